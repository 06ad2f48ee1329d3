"""Which way is taken to a version, and how far back a log is read for it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vllm_delta.subscriber as subscriber_module
from tests.spec_channel import SPEC, Channel, anchor_blobs, assert_version, seqs
from vllm_delta.codec import encode_delta
from vllm_delta.errors import ChainError, SettingsError
from vllm_delta.format import (
    BlobRef,
    Manifest,
    Reference,
    Version,
)
from vllm_delta.plan import cheapest, cheapest_within, peak_bytes, within_reach
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore


def test_a_reader_at_the_newest_version_needs_nothing():
    channel = Channel()
    channel.delta()
    assert channel.subscriber().plan(SPEC.version(1)) == []


def test_a_reader_that_lags_takes_the_deltas_in_order():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(SPEC.version(1))) == [4, 5, 6]
    assert seqs(subscriber.plan(SPEC.version(1), number=3)) == [4, 5]


def test_a_reader_without_a_version_takes_an_anchor():
    channel = Channel()
    channel.delta()
    channel.anchor(1)
    channel.delta()
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(None)) == [4, 5]
    assert seqs(subscriber.plan(Version(1, "9" * 64))) == [4, 5]
    assert seqs(subscriber.plan(None, number=0)) == [2]


def test_the_way_with_fewer_bytes_wins_whichever_it_is():
    store, tensors = MemoryStore(), {"w": torch.rand(5000)}
    publisher = Publisher(store, tensors, settings=PublisherSettings(anchor_ratio=100))
    versions = [publisher.version]
    subscriber = Subscriber(store)
    anchor_bytes = subscriber.refresh()[-1].payload_bytes
    deltas = []
    while sum(delta.payload_bytes for delta in deltas) < 1.5 * anchor_bytes:
        tensors["w"][::20] += 1.0
        versions.append(publisher.publish().version)
        deltas += subscriber.refresh()
    publisher.anchor()
    (anchor,) = subscriber.refresh()
    ways = set()
    for n_behind in range(1, len(versions)):
        chain = deltas[-n_behind:]
        by_deltas = sum(delta.payload_bytes for delta in chain) < anchor.payload_bytes
        assert subscriber.plan(versions[-1 - n_behind]) == (chain if by_deltas else [anchor])
        ways.add(by_deltas)
    assert ways == {True, False}


def test_a_plan_crosses_a_fence_but_not_a_new_beginning():
    store, tensors = MemoryStore(), {"w": torch.zeros(4000)}
    settings = PublisherSettings(anchor_ratio=100)

    def publish(publisher):
        tensors["w"][:5] += 1
        return publisher.publish().version

    publisher = Publisher(store, tensors, settings=settings)
    first = publish(publisher)
    publisher = Publisher(store, tensors, settings=settings)
    second = publish(publisher)
    subscriber = Subscriber(store)
    subscriber.refresh()
    assert seqs(subscriber.plan(first)) == [5]
    tensors["w"].zero_()
    tensors["w"][7] = 3
    publisher = Publisher(store, tensors, settings=settings)
    publish(publisher)
    subscriber.refresh()
    assert [m.kind for m in subscriber.plan(second)] == ["anchor", "delta"]
    assert seqs(subscriber.plan(second)) == [7, 8]


def test_what_lies_below_the_low_water_mark_is_no_way():
    channel = Channel()
    channel.delta()
    channel.anchor(1)
    channel.log.append(
        "anchor",
        target=SPEC.version(1),
        blobs=channel.log.put_blobs(anchor_blobs(channel)),
        low=4,
    )
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(SPEC.version(0))) == [5]
    with pytest.raises(ChainError, match="no longer kept"):
        subscriber.plan(None, number=0)


def test_a_version_that_was_never_published_is_told():
    with pytest.raises(ChainError, match="number=7"):
        Channel().subscriber().plan(number=7)


def test_an_anchor_by_reference_counts_as_the_model_in_a_plan():
    channel = Channel(reference=Reference("someone/model"))
    channel.delta()
    channel.anchor(1)
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(None)) == [4]
    assert [m.reference is None for m in subscriber.plan(None, number=0)] == [False]


# Merged deltas


def test_merged_deltas_are_taken_where_they_save_bytes():
    channel = Channel()
    for number in range(1, 9):
        channel.delta()
        if number in (4, 8):
            channel.merged(number - 4)
        if number == 8:
            channel.merged(0)
    subscriber = channel.subscriber()
    single = [m for m in subscriber.history() if m.kind == "delta"]
    by_seq = {m.seq: m for m in subscriber.history()}
    for start in range(8):
        path = subscriber.plan(SPEC.version(start))
        assert path[-1].target == SPEC.version(8)
        cost = sum(m.payload_bytes for m in path)
        assert cost <= sum(m.payload_bytes for m in single[start:])
        assert_linked(path, SPEC.version(start))
    # seq: 1 fence, 2 anchor, 3 to 6 deltas, 7 merged, 8 to 11 deltas, 12 and 13 merged
    costs = {seq: by_seq[seq].payload_bytes for seq in by_seq}
    ways = ([13], [7, 12], [*range(3, 7), 12], [7, *range(8, 12)], [*range(3, 7), *range(8, 12)])
    best = min(ways, key=lambda way: sum(costs[seq] for seq in way))
    assert seqs(subscriber.plan(SPEC.version(0))) == best


def assert_linked(path, start) -> None:
    at = start
    for manifest in path:
        if manifest.kind != "anchor":
            assert manifest.base == at
        at = manifest.target


def version(number: int) -> Version:
    return Version(number, f"{number:064x}")


def blobs(n_bytes: int) -> tuple[BlobRef, ...]:
    """Of at most 10 bytes each."""
    sizes = [10] * (n_bytes // 10) + [n_bytes % 10] * (n_bytes % 10 > 0)
    return tuple(BlobRef("0" * 64, size) for size in sizes)


def record(kind: str, base: int | None, target: int, n_bytes: int, seq: int) -> Manifest:
    return Manifest(
        channel="0" * 32,
        seq=seq,
        epoch=1,
        parent="0" * 64,
        kind=kind,
        base=None if base is None else version(base),
        target=version(target),
        anchor=1,
        low=1,
        schema=None,
        blobs=blobs(n_bytes),
        reference=None,
        writer="test",
        time=0.0,
    )


@st.composite
def logs(draw) -> list[Manifest]:
    """A log of made-up sizes: an anchor, then deltas with what may stand after each."""
    sizes = st.integers(1, 40)
    log = [record("anchor", None, 0, draw(sizes), 1)]
    for number in range(1, draw(st.integers(1, 12)) + 1):
        log.append(record("delta", number - 1, number, draw(sizes), len(log) + 1))
        bases = st.integers(0, number - 2) if number > 1 else st.nothing()
        for base in draw(st.lists(bases, max_size=2)) if number > 1 else []:
            log.append(record("merged", base, number, draw(sizes), len(log) + 1))
        if draw(st.integers(0, 5)) == 0:
            log.append(record("fence", number, number, 1, len(log) + 1))
        if draw(st.integers(0, 3)) == 0:
            log.append(record("anchor", None, number, draw(st.integers(1, 120)), len(log) + 1))
    return log


def brute_force(log: list[Manifest], goal: int, start: int | None) -> float:
    """The fewest bytes to a version from another or from nothing, by trying again and again."""
    least = {start: 0.0} if start is not None else {}
    for _ in range(len(log)):
        for m in log:
            if m.kind == "anchor":
                whole = least.get(m.target.number, math.inf), m.payload_bytes
                least[m.target.number] = min(whole)
            elif m.kind != "fence" and m.base.number in least:
                cost = least[m.base.number] + m.payload_bytes
                least[m.target.number] = min(cost, least.get(m.target.number, math.inf))
    return least[goal]


@given(logs(), st.data())
@settings(max_examples=300)
def test_no_way_is_cheaper_than_the_plan(log, data):
    """Over deltas, merged deltas and anchors, from any version or none, to any version."""
    newest = log[-1].target.number
    goal = data.draw(st.integers(0, newest), "goal")
    start = data.draw(st.none() | st.integers(0, max(goal - 1, 0)), "start")
    if start == goal:
        return
    resident = None if start is None else version(start)
    path = cheapest(reversed(log), version(goal), resident, None)
    assert sum(m.payload_bytes for m in path) == brute_force(log, goal, start)
    assert path[-1].target == version(goal)
    assert path[0].kind == "anchor" or path[0].base == resident
    assert all(m.kind in ("delta", "merged") for m in path[1:])
    assert_linked(path, resident)


def needed_bytes(log: list[Manifest], goal: int, start: int | None) -> int:
    """The least memory with which there is a way, by trying each."""
    for at_most in sorted({peak_bytes(m) for m in log}):
        fitting = [m for m in log if peak_bytes(m) <= at_most]
        if reaches(fitting, goal, start) < math.inf:
            return at_most
    raise AssertionError("no way at all")


def reaches(log: list[Manifest], goal: int, start: int | None) -> float:
    try:
        return brute_force(log, goal, start)
    except KeyError:
        return math.inf


@given(logs(), st.data())
@settings(max_examples=400)
def test_no_way_within_memory_is_cheaper_than_the_plan(log, data):
    """A record that takes more is not on it; where no way fits, what would is named."""
    newest = log[-1].target.number
    goal = data.draw(st.integers(0, newest), "goal")
    start = data.draw(st.none() | st.integers(0, max(goal - 1, 0)), "start")
    at_most = data.draw(st.integers(0, 45), "at_most_bytes")
    if start == goal:
        return
    resident = None if start is None else version(start)

    def find(at_most: float) -> list[Manifest]:
        may_take = lambda m: peak_bytes(m) <= at_most  # noqa: E731
        return cheapest(reversed(log), version(goal), resident, None, may_take=may_take)

    least = reaches([m for m in log if peak_bytes(m) <= at_most], goal, start)
    if least == math.inf:
        with pytest.raises(SettingsError, match="memory") as caught:
            cheapest_within(at_most, find, lambda: reversed(log))
        assert caught.value.at_most_bytes == at_most
        assert caught.value.needed_bytes == needed_bytes(log, goal, start)
        at_most = caught.value.needed_bytes
    path = cheapest_within(at_most, find, lambda: reversed(log))
    assert sum(m.payload_bytes for m in path) == reaches(
        [m for m in log if peak_bytes(m) <= at_most], goal, start
    )
    assert all(peak_bytes(m) <= at_most for m in path)
    assert path[-1].target == version(goal)
    assert path[0].kind == "anchor" or path[0].base == resident
    assert_linked(path, resident)


def test_memory_is_counted_whole_for_a_delta_and_blob_by_blob_for_an_anchor():
    assert peak_bytes(record("delta", 0, 1, 25, 2)) == 25
    assert peak_bytes(record("merged", 0, 2, 25, 4)) == 25
    assert peak_bytes(record("anchor", None, 1, 25, 3)) == 10


def test_a_plan_keeps_to_its_memory_by_single_deltas_and_then_by_an_anchor():
    channel = Channel()
    for _ in range(6):
        channel.delta()
    channel.merged(2)
    subscriber = channel.subscriber()
    whole = subscriber.plan(SPEC.version(2))
    (merged,) = whole
    assert merged.kind == "merged"
    assert subscriber.plan(SPEC.version(2), at_most_bytes=merged.payload_bytes) == whole
    singles = subscriber.plan(SPEC.version(2), at_most_bytes=merged.payload_bytes - 1)
    assert seqs(singles) == [5, 6, 7, 8]
    at_most = max(m.payload_bytes for m in singles) - 1
    channel.anchor(6)
    subscriber.refresh()
    (anchor,) = subscriber.plan(SPEC.version(2), at_most_bytes=at_most)
    assert anchor.kind == "anchor"
    assert peak_bytes(anchor) <= at_most
    with pytest.raises(SettingsError, match="memory") as caught:
        subscriber.plan(SPEC.version(2), at_most_bytes=1)
    assert caught.value.needed_bytes == min(
        max(m.payload_bytes for m in singles), peak_bytes(anchor), merged.payload_bytes
    )
    assert str(caught.value.needed_bytes) in str(caught.value)
    left = subscriber.plan(SPEC.version(2), without={9, 10}, at_most_bytes=10**9)
    assert left == singles
    with pytest.raises(ChainError):
        subscriber.plan(SPEC.version(2), number=99, at_most_bytes=1)


def test_a_single_delta_left_out_is_led_over_by_a_merged_one():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    channel.merged(0)
    channel.delta()
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(SPEC.version(0), without={4})) == [7, 8]
    assert subscriber.plan(SPEC.version(2), without={5})[0].kind == "anchor"


def test_a_reader_that_was_away_for_long_comes_back_by_few_bytes_and_few_reads():
    """Far fewer than it missed: the newest anchor, or merged deltas, whichever is less."""
    channel = Channel()
    reader = channel.subscriber()
    for number in range(1, 97):
        channel.delta()
        if number % 4 == 0:
            channel.merged(number - 4)
        if number % 16 == 0:
            channel.merged(number - 16)
    missed = [m for m in channel.subscriber().history() if m.kind == "delta"]
    reader.refresh()
    path = reader.plan(SPEC.version(0))
    cost = sum(m.payload_bytes for m in path)
    log = [m for m in channel.subscriber().history() if m.kind != "fence"]
    assert cost == brute_force(log, 96, 0)
    assert cost < 0.8 * sum(m.payload_bytes for m in missed)
    assert len(path) <= 12


@given(logs())
@settings(max_examples=300)
def test_a_log_is_read_back_as_far_as_deltas_can_be_the_cheaper_way(log):
    reach = list(within_reach(reversed(log), 0))
    assert reach == log[::-1][: len(reach)]
    found = {m.target for m in reach} | {m.base for m in reach}
    newest = log[-1].target
    for number in range(newest.number):
        path = cheapest(reversed(log), newest, version(number), None)
        if path[0].kind != "anchor":
            assert version(number) in found


@given(logs())
@settings(max_examples=200)
def test_a_plan_reads_no_record_that_cannot_matter(log):
    """A reader one version behind reads the newest delta and what stands after it."""
    newest = log[-1].target.number
    last = [m for m in log if m.target.number == newest and m.kind in ("delta", "merged")]
    assume(last[0].payload_bytes == min(m.payload_bytes for m in last))
    read = []
    manifests = (read.append(m) or m for m in reversed(log))
    cheapest(manifests, version(newest), version(newest - 1), None)
    assert all(m.target.number == newest for m in read)


def test_a_merged_delta_whose_base_was_never_a_version_changes_no_plan():
    channel = Channel()
    for _ in range(5):
        channel.delta()
    plans = [channel.subscriber().plan(SPEC.version(n)) for n in range(5)]
    (blob, *_) = encode_delta(channel.schema, channel.changes(4))
    channel.append("merged", 5, [blob], base=Version(2, "8" * 64))
    assert [channel.subscriber().plan(SPEC.version(n)) for n in range(5)] == plans
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    assert subscriber.find("0" * 64) is None


def test_a_merged_delta_leads_on_from_a_version_whose_own_records_are_no_longer_kept():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    channel.merged(1)
    blobs = channel.log.put_blobs(anchor_blobs(channel))
    seq = channel.log.position.seq
    channel.log.append("anchor", target=SPEC.version(4), blobs=blobs, low=seq)
    subscriber = channel.subscriber()
    assert subscriber.find(SPEC.version(1).root) == SPEC.version(1)
    assert subscriber.find(SPEC.version(2).root) is None
    assert seqs(subscriber.plan(SPEC.version(1))) == [seq]
    assert seqs(subscriber.plan(SPEC.version(2))) == [seq + 1]


def test_records_that_proved_no_good_can_be_left_out():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    channel.merged(0)
    subscriber = channel.subscriber()
    seq = subscriber.newest_manifest.seq
    assert seqs(subscriber.plan(SPEC.version(0))) == [seq]
    assert seqs(subscriber.plan(SPEC.version(0), without={seq})) == [3, 4, 5, 6]


# Looking back


class Counting(FaultyChannel):
    """A store that counts what is read from it."""

    def reads(self, call) -> int:
        before = self.n_calls
        call()
        return self.n_calls - before


def test_a_root_is_looked_for_where_deltas_from_it_can_cost_less_than_an_anchor():
    """Each version that deltas are the way from is found; for an unknown root little is read."""
    channel = Channel()
    for number in range(1, 31):
        channel.delta()
        if number % 10 == 0:
            channel.anchor(number)
    channel.delta()
    ways = set()
    for number in range(32):
        version = SPEC.version(number)
        by_deltas = all(m.kind == "delta" for m in channel.subscriber().plan(version))
        ways.add(by_deltas)
        if by_deltas:
            assert channel.subscriber().find(version.root) == version
    assert ways == {True, False}
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema
    assert store.reads(lambda: subscriber.find("0" * 64)) < 10


def test_nothing_is_read_below_the_low_water_mark():
    channel = Channel()
    for _ in range(20):
        channel.delta()
    blobs = channel.log.put_blobs(anchor_blobs(channel))
    for low in (channel.log.position.seq + 1, None):
        channel.log.append("anchor", target=SPEC.version(20), blobs=blobs, low=low)
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema

    def version_3() -> None:
        with pytest.raises(ChainError, match="number=3"):
            subscriber.plan(number=3)

    assert store.reads(lambda: subscriber.find("0" * 64)) <= 1
    assert store.reads(lambda: subscriber.plan(SPEC.version(3))) == 0
    assert store.reads(version_3) == 0


def test_a_version_beyond_the_newest_is_refused_without_reading_back():
    channel = Channel()
    for _ in range(5):
        channel.delta()
    channel.anchor(5)
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema

    def version_9() -> None:
        with pytest.raises(ChainError, match="number=9"):
            subscriber.plan(number=9)

    assert store.reads(version_9) == 0


def test_a_long_follower_keeps_a_bounded_part_of_the_log_and_still_finds_its_way(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_KEPT", 4)
    channel = Channel()
    subscriber = channel.subscriber()
    for number in range(1, 13):
        channel.delta()
        subscriber.refresh()
        assert len(subscriber._records) <= 4
        assert seqs(subscriber.plan(SPEC.version(number - 1))) == [number + 2]
    assert seqs(subscriber.plan(SPEC.version(2))) == list(range(5, 15))
    assert_version(subscriber.materialise(), 12)
    assert subscriber.find(SPEC.version(0).root) == SPEC.version(0)
    assert seqs(subscriber.history()) == list(range(1, 15))
    channel.delta()
    assert seqs(subscriber.refresh()) == [15]
    assert len(subscriber._records) == 4
