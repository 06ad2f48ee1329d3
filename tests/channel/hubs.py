"""Aids for the tests of a channel on the Hub."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_delta.channel import Store
from vllm_delta.channel.hub import SMALL_BYTES, HubStore
from vllm_delta.format import blob_key
from vllm_delta.testing.hub import LoopbackHub

BLOB = blob_key("ab" * 32)
LARGE = SMALL_BYTES + 1


def opened(hub: LoopbackHub, bucket: str, prefix: str = "run", **options: Any) -> HubStore:
    return HubStore(bucket, prefix, endpoint=hub.endpoint, **({"token": hub.token} | options))


def streamed(store: Store, key: str, n_bytes: int, start: int = 0) -> bytes | None:
    pieces = store.stream(key, max_bytes=n_bytes, start=start)
    return None if pieces is None else b"".join(pieces)


class Answers:
    """What a test wants to be told, in place of the Hub."""

    def __init__(self, answers: list[tuple[int, dict[str, str], bytes]]) -> None:
        self.asked: list[dict[str, str]] = []
        self._answers = answers

    def __enter__(self) -> str:
        test = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                test.asked.append({key.lower(): value for key, value in self.headers.items()})
                status, headers, body = test._answers.pop(0)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def told(*answers: tuple[int, dict[str, str], bytes]) -> Answers:
    return Answers(list(answers))


def asking(endpoint: str) -> HubStore:
    return HubStore("me/b", endpoint=endpoint, token="hf_secret")


class Woken:
    """Counts wakes, and waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.n = 0

    def __call__(self) -> None:
        with self._changed:
            self.n += 1
            self._changed.notify_all()

    def wait(self, n: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.n >= n, timeout_s)
