"""Deleting what no record needs any more, without ever taking what a reader may still ask for.

Every blob's object is written once, under a name that nobody writes again. So an object that no
record from the low-water mark on names is never named again, and a delete of it that comes late
hits nothing else. `FORMAT.md` has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from vllm_delta.channel.chain import Record, verify_link
from vllm_delta.channel.keys import NO_KEYS, Keys
from vllm_delta.channel.log import Log
from vllm_delta.channel.reader import LogReader
from vllm_delta.channel.store import Store
from vllm_delta.errors import (
    ChainError,
    DigestError,
    FencedError,
    FormatError,
    UnsupportedError,
)
from vllm_delta.events import Collected
from vllm_delta.format import Manifest, blob_key, manifest_key

GRACE_S = 3600.0
"""Longer than any fetch takes: a reader may have planned it before the low-water mark rose."""

BROKEN = (ChainError, DigestError, FormatError, UnsupportedError)
"""What a record that is missing, unreadable or another's raises."""

_BLOBS = "b/"
_BATCH = 1000
_READ_TOGETHER = 64
_READERS = 8


def blobs_of(manifest: Manifest) -> dict[str, int]:
    """Keys of the objects that a record brings, and their bytes; the schema is not among them."""
    return {blob_key(ref.sha256): ref.n_bytes for ref in manifest.blobs}


def read_back(reader: LogReader, newest: Record, first: int) -> Iterator[Record]:
    """The verified records before `newest` down to `first`, the newer first.

    Raises:
        ChainError, DigestError, FormatError, UnsupportedError: the next one is missing, cannot be
            read or does not lead to the one after it.
        ChannelError: the store cannot be reached.
    """
    after = newest
    for record in _read_down(reader, newest.seq - 1, first):
        if record is None:
            raise ChainError("a record is missing from the chain", seq=after.seq - 1)
        verify_link(record, after)
        yield record
        after = record


def _read_down(reader: LogReader, last: int, first: int) -> Iterator[Record | None]:
    """Records `last` down to `first`, many at a time where there are many."""
    while last - first >= _READ_TOGETHER:
        with ThreadPoolExecutor(_READERS) as pool:
            yield from pool.map(reader.read, range(last, last - _READ_TOGETHER, -1))
        last -= _READ_TOGETHER
    yield from map(reader.read, range(last, first - 1, -1))


class Collector:
    """Deletes, for the channel's owner, objects that have gone unnamed for long enough.

    To be called between commits only, from the thread that commits. How long an object has been
    unnamed counts from when this collector first listed it so: no clock but the timer is trusted.

    Args:
        log: the owner's.
        grace_s: how long an object that no record names is left.
        timer: seconds that only go forward.
    """

    def __init__(self, log: Log, *, grace_s: float, timer: Callable[[], float]) -> None:
        self._log = log
        self._grace_s = grace_s
        self._timer = timer
        self._seen: dict[str, float] = {}
        self._intents: list[str] = []

    @property
    def due(self) -> bool:
        """Whether something can be deleted now."""
        return bool(self._intents or self._ripe())

    def look(self, named: Container[str]) -> None:
        """List the channel's objects. What a stale listing misses is found by a later one.

        Args:
            named: keys of all objects that records from the low-water mark on name, the schema
                included.
        """
        position = self._log.position
        assert position is not None
        keys = self._log.store.list(_BLOBS)
        if not self._log.store.atomic:
            self._intents = old_intents(self._log.store, position.seq)
        now = self._timer()
        self._seen = {key: self._seen.get(key, now) for key in keys if key not in named}

    def sweep(self, named: Container[str]) -> Iterator[list[str]]:
        """Delete what is due.

        Yields:
            Keys of blobs that have been deleted, batch by batch.

        Raises:
            FencedError: another trainer owns the channel; nothing more is deleted.
            ChannelError, SettingsError: the store did not do it; what is left is tried again.
        """
        if self._intents:
            check_ours(self._log)
            self._log.store.delete(self._intents)
            self._intents = []
        for batch in _batches([key for key in self._ripe() if key not in named]):
            check_ours(self._log)
            self._log.store.delete(batch)
            for key in batch:
                del self._seen[key]
            yield batch

    def _ripe(self) -> list[str]:
        now = self._timer()
        return [key for key, since in self._seen.items() if now - since >= self._grace_s]


def check_ours(log: Log) -> None:
    """Read the tail again.

    Raises:
        FencedError: it is not the record that `log` has written last.
    """
    tail, position = log.tail(), log.position
    if tail is None or position is None or tail.digest != position.digest:
        seq = None if tail is None else tail.seq
        raise FencedError("the newest record is not ours; nothing is collected", seq=seq)


def old_intents(store: Store, seq: int) -> list[str]:
    """Keys of intents that trainers left before record `seq` - 1, where nobody looks any more.

    Of the last hundred places or two: older ones cost listings of the whole log to find, and are
    of some 20 bytes each.
    """
    hundreds = {manifest_key(n)[:-2] for n in (seq, max(1, seq - 100))}
    return [
        key
        for hundred in sorted(hundreds)
        for key in store.list(hundred)
        if "." in key and key.partition(".")[0] < manifest_key(max(1, seq - 1))
    ]


def collect(
    store: Store,
    *,
    keys: Keys = NO_KEYS,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    orphans: bool = False,
    writer: str = "collect",
    clock: Callable[[], float] = time.time,
    say: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Delete the blobs of records below the low-water mark, beside a live trainer or without one.

    Nothing is deleted while the newest rise of the mark is younger than `grace_s`, by the times
    in the manifests, so the clocks of trainer and caller must agree better than that.

    Args:
        keys: of the channel; `orphans` takes one to sign with where records are signed.
        dry_run: only count; nothing is written.
        orphans: delete objects that no record ever named too, which dead trainers leave. That
            takes owning the channel, so it is claimed, and a trainer that lives is fenced.
        writer: named in the fence, for people.
        clock: seconds since 1970.
        say: told what a person should know, in sentences.

    Returns:
        What was deleted, or would be.

    Raises:
        ChainError, DigestError, FormatError, UnsupportedError: a record from the mark on cannot be
            read; nothing is deleted.
        FencedError: another trainer claimed the channel meanwhile.
        ChannelError: the store cannot be reached.
    """
    log = Log(store, keys=keys, clock=clock)
    newest = log.tail()
    # Before the first anchor the schema may be there and not yet named. It is the one object that
    # is written more than once, so it must never be deleted.
    if newest is None or newest.manifest.schema is None:
        return Collected(0, 0)
    standing = _standing(log, newest)
    if not _is_old(standing, grace_s, clock, say):
        return Collected(0, 0)
    if orphans and not dry_run:
        log.claim(writer)
        assert log.position is not None
        say("the channel is claimed; a trainer that was writing to it is fenced")
        if log.rival is not None:
            # Without put-if-absent its record may still replace our fence, and name its blobs.
            say(
                "a trainer was about to write there; nothing is deleted: stop it and run this again"
            )
            return Collected(0, 0)
        standing = _standing(log, log.position)
        if not _is_old(standing, grace_s, clock, say):
            return Collected(0, 0)
    unnamed = set(store.list(_BLOBS)) - _names(standing)
    sizes = _named_before(log, standing[-1], unnamed, say)
    doomed = sorted(unnamed if orphans else sizes)
    for batch in _batches([] if dry_run else doomed):
        if orphans:
            check_ours(log)
        store.delete(batch)
    known = all(key in sizes for key in doomed)
    return Collected(len(doomed), sum(sizes[key] for key in doomed) if known else None)


def _standing(log: Log, newest: Record) -> list[Record]:
    """The records from the low-water mark on, the newest first."""
    return [newest, *read_back(log, newest, newest.manifest.low)]


def _names(standing: Sequence[Record]) -> set[str]:
    names = {key for record in standing for key in blobs_of(record.manifest)}
    return names | {blob_key(r.manifest.schema.sha256) for r in standing if r.manifest.schema}


def _is_old(
    standing: Sequence[Record],
    grace_s: float,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> bool:
    """Whether the low-water mark has stood for as long as a fetch may take."""
    low = standing[0].manifest.low
    raised = [record.manifest for record in standing if record.manifest.low == low][-1]
    wait_s = grace_s - (clock() - raised.time)
    if low == 1 or wait_s <= 0:
        return True
    say(f"blobs before record {low} may still be read; they can go in {wait_s:.0f} s")
    return False


def _named_before(
    log: Log, lowest: Record, unnamed: set[str], say: Callable[[str], None]
) -> dict[str, int]:
    """Which of `unnamed` older records name, and their bytes; read no further than it takes."""
    left, sizes = set(unnamed), dict[str, int]()
    older = read_back(log, lowest, 1)
    while left:
        try:
            record = next(older, None)
        except BROKEN as error:
            say(f"older records are left alone, since one cannot be read: {error}")
            break
        if record is None:
            break
        found = {key: n for key, n in blobs_of(record.manifest).items() if key in left}
        sizes |= found
        left -= found.keys()
    return sizes


def _batches(keys: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _BATCH):
        yield list(keys[start : start + _BATCH])
