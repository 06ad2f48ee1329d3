"""A reader's memory of how far it saw a channel go, so that nobody can take it back unseen.

A signature says who wrote a record, not that it is the newest: whoever can write to the store can
put an older log there, every byte of it well signed. A running reader notices, a restarted one
needs a note on its own disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_delta.channel.chain import Record
from vllm_delta.errors import ChainError, ChannelFullError, SettingsError
from vllm_delta.format import MAX_SEQ, digest, open_envelope

UNSIGNED = "unsigned"
"""Stands in place of a key's id where no signatures are required."""

_FORMAT = 1
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_BYTES = 1 << 20
_MAX_EPOCH = (1 << 63) - 1
_HEX32, _HEX64 = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Mark:
    """The furthest record that was verified by one key's signature.

    Attributes:
        channel: the channel's id.
        payload: sha256 of what was signed. Not of the envelope, to which anybody can add a
            signature of their own.
    """

    channel: str
    epoch: int
    seq: int
    payload: str

    @property
    def place(self) -> tuple[int, int]:
        """What orders marks: a later claim of the channel goes before a higher number."""
        return self.epoch, self.seq


@dataclass(frozen=True)
class Seen:
    """What was known of a channel at one time, by the keys that are trusted now."""

    marks: Mapping[str, Mark]
    path: Path

    def check(self, records: Sequence[Record]) -> None:
        """Refuse a chain that is not as far as what was seen, or another one.

        Args:
            records: verified, in order, up to the channel's newest; none for an empty channel.

        Raises:
            ChainError: the channel went back, forked, or is another one.
        """
        self.check_part(records)
        highest = max(self.marks.values(), key=lambda mark: mark.place, default=None)
        if highest is None:
            return
        if not records:
            raise self._refusal("the channel is empty, but was not before", expected=highest.seq)
        tail = records[-1]
        if _place(tail) < highest.place:
            raise self._refusal(
                "the channel went back to before what was seen of it",
                expected=highest.seq,
                actual=tail.seq,
                expected_epoch=highest.epoch,
                actual_epoch=tail.manifest.epoch,
            )

    def check_part(self, records: Sequence[Record]) -> None:
        """As `check`, for records that may not be all there are."""
        for mark in self.marks.values():
            for record in records:
                if record.manifest.channel != mark.channel:
                    raise self._refusal(
                        "another channel stands at this address",
                        expected=mark.channel,
                        actual=record.manifest.channel,
                    )
                if _place(record) == mark.place and _payload(record) != mark.payload:
                    raise self._refusal("another record was seen in this place", seq=record.seq)

    def _refusal(self, message: str, **facts: Any) -> ChainError:
        return ChainError(message, **facts, ratchet=str(self.path))


class Ratchet:
    """What readers on this machine have verified of one channel, kept in a file.

    Marks are kept by the key that signed, and only those of keys that are trusted now count: a
    key that leaked, and was used to lead readers far ahead, holds nobody up once it is trusted
    no more. The channel's id is pinned by the first record seen, on the same terms.

    Thread-safe, and safe for any number of processes on one machine. A file that was removed
    means trust at first sight again.

    Args:
        folder: of this machine, for the files of any number of channels; made when needed.
        url: the channel's address.
    """

    def __init__(self, folder: str | Path, url: str) -> None:
        self._url = url
        self._folder = Path(folder)
        name = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()
        self.path = self._folder / f"{name}.json"

    def __repr__(self) -> str:
        return f"Ratchet({str(self._folder)!r}, {self._url!r})"

    def seen(self, trusted: Iterable[str] = ()) -> Seen:
        """What is known by now. Ask before the channel is read: others may see more meanwhile.

        Args:
            trusted: ids of the keys whose signatures are required; none where none are.

        Raises:
            SettingsError: the file is damaged or cannot be read.
        """
        counting = frozenset(trusted) or {UNSIGNED}
        marks = {key: mark for key, mark in self._read().items() if key in counting}
        return Seen(marks, self.path)

    def advance(self, records: Iterable[Record]) -> None:
        """Take note of verified records, lastingly. Never goes back.

        Raises:
            SettingsError: the file is damaged or cannot be written.
            ChannelFullError: the disk is full.
        """
        newest: dict[str, Mark] = {}
        for record in records:
            key = record.signer or UNSIGNED
            if key not in newest or newest[key].place < _place(record):
                newest[key] = _mark(record)
        if not newest:
            return
        with self._locked():
            marks = self._read()
            ahead = {
                key: mark
                for key, mark in newest.items()
                if key not in marks or _moves(marks[key], mark)
            }
            if ahead:
                self._write({**marks, **ahead})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._errors():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        try:
            with self._errors():
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read(self) -> dict[str, Mark]:
        with self._errors():
            try:
                with self.path.open("rb") as file:
                    data = file.read(_MAX_BYTES)
            except FileNotFoundError:
                return {}
        try:
            return _parse(data, self._url)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SettingsError(
                "the note of what was seen of a channel is damaged; restore it, or remove it to "
                "trust the channel as it stands now",
                path=str(self.path),
                url=self._url,
            ) from error

    def _write(self, marks: Mapping[str, Mark]) -> None:
        fields = {
            "format": _FORMAT,
            "url": self._url,
            "keys": {key: asdict(mark) for key, mark in marks.items()},
        }
        data = json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"
        with self._errors():
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            facts = {"path": str(self.path), "cause": error.strerror}
            if error.errno in _FULL:
                raise ChannelFullError("no room for the note of what was seen", **facts) from error
            raise SettingsError("the note of what was seen cannot be kept", **facts) from error


def _place(record: Record) -> tuple[int, int]:
    return record.manifest.epoch, record.seq


def _payload(record: Record) -> str:
    return digest(open_envelope(record.envelope))


def _mark(record: Record) -> Mark:
    return Mark(record.manifest.channel, *_place(record), _payload(record))


def _moves(old: Mark, new: Mark) -> bool:
    """Whether a key's mark is replaced: by one further on, never by one of another channel."""
    return new.channel == old.channel and new.place > old.place


def _parse(data: bytes, url: str) -> dict[str, Mark]:
    fields = json.loads(data.decode())
    if set(fields) != {"format", "url", "keys"} or fields["format"] != _FORMAT:
        raise ValueError("not of this format")
    if fields["url"] != url:
        raise ValueError("of another channel")
    return {key: _parsed(mark) for key, mark in fields["keys"].items()}


def _parsed(fields: Mapping[str, Any]) -> Mark:
    mark = Mark(**fields)
    if not (
        _HEX32.fullmatch(mark.channel)
        and _HEX64.fullmatch(mark.payload)
        and _within(mark.epoch, _MAX_EPOCH)
        and _within(mark.seq, MAX_SEQ)
    ):
        raise ValueError("not a mark")
    return mark


def _within(value: Any, highest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= highest
