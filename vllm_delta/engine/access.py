"""How an engine gets at its channel: keys, the cache of blobs, the note of what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_delta.channel import Keys, LogReader, open_channel
from vllm_delta.channel.cache import BlobCache, own_folder
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import ChannelError, SettingsError


@dataclass(frozen=True, kw_only=True)
class Access:
    """What each rank needs to read the channel by itself, as plain values that travel.

    Keys travel as paths, so their files have to be on every machine that runs a rank.

    Attributes:
        cache_dir: where the ranks of a machine keep what they fetched; None for nowhere.
    """

    channel: str
    trusted_keys: tuple[str, ...] = ()
    sealing_keys: tuple[str, ...] = ()
    cache_dir: str | None = None
    cache_bytes: int = 0

    @classmethod
    def of(cls, settings: Settings, channel: str) -> Access:
        """What the settings say, for the channel at an address."""
        folder = settings.cache_dir
        if folder is None and settings.is_remote:
            folder = str(Path(tempfile.gettempdir()) / f"vllm-delta-{os.geteuid()}")
        return cls(
            channel=channel,
            trusted_keys=_absolute(settings.trusted_keys),
            sealing_keys=_absolute(settings.sealing_keys),
            cache_dir=folder if settings.cache_bytes else None,
            cache_bytes=settings.cache_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Access:
        keys = {name: tuple(data[name]) for name in ("trusted_keys", "sealing_keys")}
        return cls(**{**data, **keys})

    def keys(self) -> Keys:
        """Reads the files.

        Raises:
            SettingsError: a file is not there, or is not a key of its kind.
        """
        return Keys.load(trusted=self.trusted_keys, sealing=self.sealing_keys)

    def cache(self) -> BlobCache | None:
        """The folder of fetched blobs, if there is to be one.

        Raises:
            SettingsError: it is another user's.
        """
        if self.cache_dir is None:
            return None
        return BlobCache(self.cache_dir, quota_bytes=self.cache_bytes)

    def open(self) -> LogReader:
        """A reader of the channel's blobs."""
        return LogReader(open_channel(self.channel), keys=self.keys(), cache=self.cache())


def open_ratchet(
    settings: Settings, channel: str, environment: Mapping[str, str] = os.environ
) -> Ratchet | None:
    """What was seen of the channel before; None where records need no signature.

    Raises:
        SettingsError: there is no such folder, or no home for one.
    """
    folder = _state_folder(settings, environment)
    return None if folder is None else Ratchet(folder, channel)


def _state_folder(settings: Settings, environment: Mapping[str, str]) -> Path | None:
    if not settings.trusted_keys:
        return None
    if settings.state_dir is not None:
        return own_folder(settings.state_dir)
    state = environment.get("XDG_STATE_HOME", "")
    # By that standard, a path that is not absolute is to be ignored.
    return own_folder(state if os.path.isabs(state) else "~/.local/state") / "vllm-delta"


def check(settings: Settings) -> ChannelError | None:
    """Tells of a mistake at once that would show when the channel is read.

    Returns:
        Why the channel is out of reach for now; a directory may come later.

    Raises:
        SettingsError: an address, a key's file or a folder that cannot be used; names the field.
    """
    access = Access.of(settings, settings.channel or "")
    for field in ("trusted_keys", "sealing_keys"):
        with _naming(field):
            dataclasses.replace(Access(channel=""), **{field: getattr(access, field)}).keys()
    if settings.channel is None:
        return None
    with _naming("cache_dir"):
        access.cache()
    with _naming("state_dir"):
        _state_folder(settings, os.environ)
    try:
        with _naming("channel"):
            open_channel(settings.channel)
    except ChannelError as error:
        return error
    return None


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """Adds a setting's name to what is wrong with it."""
    try:
        yield
    except SettingsError as error:
        raise type(error)(error.message, **{"field": field, **error.facts}) from error


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths)
    except ValueError as error:
        raise SettingsError("not names of files for keys", paths=ascii(paths)) from error
