"""Asks a following server how it stands, and tells it where to go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from scripts._demo.server import Server

_TIMEOUT_S = 120.0
_POLL_S = 0.1
_HOPELESS = ("refused", "fenced", "damaged", "no channel")


class FollowError(Exception):
    """The server does not follow; the message says what it answered."""


@dataclass(frozen=True)
class Arrival:
    """What it cost to bring a version into the engine, as the server tells it.

    Attributes:
        at: When it was in; seconds since the epoch.
        stage_s: From the server seeing it to every rank having it decoded.
        pause_ms: How long the engine made no step.
    """

    at: float
    stage_s: float
    check_ms: float
    apply_ms: float
    pause_ms: float


class Follower:
    """The routes under `/v1/delta` of one server, and vLLM's own weight checksums."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = httpx.Client(base_url=server.url, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def number(self) -> int | None:
        """The version that is served."""
        return _number(self._status())

    def wait_until_attached(self, number: int) -> None:
        """Waits until the server knows that it holds the version.

        Raises:
            FollowError: the server refuses, or took too long.
        """
        self._wait(number, lambda status: _number(status) == number)

    def wait_for(self, number: int) -> Arrival:
        """Waits until the version has been committed and is served on every rank.

        Raises:
            FollowError: the server refuses, or took too long.
        """

        def has_come(status: dict[str, Any]) -> bool:
            commit = status["last_commit"]
            # The ranks hold a version a moment before the server has told of the commit.
            return commit is not None and number in commit["versions"] and number == _number(status)

        commit = self._wait(number, has_come)["last_commit"]
        return Arrival(
            at=commit["at"],
            stage_s=commit["stage_s"],
            check_ms=commit["check_ms"],
            apply_ms=commit["apply_ms"],
            pause_ms=commit["pause_ms"],
        )

    def _wait(self, number: int, has_come: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._status()
            if has_come(status):
                return status
            if status["state"] in _HOPELESS:
                raise FollowError(f"the server does not follow: {status}")
            time.sleep(_POLL_S)
        raise FollowError(f"version {number} did not come: {status}\n{self._server.log_tail()}")

    def verify(self) -> str:
        """Lets the server fingerprint all its weights; returns their root.

        Raises:
            FollowError: they are not what was published.
        """
        return str(self._post("verify")["version"]["root"])

    def roll_back(self) -> int:
        """Goes to the version before; returns its number."""
        return int(self._post("rollback")["version"]["number"])

    def go_on(self) -> int:
        """Goes to the newest version and follows on; returns its number."""
        return int(self._post("apply")["version"]["number"])

    def weight_version(self) -> str:
        """Returns what vLLM itself says is served."""
        response = self._http.get("/weight_info")
        response.raise_for_status()
        return str(response.json()["weight_version"])

    def digests(self) -> dict[str, str]:
        """Returns the sha256 of every resident parameter, computed by vLLM's own checker."""
        response = self._http.post("/weight_checker", json={"action": "checksum"})
        response.raise_for_status()
        checksums: dict[str, str] = response.json()["checksums"]
        return checksums

    def counters(self) -> dict[str, float]:
        """Returns the follower's samples on vLLM's `/metrics`, summed over their labels."""
        sums: dict[str, float] = {}
        for line in self._http.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.split("{")[0]
            if name.startswith("vllm_delta_") and not name.endswith(("_bucket", "_created")):
                name = name.removeprefix("vllm_delta_")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _status(self) -> dict[str, Any]:
        self._server.check_running()
        response = self._http.get("/v1/delta/status")
        if not response.is_success:
            raise FollowError(f"{response.url} answered {response.status_code}: {response.text}")
        status: dict[str, Any] = response.json()
        return status

    def _post(self, route: str) -> dict[str, Any]:
        response = self._http.post(f"/v1/delta/{route}")
        if not response.is_success:
            raise FollowError(f"{response.url} answered {response.status_code}: {response.text}")
        answer: dict[str, Any] = response.json()
        return answer


def _number(status: dict[str, Any]) -> int | None:
    """The version that every rank holds, if it is one."""
    held = {None if r["version"] is None else r["version"]["number"] for r in status["ranks"]}
    return held.pop() if len(held) == 1 else None
