"""Tiles: the parts of a tensor that are coded apart, so that a reader decodes what it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_delta.format import Schema

MAX_SHARDS = 1024
HALO_SHARE = 50
"""A rank keeps at most one part in so many of its bytes of weights that it does not serve."""
_PADDING = 64
"""vLLM pads a vocabulary to a multiple of this before it shares it out."""
CUT = 0x80
"""In the first byte of a tensor's lines in the directory: it is cut into bands."""
MIN_LANE_BITS, MAX_LANE_BITS, MAX_TILED_LANE_BITS = 8, 22, 20


class Tile(NamedTuple):
    """Rows and columns of a tensor seen as a matrix: all dimensions but the last are rows."""

    row: int
    col: int
    n_rows: int
    n_cols: int

    @property
    def numel(self) -> int:
        return self.n_rows * self.n_cols


@dataclass(frozen=True)
class Tiles:
    """A tensor's tiles in order, each made when it is asked for: there may be many.

    Attributes:
        n_matrices, n_rows: the tensor is so many matrices of so many rows.
        row_bands, col_bands: start and length of the parts of each.
    """

    n_matrices: int
    n_rows: int
    row_bands: Sequence[tuple[int, int]]
    col_bands: Sequence[tuple[int, int]]

    def __len__(self) -> int:
        return self.n_matrices * len(self.row_bands) * len(self.col_bands)

    def __iter__(self) -> Iterator[Tile]:
        for matrix in range(self.n_matrices):
            for row, height in self.row_bands:
                for col, width in self.col_bands:
                    yield Tile(matrix * self.n_rows + row, col, height, width)


_NONE = Tiles(0, 0, (), ())


class Tiling:
    """How a schema's tensors are cut for readers that split them into `shards` parts.

    With one shard every tensor stays whole. Else a matrix with many changes is cut into `shards`
    bands of rows by as many bands of columns; dimensions before the last two are cut into
    matrices. Whole is then only what every rank can keep beside its own weights: the smallest
    tensors, as long as all of them together fit into the halo of a rank that holds one part in
    `shards`.

    Args:
        schema: the checkpoint's tensors.
        shards: 1 to MAX_SHARDS.
    """

    def __init__(self, schema: Schema, shards: int) -> None:
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"{shards} shards")
        self.schema = schema
        self.shards = shards

    @property
    def max_lane_bits(self) -> int:
        return MAX_LANE_BITS if self.shards == 1 else MAX_TILED_LANE_BITS

    def tiles(self, tensor: int, *, cut: bool) -> Tiles:
        """The tensor's tiles; none when it may not be coded so.

        Args:
            cut: whether into bands; else it is one tile.
        """
        spec = self.schema.tensors[tensor]
        if not spec.stepped or spec.numel == 0:
            return _NONE
        if not cut:
            whole = self.shards == 1 or tensor in self._whole
            return Tiles(1, spec.n_rows, [(0, spec.n_rows)], [(0, spec.n_cols)]) if whole else _NONE
        if self.shards == 1 or len(spec.shape) < 2:
            return _NONE
        *outer, n_rows, n_cols = spec.shape
        return Tiles(
            math.prod(outer), n_rows, bands(n_rows, self.shards), bands(n_cols, self.shards)
        )

    @cached_property
    def _whole(self) -> frozenset[int]:
        """The smallest tensors, which every rank can keep whole."""
        left = self.schema.n_bytes // (HALO_SHARE * self.shards)
        kept = []
        specs = self.schema.tensors
        for tensor in sorted(range(len(specs)), key=lambda tensor: specs[tensor].n_bytes):
            left -= specs[tensor].n_bytes
            if left < 0:
                break
            kept.append(tensor)
        return frozenset(kept)


def bands(n: int, shards: int) -> list[tuple[int, int]]:
    """Start and length of the parts that rows or columns are cut into.

    Equal parts where they are; else as a vocabulary of n rows is shared out once it is padded.
    """
    step = n // shards
    if n % shards:
        step = -(-(-(-n // _PADDING) * _PADDING) // shards)
    return [(start, min(step, n - start)) for start in range(0, n, step)]
