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
from vllm_delta.channel.reader import LogReader
from vllm_delta.channel.store import Store
from vllm_delta.errors import SettingsError

__all__ = [
    "NO_KEYS",
    "Keys",
    "LocalStore",
    "Log",
    "LogReader",
    "Record",
    "Store",
    "open_channel",
    "verify_link",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
_SUPPORTED = "a directory's path or a file:// URL"


def open_channel(url: str | Path) -> Store:
    """Open the store behind a channel's address; nothing is read or written yet.

    Args:
        url: a directory's path, absolute or relative to the current directory, or `file:///path`.

    Returns:
        A `LocalStore`. A directory that does not exist yet is an empty channel; the first write
        makes it.

    Raises:
        SettingsError: an address of another kind, or a path that is not a directory.
    """
    if isinstance(url, Path):
        return LocalStore(url)
    scheme = _SCHEME.match(url)
    if scheme is None:
        if not url or "\0" in url:
            raise SettingsError("not a channel's address", url=url, supported=_SUPPORTED)
        try:
            return LocalStore(Path(url).expanduser())
        except RuntimeError as error:
            raise SettingsError("no such user's home directory", url=url) from error
    parts = urlsplit(url)
    # As bytes: a directory's name need not be UTF-8.
    path = os.fsdecode(unquote_to_bytes(parts.path))
    plain = parts.netloc in ("", "localhost") and not parts.query and not parts.fragment
    if scheme[1].lower() != "file" or not plain or "\0" in path:
        raise SettingsError("not a channel's address", url=url, supported=_SUPPORTED)
    return LocalStore(Path(path))
