"""Runs something between two steps of an engine, and gives the engine back as others want it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType

from vllm_delta.engine.calls import Answer
from vllm_delta.errors import EngineError


class Gate:
    """The one place that stops an engine core and lets it go again.

    It watches the scheduler's pause state: a pause that somebody else asked for, before or
    meanwhile, is used and left in place. Everything runs on the core's own thread.

    Args:
        core: vLLM's ``EngineCore``; its scheduler's ``set_pause_state`` is replaced on this
            instance.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._set = core.scheduler.set_pause_state
        self._wanted = core.scheduler.pause_state
        self._busy = False
        self._mine = False
        self.fence: dict[str, Any] | None = None
        core.scheduler.set_pause_state = self._observe

    @property
    def wanted(self) -> str:
        """The pause state that others asked for."""
        return str(self._wanted.name)

    def _observe(self, state: PauseState) -> None:
        if not self._mine:
            self._wanted = state
            if state == PauseState.UNPAUSED and (self._busy or self.fence is not None):
                return  # it takes effect when the gate opens
        self._set(state)

    @contextmanager
    def _as_mine(self) -> Iterator[None]:
        self._mine = True
        try:
            yield
        finally:
            self._mine = False

    def run(self, action: Callable[[], Answer], *, clear_cache: bool) -> Answer | Future[Answer]:
        """Calls ``action`` while no step is in flight.

        Args:
            action: called once, on this thread, now or when the running step has ended. While
                it sets `fence`, the engine stays paused.
            clear_cache: drop all KV first, so that running requests are prefilled again.

        Returns:
            The action's answer with ``pause_s`` added, or a future of it.

        Raises:
            EngineError: another action is waiting, the engine sleeps or has steps in flight that
                only its caller can finish.
        """
        core, started = self._core, time.perf_counter()
        self._check_ready()
        # Callbacks of a pause that still drains would take our stop for their end.
        others = list(core._idle_state_callbacks)
        core._idle_state_callbacks.clear()
        self._busy = True
        try:
            with self._as_mine():
                stopped = core.pause_scheduler("keep", clear_cache)
            if stopped is None:
                answer = action()
        except BaseException:
            self._open(others)
            raise
        if stopped is None:
            self._open(others)
            return {**answer, "pause_s": time.perf_counter() - started}
        later: Future[Answer] = Future()
        stopped.add_done_callback(lambda done: self._resume(done, action, others, later, started))
        return later

    def _check_ready(self) -> None:
        if self._busy:
            raise EngineError("another commit is waiting for the engine")
        if self._core.model_executor.is_sleeping:
            raise EngineError("the engine sleeps; wake it up first")
        if self._core.batch_queue and not hasattr(self._core, "input_queue"):
            raise EngineError("steps are in flight; finish them before the commit")

    def _resume(
        self,
        stopped: Future[Any],
        action: Callable[[], Answer],
        others: list[Callable[..., Any]],
        later: Future[Answer],
        started: float,
    ) -> None:
        try:
            stopped.result()
            answer = action()
        except BaseException as error:  # noqa: BLE001 - it travels in the future
            self._open(others)
            later.set_exception(error)
        else:
            self._open(others)
            later.set_result({**answer, "pause_s": time.perf_counter() - started})
        # The core is about to wait for a message, although it may have work again.
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _open(self, others: list[Callable[..., Any]]) -> None:
        self._busy = False
        self._core._idle_state_callbacks[:0] = others
        if self.fence is None:
            self._set(self._wanted)
