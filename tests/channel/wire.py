"""A wire to an S3 server that counts requests and fails as it is told."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["lost", "cut"] | tuple[int, str] | None
"""What happens to one request.

lost: the server does it, and the answer never comes. cut: the answer ends in the middle of its
body. (status, code): this is the answer, and the server is not asked. None: nothing.
"""

_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>so told</Message>{}</Error>"


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)


class Wire:
    """A loopback server before another one, as a context manager.

    Args:
        endpoint: where requests go to; None where each is answered with 404.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._host = None if endpoint is None else endpoint.removeprefix("http://")
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._at_once = 0
        self.most_at_once = 0
        self.seen: list[Seen] = []
        self.always: Fault = None if endpoint else (404, "")
        self.more_headers: dict[str, str] = {}
        self.more_body = ""
        self.content: bytes | None = None
        """What is answered with a status that is told, in place of an error's text."""
        self.hold: Callable[[], object] = lambda: None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def script(self, faults: Iterable[Fault]) -> None:
        """What happens to the next requests, one each; then nothing does."""
        self._faults = list(faults)

    def count(self) -> list[str]:
        """Method and path of what was asked since the last count, without a query's values."""
        seen, self.seen = self.seen, []
        return [f"{one.method} {one.path.partition('=')[0]}" for one in seen]

    def __enter__(self) -> Wire:
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do(self) -> None:
                wire._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            headers = {name.lower(): value for name, value in request.headers.items()}
            self.seen.append(Seen(request.command, request.path, headers, body))
            fault = self._faults.pop(0) if self._faults else self.always
        try:
            self.hold()
            self._answer(request, body, fault)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes, fault: Fault) -> None:
        if isinstance(fault, tuple):
            status, code = fault
            text = (_ERROR.format(code, self.more_body) if code else "").encode()
            text = text if self.content is None else self.content
            _reply(request, status, self.more_headers, text, len(text))
            return
        assert self._host is not None
        onward = http.client.HTTPConnection(self._host, timeout=30)
        try:
            onward.request(request.command, request.path, body, dict(request.headers.items()))
            answer = onward.getresponse()
            content = answer.read()
            headers = dict(answer.getheaders())
        finally:
            onward.close()
        n_bytes = int(headers.get("Content-Length") or len(content))
        if fault == "lost":
            request.close_connection = True
            return
        if fault == "cut":
            content = content[: len(content) // 2]
            request.close_connection = True
        _reply(request, answer.status, headers, content, n_bytes)


def _reply(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    content: bytes,
    n_bytes: int,
) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "connection"):
            request.send_header(name, value)
    if status >= 200 and status != 204:
        request.send_header("Content-Length", str(n_bytes))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
