"""What must be true after a kill: of the channel, of what was acknowledged, of what was shown."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts._soak.kill_truth import Steps, digest_of
from vllm_delta.channel import LogReader, Record, Store
from vllm_delta.channel.collect import blobs_of
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.errors import DeltaError
from vllm_delta.format import manifest_key


class Judge:
    """Holds all that processes have told against what the channel holds.

    Attributes:
        told: the step that a trainer has begun with last.
        acknowledged: how many records, by kind.
        n_shown: how many versions.
    """

    def __init__(self, seed: int, url: str, store: Store, folder: Path) -> None:
        self.told = 0
        self.acknowledged: Counter[str] = Counter()
        self.n_shown = 0
        self._steps = Steps(seed)
        self._roots: set[str] = set()
        self._known = self._most = -1
        self._unproven: list[tuple[int, str]] = []
        self._url = url
        self._store = store
        self._reader = LogReader(store)
        self._folder = folder
        self._records: list[Record] = []
        self._acknowledged: list[tuple[list[Any], int]] = []
        self._shown: list[tuple[str, list[Any]]] = []
        self._last: dict[str, int] = {}
        self._problems: list[str] = []

    def heard(self, who: str, facts: dict[str, Any]) -> None:
        """Take in a line that a process told."""
        if "step" in facts:
            self.told = facts["step"]
            self._most = max(self._most, self.told)
        if "ack" in facts:
            self.acknowledged[facts["ack"][3]] += 1
            self._acknowledged.append((facts["ack"], facts["step"]))
        if "shown" in facts:
            self.n_shown += 1
            self._shown.append((who, facts["shown"]))
            number = facts["shown"][0]
            if number < self._last.get(who, -1):
                self._problems.append(f"{who} went back from {self._last[who]} to {number}")
            self._last[who] = number
        if "failed" in facts:
            self._problems.append(f"{who} ended by itself: {facts['failed']}")

    def check(self, *, alone: bool) -> Iterator[str]:
        """What is wrong now.

        Args:
            alone: no trainer lives, so that the channel stands still.
        """
        yield from self._problems
        self._problems.clear()
        try:
            seen = self._seen()  # before the channel is read, which may go on meanwhile
            yield from self._check_chain()
            if len(self._records) < seen:
                yield f"the ratchet is at record {seen}, ahead of the channel"
            if alone:  # and all that trainers have told has been heard
                yield from self._check_weights()
                yield from self._check_objects()
            yield from self._check_cache()
        except DeltaError as error:
            yield f"the channel or the ratchet cannot be read: {error}"
        yield from self._check_told()

    def check_whole(self) -> Iterator[str]:
        """The chain once more from its beginning: no record may have changed meanwhile."""
        before, self._records = self._records, []
        yield from self._check_chain()
        yield from self._check_weights()
        if [r.envelope for r in self._records[: len(before)]] != [r.envelope for r in before]:
            yield "a record is not what it was"

    def digest(self, step: int) -> str:
        """Of the bits of a step's weights."""
        return digest_of(self._steps.bits(step))

    def _check_chain(self) -> Iterator[str]:
        tail = self._reader.tail()
        n = len(self._records)
        if tail is None or tail.seq < n:
            if n:
                yield f"the log ends at {tail and tail.seq}, but went to {n}"
            return
        previous = self._records[-1] if self._records else None
        if previous is not None and self._reader.read(n) != previous:
            yield f"record {n} is not what it was"
        for record in self._reader.read_chain(n + 1, tail.seq, previous=previous):
            self._records.append(record)
            if (target := record.manifest.target) is not None:
                self._unproven.append((record.seq, target.root))

    def _check_weights(self) -> Iterator[str]:
        while self._known < self._most:
            self._known += 1
            self._roots.add(self._steps.root(self._known))
        for seq, root in self._unproven:
            if root not in self._roots:
                yield f"record {seq} names weights that no trainer had"
        self._unproven.clear()

    def _check_objects(self) -> Iterator[str]:
        """What records from the low-water mark on name is there, and nothing is there in part."""
        if not self._records:
            return
        low = self._records[-1].manifest.low
        needed = {key for record in self._records[low - 1 :] for key in blobs_of(record.manifest)}
        there = set(self._store.list("b/"))
        for key in needed - there:
            yield f"{key}, which a record names, is missing"
        for key in there:
            data = self._store.get(key, max_bytes=1 << 24)
            if data is None or hashlib.sha256(data).hexdigest() != key[2:]:
                yield f"{key} is there in part"
        last = len(self._records)
        later = [key for key in self._store.list("m/") if key > manifest_key(last)]
        if later:
            yield f"records beyond the newest: {later}"

    def _seen(self) -> int:
        """How far the readers' ratchet is, as a reader would find it now."""
        marks = Ratchet(self._folder / "ratchet", self._url).seen().marks
        return max((mark.seq for mark in marks.values()), default=0)

    def _check_cache(self) -> Iterator[str]:
        for path in (self._folder / "cache").glob("*.blob"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue  # another one took its place
            if hashlib.sha256(data).hexdigest() != path.stem:
                yield f"{path.name} is in the cache in part"

    def _check_told(self) -> Iterator[str]:
        for (seq, number, root, kind), step in self._acknowledged:
            record = self._records[seq - 1] if seq <= len(self._records) else None
            target = record and record.manifest.target
            if not target or (target.number, target.root) != (number, root):
                yield f"version {number} is lost, which was acknowledged as record {seq}"
            elif record is not None and record.manifest.kind != kind:
                yield f"record {seq} is no {kind}, as was acknowledged"
            elif self._steps.root(step) != root:
                yield f"version {number} does not have the weights of step {step}"
        self._acknowledged.clear()
        published = {
            (target.number, target.root)
            for record in self._records
            if (target := record.manifest.target) is not None
        }
        for who, (number, root) in self._shown:
            if (number, root) not in published:
                yield f"{who} showed version {number} with a root that was never published"
        self._shown.clear()
