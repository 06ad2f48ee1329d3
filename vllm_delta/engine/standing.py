"""How following a channel stands: for people, and for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_delta.engine.driver import Committed, Driver
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.pilot import Pilot
from vllm_delta.engine.spacing import Spacing
from vllm_delta.errors import DeltaError, RateLimitError
from vllm_delta.format import Version

logger = init_logger(f"vllm.{__name__}")

_LONGEST_BACKOFF_S = 60.0
_LONGEST_PATIENCE_S = 3600.0
_LOG_AGAIN_S = 60.0


class Standing:
    """Keeps the last commit, the last errors and the lag, and how long to leave off after errors.

    Written by the follower's thread; `as_dict` may be read by any.

    Args:
        driver: the engine.
        spacing: when the next commit may be made.
        metrics: where the numbers go.
        first_backoff_s: half the pause after a first error; it doubles with each.
        clock: seconds since the epoch.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        driver: Driver,
        spacing: Spacing,
        metrics: Metrics,
        *,
        first_backoff_s: float,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._spacing = spacing
        self._metrics = metrics
        self._first_backoff_s = first_backoff_s
        self._clock = clock
        self._monotonic = monotonic
        self._last_error: dict[str, Any] | None = None
        self._last_commit: dict[str, Any] | None = None
        self._lag: tuple[int, float | None] = (0, None)
        self._n_failures = 0
        self._retry_at = 0.0
        self._ask_at = 0.0
        self._logged_at = -math.inf
        self.error: dict[str, Any] | None = None

    @property
    def may_retry(self) -> bool:
        """Whether enough time has passed since the last error."""
        return self.retry_s <= 0

    @property
    def retry_s(self) -> float:
        """Seconds until what failed may be tried again."""
        return max(0.0, self._retry_at - self._monotonic())

    def retry_now(self) -> None:
        """There is news; do not wait any longer."""
        self._retry_at = 0.0

    def patience(self) -> RateLimitError | None:
        """What to answer in place of asking a store that wants to be left alone; None: ask it."""
        left_s = self._ask_at - self._monotonic()
        if left_s <= 0:
            return None
        return RateLimitError("the store asked to be left alone", retry_after_s=left_s)

    def note(self, done: Committed) -> None:
        """Takes note of a commit."""
        if not done.versions:
            return
        self._spacing.committed(self._driver.n_recomputing)
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

    def succeed(self) -> None:
        """All is well: the current error is over."""
        self.error, self._n_failures, self._retry_at = None, 0, 0.0

    def fail(self, error: DeltaError) -> None:
        """Takes note of an error that ended what was being done."""
        self.report(error)
        self._n_failures += 1
        backoff_s = self._first_backoff_s * 2.0 ** min(self._n_failures, 16)
        now = self._monotonic()
        if isinstance(error, RateLimitError):
            asked_s = error.facts.get("retry_after_s") or 0.0
            self._ask_at = max(self._ask_at, now + min(asked_s, _LONGEST_PATIENCE_S))
        self._retry_at = max(now + min(backoff_s, _LONGEST_BACKOFF_S), self._ask_at)

    def report(self, error: DeltaError) -> None:
        """Takes note of an error."""
        said, now = error.to_dict(), self._monotonic()
        news = self.error is None or self.error != said | {"at": self.error["at"]}
        self.error = self._last_error = {**said, "at": self._clock()}
        self._metrics.errors.labels(kind=type(error).__name__).inc()
        # A channel that is away is looked for twice a second; the log need not say so each time.
        if news or now >= self._logged_at + _LOG_AGAIN_S:
            self._logged_at = now
            logger.warning("Still serving version %s: %s", self._driver.resident, error)

    def measure(self, pilot: Pilot | None) -> None:
        """Brings lag and gauges up to date."""
        self._lag = self._measure_lag(pilot)
        driver, metrics = self._driver, self._metrics
        metrics.version.set(-1 if driver.resident is None else driver.resident.number)
        metrics.lag_versions.set(self._lag[0])
        metrics.lag_s.set(self._lag[1] or 0.0)
        metrics.kv_age.set(driver.core.get("oldest_kv_versions") or 0)
        metrics.spacing_s.set(self._spacing.interval_s)
        metrics.recompute_share.set(self._spacing.share)
        metrics.fenced.set(driver.fenced)

    def _measure_lag(self, pilot: Pilot | None) -> tuple[int, float | None]:
        resident = self._driver.resident
        newest = None if pilot is None else pilot.subscriber.newest
        if pilot is None or newest is None or newest == resident:
            return 0, None
        n_versions = newest.number - (-1 if resident is None else resident.number)
        try:
            chain = pilot.plan()
        except DeltaError:
            return n_versions, None
        # What the plan begins with may be newer: a merged delta stands for versions before it.
        since = None if resident is None else pilot.subscriber.time_after(resident)
        if since is None and chain:
            since = chain[0].time
        return n_versions, None if since is None else self._clock() - since

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        core = self._driver.core
        return {
            "version": plain(self._driver.resident),
            "lag_versions": self._lag[0],
            "lag_s": self._lag[1],
            "wait_s": self._spacing.wait_s,
            "last_commit": self._last_commit,
            "error": self.error,
            "last_error": self._last_error,
            **{key: core.get(key) for key in ("weight_version", "pause", "fence", "sleeping")},
            "oldest_kv_versions": core.get("oldest_kv_versions"),
        }


def plain(version: Version | None) -> dict[str, Any] | None:
    """A version for people."""
    return None if version is None else {"number": version.number, "root": version.root}
