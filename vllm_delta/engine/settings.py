"""What a user can set about following a channel, and where it is read from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_delta.errors import SettingsError

KvPolicy = Literal["fresh", "reset", "keep"]

CONFIG_KEY = "vllm_delta"
"""The key of our settings in vLLM's ``--additional-config``."""

ENVIRONMENT_PREFIX = "VLLM_DELTA_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine follows a channel.

    Args:
        channel: directory or URL of the channel; None loads the extension without following.
        kv_policy: what happens to KV computed under older weights. ``fresh``: running requests
            keep theirs, new requests never reuse it. ``reset``: all of it is recomputed.
            ``keep``: nothing is done.
        min_interval_s: seconds between two commits, at least; 0 for none.
        max_recompute_share: with ``reset``, the share of time that may go into recomputing KV,
            above 0, at most 1. The next commit waits, then goes to the newest version.
        poll_interval_s: seconds between two looks at the channel, above 0.
        stage_ahead: versions that are fetched, decoded and committed together, at least 1.
        rollback_bytes: host and device memory per rank for undoing applied deltas; 0 for none.
        scan_interval_s: seconds between two full scans of the weights; 0 for none.

    Raises:
        SettingsError: a value that makes no sense; names the field.
    """

    channel: str | None = None
    kv_policy: KvPolicy = "fresh"
    min_interval_s: float = 0.0
    max_recompute_share: float = 0.25
    poll_interval_s: float = 0.5
    stage_ahead: int = 8
    rollback_bytes: int = 1 << 30
    scan_interval_s: float = 600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, str(field.type))
        if self.channel is not None and not self.channel:
            self._refuse("channel", "is empty")
        if self.kv_policy not in get_args(KvPolicy):
            self._refuse("kv_policy", f"is none of {', '.join(get_args(KvPolicy))}")
        if not 0 < self.max_recompute_share <= 1:
            self._refuse("max_recompute_share", "is not above 0 and at most 1")
        if not self.poll_interval_s > 0:
            self._refuse("poll_interval_s", "is not above 0")
        if self.stage_ahead < 1:
            self._refuse("stage_ahead", "is below 1")
        for name in ("min_interval_s", "rollback_bytes", "scan_interval_s"):
            if getattr(self, name) < 0:
                self._refuse(name, "is below 0")

    def _check_type(self, name: str, type_name: str) -> None:
        value = getattr(self, name)
        if type_name == "float":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self._refuse(name, "is not a number")
            if not math.isfinite(value):
                self._refuse(name, "is not finite")
        elif type_name == "int":
            if isinstance(value, bool) or not isinstance(value, int):
                self._refuse(name, "is not a whole number")
        elif value is not None and not isinstance(value, str):
            self._refuse(name, "is not text")

    def _refuse(self, field: str, problem: str) -> None:
        raise SettingsError(
            f"setting {field} {problem}", field=field, value=repr(getattr(self, field))
        )


def read_settings(config: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Settings:
    """Reads the settings of a server.

    Args:
        config: vLLM's additional config; ours is under `CONFIG_KEY` and wins.
        environment: variables; ours start with `ENVIRONMENT_PREFIX`.

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
    try:
        return {"float": float, "int": int}.get(type_name, str)(text)
    except ValueError as error:
        raise SettingsError("setting is not a number", field=variable, value=repr(text)) from error
