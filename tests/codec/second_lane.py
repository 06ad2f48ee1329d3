"""One hazard lane, decoded in plain Python from section 5.3 of FORMAT.md alone."""

from __future__ import annotations

import hashlib
import pathlib
import struct
from collections.abc import Sequence

TABLES = pathlib.Path(__file__).parents[2] / "vllm_delta" / "codec" / "hazard" / "tables.bin"
WIDTH = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "F8_E5M2": 8}
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F8_E4M3": 3, "F8_E5M2": 2}
X = 1 << 22


class RefusedError(ValueError):
    """The bytes are not a blob by FORMAT.md."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise RefusedError(why)


class Cursor:
    """Bytes read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        require(self.at + n <= len(self.data), "too short")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                require(byte > 0 or shift == 7, "not the shortest form")
                require(value < 1 << 63, "more than 63 bits")
                return value
            require(shift < 63, "more than 63 bits")

    @property
    def left(self) -> int:
        return len(self.data) - self.at


class Constants:
    """N, L and S of `tables.bin`."""

    def __init__(self) -> None:
        data = TABLES.read_bytes()
        digest = "b707eb500f1a27c8a3098d72faf221501f099a96098b3c565b40c606062fffce"
        require(hashlib.sha256(data).hexdigest() == digest, "not the constants")
        self.n: tuple[int, ...] = struct.unpack_from("<4097I", data)
        at = 4 * 4097
        self.hazards: tuple[int, ...] = struct.unpack_from("<161I", data, at)
        at += 4 * (161 + 160)
        rows = struct.unpack_from(f"<{129 * 128}H", data, at)
        self.scales = [rows[row * 128 : row * 128 + 128] for row in range(129)]
        require(at + 2 * (129 * 128 + 257) == len(data) == 51210, "the constants' size")

    def f(self, y: int) -> int:
        high, low = y >> 10, y & 1023
        rise = (self.n[high + 1] - self.n[high]) * low >> 10 if low else 0
        return self.n[high] + rise


def key(u: int, width: int) -> int:
    top = 1 << (width - 1)
    return u if u < top else (u ^ (top - 1)) - (1 << width)


def add_step(u: int, step: int, width: int) -> int:
    """The pattern whose key is key(u) + step mod 2^width."""
    moved = (key(u, width) + step) % (1 << width)
    return moved if moved < 1 << (width - 1) else moved ^ ((1 << (width - 1)) - 1)


class Lane:
    """A lane on its way.

    Args:
        patterns: of the lane's elements in the base.
        model: rate and scale of each class.
        seed: what the hash starts as.
    """

    def __init__(
        self,
        words: Sequence[int],
        patterns: Sequence[int],
        dtype: str,
        model: Sequence[tuple[int, int]],
        seed: int,
        constants: Constants,
    ) -> None:
        self.words, self.next = words, 2
        self.x = words[0] << 32 | words[1]
        require(1 << 31 <= self.x < 1 << 63, "first state")
        self.patterns, self.dtype, self.model = patterns, dtype, model
        self.hash, self.constants = seed, constants

    def decode(self, n_changes: int) -> tuple[list[int], list[int]]:
        """Places in the lane, and steps."""
        places, steps, at = [], [], 0
        for _ in range(n_changes):
            at, scale = self.position(at)
            step = self.step(scale)
            new = add_step(self.patterns[at], step, WIDTH[self.dtype])
            self.hash = (self.hash ^ (at << 32 | new)) * 0x9FB21C651E98DF25 % (1 << 64)
            self.hash ^= self.hash >> 32
            places.append(at)
            steps.append(step)
            at += 1
        require(self.x == (1 << 31) + (self.hash >> 33), "last state")
        require(self.next == len(self.words), "words left over")
        return places, steps

    def position(self, at: int) -> tuple[int, int]:
        """Where the next change is, and the scale of its class."""
        f, y, width = self.constants.f, 0, WIDTH[self.dtype]
        u = self.x % (1 << 24)
        while True:
            require(at < len(self.patterns), "a change past the lane's end")
            magnitude = self.patterns[at] & (1 << (width - 1)) - 1
            rate, scale = self.model[magnitude >> MANTISSA[self.dtype]]
            further = y + self.constants.hazards[rate]
            if further > X and u >= f(y):
                self.take(f(y), 1 << 24)
                y, u = 0, self.x % (1 << 24)
            elif further <= X and u < f(further):
                self.take(f(y), f(further))
                return at, scale
            else:
                y, at = further, at + 1

    def take(self, a: int, b: int) -> None:
        self.x = (b - a) * (self.x >> 24) + self.x % (1 << 24) - a
        self.refill()

    def step(self, scale: int) -> int:
        row = self.constants.scales[scale]
        negative, t = self.x & 1, self.x >> 1 & 0xFFFF
        m = below = 0
        while t >= below + row[m]:
            below += row[m]
            m += 1
        self.x = row[m] * (self.x >> 17) + t - below
        self.refill()
        magnitude = m + 1
        if m >= 16:
            v = 2 + (m - 16 >> 2)
            magnitude = (4 + (m & 3) << v) + self.x % (1 << v)
            self.x >>= v
            self.refill()
        most = 1 << (WIDTH[self.dtype] - 1)
        require(magnitude <= most and magnitude < most + negative, "magnitude")
        require(magnitude != 16 or m == 15, "16 by another symbol")
        return -magnitude if negative else magnitude

    def refill(self) -> None:
        if self.x < 1 << 31:
            require(self.next < len(self.words), "a lane that ends too early")
            self.x = self.x << 32 | self.words[self.next]
            self.next += 1
