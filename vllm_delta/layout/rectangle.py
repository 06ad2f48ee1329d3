"""A strided part of a checkpoint tensor, and where its elements are in a parameter's storage."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        triples = zip(self.sizes, self.source_strides, self.target_strides, strict=True)
        return tuple(Dim(*triple) for triple in triples)

    @cached_property
    def source(self) -> Strided:
        """The flat indices covered."""
        return Strided(self.source_offset, self.sizes, self.source_strides)

    @cached_property
    def target(self) -> Strided:
        """The storage offsets covered."""
        return Strided(self.target_offset, self.sizes, self.target_strides)

    @property
    def is_run(self) -> bool:
        """Whether its elements follow one another, in one order in tensor and storage."""
        runs = ((), (1,))
        return self.source_strides in runs and self.target_strides in runs

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
        if self.is_run:
            offsets = indices[first:last].astype(np.int64)
            offsets += self.target_offset - self.source_offset
            return np.arange(first, last, dtype=np.int64), offsets
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
