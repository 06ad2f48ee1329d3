"""The halo: weights that a rank does not hold, and needs to decode lanes of which it holds a part.

They are kept by units (`Run.unit`), so that later deltas with shorter or longer lanes need nothing
new. No fingerprint proves them: the sums that a delta is judged by count what is served, once. What
proves them is the hash of each lane that was decoded with them, over its positions and new bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta.codec import Change, order
from vllm_delta.codec.hazard.lanes import elements
from vllm_delta.codec.hazard.tiles import HALO_SHARE
from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.errors import SettingsError
from vllm_delta.format import Schema, Version
from vllm_delta.layout import I64
from vllm_delta.patch.overlay import Overlay, put
from vllm_delta.patch.places import Places, Run


class LackingError(Exception):
    """Bits are needed that the rank does not hold: of these units."""

    def __init__(self, units: Iterable[Run]) -> None:
        super().__init__("a rank lacks bits of the base")
        self.units = tuple(units)


@dataclass
class _Kept:
    """What is missing of a unit, in order: unsigned[n], and the version it is of."""

    bits: Unsigned
    version: Version


class Halo:
    """What a rank keeps of units that it does not hold all of. Not thread-safe.

    A unit is of one version. It follows the weights through patches that know all its changes;
    what did not follow is gone, and is asked for again.

    Args:
        schema: the checkpoint's tensors.
        places: what the rank holds.
    """

    def __init__(self, schema: Schema, places: Places) -> None:
        self._schema = schema
        self._places = places
        self._kept: dict[Run, _Kept] = {}
        self.limit_bytes = places.n_bytes // HALO_SHARE

    @property
    def n_bytes(self) -> int:
        """Memory that it takes; any thread may ask."""
        return sum(kept.bits.nbytes for kept in list(self._kept.values()))

    @property
    def units(self) -> tuple[Run, ...]:
        return tuple(self._kept)

    def has(self, unit: Run, version: Version) -> bool:
        """Whether the halo has what the rank misses of the unit."""
        kept = self._kept.get(unit)
        return kept is not None and kept.version == version

    def fill(self, bits: Any, run: Run, version: Version) -> None:
        """Adds what the rank does not hold to the bits of a run.

        Args:
            bits: [run.n] as for `Patcher.gather`, which has filled in what the rank holds.

        Raises:
            LackingError: the halo has not got it.
        """
        unit = run.unit
        if not self.has(unit, version):
            raise LackingError([unit])
        missing = self._places.missing(run)
        before = run.start - unit.start
        if before:
            before -= self._places.count(Run(run.tensor, run.tile, unit.start, before))
        values = self._kept[unit].bits[before : before + np.count_nonzero(missing)]
        put(bits, missing, values)

    def make_room(self, units: Iterable[Run]) -> None:
        """Forgets what would not fit beside these units.

        Raises:
            SettingsError: they alone take more than a rank may keep.
        """
        needed = {unit: self._missing_bytes(unit) for unit in units}
        if sum(needed.values()) > self.limit_bytes:
            largest = max(needed, key=needed.__getitem__)
            raise SettingsError(
                "the channel's deltas are not cut as the engine's ranks are; "
                "publish with shards = the tensor-parallel size, or with the codec gap",
                name=self._schema.tensors[largest.tensor].name,
                n_bytes=sum(needed.values()),
                limit=self.limit_bytes,
            )
        others = [unit for unit in self._kept if unit not in needed]
        while others and sum(map(self._missing_bytes, others)) + sum(needed.values()) > (
            self.limit_bytes
        ):
            del self._kept[others.pop()]

    def _missing_bytes(self, unit: Run) -> int:
        return (unit.n - self._places.count(unit)) * self._schema.tensors[unit.tensor].itemsize

    def put(self, unit: Run, bits: Unsigned, version: Version) -> None:
        """Takes a unit's bits over: unsigned[unit.n], of which what the rank holds is ignored."""
        self._kept[unit] = _Kept(bits[self._places.missing(unit)], version)

    def patch(self) -> HaloPatch:
        """A patch of the units that there are now, to be filled."""
        return HaloPatch(self._schema, self._places, self.units)

    def apply(self, patch: HaloPatch, base: Version, target: Version) -> None:
        """Follows the weights from base to target."""
        self._move(patch, base, target, 1)

    def rollback(self, patch: HaloPatch, base: Version, target: Version) -> None:
        """Follows the weights back from target to base."""
        self._move(patch, target, base, -1)

    def _move(self, patch: HaloPatch, here: Version, there: Version, sign: int) -> None:
        for unit, kept in list(self._kept.items()):
            pieces = patch.pieces.get(unit)
            if pieces is not None and not all(piece.may_go(sign) for piece in pieces):
                pieces = None  # it was not there when the weights went the other way
            if kept.version == here and pieces is not None:
                del self._kept[unit]  # nothing half patched stays
                for piece in pieces:
                    piece.swap_or_step(kept.bits, sign)
                kept.version = there
                self._kept[unit] = kept
            elif kept.version != there:
                del self._kept[unit]

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()


@dataclass(eq=False)
class _Piece:
    """Changes of a unit's kept bits: steps at places, or other bits for all of them.

    Attributes:
        swapped: whether `bits` are those of the base, exchanged for the target's.
    """

    places: npt.NDArray[np.int32] | None
    steps: Signed | None
    bits: Unsigned | None
    swapped: bool = False

    def may_go(self, sign: int) -> bool:
        """Whether it has what the kept bits become."""
        return self.bits is None or self.swapped == (sign < 0)

    def swap_or_step(self, kept: Unsigned, sign: int) -> None:
        if self.bits is not None:
            kept[...], self.bits[...] = self.bits.copy(), kept.copy()
            self.swapped = sign > 0
        elif self.steps is not None:
            steps = self.steps if sign > 0 else np.negative(self.steps)
            kept[self.places] = order.add_steps(kept[self.places], steps)


class HaloPatch:
    """One version's changes of the halo's units.

    Attributes:
        pieces: by unit; a unit that the version does not change has none, a unit of which not all
            changes are known is left out.
    """

    def __init__(self, schema: Schema, places: Places, units: Iterable[Run]) -> None:
        self._schema = schema
        self._places = places
        self.pieces: dict[Run, list[_Piece]] = {unit: [] for unit in units}

    def add(self, change: Change) -> None:
        """Takes what a decoded change does to the units."""
        for unit in self.pieces:
            if unit.tensor == change.tensor:
                self._add(unit, change)

    def cover(self, units: Iterable[Run], overlay: Overlay) -> None:
        """Takes what the version does to units that came when it was staged already."""
        for unit in units:
            if unit in self.pieces or not overlay.knows(unit):
                continue
            self.pieces[unit] = []
            if (change := overlay.changes.get(unit.tensor)) is not None:
                self._add(unit, change)

    def forget(self, skipped: Mapping[int, Any]) -> None:
        """Leaves out the units of tensors of which some lanes were not decoded, if they may lie
        there: by `Overlay.knows`."""
        known = Overlay(self._schema, {}, skipped)
        for unit in [unit for unit in self.pieces if not known.knows(unit)]:
            del self.pieces[unit]

    def _add(self, unit: Run, change: Change) -> None:
        spec = self._schema.tensors[unit.tensor]
        missing = self._places.missing(unit)
        if change.bits is not None:
            bits = elements(change.bits, spec, unit.tile, unit.start, unit.n)[missing]
            self.pieces[unit].append(_Piece(None, None, bits))
        elif change.indices is not None and change.steps is not None:
            some, positions, inside = unit.locate(change.indices, spec)
            inside[inside] = missing[positions[inside]]
            order_of: I64 = np.cumsum(missing, dtype=np.int64) - 1
            places = order_of[positions[inside]].astype(np.int32)
            self.pieces[unit].append(_Piece(places, change.steps[some][inside], None))
