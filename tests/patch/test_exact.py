"""Bits and sums of the patcher against a brute-force model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.patch.models import (
    TORCH,
    large_rank,
    random_bits,
    random_change,
    random_rank,
    random_specs,
    sparse_changes,
    whole_rank,
)
from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import MASK64, fingerprint
from vllm_delta.format import DTYPES, Schema, TensorSpec
from vllm_delta.layout import ParameterSpec, RankLayout, Rectangle
from vllm_delta.patch import Patcher, Sums
from vllm_delta.patch.cpu import CpuBackend


@pytest.mark.parametrize("seed", range(25))
def test_a_patch_equals_loading_the_new_checkpoint(seed: int) -> None:
    """Whatever the layout and the types, storages end as if the target had been loaded."""
    rng = np.random.default_rng(seed)
    mixes = [["BF16"], ["F16", "F32"], ["F8_E4M3", "F8_E5M2", "BF16"], list(TORCH)]
    rank = random_rank(rng, random_specs(rng, mixes[seed % len(mixes)]))
    patcher = rank.patcher()
    before = rank.loaded(rank.base)
    assert rank.holds(before)
    target = dict(rank.base)
    changes = []
    for tensor in range(len(rank.schema)):
        if rng.random() < 0.8:
            change, target[tensor] = random_change(rng, rank, tensor, rng.choice([0.01, 0.2, 1.0]))
            changes.append(change)
    patch = patcher.stage(iter(changes))
    sums = patcher.check(patch)
    assert rank.holds(before), "check wrote a weight"
    touched, change = {}, {}
    by_tensor = {c.tensor: c for c in changes}
    for index, rectangle in enumerate(rank.layout.rectangles):
        tensor = rectangle.tensor
        if tensor not in by_tensor:
            continue
        some = by_tensor[tensor].indices
        old = rank.partial(rectangle, rank.base[tensor], some)
        new = rank.partial(rectangle, target[tensor], some)
        touched[index], change[index] = old, (new - old) & MASK64
    names = set(sums.touched)
    assert set(sums.change) == names
    assert sums.touched == {i: v for i, v in touched.items() if i in names}
    assert sums.change == {i: v for i, v in change.items() if i in names}
    assert not any(v for i, v in touched.items() if i not in names)
    assert patch.entries == tuple((c.tensor, c.touched, c.target) for c in changes)
    assert patcher.apply(patch) == sums.change
    assert rank.holds(rank.loaded(target))
    back = patcher.rollback(patch)
    assert back == {i: -v & MASK64 for i, v in sums.change.items()}
    assert rank.holds(before)


@pytest.mark.parametrize("seed", range(12))
def test_the_scan_is_each_rectangles_fingerprint(seed: int) -> None:
    """The scan gives Σ g·P·Q in checkpoint coordinates for every rectangle."""
    rng = np.random.default_rng(1000 + seed)
    rank = random_rank(rng, random_specs(rng, list(TORCH)))
    found = rank.patcher().scan()
    assert found == {
        i: rank.partial(r, rank.base[r.tensor]) for i, r in enumerate(rank.layout.rectangles)
    }


@pytest.mark.parametrize("n_threads", [1, 2])
def test_long_rows_and_large_rectangles_are_scanned(n_threads: int) -> None:
    """Rows past the table of column constants, more than one job to a rectangle, a narrow
    tensor after a wide one: sums over the rectangles are the tensors' fingerprints."""
    rng = np.random.default_rng(5)
    shapes = {"a": (1100, 1000), "b": (3, 150_001), "c": (200_003,), "d": (40, 10), "e": (40, 10)}
    rank = whole_rank(
        {n: ("BF16", s, random_bits(rng, int(np.prod(s)), 2)) for n, s in shapes.items()}
    )
    b = rank.schema.index("b")
    rows = 150_001
    half = Rectangle(b, (3, 75_000), 0, (rows, 2), "b", 0, (75_000, 1))
    other = Rectangle(b, (3, 75_001), 0, (rows, 2), "b", 225_000, (75_001, 1))
    # The even columns in front, the odd ones behind: a stride of 2 in rows that are too long.
    odd = replace(half, source_offset=1, target_offset=0)
    even = replace(other, source_offset=0, target_offset=225_000)
    layout = replace(
        rank.layout,
        rectangles=(*(r for r in rank.layout.rectangles if r.tensor != b), odd, even),
    )
    rank.layout = layout
    for name, bits in rank.loaded(rank.base).items():
        rank.storages[name][...] = bits
    found = rank.patcher(backend=CpuBackend(n_threads)).scan()
    totals: dict[int, int] = {}
    for index, value in found.items():
        tensor = layout.rectangles[index].tensor
        totals[tensor] = (totals.get(tensor, 0) + value) & MASK64
    assert totals == {i: fingerprint(rank.base[i], s) for i, s in enumerate(rank.schema.tensors)}


@pytest.mark.parametrize("step", [1, -1, 2, -300, 32767, -32768])
def test_every_16_bit_pattern_moves_by_every_kind_of_step(step: int) -> None:
    """NaN payloads, infinities, -0 and subnormals step like any other pattern, and back."""
    old = np.arange(1 << 16, dtype=np.uint16)
    rank = whole_rank({"w": ("BF16", (256, 256), old)})
    patcher = rank.patcher()
    steps = np.full(old.size, step, np.int16)
    new = order.add_steps(old, steps)
    assert len(np.unique(new)) == old.size
    before = old.copy()
    spec = rank.schema.tensors[0]
    indices = np.arange(old.size, dtype=np.int32)
    patch = patcher.stage([Change(0, indices, steps, None, 0, 0)])
    change = (fingerprint(new, spec) - fingerprint(old, spec)) & MASK64
    assert patcher.check(patch) == Sums({0: fingerprint(old, spec)}, {0: change})
    assert patcher.apply(patch) == {0: change}
    assert np.array_equal(old, new)
    patcher.rollback(patch)
    assert np.array_equal(old, before)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F32"])
def test_every_8_bit_pattern_and_the_edges_of_32_bits(dtype: str) -> None:
    """The order is the codec's at the other widths too."""
    width = DTYPES[dtype].itemsize
    edges = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x80000000, 0x80000001, 0xFFFFFFFF]
    patterns = np.arange(256, dtype=np.uint8) if width == 1 else np.array(edges, np.uint32)
    moves = [1, -1, 5, -128, 127] + ([] if width == 1 else [-129, 1 << 20, -(1 << 31)])
    for move in moves:
        old = patterns.copy()
        rank = whole_rank({"w": (dtype, (old.size,), old)})
        patcher = rank.patcher()
        steps = np.full(old.size, move, order.SIGNED[width])
        new = order.add_steps(old, steps)
        indices = np.arange(old.size, dtype=np.int32)
        patch = patcher.stage([Change(0, indices, steps, None, 0, 0)])
        patcher.apply(patch)
        assert np.array_equal(old, new), move
        patcher.rollback(patch)
        assert np.array_equal(old, patterns), move


def test_offsets_past_32_bits() -> None:
    """A storage of more than 2^32 elements takes 64-bit offsets; only touched pages are real."""
    n = (1 << 32) + 64
    tensor = torch.empty(n, dtype=torch.float8_e4m3fn)
    bits = tensor.view(torch.uint8).numpy()
    bits[-64:] = np.arange(64)
    schema = Schema.of([TensorSpec("w", "F8_E4M3", (8, 8))])
    rectangle = Rectangle(0, (64,), 0, (1,), "w", n - 64, (1,))
    layout = RankLayout(schema.digest, 0, (rectangle,), {"w": ParameterSpec("F8_E4M3", n)})
    patcher = Patcher(schema, layout, {"w": tensor})
    assert patcher.scan() == {0: fingerprint(np.arange(64, dtype=np.uint8), schema.tensors[0])}
    steps = np.ones(64, np.int8)
    patcher.apply(patcher.stage([Change(0, np.arange(64, dtype=np.int32), steps, None, 0, 0)]))
    assert np.array_equal(bits[-64:], np.arange(1, 65))


@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_change_nothing_but_the_time(n_threads: int) -> None:
    """Sums and weights are the same for any number of threads."""
    one, many = large_rank(3, (500, 1000)), large_rank(3, (500, 1000))
    first, second = one.patcher(backend=CpuBackend(1)), many.patcher(backend=CpuBackend(n_threads))
    a, b = first.stage(sparse_changes(one, 0.1)), second.stage(sparse_changes(many, 0.1))
    assert a.nnz > 100_000
    assert first.scan() == second.scan()
    assert first.check(a) == second.check(b)
    assert first.apply(a) == second.apply(b)
    assert many.holds(one.storages)
    assert first.scan() == second.scan()
