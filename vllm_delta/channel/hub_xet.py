"""Bytes to and from Xet, the Hub's content store, held in memory on the way."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from vllm_delta.channel.hub_client import HubClient, require
from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    RateLimitError,
)

TOKEN_MARGIN_S = 60.0
"""A token with less time left than this is not begun with."""

_SETTINGS = {
    "client.retry_max_attempts": ("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", 2),
    "client.retry_base_delay": ("HF_XET_CLIENT_RETRY_BASE_DELAY", timedelta(seconds=0.5)),
    "client.retry_max_duration": ("HF_XET_CLIENT_RETRY_MAX_DURATION", timedelta(seconds=5)),
    "client.connect_timeout": ("HF_XET_CLIENT_CONNECT_TIMEOUT", timedelta(seconds=10)),
}
"""Bounds on what `hf_xet` repeats by itself: in our sessions only, unless the environment says."""

_READ_TIMEOUT = "client.read_timeout", "HF_XET_CLIENT_READ_TIMEOUT"
_SILENCE = {"read": timedelta(seconds=30), "write": timedelta(seconds=120)}
"""Longest wait for the next bytes. A write waits while its 64 MiB pieces are on their way."""

_RANGE_BYTES = 8 << 20
"""Asked for at a time: `hf_xet` gives a range as one piece, and it is hashed beside the next."""

_REFUSED = re.compile(r"\((401 Unauthorized|403 Forbidden)\)")
_EMPTY_HASH = "0" * 64
_LATEST_S = 1e12


@dataclass(frozen=True)
class _Token:
    """A right to read or to write that Xet gives for an hour or so."""

    endpoint: str
    secret: str
    expires_s: float

    def __repr__(self) -> str:
        return f"_Token({self.endpoint!r})"


class Xet:
    """A bucket's bytes in Xet. Safe from any thread; blocks as long as `_SETTINGS` allow.

    Tokens and the connections to read with are kept until shortly before the token expires, and
    within a transfer `hf_xet` renews the token by itself. One that Xet refuses is renewed once.
    """

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._tokens: dict[str, _Token] = {}
        self._group: tuple[int, _Token, Any] | None = None

    def put(self, objects: Sequence[bytes]) -> list[str]:
        """Upload objects and return their Xet hashes; in the bucket nothing has changed yet."""
        while True:
            token, is_new = self._token("write")
            try:
                return self._upload(token, objects)
            except AuthError:
                self._forget("write", token)
                if is_new:
                    raise

    def stream(self, xet_hash: str, n_bytes: int, start: int = 0) -> Iterator[bytes]:
        """An object's bytes from `start` on, in pieces; their content is not verified by Xet."""
        if xet_hash == _EMPTY_HASH:
            return
        # The next range comes while the caller is busy with this one.
        with ThreadPoolExecutor(1) as ahead:
            coming: Future[list[bytes]] | None = None
            for first in range(start, n_bytes, _RANGE_BYTES):
                this, coming = coming, ahead.submit(self._range, xet_hash, n_bytes, first)
                if this is not None:
                    yield from this.result()
            if coming is not None:
                yield from coming.result()

    def _range(self, xet_hash: str, n_bytes: int, start: int) -> list[bytes]:
        """The pieces of one range, all of them."""
        end = min(start + _RANGE_BYTES, n_bytes)
        pieces: list[bytes] = []
        while start < end:
            token, is_new = self._token("read")
            cause: Exception | None = None
            try:
                info = require("hf_xet", "1.8").XetFileInfo(xet_hash, n_bytes)
                for piece in self._reader(token).download_stream(info, start=start, end=end):
                    start += len(piece)
                    pieces.append(piece)
            except (OSError, RuntimeError, ValueError) as error:
                cause = error
            if start < end:
                self._after_failure(cause, token, is_new)
        return pieces

    def _after_failure(self, cause: Exception | None, token: _Token, is_new: bool) -> None:
        """Raise, unless a new token may help."""
        # hf_xet loses about one error in three: the stream ends, and nothing says why.
        ended = ChannelError("a stream from Xet ended early")
        error = self._typed(cause, token) if cause is not None else ended
        if is_new or not (error is ended or isinstance(error, AuthError)):
            raise error from self._hub.chained(cause, token.secret)
        self._forget("read", token)

    def _upload(self, token: _Token, objects: Sequence[bytes]) -> list[str]:
        skip = require("hf_xet", "1.8").SKIP_SHA256
        try:
            with _session("write").new_upload_commit(**self._arguments("write", token)) as commit:
                jobs = [commit.start_upload_bytes(data, sha256=skip) for data in objects]
            return [str(job.result().xet_info.hash) for job in jobs]
        except (OSError, RuntimeError, ValueError) as error:
            raise self._typed(error, token) from self._hub.chained(error, token.secret)

    def _typed(self, error: Exception, token: _Token) -> DeltaError:
        return _typed(error, self._hub.cause(error, token.secret))

    def _reader(self, token: _Token) -> Any:
        """Connections to read with, kept as long as the token is."""
        with self._lock:
            if self._group is None or self._group[:2] != (os.getpid(), token):
                group = _session("read").new_download_stream_group(**self._arguments("read", token))
                self._group = (os.getpid(), token, group)
            return self._group[2]

    def _arguments(self, right: Literal["read", "write"], token: _Token) -> dict[str, Any]:
        headers = self._hub.headers()
        return {
            "endpoint": token.endpoint,
            "token": token.secret,
            "token_expiry_unix_secs": int(token.expires_s),
            "token_refresh_url": self._hub.api(f"/xet-{right}-token"),
            "token_refresh_headers": headers,
            # The token for the Hub is none of Xet's business.
            "custom_headers": {k: v for k, v in headers.items() if k.lower() != "authorization"},
        }

    def _token(self, right: Literal["read", "write"]) -> tuple[_Token, bool]:
        """A token with time left, and whether it is a new one."""
        with self._lock:
            token = self._tokens.get(right)
            if token is not None and token.expires_s > time.time() + TOKEN_MARGIN_S:
                return token, False
            answer, _ = self._hub.get_json(self._hub.api(f"/xet-{right}-token"))
            token = self._tokens[right] = _parse(answer)
            return token, True

    def _forget(self, right: str, token: _Token) -> None:
        with self._lock:
            if self._tokens.get(right) == token:
                del self._tokens[right]


_sessions: dict[tuple[int, str], Any] = {}
_sessions_lock = threading.Lock()


def _session(right: Literal["read", "write"]) -> Any:
    """This process's Xet session: threads and connections of our own, and bounded retries."""
    # By process: a child after a fork has none of the parent's threads.
    place = os.getpid(), right
    with _sessions_lock:
        if place not in _sessions:
            hf_xet = require("hf_xet", "1.8")
            settings = {**_SETTINGS, _READ_TIMEOUT[0]: (_READ_TIMEOUT[1], _SILENCE[right])}
            own = {k: v for k, (name, v) in settings.items() if name not in os.environ}
            _sessions[place] = hf_xet.XetSession(hf_xet.XetConfig().with_config(own))
        return _sessions[place]


def _parse(answer: Any) -> _Token:
    try:
        token = _Token(str(answer["casUrl"]), str(answer["accessToken"]), float(answer["exp"]))
        if not 0 < token.expires_s < _LATEST_S:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ChannelError("the Hub's answer holds no Xet token") from error
    return token


def _typed(error: Exception, text: str) -> DeltaError:
    """Our error for one of `hf_xet`'s, which tells little but its text."""
    if isinstance(error, PermissionError) or _REFUSED.search(text):
        return AuthError("Xet does not let us in", cause=text)
    if isinstance(error, FileNotFoundError) or "(404 Not Found)" in text:
        return DigestError("an object's content is missing in Xet", cause=text)
    if "(429 Too Many Requests)" in text:
        return RateLimitError("Xet asks for fewer requests", cause=text)
    if "(413 " in text or "(507 " in text:
        return ChannelFullError("no room left in Xet", cause=text)
    return ChannelError("Xet cannot be reached", cause=text)
