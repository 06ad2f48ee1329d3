"""When a channel is looked at: every so often, and when its store says that there may be news."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from vllm_delta.channel import Store
from vllm_delta.errors import DeltaError


class Lookout:
    """Waits between two looks. `wake` may be called from any thread, the rest from one.

    Args:
        monotonic: seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._woken = threading.Event()
        self._next_at = -math.inf
        self._watched: Store | None = None
        self._end_watch: Callable[[], None] | None = None

    def wake(self) -> None:
        """Ends a wait; the next look is due."""
        self._woken.set()

    def due(self, poll_s: float) -> bool:
        """Whether to look now; the next time is then so many seconds later."""
        now = self._monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + poll_s
        return True

    def wait(self, at_most_s: float) -> None:
        """Waits until a look is due, or so many seconds."""
        left_s = self._next_at - self._monotonic()
        if self._woken.wait(max(0.0, min(left_s, at_most_s, threading.TIMEOUT_MAX))):
            self._woken.clear()
            self._next_at = -math.inf

    def put_off(self, seconds: float) -> None:
        """Waits so long, unless somebody wakes it."""
        self._next_at = self._monotonic() + seconds
        self.wait(seconds)

    def watch(self, store: Store) -> DeltaError | None:
        """Has the store wake it, if the store can and was not asked before.

        Returns:
            Why it cannot.
        """
        if store is self._watched:
            return None
        self.end()
        self._watched = store
        try:
            self._end_watch = store.watch(self.wake)
        except DeltaError as error:
            return error
        return None

    def end(self) -> None:
        """Ends the watch."""
        end, self._end_watch, self._watched = self._end_watch, None, None
        if end is not None:
            end()
