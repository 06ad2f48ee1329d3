"""One trainer and many reader processes on one directory: how long after a commit all have it.

The deltas are real: the versions of a channel that `scripts/demo` left behind are published one
after the other, forward and back again, each as the exact difference from the one before. A reader
fetches, verifies and decodes a version, checks it against the weights that it holds and applies
it, in plain memory. At the end the weights of every reader are scanned whole.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_delta import Publisher, Subscriber
from vllm_delta.codec import Change
from vllm_delta.codec.order import Unsigned
from vllm_delta.fingerprint import root
from vllm_delta.format import Manifest, TensorSpec
from vllm_delta.layout import Coverage, ParameterSpec, RankLayout, Rectangle, judge
from vllm_delta.patch import Patch, Patcher

_POLL_S = 0.005
_READY_S = 300.0
_TORCH = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}

Weights = dict[str, Unsigned]


def main(source: Path, json_path: Path | None, n_readers: int, n_versions: int) -> int:
    """Run it; returns the exit status: 1 when a reader's weights are not the trainer's."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        row = _run(source, Path(folder), n_readers, n_versions)
    print(
        f"{row['n_readers']} readers, {row['n_versions']} versions of {row['model_mb']:.0f} MB: "
        f"median {row['median_decoded_ms']:.0f} ms from commit to verified and decoded, "
        f"{row['median_lag_ms']:.0f} ms to checked against the weights, 95 % within "
        f"{row['p95_lag_ms']:.0f} ms, "
        f"the last reader's median {row['median_last_ms']:.0f} ms; "
        + ("all equal" if row["all_equal"] else "NOT EQUAL")
    )
    if json_path is not None:
        json_path.write_text(json.dumps(row, indent=1) + "\n")
    return 0 if row["all_equal"] else 1


def _run(source: Path, folder: Path, n_readers: int, n_versions: int) -> dict[str, Any]:
    _say(f"rebuilding the versions of {source}")
    versions = _versions(source)
    if len(versions) < 2:
        raise SystemExit(f"scripts/bench fleet: {source} holds fewer than two versions")
    current = versions[0]
    channel = folder / "channel"
    with Publisher(channel, lambda: _tensors(current)) as publisher:
        readers = [_start(channel, n_versions, folder / f"reader-{i}") for i in range(n_readers)]
        try:
            for reader in readers:
                assert reader.stdout is not None
                if not reader.stdout.readline():
                    raise SystemExit("scripts/bench fleet: a reader did not start")
            _say(f"{n_readers} readers hold version 0; publishing {n_versions} versions")
            sizes = []
            for number, place in enumerate(_back_and_forth(len(versions), n_versions), 1):
                current = versions[place]
                sizes.append(publisher.publish().payload_bytes)
                if number % 20 == 0:
                    _say(f"version {number} of {n_versions}")
                _wait(folder, n_readers, number)
            ends = [reader.wait(_READY_S) for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
        expected = publisher.version.root
    told = [json.loads((folder / f"reader-{i}.json").read_text()) for i in range(n_readers)]
    lags = [lag for one in told for lag in one["lags_ms"]]
    decoded = [lag for one in told for lag in one["decoded_ms"]]
    last = [max(column) for column in zip(*(one["lags_ms"] for one in told), strict=True)]
    return {
        "n_readers": n_readers,
        "n_versions": n_versions,
        "model_mb": sum(bits.nbytes for bits in versions[0].values()) / 1e6,
        "payload_bytes": statistics.median(sizes),
        "all_equal": ends == [0] * n_readers and all(one["root"] == expected for one in told),
        "median_decoded_ms": statistics.median(decoded),
        "median_lag_ms": statistics.median(lags),
        "p95_lag_ms": float(np.percentile(lags, 95)),
        "median_last_ms": statistics.median(last),
        "n_cores": os.cpu_count(),
    }


def _versions(source: Path) -> list[Weights]:
    subscriber = Subscriber(source)
    subscriber.refresh()
    newest = subscriber.version()
    return [subscriber.materialise(number) for number in range(newest.number + 1)]


def _back_and_forth(n: int, n_steps: int) -> Iterator[int]:
    """Places 1, 2, …, n - 1, n - 2, …, 0, 1, … of `n` versions."""
    place, step = 0, 1
    for _ in range(n_steps):
        if not 0 <= place + step < n:
            step = -step
        place += step
        yield place


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    signed = {name: bits.view(f"i{bits.itemsize}") for name, bits in weights.items()}
    return {
        name: torch.from_numpy(bits).view(_TORCH[bits.itemsize]) for name, bits in signed.items()
    }


def _start(channel: Path, n_versions: int, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scripts._bench.main", "reader"]
    command += [str(channel), str(n_versions), str(out)]
    # One thread each: there are more readers than cores.
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def _wait(folder: Path, n_readers: int, number: int) -> None:
    """Until every reader has said that it holds the version; a step of training takes longer."""
    waiting = set(range(n_readers))
    deadline = time.monotonic() + _READY_S
    while waiting:
        if time.monotonic() > deadline:
            raise SystemExit(f"scripts/bench fleet: readers {sorted(waiting)} do not follow")
        waiting = {i for i in waiting if _reached(folder / f"reader-{i}") < number}
        time.sleep(_POLL_S)


def _reached(out: Path) -> int:
    """How many versions a reader has said it reached: a byte each."""
    return out.stat().st_size if out.exists() else 0


def read(channel: Path, n_versions: int, out: Path) -> None:
    """Be a reader: follow the channel to a version, and write down how far behind each came."""
    subscriber = Subscriber(channel)
    subscriber.refresh()
    weights = _Weights(subscriber)
    decoded: list[float] = []
    lags: list[float] = []
    with out.open("wb", buffering=0) as reached:
        print("ready", flush=True)
        while weights.number < n_versions:
            if not subscriber.refresh():
                time.sleep(_POLL_S)
                continue
            for manifest in subscriber.plan(subscriber.version(weights.number)):
                before = weights.number
                changes = list(subscriber.changes(manifest))
                decoded.append(1000 * (time.time() - manifest.time))
                patch = weights.check(manifest, changes)
                lags.append(1000 * (time.time() - manifest.time))
                weights.apply(patch, manifest)
                reached.write(b"." * (weights.number - before))
    told = {"decoded_ms": decoded, "lags_ms": lags, "root": weights.scanned_root()}
    out.with_suffix(".json").write_text(json.dumps(told))


class _Weights:
    """A reader's weights in plain memory, patched as an engine patches its own."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._schema = schema = subscriber.schema
        tensors = _tensors(subscriber.materialise(0))
        layout = RankLayout(
            schema.digest,
            0,
            tuple(_whole(place, spec) for place, spec in enumerate(schema.tensors)),
            {spec.name: ParameterSpec(spec.dtype, spec.numel) for spec in schema.tensors},
        )
        self._coverage = Coverage(schema, [layout])
        self._patcher = Patcher(schema, layout, tensors)
        self._fingerprints = self._scan()
        self.number = 0

    def check(self, manifest: Manifest, changes: list[Change]) -> Patch:
        """Check a decoded delta against the weights."""
        assert manifest.target is not None
        patch = self._patcher.stage(changes)
        sums = self._patcher.check(patch)
        touched, change = (self._coverage.total([part]) for part in (sums.touched, sums.change))
        self._fingerprints = judge(
            self._schema, self._fingerprints, patch.entries, touched, change, manifest.target.root
        )
        return patch

    def apply(self, patch: Patch, manifest: Manifest) -> None:
        assert manifest.target is not None
        self._patcher.apply(patch)
        self.number = manifest.target.number

    def scanned_root(self) -> str:
        """The root of the weights, from all of their bits."""
        return root(self._schema, self._scan())

    def _scan(self) -> list[int]:
        totals = self._coverage.total([self._patcher.scan()])
        return [totals.get(place, 0) for place in range(len(self._schema))]


def _whole(place: int, spec: TensorSpec) -> Rectangle:
    return Rectangle(place, (spec.numel,), 0, (1,), spec.name, 0, (1,))


def _say(text: str) -> None:
    print(f"[fleet] {text}", file=sys.stderr, flush=True)
