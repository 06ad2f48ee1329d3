"""Coding changes by `hazard`: a model for some tensors, then their lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta.codec import workers
from vllm_delta.codec.blob import put_uvarint
from vllm_delta.codec.change import Change
from vllm_delta.codec.hazard import loops, tables
from vllm_delta.codec.hazard.lanes import elements, lane_seed, spans
from vllm_delta.codec.hazard.model import SHIFTS, Model, Statistics
from vllm_delta.codec.hazard.tiles import CUT, MIN_LANE_BITS, Tile, Tiling
from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.format import TensorSpec

_CHANGES_IN_LANE = 1 << 12
"""A lane has at least this many changes if they lie evenly: four kilobytes or more of payload, of
which its state, its hash and its line in the directory take 12 bytes."""
_CHANGES_IN_TILE = 1 << 10
"""A tile holds at least this many changes on average: about one kilobyte of payload."""
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
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, change: Change, base: Unsigned, tiling: Tiling) -> Pending:
        """The change in tiles: cut into bands where each can be expected to hold enough."""
        spec = tiling.schema.tensors[change.tensor]
        if change.nnz >= _CHANGES_IN_TILE * tiling.shards**2:
            tiles = tiling.tiles(change.tensor, cut=True)
            if tiles:
                return cls(change, spec, base, True, tiles)
        return cls(change, spec, base, False, tiling.tiles(change.tensor, cut=False))


def encode(pending: Sequence[Pending], tiling: Tiling, n_threads: int) -> list[Coded]:
    """Code changes under one model.

    Memory beside the input and the words: one lane's symbols for each thread.
    """
    model, gaps = _measure(pending, n_threads)
    scratch = _Scratch()
    jobs = [
        (one, place, job)
        for place, one in enumerate(pending)
        for job in _lanes(one, _lane_bits(one, tiling.max_lane_bits))
    ]

    words = [b""] * len(jobs)

    def work(which: int) -> None:
        one, _, job = jobs[which]
        words[which] = _encode_lane(one, job, model, scratch.mine())

    # The longest first, so that no thread is left with one at the end.
    longest = sorted(range(len(jobs)), key=lambda which: -jobs[which][2].n_elements)
    workers.run(work, longest, n_threads)
    lines = [bytearray([_lane_bits(one, tiling.max_lane_bits) | CUT * one.cut]) for one in pending]
    parts: list[list[bytes]] = [[] for _ in pending]
    for (_, place, job), data in zip(jobs, words, strict=True):
        put_uvarint(lines[place], job.positions.size)
        if data:
            put_uvarint(lines[place], len(data) // 4 - 2)
            parts[place].append(data)
    return [
        Coded(one.change.tensor, model, bytes(line), b"".join(part), gap_bytes)
        for one, line, part, gap_bytes in zip(pending, lines, parts, gaps, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Job:
    """One lane: its seed, its elements before the change, where it changes and by what."""

    tile: Tile
    number: int
    start: int
    n_elements: int
    positions: Signed
    steps: Signed


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


def _lanes(one: Pending, lane_bits: int) -> Iterator[_Job]:
    indices, steps = one.change.indices, one.change.steps
    assert indices is not None
    assert steps is not None
    if len(one.tiles) == 1:
        split: Callable[[Tile], tuple[Signed, Signed]] = lambda _: (indices, steps)  # noqa: E731
    else:
        split = _by_tile(one.spec, indices, steps)
    seen: Tile | None = None
    for tile, number, start, n in spans(one.tiles, lane_bits):
        if tile != seen:
            seen, (places, some) = tile, split(tile)
        first, last = np.searchsorted(places, np.array([start, start + n], places.dtype))
        yield _Job(tile, number, start, n, places[first:last], some[first:last])


def _by_tile(
    spec: TensorSpec, indices: Signed, steps: Signed
) -> Callable[[Tile], tuple[Signed, Signed]]:
    """Gives the changes in a tile: their places in it, ascending, and steps."""

    def split(tile: Tile) -> tuple[Signed, Signed]:
        bounds = np.array([tile.row, tile.row + tile.n_rows], np.int64) * spec.n_cols
        first, last = np.searchsorted(indices, bounds.astype(indices.dtype))
        rows, cols = np.divmod(indices[first:last], indices.dtype.type(spec.n_cols))
        mine = (cols >= tile.col) & (cols < tile.col + tile.n_cols)
        places = (rows[mine] - tile.row) * tile.n_cols + cols[mine] - tile.col
        return places.astype(indices.dtype), steps[first:last][mine]

    return split


class _Scratch:
    """Room for one lane's symbols and words, for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def mine(self) -> _Room:
        room: _Room | None = getattr(self._local, "room", None)
        if room is None:
            room = self._local.room = _Room(1 << 14)
        return room


class _Room:
    def __init__(self, n: int) -> None:
        self.grow(n)

    def grow(self, n: int) -> None:
        self.n = n
        self.kinds = np.empty(n, np.uint8)
        self.lows = np.empty(n, np.uint32)
        self.shares = np.empty(n, np.uint32)
        self.words = np.empty(n + 2, np.uint32)


def _encode_lane(one: Pending, job: _Job, model: Model, room: _Room) -> bytes:
    if not job.positions.size:
        return b""
    bits = elements(one.base, one.spec, job.tile, job.start, job.n_elements)
    which = model.tables[one.spec.dtype]
    while True:
        n = loops.encode_lane(
            bits,
            job.positions - job.positions.dtype.type(job.start),
            job.steps,
            np.uint64(lane_seed(one.change.tensor, job.number)),
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
        if n >= 0:
            return room.words[-n:].astype("<u4").tobytes()
        room.grow(2 * room.n)
