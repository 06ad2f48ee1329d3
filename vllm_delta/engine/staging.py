"""Background work of a rank: fetch, verify and decode versions before they are applied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_delta.engine.residence import Built, UnreachableError
from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Manifest, Version
from vllm_delta.patch import HaloPatch, LackingError, Overlay, Run

if TYPE_CHECKING:
    from vllm_delta.patch import Patch, Sums


@dataclass
class Staged:
    """A version on its way into the engine.

    Attributes:
        built: what to apply, once it is done.
        sums: what the check found; None until it was checked.
        error: why it could not be staged.
        lacks: units of which bits have to come from other ranks first.
        held_up: the number of events when it was found that it cannot be decoded yet: bits are
            lacking, or its base is not reached; it is tried again after the next.
    """

    manifest: Manifest
    done: bool = False
    built: Built | None = None
    sums: Sums | None = None
    error: DeltaError | None = None
    lacks: tuple[Run, ...] = ()
    held_up: int | None = None
    seconds: float = 0.0

    @property
    def patch(self) -> Patch | None:
        """What to apply; None until it is ready, and for an anchor, which is only verified."""
        return None if self.built is None else self.built.patch

    @property
    def halo(self) -> HaloPatch | None:
        """What it does to the halo."""
        return None if self.built is None else self.built.halo

    @property
    def overlay(self) -> Overlay | None:
        """What it changes, if a later version may be decoded on top of it."""
        return None if self.built is None else self.built.overlay

    @property
    def n_bytes(self) -> int:
        parts = (self.patch, self.overlay)
        return sum(part.n_bytes for part in parts if part is not None)


class Stager:
    """Stages the versions that are wanted next, one after the other, on a thread of its own.

    The thread lives while there is work that can be done. It reads the channel and weights and
    builds patches; it never writes a weight. The methods are called from one other thread and do
    not block; `way` is also called by the builder.

    A version whose base is not reached yet, or for which bits are lacking, is passed over, and
    tried again when the weights moved, something else was staged or bits were supplied.

    Args:
        build: makes a version's patch; runs on the thread.
        resident: the version that the weights are proven to be, if they are.
    """

    def __init__(
        self, build: Callable[[Manifest], Built], resident: Callable[[], Version | None]
    ) -> None:
        self._build = build
        self._resident = resident
        self._lock = threading.Lock()
        self._wanted: dict[int, Staged] = {}
        self._thread: threading.Thread | None = None
        self._n_events = 0

    def want(self, manifests: Sequence[Manifest]) -> None:
        """Sets what is wanted, in order. Anything else is dropped; what failed is tried again."""
        with self._lock:
            kept = {}
            for manifest in manifests:
                old = self._wanted.get(manifest.seq)
                if old is None or old.manifest != manifest or old.error is not None:
                    old = Staged(manifest)
                    self._n_events += 1
                kept[manifest.seq] = old
            self._wanted = kept
            self._drop_stranded()
            self._start()

    def moved(self) -> None:
        """The weights are those of another version, or no version's.

        What was decoded on the way to a base that is not reached any more is staged anew.
        """
        self._tell(self._drop_stranded)

    def supplied(self) -> None:
        """Bits that were lacking are there."""
        self._tell(lambda: None)

    def _tell(self, change: Callable[[], None]) -> None:
        with self._lock:
            self._n_events += 1
            change()
            self._start()

    def _drop_stranded(self) -> None:
        for seq, staged in self._wanted.items():
            if staged.built is not None and staged.built.decoded and self._way(staged) is None:
                self._wanted[seq] = Staged(staged.manifest, held_up=self._n_events)

    def _start(self) -> None:
        if self._thread is None and self._next() is not None:
            self._thread = threading.Thread(target=self._work, name="delta-stage", daemon=True)
            self._thread.start()

    def _next(self) -> Staged | None:
        return next((s for s in self._wanted.values() if not s.done and self._may(s)), None)

    def _may(self, staged: Staged) -> bool:
        """Whether it makes sense to stage it now."""
        if staged.held_up is None:
            return True
        return staged.held_up < self._n_events and self._way(staged) is not None

    def _way(self, staged: Staged) -> Sequence[Overlay] | None:
        here, base = self._resident(), staged.manifest.base
        return None if here is None or base is None else self._between(here, base)

    def way(self, here: Version, there: Version) -> Sequence[Overlay] | None:
        """What is staged from one version to another; None: it does not lead there."""
        with self._lock:
            return self._between(here, there)

    def _between(self, here: Version, there: Version) -> Sequence[Overlay] | None:
        found: list[Overlay] = []
        for staged in self._wanted.values():
            if here == there:
                break
            if staged.manifest.base == here and staged.overlay is not None:
                assert staged.manifest.target is not None
                found.append(staged.overlay)
                here = staged.manifest.target
        return found if here == there else None

    def find(self, seq: int) -> Staged:
        """The version with this manifest number.

        Raises:
            EngineError: it is not wanted.
            DeltaError: it could not be staged.
        """
        with self._lock:
            staged = self._wanted.get(seq)
        if staged is None:
            raise EngineError("that version is not staged", seq=seq)
        if staged.error is not None:
            raise staged.error
        return staged

    def hold_up(self, staged: Staged) -> Literal["waits", "lacks"] | None:
        """Whether it waits for something that staging does not bring: for its base to be resident,
        or for bits of other ranks."""
        with self._lock:
            if staged.done or self._may(staged):
                return None
            return "lacks" if staged.lacks and self._way(staged) is not None else "waits"

    def drop(self, seq: int) -> None:
        """Forgets a version."""
        with self._lock:
            self._wanted.pop(seq, None)

    def all(self) -> list[Staged]:
        """Everything that is wanted, in order."""
        with self._lock:
            return list(self._wanted.values())

    def _work(self) -> None:
        while True:
            with self._lock:
                staged, n_events = self._next(), self._n_events
                if staged is None:
                    self._thread = None
                    return
            self._stage(staged, n_events)

    def _stage(self, staged: Staged, n_events: int) -> None:
        started = time.perf_counter()
        built: Built | None = None
        error: DeltaError | None = None
        held_up: int | None = None
        lacks: tuple[Run, ...] = ()
        try:
            built = self._build(staged.manifest)
        except UnreachableError:
            held_up = n_events
        except LackingError as lacking:
            held_up, lacks = n_events, lacking.units
        except DeltaError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001 - it travels as a value in the rank's answer
            error = EngineError("unexpected failure while staging", reason=repr(problem))
        with self._lock:
            staged.seconds += time.perf_counter() - started
            staged.built, staged.error = built, error
            staged.held_up, staged.lacks = held_up, lacks
            staged.done = held_up is None
            self._n_events += staged.done
