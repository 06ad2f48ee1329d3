"""What a channel needs from a store: a few calls on flat keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from vllm_delta.format import HEAD_KEY

_KEY = re.compile(rf"m/[0-9]{{12}}(\.[0-9a-f]{{32}})?|b/[0-9a-f]{{64}}|{HEAD_KEY}")


class Store(Protocol):
    """Where a channel's objects live. Every method may block and may be called from any thread.

    A store raises nothing but kinds of `DeltaError` for what the world does: `ChannelError` when
    it cannot be reached or has vanished (`RateLimitError` when it asks for patience),
    `ChannelFullError` when it has no room, `SettingsError` when it is not allowed (`AuthError`,
    `NotFoundError`). It retries nothing: `RetryingStore` does. After an error of a write, the write
    may or may not have landed, now or later; `Log` settles that by reading back.
    `vllm_delta.testing.ChannelContract` checks a store. Subclasses inherit the methods that have a
    body here.
    """

    @property
    def url(self) -> str:
        """The store's address, for messages and for opening it elsewhere."""

    @property
    def atomic(self) -> bool:
        """Whether of all processes that `put_new` one key at most one is told True."""
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing one that is there. Readers see the old or the new, whole."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there, in one step over all processes if `atomic`.

        Returns:
            True when it was written, False when the key was taken.
        """

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        """Write objects as `put` does, together where the store can; not in one step.

        After an error any of them may have been written.
        """
        for key, data in objects.items():
            self.put(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """Read an object as of now, never from a cache.

        Returns:
            Its bytes, or None when there is none.

        Raises:
            DigestError: it is larger than `max_bytes`; told before it is read.
        """

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        """Read an object in pieces, as they come.

        Args:
            start: bytes at the object's beginning to leave out.

        Returns:
            Its pieces, or None when there is none. Errors may come between two pieces.

        Raises:
            DigestError: it is larger than `max_bytes`, `start` included.
        """
        data = self.get(key, max_bytes=max_bytes)
        return None if data is None else iter([data[start:]] if data[start:] else [])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; keys without one are passed over."""

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted; may be behind. For tools, never for safety."""

    def watch(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Have `wake` called, from another thread, whenever the channel may have something new.

        It is a help, no promise: whoever watches still looks now and then.

        Returns:
            Ends the watch; None where the store cannot tell.
        """
        return None


def check_key(key: str) -> str:
    """Return `key`, or raise ValueError when it is not one of a channel's kinds of key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a channel's key: {key!r}")
    return key


def is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None
