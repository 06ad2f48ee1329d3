"""`scripts/soak protocol`: rounds of trainers and readers under faults, over every kind of store.

A round depends on the seed, the store and its number alone.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scripts._soak.protocol_attacks import ATTACKS
from scripts._soak.protocol_mutants import MUTANTS
from scripts._soak.protocol_round import Round, Script
from scripts._soak.protocol_stage import Stage
from scripts._soak.protocol_stores import STORES, Fresh, entropy, folder
from scripts._soak.protocol_sweep import sweep
from vllm_delta import merge

FULL = {"memory": 1500, "local": 300, "s3": 150, "hub": 50}
"""Rounds over each store when none is named."""

LEAST = 20
"""So often at least must every kind of fault occur in the full run."""

KINDS = (
    "transport", "429", "5xx", "outage", "lost_answer", "late", "twice", "partial",
    "corrupt", "truncated", "cut", "corrupt_manifest", "stale_list", "clock_jump",
    "crash", "crash_in_publish", "two_trainers", "overwritten", "begun_twice",
    "slow_reader", "reader_offline", "collection", *ATTACKS,
)  # fmt: skip

RARE = {"begun_twice"}
"""Comes by itself, in stores without a conditional write, and seldom."""

_SWEPT = 49
"""One round of so many is a trainer that dies at every call of a publish in turn."""

_MUTANT_ROUNDS = 400
_KEPT = 20
"""Violations that are told one by one."""


@dataclass
class Report:
    """What became of the rounds."""

    seed: int
    first: int
    full: bool = False
    stores: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    n_violations: int = 0
    troubles: list[str] = field(default_factory=list)
    mutants: dict[str, int | None] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, where: str, number: int, stage: Stage) -> None:
        self.stores[where] += 1
        self.faults += stage.faults
        self.n_violations += len(stage.violations)
        for text in stage.violations:
            told = f"seed {self.seed} round {number} over {where}: {text}"
            _say(told)
            if len(self.troubles) < _KEPT:
                self.troubles.append(told)

    @property
    def n_rounds(self) -> int:
        return sum(self.stores.values())

    @property
    def rare(self) -> dict[str, int]:
        """Faults that a full run should have seen more of."""
        counted = [kind for kind in KINDS if kind not in RARE] if self.full else []
        return {kind: self.faults[kind] for kind in counted if self.faults[kind] < LEAST}

    @property
    def missed(self) -> list[str]:
        """Mutants that nothing was noticed of."""
        return [name for name, number in self.mutants.items() if number is None]

    @property
    def good(self) -> bool:
        return not (self.n_violations or self.rare or self.missed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "first": self.first,
            "rounds": self.n_rounds,
            "violations": self.n_violations,
            "troubles": self.troubles,
            "faults": {kind: self.faults[kind] for kind in KINDS},
            "too_rare": self.rare,
            "mutants_caught": sorted(self.mutants.keys() - set(self.missed)),
            "mutants_missed": self.missed,
            "stores": dict(self.stores),
            "seconds": round(self.seconds, 1),
        }

    def summary(self) -> str:
        """Rounds, faults and mutants, a line each; the violations have been told."""
        stores = " ".join(f"{where}={n}" for where, n in self.stores.items())
        faults = " ".join(f"{kind}={self.faults[kind]}" for kind in KINDS)
        lines = [
            f"[soak] protocol: {self.n_rounds} rounds ({stores}), seed {self.seed}",
            f"[soak]   {self.n_violations} violations in {self.seconds:.0f} s",
            f"[soak]   faults: {faults}",
        ]
        for name, number in self.mutants.items():
            found = "NOT CAUGHT" if number is None else f"caught by round {number}"
            lines.append(f"[soak]   mutant {name}: {found}")
        lines += [f"[soak]   too rare: {kind}, {n} times" for kind, n in self.rare.items()]
        return "\n".join(lines)


def run(
    rounds: dict[str, int],
    seed: int,
    first: int = 0,
    *,
    full: bool = False,
    mutants: bool = True,
) -> Report:
    """Play rounds from `first` on over each store, then look for the mutants in the same ones.

    Args:
        rounds: how many over which store.
        full: whether all kinds of faults must have come often.
    """
    report, started = Report(seed, first, full), time.monotonic()
    n, told = sum(rounds.values()), started
    with settled():
        for where, n_rounds in rounds.items():
            with STORES[where]() as fresh:
                for number in range(first, first + n_rounds):
                    report.add(where, number, play(seed, number, where, fresh))
                    now = time.monotonic()
                    if now - told > 2:
                        told = now
                        rate = report.n_rounds / (now - started)
                        _say(
                            f"{report.n_rounds}/{n} {rate:.1f}/s {where} "
                            f"violations={report.n_violations} faults={report.faults.total()}"
                        )
        if mutants:
            for name in MUTANTS:
                report.mutants[name] = find(name, seed, first)
                _say(f"mutant {name}: {report.mutants[name]}")
    report.seconds = time.monotonic() - started
    return report


def play(seed: int, number: int, where: str, fresh: Fresh) -> Stage:
    """One round; its stage has what went wrong and which faults there were."""
    with entropy(random.Random(f"{seed} {where} {number} bytes")), folder() as notes:
        script = Script.of(seed, number, where)
        ratchets = notes if script.signed or number % 8 == 0 else None
        if number % _SWEPT == _SWEPT - 1 and where != "hub":  # where it would take minutes
            return sweep(script, fresh, ratchets)
        its = Round(script, fresh(number), ratchets)
        its.play()
        return its.stage


def find(mutant: str, seed: int, first: int = 0) -> int | None:
    """The round in memory that notices a mutant first; None where none does."""
    with STORES["memory"]() as fresh, MUTANTS[mutant]():
        for number in range(first, first + _MUTANT_ROUNDS):
            if play(seed, number, "memory", fresh).violations:
                return number
    return None


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Small merged deltas are worth a record here, and what is waited for needs no word."""
    least, logger = merge.LEAST_SAVED_BYTES, logging.getLogger("vllm_delta")
    level = logger.level
    merge.LEAST_SAVED_BYTES = 0
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        merge.LEAST_SAVED_BYTES = least
        logger.setLevel(level)


def main(store: str | None, rounds: int | None, seed: int, first: int) -> Report:
    """The soak as the command line asks for it."""
    if store is None:
        return run(FULL, seed, first, full=True)
    n = FULL[store] if rounds is None else rounds
    return run({store: n}, seed, first, mutants=n > 1)


def _say(text: str) -> None:
    print(f"[soak] {text}", file=sys.stderr, flush=True)
