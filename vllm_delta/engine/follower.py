"""Follows a channel: looks again and again, moves the engine, and says how things stand."""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger

from vllm_delta.channel import RetryPolicy, Store, open_channel
from vllm_delta.engine.access import Access, open_ratchet
from vllm_delta.engine.calls import Port
from vllm_delta.engine.driver import Driver
from vllm_delta.engine.lookout import Lookout
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.pilot import Pilot
from vllm_delta.engine.settings import Settings
from vllm_delta.engine.spacing import Spacing
from vllm_delta.engine.standing import Standing, plain
from vllm_delta.errors import ChannelError, DeltaError, EngineError, SettingsError
from vllm_delta.format import Version
from vllm_delta.subscriber import Subscriber

logger = init_logger(f"vllm.{__name__}")

_RECOMPUTE_POLL_S = 0.05
_GO_ON_S = 0.05
_AFTER_FAULT_S = 10.0
_POLICY = RetryPolicy(deadline_s=5.0)
"""For manifests: commands wait behind it. Ranks, which fetch blobs, are more patient."""

_WAITING = "waiting for the channel"
_HOPELESS = ("fix", "upgrade", "stop")


class Follower:
    """Keeps one engine at the newest version of a channel, or where it was pinned.

    All work is done on one thread: the one that calls `run`, or the caller's of `cycle` and of
    the commands `apply`, `rollback` and `verify`. Others may call `status`, `submit` and `stop`.

    Args:
        port: the way into the engine.
        settings: what to follow and how.
        metrics: where the numbers go.
        clock: seconds since the epoch, as publishers use them.
        monotonic: seconds that never go back.

    Raises:
        SettingsError: a key's file cannot be read.
    """

    def __init__(
        self,
        port: Port,
        settings: Settings,
        *,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._lookout = Lookout(monotonic)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()
        self._driver = Driver(port, settings, metrics=metrics, sleep=self._sleep)
        self._spacing = Spacing(settings, monotonic)
        self._standing = Standing(
            self._driver,
            self._spacing,
            metrics,
            first_backoff_s=settings.poll_s,
            clock=clock,
            monotonic=monotonic,
        )
        self._keys = Access.of(settings, "").keys()
        self._store: Store | None = None
        self._pilot: Pilot | None = None
        self._state = "starting" if settings.channel else "no channel"
        self._unread: DeltaError | None = None
        self._has_read = False
        self._goal: Version | None = None
        self._ready_once = settings.channel is None
        self._scanned_at = monotonic()

    def run(self) -> None:
        """Follows until `stop`; for a thread of its own."""
        while not self._stopped.is_set():
            try:
                self._run_commands()
                self.cycle(look=self._lookout.due(self._settings.poll_s))
                self._watch()
                self._lookout.wait(self._idle_s())
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # A fault of ours. It must not end following, nor leave commands unanswered.
                logger.exception("Following goes on in %.0f s.", _AFTER_FAULT_S)
                self._standing.fail(EngineError("following failed", reason=repr(error)))
                self._lookout.put_off(_AFTER_FAULT_S)
        self._lookout.end()

    def _idle_s(self) -> float:
        """How long there is nothing to do but to look at the channel."""
        if self._spacing.recomputing:
            return _RECOMPUTE_POLL_S  # its end is only seen by looking
        if self._pilot is None or self._pilot.held or self._caught_up():
            return math.inf
        return max(_GO_ON_S, self._spacing.wait_s, self._standing.retry_s)

    def _watch(self) -> None:
        if self._store is not None and (error := self._lookout.watch(self._store)) is not None:
            self._standing.report(error)

    def stop(self) -> None:
        """Ends `run` after what it is doing."""
        self._stopped.set()
        self._lookout.wake()

    def submit(self, command: Callable[[], Any]) -> Future[Any]:
        """Has `run`'s thread call ``command``."""
        future: Future[Any] = Future()
        self._commands.put((command, future))
        self._lookout.wake()
        return future

    def _run_commands(self) -> None:
        while not self._commands.empty():
            command, future = self._commands.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except BaseException as error:  # it is the submitter's
                future.set_exception(error)
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EngineError("the follower was stopped")

    def cycle(self, *, eager: bool = False, look: bool = True) -> None:
        """Looks at the channel once and goes as far as it may; errors end up in `status`.

        Args:
            eager: try again now what failed a moment ago.
            look: whether to look; else it only goes on with what is known.
        """
        if self._state in ("no channel", "refused"):
            return
        try:
            if self._standing.patience() is not None:
                self._observe()
            else:
                self._go_on(eager=eager, look=look)
        except DeltaError as error:
            self._standing.fail(error)
        self._settle()

    def _go_on(self, *, eager: bool, look: bool) -> None:
        if look:
            self._read()
        if self._ready() and (eager or self._standing.may_retry):
            self._scan_if_due()
            self._steer().advance(hurry=not self._ready_once)
        if look and self._unread is not None:
            raise self._unread  # what was verified before it has been taken
        if self._unread is None and self._caught_up():
            self._standing.succeed()

    def due(self) -> bool:
        """Whether it is time to look, where looks are not to be had for nothing.

        Asked once a look by who has no `run`: a remote store counts its requests, and one that is
        out of reach takes its time.
        """
        if not self._settings.is_remote:
            return True
        return self._standing.may_retry and self._lookout.due(self._settings.poll_s)

    def _steer(self) -> Pilot:
        if self._pilot is None:
            if self._settings.channel is None:
                raise EngineError("no channel is followed")
            self._store = store = open_channel(self._settings.channel, policy=_POLICY)
            ratchet = open_ratchet(self._settings, store.url)
            self._pilot = Pilot(
                Subscriber(store, keys=self._keys, ratchet=ratchet),
                Access.of(self._settings, store.url),
                self._driver,
                self._settings,
                self._spacing,
                note=self._standing.note,
                report=self._standing.report,
            )
        return self._pilot

    def _read(self) -> DeltaError | None:
        """Reads the channel; what kept it from being read to its end, if anything did."""
        try:
            if self._steer().look():
                self._standing.retry_now()
        except DeltaError as error:
            self._unread = error
            return error
        if not self._has_read:
            self._has_read, self._goal = True, self.newest
        self._unread = None
        return None

    def _ready(self) -> bool:
        """Asks the core for its state; whether there is a version to hold."""
        if self._pilot is None or self._pilot.subscriber.newest is None:
            return False
        self._attach(self._pilot)
        self._observe()
        return True

    def _observe(self) -> None:
        if self._driver.attached:
            self._driver.refresh()
            self._spacing.observe(self._driver.n_recomputing)

    def _attach(self, pilot: Pilot) -> None:
        try:
            if pilot.attach():
                version = self._driver.resident
                logger.info("Following %s from version %s.", self._settings.channel, version)
        except DeltaError as error:
            # What is wrong with the store (rights, a link in a folder's place) can be put right.
            if error.action in _HOPELESS and not isinstance(error, SettingsError):
                self._state = "refused"
                logger.error("Not following %s: %s", self._settings.channel, error)
            raise

    def _scan_if_due(self) -> None:
        every_s = self._settings.scan_interval_s
        if every_s and self._monotonic() - self._scanned_at >= every_s:
            self._scanned_at = self._monotonic()
            self._steer().find_damage()

    def apply(self, number: int | None = None) -> dict[str, Any]:
        """Unpins and goes to the newest version now, or goes to ``number`` and stays there.

        Raises:
            DeltaError: it could not; what was resident still is.
        """
        return self._command(lambda pilot: pilot.go(number), forward=True)

    def rollback(self) -> dict[str, Any]:
        """Goes back to the version before and stays there until `apply`.

        Raises:
            EngineError: it is not kept on every rank.
        """
        return self._command(Pilot.rollback)

    def verify(self) -> dict[str, Any]:
        """Scans all resident weights and compares them with what was published.

        Raises:
            BaseMismatchError: they differ; an anchor will be loaded unless pinned.
        """
        return self._command(Pilot.verify)

    def take(self, channel: str) -> None:
        """Follows ``channel``, but goes only where `apply` says.

        Raises:
            SettingsError: another channel is followed already.
        """
        if self._settings.channel not in (None, channel):
            raise SettingsError(
                "another channel is followed already", field="channel", value=channel
            )
        if self._settings.channel is None:
            self._settings = dataclasses.replace(self._settings, channel=channel)
            self._state, self._steer().held = "starting", True

    def _command(self, command: Callable[[Pilot], Any], *, forward: bool = False) -> dict[str, Any]:
        if self._state in ("no channel", "refused"):
            raise EngineError("no channel is followed", state=self._state)
        try:
            unread = self._standing.patience() or self._read()
            if unread is not None and (forward or not self._driver.attached):
                raise unread
            if not self._ready():
                raise ChannelError("nothing is published yet", state=self._state)
            command(self._steer())
        except DeltaError as error:
            self._standing.fail(error)
            raise
        else:
            if unread is None:
                self._standing.succeed()
        finally:
            self._settle()
        return {"version": plain(self._driver.resident), "state": self._state}

    def _caught_up(self) -> bool:
        return self.newest == self._driver.resident and not self._steer().damaged

    def _settle(self) -> None:
        if self._state not in ("no channel", "refused"):
            before, self._state = self._state, self._describe()
            if self._state != before and self._state == _WAITING:
                logger.info("Nothing is published on %s yet; waiting.", self._settings.channel)
        self._ready_once = self._ready_once or self._has_joined()
        self._standing.measure(self._pilot)

    def _has_joined(self) -> bool:
        """Whether the engine stands where the channel did when it was first read, or will not."""
        if self._state == "refused":
            return True
        if not self._has_read or self._pilot is None:
            return False
        goal, resident = self._goal, self._driver.resident
        if goal is None or self._pilot.held:
            return True
        return resident is not None and resident.number >= goal.number and not self._pilot.damaged

    def _describe(self) -> str:
        pilot = self._pilot
        if pilot is None or not self._driver.attached:
            return "starting" if self._standing.error else _WAITING
        if self._driver.fenced:
            return "fenced"
        if pilot.damaged:
            return "damaged"
        return "pinned" if pilot.held else "following"

    @property
    def fenced(self) -> bool:
        """Whether the engine serves nothing for want of good weights."""
        return self._driver.fenced

    @property
    def ready(self) -> bool:
        """Whether the engine serves what it should.

        Not before it has joined its channel: read it once, and reached the version that was the
        newest then, unless there was none, it is pinned, or the channel cannot be followed at all.
        Later only not while it is fenced.
        """
        return self._ready_once and not self.fenced

    @property
    def newest(self) -> Version | None:
        """The newest version on the channel, as far as it was read."""
        return None if self._pilot is None else self._pilot.subscriber.newest

    def status(self) -> dict[str, Any]:
        """How things stand, as plain values, without asking the engine."""
        return {
            "state": self._state,
            "ready": self.ready,
            "channel": self._settings.channel,
            "newest": plain(self.newest),
            "pinned": self._pilot is not None and self._pilot.held,
            "kv_policy": self._settings.kv_policy,
            **self._standing.as_dict(),
        }
