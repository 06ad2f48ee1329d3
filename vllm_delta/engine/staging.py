"""Background work of a rank: fetch, verify and decode versions before they are applied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_delta.errors import DeltaError, EngineError
from vllm_delta.format import Manifest

if TYPE_CHECKING:
    from vllm_delta.patch import Patch, Sums


@dataclass
class Staged:
    """A version on its way into the engine.

    Attributes:
        patch: what to apply; None until it is ready, and for an anchor, which is only verified.
        sums: what the check found; None until it was checked.
        error: why it could not be staged.
    """

    manifest: Manifest
    done: bool = False
    patch: Patch | None = None
    sums: Sums | None = None
    error: DeltaError | None = None
    seconds: float = 0.0


class Stager:
    """Stages the versions that are wanted next, one after the other, on a thread of its own.

    The thread lives while there is work. It reads the channel and builds patches; it never
    writes a weight. The methods are called from one other thread and do not block.

    Args:
        build: makes a version's patch; runs on the thread.
    """

    def __init__(self, build: Callable[[Manifest], Patch | None]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._wanted: dict[int, Staged] = {}
        self._thread: threading.Thread | None = None

    def want(self, manifests: Sequence[Manifest]) -> None:
        """Sets what is wanted, in order. Anything else is dropped; what failed is tried again."""
        with self._lock:
            kept = {}
            for manifest in manifests:
                old = self._wanted.get(manifest.seq)
                if old is None or old.manifest != manifest or old.error is not None:
                    old = Staged(manifest)
                kept[manifest.seq] = old
            self._wanted = kept
            idle = self._thread is None and any(not staged.done for staged in kept.values())
            if idle:
                self._thread = threading.Thread(target=self._work, name="delta-stage", daemon=True)
                self._thread.start()

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
                todo = [staged for staged in self._wanted.values() if not staged.done]
                if not todo:
                    self._thread = None
                    return
            self._stage(todo[0])

    def _stage(self, staged: Staged) -> None:
        started = time.perf_counter()
        try:
            staged.patch = self._build(staged.manifest)
        except DeltaError as error:
            staged.error = error
        except Exception as error:  # noqa: BLE001 - it travels as a value in the rank's answer
            staged.error = EngineError("unexpected failure while staging", reason=repr(error))
        staged.seconds = time.perf_counter() - started
        staged.done = True
