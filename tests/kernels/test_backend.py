"""The patcher over the GPU backend against the brute-force model and the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.memory import DEVICE
from tests.patch.models import (
    Rank,
    random_bits,
    random_change,
    random_rank,
    random_specs,
    sparse_changes,
    whole_rank,
)
from vllm_delta.codec import Change
from vllm_delta.fingerprint import MASK64
from vllm_delta.patch import Patcher
from vllm_delta.patch.gpu import GpuBackend


class OnDevice:
    """A rank's storages copied to the device, and the patcher over the copy."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.tensors = {name: tensor.to(DEVICE, copy=True) for name, tensor in rank.tensors.items()}
        backend = GpuBackend(torch.device(DEVICE))
        self.patcher = Patcher(rank.schema, rank.layout, self.tensors, backend=backend)

    def equals(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(
                self.tensors[name].cpu().view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )
            for name, tensor in tensors.items()
        )


@pytest.mark.parametrize("seed", range(3))
def test_both_backends_agree_bit_for_bit(seed: int) -> None:
    """Scan, check, apply, roll back: the same sums, the same weights, the padding untouched."""
    rng = np.random.default_rng(100 + seed)
    dtypes = [["BF16"], ["F32", "F8_E4M3"], ["BF16", "F64", "I8", "F16"]][seed]
    rank = random_rank(rng, random_specs(rng, dtypes))
    device = OnDevice(rank)
    patcher = rank.patcher()
    assert device.patcher.scan() == patcher.scan()
    target = dict(rank.base)
    changes: list[Change] = []
    for tensor in range(len(rank.schema)):
        change, target[tensor] = random_change(rng, rank, tensor, 0.3)
        changes.append(change)
    patch, mine = device.patcher.stage(changes), patcher.stage(changes)
    assert (patch.entries, patch.nnz, patch.n_bytes) == (mine.entries, mine.nnz, mine.n_bytes)
    sums = patcher.check(mine)
    before = {name: tensor.clone() for name, tensor in rank.tensors.items()}
    assert device.patcher.check(patch) == sums
    assert device.equals(before)
    assert device.patcher.apply(patch) == patcher.apply(mine) == sums.change
    assert rank.holds(rank.loaded(target))
    assert device.equals(rank.tensors)
    assert not device.equals(before)
    assert device.patcher.rollback(patch) == {i: -v & MASK64 for i, v in sums.change.items()}
    assert device.equals(before)


def test_pieces_and_rows_longer_than_a_program() -> None:
    """More changes than a row of the table holds, rows of more columns than a job: the same as
    on a CPU, forward and back."""
    bits = random_bits(np.random.default_rng(6), 3 * 1500, 2)
    rank = whole_rank({"w": ("BF16", (3, 1500), bits)})
    device = OnDevice(rank)
    patcher = rank.patcher()
    assert device.patcher.scan() == patcher.scan()
    patch = device.patcher.stage(sparse_changes(rank, 0.9))
    mine = patcher.stage(sparse_changes(rank, 0.9))
    assert patch.nnz > 2 * 1024
    before = {name: tensor.clone() for name, tensor in rank.tensors.items()}
    assert device.patcher.check(patch) == patcher.check(mine)
    assert device.patcher.apply(patch) == patcher.apply(mine)
    assert device.equals(rank.tensors)
    device.patcher.rollback(patch)
    assert device.equals(before)
