"""Turns at the weights: reading them back, or changing them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Keeps those who read weights back and those who change them apart, one at a time.

    Whoever changes waits for one reader at most: readers that come later let it go first.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._taken = False
        self._n_changing = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._taken and not self._n_changing)
            self._taken = True
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._free:
            self._n_changing += 1
            self._free.wait_for(lambda: not self._taken)
            self._n_changing -= 1
            self._taken = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._free:
            self._taken = False
            self._free.notify_all()
