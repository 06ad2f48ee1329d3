"""Staging against weights that move: halos, overlays, and what becomes of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.fleet import (
    Builder,
    Fleet,
    Trainer,
    Weights,
    bits_of,
    random_weights,
    start,
)
from tests.engine.harness import forced, wait_until
from vllm_delta import Publisher
from vllm_delta.engine.turns import Turns
from vllm_delta.errors import BaseMismatchError, EngineError, SettingsError
from vllm_delta.format import Manifest
from vllm_delta.patch import LackingError
from vllm_delta.publisher import PublisherSettings

pytestmark = pytest.mark.engine

SHAPES = {
    "bias": ((1024,), torch.bfloat16),
    "matrix": ((512, 256), torch.bfloat16),
    "norm": ((96,), torch.bfloat16),
    "small": ((8, 16), torch.bfloat16),
}


def halves(builder: Builder, rank: int, n_ranks: int) -> None:
    """The matrix by rows, as it is cut; two small tensors in parts, of which each rank lacks one:
    one in the middle of a lane, one by columns."""
    builder.add("matrix", slice(512 * rank // n_ranks, 512 * (rank + 1) // n_ranks))
    builder.add("bias", slice(0, 600) if rank == 0 else slice(600, 1024))
    builder.add("small", slice(None), slice(16 * rank // n_ranks, 16 * (rank + 1) // n_ranks))
    builder.add("norm")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two ranks, and a trainer that cuts for them; several blobs to a version."""
    trainer = Trainer(tmp_path / "channel", random_weights(SHAPES), shards=2, blob_bytes=2000)
    return start(trainer, halves, 2)


def step(
    fleet: Fleet,
    percent: float = 3.0,
    *,
    changes_in_tile: int = 64,
    changes_in_lane: int = 8,
    only: str = "",
) -> Manifest:
    """Publishes a version. The small tensors stay whole unless tiles may hold little; a lane of
    eight changes has 256 elements."""
    with forced(changes_in_tile=changes_in_tile, changes_in_lane=changes_in_lane):
        return fleet.trainer.step(percent, only=only)


def resume(fleet: Fleet, **settings: Any) -> None:
    """Another trainer goes on with other settings."""
    trainer = fleet.trainer
    plain = {"anchor_ratio": 1e9, "strides": (), "n_threads": 1, "blob_bytes": 2000}
    trainer.publisher = Publisher(
        trainer.channel, trainer.weights, settings=PublisherSettings(**plain | settings)
    )


def copy(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def halo_is(fleet: Fleet, weights: Weights) -> bool:
    """Whether every rank keeps the other's parts of both small tensors, of these weights."""
    for number, rank in enumerate(fleet.ranks):
        other = slice(600, 1024) if number == 0 else slice(0, 600)
        columns = slice(8, 16) if number == 0 else slice(0, 8)
        expected = {
            "bias": weights["bias"][other].contiguous(),
            "small": weights["small"][:, columns].contiguous(),
        }
        found = {
            fleet.schema.tensors[unit.tensor].name: kept
            for unit, kept in rank._residence.halo._kept.items()
        }
        if found.keys() != expected.keys() or any(
            not np.array_equal(kept.bits, bits_of(expected[name])) or kept.version != rank.version
            for name, kept in found.items()
        ):
            return False
    return True


def staged(fleet: Fleet) -> list[list[int]]:
    return [rank.status()["staged"] for rank in fleet.ranks]


def stage_all(fleet: Fleet, *manifests: Manifest) -> None:
    fleet.driver.stage(manifests)
    for manifest in manifests:
        assert fleet.driver.wait_staged(manifest)


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


def test_several_versions_are_decoded_on_top_of_each_other(fleet: Fleet) -> None:
    """All of them are staged before any is applied, the halo is asked for once."""
    manifests = [step(fleet) for _ in range(5)]
    fleet.follow(*manifests)
    assert fleet.runs == [5]
    assert fleet.holds()
    assert halo_is(fleet, fleet.trainer.weights)
    assert fleet.calls.count("delta_read") == 1


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


def test_a_base_that_nothing_leads_to_is_refused(fleet: Fleet) -> None:
    """A version is not staged against weights that are not its base."""
    step(fleet)
    second = step(fleet)
    before = copy_of(fleet)
    with pytest.raises(BaseMismatchError, match="base is not resident"):
        fleet.driver.commit([second])
    assert copy_of(fleet) == before


def copy_of(fleet: Fleet) -> list[bytes]:
    return [
        bits_of(tensor).tobytes()
        for shard in fleet.shards
        for _, tensor in sorted(shard.storages.items())
    ]


def damage(fleet: Fleet, rank: int, parameter: str, place: int = 5) -> None:
    """Turns a high bit of the exponent over."""
    bits_of(fleet.shards[rank].storages[parameter])[place] ^= 0x2000


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
