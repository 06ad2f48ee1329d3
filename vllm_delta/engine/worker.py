"""The worker extension: the calls that every rank answers.

vLLM appends the class to its worker's bases; its ``__init__`` never runs and all its names start
with ``delta_`` or ``_delta_``. A method that raised on one rank would leave a stale answer behind
for the next call, so errors are returned as values, and every answer repeats the call's id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_delta.engine import cpu, trace
from vllm_delta.engine.access import Access
from vllm_delta.engine.calls import Answer, unpack
from vllm_delta.engine.rank import Rank
from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Version, parse_manifest, parse_schema
from vllm_delta.patch import Patcher, Run

logger = init_logger(f"vllm.{__name__}")

# Workers import this module before they load a model, and nobody else does. From here on patched
# weights stay visible to the forward pass, and what is done to them after loading is noticed.
cpu.install()
trace.install_detector()


def _answers(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turns a method's errors into values and puts the call's id and the rank into its answer."""

    @functools.wraps(method)
    def answered(self: Any, call: str, *args: Any) -> Answer:
        head = {"call": call, "rank": self.rank}
        try:
            return {**head, **method(self, call, *args)}
        except DeltaError as error:
            problem = error
        except Exception as error:
            logger.exception("Rank %d failed in %s.", self.rank, method.__name__)
            problem = EngineError("unexpected failure in a rank", reason=repr(error))
        rank = self.__dict__.get("_delta_state")
        untouched = rank is None or rank.verdict != "half applied"
        return {**head, "error": problem.to_dict(), "untouched": untouched}

    return answered


def _version(value: Sequence[Any]) -> Version:
    version = unpack(value)
    assert version is not None
    return version


class WorkerExtension:
    """Follows a channel of weight deltas; pass it as ``--worker-extension-cls``.

    Every method takes the call's id first, returns a dict of plain values and never raises. They
    run on the worker's own thread, in line with its forward steps.
    """

    rank: int
    vllm_config: Any
    model_runner: Any
    device: Any

    @_answers
    def delta_attach(
        self, call: str, schema: bytes, access: Mapping[str, Any], rollback_bytes: int
    ) -> Answer:
        """Learns where this rank holds the channel's tensors, and fingerprints them."""
        parsed = parse_schema(schema)
        traced = trace.trace_layout(
            self.model_runner.get_model(), self.vllm_config, parsed, self.rank
        )
        self.__dict__["_delta_state"] = rank = Rank(
            parsed,
            traced.layout,
            Patcher(parsed, traced.layout, traced.storages),
            log=Access.from_dict(access).open(),
            rollback_bytes=rollback_bytes,
            enter_thread=self._delta_enter_thread,
        )
        return {"layout": traced.layout.to_dict(), **rank.scan()}

    @_answers
    def delta_proven(self, call: str, version: Sequence[Any] | None) -> Answer:
        """`Rank.prove`."""
        return self._delta_rank().prove(unpack(version))

    @_answers
    def delta_stage(self, call: str, manifests: Sequence[bytes]) -> Answer:
        """`Rank.stage`."""
        return self._delta_rank().stage([parse_manifest(data) for data in manifests])

    @_answers
    def delta_ready(self, call: str, seq: int) -> Answer:
        """`Rank.ready`."""
        return self._delta_rank().ready(seq)

    @_answers
    def delta_read(
        self, call: str, version: Sequence[Any], units: Sequence[Sequence[int]]
    ) -> Answer:
        """`Rank.read`."""
        return self._delta_rank().read(_version(version), [Run.from_list(unit) for unit in units])

    @_answers
    def delta_halo(
        self,
        call: str,
        version: Sequence[Any],
        units: Sequence[Sequence[int]],
        pieces: Sequence[Sequence[Any]],
    ) -> Answer:
        """`Rank.supply`."""
        runs = [Run.from_list(unit) for unit in units]
        return self._delta_rank().supply(_version(version), runs, pieces)

    @_answers
    def delta_check(self, call: str, seq: int) -> Answer:
        """`Rank.check`."""
        return self._delta_rank().check(seq)

    @_answers
    def delta_apply(self, call: str, seq: int) -> Answer:
        """`Rank.apply`."""
        return self._delta_rank().apply(seq)

    @_answers
    def delta_undo(self, call: str, seq: int) -> Answer:
        """`Rank.undo`."""
        return self._delta_rank().undo(seq)

    @_answers
    def delta_rollback(self, call: str, expected: Sequence[Any]) -> Answer:
        """`Rank.rollback`."""
        return self._delta_rank().rollback(_version(expected))

    @_answers
    def delta_redo(self, call: str, version: Sequence[Any]) -> Answer:
        """`Rank.redo`."""
        return self._delta_rank().redo(_version(version))

    @_answers
    def delta_anchor(self, call: str, seq: int) -> Answer:
        """`Rank.load_anchor`."""
        return self._delta_rank().load_anchor(seq)

    @_answers
    def delta_scan(self, call: str) -> Answer:
        """`Rank.scan`."""
        return self._delta_rank().scan()

    @_answers
    def delta_status(self, call: str) -> Answer:
        """`Rank.status`; a rank that is not attached has no version."""
        rank = self.__dict__.get("_delta_state")
        return {"version": None, "verdict": "unknown"} if rank is None else rank.status()

    def _delta_rank(self) -> Rank:
        rank: Rank | None = self.__dict__.get("_delta_state")
        if rank is None:
            raise EngineError("the rank is not attached to a channel")
        return rank

    def _delta_enter_thread(self) -> None:
        from vllm.platforms import current_platform

        if current_platform.device_type != "cpu":
            current_platform.set_device(self.device)
