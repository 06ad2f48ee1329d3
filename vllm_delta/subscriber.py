"""Reading a channel: verified manifests, the cheapest way to a version, its blobs and changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_delta.channel import NO_KEYS, Keys, LogReader, Record, Store, open_channel, verify_link
from vllm_delta.codec import Change, LaneDecoder, decode
from vllm_delta.codec.blob import Entry, parse_blob
from vllm_delta.errors import (
    BaseMismatchError,
    ChainError,
    ChannelError,
    DeltaError,
    DigestError,
    FormatError,
    UnsupportedError,
)
from vllm_delta.events import Fetched, Hook, emit
from vllm_delta.fingerprint import root
from vllm_delta.format import Manifest, Schema, Version, parse_schema
from vllm_delta.plan import cheapest, cheapest_within, peak_bytes, within_reach
from vllm_delta.replay import replay

if TYPE_CHECKING:
    from vllm_delta.channel.ratchet import Ratchet, Seen
    from vllm_delta.codec.order import Unsigned

T = TypeVar("T")

_BROKEN = (ChainError, DigestError, FormatError, UnsupportedError)
"""What a record that is missing, unreadable or another's raises."""

_KEPT = 1024
"""Records kept from one refresh to the next; older ones are read again where they are needed."""


class Subscriber:
    """Follows a channel's log and gives what a reader of weights needs. Knows no engine.

    Nothing is read before the first `refresh`. A manifest is believed only as the verified
    successor of the one before, from an anchor on; a blob only with its manifest's digest. After
    an error the subscriber stands where it stood. Methods block on the store. Memory is bounded,
    except by `history`. Not thread-safe.

    Args:
        channel: a directory or URL, or an open store.
        keys: what manifests must be signed and blobs sealed with.
        ratchet: what readers on this machine saw of the channel before; it may not go back.
        hooks: called with every event, on the caller's thread.
        timer: seconds that only go forward, for how long things take.
        n_threads: threads that `materialise` decodes with.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        *,
        keys: Keys = NO_KEYS,
        ratchet: Ratchet | None = None,
        hooks: Iterable[Hook] = (),
        timer: Callable[[], float] = time.perf_counter,
        n_threads: int = 1,
    ) -> None:
        store = open_channel(channel) if isinstance(channel, (str, Path)) else channel
        self._log = LogReader(store, keys=keys)
        self._ratchet = ratchet
        self._hooks = tuple(hooks)
        self._timer = timer
        self._n_threads = n_threads
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
            self._schema = parse_schema(_twice(lambda: self._log.get_schema(manifest)))
        return self._schema

    def refresh(self) -> list[Manifest]:
        """Read and verify what the channel has since the last call.

        The first call begins at the newest anchor. When the next manifest does not continue the
        chain or cannot be read, the newest anchor's chain is taken instead, if it is of the same
        channel and leads to no older version. An error after manifests that verify leaves those
        for good, and is raised by the next call.

        Returns:
            The manifests that came, oldest first; none when there is nothing new.

        Raises:
            ChainError: no chain that continues what was read before verifies, or by the ratchet
                the channel went back or is another one.
            ChannelError: the store cannot be reached.
            SettingsError: the ratchet's file is damaged or cannot be kept.
            FormatError, DigestError, UnsupportedError: a manifest cannot be read.
        """
        came: list[Manifest] = []
        try:
            self._read_on(came)
        except DeltaError:
            if not came:
                raise
        finally:
            del self._records[:-_KEPT]
        return came

    def history(self) -> list[Manifest]:
        """All manifests from the channel's first, verified; those not yet read are read now.

        Raises:
            ChainError: a manifest is missing or is not what its successor names.
        """
        for _ in self._backwards(1, strict=True):
            pass
        return [record.manifest for record in self._records]

    def record(self, seq: int) -> Record:
        """The verified record with that number, which `history`, `plan` or `refresh` gave."""
        record = self._records[seq - self._records[0].seq]
        assert record.seq == seq
        return record

    def find(self, root: str) -> Version | None:
        """The published version with that root, the newest if several; None when there is none.

        Looks back, as far as the log verifies and its blobs are kept, while deltas from there can
        be a cheaper way to the newest version than an anchor is: a reader that holds an older
        version takes an anchor whether it is known or not.
        """
        if self.newest is None:
            return None
        bases: list[Version] = []
        for manifest in within_reach(self._held(), self.schema.n_bytes):
            if manifest.target is not None and manifest.target.root == root:
                return manifest.target
            if manifest.base is not None and manifest.base.root == root:
                bases.append(manifest.base)
        # Their own records are not kept any more, but a delta from there is.
        return max(bases, key=lambda version: version.number, default=None)

    def time_after(self, version: Version) -> float | None:
        """When the version after this one was published, by the trainer's clock.

        Of those that came since the first `refresh`; None when none did.
        """
        time: float | None = None
        for record in reversed(self._records):
            target = record.manifest.target
            if target is None or target.number <= version.number:
                break
            time = record.manifest.time
        return time

    def version(self, number: int | None = None) -> Version:
        """The published version with that number, None for the newest.

        Raises:
            ChainError: it was never published, or is no longer kept.
            ChannelError: nothing is published yet.
        """
        if self.newest is None:
            raise ChannelError("nothing is published on the channel yet")
        if number is None:
            return self.newest
        for manifest in self._held():
            target = manifest.target
            if target is None or target.number < number:
                break  # numbers only grow
            if target.number == number:
                return target
        raise ChainError("the version was never published or is no longer kept", number=number)

    def plan(
        self,
        resident: Version | None = None,
        *,
        number: int | None = None,
        without: Container[int] = (),
        at_most_bytes: int | None = None,
    ) -> list[Manifest]:
        """The fewest bytes that lead to a version: deltas in order, or an anchor and deltas.

        Merged deltas stand for many; who keeps up with the channel never takes one.
        An anchor by reference, whose weights the reader must have, counts as the whole model.

        Args:
            resident: the version at hand; None when there is none on the channel.
            number: the version to reach; None for the newest.
            without: numbers of records not to take.
            at_most_bytes: of blobs in memory at once. A delta needs all of its own, an anchor one
                after another; what needs more is not taken.

        Returns:
            Manifests to take in order; none when `resident` is that version.

        Raises:
            ChainError: the version was never published, or nothing leads to it any longer.
            ChannelError: nothing is published yet.
            SettingsError: no way fits into `at_most_bytes`; it names what would.
        """

        def find(at_most: float) -> list[Manifest]:
            return self._cheapest(
                resident,
                number,
                self.schema.n_bytes,
                lambda m: m.seq not in without and peak_bytes(m) <= at_most,
            )

        if at_most_bytes is None:
            return find(math.inf)
        return cheapest_within(at_most_bytes, find, self._held)

    def fetch(self, manifest: Manifest) -> list[bytes | memoryview]:
        """All blobs of a manifest, verified. A bad one is asked for once more.

        Raises:
            DigestError: a blob is missing, or its size or digest is not the manifest's.
        """
        started = self._timer()
        blobs = list(self._blobs(manifest))
        if manifest.target is not None:
            seconds = self._timer() - started
            emit(self._hooks, Fetched(manifest.target, manifest.payload_bytes, seconds))
        return blobs

    def changes(self, manifest: Manifest, lanes: LaneDecoder | None = None) -> Iterator[Change]:
        """What a delta, single or merged, changes or an anchor holds: decoded, checked, in order.

        All blobs of a delta are fetched and verified before its first change is given; an
        anchor's are fetched one by one. Take no change for good before the last one has come.

        Args:
            lanes: decodes what is coded by `hazard`, against the weights of the delta's base; those
                of a tensor must not move before its change has come.

        Raises:
            ValueError: a fence, or there is `hazard` and nothing to decode it.
            DigestError, FormatError, UnsupportedError: the blobs cannot be used.
        """
        kind = manifest.content
        blobs: Iterable[bytes | memoryview]
        if kind == "delta":
            blobs = self.fetch(manifest)
        else:
            blobs = self._blobs(manifest)
        targets: list[int] = []
        before = -1
        for blob in blobs:
            for change in decode(blob, self.schema, kind, lanes):
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

    def entries(self, manifest: Manifest) -> Iterator[Entry]:
        """What a record's blobs say of each tensor, without decoding it; blobs come one by one.

        Raises:
            ValueError: a fence.
            DigestError, FormatError, UnsupportedError: the blobs cannot be used.
        """
        kind = manifest.content
        for blob in self._blobs(manifest):
            yield from parse_blob(blob, self.schema, kind).entries

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
        reference_bytes = None if base is None else 0
        path = self._cheapest(None, number, reference_bytes)
        try:
            return self._rebuild(path, base)
        except (BaseMismatchError, DigestError, FormatError, UnsupportedError):
            merged = {manifest.seq for manifest in path if manifest.kind == "merged"}
            if not merged:
                raise
            # They are there to save bytes, and must not be what a version is lost by.
            path = self._cheapest(None, number, reference_bytes, lambda m: m.seq not in merged)
            return self._rebuild(path, base)

    def _rebuild(
        self, path: Sequence[Manifest], base: Mapping[str, Unsigned] | None
    ) -> dict[str, Unsigned]:
        *_, (_, replica) = replay(self.schema, path, self.changes, base, n_threads=self._n_threads)
        return replica.tensors()

    def _read_on(self, came: list[Manifest]) -> None:
        """Read to the tail. What verifies is kept and added to `came`, whatever comes after it."""
        seen = None if self._ratchet is None else self._ratchet.seen(self._log.keys.signers)
        try:
            if self._records:
                self._continue(came, seen)
            else:
                tail = self._log.tail()
                records = [] if tail is None else self._log.read_from_anchor(tail)
                if seen is not None:
                    seen.check(records)
                came += self._adopt(records)
        except _BROKEN:
            if not self._records or not (around := self._around(seen)):
                raise
            came += around

    def _continue(self, came: list[Manifest], seen: Seen | None) -> None:
        """Read on from the newest record at hand."""
        fresh: list[Record] = []
        broken: DeltaError | None = None
        try:
            newest = self._records[-1]
            while (record := self._log.read_next(newest, hinted=not fresh)) is not None:
                fresh.append(record)
                newest = record
        except DeltaError as error:
            broken = error
        if seen is not None:
            if broken is None:
                seen.check(fresh or self._records[-1:])
            else:
                seen.check_part(fresh)
        came += self._adopt(fresh, after=self._records)
        if broken is not None:
            raise broken

    def _adopt(self, records: list[Record], *, after: Sequence[Record] = ()) -> list[Manifest]:
        """Take records for good: first on the ratchet, so that nothing is done with others."""
        if self._ratchet is not None and any(r.manifest.target is not None for r in records):
            self._ratchet.advance(records)
        known = {record.digest for record in self._records}
        self._records = [*after, *records]
        return [record.manifest for record in records if record.digest not in known]

    def _around(self, seen: Seen | None) -> list[Manifest]:
        """Take the newest anchor's chain in place of one that is broken.

        Returns:
            What is new in it; nothing when there is none that may stand in.
        """
        try:
            tail = self._log.tail()
            if tail is None or not _replaces(self._records[-1].manifest, tail.manifest):
                return []
            records = self._log.read_from_anchor(tail)
            if seen is not None:
                seen.check(records)
        except _BROKEN:
            return []
        return self._adopt(records)

    def _held(self) -> Iterator[Manifest]:
        """Verified manifests whose blobs are kept, the newest first."""
        return self._backwards(self._records[-1].manifest.low)

    def _backwards(self, first: int, *, strict: bool = False) -> Iterator[Manifest]:
        """Verified manifests from the newest to record `first`, read where not yet at hand.

        Before the anchor that the chain was taken up at, a record that is missing or does not
        verify is an error if `strict`; else the channel counts as beginning after it.
        """
        for record in reversed(self._records):
            if record.seq >= first:
                yield record.manifest
        while self._records and self._records[0].seq > first:
            try:
                record = self._before(self._records[0])
            except _BROKEN:
                if strict:
                    raise
                return
            self._records.insert(0, record)
            yield record.manifest

    def _before(self, record: Record) -> Record:
        before = self._log.read(record.seq - 1)
        if before is None:
            raise ChainError("a record is missing from the chain", seq=record.seq - 1)
        verify_link(before, record)
        return before

    def _cheapest(
        self,
        resident: Version | None,
        number: int | None,
        reference_bytes: int | None,
        may_take: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> list[Manifest]:
        """As `plan`; an anchor by reference counts `reference_bytes`, None: it is no way."""
        goal = self.version(number)
        if goal == resident:
            return []
        return cheapest(self._held(), goal, resident, reference_bytes, may_take=may_take)

    def _blobs(self, manifest: Manifest) -> Iterator[bytes | memoryview]:
        for place in range(len(manifest.blobs)):
            yield _twice(partial(self._log.get_blob, manifest, place))


def _twice(fetch: Callable[[], T]) -> T:
    """Ask once more for what came damaged."""
    try:
        return fetch()
    except DigestError:
        return fetch()


def _replaces(old: Manifest, new: Manifest) -> bool:
    """Whether a chain that ends in `new` may stand in for one that ended in `old`."""
    if old.target is None:
        # Nothing was taken from it: perhaps two trainers began the channel at once.
        return True
    if new.channel != old.channel or new.epoch < old.epoch:
        return False
    if new.target is None or new.target == old.target:
        return new.target is not None
    return new.target.number > old.target.number
