"""What a rank holds, the proof that all ranks hold the checkpoint, and the verdict on a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta.errors import BaseMismatchError, LayoutError
from vllm_delta.fingerprint import MASK64, root
from vllm_delta.format import Schema
from vllm_delta.layout.rectangle import Rectangle, Strided


@dataclass(frozen=True)
class ParameterSpec:
    """A runtime parameter's element type (safetensors name) and its storage's elements."""

    dtype: str
    n_elements: int


@dataclass(frozen=True)
class RankLayout:
    """Where one rank holds which elements of the checkpoint."""

    schema_digest: str
    rank: int
    rectangles: tuple[Rectangle, ...]
    parameters: Mapping[str, ParameterSpec]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a call between processes."""
        return {
            "schema_digest": self.schema_digest,
            "rank": self.rank,
            "rectangles": [
                [
                    r.tensor,
                    list(r.sizes),
                    r.source_offset,
                    list(r.source_strides),
                    r.parameter,
                    r.target_offset,
                    list(r.target_strides),
                ]
                for r in self.rectangles
            ],
            "parameters": {n: [p.dtype, p.n_elements] for n, p in self.parameters.items()},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RankLayout:
        """The layout that ``to_dict`` wrote."""
        rectangles = [
            Rectangle(tensor, tuple(sizes), source, tuple(steps), name, target, tuple(strides))
            for tensor, sizes, source, steps, name, target, strides in data["rectangles"]
        ]
        return RankLayout(
            schema_digest=data["schema_digest"],
            rank=data["rank"],
            rectangles=tuple(rectangles),
            parameters={n: ParameterSpec(*p) for n, p in data["parameters"].items()},
        )


class Coverage:
    """Proof that the ranks together hold every element of the checkpoint, replicas aside.

    Args:
        schema: the checkpoint's tensors.
        layouts: one per rank.

    Raises:
        LayoutError: a tensor has an element that no rank holds, or parts that overlap without
            being equal; it names the tensor.
    """

    def __init__(self, schema: Schema, layouts: Sequence[RankLayout]) -> None:
        self.schema = schema
        self.layouts = tuple(layouts)
        self._holders: dict[tuple[int, Strided], list[tuple[int, int]]] = {}
        for place, layout in enumerate(self.layouts):
            if layout.schema_digest != schema.digest:
                raise LayoutError("a rank's layout is of another checkpoint", rank=layout.rank)
            for index, rectangle in enumerate(layout.rectangles):
                self._holders.setdefault(rectangle.region, []).append((place, index))
        parts: list[list[Strided]] = [[] for _ in schema.tensors]
        for tensor, region in self._holders:
            parts[tensor].append(region)
        for spec, regions in zip(schema.tensors, parts, strict=True):
            if problem := find_gap(regions, spec.numel):
                raise LayoutError(
                    f"the ranks do not hold every element of the tensor exactly once: {problem}; "
                    "publish a checkpoint that the engine loads whole, or serve another model",
                    name=spec.name,
                    n_parts=len(regions),
                )

    def total(self, partials: Sequence[Mapping[int, int]]) -> dict[int, int]:
        """Adds up what the ranks found, each distinct part of a tensor once.

        Args:
            partials: per rank, in the order of ``layouts``: rectangle index to its 64-bit sum.
                What a rank leaves out counts as zero.

        Returns:
            tensor to the sum over its parts, mod 2^64; only tensors that a rank reported.

        Raises:
            BaseMismatchError: ranks that hold the same part disagree; names tensor and ranks.
        """
        if len(partials) != len(self.layouts):
            raise ValueError(f"{len(partials)} replies for {len(self.layouts)} ranks")
        totals: dict[int, int] = {}
        for (tensor, _), holders in self._holders.items():
            if not any(index in partials[place] for place, index in holders):
                continue
            sums = [partials[place].get(index, 0) for place, index in holders]
            if any(value != sums[0] for value in sums):
                raise BaseMismatchError(
                    "ranks that hold the same part of a tensor disagree about it",
                    name=self.schema.tensors[tensor].name,
                    ranks=sorted({self.layouts[place].rank for place, _ in holders}),
                )
            totals[tensor] = (totals.get(tensor, 0) + sums[0]) & MASK64
        return totals


def judge(
    schema: Schema,
    fingerprints: Sequence[int],
    entries: Sequence[tuple[int, int, int]],
    touched: Mapping[int, int],
    change: Mapping[int, int],
    target_root: str,
) -> list[int]:
    """Decides whether a delta fits the resident weights, before anything is written.

    Args:
        schema: the checkpoint's tensors.
        fingerprints: of the resident weights, one per tensor.
        entries: per changed tensor: place in the schema, ``touched`` and target fingerprint, as
            the delta says.
        touched: per tensor, Σ g(old)·P·Q over the delta's indices, from the resident bits.
        change: per tensor, Σ (g(new) − g(old))·P·Q over them, from the resident bits.
        target_root: root of the delta's target version.

    Returns:
        The fingerprints of the weights that the delta leads to.

    Raises:
        BaseMismatchError: some tensor's resident bits are not the delta's base, or the whole does
            not become the target.
    """
    after = list(fingerprints)
    bad: list[tuple[int, str]] = []
    for tensor, expected, target in entries:
        after[tensor] = (after[tensor] + change.get(tensor, 0)) & MASK64
        if touched.get(tensor, 0) != expected:
            bad.append((tensor, "a resident weight that the delta touches is not its base's"))
        elif after[tensor] != target:
            bad.append((tensor, "the tensor would not become the delta's target"))
    if bad:
        tensor, reason = bad[0]
        name = schema.tensors[tensor].name
        raise BaseMismatchError(reason, name=name, n_others=len(bad) - 1)
    if (actual := root(schema, after)) != target_root:
        raise BaseMismatchError(
            "the weights would not become the delta's target", expected=target_root, actual=actual
        )
    return after


def find_gap(parts: Sequence[Strided], numel: int) -> str | None:
    """Checks that the parts, each without repeats, cover ``0 … numel - 1`` exactly once.

    Contiguous and nested parts are compared by their bounds. Only others are marked element by
    element, which takes ``numel`` bytes.

    Returns:
        None, or what is wrong with the first bad element.
    """
    outside = [part for part in parts if part.stop > numel]
    if outside:
        return f"element {outside[0].stop - 1} is past the end ({numel})"
    tiles = _tiles(parts, numel)
    if tiles is not None:
        return tiles or None
    marks = np.zeros(numel, dtype=np.uint8)
    for part in parts:
        view = np.lib.stride_tricks.as_strided(marks[part.offset :], part.sizes, part.strides)
        if view.any():
            return f"element {part.offset + _first(view, part)} is covered twice"
        view[...] = 1
    missing = np.flatnonzero(marks == 0)
    return f"element {missing[0]} is missing" if missing.size else None


def _tiles(parts: Sequence[Strided], numel: int) -> str | None:
    """The same by bounds alone: a problem, an empty string for none, None for not decidable."""
    if all(part.is_run for part in parts):
        end = 0
        for part in sorted(parts, key=lambda part: part.offset):
            if part.offset != end:
                word = "missing" if part.offset > end else "covered twice"
                return f"element {min(end, part.offset)} is {word}"
            end = part.stop
        return "" if end == numel else f"element {end} is missing"
    outer = {(part.sizes[0], part.strides[0]) for part in parts if not part.is_run}
    if len(outer) != 1 or any(part.is_run for part in parts):
        return None
    [(size, stride)] = outer
    inner = [Strided(part.offset, part.sizes[1:], part.strides[1:]) for part in parts]
    if size * stride != numel or any(part.stop > stride for part in inner):
        return None
    return _tiles(inner, stride)


def _first(view: npt.NDArray[np.uint8], part: Strided) -> int:
    coordinates = np.unravel_index(int(np.argmax(view)), view.shape)
    return sum(int(k) * s for k, s in zip(coordinates, part.strides, strict=True))
