"""The CPU loops: over the changes of a patch, and over whole rectangles. numba, without the GIL.

`kind` arguments are empty arrays; their element types are what the addresses in a table point to.
Sums are mod 2^64. Types of the tables are int64; a 64-bit seed is stored by its bits.
"""

from __future__ import annotations

import numba
import numpy as np

from vllm_delta.fingerprint import mix, odd_key
from vllm_delta.patch.memory import pointer, prefetch_read, prefetch_write
from vllm_delta.patch.places import AT, COL_STRIDE, N_ROWS, OFFSET, PITCH, ROW_STRIDE, STEP
from vllm_delta.patch.places import N_COLS as N_GRID_COLS

# Columns of a table of pieces: runs of changes that one rectangle holds.
STORAGE, N_ELEMENTS, OFFSETS, STEPS, COEFFICIENTS, N_CHANGES = range(6)
N_PIECE_COLUMNS = 6

# Columns of a table of walks: rectangles, followed by size, source and target stride per
# dimension. The storage's address and its number of elements come first here too.
N_COLS, ROW_SEED, COL_SEED, SOURCE, TARGET, BUFFER, N_DIMS = range(2, 9)
FIRST_DIM = 9

# Columns of a table of jobs: a run of a rectangle's elements, counted in checkpoint order.
WALK, START, STOP = range(3)

SCAN, CHECK, SWAP = range(3)

_BLOCK = 128
"""Changes handled together: their old bits stay in the first-level cache, the arithmetic is
vectorised, and the next block's cache lines are asked for meanwhile."""
_MAX_KEYS = 1 << 16
"""Rows up to this long keep their column constants in a table for the whole walk."""
_WIDE = 1 << 13
_SQUARE = 64


@numba.njit(cache=True, nogil=True)
def run_pieces(pieces, offset_kind, step_kind, bits_kind, sign, write, sums):  # type: ignore[no-untyped-def]
    """Checks or applies steps.

    Args:
        pieces: int64[n, N_PIECE_COLUMNS].
        offset_kind, step_kind, bits_kind: unsigned offsets, signed steps, unsigned weights.
        sign: 1 to go forward, -1 to go back.
        write: whether the weights are changed.
        sums: uint64[n, 2], Σ g(old)·coefficient and Σ g(new)·coefficient are added to it.
    """
    width = np.uintp(bits_kind.itemsize)
    top = np.uint64(8 * bits_kind.itemsize - 1)
    low = (np.uint64(1) << top) - np.uint64(1)
    full = low + low + np.uint64(1)
    block = np.empty(_BLOCK, bits_kind.dtype)
    for p in range(pieces.shape[0]):
        n = pieces[p, N_CHANGES]
        base = np.uintp(pieces[p, STORAGE])
        weights = numba.carray(pointer(base), (pieces[p, N_ELEMENTS],), bits_kind.dtype)
        offsets = numba.carray(pointer(np.uintp(pieces[p, OFFSETS])), (n,), offset_kind.dtype)
        steps = numba.carray(pointer(np.uintp(pieces[p, STEPS])), (n,), step_kind.dtype)
        factors = numba.carray(pointer(np.uintp(pieces[p, COEFFICIENTS])), (n,), np.uint64)
        before, after = np.uint64(0), np.uint64(0)
        for start in range(0, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            if write:
                for i in range(stop, min(stop + _BLOCK, n)):
                    prefetch_write(base + np.uintp(offsets[i]) * width)
            else:
                for i in range(stop, min(stop + _BLOCK, n)):
                    prefetch_read(base + np.uintp(offsets[i]) * width)
            for i in range(stop - start):
                block[i] = weights[offsets[start + i]]
            some_steps, some_factors = steps[start:stop], factors[start:stop]
            for i in range(stop - start):
                old = np.uint64(block[i])
                key = old ^ ((np.uint64(0) - (old >> top)) & low)
                key = (key + np.uint64(np.int64(some_steps[i]) * sign)) & full
                new = key ^ ((np.uint64(0) - (key >> top)) & low)
                before += mix(old) * some_factors[i]
                after += mix(new) * some_factors[i]
                block[i] = new
            if write:
                for i in range(stop - start):
                    weights[offsets[start + i]] = block[i]
        sums[p, 0] += before
        sums[p, 1] += after


@numba.njit(cache=True, nogil=True)
def walk_jobs(walks, jobs, bits_kind, mode, sums):  # type: ignore[no-untyped-def]
    """Walks runs of rectangles in checkpoint order.

    Args:
        walks: int64[n, FIRST_DIM + 3·max_dims].
        jobs: int64[m, 3].
        bits_kind: unsigned weights; the BUFFER of a walk points to as many as it has elements.
        mode: SCAN sums over the resident bits, CHECK also over the buffer, SWAP exchanges them.
        sums: uint64[m, 2], Σ g·P·Q over the resident bits and over the buffer are added to it,
            both as they were before a swap.
    """
    keys = np.empty(_MAX_KEYS, np.uint64)
    keys_of = np.int64(-1)
    for j in range(jobs.shape[0]):
        walk = walks[jobs[j, WALK]]
        n_cols, n_dims = walk[N_COLS], walk[N_DIMS]
        row_seed, col_seed = np.uint64(walk[ROW_SEED]), np.uint64(walk[COL_SEED])
        weights = numba.carray(
            pointer(np.uintp(walk[STORAGE])), (walk[N_ELEMENTS],), bits_kind.dtype
        )
        buffer = numba.carray(pointer(np.uintp(walk[BUFFER])), (jobs[j, STOP],), bits_kind.dtype)
        size, source, target = np.int64(1), np.int64(1), np.int64(1)
        if n_dims:
            inner = FIRST_DIM + 3 * (n_dims - 1)
            size, source, target = walk[inner], walk[inner + 1], walk[inner + 2]
        wide = n_cols > _MAX_KEYS
        if not wide and keys_of != jobs[j, WALK]:
            for col in range(n_cols):
                keys[col] = odd_key(col_seed, np.uint64(col))
            keys_of = jobs[j, WALK]
        at = jobs[j, START]
        while at < jobs[j, STOP]:
            index, offset, rest = walk[SOURCE], walk[TARGET], at
            for d in range(n_dims - 1, -1, -1):
                dim = FIRST_DIM + 3 * d
                digit = rest % walk[dim]
                rest //= walk[dim]
                index += digit * walk[dim + 1]
                offset += digit * walk[dim + 2]
            run = min(size - at % size, jobs[j, STOP] - at)
            row = index // n_cols
            col = index - row * n_cols
            while run:
                # The part of the run within one row of the checkpoint's tensor.
                n = min(run, (n_cols - col + source - 1) // source)
                first, stride = col, source
                if wide:
                    n = min(n, _WIDE)
                    keys_of = np.int64(-1)
                    for i in range(n):
                        keys[i] = odd_key(col_seed, np.uint64(col + i * source))
                    first, stride = np.int64(0), np.int64(1)
                p = odd_key(row_seed, np.uint64(row))
                here, there = _row(
                    weights, offset, target, buffer, at, keys, first, stride, n, mode
                )
                sums[j, 0] += here * p
                sums[j, 1] += there * p
                at += n
                run -= n
                offset += n * target
                col += n * source
                if col >= n_cols:
                    row += col // n_cols
                    col %= n_cols


@numba.njit(cache=True, nogil=True)
def _row(weights, offset, target, buffer, at, keys, col, source, n, mode):  # type: ignore[no-untyped-def]
    """Σ g·Q over part of a row: of the resident bits and, unless mode is SCAN, of the buffer."""
    here, there = np.uint64(0), np.uint64(0)
    if target == 1 and source == 1:
        # Slices, so that the compiler sees unit strides and vectorises.
        some, factors = weights[offset : offset + n], keys[col : col + n]
        for i in range(n):
            here += mix(np.uint64(some[i])) * factors[i]
        if mode != SCAN:
            other = buffer[at : at + n]
            for i in range(n):
                there += mix(np.uint64(other[i])) * factors[i]
            if mode == SWAP:
                for i in range(n):
                    some[i], other[i] = other[i], some[i]
        return here, there
    for i in range(n):
        place, factor = offset + i * target, keys[col + i * source]
        here += mix(np.uint64(weights[place])) * factor
        if mode != SCAN:
            there += mix(np.uint64(buffer[at + i])) * factor
        if mode == SWAP:
            weights[place], buffer[at + i] = buffer[at + i], weights[place]
    return here, there


@numba.njit(cache=True, nogil=True)
def gather_grids(grids, addresses, out):  # type: ignore[no-untyped-def]
    """Copies grids of elements out of storages.

    Args:
        grids: int64[n, 9], as `Places.crossings` gives them.
        addresses: int64[n], of each grid's storage.
        out: unsigned[m] of the weights' width; elements of no grid stay as they are.
    """
    for g in range(grids.shape[0]):
        n_rows, n_cols = grids[g, N_ROWS], grids[g, N_GRID_COLS]
        row_stride, col_stride = grids[g, ROW_STRIDE], grids[g, COL_STRIDE]
        pitch, step = grids[g, PITCH], grids[g, STEP]
        offset, at = grids[g, OFFSET], grids[g, AT]
        n = offset + (n_rows - 1) * row_stride + (n_cols - 1) * col_stride + 1
        weights = numba.carray(pointer(np.uintp(addresses[g])), (n,), out.dtype)
        if col_stride == 1 and step == 1:
            for i in range(n_rows):
                first, there = offset + i * row_stride, at + i * pitch
                out[there : there + n_cols] = weights[first : first + n_cols]
            continue
        # Square by square, so that neither side leaves the cache where it is a transpose.
        for top in range(0, n_rows, _SQUARE):
            bottom = min(top + _SQUARE, n_rows)
            for left in range(0, n_cols, _SQUARE):
                for j in range(left, min(left + _SQUARE, n_cols)):
                    first, there = offset + j * col_stride, at + j * step
                    for i in range(top, bottom):
                        out[there + i * pitch] = weights[first + i * row_stride]
