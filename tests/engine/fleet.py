"""Ranks without vLLM: plain tensors laid out as tensor or expert parallelism does, on one channel.

`Rank` and `Driver` are the engine's own. What lies between them, calls and the engine's core, is as
plain as can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.shards import Builder, Shard, Weights, bits_of, load
from vllm_delta import Publisher
from vllm_delta.channel import LogReader, open_channel
from vllm_delta.codec import order
from vllm_delta.engine.access import Access
from vllm_delta.engine.calls import Answer, unpack
from vllm_delta.engine.ledger import Ledger
from vllm_delta.engine.rank import Rank
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import DeltaError
from vllm_delta.format import Manifest, Version, parse_manifest, parse_schema
from vllm_delta.layout import RankLayout
from vllm_delta.patch import Backend, Patcher, Run
from vllm_delta.publisher import PublisherSettings


class Trainer:
    """Publishes tensors and changes them step by step."""

    def __init__(self, channel: Path, weights: Weights, **settings: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.channel = channel
        self.rng = np.random.default_rng(1)
        plain = {"anchor_ratio": 1e9, "strides": (), "n_threads": 1, "codec": "hazard"}
        self.publisher = Publisher(
            channel, self.weights, settings=PublisherSettings(**plain | settings)
        )

    def step(self, percent: float = 3.0, *, only: str = "") -> Manifest:
        """Small steps of a share of each tensor whose name contains ``only``; the manifest."""
        for name, tensor in self.weights.items():
            if only in name:
                bits = bits_of(tensor)
                n = max(1, round(bits.size * percent / 100))
                places = self.rng.choice(bits.size, n, replace=False)
                steps = self.rng.choice(np.array([-2, -1, 1, 1, 3]), n)
                bits[places] = order.add_steps(bits[places], steps.astype(f"i{bits.itemsize}"))
        self.publisher.publish()
        return self.newest()

    def newest(self) -> Manifest:
        record = LogReader(open_channel(self.channel)).tail()
        assert record is not None
        return record.manifest


@dataclass
class Fleet:
    """Ranks that follow a channel, and their driver. Is the port between them too.

    Attributes:
        calls: methods that the driver called, in order.
        runs: how many versions each commit took.
    """

    trainer: Trainer
    shards: list[Shard]
    ranks: list[Rank] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    ledger: Ledger | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        # They count with prometheus_client, which comes with vLLM.
        from vllm_delta.engine.driver import Driver
        from vllm_delta.engine.metrics import Metrics

        self.schema = self.trainer.publisher.schema
        settings = Settings(channel=str(self.trainer.channel), rollback_bytes=1 << 24)
        self.driver = Driver(
            self, settings, metrics=Metrics(registry=None), sleep=lambda _: time.sleep(1e-4)
        )
        found = self.driver.attach(self.schema, Access(channel=str(self.trainer.channel)))
        assert found is not None
        record = LogReader(open_channel(self.trainer.channel)).tail()
        assert record is not None
        assert self.driver.ledger.root(found) == record.manifest.target.root
        self.driver.open(record.manifest.target, found)

    def holds(self, weights: Weights | None = None) -> bool:
        """Whether every rank holds its part of these weights, or of the trainer's."""
        expected = self.trainer.weights if weights is None else weights
        return all(shard.holds(expected, self.schema) for shard in self.shards)

    def follow(self, *manifests: Manifest) -> None:
        """Commits all of them, in as many runs as it takes."""
        left: Sequence[Manifest] = manifests
        while left:
            done = self.driver.commit(left)
            self.runs.append(len(done.versions))
            left = left[len(done.versions) :]
            if done.failure is not None:
                raise done.failure

    def rpc(self, method: str, *args: Any) -> list[Answer]:
        self.calls.append(method)
        call, *rest = args
        return [self._answer(call, number, method, rest) for number in range(len(self.shards))]

    def _answer(self, call: str, number: int, method: str, args: Sequence[Any]) -> Answer:
        try:
            answer = getattr(self, method)(number, *args)
        except DeltaError as error:
            answer = {"error": error.to_dict()}
        return {"call": call, "rank": number, **answer}

    def delta_attach(self, number: int, schema: bytes, access: Any, n_bytes: int) -> Answer:
        parsed, shard = parse_schema(schema), self.shards[number]
        rank = Rank(
            parsed,
            shard.layout,
            Patcher(parsed, shard.layout, shard.storages, backend=self.backend),
            log=Access.from_dict(access).open(),
            rollback_bytes=n_bytes,
            enter_thread=lambda: None,
        )
        self.ranks[number : number + 1] = [rank]
        return {"layout": shard.layout.to_dict(), **rank.scan()}

    def delta_proven(self, number: int, version: Any) -> Answer:
        return self.ranks[number].prove(unpack(version))

    def delta_stage(self, number: int, manifests: Sequence[bytes]) -> Answer:
        return self.ranks[number].stage([parse_manifest(data) for data in manifests])

    def delta_ready(self, number: int, seq: int) -> Answer:
        return self.ranks[number].ready(seq)

    def delta_read(self, number: int, version: Any, units: Any) -> Answer:
        return self.ranks[number].read(_version(version), [Run.from_list(unit) for unit in units])

    def delta_halo(self, number: int, version: Any, units: Any, pieces: Any) -> Answer:
        runs = [Run.from_list(unit) for unit in units]
        return self.ranks[number].supply(_version(version), runs, pieces)

    def delta_check(self, number: int, seq: int) -> Answer:
        return self.ranks[number].check(seq)

    def delta_scan(self, number: int) -> Answer:
        return self.ranks[number].scan()

    def delta_status(self, number: int) -> Answer:
        return self.ranks[number].status()

    def utility(self, method: str, *args: Any) -> Answer:
        call, *rest = args
        actions: dict[str, Callable[..., Answer]] = {
            "delta_open": self._open,
            "delta_commit": self._commit,
            "delta_core_rollback": self._rollback,
            "delta_state": self._state,
            "delta_fingerprints": self._state,
        }
        return {"call": call, **actions[method](*rest)}

    def _open(self, schema: bytes, layouts: Any, version: Any, found: Any, policy: str) -> Answer:
        self.ledger = Ledger(parse_schema(schema), [RankLayout.from_dict(one) for one in layouts])
        self.ledger.adopt(unpack(version), found)
        self._history: list[tuple[Version | None, list[int]]] = []
        return {"version": version}

    def _commit(self, steps: Sequence[Any], first: Sequence[int]) -> Answer:
        assert self.ledger is not None
        committed, failure = [], None
        for step in steps:
            target = _version(step["target"])
            try:
                if step["kind"] == "anchor":
                    scans = [rank.load_anchor(step["seq"])["scan"] for rank in self.ranks]
                    after = self.ledger.measure(scans)
                    for rank in self.ranks:
                        rank.prove(target)
                else:
                    after = list(first) if first and not committed else self._judge(step, target)
                    for rank in self.ranks:
                        rank.apply(step["seq"])
            except DeltaError as error:
                failure = error.to_dict()
                break
            self._history.append((self.ledger.version, self.ledger.fingerprints))
            self.ledger.adopt(target, after)
            committed.append(step["target"])
        times = {"apply_s": 0.0, "pause_s": 0.0}
        return {"committed": committed, "failure": failure, **self._state(), **times}

    def _judge(self, step: Any, target: Version) -> list[int]:
        assert self.ledger is not None
        return self.ledger.judge([rank.check(step["seq"]) for rank in self.ranks], target)

    def _rollback(self, expected: Any) -> Answer:
        assert self.ledger is not None
        for rank in self.ranks:
            rank.rollback(_version(expected))
        self.ledger.adopt(*self._history.pop())
        return {"failure": None, **self._state()}

    def _state(self) -> Answer:
        assert self.ledger is not None
        version = self.ledger.version
        back = self._history[-1][0] if self._history else None
        return {
            "version": version and [version.number, version.root],
            "fingerprints": self.ledger.fingerprints,
            "rollback_to": back and [back.number, back.root],
        }


def _version(value: Any) -> Version:
    version = unpack(value)
    assert version is not None
    return version


def start(
    trainer: Trainer,
    build: Callable[[Builder, int, int], None],
    n_ranks: int,
    backend: Backend | None = None,
    device: torch.device | None = None,
) -> Fleet:
    """Ranks that hold the trainer's weights as ``build(builder, rank, n_ranks)`` lays them out."""
    shards = []
    for rank in range(n_ranks):
        builder = Builder(trainer.weights, rank)
        build(builder, rank, n_ranks)
        schema = trainer.publisher.schema
        shards.append(load(builder.layout(schema), trainer.weights, schema, device))
    return Fleet(trainer, shards, backend=backend)
