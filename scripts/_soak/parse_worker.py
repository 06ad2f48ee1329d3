"""A process that gives damaged bytes to parsers, within bounds of memory and time."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts._soak.codec import Watchdog, _forget_peak, _peak_bytes
from scripts._soak.parse_answers import answers
from scripts._soak.parse_files import ENVIRONMENT, files
from scripts._soak.parse_mutants import MUTANTS
from scripts._soak.parse_mutations import MUTATIONS, damaged
from scripts._soak.parse_subjects import REFUSED, SAME, Parser, formats
from vllm_delta.errors import DeltaError

ROOM_BYTES = 64 << 20
"""Address space that any input may take beyond what all intact ones did, itself included.

What is kept from one input to the next counts as well: this bounds all of them together.
"""

_TELL_S = 0.5
_M_ARENA_MAX = -8
_SECOND_INSIDE = 0.4
"""Share of damage within what is then wrapped properly, where a parser has such."""


@dataclass
class Found:
    """What became of some inputs.

    Attributes:
        wrong: number, parser, kind of damage, and what went wrong.
    """

    faults: Counter[str] = field(default_factory=Counter)
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[tuple[int, str, str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_bytes: int = 0

    def __iadd__(self, other: Found) -> Found:
        self.faults += other.faults
        for name, verdicts in other.verdicts.items():
            self.verdicts.setdefault(name, Counter()).update(verdicts)
        self.wrong += other.wrong
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.grown_bytes = max(self.grown_bytes, other.grown_bytes)
        return self


class Bench:
    """All parsers, ready, with what they take when all is well."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.parsers = [*formats(seed), *files(seed, folder), *answers()]
        self._up_to = list(accumulate(parser.share for parser in self.parsers))
        for parser in self.parsers:
            for data in parser.inputs:
                found = parser.judge(data)
                assert found == SAME, f"{parser.name}: {found} {data[:80]!r}"

    def one(self, number: int, found: Found) -> None:
        """Give one input to one parser; both depend on the seed and the number alone."""
        draw = random.Random(f"{self.seed} {number}")
        (parser,) = draw.choices(self.parsers, cum_weights=self._up_to)
        kind = draw.choice(tuple(MUTATIONS))
        started = time.perf_counter()
        try:
            verdict = parser.judge(_input(draw, parser, kind))
        except BaseException as error:  # noqa: BLE001, what is no refusal is what is looked for
            verdict = REFUSED
            if not isinstance(error, (DeltaError, *parser.refusals)):
                verdict = "wrong"
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                said = f"{type(error).__name__}: {error} ({where})"
                found.wrong.append((number, parser.name, kind, said[:300]))
        found.slowest_s = max(found.slowest_s, time.perf_counter() - started)
        found.faults[kind] += 1
        found.verdicts.setdefault(parser.name, Counter())[verdict] += 1


def _input(draw: random.Random, parser: Parser, kind: str) -> bytes:
    if parser.inner and draw.random() < _SECOND_INSIDE:
        data, wrap = draw.choice(parser.inner)
        return wrap(damaged(draw, kind, data, [other for other, _ in parser.inner]))
    return damaged(draw, kind, draw.choice(parser.inputs), parser.inputs)


def work(
    pipe: Connection, place: Any, seed: int, numbers: Sequence[int], folder: str, mutant: str | None
) -> None:
    """Entry of a process: sends what it finds, now and then, and None at the end.

    Args:
        place: a shared number: which input is looked at, so that a crash can be told.
        mutant: what to leave out. Then only the first input that shows it is told, and what goes
            wrong without it too shows nothing.
    """
    os.environ.update(ENVIRONMENT, HOME=folder)
    os.chdir(folder)
    # One arena: each thread's own would take its 64 MiB of address space at some moment.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    bench = Bench(seed, Path(folder))
    with Watchdog(seed) as watchdog, warnings.catch_warnings():
        warnings.simplefilter("error")
        _limit_memory()
        _forget_peak()
        before, found, told = _peak_bytes(), Found(), time.monotonic()
        for number in numbers:
            place.value = number
            watchdog.begins(number)
            if mutant is None:
                bench.one(number, found)
            elif (shown := _shown_by(bench, number, mutant)) is not None:
                found = shown
                break
            if time.monotonic() - told > _TELL_S:
                pipe.send(found)
                found, told = Found(), time.monotonic()
        found.grown_bytes = _peak_bytes() - before
        pipe.send(found)
    pipe.send(None)


def _shown_by(bench: Bench, number: int, mutant: str) -> Found | None:
    """What goes wrong with an input because of a mutant."""
    found, without = Found(), Found()
    with MUTANTS[mutant]():
        bench.one(number, found)
    if found.wrong:
        bench.one(number, without)
    return found if found.wrong and not without.wrong else None


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_BYTES, hard))
