"""`check_patch` and `scatter_patch` against their definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.memory import (
    INTEGERS,
    Guarded,
    added,
    flag,
    poisoned_sums,
    random_bits,
    table,
)
from vllm_delta_kernels import BLOCK, check_patch, reference, scatter_patch
from vllm_delta_kernels.patch import N_COLUMNS

SIZES = [0, 1, 997, BLOCK, BLOCK + 1]


@dataclass
class Run:
    """Changes of one parameter, in guarded memory."""

    weights: Guarded
    offsets: Guarded
    steps: Guarded
    coefficients: Guarded

    def rows(self, place: int) -> list[list[int]]:
        n, size = self.offsets.tensor.numel(), self.offsets.tensor.element_size()
        return [
            [
                self.weights.address,
                self.weights.tensor.numel(),
                self.offsets.address + start * size,
                self.steps.address + start * self.steps.tensor.element_size(),
                self.coefficients.address + start * 8,
                min(BLOCK, n - start),
                place,
            ]
            for start in range(0, max(n, 1), BLOCK)
        ]

    @property
    def inputs(self) -> tuple[Guarded, ...]:
        return self.offsets, self.steps, self.coefficients

    def definition(self) -> list[torch.Tensor]:
        return [g.original.clone() for g in (self.weights, *self.inputs)]


def make_run(
    rng: np.random.Generator, n: int, width: int, offset_bytes: int, step_bytes: int
) -> Run:
    n_elements = 3 * n + 7
    offsets = np.sort(rng.choice(n_elements, n, replace=False))
    return Run(
        Guarded(random_bits(rng, n_elements, width)),
        Guarded(torch.from_numpy(offsets).to(INTEGERS[offset_bytes])),
        Guarded(random_bits(rng, n, step_bytes)),
        Guarded(random_bits(rng, n, 8)),
    )


KINDS = [
    (1, 4, 1),
    (2, 4, 1),
    (2, 4, 2),
    (2, 8, 2),
    (4, 4, 1),
    (4, 8, 4),
]


@pytest.mark.parametrize(("width", "offset_bytes", "step_bytes"), KINDS)
def test_check_then_scatter_equal_the_definition(
    width: int, offset_bytes: int, step_bytes: int
) -> None:
    """One launch over parameters of every size: sums, weights, and every byte around them; then
    back."""
    rng = np.random.default_rng(width * 100 + offset_bytes * 10 + step_bytes)
    kind = {"width": width, "offset_bytes": offset_bytes, "step_bytes": step_bytes}
    runs = [make_run(rng, n, width, offset_bytes, step_bytes) for n in SIZES]
    rows = table([row for i, run in enumerate(runs) for row in run.rows(i)], N_COLUMNS)
    kept_rows = rows.clone()
    definitions = [run.definition() for run in runs]
    expected = [list(reference.check_patch(*parts)) for parts in definitions]

    sums, n_bad = poisoned_sums(len(runs)), flag(0)
    check_patch(rows, sums, n_bad, **kind)
    assert added(sums) == [pair[:2] for pair in expected]
    assert all(run.weights.untouched for run in runs), "the check wrote a weight"

    for forward in (True, False):
        moved = [
            list(reference.scatter_patch(*parts, gate=1, forward=forward)) for parts in definitions
        ]
        sums = poisoned_sums(len(runs))
        scatter_patch(rows, flag(1), sums, n_bad, **kind, forward=forward)
        assert added(sums) == [pair[:2] for pair in moved]
        for run, (weights, *_) in zip(runs, definitions, strict=True):
            assert torch.equal(run.weights.tensor.cpu(), weights)
            assert run.weights.guards_hold
            assert all(guarded.untouched for guarded in run.inputs)
    assert all(run.weights.untouched for run in runs), "rolling back did not restore"
    assert int(n_bad) == 0
    assert torch.equal(rows, kept_rows)


@pytest.mark.parametrize("gate", [0, 2, -1])
def test_a_closed_gate_writes_nothing(gate: int) -> None:
    """Anything but 1 in the gate makes the scatter a no-op: weights, sums and count."""
    run = make_run(np.random.default_rng(1), 100, 2, 4, 1)
    sums, n_bad = poisoned_sums(1), flag(0)
    kind = {"width": 2, "offset_bytes": 4, "step_bytes": 1}
    rows = table(run.rows(0), N_COLUMNS)
    scatter_patch(rows, flag(gate), sums, n_bad, **kind, forward=True)
    assert run.weights.untouched
    assert added(sums) == [[0, 0]]
    scatter_patch(rows, flag(1), sums, n_bad, **kind, forward=True)
    assert not run.weights.untouched
    assert run.weights.guards_hold


@pytest.mark.parametrize("offset_bytes", [4, 8])
def test_offsets_outside_of_the_storage_are_counted_and_left_alone(offset_bytes: int) -> None:
    """Negative, one past the end and far away: counted, not read, not written."""
    rng = np.random.default_rng(3)
    run = make_run(rng, 8, 2, offset_bytes, 2)
    n = run.weights.tensor.numel()
    far = [-(1 << 31), (1 << 31) - 1] if offset_bytes == 4 else [-(1 << 40), 1 << 40]
    bad = torch.tensor([-1, n, n + 1, *far, 0, 5, n - 1], dtype=INTEGERS[offset_bytes])
    run.offsets = Guarded(bad)
    kind = {"width": 2, "offset_bytes": offset_bytes, "step_bytes": 2}
    rows = table(run.rows(0), N_COLUMNS)
    parts = run.definition()
    *expected, n_expected = reference.scatter_patch(*parts, gate=1, forward=True)
    assert n_expected == 5
    sums, n_bad = poisoned_sums(1), flag(0)
    check_patch(rows, sums, n_bad, **kind)
    assert (added(sums), int(n_bad)) == ([expected], 5)
    assert run.weights.untouched
    scatter_patch(rows, flag(1), sums, n_bad, **kind, forward=True)
    assert int(n_bad) == 10
    assert torch.equal(run.weights.tensor.cpu(), parts[0])
    assert run.weights.guards_hold


@pytest.mark.parametrize("step", [1, -1, 300, -32768])
def test_every_16_bit_pattern(step: int) -> None:
    """NaN payloads, infinities, -0 and subnormals step like any other pattern, and back."""
    n = 1 << 16
    patterns = torch.arange(n, dtype=torch.int32).to(torch.int16)
    run = Run(
        Guarded(patterns),
        Guarded(torch.arange(n, dtype=torch.int32)),
        Guarded(torch.full((n,), step, dtype=torch.int16)),
        Guarded(torch.ones(n, dtype=torch.int64)),
    )
    rows = table(run.rows(0), N_COLUMNS)
    kind = {"width": 2, "offset_bytes": 4, "step_bytes": 2}
    sums, n_bad = poisoned_sums(1), flag(0)
    scatter_patch(rows, flag(1), sums, n_bad, **kind, forward=True)
    after = run.weights.tensor.cpu()
    assert torch.equal(after, reference.add_steps(patterns, run.steps.original))
    assert len(after.unique()) == n
    every = int(reference.mix(patterns).sum())
    assert added(sums) == [[every, every]], "a bijection keeps the sum"
    scatter_patch(rows, flag(1), sums, n_bad, **kind, forward=False)
    assert run.weights.untouched
