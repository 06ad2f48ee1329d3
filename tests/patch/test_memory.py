"""What the patcher takes beside the weights."""

from __future__ import annotations

import re
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

from tests.patch.models import large_rank, sparse_change, sparse_changes
from vllm_delta.codec import Change
from vllm_delta.patch.cpu import CpuBackend


def test_changes_are_consumed_one_by_one() -> None:
    """Staging holds on to no decoded change once it has asked for the next."""
    rank = large_rank(4, (64, 64))
    alive: list[weakref.ref[Any]] = []

    def next_change(tensor: int) -> Change:
        assert not [ref for ref in alive if ref() is not None], tensor
        change = sparse_change(rank, tensor, 0.5)
        alive.extend([weakref.ref(change.indices), weakref.ref(change.steps)])
        return change

    patcher = rank.patcher()
    patch = patcher.stage(map(next_change, range(4)))
    assert len(alive) == 8
    assert patch.nnz > 4 * 64


def peak_rss_bytes() -> int:
    [line] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def test_a_patch_takes_at_most_three_times_the_decoded_delta() -> None:
    """Stage, check, apply and roll back, 1.3 % of 64 million weights changed: what numpy
    allocates, and what the process grows by at its peak, stay below 3 times the indices and
    steps (6 bytes for each change), the change at hand included. A copy of one tensor, 16 MB,
    would not fit."""
    rank = large_rank(8, (2048, 4096))
    patcher = rank.patcher(backend=CpuBackend(1))
    warm = patcher.stage(sparse_changes(rank, 0.0001))
    patcher.check(warm)
    n_decoded = sum(c.indices.nbytes + c.steps.nbytes for c in sparse_changes(rank, 0.013))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_rss_bytes()
    tracemalloc.start()
    patch = patcher.stage(sparse_changes(rank, 0.013))
    patcher.check(patch)
    patcher.apply(patch)
    patcher.rollback(patch)
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    grown = peak_rss_bytes() - before
    assert patch.n_bytes <= 14 * patch.nnz
    assert patch.n_bytes <= allocated <= 3 * n_decoded < 16 << 20
    assert grown <= 3 * n_decoded, (grown, n_decoded)
