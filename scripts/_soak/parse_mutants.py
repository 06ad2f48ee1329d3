"""Parsers that lack a part, which the soak must catch: else it proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scripts._soak.protocol_mutants import _patched
from vllm_delta.channel import Keys
from vllm_delta.codec import blob
from vllm_delta.errors import FormatError
from vllm_delta.format import parse, values


@contextlib.contextmanager
def no_size_check() -> Iterator[None]:
    """JSON may be of any size."""
    load = values.load_object

    def unlimited(data: bytes, what: str, limit: int) -> dict[str, Any]:
        return load(data, what, 1 << 62)

    with _patched(values, "load_object", unlimited):
        yield


@contextlib.contextmanager
def no_strict_keys() -> Iterator[None]:
    """Fields that nobody knows are passed over."""

    def lenient(fields: Mapping[str, Any], names: set[str], what: str) -> None:
        if not set(fields) >= names:
            raise FormatError(f"{what}: missing fields")

    with _patched(parse, "expect_keys", lenient):
        yield


@contextlib.contextmanager
def keys_twice() -> Iterator[None]:
    """Of a field that stands twice, the last one counts."""
    with _patched(values, "_unique", dict):
        yield


@contextlib.contextmanager
def no_signature_check() -> Iterator[None]:
    """A signature by the name of a trusted key is as good as one by the key."""

    def believe(keys: Keys, payload: bytes, signatures: Any) -> str | None:
        return next(iter(keys.signers), None)

    with _patched(Keys, "verify", believe):
        yield


@contextlib.contextmanager
def memory_by_number() -> Iterator[None]:
    """Memory is taken by a number that stands in the bytes, before they are looked at."""
    entries = blob._parse_entries

    def greedy(lines: memoryview, n_entries: int, *others: Any) -> Any:
        bytearray(n_entries << 28)
        return entries(lines, n_entries, *others)

    with _patched(blob, "_parse_entries", greedy):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    one.__name__: one
    for one in (no_size_check, no_strict_keys, keys_twice, no_signature_check, memory_by_number)
}
