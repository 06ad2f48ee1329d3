"""Rectangles cut into grids: every element once, at its place in all three countings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.patch.models import grid, random_rank, random_specs
from vllm_delta.layout import Rectangle
from vllm_delta.patch.grids import Grid, grids


def elements(part: Grid, n_cols: int) -> list[tuple[int, int, int]]:
    """Index, offset and place in checkpoint order of each element."""
    return [
        (
            (part.row + i * part.row_step) * n_cols + part.col + j * part.col_step,
            part.offset + i * part.row_stride + j * part.col_stride,
            part.at + i * part.pitch + j,
        )
        for i in range(part.n_rows)
        for j in range(part.n_cols)
    ]


def check(rectangle: Rectangle, n_cols: int) -> list[Grid]:
    """Compares the grids, cut small, with the rectangle; returns them whole."""
    source = grid(rectangle.source_offset, rectangle.sizes, rectangle.source_strides)
    target = grid(rectangle.target_offset, rectangle.sizes, rectangle.target_strides)
    expected = [(int(s), int(t), k) for k, (s, t) in enumerate(zip(source, target, strict=True))]
    whole = list(grids(rectangle, n_cols))
    small = [part for g in whole for part in g.cut(3, 5)]
    assert all(part.n_rows <= 3 and part.n_cols <= 5 for part in small)
    for parts in (whole, small):
        found = sorted((e for part in parts for e in elements(part, n_cols)), key=lambda e: e[2])
        assert found == expected
        assert all(p.col >= 0 and p.col + (p.n_cols - 1) * p.col_step < n_cols for p in parts)
    return whole


@pytest.mark.parametrize("seed", range(30))
def test_grids_cover_a_random_rectangle_once(seed: int) -> None:
    """Boxes of any dimension, transposed or with holes."""
    rng = np.random.default_rng(seed)
    rank = random_rank(rng, random_specs(rng, ["BF16"]))
    for rectangle in rank.layout.rectangles:
        check(rectangle, rank.schema.tensors[rectangle.tensor].n_cols)


@pytest.mark.parametrize(
    ("rectangle", "n_grids"),
    [
        (Rectangle(0, (600,), 0, (1,), "w", 0, (1,)), 1),
        (Rectangle(0, (555,), 17, (1,), "w", 0, (1,)), 3),
        (Rectangle(0, (20, 12), 5, (30, 1), "w", 3, (12, 1)), 1),
        (Rectangle(0, (20, 30), 0, (30, 1), "w", 3, (1, 20)), 1),
        (Rectangle(0, (4, 5, 2, 6), 0, (150, 30, 6, 1), "w", 0, (60, 6, 300, 1)), 8),
        (Rectangle(0, (20,), 7, (30,), "w", 0, (1,)), 1),
        (Rectangle(0, (300,), 1, (2,), "w", 0, (1,)), 1),
        (Rectangle(0, (85,), 2, (7,), "w", 0, (1,)), 20),
        (Rectangle(0, (), 599, (), "w", 8, ()), 1),
    ],
)
def test_grids_are_large(rectangle: Rectangle, n_grids: int) -> None:
    """A tensor of 20 rows of 30: whole, a run, a column block, transposed, permuted, a column,
    every other element, and a stride that no row divides by."""
    assert len(check(rectangle, 30)) == n_grids
