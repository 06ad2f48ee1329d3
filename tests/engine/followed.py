"""Two ranks behind a whole follower, whose clock stands still and whose store fails when told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import Fleet
from tests.engine.halves import two_ranks
from vllm_delta.channel import LocalStore, RetryPolicy, Store
from vllm_delta.engine import follower
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import DeltaError
from vllm_delta.format import Manifest


class Told(Store):
    """A directory's store that counts what it is asked, fails as told, and can say that there is
    news."""

    def __init__(self, path: str | Path) -> None:
        self._store = LocalStore(path)
        self.error: DeltaError | None = None
        self.n_asked = 0
        self.wake: Callable[[], None] | None = None
        self.no_watch: DeltaError | None = None

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        return self._store.put_new(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        self.n_asked += 1
        if self.error is not None:
            raise self.error
        return self._store.get(key, max_bytes=max_bytes)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def watch(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        if self.no_watch is not None:
            raise self.no_watch
        self.wake = wake

        def end() -> None:
            self.wake = None

        return end


class Followed:
    """A fleet, its trainer and a follower.

    Attributes:
        now: the follower's time, in seconds.
        policies: with which it opened its store.
    """

    def __init__(self, channel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet: Fleet = two_ranks(channel)
        self.channel = channel
        self.store = Told(channel)
        self.now = 1000.0
        self.policies: list[RetryPolicy | None] = []

        def open_channel(url: str, *, policy: RetryPolicy | None = None) -> Store:
            self.policies.append(policy)
            return self.store

        monkeypatch.setattr(follower, "open_channel", open_channel)

    def step(self) -> Manifest:
        return self.fleet.trainer.step()

    def follow(self, **settings: Any) -> follower.Follower:
        """A new follower; it has not looked yet."""
        # It counts with prometheus_client, which comes with vLLM.
        from vllm_delta.engine.metrics import Metrics

        plain: dict[str, Any] = {"channel": str(self.channel), "rollback_bytes": 1 << 24}
        return follower.Follower(
            self.fleet,
            Settings(**plain | settings),
            metrics=Metrics(registry=None),
            monotonic=lambda: self.now,
        )


def number(followed: follower.Follower) -> int | None:
    version = followed.status()["version"]
    return None if version is None else int(version["number"])


def kind(followed: follower.Follower) -> str | None:
    error = followed.status()["error"]
    return None if error is None else str(error["kind"])
