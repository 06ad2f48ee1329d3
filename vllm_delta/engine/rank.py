"""One rank's part: stage, check, apply and undo versions on the weights that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_delta.channel import LogReader
from vllm_delta.codec import Change, LaneDecoder
from vllm_delta.engine.calls import Answer, pack
from vllm_delta.engine.reading import read_changes
from vllm_delta.engine.residence import Built, Residence
from vllm_delta.engine.staging import Staged, Stager
from vllm_delta.errors import BaseMismatchError, EngineError
from vllm_delta.format import Manifest, Schema, Version
from vllm_delta.layout import RankLayout
from vllm_delta.patch import HaloPatch, Run

if TYPE_CHECKING:
    from vllm_delta.patch import Patch, Patcher, Sums


@dataclass(frozen=True)
class Applied:
    """A version that was applied, and how to undo it."""

    base: Version
    target: Version
    seq: int
    patch: Patch
    sums: Sums
    halo: HaloPatch


class Rank:
    """Holds a rank's patcher and what is staged and applied.

    Everything but staging runs on the worker's own thread, in line with the forward steps. What
    changes weights takes its turn with the staging thread, which reads them back.

    Args:
        schema: the channel's tensors.
        layout: where this rank holds them.
        patcher: writes the weights.
        log: reads the channel's blobs.
        rollback_bytes: memory for undoing.
        enter_thread: called first on the staging thread (it selects the device).
    """

    def __init__(
        self,
        schema: Schema,
        layout: RankLayout,
        patcher: Patcher,
        *,
        log: LogReader,
        rollback_bytes: int,
        enter_thread: Callable[[], None],
    ) -> None:
        self.layout = layout
        self._schema = schema
        self._patcher = patcher
        self._log = log
        self._rollback_bytes = rollback_bytes
        self._enter_thread = enter_thread
        self._stager = Stager(self._build, self._resident)
        self._residence = Residence(schema, patcher, self._resident, self._stager.way)
        self._turns = self._residence.turns
        self._applied: list[Applied] = []
        self._undone: Applied | None = None
        self.version: Version | None = None
        self.verdict = "unknown"

    def stage(self, manifests: Sequence[Manifest]) -> Answer:
        """Starts staging these versions in the background; anything else staged is dropped."""
        self._undone = None
        self._stager.want(manifests)
        return {}

    def ready(self, seq: int) -> Answer:
        """Whether a version is staged; its error if it could not be.

        Where it is not, the answer may say ``lacks``, with runs of which the rank holds a part and
        needs the rest (`read`, `supply`), or ``waits``: until its base, or a version nearer to it,
        is resident.
        """
        staged = self._stager.find(seq)
        answer: Answer = {"ready": staged.done}
        match self._stager.hold_up(staged):
            case "lacks":
                answer["lacks"] = [unit.to_list() for unit in staged.lacks]
            case "waits":
                answer["waits"] = True
        return answer

    def read(self, version: Version, units: Sequence[Run]) -> Answer:
        """What this rank holds of the units, for ranks that lack it."""
        self._require(version)
        return {"pieces": self._residence.read(units)}

    def supply(self, version: Version, units: Sequence[Run], pieces: Sequence[Any]) -> Answer:
        """Keeps what other ranks hold of units of which this rank has a part."""
        self._require(version)
        self._residence.supply(units, pieces, version)
        self._stager.supplied()
        return {}

    def _require(self, version: Version) -> None:
        if (actual := self._resident()) != version:
            raise EngineError(
                "another version is resident", expected=str(version), actual=str(actual)
            )

    def _resident(self) -> Version | None:
        return self.version if self.verdict == "proven" else None

    def check(self, seq: int) -> Answer:
        """What a staged delta would find and change, per rectangle; reads only."""
        staged = self._stager.find(seq)
        if staged.patch is None:
            raise EngineError("the version is not staged yet", seq=seq)
        if staged.halo is not None and staged.overlay is not None:
            staged.halo.cover(self._residence.halo.units, staged.overlay)
        staged.sums = self._patcher.check(staged.patch)
        return {
            "entries": [list(entry) for entry in staged.patch.entries],
            "touched": staged.sums.touched,
            "change": staged.sums.change,
        }

    def apply(self, seq: int) -> Answer:
        """Applies what was staged and checked, and compares what it did with the check.

        Raises:
            EngineError: it was not checked, or another version is resident.
            BaseMismatchError: weights changed since the check; they are as they were before.
        """
        applied = self._ready(self._stager.find(seq))
        with self._changing():
            self._stager.drop(seq)  # a patch that was tried is not tried again
            try:
                change = self._patcher.apply(applied.patch)
            except Exception:
                self._settle(applied.patch, applied.sums)
                raise
            if change != applied.sums.change:
                self._take_back(applied)
                raise BaseMismatchError(
                    "weights changed between check and apply", version=str(applied.target)
                )
            self._keep(applied)
        return {}

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A turn at the weights, which are half applied until it is said otherwise."""
        with self._turns.changing():
            self.verdict = "half applied"
            try:
                yield
            finally:
                self._stager.moved()

    def _ready(self, staged: Staged) -> Applied:
        manifest, patch, sums = staged.manifest, staged.patch, staged.sums
        if self.verdict == "half applied":
            raise EngineError("the rank is half applied", seq=manifest.seq)
        if patch is None or sums is None or staged.halo is None:
            raise EngineError("the version was not checked", seq=manifest.seq)
        assert manifest.base is not None
        assert manifest.target is not None
        if manifest.base != self.version:
            raise EngineError(
                "another version is resident", expected=str(manifest.base), actual=str(self.version)
            )
        return Applied(manifest.base, manifest.target, manifest.seq, patch, sums, staged.halo)

    def _keep(self, applied: Applied) -> None:
        self._residence.halo.apply(applied.halo, applied.base, applied.target)
        self.version, self.verdict = applied.target, "proven"
        self._applied.append(applied)
        while sum(kept.patch.n_bytes for kept in self._applied) > self._rollback_bytes:
            del self._applied[0]

    def _take_back(self, applied: Applied) -> None:
        self._patcher.rollback(applied.patch)
        self._settle(applied.patch, applied.sums)

    def _settle(self, patch: Patch, sums: Sums) -> None:
        """After a failure: are the touched weights as they were at the check?"""
        found = self._patcher.check(patch)
        if (found.touched, found.change) != (sums.touched, sums.change):
            raise EngineError("the rank is half applied")
        self.verdict = "proven"

    def undo(self, seq: int) -> Answer:
        """Takes a version back that another rank could not apply; nothing to do is fine.

        Raises:
            EngineError: this rank's weights are neither the base's nor the target's.
        """
        if self._applied and self._applied[-1].seq == seq:
            self._go_back(self._applied.pop())
        if self.verdict == "half applied":
            raise EngineError("the rank is half applied", seq=seq)
        return {}

    def rollback(self, expected: Version) -> Answer:
        """Goes back to the version before the resident one.

        Raises:
            EngineError: it is not ``expected``, or what it takes is no longer kept.
        """
        if not self._applied or self._applied[-1].base != expected:
            raise EngineError("the version before is no longer kept", expected=str(expected))
        applied = self._applied.pop()
        self._go_back(applied)
        self._undone = applied
        return {}

    def _go_back(self, applied: Applied) -> None:
        with self._changing():
            self._take_back(applied)
            self._residence.halo.rollback(applied.halo, applied.base, applied.target)
            self.version = applied.base

    def redo(self, version: Version) -> Answer:
        """Applies again what `rollback` took back, because another rank could not."""
        undone, self._undone = self._undone, None
        if self.version == version and self.verdict != "half applied":
            return {}
        if undone is None or undone.target != version:
            raise EngineError("the rank cannot return to the version", version=str(version))
        with self._changing():
            if self._patcher.apply(undone.patch) != undone.sums.change:
                raise EngineError("the rank is half applied")
            self._keep(undone)
        return {}

    def load_anchor(self, seq: int) -> Answer:
        """Writes a whole published checkpoint, tensor by tensor, and scans the result.

        The answer says ``untouched`` with an error that came before the first write.
        """
        manifest = self._stager.find(seq).manifest
        changes = self._changes(manifest)
        first = next(changes, None)
        with self._changing():
            self._applied.clear()
            self._residence.halo.clear()
            self.version = None
            for change in chain(() if first is None else (first,), changes):
                self._patcher.apply(self._patcher.stage([change]))
            self._stager.drop(seq)
        return {"scan": self._patcher.scan()}

    def prove(self, version: Version | None) -> Answer:
        """Takes note of what all ranks together were proven to hold; None: it is unpublished."""
        with self._changing():
            self.version, self.verdict = version, "unpublished" if version is None else "proven"
        return {}

    def scan(self) -> Answer:
        """Fingerprints of everything this rank holds, per rectangle."""
        return {"scan": self._patcher.scan()}

    def status(self) -> Answer:
        """What this rank holds, for people."""
        staged = self._stager.all()
        return {
            "version": pack(self.version),
            "verdict": self.verdict,
            "staged": [s.manifest.target.number for s in staged if s.done and s.manifest.target],
            "staging": [
                s.manifest.target.number for s in staged if not s.done and s.manifest.target
            ],
            "staged_bytes": sum(s.n_bytes for s in staged),
            "halo_bytes": self._residence.halo.n_bytes,
            "kept_bytes": sum(kept.patch.n_bytes for kept in self._applied),
            "rollback_to": pack(self._applied[-1].base) if self._applied else None,
        }

    def _build(self, manifest: Manifest) -> Built:
        self._enter_thread()
        if manifest.content == "delta":
            assert manifest.base is not None
            return self._residence.build(
                manifest.base, lambda lanes: self._changes(manifest, lanes)
            )
        # An anchor is too big to keep. Reading it now means that damage is found before a pause.
        for _ in self._changes(manifest):
            pass
        return Built()

    def _changes(self, manifest: Manifest, lanes: LaneDecoder | None = None) -> Iterator[Change]:
        return read_changes(self._log, self._schema, manifest, lanes)
