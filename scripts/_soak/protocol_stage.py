"""A stage for trainers and readers: one acts at a time, and every call of a store is a cue.

Each actor has a thread of its own, but only the one that holds the baton runs. At a cue the seed
says who goes on, so calls of different actors fall between each other in any order, and a seed
gives the same order again. Time is virtual: calls and waits move it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable

START_S = 1_700_000_000.0
_CALL_S = 0.05
_MOST_CUES = 60_000
_HUNG_S = 60.0
_KEPT_CALLS = 40
_DELIVERY = 0.08
"""Chance at each cue that a write which is under way arrives."""


class AbandonedError(BaseException):
    """The round is over for a reason that its end tells."""


class Actor:
    """Somebody on the stage; runs `body` on a thread of its own."""

    def __init__(self, name: str, body: Callable[[], None], wake_s: float) -> None:
        self.name = name
        self.body = body
        self.wake_s = wake_s
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None


class Stage:
    """Who is on, what time it is, what is under way, and what has gone wrong so far.

    Attributes:
        calm: no more faults: what is left is to see that all ends well.
    """

    def __init__(self, draw: random.Random, *, stickiness: float = 0.5) -> None:
        self.draw = draw
        self.now_s = START_S
        self.calm = False
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []
        self.n_cues = 0
        self._calls: deque[str] = deque(maxlen=_KEPT_CALLS)
        self._late: list[Callable[[], None]] = []
        self._stickiness = stickiness
        self._actors: list[Actor] = []
        self._running: Actor | None = None
        self._over = threading.Event()
        self._abandoned = False

    def clock(self) -> float:
        """Seconds that only go forward."""
        return self.now_s

    def note(self, call: str) -> None:
        """Keep a call for the trace."""
        self._calls.append(f"{self.now_s - START_S:.2f} {call}")

    def violate(self, text: str) -> None:
        """Something happened that must not; told with the calls that led to it."""
        self.violations.append("\n".join([text, *(f"    {call}" for call in self._calls)]))

    def enter(self, name: str, body: Callable[[], None], *, after_s: float = 0.0) -> None:
        """Add an actor, before `run`."""
        self._actors.append(Actor(name, body, self.now_s + after_s))

    def run(self) -> None:
        """Let all act until all are done. Blocks."""
        if not self._actors:
            return
        self._over.clear()
        for actor in self._actors:
            actor.thread = threading.Thread(target=self._perform, args=(actor,), daemon=True)
            actor.thread.start()
        threads = [actor.thread for actor in self._actors]
        self._running = self._next()
        self._running.baton.release()
        if not self._over.wait(_HUNG_S):
            self.violate(f"{self._running.name} hangs")
            raise AbandonedError
        for thread in threads:
            assert thread is not None
            thread.join()
        self._running = None

    def cue(self, seconds: float = 0.0, *, away: bool = False) -> None:
        """Let others act, for so long at least; only moves time for who is not an actor.

        Args:
            away: rather another one than the same again.
        """
        me = self._running
        if me is None or me.thread is not threading.current_thread():
            self.now_s += seconds
            return
        self.n_cues += 1
        if self.n_cues > _MOST_CUES and not self._abandoned:
            self._abandoned = True
            self.violate("the round does not end")
        self.now_s += _CALL_S * self.draw.random()
        me.wake_s = self.now_s + seconds
        if self._late and self.draw.random() < _DELIVERY:
            self._late.pop(self.draw.randrange(len(self._late)))()
        if seconds or away or self.draw.random() >= self._stickiness:
            other = self._next(me if away else None)
            if other is not me:
                self._running = other
                other.baton.release()
                me.baton.acquire()
        if self._abandoned:
            raise AbandonedError

    def sleep(self, seconds: float) -> None:
        self.cue(seconds)

    def send_late(self, write: Callable[[], None]) -> None:
        """Have a write arrive at some later cue."""
        self._late.append(write)

    def deliver(self) -> None:
        """Let all that is under way arrive, in any order."""
        self.draw.shuffle(self._late)
        while self._late:
            self._late.pop()()

    def _next(self, last: Actor | None = None) -> Actor:
        """Who acts next; `last` only if nobody else can."""
        ready = [actor for actor in self._actors if actor.wake_s <= self.now_s]
        if not ready:
            self.now_s = min(actor.wake_s for actor in self._actors)
            ready = [actor for actor in self._actors if actor.wake_s <= self.now_s]
        return self.draw.choice([actor for actor in ready if actor is not last] or ready)

    def _perform(self, actor: Actor) -> None:
        actor.baton.acquire()
        try:
            actor.body()
        except AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001, an actor must not end in any other way
            self.violate(f"{actor.name} ended with {type(error).__name__}: {error}")
        self._actors.remove(actor)
        if not self._actors:
            self._over.set()
            return
        self._running = self._next()
        self._running.baton.release()
