"""What the wire format is made of, as frozen objects, and their canonical bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vllm_delta.errors import ModelMismatchError

FORMAT = 1
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

Kind = Literal["fence", "delta", "merged", "anchor"]
Content = Literal["delta", "anchor", "reference"]


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

    @property
    def content(self) -> Content:
        """The kind of its blobs: a merged delta's are those of any delta.

        Raises:
            ValueError: a fence has none.
        """
        if self.kind == "fence":
            raise ValueError("a fence holds no changes")
        if self.kind == "anchor":
            return "anchor" if self.reference is None else "reference"
        return "delta"

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
