"""What a channel needs from a store: six calls on flat keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from vllm_delta.format import HEAD_KEY

_KEY = re.compile(rf"m/[0-9]{{12}}|b/[0-9a-f]{{64}}|{HEAD_KEY}")


class Store(Protocol):
    """Where a channel's objects live. Every method may block and may be called from any thread.

    A store raises nothing but kinds of `DeltaError` for what the world does: `ChannelError` when
    it cannot be reached or has vanished, `ChannelFullError` when it has no room, `SettingsError`
    when it is not allowed. After an error of a write, the write may or may not have landed, now or
    later; `Log` settles that by reading back. `vllm_delta.testing.ChannelContract` checks a store.
    """

    @property
    def url(self) -> str:
        """The store's address, for messages and for opening it elsewhere."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing one that is there. Readers see the old or the new, whole."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there, in one atomic step over all processes.

        Returns:
            True when it was written, False when the key was taken.
        """

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """Read an object as of now, never from a cache.

        Returns:
            Its bytes, or None when there is none.

        Raises:
            DigestError: it is larger than `max_bytes`; told before it is read.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; keys without one are passed over."""

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted; may be behind. For tools, never for safety."""


def check_key(key: str) -> str:
    """Return `key`, or raise ValueError when it is not one of a channel's three kinds of key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a channel's key: {key!r}")
    return key


def is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None
