"""Deltas coded by hazard wherever it is allowed, also where another codec would be smaller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from vllm_delta import codec
from vllm_delta.codec import Change, writer
from vllm_delta.codec.hazard import Part, definition, encoder, lanes, parse_parts, tables
from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.format import Schema

Base = Callable[[int], Unsigned]


@contextlib.contextmanager
def forced(*, changes_in_tile: int = 1, changes_in_lane: int = 8) -> Iterator[None]:
    """Tiny tensors are coded as large ones are: by hazard wherever it may be, tiles and lanes
    short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_WORTH_GAP", 1 << 60)
        patch.setattr(writer, "_or_raw", lambda item, _: item)
        patch.setattr(encoder, "_CHANGES_IN_TILE", changes_in_tile)
        patch.setattr(encoder, "_CHANGES_IN_LANE", changes_in_lane)
        yield


def encode(
    schema: Schema,
    changes: Sequence[Change],
    base: Base,
    *,
    shards: int = 1,
    n_threads: int = 1,
    changes_in_tile: int = 1,
    changes_in_lane: int = encoder._CHANGES_IN_LANE,
) -> bytes:
    """One blob; by gap only what hazard may not code."""
    with forced(changes_in_tile=changes_in_tile, changes_in_lane=changes_in_lane):
        (data,) = codec.encode_delta(
            schema, changes, codec="hazard", base=base, shards=shards, n_threads=n_threads
        )
    return data


def parts_of(data: bytes, schema: Schema) -> Sequence[Part]:
    """The blob's hazard entries."""
    parsed = codec.parse_blob(data, schema, "delta")
    entries = [entry for entry in parsed.entries if entry.codec == codec.HAZARD]
    return parse_parts(entries, parsed.sections, schema)


def by_definition(part: Part, lane: lanes.Lane, bits: Unsigned) -> tuple[list[int], list[int]]:
    """One lane by the plain Python definition."""
    rates = [tables.RATES.tolist().index(rate) for rate in part.tables.rates.tolist()]
    return definition.decode_lane(
        bits.tolist(),
        part.words_of(lane).tolist(),
        lane.n_changes,
        rates=rates,
        scales=part.tables.scales.tolist(),
        shift=part.tables.shift,
        width=8 * part.spec.itemsize,
        seed=lanes.lane_seed(part.tensor, lane.number),
    )


def bits_of(part: Part, lane: lanes.Lane, base: Base) -> Unsigned:
    """The lane's elements before the change."""
    flat = base(part.tensor)
    return lanes.elements(flat, part.spec, lane.tile, lane.start, lane.n_elements)


class SomeLanes:
    """Decodes the lanes that are wanted, in an order of its own.

    Args:
        wanted: says for each part and lane whether to decode it.
        arrange: puts the lanes in the order in which they are decoded.
    """

    def __init__(
        self,
        base: Base,
        wanted: Callable[[Part, lanes.Lane], bool],
        arrange: Callable[[list[lanes.Lane]], list[lanes.Lane]] = list,
    ) -> None:
        self._base, self._wanted, self._arrange = base, wanted, arrange
        self.n_decoded = 0

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        return [self._some(part) for part in parts]

    def _some(self, part: Part) -> tuple[Signed, Signed]:
        found: list[tuple[Signed, Signed]] = []
        steps_type = codec.order.SIGNED[part.spec.itemsize]
        for lane in self._arrange([lane for lane in part.lanes if self._wanted(part, lane)]):
            indices = np.empty(lane.n_changes, part.index_type)
            steps = np.empty(lane.n_changes, steps_type)
            lanes.decode_lane(part, lane, bits_of(part, lane, self._base), indices, steps)
            lanes.to_indices(indices, part.spec, lane)
            found.append((indices, steps))
            self.n_decoded += 1
        indices = np.concatenate([np.empty(0, part.index_type), *(f[0] for f in found)])
        steps = np.concatenate([np.empty(0, steps_type), *(f[1] for f in found)])
        order = np.argsort(indices)
        return indices[order], steps[order]
