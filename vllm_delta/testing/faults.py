"""A store in memory, and one that fails now and then."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from vllm_delta.channel import Store
from vllm_delta.channel.store import check_key
from vllm_delta.errors import ChannelError, DigestError

Fault = Literal["transport", "lost_answer", "late", "corrupt", "stale_list", "crash"]
"""What can go wrong with one call of a store.

transport: `ChannelError`, and nothing happened. lost_answer: it happened, then `ChannelError`.
late: `ChannelError` now; a write happens when `FaultyChannel.deliver` is called. corrupt: a blob
is read with one byte changed. stale_list: a listing misses its newest keys. crash: `SimulatedCrash`
before the call, and before every later one.
"""


class SimulatedCrash(BaseException):
    """The process is dead: nothing may catch this and go on."""


class MemoryStore(Store):
    """A `Store` in this process's memory, for tests. Safe to use from any thread."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{id(self):x}"

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._lock:
            taken = check_key(key) in self._objects
            if not taken:
                self._objects[key] = bytes(data)
            return not taken

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is not None and len(data) > max_bytes:
            raise DigestError(
                "an object is too large", key=key, n_bytes=len(data), max_bytes=max_bytes
            )
        return data

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))


class FaultyChannel(Store):
    """A store whose calls fail now and then: by seed, by script, or by a crash at one step.

    Args:
        store: the store that calls reach when they do.
        seed: of the faults drawn by `rates` and of which byte is corrupted.
        rates: for each fault the probability that a call which can suffer it does.
        crash_at: the number of the call, from 0, before which the process dies.
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        crash_at: int | None = None,
    ) -> None:
        self.store = store
        self.crash_at = crash_at
        self.n_calls = 0
        self.suffered: list[Fault] = []
        self._rates = dict(rates or {})
        self._random = random.Random(seed)
        self._script: list[Fault | None] = []
        self._late: list[Callable[[], object]] = []
        self._dead = False
        unknown = set(self._rates) - set(get_args(Fault))
        if unknown:
            raise ValueError(f"unknown faults: {sorted(unknown)}")

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def atomic(self) -> bool:
        return self.store.atomic

    def script(self, faults: Iterable[Fault | None]) -> None:
        """Have the next calls suffer these, one each, in place of what was left of a script.

        A call that cannot suffer its fault passes unharmed.
        """
        self._script = list(faults)

    def deliver(self) -> int:
        """Let every late write happen now, in the order sent. Returns how many there were."""
        late, self._late = self._late, []
        for write in late:
            with contextlib.suppress(ChannelError):
                write()
        return len(late)

    def put(self, key: str, data: bytes) -> None:
        self._write(lambda: self.store.put(key, data), key)

    def put_new(self, key: str, data: bytes) -> bool:
        return bool(self._write(lambda: self.store.put_new(key, data), key))

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        self._write(lambda: self.store.delete(listed), ",".join(listed))

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        corruptible: tuple[Fault, ...] = ("corrupt",) if key.startswith("b/") else ()
        fault = self._next_fault(("transport", *corruptible), key)
        data = self.store.get(key, max_bytes=max_bytes)
        if fault == "corrupt" and data:
            place = self._random.randrange(len(data))
            flipped = data[place] ^ self._random.randint(1, 255)
            return data[:place] + bytes([flipped]) + data[place + 1 :]
        return data

    def list(self, prefix: str) -> list[str]:
        fault = self._next_fault(("transport", "stale_list"), prefix)
        keys = self.store.list(prefix)
        return keys[: -self._random.randint(1, 3)] if fault == "stale_list" else keys

    def _write(self, write: Callable[[], Any], key: str) -> Any:
        fault = self._next_fault(("transport", "lost_answer", "late"), key)
        if fault == "late":
            self._late.append(write)
            raise ChannelError("simulated time-out", key=key)
        answer = write()
        if fault == "lost_answer":
            raise ChannelError("simulated loss of the answer", key=key)
        return answer

    def _next_fault(self, possible: tuple[Fault, ...], key: str) -> Fault | None:
        fault: Fault | None = None
        if self._script:
            fault = self._script.pop(0)
        else:
            for name in ("crash", *possible):
                if self._random.random() < self._rates.get(name, 0.0):
                    fault = name
                    break
        self._dead |= fault == "crash" or self.n_calls == self.crash_at
        self.n_calls += 1
        if self._dead:
            raise SimulatedCrash(key)
        if fault not in possible:
            return None
        self.suffered.append(fault)
        if fault == "transport":
            raise ChannelError("simulated transport error", key=key)
        return fault
