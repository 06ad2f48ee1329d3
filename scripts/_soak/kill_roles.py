"""What the processes do that are killed: one publishes, the others follow.

Each tells, line by line of JSON, what it is about to do (so that it can be killed in the midst of
it) and what has become true.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts._soak.kill_truth import Steps, digest_of, root_of
from vllm_delta import merge
from vllm_delta.channel import LogReader, Record, Store, open_channel
from vllm_delta.channel.cache import BlobCache
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.errors import ChainError, ChannelError, DeltaError
from vllm_delta.events import Collected, Event, Published
from vllm_delta.format import BlobRef, Manifest, Version
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.replay import Replica, replay
from vllm_delta.subscriber import Subscriber

CACHE_BYTES = 1 << 20
RETAIN_S, GRACE_S = 0.5, 0.3
_LONGEST_STEP_S = 0.02
_LOOK_S = 0.005
_PATIENCE_S = 20.0


class Line:
    """The line to the parent."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def tell(self, **facts: Any) -> None:
        self._line.sendall(json.dumps(facts).encode() + b"\n")

    def asked(self, wait_s: float) -> bool:
        """Whether the parent has said something; waits so long for it."""
        return bool(select.select([self._line], [], [], wait_s)[0])


class TellingStore(Store):
    """Tells each call before it is made."""

    def __init__(self, store: Store, line: Line) -> None:
        self.store = store
        self._line = line

    def _tell(self, call: str) -> None:
        self._line.tell(phase=call)

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def atomic(self) -> bool:
        return self.store.atomic

    def put(self, key: str, data: bytes) -> None:
        self._tell("put")
        self.store.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        self._tell("put_new")
        return self.store.put_new(key, data)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        self._tell("put_many")
        self.store.put_many(objects)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        self._tell("get")
        return self.store.get(key, max_bytes=max_bytes)

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        self._tell("stream")
        return self.store.stream(key, max_bytes=max_bytes, start=start)

    def delete(self, keys: Iterable[str]) -> None:
        self._tell("delete")
        self.store.delete(keys)

    def list(self, prefix: str) -> list[str]:
        self._tell("list")
        return self.store.list(prefix)


class TellingRatchet(Ratchet):
    """Tells when it is about to move."""

    line: Line

    def advance(self, records: Iterable[Record]) -> None:
        self.line.tell(phase="ratchet")
        super().advance(records)


class TellingCache(BlobCache):
    """Tells when it is about to be asked."""

    line: Line

    def fetch(self, ref: BlobRef, load: Callable[[], Any]) -> Any:
        self.line.tell(phase="cache")
        return super().fetch(ref, load)


def trainer(line: socket.socket, *, url: str, seed: int, step: int, life: int) -> None:
    """Publish step after step, from this one on, until the parent says something."""
    talk, draw, steps = Line(line), random.Random(f"{seed} life {life}"), Steps(seed)
    tensors = steps.at(step)
    settings = PublisherSettings(
        codec=draw.choice(("gap", "hazard")),
        shards=draw.choice((1, 2)),
        strides=(2, 8),
        anchor_ratio=2.0,
        retain_s=RETAIN_S,
        grace_s=GRACE_S,
        blob_bytes=draw.choice((600, 1 << 20)),
        n_threads=1,
    )

    def hook(event: Event) -> None:
        if isinstance(event, Published) and event.kind != "none":
            version = event.version
            talk.tell(ack=[event.seq, version.number, version.root, event.kind], step=step)
        elif isinstance(event, Collected):
            talk.tell(collected=event.n_objects)

    talk.tell(step=step)
    store = TellingStore(open_channel(url), talk)
    publisher = Publisher(store, tensors, settings=settings, hooks=[hook])
    while not talk.asked(draw.uniform(0, _LONGEST_STEP_S)):
        step += 1
        talk.tell(step=step)
        for name, tensor in steps.at(step).items():
            tensors[name].copy_(tensor)
        publisher.publish()
        talk.tell(phase="published")
    talk.tell(final=[publisher.version.number, publisher.version.root], step=step)


def reader(line: socket.socket, *, url: str, folder: str, name: str) -> None:
    """Follow the channel, until the parent says up to where.

    What was shown last stands in a file. A new process builds those weights up through the
    channel, where it still holds them, else newer ones.
    """
    talk, here = Line(line), Path(folder)
    follower = Follower(url, here, talk)
    note = here / f"{name}.json"
    before: list[Any] = json.loads(note.read_bytes()) if note.exists() else [-1, ""]
    goal: list[Any] | None = None
    while True:
        if goal is None and talk.asked(_LOOK_S):
            goal = json.loads(line.recv(1 << 12))
        for shown, replica in follower.go(before):
            now = [shown.number, root_of(replica.schema, replica.bits)]
            before[:] = now
            talk.tell(phase="save")
            temporary = note.with_suffix(".tmp")
            temporary.write_text(json.dumps(now))
            os.replace(temporary, note)
            # Only now: what comes after this process must not fall behind what it has shown.
            talk.tell(shown=now, from_note=follower.resumed)
        if goal is not None and before == goal:
            talk.tell(final=follower.digest)
            return


class Follower:
    """A reader's way through a channel. What went wrong is tried again, for a while."""

    def __init__(self, url: str, folder: Path, line: Line) -> None:
        store = TellingStore(open_channel(url), line)
        cache = TellingCache(folder / "cache", quota_bytes=CACHE_BYTES)
        ratchet = TellingRatchet(folder / "ratchet", url)
        cache.line = ratchet.line = line
        self._line = line
        self._subscriber = Subscriber(store, ratchet=ratchet)
        # As an engine's ranks do: records by a subscriber, blobs through the machine's cache.
        self._subscriber._log = LogReader(store, cache=cache)
        self._held: Version | None = None
        self._replica: Replica | None = None
        self._failing_since: float | None = None
        self.resumed = False

    @property
    def digest(self) -> str:
        """Of the bits that it holds."""
        return "" if self._replica is None else digest_of(self._replica.bits)

    def go(self, before: list[Any]) -> Iterator[tuple[Version, Replica]]:
        """Each version on the way to the newest one, with its weights.

        Args:
            before: number and root of what an earlier process showed last.
        """
        try:
            yield from self._go(before)
            self._failing_since = None
        except DeltaError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > _PATIENCE_S:
                raise
            self._line.tell(error=type(error).__name__)
            if not isinstance(error, ChannelError):
                self._held = self._replica = None  # by an anchor, then

    def _go(self, before: list[Any]) -> Iterator[tuple[Version, Replica]]:
        subscriber = self._subscriber
        subscriber.refresh()
        newest = subscriber.newest
        if newest is None or newest == self._held:
            return
        if newest.number < before[0]:
            raise ChainError("the channel went back", before=before, newest=str(newest))
        number = None
        if self._held is None and (found := subscriber.find(before[1])) is not None:
            number = found.number
        self.resumed = number is not None
        for manifest in subscriber.plan(self._held, number=number):
            self._replica = self._applied(manifest)
            self._held = manifest.target
            assert self._held is not None
            if self._held.number >= before[0]:
                yield self._held, self._replica

    def _applied(self, manifest: Manifest) -> Replica:
        subscriber, before = self._subscriber, self._replica
        if manifest.kind == "anchor":
            *_, (_, replica) = replay(subscriber.schema, [manifest], subscriber.changes)
            return replica
        assert before is not None
        bits = [one.copy() for one in before.bits]
        replica = Replica(subscriber.schema, list(before.fingerprints), bits)
        for change in subscriber.changes(manifest, replica.lanes(1)):
            replica.apply(change)
        return replica


def warm_up(folder: Path) -> None:
    """Compile everything once, so that no forked process has to."""
    merge.LEAST_SAVED_BYTES = 0
    for codec in ("gap", "hazard"):
        steps, url = Steps(0), str(folder / codec)
        tensors = steps.at(0)
        settings = PublisherSettings(codec=codec, strides=(2,), shards=2, n_threads=1)
        with Publisher(url, tensors, settings=settings) as publisher:
            for step in range(1, 7):
                for name, tensor in steps.at(step).items():
                    tensors[name].copy_(tensor)
                publisher.publish()
            publisher.anchor()
        subscriber = Subscriber(url)
        subscriber.refresh()
        path = [manifest for manifest in subscriber.history() if manifest.kind != "fence"]
        for _, replica in replay(subscriber.schema, path, subscriber.changes):
            root_of(replica.schema, replica.bits)


ROLES: dict[str, Callable[..., None]] = {"trainer": trainer, "reader": reader}
