"""What the loopback Hub does wrong on request, whom it limits, and what it has counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "status", "drop", "lose_answer", "delay", "hold", "corrupt", "truncate", "cut", "stale",
    "refuse", "half", "expired", "lose_event", "reconnect", "reset",
]  # fmt: skip
"""What goes wrong with one request. It names the routes or classes it makes a difference to.

status: answered with `status` (and `retry_after_s`; for 429 `reset_s` in a `RateLimit` header),
nothing done. drop: connection closed, nothing done. lose_answer: done, then closed. delay: done
`delay_s` later. hold: done when `HubFaults.release` is called. corrupt: byte `n` of the answer has
one bit flipped. truncate: the answer ends after `n` bytes and is well formed. cut: the connection
closes after `n` bytes of it (corrupt, truncate, cut: `resolve`, `xorb`, `cdn.get`, `s3.get`).
stale: the newest `n` entries of the bucket are not seen (`tree`, `paths-info`, `resolve`,
`s3.list`, `s3.get`, `s3.head`). refuse: the first `n` operations of a `batch` fail. half: the last
`n` operations of a `batch` are not done, then the connection closes. expired: the token given is
good for nothing (`xet-read-token`, `xet-write-token`). lose_event: what a `batch` or `s3.put`
changed is told to no follower, ever. reconnect, reset: a stream of `events` begins with that event
and ends.
"""


@dataclass(frozen=True, kw_only=True)
class HubFault:
    """Something that goes wrong with requests to `where`.

    Args:
        where: a route or a class of routes, as the counts name them; `*` for any.
        kind: what goes wrong.
        times: how many requests suffer it; None for all that come.
        skip: how many matching requests pass unharmed first.
        path: what the request's path must contain.
    """

    where: str
    kind: Kind
    times: int | None = 1
    skip: int = 0
    path: str = ""
    status: int = 503
    retry_after_s: int | None = None
    reset_s: int | None = None
    delay_s: float = 0.0
    n: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown fault: {self.kind!r}")


class HubFaults:
    """The faults yet to happen. A request suffers the first that fits it. Safe from any thread."""

    def __init__(self) -> None:
        self.suffered: list[HubFault] = []
        self.names: frozenset[str] | None = None
        self._planned: list[tuple[HubFault, Counter[str]]] = []
        self._changed = threading.Condition()
        self._held: list[Callable[[], object]] = []

    def add(self, where: str, kind: Kind, **facts: object) -> HubFault:
        """Plan a fault; `facts` are the other fields of `HubFault`.

        Raises:
            ValueError: there is no such kind, or no such route or class in a Hub that runs.
        """
        fault = HubFault(where=where, kind=kind, **facts)  # type: ignore[arg-type]
        if self.names is not None and where not in self.names:
            raise ValueError(f"no route or class {where!r}; there are {sorted(self.names)}")
        with self._changed:
            self._planned.append((fault, Counter()))
        return fault

    def clear(self) -> None:
        """Forget what was planned and let go of what is held."""
        with self._changed:
            self._planned.clear()
        self.release()

    def draw(self, kind: str, route: str, path: str) -> HubFault | None:
        """The fault that a request suffers, which is thereby used up once."""
        with self._changed:
            for fault, used in self._planned:
                if fault.where not in ("*", kind, route) or fault.path not in path:
                    continue
                if fault.times is not None and used["hit"] >= fault.times:
                    continue
                used["seen"] += 1
                if used["seen"] > fault.skip:
                    used["hit"] += 1
                    self.suffered.append(fault)
                    return fault
        return None

    def hold(self, let_go: Callable[[], object]) -> None:
        """Note a request that waits until `let_go` is called."""
        with self._changed:
            self._held.append(let_go)
            self._changed.notify_all()

    def wait_held(self, n_requests: int, timeout_s: float = 30.0) -> None:
        """Wait until that many requests are held."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= n_requests, timeout_s):
                raise TimeoutError(f"{len(self._held)} of {n_requests} requests are held")

    def release(self, n_requests: int | None = None) -> int:
        """Let held requests go on, the first ones first. Returns how many did."""
        with self._changed:
            gone, self._held = self._held[:n_requests], self._held[len(self._held[:n_requests]) :]
        for let_go in gone:
            let_go()
        return len(gone)


class RateLimits:
    """Fixed windows of requests by class, as the Hub counts them. Used by one thread.

    Args:
        limits: requests a window by `api` and `resolvers`; a class not named has no limit.
        clock: seconds.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = dict(limits)
        self._window_s = window_s
        self._clock = clock
        self._started: dict[str, float] = {}
        self._used: Counter[str] = Counter()

    def take(self, kind: str) -> tuple[bool, dict[str, str]]:
        """Count a request of a class: whether it may pass, and the headers of its answer."""
        limit = self.limits.get(kind)
        if limit is None:
            return True, {}
        now = self._clock()
        if now - self._started.get(kind, -self._window_s) >= self._window_s:
            self._started[kind], self._used[kind] = now, 0
        self._used[kind] += 1
        left = max(0, limit - self._used[kind])
        reset_s = max(1, round(self._started[kind] + self._window_s - now))
        headers = {
            "RateLimit": f'"{kind}";r={left};t={reset_s}',
            "RateLimit-Policy": f'"fixed window";"{kind}";q={limit};w={self._window_s:.0f}',
        }
        return self._used[kind] <= limit, headers


class Counts:
    """How often each route and class of routes was asked. Safe to read from any thread."""

    def __init__(self) -> None:
        self._counter: Counter[str] = Counter()

    def add(self, *names: str) -> None:
        for name in names:
            self._counter[name] += 1

    def read(self) -> Counter[str]:
        return self._counter.copy()

    def reset(self) -> None:
        self._counter.clear()
