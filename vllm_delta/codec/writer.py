"""Writing blobs: which codec each tensor takes, and what goes into which section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_delta.codec import entropy, gap, hazard, raw
from vllm_delta.codec.blob import (
    GAP,
    GAP_BITS,
    GAP_SYMBOLS,
    HAZARD,
    HAZARD_LANES,
    HAZARD_MODELS,
    HAZARD_WORDS,
    RAW,
    RAW_FRAMES,
    RAW_SIZES,
    STEP_BITS,
    STEP_SYMBOLS,
    BlobKind,
    Entry,
    build_blob,
    put_uvarint,
)
from vllm_delta.codec.change import Change
from vllm_delta.codec.order import Unsigned, add_steps
from vllm_delta.errors import UnsupportedError
from vllm_delta.fingerprint import fingerprint
from vllm_delta.format import MAX_BLOB_BYTES, Schema

Base = Callable[[int], Unsigned]

_GROUP_CHANGES = 1 << 18
"""Tensors share a model until they have this many changes: it takes about 60 bytes."""
_WORTH_MODEL = 8
"""A model is chosen again where one in so many of its changes turns out to be sent otherwise."""
_WORTH_GAP = 64
"""Bytes that `gap` must save in a group to be used in it: its sections take about as many."""


@dataclass(frozen=True, eq=False)
class Item:
    """A change with what codes it: lanes, frames, or neither for `gap`."""

    change: Change
    lanes: hazard.Coded | None = None
    frames: Sequence[bytes] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of payload; two a change for `gap`, about."""
        if self.lanes is not None:
            return self.lanes.n_bytes
        if self.frames is not None:
            return sum(map(len, self.frames))
        return 2 * self.change.nnz


def write_blobs(
    kind: BlobKind, schema: Schema, items: Iterable[Item], shards: int, blob_bytes: int
) -> Iterator[bytes]:
    """Blobs of whole tensors, each begun anew where the one before is full."""
    writer = _Writer(kind, schema, shards)
    before = -1
    for item in items:
        if item.change.tensor <= before:
            raise ValueError("changes must be in schema order, one per tensor")
        before = item.change.tensor
        if writer.n_entries and not writer.has_room(item, blob_bytes):
            yield writer.finish()
            writer = _Writer(kind, schema, shards)
        writer.add(item)
    if writer.n_entries:
        yield writer.finish()


def plain_items(changes: Iterable[Change]) -> Iterator[Item]:
    """Changes with indices by `gap`, others by `raw`."""
    for change in changes:
        yield _raw(change) if change.indices is None else Item(change)


def smallest_items(
    schema: Schema, changes: Iterable[Change], base: Base, tiling: hazard.Tiling, n_threads: int
) -> Iterator[Item]:
    """Each tensor by what is smallest of `hazard`, `gap` and `raw`, as measured.

    Args:
        base: see `encode_delta`.
    """
    group: list[hazard.Pending] = []
    n_changed = 0
    for change in changes:
        if change.indices is None:
            yield from _coded(group, tiling, n_threads)
            group, n_changed = [], 0
            yield _raw(change)
            continue
        spec, bits = schema.tensors[change.tensor], base(change.tensor)
        if bits.size != spec.numel or bits.itemsize != spec.itemsize:
            raise ValueError(f"{bits.size} elements of {bits.itemsize} bytes as base of {spec}")
        group.append(hazard.Pending.of(change, bits, tiling))
        n_changed += change.nnz
        if n_changed >= _GROUP_CHANGES:
            yield from _coded(group, tiling, n_threads)
            group, n_changed = [], 0
    yield from _coded(group, tiling, n_threads)


def _coded(
    group: Sequence[hazard.Pending], tiling: hazard.Tiling, n_threads: int
) -> Iterator[Item]:
    items = _measured(group, tiling, n_threads)
    n_whole = sum(one.change.nnz for one, i in zip(group, items, strict=True) if i.frames)
    if _WORTH_MODEL * n_whole > sum(one.change.nnz for one in group):
        # What is sent whole has no say in the model of the others.
        rest = [one for one, item in zip(group, items, strict=True) if item.frames is None]
        again = iter(_measured(rest, tiling, n_threads))
        items = [next(again) if item.frames is None else item for item in items]
    yield from items


def _measured(group: Sequence[hazard.Pending], tiling: hazard.Tiling, n_threads: int) -> list[Item]:
    """Each change of a group by what is smallest, all lanes under one model."""
    tiled = [pending for pending in group if pending.tiles]
    coded = iter(hazard.encode(tiled, tiling, n_threads) if tiled else [])
    lanes = [next(coded) if pending.tiles else None for pending in group]
    smaller: dict[int, int] = {}
    for place, (pending, one) in enumerate(zip(group, lanes, strict=True)):
        if one is not None and one.gap_bytes < one.n_bytes:
            saved = one.n_bytes - _gap_bytes(pending.change)
            if saved > 0:
                smaller[place] = saved
    if sum(smaller.values()) <= _WORTH_GAP:
        smaller = {}
    items = []
    for place, (pending, one) in enumerate(zip(group, lanes, strict=True)):
        item = Item(pending.change, None if place in smaller else one)
        large = 2 * item.n_bytes >= pending.spec.n_bytes
        items.append(_or_raw(item, pending) if large else item)
    return items


def _or_raw(item: Item, pending: hazard.Pending) -> Item:
    """The item, or the whole tensor where that is smaller."""
    change, spec = pending.change, pending.spec
    assert change.indices is not None
    assert change.steps is not None
    bits = pending.base.copy()
    bits[change.indices] = add_steps(bits[change.indices], change.steps)
    touched = fingerprint(pending.base, spec)
    whole = _raw(replace(change, indices=None, steps=None, bits=bits, touched=touched))
    n_bytes = _gap_bytes(change) if item.lanes is None else item.n_bytes
    return whole if whole.n_bytes < n_bytes or change.nnz > gap.MAX_CHANGES else item


def _raw(change: Change) -> Item:
    if change.bits is None:
        raise ValueError("a change has neither indices nor bits")
    return Item(change, frames=list(raw.encode(change.bits)))


def _gap_bytes(change: Change) -> int:
    """What a tensor takes by `gap`, alone."""
    assert change.indices is not None
    assert change.steps is not None
    total = 0
    for values in (gap.gaps_of(change.indices), gap.codes_of(change.steps)):
        stream = gap.Stream()
        stream.add(values)
        symbols, low = stream.finish()
        total += len(entropy.compress(symbols)) + len(low)
    return total


class _Writer:
    """Collects one blob."""

    def __init__(self, kind: BlobKind, schema: Schema, shards: int) -> None:
        self._kind, self._schema = kind, schema
        self._entries: list[Entry] = []
        self._gaps = gap.Stream()
        self._codes = gap.Stream()
        self._frames: list[bytes] = []
        self._lanes: list[hazard.Coded] = []
        self._shards = shards
        self._n_changed = dict.fromkeys((GAP, HAZARD), 0)
        self._n_bytes = 0

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    def has_room(self, item: Item, blob_bytes: int) -> bool:
        if self._n_bytes + item.n_bytes > blob_bytes:
            return False
        codec = HAZARD if item.lanes is not None else GAP
        n_changed = 0 if item.frames is not None else item.change.nnz
        return self._n_changed[codec] + n_changed <= gap.MAX_CHANGES

    def add(self, item: Item) -> None:
        change, codec, n_changed = item.change, RAW, 0
        if item.frames is not None:
            self._frames += item.frames
        else:
            codec, n_changed = (GAP if item.lanes is None else HAZARD), change.nnz
            if not 0 < n_changed <= gap.MAX_CHANGES:
                raise ValueError(f"{n_changed} changes cannot be one tensor's code")
            self._n_changed[codec] += n_changed
            if item.lanes is not None:
                self._lanes.append(item.lanes)
            else:
                assert change.indices is not None
                assert change.steps is not None
                self._gaps.add(gap.gaps_of(change.indices))
                self._codes.add(gap.codes_of(change.steps))
        self._n_bytes += item.n_bytes
        self._entries.append(Entry(change.tensor, codec, n_changed, change.touched, change.target))

    def finish(self) -> bytes:
        sections = self._gap_sections() | self._hazard_sections()
        sections[RAW_SIZES] = np.array([len(f) for f in self._frames], "<u4").tobytes()
        sections[RAW_FRAMES] = b"".join(self._frames)
        data = build_blob(self._kind, self._schema, self._entries, sections)
        if len(data) > MAX_BLOB_BYTES:
            # More than one tensor never comes near: `has_room` begins a new blob before.
            name = self._schema.tensors[self._entries[0].tensor].name
            raise UnsupportedError(
                "a tensor takes more bytes than a blob holds",
                name=name,
                n_bytes=len(data),
                limit=MAX_BLOB_BYTES,
            )
        return data

    def _gap_sections(self) -> dict[int, bytes]:
        sections: dict[int, bytes] = {}
        if self._n_changed[GAP]:
            for stream, symbol_tag, bits_tag in (
                (self._gaps, GAP_SYMBOLS, GAP_BITS),
                (self._codes, STEP_SYMBOLS, STEP_BITS),
            ):
                symbols, sections[bits_tag] = stream.finish()
                sections[symbol_tag] = entropy.compress(symbols)
        return sections

    def _hazard_sections(self) -> dict[int, bytes]:
        if not self._lanes:
            return {}
        models = bytearray()
        put_uvarint(models, self._shards)
        runs: list[list[hazard.Coded]] = []
        for coded in self._lanes:
            if not runs or runs[-1][0].model is not coded.model:
                runs.append([])
            runs[-1].append(coded)
        for run in runs:
            put_uvarint(models, len(run))
            dtypes = {self._dtype(coded) for coded in run}
            models += run[0].model.to_bytes(dtypes)
        return {
            HAZARD_MODELS: bytes(models),
            HAZARD_LANES: b"".join(coded.directory for coded in self._lanes),
            HAZARD_WORDS: b"".join(coded.words for coded in self._lanes),
        }

    def _dtype(self, coded: hazard.Coded) -> str:
        return self._schema.tensors[coded.tensor].dtype
