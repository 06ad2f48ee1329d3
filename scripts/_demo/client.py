"""Talks to a served engine: rollouts, greedy completions, and other clients' streams."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from scripts._demo.server import MODEL_NAME
from scripts._demo.task import MAX_NEW_TOKENS, Problem
from scripts._demo.trainer import Group, Sample

_TIMEOUT_S = 300.0
_N_GREEDY_TOKENS = 16


@dataclass(frozen=True)
class Completion:
    """A greedy completion: its tokens, and their log-probabilities in full precision."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]


class Client:
    """The completions API of one server. Not thread-safe."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self.n_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def roll_out(self, problems: Sequence[Problem], n_samples: int) -> list[Group]:
        """Samples `n_samples` completions of each problem at temperature 1, and grades them."""
        choices = self._complete(
            prompt=[problem.prompt for problem in problems],
            n=n_samples,
            max_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
        )
        groups: list[Group] = []
        for i, problem in enumerate(problems):
            own = choices[i * n_samples : (i + 1) * n_samples]
            samples = tuple(
                Sample(
                    tokens=tuple(choice["token_ids"]),
                    log_probabilities=tuple(choice["logprobs"]["token_logprobs"]),
                    reward=problem.reward(choice["text"]),
                )
                for choice in own
            )
            groups.append(Group(tuple(own[0]["prompt_token_ids"]), samples))
        return groups

    def complete_greedily(self, prompt: str) -> Completion:
        """Completes one prompt at temperature 0, alone."""
        (choice,) = self._complete(
            prompt=prompt,
            max_tokens=_N_GREEDY_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            # A prefix that happens to be cached would be computed in other shapes than a new one.
            cache_salt=uuid.uuid4().hex,
        )
        return Completion(
            tokens=tuple(choice["token_ids"]),
            log_probabilities=tuple(choice["logprobs"]["token_logprobs"]),
        )

    def _complete(self, **request: Any) -> list[dict[str, Any]]:
        """Returns the choices in the order of their index."""
        self.n_requests += 1
        body = {"model": MODEL_NAME, "logprobs": 0, "return_token_ids": True, **request}
        response = self._http.post("/v1/completions", json=body)
        response.raise_for_status()
        choices: list[dict[str, Any]] = response.json()["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))
