"""Where a rank holds runs of a checkpoint's tensors: the geometry of reading weights back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta.codec.hazard import Tile
from vllm_delta.codec.order import Signed
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import I64, RankLayout
from vllm_delta.patch.grids import grids

UNIT_BITS = 22
"""Runs of this many elements hold any lane whole; what a rank lacks is kept by them."""

# Columns of a table of crossings: a grid of elements, in a storage and in a run.
RECTANGLE, OFFSET, ROW_STRIDE, COL_STRIDE, N_ROWS, N_COLS, AT, PITCH, STEP = range(9)

# Columns of a tensor's table of grids, and of a run's table of boxes.
_INDEX, _OFFSET, _ROW_STRIDE, _COL_STRIDE = range(4)
_ROW, _ROW_STEP, _COL, _COL_STEP, _ROWS, _COLS = range(4, 10)
_BOX_ROW, _BOX_COL, _BOX_ROWS, _BOX_COLS, _BOX_AT = range(5)


class Run(NamedTuple):
    """Consecutive elements of a tensor's tile, counted row by row within the tile."""

    tensor: int
    tile: Tile
    start: int
    n: int

    @property
    def unit(self) -> Run:
        """The aligned run of at most 2^UNIT_BITS elements in which it lies."""
        first = self.start >> UNIT_BITS << UNIT_BITS
        return Run(self.tensor, self.tile, first, min(1 << UNIT_BITS, self.tile.numel - first))

    def to_list(self) -> list[int]:
        """Plain values, for a call between processes."""
        return [self.tensor, *self.tile, self.start, self.n]

    @staticmethod
    def from_list(values: Sequence[int]) -> Run:
        """The run that `to_list` wrote."""
        tensor, row, col, n_rows, n_cols, start, n = values
        return Run(tensor, Tile(row, col, n_rows, n_cols), start, n)

    def locate(self, indices: Signed, spec: TensorSpec) -> tuple[slice, I64, npt.NDArray[np.bool_]]:
        """Finds the elements of the run among a tensor's.

        Args:
            indices: signed[nnz], flat checkpoint indices, ascending.

        Returns:
            some: a part of `indices` that holds all that are in the run.
            positions: int64[n], where in the run the elements of that part would be.
            inside: bool[n], whether they are.
        """
        tile, n_cols = self.tile, spec.n_cols
        top, bottom = self.start // tile.n_cols, (self.start + self.n - 1) // tile.n_cols
        first = (tile.row + top) * n_cols + tile.col
        last = (tile.row + bottom) * n_cols + tile.col + tile.n_cols
        low, high = np.searchsorted(indices, np.array([first, last], indices.dtype))
        rows, cols = np.divmod(indices[low:high].astype(np.int64), n_cols)
        cols -= tile.col
        positions = (rows - tile.row) * tile.n_cols + cols - self.start
        inside = (cols >= 0) & (cols < tile.n_cols) & (positions >= 0) & (positions < self.n)
        return slice(low, high), positions, inside


class Places:
    """Which elements a rank holds, and where.

    Args:
        schema: the checkpoint's tensors.
        layout: where this rank holds them.
    """

    def __init__(self, schema: Schema, layout: RankLayout) -> None:
        self._schema = schema
        self._tables: dict[int, I64] = {}
        self._distinct: dict[int, list[int]] = {}
        seen = set()
        self.n_bytes = 0
        for index, rectangle in enumerate(layout.rectangles):
            if rectangle.region not in seen:
                seen.add(rectangle.region)
                self._distinct.setdefault(rectangle.tensor, []).append(index)
                self.n_bytes += rectangle.numel * schema.tensors[rectangle.tensor].itemsize
        self._layout = layout

    def count(self, run: Run) -> int:
        """How many of a run's elements the rank holds."""
        found = self.crossings(run)
        return int((found[:, N_ROWS] * found[:, N_COLS]).sum())

    def missing(self, run: Run) -> npt.NDArray[np.bool_]:
        """bool[run.n]: which of its elements the rank does not hold."""
        mask = np.ones(run.n, np.bool_)
        for row in self.crossings(run):
            sizes, strides = (row[N_ROWS], row[N_COLS]), (row[PITCH], row[STEP])
            np.lib.stride_tricks.as_strided(mask[row[AT] :], sizes, strides)[...] = False
        return mask

    def crossings(self, run: Run) -> I64:
        """int64[n, 9]: what the rank holds of a run, each element once."""
        table = self._table(run.tensor)
        boxes = np.array(list(_boxes(run)), np.int64)[:, :, None]
        row, col = boxes[:, _BOX_ROW], boxes[:, _BOX_COL]
        i, n_rows = _overlap(table[_ROW], table[_ROW_STEP], table[_ROWS], row, boxes[:, _BOX_ROWS])
        j, n_cols = _overlap(table[_COL], table[_COL_STEP], table[_COLS], col, boxes[:, _BOX_COLS])
        which = np.nonzero((n_rows > 0) & (n_cols > 0))
        i, j = i[which], j[which]
        box, grid = which
        chosen = table[:, grid]
        width = run.tile.n_cols
        down = chosen[_ROW] + i * chosen[_ROW_STEP] - boxes[box, _BOX_ROW, 0]
        along = chosen[_COL] + j * chosen[_COL_STEP] - boxes[box, _BOX_COL, 0]
        found = np.empty((len(i), 9), np.int64)
        found[:, RECTANGLE] = chosen[_INDEX]
        found[:, OFFSET] = chosen[_OFFSET] + i * chosen[_ROW_STRIDE] + j * chosen[_COL_STRIDE]
        found[:, ROW_STRIDE], found[:, COL_STRIDE] = chosen[_ROW_STRIDE], chosen[_COL_STRIDE]
        found[:, N_ROWS], found[:, N_COLS] = n_rows[which], n_cols[which]
        found[:, AT] = boxes[box, _BOX_AT, 0] + down * width + along
        found[:, PITCH], found[:, STEP] = chosen[_ROW_STEP] * width, chosen[_COL_STEP]
        return found

    def _table(self, tensor: int) -> I64:
        """int64[10, n]: the grids of the tensor that the rank holds."""
        table = self._tables.get(tensor)
        if table is None:
            n_cols = self._schema.tensors[tensor].n_cols
            rows = [
                (
                    *(index, g.offset, g.row_stride, g.col_stride),
                    *(g.row, g.row_step, g.col, g.col_step, g.n_rows, g.n_cols),
                )
                for index in self._distinct.get(tensor, ())
                for g in grids(self._layout.rectangles[index], n_cols)
            ]
            table = np.array(rows, np.int64).reshape(-1, 10).T.copy()
            self._tables[tensor] = table
        return table


def _boxes(run: Run) -> Iterator[tuple[int, int, int, int, int]]:
    """A run as boxes of the tensor's rows and columns: row, column, their numbers, and where in
    the run the first element is."""
    tile, width = run.tile, run.tile.n_cols
    at = 0
    while at < run.n:
        row, col = divmod(run.start + at, width)
        left = run.n - at
        n_rows = left // width if col == 0 and left >= width else 1
        n_cols = min(width - col, left)
        yield tile.row + row, tile.col + col, n_rows, n_cols, at
        at += n_rows * n_cols


def _overlap(first: I64, step: I64, size: I64, start: I64, length: I64) -> tuple[I64, I64]:
    """Of the numbers first + k·step, 0 <= k < size: the first k with one in start … start +
    length - 1, and how many there are (perhaps none, or fewer)."""
    low = np.maximum(-((first - start) // step), 0)
    high = np.minimum(-((first - start - length) // step), size)
    return low, high - low
