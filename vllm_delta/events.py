"""What happened, as frozen values. The core emits them to hooks; logs and metrics are adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta.format import Version


@dataclass(frozen=True)
class Claimed:
    """A trainer claimed the channel by a fence; `resumed` when it goes on from the tail."""

    channel: str
    epoch: int
    seq: int
    resumed: bool


@dataclass(frozen=True)
class Published:
    """A record was committed, and what it cost.

    Attributes:
        kind: "delta" or "anchor"; "merged" for a delta over several versions, which brings none
            of its own.
        n_weights: elements in the checkpoint; n_changed: elements whose bits changed.
        model_bytes: bytes of the checkpoint.
        payload_bytes: all bytes written for the version, manifest included.
        diff_s, encode_s, upload_s: seconds of each part; seconds: of the whole call.
    """

    version: Version
    seq: int
    kind: str
    n_weights: int
    n_changed: int
    model_bytes: int
    payload_bytes: int
    diff_s: float
    encode_s: float
    upload_s: float
    seconds: float

    @property
    def changed_percent(self) -> float:
        return 100.0 * self.n_changed / max(self.n_weights, 1)

    @property
    def payload_percent(self) -> float:
        return 100.0 * self.payload_bytes / max(self.model_bytes, 1)


@dataclass(frozen=True)
class Fetched:
    """A version's blobs were fetched and verified."""

    version: Version
    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class Collected:
    """Objects that no record needs any more were deleted; None: some are of unknown size."""

    n_objects: int
    n_bytes: int | None


@dataclass(frozen=True)
class Clashed:
    """Another trainer of that epoch was met where record `seq` is ours, or was.

    Only in a store that cannot write if absent. One of a higher epoch has claimed the channel; one
    of a lower has not seen yet that it must stop, and may have overwritten a record.
    """

    seq: int
    epoch: int


@dataclass(frozen=True)
class Failed:
    """An operation ended in an error and lost nothing.

    The operation "collect" goes on by itself later; whoever called `publish` is not told.
    """

    operation: str
    error: Exception


Event = Claimed | Published | Fetched | Collected | Clashed | Failed
Hook = Callable[[Event], None]


def emit(hooks: Iterable[Hook], event: Event) -> None:
    """Call every hook with the event, in order. A hook that raises stops the caller: hooks are
    the caller's own code."""
    for hook in hooks:
        hook(event)
