"""An error that lasts is counted each time and logged only now and then."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_delta.engine import standing
from vllm_delta.errors import ChannelError

pytestmark = pytest.mark.engine


class Anything:
    """Stands in for an engine and for metrics: has every attribute, may be called."""

    n_counted = 0

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, **labels: str) -> Any:
        return self

    def inc(self) -> None:
        self.n_counted += 1


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def warning(self, text: str, *arguments: object) -> None:
        self.errors.append(str(arguments[-1]))


def test_an_error_that_lasts_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that is away for two minutes; another error and a second outage are news."""
    log, engine, now = Log(), Anything(), [0.0]
    monkeypatch.setattr(standing, "logger", log)
    stands = standing.Standing(
        engine,  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        first_backoff_s=0.5,
        clock=lambda: now[0],
        monotonic=lambda: now[0],
    )
    for _ in range(240):
        stands.fail(ChannelError("away"))
        now[0] += 0.5
    assert (len(log.errors), engine.n_counted) == (2, 240)
    stands.fail(ChannelError("unreadable"))
    stands.succeed()
    stands.fail(ChannelError("unreadable"))
    assert log.errors[2:] == ["unreadable", "unreadable"]
