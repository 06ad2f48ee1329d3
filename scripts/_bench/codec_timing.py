"""Seconds of a coder, its answer checked first; and what a second thread is worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np

from scripts._bench.codec_ours import Ours
from scripts._bench.codec_peers import Coder
from scripts._bench.codec_traces import View
from vllm_delta.shadow import Shadow

MIN_RUNS, MAX_RUNS = 3, 25
ENOUGH_S = 1.5
"""Runs go on up to MAX_RUNS until they have taken this long together."""
VARYING_RUNS, VARYING_S = 25, 30.0
"""Where sizes differ from run to run, encoding goes on to so many runs or until this long."""
N_THREAD_RUNS = 10
CONTROL_ROUNDS = 30_000_000
"""Some 50 ms."""


def measure(coders: Sequence[Coder], model_bytes: int) -> list[dict[str, Any]]:
    """The coders' figures: bytes, percent, MB of weights per CPU second and per second, exact.

    Every answer is checked before anything is timed; a wrong one has no figures. Then the coders
    take turns, so that all see the same machine, and the best run of each counts. CPU seconds are
    the process's, so a coder that starts threads pays for all of them, and for what they do after
    it answered. MB are 10^6 bytes of weights. Where sizes differ from run to run, the payload of
    median size counts.
    """
    trials = [_Trial(coder) for coder in coders]
    _take_turns([trial.encoding for trial in trials if trial.is_exact])
    for trial in trials:
        trial.choose()
    _take_turns([trial.decoding for trial in trials if trial.is_exact])
    return [trial.figures(model_bytes) for trial in trials]


class _Runs:
    """Repeated work of one coder, in CPU seconds of the process and in seconds.

    Args:
        work: what is timed.
        settle: waits for what `work` left behind; its CPU seconds count.
        note: called after each run; not timed.
    """

    def __init__(
        self, work: Callable[[], Any], settle: Callable[[], None], note: Callable[[], None]
    ) -> None:
        self._work, self._settle, self._note = work, settle, note
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.is_varying = False

    def once(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self._work()
        self.wall.append(time.perf_counter() - start)
        self._settle()
        self.cpu.append(time.process_time() - cpu_start)
        self._note()

    @property
    def is_enough(self) -> bool:
        n, seconds = len(self.wall), sum(self.wall)
        if self.is_varying:
            return n >= VARYING_RUNS or (n >= MIN_RUNS and seconds >= VARYING_S)
        return n >= MAX_RUNS or (n >= MIN_RUNS and seconds >= ENOUGH_S)

    def speeds(self, megabytes: float, name: str) -> dict[str, float]:
        return {
            f"{name}_mb_s": megabytes / min(self.cpu),
            f"{name}_wall_mb_s": megabytes / min(self.wall),
        }


class _Trial:
    """One coder: its first answer is checked at once."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._payloads: list[Any] = []
        self._sizes: list[int] = []
        self.encoding = _Runs(self._encode, coder.settle, self._weigh)
        self.decoding = _Runs(self._decode, coder.settle, lambda: None)
        self._payload = coder.encode()
        coder.settle()
        self.is_exact = coder.holds(self._payload)

    def choose(self) -> None:
        """Take the payload of median size, and check it too."""
        if self.is_exact:
            self._payload = self._payloads[self._sizes.index(statistics.median_low(self._sizes))]
            self._payloads.clear()
            self.is_exact = self._coder.holds(self._payload)

    def figures(self, model_bytes: int) -> dict[str, Any]:
        if not self.is_exact:
            return {"exact": False}
        n_bytes, megabytes = self._coder.n_bytes(self._payload), model_bytes / 1e6
        return {
            "bytes": n_bytes,
            "percent": 100 * n_bytes / model_bytes,
            **self.encoding.speeds(megabytes, "encode"),
            **self.decoding.speeds(megabytes, "decode"),
            "exact": True,
            "smallest_bytes": min(self._sizes),
            "largest_bytes": max(self._sizes),
        }

    def _encode(self) -> None:
        self._payloads.append(self._coder.encode())

    def _weigh(self) -> None:
        self._sizes.append(self._coder.n_bytes(self._payloads[-1]))
        self.encoding.is_varying = len(set(self._sizes)) > 1

    def _decode(self) -> None:
        _exhaust(self._coder.decode(self._payload))


def _take_turns(all_runs: Iterable[_Runs]) -> None:
    while waiting := [runs for runs in all_runs if not runs.is_enough]:
        for runs in waiting:
            runs.once()


def measure_threads(view: View, shadow: Shadow) -> list[dict[str, Any]]:
    """`hazard` with two threads against one, by the clock, beside pure arithmetic.

    One and two threads take turns, and so do the operations, so that all see the same machine.
    """
    one, two = (Ours(view, "hazard", shadow, n_threads=n) for n in (1, 2))
    changes = list(one.changes())
    payload = one.code(iter(changes))
    assert one.holds(payload), "wrong with one thread"
    assert two.code(iter(changes)) == payload, "two threads code to other bytes"
    assert two.holds(payload), "wrong with two threads"
    with ThreadPoolExecutor(2) as pool:
        work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "control": (
                lambda: list(map(_control, (1, 2))),
                lambda: list(pool.map(_control, (1, 2))),
            ),
            "encode": (one.encode, two.encode),
            "code": (lambda: one.code(iter(changes)), lambda: two.code(iter(changes))),
            "decode": (
                lambda: _exhaust(one.decode(payload)),
                lambda: _exhaust(two.decode(payload)),
            ),
        }
        best = {name: [float("inf")] * 2 for name in work}
        for _ in range(N_THREAD_RUNS + 1):  # the first compiles, and is never the best
            for name, pair in work.items():
                for place, run in enumerate(pair):
                    start = time.perf_counter()
                    run()
                    best[name][place] = min(best[name][place], time.perf_counter() - start)
    return [
        {"work": name, "one_s": alone, "two_s": together, "ratio": alone / together}
        for name, (alone, together) in best.items()
    ]


def _exhaust(results: Iterable[Any]) -> None:
    for _ in results:
        pass


def _control(seed: int) -> None:
    _spin(seed, CONTROL_ROUNDS)


@numba.njit(cache=True, nogil=True)
def _spin(seed, n_rounds):  # type: ignore[no-untyped-def]
    """Arithmetic that touches no memory: Marsaglia's xorshift64."""
    x = np.uint64(seed)
    for _ in range(n_rounds):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
    return x
