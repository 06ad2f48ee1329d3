"""Follows a channel: looks again and again, moves the engine, and says how things stand."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger

from vllm_delta.channel import open_channel
from vllm_delta.engine.calls import Port
from vllm_delta.engine.driver import Committed, Driver
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.pilot import Pilot
from vllm_delta.engine.settings import Settings
from vllm_delta.engine.spacing import Spacing
from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Version

logger = init_logger(f"vllm.{__name__}")

_LONGEST_BACKOFF_S = 60.0
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
        self._metrics = metrics
        self._clock = clock
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()
        self._driver = Driver(port, settings, metrics=metrics, sleep=self._sleep)
        self._spacing = Spacing(settings, monotonic)
        self._pilot: Pilot | None = None
        self._state = "starting" if settings.channel else "no channel"
        self._error: dict[str, Any] | None = None
        self._last_error: dict[str, Any] | None = None
        self._last_commit: dict[str, Any] | None = None
        self._lag: tuple[int, float | None] = (0, None)
        self._scanned_at = monotonic()
        self._n_failures = 0
        self._retry_at = 0.0

    def run(self) -> None:
        """Follows until `stop`; for a thread of its own."""
        while not self._stopped.is_set():
            self._run_commands()
            self.cycle()
            self._wake.wait(self._settings.poll_interval_s)
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

    def cycle(self) -> None:
        """Looks at the channel once and goes as far as it may; errors end up in `status`."""
        if self._state in ("no channel", "refused"):
            return
        try:
            if self._look() and self._monotonic() >= self._retry_at:
                self._scan_if_due()
                self._steer().advance()
                if self._caught_up():
                    self._succeed()
        except DeltaError as error:
            self._fail(error)
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
                note=self._note,
                report=self._report,
            )
        return self._pilot

    def _look(self) -> bool:
        """Reads the channel and the core's state; whether there is a version to hold."""
        pilot = self._steer()
        if pilot.look():
            self._retry_at = 0.0
        if pilot.subscriber.newest is None:
            return False
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
            if error.action in _HOPELESS:
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
        return self._command(lambda pilot: pilot.go(number))

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

    def _command(self, command: Callable[[Pilot], Any]) -> dict[str, Any]:
        if self._state in ("no channel", "refused"):
            raise EngineError("no channel is followed", state=self._state)
        try:
            if not self._look():
                raise EngineError("nothing is published yet", state=self._state)
            command(self._steer())
        except DeltaError as error:
            self._fail(error)
            raise
        else:
            self._succeed()
        finally:
            self._settle()
        return {"version": _plain(self._driver.resident), "state": self._state}

    def _note(self, done: Committed) -> None:
        if not done.versions:
            return
        self._spacing.committed()
        self._last_commit = {
            "versions": [version.number for version in done.versions],
            "at": self._clock(),
            "payload_bytes": done.n_bytes,
            "stage_s": done.stage_s,
            "check_ms": 1e3 * done.check_s,
            "apply_ms": 1e3 * done.apply_s,
            "pause_ms": 1e3 * done.pause_s,
        }
        logger.info("Version %s, paused for %.1f ms.", done.versions[-1], 1e3 * done.pause_s)

    def _succeed(self) -> None:
        self._error, self._n_failures, self._retry_at = None, 0, 0.0

    def _fail(self, error: DeltaError) -> None:
        self._report(error)
        self._n_failures += 1
        backoff_s = self._settings.poll_interval_s * 2.0 ** min(self._n_failures, 16)
        self._retry_at = self._monotonic() + min(backoff_s, _LONGEST_BACKOFF_S)

    def _report(self, error: DeltaError) -> None:
        self._error = self._last_error = {**error.to_dict(), "at": self._clock()}
        self._metrics.errors.labels(kind=type(error).__name__).inc()
        logger.warning("Still serving version %s: %s", self._driver.resident, error)

    def _caught_up(self) -> bool:
        return self.newest == self._driver.resident and not self._steer().damaged

    def _settle(self) -> None:
        """Brings state, lag and gauges up to date."""
        if self._state not in ("no channel", "refused"):
            self._state = self._describe()
        self._lag = self._measure_lag()
        driver, metrics = self._driver, self._metrics
        metrics.version.set(-1 if driver.resident is None else driver.resident.number)
        metrics.lag_versions.set(self._lag[0])
        metrics.lag_s.set(self._lag[1] or 0.0)
        metrics.kv_age.set(driver.core.get("oldest_kv_versions") or 0)
        metrics.spacing_s.set(self._spacing.interval_s)
        metrics.recompute_share.set(self._spacing.share)
        metrics.fenced.set(driver.fenced)

    def _describe(self) -> str:
        pilot = self._pilot
        if pilot is None or not self._driver.attached:
            return "starting" if self._error else "waiting for the channel"
        if self._driver.fenced:
            return "fenced"
        if pilot.damaged:
            return "damaged"
        return "following" if pilot.pinned is None else "pinned"

    def _measure_lag(self) -> tuple[int, float | None]:
        resident, newest = self._driver.resident, self.newest
        if self._pilot is None or newest is None or newest == resident:
            return 0, None
        n_versions = newest.number - (-1 if resident is None else resident.number)
        try:
            chain = self._pilot.plan()
        except DeltaError:
            return n_versions, None
        return n_versions, self._clock() - chain[0].time if chain else None

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
        core = self._driver.core
        return {
            "state": self._state,
            "channel": self._settings.channel,
            "version": _plain(self._driver.resident),
            "newest": _plain(self.newest),
            "pinned": _plain(None if self._pilot is None else self._pilot.pinned),
            "lag_versions": self._lag[0],
            "lag_s": self._lag[1],
            "kv_policy": self._settings.kv_policy,
            "wait_s": self._spacing.wait_s,
            "last_commit": self._last_commit,
            "error": self._error,
            "last_error": self._last_error,
            **{key: core.get(key) for key in ("weight_version", "pause", "fence", "sleeping")},
            "oldest_kv_versions": core.get("oldest_kv_versions"),
        }


def _plain(version: Version | None) -> dict[str, Any] | None:
    return None if version is None else {"number": version.number, "root": version.root}
