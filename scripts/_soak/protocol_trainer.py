"""Trainers on a stage: real publishers, which die, are fenced and come back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from scripts._soak.protocol_faults import StagedStore
from scripts._soak.protocol_stage import Stage
from scripts._soak.protocol_truth import Tensors, Truth, copied, move
from vllm_delta.channel import Keys, Store
from vllm_delta.channel.retry import RetryingStore, RetryPolicy
from vllm_delta.errors import ChainError, ChannelError, DeltaError, DigestError, FencedError
from vllm_delta.events import Claimed, Clashed, Collected, Event, Published
from vllm_delta.format import Version
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.testing import SimulatedCrash

_POLICY = RetryPolicy(deadline_s=8.0, first_delay_s=0.2, longest_delay_s=2.0)
_ATTEMPTS = 12
JUMPS_S = (-86_400.0, -3600.0, -30.0, 30.0, 3600.0, 86_400.0)


@dataclass(frozen=True)
class Acknowledged:
    """What a trainer was told is committed."""

    seq: int
    version: Version
    kind: str


class Trainer:
    """Publishes until it has done its steps; a process that dies is followed by another one.

    Args:
        haste: divides how long it waits; in great haste it comes back whenever it was fenced.

    Attributes:
        acknowledged: by all processes; those of the one that lives are from `since` on.
        lost: versions that it was told are lost.
        committed: numbers of the records that the living process was told are committed.
        learnt: whether the living process knows that it is not alone.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        truth: Truth,
        store: Callable[[str], StagedStore],
        tensors: Tensors,
        *,
        settings: PublisherSettings,
        keys: Keys,
        n_steps: int,
        draw: random.Random,
        haste: float = 1.0,
    ) -> None:
        self.name = name
        self.tensors = tensors
        self.publisher: Publisher | None = None
        self.fenced = False
        self.n_steps = n_steps
        self.staged: StagedStore | None = None
        self.acknowledged: list[Acknowledged] = []
        self.since = 0
        self.lost: set[str] = set()
        self.committed: set[int] = set()
        self.learnt = False
        self._stage = stage
        self._truth = truth
        self._store = store
        self._settings = settings
        self._keys = keys
        self._draw = draw
        self._haste = haste
        self._jump_s = 0.0
        self._saved = copied(tensors)
        self._n_lives = 0

    def act(self) -> None:
        """Publish, die and come back."""
        while self.n_steps > 0:
            try:
                self.publish_some()
            except SimulatedCrash:
                self.die()
            except FencedError:
                if self._draw.random() < 0.6 / self._haste:
                    return
                self.die()

    def publish_some(self) -> None:
        """Publish a version for each step that is left."""
        while self.n_steps > 0:
            self._sleep(0.1, 4)
            if self._draw.random() < 0.05:
                self._stage.faults["clock_jump"] += 1
                self._jump_s += self._draw.choice(JUMPS_S)
            if self.publisher is not None:
                move(self.tensors, self._draw)
            self.n_steps -= 1
            if self._draw.random() < 0.1:
                self._saved = copied(self.tensors)
            self.publish(_ATTEMPTS)

    def publish(self, attempts: int = 1) -> bool:
        """Publish the weights, however often it takes; whether it went well at last.

        Raises:
            FencedError, SimulatedCrash: this process is over.
        """
        self._truth.learn(self.tensors)
        for _ in range(attempts):
            try:
                if self.publisher is None:
                    self._begin()
                self.publisher_here.publish()
            except FencedError as error:
                self._fence(error)
                raise
            except ChainError as error:
                # Our part of the log has gone: only a new publisher may go on.
                self._hear(error)
                self.publisher = None
                if self._truth.atomic:
                    self._stage.violate(f"{self.name}: {error}")
            except (ChannelError, DigestError) as error:
                self._hear(error)
                self._sleep(0.1, 10)
                if self._draw.random() < 0.3:  # goes on training meanwhile
                    move(self.tensors, self._draw)
                    self._truth.learn(self.tensors)
            else:
                return True
        return False

    @property
    def publisher_here(self) -> Publisher:
        assert self.publisher is not None
        return self.publisher

    def die(self) -> None:
        """The process is gone; another one has its weights, or those of an earlier checkpoint."""
        self.publisher = None
        self.fenced = self.learnt = False
        self.committed.clear()
        self.since = len(self.acknowledged)
        self._jump_s = 0.0
        if self._draw.random() < 0.3:
            self.tensors = copied(self._saved)
        self._sleep(0, 15)

    def new_store(self) -> Store:
        """The store as a new process sees it."""
        self._n_lives += 1
        self.staged = self._store(f"{self.name}.{self._n_lives}")
        return RetryingStore(
            self.staged,
            _POLICY,
            clock=self._stage.clock,
            sleep=self._stage.sleep,
            random=self._draw,
        )

    def _sleep(self, least_s: float, most_s: float) -> None:
        self._stage.sleep(self._draw.uniform(least_s, most_s) / self._haste)

    def _begin(self) -> None:
        """Make a publisher; one that could not finish leaves nothing behind but its fence."""

        def hook(event: Event) -> None:
            if isinstance(event, Clashed):
                self.learnt = True
            elif isinstance(event, Collected):
                self._stage.faults["collection"] += 1
                self._stage.note(f"{self.name}   collected {event.n_objects}")
            if isinstance(event, (Claimed, Published)):
                self.committed.add(event.seq)
            if not isinstance(event, Published):
                return
            record = self._truth.record(event.seq)
            named = record is not None and record.manifest
            there = named and (named.target, named.kind) == (event.version, event.kind)
            if not there and self._truth.atomic:
                self._stage.violate(f"{self.name}: {event.seq} is acknowledged, not there")
            if self.fenced:
                self._stage.violate(f"{self.name}: committed {event.seq} after it was fenced")
            self.acknowledged.append(Acknowledged(event.seq, event.version, event.kind))

        self.publisher = None
        self.committed.clear()
        self.publisher = Publisher(
            self.new_store(),
            self.tensors,
            settings=self._settings,
            keys=self._keys,
            hooks=(hook,),
            clock=lambda: self._stage.now_s + self._jump_s,
            timer=self._stage.clock,
        )

    @property
    def writer(self) -> str:
        """How the living process signs its records."""
        return "" if self.publisher is None else self.publisher._writer

    def _fence(self, error: FencedError) -> None:
        self._hear(error)
        writer, seq = self.writer, error.facts.get("seq")
        self.fenced = True
        if self._truth.atomic and writer:
            record = self._truth.record(seq) if isinstance(seq, int) else None
            if record is None or record.manifest.writer == writer:
                self._stage.violate(f"{self.name}: fenced at {seq}, where nobody else is")
            self._truth.fenced.add(writer)

    def _hear(self, error: DeltaError) -> None:
        """Whom an error tells of."""
        self._stage.note(f"{self.name}   {error}"[:160])
        if isinstance(error, (FencedError, ChainError)):
            self.learnt = True
        if error.facts.get("lost"):
            self.lost.add(str(error.facts["lost"]))
