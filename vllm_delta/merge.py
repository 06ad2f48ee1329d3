"""Deltas that follow each other folded to one: exact, from their steps and the bits after them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numba
import numpy as np
import numpy.typing as npt

from vllm_delta.codec import Change, decode, gap
from vllm_delta.codec.order import Signed, Unsigned, add_steps
from vllm_delta.errors import DeltaError
from vllm_delta.fingerprint import MASK64, coefficients, weigh
from vllm_delta.format import Schema, Version

LEAST_SAVED_BYTES = 64 << 10
LARGEST_SHARE = 0.75
"""A merged delta pays when it takes at most this share of the bytes of those that it stands for,
and saves at least so many bytes: less is not worth a record."""

LARGEST_UNION = 0.9
"""Where so many of the changes are of elements of their own, a merged delta cannot pay: the steps
that fall together are all that it saves."""


@numba.njit(cache=True, nogil=True)
def _unite(left, left_steps, right, right_steps, indices, steps):  # type: ignore[no-untyped-def]
    """Union of two ascending runs of indices, steps of one index added mod 2^width, zeros left out.

    Returns how many there are.
    """
    i = j = n = 0
    while i < left.size or j < right.size:
        if j == right.size or (i < left.size and left[i] < right[j]):
            indices[n], steps[n] = left[i], left_steps[i]
            i += 1
        elif i == left.size or right[j] < left[i]:
            indices[n], steps[n] = right[j], right_steps[j]
            j += 1
        else:
            indices[n], steps[n] = left[i], left_steps[i] + right_steps[j]
            i += 1
            j += 1
        n += steps[n] != 0
    return n


def merge(
    schema: Schema,
    parts: Sequence[Change],
    now: Unsigned,
    *,
    base: int,
    raw_above: float = 1.0,
) -> Change | None:
    """The one change that does what consecutive changes of a tensor did; None: they cancel out.

    O(sum of their changes), without the bits before them. After a replacement nothing says what
    was before it, so the result is then a replacement too, as it is with more than `raw_above` of
    the elements changed; it aliases `now`.

    Args:
        schema: the checkpoint's tensors.
        parts: one tensor's changes, each made for what the one before led to, oldest first.
        now: unsigned[numel], flat, the bits after all of them; not modified.
        base: fingerprint of the tensor before them.
        raw_above: share of the elements, 0 to 1.

    Raises:
        DeltaError: the parts do not lead from `base` to `now`.
    """
    tensor, target = parts[0].tensor, parts[-1].target
    spec = schema.tensors[tensor]
    replacement = Change(tensor, None, None, now, base, target)
    runs = [(p.indices, p.steps) for p in parts if p.indices is not None and p.steps is not None]
    if len(runs) < len(parts):
        return replacement
    indices, steps = _union(runs)
    new = now[indices]
    old = add_steps(new, np.negative(steps))
    weights = coefficients(spec, indices)
    touched = weigh(old, weights)
    if (base + weigh(new, weights) - touched) & MASK64 != target:
        raise DeltaError("deltas do not lead to the weights at hand", name=spec.name)
    if not indices.size:
        return None
    if indices.size > min(int(raw_above * spec.numel), gap.MAX_CHANGES):
        return replacement
    return Change(tensor, indices, steps, None, touched, target)


def _union(runs: Sequence[tuple[Signed, Signed]]) -> tuple[Signed, Signed]:
    """All runs united, neighbours first, so that each change is moved log₂(runs) times."""
    while len(runs) > 1:
        united = []
        for (left, left_steps), (right, right_steps) in zip(runs[::2], runs[1::2], strict=False):
            n = left.size + right.size
            indices, steps = np.empty(n, left.dtype), np.empty(n, left_steps.dtype)
            n = int(_unite(left, left_steps, right, right_steps, indices, steps))
            united.append((indices[:n], steps[:n]))
        runs = [*united, *runs[2 * len(united) :]]
    return runs[0]


@dataclass(frozen=True, eq=False)
class Segment:
    """What led from one version to a later one, kept so that it can be folded.

    Attributes:
        fingerprints: uint64[tensors], those of the base.
        blobs: a delta that decodes without a base.
        n_changed: changes in it.
        payload_bytes: what the single deltas that it stands for take on the channel.
    """

    base: Version
    target: Version
    fingerprints: npt.NDArray[np.uint64]
    blobs: Sequence[bytes]
    n_changed: int
    payload_bytes: int

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return self.fingerprints.nbytes + sum(map(len, self.blobs))

    def changes(self, schema: Schema) -> Iterator[Change]:
        """Its changes, in schema order."""
        for blob in self.blobs:
            yield from decode(blob, schema, "delta")


def fold(
    schema: Schema,
    segments: Sequence[Segment],
    now: Callable[[int], Unsigned],
    *,
    raw_above: float,
) -> Iterator[Change]:
    """What segments that follow each other do together, in schema order.

    Memory: of each segment one blob's streams and one tensor's changes.

    Args:
        segments: oldest first.
        now: gives a tensor's flat bits after the last of them.
        raw_above: see `merge`.
    """
    parts = heapq.merge(*(s.changes(schema) for s in segments), key=attrgetter("tensor"))
    before = segments[0].fingerprints
    for tensor, group in itertools.groupby(parts, key=attrgetter("tensor")):
        base = int(before[tensor])
        merged = merge(schema, list(group), now(tensor), base=base, raw_above=raw_above)
        if merged is not None:
            yield merged


def most_bytes(window: Sequence[Segment]) -> float:
    """What a merged delta may take at most for it to pay."""
    single = sum(segment.payload_bytes for segment in window)
    return min(LARGEST_SHARE * single, single - LEAST_SAVED_BYTES)


def most_changes(window: Sequence[Segment]) -> float:
    """How many changes a merged delta may hold at most for it to be worth coding."""
    return LARGEST_UNION * sum(segment.n_changed for segment in window)


class History:
    """The newest deltas of a channel, as far as merged ones can still be made of them.

    For each stride k those from version n - k to n are folded where n is a multiple of k. A
    history begins empty, so the first is due k versions after the next multiple.

    Args:
        strides: ascending, each a multiple of the one before.
    """

    def __init__(self, strides: Sequence[int]) -> None:
        self._strides = strides
        self._segments: list[Segment] = []

    @property
    def n_bytes(self) -> int:
        """Memory that is held."""
        return sum(segment.n_bytes for segment in self._segments)

    def add(self, segment: Segment, *, at_most_bytes: float) -> None:
        """Append the newest delta, and forget what no stride needs any more.

        Args:
            at_most_bytes: with more than this kept, all is forgotten.
        """
        self._segments.append(segment)
        first, number = self._segments[0].base.number, segment.target.number
        last = number - 1
        begun = [last // stride * stride for stride in self._strides]
        needed = min((start for start in begun if start >= first), default=number)
        self._segments = [kept for kept in self._segments if kept.base.number >= needed]
        if self.n_bytes > at_most_bytes:
            self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._segments.clear()

    def replace(self, merged: Segment) -> None:
        """Keep a merged delta instead of those that it stands for, the newest of the history."""
        first = merged.base.number
        older = [kept for kept in self._segments if kept.base.number < first]
        self._segments = [*older, merged]

    def due(self) -> Iterator[list[Segment]]:
        """What to fold at the newest version, for each stride that ends there, the smaller first.

        Where one is folded and `replace`d before the next is asked for, the next begins from it.
        """
        for stride in self._strides:
            window = self._window(stride)
            if window and most_bytes(window) > 0:
                yield window

    def _window(self, stride: int) -> list[Segment]:
        if not self._segments or self._segments[-1].target.number % stride:
            return []
        first = self._segments[-1].target.number - stride
        window = [kept for kept in self._segments if kept.base.number >= first]
        return window if len(window) > 1 and window[0].base.number == first else []
