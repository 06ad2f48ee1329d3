"""A trainer that deletes never takes what a reader may need, whatever fails, dies or lags."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.keeping import DAY, HOUR, Clock, Run, assert_all_versions_stand
from tests.nets import Net, assert_same, expected, nudge, read, spoil
from vllm_delta.channel import Keys, LocalStore, Log
from vllm_delta.channel import collect as collect_module
from vllm_delta.channel.contest import Contest
from vllm_delta.errors import ChannelError, FencedError
from vllm_delta.events import Clashed, Collected, Failed
from vllm_delta.format import blob_key
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash

KEEPING = {"anchor_every_s": None, "retain_s": DAY, "grace_s": HOUR}


def named(store) -> set[str]:
    """Keys of all objects that the records from the low-water mark on name."""
    log = Log(store)
    tail = log.tail().manifest
    records = [log.read(seq).manifest for seq in range(tail.low, tail.seq + 1)]
    keys = {blob_key(ref.sha256) for manifest in records for ref in manifest.blobs}
    return keys | {blob_key(tail.schema.sha256)}


def raised(run: Run) -> Run:
    """Publish until the low-water mark has risen past some deltas."""
    for _ in range(3):
        run.publish()
    run.publisher.anchor()
    run.clock.go(DAY)
    run.publish()
    assert run.tail().low > 1
    return run


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "channel")


def test_what_is_below_the_mark_goes_after_the_grace_and_is_told_in_bytes(store):
    run = raised(Run(store, **KEEPING))
    doomed = set(store.list("b/")) - named(store)
    n_bytes = sum(len(store.get(key, max_bytes=1 << 30)) for key in doomed)
    assert len(doomed) == 4
    run.clock.go(HOUR - 1)
    run.publisher.publish()
    assert doomed <= set(store.list("b/"))
    run.clock.go(1)
    assert run.publisher.publish().kind == "none"
    assert set(store.list("b/")) == named(store)
    assert [e for e in run.events if isinstance(e, Collected)] == [Collected(4, n_bytes)]
    assert_all_versions_stand(store, run.truth)
    run.publish()
    assert_all_versions_stand(store, run.truth)


def test_a_reader_that_planned_before_the_mark_rose_has_the_grace_to_fetch(store):
    run = Run(store, **KEEPING)
    plan = Log(store).tail().manifest
    raised(run)
    assert run.tail().low > plan.seq
    assert Log(store).get_blob(plan, 0)


def test_what_a_dead_trainer_left_unnamed_goes_after_the_grace():
    """Its blobs were written, its record was not."""
    store, clock = MemoryStore(), Clock()
    run = Run(store, clock, **KEEPING)
    channel = FaultyChannel(store)
    run = Run(channel, clock, run.net, **KEEPING)
    before = set(store.list("b/"))
    channel.script([None, "crash"])
    with pytest.raises(SimulatedCrash):
        run.publish()
    orphans = set(store.list("b/")) - before
    assert orphans
    successor = Run(store, clock, run.net, **KEEPING)
    successor.publish()
    assert orphans <= set(store.list("b/"))
    clock.go(HOUR)
    successor.publish()
    assert set(store.list("b/")) == named(store)
    (collected,) = [e for e in successor.events if isinstance(e, Collected)]
    assert collected == Collected(len(orphans), None)
    assert_same(read(store), expected(run.net))


def test_a_trainer_that_dies_anywhere_in_a_collecting_publish_loses_nothing(monkeypatch):
    """And whoever comes next has what is left collected after the grace."""
    monkeypatch.setattr(collect_module, "_BATCH", 1)
    at, n_half_done = 0, 0
    while True:
        store, clock = MemoryStore(), Clock()
        run = raised(Run(FaultyChannel(store), clock, **KEEPING))
        run.publisher.anchor()
        clock.go(HOUR)
        run.store.crash_at = run.store.n_calls + at
        doomed = set(store.list("b/")) - named(store)
        died = False
        try:
            run.publish()
        except SimulatedCrash:
            died = True
        run.truth.setdefault(read_root(store), expected(run.net))
        n_half_done += 0 < len(doomed & set(store.list("b/"))) < len(doomed)
        assert named(store) <= set(store.list("b/"))
        assert_all_versions_stand(store, run.truth)
        successor = Run(store, clock, run.net, **KEEPING)
        truth = run.truth | successor.truth
        successor.publish()
        clock.go(HOUR)
        successor.publish()
        assert set(store.list("b/")) == named(store)
        assert_all_versions_stand(store, truth | successor.truth)
        if not died:
            break
        at += 1
    assert at > 8
    assert n_half_done > 3


def read_root(store) -> str:
    return Log(store).tail().manifest.target.root


def test_a_fenced_owner_deletes_nothing_though_it_does_not_know_yet():
    run = raised(Run(**KEEPING))
    run.clock.go(HOUR)
    successor = Run(run.store, run.clock, run.net, **KEEPING)
    before = run.store.list("b/")
    assert run.publisher.publish().kind == "none"
    assert run.store.list("b/") == before
    (failed,) = [e for e in run.events if isinstance(e, Failed)]
    assert (failed.operation, type(failed.error)) == ("collect", FencedError)
    with pytest.raises(FencedError):
        run.publish()
    successor.publish()
    assert_all_versions_stand(run.store, run.truth | successor.truth)


def test_a_delete_that_comes_after_a_successor_published_the_same_weights_hits_nothing(store):
    clock = Clock()
    channel = FaultyChannel(store)
    run = raised(Run(channel, clock, **KEEPING))
    older = Net()  # what version 0 held, which is about to go
    clock.go(HOUR)
    doomed = set(store.list("b/")) - named(store)
    # the tail, read by `head` in four calls, then the delete
    channel.script([*[None] * 4, "late"])
    run.publisher.publish()
    assert channel.suffered == ["late"]
    assert doomed <= set(store.list("b/"))
    successor = Run(store, clock, older, **KEEPING)
    assert_same(read(store), expected(older))
    assert channel.deliver() == 1
    assert not doomed & set(store.list("b/"))
    assert_all_versions_stand(store, run.truth | successor.truth)
    successor.publish()
    assert_all_versions_stand(store, run.truth | successor.truth)


def test_a_stale_listing_only_delays():
    store, clock = MemoryStore(), Clock()
    channel = FaultyChannel(store, rates={"stale_list": 1.0}, seed=3)
    run = raised(Run(channel, clock, **KEEPING))
    assert channel.suffered.count("stale_list") >= 2
    for number in range(5):
        clock.go(DAY)
        run.publish(4 + number)
        run.publisher.anchor()
        assert named(store) <= set(store.list("b/"))
        assert_all_versions_stand(store, run.truth)
    assert run.n_collected() > 4


class Haunted(MemoryStore):
    """Its listings still show all that was ever deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[str] = set()

    def delete(self, keys) -> None:
        keys = list(keys)
        self.gone |= set(keys)
        super().delete(keys)

    def list(self, prefix: str) -> list[str]:
        ghosts = {key for key in self.gone if key.startswith(prefix)}
        return sorted({*super().list(prefix), *ghosts})


def test_a_listing_that_shows_what_is_gone_harms_nothing():
    run = raised(Run(Haunted(), **KEEPING))
    for _ in range(4):
        run.clock.go(DAY)
        run.publish()
        run.publisher.anchor()
        assert_all_versions_stand(run.store, run.truth)
    assert run.n_collected() > 4


def test_a_store_that_cannot_collect_fails_no_publish_and_is_left_alone_for_a_while():
    store, clock = MemoryStore(), Clock()
    channel = FaultyChannel(store)
    run = raised(Run(channel, clock, **KEEPING))
    clock.go(HOUR)
    channel.script(["transport"])
    for _ in range(3):
        assert run.publisher.publish().kind == "none"
    failed = [e for e in run.events if isinstance(e, Failed)]
    assert [(f.operation, type(f.error)) for f in failed] == [("collect", ChannelError)]
    assert run.n_collected() == 0
    clock.go(600)
    run.publisher.publish()
    assert run.n_collected() == 4


class Counting(MemoryStore):
    n_lists = 0

    def list(self, prefix: str) -> list[str]:
        self.n_lists += 1
        return super().list(prefix)


def test_listings_come_with_anchors_and_not_with_every_publish():
    store = Counting()
    run = Run(store, anchor_every_s=6 * HOUR, retain_s=6 * HOUR, grace_s=HOUR)
    for _ in range(100):
        run.clock.go(600)
        run.publish()
    n_anchors = run.kinds().count("anchor")
    assert n_anchors == 3
    assert run.n_collected() > 30
    assert store.n_lists <= 2 * n_anchors + 1


def test_nothing_goes_while_a_record_that_counts_cannot_be_read():
    """Until the mark has risen past it."""
    run = raised(Run(**KEEPING))
    spoil(run.store, run.tail().seq - 1, "damaged")  # the record that the mark is at
    doomed = set(run.store.list("b/"))
    successor = Run(run.store, run.clock, run.net, **KEEPING)
    for _ in range(3):
        run.clock.go(HOUR)
        successor.publish()
    assert doomed <= set(run.store.list("b/"))
    run.clock.go(DAY)
    successor.publish()
    run.clock.go(HOUR)
    successor.publish()
    assert set(run.store.list("b/")) == named(run.store)
    assert_all_versions_stand(run.store, successor.truth)


def test_a_version_restated_twice_is_safe():
    run = Run(**KEEPING)
    for _ in range(4):
        run.publish()
        run.publisher.anchor()
        run.publisher.anchor()
        run.clock.go(DAY + HOUR)
        run.publisher.anchor()
        assert_all_versions_stand(run.store, run.truth)
    assert run.n_collected() > 5


def test_a_sealed_channel_is_kept_small_alike():
    keys = Keys(sealing=(bytes(range(32)),))
    anchor_bytes = Run(keys=keys).tail().payload_bytes
    run = raised(Run(keys=keys, quota_bytes=anchor_bytes + 2000, **KEEPING))
    for number in range(20):
        run.clock.go(HOUR)
        run.publish(3 + number)
        tail = run.tail()
        records = [Log(run.store).read(seq).manifest for seq in range(tail.low, tail.seq + 1)]
        assert sum(m.payload_bytes for m in records) <= anchor_bytes + 2000
        assert_all_versions_stand(run.store, run.truth, keys)
    assert run.n_collected() > 20


class Racing(MemoryStore):
    """A store without put-if-absent."""

    @property
    def atomic(self) -> bool:
        return False


def test_a_rival_is_told_once_and_then_the_version_that_it_overwrote():
    run = Run(Racing(), **KEEPING)
    rival = Contest(run.store)
    run.publish()
    position = run.publisher._log.position
    rival.enter(position.seq, 1)  # an earlier intent of the same epoch, at a place of ours
    run.publish()
    run.publish()
    clashes = [e for e in run.events if isinstance(e, Clashed)]
    assert clashes == [Clashed(position.seq, 1)]
    lost = run.publisher.version
    stolen = run.store.get(f"m/{run.tail().seq - 1:012d}", max_bytes=1 << 20)
    run.store.put(f"m/{run.tail().seq:012d}", stolen)
    for _ in range(2):
        with pytest.raises(FencedError) as fenced:
            run.publish()
        assert fenced.value.lost == str(lost)
    errors = [e.error for e in run.events if isinstance(e, Failed) and e.operation == "publish"]
    assert [error.lost for error in errors] == [str(lost)] * 2


def test_intents_of_dead_trainers_go_where_the_store_cannot_write_if_absent():
    run = Run(Racing(), **KEEPING)
    run.publish()
    run.publish()
    Contest(run.store).enter(run.publisher._log.position.seq, 1)
    stale = {key for key in run.store.list("m/") if "." in key}
    assert len(stale) == 2
    for _ in range(3):
        run.publish()
    run.publisher.anchor()
    left = [key for key in run.store.list("m/") if "." in key]
    assert len(left) == 1
    assert left[0].startswith(f"m/{run.tail().seq:012d}."), "its own"


# Any life

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 40)),
        st.tuples(st.just("go"), st.sampled_from([60.0, HOUR, 5 * HOUR, DAY])),
        st.tuples(st.just("jump"), st.sampled_from([-3 * DAY, 100 * DAY])),
        st.tuples(st.just("anchor"), st.just(0)),
        st.tuples(st.just("restart"), st.sampled_from(["same", "older"])),
        st.tuples(st.just("crash"), st.integers(0, 12)),
    ),
    min_size=10,
    max_size=50,
)


@settings(max_examples=40)
@given(steps=STEPS, anchor_every=st.sampled_from([None, HOUR, 4 * HOUR]), quota=st.booleans())
def test_no_life_of_a_channel_takes_what_a_reader_can_name(steps, anchor_every, quota):
    store, clock = MemoryStore(), Clock()
    keeping = {"anchor_every_s": anchor_every, "retain_s": 2 * HOUR, "grace_s": HOUR / 2}
    if quota:
        keeping["quota_bytes"] = 2 * Run().tail().payload_bytes
    run = Run(FaultyChannel(store), clock, **keeping)
    truth = run.truth
    for step, argument in steps:
        net = run.net
        clock.go(HOUR / 4)
        if step == "go":
            clock.go(argument)
        elif step == "jump":
            clock.now += argument
        elif step == "publish":
            run.publish(argument)
        elif step == "anchor":
            run.publisher.anchor()
        else:
            if step == "crash":
                run.store.crash_at = run.store.n_calls + argument
                nudge(net)
                with contextlib.suppress(SimulatedCrash):
                    run.publisher.publish()
                truth.setdefault(read_root(store), expected(net))
            elif argument == "older":
                net = Net()
            run = Run(FaultyChannel(store), clock, net, **keeping)
        truth |= run.truth
        assert named(store) <= set(store.list("b/"))
        assert_all_versions_stand(store, truth)
