"""The lanes of a version that concern a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from vllm_delta.codec import LaneDecoder
from vllm_delta.codec.hazard import Lane, Part, Tile
from vllm_delta.codec.order import SIGNED, Signed
from vllm_delta.errors import BaseMismatchError, FormatError
from vllm_delta.format import Version
from vllm_delta.patch import Run


class Source(Protocol):
    """What a rank has to decode with."""

    def count(self, run: Run) -> int:
        """How many elements of a run the rank holds."""

    def lacks(self, units: Iterable[Run], base: Version) -> list[Run]:
        """Which of these units the halo has to get first."""

    def distrust(self) -> None:
        """Gets the halo anew before it is used again."""

    def decoder(self, base: Version) -> LaneDecoder:
        """Decodes all lanes that it is given, of a version with that base."""


class RankLanes:
    """Decodes the lanes of one version that concern a rank; a `codec.LaneDecoder`.

    Those are the lanes in units of which the rank holds something. Once bits are lacking nothing
    more is decoded: what comes is empty, and only says what else is lacking.

    Attributes:
        used: whether there were lanes at all.
        needed, lacking: units that the halo has to have, and has not.
        skipped: by tensor, the tiles of which some lanes were left out.
        n_lanes: how many were decoded.
    """

    def __init__(self, source: Source, base: Version) -> None:
        self.used = False
        self.needed: dict[Run, None] = {}
        self.lacking: dict[Run, None] = {}
        self.skipped: dict[int, set[Tile]] = {}
        self.n_lanes = 0
        self._source = source
        self._base = base
        self._decoder: LaneDecoder | None = None

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        """See `LaneDecoder.decode`."""
        self.used = True
        wanted = [self._wanted(part) for part in parts]
        # Once something was left out all is, although it may have been supplied meanwhile.
        self.lacking |= dict.fromkeys(self._source.lacks(self.needed, self._base))
        if self.lacking:
            return [_nothing(part) for part in parts]
        if self._decoder is None:
            self._decoder = self._source.decoder(self._base)
        try:
            found = self._decoder.decode(wanted)
        except FormatError as error:
            if self.needed:
                self._source.distrust()
            # The bytes are those that were published, so the weights are not those they are for.
            raise BaseMismatchError(
                "resident weights are not the base that a delta was made for", **error.facts
            ) from error
        self.n_lanes += sum(len(part.lanes) for part in wanted)
        return found

    def _wanted(self, part: Part) -> Part:
        lanes: list[Lane] = []
        n_changes = 0
        for lane in part.lanes:
            run = Run(part.tensor, lane.tile, lane.start, lane.n_elements)
            n_held = self._source.count(run.unit)
            if not n_held:
                self.skipped.setdefault(part.tensor, set()).add(lane.tile)
                continue
            if n_held < run.unit.n and self._source.count(run) < run.n:
                self.needed[run.unit] = None
            lanes.append(lane._replace(first_change=n_changes))
            n_changes += lane.n_changes
        return replace(part, lanes=tuple(lanes), n_changes=n_changes)


def _nothing(part: Part) -> tuple[Signed, Signed]:
    return np.empty(0, part.index_type), np.empty(0, SIGNED[part.spec.itemsize])
