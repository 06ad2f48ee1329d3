"""`scan_weights`, `check_bits` and `swap_bits` against their definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.memory import Guarded, added, flag, poisoned_sums, random_bits, table
from vllm_delta_kernels import check_bits, reference, scan_weights, swap_bits
from vllm_delta_kernels.fingerprint import LANES, N_COLUMNS


@dataclass
class Grid:
    """A grid of a storage: rows and columns, their distances, and their checkpoint places."""

    storage: Guarded
    buffer: Guarded
    shape: tuple[int, int]
    strides: tuple[int, int]
    first: int
    row: tuple[int, int]
    col: tuple[int, int]
    seeds: tuple[int, int]

    def job(self, place: int) -> list[int]:
        width = self.storage.tensor.element_size()
        return [
            self.storage.address + self.first * width,
            *self.strides,
            *self.row,
            *self.col,
            *self.shape,
            *map(reference.signed, self.seeds),
            place,
            self.buffer.address,
            self.shape[1],
        ]

    def constants(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.row[0] + torch.arange(self.shape[0]) * self.row[1]
        cols = self.col[0] + torch.arange(self.shape[1]) * self.col[1]
        return reference.odd_keys(self.seeds[0], rows), reference.odd_keys(self.seeds[1], cols)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(self.shape, self.strides, self.first)


def make_grid(
    rng: np.random.Generator,
    width: int,
    shape: tuple[int, int],
    strides: tuple[int, int],
    first: int = 0,
    row: tuple[int, int] = (0, 1),
    col: tuple[int, int] = (0, 1),
) -> Grid:
    last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    seeds = tuple(int(x) for x in rng.integers(0, 1 << 64, 2, dtype=np.uint64))
    return Grid(
        Guarded(random_bits(rng, max(last, 0) + 3, width)),
        Guarded(random_bits(rng, shape[0] * shape[1], width).reshape(shape)),
        shape,
        strides,
        first,
        row,
        col,
        (seeds[0], seeds[1]),
    )


def grids(rng: np.random.Generator, width: int) -> list[Grid]:
    big = (1 << 33) + 5
    return [
        make_grid(rng, width, (0, 5), (5, 1)),
        make_grid(rng, width, (1, 1), (1, 1), first=2),
        make_grid(rng, width, (3, 997), (1000, 1), first=1, row=(7, 1), col=(11, 1)),
        make_grid(rng, width, (2, LANES), (LANES, 1)),
        make_grid(rng, width, (3, LANES), (2 * LANES, 1), row=(4, 2), col=(LANES, 1)),
        make_grid(rng, width, (2, LANES), (LANES + 1, 1), first=1),
        make_grid(rng, width, (5, 64), (1, 7), row=(2, 3), col=(1, 16)),
        make_grid(rng, width, (2, 33), (67, 2), row=(big, 1), col=(big, 2)),
    ]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_scan_check_and_swap_equal_the_definition(width: int) -> None:
    """One launch over grids of every shape: whole, column blocks, transposed, with holes, aligned
    and not, rows and columns past 32 bits; every byte around them stays."""
    cases = grids(np.random.default_rng(width), width)
    jobs = table([grid.job(i) for i, grid in enumerate(cases)], N_COLUMNS)
    kept_jobs = jobs.clone()
    expected = [
        list(
            reference.check_bits(
                grid.view(grid.storage.original), grid.buffer.original, *grid.constants()
            )
        )
        for grid in cases
    ]

    sums = poisoned_sums(len(cases))
    scan_weights(jobs, sums, width=width)
    assert added(sums) == [[old, 0] for old, _ in expected]

    sums = poisoned_sums(len(cases))
    check_bits(jobs, sums, width=width)
    assert added(sums) == expected
    assert all(grid.storage.untouched and grid.buffer.untouched for grid in cases)

    swap_bits(jobs, flag(0), sums, width=width)
    assert added(sums) == expected, "a closed gate added to the sums"
    assert all(grid.storage.untouched and grid.buffer.untouched for grid in cases)

    sums = poisoned_sums(len(cases))
    swap_bits(jobs, flag(1), sums, width=width)
    assert added(sums) == expected
    for grid in cases:
        storage, buffer = grid.storage.original.clone(), grid.buffer.original.clone()
        reference.swap_bits(grid.view(storage), buffer, *grid.constants(), gate=1)
        assert torch.equal(grid.storage.tensor.cpu(), storage)
        assert torch.equal(grid.buffer.tensor.cpu(), buffer)
        assert grid.storage.guards_hold
        assert grid.buffer.guards_hold
    swap_bits(jobs, flag(1), sums, width=width)
    assert all(grid.storage.untouched and grid.buffer.untouched for grid in cases)
    assert torch.equal(jobs, kept_jobs)


def test_a_grid_in_parts_adds_up_to_the_whole() -> None:
    """Row blocks and column blocks of a tensor, each with its checkpoint place, sum to its
    fingerprint: jobs that count to one row of the sums."""
    rng = np.random.default_rng(8)
    whole = make_grid(rng, 2, (8, 96), (96, 1))
    expected = reference.scan_weights(whole.view(whole.storage.original), *whole.constants())
    jobs = []
    for row, col in [(0, 0), (0, 40), (5, 0), (5, 40)]:
        part = whole.job(0)
        part[0] += 2 * (row * 96 + col)
        part[3], part[5] = row, col
        part[7], part[8] = (3 if row else 5), (56 if col else 40)
        jobs.append(part)
    sums = poisoned_sums(1)
    scan_weights(table(jobs, N_COLUMNS), sums, width=2)
    assert added(sums) == [[expected, 0]]


def test_the_definition_is_the_formats() -> None:
    """`reference` and `vllm_delta` agree on the constants, the mix and the order."""
    from vllm_delta import fingerprint
    from vllm_delta.codec import order
    from vllm_delta.format import TensorSpec

    rng = np.random.default_rng(4)
    spec = TensorSpec("model.layers.0.weight", "BF16", (23, 31))
    bits = random_bits(rng, spec.numel, 2)
    row_seed, col_seed = fingerprint.tensor_seeds(spec.name)
    p = reference.odd_keys(row_seed, torch.arange(23))
    q = reference.odd_keys(col_seed, torch.arange(31))
    found = reference.scan_weights(bits.reshape(23, 31), p, q)
    raw = bits.numpy().view(np.uint16)
    assert found & fingerprint.MASK64 == fingerprint.fingerprint(raw, spec)
    for width in (1, 2, 4):
        some = random_bits(rng, 4096, width)
        steps = random_bits(rng, 4096, width)
        expected = order.add_steps(some.numpy().view(order.UNSIGNED[width]), steps.numpy())
        assert np.array_equal(
            reference.add_steps(some, steps).numpy().view(order.UNSIGNED[width]), expected
        )
