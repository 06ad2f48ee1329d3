"""The loopback Hub reads the whole format of xorbs and shards, also what clients seldom send."""

from __future__ import annotations

import struct

import lz4.frame
import pytest

from tests.channel.loopback import noise
from vllm_delta.testing.hub_xet import Cas, Term, XetError, Xorb, parse_shard

FIRST, SECOND, XORB = "0" * 15 + "1" + "a" * 48, "0" * 15 + "2" + "b" * 48, "c" * 64
END = b"\xff" * 32 + bytes(16)
CHUNKS = [noise(n_bytes, n_bytes) for n_bytes in (1, 1001, 1002, 1003, 4096)]


def words(name: str) -> list[int]:
    return [int(name[start : start + 16], 16) for start in range(0, 64, 16)]


def file_records(name: str, flags: int, terms: list[tuple[str, int, int, int]]) -> bytes:
    records = [struct.pack("<4QII8x", *words(name), flags, len(terms))]
    records += [struct.pack("<4QIIII", *words(xorb), 0, *rest) for xorb, *rest in terms]
    records += [b"v" * 48] * len(terms) * bool(flags & 1 << 31)
    records += [b"m" * 48] * bool(flags & 1 << 30)
    return b"".join(records)


def chunk(data: bytes, scheme: int) -> bytes:
    planes = b"".join(data[plane::4] for plane in range(4)) if scheme == 2 else data
    packed = planes if scheme == 0 else lz4.frame.compress(planes)
    lengths = len(packed).to_bytes(3, "little"), len(data).to_bytes(3, "little")
    return b"\0" + lengths[0] + bytes([scheme]) + lengths[1] + packed


def xorb() -> bytes:
    packed = [chunk(data, number % 3) for number, data in enumerate(CHUNKS)]
    packed += [chunk(data, 2) for data in CHUNKS]
    return b"".join(packed) + b"XETBLOB" + bytes(100)


@pytest.mark.parametrize("flags", [0, 1 << 31, 1 << 30, 3 << 30])
def test_a_shard_is_read_past_every_kind_of_record(flags: int) -> None:
    terms = [(XORB, 1002, 0, 2), (XORB, 1002, 2, 3)]
    shard = bytes(48) + file_records(FIRST, flags, terms) + file_records(SECOND, 0, terms[:1]) + END
    first, second = Term(XORB, 1002, 0, 2), Term(XORB, 1002, 2, 3)
    assert parse_shard(shard) == {FIRST: [first, second], SECOND: [first]}
    with pytest.raises(XetError):
        parse_shard(shard[: -len(END) - 60])


def test_chunks_are_unpacked_by_every_scheme() -> None:
    cas = Cas()
    assert cas.put_xorb(XORB, xorb()) is True
    assert cas.put_xorb(XORB, xorb()) is False
    assert [bytes(cas.xorbs[XORB].chunk(i)) for i in range(10)] == CHUNKS * 2
    whole = b"".join(CHUNKS * 2)
    terms = [(XORB, len(whole), 0, 10), (XORB, 1001, 1, 2)]
    cas.put_shard(bytes(48) + file_records(FIRST, 0, terms) + END)
    data = whole + CHUNKS[1]
    for start in range(0, len(data), 997):
        for stop in {start + 1, start + 1500, len(data)}:
            assert b"".join(cas.read(FIRST, start, min(stop, len(data)))) == data[start:stop]
    cas.damage(FIRST, 1500)
    found = b"".join(cas.read(FIRST, 0, len(data)))
    assert [i for i in range(len(data)) if found[i] != data[i]] == [1500]


def test_what_is_no_xorb_or_names_what_was_never_sent_is_refused() -> None:
    with pytest.raises(XetError):
        Xorb.parse(chunk(CHUNKS[1], 0)[:-1])
    cas = Cas()
    cas.put_xorb(XORB, xorb())
    for term in ((SECOND, 1, 0, 1), (XORB, 1, 0, 11), (XORB, 1, 2, 1)):
        with pytest.raises(XetError):
            cas.put_shard(bytes(48) + file_records(FIRST, 0, [term]) + END)
    assert cas.size(FIRST) is None
