"""Decides where an engine goes next: forward, around damage, back, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_delta.engine.access import Access
from vllm_delta.engine.driver import Committed, Driver
from vllm_delta.engine.settings import Settings
from vllm_delta.engine.spacing import Spacing
from vllm_delta.errors import BaseMismatchError, DeltaError
from vllm_delta.format import Manifest, Version
from vllm_delta.plan import peak_bytes
from vllm_delta.subscriber import Subscriber


class Pilot:
    """Steers one engine along one channel. Blocking, for one thread.

    Attributes:
        held: it goes only where it is told to.
        damaged: resident weights are not what they should be.

    Args:
        subscriber: reads the channel.
        access: with which each rank reads its blobs.
        driver: the engine.
        settings: how far to stage ahead.
        spacing: when a commit may be made; commands do not ask it.
        note: told of every commit.
        report: told of every error that is answered rather than raised.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        access: Access,
        driver: Driver,
        settings: Settings,
        spacing: Spacing,
        *,
        note: Callable[[Committed], None],
        report: Callable[[DeltaError], None],
    ) -> None:
        self.subscriber = subscriber
        self.held = False
        self.damaged = False
        self._shunned: set[int] = set()
        self._access = access
        self._driver = driver
        self._settings = settings
        self._spacing = spacing
        self._note = note
        self._report = report

    def look(self) -> bool:
        """Reads what is new on the channel; whether anything was."""
        return bool(self.subscriber.refresh())

    def attach(self) -> bool:
        """Finds out which published version the engine holds; whether it had to.

        Raises:
            LayoutError, ModelMismatchError: the engine cannot follow this channel.
        """
        if self._driver.attached:
            return False
        try:
            fingerprints = self._driver.attach(self.subscriber.schema, self._access)
            version = None
            if fingerprints is not None:
                version = self.subscriber.find(self._driver.ledger.root(fingerprints))
            self._driver.open(version, fingerprints or [])
        except DeltaError:
            self._driver.detach()
            raise
        return True

    def plan(self) -> list[Manifest]:
        """What leads from the resident to the newest version."""
        return self._plan_to(None)

    def _plan_to(self, number: int | None) -> list[Manifest]:
        return self._lead(self._driver.resident, number)

    def _lead(self, start: Version | None, number: int | None) -> list[Manifest]:
        return self.subscriber.plan(
            start,
            number=number,
            without=self._shunned,
            at_most_bytes=self._settings.memory_bytes,
        )

    def _batch(self, chain: Sequence[Manifest]) -> Sequence[Manifest]:
        """As many versions as are staged together."""
        most = len(chain) if chain[0].kind == "anchor" else self._settings.stage_ahead
        return self._within_memory(chain[:most])

    def _within_memory(self, chain: Sequence[Manifest]) -> Sequence[Manifest]:
        n_bytes = 0
        for place, manifest in enumerate(chain):
            n_bytes += peak_bytes(manifest)
            if place and n_bytes > self._settings.memory_bytes:
                return chain[:place]
        return chain

    def advance(self, *, hurry: bool = False) -> None:
        """Does the next thing that brings the engine to the newest version, if it may now.

        Args:
            hurry: do not wait between two commits.
        """
        if self._driver.fenced or (self.damaged and not self.held):
            self._heal()
        elif not self.held and (chain := self.plan()):
            batch = self._batch(chain)
            if self._spacing.wait_s > 0 and self._driver.resident is not None and not hurry:
                self._driver.stage(batch)
            else:
                self._commit(batch)

    def _commit(self, batch: Sequence[Manifest]) -> None:
        """Commits a batch; what does not fit is answered by a scan and perhaps by an anchor."""
        if (problem := self._try(batch, spaced=True)) is not None:
            self._recover(*problem)

    def _try(
        self, batch: Sequence[Manifest], *, spaced: bool = False
    ) -> tuple[DeltaError, Manifest] | None:
        """Commits a batch as far as it goes; what went wrong, and with which of it.

        It takes more than one commit where a version can only be decoded once another is resident.

        Args:
            spaced: whether the others wait until they may be made.
        """
        while batch:
            try:
                done = self._driver.commit(batch)
            except DeltaError as error:
                return error, batch[0]
            self._note(done)
            batch = batch[len(done.versions) :]
            if done.failure is not None:
                return done.failure, batch[0]
            if spaced and self._spacing.wait_s > 0:
                break
        return None

    def _recover(self, error: DeltaError, failed: Manifest) -> None:
        if self._driver.fenced or error.action not in ("refetch", "reseed"):
            raise error
        if isinstance(error, BaseMismatchError):
            if failed.kind != "merged":
                self._report(error)
            self.find_damage()
        if self._shun(error, failed):
            self.advance()
        elif not self._reseed(failed):
            raise error

    def _shun(self, error: DeltaError, failed: Manifest) -> bool:
        """Gives a merged delta that is no good up for ever: those it stands for lead there too.

        Returns:
            Whether there is another way to try now.
        """
        wrong = error.action in ("refetch", "reseed") and not self.damaged
        if failed.kind != "merged" or not wrong:
            return False
        self._shunned.add(failed.seq)
        self._report(error)
        return True

    def _heal(self) -> None:
        if not self._reseed(None):
            raise BaseMismatchError(
                "weights are damaged and the channel has no anchor to load; publish one"
            )

    def find_damage(self) -> None:
        """Finds out by a full scan whether the resident weights are what they should be."""
        try:
            self.verify()
        except BaseMismatchError as error:
            self._report(error)

    def _reseed(self, failed: Manifest | None) -> bool:
        """Loads an anchor and what follows it, if that leads anywhere.

        Args:
            failed: what could not be applied to good weights; the anchor must come after it.
        """
        chain = self._anchored()
        resident = self._driver.resident
        if not chain:
            return False
        if failed is not None and not self.damaged and chain[0].seq < failed.seq:
            return False
        target = chain[-1].target
        if resident is not None and (target is None or target.number < resident.number):
            return False
        while chain:
            done = self._driver.commit(self._within_memory(chain))
            if done.versions:
                self.damaged = False
            self._note(done)
            if done.failure is not None:
                raise done.failure
            chain = chain[len(done.versions) :]
        return True

    def _anchored(self) -> list[Manifest]:
        """The way to the newest version from an anchor that can be loaded; perhaps none."""
        try:
            chain = self._lead(None, None)
        except DeltaError as error:
            self._report(error)
            return []
        usable = chain and chain[0].kind == "anchor" and chain[0].reference is None
        return chain if usable else []

    def go(self, number: int | None) -> None:
        """Unpins and goes to the newest version now, or goes to ``number`` and stays there.

        Raises:
            DeltaError: it could not; what was resident still is, and is pinned if it was.
        """
        if number is None:
            self.held = False
        elif (back := self._driver.rollback_to) is None or back.number != number:
            self.subscriber.version(number)  # nothing moves for a version that is not there
        if self._driver.fenced or self.damaged:
            self._heal()
        while self._before(number):
            self._driver.rollback()
        while chain := self._plan_to(number):
            if (problem := self._try(self._batch(chain))) is not None and not self._shun(*problem):
                raise problem[0]
        self.held = number is not None

    def _before(self, number: int | None) -> bool:
        """Whether ``number`` lies before the resident version and a rollback leads towards it."""
        resident, back = self._driver.resident, self._driver.rollback_to
        return (
            number is not None
            and resident is not None
            and back is not None
            and number <= back.number < resident.number
        )

    def rollback(self) -> None:
        """Goes back to the version before and stays there.

        Raises:
            EngineError: it is not kept.
        """
        self._driver.rollback()
        self.held = True

    def verify(self) -> str:
        """Scans all resident weights; the root they have.

        Raises:
            BaseMismatchError: it is not the version's.
        """
        try:
            found = self._driver.scan()
            self._driver.ledger.compare(found)
        except BaseMismatchError:
            self.damaged = True
            raise
        return self._driver.ledger.root(found)
