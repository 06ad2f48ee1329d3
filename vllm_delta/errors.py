"""Typed errors: what went wrong, with which facts, and what a caller can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

Action = Literal["fix", "retry", "refetch", "reseed", "upgrade", "stop", "restart"]

EXIT_CODES: dict[str, int] = {
    "fix": 2,
    "retry": 3,
    "refetch": 4,
    "reseed": 5,
    "upgrade": 6,
    "stop": 7,
    "restart": 8,
}
"""Exit status of the command line for each action. 0 is success, 1 an unexpected failure."""


class DeltaError(Exception):
    """Anything the world can cause: a store, a peer, a file, a setting.

    Args:
        message: what happened, lower case, without the facts.
        **facts: plain values that identify the thing (names, counts, digests). They become
            attributes and are appended to the message.
    """

    action: ClassVar[Action] = "fix"

    def __init__(self, message: str, **facts: Any) -> None:
        self.message = message
        self.facts = facts
        super().__init__(" ".join([message, *(f"{k}={v!r}" for k, v in facts.items())]))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).__name__, self.message, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that travel between processes and in HTTP answers."""
        return {
            "kind": type(self).__name__,
            "action": self.action,
            "message": self.message,
            "facts": {key: _plain(value) for key, value in self.facts.items()},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> DeltaError:
        """Rebuild an error that `to_dict` wrote; an unknown kind becomes a plain `DeltaError`."""
        facts = {str(key): value for key, value in dict(data.get("facts", {})).items()}
        return _restore(str(data.get("kind", "")), str(data.get("message", "")), facts)


class FormatError(DeltaError):
    """Bytes that break the wire format."""

    action = "refetch"


class DigestError(DeltaError):
    """A blob is missing, or its size or sha256 is not the one the manifest names."""

    action = "refetch"


class UnsupportedError(DeltaError):
    """Well-formed bytes of a format, codec or feature that this release does not know."""

    action = "upgrade"


class ChainError(DeltaError):
    """Manifests that do not continue each other: a fork, a gap, another channel, an older epoch."""

    action = "reseed"


class SignatureError(ChainError):
    """A manifest without a signature by a trusted key."""


class BaseMismatchError(DeltaError):
    """The weights that a delta was made for are not the ones at hand."""

    action = "reseed"


class ModelMismatchError(DeltaError):
    """The channel's checkpoint and the model at hand differ in names, shapes or dtypes."""

    action = "fix"


class LayoutError(DeltaError):
    """The engine keeps a tensor in a way that cannot be patched in place."""

    action = "fix"


class ChannelError(DeltaError):
    """The store cannot be reached or has vanished."""

    action = "retry"


class RateLimitError(ChannelError):
    """The store asks for fewer requests; `retry_after_s`, where given, says how long to wait."""


class ChannelFullError(DeltaError):
    """The store has no room left."""

    action = "fix"


class FencedError(DeltaError):
    """Another trainer owns the channel now; this one must stop."""

    action = "stop"


class SettingsError(DeltaError):
    """A setting that makes no sense."""

    action = "fix"


class AuthError(SettingsError):
    """The store does not let us in: no credentials, expired ones, or ones without the right."""


class NotFoundError(SettingsError):
    """The bucket or container of a channel's address does not exist."""


class EngineError(DeltaError):
    """The engine's ranks could not be brought to one version; it serves nothing until reseeded."""

    action = "restart"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _restore(kind: str, message: str, facts: dict[str, Any]) -> DeltaError:
    known = {cls.__name__: cls for cls in _kinds(DeltaError)}
    return known.get(kind, DeltaError)(message, **facts)


def _kinds(cls: type[DeltaError]) -> Iterator[type[DeltaError]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _kinds(kind)
