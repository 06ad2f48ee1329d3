"""Checked values out of JSON from outside: each function returns one or raises `FormatError`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_delta.errors import FormatError, UnsupportedError
from vllm_delta.format.objects import FORMAT


def load(data: bytes, what: str, limit: int) -> dict[str, Any]:
    fields = load_object(data, what, limit)
    number = fields.get("format")
    if number != FORMAT or isinstance(number, bool):
        if isinstance(number, int) and number > FORMAT:
            raise UnsupportedError(f"{what}: newer format", format=number)
        raise FormatError(f"{what}: no format number")
    return fields


def load_object(data: bytes, what: str, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise FormatError(f"{what}: too large", n_bytes=len(data), limit=limit)
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_int
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not JSON") from error
    return mapping(value, what)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("a number is too long")
    return int(text)


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what}: not an object")
    return value


def expect_keys(fields: Mapping[str, Any], names: set[str], what: str) -> None:
    if set(fields) != names:
        wrong = sorted(set(fields) ^ names)[:4]
        raise FormatError(
            f"{what}: missing or unknown fields", fields=[name[:64] for name in wrong]
        )


def integer(value: Any, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{what}: not an integer in range", low=low, high=high)
    return value


def match(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"{what}: malformed")
    return value


def text(value: Any, what: str, limit: int) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what}: not text")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"{what}: not valid text") from error
    if not 0 < n_bytes <= limit:
        raise FormatError(f"{what}: empty or too long", limit=limit)
    return value
