"""Collecting from the command line: beside a live trainer, or in its place."""

from __future__ import annotations

import pytest

from tests.channel import toy
from tests.channel.hubs import opened
from vllm_delta.channel import LocalStore, Log, open_channel
from vllm_delta.channel.collect import Collector, collect, old_intents, read_back
from vllm_delta.errors import ChainError, ChannelError, FencedError, FormatError
from vllm_delta.events import Collected
from vllm_delta.format import Version, blob_key, manifest_key
from vllm_delta.testing import FaultyChannel, MemoryStore

HOUR = 3600.0


class Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "directory", "hub", "s3"])
def store(request, tmp_path):
    if request.param == "hub":
        return opened(request.getfixturevalue("hub"), request.getfixturevalue("bucket"))
    if request.param == "s3":
        return open_channel(f"s3://{request.getfixturevalue('s3_bucket')}/run")
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "channel")


def keep(log: Log, weights: toy.Weights, low: int) -> toy.Weights:
    """Publish one delta more, and raise the low-water mark with it."""
    number = log.position.manifest.target.number + 1
    moved = toy.moved(weights, 0, 1)
    log.append(
        "delta",
        target=Version(number, toy.root_of(moved)),
        blobs=[log.put_blob(b'{"place": 0, "step": 1}')],
        low=low,
    )
    return moved


def published(store, clock, n_deltas: int = 5):
    """A channel whose mark has risen past some deltas an hour ago: (log, weights, what may go)."""
    log = Log(store, clock=clock)
    weights = toy.begin(log, n_deltas)
    doomed = set(store.list("b/")) - {blob_key(log.position.manifest.schema.sha256)}
    toy.append_anchor(log, weights)
    weights = keep(log, weights, log.position.seq)
    clock.now += HOUR
    return log, weights, doomed


def weights_at(store) -> toy.Weights | None:
    reader = Log(store)
    return toy.replay(reader, reader.read_from_anchor(reader.tail()))


def test_what_is_below_the_mark_goes_and_nothing_else(store):
    clock = Clock()
    log, weights, doomed = published(store, clock)
    orphan = blob_key(log.put_blob(b"never named").sha256)
    before = store.list("")
    n_bytes = sum(len(toy.fetched(store, key)) for key in doomed)
    told = collect(store, clock=clock, dry_run=True)
    assert store.list("") == before
    assert told == Collected(6, n_bytes)
    assert collect(store, clock=clock) == told
    assert store.list("") == sorted(set(before) - doomed)
    assert orphan in before
    assert weights_at(store) == weights
    assert collect(store, clock=clock) == Collected(0, 0)
    keep(log, weights, log.position.manifest.low)
    assert log.position.manifest.epoch == 1, "nobody claimed the channel"


def test_nothing_goes_until_the_mark_has_stood_for_the_grace():
    """The mark, not the newest record; and readers of what it rose past may still be at it."""
    store, clock, said = MemoryStore(), Clock(), []
    log, weights, doomed = published(store, clock)
    clock.now -= 1
    keep(log, weights, log.position.manifest.low)
    before = store.list("")
    for orphans in (False, True):
        assert collect(store, orphans=orphans, clock=clock, say=said.append) == Collected(0, 0)
        assert store.list("") == before
    assert said == ["blobs before record 8 may still be read; they can go in 1 s"] * 2
    clock.now += 1
    assert collect(store, clock=clock).n_objects == len(doomed)


def test_what_was_never_named_takes_owning_the_channel(store):
    clock, said = Clock(), []
    log, weights, doomed = published(store, clock)
    orphan = blob_key(log.put_blob(b"never named").sha256)
    assert collect(store, orphans=True, dry_run=True, clock=clock) == Collected(7, None)
    assert log.tail() == log.position
    if not store.atomic:
        # The trainer's intent is there: its record may still replace the fence and name the blob.
        assert collect(store, orphans=True, clock=clock, say=said.append) == Collected(0, 0)
        assert "nothing is deleted" in said.pop()
        assert {orphan, *doomed} <= set(store.list("b/"))
        said.clear()
    told = collect(store, orphans=True, writer="someone", clock=clock, say=said.append)
    assert told == Collected(7, None)
    assert said == ["the channel is claimed; a trainer that was writing to it is fenced"]
    assert not {orphan, *doomed} & set(store.list("b/"))
    fence = log.tail().manifest
    assert (fence.kind, fence.epoch) == ("fence", 2 if store.atomic else 3)
    assert fence.writer == "someone"
    with pytest.raises(FencedError):
        keep(log, weights, log.position.manifest.low)
    assert weights_at(store) == weights


def test_what_a_trainer_publishes_until_it_is_fenced_stays():
    class Live(MemoryStore):
        """A trainer publishes once more right before somebody else claims the channel."""

        trainer = None

        def put_new(self, key: str, data: bytes) -> bool:
            if self.trainer is not None:
                (log, weights), self.trainer = self.trainer, None
                self.weights = keep(log, weights, log.position.manifest.low)
            return super().put_new(key, data)

    store, clock = Live(), Clock()
    log, weights, doomed = published(store, clock)
    store.trainer = log, weights
    assert collect(store, orphans=True, clock=clock).n_objects == len(doomed)
    assert weights_at(store) == store.weights != weights


def test_orphans_go_where_the_mark_never_rose():
    store, clock = MemoryStore(), Clock()
    log = Log(store, clock=clock)
    weights = toy.begin(log, 2)
    log.put_blob(b"never named")
    assert collect(store, orphans=True, clock=clock) == Collected(1, None)
    assert weights_at(store) == weights


def test_an_owner_in_its_place_that_is_fenced_itself_stops():
    class Contested(MemoryStore):
        """Another trainer claims the channel while it is listed."""

        contested = False

        def list(self, prefix: str) -> list[str]:
            keys = super().list(prefix)
            if self.contested:
                Log(self).claim("another")
            return keys

    store, clock = Contested(), Clock()
    _, weights, _ = published(store, clock)
    store.contested = True
    before = MemoryStore.list(store, "b/")
    with pytest.raises(FencedError):
        collect(store, orphans=True, clock=clock)
    assert MemoryStore.list(store, "b/") == before
    assert weights_at(store) == weights


def test_a_trainer_that_publishes_meanwhile_loses_nothing():
    class Live(MemoryStore):
        """A trainer publishes before and after each call that lists or deletes."""

        trainer = None

        def list(self, prefix: str) -> list[str]:
            self.step()
            keys = super().list(prefix)
            self.step()
            return keys

        def delete(self, keys) -> None:
            self.step()
            super().delete(keys)
            self.step()

        def step(self) -> None:
            if self.trainer is not None:
                log, weights = self.trainer
                weights = keep(log, weights, log.position.manifest.low)
                toy.append_anchor(log, weights)
                self.trainer = log, keep(log, weights, log.position.seq)

    store, clock = Live(), Clock()
    log, weights, doomed = published(store, clock)
    store.trainer = log, weights
    assert collect(store, clock=clock).n_objects == len(doomed)
    assert not doomed & set(MemoryStore.list(store, "b/"))
    log, weights = store.trainer
    assert weights_at(store) == weights


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_nothing_goes_while_a_record_that_counts_cannot_be_read(how):
    store, clock = MemoryStore(), Clock()
    log, weights, _ = published(store, clock)
    keep(log, weights, log.position.manifest.low)
    before = store.list("b/")
    store.delete([manifest_key(log.position.seq - 1)])
    if how == "damaged":
        store.put(manifest_key(log.position.seq - 1), b"{}")
    for orphans in (False, True):
        with pytest.raises(ChainError if how == "missing" else FormatError):
            collect(store, orphans=orphans, clock=clock)
    assert store.list("b/") == before
    assert log.tail() == log.position


def test_an_older_record_that_cannot_be_read_leaves_what_is_older_alone():
    store, clock, said = MemoryStore(), Clock(), []
    _, weights, _ = published(store, clock)
    store.put(manifest_key(4), b"{}")
    assert collect(store, clock=clock, say=said.append).n_objects == 3
    assert len(said) == 1
    assert manifest_key(4) in said[0]
    assert weights_at(store) == weights


def test_old_records_are_read_only_while_objects_are_unaccounted_for():
    store, clock = MemoryStore(), Clock()
    log, weights, _ = published(store, clock, 40)
    toy.append_anchor(log, weights)
    low = log.position.seq
    collect(store, clock=clock)
    weights = keep(log, weights, low)
    clock.now += HOUR
    channel = FaultyChannel(store)
    assert collect(channel, clock=clock).n_objects == 2
    # the tail, the two records from the mark on, those two before it, a listing and a delete
    assert channel.n_calls <= 4 + 1 + 2 + 2
    assert weights_at(store) == weights


def test_an_empty_channel_stays_empty():
    store = MemoryStore()
    for orphans in (False, True):
        assert collect(store, orphans=orphans) == Collected(0, 0)
    assert store.list("") == []


def test_the_schema_of_a_trainer_that_died_before_its_first_anchor_stays():
    """Its successor writes the very same object, which a late delete would hit."""
    store = MemoryStore()
    log = Log(store)
    log.claim("trainer")
    toy.put_schema(log)
    before = store.list("")
    assert collect(store, orphans=True) == Collected(0, 0)
    assert store.list("") == before


def test_a_store_out_of_reach_is_told():
    store, clock = MemoryStore(), Clock()
    published(store, clock)
    with pytest.raises(ChannelError):
        collect(FaultyChannel(store, rates={"transport": 1.0}), clock=clock)


def test_many_records_are_read_back_in_order():
    store = MemoryStore()
    log = Log(store)
    toy.begin(log, 200)
    newest = log.tail()
    assert [record.seq for record in read_back(log, newest, 1)] == list(range(201, 0, -1))
    assert [record.seq for record in read_back(log, newest, 150)] == list(range(201, 149, -1))
    toy.plant(store, 100, time=1.0)
    read = read_back(log, newest, 1)
    assert [record.seq for _, record in zip(range(101), read, strict=False)][-1] == 101
    with pytest.raises(ChainError):
        next(read)


def test_an_owner_reads_the_tail_before_each_batch(monkeypatch):
    monkeypatch.setattr("vllm_delta.channel.collect._BATCH", 2)
    store, clock = MemoryStore(), Clock()
    log, _, doomed = published(store, clock)
    collector = Collector(log, grace_s=0, timer=clock)
    kept = set(store.list("b/")) - doomed
    collector.look(kept)
    sweep = collector.sweep(kept)
    assert len(next(sweep)) == 2
    Log(store).claim("another")
    with pytest.raises(FencedError):
        next(sweep)
    assert len(doomed & set(store.list("b/"))) == len(doomed) - 2


def test_an_object_seen_unnamed_and_named_since_is_not_deleted():
    """It cannot be, since no two writes are of one object; and if it were, it would be kept."""
    store, clock = MemoryStore(), Clock()
    log, _, doomed = published(store, clock)
    collector = Collector(log, grace_s=HOUR, timer=clock)
    collector.look(set(store.list("b/")) - doomed)
    clock.now += HOUR
    assert collector.due
    assert list(collector.sweep(set(store.list("b/")))) == []


def test_intents_that_somebody_may_still_look_at_stay():
    store = MemoryStore()
    names = [f"{manifest_key(seq)}.{seq:032x}" for seq in (3, 120, 198, 199, 200, 201, 202)]
    for name in names:
        store.put(name, b"{}")
    store.put(manifest_key(198), b"{}")
    assert old_intents(store, 201) == names[1:4]
    assert old_intents(store, 1) == []
    assert old_intents(store, 4) == names[:0]
    assert old_intents(store, 5) == names[:1]
