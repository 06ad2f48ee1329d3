"""The lane loops of the `hazard` codec: numba, without the GIL, every access within bounds."""

from __future__ import annotations

import numba
import numpy as np

from vllm_delta.codec.hazard.tables import LIMIT, N_NODES

_BLOCK = 16
_U32 = np.uint64(32)
_LOW_STATE = np.uint64(1 << 31)
_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
_TOTAL = 1 << 24

OK, SHORT, BAD_STATE, TOO_FEW, BAD_STEP, BAD_END = range(6)


@numba.njit(inline="always")
def _cumulated(y, nodes):  # type: ignore[no-untyped-def]
    node = np.uintp(y >> 10)
    low = nodes[node]
    return low + (((nodes[node + np.uintp(1)] - low) * (y & 1023)) >> 10)


@numba.njit(inline="always")
def _last_below(u, nodes, node_of):  # type: ignore[no-untyped-def]
    """The largest y <= LIMIT with F(y) <= u, for 0 <= u < 2^24."""
    node = np.uintp(node_of[np.uintp(u >> 12)])
    while node < N_NODES and nodes[node + np.uintp(1)] <= u:
        node += np.uintp(1)
    if node >= N_NODES:
        return np.int64(LIMIT)
    height = np.uint32(nodes[node + np.uintp(1)] - nodes[node])
    # F(node + part) <= u  ⟺  height·part < (u − F + 1)·2^10
    part = np.uint32(((u - nodes[node] + 1) << 10) - 1) // height
    return (np.int64(node) << 10) + min(np.int64(part), np.int64(1023))


@numba.njit(inline="always")
def _walk(bits, at, stop, y, most, rates, shift):  # type: ignore[no-untyped-def]
    """Goes on while the hazards add up to at most `most`; returns where it stopped and the sum.

    Places are unsigned, or each access would first ask whether it counts from the end.
    """
    left = most - y
    while at + np.uintp(_BLOCK) <= stop:
        total = np.int64(0)
        for i in range(_BLOCK):
            total += rates[np.uintp(bits[at + np.uintp(i)]) >> shift]
        if total > left:
            # Within the block without a branch to guess wrong: hazards are positive, so the sums
            # that are small enough are the first ones.
            total, passed, n = np.int64(0), np.int64(0), np.uintp(0)
            for i in range(_BLOCK):
                total += rates[np.uintp(bits[at + np.uintp(i)]) >> shift]
                fits = total <= left
                passed = total if fits else passed
                n += np.uintp(fits)
            return at + n, most - left + passed
        left -= total
        at += np.uintp(_BLOCK)
    while at < stop:
        rate = rates[np.uintp(bits[at]) >> shift]
        if rate > left:
            break
        left -= rate
        at += np.uintp(1)
    return at, most - left


@numba.njit(inline="always")
def _mixed(hash_, position, pattern):  # type: ignore[no-untyped-def]
    hash_ = (hash_ ^ ((np.uint64(position) << _U32) | np.uint64(pattern))) * _MULTIPLIER
    return hash_ ^ (hash_ >> _U32)


@numba.njit(inline="always")
def _moved(pattern, step, width):  # type: ignore[no-untyped-def]
    """The pattern that many steps away, mod 2^width; int64 in and out."""
    low = (np.int64(1) << (width - 1)) - 1
    key = pattern ^ (low if pattern >> (width - 1) else np.int64(0))
    key = (key + step) & (2 * low + 1)
    return key ^ (low if key >> (width - 1) else np.int64(0))


@numba.njit(cache=True, nogil=True)
def decode_lane(bits, words, seed, shift, rates, scale_of, steps, nodes, node_of, positions, out):  # type: ignore[no-untyped-def]
    """Decodes one lane; returns OK or what is wrong.

    Args:
        bits: unsigned[n], the lane before the change; not modified.
        words: uint32[m].
        seed: uint64, what the hash begins with.
        shift: rates and scale_of are indexed by ``pattern >> shift``, sign included.
        rates: int64[classes], λ.
        scale_of: int64[classes], row of `steps`.
        steps: int32[N_SCALES, N_MAGNITUDES + 1], cumulated.
        nodes, node_of: F and the search's start.
        positions: signed[n_changes], written: positions in the lane.
        out: signed[n_changes], written: steps.
    """
    width = np.int64(8 * bits.itemsize)
    if words.size < 2:
        return BAD_STATE
    n_words = np.uintp(words.size)
    x = (np.uint64(words[0]) << _U32) | np.uint64(words[1])
    if x < _LOW_STATE or x >> np.uint64(63):
        return BAD_STATE
    next_word = np.uintp(2)
    at, n = np.uintp(0), np.uintp(bits.size)
    shift = np.uintp(shift)
    hash_ = seed
    for c in range(out.size):
        y = np.int64(0)
        while True:
            u = np.int64(x & np.uint64(_TOTAL - 1))
            at, y = _walk(bits, at, n, y, _last_below(u, nodes, node_of), rates, shift)
            if at >= n:
                return TOO_FEW
            after = y + rates[np.uintp(bits[at]) >> shift]
            low = _cumulated(y, nodes)
            escape = after > LIMIT
            share = (np.int64(_TOTAL) if escape else _cumulated(after, nodes)) - low
            x = np.uint64(share) * (x >> np.uint64(24)) + np.uint64(u - low)
            x, next_word = _refilled(x, words, next_word, n_words)
            if not escape:
                break
            y = np.int64(0)
        pattern = np.int64(bits[at])
        row = np.uintp(scale_of[np.uintp(pattern) >> shift])
        slot = np.int64(x & np.uint64(0x1FFFF))
        negative = slot & 1
        slot >>= 1
        symbol = np.uintp(0)
        while steps[row, symbol + np.uintp(1)] <= slot:
            symbol += np.uintp(1)
        low = np.int64(steps[row, symbol])
        share = np.int64(steps[row, symbol + np.uintp(1)]) - low
        x = np.uint64(share) * (x >> np.uint64(17)) + np.uint64(slot - low)
        x, next_word = _refilled(x, words, next_word, n_words)
        magnitude = np.int64(symbol) + 1
        if symbol >= 16:
            n_low = np.uint64(2) + ((symbol - np.uint64(16)) >> np.uint64(2))
            magnitude = np.int64(
                ((np.uint64(4) + (symbol & np.uint64(3))) << n_low)
                | (x & ((np.uint64(1) << n_low) - np.uint64(1)))
            )
            x, next_word = _refilled(x >> n_low, words, next_word, n_words)
            if magnitude == 16:
                return BAD_STEP
        if magnitude - negative >= np.int64(1) << (width - 1):
            return BAD_STEP
        step = -magnitude if negative else magnitude
        positions[c] = at
        out[c] = step
        hash_ = _mixed(hash_, at, _moved(pattern, step, width))
        at += np.uintp(1)
    if next_word > n_words:
        return SHORT
    if next_word != n_words or x != _LOW_STATE + (hash_ >> np.uint64(33)):
        return BAD_END
    return OK


@numba.njit(inline="always")
def _refilled(x, words, next_word, n_words):  # type: ignore[no-untyped-def]
    """The state with a word more where it is small, and the next word.

    No branch to guess wrong, and past the end the last word again: a lane that is too short is
    noticed when it is done, and until then it reads nothing that is not its own.
    """
    small = x < _LOW_STATE
    word = np.uint64(words[min(next_word, n_words - np.uintp(1))])
    return ((x << _U32) | word) if small else x, next_word + np.uintp(small)


@numba.njit(inline="always")
def _symbol(magnitude):  # type: ignore[no-untyped-def]
    """Symbol of a magnitude (int64, at least 1) and how many low bits follow."""
    if magnitude <= 16:
        return magnitude - 1, np.int64(0)
    top = np.int64(4)
    while magnitude >> (top + 1):
        top += 1
    return 16 + 4 * (top - 4) + ((magnitude >> (top - 2)) & 3), top - 2


_POSITION, _STEP = np.uint8(24), np.uint8(17)


@numba.njit(cache=True, nogil=True)
def encode_lane(  # type: ignore[no-untyped-def]
    bits, positions, changes, seed, shift, rates, scale_of, steps, nodes, kinds, lows, shares, words
):
    """Encodes one lane.

    Args:
        bits: unsigned[n], the lane before the change; not modified.
        positions: signed[m], ascending, where it changes.
        changes: signed[m], steps.
        kinds, lows, shares: uint8, uint32, uint32 of one size: room for the symbols.
        words: uint32, room for as many as there are symbols and two more; written at its end.

    Returns:
        the number of words, which stand at the end of `words`; -1 if there is not room enough.
    """
    width = np.int64(8 * bits.itemsize)
    n, at, room = np.uintp(0), np.uintp(0), np.uintp(kinds.size - 3)
    shift = np.uintp(shift)
    hash_ = seed
    for c in range(positions.size):
        y = np.int64(0)
        place = np.uintp(positions[c])
        while True:
            at, y = _walk(bits, at, place, y, np.int64(LIMIT), rates, shift)
            low = _cumulated(y, nodes)
            after = y + rates[np.uintp(bits[at]) >> shift]
            if n >= room:
                return -1
            kinds[n], lows[n] = _POSITION, low
            if after > LIMIT:
                shares[n] = _TOTAL - low
                n += np.uintp(1)
                y = np.int64(0)
                continue
            shares[n] = _cumulated(after, nodes) - low
            n += np.uintp(1)
            break
        pattern, step = np.int64(bits[at]), np.int64(changes[c])
        magnitude = abs(step)
        symbol, n_low = _symbol(magnitude)
        row, column = np.uintp(scale_of[np.uintp(pattern) >> shift]), np.uintp(symbol)
        low = np.int64(steps[row, column])
        kinds[n] = _STEP
        lows[n] = (low << 1) | (step < 0)
        shares[n] = np.int64(steps[row, column + np.uintp(1)]) - low
        n += np.uintp(1)
        if n_low:
            kinds[n], shares[n] = np.uint8(n_low + 32), 1
            lows[n] = magnitude & ((np.int64(1) << n_low) - 1)
            n += np.uintp(1)
        hash_ = _mixed(hash_, at, _moved(pattern, step, width))
        at += np.uintp(1)
    x = _LOW_STATE + (hash_ >> np.uint64(33))
    p = np.uintp(words.size)
    while n > 0:
        n -= np.uintp(1)
        t = n
        kind, share, low = kinds[t], np.uint64(shares[t]), np.uint64(lows[t])
        raw = kind > np.uint8(32)
        precision = np.uint64(kind - np.uint8(32)) if raw else np.uint64(kind)
        if x >= share << (np.uint64(63) - precision):
            p -= np.uintp(1)
            words[p] = np.uint32(x & np.uint64(0xFFFFFFFF))
            x >>= _U32
        if raw:
            x = (x << precision) | low
        else:
            rest = x % share
            x = ((x // share) << precision) + low
            x += rest << np.uint64(1) if kind == _STEP else rest
    p -= np.uintp(2)
    words[p] = np.uint32(x >> _U32)
    words[p + np.uintp(1)] = np.uint32(x & np.uint64(0xFFFFFFFF))
    return words.size - np.int64(p)


@numba.njit(cache=True, nogil=True)
def count_classes(bits, shift, stride, counts):  # type: ignore[no-untyped-def]
    """Adds how many elements each class (sign included) has in every stride-th run of 64.

    Returns:
        how many elements were looked at.
    """
    n = 0
    for start in range(0, bits.size, 64 * stride):
        stop = min(start + 64, bits.size)
        for i in range(start, stop):
            counts[bits[i] >> shift] += 1
        n += stop - start
    return n


@numba.njit(cache=True, nogil=True)
def count_changes(bits, indices, steps, shift, mask, counts):  # type: ignore[no-untyped-def]
    """Adds to int64[classes, N_MAGNITUDES] the magnitudes of the steps, by the base's class."""
    for c in range(indices.size):
        symbol, _ = _symbol(abs(np.int64(steps[c])))
        counts[(bits[indices[c]] >> shift) & mask, symbol] += 1


@numba.njit(inline="always")
def _log2(value, logarithms):  # type: ignore[no-untyped-def]
    """log2 of an integer >= 1 in 2^-12, to about 0.003."""
    top = np.int64(0)
    while value >> (top + 1):
        top += 1
    mantissa = value >> (top - 8) if top >= 8 else value << (8 - top)
    return (top << 12) + logarithms[mantissa - 256]


@numba.njit(cache=True, nogil=True)
def gap_bits(indices, steps, logarithms):  # type: ignore[no-untyped-def]
    """The entropy of the symbols that `gap` would use for a tensor's changes, and its low bits."""
    counts = np.zeros((2, 256), np.int64)
    n_low, before = np.int64(0), np.int64(-1)
    for c in range(indices.size):
        value = np.int64(indices[c]) - before - 1
        before = np.int64(indices[c])
        for stream in range(2):
            if value < 8:
                counts[stream, value] += 1
            else:
                top = np.int64(3)
                while value >> (top + 1):
                    top += 1
                counts[stream, 8 + (top - 3) * 4 + ((value >> (top - 2)) & 3)] += 1
                n_low += top - 2
            step = np.int64(steps[c])
            value = ((step << 1) ^ (step >> 63)) - 1
    entropy = 2 * indices.size * _log2(np.int64(indices.size), logarithms)
    for stream in range(2):
        for symbol in range(256):
            if counts[stream, symbol]:
                entropy -= counts[stream, symbol] * _log2(counts[stream, symbol], logarithms)
    return (entropy >> 12) + n_low
