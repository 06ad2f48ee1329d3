"""`scripts/soak codec`: damage, seeded by number, until one passes unnoticed or all are done."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scripts._soak.judge import VERDICTS, judge_base, judge_blob, other_base
from scripts._soak.mutations import BLOBS
from scripts._soak.subjects import Subject, subjects

BASE = "base"
_ROOM_BYTES = 256 << 20
"""Address space that all mutations together may need more than the intact deltas do."""
_LIMIT_S = 20.0
"""Time for one mutation; they take about a millisecond."""
_KEPT = 20
"""Troubles that are told one by one."""


@dataclass
class Report:
    """What became of the mutations."""

    seed: int
    first: int
    n: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    troubles: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0
    grown_bytes: int = 0

    def add(self, kind: str, verdict: str) -> None:
        self.counts.setdefault(kind, Counter())[verdict] += 1
        self.n += 1

    @property
    def totals(self) -> dict[str, int]:
        return {v: sum(counts[v] for counts in self.counts.values()) for v in VERDICTS}

    @property
    def good(self) -> bool:
        return self.totals["undetected"] == self.totals["failed"] == 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "first": self.first,
            "n": self.n,
            "counts": self.totals,
            "by_kind": {kind: dict(counts) for kind, counts in sorted(self.counts.items())},
            "troubles": self.troubles,
            "seconds": round(self.seconds, 2),
            "slowest_s": round(self.slowest_s, 4),
            "grown_bytes": self.grown_bytes,
        }

    def summary(self) -> str:
        """A line of counts, then one for each kind and each trouble."""
        lines = [f"[soak] codec: {self.n} mutations, seed {self.seed}: {_said(self.totals)}"]
        lines += [f"[soak]   {kind}: {_said(some)}" for kind, some in sorted(self.counts.items())]
        lines += [
            f"[soak]   seed {self.seed} number {one['number']} ({one['kind']} of "
            f"{one['subject']}): {one['verdict']} {one['error']}"
            for one in self.troubles
        ]
        lines.append(
            f"[soak] {self.seconds:.1f} s, the slowest {1000 * self.slowest_s:.1f} ms, "
            f"memory grew by {self.grown_bytes / 2**20:.1f} MiB"
        )
        return "\n".join(lines)


def run(n: int, seed: int, first: int = 0) -> Report:
    """Do mutations `first` to `first + n - 1`; each depends on the seed and its number alone."""
    some = subjects(seed)
    for subject in some:  # compiles everything, and shows that what is intact is right
        assert judge_blob(subject, subject.data) == "harmless", subject.name
    limit_memory()
    report, started = Report(seed, first), time.monotonic()
    _forget_peak()
    before, told = _peak_bytes(), started
    with Watchdog(seed) as watchdog, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(first, first + n):
            watchdog.begins(number)
            mutation_started = time.monotonic()
            one(number, seed, some, report)
            now = time.monotonic()
            report.slowest_s = max(report.slowest_s, now - mutation_started)
            if now - told > 2:
                told = now
                rate = report.n / (now - started)
                _say(f"{report.n}/{n} {rate:.0f}/s {_said(report.totals)}")
    report.seconds = time.monotonic() - started
    report.grown_bytes = _peak_bytes() - before
    return report


def one(number: int, seed: int, some: list[Subject], report: Report) -> None:
    """Do one mutation and write down its verdict."""
    draw = random.Random(f"{seed} {number}")
    subject = draw.choice(some)
    others = [other for other in some if other is not subject]
    kind = draw.choice([*BLOBS, BASE])
    error = ""
    try:
        if kind == BASE:
            verdict = judge_base(subject, other_base(draw, subject, others))
        else:
            data = subject.data
            while data == subject.data:
                data = BLOBS[kind](draw, subject, others)
            verdict = judge_blob(subject, data)
    except Exception as unexpected:  # noqa: BLE001, anything but a refusal is what is looked for
        verdict, error = "failed", f"{type(unexpected).__name__}: {unexpected}"
    report.add(kind, verdict)
    if verdict in ("undetected", "failed"):
        trouble = {"number": number, "kind": kind, "subject": subject.name, "verdict": verdict}
        _say(f"seed {seed} number {number}: {verdict} {error}")
        if len(report.troubles) < _KEPT:
            report.troubles.append({**trouble, "error": error})


def limit_memory() -> None:
    """From here on, memory beyond a fixed room is refused to this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM_BYTES, hard))


class Watchdog:
    """Ends the process when a mutation takes too long: compiled loops heed no signal."""

    def __init__(self, seed: int) -> None:
        self._seed, self._stopped = seed, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._now = (0, time.monotonic())

    def begins(self, number: int) -> None:
        self._now = (number, time.monotonic())

    def _watch(self) -> None:
        while not self._stopped.wait(1):
            number, since = self._now
            if time.monotonic() - since > _LIMIT_S:
                _say(f"seed {self._seed} number {number}: still running after {_LIMIT_S:.0f} s")
                os._exit(1)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


def _forget_peak() -> None:
    """Begin a new peak, where the kernel can: compiling took more than decoding ever does."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _peak_bytes() -> int:
    """Most resident memory since the last peak was forgotten."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _said(counts: dict[str, int] | Counter[str]) -> str:
    return " ".join(f"{verdict}={counts[verdict]}" for verdict in VERDICTS)


def _say(text: str) -> None:
    print(f"[soak] {text}", file=sys.stderr, flush=True)
