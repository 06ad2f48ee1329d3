"""A channel: numbered manifests and immutable blobs in a store that trainers and engines share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from vllm_delta.channel.chain import Record, verify_link
from vllm_delta.channel.keys import NO_KEYS, Keys
from vllm_delta.channel.local import LocalStore
from vllm_delta.channel.log import Log
from vllm_delta.channel.object import ObjectStore
from vllm_delta.channel.object_clients import shown
from vllm_delta.channel.reader import LogReader
from vllm_delta.channel.retry import RetryingStore, RetryPolicy
from vllm_delta.channel.store import Store
from vllm_delta.errors import SettingsError

__all__ = [
    "NO_KEYS",
    "Keys",
    "LocalStore",
    "Log",
    "LogReader",
    "ObjectStore",
    "Record",
    "RetryPolicy",
    "RetryingStore",
    "Store",
    "open_channel",
    "verify_link",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
_MAX_CHARACTERS = 1 << 16
_BARE = re.compile(r"(s3|gs|az|hf|file):", re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_OBJECTS = ("s3", "gs", "az")
_HUB = "hf"
_SUPPORTED = (
    "a directory's path, file:///path, s3://bucket/prefix, gs://bucket/prefix, "
    "az://container/prefix or hf://buckets/owner/name"
)


def open_channel(url: str | Path, *, policy: RetryPolicy | None = None) -> Store:
    """Open the store behind a channel's address; nothing is read or written yet.

    Args:
        url: a directory's path, absolute or relative to the current directory, or `file:///path`;
            `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`; or
            `hf://buckets/owner/name`.
        policy: how long and how often a failed call to a remote store is repeated.

    Returns:
        A `LocalStore`, or a `RetryingStore` over an `ObjectStore` or a `HubStore`. A directory that
        does not exist yet is an empty channel; the first write makes it.

    Raises:
        SettingsError: an address of another kind, a path that is not a directory, or a remote
            store's settings that do not fit.
    """
    if isinstance(url, Path):
        return LocalStore(url)
    if len(url) > _MAX_CHARACTERS:  # no system has such a path, and to take it apart takes memory
        raise SettingsError("not a channel's address", n_characters=len(url), supported=_SUPPORTED)
    scheme = _SCHEME.match(url)
    if scheme is None:
        return _local(url)
    if _CONTROLS.search(url):  # which parsers of addresses drop without a word
        raise SettingsError("not a channel's address", url=ascii(shown(url)), supported=_SUPPORTED)
    if scheme[1].lower() in _OBJECTS:
        return RetryingStore(ObjectStore(url), policy)
    if scheme[1].lower() == _HUB:
        from vllm_delta.channel.hub import HubStore

        return RetryingStore(HubStore.open(url), policy)
    return _file(url, scheme[1].lower())


def _local(path: str) -> Store:
    # `s3:bucket` is a slip, not a directory's name.
    if not path or "\0" in path or _BARE.match(path):
        raise SettingsError("not a channel's address", url=ascii(path), supported=_SUPPORTED)
    try:
        return LocalStore(Path(path).expanduser())
    except (RuntimeError, ValueError) as error:
        raise SettingsError("no such user's home directory", url=ascii(path)) from error


def _file(url: str, scheme: str) -> Store:
    try:
        parts = urlsplit(url)
        # As bytes: a directory's name need not be UTF-8.
        path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
    except ValueError as error:
        raise SettingsError(
            "not a channel's address", url=ascii(shown(url)), supported=_SUPPORTED
        ) from error
    plain = parts.netloc in ("", "localhost") and not parts.query and not parts.fragment
    if scheme != "file" or not plain or "\0" in path:
        raise SettingsError("not a channel's address", url=shown(url), supported=_SUPPORTED)
    return LocalStore(Path(path))
