"""Two trainers in a store without a conditional write: neither is stopped, both must learn of it.

Before a trainer writes a record it writes an intent under a name of its own beside the record's
place, and after it has read the record back it looks for intents of others there. Of two trainers
at one place at least one so learns of the other; the other one does at its next commit, when it
looks at the place once more.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_delta.channel.store import Store
from vllm_delta.errors import DeltaError, DigestError, FormatError
from vllm_delta.format import MAX_SEQ, manifest_key

_MAX_INTENT_BYTES = 64
_INTENT = re.compile(rb'\{"epoch":([1-9][0-9]{0,18})\}')


@dataclass(frozen=True)
class Rival:
    """Another trainer's intent to write the record at a place."""

    seq: int
    epoch: int


class Contest:
    """What one trainer leaves beside the places that it writes to, and what it finds there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name = uuid.uuid4().hex
        self._entered = (0, 0)

    def enter(self, seq: int, epoch: int, objects: Mapping[str, bytes] | None = None) -> None:
        """Leave an intent to write a record, unless it was left already.

        Args:
            objects: of the record, to be written together with the intent.
        """
        together = dict(objects or {})
        if self._entered != (seq, epoch):
            together[self._key(seq)] = b'{"epoch":%d}' % epoch
        if together:
            self._store.put_many(together)
        self._entered = (seq, epoch)

    def rival(self, seq: int) -> Rival | None:
        """Of the others that mean or meant to write there, the one of the highest epoch."""
        if not 1 <= seq <= MAX_SEQ:
            return None
        prefix = manifest_key(seq) + "."
        rivals = [
            Rival(seq, epoch)
            for key in self._store.list(prefix)
            if key != self._key(seq) and (epoch := self._epoch(key)) is not None
        ]
        return max(rivals, key=lambda rival: rival.epoch, default=None)

    def leave(self, seq: int) -> None:
        """Take the intent away; that it stays behind harms nobody."""
        with contextlib.suppress(DeltaError):
            self._store.delete([self._key(seq)])

    def _key(self, seq: int) -> str:
        return f"{manifest_key(seq)}.{self._name}"

    def _epoch(self, key: str) -> int | None:
        try:
            data = self._store.get(key, max_bytes=_MAX_INTENT_BYTES)
        except (DigestError, FormatError):
            return None
        match = _INTENT.fullmatch(data) if data else None
        return int(match[1]) if match else None
