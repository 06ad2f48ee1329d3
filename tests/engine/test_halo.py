"""What a rank keeps of weights that it does not serve: where it comes from, and how it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fleet import Fleet
from tests.engine.halves import (
    copy,
    copy_of,
    halo_is,
    resume,
    stage_all,
    step,
    two_ranks,
)
from tests.engine.harness import wait_until
from vllm_delta.errors import BaseMismatchError, EngineError, SettingsError
from vllm_delta.patch import LackingError

pytestmark = pytest.mark.engine


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two ranks that each lack some of small tensors."""
    return two_ranks(tmp_path / "channel")


def test_the_halo_is_asked_for_once_and_follows(fleet: Fleet) -> None:
    """What a rank lacks it gets from the other with the first delta; from then on it is patched,
    rolled back and patched again with the weights."""
    states = [copy(fleet.trainer.weights)]
    manifests = []
    for _ in range(3):
        manifests.append(step(fleet))
        states.append(copy(fleet.trainer.weights))
        fleet.follow(manifests[-1])
        assert fleet.holds()
        assert halo_is(fleet, states[-1])
    assert fleet.calls.count("delta_read") == 1
    for state in states[-2:0:-1]:
        fleet.driver.rollback()
        assert fleet.holds(state)
        assert halo_is(fleet, state)
    fleet.follow(*manifests[1:])
    assert fleet.holds()
    assert halo_is(fleet, states[-1])
    assert fleet.calls.count("delta_read") == 1
    assert [rank.status()["halo_bytes"] for rank in fleet.ranks] == [976, 1328]


def test_longer_and_shorter_lanes_need_nothing_new(fleet: Fleet) -> None:
    """A unit is patched whole, also in lanes that the rank holds nothing of."""
    for changes_in_lane in (8, 64, 8, 1000, 16):
        fleet.follow(step(fleet, changes_in_lane=changes_in_lane))
        assert fleet.holds()
        assert halo_is(fleet, fleet.trainer.weights)
    assert fleet.calls.count("delta_read") == 1


def test_a_halo_follows_versions_that_were_staged_before_it_came(fleet: Fleet) -> None:
    """It comes with the second version, of the resident one's bits, and goes with both."""
    fleet.follow(step(fleet, only="matrix"), step(fleet))
    assert fleet.runs == [2]
    assert fleet.calls.count("delta_read") == 1
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_a_halo_is_of_one_version(fleet: Fleet) -> None:
    """It is not there for any other, whichever way that came about."""
    manifest = step(fleet)
    fleet.follow(manifest)
    halo = fleet.ranks[0]._residence.halo
    unit = halo.units[0]
    assert halo.has(unit, manifest.target)
    assert not halo.has(unit, manifest.base)
    with pytest.raises(LackingError):
        halo.fill(np.zeros(unit.n, np.uint16), unit, manifest.base)


@pytest.mark.parametrize("between", ["gap", "raw", "both"])
def test_other_codecs_in_between_move_the_halo_too(fleet: Fleet, between: str) -> None:
    """A delta by gap, and tensors that are replaced, lead on as lanes do: below and above."""
    manifests = [step(fleet)]
    if between != "raw":
        resume(fleet, codec="gap")
        manifests.append(step(fleet))
    if between != "gap":
        resume(fleet, codec="gap", raw_above=0.0)
        manifests.append(step(fleet, only="small"))
    resume(fleet, codec="hazard", shards=2)
    manifests += [step(fleet), step(fleet)]
    first, *rest = manifests
    fleet.follow(first)
    fleet.follow(*rest)
    assert fleet.runs == [1, len(rest)]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)
    assert fleet.calls.count("delta_read") == 1
    for _ in rest:
        fleet.driver.rollback()
    fleet.follow(*rest)
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_what_does_not_fit_into_the_halo_makes_room(fleet: Fleet) -> None:
    """A halo keeps what is needed now, and forgets the rest where both would be too much."""
    fleet.follow(step(fleet, only="bias"))
    halo = fleet.ranks[0]._residence.halo
    halo.limit_bytes = 900  # the bias takes 848, the small matrix 128
    fleet.follow(step(fleet, only="small"))
    assert [fleet.schema.tensors[unit.tensor].name for unit in halo.units] == ["small"]
    assert fleet.holds()
    with pytest.raises(SettingsError, match="bias"):
        fleet.follow(step(fleet))
    assert halo.n_bytes == 128


def test_what_was_left_out_is_known(fleet: Fleet) -> None:
    """A small tensor is cut in one version, where each rank decodes its own tiles only, and whole
    in the next: that one waits, since nobody knows the bits between; and the halo of the tensor
    ends where it was cut."""
    manifests = [step(fleet, changes_in_tile=1), step(fleet)]
    fleet.follow(*manifests)
    assert fleet.runs == [1, 1]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)
    fleet.follow(step(fleet, changes_in_tile=1))
    assert fleet.holds()
    assert not halo_is(fleet, fleet.trainer.weights)
    fleet.follow(step(fleet))
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_an_anchor_in_between_starts_anew(fleet: Fleet) -> None:
    """The halo is dropped with what it belonged to, and asked for again."""
    fleet.follow(step(fleet))
    step(fleet)
    fleet.trainer.publisher.anchor()
    anchor = fleet.trainer.newest()
    after = [step(fleet), step(fleet)]
    fleet.follow(anchor, *after)
    assert fleet.runs == [1, 1, 2]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)
    assert fleet.calls.count("delta_read") == 2


def test_a_damaged_halo_is_found_and_asked_for_again(fleet: Fleet) -> None:
    """Nothing but a lane's hash proves the halo: it fails, and the next try has good bits."""
    fleet.follow(step(fleet))
    manifest = step(fleet)
    for kept in fleet.ranks[0]._residence.halo._kept.values():
        kept.bits[3:9] ^= 0x2000
    before = copy_of(fleet)
    with pytest.raises(BaseMismatchError, match="bias"):
        fleet.follow(manifest)
    assert copy_of(fleet) == before
    fleet.follow(manifest)
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)


def test_bits_supplied_in_the_middle_of_a_try_do_not_make_it_whole(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank lacked the same and was answered: what was left out before that stays out."""
    manifest = step(fleet)
    residence = fleet.ranks[0]._residence
    lacks, found = residence.lacks, []

    def only_at_first(units: Any, base: Any) -> Any:
        found.append(lacks(units, base))
        return found[-1] if len(found) == 1 else []

    monkeypatch.setattr(residence, "lacks", only_at_first)
    fleet.ranks[0].stage([manifest])
    answer = wait_until(
        lambda: (said := fleet.ranks[0].ready(manifest.seq)) != {"ready": False} and said
    )
    assert len(found) > 1
    assert (answer["ready"], len(answer["lacks"])) == (False, len(found[0]))


def test_bits_that_nobody_has_are_an_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A halo is whole or not there."""
    manifest = step(fleet)
    monkeypatch.setattr(fleet.ranks[1]._residence, "read", lambda units: [])
    with pytest.raises(EngineError, match="no rank has bits"):
        fleet.follow(manifest)
    monkeypatch.undo()
    fleet.follow(manifest)
    assert fleet.holds()


def test_a_halo_that_came_after_a_replacement_does_not_go_back_with_it(fleet: Fleet) -> None:
    """What replaces a tensor whole exchanges bits with the halo: it has the old ones only if the
    halo was there when the weights moved."""
    first = step(fleet)
    fleet.follow(first)
    second = step(fleet)
    resume(fleet, codec="gap", raw_above=0.0)
    third = step(fleet)
    resume(fleet, codec="hazard", shards=2)
    fourth = step(fleet)
    fleet.follow(second)
    stage_all(fleet, third)
    for rank in fleet.ranks:
        rank._residence.distrust()
    fleet.follow(third)
    fleet.follow(fourth)
    assert fleet.holds()
    for _ in range(3):
        fleet.driver.rollback()
    fleet.follow(second, third, fourth)
    assert fleet.holds()
