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
N_THREAD_RUNS = 10
_CONTROL_ROUNDS = 30_000_000


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
    encode = _best(lambda: payloads.append(coder.encode()), coder.settle)
    sizes = sorted(map(coder.n_bytes, payloads))
    n_bytes = statistics.median_low(sizes)
    payload = next(found for found in payloads if coder.n_bytes(found) == n_bytes)
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
        "smallest_bytes": sizes[0],
        "largest_bytes": sizes[-1],
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
            "control": (lambda: list(map(_spin, (1, 2))), lambda: list(pool.map(_spin, (1, 2)))),
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


def _best(run: Callable[[], Any], settle: Callable[[], None]) -> Seconds:
    cpu: list[float] = []
    wall: list[float] = []
    while len(cpu) < MIN_RUNS or (sum(wall) < ENOUGH_S and len(cpu) < MAX_RUNS):
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        settle()
        cpu.append(time.process_time() - cpu_start)
    return Seconds(min(cpu), min(wall))


def _exhaust(results: Iterable[Any]) -> None:
    for _ in results:
        pass


@numba.njit(cache=True, nogil=True)
def _spin(seed):  # type: ignore[no-untyped-def]
    """Arithmetic that touches no memory: Marsaglia's xorshift64."""
    x = np.uint64(seed)
    for _ in range(_CONTROL_ROUNDS):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
    return x
