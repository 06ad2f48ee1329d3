"""The `gap` codec: distances between changed elements and their steps, as log buckets.

A value below 8 is its own symbol; a larger one is a bucket with two mantissa bits and its low bits
follow raw, least significant first. Symbols go through zstandard, low bits as they are. Positions
need no base, and two changes of one element cannot be expressed.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from vllm_delta.codec.order import SIGNED, Signed
from vllm_delta.errors import FormatError

U8 = npt.NDArray[np.uint8]

MAX_CHANGES = 1 << 26
"""Changes in one blob at most: bounds what a decoder allocates. More go `raw` or to a new blob."""

MAX_SYMBOL = 8 + 4 * (40 - 3) + 3
"""The bucket of values below 2^41: more than any gap in a tensor of 2^40 elements."""

_OK, _OUT_OF_RANGE, _BAD_STEP, _BAD_SYMBOL, _SHORT = 0, 1, 2, 3, 4
_PROBLEMS = {
    _OUT_OF_RANGE: "gap: an index is out of range",
    _BAD_STEP: "gap: a step does not fit its type",
    _BAD_SYMBOL: "gap: unknown symbol",
    _SHORT: "gap: low bits end too early",
}


@numba.njit(cache=True, nogil=True)
def _put(values, symbols, low, carry):  # type: ignore[no-untyped-def]
    """Split values (int64, >= 0) into symbols and low bits; returns bytes of low bits.

    carry: uint64[2], low bits that do not fill a byte yet, and how many; read and written.
    """
    held, n_held, at = carry[0], np.int64(carry[1]), 0
    for i in range(values.size):
        value = np.uint64(values[i])
        if value < 8:
            symbols[i] = value
            continue
        top = 3
        while value >> np.uint64(top + 1):
            top += 1
        n_low = top - 2
        symbols[i] = 8 + (top - 3) * 4 + int((value >> np.uint64(n_low)) & np.uint64(3))
        held |= (value & ((np.uint64(1) << np.uint64(n_low)) - np.uint64(1))) << np.uint64(n_held)
        n_held += n_low
        while n_held >= 8:
            low[at] = np.uint8(held & np.uint64(255))
            at += 1
            held >>= np.uint64(8)
            n_held -= 8
    carry[0], carry[1] = held, np.uint64(n_held)
    return at


@numba.njit(cache=True, nogil=True)
def _count_low_bits(values):  # type: ignore[no-untyped-def]
    n_bits = 0
    for i in range(values.size):
        value = np.uint64(values[i])
        if value >= 8:
            top = 3
            while value >> np.uint64(top + 1):
                top += 1
            n_bits += top - 2
    return n_bits


@numba.njit(cache=True, nogil=True)
def _get(symbol, low, state):  # type: ignore[no-untyped-def]
    """Value of a symbol; state is [held bits, count held, next byte, problem]."""
    if symbol < 8:
        return np.uint64(symbol)
    if symbol > MAX_SYMBOL:
        state[3] = np.uint64(_BAD_SYMBOL)
        return np.uint64(0)
    n_low = np.uint64(1 + ((symbol - 8) >> 2))
    while state[1] < n_low:
        if state[2] >= low.size:
            state[3] = np.uint64(_SHORT)
            return np.uint64(0)
        state[0] |= np.uint64(low[np.int64(state[2])]) << state[1]
        state[1] += np.uint64(8)
        state[2] += np.uint64(1)
    value = state[0] & ((np.uint64(1) << n_low) - np.uint64(1))
    state[0] >>= n_low
    state[1] -= n_low
    return (np.uint64(4 + ((symbol - 8) & 3)) << n_low) | value


@numba.njit(cache=True, nogil=True)
def _read_gaps(symbols, low, state, numel, indices):  # type: ignore[no-untyped-def]
    index = np.int64(-1)
    for i in range(symbols.size):
        gap = _get(symbols[i], low, state)
        if state[3]:
            return np.int64(state[3])
        if gap >= np.uint64(numel - 1 - index):
            return np.int64(_OUT_OF_RANGE)
        index += np.int64(gap) + 1
        indices[i] = index
    return np.int64(_OK)


@numba.njit(cache=True, nogil=True)
def _read_steps(symbols, low, state, limit, steps):  # type: ignore[no-untyped-def]
    for i in range(symbols.size):
        code = _get(symbols[i], low, state)
        if state[3]:
            return np.int64(state[3])
        if code >= limit:
            return np.int64(_BAD_STEP)
        zigzag = np.int64(code) + 1
        steps[i] = (zigzag >> 1) ^ -(zigzag & 1)
    return np.int64(_OK)


class Stream:
    """Values of one kind on their way into a blob: a byte per value, and the low bits packed."""

    def __init__(self) -> None:
        self._symbols: list[bytes] = []
        self._low: list[bytes] = []
        self._carry = np.zeros(2, np.uint64)

    def add(self, values: npt.NDArray[np.int64]) -> None:
        """Append values int64[n] >= 0."""
        symbols = np.empty(values.size, np.uint8)
        low = np.empty(int(_count_low_bits(values)) // 8 + 1, np.uint8)
        n = int(_put(values, symbols, low, self._carry))
        self._symbols.append(symbols.tobytes())
        self._low.append(low[:n].tobytes())

    def finish(self) -> tuple[bytes, bytes]:
        """Symbols, and low bits with the last byte padded."""
        rest = bytes([int(self._carry[0])]) if self._carry[1] else b""
        return b"".join(self._symbols), b"".join([*self._low, rest])


def gaps_of(indices: Signed) -> npt.NDArray[np.int64]:
    """Unchanged elements before each index, counted from the one before: int64[n]."""
    wide = indices.astype(np.int64)
    return np.diff(wide, prepend=np.int64(-1)) - 1


def codes_of(steps: Signed) -> npt.NDArray[np.int64]:
    """Zigzag codes of non-zero steps, minus one: +1 → 1, -1 → 0, +2 → 3, -2 → 2."""
    wide = steps.astype(np.int64)
    return ((wide << 1) ^ (wide >> 63)) - 1


class Reader:
    """Reads tensor after tensor from a blob's four streams, checking every value."""

    def __init__(self, gap_symbols: U8, gap_low: U8, step_symbols: U8, step_low: U8) -> None:
        self._gaps = (gap_symbols, gap_low, np.zeros(4, np.uint64))
        self._steps = (step_symbols, step_low, np.zeros(4, np.uint64))
        self._at = 0

    def take(self, n: int, numel: int, itemsize: int, name: str) -> tuple[Signed, Signed]:
        """The next n changes of a tensor: indices int32 or int64[n], steps signed[n]."""
        part = slice(self._at, self._at + n)
        self._at += n
        indices: Signed = np.empty(n, np.int32 if numel < 1 << 31 else np.int64)
        symbols, low, state = self._gaps
        _check(_read_gaps(symbols[part], low, state, np.int64(numel), indices), name)
        steps: Signed = np.empty(n, SIGNED[itemsize])
        symbols, low, state = self._steps
        limit = np.uint64((1 << 8 * itemsize) - 1)
        _check(_read_steps(symbols[part], low, state, limit, steps), name)
        return indices, steps

    def finish(self) -> None:
        """Check that every stream was used up to its last byte."""
        for symbols, low, state in (self._gaps, self._steps):
            held, n_held, at, _ = (int(value) for value in state)
            if self._at != symbols.size or at != low.size or n_held >= 8 or held:
                raise FormatError("gap: bytes left over", symbols=symbols.size, low=low.size)


def _check(problem: int, name: str) -> None:
    if problem != _OK:
        raise FormatError(_PROBLEMS[int(problem)], name=name)
