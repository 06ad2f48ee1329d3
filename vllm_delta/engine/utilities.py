"""The calls that vLLM's engine core gets: its way into `core`.

They become methods of ``EngineCore`` and are called as utilities, on the core's own thread. They
return errors as values. In an engine that did not ask for our extension nobody calls them, so this
module imports nothing heavy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger

from vllm_delta.engine.calls import Answer, unpack
from vllm_delta.errors import DeltaError, EngineError

logger = init_logger(f"vllm.{__name__}")


def _answers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a utility's errors into values and puts the call's id into its answer."""

    @functools.wraps(function)
    def answered(self: Any, call: str, *args: Any) -> Any:
        try:
            result = function(self, call, *args)
        except Exception as error:  # noqa: BLE001 - the boundary to the follower
            return _error_answer(call, error)
        if not isinstance(result, Future):
            return {"call": call, **result}
        later: Future[Answer] = Future()

        def pass_on(done: Future[Answer]) -> None:
            error = done.exception()
            later.set_result(
                {"call": call, **done.result()} if error is None else _error_answer(call, error)
            )

        result.add_done_callback(pass_on)
        return later

    return answered


def _error_answer(call: str, error: BaseException) -> Answer:
    if not isinstance(error, DeltaError):
        logger.error("A call into the engine core failed.", exc_info=error)
        error = EngineError("unexpected failure in the engine core", reason=repr(error))
    return {"call": call, "error": error.to_dict()}


@_answers
def delta_open(
    self: Any,
    call: str,
    schema: bytes,
    layouts: Sequence[Mapping[str, Any]],
    version: Sequence[Any] | None,
    fingerprints: Sequence[int],
    policy: str,
) -> Answer:
    """Takes over what the follower learned when it attached to the ranks."""
    from vllm_delta.engine.core import Committer
    from vllm_delta.engine.ledger import Ledger
    from vllm_delta.format import parse_schema
    from vllm_delta.layout import RankLayout

    ledger = Ledger(parse_schema(schema), [RankLayout.from_dict(layout) for layout in layouts])
    ledger.adopt(unpack(version), fingerprints)
    committer = getattr(self, "_delta_committer", None)
    if committer is None:
        committer = self._delta_committer = Committer(self, ledger, policy)
    else:
        committer.reopen(ledger, policy)
    if ledger.version is not None:
        self.set_weight_version(str(ledger.version))
    return dict(committer.state())


@_answers
def delta_commit(
    self: Any, call: str, steps: Sequence[Mapping[str, Any]], first: Sequence[int]
) -> Any:
    """`Committer.commit` as a utility."""
    return self._delta_committer.commit(steps, first)


@_answers
def delta_core_rollback(self: Any, call: str, expected: Sequence[Any]) -> Any:
    """`Committer.rollback` as a utility."""
    return self._delta_committer.rollback(unpack(expected))


@_answers
def delta_state(self: Any, call: str) -> Answer:
    """`Committer.state` as a utility."""
    return dict(self._delta_committer.state())


@_answers
def delta_fingerprints(self: Any, call: str) -> Answer:
    """`Committer.resident` as a utility."""
    return dict(self._delta_committer.resident())


UTILITIES = (delta_open, delta_commit, delta_core_rollback, delta_state, delta_fingerprints)


def install() -> None:
    """Adds the utilities to vLLM's ``EngineCore`` in this process; nothing else of it changes."""
    from vllm.v1.engine.core import EngineCore

    for utility in UTILITIES:
        setattr(EngineCore, utility.__name__, utility)
