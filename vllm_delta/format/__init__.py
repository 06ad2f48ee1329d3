"""The wire format's frozen objects and their parsers; `FORMAT.md` is the definition.

Standard library only. Every parser takes bytes from outside and either returns a checked object
or raises `FormatError` (the bytes are wrong) or `UnsupportedError` (a newer format).
"""

from __future__ import annotations

from vllm_delta.format.envelope import (
    PAYLOAD_TYPE,
    open_envelope,
    seal,
    unseal,
)
from vllm_delta.format.objects import (
    DTYPES,
    FORMAT,
    HEAD_KEY,
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
    DType,
    Kind,
    Manifest,
    Reference,
    Schema,
    TensorSpec,
    Version,
    blob_key,
    canonical,
    digest,
    manifest_key,
)
from vllm_delta.format.parse import (
    parse_manifest,
    parse_schema,
)

__all__ = [
    "DTYPES",
    "FORMAT",
    "HEAD_KEY",
    "MAX_BLOBS",
    "MAX_BLOB_BYTES",
    "MAX_DIMENSIONS",
    "MAX_MANIFEST_BYTES",
    "MAX_NAME_BYTES",
    "MAX_NUMEL",
    "MAX_SCHEMA_BYTES",
    "MAX_SEQ",
    "MAX_TENSORS",
    "NO_PARENT",
    "PAYLOAD_TYPE",
    "BlobRef",
    "DType",
    "Kind",
    "Manifest",
    "Reference",
    "Schema",
    "TensorSpec",
    "Version",
    "blob_key",
    "canonical",
    "digest",
    "manifest_key",
    "open_envelope",
    "parse_manifest",
    "parse_schema",
    "seal",
    "unseal",
]
