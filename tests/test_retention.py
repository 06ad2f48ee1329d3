"""What stays on a channel and what goes: anchors by cost and time, the low-water mark, quotas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests import merging
from tests.keeping import DAY, HOUR, Clock, Run, assert_all_versions_stand
from tests.nets import BF16, Net, assert_same, expected, nudge, read
from vllm_delta.channel import LocalStore, Log
from vllm_delta.channel.chain import fence_after
from vllm_delta.codec.order import add_steps
from vllm_delta.commit import PublisherSettings
from vllm_delta.errors import ChannelFullError, SettingsError
from vllm_delta.format import BlobRef, Reference, Version, blob_key
from vllm_delta.publisher import Publisher
from vllm_delta.retention import Retention
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "channel")


# Anchors


def test_an_anchor_is_written_once_the_newest_is_old_and_there_is_something_new():
    run = Run(anchor_every_s=12 * HOUR)
    for _ in range(11):
        run.clock.go(HOUR)
        assert run.publish().kind == "delta"
    assert run.kinds().count("anchor") == 1
    run.clock.go(HOUR)
    run.publish()
    assert run.kinds()[-2:] == ["delta", "anchor"]
    run.clock.go(5 * DAY)
    assert run.publisher.publish().kind == "none"
    assert run.kinds().count("anchor") == 2


def test_without_an_interval_age_makes_no_anchor_due():
    run = Run(anchor_every_s=None)
    for _ in range(5):
        run.clock.go(30 * DAY)
        run.publish()
    assert run.kinds() == ["anchor", *["delta"] * 5]


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_set_back_delays_anchors_and_does_not_stop_them(restart):
    run = Run(anchor_every_s=12 * HOUR)
    run.clock.go(6 * HOUR)
    run.publish()
    run.clock.now -= 1000 * DAY
    n_hours = 0
    while run.kinds().count("anchor") < 2:
        run.clock.go(HOUR)
        if restart:
            events = run.events
            run = Run(run.store, run.clock, run.net, anchor_every_s=12 * HOUR)
            run.events[:0] = events
        run.publish()
        n_hours += 1
    assert n_hours <= 8, "the hour of the step back is lost, and no more"


def test_a_clock_that_jumps_ahead_makes_one_anchor_too_early():
    run = Run(anchor_every_s=12 * HOUR)
    run.publish()
    run.clock.now += 3000 * DAY
    for _ in range(11):
        run.publish()
        run.clock.go(HOUR)
    assert run.kinds().count("anchor") == 2


def take(retention, tail, kind, n_bytes, number, base=None, **more):
    """Have `retention` count a record of so many bytes; its version is told by its number."""
    manifest = replace(
        fence_after(tail, "w", more.pop("time", 0.0)) if tail is None else tail,
        seq=1 if tail is None else tail.seq + 1,
        kind=kind,
        base=None if base is None else Version(base, "0" * 64),
        target=Version(number, "0" * 64),
        blobs=(BlobRef(f"{0 if tail is None else tail.seq:064x}", n_bytes),),
        **more,
    )
    retention.take(manifest)
    return manifest


def counting(**settings) -> Retention:
    settings = PublisherSettings(anchor_every_s=None, **settings)
    clock = Clock()
    return Retention(
        Log(MemoryStore()), settings, model_bytes=1000, clock=clock, timer=clock, hooks=[]
    )


def test_what_counts_against_an_anchor_is_what_a_newcomer_would_take():
    """A merged delta shortens the way; one that begins before the anchor is none from it."""
    retention = counting(anchor_ratio=0.5)
    tail = take(retention, None, "anchor", 100, 0)
    for number in range(1, 5):
        tail = take(retention, tail, "delta", 10, number, number - 1)
    assert retention.catch_up_bytes == 40
    tail = take(retention, tail, "merged", 15, 4, 0)
    assert retention.catch_up_bytes == 15
    tail = take(retention, tail, "merged", 16, 4, 0)
    assert retention.catch_up_bytes == 15
    tail = take(retention, tail, "delta", 35, 5, 4)
    assert not retention.anchor_due()
    tail = take(retention, tail, "delta", 1, 6, 5)
    assert (retention.catch_up_bytes, retention.anchor_due()) == (51, True)
    tail = take(retention, tail, "anchor", 100, 6, anchor=tail.seq + 1)
    tail = take(retention, tail, "merged", 1, 6, 4)
    assert (retention.catch_up_bytes, retention.anchor_due()) == (0, False)
    take(retention, tail, "delta", 51, 7, 6)
    assert (retention.catch_up_bytes, retention.anchor_due()) == (51, True)


def test_an_anchor_by_reference_counts_as_the_whole_model():
    retention = counting()
    tail = take(retention, None, "anchor", 10, 0, reference=Reference("some/model"))
    tail = take(retention, replace(tail, reference=None), "delta", 1000, 1, 0)
    assert not retention.anchor_due()
    take(retention, tail, "delta", 1, 2, 1)
    assert retention.anchor_due()


# The low-water mark


def test_a_reader_away_for_a_day_comes_back_by_deltas_and_one_away_for_longer_by_an_anchor(store):
    run = Run(store, anchor_every_s=6 * HOUR, retain_s=DAY, grace_s=HOUR)
    held = []
    for _ in range(60):
        subscriber = Subscriber(store)
        subscriber.refresh()
        held.append((run.clock.now, subscriber.newest))
        run.clock.go(HOUR)
        run.publish()
        subscriber = Subscriber(store)
        subscriber.refresh()
        least = subscriber.newest_manifest.low
        assert subscriber.history()[least - 1].kind in ("anchor", "fence")
        for since, version in held:
            numbers = [m.target.number for m in subscriber._held() if m.kind == "delta"]
            if run.clock.now - since <= DAY:
                # All deltas from there are kept, and so are their blobs.
                assert set(range(version.number + 1, subscriber.newest.number + 1)) <= set(numbers)
            if run.clock.now - since > DAY + 7 * HOUR:
                assert version.number + 1 not in numbers
    assert run.n_collected() > 20
    anchors = {m.seq for m in subscriber._held() if m.kind == "anchor"}
    for hours, without in ((24, anchors), (40, set())):
        since, version = held[60 - hours]
        assert run.clock.now - since == hours * HOUR
        plan = subscriber.plan(version, without=without)
        assert plan[0].kind == ("delta" if without else "anchor")
        assert_same(applied(subscriber, plan, run.truth[version.root]), expected(run.net))
    assert_same(read(store), expected(run.net))
    assert assert_all_versions_stand(store, run.truth) > 24


def applied(subscriber, plan, weights):
    """What a reader that holds `weights` makes of a plan."""
    bits = {name: values.reshape(-1).copy() for name, values in weights.items()}
    for manifest in plan:
        for change in subscriber.changes(manifest):
            flat = bits[subscriber.schema.tensors[change.tensor].name]
            if change.bits is not None:
                flat[:] = change.bits
            else:
                flat[change.indices] = add_steps(flat[change.indices], change.steps)
    return {name: bits[name].reshape(values.shape) for name, values in weights.items()}


def test_the_mark_rises_with_the_next_record_and_makes_none_of_its_own():
    run = Run(anchor_every_s=None, retain_s=DAY)
    run.publish()
    run.publisher.anchor()
    anchor = run.tail().seq
    run.clock.go(DAY - 1)
    run.publish()
    assert run.tail().low == 1
    run.clock.go(1)
    assert run.publisher.publish().kind == "none"
    assert run.tail().low == 1
    run.publish()
    assert (run.tail().low, run.tail().kind) == (anchor, "delta")
    assert run.kinds() == ["anchor", "delta", "anchor", "delta", "delta"]


def test_a_successor_goes_on_with_the_mark_and_raises_it_too():
    run = Run(anchor_every_s=None, retain_s=DAY)
    run.publisher.anchor()
    anchor = run.tail().seq
    run.clock.go(DAY)
    successor = Run(run.store, run.clock, run.net, anchor_every_s=None, retain_s=DAY)
    assert run.tail().low == 1, "a fence restates"
    successor.publish()
    assert run.tail().low == anchor
    assert Run(run.store, run.clock, run.net).tail().low == anchor


def test_all_stays_where_it_is_to_stay_for_ever():
    run = Run(anchor_every_s=DAY, retain_s=math.inf, grace_s=0)
    for _ in range(5):
        run.clock.go(100 * DAY)
        run.publish()
    assert (run.tail().low, run.n_collected()) == (1, 0)


def test_an_anchor_by_reference_may_be_what_the_mark_rises_to():
    store, net, clock = MemoryStore(), Net(), Clock()
    reference, wanted = Reference("some/model"), expected(net)
    settings = PublisherSettings(retain_s=DAY, grace_s=0)
    for _ in range(3):
        older = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        publisher = Publisher(
            store, net, dtype=BF16, reference=reference, settings=settings, clock=clock, timer=clock
        )
        nudge(net)
        clock.go(DAY)
        publisher.publish()
        assert_same(read(store, base=wanted), expected(net))
        newest = expected(net)
        net.load_state_dict(older)
    subscriber = Subscriber(store)
    subscriber.refresh()
    low = subscriber.history()[subscriber.newest_manifest.low - 1]
    assert (low.kind, low.reference, low.seq > 2) == ("anchor", reference, True)
    assert_same(read(store, base=wanted), newest)


# A quota


def held_bytes(store) -> int:
    """What the blobs from the low-water mark on take, as they stand in the store."""
    log = Log(store)
    tail = log.tail().manifest
    records = [log.read(seq).manifest for seq in range(tail.low, tail.seq + 1)]
    keys = {blob_key(ref.sha256) for manifest in records for ref in manifest.blobs}
    return sum(len(store.get(key, max_bytes=1 << 30)) for key in keys)


def test_what_is_kept_never_exceeds_the_quota_and_every_reader_finds_a_way():
    probe = Run()
    anchor_bytes = probe.tail().payload_bytes
    quota_bytes = anchor_bytes + 1200
    run = Run(quota_bytes=quota_bytes, grace_s=HOUR)
    lows = set()
    for number in range(40):
        run.clock.go(1000)
        run.publish(3 + number)
        assert held_bytes(run.store) <= quota_bytes
        assert assert_all_versions_stand(run.store, run.truth) >= 1
        lows.add(run.tail().low)
    assert len(lows) > 4, "deltas alone fill the quota"
    assert run.kinds().count("anchor") == len(lows)
    assert run.kinds().count("delta") == 40
    in_store = sum(len(run.store.get(k, max_bytes=1 << 30)) for k in run.store.list("b/"))
    assert in_store < 5 * quota_bytes, "and what is beyond is collected"


def test_an_anchor_that_is_there_makes_room_before_another_is_written():
    probe = Run()
    anchor_bytes = probe.tail().payload_bytes
    probe.publish()
    run = Run(quota_bytes=2 * anchor_bytes + 2 * probe.tail().payload_bytes, anchor_every_s=None)
    run.publisher.anchor()
    anchor = run.tail().seq
    for _ in range(3):
        run.publish()
    assert run.tail().low == anchor
    assert run.kinds().count("anchor") == 2


def test_an_anchor_that_is_due_may_take_all_of_the_quota():
    anchor_bytes = Run().tail().payload_bytes
    run = Run(quota_bytes=anchor_bytes + 1000, anchor_every_s=HOUR)
    run.clock.go(HOUR)
    run.publish()
    assert (run.tail().kind, run.tail().low) == ("anchor", run.tail().seq)


def test_a_version_that_cannot_fit_is_refused_in_bytes_before_anything_is_written():
    anchor_bytes = Run().tail().payload_bytes
    quota_bytes = anchor_bytes + 400
    run = Run(quota_bytes=quota_bytes)
    before = run.store.list("")
    with torch.no_grad():
        run.net.embed.weight.mul_(1.05)
    for _ in range(2):
        with pytest.raises(ChannelFullError) as full:
            run.publisher.publish()
        assert full.value.quota_bytes == quota_bytes
        assert full.value.needed_bytes > quota_bytes
        assert anchor_bytes <= full.value.held_bytes <= quota_bytes
        assert run.store.list("") == before
    with torch.no_grad():
        for tensor, old in zip(run.net.parameters(), Net().parameters(), strict=True):
            tensor.copy_(old)
    assert run.publish().kind == "delta"


def test_a_first_anchor_larger_than_the_quota_is_refused():
    store = MemoryStore()
    with pytest.raises(ChannelFullError, match="needed_bytes"):
        Run(store, quota_bytes=1000)
    assert store.list("b/") == []


def test_merged_deltas_are_left_out_where_they_would_cost_others_their_way():
    probe = merging.Run(4, strides=(4,), codec="gap")
    sizes = {m.seq: m.payload_bytes for m in probe.manifests() if m.kind == "merged"}
    assert sizes
    for spare, merged in ((200, [(0, 4)]), (-400, [])):
        taken = sum(m.payload_bytes for m in probe.manifests()) + spare
        run = merging.Run(4, strides=(4,), codec="gap", quota_bytes=taken)
        assert run.merged() == merged
        assert [e.kind for e in run.events].count("anchor") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"anchor_every_s": 0},
        {"anchor_every_s": math.nan},
        {"retain_s": -1},
        {"retain_s": math.nan},
        {"grace_s": -1},
        {"quota_bytes": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        PublisherSettings(**settings)
