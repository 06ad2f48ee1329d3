from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from tests.channel.toy import (
    START,
    append_delta,
    begin,
    moved,
    replay,
)
from vllm_delta.channel import Log, Store
from vllm_delta.channel.chain import parse_record
from vllm_delta.channel.log import COMMIT_ATTEMPTS
from vllm_delta.errors import (
    ChannelError,
    ChannelFullError,
    DeltaError,
    FencedError,
)
from vllm_delta.format import (
    HEAD_KEY,
    manifest_key,
    seal,
)
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash


def writes_of_an_append(store: Store, faults: Iterable[Any]) -> tuple[Log, FaultyChannel]:
    """A log whose next append suffers these on its manifest's put_new and read-back, in turn."""
    faulty = FaultyChannel(store)
    log = Log(faulty)
    begin(log)
    # Calls before: the blob's put and the look at the record below.
    faulty.script([None, None, *faults])
    return log, faulty


def test_a_write_whose_answer_is_lost_is_won() -> None:
    log, faulty = writes_of_an_append(MemoryStore(), ["lost_answer"])
    record = append_delta(log, START, 0, 1)
    assert faulty.suffered == ["lost_answer"]
    assert log.tail() == record == log.position
    append_delta(log, moved(START, 0, 1), 0, 1)


def test_a_write_that_did_not_land_is_tried_again() -> None:
    log, faulty = writes_of_an_append(MemoryStore(), ["transport", None, "transport", None])
    record = append_delta(log, START, 0, 1)
    assert faulty.suffered == ["transport", "transport"]
    assert log.tail() == record


def test_a_taken_place_is_lost_though_the_answer_was_an_error() -> None:
    store = MemoryStore()
    log, faulty = writes_of_an_append(store, ["transport"])
    Log(store).claim("other")
    with pytest.raises(FencedError):
        append_delta(log, START, 0, 1)
    assert faulty.suffered == ["transport"]


def test_a_store_that_says_taken_though_nothing_landed_is_asked_again() -> None:
    class Conflicting(MemoryStore):
        n_conflicts = COMMIT_ATTEMPTS - 1

        def put_new(self, key: str, data: bytes) -> bool:
            if key == manifest_key(3) and self.n_conflicts:
                self.n_conflicts -= 1
                return False
            return super().put_new(key, data)

    log = Log(Conflicting())
    begin(log, 1)
    assert log.position.seq == 3


def test_a_store_that_says_taken_of_our_own_bytes_is_not_believed() -> None:
    class Retrying(MemoryStore):
        def put_new(self, key: str, data: bytes) -> bool:
            super().put_new(key, data)
            return False

    log = Log(Retrying())
    weights = begin(log, 3)
    assert replay(log, log.read_from_anchor(log.tail())) == weights


def test_a_store_that_ignores_the_condition_is_caught_by_reading_back() -> None:
    class Careless(MemoryStore):
        def put_new(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            if key == manifest_key(3):
                other = dataclasses.replace(parse_record(data, 3).manifest, writer="other")
                self.put(key, seal(other.to_bytes()))
            return True

    log = Log(Careless())
    with pytest.raises(FencedError):
        begin(log, 1)


def test_an_append_in_doubt_is_settled_before_anything_else() -> None:
    """Nothing can be read, then the first write, given up long ago, lands after all."""
    silence = ["late"] + ["transport"] * (2 * COMMIT_ATTEMPTS - 1)
    log, faulty = writes_of_an_append(MemoryStore(), silence)
    before = log.position
    with pytest.raises(ChannelError, match="doubt"):
        append_delta(log, START, 0, 1)
    assert log.position == before
    pending = log.in_doubt
    with pytest.raises(ChannelError, match="settle"):
        append_delta(log, START, 3, 3)
    assert faulty.deliver() == 1
    assert log.settle() == pending == log.position == log.tail()
    assert log.settle() is None
    append_delta(log, moved(START, 0, 1), 3, 3)


def test_settling_writes_the_same_bytes_where_nothing_landed() -> None:
    silence = ["late"] + ["transport"] * (2 * COMMIT_ATTEMPTS - 1)
    log, faulty = writes_of_an_append(MemoryStore(), silence)
    with pytest.raises(ChannelError, match="doubt"):
        append_delta(log, START, 0, 1)
    pending = log.in_doubt
    assert log.settle() == pending == log.tail()
    faulty.deliver()
    assert log.tail() == pending


def test_an_interrupt_after_the_write_leaves_something_to_settle() -> None:
    class Interrupted(MemoryStore):
        armed = False

        def put(self, key: str, data: bytes) -> None:
            if self.armed and key == HEAD_KEY:
                self.armed = False
                raise KeyboardInterrupt
            super().put(key, data)

    store = Interrupted()
    log = Log(store)
    begin(log)
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        append_delta(log, START, 0, 1)
    pending = log.in_doubt
    assert pending is not None
    assert log.settle() == pending == log.tail() == log.position
    append_delta(log, moved(START, 0, 1), 0, 1)


def test_settling_may_show_that_another_trainer_came_first() -> None:
    store = MemoryStore()
    log, faulty = writes_of_an_append(store, ["late"] + ["transport"] * (2 * COMMIT_ATTEMPTS - 1))
    with pytest.raises(ChannelError, match="doubt"):
        append_delta(log, START, 0, 1)
    other = Log(store)
    other.claim("other")
    faulty.deliver()
    with pytest.raises(FencedError):
        log.settle()
    with pytest.raises(FencedError):
        log.claim("again")
    assert other.tail() == other.position


def test_a_claim_in_doubt_is_claimed_again() -> None:
    for landed in (False, True):
        store = MemoryStore()
        faulty = FaultyChannel(store)
        log = Log(faulty)
        # Calls before the fence's write: head and the first manifest.
        faulty.script([None, None, "late"] + ["transport"] * (2 * COMMIT_ATTEMPTS - 1))
        with pytest.raises(ChannelError, match="doubt"):
            log.claim("trainer")
        if landed:
            faulty.deliver()
        fence = log.claim("trainer")
        faulty.deliver()
        assert (fence.seq, fence.epoch) == (1, 1)
        assert log.tail() == log.position


def test_a_first_claim_in_doubt_that_lost_is_tried_again_behind_the_winner() -> None:
    store = MemoryStore()
    faulty = FaultyChannel(store)
    log = Log(faulty)
    faulty.script([None, None, "late"] + ["transport"] * (2 * COMMIT_ATTEMPTS - 1))
    with pytest.raises(ChannelError, match="doubt"):
        log.claim("trainer")
    begin(Log(store), 1)
    fence = log.claim("trainer")
    assert (fence.seq, fence.epoch) == (4, 2)


@pytest.mark.parametrize("error", [ChannelFullError("full"), ChannelError("down")])
def test_an_error_of_the_store_leaves_the_channel_as_it_was(error: DeltaError) -> None:
    class Failing(MemoryStore):
        failing = False

        def put_new(self, key: str, data: bytes) -> bool:
            if self.failing:
                raise error
            return super().put_new(key, data)

    store = Failing()
    log = Log(store)
    begin(log, 1)
    before = log.position
    store.failing = True
    with pytest.raises(type(error)):
        append_delta(log, START, 0, 1)
    assert log.tail() == before == log.position
    store.failing = False
    in_doubt = isinstance(error, ChannelError)
    assert (log.settle() is not None) == in_doubt
    assert log.claim("again").seq == before.seq + 1 + in_doubt


def test_a_crash_before_each_call_of_an_append_loses_nothing_acknowledged() -> None:
    for crash_at in range(100):
        store = MemoryStore()
        weights = begin(Log(store), 2)
        acknowledged = Log(store).tail()
        faulty = FaultyChannel(store, crash_at=crash_at)
        log = Log(faulty)
        done = 0
        try:
            log.claim("second")
            done = 1
            append_delta(log, weights, 1, 5)
            done = 2
        except SimulatedCrash:
            with pytest.raises(SimulatedCrash):
                log.tail()
        tail = Log(store).tail()
        assert tail is not None
        assert tail.seq >= acknowledged.seq + done
        there = replay(Log(store), Log(store).read_chain(1, tail.seq))
        assert there in (weights, moved(weights, 1, 5))
        third = Log(store)
        third.claim("third")
        append_delta(third, there, 0, 1)
        if done == 2:
            break
    assert done == 2
    assert crash_at > 8
