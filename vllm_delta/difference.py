"""The exact difference of two tensors' bits: where they differ, by which steps, and what that adds
to their fingerprint, in one pass over both."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from vllm_delta.codec import workers
from vllm_delta.codec.order import SIGNED, Signed, Unsigned
from vllm_delta.fingerprint import MASK64, mix, odd_key, tensor_seeds
from vllm_delta.format import TensorSpec

CHUNK = 1 << 18
"""Elements that a thread compares at a time; a multiple of the elements in a block of words."""
_WORD_BYTES = 8
_BLOCK = 8
"""Words compared together: a cache line."""


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


def difference(
    spec: TensorSpec, old: Unsigned, new: Unsigned, *, most: int, n_threads: int = 1
) -> Difference | None:
    """Compare a tensor's bits; None when more than `most` elements differ.

    Memory beside the result: one chunk's changes for each thread.

    Args:
        old, new: unsigned[numel], flat, contiguous; not modified.
        n_threads: threads to use, the calling one included.
    """
    kind = np.int32 if spec.numel < 1 << 31 else np.int64
    seeds = [np.uint64(seed) for seed in tensor_seeds(spec.name)]
    rooms = threading.local()
    left = most

    def compare(start: int) -> tuple[Signed, Signed, int, int] | None:
        nonlocal left
        if left < 0:
            return None
        some = slice(start, start + CHUNK)
        if not hasattr(rooms, "places"):
            rooms.places = np.empty(min(CHUNK, spec.numel) + _WORD_BYTES, kind)
        a, b = old[some], new[some]
        n = _compare(*_aligned(a, b), a, b, rooms.places)
        left -= n  # a race may only let a few chunks more be compared
        if left < 0:
            return None
        places, steps = rooms.places[:n].copy(), np.empty(n, SIGNED[spec.itemsize])
        sums = np.zeros(2, np.uint64)
        _weigh(a, b, start, spec.n_cols, *seeds, places, steps, sums)
        return places, steps, int(sums[0]), int(sums[1])

    found = workers.run(compare, range(0, spec.numel, CHUNK), n_threads)
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or sum(part[0].size for part in parts) > most:
        return None
    touched = sum(part[2] for part in parts)
    after = sum(part[3] for part in parts)
    return Difference(
        np.concatenate([np.empty(0, kind), *(part[0] for part in parts)]),
        np.concatenate([np.empty(0, SIGNED[spec.itemsize]), *(part[1] for part in parts)]),
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
