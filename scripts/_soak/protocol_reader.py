"""Readers on a stage: real subscribers, and weights that changes are applied to."""

from __future__ import annotations

import random
from collections.abc import Callable

from scripts._soak.protocol_stage import Stage
from scripts._soak.protocol_truth import Truth
from vllm_delta.channel import Keys, Store
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.errors import ChainError, ChannelError, DeltaError, FormatError
from vllm_delta.format import Manifest, Version
from vllm_delta.replay import Replica, replay
from vllm_delta.subscriber import Subscriber


class Reader:
    """Follows the channel as an engine does: verified changes, on weights that are proven.

    Attributes:
        held: the version that its weights are.
        slow: how long it takes between two deltas.
        away: after so many looks it is gone for a while, and comes back as a new process or not.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        truth: Truth,
        store: Callable[[str], Store],
        *,
        keys: Keys,
        draw: random.Random,
        n_looks: int,
        slow: bool = False,
        away: bool = False,
        ratchet: Ratchet | None = None,
    ) -> None:
        self.name = name
        self.held: Version | None = None
        self.replica: Replica | None = None
        self.errors: list[DeltaError] = []
        self._stage = stage
        self._truth = truth
        self._store = store
        self._keys = keys
        self._draw = draw
        self._n_looks = n_looks
        self._slow = slow
        self._away = away
        self.ratchet = ratchet
        self._shunned: set[int] = set()
        self._believed: list[Manifest] = []
        self.restart()

    def act(self) -> None:
        """Look again and again."""
        gone_at = self._draw.randrange(self._n_looks) if self._away else -1
        for look in range(self._n_looks):
            self._stage.sleep(self._draw.uniform(0.1, 3))
            if look == gone_at:
                self._stage.faults["reader_offline"] += 1
                self._stage.sleep(self._draw.uniform(20, 120))
                if self._draw.random() < 0.5:
                    self.restart()
            self.look()

    def restart(self) -> None:
        """A new process: it has the weights of before, and knows no channel."""
        self.subscriber = Subscriber(
            self._store(self.name),
            keys=self._keys,
            ratchet=self.ratchet,
            timer=self._stage.clock,
        )
        self._shunned.clear()
        self._believed.clear()
        self._attached = False

    def forget(self) -> None:
        """A new engine: it has no weights and knows no channel."""
        self.held = self.replica = None
        self.restart()

    def look(self) -> bool:
        """Read what is new and go to the newest version; whether all went well."""
        self.errors.clear()
        try:
            self._refresh()
            newest = self.subscriber.newest
            if newest is None:
                return True
            if self.held is not None and newest.number < self.held.number:
                raise ChainError("the channel went back", held=str(self.held), newest=str(newest))
            return newest == self.held or self._go()
        except DeltaError as error:
            self._failed(error)
            return False

    def _refresh(self) -> None:
        came = self.subscriber.refresh()
        self._believed = [*self._believed[-1:], *came]
        self._truth.check_links(self.name, self._believed)

    def _go(self) -> bool:
        """Take the cheapest way; where it cannot be gone, the way by an anchor."""
        subscriber = self.subscriber
        resident = self.held
        if resident is not None and not self._attached:
            resident = subscriber.find(resident.root)
            self.held = resident or self.held
        self._attached = True
        for start in (resident, None):
            try:
                for manifest in subscriber.plan(start, without=self._shunned):
                    self._take(manifest)
            except ChannelError:
                raise
            except DeltaError as error:
                self._failed(error)
            else:
                return True
        self._shunned.clear()
        return False

    def _take(self, manifest: Manifest) -> None:
        if self._slow:
            self._stage.faults["slow_reader"] += 1
            self._stage.sleep(self._draw.uniform(5, 40))
        try:
            replica = self.applied(manifest)
        except DeltaError as error:
            if not isinstance(error, ChannelError):
                self._shunned.add(manifest.seq)
            raise
        self.replica, self.held = replica, manifest.target
        self.check()

    def applied(self, manifest: Manifest) -> Replica:
        """The weights after a record; those held stay as they are."""
        schema, subscriber = self.subscriber.schema, self.subscriber
        if manifest.kind == "anchor":
            *_, (_, replica) = replay(schema, [manifest], subscriber.changes)
            return replica
        before = self.replica
        assert before is not None
        replica = Replica(schema, list(before.fingerprints), [bits.copy() for bits in before.bits])
        for change in subscriber.changes(manifest, replica.lanes(1)):
            replica.apply(change)
        if manifest.target is None or replica.root != manifest.target.root:
            raise FormatError("not the version's root", seq=manifest.seq)
        return replica

    def check(self) -> None:
        """What it shows must be what it says it holds."""
        if self.held is not None and self.replica is not None:
            self._truth.check_held(self.name, self.held, self.replica.bits)

    def _failed(self, error: DeltaError) -> None:
        self.errors.append(error)
        self._stage.note(f"{self.name}   {error}"[:160])
