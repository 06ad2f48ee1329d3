"""Weights read back in checkpoint order, against a model that walks every element."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.patch.models import (
    Rank,
    grid,
    large_rank,
    random_bits,
    random_change,
    random_rank,
    random_specs,
    simple_rank,
    whole_rank,
)
from vllm_delta.codec import Change, order
from vllm_delta.codec.hazard import Tile
from vllm_delta.errors import LayoutError
from vllm_delta.layout import Rectangle
from vllm_delta.patch import Overlay, Patcher, Run, overlay
from vllm_delta.patch.cpu import CpuBackend
from vllm_delta.patch.places import UNIT_BITS

MIXES = [["BF16"], ["F16", "F32"], ["F8_E4M3", "F8_E5M2", "BF16"]]


def random_run(rng: np.random.Generator, rank: Rank, tensor: int) -> Run:
    spec = rank.schema.tensors[tensor]
    row, col = int(rng.integers(spec.n_rows)), int(rng.integers(spec.n_cols))
    if rng.random() < 0.5:
        col = 0
    tile = Tile(
        row,
        col,
        int(rng.integers(1, spec.n_rows - row + 1)),
        spec.n_cols
        if col == 0 and rng.random() < 0.5
        else int(rng.integers(1, spec.n_cols - col + 1)),
    )
    start = int(rng.integers(tile.numel))
    return Run(tensor, tile, start, int(rng.integers(1, tile.numel - start + 1)))


def indices_of(rank: Rank, run: Run) -> np.ndarray:
    """Flat index of every element of a run, one by one."""
    n_cols = rank.schema.tensors[run.tensor].n_cols
    rows = range(run.tile.row, run.tile.row + run.tile.n_rows)
    cols = range(run.tile.col, run.tile.col + run.tile.n_cols)
    every = [row * n_cols + col for row, col in itertools.product(rows, cols)]
    return np.array(every[run.start : run.start + run.n], np.int64)


def held_by(rank: Rank, tensor: int) -> np.ndarray:
    held = np.zeros(rank.schema.tensors[tensor].numel, np.bool_)
    for r in rank.layout.rectangles:
        if r.tensor == tensor:
            held[grid(r.source_offset, r.sizes, r.source_strides)] = True
    return held


def empty(rank: Rank, run: Run) -> np.ndarray:
    return np.full(run.n, 7, order.UNSIGNED[rank.schema.tensors[run.tensor].itemsize])


@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_gathered_from_wherever_it_lies(seed: int) -> None:
    """Boxes in any order, transposed, with holes: the run is the checkpoint's, what is not held
    stays as it was and is named."""
    rng = np.random.default_rng(seed)
    rank = random_rank(rng, random_specs(rng, MIXES[seed % len(MIXES)]))
    patcher = rank.patcher()
    for tensor, _ in itertools.product(range(len(rank.schema)), range(6)):
        run = random_run(rng, rank, tensor)
        every = indices_of(rank, run)
        held = held_by(rank, tensor)[every]
        out = empty(rank, run)
        assert patcher.gather(run, out) == held.sum() == patcher.places.count(run)
        assert np.array_equal(out, np.where(held, rank.base[tensor][every], out.dtype.type(7)))
        assert np.array_equal(patcher.places.missing(run), ~held)


@pytest.mark.parametrize("seed", range(4))
def test_a_device_gathers_the_same(seed: int) -> None:
    """The backend for a GPU copies by views of the storages; here they are on the CPU."""
    pytest.importorskip("triton")
    from vllm_delta.patch.gpu import GpuBackend

    rng = np.random.default_rng(100 + seed)
    rank = random_rank(rng, random_specs(rng, MIXES[seed % len(MIXES)]))
    patcher = rank.patcher()
    device = GpuBackend(torch.device("cpu"))
    for tensor in range(len(rank.schema)):
        run = random_run(rng, rank, tensor)
        expected = empty(rank, run)
        patcher.gather(run, expected)
        itemsize = expected.itemsize
        room = torch.from_numpy(np.full(run.n + 6, 7, order.SIGNED[itemsize]))
        patcher._backend = device
        patcher.gather(run, room[3:-3])
        patcher._backend = CpuBackend(1)
        found = room.numpy().view(expected.dtype)
        assert np.array_equal(found[3:-3], expected)
        assert (np.delete(found, np.s_[3:-3]) == 7).all()


def test_copies_of_a_part_on_one_rank_are_counted_once() -> None:
    """What a rank holds twice is one part of the run."""
    rank = simple_rank((8, 16))
    whole = rank.layout.rectangles[0]
    rank.layout = replace(rank.layout, rectangles=(whole, replace(whole)))
    assert rank.patcher().places.count(Run(0, Tile(2, 0, 3, 16), 5, 20)) == 20
    assert rank.patcher().places.n_bytes == 8 * 16 * 2


def test_a_transposed_matrix_of_many_squares() -> None:
    """A transpose is copied square by square; the edges are no different."""
    rng = np.random.default_rng(4)
    rank = whole_rank({"w": ("BF16", (150, 130), random_bits(rng, 150 * 130, 2))})
    transposed = Rectangle(0, (150, 130), 0, (130, 1), "w", 0, (1, 150))
    rank.layout = replace(rank.layout, rectangles=(transposed,))
    rank.storages["w"][...] = rank.base[0].reshape(150, 130).T.reshape(-1)
    patcher = rank.patcher()
    for run in (Run(0, Tile(0, 0, 150, 130), 77, 19_000), Run(0, Tile(3, 1, 140, 129), 0, 18_060)):
        out = empty(rank, run)
        assert patcher.gather(run, out) == run.n
        assert np.array_equal(out, rank.base[0][indices_of(rank, run)])


def test_a_moved_storage_is_not_read() -> None:
    """A gather refuses a parameter that moved, like every other call."""
    rank = simple_rank()
    patcher = rank.patcher()
    rank.tensors["w"].data = rank.tensors["w"].data.clone()
    with pytest.raises(LayoutError, match="moved"):
        patcher.gather(Run(0, Tile(0, 0, 8, 16), 0, 4), np.zeros(4, np.uint16))


def test_units_hold_every_lane_whole() -> None:
    """Aligned runs of a tile, whatever the lanes' length."""
    tile = Tile(0, 0, 5000, 1000)
    for bits in (8, 20, 22):
        for start in range(0, tile.numel, 1 << bits):
            run = Run(3, tile, start, min(1 << bits, tile.numel - start))
            unit = run.unit
            assert unit.start <= start
            assert start + run.n <= unit.start + unit.n
            assert unit.start % (1 << UNIT_BITS) == 0
            assert unit == unit.unit
    assert Run(3, tile, 1 << UNIT_BITS, 1).unit.n == tile.numel - (1 << UNIT_BITS)
    assert Run.from_list(unit.to_list()) == unit


def device_steps(bits: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(bits.view(order.SIGNED[bits.itemsize]).copy())
    overlay.add_steps(tensor, positions, steps)
    return tensor.numpy().view(bits.dtype)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_device_steps_in_the_types_order(itemsize: int) -> None:
    """The order on a device is the codec's."""
    rng = np.random.default_rng(3)
    old = random_bits(rng, 5000, itemsize)
    steps = random_bits(rng, 5000, itemsize).view(order.SIGNED[itemsize])
    places = np.arange(5000)
    assert np.array_equal(device_steps(old, places, steps), order.add_steps(old, steps))


@pytest.mark.parametrize("seed", range(12))
def test_an_overlay_leads_to_the_next_versions_bits(seed: int) -> None:
    """A run with an overlay on it is the same run of the target."""
    rng = np.random.default_rng(300 + seed)
    rank = random_rank(rng, random_specs(rng, MIXES[seed % len(MIXES)]))
    for tensor in range(len(rank.schema)):
        change, target = random_change(rng, rank, tensor, float(rng.choice([0.02, 0.5, 1.0])))
        run = random_run(rng, rank, tensor)
        every = indices_of(rank, run)
        bits = rank.base[tensor][every].copy()
        Overlay(rank.schema, {tensor: change}, {}).add_to(bits, run)
        assert np.array_equal(bits, target[every])
        if change.steps is not None and change.steps.itemsize <= 4:
            again = torch.from_numpy(
                rank.base[tensor][every].view(order.SIGNED[bits.itemsize]).copy()
            )
            Overlay(rank.schema, {tensor: change}, {}).add_to(again, run)
            assert np.array_equal(again.numpy().view(bits.dtype), target[every])


def test_an_overlay_knows_what_it_left_out() -> None:
    """Within a tile that is read nothing is left out; across other tiles nothing is known."""
    rank = simple_rank((8, 16))
    left, right = Tile(0, 0, 8, 8), Tile(0, 8, 8, 8)
    some = Overlay(rank.schema, {}, {0: frozenset([right])})
    assert some.knows(Run(0, left, 0, 64))
    assert some.knows(Run(0, right, 0, 64))  # another unit of the same tile was left out
    assert not some.knows(Run(0, Tile(0, 0, 8, 16), 0, 128))
    assert not some.knows(Run(0, Tile(0, 4, 4, 8), 0, 32))
    assert some.knows(Run(1, Tile(0, 0, 8, 16), 0, 128))


def test_a_gather_takes_no_more_than_its_copy() -> None:
    """Reading back a large run allocates nothing of its size."""
    import tracemalloc

    rank = large_rank(1, (1000, 1000))
    patcher: Patcher = rank.patcher()
    run = Run(0, Tile(0, 0, 1000, 1000), 0, 1_000_000)
    out = np.empty(run.n, np.uint16)
    patcher.gather(run, out)
    tracemalloc.start()
    patcher.gather(run, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert np.array_equal(out, rank.base[0])


def test_a_raw_overlay_replaces() -> None:
    """A tensor that is replaced is its new bits."""
    rank = simple_rank((8, 16))
    new = random_bits(np.random.default_rng(8), 128, 2)
    run = Run(0, Tile(1, 2, 5, 9), 4, 30)
    bits = np.zeros(30, np.uint16)
    Overlay(rank.schema, {0: Change(0, None, None, new, 0, 0)}, {}).add_to(bits, run)
    assert np.array_equal(bits, new[indices_of(rank, run)])
