"""Reading a channel: verified manifests, the cheapest way to a version, its blobs and changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta.channel import LogReader, Record, Store, open_channel, verify_link
from vllm_delta.codec import Change, decode
from vllm_delta.codec.blob import BlobKind
from vllm_delta.errors import (
    ChainError,
    ChannelError,
    DigestError,
    FormatError,
    UnsupportedError,
)
from vllm_delta.events import Fetched, Hook, emit
from vllm_delta.fingerprint import root
from vllm_delta.format import BlobRef, Manifest, Schema, Version, parse_schema
from vllm_delta.plan import cheapest
from vllm_delta.replay import replay

if TYPE_CHECKING:
    from vllm_delta.codec.order import Unsigned


class Subscriber:
    """Follows a channel's log and gives what a reader of weights needs. Knows no engine.

    Nothing is read before the first `refresh`. A manifest is believed only as the verified
    successor of the one before, from an anchor on; a blob only with its manifest's digest. After
    an error the subscriber stands where it stood. Methods block on the store. Not thread-safe.

    Args:
        channel: a directory or URL, or an open store.
        hooks: called with every event, on the caller's thread.
        timer: seconds that only go forward, for how long things take.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        *,
        hooks: Iterable[Hook] = (),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        store = open_channel(channel) if isinstance(channel, (str, Path)) else channel
        self._log = LogReader(store)
        self._hooks = tuple(hooks)
        self._timer = timer
        self._records: list[Record] = []
        self._schema: Schema | None = None

    @property
    def newest(self) -> Version | None:
        """The newest verified version; None while nothing is published."""
        return self._records[-1].manifest.target if self._records else None

    @property
    def newest_manifest(self) -> Manifest | None:
        """The newest verified manifest, which may be a fence."""
        return self._records[-1].manifest if self._records else None

    @property
    def channel_id(self) -> str | None:
        """The channel's identity; None before the first record is read."""
        return self._records[-1].manifest.channel if self._records else None

    @property
    def schema(self) -> Schema:
        """The checkpoint's tensors; the same for a channel's whole life.

        Raises:
            ChannelError: nothing is published yet.
            DigestError, FormatError: the schema's blob is bad.
        """
        if self._schema is None:
            manifest = self.newest_manifest
            if manifest is None or manifest.schema is None:
                raise ChannelError("nothing is published on the channel yet")
            self._schema = parse_schema(self._blob(manifest.schema))
        return self._schema

    def refresh(self) -> list[Manifest]:
        """Read and verify what the channel has since the last call.

        The first call begins at the newest anchor. When the next manifest does not continue the
        chain, the newest anchor's chain is taken instead, if it is of the same channel and leads
        to no older version.

        Returns:
            The manifests that came, oldest first; none when there is nothing new.

        Raises:
            ChainError: no chain that continues what was read before verifies.
            ChannelError: the store cannot be reached.
            FormatError, DigestError, UnsupportedError: a manifest cannot be read.
        """
        if not self._records:
            return self._begin()
        came: list[Record] = []
        try:
            while (record := self._log.read_next((came or self._records)[-1])) is not None:
                came.append(record)
        except ChainError as error:
            return self._begin(error)
        self._records += came
        return [record.manifest for record in came]

    def history(self) -> list[Manifest]:
        """All manifests from the channel's first, verified; those not yet read are read now.

        Raises:
            ChainError: a manifest is missing or is not what its successor names.
        """
        for _ in self._backwards(strict=True):
            pass
        return [record.manifest for record in self._records]

    def find(self, root: str) -> Version | None:
        """The published version with that root, the newest if several; None when there is none.

        Reads the log back to its beginning, as far as it verifies, before it says None.
        """
        for record in self._backwards():
            target = record.manifest.target
            if target is not None and target.root == root:
                return target
        return None

    def plan(self, resident: Version | None = None, *, number: int | None = None) -> list[Manifest]:
        """The fewest bytes that lead to a version: deltas in order, or an anchor and deltas.

        An anchor by reference, whose weights the reader must have, counts as the whole model.

        Args:
            resident: the version at hand; None when there is none on the channel.
            number: the version to reach; None for the newest.

        Returns:
            Manifests to take in order; none when `resident` is that version.

        Raises:
            ChainError: the version was never published, or nothing leads to it any more.
            ChannelError: nothing is published yet.
        """
        return self._cheapest(resident, number, self.schema.n_bytes)

    def fetch(self, manifest: Manifest) -> list[bytes]:
        """All blobs of a manifest, verified. A bad one is asked for once more.

        Raises:
            DigestError: a blob is missing, or its size or digest is not the manifest's.
        """
        started = self._timer()
        blobs = [self._blob(ref) for ref in manifest.blobs]
        if manifest.target is not None:
            seconds = self._timer() - started
            emit(self._hooks, Fetched(manifest.target, manifest.payload_bytes, seconds))
        return blobs

    def changes(self, manifest: Manifest) -> Iterator[Change]:
        """What a delta changes or an anchor holds, in schema order, decoded and checked.

        All blobs of a delta are fetched and verified before its first change is given; an
        anchor's are fetched one by one. Take no change for good before the last one has come.

        Raises:
            DigestError, FormatError, UnsupportedError: the blobs cannot be used.
        """
        kind: BlobKind
        if manifest.kind == "fence":
            raise ValueError("a fence holds no changes")
        kind = "reference" if manifest.reference is not None else manifest.kind
        blobs: Iterable[bytes]
        if kind == "delta":
            blobs = self.fetch(manifest)
        else:
            blobs = map(self._blob, manifest.blobs)
        targets: list[int] = []
        before = -1
        for blob in blobs:
            for change in decode(blob, self.schema, kind):
                if change.tensor <= before:
                    raise FormatError("a tensor stands in two blobs", tensor=change.tensor)
                before = change.tensor
                targets.append(change.target)
                yield change
        if kind == "delta":
            return
        if len(targets) != len(self.schema):
            raise FormatError("an anchor lacks tensors", n=len(targets), expected=len(self.schema))
        if manifest.target is None or root(self.schema, targets) != manifest.target.root:
            raise FormatError("an anchor's fingerprints are not its version's", seq=manifest.seq)

    def materialise(
        self, number: int | None = None, *, base: Mapping[str, Unsigned] | None = None
    ) -> dict[str, Unsigned]:
        """A version's whole weights, proven by its root.

        Args:
            number: the version; None for the newest.
            base: raw bits by name of the public checkpoint that the channel refers to; not
                modified. Needed where no anchor by blobs leads to the version.

        Returns:
            Unsigned raw bits of each tensor, in its shape.

        Raises:
            SettingsError: the base checkpoint is needed.
            ModelMismatchError, BaseMismatchError: `base` is another checkpoint.
            DigestError, FormatError, ChainError: the channel does not hold the version whole.
        """
        path = self._cheapest(None, number, None if base is None else 0)
        *_, (_, replica) = replay(self.schema, path, self.changes, base)
        return replica.tensors()

    def _begin(self, doubt: ChainError | None = None) -> list[Manifest]:
        """Take up the newest anchor's chain, in place of the one read so far if in doubt."""
        tail = self._log.tail()
        if tail is None:
            if doubt is not None:
                raise doubt
            return []
        records = self._log.read_from_anchor(tail)
        if doubt is not None and not _replaces(self._records[-1].manifest, tail.manifest):
            raise doubt
        self._records = records
        return [record.manifest for record in records]

    def _backwards(self, *, strict: bool = False) -> Iterator[Record]:
        """Verified records from the newest to the channel's first, read where not yet at hand.

        Before the anchor that the chain was taken up at, a record that is missing or does not
        verify is an error if `strict`; else the channel counts as beginning after it.
        """
        yield from reversed(self._records)
        while self._records and self._records[0].seq > 1:
            try:
                record = self._before(self._records[0])
            except (ChainError, DigestError, FormatError, UnsupportedError):
                if strict:
                    raise
                return
            self._records.insert(0, record)
            yield record

    def _before(self, record: Record) -> Record:
        before = self._log.read(record.seq - 1)
        if before is None:
            raise ChainError("a record is missing from the chain", seq=record.seq - 1)
        verify_link(before, record)
        return before

    def _cheapest(
        self, resident: Version | None, number: int | None, reference_bytes: int | None
    ) -> list[Manifest]:
        """As `plan`; an anchor by reference counts `reference_bytes`, None: it is no way."""
        goal = self._version(number)
        if goal == resident:
            return []
        low = self._records[-1].manifest.low
        manifests = (record.manifest for record in self._backwards() if record.seq >= low)
        return cheapest(manifests, goal, resident, reference_bytes)

    def _version(self, number: int | None) -> Version:
        if number is None:
            if self.newest is None:
                raise ChannelError("nothing is published on the channel yet")
            return self.newest
        for record in self._backwards():
            target = record.manifest.target
            if target is not None and target.number == number:
                return target
        raise ChainError("the version was never published", number=number)

    def _blob(self, ref: BlobRef) -> bytes:
        try:
            return self._log.get_blob(ref)
        except DigestError:
            return self._log.get_blob(ref)


def _replaces(old: Manifest, new: Manifest) -> bool:
    """Whether a chain that ends in `new` may stand in for one that ended in `old`."""
    if new.channel != old.channel or new.epoch < old.epoch:
        return False
    if old.target is None:
        return True
    if new.target is None or new.target == old.target:
        return new.target is not None
    return new.target.number > old.target.number
