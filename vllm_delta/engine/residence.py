"""The weights as staging sees them: resident bits, overlaid with what is staged.

A `hazard` delta is decoded against the bits of its base. They are read back from the weights, lane
by lane, while forward steps go on. If the base is not resident yet, the versions on the way to it,
which are staged already, are added to the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_delta.codec import Change, LaneDecoder
from vllm_delta.codec.hazard import Tile
from vllm_delta.codec.order import SIGNED, UNSIGNED, Unsigned
from vllm_delta.engine.lanes import RankLanes
from vllm_delta.engine.turns import Turns
from vllm_delta.errors import EngineError
from vllm_delta.format import Schema, Version
from vllm_delta.patch import CpuLanes, Halo, HaloPatch, LackingError, Overlay, Patch, Patcher, Run

_REMEMBERED = 1 << 16
_KEPT_SHARE = 2
"""An overlay takes at most one part in so many of the bytes of weights that a rank holds."""


class UnreachableError(Exception):
    """The base is neither resident nor reached from there by what is staged."""


@dataclass(frozen=True, eq=False)
class Built:
    """A staged version.

    Attributes:
        patch: what to apply; None for an anchor, which is only verified.
        halo: what it does to the halo.
        overlay: what it changes, kept where a later version may be decoded on top of it.
        decoded: whether it was decoded against the weights.
    """

    patch: Patch | None = None
    halo: HaloPatch | None = None
    overlay: Overlay | None = None
    decoded: bool = False


class Residence:
    """Builds patches, and reads back what decoding them takes.

    `build` runs on the staging thread, `read` and `supply` on the worker's. Weights and version
    change, and the halo is used, in one's turn only.

    Args:
        schema: the channel's tensors.
        patcher: reads and writes the weights.
        resident: the version that the weights are proven to be; None while they are not.
        overlays: what is staged on the way from one version to another; None: it leads not there.
    """

    def __init__(
        self,
        schema: Schema,
        patcher: Patcher,
        resident: Callable[[], Version | None],
        overlays: Callable[[Version, Version], Sequence[Overlay] | None],
    ) -> None:
        self.turns = Turns()
        self.halo = Halo(schema, patcher.places)
        self.n_lanes = 0
        self._schema = schema
        self._patcher = patcher
        self._resident = resident
        self._overlays = overlays
        self._keeps: bool | None = None
        self._counts: dict[Run, int] = {}

    def build(self, base: Version, decode: Callable[[LaneDecoder], Iterable[Change]]) -> Built:
        """Stages a version.

        Its changes are kept as an overlay, unless they are too large, on a channel that has shown
        `hazard` deltas, or not shown yet that it has none. Without one the next version waits until
        this one is resident.

        Raises:
            UnreachableError, LackingError: it cannot be decoded now.
            BaseMismatchError: the weights are not its base.
        """
        with self.turns.reading():
            halo = self.halo.patch()
        lanes = RankLanes(self, base)
        kept: dict[int, Change] | None = {} if self._keeps is not False else None

        def noted() -> Iterator[Change]:
            for change in decode(lanes):
                halo.add(change)
                if kept is not None:
                    kept[change.tensor] = change
                yield change

        patch = self._patcher.stage(noted())
        self._settle(lanes)
        halo.forget(lanes.skipped)
        self._keeps = bool(self._keeps) or lanes.used
        self.n_lanes += lanes.n_lanes
        overlay = None
        if kept is not None and self._keeps:
            skipped = {tensor: frozenset(tiles) for tensor, tiles in lanes.skipped.items()}
            overlay = Overlay(self._schema, kept, skipped)
            if overlay.n_bytes > self._patcher.places.n_bytes // _KEPT_SHARE:
                overlay = None
        return Built(patch, halo, overlay, lanes.used)

    def _settle(self, lanes: RankLanes) -> None:
        """Raises what kept lanes from being decoded, if anything did."""
        if lanes.lacking:
            with self.turns.reading():
                self.halo.make_room(lanes.needed)
            raise LackingError(lanes.lacking)

    def decoder(self, base: Version) -> LaneDecoder:
        """Decodes lanes of a version with that base."""
        device = self._patcher.device
        if device is None:
            return CpuLanes(lambda run, out: self.gather(run, base, out))
        from vllm_delta.patch.gpu_lanes import GpuLanes  # triton, which a CPU does without

        def gather(tensor: int, tile: Tile, start: int, n: int, out: Any) -> bool:
            self.gather(Run(tensor, tile, start, n), base, out)
            return True

        return GpuLanes(gather, device)

    def gather(self, run: Run, base: Version, out: Any) -> None:
        """The bits of a run at a version.

        Args:
            out: as for `Patcher.gather`.

        Raises:
            UnreachableError: the version is not reached from the resident one.
            LackingError: bits are needed that neither rank nor halo has.
        """
        with self.turns.reading():
            resident, overlays = self.way_to(base)
            if not all(overlay.knows(run) for overlay in overlays):
                raise UnreachableError
            if self._patcher.gather(run, out) < run.n:
                self.halo.fill(out, run, resident)
        for overlay in overlays:
            overlay.add_to(out, run)

    def way_to(self, base: Version) -> tuple[Version, Sequence[Overlay]]:
        """The resident version, and what is staged between it and another; in one's turn."""
        resident = self._resident()
        overlays = None if resident is None else self._overlays(resident, base)
        if resident is None or overlays is None:
            raise UnreachableError
        return resident, overlays

    def lacks(self, units: Iterable[Run], base: Version) -> list[Run]:
        """Which of these units the halo has to get first."""
        with self.turns.reading():
            resident, _ = self.way_to(base)
            return [unit for unit in units if not self.halo.has(unit, resident)]

    def distrust(self) -> None:
        """Forgets the halo: lanes could not be decoded with it."""
        with self.turns.reading():
            self.halo.clear()

    def count(self, run: Run) -> int:
        """How many elements of a run the rank holds."""
        if (found := self._counts.get(run)) is None:
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()
            self._counts[run] = found = self._patcher.places.count(run)
        return found

    def read(self, units: Sequence[Run]) -> list[list[Any]]:
        """What this rank holds of the units: number of the unit, which elements (a bit each) and
        their bits."""
        pieces: list[list[Any]] = []
        for place, unit in enumerate(units):
            held = ~self._patcher.places.missing(unit)
            if not held.any():
                continue
            bits = self._on_host(unit)[held]
            pieces.append([place, np.packbits(held).tobytes(), bits.tobytes()])
        return pieces

    def _on_host(self, unit: Run) -> Unsigned:
        itemsize = self._schema.tensors[unit.tensor].itemsize
        out: Unsigned = np.zeros(unit.n, UNSIGNED[itemsize])
        device = self._patcher.device
        if device is None:
            self._patcher.gather(unit, out)
            return out
        import torch

        there = torch.from_numpy(out.view(SIGNED[itemsize])).to(device)
        self._patcher.gather(unit, there)
        host: Unsigned = there.cpu().numpy().view(UNSIGNED[itemsize])
        return host

    def supply(
        self, units: Sequence[Run], pieces: Iterable[Sequence[Any]], version: Version
    ) -> None:
        """Takes over what other ranks read of units of which this rank holds a part.

        Raises:
            EngineError: nobody had all of it.
        """
        by_unit: dict[int, list[Sequence[Any]]] = {}
        for piece in pieces:
            by_unit.setdefault(piece[0], []).append(piece)
        for place, unit in enumerate(units):
            if not 0 < self.count(unit) < unit.n:
                continue
            bits, found = self._assemble(unit, by_unit.get(place, []))
            if not found[self._patcher.places.missing(unit)].all():
                name = self._schema.tensors[unit.tensor].name
                raise EngineError("no rank has bits that another needs", name=name)
            with self.turns.changing():
                self.halo.put(unit, bits, version)

    def _assemble(self, unit: Run, pieces: Iterable[Sequence[Any]]) -> tuple[Unsigned, Any]:
        kind = UNSIGNED[self._schema.tensors[unit.tensor].itemsize]
        bits: Unsigned = np.zeros(unit.n, kind)
        found = np.zeros(unit.n, np.bool_)
        for _, mask, data in pieces:
            held = np.unpackbits(np.frombuffer(mask, np.uint8), count=unit.n).astype(np.bool_)
            bits[held] = np.frombuffer(data, kind)
            found |= held
        return bits, found
