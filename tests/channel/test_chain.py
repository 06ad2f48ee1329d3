from __future__ import annotations

from typing import Any

import pytest

from tests.channel.toy import (
    START,
    append_anchor,
    append_delta,
    append_merged,
    begin,
    fetched,
    moved,
    plant,
    replay,
    root_of,
)
from vllm_delta.channel import Log, Record, verify_link
from vllm_delta.errors import (
    ChainError,
    FormatError,
)
from vllm_delta.format import (
    HEAD_KEY,
    MAX_SEQ,
    BlobRef,
    Version,
    manifest_key,
)
from vllm_delta.testing import MemoryStore


def test_nothing_new_is_not_an_error() -> None:
    log = Log(MemoryStore())
    assert log.read_next(None) is None
    begin(log, 1)
    record = None
    seen = []
    while (record := log.read_next(record)) is not None:
        seen.append(record.seq)
        last = record
    assert seen == [1, 2, 3]
    assert log.read_next(last) is None
    assert log.read(0) is log.read(-1) is log.read(MAX_SEQ + 1) is None


def test_a_gap_is_named() -> None:
    store = MemoryStore()
    begin(Log(store), 5)
    store.delete([manifest_key(4)])
    reader = Log(store)
    tail = reader.tail()
    assert tail is not None
    assert tail.seq == 7, "head still shows what lies beyond the gap"
    with pytest.raises(ChainError, match="missing") as caught:
        reader.read_from_anchor(tail)
    assert caught.value.seq == 4
    previous = list(reader.read_chain(1, 3))[-1]
    with pytest.raises(ChainError, match="missing") as caught:
        reader.read_next(previous)
    assert (caught.value.seq, caught.value.last) == (4, 7)


@pytest.mark.parametrize("head", [b'{"seq":5}', b'{"seq":6}', b'{"seq":999999999999}', b"x", None])
def test_a_forged_head_makes_no_gap(head: bytes | None) -> None:
    store = MemoryStore()
    log = Log(store)
    begin(log, 2)
    if head is None:
        store.delete([HEAD_KEY])
    else:
        store.put(HEAD_KEY, head)
    assert Log(store).read_next(log.position) is None


def test_a_record_that_comes_between_two_reads_is_no_gap() -> None:
    class Late(MemoryStore):
        hidden = True

        def get(self, key: str, *, max_bytes: int) -> bytes | None:
            if key == manifest_key(4) and self.hidden:
                self.hidden = False
                return None
            return super().get(key, max_bytes=max_bytes)

    store = Late()
    store.hidden = False
    log = Log(store)
    begin(log, 3)
    store.hidden = True
    third = log.read(3)
    assert log.read_next(third) == log.read(4)


def test_a_record_of_another_channel_is_refused() -> None:
    ours, theirs = MemoryStore(), MemoryStore()
    begin(Log(ours), 2)
    begin(Log(theirs), 3)
    reader = Log(ours)
    last = list(reader.read_chain(1, 4))[-1]
    ours.put(manifest_key(5), fetched(theirs, manifest_key(5)))
    with pytest.raises(ChainError, match="'channel'"):
        reader.read_next(last)


def test_a_replayed_record_is_refused_in_another_place() -> None:
    store = MemoryStore()
    begin(Log(store), 2)
    store.put(manifest_key(5), fetched(store, manifest_key(4)))
    with pytest.raises(ChainError, match="another's place"):
        Log(store).read(5)


def test_a_fork_is_refused() -> None:
    """An older epoch's record written over the fence that ended it."""
    store = MemoryStore()
    old = Log(store)
    weights = begin(old, 1)
    branch = MemoryStore()
    for key in store.list(""):
        branch.put(key, fetched(store, key))
    append_delta(old, weights, 0, 7)
    forked = Log(branch)
    forked.claim("new")
    append_delta(forked, weights, 1, 1)
    reader = Log(branch)
    last = list(reader.read_chain(1, 4))[-1]
    branch.put(manifest_key(4), fetched(store, manifest_key(4)))
    with pytest.raises(ChainError, match=r"'epoch'|'parent'"):
        list(Log(branch).read_chain(1, 5))
    assert reader.read_next(last) is not None, "who has the true record goes on"


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_fence_raises_the_epoch_by_one(epoch: int) -> None:
    store = MemoryStore()
    begin(Log(store), 1)
    Log(store).claim("next")
    plant(store, 4, epoch=epoch)
    with pytest.raises(ChainError, match="'epoch'"):
        list(Log(store).read_chain(1, 4))


def test_a_fence_may_not_move_the_version() -> None:
    store = MemoryStore()
    begin(Log(store), 1)
    Log(store).claim("next")
    other = Version(1, "9" * 64)
    plant(store, 4, base=other, target=other)
    with pytest.raises(ChainError, match="'base'"):
        list(Log(store).read_chain(1, 4))


@pytest.mark.parametrize(
    "target", [Version(1, "9" * 64), Version(2, "9" * 64), Version(0, root_of(START))]
)
def test_an_anchor_may_not_move_the_version(target: Version) -> None:
    store = MemoryStore()
    log = Log(store)
    append_anchor(log, begin(log, 1))
    plant(store, 4, target=target)
    with pytest.raises(ChainError, match="'target'"):
        list(Log(store).read_chain(1, 4))


@pytest.mark.parametrize(
    "changes",
    [
        {"target": Version(3, "9" * 64)},
        {"target": Version(4, "9" * 64)},
        {"target": Version(2, "9" * 64)},
        {"anchor": 6},
        {"epoch": 2},
    ],
    ids=str,
)
def test_a_merged_delta_may_not_move_the_version_or_anything_else(changes: dict[str, Any]) -> None:
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 3)
    base = log.read(2).manifest.target
    append_merged(log, base, START, weights)
    records = list(log.read_chain(1, 6))
    assert records[-1].manifest.target == records[-2].manifest.target
    assert replay(log, records) == weights
    append_delta(log, weights, 0, 1)
    assert [record.seq for record in log.read_chain(1, 7)] == [*range(1, 8)]
    plant(store, 6, **changes)
    with pytest.raises((ChainError, FormatError)):
        list(Log(store).read_chain(1, 6))


@pytest.mark.parametrize("base", [Version(3, "9" * 64), Version(2, "9" * 64), None])
def test_a_merged_delta_over_less_than_two_versions_is_not_written(base: Version | None) -> None:
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 3)
    before = store.list("m/")
    with pytest.raises(ValueError, match="do not fit"):
        append_merged(log, base, START, weights)
    assert store.list("m/") == before
    append_merged(log, Version(1, "9" * 64), START, weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 2},
        {"base": Version(0, "0" * 64), "target": Version(0, "0" * 64),
         "schema": BlobRef("0" * 64, 1)},
    ],
)  # fmt: skip
def test_the_first_record_is_a_fence_of_nothing(changes: dict[str, Any]) -> None:
    store = MemoryStore()
    Log(store).claim("trainer")
    assert Log(store).read_next(None) is not None
    plant(store, 1, **changes)
    with pytest.raises(ChainError, match="does not continue"):
        Log(store).read_next(None)


def test_a_chain_may_begin_at_an_anchor_but_nowhere_else() -> None:
    store = MemoryStore()
    log = Log(store)
    append_anchor(log, begin(log, 2))
    reader = Log(store)
    assert [r.seq for r in reader.read_chain(5, 5)] == [5]
    with pytest.raises(ChainError, match="not an anchor"):
        list(reader.read_chain(3, 5))
    previous = reader.read(2)
    assert [r.seq for r in reader.read_chain(3, 5, previous=previous)] == [3, 4, 5]
    with pytest.raises(ValueError, match="previous"):
        list(reader.read_chain(4, 5, previous=previous))


def test_the_newest_anchor_is_enough_to_verify_from() -> None:
    """What lies before it may be damaged beyond reading."""
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 2)
    append_anchor(log, weights)
    append_delta(log, weights, 2, 2)
    for seq in range(1, 5):
        store.put(manifest_key(seq), b"damaged")
    reader = Log(store)
    records = reader.read_from_anchor(reader.tail())
    assert [record.seq for record in records] == [5, 6]
    assert replay(reader, records) == moved(weights, 2, 2)


def test_a_channel_without_an_anchor_verifies_from_its_first_record() -> None:
    store = MemoryStore()
    Log(store).claim("one")
    Log(store).claim("two")
    reader = Log(store)
    assert [record.seq for record in reader.read_from_anchor(reader.tail())] == [1, 2]


def test_a_tail_replaced_while_its_chain_is_read_is_refused() -> None:
    store = MemoryStore()
    log = Log(store)
    begin(log, 2)
    tail = log.tail()
    plant(store, 4, time=1.0)
    with pytest.raises(ChainError, match="replaced"):
        log.read_from_anchor(tail)
    assert log.read_from_anchor(log.tail())[-1].manifest.time == 1.0


def test_a_tail_that_names_a_false_anchor_is_refused() -> None:
    store = MemoryStore()
    begin(Log(store), 2)
    plant(store, 4, anchor=3)
    reader = Log(store)
    with pytest.raises(ChainError, match="not an anchor"):
        reader.read_from_anchor(reader.tail())


def test_links_are_verified_on_records_alone() -> None:
    log = Log(MemoryStore())
    begin(log, 1)
    records: list[Record] = list(log.read_chain(1, 3))
    verify_link(None, records[0])
    verify_link(records[1], records[2])
    for previous, record in (
        (None, records[1]),
        (records[0], records[2]),
        (records[2], records[1]),
    ):
        with pytest.raises(ChainError):
            verify_link(previous, record)
