"""Publishing: what a reader rebuilds is bit for bit what the trainer holds."""

from __future__ import annotations

import pytest
import torch

from tests.nets import BF16, Net, assert_same, bits_of, expected, nudge, read, train
from vllm_delta.channel import Log
from vllm_delta.errors import (
    ChannelError,
    SettingsError,
)
from vllm_delta.format import manifest_key
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore


def test_optimizer_steps_reach_the_reader_bit_for_bit():
    """Any number of AdamW steps between publishes; every version, not only the last."""
    store, net = MemoryStore(), Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    versions = []
    with Publisher(store, net, dtype=BF16) as publisher:
        versions.append(expected(net))
        for n_steps in (1, 3, 1, 7):
            train(net, optimizer, n_steps)
            published = publisher.publish()
            versions.append(expected(net))
            assert published.version.number == len(versions) - 1
            assert 0 < published.n_changed < published.n_weights
    for number, wanted in enumerate(versions):
        assert_same(read(store, number), wanted)


def test_nothing_changed_writes_nothing():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = store.list("")
    with torch.no_grad():
        net.up.weight += 1e-12  # moves no bf16 value
        net.scratch += 1
    published = publisher.publish()
    assert (published.kind, published.payload_bytes, published.n_changed) == ("none", 0, 0)
    assert published.version == publisher.version
    assert store.list("") == before


def test_frozen_and_other_unchanged_tensors_cost_nothing():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    nudge(net)
    published = publisher.publish()
    assert published.n_changed == 3
    subscriber = Subscriber(store)
    manifest = subscriber.refresh()[-1]
    names = [subscriber.schema.tensors[c.tensor].name for c in subscriber.changes(manifest)]
    assert names == ["up.weight"]
    assert published.payload_bytes < 2000


def test_what_it_cost_is_what_was_written():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = set(store.list(""))
    nudge(net)
    published = publisher.publish()
    written = set(store.list("")) - before
    assert published.payload_bytes == sum(len(store.get(k, max_bytes=1 << 30)) for k in written)
    assert published.seconds >= published.diff_s + published.upload_s


def test_odd_values_are_exact():
    """NaN payloads, infinities and the sign of zero."""
    special = torch.tensor([0x7FC1, 0xFFA5, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x0000, 0x807F])
    odd = special.to(torch.int32).to(torch.int16).view(BF16)
    tensors = {"odd": torch.zeros(8, dtype=BF16), "many": torch.zeros(100, dtype=torch.float32)}
    store = MemoryStore()
    publisher = Publisher(store, tensors, settings=PublisherSettings(raw_above=1.0))
    tensors["odd"].copy_(odd)
    tensors["many"][:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    publisher.publish()
    assert_same(read(store), {name: bits_of(tensor) for name, tensor in tensors.items()})
    assert read(store)["odd"].tolist() == special.tolist()


def test_types_without_steps_travel_whole():
    tensors = {
        "a": torch.arange(10, dtype=torch.int64),
        "b": torch.rand(10, dtype=torch.float64),
        "c": torch.zeros(10, dtype=torch.bool),
        "d": torch.zeros((), dtype=torch.uint8),
    }
    store = MemoryStore()
    publisher = Publisher(store, tensors)
    tensors["a"][3], tensors["b"][0], tensors["c"][9] = -1, float("nan"), True
    tensors["d"].fill_(7)
    assert publisher.publish().n_changed == 4
    assert_same(read(store), {name: bits_of(tensor) for name, tensor in tensors.items()})


def test_fp8_changes_are_exact():
    tensors = {"w": torch.linspace(-3, 3, 999).to(torch.float8_e4m3fn)}
    store = MemoryStore()
    publisher = Publisher(store, tensors, dtype=BF16)
    tensors["w"].view(torch.uint8)[::50] += 1
    publisher.publish()
    assert_same(read(store), {"w": bits_of(tensors["w"])})


def test_tensors_that_are_not_contiguous_travel_in_their_shape():
    base = torch.randn(12, 20)
    tensors = {"w": base.t()[3:]}
    store = MemoryStore()
    publisher = Publisher(store, tensors, dtype=BF16)
    base[4, 5] = 99.0
    publisher.publish()
    assert read(store)["w"][2, 4] == bits_of(torch.tensor(99.0, dtype=BF16))
    assert_same(read(store), {"w": bits_of(tensors["w"].to(BF16))})


def test_a_function_gives_the_tensors_of_each_publish():
    store, current = MemoryStore(), {"w": torch.zeros(50)}
    publisher = Publisher(store, lambda: current, dtype=BF16)
    current = {"w": torch.zeros(50)}
    current["w"][7] = 1.0
    assert publisher.publish().n_changed == 1


@pytest.mark.parametrize(
    "settings", [{"raw_above": 1.5}, {"anchor_ratio": 0}, {"blob_bytes": 0}, {"raw_above": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        PublisherSettings(**settings)


# Anchors


def test_an_anchor_is_written_once_the_deltas_cost_more():
    store, net, events = MemoryStore(), Net(), []
    settings = PublisherSettings(anchor_ratio=0.5, raw_above=1.0)
    publisher = Publisher(store, net, dtype=BF16, settings=settings, hooks=[events.append])
    anchor_bytes = Log(store).tail().manifest.payload_bytes
    spent = 0
    for _ in range(20):
        with torch.no_grad():
            net.embed.weight.mul_(1.05)
        publisher.publish()
        tail = Log(store).tail().manifest
        spent += events[-1 if tail.kind == "delta" else -2].payload_bytes
        if tail.kind == "anchor":
            break
    assert tail.kind == "anchor"
    assert spent > 0.5 * anchor_bytes
    assert tail.target == publisher.version
    assert publisher.publish().kind == "none"
    assert Log(store).tail().manifest == tail
    assert_same(read(store), expected(net))
    subscriber = Subscriber(store)
    assert [m.kind for m in subscriber.refresh()] == ["anchor"]


def test_a_restart_remembers_what_was_spent_since_the_anchor():
    store, net = MemoryStore(), Net()
    kinds = []
    for _ in range(6):
        settings = PublisherSettings(anchor_ratio=0.9, raw_above=1.0)
        publisher = Publisher(store, net, dtype=BF16, settings=settings)
        with torch.no_grad():
            net.embed.weight.mul_(1.05)
        publisher.publish()
        kinds.append(Log(store).tail().manifest.kind)
    assert "anchor" in kinds
    assert kinds[0] == "delta"


def test_an_anchor_that_failed_is_written_by_the_next_publish():
    store, net = MemoryStore(), Net()
    channel = FaultyChannel(store)
    settings = PublisherSettings(anchor_ratio=1e-9)
    publisher = Publisher(channel, net, dtype=BF16, settings=settings)
    nudge(net)
    # the delta: its blob, the record before it, its record, that read back, head; then the schema
    channel.script([None] * 5 + ["transport"])
    with pytest.raises(ChannelError):
        publisher.publish()
    assert Log(store).tail().manifest.kind == "delta"
    assert publisher.version.number == 1
    assert publisher.publish().kind == "none"
    assert Log(store).tail().manifest.kind == "anchor"
    assert_same(read(store), expected(net))


def test_an_anchor_can_be_asked_for():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    nudge(net)
    publisher.publish()
    nudge(net)  # not published, so not in the anchor
    wanted = read(store)
    assert publisher.anchor().version.number == 1
    assert_same(read(store), wanted)


def test_blobs_are_made_so_large_that_a_version_takes_few_enough():
    small = PublisherSettings(blob_bytes=1)
    assert small.for_model(100).blob_bytes == 1
    assert small.for_model(1 << 40).blob_bytes == 256 << 20
    assert small.for_model(1 << 50).blob_bytes == 512 << 20
    large = PublisherSettings()
    assert large.for_model(100 << 30) is large


def test_a_version_of_too_many_blobs_is_refused_before_the_last_are_written(monkeypatch):
    monkeypatch.setattr("vllm_delta.publisher.MAX_BLOBS", 3)
    store = MemoryStore()
    with pytest.raises(SettingsError, match="raise blob_bytes"):
        Publisher(
            store,
            {f"w{i}": torch.ones(9, dtype=torch.bfloat16) for i in range(5)},
            settings=PublisherSettings(blob_bytes=1),
        )
    assert store.list("m/") == [manifest_key(1)]
