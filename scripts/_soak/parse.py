"""`scripts/soak parse`: damaged bytes for every parser that is given bytes from outside.

An input depends on the seed and its number alone. Each must be refused by a typed error, or be
taken for just what stands in it, without a crash, without a hang, and within `ROOM_BYTES`.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from scripts._soak.parse_worker import ROOM_BYTES, Found, work
from scripts._soak.protocol_stores import folder

N_PROCESSES = 2
_MUTANT_ROUNDS = 500_000
_MUTANTS = (
    "no_size_check", "no_strict_keys", "keys_twice", "no_signature_check", "memory_by_number",
)  # fmt: skip
_KEPT = 40
"""Violations that are told one by one."""


@dataclass
class Report:
    """What became of all inputs."""

    seed: int
    first: int
    found: Found = field(default_factory=Found)
    n_violations: int = 0
    troubles: list[str] = field(default_factory=list)
    mutants: dict[str, int | None] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, found: Found) -> None:
        for number, parser, kind, said in found.wrong:
            self.violate(number, f"{kind} for {parser}: {said}")
        self.found += found
        self.found.wrong.clear()

    def violate(self, number: int, said: str) -> None:
        self.n_violations += 1
        if len(self.troubles) < _KEPT:
            self.troubles.append(f"seed {self.seed} number {number}: {said}")
            _say(self.troubles[-1])

    @property
    def n_rounds(self) -> int:
        return self.found.faults.total()

    @property
    def missed(self) -> list[str]:
        return [name for name, number in self.mutants.items() if number is None]

    @property
    def good(self) -> bool:
        return not self.n_violations and not self.missed

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "first": self.first,
            "rounds": self.n_rounds,
            "violations": self.n_violations,
            "troubles": self.troubles,
            "faults": dict(sorted(self.found.faults.items())),
            "mutants_caught": sorted(self.mutants.keys() - set(self.missed)),
            "mutants_missed": self.missed,
            "stores": {},
            "by_parser": {name: dict(one) for name, one in sorted(self.found.verdicts.items())},
            "room_bytes": ROOM_BYTES,
            "grown_bytes": self.found.grown_bytes,
            "slowest_s": round(self.found.slowest_s, 3),
            "seconds": round(self.seconds, 1),
        }

    def summary(self) -> str:
        """A line for all, for each parser, and for each mutant; violations have been told."""
        rate = self.n_rounds / max(self.seconds, 1e-9)
        lines = [
            (
                f"[soak] parse: {self.n_rounds} inputs, seed {self.seed}: "
                f"{self.n_violations} violations in {self.seconds:.0f} s ({rate:.0f}/s)"
            ),
            f"[soak]   {_said(self.found.faults)}",
            (
                f"[soak]   the slowest {1000 * self.found.slowest_s:.0f} ms, memory grew by "
                f"{self.found.grown_bytes / 2**20:.1f} MiB of {ROOM_BYTES >> 20}"
            ),
        ]
        lines += [
            f"[soak]   {name}: {_said(one)}" for name, one in sorted(self.found.verdicts.items())
        ]
        for name, number in self.mutants.items():
            told = "NOT CAUGHT" if number is None else f"caught by number {number}"
            lines.append(f"[soak]   mutant {name}: {told}")
        return "\n".join(lines)


def run(
    n: int,
    seed: int,
    first: int = 0,
    *,
    mutants: Sequence[str] = _MUTANTS,
    n_processes: int = N_PROCESSES,
) -> Report:
    """Give inputs `first` to `first + n - 1` to the parsers, then look for the mutants.

    Args:
        n_processes: among which the numbers are dealt out; what comes of each stays the same.
    """
    report, started = Report(seed, first), time.monotonic()
    told = started
    shares = [range(first + k, first + n, n_processes) for k in range(n_processes)]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(seed, share)) for share in shares if share]
        for worker, found in _results(workers):
            if isinstance(found, Found):
                report.add(found)
            else:
                report.violate(worker.number, found)
            now = time.monotonic()
            if now - told > 2:
                told = now
                rate = report.n_rounds / (now - started)
                _say(f"{report.n_rounds}/{n} {rate:.0f}/s violations={report.n_violations}")
    report.seconds = time.monotonic() - started
    for name in mutants:
        report.mutants[name] = find(name, seed, first)
        _say(f"mutant {name}: {report.mutants[name]}")
    return report


def find(mutant: str, seed: int, first: int = 0) -> int | None:
    """The number of the input that shows a mutant first; None where none does."""
    with Worker(seed, range(first, first + _MUTANT_ROUNDS), mutant) as worker:
        for _, found in _results([worker]):
            if not isinstance(found, Found):
                return worker.number  # it died of it
            for number, *_ in found.wrong:
                return number
    return None


class Worker:
    """A process that looks at some inputs."""

    def __init__(self, seed: int, numbers: range, mutant: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._place = context.Value("q", numbers[0], lock=False)
        self.pipe, self._theirs = context.Pipe(duplex=False)
        self._arguments = (self._theirs, self._place, seed, numbers)
        self._mutant = mutant
        self._stack = ExitStack()
        self._context = context

    @property
    def number(self) -> int:
        """The input that it looks at, or died of."""
        return int(self._place.value)

    def __enter__(self) -> Worker:
        path = self._stack.enter_context(folder())
        self._process = self._context.Process(
            target=work, args=(*self._arguments, str(path), self._mutant), daemon=True
        )
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._stack.close()

    @property
    def fate(self) -> str:
        self._process.join()
        return f"the process ended with {self._process.exitcode}"


def _results(workers: Sequence[Worker]) -> Iterator[tuple[Worker, Found | str]]:
    """What workers find, as it comes; a text for one that died."""
    left: dict[Connection, Worker] = {worker.pipe: worker for worker in workers}
    while left:
        for pipe in wait(list(left)):
            assert isinstance(pipe, Connection)
            worker = left[pipe]
            try:
                found = pipe.recv()
            except (EOFError, OSError):
                found = worker.fate
            if not isinstance(found, Found):
                del left[pipe]
            if found is not None:
                yield worker, found


def _said(counts: Counter[str]) -> str:
    return " ".join(f"{name}={n}" for name, n in sorted(counts.items()))


def _say(text: str) -> None:
    print(f"[soak] {text}", file=sys.stderr, flush=True)
