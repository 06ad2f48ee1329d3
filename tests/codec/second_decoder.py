"""A second decoder of blobs, in plain Python, written from sections 1 to 5 of FORMAT.md alone.

It shares no line with the package. Integers are Python's; nothing is fast.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zstandard

from tests.codec.second_lane import MANTISSA, WIDTH, Constants, Cursor, Lane, require

BYTES = {"F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8}
BYTES |= {"BOOL": 1} | {dtype: width // 8 for dtype, width in WIDTH.items()}
KINDS = {1: "delta", 2: "anchor", 3: "reference"}
CLEAREST = (160, 0)
RAW, GAP, HAZARD, REFERENCE = 0, 1, 2, 255
Base = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.numel * BYTES[self.dtype]


@dataclass
class Entry:
    """One tensor's part: what the blob says, then what its sections say."""

    tensor: int
    codec: int
    n_changes: int
    touched: int
    target: int
    indices: list[int] | None = None
    steps: list[int] | None = None
    bits: list[int] | None = None
    models: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    lanes: list[tuple[int, int]] = field(default_factory=list)
    log_lane: int = 0
    cut: bool = False


def parse_schema(data: bytes) -> list[Tensor]:
    rows = json.loads(data)["tensors"]
    return [Tensor(name, dtype, tuple(shape)) for name, dtype, shape in rows]


def decode(blob: bytes, schema: bytes, base: Base | None = None) -> Iterator[Entry]:
    """The entries of a blob, with indices, steps and bits filled in.

    Args:
        base: gives a tensor's patterns before the delta; wanted by hazard entries only.
    """
    tensors = parse_schema(schema)
    kind, entries, sections = container(blob, tensors, hashlib.sha256(schema).digest())
    by_codec = {c: [e for e in entries if e.codec == c] for c in (RAW, GAP, HAZARD)}
    wanted = {GAP: {1, 2, 3, 4}, RAW: {5, 6}, HAZARD: {7, 8, 9}}
    allowed = set().union(*(wanted[c] for c, found in by_codec.items() if found))
    require(set(sections) <= allowed, "a section that nothing needs")
    if by_codec[GAP]:
        gap(by_codec[GAP], tensors, sections)
    if by_codec[RAW]:
        raw(by_codec[RAW], tensors, sections)
    if by_codec[HAZARD]:
        require(kind == "delta", "hazard outside a delta")
        assert base is not None
        hazard(by_codec[HAZARD], tensors, sections, base)
    yield from entries


def container(
    blob: bytes, tensors: list[Tensor], digest: bytes
) -> tuple[str, list[Entry], dict[int, bytes]]:
    head = Cursor(blob)
    require(head.take(8) == b"vdelta\0\1", "magic")
    kind = KINDS[head.number(1)]
    require(head.number(1) == 0, "features")
    n_sections, n_entries, n_bytes = head.number(2), head.number(4), head.number(4)
    require(head.take(32) == digest, "schema")
    part, entries, before = Cursor(head.take(n_bytes)), [], -1
    for _ in range(n_entries):
        tensor = before = before + 1 + part.uvarint()
        require(tensor < len(tensors), "no such tensor")
        codec, n_changes = part.number(1), part.uvarint()
        touched = part.number(8) if kind == "delta" else 0
        entries.append(Entry(tensor, codec, n_changes, touched, part.number(8)))
        if codec in (GAP, HAZARD):
            require(kind == "delta" and tensors[tensor].dtype in WIDTH, "no steps here")
            require(1 <= n_changes <= tensors[tensor].numel, "number of changes")
        else:
            require(codec in (RAW, REFERENCE) and n_changes == 0, "codec or changes")
    require(part.left == 0, "bytes after the entries")
    table = [(head.number(1), head.number(8)) for _ in range(n_sections)]
    tags = [tag for tag, _ in table]
    require(tags == sorted(set(tags)) and all(size for _, size in table), "section table")
    sections = {tag: head.take(size) for tag, size in table}
    require(head.left == 0, "bytes after the sections")
    return kind, entries, sections


def unzip(frame: bytes, n: int) -> bytes:
    require(zstandard.frame_content_size(frame) == n, "content size")
    worker = zstandard.ZstdDecompressor().decompressobj()
    out = worker.decompress(frame)
    require(len(out) == n and not worker.unused_data, "frame")
    return out


def gap_values(symbols: bytes, low: bytes) -> list[int]:
    bits, at, values = int.from_bytes(low, "little"), 0, []
    for symbol in symbols:
        require(symbol < 160, "symbol")
        value = symbol
        if symbol >= 8:
            k = 3 + ((symbol - 8) >> 2)
            value = (4 + ((symbol - 8) & 3)) << (k - 2) | (bits >> at) & ((1 << (k - 2)) - 1)
            at += k - 2
        values.append(value)
    require(len(low) == (at + 7) // 8 and bits >> at == 0, "low bits")
    return values


def gap(entries: list[Entry], tensors: list[Tensor], sections: dict[int, bytes]) -> None:
    n = sum(entry.n_changes for entry in entries)
    gaps = iter(gap_values(unzip(sections[1], n), sections.get(2, b"")))
    codes = iter(gap_values(unzip(sections[3], n), sections.get(4, b"")))
    for entry in entries:
        tensor, at = tensors[entry.tensor], -1
        entry.indices, entry.steps = [], []
        for _ in range(entry.n_changes):
            at += next(gaps) + 1
            zigzag = next(codes) + 1
            require(at < tensor.numel and zigzag < 1 << WIDTH[tensor.dtype], "out of range")
            entry.indices.append(at)
            entry.steps.append(-(zigzag + 1 >> 1) if zigzag & 1 else zigzag >> 1)


def raw(entries: list[Entry], tensors: list[Tensor], sections: dict[int, bytes]) -> None:
    sizes, frames = Cursor(sections.get(5, b"")), Cursor(sections.get(6, b""))
    for entry in entries:
        tensor, entry.bits = tensors[entry.tensor], []
        for start in range(0, tensor.numel, 1 << 22):
            n, b = min(1 << 22, tensor.numel - start), BYTES[tensor.dtype]
            planes = unzip(frames.take(sizes.number(4)), n * b)
            for i in range(n):
                entry.bits.append(int.from_bytes(planes[i::n], "little"))
    require(sizes.left == frames.left == 0, "frames left over")


def hazard(
    entries: list[Entry], tensors: list[Tensor], sections: dict[int, bytes], base: Base
) -> None:
    part = Cursor(sections[7])
    shards = part.uvarint()
    require(1 <= shards <= 1024, "shards")
    read_models(part, entries, tensors)
    part = Cursor(sections[8])
    small = smallest(tensors, shards)
    for entry in entries:
        read_directory(part, entry, tensors[entry.tensor], shards)
        require(entry.cut or shards == 1 or entry.tensor in small, "should be cut")
    require(part.left == 0, "directory left over")
    words, constants = Cursor(sections[9]), Constants()
    for entry in entries:
        read_lanes(words, entry, tensors[entry.tensor], shards, base(entry.tensor), constants)
    require(words.left == 0, "words left over")


def read_models(part: Cursor, entries: list[Entry], tensors: list[Tensor]) -> None:
    place = 0
    while part.left:
        n = part.uvarint()
        require(1 <= n <= len(entries) - place, "entries of a model")
        group, models = entries[place : place + n], {}
        place += n
        among = {tensors[entry.tensor].dtype for entry in group}
        for dtype in MANTISSA:
            if dtype not in among:
                continue
            known = 1 << (WIDTH[dtype] - 1 - MANTISSA[dtype])
            first, count = part.number(1), part.number(1) + 1
            require(first + count <= known, "classes")
            rates, scales = part.take(count), part.take(count)
            require(max(rates) < 161 and max(scales) < 129, "rate or scale")
            models[dtype] = [CLEAREST] * known
            models[dtype][first : first + count] = list(zip(rates, scales, strict=True))
        for entry in group:
            entry.models = models
    require(place == len(entries), "entries without a model")


def smallest(tensors: list[Tensor], shards: int) -> set[int]:
    left = sum(tensor.n_bytes for tensor in tensors) // (50 * shards)
    out = set()
    for place in sorted(range(len(tensors)), key=lambda i: (tensors[i].n_bytes, i)):
        left -= tensors[place].n_bytes
        if left < 0:
            break
        out.add(place)
    return out


def bands(n: int, shards: int) -> list[tuple[int, int]]:
    size = n // shards if n % shards == 0 else -(-64 * -(-n // 64) // shards)
    return [(start, min(start + size, n)) for start in range(0, n, size)] if size else []


def tiles(tensor: Tensor, cut: bool, shards: int) -> list[list[int]]:
    """The flat indices of each tile's elements."""
    if not cut:
        return [list(range(tensor.numel))]
    n_rows, n_columns = tensor.shape[-2:]
    return [
        [start + row * n_columns + column for row in range(*rows) for column in range(*columns)]
        for start in range(0, tensor.numel, n_rows * n_columns)
        for rows in bands(n_rows, shards)
        for columns in bands(n_columns, shards)
    ]


def read_directory(part: Cursor, entry: Entry, tensor: Tensor, shards: int) -> None:
    flags = part.number(1)
    entry.log_lane, entry.cut = flags & 127, flags >= 128
    require(8 <= entry.log_lane <= (20 if shards > 1 else 22), "length of lanes")
    require(not entry.cut or (shards > 1 and len(tensor.shape) > 1), "nothing to cut")
    for tile in tiles(tensor, entry.cut, shards):
        for start in range(0, len(tile), 1 << entry.log_lane):
            n_changes = part.uvarint()
            n_words = part.uvarint() + 2 if n_changes else 0
            require(n_changes <= min(len(tile) - start, 1 << entry.log_lane), "changes of a lane")
            require(n_changes <= max(0, 32 * (n_words - 1)), "changes of so few words")
            entry.lanes.append((n_changes, n_words))
    require(sum(n for n, _ in entry.lanes) == entry.n_changes, "changes of the lanes")


def read_lanes(
    words: Cursor,
    entry: Entry,
    tensor: Tensor,
    shards: int,
    patterns: Sequence[int],
    constants: Constants,
) -> None:
    found: list[tuple[int, int]] = []
    lanes = [
        tile[start : start + (1 << entry.log_lane)]
        for tile in tiles(tensor, entry.cut, shards)
        for start in range(0, len(tile), 1 << entry.log_lane)
    ]
    for number, (elements, (n_changes, n_words)) in enumerate(zip(lanes, entry.lanes, strict=True)):
        if n_changes:
            lane = Lane(
                [words.number(4) for _ in range(n_words)],
                [patterns[i] for i in elements],
                tensor.dtype,
                entry.models[tensor.dtype],
                (entry.tensor + 1 << 32) + number,
                constants,
            )
            places, steps = lane.decode(n_changes)
            found += zip([elements[place] for place in places], steps, strict=True)
    found.sort()
    entry.indices, entry.steps = [i for i, _ in found], [step for _, step in found]
