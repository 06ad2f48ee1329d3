"""The exact difference of two tensors' bits: where they differ, by which steps, and what that adds
to their fingerprint, in one pass over both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from vllm_delta.codec import workers
from vllm_delta.codec.order import SIGNED, Signed, Unsigned
from vllm_delta.fingerprint import MASK64, U64, mix, odd_key, tensor_seeds
from vllm_delta.format import TensorSpec

CHUNK = 1 << 19
"""Elements that a thread compares at a time; a multiple of the elements in a block of words."""
_WORD_BYTES = 8
_BLOCK = 8
"""Words compared together: a cache line."""
_room = threading.local()
"""Each thread's places of one chunk, two megabytes, kept: fresh memory costs time."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Bits to compare.

    Attributes:
        old, new: unsigned[numel], flat, contiguous; not modified.
        most: with more elements that differ, nothing else is found out.
    """

    spec: TensorSpec
    old: Unsigned
    new: Unsigned
    most: int


@dataclass(frozen=True, eq=False)
class Difference:
    """What differs.

    Attributes:
        indices: int32 or int64[n], ascending, flat.
        steps: signed[n] of the type's width, from the old to the new bits.
        touched: Σ g(old)·P·Q over them, mod 2^64.
        moved: what they add to the tensor's fingerprint, mod 2^64.
    """

    indices: Signed
    steps: Signed
    touched: int
    moved: int


def differences(pairs: Sequence[Pair], n_threads: int = 1) -> list[Difference | None]:
    """Compare tensors' bits; None for each of which more elements differ than it says.

    Memory beside the result: one chunk's changes for each thread.

    Args:
        n_threads: threads to use, the calling one included.
    """
    comparisons = [_Comparison(pair) for pair in pairs]
    jobs = [
        (comparison, start)
        for comparison, pair in zip(comparisons, pairs, strict=True)
        for start in range(0, pair.spec.numel, CHUNK)
    ]

    def compare(job: tuple[_Comparison, int]) -> None:
        comparison, start = job
        if not hasattr(_room, "places"):
            _room.places = np.empty(CHUNK + _WORD_BYTES, np.int32)
        comparison.compare(start, _room.places)

    workers.run(compare, jobs, n_threads)
    return [comparison.finish() for comparison in comparisons]


class _Comparison:
    """One pair, compared chunk by chunk in any order."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._seeds = [np.uint64(seed) for seed in tensor_seeds(pair.spec.name)]
        self._left = pair.most
        self._parts: dict[int, tuple[Signed, Signed, U64]] = {}
        self._kind = np.int32 if pair.spec.numel < 1 << 31 else np.int64

    def compare(self, start: int, room: npt.NDArray[np.int32]) -> None:
        if self._left < 0:
            return
        old = self._pair.old[start : start + CHUNK]
        new = self._pair.new[start : start + CHUNK]
        n = _compare(*_aligned(old, new), old, new, room)
        self._left -= n  # a race may only let a few chunks more be compared
        if not n or self._left < 0:
            return
        indices: Signed = room[:n].astype(self._kind)
        steps, sums = np.empty(n, SIGNED[old.itemsize]), np.zeros(2, np.uint64)
        _weigh(old, new, start, self._pair.spec.n_cols, *self._seeds, indices, steps, sums)
        self._parts[start] = (indices, steps, sums)

    def finish(self) -> Difference | None:
        parts = [self._parts[start] for start in sorted(self._parts)]
        if self._left < 0 or sum(part[0].size for part in parts) > self._pair.most:
            return None
        touched = sum(int(part[2][0]) for part in parts)
        after = sum(int(part[2][1]) for part in parts)
        return Difference(
            np.concatenate([np.empty(0, self._kind), *(part[0] for part in parts)]),
            np.concatenate(
                [np.empty(0, SIGNED[self._pair.old.itemsize]), *(part[1] for part in parts)]
            ),
            touched & MASK64,
            (after - touched) & MASK64,
        )


def _aligned(old: Unsigned, new: Unsigned) -> tuple[npt.NDArray[np.uint64], ...]:
    """The whole words at the start of both; none where memory is not aligned for them."""
    per_word = _WORD_BYTES // old.itemsize
    n = old.size // per_word * per_word
    if old.ctypes.data % _WORD_BYTES or new.ctypes.data % _WORD_BYTES:
        n = 0
    return old[:n].view(np.uint64), new[:n].view(np.uint64)


@numba.njit(cache=True, nogil=True)
def _compare(old_words, new_words, old, new, places):  # type: ignore[no-untyped-def]
    """Finds where a chunk differs; returns how many places were written.

    Blocks of words are compared first, then words, then elements: those without a branch, which
    would be guessed wrong about once a change, so `places` needs room for one word more. Elements
    after the last whole block are compared one by one.
    """
    per_word = np.uintp(8 // old.itemsize)
    n_blocks = old_words.size // _BLOCK
    n, word = np.uintp(0), np.uintp(0)
    for _ in range(n_blocks):
        differ = np.uint64(0)
        for k in range(_BLOCK):
            differ |= old_words[word + np.uintp(k)] ^ new_words[word + np.uintp(k)]
        if differ:
            for k in range(_BLOCK):
                here = word + np.uintp(k)
                if old_words[here] != new_words[here]:
                    i = here * per_word
                    for _ in range(per_word):
                        places[n] = i
                        n += np.uintp(old[i] != new[i])
                        i += np.uintp(1)
        word += np.uintp(_BLOCK)
    for rest in range(n_blocks * _BLOCK * per_word, old.size):
        places[n] = rest
        n += np.uintp(old[rest] != new[rest])
    return np.int64(n)


@numba.njit(cache=True, nogil=True)
def _weigh(old, new, start, n_cols, row_seed, col_seed, places, steps, sums):  # type: ignore[no-untyped-def]
    """Writes the steps at the places, makes those flat indices, and adds up both sides' sums."""
    top = np.uint64(8 * old.itemsize - 1)
    low = (np.uint64(1) << top) - np.uint64(1)
    first = end = np.int64(0)
    p = np.uint64(0)
    for c in range(places.size):
        i = np.uintp(places[c])
        index = start + np.int64(i)
        if index >= end:
            row = index // n_cols
            first, end = row * n_cols, (row + 1) * n_cols
            p = odd_key(row_seed, np.uint64(row))
        before, after = np.uint64(old[i]), np.uint64(new[i])
        factor = p * odd_key(col_seed, np.uint64(index - first))
        sums[0] += mix(before) * factor
        sums[1] += mix(after) * factor
        step = (after ^ ((np.uint64(0) - (after >> top)) & low)) - (
            before ^ ((np.uint64(0) - (before >> top)) & low)
        )
        places[c] = index
        steps[c] = step  # modulo 2^width
