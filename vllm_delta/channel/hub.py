"""A channel in a bucket of the Hugging Face Hub.

Manifests and other small objects are read by one plain request each, blobs through Xet. Writes put
the bytes into Xet and then change the bucket in one request, which is not one step for several
objects. The Hub's own interface has no conditional write, its S3 gateway has: see `hub_gateway`.
`docs/adr/0009-hub-buckets.md` says why it is done so and what each call costs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from vllm_delta.channel.hub_client import HubClient, plain, read, size_of, too_large
from vllm_delta.channel.hub_events import follow
from vllm_delta.channel.hub_xet import Xet
from vllm_delta.channel.store import Store, check_key, is_key
from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    SettingsError,
)

if TYPE_CHECKING:
    from vllm_delta.channel.hub_gateway import Gateway

SMALL_BYTES = 256 << 10
"""Up to this size a blob comes by one plain request, above through Xet."""

MAX_OPERATIONS = 1000
"""Changes that the Hub takes in one request."""

_SUPPORTED = "hf://buckets/<namespace>/<name>[/<prefix>][?manifests=s3]"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}")
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_MANIFEST = re.compile(r"m/[0-9]{12}")
_NOT_THERE = re.compile(r"not found|no such|not exist", re.IGNORECASE)
_FULL = re.compile(r"quota|storage limit|too large|no space", re.IGNORECASE)
_DENIED = re.compile(r"permission|forbidden|unauthori[sz]ed|not allowed", re.IGNORECASE)

T = TypeVar("T")


class HubStore(Store):
    """A `Store` in a bucket of the Hub. Safe to use from any thread; opening it sends nothing.

    Args:
        bucket: `<namespace>/<name>`. It must exist.
        prefix: a folder in the bucket that the channel lives in; "" for the bucket itself.
        manifests_by_s3: write manifests through the S3 gateway, which makes the store `atomic`.
            Readers need no key for it, but must be told, as everybody who opens the channel.
        endpoint: the Hub; None for `HF_ENDPOINT` or the public one.
        token: None for `HF_TOKEN` or the one that was logged in with.

    Raises:
        SettingsError: `huggingface_hub` is missing, or in offline mode.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        manifests_by_s3: bool = False,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> None:
        self._hub = HubClient(bucket, endpoint=endpoint, token=token)
        self._xet = Xet(self._hub)
        self._bucket, self._prefix = bucket, prefix
        self._root = f"{prefix}/" if prefix else ""
        self._gateway: Gateway | None = None
        if manifests_by_s3:
            from vllm_delta.channel.hub_gateway import Gateway

            self._gateway = Gateway(bucket, prefix)

    @classmethod
    def open(cls, url: str) -> HubStore:
        """Open the store behind `hf://buckets/<namespace>/<name>[/<prefix>][?manifests=s3]`.

        Raises:
            SettingsError: an address of another form, or what the constructor raises.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        path = unquote(parts.path, errors="strict") if _is_utf8(parts.path) else ""
        names = path.removeprefix("/").removesuffix("/").split("/")
        query = parse_qsl(parts.query, keep_blank_values=True)
        if (
            parts.scheme.lower() != "hf"
            or parts.netloc != "buckets"
            or parts.fragment
            or len(names) < 2
            or not all(_NAME.fullmatch(name) for name in names[:2])
            or not all(_PART.fullmatch(name) and name not in (".", "..") for name in names[2:])
            or query not in ([], [("manifests", "s3")])
        ):
            raise SettingsError("not a channel's address", url=plain(url), supported=_SUPPORTED)
        return cls("/".join(names[:2]), "/".join(names[2:]), manifests_by_s3=bool(query))

    @property
    def url(self) -> str:
        path = f"hf://buckets/{self._bucket}/{quote(self._prefix)}".removesuffix("/")
        return path + ("?manifests=s3" if self._gateway else "")

    @property
    def atomic(self) -> bool:
        return self._gateway is not None

    def __repr__(self) -> str:
        return f"HubStore({self.url!r})"

    def put(self, key: str, data: bytes) -> None:
        self.put_many({key: data})

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        for key in objects:
            check_key(key)
        for items in _batches(list(objects.items())):
            hashes = self._xet.put([data for _, data in items])
            now_ms = int(time.time() * 1000)
            self._change(
                [
                    {"type": "addFile", "path": self._root + key, "xetHash": xet, "mtime": now_ms}
                    for (key, _), xet in zip(items, hashes, strict=True)
                ]
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there; see `atomic`.

        Without the gateway it looks, writes, and looks again, so of several that write at once more
        than one can be told True. What stands then is whole and one of theirs.
        """
        check_key(key)
        if self._gateway is not None and _MANIFEST.fullmatch(key):
            return self._gateway.put_new(key, data)
        if self._find(key) is not None:
            return False
        self.put(key, data)
        try:
            return self._get_small(key, len(data)) == data
        except DigestError:
            return False

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        if not check_key(key).startswith("b/"):
            return self._get_small(key, max_bytes)
        pieces = self.stream(key, max_bytes=max_bytes)
        return None if pieces is None else b"".join(pieces)

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        """Read an object in pieces: a blob that may be large through Xet, all else at once."""
        if not check_key(key).startswith("b/") or max_bytes <= SMALL_BYTES:
            data = self._get_small(key, max_bytes)
            return None if data is None else iter([data[start:]] if data[start:] else [])
        if (found := self._find(key)) is None:
            return None
        xet_hash, n_bytes = found
        if n_bytes > max_bytes:
            raise too_large(key, n_bytes, max_bytes)
        return self._xet.stream(xet_hash, n_bytes, start)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._root + check_key(key) for key in keys]
        for some in _batches(paths):
            self._change([{"type": "deleteFile", "path": path} for path in some])

    def list(self, prefix: str) -> list[str]:
        keys = (path.removeprefix(self._root) for path in self._hub.list(self._root + prefix))
        return sorted({key for key in keys if key.startswith(prefix) and is_key(key)})

    def watch(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Have `wake` called when a manifest or `head` was written, and after every reconnection.

        Costs one connection that stays open. A Hub without events ends the watch silently.
        """

        def concerns(path: str) -> bool:
            key = path.removeprefix(self._root) if path.startswith(self._root) else ""
            return is_key(key) and not key.startswith("b/") and "." not in key

        return follow(self._hub, concerns, wake)

    def _get_small(self, key: str, max_bytes: int) -> bytes | None:
        headers = {"cache-control": "no-cache"}
        with self._hub.send("GET", self._hub.resolve(self._root + key), headers=headers) as answer:
            if self._hub.is_absent(answer):
                return None
            if answer.status_code != 200:
                raise self._hub.error(answer)
            return read(answer, max_bytes, key)

    def _find(self, key: str) -> tuple[str, int] | None:
        """An object's Xet hash and size; None when there is none."""
        url = self._hub.resolve(self._root + key)
        with self._hub.send("HEAD", url, follow=False) as answer:
            if self._hub.is_absent(answer):
                return None
            xet_hash, n_bytes = answer.headers.get("x-xet-hash", ""), size_of(answer)
            if answer.status_code not in range(200, 400):
                raise self._hub.error(answer)
        if not re.fullmatch(r"[0-9a-f]{64}", xet_hash) or n_bytes is None:
            raise ChannelError("the Hub does not say where an object is in Xet", key=key)
        return xet_hash, n_bytes

    def _change(self, operations: Sequence[Mapping[str, Any]]) -> None:
        """Have the Hub change the bucket, and raise for what it did not do."""
        body = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        status, answer = self._hub.post(self._hub.api("/batch"), body, "application/x-ndjson")
        failed = answer.get("failed", []) if isinstance(answer, dict) else None
        if not isinstance(failed, list) or (status == 422 and not failed):
            raise ChannelError("the Hub's answer to a change makes no sense", status=status)
        deleted = {op["path"] for op in operations if op["type"] == "deleteFile"}
        failures = [failure for failure in failed if not self._is_gone(failure, deleted)]
        if failures:
            raise self._refusal(failures, len(operations))

    def _is_gone(self, failure: Any, deleted: set[str]) -> bool:
        """Whether it is a delete that failed because nothing was there."""
        path = failure.get("path") if isinstance(failure, dict) else None
        if not isinstance(path, str) or path not in deleted:
            return False
        if _NOT_THERE.search(str(failure.get("error", ""))):
            return True
        return self._find(str(failure["path"]).removeprefix(self._root)) is None

    def _refusal(self, failures: Sequence[Any], n_sent: int) -> DeltaError:
        first = failures[0] if isinstance(failures[0], dict) else {}
        said = self._hub.plain(str(first.get("error", "")))
        facts = {
            "key": self._hub.plain(str(first.get("path", ""))).removeprefix(self._root),
            "cause": said,
            "n_failed": len(failures),
            "n_sent": n_sent,
        }
        if _FULL.search(said):
            return ChannelFullError("no room left in the bucket", **facts)
        if _DENIED.search(said):
            return AuthError("the Hub refuses changes of the bucket", **facts)
        return ChannelError("the Hub did not do all changes", **facts)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), MAX_OPERATIONS):
        yield items[first : first + MAX_OPERATIONS]


def _is_utf8(path: str) -> bool:
    try:
        unquote(path, errors="strict").encode()
    except UnicodeError:
        return False
    return True
