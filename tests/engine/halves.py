"""Two ranks that each hold a part of every tensor, and lack some of small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.codec.forced import forced
from tests.engine.fleet import Fleet, Trainer, start
from tests.engine.shards import Builder, Weights, bits_of, random_weights
from vllm_delta import Publisher
from vllm_delta.format import Manifest
from vllm_delta.publisher import PublisherSettings

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


def two_ranks(channel: Path) -> Fleet:
    """Two ranks, and a trainer that cuts for them; several blobs to a version."""
    trainer = Trainer(channel, random_weights(SHAPES), shards=2, blob_bytes=2000)
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


def copy_of(fleet: Fleet) -> list[bytes]:
    return [
        bits_of(tensor).tobytes()
        for shard in fleet.shards
        for _, tensor in sorted(shard.storages.items())
    ]


def damage(fleet: Fleet, rank: int, parameter: str, place: int = 5) -> None:
    """Turns a high bit of the exponent over."""
    bits_of(fleet.shards[rank].storages[parameter])[place] ^= 0x2000
