"""Protocols that lack a part, which the soak must catch: else it proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_delta.channel import Log, Record, chain
from vllm_delta.format import Manifest, manifest_key


def _trusting(log: Log, record: Record) -> bool:
    """A commit that takes the store's answer for what happened."""
    if log._contest is not None:
        log._contest.enter(record.seq, record.manifest.epoch)
    won = log.store.put_new(manifest_key(record.seq), record.envelope)
    log._in_doubt = None
    if won:
        log._position = record
        log._put_head(record.seq)
    return won


@contextlib.contextmanager
def no_read_back() -> Iterator[None]:
    """A trainer believes what the store answers to its put-if-absent."""
    with _patched(Log, "_commit", _trusting):
        yield


@contextlib.contextmanager
def no_parent_check() -> Iterator[None]:
    """A record need not name the digest of the one before it."""
    expected = chain._next

    def fewer(previous: Record, manifest: Manifest) -> dict[str, Any]:
        return {k: v for k, v in expected(previous, manifest).items() if k != "parent"}

    with _patched(chain, "_next", fewer):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "no_read_back": no_read_back,
    "no_parent_check": no_parent_check,
}


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
