"""Sparse changes: one launch checks or applies a patch of any number of parameters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_delta_kernels.bits import (
    INTEGERS,
    _add_step,
    _mix,
    _one_to_a_lane,
    _total,
    _widen,
)

BLOCK = 1024
"""The most changes in a row of the table: what one program handles."""
N_COLUMNS = 7
"""Columns of a table of changes: address of the storage, its number of elements, addresses of
offsets, steps and coefficients, number of changes, and which row of `sums` they count to."""

_WARPS = 4


@triton.jit
def _load_changes(
    table_ptr,
    n_bad_ptr,
    sign,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """A row of the table: where its weights are, their old and new bits, and their coefficients.

    sign: 1 to go forward, -1 to go back.

    Offsets outside of the storage are counted and masked out.
    """
    row = table_ptr + tl.program_id(0).to(tl.int64) * 7
    storage = tl.load(row).to(tl.pointer_type(BITS))
    n_elements = tl.load(row + 1)
    offsets_ptr = tl.load(row + 2).to(tl.pointer_type(OFFSET))
    steps_ptr = tl.load(row + 3).to(tl.pointer_type(STEP))
    coefficients_ptr = tl.load(row + 4).to(tl.pointer_type(tl.uint64))
    n = tl.load(row + 5)
    lane = _one_to_a_lane(tl.arange(0, LANES))
    present = lane < n
    offset = tl.load(offsets_ptr + lane, mask=present, other=0).to(tl.int64)
    inside = present & (offset >= 0) & (offset < n_elements)
    place = storage + offset
    old = _widen(tl.load(place, mask=inside, other=0), WIDTH)
    step = tl.load(steps_ptr + lane, mask=inside, other=0).to(tl.int64)
    new = _add_step(old, step * sign, WIDTH)
    coefficient = tl.load(coefficients_ptr + lane, mask=inside, other=0)
    n_bad = tl.sum((present & (~inside)).to(tl.int32), 0)
    if n_bad > 0:
        tl.atomic_add(n_bad_ptr, n_bad, sem="relaxed")
    return place, inside, old, new, coefficient


@triton.jit
def _add_sums(table_ptr, sums_ptr, old, new, coefficient, mask):
    row = table_ptr + tl.program_id(0).to(tl.int64) * 7
    sums = sums_ptr + 2 * tl.load(row + 6)
    tl.atomic_add(sums, _total(_mix(old) * coefficient, mask), sem="relaxed")
    tl.atomic_add(sums + 1, _total(_mix(new) * coefficient, mask), sem="relaxed")


@triton.jit
def _check_patch_kernel(
    table_ptr,
    sums_ptr,
    n_bad_ptr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    _, inside, old, new, coefficient = _load_changes(
        table_ptr, n_bad_ptr, 1, WIDTH, BITS, OFFSET, STEP, LANES
    )
    _add_sums(table_ptr, sums_ptr, old, new, coefficient, inside)


@triton.jit(do_not_specialize=["sign"])
def _scatter_patch_kernel(
    table_ptr,
    gate_ptr,
    sums_ptr,
    n_bad_ptr,
    sign,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    if tl.load(gate_ptr) != 1:
        return
    place, inside, old, new, coefficient = _load_changes(
        table_ptr, n_bad_ptr, sign, WIDTH, BITS, OFFSET, STEP, LANES
    )
    tl.store(place, new.to(BITS), mask=inside)
    _add_sums(table_ptr, sums_ptr, old, new, coefficient, inside)


def check_patch(
    table: torch.Tensor,
    sums: torch.Tensor,
    n_bad: torch.Tensor,
    *,
    width: int,
    offset_bytes: int,
    step_bytes: int,
) -> None:
    """Reads the weights that a patch touches and sums over them and over what they would become.

    Args:
        table: int64[n, N_COLUMNS], contiguous; not modified. See `N_COLUMNS`; offsets are int32
            or int64, steps signed, coefficients 64 bits. A row has at most BLOCK changes, and no
            offset is twice in a patch.
        sums: int64[m, 2]; Σ g(old)·coefficient and Σ g(new)·coefficient are added, mod 2^64.
        n_bad: int32[1]; the number of offsets outside of their storage is added. They are left
            out of the sums.
        width: bytes of a weight, 1, 2 or 4.
        offset_bytes: 4 or 8.
        step_bytes: 1, 2 or 4, at most `width`.
    """
    if len(table):
        options = _options(width, offset_bytes, step_bytes)
        _check_patch_kernel[(len(table),)](table, sums, n_bad, **options)


def scatter_patch(
    table: torch.Tensor,
    gate: torch.Tensor,
    sums: torch.Tensor,
    n_bad: torch.Tensor,
    *,
    width: int,
    offset_bytes: int,
    step_bytes: int,
    forward: bool,
) -> None:
    """Moves weights by their steps, in place; a no-op unless the gate is open.

    Args:
        gate: int32[1]; anything but 1 is closed. Read on the device, so that a verdict need not
            visit the host between the check and the scatter.
        sums: as in `check_patch`; `old` is what was there, `new` what is there now.
        forward: False takes a patch back: the steps with their sign turned.

    The rest as in `check_patch`. An offset outside of its storage is counted and not written.
    """
    if len(table):
        options = _options(width, offset_bytes, step_bytes)
        sign = 1 if forward else -1
        _scatter_patch_kernel[(len(table),)](table, gate, sums, n_bad, sign, **options)


def _options(width: int, offset_bytes: int, step_bytes: int) -> dict[str, object]:
    return {
        "WIDTH": width,
        "BITS": INTEGERS[width],
        "OFFSET": INTEGERS[offset_bytes],
        "STEP": INTEGERS[step_bytes],
        "LANES": BLOCK,
        "num_warps": _WARPS,
    }
