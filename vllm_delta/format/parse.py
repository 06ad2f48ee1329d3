"""Parsers of schemas and manifests: bytes from outside to checked objects."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from vllm_delta.errors import FormatError, UnsupportedError
from vllm_delta.format.objects import (
    DTYPES,
    MAX_BLOB_BYTES,
    MAX_BLOBS,
    MAX_DIMENSIONS,
    MAX_MANIFEST_BYTES,
    MAX_NAME_BYTES,
    MAX_NUMEL,
    MAX_SCHEMA_BYTES,
    MAX_SEQ,
    MAX_TENSORS,
    NO_PARENT,
    BlobRef,
    Kind,
    Manifest,
    Reference,
    Schema,
    TensorSpec,
    Version,
)
from vllm_delta.format.values import expect_keys, integer, load, mapping, match, text

_MAX_INT = (1 << 63) - 1
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CHANNEL = re.compile(r"[0-9a-f]{32}")


def parse_schema(data: bytes) -> Schema:
    """Parse and check a schema blob.

    Raises:
        FormatError: the bytes are not a schema.
        UnsupportedError: an element type or format number this release does not know.
    """
    fields = load(data, "schema", MAX_SCHEMA_BYTES)
    expect_keys(fields, {"format", "tensors"}, "schema")
    rows = fields["tensors"]
    if not isinstance(rows, list) or len(rows) > MAX_TENSORS:
        raise FormatError("schema: tensors is not a list within the limit", limit=MAX_TENSORS)
    specs = tuple(_parse_spec(row) for row in rows)
    names = [spec.name for spec in specs]
    if names != sorted(set(names)):
        raise FormatError("schema: names are not sorted and unique")
    schema = Schema(specs)
    if schema.to_bytes() != data:
        raise FormatError("schema: not in canonical form")
    return schema


def parse_manifest(data: bytes) -> Manifest:
    """Parse and check a manifest payload (the envelope's inside).

    Raises:
        FormatError: the bytes are not a manifest, or its fields contradict each other.
        UnsupportedError: a newer format number.
    """
    fields = load(data, "manifest", MAX_MANIFEST_BYTES)
    names = set(Manifest.__dataclass_fields__) | {"format"}
    expect_keys(fields, names, "manifest")
    blobs = fields["blobs"]
    if not isinstance(blobs, list) or len(blobs) > MAX_BLOBS:
        raise FormatError("manifest: blobs is not a list within the limit", limit=MAX_BLOBS)
    kind = fields["kind"]
    if kind not in get_args(Kind):
        raise UnsupportedError("manifest: unknown kind", kind=str(kind)[:64])
    time = fields["time"]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time):
        raise FormatError("manifest: time is not a number")
    manifest = Manifest(
        channel=match(fields["channel"], _CHANNEL, "manifest: channel"),
        seq=integer(fields["seq"], "manifest: seq", 1, MAX_SEQ),
        epoch=integer(fields["epoch"], "manifest: epoch", 1, _MAX_INT),
        parent=match(fields["parent"], _HEX64, "manifest: parent"),
        kind=kind,
        base=_parse_version(fields["base"], "base"),
        target=_parse_version(fields["target"], "target"),
        anchor=None
        if fields["anchor"] is None
        else integer(fields["anchor"], "manifest: anchor", 1, MAX_SEQ),
        low=integer(fields["low"], "manifest: low", 1, MAX_SEQ),
        schema=None if fields["schema"] is None else _parse_ref(fields["schema"]),
        blobs=tuple(_parse_ref(ref) for ref in blobs),
        reference=_parse_reference(fields["reference"]),
        writer=text(fields["writer"], "manifest: writer", 256),
        time=float(time),
    )
    _check_manifest(manifest)
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    kind, seq = manifest.kind, manifest.seq
    if (manifest.parent == NO_PARENT) != (seq == 1):
        raise FormatError("manifest: only the first record has no parent", seq=seq)
    if manifest.low > seq:
        raise FormatError("manifest: the low-water mark is ahead", low=manifest.low, seq=seq)
    if manifest.anchor is not None and manifest.anchor > seq:
        raise FormatError("manifest: the anchor is ahead", anchor=manifest.anchor, seq=seq)
    if kind == "fence":
        ok = manifest.base == manifest.target and not manifest.blobs and manifest.reference is None
    elif kind in ("delta", "merged"):
        ok = (
            manifest.base is not None
            and manifest.target is not None
            and _spans(kind, manifest.target.number - manifest.base.number)
            and bool(manifest.blobs)
            and manifest.anchor is not None
            and manifest.anchor < seq
            and manifest.reference is None
        )
    else:
        ok = (
            manifest.base is None
            and manifest.target is not None
            and manifest.anchor == seq
            and bool(manifest.blobs)
        )
    if not ok or (manifest.target is not None) != (manifest.schema is not None):
        raise FormatError("manifest: fields do not fit its kind", kind=kind, seq=seq)


def _spans(kind: Kind, n_versions: int) -> bool:
    """Whether a delta of this kind leads over so many versions."""
    return n_versions == 1 if kind == "delta" else n_versions > 1


def _parse_spec(row: Any) -> TensorSpec:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list):
        raise FormatError("schema: a tensor is not [name, dtype, shape]")
    name = text(row[0], "schema: name", MAX_NAME_BYTES)
    dtype = text(row[1], "schema: dtype", 32)
    if dtype not in DTYPES:
        raise UnsupportedError("schema: unknown element type", name=name, dtype=dtype)
    if len(row[2]) > MAX_DIMENSIONS:
        raise FormatError("schema: too many dimensions", name=name, limit=MAX_DIMENSIONS)
    shape = tuple(integer(size, "schema: size", 0, MAX_NUMEL) for size in row[2])
    if math.prod(shape) > MAX_NUMEL:
        raise FormatError("schema: tensor is too large", name=name, limit=MAX_NUMEL)
    return TensorSpec(name, dtype, shape)


def _parse_version(value: Any, field: str) -> Version | None:
    if value is None:
        return None
    fields = mapping(value, f"manifest: {field}")
    expect_keys(fields, {"number", "root"}, f"manifest: {field}")
    number = integer(fields["number"], f"manifest: {field} number", 0, MAX_SEQ)
    return Version(number, match(fields["root"], _HEX64, f"manifest: {field} root"))


def _parse_ref(value: Any) -> BlobRef:
    fields = mapping(value, "manifest: blob")
    expect_keys(fields, {"sha256", "bytes", "shard"}, "manifest: blob")
    return BlobRef(
        match(fields["sha256"], _HEX64, "manifest: blob sha256"),
        integer(fields["bytes"], "manifest: blob bytes", 1, MAX_BLOB_BYTES),
        integer(fields["shard"], "manifest: blob shard", 0, 1 << 20),
    )


def _parse_reference(value: Any) -> Reference | None:
    if value is None:
        return None
    fields = mapping(value, "manifest: reference")
    expect_keys(fields, {"repository", "revision"}, "manifest: reference")
    return Reference(
        text(fields["repository"], "manifest: repository", 1024),
        text(fields["revision"], "manifest: revision", 256),
    )
