"""Whole rectangles: their fingerprints, and their exchange with a buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_delta_kernels.bits import INTEGERS, _mix, _odd_key, _total, _widen

LANES = 1024
"""The most columns of a job."""
N_COLUMNS = 14
"""Columns of a table of jobs. A job is a grid of elements: address of the first, distances
between rows and between columns (in elements); checkpoint row of the first and distance, the same
for columns; number of rows and columns; seeds of the row and column constants; which row of
`sums` it counts to; address of the first element in the buffer and distance between rows there
(columns are next to each other)."""

_WARPS = 4


@triton.jit
def _walk_job(
    jobs_ptr,
    sums_ptr,
    BUFFER: tl.constexpr,
    SWAP: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    job = jobs_ptr + tl.program_id(0).to(tl.int64) * 14
    address = tl.load(job)
    row_stride = tl.load(job + 1)
    col_stride = tl.load(job + 2)
    row = tl.load(job + 3)
    row_step = tl.load(job + 4)
    col = tl.load(job + 5)
    col_step = tl.load(job + 6)
    n_rows = tl.load(job + 7).to(tl.int32)
    n_cols = tl.load(job + 8)
    row_seed = tl.load(job + 9).to(tl.uint64, bitcast=True)
    col_seed = tl.load(job + 10).to(tl.uint64, bitcast=True)
    sums = sums_ptr + 2 * tl.load(job + 11)
    weights = address.to(tl.pointer_type(BITS))
    lane = tl.arange(0, LANES)
    present = lane < n_cols
    old = tl.zeros((LANES,), tl.uint64)
    new = tl.zeros((LANES,), tl.uint64)
    if BUFFER:
        buffer = tl.load(job + 12).to(tl.pointer_type(BITS))
        pitch = tl.load(job + 13)
        for r in range(n_rows):
            p = _odd_key(row_seed, row + r * row_step)
            place = weights + r * row_stride + lane * col_stride
            other = buffer + r * pitch + lane
            here = tl.load(place, mask=present, other=0)
            there = tl.load(other, mask=present, other=0)
            old += _mix(_widen(here, WIDTH)) * p
            new += _mix(_widen(there, WIDTH)) * p
            if SWAP:
                tl.store(place, there, mask=present)
                tl.store(other, here, mask=present)
    elif (n_cols == LANES) & (col_stride == 1) & (row_stride % 16 == 0) & (address % 16 == 0):
        # No mask and aligned: loads of 16 bytes. The hint counts on the pointer only.
        aligned = tl.multiple_of(weights, 16)
        stride = tl.multiple_of(row_stride, 16)
        for r in range(n_rows):
            p = _odd_key(row_seed, row + r * row_step)
            old += _mix(_widen(tl.load(aligned + r * stride + lane), WIDTH)) * p
    else:
        for r in range(n_rows):
            p = _odd_key(row_seed, row + r * row_step)
            place = weights + r * row_stride + lane * col_stride
            old += _mix(_widen(tl.load(place, mask=present, other=0), WIDTH)) * p
    q = _odd_key(col_seed, col + lane * col_step)
    tl.atomic_add(sums, _total(old * q, present), sem="relaxed")
    if BUFFER:
        tl.atomic_add(sums + 1, _total(new * q, present), sem="relaxed")


@triton.jit
def _scan_weights_kernel(
    jobs_ptr, sums_ptr, WIDTH: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr
):
    _walk_job(jobs_ptr, sums_ptr, False, False, WIDTH, BITS, LANES)


@triton.jit
def _check_bits_kernel(
    jobs_ptr, sums_ptr, WIDTH: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr
):
    _walk_job(jobs_ptr, sums_ptr, True, False, WIDTH, BITS, LANES)


@triton.jit
def _swap_bits_kernel(
    jobs_ptr, gate_ptr, sums_ptr, WIDTH: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr
):
    if tl.load(gate_ptr) != 1:
        return
    _walk_job(jobs_ptr, sums_ptr, True, True, WIDTH, BITS, LANES)


def scan_weights(jobs: torch.Tensor, sums: torch.Tensor, *, width: int) -> None:
    """Fingerprints weights where they are.

    Args:
        jobs: int64[n, N_COLUMNS], contiguous; not modified. See `N_COLUMNS`; the buffer is not
            used. A job has at most LANES columns. Addresses are not checked here: whoever makes
            the table knows the storages.
        sums: int64[m, 2]; Σ g·P(row)·Q(col) is added to the first column, mod 2^64.
        width: bytes of a weight, 1, 2, 4 or 8.
    """
    if len(jobs):
        _scan_weights_kernel[(len(jobs),)](jobs, sums, **_options(width))


def check_bits(jobs: torch.Tensor, sums: torch.Tensor, *, width: int) -> None:
    """Sums over weights and over the bits that would replace them.

    Args:
        sums: int64[m, 2]; Σ g·P·Q over the weights is added to the first column, over the buffer
            to the second, mod 2^64.

    The rest as in `scan_weights`.
    """
    if len(jobs):
        _check_bits_kernel[(len(jobs),)](jobs, sums, **_options(width))


def swap_bits(jobs: torch.Tensor, gate: torch.Tensor, sums: torch.Tensor, *, width: int) -> None:
    """Exchanges weights and buffer, in place; a no-op unless the gate is open.

    Args:
        gate: int32[1]; anything but 1 is closed.
        sums: as in `check_bits`, over what was there and what is there now.

    The rest as in `scan_weights`. The same call again restores both.
    """
    if len(jobs):
        _swap_bits_kernel[(len(jobs),)](jobs, gate, sums, **_options(width))


def _options(width: int) -> dict[str, object]:
    return {"WIDTH": width, "BITS": INTEGERS[width], "LANES": LANES, "num_warps": _WARPS}
