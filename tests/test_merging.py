"""Merged deltas on a channel: when a publisher writes them, and who takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vllm_delta.coding as coding_module
from tests.merging import N_HOT, Run, settings
from tests.nets import BF16, assert_same, bits_of, read
from vllm_delta.errors import SettingsError
from vllm_delta.format import Reference
from vllm_delta.merge import LARGEST_SHARE, LEAST_SAVED_BYTES
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.replay import replay
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore


@pytest.fixture(scope="module", params=["gap", "hazard"])
def run(request) -> Run:
    """Seventeen versions after the first, in either codec."""
    return Run(17, codec=request.param)


def test_a_merged_delta_follows_the_delta_that_ends_its_stride(run):
    kinds = [(m.kind, m.target and m.target.number) for m in run.manifests()][1:]
    wanted = []
    for number in range(18):
        wanted.append(("delta" if number else "anchor", number))
        wanted += [("merged", number)] * (number % 4 == 0 and number > 0)
        wanted += [("merged", number)] * (number == 16)
    assert kinds == wanted
    assert run.merged() == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)]


def test_a_merged_delta_pays(run):
    """At most three quarters of those that it stands for, and 64 KiB saved; the events say so."""
    manifests = run.manifests()
    single = {m.target.number: m.payload_bytes for m in manifests if m.kind == "delta"}
    for m in manifests:
        if m.kind == "merged":
            others = sum(single[n] for n in range(m.base.number + 1, m.target.number + 1))
            assert m.payload_bytes <= LARGEST_SHARE * others
            assert others - m.payload_bytes >= LEAST_SAVED_BYTES
    told = [e for e in run.events if e.kind == "merged"]
    written = [m.payload_bytes for m in manifests if m.kind == "merged"]
    assert [0 < e.payload_bytes - n < 2000 for e, n in zip(told, written, strict=True)] == [
        True
    ] * 5
    assert all(0 < e.n_changed < 2 * N_HOT for e in told)


def test_every_lag_is_made_up_bit_for_bit_in_the_fewest_bytes(run):
    """From any version to any later one, whatever of deltas, merged deltas and anchors is taken."""
    subscriber = Subscriber(run.store)
    subscriber.refresh()
    versions = [subscriber.version(n) for n in range(18)]
    first = subscriber.history()[1]
    ways = {}
    for start in range(18):
        reach = subscriber.plan(number=start)
        for end in (start + 1, start + 3, start + 4, 16, 17):
            if not start < end <= 17:
                continue
            path = subscriber.plan(versions[start], number=end)
            ways[start, end] = [(m.kind, m.base.number, m.target.number) for m in path]
        path = subscriber.plan(versions[start], number=min(start + 4, 17))
        if path and path[0].kind != "anchor":
            *_, (_, replica) = replay(subscriber.schema, [*reach, *path], subscriber.changes)
            assert_same(replica.tensors(), run.versions[min(start + 4, 17)])
    assert ways[0, 4] == [("merged", 0, 4)]
    assert ways[0, 16] == [("merged", 0, 16)]
    assert ways[0, 17] == [("merged", 0, 16), ("delta", 16, 17)]
    assert ways[3, 17] == [
        ("delta", 3, 4),
        ("merged", 4, 8),
        ("merged", 8, 12),
        ("merged", 12, 16),
        ("delta", 16, 17),
    ]
    assert first.kind == "anchor"
    for number in (0, 3, 4, 15, 16, 17):
        assert_same(subscriber.materialise(number), run.versions[number])
    assert [m.kind for m in subscriber.plan()] == ["anchor", "merged", "delta"]


def test_a_reader_that_keeps_up_never_takes_a_merged_delta(run):
    subscriber = Subscriber(run.store)
    subscriber.refresh()
    for number in range(1, 18):
        path = subscriber.plan(subscriber.version(number - 1), number=number)
        assert [(m.kind, m.target.number) for m in path] == [("delta", number)]


def test_a_log_read_record_by_record_checks_merged_deltas_too(run):
    """By gap they are checked against the bits they led to; by hazard only from their base."""
    subscriber = Subscriber(run.store)
    subscriber.refresh()
    steps = replay(subscriber.schema, subscriber.history(), subscriber.changes)
    proven = [m.kind for m, _ in steps]
    checked = run.publisher._settings.codec == "gap"
    assert proven.count("merged") == (5 if checked else 0)
    assert proven.count("delta") == 17


def test_blobs_of_a_hazard_channel_are_smaller(run):
    if run.publisher._settings.codec == "gap":
        other = Run(4, codec="hazard")
        sizes = [
            [m.payload_bytes for m in r.manifests() if m.kind in ("delta", "merged")][:5]
            for r in (run, other)
        ]
        assert all(gap > hazard for gap, hazard in zip(*sizes, strict=True))


@pytest.mark.parametrize("codec", ["gap", "hazard"])
def test_what_does_not_pay_is_not_published(codec):
    """Steps that change other weights each time have nothing to merge."""
    run = Run(0, codec=codec)
    for _ in range(16):
        run.publish(spread=True)
    assert run.merged() == []
    assert_same(read(run.store), run.versions[16])


def test_what_has_little_to_merge_is_given_up_before_its_bytes_are_counted(monkeypatch):
    """More than nine tenths of the changes are of weights of their own."""
    monkeypatch.setattr(coding_module, "most_bytes", lambda window: 1e9)
    run = Run(4)
    assert run.merged() == [(0, 4)]
    run = Run(0)
    for _ in range(4):
        run.publish(spread=True)
    assert run.merged() == []


def test_no_part_of_what_is_given_up_is_published(monkeypatch):
    """The first tensor's changes fall together, and it is the second that has too many."""
    monkeypatch.setattr(coding_module, "most_bytes", lambda window: 1e9)
    tensors = {name: torch.randn(500_000).to(BF16) for name in ("a", "b")}
    publisher = Publisher(store := MemoryStore(), tensors, settings=settings())
    for number in range(4):
        for name, first, n in (("a", 0, 3_000), ("b", 40_000 * number, 40_000)):
            tensors[name].view(torch.int16)[first : first + n] ^= torch.randint(1, 99, (n,)).short()
        publisher.publish()
    assert publisher._history.n_bytes > 1 << 16
    assert "merged" not in [m.kind for m in Subscriber(store).refresh()]


def test_what_saves_too_few_bytes_is_not_published(monkeypatch):
    """Enough changes fall together to fold them, but their bytes are more than three quarters."""

    def merged() -> list[tuple[int, int]]:
        run = Run(0)
        flat = run.weights.tensors["matrix"].view(-1).view(torch.int16)
        for _ in range(4):
            flat[torch.from_numpy(rng.choice(700_000, 60_000, replace=False))] += 1
            run.publisher.publish()
        return run.merged()

    rng = np.random.default_rng(11)
    assert merged() == []
    monkeypatch.setattr(coding_module, "most_bytes", lambda window: 1e9)
    assert merged() == [(0, 4)]


def test_the_larger_stride_may_pay_where_the_smaller_does_not():
    """Four steps change weights of their own, sixteen the same ones again and again."""
    run = Run(0)
    parts = np.array_split(run.weights.hot, 4)
    flat = run.weights.tensors["matrix"].view(-1).view(torch.int16)
    for number in range(16):
        flat[torch.from_numpy(parts[number % 4])] += 1
        run.publisher.publish()
    assert run.merged() == [(0, 16)]
    assert_same(read(run.store), run.weights.bits())


def test_small_channels_and_those_without_strides_have_none():
    assert Run(8, strides=()).merged() == []
    tensors = {"w": torch.zeros(5000)}
    publisher = Publisher(store := MemoryStore(), tensors, settings=settings())
    for _ in range(8):
        tensors["w"][:50] += 1
        publisher.publish()
    kinds = [m.kind for m in Subscriber(store).refresh()]
    assert "merged" not in kinds


def test_other_strides():
    assert Run(6, strides=(2, 6)).merged() == [(0, 2), (2, 4), (4, 6), (0, 6)]


def test_a_tensor_that_was_replaced_on_the_way_is_replaced_by_the_merged_delta():
    run = Run(2)
    run.weights.tensors["norm"][:] *= 1.5
    run.publish()
    run.publish()
    assert run.merged() == [(0, 4)]
    subscriber = Subscriber(run.store)
    (merged,) = [m for m in subscriber.refresh() if m.kind == "merged"]
    changes = {subscriber.schema.tensors[c.tensor].name: c for c in subscriber.changes(merged)}
    assert changes["norm"].bits is not None
    assert changes["n_steps"].bits is not None
    assert changes["matrix"].bits is None
    assert_same(subscriber.materialise(), run.versions[4])


def test_a_restart_begins_to_collect_at_the_next_multiple():
    run = Run(6)
    again = Publisher(run.store, run.weights.tensors, settings=settings())
    for _ in range(12):
        run.weights.step()
        again.publish()
    assert again.version.number == 18
    assert run.merged() == [(0, 4), (8, 12), (12, 16)]
    assert_same(read(run.store), run.weights.bits())


def test_a_new_beginning_is_not_merged_over():
    run = Run(5)
    older = {name: tensor.clone() for name, tensor in run.weights.tensors.items()}
    older["norm"] += 1
    run.weights.tensors = older
    publisher = Publisher(run.store, older, settings=settings())
    for _ in range(8):
        run.weights.step()
        publisher.publish()
    assert publisher.version.number == 14
    assert run.merged() == [(0, 4), (8, 12)]
    subscriber = Subscriber(run.store)
    subscriber.refresh()
    assert subscriber.plan(subscriber.version(4))[0].kind == "anchor"


def test_merged_deltas_delay_the_next_anchor():
    """What a newcomer would read is what decides, and that is less with them."""
    firsts = []
    for strides in ((), (4,)):
        run = Run(12, strides=strides, anchor_ratio=0.35)
        anchors = [m.target.number for m in run.manifests() if m.kind == "anchor"]
        firsts.append(min(filter(None, anchors), default=13))
    assert firsts[0] < firsts[1]


def test_a_history_beyond_its_bound_is_dropped():
    run = Run(0, raw_above=1.0)
    flat = run.weights.tensors["matrix"].view(-1).view(torch.int16)
    for _ in range(4):
        flat[:] += 1
        flat[::3] += 5
        flat[::7] -= 300
        run.publisher.publish()
        held = run.publisher._history.n_bytes
        assert held <= 0.5 * run.publisher._retention.anchor_bytes
    run.publish()
    assert_same(read(run.store), run.weights.bits())


# Hazard


def test_a_hazard_channel_is_rebuilt_from_the_checkpoint_that_it_refers_to():
    run = Run(5, codec="hazard", reference=Reference("someone/model"))
    subscriber = Subscriber(run.store)
    subscriber.refresh()
    assert_same(subscriber.materialise(base=run.versions[0]), run.versions[5])
    with pytest.raises(SettingsError, match="someone/model"):
        subscriber.materialise()
    with pytest.raises(SettingsError, match="someone/model"):
        for _ in replay(subscriber.schema, subscriber.history(), subscriber.changes):
            pass
    with pytest.raises(ValueError, match="weights before"):
        list(subscriber.changes(subscriber.newest_manifest))


def test_shards_and_threads_change_nothing_in_what_is_read():
    payloads = set()
    for shards, n_threads in ((1, 1), (1, 2), (4, 2)):
        run = Run(4, codec="hazard", shards=shards, n_threads=n_threads)
        assert_same(read(run.store), run.versions[4])
        payloads.add(tuple(m.payload_bytes for m in run.manifests()[2:]))
    assert len(payloads) == 2, "threads do not change the bytes"


def test_a_tensor_that_the_encoder_chose_to_replace_is_proven_to_be_the_same():
    """By hazard many scattered changes of random bits are larger than the tensor itself."""
    rng = np.random.default_rng(8)
    tensors = {
        "w": torch.from_numpy(rng.integers(0, 255, 9000, dtype=np.uint8)).view(torch.float8_e4m3fn)
    }
    store = MemoryStore()
    publisher = Publisher(store, tensors, settings=settings("hazard", raw_above=1.0))
    raw = tensors["w"].view(torch.uint8)
    for n in (100, 8000, 9000):
        raw[:n] = torch.from_numpy(rng.integers(0, 255, n, dtype=np.uint8))
        publisher.publish()
        assert_same(read(store), {"w": bits_of(tensors["w"])})
    subscriber = Subscriber(store)
    kinds = [next(subscriber.changes(m)).bits is not None for m in subscriber.refresh()[-1:]]
    assert kinds == [True]


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "zip"},
        {"shards": 0},
        {"n_threads": 0},
        {"strides": (1, 4)},
        {"strides": (4, 6)},
        {"strides": (4, 4)},
        {"strides": (16, 4)},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(SettingsError, match=next(iter(options))):
        PublisherSettings(**options)


def test_the_share_above_which_a_tensor_is_replaced_follows_the_codec():
    assert PublisherSettings().replaced_above == 0.30
    assert PublisherSettings(codec="hazard").replaced_above == 0.75
    assert PublisherSettings(codec="hazard", raw_above=0.0).replaced_above == 0.0
    assert PublisherSettings(strides=(2,)).strides == (2,)
