"""The wire format's frozen objects and their parsers; `FORMAT.md` is the definition.

Standard library only. Every parser takes bytes from outside and either returns a checked object
or raises `FormatError` (the bytes are wrong) or `UnsupportedError` (a newer format).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from vllm_delta.errors import FormatError, ModelMismatchError, UnsupportedError

FORMAT = 1
PAYLOAD_TYPE = "application/vnd.vllm-delta.manifest.v1+json"
HEAD_KEY = "head"
NO_PARENT = "0" * 64

MAX_MANIFEST_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 64 << 20
MAX_BLOB_BYTES = 1 << 32
MAX_BLOBS = 1 << 13
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 8
MAX_NUMEL = 1 << 40
MAX_NAME_BYTES = 512
MAX_SEQ = 10**12 - 1
_MAX_INT = (1 << 63) - 1

Kind = Literal["fence", "delta", "anchor"]

_HEX64 = re.compile(r"[0-9a-f]{64}")
_CHANNEL = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class DType:
    """An element type: its safetensors name, bytes per element, and whether changes are steps."""

    name: str
    itemsize: int
    stepped: bool


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BF16", 2, True),
        DType("F16", 2, True),
        DType("F32", 4, True),
        DType("F64", 8, False),
        DType("F8_E4M3", 1, True),
        DType("F8_E5M2", 1, True),
        DType("I8", 1, False),
        DType("I16", 2, False),
        DType("I32", 4, False),
        DType("I64", 8, False),
        DType("U8", 1, False),
        DType("U16", 2, False),
        DType("U32", 4, False),
        DType("U64", 8, False),
        DType("BOOL", 1, False),
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """One checkpoint tensor: its name, element type (safetensors name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def n_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def stepped(self) -> bool:
        return DTYPES[self.dtype].stepped

    @property
    def n_cols(self) -> int:
        """Length of a row in the fingerprint's two-dimensional view (at least 1)."""
        return max(self.shape[-1], 1) if self.shape else 1

    @property
    def n_rows(self) -> int:
        return self.numel // self.n_cols


@dataclass(frozen=True)
class Schema:
    """The checkpoint's tensors, sorted by name. Deltas name a tensor by its place here."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if names != sorted(set(names)):
            raise ValueError("tensors must be sorted by name and unique")

    @staticmethod
    def of(tensors: Iterable[TensorSpec]) -> Schema:
        """Build a schema from specs in any order."""
        return Schema(tuple(sorted(tensors, key=lambda spec: spec.name)))

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def n_weights(self) -> int:
        return sum(spec.numel for spec in self.tensors)

    @cached_property
    def n_bytes(self) -> int:
        return sum(spec.n_bytes for spec in self.tensors)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {spec.name: place for place, spec in enumerate(self.tensors)}

    def index(self, name: str) -> int:
        """Place of the tensor called `name`; `ModelMismatchError` when there is none."""
        try:
            return self._places[name]
        except KeyError:
            raise ModelMismatchError("tensor is not in the channel's schema", name=name) from None

    def to_bytes(self) -> bytes:
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]
        return canonical({"format": FORMAT, "tensors": rows})

    @cached_property
    def digest(self) -> str:
        return digest(self.to_bytes())


@dataclass(frozen=True)
class Version:
    """A published state of the weights: its number and the root of its fingerprints (64 hex)."""

    number: int
    root: str

    def __str__(self) -> str:
        return f"{self.number}-{self.root[:12]}"


@dataclass(frozen=True)
class BlobRef:
    """A blob as a manifest names it: sha256 (64 hex), size in bytes, the shard that wrote it."""

    sha256: str
    n_bytes: int
    shard: int = 0


@dataclass(frozen=True)
class Reference:
    """A public checkpoint that stands in for an anchor's weights."""

    repository: str
    revision: str = "main"


@dataclass(frozen=True)
class Manifest:
    """One record of a channel's log. See `FORMAT.md` for each field."""

    channel: str
    seq: int
    epoch: int
    parent: str
    kind: Kind
    base: Version | None
    target: Version | None
    anchor: int | None
    low: int
    schema: BlobRef | None
    blobs: tuple[BlobRef, ...]
    reference: Reference | None
    writer: str
    time: float

    @property
    def payload_bytes(self) -> int:
        """Bytes of this record's blobs (the schema and the manifest itself not counted)."""
        return sum(ref.n_bytes for ref in self.blobs)

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "format": FORMAT,
                "channel": self.channel,
                "seq": self.seq,
                "epoch": self.epoch,
                "parent": self.parent,
                "kind": self.kind,
                "base": _version_out(self.base),
                "target": _version_out(self.target),
                "anchor": self.anchor,
                "low": self.low,
                "schema": _ref_out(self.schema),
                "blobs": [_ref_out(ref) for ref in self.blobs],
                "reference": _reference_out(self.reference),
                "writer": self.writer,
                "time": self.time,
            }
        )


def digest(data: bytes | memoryview) -> str:
    """sha256 of `data`, 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def manifest_key(seq: int) -> str:
    return f"m/{seq:012d}"


def blob_key(sha256: str) -> str:
    return f"b/{sha256}"


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, so that equal content gives equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_schema(data: bytes) -> Schema:
    """Parse and check a schema blob.

    Raises:
        FormatError: the bytes are not a schema.
        UnsupportedError: an element type or format number this release does not know.
    """
    fields = _load(data, "schema", MAX_SCHEMA_BYTES)
    _expect_keys(fields, {"format", "tensors"}, "schema")
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
    fields = _load(data, "manifest", MAX_MANIFEST_BYTES)
    names = set(Manifest.__dataclass_fields__) | {"format"}
    _expect_keys(fields, names, "manifest")
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
        channel=_match(fields["channel"], _CHANNEL, "manifest: channel"),
        seq=_integer(fields["seq"], "manifest: seq", 1, MAX_SEQ),
        epoch=_integer(fields["epoch"], "manifest: epoch", 1, _MAX_INT),
        parent=_match(fields["parent"], _HEX64, "manifest: parent"),
        kind=kind,
        base=_parse_version(fields["base"], "base"),
        target=_parse_version(fields["target"], "target"),
        anchor=None
        if fields["anchor"] is None
        else _integer(fields["anchor"], "manifest: anchor", 1, MAX_SEQ),
        low=_integer(fields["low"], "manifest: low", 1, MAX_SEQ),
        schema=None if fields["schema"] is None else _parse_ref(fields["schema"]),
        blobs=tuple(_parse_ref(ref) for ref in blobs),
        reference=_parse_reference(fields["reference"]),
        writer=_text(fields["writer"], "manifest: writer", 256),
        time=float(time),
    )
    _check_manifest(manifest)
    return manifest


def seal(payload: bytes, signatures: Iterable[Mapping[str, str]] = ()) -> bytes:
    """Wrap a manifest's payload in a DSSE envelope."""
    return canonical(
        {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [dict(signature) for signature in signatures],
        }
    )


def unseal(data: bytes) -> tuple[bytes, tuple[dict[str, str], ...]]:
    """Open a DSSE envelope: its payload and its signatures, which are not checked here."""
    fields = _load_object(data, "envelope", 2 * MAX_MANIFEST_BYTES)
    _expect_keys(fields, {"payloadType", "payload", "signatures"}, "envelope")
    if fields["payloadType"] != PAYLOAD_TYPE:
        raise UnsupportedError("envelope: unknown payload type", type=str(fields["payloadType"]))
    signatures = fields["signatures"]
    if not isinstance(signatures, list) or len(signatures) > 16:
        raise FormatError("envelope: signatures is not a list within the limit", limit=16)
    for signature in signatures:
        if not isinstance(signature, dict) or set(signature) != {"keyid", "sig"}:
            raise FormatError("envelope: a signature is not {keyid, sig}")
        _text(signature["keyid"], "envelope: keyid", 256)
        _text(signature["sig"], "envelope: sig", 1024)
    payload = _text(fields["payload"], "envelope: payload", 2 * MAX_MANIFEST_BYTES)
    try:
        return base64.b64decode(payload, validate=True), tuple(signatures)
    except (binascii.Error, ValueError) as error:
        raise FormatError("envelope: payload is not base64") from error


def open_envelope(data: bytes) -> bytes:
    """The payload of a DSSE envelope."""
    return unseal(data)[0]


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
    elif kind == "delta":
        ok = (
            manifest.base is not None
            and manifest.target is not None
            and manifest.target.number == manifest.base.number + 1
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


def _parse_spec(row: Any) -> TensorSpec:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list):
        raise FormatError("schema: a tensor is not [name, dtype, shape]")
    name = _text(row[0], "schema: name", MAX_NAME_BYTES)
    dtype = _text(row[1], "schema: dtype", 32)
    if dtype not in DTYPES:
        raise UnsupportedError("schema: unknown element type", name=name, dtype=dtype)
    if len(row[2]) > MAX_DIMENSIONS:
        raise FormatError("schema: too many dimensions", name=name, limit=MAX_DIMENSIONS)
    shape = tuple(_integer(size, "schema: size", 0, MAX_NUMEL) for size in row[2])
    if math.prod(shape) > MAX_NUMEL:
        raise FormatError("schema: tensor is too large", name=name, limit=MAX_NUMEL)
    return TensorSpec(name, dtype, shape)


def _parse_version(value: Any, field: str) -> Version | None:
    if value is None:
        return None
    fields = _mapping(value, f"manifest: {field}")
    _expect_keys(fields, {"number", "root"}, f"manifest: {field}")
    number = _integer(fields["number"], f"manifest: {field} number", 0, MAX_SEQ)
    return Version(number, _match(fields["root"], _HEX64, f"manifest: {field} root"))


def _parse_ref(value: Any) -> BlobRef:
    fields = _mapping(value, "manifest: blob")
    _expect_keys(fields, {"sha256", "bytes", "shard"}, "manifest: blob")
    return BlobRef(
        _match(fields["sha256"], _HEX64, "manifest: blob sha256"),
        _integer(fields["bytes"], "manifest: blob bytes", 1, MAX_BLOB_BYTES),
        _integer(fields["shard"], "manifest: blob shard", 0, 1 << 20),
    )


def _parse_reference(value: Any) -> Reference | None:
    if value is None:
        return None
    fields = _mapping(value, "manifest: reference")
    _expect_keys(fields, {"repository", "revision"}, "manifest: reference")
    return Reference(
        _text(fields["repository"], "manifest: repository", 1024),
        _text(fields["revision"], "manifest: revision", 256),
    )


def _version_out(version: Version | None) -> dict[str, Any] | None:
    return None if version is None else {"number": version.number, "root": version.root}


def _ref_out(ref: BlobRef | None) -> dict[str, Any] | None:
    if ref is None:
        return None
    return {"sha256": ref.sha256, "bytes": ref.n_bytes, "shard": ref.shard}


def _reference_out(reference: Reference | None) -> dict[str, str] | None:
    if reference is None:
        return None
    return {"repository": reference.repository, "revision": reference.revision}


def _load(data: bytes, what: str, limit: int) -> dict[str, Any]:
    fields = _load_object(data, what, limit)
    number = fields.get("format")
    if number != FORMAT or isinstance(number, bool):
        if isinstance(number, int) and number > FORMAT:
            raise UnsupportedError(f"{what}: newer format", format=number)
        raise FormatError(f"{what}: no format number")
    return fields


def _load_object(data: bytes, what: str, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise FormatError(f"{what}: too large", n_bytes=len(data), limit=limit)
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_int
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not JSON") from error
    return _mapping(value, what)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("a number is too long")
    return int(text)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what}: not an object")
    return value


def _expect_keys(fields: Mapping[str, Any], names: set[str], what: str) -> None:
    if set(fields) != names:
        wrong = sorted(set(fields) ^ names)[:4]
        raise FormatError(
            f"{what}: missing or unknown fields", fields=[name[:64] for name in wrong]
        )


def _integer(value: Any, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{what}: not an integer in range", low=low, high=high)
    return value


def _match(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"{what}: malformed")
    return value


def _text(value: Any, what: str, limit: int) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what}: not text")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"{what}: not valid text") from error
    if not 0 < n_bytes <= limit:
        raise FormatError(f"{what}: empty or too long", limit=limit)
    return value
