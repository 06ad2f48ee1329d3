"""The loop: sample from the served engine, learn, publish, wait until the engine has followed."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from types import TracebackType
from typing import Self

import torch

from scripts._demo.channels import Channel
from scripts._demo.client import Client
from scripts._demo.delta import Follower, FollowError
from scripts._demo.proofs import Served
from scripts._demo.report import Findings, Progress, VersionRow, table_head, table_row
from scripts._demo.server import Server
from scripts._demo.task import draw_problem
from scripts._demo.traffic import Traffic
from scripts._demo.trainer import Group, Trainer
from vllm_delta import Publisher, Subscriber

_N_PROBLEMS = 4
_N_SAMPLES = 8
_N_STREAMS = 6
_N_STREAMED_TOKENS = 352 if torch.cuda.is_available() else 128
"""So many that an answer takes several times as long as a version needs to arrive."""


class Loop:
    """One trainer and one server that follows it; a context manager that owns the connections.

    Args:
        server: Ready, and following `channel`.
        publisher: Of the weights that `trainer` changes.
        seed: Of the problems and of the other clients' prompts.
    """

    def __init__(
        self,
        *,
        server: Server,
        publisher: Publisher,
        trainer: Trainer,
        channel: Channel,
        seed: int,
        progress: Progress,
    ) -> None:
        self._publisher = publisher
        self._trainer = trainer
        self._subscriber = Subscriber(channel.address, keys=channel.keys.reader)
        self._source = random.Random(seed)
        self._progress = progress
        self._traffic = Traffic(
            server.url, n_streams=_N_STREAMS, n_tokens=_N_STREAMED_TOKENS, seed=seed
        )
        self._swaps: list[tuple[float, float]] = []
        self._served: deque[Served] = deque(maxlen=2)
        self.client = Client(server.url)
        self.follower = Follower(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self.client)
            stack.push(self.follower)

    @property
    def served(self) -> tuple[Served, Served]:
        """The version before, and the newest."""
        before, newest = self._served
        return before, newest

    def run(self, n_versions: int, findings: Findings) -> None:
        """Makes `n_versions` versions while other clients stream; adds to `findings`."""
        self.follower.wait_until_attached(self._publisher.version.number)
        self._note_served()
        with self._traffic:
            self._progress.say(f"{_N_STREAMS} other clients stream from now on")
            print(table_head(), flush=True)
            for _ in range(n_versions):
                findings.versions.append(self._make_version())
                print(table_row(findings.versions[-1]), flush=True)
            self._progress.say("waiting for the other clients' last answers")
        for failure in self._traffic.failures:
            self._progress.say(f"a request failed: {failure}")
        findings.failed_requests = len(self._traffic.failures)
        findings.n_requests_across_a_swap = self._traffic.n_across(self._swaps)
        findings.n_requests = len(self._traffic.done) + self.client.n_requests

    def _make_version(self) -> VersionRow:
        number = self._publisher.version.number
        groups = self._roll_out()
        step = self._trainer.step(groups)
        published = self._publisher.publish()
        arrival = self.follower.wait_for(published.version.number)
        written_at = self._written_at(published.seq)
        self._swaps.append((written_at, arrival.at))
        self._note_served()
        return VersionRow(
            number=published.version.number,
            rollout_version=number,
            reward=step.mean_reward,
            n_groups_varied=step.n_varied,
            mean_ratio=step.mean_ratio,
            changed_percent=published.changed_percent,
            payload_percent=published.payload_percent,
            payload_bytes=published.payload_bytes,
            publish_s=published.seconds,
            stage_s=arrival.stage_s,
            check_ms=arrival.check_ms,
            apply_ms=arrival.apply_ms,
            pause_ms=arrival.pause_ms,
            lag_s=arrival.at - written_at,
        )

    def _roll_out(self) -> list[Group]:
        """Samples groups until one is varied, all from the version that stands."""
        groups: list[Group] = []
        while not any(group.is_varied for group in groups):
            problems = [draw_problem(self._source) for _ in range(_N_PROBLEMS)]
            self._check_served()
            groups = self.client.roll_out(problems, _N_SAMPLES)
            # Only this loop publishes, so that this was served all the time in between.
            self._check_served()
        return groups

    def _check_served(self) -> None:
        expected, served = str(self._publisher.version), self.follower.weight_version()
        if served != expected:
            raise FollowError(f"vLLM serves {served!r}, and {expected!r} stands on the channel")

    def _written_at(self, seq: int) -> float:
        """When a record that came since the last call was written, seconds since the epoch."""
        # A merged delta or an anchor of the same version may follow it.
        times = {manifest.seq: manifest.time for manifest in self._subscriber.refresh()}
        assert seq in times, "another publisher writes to the channel"
        return times[seq]

    def _note_served(self) -> None:
        version = self._publisher.version
        self._served.append(Served(version.number, version.root, self.follower.digests()))
