"""A pause that somebody else asked for is used and left as they want it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.harness import PROMPT, LocalEngine
from vllm_delta.engine.pause import Gate
from vllm_delta.errors import EngineError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_foreign_pause_is_left_in_place(engine: LocalEngine, mode: str) -> None:
    """A commit under somebody's pause happens, and the engine stays paused as it was."""
    follow = engine.follow()
    engine.core.pause_scheduler(mode, False)
    paused = engine.core.scheduler.pause_state
    engine.trainer.step()
    assert follow.step()["version"]["number"] == 1
    assert engine.core.scheduler.pause_state == paused != PauseState.UNPAUSED
    assert follow.status()["pause"] == paused.name
    engine.core.resume_scheduler()
    assert engine.complete(PROMPT).outputs[0].token_ids


def test_an_engine_that_was_running_runs_on(engine: LocalEngine) -> None:
    """Without anybody's pause the engine is unpaused after commit, refusal and rollback."""
    follow = engine.follow()
    engine.trainer.step()
    follow.step()
    follow.rollback()
    assert engine.core.scheduler.pause_state == PauseState.UNPAUSED


def test_a_sleeping_engine_is_refused(engine: LocalEngine) -> None:
    """Weights that are not in memory are not patched; it says so and goes on when awake."""
    follow = engine.follow()
    engine.trainer.step()
    engine.core.model_executor.sleeping_tags = {"weights"}
    try:
        with pytest.raises(EngineError, match="sleeps"):
            follow.step()
    finally:
        engine.core.model_executor.sleeping_tags = set()
    assert follow.step()["version"]["number"] == 1


class Core:
    """The parts of an engine core with steps in flight that a `Gate` touches."""

    def __init__(self) -> None:
        self.scheduler = self
        self.model_executor = self
        self.is_sleeping = False
        self.batch_queue = [object()]
        self.input_queue = self
        self.messages: list[Any] = []
        self.pause_state = PauseState.UNPAUSED
        self._idle_state_callbacks: list[Any] = []
        self.idle: Future[None] = Future()

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def put_nowait(self, message: Any) -> None:
        self.messages.append(message)

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None]:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        return self.idle


@pytest.mark.parametrize("others", [PauseState.PAUSED_ALL, PauseState.UNPAUSED, None])
def test_what_others_ask_while_steps_are_in_flight_holds_afterwards(
    others: PauseState | None,
) -> None:
    """Somebody pauses or resumes between our stop and the last step's end: their word is kept."""
    core = Core()
    gate = Gate(core)
    seen: list[PauseState] = []
    answer = gate.run(lambda: seen.append(core.pause_state) or {"done": True}, clear_cache=False)
    assert isinstance(answer, Future)
    if others is not None:
        core.scheduler.set_pause_state(others)
    assert core.pause_state == PauseState.PAUSED_ALL
    core.idle.set_result(None)
    assert answer.result(0)["done"] is True
    assert seen == [PauseState.PAUSED_ALL]
    assert core.pause_state == (PauseState.UNPAUSED if others is None else others)
    assert len(core.messages) == 1


def test_a_failed_pause_or_action_opens_the_gate() -> None:
    """Whatever raises, the engine is not left paused, and the next commit is possible."""
    core = Core()
    gate = Gate(core)

    def fail() -> dict[str, Any]:
        raise EngineError("no")

    first = gate.run(fail, clear_cache=False)
    assert isinstance(first, Future)
    with pytest.raises(EngineError, match="waiting"):
        gate.run(fail, clear_cache=False)
    core.idle.set_result(None)
    with pytest.raises(EngineError, match="no"):
        first.result(0)
    assert core.pause_state == PauseState.UNPAUSED
    core.idle = Future()
    second = gate.run(dict, clear_cache=False)
    core.idle.set_exception(RuntimeError("cache"))
    assert isinstance(second, Future)
    with pytest.raises(RuntimeError, match="cache"):
        second.result(0)
    assert core.pause_state == PauseState.UNPAUSED


def test_a_drain_that_was_under_way_goes_on_afterwards() -> None:
    """Callbacks of somebody's pause do not fire for our stop; they are put back."""
    core = Core()
    waiting = object()
    core._idle_state_callbacks.append(waiting)
    gate = Gate(core)
    gate.run(dict, clear_cache=False)
    assert core._idle_state_callbacks == []
    core.idle.set_result(None)
    assert core._idle_state_callbacks == [waiting]
