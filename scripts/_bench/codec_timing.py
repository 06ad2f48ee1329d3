"""Seconds of a coder, its answer checked first; and what a second thread is worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Seconds:
    """The best of several runs: CPU seconds of the whole process, and by the clock."""

    cpu: float
    wall: float


def measure(coder: Coder, model_bytes: int) -> dict[str, Any]:
    """One coder's figures: bytes, percent, MB of weights per CPU second and per second, exact.

    CPU seconds are the process's, so a coder that starts threads pays for all of them, and for
    what they do after it answered. MB are 10^6 bytes of weights. Where sizes differ from run to
    run, the payload of median size counts. A wrong answer has no figures.
    """
    first = coder.encode()
    coder.settle()
    if not coder.holds(first):
        return {"exact": False}
    payloads: list[Any] = []
    sizes: list[int] = []

    def encode_once() -> None:
        payloads.append(coder.encode())

    def is_enough(wall: list[float]) -> bool:
        sizes.append(coder.n_bytes(payloads[-1]))
        if len(set(sizes)) == 1:
            return _is_enough(wall)
        return len(wall) >= VARYING_RUNS or (len(wall) >= MIN_RUNS and sum(wall) >= VARYING_S)

    encode = _best(encode_once, coder.settle, is_enough)
    n_bytes = statistics.median_low(sizes)
    payload = payloads[sizes.index(n_bytes)]
    if not coder.holds(payload):
        return {"exact": False}
    decode = _best(lambda: _exhaust(coder.decode(payload)), coder.settle)
    megabytes = model_bytes / 1e6
    return {
        "bytes": n_bytes,
        "percent": 100 * n_bytes / model_bytes,
        "encode_mb_s": megabytes / encode.cpu,
        "decode_mb_s": megabytes / decode.cpu,
        "exact": True,
        "encode_wall_mb_s": megabytes / encode.wall,
        "decode_wall_mb_s": megabytes / decode.wall,
        "smallest_bytes": min(sizes),
        "largest_bytes": max(sizes),
    }


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


def _is_enough(wall: list[float]) -> bool:
    return len(wall) >= MAX_RUNS or (len(wall) >= MIN_RUNS and sum(wall) >= ENOUGH_S)


def _best(
    run: Callable[[], Any],
    settle: Callable[[], None],
    is_enough: Callable[[list[float]], bool] = _is_enough,
) -> Seconds:
    """Run until it is enough, which is asked once after every run."""
    cpu: list[float] = []
    wall: list[float] = []
    while not wall or not is_enough(wall):
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        settle()
        cpu.append(time.process_time() - cpu_start)
    return Seconds(min(cpu), min(wall))


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
