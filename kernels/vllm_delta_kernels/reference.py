"""The definition of the kernels, in plain torch: one rectangle, run of changes or lane at a time.

Weights are integer tensors of their raw bits. 64-bit sums are int64 and wrap. Where a kernel
takes a table of addresses, the functions here take the tensors themselves.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS_MULTIPLIER = 0x9FB21C651E98DF25

LIMIT, TOTAL, LOW_STATE = 1 << 22, 1 << 24, 1 << 31
OK, SHORT, BAD_STATE, TOO_FEW, BAD_STEP, BAD_END = range(6)


def signed(value: int) -> int:
    """A number mod 2^64 as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def odd_keys(seed: int, indices: torch.Tensor) -> torch.Tensor:
    """The odd constants of rows or columns: int64 of the shape of `indices` (int64)."""
    h = indices * signed(GOLDEN) + signed(seed)
    h = (h ^ _shift_right(h, 30)) * signed(MIX_1)
    h = (h ^ _shift_right(h, 27)) * signed(MIX_2)
    return (h ^ _shift_right(h, 31)) | 1


def mix(bits: torch.Tensor) -> torch.Tensor:
    """g of raw bits: int64 of the same shape."""
    x = (_widen(bits) + 1) * signed(BITS_MULTIPLIER)
    return x ^ _shift_right(x, 32)


def add_steps(bits: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The patterns `steps` places away in the order of the numbers; of the type of `bits`."""
    low = (1 << (8 * bits.element_size() - 1)) - 1
    key = _mirror(_widen(bits), low)
    return _mirror((key + steps.long()) & (2 * low + 1), low).to(bits.dtype)


def check_patch(
    weights: torch.Tensor, offsets: torch.Tensor, steps: torch.Tensor, coefficients: torch.Tensor
) -> tuple[int, int, int]:
    """Sums over what changes touch and what it becomes, and how many offsets are outside.

    Args:
        weights: int[n_elements], a whole storage; not modified.
        offsets: int[nnz]. Those outside of the storage are counted and left out.
        steps: int[nnz].
        coefficients: int64[nnz].

    Returns:
        Σ g(old)·coefficient and Σ g(new)·coefficient as int64, and the count.
    """
    inside = (offsets >= 0) & (offsets < weights.numel())
    old = weights[offsets[inside].long()]
    new = add_steps(old, steps[inside])
    kept = coefficients[inside]
    n_bad = int((~inside).sum())
    return int((mix(old) * kept).sum()), int((mix(new) * kept).sum()), n_bad


def scatter_patch(
    weights: torch.Tensor,
    offsets: torch.Tensor,
    steps: torch.Tensor,
    coefficients: torch.Tensor,
    *,
    gate: int,
    forward: bool,
) -> tuple[int, int, int]:
    """Moves the weights by their steps in place, if the gate is 1; returns as `check_patch` does,
    zeros where it is not."""
    if gate != 1:
        return 0, 0, 0
    signed_steps = steps.long() if forward else -steps.long()
    found = check_patch(weights, offsets, signed_steps, coefficients)
    inside = (offsets >= 0) & (offsets < weights.numel())
    places = offsets[inside].long()
    weights[places] = add_steps(weights[places], signed_steps[inside])
    return found


def scan_weights(weights: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> int:
    """Σ g·P·Q over a grid: weights int[n_rows, n_cols] of any strides, p int64[n_rows], q
    int64[n_cols]; not modified."""
    return int((mix(weights) * p[:, None] * q[None, :]).sum())


def check_bits(
    weights: torch.Tensor, buffer: torch.Tensor, p: torch.Tensor, q: torch.Tensor
) -> tuple[int, int]:
    """Σ g·P·Q over the weights and over the bits that would replace them, of the same shape."""
    return scan_weights(weights, p, q), scan_weights(buffer, p, q)


def swap_bits(
    weights: torch.Tensor, buffer: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, gate: int
) -> tuple[int, int]:
    """Exchanges weights and buffer in place, if the gate is 1; returns as `check_bits` does."""
    if gate != 1:
        return 0, 0
    found = check_bits(weights, buffer, p, q)
    kept = weights.clone()
    weights.copy_(buffer)
    buffer.copy_(kept)
    return found


def decode_lanes(
    base: torch.Tensor,
    words: torch.Tensor,
    n_changes: int,
    *,
    seed: int,
    shift: int,
    nodes: torch.Tensor,
    rates: torch.Tensor,
    scales: torch.Tensor,
    magnitudes: torch.Tensor,
) -> tuple[list[int], list[int], int]:
    """Positions and steps of one lane's changes, as far as they go, and its status.

    Args:
        base: int[n], the lane's weights before the change.
        words: int32[m].
        seed: what the lane's hash begins with, mod 2^64.
        rates, scales: int32[classes] of the lane's model.

    The rest as the kernel's entry has it. Nothing is modified.
    """
    state = _State(words)
    positions: list[int] = []
    steps: list[int] = []
    if not LOW_STATE <= state.x < 1 << 63:
        return positions, steps, BAD_STATE
    patterns = _widen(base)
    hazards = rates[patterns >> shift].tolist()
    rows = magnitudes.reshape(-1, 129)[scales[patterns >> shift].long()]
    cumulated = nodes.tolist()
    hash_, at = seed, 0
    for _ in range(n_changes):
        at = _find(state, hazards, at, cumulated)
        if at == len(hazards):
            return positions, steps, TOO_FEW
        step = _step(state, rows[at].tolist(), 8 * base.element_size())
        if step is None:
            return positions, steps, BAD_STEP
        new = int(_widen(add_steps(base[at], torch.tensor(step))))
        hash_ = (hash_ ^ (at << 32 | new)) * BITS_MULTIPLIER % (1 << 64)
        hash_ ^= hash_ >> 32
        positions.append(at)
        steps.append(step)
        at += 1
    if state.next_word > len(state.words):
        return positions, steps, SHORT
    whole = state.next_word == len(state.words) and state.x == LOW_STATE + (hash_ >> 33)
    return positions, steps, OK if whole else BAD_END


class _State:
    """A lane's state and its words; past the last word comes that one again."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words: list[int] = _widen(words).tolist()
        self.x = self.words[0] << 32 | self.words[1] if len(self.words) > 1 else 0
        self.next_word = 2

    def move(self, x: int) -> None:
        if x < LOW_STATE:
            x = x << 32 | self.words[min(self.next_word, len(self.words) - 1)]
            self.next_word += 1
        self.x = x


def _find(state: _State, hazards: list[int], at: int, nodes: list[int]) -> int:
    """The position of the next change, or the number of elements."""

    def cumulated(y: int) -> int:
        low, high = nodes[y >> 10], nodes[(y >> 10) + 1]
        return low + ((high - low) * (y & 1023) >> 10)

    y = 0
    while at < len(hazards):
        u, after = state.x % TOTAL, y + hazards[at]
        escapes = after > LIMIT
        low, high = cumulated(y), TOTAL if escapes else cumulated(after)
        if u < high:
            state.move((high - low) * (state.x // TOTAL) + u - low)
            if not escapes:
                return at
            y = 0
        else:
            y = after
            at += 1
    return at


def _step(state: _State, ends: list[int], width: int) -> int | None:
    """The next step, None if it does not fit its type."""
    negative, slot = state.x & 1, state.x >> 1 & 0xFFFF
    symbol = sum(end <= slot for end in ends) - 1
    state.move((ends[symbol + 1] - ends[symbol]) * (state.x >> 17) + slot - ends[symbol])
    magnitude = symbol + 1
    if symbol >= 16:
        n_low = 2 + (symbol - 16) // 4
        magnitude = (4 + symbol % 4 << n_low) + state.x % (1 << n_low)
        state.move(state.x >> n_low)
        if magnitude == 16:
            return None
    if magnitude - negative >= 1 << (width - 1):
        return None
    return -magnitude if negative else magnitude


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def _widen(bits: torch.Tensor) -> torch.Tensor:
    width = 8 * bits.element_size()
    return bits.long() if width == 64 else bits.long() & ((1 << width) - 1)


def _mirror(patterns: torch.Tensor, low: int) -> torch.Tensor:
    return torch.where(patterns > low, patterns ^ low, patterns)
