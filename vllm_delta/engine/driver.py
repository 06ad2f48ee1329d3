"""Moves an engine from version to version, through its ranks and its core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_delta.engine.access import Access
from vllm_delta.engine.calls import Answer, Port, ask_core, ask_ranks, pack, unpack
from vllm_delta.engine.ledger import Ledger
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import BaseMismatchError, DeltaError, EngineError
from vllm_delta.format import Manifest, Schema, Version
from vllm_delta.layout import RankLayout

_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.1
_SUPPLIED_ELEMENTS = 1 << 24
"""Elements that ranks pass on in one call, unless one unit has more."""


@dataclass(frozen=True)
class Committed:
    """What one commit did, and what it cost.

    Attributes:
        versions: applied in order; the last is served.
        failure: why the version after them was not applied.
    """

    versions: tuple[Version, ...]
    failure: DeltaError | None
    n_bytes: int
    stage_s: float
    check_s: float
    apply_s: float
    pause_s: float


class Driver:
    """One engine: what it holds, and the calls that change it. Blocking, for one thread.

    Args:
        port: the way into the engine.
        settings: KV policy and memory bounds.
        metrics: counts what is done.
        sleep: waits so many seconds; raises to give up waiting.
    """

    def __init__(
        self,
        port: Port,
        settings: Settings,
        *,
        metrics: Metrics,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._port = port
        self._settings = settings
        self._metrics = metrics
        self._sleep = sleep
        self._ledger: Ledger | None = None
        self._layouts: list[Answer] = []
        self._core: Answer = {}

    @property
    def attached(self) -> bool:
        """Whether the ranks' layouts are known."""
        return self._ledger is not None

    @property
    def ledger(self) -> Ledger:
        """What is resident."""
        if self._ledger is None:
            raise EngineError("the engine is not attached to a channel")
        return self._ledger

    @property
    def resident(self) -> Version | None:
        """The published version that the engine holds, if it holds one."""
        return None if self._ledger is None else self._ledger.version

    @property
    def core(self) -> Answer:
        """The engine core's state as it was last told."""
        return self._core

    @property
    def fenced(self) -> bool:
        """Whether the engine serves nothing for want of good weights."""
        return self._core.get("fence") is not None

    @property
    def rollback_to(self) -> Version | None:
        """The version before the resident one, if its fingerprints are kept."""
        return unpack(self._core.get("rollback_to"))

    @property
    def n_recomputing(self) -> int:
        """How many requests are still being prefilled again after the last commit."""
        return int(self._core.get("n_recomputing", 0))

    def attach(self, schema: Schema, access: Access) -> list[int] | None:
        """Learns every rank's layout and fingerprints what they hold.

        Returns:
            The fingerprints of the resident weights; None when ranks disagree about them.

        Raises:
            LayoutError: a rank holds a tensor in a way that cannot be patched, or none holds it.
        """
        answers = ask_ranks(
            self._port,
            "delta_attach",
            schema.to_bytes(),
            access.to_dict(),
            self._settings.rollback_bytes,
        )
        self._layouts = [answer["layout"] for answer in answers]
        ledger = Ledger(schema, [RankLayout.from_dict(layout) for layout in self._layouts])
        self._ledger = ledger
        try:
            return ledger.measure([answer["scan"] for answer in answers])
        except BaseMismatchError:
            return None

    def detach(self) -> None:
        """Forgets an attachment that could not be completed."""
        self._ledger = None

    def open(self, version: Version | None, fingerprints: Sequence[int]) -> None:
        """Tells core and ranks what is resident; None: no published version."""
        ledger = self.ledger
        self._core = ask_core(
            self._port,
            "delta_open",
            ledger.schema.to_bytes(),
            self._layouts,
            pack(version),
            list(fingerprints),
            self._settings.kv_policy,
        )
        ask_ranks(self._port, "delta_proven", pack(version))
        ledger.adopt(version, fingerprints)

    def refresh(self) -> None:
        """Asks the core how it stands, and believes it.

        It may have moved on: a commit whose answer was lost was made nevertheless.
        """
        self._core = ask_core(self._port, "delta_state")
        version = unpack(self._core["version"])
        if version != self.ledger.version:
            answer = ask_core(self._port, "delta_fingerprints")
            self.ledger.adopt(unpack(answer["version"]), answer["fingerprints"])

    def stage(self, manifests: Sequence[Manifest]) -> None:
        """Starts fetching and decoding on every rank; returns at once."""
        ask_ranks(self._port, "delta_stage", [manifest.to_bytes() for manifest in manifests])

    def wait_staged(self, manifest: Manifest) -> bool:
        """Waits until every rank has staged the version; raises the first rank's error.

        What ranks lack of lanes that they hold in parts is passed on between them.

        Returns:
            Whether it is staged; else its base has to become resident first.
        """
        wait_s = _FIRST_WAIT_S
        supplied: set[tuple[int, ...]] = set()
        while True:
            answers = ask_ranks(self._port, "delta_ready", manifest.seq)
            if all(answer["ready"] for answer in answers):
                return True
            if any(answer.get("waits") for answer in answers):
                return False
            lacking = {tuple(unit): None for a in answers for unit in a.get("lacks", ())}
            if lacking:
                if not supplied.isdisjoint(lacking):
                    raise EngineError("a rank lacks bits that it was given", seq=manifest.seq)
                supplied.update(self._supply(list(lacking)))
            else:
                self._sleep(wait_s)
                wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)

    def _supply(self, units: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        """Passes bits of units between the ranks, as many as go in one call; which they were."""
        size = 0
        some: list[tuple[int, ...]] = []
        for unit in units:
            size += unit[-1]
            if some and size > _SUPPLIED_ELEMENTS:
                break
            some.append(unit)
        version, sent = pack(self.resident), [list(unit) for unit in some]
        answers = ask_ranks(self._port, "delta_read", version, sent)
        pieces = [piece for answer in answers for piece in answer["pieces"]]
        ask_ranks(self._port, "delta_halo", version, sent, pieces)
        return some

    def check(self, manifest: Manifest) -> list[int]:
        """Lets every rank check the staged delta, and judges it; nothing is written or paused.

        Returns:
            The fingerprints it leads to.

        Raises:
            BaseMismatchError: it does not fit what is resident.
        """
        assert manifest.target is not None
        answers = ask_ranks(self._port, "delta_check", manifest.seq)
        return self.ledger.judge(answers, manifest.target)

    def commit(self, manifests: Sequence[Manifest]) -> Committed:
        """Stages, checks and commits versions under one pause.

        What fails to stage, and all after it, is left out; a first version that fails raises. So is
        what can be decoded only once a version before it is resident.
        """
        started = time.perf_counter()
        self.stage(manifests)
        ready, failure = self._ready(manifests)
        staged = time.perf_counter()
        first = [] if ready[0].kind == "anchor" else self.check(ready[0])
        checked = time.perf_counter()
        steps = [
            {"seq": m.seq, "kind": m.kind, "base": pack(m.base), "target": pack(m.target)}
            for m in ready
        ]
        self._core = answer = ask_core(self._port, "delta_commit", steps, first)
        versions = tuple(v for v in map(unpack, answer["committed"]) if v is not None)
        self.ledger.adopt(unpack(answer["version"]), answer["fingerprints"])
        if answer["failure"] is not None:
            failure = DeltaError.from_dict(answer["failure"])
        done = Committed(
            versions=versions,
            failure=failure,
            n_bytes=sum(m.payload_bytes for m in ready[: len(versions)]),
            stage_s=staged - started,
            check_s=checked - staged,
            apply_s=answer["apply_s"],
            pause_s=answer["pause_s"],
        )
        self._observe(done)
        return done

    def _ready(self, manifests: Sequence[Manifest]) -> tuple[list[Manifest], DeltaError | None]:
        ready: list[Manifest] = []
        for manifest in manifests:
            try:
                is_staged = self.wait_staged(manifest)
            except DeltaError as error:
                if not ready:
                    raise
                return ready, error
            if not is_staged:
                break
            ready.append(manifest)
        if not ready:
            raise BaseMismatchError(
                "the delta's base is not resident", version=str(manifests[0].base)
            )
        return ready, None

    def _observe(self, done: Committed) -> None:
        metrics = self._metrics
        metrics.stage_s.observe(done.stage_s)
        metrics.check_s.observe(done.check_s)
        metrics.pause_s.observe(done.pause_s)
        if done.versions:
            metrics.apply_s.observe(done.apply_s)
            metrics.commits.inc()
            metrics.versions.inc(len(done.versions))
            metrics.skipped.inc(len(done.versions) - 1)
            metrics.n_bytes.inc(done.n_bytes)

    def rollback(self) -> Version:
        """Goes back to the version before the resident one.

        Raises:
            EngineError: there is none, or a rank no longer keeps what it takes.
        """
        expected = self.rollback_to
        kept = [unpack(a["rollback_to"]) for a in ask_ranks(self._port, "delta_status")]
        if expected is None or any(version != expected for version in kept):
            raise EngineError(
                "the version before is not kept on every rank", resident=str(self.resident)
            )
        self._core = answer = ask_core(self._port, "delta_core_rollback", pack(expected))
        self.ledger.adopt(unpack(answer["version"]), answer["fingerprints"])
        if answer["failure"] is not None:
            raise DeltaError.from_dict(answer["failure"])
        self._metrics.rollbacks.inc()
        return expected

    def scan(self) -> list[int]:
        """Fingerprints all resident weights again, between two steps."""
        self._metrics.scans.inc()
        answers = ask_ranks(self._port, "delta_scan")
        return self.ledger.measure([answer["scan"] for answer in answers])
