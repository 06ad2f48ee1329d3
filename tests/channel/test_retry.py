"""Calls that may succeed later are repeated, for as long as the policy says and no longer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from vllm_delta.channel import Log, LogReader, Store
from vllm_delta.channel.retry import RetryingStore, RetryPolicy
from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    FencedError,
    NotFoundError,
    RateLimitError,
    SettingsError,
)
from vllm_delta.format import BlobRef, Manifest, Version, blob_key, digest, manifest_key
from vllm_delta.testing import ChannelContract, FaultyChannel, MemoryStore

BLOB = blob_key("ab" * 32)


class Clock:
    """Time that passes only where somebody waits or an attempt takes some."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class Longest(Random):
    """Draws the longest wait each time."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Failing(MemoryStore):
    """Fails with these errors in turn, then works; every attempt takes its time."""

    def __init__(self, *errors: DeltaError, clock: Clock | None = None, takes_s: float = 0) -> None:
        super().__init__()
        self.errors = list(errors)
        self.n_calls = 0
        self._clock, self._takes_s = clock or Clock(), takes_s

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        self.n_calls += 1
        self._clock.now += self._takes_s
        if self.errors:
            raise self.errors.pop(0)
        return super().get(key, max_bytes=max_bytes)


class Pieces(MemoryStore):
    """Streams by `size` bytes, and breaks off where it is told to.

    Args:
        breaks: for each attempt the bytes after which it breaks off; then it does not.
    """

    def __init__(self, *breaks: int, size: int = 3) -> None:
        super().__init__()
        self.breaks = list(breaks)
        self.starts: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self._size = size

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        self.starts.append(start)
        if len(self.starts) > 1:
            self.before()
        data = self.get(key, max_bytes=max_bytes)
        end = self.breaks.pop(0) if self.breaks else math.inf
        return None if data is None else self._pieces(data[start:], end)

    def _pieces(self, data: bytes, end: float) -> Iterator[bytes]:
        for place in range(0, len(data) + 1, self._size):
            if place >= end:
                raise ChannelError("reset by peer")
            yield data[place : place + self._size]


def retrying(
    store: Store, clock: Clock | None = None, random: Random | None = None, **policy: Any
) -> RetryingStore:
    clock = clock or Clock()
    policy_ = RetryPolicy(**policy)
    return RetryingStore(store, policy_, clock=clock, sleep=clock.sleep, random=random or Random(0))


class TestRetryingStore(ChannelContract):
    def open_store(self, place: Path) -> Store:
        return retrying(self.__dict__.setdefault("store", MemoryStore()))


class TestRetryingStoreOverFaults(ChannelContract):
    """Nothing of the contract is lost where every third call fails before anything happened."""

    def open_store(self, place: Path) -> Store:
        rates: Any = {"transport": 0.3}
        faulty = FaultyChannel(self.__dict__.setdefault("store", MemoryStore()), rates=rates)
        return retrying(faulty, deadline_s=1e6)


def test_a_call_that_fails_for_a_while_succeeds_in_the_end() -> None:
    clock = Clock()
    store = Failing(*[ChannelError("away")] * 3, RateLimitError("too many"))
    store.put(BLOB, b"data")
    assert retrying(store, clock).get(BLOB, max_bytes=9) == b"data"
    assert store.n_calls == 5
    assert len(clock.waits) == 4


@pytest.mark.parametrize(
    "error",
    [
        AuthError("expired"),
        NotFoundError("no bucket"),
        SettingsError("no"),
        DigestError("too large"),
        ChannelFullError("full"),
        FencedError("another"),
    ],
)
def test_an_error_that_waiting_does_not_help_raises_at_once(error: DeltaError) -> None:
    clock, store = Clock(), Failing(error)
    with pytest.raises(type(error)) as caught:
        retrying(store, clock).get(BLOB, max_bytes=9)
    assert caught.value is error
    assert (store.n_calls, clock.waits) == (1, [])


def test_waits_double_up_to_the_longest_and_are_drawn_from_zero_on() -> None:
    def waits(random: Random) -> list[float]:
        clock = Clock()
        with pytest.raises(ChannelError):
            retrying(
                Failing(*[ChannelError("away")] * 99), clock, random, first_delay_s=1.0,
                longest_delay_s=5.0, deadline_s=1e6, n_attempts=40,
            ).get(BLOB, max_bytes=9)  # fmt: skip
        return clock.waits

    assert waits(Longest()) == [1.0, 2.0, 4.0, *[5.0] * 36]
    drawn = waits(Random(3))
    assert all(0 <= wait <= longest for wait, longest in zip(drawn, waits(Longest()), strict=True))
    assert min(drawn) < 0.5
    assert 4.5 < max(drawn) <= 5.0
    assert drawn != waits(Random(4))


def test_no_attempt_begins_after_the_deadline_and_the_last_error_is_raised() -> None:
    """An attempt's own time counts; the last one is made when the deadline is there."""
    clock = Clock()
    errors = [ChannelError("away", number=number) for number in range(1000)]
    store = Failing(*errors, clock=clock, takes_s=7.0)
    with pytest.raises(ChannelError) as caught:
        retrying(store, clock, deadline_s=60.0).get(BLOB, max_bytes=9)
    assert caught.value is errors[store.n_calls - 1]
    assert clock.now - 7.0 <= 100 + 60.0 <= clock.now


def test_a_deadline_of_zero_is_a_single_attempt_and_attempts_are_counted() -> None:
    for policy, n_calls in ({"deadline_s": 0.0}, 1), ({"n_attempts": 1}, 1), ({"n_attempts": 3}, 3):
        store = Failing(*[ChannelError("away")] * 9)
        with pytest.raises(ChannelError):
            retrying(store, **policy).get(BLOB, max_bytes=9)
        assert store.n_calls == n_calls, policy


def test_who_asks_for_patience_gets_it() -> None:
    """The wait is never shorter than what was asked for, and not much longer."""
    clock = Clock()
    store = Failing(*[RateLimitError("slow down", retry_after_s=seconds) for seconds in (9, 2.5)])
    retrying(store, clock).get(BLOB, max_bytes=9)
    (first, second) = clock.waits
    assert 9 <= first <= 9.2
    assert 2.5 <= second <= 2.9


def test_a_wait_past_the_deadline_is_left_to_the_caller() -> None:
    """The error comes at once, with how long to wait."""
    clock, store = Clock(), Failing(RateLimitError("slow down", retry_after_s=61))
    with pytest.raises(RateLimitError) as caught:
        retrying(store, clock).get(BLOB, max_bytes=9)
    assert caught.value.retry_after_s == 61
    assert (store.n_calls, clock.waits) == (1, [])


@pytest.mark.parametrize("asked", [None, -3, 0, math.nan, "soon"])
def test_a_wait_that_makes_no_sense_is_none(asked: Any) -> None:
    clock, store = Clock(), Failing(RateLimitError("slow down", retry_after_s=asked))
    assert retrying(store, clock).get(BLOB, max_bytes=9) is None
    assert clock.waits[0] <= 0.2


def test_every_call_is_repeated() -> None:
    memory = MemoryStore()
    faulty = FaultyChannel(memory)
    store = retrying(faulty)
    calls: list[Callable[[], Any]] = [
        lambda: store.put(BLOB, b"data"),
        lambda: store.put_new(manifest_key(1), b"one"),
        lambda: store.get(BLOB, max_bytes=9),
        lambda: store.list(""),
        lambda: list(store.stream(BLOB, max_bytes=9) or ()),
        lambda: store.delete(iter([BLOB])),
        lambda: store.put_many({BLOB: b"again"}),
    ]
    answers = []
    for call in calls:
        faulty.script(["transport", "transport"])
        answers.append(call())
    keys = sorted([BLOB, manifest_key(1)])
    assert answers == [None, True, b"data", keys, [b"data"], None, None]
    assert len(faulty.suffered) == 2 * len(calls)
    assert memory.get(BLOB, max_bytes=9) == b"again"


def test_what_a_store_writes_one_by_one_is_not_written_twice() -> None:
    faulty = FaultyChannel(MemoryStore())
    faulty.script([None, None, "transport"])
    objects = {blob_key(digest(bytes([n]))): bytes([n]) for n in range(5)}
    retrying(faulty).put_many(objects)
    assert faulty.n_calls == 6


def test_a_store_that_writes_together_is_given_all_again() -> None:
    class Together(MemoryStore):
        n_objects: ClassVar[list[int]] = []

        def put_many(self, objects: Any) -> None:
            self.n_objects.append(len(objects))
            if len(self.n_objects) == 1:
                raise ChannelError("away")
            super().put_many(objects)

    store = Together()
    retrying(store).put_many({BLOB: b"1", manifest_key(1): b"2"})
    assert store.n_objects == [2, 2]
    assert store.get(BLOB, max_bytes=9) == b"1"


def test_a_lost_answer_to_a_create_is_settled_by_the_log() -> None:
    """`put_new` finds its own write and says no; the log reads back and knows better."""
    faulty = FaultyChannel(MemoryStore())
    store = retrying(faulty)
    faulty.script(["lost_answer"])
    assert store.put_new(manifest_key(7), b"mine") is False
    log = Log(store)
    faulty.script([*[None] * 2, "lost_answer"])
    log.claim("trainer")
    assert faulty.suffered == ["lost_answer"] * 2
    assert log.position is not None


DATA = bytes(range(20))


@pytest.mark.parametrize("breaks", [(0,), (3,), (9,), (18,), (0, 0, 6, 0, 3), (21,)])
@pytest.mark.parametrize("start", [0, 2])
def test_a_stream_goes_on_at_the_byte_reached(breaks: tuple[int, ...], start: int) -> None:
    """No byte comes twice and none is left out, wherever and however often it breaks off."""
    store = Pieces(*breaks)
    store.put(BLOB, DATA)
    found = retrying(store).stream(BLOB, max_bytes=20, start=start)
    assert found is not None
    assert b"".join(found) == DATA[start:]
    reached = [start]
    for end in breaks[: len(store.starts) - 1]:
        reached.append(min(reached[-1] + end, 20))
    assert store.starts == reached


def test_a_stream_of_nothing_is_none_and_an_empty_object_has_no_bytes() -> None:
    store = Pieces()
    assert retrying(store).stream(BLOB, max_bytes=9) is None
    store.put(BLOB, b"")
    assert b"".join(retrying(store).stream(BLOB, max_bytes=9) or [b"none"]) == b""


def test_a_long_stream_has_its_deadline_from_piece_to_piece() -> None:
    """Neither the whole transfer nor what the reader does with a piece counts."""
    clock = Clock()
    store = Pieces(*[3] * 6, size=3)
    store.put(BLOB, DATA)
    found = []
    for piece in retrying(store, clock, deadline_s=60.0).stream(BLOB, max_bytes=20) or ():
        clock.now += 100.0
        found.append(piece)
    assert b"".join(found) == DATA


def test_a_stream_without_progress_ends_at_the_deadline() -> None:
    clock = Clock()
    store = Pieces(6, *[0] * 1000)
    store.put(BLOB, DATA)
    found = retrying(store, clock, deadline_s=60.0).stream(BLOB, max_bytes=20)
    assert found is not None
    assert [next(found), next(found)] == [DATA[:3], DATA[3:6]]
    with pytest.raises(ChannelError):
        next(found)
    assert clock.now == pytest.approx(160.0)


CHANGES: dict[str, Callable[[Store], None]] = {
    "vanished": lambda store: store.delete([BLOB]),
    "longer": lambda store: store.put(BLOB, DATA + b"!"),
    "shorter": lambda store: store.put(BLOB, DATA[:-1]),
    "shorter than read": lambda store: store.put(BLOB, DATA[:4]),
    "another": lambda store: store.put(BLOB, DATA[::-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_object_that_changes_between_two_pieces_is_an_error(change: str) -> None:
    """What is gone or too long is told by the stream, anything else by the reader's digest."""
    store = Pieces(9)
    store.put(BLOB, DATA)
    store.before = lambda: CHANGES[change](store)
    stream = retrying(store).stream(BLOB, max_bytes=20)
    assert stream is not None
    if change in ("vanished", "longer"):
        with pytest.raises(DigestError):
            list(stream)
    key = blob_key(digest(DATA))
    store = Pieces(9)
    store.put(key, DATA)
    ref = BlobRef(digest(DATA), 20, 0)
    assert LogReader(retrying(store))._fetch(ref) == DATA
    store.starts, store.breaks = [], [9]
    store.before = lambda: CHANGES[change](_Renamed(store, key))
    with pytest.raises(DigestError):
        LogReader(retrying(store))._fetch(ref)


class _Renamed(MemoryStore):
    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key

    def put(self, key: str, data: bytes) -> None:
        self._store.put(self._key, data)

    def delete(self, keys: Any) -> None:
        self._store.delete([self._key])


def test_an_error_that_waiting_does_not_help_ends_a_stream() -> None:
    class Closing(Pieces):
        def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
            if start:
                raise AuthError("expired")
            return super().stream(key, max_bytes=max_bytes, start=start)

    store = Closing(6)
    store.put(BLOB, DATA)
    stream = retrying(store).stream(BLOB, max_bytes=20)
    assert stream is not None
    with pytest.raises(AuthError):
        list(stream)


def test_a_long_wait_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """What is waited for is in the log, but not each attempt; a short wait is not told."""
    store = Failing(*[ChannelError("away")] * 8)
    with caplog.at_level(logging.INFO, "vllm_delta"):
        retrying(store, random=Longest()).get(BLOB, max_bytes=9)
        first, last = caplog.messages
        assert "away" in first
        assert store.url in first
        assert BLOB in first
        assert "answers again" in last
        caplog.clear()
        store.errors = [ChannelError("away")] * 4
        retrying(store, random=Longest()).get(BLOB, max_bytes=9)
        assert caplog.messages == []
        store.errors = [RateLimitError("slow down", retry_after_s=30)]
        retrying(store).get(BLOB, max_bytes=9)
        assert len(caplog.messages) == 2


def test_whoever_waits_may_give_up() -> None:
    """What the given sleep raises ends the call."""

    def stopped(seconds: float) -> None:
        raise FencedError("stopped")

    store = RetryingStore(Failing(ChannelError("away")), sleep=stopped)
    with pytest.raises(FencedError):
        store.get(BLOB, max_bytes=9)


def test_what_is_not_a_call_passes_through() -> None:
    class Watched(MemoryStore):
        @property
        def atomic(self) -> bool:
            return False

        def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
            wake()
            return wake

    inner, woken = Watched(), []
    store = retrying(inner)
    assert (store.url, store.atomic) == (inner.url, False)
    end = store.watch(lambda: woken.append(1))
    assert end is not None
    end()
    assert woken == [1, 1]
    assert retrying(MemoryStore()).watch(lambda: None) is None
    assert retrying(MemoryStore()).atomic


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"deadline_s": -1}, {"deadline_s": math.inf}, {"deadline_s": math.nan},
        {"first_delay_s": 0}, {"first_delay_s": 11}, {"longest_delay_s": math.inf},
        {"n_attempts": 0},
    ]  # fmt: skip
    for values in bad:
        with pytest.raises(SettingsError):
            RetryPolicy(**values)


def test_a_log_under_heavy_faults_is_written_and_read_without_an_error() -> None:
    """A third of all calls fail, answers are lost: the protocol above sees none of it."""
    rates: Any = {"transport": 0.2, "lost_answer": 0.15}
    faulty = FaultyChannel(MemoryStore(), seed=11, rates=rates)
    store = retrying(faulty, deadline_s=1e6)
    log = Log(store)
    log.claim("trainer")
    manifests: list[Manifest] = []
    for number in range(30):
        record = log.append(
            "anchor" if number == 0 else "delta",
            target=Version(number, f"{number:064x}"),
            blobs=[log.put_blob(b"%d" % number)],
            schema=log.put_schema(b"schema"),
        )
        manifests.append(record.manifest)
    reader = LogReader(store)
    tail = reader.tail()
    assert tail is not None
    assert [record.manifest for record in reader.read_from_anchor(tail)] == manifests
    assert [reader.get_blob(m, 0) for m in manifests] == [b"%d" % n for n in range(30)]
    assert all(a < b for a, b in pairwise(m.seq for m in manifests))
    assert len(faulty.suffered) > 30
