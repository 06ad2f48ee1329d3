"""Ranks whose weights are on a device: lanes decoded by its kernels, patches applied there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.codec.forced import forced
from tests.engine.fleet import Fleet, Trainer, start
from tests.engine.shards import Builder, bits_of, random_weights
from tests.kernels.memory import DEVICE
from vllm_delta.codec import LaneDecoder
from vllm_delta.codec.hazard import Part
from vllm_delta.codec.order import Signed
from vllm_delta.errors import BaseMismatchError
from vllm_delta.format import Manifest, Version
from vllm_delta.patch.gpu import GpuBackend

pytest.importorskip("prometheus_client", reason="the engine's driver counts with it")

SHAPES = {
    "bias": ((8,), torch.bfloat16),
    "matrix": ((24, 20), torch.bfloat16),
    "scale": ((8,), torch.float32),
    "small": ((30, 24), torch.bfloat16),
}


def halves(builder: Builder, rank: int, n_ranks: int) -> None:
    builder.add("matrix", slice(12 * rank, 12 * rank + 12), transposed=True)
    builder.add("small", slice(None), slice(12 * rank, 12 * rank + 12))
    builder.add("bias", slice(4 * rank, 4 * rank + 4))
    builder.add("scale")


class OneAtATime:
    """Triton's interpreter runs one kernel at a time; the ranks stage on threads of one process."""

    _lock = threading.Lock()

    def __init__(self, decoder: LaneDecoder) -> None:
        self._decoder = decoder

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        with self._lock:
            return self._decoder.decode(parts)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Two ranks on the device; in the interpreter that is the CPU, which is told to be one."""
    device = torch.device(DEVICE)
    trainer = Trainer(tmp_path / "channel", random_weights(SHAPES), shards=2)
    fleet = start(trainer, halves, 2, backend=GpuBackend(device), device=device)
    for rank in fleet.ranks:
        rank._residence.halo.limit_bytes = 1 << 10
        decoder = rank._residence.decoder

        def one_at_a_time(base: Version, decoder: Any = decoder) -> OneAtATime:
            return OneAtATime(decoder(base))

        monkeypatch.setattr(rank._residence, "decoder", one_at_a_time)
    return fleet


def step(fleet: Fleet) -> Manifest:
    with forced(changes_in_tile=8, changes_in_lane=1):
        return fleet.trainer.step(7.0)


def test_ranks_on_a_device_follow_with_a_halo(fleet: Fleet) -> None:
    """One version, two at once on top of each other, back and forward: the trainer's bits."""
    manifests = [step(fleet)]
    fleet.follow(*manifests)
    assert fleet.holds()
    assert [rank.status()["halo_bytes"] for rank in fleet.ranks] == [8, 8]
    before = {name: tensor.clone() for name, tensor in fleet.trainer.weights.items()}
    manifests += [step(fleet), step(fleet)]
    fleet.follow(*manifests[1:])
    assert fleet.runs == [1, 2]
    assert fleet.holds()
    assert all(rank._residence.n_lanes > 3 for rank in fleet.ranks)
    fleet.driver.rollback()
    fleet.driver.rollback()
    assert fleet.holds(before)
    fleet.follow(*manifests[1:])
    assert fleet.holds()


def test_damage_on_a_device_is_found_while_staging(fleet: Fleet) -> None:
    """Lanes that do not decode say that the weights are wrong."""
    fleet.follow(step(fleet))
    manifest = step(fleet)
    tensor = fleet.shards[1].storages["matrix"]
    damaged = tensor.cpu()
    bits_of(damaged)[5:60] ^= np.uint16(0x2000)
    tensor.copy_(damaged)
    with pytest.raises(BaseMismatchError, match="matrix"):
        fleet.follow(manifest)
