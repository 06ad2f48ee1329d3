"""Which way is taken to a version, and how far back a log is read for it."""

from __future__ import annotations

import pytest
import torch

import vllm_delta.subscriber as subscriber_module
from tests.spec_channel import SPEC, Channel, anchor_blobs, assert_version, seqs
from vllm_delta.errors import (
    ChainError,
)
from vllm_delta.format import (
    Reference,
    Version,
)
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
        blobs=[channel.log.put_blob(b) for b in anchor_blobs(channel)],
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
    blobs = [channel.log.put_blob(blob) for blob in anchor_blobs(channel)]
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
