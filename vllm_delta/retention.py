"""What stays on a channel: when an anchor is due, how far back blobs are kept, what is deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta.channel import Log
from vllm_delta.channel.collect import BROKEN, Collector, blobs_of, read_back
from vllm_delta.channel.reader import SALT_BYTES
from vllm_delta.channel.sealing import sealed_bytes
from vllm_delta.commit import PublisherSettings
from vllm_delta.errors import ChannelFullError, DeltaError
from vllm_delta.events import Collected, Failed, Hook, emit
from vllm_delta.format import Manifest, blob_key

_PAUSE_S = 600.0
"""After an error, before collecting is tried again: each try may cost a publish a time-out."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record from the low-water mark on.

    Attributes:
        at: when it was written, by a clock that begins at the first one known and never goes back.
        blobs: keys of its objects, and their bytes.
    """

    seq: int
    is_anchor: bool
    at: float
    blobs: dict[str, int]


class Retention:
    """Decides, for a channel's owner, when an anchor is due and what may go, and deletes it.

    Knows every record from the low-water mark on: those that stood when the channel was claimed
    (`load`) and its own (`take`). Belongs to the thread that commits; `load` and `collect` block on
    the store.

    Ages are of the manifests' times added up, a step back counting as none: so where a clock is
    set back everything merely becomes due later by that much, and where it jumps ahead one anchor
    comes early and the low-water mark rises early, once.

    Args:
        log: the owner's, which has claimed the channel.
        model_bytes: what an anchor by reference counts.
        clock: gives the manifests' times; timer: seconds that only go forward.
        hooks: are told what was collected, and what went wrong with it.

    Attributes:
        anchor_bytes: what the newest anchor counts.
    """

    def __init__(
        self,
        log: Log,
        settings: PublisherSettings,
        *,
        model_bytes: int,
        clock: Callable[[], float],
        timer: Callable[[], float],
        hooks: Iterable[Hook],
    ) -> None:
        self._log = log
        self._settings = settings
        self._model_bytes = model_bytes
        self._clock = clock
        self._timer = timer
        self._hooks = tuple(hooks)
        self._collector = Collector(log, grace_s=settings.grace_s, timer=timer)
        self._look_due = True
        self._not_before: float | None = None
        self._sizes: dict[str, int] = {}
        self._kept: list[_Kept] = []
        self._newest: Manifest | None = None
        self._at = 0.0
        self._low = 1
        self.anchor_bytes = 0
        self._costs: dict[int, int] = {}

    def load(self) -> None:
        """Read back what stands from the low-water mark on, as far as it can be read."""
        position = self._log.position
        assert position is not None
        records = [position]
        with contextlib.suppress(*BROKEN):
            for record in read_back(self._log, position, position.manifest.low):
                records.append(record)
        for record in reversed(records):
            self.take(record.manifest)

    def take(self, manifest: Manifest) -> None:
        """Count the newest record, the successor of the one taken before."""
        if self._newest is not None:
            self._at += max(0.0, manifest.time - self._newest.time)
        self._newest = manifest
        is_anchor = manifest.kind == "anchor"
        self._kept.append(_Kept(manifest.seq, is_anchor, self._at, blobs_of(manifest)))
        self._count(manifest)
        self._look_due |= is_anchor
        if manifest.low > self._low:
            self._rise(manifest.low)

    @property
    def leads_here(self) -> bool:
        """Whether a newcomer can read its way from the newest anchor to the newest record."""
        # What is known is a verified chain without gaps that ends in the newest record.
        return self._anchor is not None and self._anchor.seq == self._manifest.anchor

    @property
    def catch_up_bytes(self) -> int:
        """What a newcomer takes beside the newest anchor: the cheapest deltas, single or merged."""
        target = self._manifest.target
        return 0 if target is None else self._costs.get(target.number, 0)

    def anchor_due(self) -> bool:
        """Whether the way from the newest anchor has become too long, in bytes or in time."""
        catch_up, every_s = self.catch_up_bytes, self._settings.anchor_every_s
        if not catch_up or self._anchor is None:
            return False
        if catch_up > self._settings.anchor_ratio * self.anchor_bytes:
            return True
        return every_s is not None and self._now() - self._anchor.at >= every_s

    def low(self) -> int:
        """The low-water mark for the next record: the newest anchor that is old enough."""
        oldest = self._now() - self._settings.retain_s
        old = (kept.seq for kept in self._kept if kept.is_anchor and kept.at <= oldest)
        return max(old, default=self._low)

    def stored_bytes(self, blobs: Iterable[bytes]) -> int:
        """What blobs take in the store, salt and seal included."""
        salted = (len(blob) + SALT_BYTES for blob in blobs)
        return sum(map(sealed_bytes, salted) if self._log.keys.sealing else salted)

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes more fit while all that is due to stay does."""
        if self._settings.quota_bytes is None:
            return True
        return self._fits(n_bytes + self._held_bytes(self.low()))

    def low_with(self, n_bytes: int) -> int | None:
        """The lowest mark with which so many bytes more fit; None: no anchor there is high enough.

        Not below `low()`, and that where there is no quota.
        """
        low = self.low()
        anchors = [kept.seq for kept in self._kept if kept.is_anchor and kept.seq > low]
        for mark in (low, *anchors):
            if self._fits(n_bytes + self._held_bytes(mark)):
                return mark
        return None

    def demand(self, n_bytes: int) -> None:
        """Raise ChannelFullError unless so many bytes fit into the quota by themselves."""
        if not self._fits(n_bytes):
            raise ChannelFullError(
                "the quota has no room for the version and an anchor to read it from",
                needed_bytes=n_bytes,
                quota_bytes=self._settings.quota_bytes,
                held_bytes=self._held_bytes(self._low),
            )

    def collect(self) -> None:
        """Delete what is no longer needed, if anything is due. An error is told to the hooks only.

        To be called between commits.
        """
        paused = self._not_before is not None and self._timer() < self._not_before
        if paused or not self._is_whole or self._log.in_doubt is not None:
            return
        n_objects, n_bytes, is_known = 0, 0, True
        try:
            if self._look_due:
                self._collector.look(self._names())
                self._look_due = False
            if not self._collector.due:
                return
            for batch in self._collector.sweep(self._names()):
                n_objects += len(batch)
                sizes = [self._sizes.pop(key, None) for key in batch]
                known = [size for size in sizes if size is not None]
                n_bytes += sum(known)
                is_known &= len(known) == len(sizes)
        except DeltaError as error:
            self._not_before = self._timer() + _PAUSE_S
            emit(self._hooks, Failed("collect", error))
        finally:
            if n_objects:
                emit(self._hooks, Collected(n_objects, n_bytes if is_known else None))

    @property
    def _manifest(self) -> Manifest:
        assert self._newest is not None
        return self._newest

    @property
    def _anchor(self) -> _Kept | None:
        return next((kept for kept in reversed(self._kept) if kept.is_anchor), None)

    @property
    def _is_whole(self) -> bool:
        """Whether every record from the low-water mark on is known."""
        return self._kept[0].seq <= self._low

    def _now(self) -> float:
        return self._at + max(0.0, self._clock() - self._manifest.time)

    def _count(self, manifest: Manifest) -> None:
        """Keep account of the fewest bytes from the newest anchor to each version since."""
        if manifest.kind == "fence" or manifest.target is None:
            return
        number, n_bytes = manifest.target.number, manifest.payload_bytes
        if manifest.kind == "anchor":
            self.anchor_bytes = n_bytes if manifest.reference is None else self._model_bytes
            self._costs = {number: 0}
        elif manifest.base is not None and manifest.base.number in self._costs:
            n_bytes += self._costs[manifest.base.number]
            self._costs[number] = min(n_bytes, self._costs.get(number, n_bytes))

    def _rise(self, low: int) -> None:
        self._low = low
        for kept in self._kept:
            if kept.seq < low:
                self._sizes |= kept.blobs
        self._kept = [kept for kept in self._kept if kept.seq >= low]
        self._look_due = True

    def _names(self) -> set[str]:
        """Keys of all objects that records from the low-water mark on name."""
        names = {key for kept in self._kept for key in kept.blobs}
        schema = self._manifest.schema
        return names if schema is None else names | {blob_key(schema.sha256)}

    def _held_bytes(self, low: int) -> int:
        return sum(sum(kept.blobs.values()) for kept in self._kept if kept.seq >= low)

    def _fits(self, n_bytes: int) -> bool:
        quota_bytes = self._settings.quota_bytes
        return quota_bytes is None or n_bytes <= quota_bytes
