"""A toy for the channel's tests: its weights are a few integers, a delta adds to one of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_delta.channel import Log, Record, Store
from vllm_delta.format import BlobRef, Version, manifest_key, seal

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("child.py")

Weights = tuple[int, ...]
START: Weights = (0, 0, 0, 0)


def root_of(weights: Weights) -> str:
    return hashlib.sha256(repr(weights).encode()).hexdigest()


def moved(weights: Weights, place: int, step: int) -> Weights:
    place %= len(weights)
    return (*weights[:place], weights[place] + step, *weights[place + 1 :])


def put_schema(log: Log) -> BlobRef:
    return log.put_schema(b"four integers")


def append_anchor(log: Log, weights: Weights) -> Record:
    """Publish the weights whole: as a new version right after a fence, else as the current one."""
    position = log.position
    assert position is not None
    at = position.manifest.target
    same = at is not None and at.root == root_of(weights)
    number = 0 if at is None else at.number + (not same)
    return log.append(
        "anchor",
        target=Version(number, root_of(weights)),
        blobs=[log.put_blob(json.dumps(weights).encode())],
        schema=put_schema(log),
    )


def append_delta(log: Log, weights: Weights, place: int, step: int) -> Record:
    """Publish `weights` moved by `step` at `place`."""
    position = log.position
    assert position is not None
    at = position.manifest.target
    assert at is not None
    return log.append(
        "delta",
        target=Version(at.number + 1, root_of(moved(weights, place, step))),
        blobs=[log.put_blob(json.dumps({"place": place, "step": step}).encode())],
    )


def append_merged(log: Log, base: Version, old: Weights, weights: Weights) -> Record:
    """Publish what led from `old`, an earlier version, to `weights`, at which the log stands."""
    position = log.position
    assert position is not None
    assert position.manifest.target is not None
    steps = [new - before for new, before in zip(weights, old, strict=True)]
    return log.append(
        "merged",
        base=base,
        target=position.manifest.target,
        blobs=[log.put_blob(json.dumps({"steps": steps}).encode())],
    )


def merged(weights: Weights, change: Any, sign: int = 1) -> Weights:
    """Weights moved by a merged delta, or back."""
    return tuple(w + sign * step for w, step in zip(weights, change["steps"], strict=True))


def replay(log: Log, records: Iterable[Record], weights: Weights | None = None) -> Weights | None:
    """Apply records to `weights`; every version must have the root its manifest names.

    Merged deltas lead to where the weights are already: they are taken back.
    """
    for record in records:
        manifest = record.manifest
        if manifest.kind == "fence":
            continue
        change = json.loads(bytes(log.get_blob(manifest, 0)))
        if manifest.kind == "anchor":
            weights = tuple(change)
        elif manifest.kind == "merged":
            assert weights is not None, "a merged delta before an anchor"
            assert manifest.base is not None
            assert root_of(merged(weights, change, -1)) == manifest.base.root
        else:
            assert weights is not None, "a delta without a base"
            weights = moved(weights, change["place"], change["step"])
        assert manifest.target is not None
        assert root_of(weights) == manifest.target.root, f"record {record.seq}"
    return weights


def begin(log: Log, n_deltas: int = 0, writer: str = "trainer") -> Weights:
    """Claim an empty channel and publish version 0 and `n_deltas` more."""
    log.claim(writer)
    weights = START
    append_anchor(log, weights)
    for number in range(n_deltas):
        append_delta(log, weights, number, 1)
        weights = moved(weights, number, 1)
    return weights


def child(*arguments: object) -> subprocess.Popen[bytes]:
    """Start `child.py` with these arguments in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)


def fetched(store: Store, key: str) -> bytes:
    data = store.get(key, max_bytes=4 << 20)
    assert data is not None, key
    return data


def reseal(store: Store, seq: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a stored manifest with its JSON changed, as somebody with write access would."""
    record = Log(store).read(seq)
    assert record is not None
    fields = json.loads(record.manifest.to_bytes())
    change(fields)
    store.put(manifest_key(seq), seal(json.dumps(fields).encode()))


def plant(store: Store, seq: int, **changes: Any) -> None:
    record = Log(store).read(seq)
    assert record is not None
    manifest = dataclasses.replace(record.manifest, **changes)
    store.put(manifest_key(seq), seal(manifest.to_bytes()))
