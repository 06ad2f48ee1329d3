"""Reading the sections of a blob's `hazard` entries, every number of them checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_delta.codec.blob import (
    HAZARD_LANES,
    HAZARD_MODELS,
    HAZARD_WORDS,
    ByteReader,
    Entry,
)
from vllm_delta.codec.hazard.lanes import Lane, Part, Words, spans
from vllm_delta.codec.hazard.model import Tables, parse_model
from vllm_delta.codec.hazard.tiles import CUT, MAX_SHARDS, MIN_LANE_BITS, Tiling
from vllm_delta.errors import FormatError
from vllm_delta.format import Schema

MAX_CHANGES = 1 << 26
"""Changes in one blob at most, as for `gap`."""


def parse_parts(
    entries: Sequence[Entry], sections: Mapping[int, memoryview], schema: Schema
) -> list[Part]:
    """The parts of a blob's `hazard` entries, in order.

    Nothing is allocated that the bytes do not account for: each lane takes a byte of the
    directory, and each change at least one bit of the words.

    Raises:
        FormatError: the sections are not what the entries ask for.
    """
    present = [tag in sections for tag in (HAZARD_MODELS, HAZARD_LANES, HAZARD_WORDS)]
    if any(wanted != bool(entries) for wanted in present):
        raise FormatError("hazard: a section is missing or not wanted", n_entries=len(entries))
    if not entries:
        return []
    if (n := sum(entry.n_changed for entry in entries)) > MAX_CHANGES:
        raise FormatError("hazard: too many changes in a blob", n_changed=n, limit=MAX_CHANGES)
    shards, tables = _models(sections[HAZARD_MODELS], entries, schema)
    data = sections[HAZARD_WORDS]
    if len(data) % 4:
        raise FormatError("hazard: not whole words", n_bytes=len(data))
    words = np.frombuffer(data, "<u4").astype(np.uint32)  # aligned, which a section need not be
    directory = _Directory(sections[HAZARD_LANES], words, Tiling(schema, shards))
    parts = [directory.part(entry, one) for entry, one in zip(entries, tables, strict=True)]
    directory.finish()
    return parts


def _models(data: memoryview, entries: Sequence[Entry], schema: Schema) -> tuple[int, list[Tables]]:
    """Number of shards, and the tables of each entry."""
    reader = ByteReader(data, "hazard")
    shards = reader.uvarint()
    if not 1 <= shards <= MAX_SHARDS:
        raise FormatError("hazard: not a number of shards", n_shards=shards)
    tables: list[Tables] = []
    while not reader.at_end:
        n = reader.uvarint()
        some = entries[len(tables) : len(tables) + n]
        if not 0 < n == len(some):
            raise FormatError("hazard: a model of no tensor", n_entries=n)
        names = [schema.tensors[entry.tensor].dtype for entry in some]
        model, reader.at = parse_model(data, reader.at, set(names))
        tables += [model.tables[name] for name in names]
    if len(tables) != len(entries):
        raise FormatError("hazard: tensors without a model", n_entries=len(entries))
    return shards, tables


class _Directory:
    """Reads the lanes of entry after entry."""

    def __init__(self, data: memoryview, words: Words, tiling: Tiling) -> None:
        self._reader = ByteReader(data, "hazard")
        self._words, self._tiling = words, tiling
        self._first_word = 0

    def part(self, entry: Entry, tables: Tables) -> Part:
        spec = self._tiling.schema.tensors[entry.tensor]
        head = self._reader.byte()
        lane_bits, cut = head & ~CUT, bool(head & CUT)
        tiles = self._tiling.tiles(entry.tensor, cut=cut)
        if not tiles or not MIN_LANE_BITS <= lane_bits <= self._tiling.max_lane_bits:
            raise FormatError("hazard: not a tensor's lanes", name=spec.name, lane_bits=lane_bits)
        if len(tiles) > self._reader.left:
            raise FormatError("hazard: more tiles than bytes", name=spec.name, n_tiles=len(tiles))
        lanes: list[Lane] = []
        n_before = 0
        for tile, number, start, n in spans(tiles, lane_bits):
            n_changes = self._reader.uvarint()
            if not n_changes:
                continue
            n_words = self._reader.uvarint() + 2
            room = len(self._words) - self._first_word
            if n_words > room or n_changes > min(n, 32 * (n_words - 1)):
                raise FormatError(
                    "hazard: a lane does not fit", name=spec.name, lane=number, n_words=n_words
                )
            place = (n_before, self._first_word, n_words)
            lanes.append(Lane(tile, number, start, n, n_changes, *place))
            self._first_word += n_words
            n_before += n_changes
        if n_before != entry.n_changed:
            raise FormatError(
                "hazard: lanes with another number of changes",
                name=spec.name,
                expected=entry.n_changed,
                actual=n_before,
            )
        return Part(entry.tensor, spec, tables, n_before, tuple(lanes), self._words)

    def finish(self) -> None:
        if not self._reader.at_end or self._first_word != len(self._words):
            raise FormatError("hazard: bytes left over", n_words=len(self._words))
