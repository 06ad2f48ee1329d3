"""Seeded damage of any bytes, and of what stands in them: JSON, base64, lengths."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
"""Makes damaged bytes of some; the others give pieces."""

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_KEY = re.compile(rb'"[a-z_]{2,12}":')
_FIELD = re.compile(rb'"[A-Za-z_]{2,12}": ?("[^"]*"|[-0-9.]+|null|\[\]|\{\}),?')
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{12,}={0,2}")
_EXTREMES = (
    b"0", b"-0", b"-1", b"1", b"2", b"1.0", b"-9223372036854775809", b"9223372036854775807",
    b"9223372036854775808", b"18446744073709551616", b"4294967296", b"1000000000000", b"1e3",
    b"1e308", b"1e309", b"-1e309", b"5e-324", b"NaN", b"Infinity", b"-Infinity", b"true", b"null",
    b"\"1\"", b"0x10", b"01", b"+1", b"1_0", b"9" * 19, b"9" * 20, b"9" * 400, b"9" * 5000,
    "\u0663".encode(),
)  # fmt: skip
_BAD_TEXT = (
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80",
    b"\\ud800", b"\\udc80", b"\\u0000", b"\x00", b"\\", b"\r\n", b"\xe2\x80\xa8", b"\xff\xfe",
    b"\xef\xbb\xbf",
)  # fmt: skip
_SIZES = (1, 2, 4, 8)
_LARGE = 40
"""One in so many of the inputs that may grow becomes really large."""


def _at(draw: random.Random, data: bytes) -> int:
    return draw.randrange(len(data) + 1)


def flip(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """One bit, or a few."""
    out = bytearray(data)
    for _n in range(draw.choice([1, 1, 1, 2, 4])):
        if out:
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


def run(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A run of bytes of one value, or of any values, over what was there."""
    at, n = _at(draw, data), draw.randrange(1, 24)
    some = draw.randbytes(n) if draw.random() < 0.5 else bytes([draw.randrange(256)]) * n
    return data[:at] + some[: len(data) - at] + data[at + n :]


def truncate(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """The end or the beginning cut off, or bytes missing from the middle."""
    at, way = _at(draw, data), draw.randrange(4)
    if way == 0:
        return data[at:]
    if way == 1:
        return data[:at] + data[at + draw.randrange(1, 24) :]
    return data[:at]


def duplicate(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A piece twice, or all of it."""
    if draw.random() < 0.1:
        return data + data
    at, to = _at(draw, data), _at(draw, data) + draw.randrange(1, 80)
    return data[:to] + data[at : at + draw.randrange(1, 80)] + data[to:]


def insert(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Bytes too many."""
    at = draw.choice([_at(draw, data), 0, len(data)])
    return data[:at] + draw.randbytes(draw.randrange(1, 24)) + data[at:]


def splice(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The beginning of one with the end of another, or a piece of another within."""
    other = draw.choice(others)
    at, there = _at(draw, data), _at(draw, other)
    if draw.random() < 0.5:
        return data[:at] + other[there:]
    n = draw.choice([1, 4, 8, 32, 200])
    return data[:at] + other[there : there + n] + data[at + draw.choice([0, n]) :]


def numbers(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Other numbers: huge, negative, none, of another type."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return data + draw.choice(_EXTREMES)
    one = draw.choice(found)
    return data[: one.start()] + draw.choice(_EXTREMES) + data[one.end() :]


def nest(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """What is nested deep, in place of a value or around all."""
    n = draw.choice([2, 20, 1200] if draw.randrange(_LARGE) else [100_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"[[],", b"]")])
    deep = opening * n + b"1" + closing * draw.choice([n, n, 0])
    found = list(_KEY.finditer(data))
    if found and draw.random() < 0.7:
        end = draw.choice(found).end()
        rest = data[end:]
        return data[:end] + deep + (rest[re.match(rb'"[^"]*"|[^,}\]]*', rest).end() :])  # type: ignore[union-attr]
    return opening * n + data + closing * n if draw.random() < 0.5 else deep


def long(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Long texts, long numbers, and more bytes than a limit allows."""
    n = draw.choice(
        [70, 300, 1100, 9000] if draw.randrange(_LARGE) else [1 << 17, 1 << 20, 1 << 21]
    )
    some = draw.choice([b"a", b" ", b"\n", b"1", b"\\u0041", b"/", b"A"])
    quotes = [place for place, byte in enumerate(data) if byte == 0x22]
    at = draw.choice([len(data), 0, draw.choice(quotes) + 1 if quotes else _at(draw, data)])
    return data[:at] + some * (n // len(some)) + data[at:]


def utf8(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """What is no UTF-8, or no text that one expects."""
    at = draw.choice([0, len(data), *[_at(draw, data)] * 4])
    return data[:at] + draw.choice(_BAD_TEXT) + data[at + draw.choice([0, 1]) :]


def keys(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A field twice, one too many, one of another name, or one that is missing."""
    found = list(_FIELD.finditer(data))
    if not found:
        return data + draw.choice([b",", b"=", b":", b"\n"]) + data
    one, other = draw.choice(found), draw.choice(found)
    way = draw.randrange(5)
    field = one[0] if one[0].endswith(b",") else one[0] + b","
    if way == 0:
        return data[: one.start()] + field + data[one.start() :]
    if way == 1:
        place = draw.choice([one.start(), data.find(b"{") + 1])
        return data[:place] + draw.choice([b'"zzz":1,', b'"":0,', b'"a":{},']) + data[place:]
    if way == 2:
        return data[: one.start()] + b'"x' + data[one.start() + 1 :]
    if way == 3:
        return data[: one.start()] + data[one.end() :]
    return data[: one.start()] + other[0] + data[one.end() :]


def base64(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Other ways to write what is in base64, and wrong ones."""
    found = list(_BASE64.finditer(data))
    if not found:
        return flip(draw, data, ())
    one = draw.choice(found)
    text, way = one[0], draw.randrange(7)
    at = draw.randrange(1, len(text))
    if way == 0:
        new = text.rstrip(b"=")
    elif way == 1:
        new = text + b"=" * draw.randrange(1, 4)
    elif way == 2:
        new = text[:at] + draw.choice([b"\n", b" ", b"\\n", b"=", b"-", b"_", b"%"]) + text[at:]
    elif way == 3:
        new = text.replace(b"+", b"-").replace(b"/", b"_")
    elif way == 4:  # bits that no byte needs
        place = len(text.rstrip(b"=")) - 1
        new = text[:place] + bytes([text[place] ^ 1 << draw.randrange(3)]) + text[place + 1 :]
    elif way == 5:
        new = text[:at] + draw.choice([b"A", b"/", b"AAAA"]) + text[at + draw.choice([0, 1]) :]
    else:
        new = text[:at]
    return data[: one.start()] + new + data[one.end() :]


def lengths(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """An extreme number where a length may stand: half the time near the beginning."""
    n = draw.choice(_SIZES)
    at = draw.randrange(max(1, min(len(data), 96 if draw.random() < 0.5 else len(data))))
    most = (1 << 8 * n) - 1
    value = draw.choice(
        [0, 1, most, most >> 1, (most >> 1) + 1, most - 1, 1 << draw.randrange(8 * n)]
    )
    return data[:at] + value.to_bytes(n, "little") + data[at + n :]


MUTATIONS: dict[str, Mutation] = {
    one.__name__: one
    for one in (
        flip, run, truncate, duplicate, insert, splice, numbers, nest, long, utf8, keys, base64,
        lengths,
    )
}  # fmt: skip
"""What damages bytes, by name."""


def damaged(draw: random.Random, kind: str, data: bytes, others: Sequence[bytes]) -> bytes:
    """Damage of a kind, seldom on top of another."""
    if draw.random() < 0.1:
        data = MUTATIONS[draw.choice(sorted(MUTATIONS))](draw, data, others)
    return MUTATIONS[kind](draw, data, others)
