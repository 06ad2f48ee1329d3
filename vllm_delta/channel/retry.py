"""Trying again: the one place where a failed call to a store is repeated."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from vllm_delta.channel.store import Store
from vllm_delta.errors import DeltaError, DigestError, RateLimitError, SettingsError

logger = logging.getLogger("vllm_delta")

_SAID_AFTER_S = 5.0
_MOST_DOUBLINGS = 64

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long and how often a failed call is repeated.

    Args:
        deadline_s: no attempt begins later than this after the call did, or, while an object is
            streamed, after its last piece came; 0 for a single attempt.
        first_delay_s: the longest wait after the first failure; it doubles with each. How long is
            waited is drawn between 0 and that, so that many clients do not come back together.
        longest_delay_s: where the doubling ends.
        n_attempts: attempts at most, the first included; None for as many as go.

    Raises:
        SettingsError: a value that makes no sense.
    """

    deadline_s: float = 60.0
    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0
    n_attempts: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.deadline_s < math.inf:
            raise SettingsError("deadline_s is not a time", value=self.deadline_s)
        if not 0 < self.first_delay_s <= self.longest_delay_s < math.inf:
            raise SettingsError(
                "delays do not grow from above 0",
                first_delay_s=self.first_delay_s,
                longest_delay_s=self.longest_delay_s,
            )
        if self.n_attempts is not None and self.n_attempts < 1:
            raise SettingsError("n_attempts is below 1", value=self.n_attempts)


class RetryingStore(Store):
    """A store whose calls are repeated while their errors say `retry`; all others raise at once.

    A `RateLimitError` that says how long to wait is obeyed: nothing is asked before. Where that is
    past the deadline it is raised at once, so that the caller can wait. When time is up the last
    error is raised as it came.

    `put_new` can find its own write of an attempt whose answer was lost, and say False for it:
    `Log` settles that by reading back. Calls may come from any thread and block as long as the
    policy allows, and as long again as one attempt takes. One warning is logged per call that
    waits for longer than 5 s.

    Args:
        store: what to ask.
        policy: how long and how often.
        clock: seconds that never go back.
        sleep: waits so many seconds; may raise to give up waiting.
        random: draws the waits.
    """

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Random | None = None,
    ) -> None:
        self.store = store
        self.policy = policy or RetryPolicy()
        self._clock = clock
        self._sleep = sleep
        self._random = random or Random()

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def atomic(self) -> bool:
        return self.store.atomic

    def __repr__(self) -> str:
        return f"RetryingStore({self.store!r})"

    def put(self, key: str, data: bytes) -> None:
        self._call(lambda: self.store.put(key, data), key)

    def put_new(self, key: str, data: bytes) -> bool:
        return self._call(lambda: self.store.put_new(key, data), key)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        """Write objects; where the store writes them one by one, what is written stays so.

        A store with a way of its own is given all of them again after an error.
        """
        if type(self.store).put_many is Store.put_many:
            super().put_many(objects)
        else:
            self._call(lambda: self.store.put_many(objects), f"{len(objects)} objects")

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return self._call(lambda: self.store.get(key, max_bytes=max_bytes), key)

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        """Read an object in pieces; after an error it is read on from the byte reached.

        No byte comes twice and none is left out. What was replaced meanwhile by something else of
        no greater length is not noticed here: check the digest.

        Raises:
            DigestError: besides the store's own reasons: the object vanished between two pieces.
        """

        def ask(reached: int) -> Iterator[bytes] | None:
            return self.store.stream(key, max_bytes=max_bytes, start=reached)

        pieces = self._call(lambda: ask(start), key)
        return None if pieces is None else self._resuming(pieces, ask, key, start)

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        self._call(lambda: self.store.delete(listed), ", ".join(listed[:1]))

    def list(self, prefix: str) -> list[str]:
        return self._call(lambda: self.store.list(prefix), prefix)

    def watch(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        return self.store.watch(wake)

    def _call(self, attempt: Callable[[], T], what: str) -> T:
        patience = self._patience(what)
        while True:
            try:
                result = attempt()
            except DeltaError as error:
                patience.wait(error)
            else:
                patience.over()
                return result

    def _resuming(
        self,
        pieces: Iterator[bytes],
        ask: Callable[[int], Iterator[bytes] | None],
        key: str,
        reached: int,
    ) -> Iterator[bytes]:
        source: Iterator[bytes] | None = pieces
        while True:
            patience = self._patience(key)
            piece: bytes | None = b""
            while piece == b"":  # an empty piece is no progress
                try:
                    if source is None and (source := ask(reached)) is None:
                        raise DigestError("an object vanished while it was read", key=key)
                    piece = next(source, None)
                except DeltaError as error:
                    source = None
                    patience.wait(error)
            patience.over()
            if piece is None:
                return
            reached += len(piece)
            yield piece

    def _patience(self, what: str) -> _Patience:
        return _Patience(self, what, self._clock())


class _Patience:
    """How long one call has been tried, and whether it is tried again."""

    def __init__(self, store: RetryingStore, what: str, started: float) -> None:
        self._store = store
        self._what = what
        self._started = started
        self._n_failed = 0
        self._said = False

    def wait(self, error: DeltaError) -> None:
        """Wait until the next attempt may be made; raises `error` where there is none."""
        store, policy = self._store, self._store.policy
        self._n_failed += 1
        if error.action != "retry" or self._n_failed == policy.n_attempts:
            raise error
        waited_s = store._clock() - self._started
        left_s = policy.deadline_s - waited_s
        asked_s = _asked_s(error)
        if left_s <= 0 or asked_s > left_s:
            raise error
        doublings = min(self._n_failed - 1, _MOST_DOUBLINGS)
        longest_s = min(policy.first_delay_s * 2.0**doublings, policy.longest_delay_s)
        delay_s = min(asked_s + store._random.uniform(0, longest_s), left_s)
        if not self._said and waited_s + delay_s > _SAID_AFTER_S:
            self._said = True
            logger.warning(
                "Waiting for %s (%s), for at most %.0f s: %s",
                store.url,
                self._what,
                policy.deadline_s,
                error,
            )
        store._sleep(delay_s)

    def over(self) -> None:
        if self._said:
            waited_s = self._store._clock() - self._started
            logger.warning("%s answers again, after %.0f s.", self._store.url, waited_s)


def _asked_s(error: DeltaError) -> float:
    """How long the store asks to be left alone; 0 where it does not say."""
    asked_s = error.facts.get("retry_after_s") if isinstance(error, RateLimitError) else None
    if not isinstance(asked_s, (int, float)) or not asked_s > 0:
        return 0.0
    return float(asked_s)
