"""A lane in plain Python: the definition that every decoder equals. Slow; for tests and readers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_delta.codec.hazard import tables
from vllm_delta.errors import FormatError

MASK64 = (1 << 64) - 1
LOW_STATE = 1 << 31
SIGN_AND_MAGNITUDE = tables.MAGNITUDE_BITS + 1

F = [int(value) for value in tables.POSITIONS]
RATES = [int(value) for value in tables.RATES]
STEPS = [[int(value) for value in row] for row in tables.STEPS]


def cumulated(y: int) -> int:
    """F(y), 0 <= y <= LIMIT: linear between the nodes."""
    node, part = divmod(y, 1 << tables.NODE_BITS)
    return F[node] + ((F[node + 1] - F[node]) * part >> tables.NODE_BITS)


def mixed(hash_: int, position: int, bits: int) -> int:
    """The lane's hash after one more change."""
    hash_ = ((hash_ ^ (position << 32 | bits)) * 0x9FB21C651E98DF25) & MASK64
    return hash_ ^ hash_ >> 32


class _State:
    def __init__(self, words: Sequence[int]) -> None:
        if len(words) < 2 or not LOW_STATE <= (words[0] << 32 | words[1]) < 1 << 63:
            raise FormatError("hazard: not a lane's state")
        self.x = words[0] << 32 | words[1]
        self._words, self._at = words, 2

    def low(self, bits: int) -> int:
        return self.x & ((1 << bits) - 1)

    def move(self, x: int) -> None:
        """Take the state after a symbol, with a word more where it is small."""
        if x < LOW_STATE:
            if self._at >= len(self._words):
                raise FormatError("hazard: a lane ends too early")
            x = x << 32 | self._words[self._at]
            self._at += 1
        self.x = x

    def finish(self, hash_: int) -> None:
        if self._at != len(self._words) or self.x != LOW_STATE + (hash_ >> 33):
            raise FormatError("hazard: a lane does not end as it was begun")


def decode_lane(
    base: Sequence[int],
    words: Sequence[int],
    n_changes: int,
    *,
    rates: Sequence[int],
    scales: Sequence[int],
    shift: int,
    width: int,
    seed: int,
) -> tuple[list[int], list[int]]:
    """Positions in the lane and steps of its changes.

    Args:
        base: the lane's raw patterns before the changes.
        words: the lane's 32-bit words.
        n_changes: at least 1.
        rates, scales: index of rate and scale per class.
        shift: an element's class is ``pattern >> shift``, without the sign.
        width: bits of an element.
        seed: what the lane's hash begins with.

    Raises:
        FormatError: the words are damaged, or `base` is not what they were made for.
    """
    state, hash_ = _State(words), seed
    positions: list[int] = []
    steps: list[int] = []
    at = 0
    sign_bit = 1 << (width - 1)
    for _ in range(n_changes):
        at = _find(state, base, at, rates, shift, sign_bit)
        class_ = (base[at] & (sign_bit - 1)) >> shift
        step = _step(state, STEPS[scales[class_]], width)
        key = base[at] ^ (sign_bit - 1 if base[at] & sign_bit else 0)
        key = (key + step) % (2 * sign_bit)
        new = key ^ (sign_bit - 1 if key & sign_bit else 0)
        hash_ = mixed(hash_, at, new)
        positions.append(at)
        steps.append(step)
        at += 1
    state.finish(hash_)
    return positions, steps


def _find(
    state: _State, base: Sequence[int], at: int, rates: Sequence[int], shift: int, sign_bit: int
) -> int:
    """The position of the next change."""
    y = 0
    u = state.low(tables.POSITION_BITS)
    while at < len(base):
        after = y + RATES[rates[(base[at] & (sign_bit - 1)) >> shift]]
        low = cumulated(y)
        if after > tables.LIMIT:
            if u >= low:  # an escape: begin anew at the same element
                share = (1 << tables.POSITION_BITS) - low
                state.move(share * (state.x >> tables.POSITION_BITS) + u - low)
                u, y = state.low(tables.POSITION_BITS), 0
                continue
        elif u < cumulated(after):
            share = cumulated(after) - low
            state.move(share * (state.x >> tables.POSITION_BITS) + u - low)
            return at
        y = after
        at += 1
    raise FormatError("hazard: a lane has fewer changes than it says")


def _step(state: _State, cumulative: Sequence[int], width: int) -> int:
    slot = state.low(SIGN_AND_MAGNITUDE)
    negative, slot = slot & 1, slot >> 1
    symbol = 0
    while cumulative[symbol + 1] <= slot:
        symbol += 1
    share = cumulative[symbol + 1] - cumulative[symbol]
    state.move(share * (state.x >> SIGN_AND_MAGNITUDE) + slot - cumulative[symbol])
    if symbol < 16:
        magnitude = symbol + 1
    else:
        n_low = 2 + (symbol - 16 >> 2)
        magnitude = (4 + (symbol & 3) << n_low) | state.low(n_low)
        state.move(state.x >> n_low)
    if (magnitude == 16 and symbol != 15) or magnitude - negative >= 1 << (width - 1):
        raise FormatError("hazard: a step does not fit its type")
    return -magnitude if negative else magnitude
