"""Where checkpoint elements live in the running engine, as strided rectangles.

Checkpoint coordinates (flat indices into a tensor) become offsets into a parameter's storage here
and nowhere else. Pure arithmetic on numpy arrays; nothing here touches a weight.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta.errors import BaseMismatchError, LayoutError
from vllm_delta.fingerprint import MASK64, root
from vllm_delta.format import Schema

I64 = npt.NDArray[np.int64]


class Dim(NamedTuple):
    """One dimension of a rectangle: its size and both strides, in elements."""

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class Strided:
    """A set of flat positions: ``offset + Σ kᵢ·strideᵢ`` for every ``0 <= kᵢ < sizeᵢ``.

    It is put in normal form (outermost first, no size 1, neighbours merged), so equal sets of
    non-negative positions that do not overlap themselves compare and hash equal.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        dims = [Dim(n, s, s) for n, s in zip(self.sizes, self.strides, strict=True)]
        merged = _normal(dims)
        object.__setattr__(self, "sizes", tuple(dim.size for dim in merged))
        object.__setattr__(self, "strides", tuple(dim.source for dim in merged))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """One past the last position."""
        return (
            self.offset
            + 1
            + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        )

    @property
    def is_run(self) -> bool:
        """Whether the positions are consecutive."""
        return self.strides in ((), (1,))

    @property
    def nests(self) -> bool:
        """Whether every stride reaches past all smaller ones, so that no position repeats."""
        reach = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if stride < reach:
                return False
            reach = (size - 1) * stride + reach
        return True


@dataclass(frozen=True)
class Rectangle:
    """A strided part of one checkpoint tensor and where its elements are on this rank.

    Element ``(k₀, k₁, …)`` is at ``source_offset + Σ kᵢ·source_stridesᵢ`` in the tensor (flat
    index) and at ``target_offset + Σ kᵢ·target_stridesᵢ`` in the parameter's storage. Dimensions
    are put in normal form: outermost in the tensor first, no size 1, neighbours merged.

    Args:
        tensor: the tensor's place in the schema.
        sizes: elements along each dimension, at least 1.
        source_offset: flat index of the first element.
        source_strides: flat-index strides.
        parameter: name of the runtime parameter or buffer.
        target_offset: offset of the first element, in elements from the storage's start.
        target_strides: offset strides.

    Raises:
        ValueError: a size below 1, or an element with two places or a place with two elements.
    """

    tensor: int
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.sizes, default=1) < 1:
            raise ValueError(f"a rectangle of sizes {self.sizes}")
        triples = zip(self.sizes, self.source_strides, self.target_strides, strict=True)
        dims = _normal([Dim(*triple) for triple in triples])
        object.__setattr__(self, "sizes", tuple(dim.size for dim in dims))
        object.__setattr__(self, "source_strides", tuple(dim.source for dim in dims))
        object.__setattr__(self, "target_strides", tuple(dim.target for dim in dims))
        if self.source_offset < 0 or not self.source.nests:
            raise ValueError(f"elements are not apart in the checkpoint: {self}")
        if self.target_offset < 0 or not self.target.nests:
            raise ValueError(f"elements are not apart in the parameter: {self}")

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def dims(self) -> tuple[Dim, ...]:
        triples = zip(self.sizes, self.source_strides, self.target_strides, strict=True)
        return tuple(Dim(*triple) for triple in triples)

    @property
    def source(self) -> Strided:
        """The flat indices covered."""
        return Strided(self.source_offset, self.sizes, self.source_strides)

    @property
    def target(self) -> Strided:
        """The storage offsets covered."""
        return Strided(self.target_offset, self.sizes, self.target_strides)

    @property
    def region(self) -> tuple[int, Strided]:
        """Which checkpoint elements are covered: equal for replicas, however they are stored."""
        return self.tensor, self.source

    def locate(self, indices: npt.NDArray[np.signedinteger]) -> tuple[I64, I64]:
        """Finds the given elements of the tensor that are in the rectangle.

        Args:
            indices: int32 or int64[nnz], flat checkpoint indices, strictly ascending.

        Returns:
            positions: int64[n], where in ``indices`` they are, ascending.
            offsets: int64[n], where they are in the parameter's storage.
        """
        # Not np.searchsorted: it would first convert all of an int32 array.
        first = bisect_left(indices, self.source_offset)
        last = bisect_left(indices, self.source.stop, first)
        rest = indices[first:last].astype(np.int64) - self.source_offset
        offsets = np.full(rest.size, self.target_offset, dtype=np.int64)
        inside: npt.NDArray[np.bool_] | None = None
        for place, (size, source, target) in enumerate(self.dims):
            # The outermost coordinate is in range because the index is in the span.
            step = rest if source == 1 else rest // source
            if place:
                fits = step < size
                inside = fits if inside is None else inside & fits
            offsets += step * target
            rest = rest - step * source
        if self.sizes and self.source_strides[-1] != 1:
            fits = rest == 0
            inside = fits if inside is None else inside & fits
        if inside is None:
            return np.arange(first, last, dtype=np.int64), offsets
        return first + np.flatnonzero(inside), offsets[inside]

    def permuted(self, digits: Sequence[tuple[int, int]]) -> Rectangle | None:
        """The rectangle after the parameter was permuted in mixed radix.

        Args:
            digits: ``(radix, stride)`` from the fastest digit up. The element at offset
                ``Σ digitⱼ · Πradix below j`` moved to ``Σ digitⱼ · strideⱼ``. The radices'
                product is the parameter's number of elements.

        Returns:
            The same elements at their new offsets, or None when those are not strided.
        """
        pieces: list[Dim] = []
        for dim in self.dims:
            cut = _split(dim, digits)
            if cut is None:
                return None
            pieces += cut
        weight, offset = 1, 0
        for radix, stride in digits:
            digit = self.target_offset // weight % radix
            mine = [dim for dim in pieces if weight <= dim.target < weight * radix]
            if digit + sum((dim.size - 1) * (dim.target // weight) for dim in mine) >= radix:
                return None  # a carry into the next digit
            offset += digit * stride
            weight *= radix
        if self.target.stop > weight:
            return None
        moved = [_moved(dim, digits) for dim in pieces]
        return Rectangle(
            self.tensor,
            tuple(dim.size for dim in moved),
            self.source_offset,
            tuple(dim.source for dim in moved),
            self.parameter,
            offset,
            tuple(dim.target for dim in moved),
        )


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


def _normal(dims: Sequence[Dim]) -> list[Dim]:
    out: list[Dim] = []
    kept = [dim for dim in dims if dim.size != 1]
    for dim in sorted(kept, key=lambda dim: (dim.source, dim.target), reverse=True):
        outer = out[-1] if out else None
        if outer and (outer.source, outer.target) == (dim.source * dim.size, dim.target * dim.size):
            out[-1] = Dim(outer.size * dim.size, dim.source, dim.target)
        else:
            out.append(dim)
    return out


def _split(dim: Dim, digits: Sequence[tuple[int, int]]) -> list[Dim] | None:
    """Cuts a dimension so that each piece moves within one digit of the offset."""
    pieces: list[Dim] = []
    size, source, target = dim
    weight = 1
    for radix, _ in digits:
        if size > 1 and weight <= target < weight * radix:
            fits = weight * radix // target
            carries = size > fits and (weight * radix % target or size % fits)
            if target % weight or carries:
                return None
            piece = min(size, fits)
            pieces.append(Dim(piece, source, target))
            size, source, target = size // piece, source * piece, target * piece
        weight *= radix
    return pieces if size == 1 else None


def _moved(dim: Dim, digits: Sequence[tuple[int, int]]) -> Dim:
    weight = 1
    for radix, stride in digits:
        if weight <= dim.target < weight * radix:
            return Dim(dim.size, dim.source, dim.target // weight * stride)
        weight *= radix
    raise AssertionError(dim)
