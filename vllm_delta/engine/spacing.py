"""When the next commit may be made, so that recomputing KV does not eat the engine."""

from __future__ import annotations

from collections.abc import Callable

from vllm_delta.engine.settings import Settings


class Spacing:
    """Spaces commits by a minimum interval and by what the last one cost to recompute.

    With the policy ``reset`` every running request is prefilled again. That time is measured
    from the commit until the last of them is back, and bounds how soon the next may follow.

    Args:
        settings: ``min_interval_s``, ``max_recompute_share``.
        clock: monotonic seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._committed_at: float | None = None
        self._recomputed_at: float | None = None

    def committed(self, n_recomputing: int) -> None:
        """A commit ended now, and so many requests must be prefilled again."""
        self._committed_at = self._clock()
        self._recomputed_at = None if n_recomputing else self._committed_at

    def observe(self, n_recomputing: int) -> None:
        """So many requests have not got back to where the last commit caught them."""
        if self._recomputed_at is None and n_recomputing == 0:
            self._recomputed_at = self._clock()

    @property
    def recomputing(self) -> bool:
        """Whether requests are still being prefilled again."""
        return self._committed_at is not None and self._recomputed_at is None

    @property
    def recompute_s(self) -> float:
        """How long the last commit's recompute took, or takes so far."""
        if self._committed_at is None:
            return 0.0
        end = self._clock() if self._recomputed_at is None else self._recomputed_at
        return end - self._committed_at

    @property
    def share(self) -> float:
        """Share of the time since the last commit that went into recompute."""
        if self._committed_at is None:
            return 0.0
        return self.recompute_s / max(self._clock() - self._committed_at, 1e-9)

    @property
    def interval_s(self) -> float:
        """Seconds that must lie between the last commit and the next."""
        by_cost = self.recompute_s / self._settings.max_recompute_share
        return max(self._settings.min_interval_s, by_cost)

    @property
    def wait_s(self) -> float:
        """Seconds until the next commit may be made; 0 for now."""
        if self._committed_at is None:
            return 0.0
        return max(0.0, self._committed_at + self.interval_s - self._clock())
