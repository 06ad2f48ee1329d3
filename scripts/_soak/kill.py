"""`scripts/soak kill`: a trainer and readers, real processes, are killed in the midst of things.

After each kill the channel, the readers' ratchet and their cache must be whole, nothing that was
acknowledged may be lost, and nothing may have been shown that was not published. At the end all
readers hold what the trainer does, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts._soak.kill_judge import Judge
from scripts._soak.kill_stores import PLACES, environment
from scripts._soak.kill_zygote import Zygote
from scripts._soak.protocol_stores import folder
from vllm_delta.channel import open_channel

TRAINER, READERS = "trainer", ("reader-0", "reader-1")
PHASES = {
    "trainer": ("put", "put_new", "put_many", "get", "list", "delete", "published", "start"),
    "reader": ("get", "stream", "ratchet", "cache", "save", "start"),
}
_PHASE_S = 1.0
"""Longest wait for a phase to come; then it is killed wherever it is."""

_AFTER_S = 0.003
"""It is killed up to so long after it told that it was about to do something."""

_START_S = 0.03
_STALLED_S = 60.0
_KEPT = 20


@dataclass
class Report:
    """What became of the rounds."""

    seed: int
    first: int
    where: str
    n_rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    n_violations: int = 0
    troubles: list[str] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def violate(self, number: int, said: str) -> None:
        self.n_violations += 1
        told = f"seed {self.seed} round {number} over {self.where}: {said}"
        _say(told)
        if len(self.troubles) < _KEPT:
            self.troubles.append(told)

    @property
    def good(self) -> bool:
        return not self.n_violations

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "first": self.first,
            "rounds": self.n_rounds,
            "violations": self.n_violations,
            "troubles": self.troubles,
            "faults": dict(sorted(self.faults.items())),
            "mutants_caught": [],
            "stores": {self.where: self.n_rounds},
            **self.facts,
            "seconds": round(self.seconds, 1),
        }

    def summary(self) -> str:
        """Rounds, kills by phase, and how much happened; the violations have been told."""
        kills = " ".join(f"{name}={n}" for name, n in sorted(self.faults.items()))
        facts = " ".join(f"{name}={n}" for name, n in self.facts.items())
        return (
            f"[soak] kill: {self.n_rounds} rounds over {self.where}, seed {self.seed}: "
            f"{self.n_violations} violations in {self.seconds:.0f} s\n"
            f"[soak]   {kills}\n[soak]   {facts}"
        )


class StalledError(Exception):
    """A process says nothing any more."""


class Process:
    """A living trainer or reader.

    Attributes:
        done: whether it has said its last word, as it was asked to.
    """

    def __init__(self, name: str, pid: int, line: socket.socket) -> None:
        self.name = name
        self.pid = pid
        self.line = line
        self.done = False
        self.heard: list[dict[str, Any]] = []
        self._rest = b""

    def read(self) -> bool:
        """Take in what it says; False at the end."""
        try:
            data = self.line.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        # What a kill cut short says nothing.
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.heard += [json.loads(line) for line in lines]
        return bool(data)


class Farm:
    """All processes: starts, kills and hears them."""

    def __init__(
        self, zygote: Zygote, judge: Judge, start: Callable[[str], tuple[str, dict[str, Any]]]
    ) -> None:
        self._zygote = zygote
        self._judge = judge
        self._start = start
        self.living: dict[str, Process] = {}
        self.n_collected = self.n_resumed = self.n_errors = 0

    def start(self, name: str) -> None:
        role, arguments = self._start(name)
        self.living[name] = Process(name, *self._zygote.start(role, arguments))

    def kill(self, name: str) -> str | None:
        """Kill a process where it stands; a text if it was not that which ended it."""
        process = self.living[name]
        os.kill(process.pid, signal.SIGKILL)
        return self.bury(name, -signal.SIGKILL)

    def bury(self, name: str, expected: int = 0) -> str | None:
        """Hear a process to its end; a text if it did not end as expected."""
        process = self.living.pop(name)
        while process.read():
            pass
        self._hear(process)
        process.line.close()
        code = self._zygote.reap(process.pid)
        return None if code == expected else f"{name} ended with {code}"

    def listen(self, until: Callable[[str, dict[str, Any]], bool], longest_s: float) -> bool:
        """Hear all processes until one says what is waited for; False when it took too long."""
        end = time.monotonic() + longest_s
        while (left_s := end - time.monotonic()) > 0:
            going = [process for process in self.living.values() if not process.done]
            lines = {process.line: process for process in going}
            for line in select.select(list(lines), [], [], left_s)[0]:
                process = lines[line]
                more = process.read()
                found = [until(process.name, facts) for facts in self._hear(process)]
                if any(found):
                    return True
                if not more and not process.done:
                    raise StalledError(f"{process.name} has ended")
        return False

    def _hear(self, process: Process) -> list[dict[str, Any]]:
        heard, process.heard = process.heard, []
        for facts in heard:
            self._judge.heard(process.name, facts)
            process.done |= "final" in facts
            self.n_collected += facts.get("collected", 0)
            self.n_resumed += bool(facts.get("from_note"))
            self.n_errors += "error" in facts
        return heard


def run(rounds: int, seed: int, first: int = 0, *, where: str = "local") -> Report:
    """Play rounds `first` to `first + rounds - 1`, in one channel."""
    report, started = Report(seed, first, where), time.monotonic()
    # First the zygote: it must know nothing of servers and their threads.
    with (
        Zygote() as zygote,
        folder() as path,
        PLACES[where](path) as (url, variables),
        environment(variables),
    ):
        judge = Judge(seed, url, open_channel(url), path)
        _play(report, rounds, Game(seed, zygote, judge, path, url, variables))
    report.seconds = time.monotonic() - started
    return report


def _play(report: Report, rounds: int, game: Game) -> None:
    told, started = time.monotonic(), time.monotonic()
    number = report.first
    try:
        game.begin()
        for number in range(report.first, report.first + rounds):
            for said in game.play(number, report.faults):
                report.violate(number, said)
            report.n_rounds += 1
            now = time.monotonic()
            if now - told > 2:
                told = now
                rate = report.n_rounds / (now - started)
                _say(f"{report.n_rounds}/{rounds} {rate:.1f}/s violations={report.n_violations}")
        for said in game.end():
            report.violate(number, said)
    except StalledError as error:
        report.violate(number, str(error))
        for said in game.judge.check(alone=False):
            report.violate(number, said)
    finally:
        game.close()
    report.facts |= game.facts


class Game:
    """A trainer and two readers, and who is killed when."""

    def __init__(
        self,
        seed: int,
        zygote: Zygote,
        judge: Judge,
        path: Path,
        url: str,
        variables: dict[str, str],
    ) -> None:
        self.judge = judge
        self._seed = seed
        self._draw = random.Random(f"{seed} begin")
        self._path = path
        self._common: dict[str, Any] = {"url": url, "environment": variables}
        self._n_lives = 0
        self._farm = Farm(zygote, judge, self._role)

    @property
    def facts(self) -> dict[str, int]:
        farm = self._farm
        return {
            **{f"acknowledged_{kind}": n for kind, n in sorted(self.judge.acknowledged.items())},
            "shown": self.judge.n_shown,
            "collected": farm.n_collected,
            "resumed": farm.n_resumed,
            "errors_retried": farm.n_errors,
        }

    def begin(self) -> None:
        for name in (TRAINER, *READERS):
            self._farm.start(name)
        self._await(TRAINER, *READERS)

    def play(self, number: int, faults: Counter[str]) -> list[str]:
        """A round: a kill, what is wrong then, and a new process that gets going."""
        self._draw = draw = random.Random(f"{self._seed} {number}")
        name = draw.choice((TRAINER, TRAINER, *READERS))
        role = TRAINER if name == TRAINER else "reader"
        phase, n = draw.choice(PHASES[role]), draw.randint(1, 4)
        if phase == "start":
            said = [self._farm.kill(name), *self.judge.check(alone=name == TRAINER)]
            self._farm.start(name)
            self._farm.listen(lambda *_: False, draw.random() * _START_S)
        else:
            said = []
            if not self._come(name, phase, n):
                phase = "anywhere"
            _pause(draw.random() * _AFTER_S)
        faults[f"{role}_in_{phase}"] += 1
        said += [self._farm.kill(name), *self.judge.check(alone=name == TRAINER)]
        self._farm.start(name)
        self._await(name)
        return [one for one in said if one]

    def end(self) -> list[str]:
        """Let all end well, and compare."""
        finals: dict[str, Any] = {}

        def final(name: str, facts: dict[str, Any]) -> bool:
            if "final" in facts:
                finals[name] = facts["final"]
            return name in finals and finals.keys() >= awaited

        awaited = {TRAINER}
        self._say(TRAINER, b"stop\n")
        self._wait(final, "the trainer does not end")
        said = [self._farm.bury(TRAINER)]
        step = self.judge.told
        awaited = set(READERS)
        for name in READERS:
            self._say(name, json.dumps(finals[TRAINER]).encode() + b"\n")
        for name in READERS:
            awaited = {name}
            if name not in finals:
                self._wait(final, f"{name} does not reach version {finals[TRAINER][0]}")
            said.append(self._farm.bury(name))
            if finals[name] != self.judge.digest(step):
                said.append(f"{name} does not hold the trainer's bits")
        said += [*self.judge.check(alone=True), *self.judge.check_whole()]
        return [one for one in said if one]

    def close(self) -> None:
        """End what still lives, where the rounds did not."""
        for name in list(self._farm.living):
            self._farm.kill(name)

    def _role(self, name: str) -> tuple[str, dict[str, Any]]:
        common = self._common
        if name != TRAINER:
            return "reader", {**common, "folder": str(self._path), "name": name}
        self._n_lives += 1
        back = self._draw.randint(1, 5) if self._draw.random() < 0.2 else 0  # an older checkpoint
        step = max(0, self.judge.told - back)
        return "trainer", {**common, "seed": self._seed, "step": step, "life": self._n_lives}

    def _come(self, name: str, phase: str, n: int) -> bool:
        """Wait until a process has told a phase so often."""
        left = n

        def told(who: str, facts: dict[str, Any]) -> bool:
            nonlocal left
            left -= who == name and facts.get("phase") == phase
            return left <= 0

        return self._farm.listen(told, _PHASE_S)

    def _await(self, *names: str) -> None:
        """Wait until processes have published or shown something."""
        left = set(names)

        def going(who: str, facts: dict[str, Any]) -> bool:
            if "ack" in facts or "shown" in facts or facts.get("phase") == "published":
                left.discard(who)
            return not left

        self._wait(going, f"{', '.join(sorted(names))} do not get going")

    def _wait(self, until: Callable[[str, dict[str, Any]], bool], said: str) -> None:
        if not self._farm.listen(until, _STALLED_S):
            raise StalledError(said)

    def _say(self, name: str, data: bytes) -> None:
        self._farm.living[name].line.sendall(data)


def _pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def _say(text: str) -> None:
    print(f"[soak] {text}", file=sys.stderr, flush=True)
