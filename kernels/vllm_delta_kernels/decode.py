"""Lanes of the `hazard` codec: where weights change and by how much, read from the weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_delta_kernels.bits import INTEGERS, UNSIGNED, _add_step, _mix_in

BLOCK = 256
"""Elements that a program scans at a time. Their rates add up to at most 2^30."""
N_COLUMNS = 9
"""Columns of a table of lanes: address of the lane's elements, their number, its first word and
number of words, its number of changes, what its hash begins with, its first change in the
outputs, first entry of its model in `rates` and `scales`, and how many bits of a pattern lie
below its class."""
ALIGNMENT = 16
"""What the address of a lane's elements is a multiple of, in bytes."""

LIMIT = tl.constexpr(1 << 22)
"""What hazards may add up to before an escape; 2^20 stands for 1."""
TOTAL = tl.constexpr(1 << 24)
LOW_STATE = tl.constexpr(1 << 31)
N_NODES = tl.constexpr(1 << 12)
N_MAGNITUDES = tl.constexpr(128)
MOST = tl.constexpr((1 << 31) - 1)
OK, SHORT, BAD_STATE, TOO_FEW, BAD_STEP, BAD_END = (tl.constexpr(i) for i in range(6))

_WARPS = 1
"""A lane to a warp: it decodes one change after the other, so that what counts is the time from
one to the next, and inside a warp nothing waits for shared memory."""


@triton.jit
def _cumulated(y, nodes_ptr):
    """F(y), 0 <= y <= LIMIT: linear between the nodes."""
    low = tl.load(nodes_ptr + (y >> 10))
    high = tl.load(nodes_ptr + (y >> 10) + 1)
    return low + (((high - low) * (y & 1023)) >> 10)


@triton.jit
def _last_below(x, nodes_ptr, node_of_ptr):
    """The largest y <= LIMIT with F(y) <= u, where u is what the state's low bits say.

    From the node that `node_of` names it is at most 14 nodes on: all of them are looked at at
    once.
    """
    u = (x & (TOTAL - 1)).to(tl.int32)
    first = tl.load(node_of_ptr + (u >> 12))
    place = first + tl.arange(0, 32)
    height = tl.load(nodes_ptr + place, mask=place <= N_NODES, other=MOST)
    below = height <= u
    node = first + tl.sum(below.to(tl.int32), 0) - 1
    low = tl.max(tl.where(below, height, 0), 0)
    high = tl.min(tl.where(below, MOST, height), 0)
    # F(node + part) <= u  ⟺  (high − low)·part < (u − low + 1)·2^10. As u is below the next node,
    # part is below 2^10; and it is 0 at the last, where `high` is MOST.
    part = (((u - low + 1) << 10) - 1).to(tl.uint32) // (high - low).to(tl.uint32)
    return (node << 10) + part.to(tl.int32)


@triton.jit
def _word(words, place):
    return tl.load(words + place).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _refilled(x, words, next_word, n_words):
    """The state with a word more where it is small, and the next word.

    Past the end it is the last word again: a lane that is too short is noticed when it is done,
    and until then it reads nothing that is not its own.
    """
    small = x < LOW_STATE
    word = _word(words, tl.minimum(next_word, n_words - 1))
    return tl.where(small, (x << 32) | word, x), next_word + small.to(tl.int32)


@triton.jit
def _take_position(x, sums, y, last, nodes_ptr):
    """A position: the state after it, the block's sum before the weight there and with it, and
    whether it is an escape.

    sums: of the block's hazards, y less than since the last change. Some are above `last` − y.
    """
    passed = sums <= last - y
    before = tl.max(tl.where(passed, sums, 0), 0)
    through = tl.min(tl.where(passed, MOST, sums), 0)
    low = _cumulated(y + before, nodes_ptr)
    escapes = y + through > LIMIT
    high = _cumulated(tl.minimum(y + through, LIMIT), nodes_ptr)
    share = tl.where(escapes, TOTAL, high) - low
    return share * (x >> 24) + ((x & (TOTAL - 1)) - low), before, through, escapes


@triton.jit
def _take_step(x, next_word, words, n_words, row_ptr, WIDTH: tl.constexpr):
    """A step: the state after it, the next word, the step, and whether it fits its type.

    row_ptr: cumulated frequencies of the magnitudes.
    """
    ends = tl.load(row_ptr + 1 + tl.arange(0, N_MAGNITUDES))
    negative = (x & 1).to(tl.int32)
    slot = ((x >> 1) & 0xFFFF).to(tl.int32)
    passed = ends <= slot
    symbol = tl.sum(passed.to(tl.int32), 0)
    low = tl.max(tl.where(passed, ends, 0), 0)
    share = tl.min(tl.where(passed, MOST, ends), 0) - low
    x = share * (x >> 17) + (slot - low)
    x, next_word = _refilled(x, words, next_word, n_words)
    magnitude = symbol.to(tl.int64) + 1
    fits = symbol < N_MAGNITUDES
    if symbol >= 16:
        n_low = (2 + ((symbol - 16) >> 2)).to(tl.int64)
        top = (4 + (symbol & 3)).to(tl.int64)
        magnitude = (top << n_low) | (x & ((tl.full([], 1, tl.int64) << n_low) - 1))
        x, next_word = _refilled(x >> n_low, words, next_word, n_words)
        fits = magnitude != 16
    fits = fits & (magnitude - negative < (1 << (8 * WIDTH - 1)))
    return x, next_word, tl.where(negative == 1, -magnitude, magnitude), fits


@triton.jit
def _load_block(base, start, n, BLOCK: tl.constexpr):
    """Elements from `start` on, up to the lane's last."""
    place = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        # No mask, so that a thread's elements are one load.
        bits = tl.load(base + place)
    else:
        bits = tl.load(base + place, mask=place < n, other=0)
    return bits


@triton.jit
def _finish(x, hash_, next_word, n_words, n_done, n_changes, status):
    """The status of a lane without elements left, or changes."""
    end = LOW_STATE + (hash_ >> 33).to(tl.int64)
    done = tl.where((next_word != n_words) | (x != end), BAD_END, OK)
    done = tl.where(next_word > n_words, SHORT, done)
    done = tl.where(n_done < n_changes, TOO_FEW, done)
    return tl.where(status == OK, done, status)


@triton.jit
def _decode_lanes_kernel(
    table_ptr,
    words_ptr,
    nodes_ptr,
    node_of_ptr,
    rates_ptr,
    scales_ptr,
    magnitudes_ptr,
    positions_ptr,
    steps_ptr,
    status_ptr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = table_ptr + lane * 9
    # The hint counts on the pointer only.
    base = tl.multiple_of(tl.load(row).to(tl.pointer_type(BITS)), 16)
    n = tl.load(row + 1).to(tl.int32)
    words = words_ptr + tl.load(row + 2)
    n_words = tl.load(row + 3).to(tl.int32)
    n_changes = tl.load(row + 4).to(tl.int32)
    hash_ = tl.load(row + 5).to(tl.uint64, bitcast=True)
    positions_ptr += tl.load(row + 6)
    steps_ptr += tl.load(row + 6)
    rates_ptr += tl.load(row + 7)
    scales_ptr += tl.load(row + 7)
    shift = tl.load(row + 8).to(tl.uint32)

    x = tl.full([], 0, tl.int64)
    if n_words >= 2:
        x = (_word(words, 0) << 32) | _word(words, 1)
    status = tl.where(x < LOW_STATE, BAD_STATE, OK)
    next_word = tl.full([], 2, tl.int32)
    n_done = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    # The sum of hazards since the last change or escape up to the block, less where that lies in
    # the block; and up to which sum the state goes on.
    y = tl.full([], 0, tl.int32)
    last = _last_below(x, nodes_ptr, node_of_ptr)
    ahead = _load_block(base, start, n, BLOCK)
    while (status == OK) & (n_done < n_changes) & (start < n):
        bits = ahead
        ahead = _load_block(base, start + BLOCK, n, BLOCK)
        sums = tl.cumsum(tl.load(rates_ptr + (bits.to(tl.uint32) >> shift)), 0)
        n_passed = tl.sum((sums <= last - y).to(tl.int32), 0)
        while n_passed < BLOCK:
            at = start + n_passed
            x, before, through, escapes = _take_position(x, sums, y, last, nodes_ptr)
            x, next_word = _refilled(x, words, next_word, n_words)
            y = -before
            if at >= n:
                status = TOO_FEW
            elif not escapes:
                pattern = tl.load(base + at)
                scale = tl.load(scales_ptr + (pattern.to(tl.uint32) >> shift))
                x, next_word, step, fits = _take_step(
                    x, next_word, words, n_words, magnitudes_ptr + scale * 129, WIDTH
                )
                status = tl.where(fits, OK, BAD_STEP)
                tl.store(positions_ptr + n_done, at)
                tl.store(steps_ptr + n_done, step.to(STEP))
                new = _add_step(pattern.to(tl.uint64), step, WIDTH)
                hash_ = _mix_in(hash_, (at.to(tl.uint64) << 32) | new)
                n_done += 1
                y = -through
            last = _last_below(x, nodes_ptr, node_of_ptr)
            going = (status == OK) & (n_done < n_changes)
            n_passed = tl.where(going, tl.sum((sums <= last - y).to(tl.int32), 0), BLOCK)
        y += tl.max(sums, 0)
        start += BLOCK
    status = _finish(x, hash_, next_word, n_words, n_done, n_changes, status)
    tl.store(status_ptr + lane, status)


def decode_lanes(
    table: torch.Tensor,
    words: torch.Tensor,
    nodes: torch.Tensor,
    node_of: torch.Tensor,
    rates: torch.Tensor,
    scales: torch.Tensor,
    magnitudes: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    status: torch.Tensor,
    *,
    width: int,
) -> None:
    """Decodes lanes against copies of their weights; writes no weight.

    All tensors are contiguous, and all but the last three are not modified.

    Args:
        table: int64[n, N_COLUMNS]. See `N_COLUMNS`. A lane's elements lie one after the other,
            before the change, the first at a multiple of ALIGNMENT; at most 2^30 of them. A lane's
            changes have places of their own in the outputs.
        words: int32[m], the lanes' 32-bit words.
        nodes: int32[4098], F at its nodes, the last twice.
        node_of: int32[4096], for u = 0, 4096, 8192, … a node at or below it, and at most 30 below
            the last that is for u + 4095.
        rates: int32[k], 1 to LIMIT: per model, the hazard of each class, sign included.
        scales: int32[k]: per model and class, a row of `magnitudes`.
        magnitudes: int32[scales, 129], cumulated frequencies of the magnitudes.
        positions: int32[changes], written: positions in the lane.
        steps: signed[changes] of the weights' width, written.
        status: int32[n], written: OK, or what is wrong with the lane. Its part of the outputs then
            holds anything; those of other lanes are as they should be.
        width: bytes of a weight, 1, 2 or 4.
    """
    if len(table):
        _decode_lanes_kernel[(len(table),)](
            table,
            words,
            nodes,
            node_of,
            rates,
            scales,
            magnitudes,
            positions,
            steps,
            status,
            **_options(width),
        )


def _options(width: int) -> dict[str, object]:
    return {
        "WIDTH": width,
        "BITS": UNSIGNED[width],
        "STEP": INTEGERS[width],
        "BLOCK": BLOCK,
        "num_warps": _WARPS,
    }
