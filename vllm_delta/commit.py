"""What a publisher goes by, and what it has in hand while a record is on its way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from vllm_delta.errors import SettingsError
from vllm_delta.format import BlobRef, Reference, Version


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """How a publisher codes and when it writes anchors.

    Attributes:
        raw_above: share of a tensor's elements, 0 to 1; with more changed it is replaced whole.
        anchor_ratio: an anchor is due once the deltas since the newest one hold more than this
            many times its bytes. An anchor by reference counts as the model's bytes.
        blob_bytes: size at which a new blob is begun.
    """

    raw_above: float = 0.30
    anchor_ratio: float = 1.0
    blob_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.raw_above <= 1:
            raise SettingsError("a share is between 0 and 1", raw_above=self.raw_above)
        if not self.anchor_ratio > 0:
            raise SettingsError("a ratio is above 0", anchor_ratio=self.anchor_ratio)
        if not 1 <= self.blob_bytes <= 512 << 20:
            raise SettingsError("not between 1 byte and 512 MiB", blob_bytes=self.blob_bytes)


@dataclass
class Costs:
    """What one call has cost so far."""

    started: float = field(default_factory=time.perf_counter)
    n_changed: int = 0
    payload_bytes: int = 0
    diff_s: float = 0.0
    upload_s: float = 0.0


@dataclass
class Commit:
    """A record on its way; a delta's blobs are kept to move the shadow by the very bytes sent."""

    kind: Literal["delta", "anchor"]
    target: Version
    base: Version | None = None
    reference: Reference | None = None
    schema: BlobRef | None = None
    refs: list[BlobRef] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
