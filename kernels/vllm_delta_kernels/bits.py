"""Device functions: raw bits through addresses, their order, and the fingerprint's constants."""

from __future__ import annotations

import triton
import triton.language as tl

INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Bytes per element to the type that kernels load and store it as. Never a float type: a compare
would make -0 equal to +0 and no NaN equal to itself."""
UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
"""The same where a kernel reads patterns as numbers."""


@triton.jit
def _odd_key(seed, index):
    """The odd 64-bit constant of a row or column: splitmix64's output (Steele, Lea, Flood 2014).

    seed: uint64. index: non-negative integer.
    """
    h = seed + index.to(tl.uint64) * 0x9E3779B97F4A7C15
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return (h ^ (h >> 31)) | 1


@triton.jit
def _mix(bits):
    """g: an injective, non-linear mix of an element's raw bits. uint64 to uint64."""
    x = (bits + 1) * 0x9FB21C651E98DF25
    return x ^ (x >> 32)


@triton.jit
def _mix_in(hash_, value):
    """A hash of 64 bits after one more value. uint64 both."""
    hash_ = (hash_ ^ value) * 0x9FB21C651E98DF25
    return hash_ ^ (hash_ >> 32)


@triton.jit
def _widen(loaded, WIDTH: tl.constexpr):
    """Raw bits, as loaded by a signed integer type, to uint64 without their sign's extension."""
    wide = loaded.to(tl.uint64)
    if WIDTH < 8:
        wide &= (1 << (8 * WIDTH)) - 1
    return wide


@triton.jit
def _add_step(bits, step, WIDTH: tl.constexpr):
    """The pattern `step` places away in the order of the numbers, modulo 2^(8·WIDTH).

    bits: uint64, below 2^(8·WIDTH). step: int64. WIDTH: 1, 2 or 4.
    """
    TOP: tl.constexpr = 8 * WIDTH - 1
    LOW: tl.constexpr = (1 << TOP) - 1
    key = bits.to(tl.int64)
    key ^= (0 - (key >> TOP)) & LOW
    key = (key + step) & (2 * LOW + 1)
    return (key ^ ((0 - (key >> TOP)) & LOW)).to(tl.uint64)


@triton.jit
def _total(terms, mask):
    """Their sum mod 2^64 as int64, where `mask` holds."""
    return tl.sum(tl.where(mask, terms, 0).to(tl.int64, bitcast=True), 0)


@triton.jit
def _one_to_a_lane(lane):
    """Hides that lanes are contiguous. The loads of a stream then have the layout of the scatter
    that follows, one element to a lane (still one transaction to a warp), and nothing is moved
    between layouts through shared memory."""
    return tl.max_contiguous(tl.multiple_of(lane, 1), 1)
