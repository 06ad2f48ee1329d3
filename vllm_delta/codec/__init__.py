"""Deltas and anchors as bytes: `encode_*` write blobs, `decode` reads and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vllm_delta.codec import entropy, gap, order, raw
from vllm_delta.codec.blob import (
    GAP,
    GAP_BITS,
    GAP_SYMBOLS,
    RAW,
    RAW_FRAMES,
    RAW_SIZES,
    REFERENCE,
    STEP_BITS,
    STEP_SYMBOLS,
    Blob,
    BlobKind,
    Entry,
    build_blob,
    parse_blob,
)
from vllm_delta.codec.change import Change
from vllm_delta.errors import FormatError, ModelMismatchError, UnsupportedError
from vllm_delta.format import MAX_BLOB_BYTES, Schema

__all__ = ["Change", "decode", "encode_anchor", "encode_delta", "encode_reference", "order"]

BLOB_BYTES = 64 << 20
"""Where an encoder starts a new blob: a unit of parallel transfer and of memory."""


def encode_delta(
    schema: Schema, changes: Iterable[Change], *, blob_bytes: int = BLOB_BYTES
) -> Iterator[bytes]:
    """Encode changes, in schema order, as blobs of whole tensors.

    A change with indices is coded by `gap`, one with bits by `raw`. Unchanged tensors are left
    out by the caller. Nothing is yielded for no changes.
    """
    return _encode("delta", schema, changes, blob_bytes)


def encode_anchor(
    schema: Schema, tensors: Iterable[Change], *, blob_bytes: int = BLOB_BYTES
) -> Iterator[bytes]:
    """Encode whole tensors (changes with bits), in schema order, as blobs."""
    return _encode("anchor", schema, tensors, blob_bytes)


def encode_reference(schema: Schema, fingerprints: Sequence[int]) -> bytes:
    """Encode the fingerprints alone, for an anchor whose weights are a public checkpoint."""
    entries = [Entry(place, REFERENCE, 0, 0, target) for place, target in enumerate(fingerprints)]
    return build_blob("reference", schema, entries, {})


def decode(data: bytes, schema: Schema, kind: BlobKind) -> Iterator[Change]:
    """Decode a blob tensor by tensor; the last step of the iterator checks what is left over.

    Memory beside the blob: one byte per changed weight for each of two symbol streams, and the
    change at hand.

    Raises:
        FormatError: the bytes break the format. Changes yielded before are valid by themselves,
            but the blob is not: use nothing of it.
        UnsupportedError: a feature this release does not know.
        ModelMismatchError: a tensor of the schema is larger than the memory.
    """
    blob = parse_blob(data, schema, kind)
    reader = _gap_reader(blob)
    frames = _raw_frames(blob, schema)
    for entry in blob.entries:
        spec = schema.tensors[entry.tensor]
        indices = steps = bits = None
        if entry.codec == GAP:
            indices, steps = reader.take(entry.n_changed, spec.numel, spec.itemsize, spec.name)
        elif entry.codec == RAW:
            try:
                bits = raw.decode(frames, spec.numel, spec.itemsize)
            except MemoryError as error:
                raise ModelMismatchError(
                    "a tensor does not fit in memory", name=spec.name, n_bytes=spec.n_bytes
                ) from error
        yield Change(entry.tensor, indices, steps, bits, entry.touched, entry.target)
    reader.finish()
    if next(frames, None) is not None:
        raise FormatError("raw: frames left over")


def _encode(
    kind: BlobKind, schema: Schema, changes: Iterable[Change], blob_bytes: int
) -> Iterator[bytes]:
    writer = _Writer(kind, schema)
    before = -1
    for change in changes:
        if change.tensor <= before:
            raise ValueError("changes must be in schema order, one per tensor")
        before = change.tensor
        if writer.n_entries and not writer.has_room(change, blob_bytes):
            yield writer.finish()
            writer = _Writer(kind, schema)
        writer.add(change)
    if writer.n_entries:
        yield writer.finish()


class _Writer:
    """Collects one blob."""

    def __init__(self, kind: BlobKind, schema: Schema) -> None:
        self._kind, self._schema = kind, schema
        self._entries: list[Entry] = []
        self._gaps = gap.Stream()
        self._codes = gap.Stream()
        self._frames: list[bytes] = []
        self._n_changed = 0
        self._n_bytes = 0

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    def has_room(self, change: Change, blob_bytes: int) -> bool:
        if change.indices is not None:
            if self._n_changed + change.nnz > gap.MAX_CHANGES:
                return False
            return self._n_bytes + 2 * change.nnz <= blob_bytes
        assert change.bits is not None
        return self._n_bytes + change.bits.nbytes <= blob_bytes

    def add(self, change: Change) -> None:
        if change.indices is not None and change.steps is not None:
            if not 0 < change.nnz <= gap.MAX_CHANGES:
                raise ValueError(f"{change.nnz} changes cannot be one tensor's gap code")
            self._gaps.add(gap.gaps_of(change.indices))
            self._codes.add(gap.codes_of(change.steps))
            self._n_changed += change.nnz
            self._n_bytes += 2 * change.nnz
            codec, n_changed = GAP, change.nnz
        elif change.bits is not None:
            frames = list(raw.encode(change.bits))
            self._frames += frames
            self._n_bytes += sum(map(len, frames))
            codec, n_changed = RAW, 0
        else:
            raise ValueError("a change has neither indices nor bits")
        self._entries.append(Entry(change.tensor, codec, n_changed, change.touched, change.target))

    def finish(self) -> bytes:
        sections: dict[int, bytes] = {}
        if self._n_changed:
            for stream, symbol_tag, bits_tag in (
                (self._gaps, GAP_SYMBOLS, GAP_BITS),
                (self._codes, STEP_SYMBOLS, STEP_BITS),
            ):
                symbols, sections[bits_tag] = stream.finish()
                sections[symbol_tag] = entropy.compress(symbols)
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


def _gap_reader(blob: Blob) -> gap.Reader:
    n = sum(entry.n_changed for entry in blob.entries)
    if n > gap.MAX_CHANGES:
        raise FormatError("gap: too many changes in a blob", n_changed=n, limit=gap.MAX_CHANGES)
    streams: list[npt.NDArray[np.uint8]] = []
    for symbol_tag, bits_tag in ((GAP_SYMBOLS, GAP_BITS), (STEP_SYMBOLS, STEP_BITS)):
        frame = blob.sections.get(symbol_tag)
        if (frame is not None) != (n > 0):
            raise FormatError("gap: a symbol stream is missing or not wanted", n_changed=n)
        symbols = b"" if frame is None else entropy.decompress(frame, n)
        streams.append(np.frombuffer(symbols, np.uint8))
        streams.append(np.frombuffer(blob.sections.get(bits_tag, b""), np.uint8))
    return gap.Reader(*streams)


def _raw_frames(blob: Blob, schema: Schema) -> Iterator[memoryview]:
    """The blob's raw frames in order, once their sizes are known to add up."""
    n = sum(
        raw.n_frames(schema.tensors[entry.tensor].numel)
        for entry in blob.entries
        if entry.codec == RAW
    )
    table = blob.sections.get(RAW_SIZES, b"")
    data = memoryview(blob.sections.get(RAW_FRAMES, b""))
    if len(table) != 4 * n:
        raise FormatError("raw: another number of frames", expected=n, n_bytes=len(table))
    sizes = np.frombuffer(table, "<u4").astype(np.int64)
    if int(sizes.sum()) != len(data):
        raise FormatError("raw: frames do not fill their section", n_bytes=len(data))
    ends = np.cumsum(sizes)
    return (data[end - size : end] for size, end in zip(sizes, ends, strict=True))
