"""Deltas and anchors as bytes: `encode_*` write blobs, `decode` reads and checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_delta.codec import entropy, gap, hazard, order, raw
from vllm_delta.codec.blob import (
    GAP,
    GAP_BITS,
    GAP_SYMBOLS,
    HAZARD,
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
from vllm_delta.codec.hazard import HostLanes, LaneDecoder
from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.codec.writer import plain_items, smallest_items, write_blobs
from vllm_delta.errors import FormatError, ModelMismatchError
from vllm_delta.format import Schema

__all__ = [
    "Change",
    "Codec",
    "HostLanes",
    "LaneDecoder",
    "decode",
    "encode_anchor",
    "encode_delta",
    "encode_reference",
    "order",
]

Codec = Literal["gap", "hazard"]

BLOB_BYTES = 64 << 20
"""Where an encoder starts a new blob: a unit of parallel transfer and of memory."""
_BATCH_CHANGES = 1 << 17
"""Changes of small tensors that are decoded together."""


def encode_delta(
    schema: Schema,
    changes: Iterable[Change],
    *,
    codec: Codec = "gap",
    base: Callable[[int], Unsigned] | None = None,
    shards: int = 1,
    n_threads: int = 1,
    blob_bytes: int = BLOB_BYTES,
) -> Iterator[bytes]:
    """Encode changes, in schema order, as blobs of whole tensors.

    By `gap`, changes with indices are coded by it and those with bits by `raw`. By `hazard`, each
    tensor takes what is smallest of `hazard`, `gap` and `raw`. Unchanged tensors are left out by
    the caller. Nothing is yielded for no changes.

    Args:
        base: for `hazard`: the tensor's bits before the change, unsigned[numel], flat, C order; not
            modified, and read until the blob with the tensor has been yielded.
        shards: for `hazard`: parts into which readers split a tensor's rows or columns.
        n_threads: threads to use, the calling one included.
    """
    if codec == "gap":
        items = plain_items(changes)
    elif base is None:
        raise ValueError("hazard needs the weights before the change")
    else:
        items = smallest_items(schema, changes, base, hazard.Tiling(schema, shards), n_threads)
    return write_blobs("delta", schema, items, shards, blob_bytes)


def encode_anchor(
    schema: Schema, tensors: Iterable[Change], *, blob_bytes: int = BLOB_BYTES
) -> Iterator[bytes]:
    """Encode whole tensors (changes with bits), in schema order, as blobs."""
    return write_blobs("anchor", schema, plain_items(tensors), 1, blob_bytes)


def encode_reference(schema: Schema, fingerprints: Sequence[int]) -> bytes:
    """Encode the fingerprints alone, for an anchor whose weights are a public checkpoint."""
    entries = [Entry(place, REFERENCE, 0, 0, target) for place, target in enumerate(fingerprints)]
    return build_blob("reference", schema, entries, {})


def decode(
    data: bytes | memoryview, schema: Schema, kind: BlobKind, lanes: LaneDecoder | None = None
) -> Iterator[Change]:
    """Decode a blob tensor by tensor; the last step of the iterator checks what is left over.

    Memory beside the blob: one byte per changed weight for each of two symbol streams of `gap`,
    the words of `hazard`, and the changes at hand: one tensor's, or of small ones those of a few.

    Args:
        lanes: decodes `hazard` entries, for which it has the weights before the change; the
            weights of a tensor must not move before its change has been yielded. It may leave out
            changes of lanes that its owner has no use for.

    Raises:
        FormatError: the bytes break the format, or the weights are not what they were made for.
            Changes yielded before are valid by themselves, but the blob is not: use nothing of it.
        UnsupportedError: a feature this release does not know.
        ModelMismatchError: a tensor of the schema is larger than the memory.
    """
    blob = parse_blob(data, schema, kind)
    reader = _gap_reader(blob)
    frames = _raw_frames(blob, schema)
    coded = _hazard_changes(blob, schema, lanes)
    for entry in blob.entries:
        spec = schema.tensors[entry.tensor]
        indices = steps = bits = None
        if entry.codec == GAP:
            indices, steps = reader.take(entry.n_changed, spec.numel, spec.itemsize, spec.name)
        elif entry.codec == HAZARD:
            indices, steps = next(coded)
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


def _hazard_changes(
    blob: Blob, schema: Schema, lanes: LaneDecoder | None
) -> Iterator[tuple[Signed, Signed]]:
    """Indices and steps of the blob's `hazard` entries, in order, decoded a few at a time."""
    entries = [entry for entry in blob.entries if entry.codec == HAZARD]
    parts = hazard.parse_parts(entries, blob.sections, schema)
    if parts and lanes is None:
        raise ValueError("hazard needs the weights before the change")
    return _decoded(parts, lanes) if lanes is not None else iter(())


def _decoded(parts: Sequence[hazard.Part], lanes: LaneDecoder) -> Iterator[tuple[Signed, Signed]]:
    batch: list[hazard.Part] = []
    for place, part in enumerate(parts, 1):
        batch.append(part)
        if place == len(parts) or sum(p.n_changes for p in batch) >= _BATCH_CHANGES:
            yield from lanes.decode(batch)
            batch = []


def _gap_reader(blob: Blob) -> gap.Reader:
    n = sum(entry.n_changed for entry in blob.entries if entry.codec == GAP)
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
