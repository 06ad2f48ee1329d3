"""Single requests to a Hugging Face Hub about one bucket: bounded, timed, with typed errors."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    NotFoundError,
    RateLimitError,
    SettingsError,
)

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
"""Longest silence of the Hub within an answer, and longest time to read a small answer whole."""

MAX_REDIRECTS = 5
MAX_URL = 16_384
MAX_ANSWER_BYTES = 64 << 20
MAX_PAGES = 10_000

_RECURSIVE: Mapping[str, str] | None = {"recursive": "true"}
_LONGEST_TEXT = 300
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})(?![0-9])")
_LONGEST_READ = 4096
_BEARER = re.compile(r"\b(bearer)\s+[^\s\"]+", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_USER = re.compile(r"//[^/\s]*@")
_PASSWORD = re.compile(r"[^\s/:@\"']{1,256}:[^\s@\"']{1,256}@")
_QUERY = re.compile(r"\?[^\s\"')]*")
_NO_ROOM = re.compile(
    r"storage\b.{0,40}\b(limit|quota|exceed)|quota\b.{0,20}\bexceed", re.IGNORECASE | re.DOTALL
)

Response = Any
"""An answer of `httpx` or of `httpx2`, whichever the installed `huggingface_hub` uses."""


class HubClient:
    """Requests about one bucket, each sent once. Safe from any thread.

    Uses `huggingface_hub`'s shared HTTP client (proxies, certificates, offline mode), its way to
    find a token, and its user agent. Redirects are followed here: what goes to another host goes
    without the token.

    Args:
        bucket: `<namespace>/<name>`.
        endpoint: the Hub; None for `HF_ENDPOINT` or the public one.
        token: None for `HF_TOKEN` or the one that was logged in with.
    """

    def __init__(self, bucket: str, *, endpoint: str | None, token: str | None) -> None:
        # Before the import: huggingface_hub reads it there, and raises whatever comes of it.
        named = os.environ.get("HF_ENDPOINT")
        if named:
            checked_endpoint("HF_ENDPOINT", named)
        constants = require("huggingface_hub.constants", "1.33")
        endpoint = endpoint or named or constants.ENDPOINT
        self.bucket = bucket
        self.endpoint = checked_endpoint("HF_ENDPOINT", str(endpoint).rstrip("/"))
        self._token = token
        self._sent = token or ""
        self._utils = require("huggingface_hub.utils", "1.33")
        self._bucket_seen = False
        if constants.is_offline_mode():
            raise SettingsError("the Hub is needed, and HF_HUB_OFFLINE is set", bucket=bucket)

    def headers(self) -> dict[str, str]:
        """User agent and, where there is a token, the authorization. Looked up each time."""
        from vllm_delta import __version__

        self._session()
        try:
            headers = dict(
                self._utils.build_hf_headers(
                    token=self._token, library_name="vllm-delta", library_version=__version__
                )
            )
        except (PermissionError, IsADirectoryError, UnicodeError) as error:
            raise SettingsError("the Hub's token cannot be read", cause=self.cause(error)) from None
        except OSError as error:
            raise ChannelError(
                "the Hub's client cannot say who asks", cause=self.cause(error)
            ) from self.chained(error)
        except Exception as error:  # noqa: BLE001 - what it makes of any JSON
            # On the way it asks HF_ENDPOINT who may be asking, and believes the answer for a day.
            raise SettingsError(
                "HF_ENDPOINT does not answer as a Hub does", cause=self.cause(error)
            ) from self.chained(error)
        sent = str(headers.get("authorization", ""))
        if not (sent.isascii() and sent.isprintable()):
            raise AuthError("the Hub's token holds what no token does; check HF_TOKEN")
        self._sent = sent.removeprefix("Bearer ")
        return headers

    def plain(self, text: str, *secrets: str) -> str:
        """As the function of this name, and without the token."""
        return plain(text, self._sent, *secrets)

    def cause(self, error: BaseException, *secrets: str) -> str:
        """An error's text, to be shown."""
        return self.plain(f"{type(error).__name__}: {error}", *secrets)

    def chained(self, error: BaseException | None, *secrets: str) -> BaseException | None:
        """An error to raise another from, unless it or what led to it tells a secret."""
        link = error
        while link is not None:
            text = str(link)
            if _stripped(text, self._sent, *secrets) != text:
                return None
            link = link.__cause__ or link.__context__
        return error

    def _session(self) -> Any:
        """The shared HTTP client, which is made at its first use."""
        try:
            return self._utils.get_session()
        except Exception as error:  # noqa: BLE001 - its user may have given another way to make it
            raise SettingsError(
                "no HTTP client can be made; check the proxies and SSL_CERT_FILE",
                cause=self.cause(error),
            ) from self.chained(error)

    def api(self, what: str = "") -> str:
        return f"{self.endpoint}/api/buckets/{self.bucket}{what}"

    def resolve(self, path: str) -> str:
        return f"{self.endpoint}/buckets/{self.bucket}/resolve/{quote(path, safe='')}"

    @contextmanager
    def send(
        self, method: str, url: str, *, follow: bool = True, read_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> Iterator[Response]:  # fmt: skip
        """Send a request once; the answer's body is not read yet, and is read within the block.

        Args:
            follow: whether to go where a redirect to another host leads.

        Raises:
            ChannelError: no answer, or the connection broke while it was read within the block.
        """
        sent = {**self.headers(), "accept-encoding": "identity", **(headers or {})}
        read_s = READ_TIMEOUT_S if read_timeout_s is None else read_timeout_s
        timeout = (CONNECT_TIMEOUT_S, read_s, READ_TIMEOUT_S, CONNECT_TIMEOUT_S)
        with self._errors(url):
            for _ in range(MAX_REDIRECTS + 1):
                with self._session().stream(
                    method, url, headers=sent, params=params, content=content,
                    timeout=timeout, follow_redirects=False,
                ) as response:  # fmt: skip
                    target = response.headers.get("location", "")
                    if response.status_code not in (301, 302, 303, 307, 308) or not target:
                        yield response
                        return
                    target = _joined(url, target)
                    if not same_host(url, target):
                        if not follow:
                            yield response
                            return
                        sent = {k: v for k, v in sent.items() if k.lower() != "authorization"}
                    url, params = target, None
            raise ChannelError("redirected too often", url=self.plain(url))

    def get_json(self, url: str, *, params: Mapping[str, str] | None = None) -> tuple[Any, str]:
        """An answer's JSON, and the address of the next page or ""; of no entry, null."""
        with self.send("GET", url, params=params) as response:
            if self.is_absent(response):
                return None, ""
            if response.status_code != 200:
                raise self.error(response)
            body = read(response, MAX_ANSWER_BYTES)
            link = response.links.get("next", {}).get("url", "")
        return _json(body), str(link)

    def post(self, url: str, content: bytes, content_type: str) -> tuple[int, Any]:
        """Post, and return the status, 200 or 422, with the answer's JSON."""
        headers = {"content-type": content_type}
        with self.send("POST", url, content=content, headers=headers, follow=False) as response:
            if response.status_code not in (200, 422):
                raise self.error(response)
            return response.status_code, _json(read(response, MAX_ANSWER_BYTES))

    def list(self, prefix: str) -> Iterator[str]:
        """Paths in the bucket that begin with `prefix`, page by page."""
        url, params = self.api("/tree"), _RECURSIVE
        if prefix:
            url += "/" + quote(prefix, safe="")
        seen = {f"{url}?recursive=true"}
        for _ in range(MAX_PAGES):
            entries, link = self.get_json(url, params=params)
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and entry.get("type") == "file":
                    yield str(entry.get("path", ""))
            if not link:
                return
            # Not an empty dictionary: that takes the query away.
            url, params = _joined(url, link), None
            if not same_host(url, self.endpoint):
                raise ChannelError("a listing goes on at another host", url=self.plain(url))
            if url in seen:
                raise ChannelError("a listing goes around in a circle", url=self.plain(url))
            seen.add(url)
        raise ChannelError("a listing has no end", bucket=self.bucket, n_pages=MAX_PAGES)

    def is_absent(self, response: Response) -> bool:
        """Whether the answer says that the bucket is there and that in it is no such entry."""
        if response.status_code != 404:
            return False
        code = response.headers.get("x-error-code", "")
        if code == "RepoNotFound":
            return False
        if not code and not self._bucket_seen:
            # Perhaps not the Hub's answer. Asked once: nobody deletes a bucket under a channel.
            with self.send("GET", self.api()) as answer:
                if answer.status_code != 200:
                    raise self.error(answer)
            self._bucket_seen = True
        return True

    def error(self, response: Response) -> DeltaError:
        """The typed error for an answer that is none."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        text = self.plain(_text(response))
        facts: dict[str, Any] = {"bucket": self.bucket, "status": status}
        if text:
            facts["cause"] = text
        if status == 429:
            return RateLimitError("the Hub asks for fewer requests", **facts, **_waits(response))
        if status in (413, 507) or (status in (400, 402, 403) and _NO_ROOM.search(text)):
            return ChannelFullError("no room left in the bucket", **facts)
        if status in (401, 403) or code == "GatedRepo":
            return AuthError("the Hub does not let us in; check HF_TOKEN and its rights", **facts)
        if status == 404:
            return NotFoundError("no such bucket, or none that the token may see", **facts)
        if status in (408, 409, 425) or status >= 500 or status < 400:
            return ChannelError("the Hub cannot serve the bucket now", **facts, **_waits(response))
        return SettingsError("the Hub refuses the request", **facts)

    @contextmanager
    def _errors(self, url: str) -> Iterator[None]:
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        # `httpx` or `httpx2`.
        library = import_module(HfHubHTTPError.__bases__[0].__module__)
        try:
            yield
        except DeltaError:
            raise
        except OfflineModeIsEnabled as error:
            raise SettingsError("the Hub is needed, and it is in offline mode") from error
        except (library.HTTPError, library.InvalidURL, ValueError, OSError) as error:
            raise ChannelError(
                "the Hub cannot be reached", url=self.plain(url), cause=self.cause(error)
            ) from self.chained(error)
        except RuntimeError as error:
            # The shared client was closed by another thread, or under an answer being read.
            if "closed" not in str(error):
                raise
            raise ChannelError("the connection was closed", url=self.plain(url)) from error


def read(response: Response, max_bytes: int, key: str = "") -> bytes:
    """Read a small body whole, at most `max_bytes` and for at most so long."""
    check_size(response, max_bytes, key)
    end_s, body = time.monotonic() + 3 * READ_TIMEOUT_S, bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > max_bytes:
            raise too_large(key, len(body), max_bytes)
        if time.monotonic() > end_s:
            raise ChannelError("an answer comes too slowly", key=key, n_bytes=len(body))
    return bytes(body)


def check_size(response: Response, max_bytes: int, key: str) -> None:
    """Refuse, before it is read, an object whose announced size is too large."""
    n_bytes = size_of(response)
    if n_bytes is not None and n_bytes > max_bytes:
        raise too_large(key, n_bytes, max_bytes)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ChannelError("an answer is compressed, though none was asked to be", key=key)


def size_of(response: Response) -> int | None:
    """The object's size where the answer tells; that of the answer itself may be another's."""
    redirect = response.status_code in range(300, 400)
    for name in ("x-linked-size", *(() if redirect else ("content-length",))):
        value = response.headers.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
    return None


def too_large(key: str, n_bytes: int, max_bytes: int) -> DigestError:
    return DigestError("an object is too large", key=key, n_bytes=n_bytes, max_bytes=max_bytes)


def require(module: str, version: str) -> Any:
    """Import one of the Hub's clients, or say what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SettingsError(
            f"a channel on the Hub needs {package}", install=f"{package}>={version}"
        ) from error


def same_host(url: str, other: str) -> bool:
    """Whether what may go to one may go to the other: same scheme, host and port."""
    one, two = urlsplit(url), urlsplit(other)
    return (one.scheme, one.netloc.lower()) == (two.scheme, two.netloc.lower())


def _joined(url: str, target: str) -> str:
    """Where an answer sends us."""
    try:
        target = urljoin(url, target)
        parts = urlsplit(target)
        if parts.scheme in ("http", "https") and parts.hostname and len(target) < MAX_URL:
            return target
    except ValueError:
        pass
    raise ChannelError("redirected to no address", url=plain(url))


def checked_endpoint(name: str, endpoint: str) -> str:
    """A setting's address of a server.

    Raises:
        SettingsError: it is no address, or holds what may be a secret, which is not repeated.
    """
    if "@" in endpoint:
        raise SettingsError(f"credentials do not belong into {name}")
    if "?" in endpoint or "#" in endpoint:
        raise SettingsError(f"{name} has no query and no fragment")
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not endpoint.isprintable() or " " in endpoint:
        raise SettingsError(f"{name} is not an http address", endpoint=plain(endpoint))
    return endpoint


def plain(text: str, *secrets: str) -> str:
    """Without what lets one in: given secrets, tokens, and the parts of addresses that hold it."""
    return _stripped(text, *secrets)[:_LONGEST_TEXT]


def _stripped(text: str, *secrets: str) -> str:
    for secret in filter(None, secrets):
        for written in (secret, repr(secret)[1:-1]):
            text = text.replace(written, "***")
    text = _HUB_TOKEN.sub("***", _BEARER.sub(r"\1 ***", text[:_LONGEST_READ]))
    return _QUERY.sub("", _PASSWORD.sub("", _USER.sub("//", text)))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChannelError("the Hub's answer is not JSON", n_bytes=len(body)) from error


def _text(response: Response) -> str:
    """What the Hub says about an error, for people."""
    said = response.headers.get("x-error-message", "")
    if not said:
        try:
            body = read(response, 1 << 16)
            said = json.loads(body).get("error", "")
        except (DeltaError, ValueError, AttributeError, RecursionError):
            return ""
    return str(said)


def _waits(response: Response) -> dict[str, float]:
    """`retry_after_s`, where the answer says how long to wait."""
    said = response.headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit() and len(said) < 10:
        return {"retry_after_s": float(said)}
    if said:
        try:
            wait_s = parsedate_to_datetime(said).timestamp() - time.time()
        except (ValueError, OverflowError):
            pass
        else:
            return {"retry_after_s": max(0.0, wait_s)}
    if response.status_code == 429 and (
        match := _RATE_LIMIT.search(response.headers.get("ratelimit", ""))
    ):
        return {"retry_after_s": float(match[1])}
    return {}
