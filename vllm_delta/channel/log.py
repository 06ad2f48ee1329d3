"""A channel's log: one record after another, each written by the trainer that owns the channel.

Every record names its predecessor's digest and is written only where none is yet, so of two
trainers one loses, knows it, and stops. `FORMAT.md` has the protocol's invariants.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, NoReturn

from vllm_delta.channel.chain import Record, checked, fence_after
from vllm_delta.channel.contest import Contest, Rival
from vllm_delta.channel.keys import NO_KEYS, Keys, about_blob, about_schema
from vllm_delta.channel.reader import HASHED_BESIDE, SALT_BYTES, LogReader
from vllm_delta.channel.store import Store
from vllm_delta.channel.tail import MAX_ENVELOPE_BYTES, head_bytes
from vllm_delta.errors import (
    ChainError,
    ChannelError,
    DeltaError,
    DigestError,
    FencedError,
    FormatError,
    SettingsError,
)
from vllm_delta.format import (
    HEAD_KEY,
    MAX_BLOB_BYTES,
    BlobRef,
    Manifest,
    Reference,
    Version,
    blob_key,
    digest,
    manifest_key,
)

COMMIT_ATTEMPTS = 4
"""Writes of one record before giving up; more than one only where nothing is found afterwards."""

CLAIM_ATTEMPTS = 16
"""Fences tried against a channel that other trainers go on writing to."""

_CONTESTED = 8
"""Of our records at places where another trainer was met, so many are read again by each commit."""


class Log(LogReader):
    """The protocol over a store: read and verify records; claim the channel and append to it.

    Writing (`claim`, `append`, `settle`) belongs to one thread. Every method may block on the
    store; none retries a failed request, apart from the read-back that settles whether a record
    was written.

    Args:
        store: where the channel lives.
        keys: what records are signed and blobs sealed with.
        clock: gives a record's time, in seconds since 1970.
    """

    def __init__(
        self, store: Store, *, keys: Keys = NO_KEYS, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(store, keys=keys)
        self._clock = clock
        self._contest = None if store.atomic else Contest(store)
        self._rival: Rival | None = None
        self._contested: dict[int, Record] = {}
        self._position: Record | None = None
        self._in_doubt: Record | None = None
        self._fenced = False

    @property
    def position(self) -> Record | None:
        """The newest record that this writer committed; None before `claim`."""
        return self._position

    @property
    def in_doubt(self) -> Record | None:
        """A record whose fate the store did not tell. It may land at any time: see `settle`."""
        return self._in_doubt

    @property
    def rival(self) -> Rival | None:
        """Another trainer that was found at a place of ours, in a store that is not `atomic`."""
        return self._rival

    def put_blobs(self, blobs: Sequence[bytes], *, place: int = 0, shard: int = 0) -> list[BlobRef]:
        """Write blobs of the next record, as objects that nobody has written before.

        So a delete that another trainer sent, late as it may come, never hits one of them.

        Args:
            place: of the first in its manifest.
        """
        objects: dict[str, bytes] = {}
        refs: list[BlobRef] = []
        for number, data in enumerate(blobs, place):
            if not data:
                raise ValueError("a blob has at least 1 byte")
            refs.append(self._salted(data, self._about(number), objects, shard))
        self._put_objects(objects)
        return refs

    def put_blob(self, data: bytes, *, place: int = 0, shard: int = 0) -> BlobRef:
        """Write a single blob; see `put_blobs`."""
        return self.put_blobs([data], place=place, shard=shard)[0]

    def put_schema(self, data: bytes) -> BlobRef:
        """Write the schema; equal content always makes the same object."""
        objects: dict[str, bytes] = {}
        channel = "" if self._position is None else self._position.manifest.channel
        sealed = self.keys.seal(data, about_schema(channel), always_the_same=True)
        ref = self._object(sealed, objects)
        self._put_objects(objects)
        return ref

    def _about(self, place: int) -> bytes:
        """What the next record's blob is sealed as a part of."""
        if self._position is None:
            if self.keys.sealing:
                raise ValueError("claim the channel first")
            return b""
        manifest = self._position.manifest
        return about_blob(manifest.channel, manifest.seq + 1, place)

    def _salted(self, data: bytes, about: bytes, objects: dict[str, bytes], shard: int) -> BlobRef:
        salt = os.urandom(SALT_BYTES)
        if self.keys.sealing or len(data) < HASHED_BESIDE:
            salted = b"".join([data, salt])
            return self._object(self.keys.seal(salted, about), objects, shard)
        with ThreadPoolExecutor(1) as beside:
            hashing = beside.submit(_digest_of, data, salt)
            return self._object(b"".join([data, salt]), objects, shard, hashing)

    def _object(
        self,
        data: bytes,
        objects: dict[str, bytes],
        shard: int = 0,
        hashing: Future[str] | None = None,
    ) -> BlobRef:
        if not 0 < len(data) <= MAX_BLOB_BYTES:
            raise ValueError(f"a blob has 1 to {MAX_BLOB_BYTES} bytes, not {len(data)}")
        ref = BlobRef(digest(data) if hashing is None else hashing.result(), len(data), shard)
        objects[blob_key(ref.sha256)] = data
        return ref

    def _put_objects(self, objects: dict[str, bytes]) -> None:
        self._refuse_if_fenced()
        if not objects:
            return
        if self._contest is None or self._position is None:
            self.store.put_many(objects)
        else:
            # The hint goes with them: a request of its own costs such stores as much as a record.
            manifest = self._position.manifest
            objects[HEAD_KEY] = head_bytes(manifest.seq)
            self._contest.enter(manifest.seq + 1, manifest.epoch, objects)

    def claim(self, writer: str) -> Manifest:
        """Take the channel over: write a fence after its newest record, or begin the channel.

        From then on every earlier owner fails to commit. The fence restates what the channel
        stands at: version, newest anchor, schema. Claiming again begins another epoch.

        Args:
            writer: who is writing, for people; 1 to 256 bytes.

        Raises:
            FencedError: this writer owned the channel before and has lost it.
            ChannelError: the store cannot be reached, or the fence is in doubt; claim again.
        """
        self._refuse_if_fenced()
        if self._in_doubt is not None:
            settled = self.settle()
            if settled is not None and settled.manifest.kind == "fence":
                return settled.manifest
        for _ in range(CLAIM_ATTEMPTS):
            tail = self.tail()
            if self._position is not None and tail != self._position:
                self._check_ground(self._position)
                self._lose(self._position.seq + 1)
            fence = checked(tail, fence_after(tail, writer, self._clock()), self.keys)
            if self._commit(fence):
                return fence.manifest
        raise ChannelError("other trainers keep writing", attempts=CLAIM_ATTEMPTS)

    def append(
        self,
        kind: Literal["delta", "merged", "anchor"],
        *,
        target: Version,
        blobs: Sequence[BlobRef],
        base: Version | None = None,
        schema: BlobRef | None = None,
        reference: Reference | None = None,
        anchor: int | None = None,
        low: int | None = None,
    ) -> Record:
        """Commit one record; its blobs must have been written before.

        Args:
            base: for a delta, the version the channel stands at; may be left out. For a merged
                one, an earlier version of the same lineage.
            schema: may be left out after the channel's first anchor.
            anchor: the newest anchor's number (for an anchor its own); may be left out.
            low: a higher low-water mark; left out, it stays.

        Returns:
            The record, which has been read back from the store.

        Raises:
            ValueError: a reader would refuse this record.
            FencedError: another trainer has written in its place. This log never commits again.
            ChannelError: nothing was written, or, if `in_doubt` is set, it is not known.
            ChannelFullError: nothing was written.
            ChainError: the record it builds on has gone from the store, or was overwritten by a
                trainer that should have stopped, which takes a store that is not `atomic`.
        """
        self._refuse_if_fenced()
        position = self._position
        if position is None:
            raise ValueError("claim the channel first")
        if self._in_doubt is not None:
            raise ChannelError("an earlier append is in doubt, settle it", seq=position.seq + 1)
        before = position.manifest
        manifest = replace(
            fence_after(position, before.writer, self._clock()),
            epoch=before.epoch,
            kind=kind,
            base=before.target if base is None and kind == "delta" else base,
            target=target,
            anchor=anchor or (position.seq + 1 if kind == "anchor" else before.anchor),
            low=low or before.low,
            schema=schema or before.schema,
            blobs=tuple(blobs),
            reference=reference,
        )
        record = checked(position, manifest, self.keys)
        self._check_ground(position)
        if not self._commit(record):
            self._lose(record.seq)
        return record

    def settle(self) -> Record | None:
        """Learn the fate of a record in doubt, by writing the very same bytes again.

        Only those bytes may go where they were sent, since the first write may still be under way.

        Returns:
            The record, now committed; None when nothing was in doubt, or when what was in doubt
            was a first claim's fence and another trainer's record stands there.

        Raises:
            FencedError: another trainer's record stands there.
            ChannelError: still in doubt.
        """
        record = self._in_doubt
        if record is None or self._commit(record):
            return record
        if self._position is not None:
            self._lose(record.seq)
        return None

    def _check_ground(self, position: Record) -> None:
        """Refuse to build on a store that lost our newest record: a restored or swapped one."""
        found = self._bytes_at(position.seq)
        lost = _version_in(position)
        if found == position.envelope:
            self._look_for_rivals(position)
            self._check_contested()
            return
        if found is not None and self._contest is not None:
            self._lose(position.seq, lost=lost)
        raise ChainError("our newest record has gone from the channel", seq=position.seq, lost=lost)

    def _check_contested(self) -> None:
        """Look again where others were met: what they sent before they knew may land yet."""
        for seq, record in list(self._contested.items())[-_CONTESTED:]:
            if self._bytes_at(seq) != record.envelope:
                raise ChainError(
                    "overwritten by another trainer", seq=seq, lost=_version_in(record)
                )

    def _look_for_rivals(self, record: Record) -> None:
        """Learn of others at the place of a record of ours; before one of a later epoch, stop."""
        if self._contest is None or (rival := self._contest.rival(record.seq)) is None:
            return
        self._rival = rival
        self._contested[record.seq] = record
        if rival.epoch > record.manifest.epoch:
            self._fenced = True
            raise FencedError(
                "another trainer claims the channel", seq=record.seq, epoch=rival.epoch
            )

    def _commit(self, record: Record) -> bool:
        """Write `record` where none is. True: it stands there; False: another one does.

        What the store says about the write is never taken for an answer, only what it gives back.
        """
        if self._contest is not None:
            self._contest.enter(record.seq, record.manifest.epoch)
        self._in_doubt = record
        failure: DeltaError | None = None
        for _ in range(COMMIT_ATTEMPTS):
            failure = self._put_new(record)
            try:
                found = self._bytes_at(record.seq)
            except ChannelError as error:
                failure = error
                continue
            if found is not None:
                won = found == record.envelope
                if won:
                    self._position = record
                    if self._contest is None:
                        self._put_head(record.seq)
                # Last, so that an interrupt before this leaves something to settle.
                self._in_doubt = None
                if won:
                    self._leave_contest(record)
                return won
            if failure is not None and failure.action != "retry":
                self._in_doubt = None
                raise failure
        raise ChannelError("a record's fate is in doubt", seq=record.seq) from failure

    def _leave_contest(self, record: Record) -> None:
        if self._contest is None:
            return
        # It is committed; whom we did not meet now we meet before the next commit.
        with contextlib.suppress(ChannelError, SettingsError):
            self._look_for_rivals(record)
        self._contest.leave(record.seq - 1)

    def _put_new(self, record: Record) -> DeltaError | None:
        try:
            self.store.put_new(manifest_key(record.seq), record.envelope)
        except DeltaError as error:
            return error
        return None

    def _put_head(self, seq: int) -> None:
        # The record is committed; a hint that could not be left only costs its readers requests.
        with contextlib.suppress(DeltaError):
            self.store.put(HEAD_KEY, head_bytes(seq))

    def _bytes_at(self, seq: int) -> bytes | None:
        try:
            return self.store.get(manifest_key(seq), max_bytes=MAX_ENVELOPE_BYTES)
        except (DigestError, FormatError):
            return b""  # there is something, and it is not ours

    def _refuse_if_fenced(self) -> None:
        if self._fenced:
            raise FencedError("another trainer owns the channel")

    def _lose(self, seq: int, *, lost: str | None = None) -> NoReturn:
        """Say that another's record stands at a place of ours, and stop for good.

        In a store that is not `atomic` it may be that of an earlier epoch. Then it is not we who
        stop, but our part of the log is gone.

        Args:
            lost: a version of ours that stood there.
        """
        other = None
        with contextlib.suppress(DeltaError):
            other = self.read(seq)
        facts = {"seq": seq, "writer": other and other.manifest.writer}
        if lost is not None:
            facts["lost"] = lost
        if other is not None and self._contest is not None and self._position is not None:
            epoch = other.manifest.epoch
            self._rival = Rival(seq, epoch)
            if epoch < self._position.manifest.epoch:
                raise ChainError("overwritten by a trainer of an earlier epoch", **facts)
        self._fenced = True
        raise FencedError("another trainer owns the channel", **facts)


def _version_in(record: Record) -> str | None:
    """The version that a record brings or restates; None for a fence."""
    return None if record.manifest.kind == "fence" else str(record.manifest.target)


def _digest_of(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
