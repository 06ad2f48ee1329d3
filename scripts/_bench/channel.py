"""Bytes a second of our publish and fetch against the bare client's, on each kind of store.

In turns, on one server, with fresh random bytes each time, both move an object of the same size;
every answer is compared with what was sent before a number counts. Ours is the whole path: for a
publish the sha256, the blob, the manifest with its look before and after, and `head`; for a fetch
the manifest, the blob and its sha256. The bare client moves the object and nothing else: obstore;
`batch_bucket_files` and a stream from hf_xet. In a directory it writes to a temporary file, forces
it to disk, renames it and reads it, and takes a sha256 each way. The servers are loopback ones on
this machine's cores, so it is the ratio that counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts._demo.channels import open_demo_channel
from vllm_delta.channel import Log, LogReader, open_channel
from vllm_delta.format import Version

SIZES = (64 << 20, 4 << 20)
_ROUNDS = 9
_KINDS = {"local": "local", "s3": "s3", "hub": "hf"}


@dataclass(frozen=True)
class Bare:
    """The client alone: moves an object under a name."""

    put: Callable[[str, bytes], Any]
    get: Callable[[str, int], bytes]


def main(json_path: Path | None, stores: Sequence[str] | None) -> int:
    """Run it; returns the exit status: 1 when an answer was wrong."""
    rows: list[dict[str, Any]] = []
    for store in stores or list(_KINDS):
        with tempfile.TemporaryDirectory(prefix="bench-channel-") as folder:
            for row in _measure(store, Path(folder)):
                rows.append(row)
                print(
                    f"{row['store']:>6} {row['object_bytes'] >> 20:>4} MiB {row['direction']:>8}  "
                    f"ours {row['ours_mb_s']:7.1f} MB/s  bare {row['bare_mb_s']:7.1f} MB/s  "
                    f"ratio {row['ours_mb_s'] / row['bare_mb_s']:.2f}",
                    flush=True,
                )
    if json_path is not None:
        json_path.write_text(json.dumps({"rows": rows, "n_cores": os.cpu_count()}, indent=1) + "\n")
    return 0


def _measure(store: str, folder: Path) -> Iterator[dict[str, Any]]:
    kind = _KINDS[store]
    _say(f"{store}: {_ROUNDS} rounds for each size")
    with open_demo_channel(kind, folder, signed=False, sealed=False) as channel:
        bare = {"local": _bare_local, "s3": _bare_s3, "hub": _bare_hub}[store](folder)
        log = Log(open_channel(channel.address))
        reader = LogReader(open_channel(channel.address))
        log.claim("bench")
        schema = log.put_schema(b"schema")
        for n_bytes in SIZES:
            seconds = _rounds(log, reader, schema, bare, n_bytes)
            for direction in ("publish", "fetch"):
                ours, theirs = seconds["ours", direction], seconds["bare", direction]
                yield {
                    "store": store,
                    "object_bytes": n_bytes,
                    "direction": direction,
                    "ours_mb_s": n_bytes / 1e6 / statistics.median(ours),
                    "bare_mb_s": n_bytes / 1e6 / statistics.median(theirs),
                    "ours_s": ours,
                    "bare_s": theirs,
                }


def _rounds(
    log: Log, reader: LogReader, schema: Any, bare: Bare, n_bytes: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round but the first, which opens connections."""
    seconds: dict[tuple[str, str], list[float]] = {
        (who, what): [] for who in ("ours", "bare") for what in ("publish", "fetch")
    }
    for number in range(_ROUNDS + 1):
        for who in ("ours", "bare") if number % 2 else ("bare", "ours"):
            data = os.urandom(n_bytes)
            if who == "ours":
                put_s, seq = _timed(partial(_publish, log, schema, data))
                get_s, got = _timed(partial(_fetch, reader, seq))
            else:
                name = uuid.uuid4().hex
                put_s, _ = _timed(partial(bare.put, name, data))
                get_s, got = _timed(partial(bare.get, name, n_bytes))
            if got != data:
                raise SystemExit(f"scripts/bench channel: {who} gave other bytes back")
            if number:
                seconds[who, "publish"].append(put_s)
                seconds[who, "fetch"].append(get_s)
    return seconds


def _publish(log: Log, schema: Any, data: bytes) -> int:
    position = log.position
    assert position is not None
    target = position.manifest.target or Version(0, "0" * 64)
    blobs = log.put_blobs([data])
    return log.append("anchor", target=target, blobs=blobs, schema=schema).seq


def _fetch(reader: LogReader, seq: int) -> bytes | memoryview:
    record = reader.read(seq)
    assert record is not None
    return reader.get_blob(record.manifest, 0)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def _bare_local(folder: Path) -> Bare:
    place = folder / "bare"
    place.mkdir()

    def put(name: str, data: bytes) -> None:
        hashlib.sha256(data).digest()
        temporary = place / f"{name}.tmp"
        with temporary.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        temporary.rename(place / name)

    def get(name: str, _: int) -> bytes:
        data = (place / name).read_bytes()
        hashlib.sha256(data).digest()
        return data

    return Bare(put, get)


def _bare_s3(_: Path) -> Bare:
    from obstore.store import S3Store

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    store = S3Store(
        "demo",
        prefix="bare",
        endpoint=endpoint,
        client_options={"allow_http": True, "timeout": "120s"},
    )

    def put(name: str, data: bytes) -> None:
        store.put(name, data)

    def get(name: str, _: int) -> bytes:
        return bytes(store.get(name).bytes())

    return Bare(put, get)


def _bare_hub(_: Path) -> Bare:
    import hf_xet
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    bucket, endpoint, token = "demo/channel", os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"]
    api = HfApi(endpoint=endpoint, token=token)
    headers = {"authorization": f"Bearer {token}"}
    url = f"{endpoint}/api/buckets/{bucket}/xet-read-token"
    right = get_session().get(url, headers=headers).json()
    group = hf_xet.XetSession().new_download_stream_group(
        endpoint=right["casUrl"],
        token=right["accessToken"],
        token_expiry_unix_secs=int(right["exp"]),
    )

    def put(name: str, data: bytes) -> None:
        api.batch_bucket_files(bucket, add=[(data, f"bare/{name}")])

    def get(name: str, n_bytes: int) -> bytes:
        (entry,) = api.get_bucket_paths_info(bucket, [f"bare/{name}"])
        info = hf_xet.XetFileInfo(entry.xet_hash, n_bytes)
        return b"".join(group.download_stream(info))

    return Bare(put, get)


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"[channel] {text}", file=sys.stderr, flush=True)
