"""What a user can set about following a channel, and where it is read from."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_delta.errors import SettingsError

KvPolicy = Literal["fresh", "reset", "keep"]

CONFIG_KEY = "vllm_delta"
"""The key of our settings in vLLM's ``--additional-config``."""

ENVIRONMENT_PREFIX = "VLLM_DELTA_"

_LIST = "tuple[str, ...]"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_LOCAL_POLL_S = 0.5
_REMOTE_POLL_S = 5.0
_MAX_S = 366 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine follows a channel. Seconds are at most a year.

    Args:
        channel: directory or URL of the channel; None loads the extension without following.
        kv_policy: what happens to KV computed under older weights. ``fresh``: running requests
            keep theirs, new requests never reuse it. ``reset``: all of it is recomputed.
            ``keep``: nothing is done.
        min_interval_s: seconds between two commits, at least; 0 for none.
        max_recompute_share: with ``reset``, the share of time that may go into recomputing KV,
            above 0, at most 1. The next commit waits, then goes to the newest version.
        poll_interval_s: seconds between two looks at the channel, above 0; None for 0.5 where it
            is a directory and 5 where its store is remote, which counts requests. A store that
            tells of news itself is looked at then, too.
        stage_ahead: versions that are fetched, decoded and committed together, at least 1.
        memory_bytes: most payload bytes of versions that are fetched together, at least 1; what
            needs more by itself is not taken.
        rollback_bytes: host and device memory per rank for undoing applied deltas; 0 for none.
        scan_interval_s: seconds between two full scans of the weights; 0 for none.
        trusted_keys: files of public keys; with any, every manifest must be signed by one.
        sealing_keys: files of keys that blobs are sealed with; with any, every blob must be.
        cache_dir: folder where the ranks of a machine share what they fetched; None for one of
            this user in the system's folder for temporary files where the store is remote, and
            for no cache where the channel is a directory.
        cache_bytes: most bytes kept there; 0 for no cache. Best larger than a whole checkpoint,
            which is read twice when it is loaded.
        state_dir: folder where it is noted how far the channel was seen, so that nobody can take
            it back unseen; used with `trusted_keys`. None for ``vllm-delta`` in
            ``XDG_STATE_HOME``, or in ``~/.local/state``.

    Raises:
        SettingsError: a value that makes no sense; names the field.
    """

    channel: str | None = None
    kv_policy: KvPolicy = "fresh"
    min_interval_s: float = 0.0
    max_recompute_share: float = 0.25
    poll_interval_s: float | None = None
    stage_ahead: int = 8
    memory_bytes: int = 4 << 30
    rollback_bytes: int = 1 << 30
    scan_interval_s: float = 600.0
    trusted_keys: tuple[str, ...] = ()
    sealing_keys: tuple[str, ...] = ()
    cache_dir: str | None = None
    cache_bytes: int = 8 << 30
    state_dir: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == _LIST and isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
            self._check_type(field.name, str(field.type))
        for name in ("channel", "cache_dir", "state_dir"):
            if getattr(self, name) == "":
                self._refuse(name, "is empty")
        if self.kv_policy not in get_args(KvPolicy):
            self._refuse("kv_policy", f"is none of {', '.join(get_args(KvPolicy))}")
        if not 0 < self.max_recompute_share <= 1:
            self._refuse("max_recompute_share", "is not above 0 and at most 1")
        if self.poll_interval_s is not None and not self.poll_interval_s > 0:
            self._refuse("poll_interval_s", "is not above 0")
        for name in ("stage_ahead", "memory_bytes"):
            if getattr(self, name) < 1:
                self._refuse(name, "is below 1")
        for name in ("min_interval_s", "rollback_bytes", "scan_interval_s", "cache_bytes"):
            if getattr(self, name) < 0:
                self._refuse(name, "is below 0")

    @property
    def is_remote(self) -> bool:
        """Whether the channel's store is asked over a network."""
        scheme = _SCHEME.match(self.channel or "")
        return scheme is not None and scheme[1].lower() != "file"

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the channel."""
        if self.poll_interval_s is not None:
            return self.poll_interval_s
        return _REMOTE_POLL_S if self.is_remote else _LOCAL_POLL_S

    def _check_type(self, name: str, type_name: str) -> None:
        value = getattr(self, name)
        if value is None and type_name.endswith("| None"):
            return
        if type_name.startswith("float"):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self._refuse(name, "is not a number")
            if not -sys.float_info.max <= value <= sys.float_info.max:
                self._refuse(name, "is not finite")
            if value > _MAX_S:
                self._refuse(name, "is more than a year")
        elif type_name == _LIST:
            if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
                self._refuse(name, "is not a list of file names")
        elif type_name == "int":
            if isinstance(value, bool) or not isinstance(value, int):
                self._refuse(name, "is not a whole number")
        elif not isinstance(value, str):
            self._refuse(name, "is not text")

    def _refuse(self, field: str, problem: str) -> None:
        value = getattr(self, field)
        if isinstance(value, int) and abs(value) >> 1024:
            value = "a very large number"  # which Python may refuse to write out
        raise SettingsError(f"setting {field} {problem}", field=field, value=repr(value))


def read_settings(config: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Settings:
    """Reads the settings of a server.

    Args:
        config: vLLM's additional config; ours is under `CONFIG_KEY` and wins.
        environment: variables; ours start with `ENVIRONMENT_PREFIX`. A list is JSON or text with
            commas.

    Raises:
        SettingsError: an unknown name, or a value that makes no sense; names the field.
    """
    ours = (config or {}).get(CONFIG_KEY, {})
    if not isinstance(ours, Mapping):
        raise SettingsError("settings are not an object", field=CONFIG_KEY, value=repr(ours))
    fields = {field.name: str(field.type) for field in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            _known(name, fields, variable)
            values[name] = _parse(text, fields[name], variable)
    for name, value in ours.items():
        _known(name, fields, name)
        values[name] = value
    return Settings(**values)


def _known(name: str, fields: Mapping[str, str], said: str) -> None:
    if name not in fields:
        raise SettingsError("unknown setting", field=said, known=", ".join(fields))


def _parse(text: str, type_name: str, variable: str) -> Any:
    if type_name == _LIST:
        return _parse_list(text, variable)
    try:
        return {"float": float, "int": int}.get(type_name.removesuffix(" | None"), str)(text)
    except ValueError as error:
        raise SettingsError("setting is not a number", field=variable, value=repr(text)) from error


def _parse_list(text: str, variable: str) -> list[Any]:
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        found: list[Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError("setting is not a list", field=variable, value=repr(text)) from error
    return found
