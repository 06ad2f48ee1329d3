"""The loopback Hub's S3 gateway serves an unmodified obstore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import obstore
import pytest

from tests.channel.loopback import (
    BUCKET,
    download,
    noise,
    resolve,
    s3,
    s3_read,
    use_clients,
    xet_read,
)
from vllm_delta.testing.hub import LoopbackHub


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_clients(monkeypatch, tmp_path / "cache")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.create_bucket(BUCKET)
        yield hub


def test_what_came_through_the_gateway_is_read_through_every_door(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    sizes = {"empty": 0, "seven": 7, "parts": 12_000_000}  # the last one is sent in parts
    files = {path: noise(n_bytes, 2) for path, n_bytes in sizes.items()}
    for path, data in files.items():
        obstore.put(s3(hub), path, data)
    assert hub.counts["s3.upload"] == 2
    assert download(hub, list(files), tmp_path) == files
    assert {path: s3_read(hub, path) for path in files} == files
    assert {path: resolve(hub, path).content for path in files} == files
    assert xet_read(hub, "parts") == files["parts"]


def test_of_eight_conditional_writes_through_the_gateway_one_wins(hub: LoopbackHub) -> None:
    for round_number in range(10):
        start = threading.Barrier(8)

        def race(writer: int, key: str, start: threading.Barrier = start) -> bool:
            store = s3(hub)
            start.wait(30)
            try:
                obstore.put(store, key, b"%d" % writer, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
            return True

        key = f"m/{round_number}"
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda writer, key=key: race(writer, key), range(8)))
        assert sum(won) == 1
        assert hub.read(BUCKET, key) == b"%d" % won.index(True)


def test_objects_of_the_gateway_are_described_replaced_and_deleted(hub: LoopbackHub) -> None:
    store = s3(hub)
    first = obstore.put(store, "a&b <c>", b"first")
    obstore.put(store, "other", b"")
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(store, "a&b <c>", b"second", mode={"e_tag": '"another"'})
    obstore.put(store, "a&b <c>", b"second", mode={"e_tag": first["e_tag"]})
    assert obstore.head(store, "a&b <c>")["size"] == 6
    assert [one["path"] for one in obstore.list(store).collect()] == ["a&b <c>", "other"]
    obstore.delete(store, ["a&b <c>", "absent"])
    obstore.delete(store, "other")
    assert hub.paths(BUCKET) == []
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "other")
    with pytest.raises(FileNotFoundError):
        obstore.put(s3(hub, bucket="me/absent"), "key", b"data")
    url = f"{hub.endpoint}/s3/{BUCKET}/key"
    assert httpx.get(url, trust_env=False).status_code == 403, "not signed"
