"""Publishing a trainer's weights: versions as exact deltas against what was published before."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch

from vllm_delta.channel import NO_KEYS, Keys, Log, Record, Store, open_channel
from vllm_delta.channel.collect import BROKEN
from vllm_delta.channel.contest import Rival
from vllm_delta.codec import Change
from vllm_delta.coding import Coder
from vllm_delta.commit import Commit, Costs, PublisherSettings
from vllm_delta.errors import DeltaError, FencedError, SettingsError
from vllm_delta.events import Claimed, Clashed, Failed, Hook, Published, emit
from vllm_delta.fingerprint import root
from vllm_delta.format import MAX_BLOBS, Manifest, Reference, Version, parse_schema
from vllm_delta.merge import History, Segment
from vllm_delta.retention import Retention
from vllm_delta.shadow import Shadow
from vllm_delta.weights import Model, ModelWeights, mismatch

__all__ = ["Published", "Publisher", "PublisherSettings"]

_HISTORY_SHARE = 0.5
"""Of an anchor's bytes: with more deltas kept for merging, an anchor is the better way for most."""


_BATCH_BYTES = 128 << 20
"""Blobs are written together until they hold so many."""


class Publisher:
    """Publishes a model's weights to a channel, whose only writer it becomes.

    The constructor claims the channel; another publisher on it fails at its next commit and stays
    stopped. On an empty channel it publishes version 0 as an anchor. On a channel whose newest
    version is bit for bit the model's, it goes on from there, by an anchor first where the log is
    damaged and a new reader could not get there. Any other weights of the same names, types and
    shapes (an older checkpoint, say) begin anew with an anchor of the next number.

    Extra memory: the published bits on the CPU (the shadow), one tensor, the payload of the
    version being published, and, for merged deltas, those of up to the largest stride's versions:
    at most half an anchor's bytes; beyond that merging begins anew. Blocking; not thread-safe: the
    weights must not change during a call.

    Args:
        channel: a directory or URL, or an open store.
        model: a module, tensors by checkpoint name, or a function that returns them. Tensors are
            read anew at each `publish`. Of the names of one memory (tied weights), one is kept:
            the one that transformers' checkpoints keep, else the first.
        dtype: the checkpoint's type where the model holds masters; see `ModelWeights`.
        reference: the public checkpoint that the model is at the start of the channel: version 0
            then holds fingerprints only.
        keys: sign what is published, and seal it; see `docs/operations.md`.
        hooks: called with every event, on the caller's thread.
        clock: seconds since the epoch, for manifests, and for what is due by them.
        timer: seconds that only go forward, for how long objects have been left.

    Raises:
        ModelMismatchError: the channel is another model's; it is left as it was.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        model: Model,
        *,
        dtype: torch.dtype | None = None,
        reference: Reference | None = None,
        settings: PublisherSettings | None = None,
        keys: Keys = NO_KEYS,
        hooks: Iterable[Hook] = (),
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or PublisherSettings()
        self._hooks = tuple(hooks)
        store = open_channel(channel) if isinstance(channel, (str, Path)) else channel
        self._log = Log(store, keys=keys, clock=clock)
        self._writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._weights = ModelWeights(model, dtype)
        self.schema = self._weights.schema
        self._settings = self._settings.for_model(self.schema.n_bytes)
        tail = self._log.tail()
        if tail is not None:
            self._check_schema(tail.manifest)
        self._shadow = Shadow(self.schema, self._weights.read())
        self._coder = Coder(self._shadow, self._settings)
        self._state: Literal["open", "closed", "torn"] = "open"
        self._fenced: FencedError | None = None
        self._rival: Rival | None = None
        self._pending: Commit | None = None
        self._retention = Retention(
            self._log,
            self._settings,
            model_bytes=self.schema.n_bytes,
            clock=clock,
            timer=timer,
            hooks=self._hooks,
        )
        self._history = History(self._settings.strides)
        self._start(reference)

    @property
    def version(self) -> Version:
        """The newest version this publisher knows to be on the channel."""
        return self._version

    def publish(self) -> Published:
        """Publish every change since the version on the channel.

        Nothing changed: nothing is written, and the result, of kind "none", names the version that
        stands, at no payload. After an error the channel holds either the version before or the
        whole new one; the next call finds out which, and publishes everything since.

        Where one is due, a merged delta and an anchor follow the delta, as records of their own.
        Then what no reader needs any more is deleted; where that fails, the event `Failed` of the
        operation "collect" says so, and nothing else.

        Raises:
            FencedError: another publisher owns the channel. Final.
            ModelMismatchError: a tensor came, went or changed its shape or type.
            ChannelError, ChannelFullError: the store did not take it.
            ChannelFullError: or it does not fit into `quota_bytes`; of what does not fit nothing
                is written.
            ChainError: our newest record has gone from the store (a restored copy, say), or was
                overwritten; nothing is written. Make a new publisher.
        """
        with self._reporting("publish"):
            self._settle()
            published = self._publish_delta()
            if published.kind == "delta":
                for window in self._history.due():
                    self._publish_merged(window)
            if self._retention.anchor_due():
                self._publish_anchor(self._version, None)
        self._retention.collect()
        return published

    def anchor(self) -> Published:
        """Publish the version that stands as a whole, for readers that come later."""
        with self._reporting("anchor"):
            self._settle()
            published = self._publish_anchor(self._version, None)
        self._retention.collect()
        return published

    def close(self) -> None:
        """Give up the shadow's memory. The channel can be claimed again at any time."""
        if self._state == "open":
            self._state = "closed"
        self._shadow.bits.clear()
        self._history.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, reference: Reference | None) -> None:
        fence = self._log.claim(self._writer)
        self._check_schema(fence)
        self._retention.load()
        standing = fence.target
        resumed = standing is not None and standing.root == self._shadow.root
        emit(self._hooks, Claimed(fence.channel, fence.epoch, fence.seq, resumed))
        self._tell_of_rivals()
        if standing is None:
            self._publish_anchor(self._shadow.version(0), reference)
        elif not resumed:
            target = self._shadow.version(standing.number + 1)
            self._publish_anchor(target, self._original(reference, target))
        else:
            self._version = standing
            if not self._retention.leads_here:
                self._publish_anchor(standing, self._original(reference, standing))

    def _check_schema(self, manifest: Manifest) -> None:
        if manifest.schema is None or manifest.schema.sha256 == self.schema.digest:
            return
        # A sealed schema has another digest than its content.
        theirs = parse_schema(self._log.get_schema(manifest))
        if theirs != self.schema:
            raise mismatch(expected=theirs, actual=self.schema)

    def _original(self, reference: Reference | None, target: Version) -> Reference | None:
        """The reference, when the channel began with it and the weights are those again."""
        try:
            first = None if reference is None else self._log.read(2)
        except BROKEN:
            return None
        if first is None or first.manifest.reference != reference:
            return None
        begun = first.manifest.target
        return reference if begun is not None and begun.root == target.root else None

    def _publish_delta(self) -> Published:
        costs = Costs()
        commit = Commit("delta", self._version, base=self._version)
        prints = list(self._shadow.fingerprints)
        blobs: Iterable[bytes] = self._coder.delta(self._changes(costs, prints))
        if self._settings.quota_bytes is not None and (blobs := list(blobs)):
            commit.low = self._make_room(self._retention.stored_bytes(blobs))
        self._upload(commit, blobs, costs, keep=True)
        if not commit.refs:
            return self._published("none", self._log.position, costs)
        commit.target = Version(self._version.number + 1, root(self.schema, prints))
        return self._published("delta", self._commit(commit, costs), costs)

    def _changes(self, costs: Costs, prints: list[int]) -> Iterator[Change]:
        """Every tensor that differs from the shadow, in schema order."""
        mark = time.perf_counter()
        settings = self._settings
        changes = self._shadow.diffs(
            self._weights.read(), raw_above=settings.replaced_above, n_threads=settings.threads
        )
        for change in changes:
            costs.n_changed += self._shadow.n_different(change)
            prints[change.tensor] = change.target
            costs.diff_s += time.perf_counter() - mark
            yield change
            mark = time.perf_counter()
        costs.diff_s += time.perf_counter() - mark

    def _publish_merged(self, window: Sequence[Segment]) -> None:
        """Publish what deltas up to the version that stands do together, if that pays."""
        costs = Costs()
        merged = self._coder.fold(window, self._version)
        if merged is None:
            return
        blobs = self._coder.merged(merged)
        if not blobs:
            self._history.replace(merged)
            return
        if not self._retention.has_room(self._retention.stored_bytes(blobs)):
            return  # it would save some readers bytes, and cost others their way by deltas
        costs.n_changed = merged.n_changed
        commit = Commit("merged", self._version, base=merged.base, merged=merged)
        self._upload(commit, blobs, costs)
        self._published("merged", self._commit(commit, costs), costs)

    def _publish_anchor(self, target: Version, reference: Reference | None) -> Published:
        costs = Costs()
        commit = Commit("anchor", target, reference=reference)
        if self._settings.quota_bytes is not None:
            commit.low = self._low_with_anchor(reference)
        mark = time.perf_counter()
        written = self._log.put_schema(self.schema.to_bytes())
        costs.payload_bytes += written.n_bytes
        assert self._log.position is not None
        # Where an older key sealed the channel's schema, that one stays.
        commit.schema = self._log.position.manifest.schema or written
        costs.upload_s += time.perf_counter() - mark
        self._upload(commit, self._anchor_blobs(reference), costs)
        return self._published("anchor", self._commit(commit, costs), costs)

    def _anchor_blobs(self, reference: Reference | None) -> Iterator[bytes]:
        return self._coder.anchor() if reference is None else self._coder.reference()

    def _make_room(self, n_bytes: int) -> int:
        """The low-water mark with which a delta fits into the quota, after an anchor if need be."""
        if (low := self._retention.low_with(n_bytes)) is None:
            self._retention.demand(self._stored_anchor_bytes(None) + n_bytes)
            self._publish_anchor(self._version, None)
            low = self._retention.low_with(n_bytes)
        assert low is not None
        return low

    def _low_with_anchor(self, reference: Reference | None) -> int:
        """The low-water mark with which an anchor fits into the quota: at worst its own place."""
        n_bytes = self._stored_anchor_bytes(reference)
        if (low := self._retention.low_with(n_bytes)) is None:
            self._retention.demand(n_bytes)
            assert self._log.position is not None
            low = self._log.position.seq + 1
        return low

    def _stored_anchor_bytes(self, reference: Reference | None) -> int:
        """What an anchor would take, found out by coding it."""
        return self._retention.stored_bytes(self._anchor_blobs(reference))

    def _upload(
        self, commit: Commit, blobs: Iterable[bytes], costs: Costs, *, keep: bool = False
    ) -> None:
        """Write a record's blobs as they come, several at a time."""
        waiting: list[bytes] = []
        for blob in blobs:
            waiting.append(blob)
            if keep:
                commit.blobs.append(blob)
            if sum(map(len, waiting)) >= _BATCH_BYTES:
                self._put(commit, waiting, costs)
                waiting = []
        self._put(commit, waiting, costs)

    def _put(self, commit: Commit, blobs: Sequence[bytes], costs: Costs) -> None:
        if len(commit.refs) + len(blobs) > MAX_BLOBS:
            raise SettingsError(
                "a version takes too many blobs; raise blob_bytes",
                blob_bytes=self._settings.blob_bytes,
                limit=MAX_BLOBS,
            )
        mark = time.perf_counter()
        refs = self._log.put_blobs(blobs, place=len(commit.refs))
        commit.refs += refs
        costs.payload_bytes += sum(ref.n_bytes for ref in refs)
        costs.upload_s += time.perf_counter() - mark

    def _commit(self, commit: Commit, costs: Costs) -> Record:
        mark = time.perf_counter()
        self._pending = commit
        try:
            record = self._log.append(
                commit.kind,
                base=commit.base,
                target=commit.target,
                blobs=commit.refs,
                schema=commit.schema,
                reference=commit.reference,
                low=commit.low or self._retention.low(),
            )
        except BaseException:
            if self._log.in_doubt is None:
                self._pending = None
            raise
        costs.payload_bytes += len(record.envelope)
        costs.upload_s += time.perf_counter() - mark
        self._land(commit, record)
        self._tell_of_rivals()
        return record

    def _land(self, commit: Commit, record: Record) -> None:
        """Move to what has been committed."""
        state, self._state = self._state, "torn"
        if commit.kind == "delta":
            self._advance(commit)
        elif commit.merged is not None:
            self._history.replace(commit.merged)
        self._version = commit.target
        self._retention.take(record.manifest)
        self._pending = None
        self._state = state

    def _advance(self, commit: Commit) -> None:
        """Move the shadow by the blobs sent, and keep them for merged deltas."""
        assert commit.base is not None
        fingerprints = np.array(self._shadow.fingerprints, np.uint64)
        n_changed = 0

        def moving() -> Iterator[Change]:
            nonlocal n_changed
            for change in self._coder.changes(commit.blobs):
                self._shadow.advance([change])
                n_changed += change.nnz
                yield change

        blobs = self._coder.kept(moving(), commit.blobs)
        payload_bytes = sum(map(len, commit.blobs))
        delta = Segment(commit.base, commit.target, fingerprints, blobs, n_changed, payload_bytes)
        self._history.add(delta, at_most_bytes=_HISTORY_SHARE * self._retention.anchor_bytes)

    def _settle(self) -> None:
        """Finish what a failed call left open: its record may stand on the channel, or come."""
        if self._fenced is not None:
            raise FencedError(self._fenced.message, **self._fenced.facts)
        if self._state == "torn" or self._shadow.torn:
            raise DeltaError("interrupted while the shadow moved; make a new publisher")
        if self._state == "closed":
            raise ValueError("the publisher is closed")
        if self._pending is not None and (record := self._log.settle()) is not None:
            self._land(self._pending, record)

    def _published(self, kind: str, record: Record | None, costs: Costs) -> Published:
        seq = 0 if record is None else record.seq
        published = costs.published(kind, self._version, seq, self.schema)
        if kind != "none":
            emit(self._hooks, published)
        return published

    def _tell_of_rivals(self) -> None:
        """Say once of each other trainer that was met at a record of ours."""
        rival = self._log.rival
        if rival is not None and rival != self._rival:
            emit(self._hooks, Clashed(rival.seq, rival.epoch))
        self._rival = rival

    @contextlib.contextmanager
    def _reporting(self, operation: str) -> Iterator[None]:
        try:
            yield
        except DeltaError as error:
            if isinstance(error, FencedError):
                self._fenced = error
            self._tell_of_rivals()
            emit(self._hooks, Failed(operation, error))
            raise
