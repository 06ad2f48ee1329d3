"""The blob's container: a header, one entry per tensor, and the codecs' byte sections."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_delta.errors import FormatError, UnsupportedError
from vllm_delta.format import MAX_BLOB_BYTES, Schema

BlobKind = Literal["delta", "anchor", "reference"]

MAGIC = b"vdelta\x00\x01"
KINDS: dict[BlobKind, int] = {"delta": 1, "anchor": 2, "reference": 3}

RAW = 0
GAP = 1
HAZARD = 2
REFERENCE = 255
_CODECS = {"delta": {RAW, GAP, HAZARD}, "anchor": {RAW}, "reference": {REFERENCE}}

GAP_SYMBOLS = 1
GAP_BITS = 2
STEP_SYMBOLS = 3
STEP_BITS = 4
RAW_SIZES = 5
RAW_FRAMES = 6
HAZARD_MODELS = 7
HAZARD_LANES = 8
HAZARD_WORDS = 9
_KNOWN_SECTIONS = frozenset(range(GAP_SYMBOLS, HAZARD_WORDS + 1))

_HEADER = struct.Struct("<8sBBHII32s")
_SECTION = struct.Struct("<BQ")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class Entry:
    """One tensor's line in a blob. Fingerprints are unsigned 64-bit."""

    tensor: int
    codec: int
    n_changed: int
    touched: int
    target: int


@dataclass(frozen=True)
class Blob:
    """A parsed container: entries in schema order, sections by tag (views into the blob)."""

    kind: BlobKind
    entries: tuple[Entry, ...]
    sections: Mapping[int, memoryview]


def build_blob(
    kind: BlobKind, schema: Schema, entries: Sequence[Entry], sections: Mapping[int, bytes]
) -> bytes:
    """Write a container. Empty sections are left out; equal content gives equal bytes."""
    lines = bytearray()
    before = -1
    for entry in entries:
        put_uvarint(lines, entry.tensor - before - 1)
        lines.append(entry.codec)
        put_uvarint(lines, entry.n_changed)
        if kind == "delta":
            lines += _U64.pack(entry.touched)
        lines += _U64.pack(entry.target)
        before = entry.tensor
    present = [(tag, data) for tag, data in sorted(sections.items()) if data]
    digest = bytes.fromhex(schema.digest)
    header = _HEADER.pack(MAGIC, KINDS[kind], 0, len(present), len(entries), len(lines), digest)
    table = b"".join(_SECTION.pack(tag, len(data)) for tag, data in present)
    return b"".join([header, bytes(lines), table, *(data for _, data in present)])


def parse_blob(data: bytes | memoryview, schema: Schema, kind: BlobKind) -> Blob:
    """Read a container and check every length and number in it.

    Raises:
        FormatError: the bytes are not a blob of this kind for this schema.
        UnsupportedError: a feature, codec or section this release does not know.
    """
    if len(data) > MAX_BLOB_BYTES:
        raise FormatError("blob: too large", n_bytes=len(data), limit=MAX_BLOB_BYTES)
    if len(data) < _HEADER.size:
        raise FormatError("blob: shorter than its header", n_bytes=len(data))
    magic, code, flags, n_sections, n_entries, n_lines, digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        if magic[:7] == MAGIC[:7]:
            raise UnsupportedError("blob: newer format", format=magic[7])
        raise FormatError("blob: not a blob of this format")
    if flags:
        raise UnsupportedError("blob: unknown feature", flags=flags)
    if code != KINDS[kind]:
        raise FormatError("blob: of another kind", expected=kind, code=code)
    if digest != bytes.fromhex(schema.digest):
        raise FormatError("blob: made for another schema")
    if n_entries > len(schema) or _HEADER.size + n_lines > len(data):
        raise FormatError("blob: entries do not fit", n_entries=n_entries, n_bytes=n_lines)
    view = memoryview(data)
    lines = view[_HEADER.size : _HEADER.size + n_lines]
    entries = _parse_entries(lines, n_entries, schema, kind)
    sections = _parse_sections(view[_HEADER.size + n_lines :], n_sections)
    return Blob(kind, entries, sections)


def _parse_entries(
    lines: memoryview, n_entries: int, schema: Schema, kind: BlobKind
) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    reader = ByteReader(lines, "blob")
    before = -1
    for _ in range(n_entries):
        tensor = before + 1 + reader.uvarint()
        if tensor >= len(schema):
            raise FormatError("blob: unknown tensor", tensor=tensor, n_tensors=len(schema))
        codec = reader.byte()
        if codec not in _CODECS[kind]:
            raise UnsupportedError("blob: unknown codec", codec=codec, kind=kind)
        n_changed = reader.uvarint()
        touched = reader.u64() if kind == "delta" else 0
        entry = Entry(tensor, codec, n_changed, touched, reader.u64())
        _check_entry(entry, schema)
        entries.append(entry)
        before = tensor
    if not reader.at_end:
        raise FormatError("blob: bytes after the last entry")
    return tuple(entries)


def _check_entry(entry: Entry, schema: Schema) -> None:
    spec = schema.tensors[entry.tensor]
    if entry.codec in (GAP, HAZARD):
        if not spec.stepped:
            raise FormatError("blob: steps for a type without", name=spec.name, dtype=spec.dtype)
        if not 0 < entry.n_changed <= spec.numel:
            raise FormatError(
                "blob: more changes than elements, or none",
                name=spec.name,
                n_changed=entry.n_changed,
                numel=spec.numel,
            )
    elif entry.n_changed:
        raise FormatError("blob: a whole tensor counts no changes", name=spec.name)


def _parse_sections(data: memoryview, n_sections: int) -> dict[int, memoryview]:
    start = n_sections * _SECTION.size
    if start > len(data):
        raise FormatError("blob: section table does not fit", n_sections=n_sections)
    sections: dict[int, memoryview] = {}
    before = 0
    for place in range(n_sections):
        tag, n_bytes = _SECTION.unpack_from(data, place * _SECTION.size)
        if tag <= before:
            raise FormatError("blob: sections are not in ascending order", tag=tag)
        if tag not in _KNOWN_SECTIONS:
            raise UnsupportedError("blob: unknown section", tag=tag)
        if n_bytes == 0 or n_bytes > len(data) - start:
            raise FormatError("blob: section does not fit", tag=tag, n_bytes=n_bytes)
        sections[tag] = data[start : start + n_bytes]
        start += n_bytes
        before = tag
    if start != len(data):
        raise FormatError("blob: bytes after the last section", n_bytes=len(data) - start)
    return sections


def put_uvarint(out: bytearray, value: int) -> None:
    """Append an unsigned LEB128 number in its shortest form."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


class ByteReader:
    """Bounds-checked reads.

    Args:
        what: the part of the format that errors name.
    """

    def __init__(self, data: memoryview, what: str) -> None:
        self._data = data
        self._what = what
        self.at = 0

    @property
    def at_end(self) -> bool:
        return self.at == len(self._data)

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def byte(self) -> int:
        if self.at >= len(self._data):
            raise FormatError(f"{self._what}: bytes end too early")
        value = self._data[self.at]
        self.at += 1
        return value

    def u64(self) -> int:
        if self.at + _U64.size > len(self._data):
            raise FormatError(f"{self._what}: bytes end too early")
        (value,) = _U64.unpack_from(self._data, self.at)
        self.at += _U64.size
        return int(value)

    def uvarint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise FormatError(f"{self._what}: a number is not in its shortest form")
                return value
        raise FormatError(f"{self._what}: a number is too long")
