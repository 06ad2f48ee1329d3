"""What runs inside vLLM's engine core: commits, rollbacks and the state they leave.

Weights, version and KV policy change together between two steps, on the core's own thread. Nothing
outside this process ever holds a pause for us. `utilities` makes it callable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_delta.engine.calls import Answer, failures_of, new_call, pack, unpack
from vllm_delta.engine.kv import KvAges
from vllm_delta.engine.ledger import Ledger
from vllm_delta.engine.pause import Gate
from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Version

logger = init_logger(f"vllm.{__name__}")

HISTORY = 64
"""Fingerprints of that many older versions are kept for rollbacks."""


class Committer:
    """One engine core's side of following a channel.

    Args:
        core: vLLM's ``EngineCore``.
        ledger: what is resident.
        policy: the KV policy.
    """

    def __init__(self, core: Any, ledger: Ledger, policy: str) -> None:
        self._core = core
        self.ledger = ledger
        self.policy = policy
        self.gate = Gate(core)
        self.ages = KvAges(core, salted=policy == "fresh")
        self._history: list[tuple[Version, list[int]]] = []

    def reopen(self, ledger: Ledger, policy: str) -> None:
        """Follows another channel, or the same one anew."""
        self.ledger, self.policy = ledger, policy
        self.ages.salted = policy == "fresh"
        self._history.clear()

    def commit(self, steps: Sequence[Mapping[str, Any]], first: Sequence[int]) -> Any:
        """Applies versions in order under one pause; the last that fits is what is served.

        Args:
            steps: per version ``seq``, ``kind``, ``base`` and ``target``.
            first: fingerprints that the judged first step leads to; empty for an anchor.

        Returns:
            An answer, or a future of it, with the versions ``committed`` and perhaps the error
            of the one that was not.
        """
        return self._between_steps(lambda: self._commit(steps, list(first)))

    def rollback(self, expected: Version) -> Any:
        """Goes back to the version before the resident one under one pause."""
        return self._between_steps(lambda: self._rollback(expected))

    def _between_steps(self, action: Callable[[], Answer]) -> Any:
        if self.policy == "reset":
            self.ages.expect_recompute()
        return self.gate.run(action, clear_cache=self.policy == "reset")

    def _commit(self, steps: Sequence[Mapping[str, Any]], first: list[int]) -> Answer:
        started = time.perf_counter()
        committed: list[Version] = []
        error: DeltaError | None = None
        for step in steps:
            target = unpack(step["target"])
            assert target is not None
            try:
                if step["kind"] == "anchor":
                    self._load_anchor(step["seq"], target)
                else:
                    self._apply_delta(step, target, first if not committed else [])
            except DeltaError as problem:
                error = problem
                break
            committed.append(target)
        apply_s = time.perf_counter() - started
        if committed:
            self._turn()
        return {**self._answer(committed, error), "apply_s": apply_s}

    def _apply_delta(self, step: Mapping[str, Any], target: Version, judged: list[int]) -> None:
        if self.gate.fence is not None:
            raise EngineError("the engine is fenced; only an anchor or a restart helps")
        before = self.ledger.version
        if before is None or before != unpack(step["base"]):
            raise EngineError("the engine moved since the delta was judged", resident=str(before))
        after = judged or self.ledger.judge(self._ask("delta_check", step["seq"]), target)
        call = new_call()
        try:
            answers = self._core.collective_rpc("delta_apply", args=(call, step["seq"]))
            failures = failures_of(call, answers)
        except Exception as error:  # noqa: BLE001 - a dead rank; whatever it left is unknown
            failures = [EngineError("a rank did not answer", reason=repr(error))]
        if failures:
            self._undo(step["seq"], failures[0])
            raise failures[0]
        self._history = [*self._history, (before, self.ledger.fingerprints)][-HISTORY:]
        self.ledger.adopt(target, after)

    def _undo(self, seq: int, reason: DeltaError) -> None:
        try:
            self._ask("delta_undo", seq)
        except Exception as error:  # noqa: BLE001 - nothing may resume onto half-applied ranks
            self._fence(EngineError("ranks are half applied", seq=seq, reason=str(reason)), error)

    def _load_anchor(self, seq: int, target: Version) -> None:
        call = new_call()
        try:
            answers = self._core.collective_rpc("delta_anchor", args=(call, seq))
            failures = failures_of(call, answers)
            if len(failures) == len(answers) and all(a.get("untouched") for a in answers):
                raise failures[0]  # nothing was written anywhere
        except DeltaError:
            raise
        except Exception as error:  # noqa: BLE001 - a dead rank; whatever it left is unknown
            failures = [EngineError("a rank did not answer", reason=repr(error))]
        try:
            if failures:
                raise failures[0]
            fingerprints = self.ledger.measure([answer["scan"] for answer in answers])
            if (root := self.ledger.root(fingerprints)) != target.root:
                raise EngineError("an anchor did not lead to its version", root=root)
            self._ask("delta_proven", pack(target))
        except Exception as error:
            self._fence(EngineError("an anchor failed half way", seq=seq), error)
            raise
        self._history.clear()
        self.ledger.adopt(target, fingerprints)
        self.gate.fence = None

    def _rollback(self, expected: Version) -> Answer:
        if not self._history or self._history[-1][0] != expected:
            raise EngineError("that version is not the one before", expected=str(expected))
        call = new_call()
        failures = failures_of(
            call, self._core.collective_rpc("delta_rollback", args=(call, pack(expected)))
        )
        if failures:
            try:
                self._ask("delta_redo", pack(self.ledger.version))
            except DeltaError as error:
                self._fence(EngineError("ranks are half rolled back"), error)
            return self._answer([], failures[0])
        self.ledger.adopt(*self._history.pop())
        self._turn()
        return self._answer([expected], None)

    def _turn(self) -> None:
        version = self.ledger.version
        assert version is not None
        self._core.set_weight_version(str(version))
        self.ages.turn(version, recomputed=self.policy == "reset")

    def _fence(self, fence: EngineError, cause: BaseException) -> None:
        logger.error("Serving stops: %s (%s).", fence, cause)
        self.gate.fence = fence.to_dict()

    def _ask(self, method: str, *args: Any) -> list[Answer]:
        call = new_call()
        answers: list[Answer] = self._core.collective_rpc(method, args=(call, *args))
        if failures := failures_of(call, answers):
            raise failures[0]
        return answers

    def _answer(self, committed: Sequence[Version], error: DeltaError | None) -> Answer:
        return {
            "committed": [pack(version) for version in committed],
            "failure": None if error is None else error.to_dict(),
            **self.resident(),
            **self.state(),
        }

    def resident(self) -> Answer:
        """The resident version and its fingerprints."""
        version, fingerprints = self.ledger.version, self.ledger.fingerprints
        return {"version": pack(version), "fingerprints": fingerprints}

    def state(self) -> Answer:
        """What the follower asks for between commits."""
        core = self._core
        return {
            "version": pack(self.ledger.version),
            "weight_version": core.get_weight_version(),
            "fence": self.gate.fence,
            "pause": self.gate.wanted,
            "sleeping": bool(core.model_executor.is_sleeping),
            "rollback_to": pack(self._history[-1][0]) if self._history else None,
            "n_recomputing": self.ages.n_recomputing,
            "oldest_kv_versions": None if self.policy == "keep" else self.ages.oldest,
        }
