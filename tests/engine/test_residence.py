"""Staging against weights that move: overlays, turns, and what is dropped when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import Fleet
from tests.engine.halves import (
    copy_of,
    damage,
    halo_is,
    resume,
    stage_all,
    staged,
    step,
    two_ranks,
)
from tests.engine.harness import wait_until
from tests.engine.shards import bits_of
from vllm_delta.engine.turns import Turns
from vllm_delta.errors import BaseMismatchError, EngineError

pytestmark = pytest.mark.engine


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two ranks that each lack some of small tensors."""
    return two_ranks(tmp_path / "channel")


def test_several_versions_are_decoded_on_top_of_each_other(fleet: Fleet) -> None:
    """All of them are staged before any is applied, the halo is asked for once."""
    manifests = [step(fleet) for _ in range(5)]
    fleet.follow(*manifests)
    assert fleet.runs == [5]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)
    assert fleet.calls.count("delta_read") == 1


def test_what_is_too_large_to_keep_is_applied_first(fleet: Fleet) -> None:
    """Where a whole model is replaced the next version waits; it is not kept a second time."""
    first = step(fleet)
    fleet.follow(first)
    resume(fleet, codec="gap", raw_above=0.0)
    manifests = [step(fleet)]
    resume(fleet, codec="hazard", shards=2)
    manifests += [step(fleet), step(fleet)]
    fleet.follow(*manifests)
    assert fleet.runs == [1, 1, 2]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_lanes_after_a_channel_of_gaps_wait_for_them(fleet: Fleet) -> None:
    """Where nothing pointed to lanes, nothing is kept for them: the versions before are committed
    first, by themselves."""
    resume(fleet, codec="gap")
    first = step(fleet)
    fleet.follow(first)
    manifests = [step(fleet)]
    resume(fleet, codec="hazard", shards=2)
    manifests += [step(fleet), step(fleet)]
    fleet.follow(*manifests)
    assert fleet.runs == [1, 1, 1, 1]
    assert fleet.holds()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (8, 2)])
def test_a_channel_may_be_cut_otherwise_from_one_version_to_the_next(
    fleet: Fleet, before: int, after: int
) -> None:
    """Lanes of other tiles may have been left out, so what is decoded there waits or is right."""
    resume(fleet, codec="hazard", shards=before)
    manifests = [step(fleet), step(fleet)]
    resume(fleet, codec="hazard", shards=after)
    manifests += [step(fleet), step(fleet)]
    fleet.follow(*manifests)
    assert sum(fleet.runs) == 4
    assert fleet.holds()


def test_a_base_that_nothing_leads_to_is_refused(fleet: Fleet) -> None:
    """A version is not staged against weights that are not its base."""
    step(fleet)
    second = step(fleet)
    before = copy_of(fleet)
    with pytest.raises(BaseMismatchError, match="base is not resident"):
        fleet.driver.commit([second])
    assert copy_of(fleet) == before


@pytest.mark.parametrize("parameter", ["matrix", "bias", "norm"])
def test_damage_in_a_lane_is_found_while_staging(fleet: Fleet, parameter: str) -> None:
    """Lanes that do not decode say that the weights are wrong: not the bytes, and by name."""
    fleet.follow(step(fleet))
    manifest = step(fleet)
    damage(fleet, 1, parameter)
    before = copy_of(fleet)
    with pytest.raises(BaseMismatchError, match=parameter):
        fleet.follow(manifest)
    assert copy_of(fleet) == before
    damage(fleet, 1, parameter)
    fleet.follow(manifest)
    assert fleet.holds()


def test_a_rollback_drops_what_was_staged_on_top(fleet: Fleet) -> None:
    """It is decoded anew once something leads to its base again."""
    fleet.follow(step(fleet))
    first, second = step(fleet), step(fleet)
    fleet.follow(first)
    stage_all(fleet, second)
    number = second.target.number
    assert staged(fleet) == [[number], [number]]
    fleet.driver.rollback()
    assert staged(fleet) == [[], []]
    assert not fleet.driver.wait_staged(second)
    fleet.follow(first, second)
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_what_lies_on_a_version_that_failed_is_dropped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change between check and apply: the version is taken back, those staged on it
    are gone, and all is well once they are staged again."""
    fleet.follow(step(fleet))
    first, second = step(fleet), step(fleet)
    before = copy_of(fleet)
    rank = fleet.ranks[0]
    apply = rank._patcher.apply

    def another(patch: Any) -> dict[int, int]:
        found = apply(patch)
        return {index: value + 1 for index, value in found.items()}

    stage_all(fleet, first, second)
    for one in fleet.ranks:
        one.check(first.seq)
    monkeypatch.setattr(rank._patcher, "apply", another)
    with pytest.raises(BaseMismatchError, match="between check and apply"):
        rank.apply(first.seq)
    monkeypatch.undo()
    assert copy_of(fleet) == before
    assert rank.status()["staged"] == []
    assert rank.ready(second.seq) == {"ready": False, "waits": True}
    assert fleet.ranks[1].status()["staged"] == [first.target.number, second.target.number]
    fleet.follow(first, second)
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_weights_that_are_half_applied_are_not_read(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decoded against a rank that does not know what it holds."""
    fleet.follow(step(fleet))
    first, second = step(fleet), step(fleet)
    rank = fleet.ranks[0]
    stage_all(fleet, first)
    rank.check(first.seq)

    def broken(patch: Any) -> None:
        bits_of(fleet.shards[0].storages["matrix"])[:] ^= 1
        raise MemoryError

    monkeypatch.setattr(rank._patcher, "apply", broken)
    with pytest.raises(EngineError, match="half applied"):
        rank.apply(first.seq)
    rank.stage([first, second])
    wait_until(lambda: rank.ready(first.seq).get("waits"))
    with pytest.raises(EngineError, match="another version"):
        rank.read(first.base, [])


def test_an_apply_while_lanes_are_decoded_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is applied in the middle of decoding the next: half of the lanes are read before
    it and take it from the overlay, the others after it."""
    fleet.follow(step(fleet))
    first, second = step(fleet), step(fleet)
    stage_all(fleet, first)
    half, go_on = threading.Event(), threading.Event()
    n = 0
    for rank in fleet.ranks:
        gather = rank._patcher.gather

        def slow(run: Any, out: Any, gather: Any = gather, rank: Any = rank) -> int:
            nonlocal n
            n += 1
            if n == 4:
                half.set()
                assert go_on.wait(20)
            return int(gather(run, out))

        monkeypatch.setattr(rank._patcher, "gather", slow)
    fleet.ranks[1].stage([first, second])
    assert half.wait(20)
    # The reader holds its turn: an apply begins to wait, the reader goes on, the apply follows.
    rank = fleet.ranks[1]
    rank.check(first.seq)
    applying = threading.Thread(target=rank.apply, args=(first.seq,))
    applying.start()
    wait_until(lambda: rank._turns._n_changing)
    assert rank.version == first.base
    go_on.set()
    applying.join(20)
    assert rank.version == first.target
    wait_until(lambda: rank.ready(second.seq)["ready"])
    assert n > 4
    fleet.ranks[0].check(first.seq)
    fleet.ranks[0].apply(first.seq)
    fleet.ledger.adopt(first.target, fleet.driver.scan())
    fleet.driver.ledger.adopt(first.target, fleet.ledger.fingerprints)
    fleet.follow(second)
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_whoever_changes_weights_waits_for_one_reader_only() -> None:
    """A reader that comes later lets it go first, however many there are."""
    turns, order, inside, leave = Turns(), [], threading.Event(), threading.Event()

    def read(name: str, wait: bool) -> None:
        with turns.reading():
            order.append(name)
            if wait:
                inside.set()
                assert leave.wait(20)

    def change() -> None:
        with turns.changing():
            order.append("change")

    first = threading.Thread(target=read, args=("first", True))
    first.start()
    assert inside.wait(20)
    changing = threading.Thread(target=change)
    changing.start()
    wait_until(lambda: turns._n_changing)
    later = threading.Thread(target=read, args=("later", False))
    later.start()
    leave.set()
    for thread in (first, changing, later):
        thread.join(20)
    assert order == ["first", "change", "later"]


def test_staged_bytes_count_what_is_kept_to_decode_on(fleet: Fleet) -> None:
    """The status counts patches and overlays, and both are gone once they are applied."""
    manifests = [step(fleet), step(fleet)]
    stage_all(fleet, *manifests)
    rank = fleet.ranks[0]
    patches = sum(one.patch.n_bytes for one in rank._stager.all())
    kept = sum(one.overlay.n_bytes for one in rank._stager.all())
    assert kept > 0
    assert rank.status()["staged_bytes"] == patches + kept
    fleet.follow(*manifests)
    assert rank.status()["staged_bytes"] == 0
