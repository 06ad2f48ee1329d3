"""Rectangles cut into grids of the checkpoint's rows and columns, which a GPU kernel can walk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_delta.layout import Dim, Rectangle


@dataclass(frozen=True)
class Grid:
    """Elements (i, j), 0 <= i < n_rows, 0 <= j < n_cols, of a rectangle.

    Attributes:
        row, row_step, col, col_step: element (i, j) is at row ``row + i·row_step`` and column
            ``col + j·col_step`` of the checkpoint's tensor,
        offset, row_stride, col_stride: at ``offset + i·row_stride + j·col_stride`` in the storage,
        at, pitch: and at ``at + i·pitch + j`` when the rectangle is counted in checkpoint order.
    """

    n_rows: int
    n_cols: int
    row: int
    row_step: int
    col: int
    col_step: int
    offset: int
    row_stride: int
    col_stride: int
    at: int
    pitch: int

    def cut(self, rows: int, cols: int) -> Iterator[Grid]:
        """The same elements in grids of at most `rows` by `cols`."""
        for i, j in itertools.product(range(0, self.n_rows, rows), range(0, self.n_cols, cols)):
            yield replace(
                self,
                n_rows=min(rows, self.n_rows - i),
                n_cols=min(cols, self.n_cols - j),
                row=self.row + i * self.row_step,
                col=self.col + j * self.col_step,
                offset=self.offset + i * self.row_stride + j * self.col_stride,
                at=self.at + i * self.pitch + j,
            )


def grids(rectangle: Rectangle, n_cols: int) -> Iterator[Grid]:
    """Cuts a rectangle of a tensor with rows of `n_cols` into grids, large where it can."""
    dims = [*rectangle.dims] or [Dim(1, 1, 1)]
    *outer, inner = dims
    places = range(len(outer))
    pitches = [1] * len(dims)
    for k in reversed(places):
        pitches[k] = pitches[k + 1] * dims[k + 1].size
    # A grid goes down the longest dimension that steps by whole rows; the others are unrolled.
    whole_rows = [k for k in places if outer[k].source % n_cols == 0]
    down = max(whole_rows, key=lambda k: outer[k].size, default=None)
    unrolled = [k for k in places if k != down]
    for digits in itertools.product(*(range(outer[k].size) for k in unrolled)):
        index, offset, at = rectangle.source_offset, rectangle.target_offset, 0
        for k, digit in zip(unrolled, digits, strict=True):
            index += digit * outer[k].source
            offset += digit * outer[k].target
            at += digit * pitches[k]
        fits = index % n_cols + (inner.size - 1) * inner.source < n_cols
        if down is None:
            yield from _run(index, offset, at, inner, n_cols)
        elif fits:
            row, col = divmod(index, n_cols)
            size, source, target = outer[down]
            yield Grid(
                size, inner.size, row, source // n_cols, col, inner.source, offset, target,
                inner.target, at, pitches[down],
            )  # fmt: skip
        else:
            size, source, target = outer[down]
            for i in range(size):
                yield from _run(
                    index + i * source, offset + i * target, at + i * pitches[down], inner, n_cols
                )


def _run(index: int, offset: int, at: int, inner: Dim, n_cols: int) -> Iterator[Grid]:
    """A run of elements, cut where rows of the checkpoint end: a part of a row, whole rows, a
    part of a row."""
    left, source, target = inner
    while left:
        row, col = divmod(index, n_cols)
        n = min(left, -(-(n_cols - col) // source))
        # Whole rows look alike where the run enters each at the same column.
        n_rows = left // n if col < source and n_cols % source == 0 else 1
        yield Grid(n_rows, n, row, 1, col, source, offset, n * target, target, at, n)
        left -= n_rows * n
        index += n_rows * n * source
        offset += n_rows * n * target
        at += n_rows * n
