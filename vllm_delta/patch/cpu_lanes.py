"""Lanes of the `hazard` codec in main memory, decoded against copies of the resident weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vllm_delta.codec.hazard import Lane, Part
from vllm_delta.codec.hazard.lanes import decode_lane, sort_bands, to_indices
from vllm_delta.codec.order import SIGNED, UNSIGNED, Signed, Unsigned
from vllm_delta.patch.places import Run

GATHERED_BITS = 20
"""Short lanes are gathered together in runs of this many elements; a longer lane alone."""


class CpuLanes:
    """Decodes lanes on the calling thread, without the GIL; a `codec.LaneDecoder`.

    Memory beside the changes: a copy of one run of weights, at most a lane or 2^20 elements.

    Args:
        gather: copies the bits of a run before the change to an array: unsigned[run.n]; whoever
            changes the weights must not do so meanwhile.
    """

    def __init__(self, gather: Callable[[Run, Unsigned], None]) -> None:
        self._gather = gather

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        """See `LaneDecoder.decode`: of all lanes."""
        return [self._decode(part) for part in parts]

    def _decode(self, part: Part) -> tuple[Signed, Signed]:
        itemsize = part.spec.itemsize
        indices = np.empty(part.n_changes, part.index_type)
        steps = np.empty(part.n_changes, SIGNED[itemsize])
        for lanes in _neighbours(part.lanes):
            first, last = lanes[0], lanes[-1]
            n = last.start + last.n_elements - first.start
            bits: Unsigned = np.empty(n, UNSIGNED[itemsize])
            self._gather(Run(part.tensor, first.tile, first.start, n), bits)
            for lane in lanes:
                some = slice(lane.first_change, lane.first_change + lane.n_changes)
                at = lane.start - first.start
                mine = bits[at : at + lane.n_elements]
                decode_lane(part, lane, mine, indices[some], steps[some])
                to_indices(indices[some], part.spec, lane)
        sort_bands(indices, steps, part.lanes)
        return indices, steps


def _neighbours(lanes: Sequence[Lane]) -> Iterator[list[Lane]]:
    """Lanes of the same aligned run of a tile."""
    for _, some in itertools.groupby(lanes, lambda lane: (lane.tile, lane.start >> GATHERED_BITS)):
        yield list(some)
