"""What a publisher goes by, and what it has in hand while a record is on its way."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from vllm_delta.codec import Codec
from vllm_delta.errors import SettingsError
from vllm_delta.events import Published
from vllm_delta.format import MAX_BLOBS, BlobRef, Reference, Schema, Version

if TYPE_CHECKING:
    from vllm_delta.merge import Segment

_RAW_ABOVE: dict[Codec, float] = {"gap": 0.30, "hazard": 0.75}
_MOST_THREADS = 8
_LARGEST_BLOB_BYTES = 512 << 20
_LARGEST_STRIDE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """How a publisher codes, when it writes anchors and merged deltas, and what it keeps.

    Attributes:
        codec: of deltas. "hazard" takes fewer bytes; to read it, the weights it was made for
            must be at hand.
        shards: for "hazard", parts into which readers split a tensor's rows or columns (the
            largest tensor parallelism among them), so that each decodes little beside its own.
        raw_above: share of a tensor's elements, 0 to 1; with more changed it is replaced whole.
            None: 0.30 for "gap", 0.75 for "hazard".
        strides: for readers that lag; where a version's number is a multiple of one, what led
            there over so many versions is published as one merged delta too, if that pays.
            Ascending, each a multiple of the one before. None are made without strides.
        anchor_ratio: an anchor is due once the cheapest deltas from the newest one, single or
            merged, hold more than this many times its bytes. An anchor by reference counts as the
            model's bytes.
        anchor_every_s: an anchor is due too once the newest one is that old and there are deltas
            since. None: age makes none due.
        retain_s: what was published within so many seconds stays, and the newest anchor before
            it, so that readers that were away for as long come back by deltas. What is older goes.
            `math.inf`: all stays.
        grace_s: objects that no record needs stay so much longer; must exceed what the slowest
            reader takes to fetch a version, or an anchor.
        quota_bytes: the blobs that are kept never hold more than this. Where they would, readers
            away for less than `retain_s` find an anchor instead, and where one and the new version
            do not fit, publishing fails. Beside it the store needs room for what waits for
            `grace_s`. None: no limit.
        blob_bytes: size at which a new blob is begun; larger for models that would take more
            blobs than a version may have.
        n_threads: None: one for each core that this process may use, at most 8.
    """

    codec: Codec = "gap"
    shards: int = 1
    raw_above: float | None = None
    strides: tuple[int, ...] = (4, 16)
    anchor_ratio: float = 1.0
    anchor_every_s: float | None = 43_200.0
    retain_s: float = 86_400.0
    grace_s: float = 3600.0
    quota_bytes: int | None = None
    blob_bytes: int = 64 << 20
    n_threads: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in get_args(Codec):
            raise SettingsError("not a codec", codec=self.codec, known=list(get_args(Codec)))
        if not 1 <= self.shards <= 1024:
            raise SettingsError("not between 1 and 1024", shards=self.shards)
        if not 0 <= self.replaced_above <= 1:
            raise SettingsError("a share is between 0 and 1", raw_above=self.raw_above)
        if not _are_strides(self.strides):
            raise SettingsError(
                "strides ascend from 2, each a multiple of the one before",
                strides=list(self.strides),
            )
        if not self.anchor_ratio > 0:
            raise SettingsError("a ratio is above 0", anchor_ratio=self.anchor_ratio)
        if self.anchor_every_s is not None and not self.anchor_every_s > 0:
            raise SettingsError("seconds above 0, or None", anchor_every_s=self.anchor_every_s)
        if not self.retain_s >= 0:
            raise SettingsError("seconds from 0 on", retain_s=self.retain_s)
        if not self.grace_s >= 0:
            raise SettingsError("seconds from 0 on", grace_s=self.grace_s)
        if self.quota_bytes is not None and not self.quota_bytes > 0:
            raise SettingsError("bytes above 0, or None", quota_bytes=self.quota_bytes)
        if not 1 <= self.blob_bytes <= _LARGEST_BLOB_BYTES:
            raise SettingsError("not between 1 byte and 512 MiB", blob_bytes=self.blob_bytes)
        if self.n_threads is not None and not 1 <= self.n_threads <= 1024:
            raise SettingsError("not between 1 and 1024", n_threads=self.n_threads)

    def for_model(self, n_bytes: int) -> PublisherSettings:
        """The settings with blobs so large that an anchor of so many bytes takes few enough."""
        least = min(-(-2 * n_bytes // MAX_BLOBS), _LARGEST_BLOB_BYTES)
        return self if self.blob_bytes >= least else replace(self, blob_bytes=least)

    @property
    def replaced_above(self) -> float:
        """Share of a tensor's elements above which it is replaced whole."""
        return _RAW_ABOVE[self.codec] if self.raw_above is None else self.raw_above

    @property
    def threads(self) -> int:
        """How many threads to encode and decode with."""
        return usable_threads() if self.n_threads is None else self.n_threads


def usable_threads() -> int:
    """Cores that this process may use, at most 8."""
    if not hasattr(os, "sched_getaffinity"):  # not on every system
        return min(os.cpu_count() or 1, _MOST_THREADS)
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def _are_strides(strides: Sequence[int]) -> bool:
    pairs = zip((1, *strides), strides, strict=False)
    return all(
        before < stride <= _LARGEST_STRIDE and stride % before == 0 for before, stride in pairs
    )


@dataclass
class Costs:
    """What one call has cost so far."""

    started: float = field(default_factory=time.perf_counter)
    n_changed: int = 0
    payload_bytes: int = 0
    diff_s: float = 0.0
    upload_s: float = 0.0

    def published(self, kind: str, version: Version, seq: int, schema: Schema) -> Published:
        """What was published at these costs; the call ends here."""
        seconds = time.perf_counter() - self.started
        return Published(
            version=version,
            seq=seq,
            kind=kind,
            n_weights=schema.n_weights,
            n_changed=self.n_changed,
            model_bytes=schema.n_bytes,
            payload_bytes=self.payload_bytes,
            diff_s=self.diff_s,
            encode_s=seconds - self.diff_s - self.upload_s,
            upload_s=self.upload_s,
            seconds=seconds,
        )


@dataclass
class Commit:
    """A record on its way.

    Attributes:
        blobs: a delta's, kept to move the shadow by the very bytes sent.
        merged: what a merged delta does, for the history.
        low: the low-water mark to come with it; None: as it is due.
    """

    kind: Literal["delta", "merged", "anchor"]
    target: Version
    base: Version | None = None
    reference: Reference | None = None
    schema: BlobRef | None = None
    refs: list[BlobRef] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    merged: Segment | None = None
    low: int | None = None
