"""Calls between follower, engine core and ranks: who asks, who answers, and with what.

Every call has an id, every answer repeats it. An executor that gave up on a call leaves stale
answers behind; the id keeps them from being taken for the next one's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Version

Answer = dict[str, Any]


class Port(Protocol):
    """The follower's way into the engine."""

    def rpc(self, method: str, *args: Any) -> list[Answer]:
        """Calls a method of the worker extension on every rank; blocks until all answered."""

    def utility(self, method: str, *args: Any) -> Answer:
        """Calls a method of the engine core; blocks until it answered."""


def new_call() -> str:
    """An id for a call."""
    return uuid.uuid4().hex[:12]


def ask_ranks(port: Port, method: str, *args: Any) -> list[Answer]:
    """Asks every rank and raises the first error among the answers."""
    call = new_call()
    answers = port.rpc(method, call, *args)
    if failures := failures_of(call, answers):
        raise failures[0]
    return answers


def ask_core(port: Port, method: str, *args: Any) -> Answer:
    """Asks the engine core and raises the error that it answered."""
    call = new_call()
    answer = port.utility(method, call, *args)
    if failures := failures_of(call, [answer]):
        raise failures[0]
    return answer


def failures_of(call: str, answers: Sequence[Mapping[str, Any]]) -> list[DeltaError]:
    """The errors among the answers to a call, stale answers included."""
    failures: list[DeltaError] = []
    for answer in answers:
        if not isinstance(answer, Mapping) or answer.get("call") != call:
            failures.append(EngineError("an answer belongs to another call", call=call))
        elif "error" in answer:
            error = DeltaError.from_dict(answer["error"])
            rank = answer.get("rank")
            if rank is not None and "rank" not in error.facts:
                error = type(error)(error.message, **error.facts, rank=rank)
            failures.append(error)
    return failures


def pack(version: Version | None) -> list[Any] | None:
    """A version as plain values."""
    return None if version is None else [version.number, version.root]


def unpack(value: Sequence[Any] | None) -> Version | None:
    """The version that `pack` wrote."""
    return None if value is None else Version(int(value[0]), str(value[1]))
