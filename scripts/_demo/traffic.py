"""Other clients: streaming requests that run across the swaps, all along."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from scripts._demo.server import MODEL_NAME
from scripts._demo.task import draw_prompts

_TIMEOUT_S = 300.0
_N_PROMPTS = 64
_N_MORE_TOKENS = 16
"""Each client asks for so many more than the one before, so that they do not end together."""


@dataclass(frozen=True)
class Streamed:
    """One streaming request.

    Attributes:
        first_at, last_at: When its first and last token came; seconds since the epoch.
        failure: What went wrong, if anything.
    """

    first_at: float
    last_at: float
    failure: str | None

    def spans(self, began: float, ended: float) -> bool:
        """Whether tokens came both before `began` and after `ended`."""
        return self.failure is None and self.first_at < began and ended < self.last_at


class Traffic:
    """`n_streams` clients that send one streaming request after another, each on a thread.

    A context manager: it starts them, and waits for the last answers when it ends.

    Args:
        n_tokens: What the first client asks for each time.
    """

    def __init__(self, url: str, *, n_streams: int, n_tokens: int, seed: int) -> None:
        self._url = url
        self._ended = threading.Event()
        self._done: list[Streamed] = []
        prompts = draw_prompts(random.Random(seed), _N_PROMPTS)
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(prompts[i:] + prompts[:i], n_tokens + i * _N_MORE_TOKENS),
                daemon=True,
            )
            for i in range(n_streams)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if error is None:
            for thread in self._threads:
                thread.join()

    @property
    def done(self) -> tuple[Streamed, ...]:
        """Every request that has ended."""
        return tuple(self._done)

    @property
    def failures(self) -> list[str]:
        """What went wrong, one line for each failed request."""
        return [streamed.failure for streamed in self._done if streamed.failure is not None]

    def n_across(self, swaps: Iterable[tuple[float, float]]) -> int:
        """Counts the requests that got tokens before and after at least one of the swaps.

        Args:
            swaps: For each a time before it and one after it, seconds since the epoch.
        """
        spans = list(swaps)
        return sum(any(streamed.spans(*span) for span in spans) for streamed in self._done)

    def _run(self, prompts: list[str], n_tokens: int) -> None:
        with httpx.Client(base_url=self._url, timeout=_TIMEOUT_S) as http:
            for prompt in itertools.cycle(prompts):
                if self._ended.is_set():
                    return
                self._done.append(_stream(http, prompt, n_tokens))


def _stream(http: httpx.Client, prompt: str, n_tokens: int) -> Streamed:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    n_came = 0
    try:
        with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices"):
                    times.append(time.time())
                elif "error" in event:
                    raise httpx.DecodingError(str(event["error"]))
                n_came = (event.get("usage") or {}).get("completion_tokens", n_came)
    except httpx.HTTPError as error:
        return _streamed(times, repr(error))
    if n_came != n_tokens:
        return _streamed(times, f"{n_came} tokens came, {n_tokens} were asked for")
    return _streamed(times, None)


def _streamed(times: list[float], failure: str | None) -> Streamed:
    first, last = (times[0], times[-1]) if times else (0.0, 0.0)
    return Streamed(first, last, failure)
