"""Asks a following server how it stands, and tells it where to go."""

from __future__ import annotations

import time
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

    def wait_for(self, number: int) -> Arrival:
        """Waits until the version is served on every rank.

        Raises:
            FollowError: the server refuses, or took too long.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._status()
            if _number(status) == number:
                commit = status["last_commit"] or {"at": time.time(), "versions": []}
                return Arrival(
                    at=commit["at"],
                    stage_s=commit.get("stage_s", 0.0),
                    check_ms=commit.get("check_ms", 0.0),
                    apply_ms=commit.get("apply_ms", 0.0),
                    pause_ms=commit.get("pause_ms", 0.0),
                )
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
