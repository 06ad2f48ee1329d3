"""Ranks decode `hazard` deltas against what they hold: any parallelism, any cut, any order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.codec.forced import forced
from tests.engine.fleet import Fleet, Trainer, start
from tests.engine.shards import Builder, random_weights
from vllm_delta import codec
from vllm_delta.channel import LocalStore, LogReader
from vllm_delta.codec.hazard import parse_parts
from vllm_delta.codec.hazard.lanes import elements
from vllm_delta.errors import SettingsError
from vllm_delta.format import Manifest

pytestmark = pytest.mark.engine

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SHAPES = {
    "embed": ((515, 64), BF16),
    "norm": ((64,), BF16),
    "q": ((128, 64), BF16),
    "k": ((64, 64), BF16),
    "v": ((64, 64), BF16),
    "q.bias": ((128,), BF16),
    "k.bias": ((64,), BF16),
    "o": ((64, 128), BF16),
    "gate": ((192, 64), BF16),
    "up": ((192, 64), BF16),
    "down": ((64, 192), BF16),
    "odd": ((107, 64), F16),
    "router": ((8, 64), F32),
    "experts.in": ((8, 32, 64), BF16),
    "experts.out": ((8, 64, 32), F8),
}
EVERY = slice(None)


def share(n: int, rank: int, n_ranks: int) -> slice:
    return slice(n * rank // n_ranks, n * (rank + 1) // n_ranks)


def padded(n: int, rank: int, n_ranks: int) -> slice:
    """A vocabulary is padded to 64, then shared out."""
    step = -(-n // 64) * 64 // n_ranks
    return slice(min(n, rank * step), min(n, (rank + 1) * step))


def dense(builder: Builder, rank: int, n_ranks: int) -> None:
    """Megatron's way: rows, columns, fused projections, two key and value heads."""
    builder.add("embed", padded(515, rank, n_ranks))
    builder.add("odd", padded(107, rank, n_ranks), transposed=True)
    for name in ("norm", "router"):
        builder.add(name)
    head = share(2, rank, n_ranks) if n_ranks <= 2 else slice(2 * rank // n_ranks, None)
    n_heads = max(1, 2 // n_ranks)
    kv = slice(32 * head.start, 32 * (head.start + n_heads))
    for name, rows in (("q", share(128, rank, n_ranks)), ("k", kv), ("v", kv)):
        builder.add(name, rows, into="qkv")
    builder.add("q.bias", share(128, rank, n_ranks), into="qkv.bias")
    builder.add("k.bias", kv, into="qkv.bias")
    for name in ("gate", "up"):
        builder.add(name, share(192, rank, n_ranks), into="gate_up")
    builder.add("o", EVERY, share(128, rank, n_ranks))
    builder.add("down", EVERY, share(192, rank, n_ranks), transposed=True)


def expert_parallel(builder: Builder, rank: int, n_ranks: int) -> None:
    """Whole experts."""
    dense(builder, rank, n_ranks)
    builder.add("experts.in", share(8, rank, n_ranks))
    builder.add("experts.out", share(8, rank, n_ranks))


def cut_experts(builder: Builder, rank: int, n_ranks: int) -> None:
    """A part of every expert; the second projection transposed."""
    dense(builder, rank, n_ranks)
    builder.add("experts.in", EVERY, share(32, rank, n_ranks))
    builder.add("experts.out", EVERY, EVERY, share(32, rank, n_ranks), transposed=True)


BUILDS = {"experts whole": expert_parallel, "experts cut": cut_experts}


def lanes_of(fleet: Fleet, manifest: Manifest) -> tuple[list[int], int]:
    """How many lanes concern each rank, element by element, and how many there are. Tensors that
    are not cut are read whole by whoever holds a part."""
    wanted, total = [0] * len(fleet.shards), 0
    helds = [shard.held(fleet.schema) for shard in fleet.shards]
    reader = LogReader(LocalStore(fleet.trainer.channel))
    for place in range(len(manifest.blobs)):
        blob = codec.parse_blob(reader.get_blob(manifest, place), fleet.schema, "delta")
        entries = [entry for entry in blob.entries if entry.codec == codec.HAZARD]
        for part in parse_parts(entries, blob.sections, fleet.schema):
            for lane in part.lanes:
                total += 1
                is_cut = lane.tile.numel < part.spec.numel
                start, n = (lane.start, lane.n_elements) if is_cut else (0, part.spec.numel)
                for rank, held in enumerate(helds):
                    mine = elements(held[part.tensor], part.spec, lane.tile, start, n)
                    wanted[rank] += bool(mine.any())
    return wanted, total


def n_decoded(fleet: Fleet) -> list[int]:
    return [rank._residence.n_lanes for rank in fleet.ranks]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("n_ranks", "shards"),
    [(1, 1), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)],
)
def test_every_rank_follows_and_decodes_what_it_holds(
    tmp_path: Path, build: str, n_ranks: int, shards: int
) -> None:
    """One version, then two at once, back and forward again: bits are the trainer's, and a rank
    decodes the lanes that it holds something of and no other."""
    trainer = Trainer(tmp_path / "channel", random_weights(SHAPES), shards=shards)
    fleet = start(trainer, BUILDS[build], n_ranks)
    with forced():
        steps = [trainer.step()]
        fleet.follow(*steps)
        assert fleet.holds()
        before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
        steps += [trainer.step(), trainer.step()]
        fleet.follow(*steps[1:])
    assert fleet.holds()
    assert fleet.runs == [1, 2]
    counts = [lanes_of(fleet, manifest) for manifest in steps]
    assert n_decoded(fleet) == [sum(w[rank] for w, _ in counts) for rank in range(n_ranks)]
    n_lanes = sum(total for _, total in counts)
    assert n_lanes > 500
    if n_ranks > 1:
        assert max(n_decoded(fleet)) < n_lanes * (0.45 + 0.65 / n_ranks)
    fleet.driver.rollback()
    fleet.driver.rollback()
    assert fleet.holds(before)
    fleet.follow(*steps[1:])
    assert fleet.holds()
    assert fleet.driver.scan() == fleet.driver.ledger.fingerprints


@pytest.mark.parametrize(("n_ranks", "shards"), [(2, 1), (4, 1), (4, 2)])
def test_a_channel_that_is_cut_too_coarsely_is_refused(
    tmp_path: Path, n_ranks: int, shards: int
) -> None:
    """A halo past its bound is a settings error that says what to publish; nothing is written."""
    trainer = Trainer(tmp_path / "channel", random_weights(SHAPES), shards=shards)
    fleet = start(trainer, cut_experts, n_ranks)
    before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    with forced():
        manifest = trainer.step()
    with pytest.raises(SettingsError, match="shards = the tensor-parallel size") as caught:
        fleet.follow(manifest)
    assert caught.value.facts["n_bytes"] > caught.value.facts["limit"]
    assert fleet.holds(before)
    assert n_decoded(fleet) == [0] * n_ranks
