"""The Hub's feed of changes in a bucket: a stream of server-sent events that says when to look."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_delta.channel.hub_client import HubClient, Response
from vllm_delta.errors import DeltaError

SILENCE_S = 90.0
"""The Hub sends something every 30 s; after this long without a byte a stream is dead."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
LONGEST_WAIT_S = 900.0
"""Most that a request for patience is obeyed for."""

JOIN_S = 2.0
MAX_EVENT_BYTES = 16 << 20
MAX_CURSOR = 4096

_NO_FEED = (404, 405, 501)


def follow(
    hub: HubClient, concerns: Callable[[str], bool], wake: Callable[[], None]
) -> Callable[[], None]:
    """Call `wake` whenever a path that `concerns` is written to, and after every connection.

    Returns:
        Ends it, and returns when no more calls come. Where the Hub has no feed it has ended.
    """
    follower = _Follower(hub, concerns, wake)
    follower.start()
    return follower.stop


class _Follower(threading.Thread):
    """Keeps one stream open. Its errors are nobody's: who waits for a wake looks anyway."""

    def __init__(
        self, hub: HubClient, concerns: Callable[[str], bool], wake: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True, name=f"vllm-delta-events-{hub.bucket}")
        self._hub, self._concerns, self._wake = hub, concerns, wake
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cursor: str | None = None
        self._n_failures = 0

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._socket is not None:
                _shut(self._socket)
        if self is not threading.current_thread():
            self.join(JOIN_S)

    def run(self) -> None:
        while not self._stopping.is_set():
            wait_s: float | None = None
            try:
                if not self._follow_once():
                    return
            except DeltaError as error:
                wait_s = error.facts.get("retry_after_s")
                if error.facts.get("status") == 400:
                    self._cursor = None
            except (OSError, RuntimeError, ValueError):
                # A stream that was cut, or shut down under the reader, fails in many ways.
                pass
            self._stopping.wait(self._delay_s(wait_s))

    def _delay_s(self, asked_s: float | None) -> float:
        self._n_failures += 1
        longest_s = min(FIRST_DELAY_S * 2.0 ** min(self._n_failures - 1, 30), LONGEST_DELAY_S)
        delay_s = longest_s * random.uniform(0.5, 1.0)
        return delay_s if asked_s is None else min(max(asked_s, delay_s), LONGEST_WAIT_S)

    def _follow_once(self) -> bool:
        """Read one stream to its end. False: there is no feed."""
        params = None if self._cursor is None else {"cursor": self._cursor}
        headers = {"accept": "text/event-stream", "cache-control": "no-cache"}
        with self._hub.send(
            "GET", self._hub.api("/events"), headers=headers, params=params,
            read_timeout_s=SILENCE_S,
        ) as answer:  # fmt: skip
            if answer.status_code in _NO_FEED:
                return False
            if answer.status_code != 200:
                raise self._hub.error(answer)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                return False
            self._set_socket(answer)
            try:
                for name, data in _events(answer.iter_raw()):
                    if self._stopping.is_set() or not self._take(name, data):
                        break
            finally:
                self._set_socket(None)
        return True

    def _set_socket(self, answer: Response | None) -> None:
        """Let `stop` get at what the thread is about to read from."""
        stream = None if answer is None else answer.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        with self._lock:
            self._socket = found if isinstance(found, socket.socket) else None
            if self._stopping.is_set() and self._socket is not None:
                _shut(self._socket)

    def _take(self, name: str, data: dict[str, Any]) -> bool:
        """Act on one event. False: the stream ends here."""
        cursor = data.get("cursor")
        # It goes into an address: what fits into none would keep the feed from being opened again.
        if isinstance(cursor, str) and cursor.isascii() and len(cursor) <= MAX_CURSOR:
            self._cursor = cursor
        if name in ("ready", "changes"):
            self._n_failures = 0
        if name == "ready":
            # What came while nobody listened is not known to be nothing.
            self._wake()
        elif name == "changes":
            changes = data.get("changes")
            if isinstance(changes, list) and any(map(self._is_news, changes)):
                self._wake()
        elif name == "reset":
            self._cursor = None
        return name not in ("reset", "reconnect")

    def _is_news(self, change: Any) -> bool:
        if not isinstance(change, dict) or change.get("op") == "delete":
            return False
        return self._concerns(str(change.get("path", "")))


def _shut(connection: socket.socket) -> None:
    """Have the thread that reads from it read an end."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which takes away what that thread reads through.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _events(pieces: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream, by name, with their JSON; others are passed over."""
    rest, name, data, n_bytes = b"", "", b"", 0
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        n_bytes += len(piece)
        for line in lines:
            line = line.removesuffix(b"\r")
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                with contextlib.suppress(ValueError):
                    parsed = json.loads(data or b"{}")
                    if name and isinstance(parsed, dict):
                        yield name, parsed
                name, data, n_bytes = "", b"", len(rest)
            elif field == b"event":
                name = value.decode(errors="replace")
            elif field == b"data":
                data += value + b"\n"
        if n_bytes > MAX_EVENT_BYTES:
            raise ValueError("an event has no end")
