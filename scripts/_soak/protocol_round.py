"""A round: trainers and readers on a stage, under faults; then all must end well."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from scripts._soak.protocol_attacks import attack
from scripts._soak.protocol_faults import StagedStore
from scripts._soak.protocol_reader import Reader
from scripts._soak.protocol_stage import AbandonedError, Stage
from scripts._soak.protocol_trainer import Acknowledged, Trainer
from scripts._soak.protocol_truth import Tensors, Truth, Witness, any_weights, copied, move
from vllm_delta.channel import Keys, Log, Store
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.channel.retry import RetryingStore
from vllm_delta.errors import DeltaError, FencedError
from vllm_delta.format import HEAD_KEY
from vllm_delta.publisher import PublisherSettings
from vllm_delta.testing import SimulatedCrash

_SLOW = ("s3", "hub")
"""Over these a round has fewer steps."""

_LOOKS = 4
_SEALING = (bytes(range(32)),)


@dataclass(frozen=True)
class Script:
    """What a round is about, by its number."""

    seed: int
    number: int
    where: str
    draw: random.Random = field(compare=False)
    signed: bool
    sealed: bool
    settings: PublisherSettings
    rate: float
    light: bool

    @classmethod
    def of(cls, seed: int, number: int, where: str) -> Script:
        draw = random.Random(f"{seed} {where} {number}")
        settings = PublisherSettings(
            codec=draw.choice(("gap", "gap", "hazard")),
            strides=draw.choice(((2, 4), (2,), (3, 6), ())),
            anchor_ratio=draw.choice((0.1, 0.3, 1.0)),
            blob_bytes=draw.choice((300, 1500, 1 << 20)),
            n_threads=1,
            anchor_every_s=draw.choice((None, 60.0)),
            retain_s=draw.choice((0.0, 15.0, 60.0)),
            grace_s=draw.choice((5.0, 30.0, 600.0)),
        )
        signed = number % 2 == 1
        sealed = number % 4 in (1, 2)
        rate = draw.choice((0.0, 0.05, 0.1, 0.2))
        light = where in _SLOW
        return cls(seed, number, where, draw, signed, sealed, settings, rate, light)

    @property
    def keys(self) -> Keys:
        """The trainers'."""
        signing = None
        if self.signed:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            signing = Ed25519PrivateKey.from_private_bytes(b"trainer." * 4)
        return Keys(signing=signing, sealing=_SEALING if self.sealed else ())

    @property
    def readers_keys(self) -> Keys:
        keys = self.keys
        if keys.signing is None:
            return keys
        return Keys(trusted=(keys.signing.public_key(),), sealing=keys.sealing)


class Round:
    """A stage with its actors, over one store.

    Args:
        folder: where readers keep their ratchets; None: they have none.
    """

    def __init__(self, script: Script, store: Store, folder: Path | None = None) -> None:
        self.script = script
        self.draw = draw = script.draw
        self.stage = Stage(draw, stickiness=draw.choice((0.2, 0.5, 0.8)))
        self.bare = store
        self._folder = folder
        self.truth = Truth(self.stage, script.readers_keys, atomic=store.atomic)
        self.witness = Witness(store, self.truth)
        self.trainers: list[Trainer] = []
        self.readers: list[Reader] = []

    def play(self) -> None:
        """The round from beginning to end; what went wrong is in `stage.violations`."""
        try:
            self.cast()
            self.stage.run()
            self.finish()
        except AbandonedError:
            assert self.stage.violations

    def cast(self) -> None:
        """Who takes part."""
        draw, stage = self.draw, self.stage
        weights = any_weights(draw)
        n_trainers = draw.choice((1, 2, 2) if self.script.light else (1, 2, 2, 3))
        hasty = 0.3 if self.truth.atomic else 0.7
        haste = 50.0 if n_trainers > 1 and draw.random() < hasty else 1.0
        for number in range(n_trainers):
            mine = weights if number == 0 or draw.random() < 0.5 else any_weights(draw)
            after_s = 0.0 if number == 0 or draw.random() < 0.3 else draw.uniform(1, 30) / haste
            n_steps = draw.randint(2, 4 if self.script.light else 9)
            trainer = self.trainer(f"T{number}", copied(mine), n_steps, haste)
            stage.enter(trainer.name, trainer.act, after_s=after_s)
        if n_trainers > 1:
            stage.faults["two_trainers"] += 1
        for number in range(3):
            reader = self.reader(f"R{number}", slow=number == 1, away=number == 2)
            stage.enter(reader.name, reader.act, after_s=draw.uniform(0, 20))
        if draw.random() < 0.3:
            stage.enter("forger", self._forge_head, after_s=draw.uniform(2, 30))

    def trainer(self, name: str, weights: Tensors, n_steps: int, haste: float = 1.0) -> Trainer:
        trainer = Trainer(
            name,
            self.stage,
            self.truth,
            lambda life: self.staged(life, crashes=True),
            weights,
            settings=self.script.settings,
            keys=self.script.keys,
            n_steps=n_steps,
            draw=self.draw,
            haste=haste,
        )
        self.trainers.append(trainer)
        return trainer

    def reader(self, name: str, *, slow: bool = False, away: bool = False) -> Reader:
        def store(name: str) -> Store:
            staged = self.staged(name, damages_manifests=self.script.signed)
            return RetryingStore(
                staged, clock=self.stage.clock, sleep=self.stage.sleep, random=self.draw
            )

        reader = Reader(
            name,
            self.stage,
            self.truth,
            store,
            keys=self.script.readers_keys,
            draw=self.draw,
            n_looks=self.draw.randint(3, 4 if self.script.light else 12),
            slow=slow,
            away=away,
            ratchet=self._ratchet(name),
        )
        self.readers.append(reader)
        return reader

    def _ratchet(self, name: str) -> Ratchet | None:
        if self._folder is None:
            return None
        return Ratchet(self._folder / name, f"soak://{self.script.where}/{self.script.number}")

    def staged(
        self, name: str, *, crashes: bool = False, damages_manifests: bool = False
    ) -> StagedStore:
        return StagedStore(
            self.stage,
            self.witness,
            name,
            rate=self.script.rate,
            crashes=crashes,
            damages_manifests=damages_manifests,
        )

    def _forge_head(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self.stage.faults["forged_head"] += 1
            self.bare.put(HEAD_KEY, forged_head(self.draw))
            self.stage.sleep(self.draw.uniform(0, 10))

    def finish(self, *, attacked: bool = True) -> None:
        """No more faults. What is under way arrives, all do their last, and it must be right."""
        self.stage.calm = True
        self.stage.deliver()
        for trainer in self.trainers:
            if trainer.publisher is not None and not trainer.fenced:
                commit(trainer)
        self.stage.faults["overwritten"] += len(self.truth.replaced)
        self._check_contest()
        self.go_on()
        self._check_log()
        for trainer in self.trainers:
            for told in trainer.acknowledged:
                self._check_acknowledged(trainer, told)
        self.reader("newcomer")
        self.arrive()
        if attacked and self.truth.atomic and not self.stage.violations:
            attack(self)

    def go_on(self) -> None:
        """A last trainer publishes something that no reader can have."""
        last = self.trainer("last", any_weights(self.draw), 0)
        if self.draw.random() < 0.7:
            last.tensors = copied(self.trainers[0].tensors)
        held = max((r.held.number for r in self.readers if r.held is not None), default=-1)
        for n in range(60):
            if not commit(last):
                self.stage.violate("nobody can publish any more")
                return
            if last.publisher_here.version.number > held and (n or self.script.light):
                return

    def arrive(self) -> None:
        """Each reader must get to where the log stands."""
        tail = self.truth.tail
        assert tail is not None
        for reader in self.readers:
            for _ in range(_LOOKS):
                if reader.look() and reader.held == tail.manifest.target:
                    break
            reader.check()
            if reader.held != tail.manifest.target and self._begun_twice(reader):
                self.stage.faults["begun_twice"] += 1
                reader.ratchet = None
                reader.forget()
                reader.look()
            if reader.held != tail.manifest.target:
                errors = "; ".join(map(str, reader.errors)) or "no error"
                self.stage.violate(
                    f"{reader.name} ends at {reader.held}, not {tail.manifest.target}: {errors}"
                )

    def _begun_twice(self, reader: Reader) -> bool:
        """Whether a reader refuses the channel for another that was begun in the same place.

        Without a condition two trainers can both begin one. Who saw the one that was overwritten
        says that the channel is another and keeps what it has, until somebody decides.
        """
        replaced = any(before.seq == 1 for before, _ in self.truth.replaced)
        words = ("'channel'", "another channel")
        return replaced and any(word in str(e) for e in reader.errors for word in words)

    def _check_log(self) -> None:
        tail = self.truth.tail
        assert tail is not None
        self.witness.check()
        first = 1 if self.truth.atomic else tail.manifest.anchor or 1
        try:
            list(Log(self.bare, keys=self.script.readers_keys).read_chain(first, tail.seq))
        except DeltaError as error:
            self.stage.violate(f"the log does not verify: {error}")

    def _check_acknowledged(self, trainer: Trainer, told: Acknowledged) -> None:
        record = self.truth.record(told.seq)
        if record is not None and record.manifest.target == told.version:
            return
        if self.truth.atomic:
            self.stage.violate(f"{trainer.name}: {told.version} was acknowledged and is lost")
        elif trainer.acknowledged.index(told) >= trainer.since:
            standing = {record.manifest.target for record in self.truth.log.values()}
            if told.version not in standing and str(told.version) not in trainer.lost:
                self.stage.violate(f"{trainer.name}: {told.version} was overwritten, untold")

    def _check_contest(self) -> None:
        """In a store without a condition: both must know, and the older must have stopped."""
        living = {t.writer: t for t in self.trainers if t.publisher is not None}
        for before, after in self.truth.replaced:
            one, other = (living.get(r.manifest.writer) for r in (before, after))
            if one is None or other is None or one is other:
                continue
            # Who reads back another's record right away has committed nothing.
            told = [trainer for trainer in (one, other) if before.seq in trainer.committed]
            for trainer in told:
                if not trainer.learnt:
                    self.stage.violate(f"{trainer.name} does not know of a clash at {before.seq}")
            older = one if before.manifest.epoch < after.manifest.epoch else other
            same = before.manifest.epoch == after.manifest.epoch
            if older in told and not same and not older.fenced:
                self.stage.violate(f"{older.name} goes on after a clash at {before.seq}")


def commit(trainer: Trainer) -> bool:
    """Let a trainer commit once more; whether it could."""
    move(trainer.tensors, trainer._draw)
    try:
        return trainer.publish(3)
    except (FencedError, SimulatedCrash):
        return False


def forged_head(draw: random.Random) -> bytes:
    """Something that whoever can write may leave under `head`."""
    number = draw.choice((0, -1, 1, draw.randrange(1, 40), 10**12 - 1, 10**15))
    return draw.choice((b"", b"{}", draw.randbytes(20), b'{"seq":%d}' % number, b"x" * 100))
