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

from vllm_delta.channel import open_channel
from vllm_delta.engine.calls import Port
from vllm_delta.engine.driver import Driver
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.pilot import Pilot
from vllm_delta.engine.settings import Settings
from vllm_delta.engine.spacing import Spacing
from vllm_delta.engine.standing import Standing, plain
from vllm_delta.errors import ChannelError, DeltaError, EngineError, SettingsError
from vllm_delta.format import Version

logger = init_logger(f"vllm.{__name__}")

_RECOMPUTE_POLL_S = 0.05
_AFTER_FAULT_S = 10.0
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
        self._wake = threading.Event()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()
        self._driver = Driver(port, settings, metrics=metrics, sleep=self._sleep)
        self._spacing = Spacing(settings, monotonic)
        self._standing = Standing(
            self._driver,
            self._spacing,
            metrics,
            first_backoff_s=settings.poll_interval_s,
            clock=clock,
            monotonic=monotonic,
        )
        self._pilot: Pilot | None = None
        self._state = "starting" if settings.channel else "no channel"
        self._scanned_at = monotonic()

    def run(self) -> None:
        """Follows until `stop`; for a thread of its own."""
        while not self._stopped.is_set():
            try:
                self._run_commands()
                self.cycle()
            except Exception as error:
                # A fault of ours. It must not end following, nor leave commands unanswered.
                logger.exception("Following goes on in %.0f s.", _AFTER_FAULT_S)
                self._standing.fail(EngineError("following failed", reason=repr(error)))
                self._wake.wait(_AFTER_FAULT_S)
            # The end of a recompute is only seen by looking.
            at_most_s = _RECOMPUTE_POLL_S if self._spacing.recomputing else math.inf
            self._wake.wait(min(self._settings.poll_interval_s, at_most_s))
            self._wake.clear()

    def stop(self) -> None:
        """Ends `run` after what it is doing."""
        self._stopped.set()
        self._wake.set()

    def submit(self, command: Callable[[], Any]) -> Future[Any]:
        """Has `run`'s thread call ``command``."""
        future: Future[Any] = Future()
        self._commands.put((command, future))
        self._wake.set()
        return future

    def _run_commands(self) -> None:
        while not self._commands.empty():
            command, future = self._commands.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 - it is the submitter's
                future.set_exception(error)

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EngineError("the follower was stopped")

    def cycle(self, *, eager: bool = False) -> None:
        """Looks at the channel once and goes as far as it may; errors end up in `status`.

        Args:
            eager: try again now what failed a moment ago.
        """
        if self._state in ("no channel", "refused"):
            return
        try:
            unread = self._read()
            if self._ready() and (eager or self._standing.may_retry):
                self._scan_if_due()
                self._steer().advance()
            if unread is not None:
                raise unread  # what was verified before it has been taken
            if self._caught_up():
                self._standing.succeed()
        except DeltaError as error:
            self._standing.fail(error)
        self._settle()

    def _steer(self) -> Pilot:
        if self._pilot is None:
            if self._settings.channel is None:
                raise EngineError("no channel is followed")
            store = open_channel(self._settings.channel)
            self._pilot = Pilot(
                store,
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
            return error
        return None

    def _ready(self) -> bool:
        """Asks the core for its state; whether there is a version to hold."""
        if self._pilot is None or self._pilot.subscriber.newest is None:
            return False
        pilot = self._pilot
        self._attach(pilot)
        self._driver.refresh()
        self._spacing.observe(self._driver.n_recomputing)
        return True

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
            unread = self._read()
            if unread is not None and (forward or not self._driver.attached):
                raise unread
            if not self._ready():
                raise ChannelError("nothing is published yet", state=self._state)
            command(self._steer())
        except DeltaError as error:
            self._standing.fail(error)
            raise
        else:
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
        self._standing.measure(self._pilot)

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
    def newest(self) -> Version | None:
        """The newest version on the channel, as far as it was read."""
        return None if self._pilot is None else self._pilot.subscriber.newest

    def status(self) -> dict[str, Any]:
        """How things stand, as plain values, without asking the engine."""
        return {
            "state": self._state,
            "channel": self._settings.channel,
            "newest": plain(self.newest),
            "pinned": self._pilot is not None and self._pilot.held,
            "kv_policy": self._settings.kv_policy,
            **self._standing.as_dict(),
        }
