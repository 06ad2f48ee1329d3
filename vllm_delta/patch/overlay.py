"""A staged delta, kept so that the bits after it can be had before it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_delta.codec import Change, order
from vllm_delta.codec.hazard import Tile
from vllm_delta.codec.hazard.lanes import elements
from vllm_delta.format import Schema
from vllm_delta.patch.places import Run


@dataclass(frozen=True, eq=False)
class Overlay:
    """What one version changes, of a rank's share.

    Attributes:
        changes: by tensor.
        skipped: by tensor, the tiles of which some lanes were not decoded.
    """

    schema: Schema
    changes: Mapping[int, Change]
    skipped: Mapping[int, frozenset[Tile]]

    @property
    def n_bytes(self) -> int:
        parts = [
            part
            for change in self.changes.values()
            for part in (change.indices, change.steps, change.bits)
            if part is not None
        ]
        return sum(part.nbytes for part in parts)

    def knows(self, run: Run) -> bool:
        """Whether all that changes in a run was decoded.

        Lanes are decoded by units that the rank holds some of, so in the tiles that a rank reads
        nothing is left out; across other tiles nothing is known.
        """
        others = self.skipped.get(run.tensor, frozenset())
        return not any(tile != run.tile and _meet(tile, run.tile) for tile in others)

    def add_to(self, bits: Any, run: Run) -> None:
        """Brings a run's bits one version further.

        Args:
            bits: [run.n] as for `Patcher.gather`; changed in place.
        """
        change = self.changes.get(run.tensor)
        if change is None:
            return
        spec = self.schema.tensors[run.tensor]
        if change.bits is not None:
            put(bits, slice(None), elements(change.bits, spec, run.tile, run.start, run.n))
        elif change.indices is not None and change.steps is not None:
            some, positions, inside = run.locate(change.indices, spec)
            add_steps(bits, positions[inside], change.steps[some][inside])


def put(bits: Any, places: Any, values: Any) -> None:
    """Sets elements of an array, or of a tensor on a device, to unsigned values on the host."""
    if isinstance(bits, np.ndarray):
        bits[places] = values
    else:
        import torch

        host = torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.itemsize}"))
        if not isinstance(places, slice):
            places = torch.from_numpy(places).to(bits.device)
        bits[places] = host.to(bits.device)


def add_steps(bits: Any, positions: Any, steps: Any) -> None:
    """Adds steps, in the type's order, to elements of an array or of a tensor on a device."""
    if isinstance(bits, np.ndarray):
        bits[positions] = order.add_steps(bits[positions], steps)
        return
    import torch

    places = torch.from_numpy(positions).to(bits.device)
    keys = _mirror(bits[places]) + torch.from_numpy(np.ascontiguousarray(steps)).to(bits.device)
    bits[places] = _mirror(keys)


def _mirror(patterns: Any) -> Any:
    """`codec.order`'s on a device: between patterns and keys, both as signed integers."""
    width = 8 * patterns.element_size()
    return patterns ^ ((patterns >> (width - 1)) & ((1 << (width - 1)) - 1))


def _meet(one: Tile, other: Tile) -> bool:
    return (
        one.row < other.row + other.n_rows
        and other.row < one.row + one.n_rows
        and one.col < other.col + other.n_cols
        and other.col < one.col + one.n_cols
    )
