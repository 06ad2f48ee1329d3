"""What a Xet server must read of xorbs and shards, and a store of both in memory.

A xorb is a run of chunks: 8 bytes of header (version, packed length, scheme, length; the lengths
take 3 bytes, little-endian), then the packed bytes. Scheme 0 is plain, 1 an LZ4 frame, 2 an LZ4
frame over the four byte planes of the chunk. A shard says which chunks of which xorbs make a file,
in records of 48 bytes. Nothing here computes a Merkle hash: clients name what they send, and the
server believes them.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import lz4.frame
import numpy as np

EMPTY_HASH = "0" * 64
"""Of the file without bytes, which clients never upload."""

_RECORD_BYTES = 48
_VERIFICATION, _METADATA = 1 << 31, 1 << 30
_CHUNK_BYTES = 64 * 1024
_CHUNKS_PER_XORB = 512
_FOOTER = b"XETBLOB"


class XetError(ValueError):
    """What a client sent is not in the format."""


@dataclass(frozen=True)
class Term:
    """A run of chunks of one xorb: `[start, end)`, `n_bytes` when unpacked."""

    xorb: str
    n_bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Xorb:
    """A stored xorb. `packed[i]` and `unpacked[i]` are where chunk i begins, packed or not."""

    data: bytes
    packed: list[int]
    unpacked: list[int]

    @classmethod
    def parse(cls, data: bytes) -> Xorb:
        packed, lengths, place = [0], [0], 0
        while place + 8 <= len(data) and not data.startswith(_FOOTER, place):
            lengths.append(int.from_bytes(data[place + 5 : place + 8], "little"))
            place += 8 + int.from_bytes(data[place + 1 : place + 4], "little")
            packed.append(place)
        if place > len(data):
            raise XetError("a xorb ends inside a chunk")
        return cls(data, packed, list(accumulate(lengths)))

    def chunk(self, index: int) -> bytes | memoryview:
        place, end = self.packed[index], self.packed[index + 1]
        payload = memoryview(self.data)[place + 8 : end]
        scheme = self.data[place + 4]
        if scheme == 0:
            return payload
        plain: bytes = lz4.frame.decompress(payload)
        return plain if scheme == 1 else _join_planes(plain)

    def damaged(self, index: int, place: int) -> Xorb:
        """The same xorb, but for one flipped bit of chunk `index`, which is then stored plain."""
        chunk = bytearray(self.chunk(index))
        chunk[place] ^= 1
        before, after = self.data[: self.packed[index]], self.data[self.packed[index + 1] :]
        return Xorb.parse(b"".join([before, _chunk_header(len(chunk)), bytes(chunk), after]))


@dataclass(frozen=True)
class Reconstruction:
    """Which chunks hold a range of a file: `terms`, of which `skip` bytes come before it."""

    terms: list[Term]
    skip: int


class Cas:
    """Xorbs and files in memory. Nothing is ever removed: clients count on what they once sent."""

    def __init__(self) -> None:
        self.xorbs: dict[str, Xorb] = {}
        self._files: dict[str, list[Term]] = {EMPTY_HASH: []}

    def put_xorb(self, name: str, data: bytes) -> bool:
        new = name not in self.xorbs
        if new:
            self.xorbs[name] = Xorb.parse(data)
        return new

    def put_shard(self, shard: bytes) -> int:
        """Take in a shard. Returns how many of its files are new."""
        files = parse_shard(shard)
        for terms in files.values():
            for term in terms:
                xorb = self.xorbs.get(term.xorb)
                if xorb is None or not term.start <= term.end < len(xorb.packed):
                    raise XetError(f"a shard names chunks that were never sent: {term}")
        n_new = len(files.keys() - self._files.keys())
        self._files.update(files)
        return n_new

    def put_plain(self, data: bytes) -> str:
        """Store bytes that came without Xet, as plain chunks. Returns the file's name."""
        if not data:
            return EMPTY_HASH
        name = hashlib.sha256(data).hexdigest()
        if name in self._files:
            return name
        terms, view, step = [], memoryview(data), _CHUNK_BYTES * _CHUNKS_PER_XORB
        for start in range(0, len(data), step):
            part = view[start : start + step]
            xorb = hashlib.sha256(b"xorb" + bytes.fromhex(name) + b"%d" % start).hexdigest()
            self.xorbs[xorb] = Xorb.parse(_pack(part))
            terms.append(Term(xorb, len(part), 0, -(-len(part) // _CHUNK_BYTES)))
        self._files[name] = terms
        return name

    def size(self, name: str) -> int | None:
        terms = self._files.get(name)
        return None if terms is None else sum(term.n_bytes for term in terms)

    def reconstruct(self, name: str, start: int, stop: int) -> Reconstruction | None:
        """The chunks that hold bytes `[start, stop)` of a file; None when there is no such file."""
        terms = self._files.get(name)
        if terms is None:
            return None
        found: list[Term] = []
        skip = base = 0
        for term in terms:
            starts = self.xorbs[term.xorb].unpacked
            zero = starts[term.start] - base  # turns places in the file into places in the xorb
            base += term.n_bytes
            if base <= start or base - term.n_bytes >= stop:
                continue
            first = max(bisect_right(starts, start + zero) - 1, term.start)
            last = min(bisect_right(starts, stop - 1 + zero), term.end)
            if not found:
                skip = start + zero - starts[first]
            found.append(Term(term.xorb, starts[last] - starts[first], first, last))
        return Reconstruction(found, skip)

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Bytes `[start, stop)` of a file, a chunk at a time."""
        found = self.reconstruct(name, start, stop)
        if found is None:
            raise KeyError(name)
        left, skip = stop - start, found.skip
        for term in found.terms:
            for index in range(term.start, term.end):
                piece = self.xorbs[term.xorb].chunk(index)[skip : skip + left]
                skip, left = 0, left - len(piece)
                yield piece

    def damage(self, name: str, place: int) -> None:
        """Flip a bit of the stored byte at `place` of a file, and of whatever shares its chunk."""
        found = self.reconstruct(name, place, place + 1)
        if found is None or not found.terms:
            raise KeyError(name)
        term = found.terms[0]
        self.xorbs[term.xorb] = self.xorbs[term.xorb].damaged(term.start, found.skip)


def parse_shard(shard: bytes) -> dict[str, list[Term]]:
    """The files of a shard by name, each as the terms that make it."""
    files: dict[str, list[Term]] = {}
    place = _RECORD_BYTES
    try:
        while shard[place : place + 32] != b"\xff" * 32:
            *name, flags, n_terms = struct.unpack_from("<4QII", shard, place)
            place += _RECORD_BYTES
            terms = []
            for _ in range(n_terms):
                *xorb, _, n_bytes, start, end = struct.unpack_from("<4QIIII", shard, place)
                terms.append(Term(_hex(xorb), n_bytes, start, end))
                place += _RECORD_BYTES
            place += _RECORD_BYTES * n_terms * bool(flags & _VERIFICATION)
            place += _RECORD_BYTES * bool(flags & _METADATA)
            files[_hex(name)] = terms
    except struct.error as error:
        raise XetError("a shard ends inside a record") from error
    return files


def _hex(words: list[int]) -> str:
    # A hash in text is four little-endian words, each as a number.
    return "".join(f"{word:016x}" for word in words)


def _chunk_header(n_bytes: int) -> bytes:
    length = n_bytes.to_bytes(3, "little")
    return b"\0" + length + b"\0" + length


def _pack(data: memoryview) -> bytes:
    parts: list[bytes | memoryview] = []
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        parts += [_chunk_header(len(chunk)), chunk]
    return b"".join(parts)


def _join_planes(planes: bytes) -> bytes:
    # The first planes are one longer when the length is no multiple of four.
    n_bytes = len(planes)
    joined, source, place = np.empty(n_bytes, np.uint8), np.frombuffer(planes, np.uint8), 0
    for plane in range(4):
        length = (n_bytes - plane + 3) // 4
        joined[plane::4] = source[place : place + length]
        place += length
    return joined.tobytes()
