"""The task: go on counting. Checkable, graded, and within reach of a small model."""

from __future__ import annotations

import random
from dataclasses import dataclass

_N_SHOWN = 3
_N_ASKED = 3
_STRIDES = (1, -1)

MAX_NEW_TOKENS = 12
"""Three numbers of two digits: a space, two digits and a comma each."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and the numbers that must come next."""

    prompt: str
    answer: tuple[int, ...]

    def reward(self, completion: str) -> float:
        """Returns the share of the answer that is right before the first mistake, 0 to 1."""
        n_right = 0
        for written, wanted in zip(completion.split(","), self.answer, strict=False):
            if written.strip() != str(wanted):
                break
            n_right += 1
        return n_right / len(self.answer)


def draw_problem(source: random.Random) -> Problem:
    """Draws a counting problem with one solved example before it."""
    stride = source.choice(_STRIDES)
    example = _run(_first(source), stride, _N_SHOWN + _N_ASKED)
    run = _run(_first(source), stride, _N_SHOWN + _N_ASKED)
    prompt = f"{_written(example)}\n{_written(run[:_N_SHOWN])},"
    return Problem(prompt, run[_N_SHOWN:])


def draw_prompts(source: random.Random, count: int) -> list[str]:
    """Draws prompts for everything else: beginnings of sentences and counting, half each."""
    openings = ("The capital of", "Once upon a time", "To make bread you", "The number after")
    subjects = ("France", "a small river", "seventeen", "the old king", "water", "my neighbour")
    prompts = [f"{source.choice(openings)} {source.choice(subjects)}" for _ in range(count // 2)]
    return prompts + [draw_problem(source).prompt for _ in range(count - len(prompts))]


def _first(source: random.Random) -> int:
    return source.randint(20, 80)


def _run(first: int, stride: int, count: int) -> tuple[int, ...]:
    return tuple(first + stride * i for i in range(count))


def _written(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
