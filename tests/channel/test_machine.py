"""The protocol against a model that is right by construction, under faults chosen by Hypothesis.

The model is a plain list: what landed in the bare store, in order, and the integers each version
stands for. Trainers and readers see the store only through faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.channel.toy import (
    START,
    Weights,
    append_anchor,
    append_delta,
    append_merged,
    moved,
    replay,
    root_of,
)
from vllm_delta.channel import Log, Record, verify_link
from vllm_delta.channel.chain import parse_record
from vllm_delta.channel.log import COMMIT_ATTEMPTS
from vllm_delta.errors import ChannelError, DigestError, FencedError
from vllm_delta.format import HEAD_KEY, digest, manifest_key
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash

TROUBLE = st.lists(
    st.sampled_from(["transport", "lost_answer", "late", "corrupt", None]), min_size=1, max_size=4
)
SILENCE = [
    [first, *["transport"] * (2 * COMMIT_ATTEMPTS - 1)]
    for first in ("late", "lost_answer", "transport")
]
FAULTS = st.just([]) | st.builds(
    lambda n_good, faults: [None] * n_good + faults,
    st.integers(0, 7),
    TROUBLE | st.sampled_from(SILENCE) | st.just(["crash"]) | st.just(["late", "crash"]),
)
"""What a trainer's calls suffer, in turn: some calls go well, then come the faults."""

TRAINERS = st.integers(0, 1)


class Witness(MemoryStore):
    """A store that notes every manifest the moment it lands, and that none is ever replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.landed: list[bytes] = []

    def put_new(self, key: str, data: bytes) -> bool:
        new = super().put_new(key, data)
        if new and key.startswith("m/"):
            assert key == manifest_key(len(self.landed) + 1), f"a hole before {key}"
            self.landed.append(data)
        return new

    def put(self, key: str, data: bytes) -> None:
        assert not key.startswith("m/"), f"{key} was written without a condition"
        super().put(key, data)


class Trainer:
    """A process: it dies by a crash and is then replaced by a fresh one."""

    def __init__(self, store: Witness, name: str) -> None:
        self.channel = FaultyChannel(store)
        self.log = Log(self.channel)
        self.name = name
        self.owns = False
        self.fenced = False


def doubtful(trainer: Trainer) -> int:
    """How many records of its own a trainer may not know to have landed."""
    return trainer.log.in_doubt is not None


class Channel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Witness()
        self.n_trainers = 0
        self.trainers = [self.new_trainer(), self.new_trainer()]
        self.log: list[Record] = []
        self.ghosts: list[FaultyChannel] = []
        self.truth: dict[str, Weights] = {root_of(START): START}
        self.acknowledged: dict[int, bytes] = {}
        self.reader = FaultyChannel(self.store)
        self.seen: Record | None = None
        self.shown: Weights | None = None

    def new_trainer(self) -> Trainer:
        self.n_trainers += 1
        return Trainer(self.store, f"trainer {self.n_trainers}")

    def landed_after(self, record: Record) -> tuple[bytes, int]:
        return self.store.landed[record.seq], record.seq + 1

    @contextlib.contextmanager
    def suffering(self, number: int, faults: list[Any]) -> Iterator[Trainer]:
        """Run a trainer's action under faults; a dead one is replaced, a fenced one stays so."""
        trainer = self.trainers[number]
        trainer.channel.script(faults)
        try:
            yield trainer
        except SimulatedCrash:
            self.ghosts.append(trainer.channel)  # what the dead had sent may still arrive
            self.trainers[number] = self.new_trainer()
        except FencedError:
            assert trainer.owns, "fenced without ever having owned"
            taken = parse_record(*self.landed_after(trainer.log.position))
            assert taken.manifest.writer != trainer.name, "fenced by its own record"
            trainer.fenced = True
        except (ChannelError, DigestError):
            pass
        finally:
            trainer.channel.script([])

    def acknowledge(self, trainer: Trainer) -> None:
        record = trainer.log.position
        assert record is not None
        assert not trainer.fenced, "a fenced trainer committed"
        assert self.store.landed[record.seq - 1] == record.envelope, "acknowledged, not there"
        assert trainer.log.in_doubt is None
        self.acknowledged[record.seq] = record.envelope

    def stands_at(self, trainer: Trainer) -> Weights:
        target = trainer.log.position.manifest.target
        return START if target is None else self.truth[target.root]

    @initialize(begun=st.sampled_from([True, True, True, False]))
    def begin(self, begun: bool) -> None:
        if begun:
            self.claim(0, [])
            self.publish(0, [], 0, 0)

    @rule(number=TRAINERS, faults=FAULTS)
    def claim(self, number: int, faults: list[Any]) -> None:
        with self.suffering(number, faults) as trainer:
            before = trainer.log.position
            is_newest = before is None or len(self.store.landed) <= before.seq + doubtful(trainer)
            trainer.log.claim(trainer.name)
            assert is_newest, "claimed back what it had lost"
            trainer.owns = True
            self.acknowledge(trainer)

    @rule(number=TRAINERS, faults=FAULTS, place=st.integers(0, 3), step=st.integers(-2, 2))
    def publish(self, number: int, faults: list[Any], place: int, step: int) -> None:
        with self.suffering(number, faults) as trainer:
            if trainer.log.position is None:
                return
            if trainer.log.in_doubt is not None:
                settled = trainer.log.settle()
                assert settled == trainer.log.position
            elif trainer.log.position.manifest.anchor is None:
                append_anchor(trainer.log, START)
            else:
                weights = self.stands_at(trainer)
                new = moved(weights, place, step)
                self.truth[root_of(new)] = new
                append_delta(trainer.log, weights, place, step)
            self.acknowledge(trainer)

    @rule(number=TRAINERS, faults=FAULTS)
    def anchor(self, number: int, faults: list[Any]) -> None:
        with self.suffering(number, faults) as trainer:
            if trainer.log.position is None or trainer.log.in_doubt is not None:
                return
            append_anchor(trainer.log, self.stands_at(trainer))
            self.acknowledge(trainer)

    @rule(number=TRAINERS, faults=FAULTS, back=st.integers(2, 4))
    def merge(self, number: int, faults: list[Any], back: int) -> None:
        with self.suffering(number, faults) as trainer:
            position = trainer.log.position
            if position is None or trainer.log.in_doubt is not None:
                return
            target = position.manifest.target
            for record in self.log[: position.seq]:
                base = record.manifest.target
                if base is not None and target is not None and base.number == target.number - back:
                    old = self.truth[base.root]
                    append_merged(trainer.log, base, old, self.stands_at(trainer))
                    self.acknowledge(trainer)
                    return

    @rule()
    def deliver_what_is_late(self) -> None:
        for channel in [*self.ghosts, *(trainer.channel for trainer in self.trainers)]:
            channel.deliver()

    @rule(head=st.binary(max_size=30) | st.integers(0, 2**40).map(lambda n: b'{"seq":%d}' % n))
    def forge_head(self, head: bytes) -> None:
        self.store.put(HEAD_KEY, head)

    @rule(faults=st.lists(st.sampled_from([None, "corrupt", "transport"]), max_size=12))
    def read(self, faults: list[Any]) -> None:
        self.reader = FaultyChannel(self.store, seed=len(self.store.landed))
        self.reader.script(faults)
        log = Log(self.reader)
        try:
            while (record := log.read_next(self.seen)) is not None:
                self.shown = replay(log, [record], self.shown)
                self.seen = record
        except (ChannelError, DigestError):
            return
        assert (0 if self.seen is None else self.seen.seq) == len(self.store.landed)

    @rule()
    def newcomer(self) -> None:
        log = Log(self.store)
        tail = log.tail()
        assert (0 if tail is None else tail.seq) == len(self.store.landed)
        if tail is not None:
            weights = replay(log, log.read_from_anchor(tail))
            assert weights is None or weights == self.truth[tail.manifest.target.root]

    @invariant()
    def what_landed_continues_the_log_and_its_blobs_are_there(self) -> None:
        log = Log(self.store)
        for seq in range(len(self.log) + 1, len(self.store.landed) + 1):
            record = parse_record(self.store.landed[seq - 1], seq)
            verify_link(self.log[-1] if self.log else None, record)
            for place in range(len(record.manifest.blobs)):
                log.get_blob(record.manifest, place)
            self.log.append(record)

    def teardown(self) -> None:
        for seq, envelope in self.acknowledged.items():
            assert self.store.get(manifest_key(seq), max_bytes=1 << 20) == envelope
        last = len(self.store.landed)
        assert list(Log(self.store).read_chain(1, last)) == self.log

    @invariant()
    def a_reader_shows_a_published_version(self) -> None:
        if self.seen is not None and self.shown is not None:
            assert self.shown == self.truth[self.seen.manifest.target.root]
            assert digest(self.store.landed[self.seen.seq - 1]) == self.seen.digest


Channel.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestChannel = Channel.TestCase
