"""Tensors coded by `hazard`: their lanes, and how a CPU decodes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_delta.codec import workers
from vllm_delta.codec.hazard import loops, tables
from vllm_delta.codec.hazard.model import Tables
from vllm_delta.codec.hazard.tiles import Tile
from vllm_delta.codec.order import SIGNED, Signed, Unsigned
from vllm_delta.errors import FormatError
from vllm_delta.format import TensorSpec

Words = npt.NDArray[np.uint32]

PROBLEMS = {
    loops.SHORT: "hazard: a lane ends too early",
    loops.BAD_STATE: "hazard: not a lane's state",
    loops.TOO_FEW: "hazard: a lane has fewer changes than it says",
    loops.BAD_STEP: "hazard: a step does not fit its type",
    loops.BAD_END: "hazard: a lane does not end as it was begun",
}
"""What is wrong with a lane, by the number that a decoder gives it."""


class Lane(NamedTuple):
    """Consecutive elements of a tile that are decoded one after the other.

    Attributes:
        tile: the tile, with its rows in order.
        number: of the lane, counted over the tensor's tiles.
        start, n_elements: in the tile's elements, row by row.
        n_changes: how many of them change.
        first_change: changes in the tensor's lanes before.
        first_word, n_words: its words among all of the blob's.
    """

    tile: Tile
    number: int
    start: int
    n_elements: int
    n_changes: int
    first_change: int
    first_word: int
    n_words: int


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor's entry: its lanes that change, and what decoding them takes.

    Attributes:
        n_changes: over all lanes.
        words: uint32, all words of the blob.
    """

    tensor: int
    spec: TensorSpec
    tables: Tables
    n_changes: int
    lanes: tuple[Lane, ...]
    words: Words

    @property
    def index_type(self) -> type[np.signedinteger]:
        return np.int32 if self.spec.numel < 1 << 31 else np.int64

    def words_of(self, lane: Lane) -> Words:
        return self.words[lane.first_word : lane.first_word + lane.n_words]


class LaneDecoder(Protocol):
    """Decodes lanes where the weights before the change are."""

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        """Indices, ascending, and steps of the changes in each part's lanes that are wanted.

        Raises:
            FormatError: a lane is damaged, or the weights are not what it was made for.
        """


def lane_seed(tensor: int, number: int) -> int:
    """What the hash of a lane begins with."""
    return (tensor + 1) << 32 | number


def spans(tiles: Iterable[Tile], lane_bits: int) -> Iterator[tuple[Tile, int, int, int]]:
    """Tile, number, start and number of elements of every lane of 2^lane_bits elements."""
    number = 0
    for tile in tiles:
        for start in range(0, tile.numel, 1 << lane_bits):
            yield tile, number, start, min(1 << lane_bits, tile.numel - start)
            number += 1


def elements(flat: Unsigned, spec: TensorSpec, tile: Tile, start: int, n: int) -> Unsigned:
    """Part of a tile out of the whole flat tensor: unsigned[n]; aliases it where it can."""
    if tile.n_cols == spec.n_cols:
        first = tile.row * spec.n_cols + start
        return flat[first : first + n]
    top, skip = divmod(start, tile.n_cols)
    bottom = -(-(start + n) // tile.n_cols)
    matrix = flat.reshape(spec.n_rows, spec.n_cols)
    rows = matrix[tile.row + top : tile.row + bottom, tile.col : tile.col + tile.n_cols]
    return rows.reshape(-1)[skip : skip + n]


def to_indices(positions: Signed, spec: TensorSpec, lane: Lane) -> None:
    """Turn positions in a lane into flat indices of the tensor, in place."""
    tile = lane.tile
    if tile.n_cols == spec.n_cols:
        positions += tile.row * spec.n_cols + lane.start
        return
    rows, cols = np.divmod(positions + lane.start, tile.n_cols)
    positions[:] = (rows + tile.row) * spec.n_cols + cols + tile.col


def sort_bands(indices: Signed, steps: Signed, lanes: Iterable[Lane]) -> None:
    """Put the changes of these lanes, one after the other, in order, in place.

    They are unless lanes lie side by side, which they do within a band of rows.
    """
    first = 0
    for _, some in itertools.groupby(lanes, lambda lane: lane.tile.row):
        band = list(some)
        last = first + sum(lane.n_changes for lane in band)
        if band[0].tile != band[-1].tile:
            order = np.argsort(indices[first:last], kind="stable")
            indices[first:last] = indices[first:last][order]
            steps[first:last] = steps[first:last][order]
        first = last


class HostLanes:
    """Decodes every lane against whole tensors in main memory.

    Args:
        base: by the tensor's place in the schema, unsigned[numel], flat: the bits before the
            change. Not modified; read while `decode` runs.
        n_threads: threads to use, the calling one included.
    """

    def __init__(self, base: Callable[[int], Unsigned], n_threads: int = 1) -> None:
        self._base = base
        self._n_threads = n_threads

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        outputs = [
            (np.empty(part.n_changes, part.index_type), np.empty(part.n_changes, _steps(part)))
            for part in parts
        ]
        bases = [self._base(part.tensor) for part in parts]

        def work(job: tuple[int, Lane]) -> None:
            place, lane = job
            part, (indices, steps) = parts[place], outputs[place]
            some = slice(lane.first_change, lane.first_change + lane.n_changes)
            bits = elements(bases[place], part.spec, lane.tile, lane.start, lane.n_elements)
            decode_lane(part, lane, bits, indices[some], steps[some])
            to_indices(indices[some], part.spec, lane)

        jobs = [(place, lane) for place, part in enumerate(parts) for lane in part.lanes]
        jobs.sort(key=lambda job: -job[1].n_elements)
        workers.run(work, jobs, self._n_threads)
        for part, output in zip(parts, outputs, strict=True):
            sort_bands(*output, part.lanes)
        return outputs


def decode_lane(part: Part, lane: Lane, bits: Unsigned, positions: Signed, steps: Signed) -> None:
    """Decode one lane.

    Args:
        bits: unsigned[lane.n_elements], contiguous, before the change; not modified.
        positions: signed[lane.n_changes], written: where in the lane it changes.
        steps: signed[lane.n_changes] of the type's width, written.

    Raises:
        FormatError: it is damaged, or `bits` are not what it was made for.
    """
    problem = loops.decode_lane(
        bits,
        part.words_of(lane),
        np.uint64(lane_seed(part.tensor, lane.number)),
        part.tables.shift,
        part.tables.rates,
        part.tables.scales,
        tables.STEPS,
        tables.POSITIONS,
        tables.NODE_OF,
        positions,
        steps,
    )
    if problem != loops.OK:
        raise FormatError(PROBLEMS[problem], name=part.spec.name, lane=lane.number)


def _steps(part: Part) -> type[np.signedinteger]:
    return SIGNED[part.spec.itemsize]
