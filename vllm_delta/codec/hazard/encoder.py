"""Coding changes by `hazard`: a model for some tensors, then their lanes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta.codec import workers
from vllm_delta.codec.blob import put_uvarint
from vllm_delta.codec.change import Change
from vllm_delta.codec.hazard import loops, tables
from vllm_delta.codec.hazard.lanes import elements, lane_seed, spans
from vllm_delta.codec.hazard.model import SHIFTS, Model, Statistics
from vllm_delta.codec.hazard.tiles import CUT, MIN_LANE_BITS, Tile, Tiles, Tiling
from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.format import TensorSpec

_CHANGES_IN_LANE = 1 << 12
"""A lane has at least this many changes if they lie evenly: four kilobytes or more of payload, of
which its state, its hash and its line in the directory take 12 bytes."""
_CHANGES_IN_TILE = 1 << 10
"""A tile holds at least this many changes on average: about one kilobyte of payload."""
_kept = threading.local()
"""Each thread's room, as large as a lane has needed: some 15 bytes for each of its symbols."""
_SAMPLED_ABOVE = 1 << 14
_STRIDE = 9
"""Of a larger tensor one run of 64 elements in nine is counted."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A tensor's lanes: its lines of the directory, and the words.

    Attributes:
        gap_bytes: about what the changes take by `gap`, hardly ever more: the entropy of its
            symbols.
    """

    tensor: int
    model: Model
    directory: bytes
    words: bytes
    gap_bytes: int

    @property
    def n_bytes(self) -> int:
        return len(self.directory) + len(self.words)


@dataclass(frozen=True, eq=False)
class Pending:
    """A change on its way, with the bits before it: unsigned[numel], flat."""

    change: Change
    spec: TensorSpec
    base: Unsigned
    cut: bool
    tiles: Tiles

    @classmethod
    def of(cls, change: Change, base: Unsigned, tiling: Tiling) -> Pending:
        """The change in tiles: cut into bands where each can be expected to hold enough."""
        spec = tiling.schema.tensors[change.tensor]
        bands = tiling.tiles(change.tensor, cut=True)
        if bands and change.nnz >= _CHANGES_IN_TILE * len(bands):
            return cls(change, spec, base, True, bands)
        return cls(change, spec, base, False, tiling.tiles(change.tensor, cut=False))


def encode(pending: Sequence[Pending], tiling: Tiling, n_threads: int) -> list[Coded]:
    """Code changes under one model.

    Memory beside the input and the words: one lane's symbols for each thread.
    """
    model, gaps = _measure(pending, n_threads)
    all_bits = [_lane_bits(one, tiling.max_lane_bits) for one in pending]
    jobs = [
        (place, lane)
        for place, (one, lane_bits) in enumerate(zip(pending, all_bits, strict=True))
        for lane in spans(one.tiles, lane_bits)
    ]
    coded: list[tuple[int, bytes]] = [(0, b"")] * len(jobs)

    def work(which: int) -> None:
        place, lane = jobs[which]
        coded[which] = _encode_lane(pending[place], *lane, model)

    # The longest first, so that no thread is left with one at the end.
    longest = sorted(range(len(jobs)), key=lambda which: -jobs[which][1][-1])
    workers.run(work, longest, n_threads)
    lines = [
        bytearray([lane_bits | CUT * one.cut])
        for one, lane_bits in zip(pending, all_bits, strict=True)
    ]
    parts: list[list[bytes]] = [[] for _ in pending]
    for (place, _), (n_changes, data) in zip(jobs, coded, strict=True):
        put_uvarint(lines[place], n_changes)
        if n_changes:
            put_uvarint(lines[place], len(data) // 4 - 2)
            parts[place].append(data)
    return [
        Coded(one.change.tensor, model, bytes(line), b"".join(part), gap_bytes)
        for one, line, part, gap_bytes in zip(pending, lines, parts, gaps, strict=True)
    ]


def _measure(pending: Sequence[Pending], n_threads: int) -> tuple[Model, list[int]]:
    """The model that fits the changes best, and about what each takes by `gap`."""
    mine = threading.local()
    all_of: list[Statistics] = []

    def count(one: Pending) -> int:
        if not hasattr(mine, "statistics"):
            mine.statistics = Statistics()
            all_of.append(mine.statistics)
        elements, magnitudes = mine.statistics.of(one.spec.dtype)
        shift, n = SHIFTS[one.spec.dtype], elements.size
        found = np.zeros(2 * n, np.int64)
        stride = _STRIDE if one.base.size > _SAMPLED_ABOVE else 1
        n_seen = loops.count_classes(one.base, shift, stride, found)
        elements += (found[:n] + found[n:]) * one.base.size // n_seen
        indices, steps = one.change.indices, one.change.steps
        loops.count_changes(one.base, indices, steps, shift, n - 1, magnitudes)
        return -(-int(loops.gap_bits(indices, steps, tables.LOGARITHMS)) // 8)

    gaps = workers.run(count, pending, n_threads)
    statistics = all_of[0]
    for other in all_of[1:]:
        statistics.add(other)
    return statistics.model(), list(gaps)


def _lane_bits(one: Pending, most: int) -> int:
    """Lanes as short as still hold enough changes."""
    n_elements = _CHANGES_IN_LANE * one.spec.numel // one.change.nnz
    return max(MIN_LANE_BITS, min(most, (n_elements - 1).bit_length()))


def _changes(one: Pending, tile: Tile, start: int, n: int) -> tuple[Signed, Signed]:
    """Where the lane changes, ascending positions in it, and by which steps."""
    indices, steps, n_cols = one.change.indices, one.change.steps, one.spec.n_cols
    assert indices is not None
    assert steps is not None
    if tile.n_cols == n_cols:
        begin = tile.row * n_cols + start
        first, last = _between(indices, begin, begin + n)
        return indices[first:last] - indices.dtype.type(begin), steps[first:last]
    top, bottom = start // tile.n_cols, -(-(start + n) // tile.n_cols)
    first, last = _between(indices, (tile.row + top) * n_cols, (tile.row + bottom) * n_cols)
    rows, cols = np.divmod(indices[first:last], indices.dtype.type(n_cols))
    positions = (rows - tile.row) * tile.n_cols + cols - tile.col - start
    mine = (cols >= tile.col) & (cols < tile.col + tile.n_cols)
    mine &= (positions >= 0) & (positions < n)
    return positions[mine].astype(indices.dtype, copy=False), steps[first:last][mine]


def _between(indices: Signed, begin: int, end: int) -> tuple[int, int]:
    """Which of the ascending indices are at least `begin` and below `end`."""
    first = bisect_left(indices, begin)  # not np.searchsorted: it may convert all of them
    return first, bisect_left(indices, end, first)


class _Room:
    """Room for one lane's symbols and words."""

    def __init__(self, n: int) -> None:
        self.grow(n)

    def grow(self, n: int) -> None:
        self.n = n
        self.kinds = np.empty(n, np.uint8)
        self.lows = np.empty(n, np.uint32)
        self.shares = np.empty(n, np.uint32)
        self.words = np.empty(n + 2, np.uint32)


def _encode_lane(
    one: Pending, tile: Tile, number: int, start: int, n: int, model: Model
) -> tuple[int, bytes]:
    """The lane's number of changes, and its words."""
    positions, steps = _changes(one, tile, start, n)
    if not positions.size:
        return 0, b""
    bits = elements(one.base, one.spec, tile, start, n)
    which = model.tables[one.spec.dtype]
    if not hasattr(_kept, "room"):
        _kept.room = _Room(1 << 14)
    room = _kept.room
    while True:
        n_words = loops.encode_lane(
            bits,
            positions,
            steps,
            np.uint64(lane_seed(one.change.tensor, number)),
            which.shift,
            which.rates,
            which.scales,
            tables.STEPS,
            tables.POSITIONS,
            room.kinds,
            room.lows,
            room.shares,
            room.words,
        )
        if n_words >= 0:
            return int(positions.size), room.words[-n_words:].astype("<u4").tobytes()
        room.grow(2 * room.n)
