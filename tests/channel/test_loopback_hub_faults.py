"""What the loopback Hub does wrong on request, and what unmodified clients make of it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError
from huggingface_hub.utils import parse_ratelimit_headers

from tests.channel.loopback import (
    BUCKET,
    download,
    hf,
    http,
    noise,
    resolve,
    resolve_url,
    s3,
    upload,
    use_clients,
    xet_group,
    xet_info,
    xet_read,
    xet_tries,
)
from vllm_delta.testing.hub import LoopbackHub
from vllm_delta.testing.hub_faults import HubFaults, RateLimits

DATA = noise(300_000)


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_clients(monkeypatch, tmp_path / "cache")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.create_bucket(BUCKET)
        hub.write(BUCKET, "file", DATA)
        yield hub


def test_a_class_of_requests_is_limited_by_window() -> None:
    with LoopbackHub(limits={"api": 2, "resolvers": 1}) as hub:
        hub.create_bucket(BUCKET)
        hub.write(BUCKET, "file", DATA)
        with http(hub) as client:
            info = f"/api/buckets/{BUCKET}"
            assert [client.get(info).status_code for _ in range(3)] == [200, 200, 429]
            seen = [client.get(resolve_url("file")) for _ in range(2)]
            assert [one.status_code for one in seen] == [200, 429]
            told = parse_ratelimit_headers(seen[1].headers)
            assert told is not None
            assert (told.resource_type, told.remaining, told.limit) == ("resolvers", 0, 1)
            assert 290 <= told.reset_in_seconds <= 300
            assert told.window_seconds == 300
        hub.set_limits({})
        assert hf(hub).bucket_info(BUCKET).id == BUCKET


def test_a_limit_is_over_with_its_window() -> None:
    now = [1000.0]
    limits = RateLimits({"api": 2}, 300, clock=lambda: now[0])
    assert [limits.take("api")[0] for _ in range(3)] == [True, True, False]
    now[0] += 299
    may_pass, headers = limits.take("api")
    assert not may_pass
    assert headers["RateLimit"] == '"api";r=0;t=1'
    now[0] += 1
    assert limits.take("api")[0]
    assert limits.take("s3") == (True, {})


def test_the_client_waits_as_long_as_it_is_told(hub: LoopbackHub) -> None:
    for facts, least_s in (
        ({"status": 429, "reset_s": 1}, 2.0),
        ({"status": 429, "retry_after_s": 0}, 1.0),
        ({"status": 503, "retry_after_s": 0}, 1.0),
        ({"status": 500}, 1.0),
    ):
        hub.faults.add("batch", "status", **facts)
        began = time.monotonic()
        upload(hub, {"new": json.dumps(facts).encode()})
        assert time.monotonic() - began >= least_s, facts
        assert hub.read(BUCKET, "new") == json.dumps(facts).encode()
    assert hub.counts["batch"] == 8


def test_a_dropped_request_did_nothing_and_a_lost_answer_did_it_all(hub: LoopbackHub) -> None:
    delete = '{"type":"deleteFile","path":"%s"}'
    for number, (kind, landed) in enumerate((("drop", False), ("lose_answer", True))):
        hub.write(BUCKET, f"old{number}", b"old")
        hub.faults.add("batch", kind)
        with http(hub) as client, pytest.raises(httpx.RemoteProtocolError):
            client.post(f"/api/buckets/{BUCKET}/batch", content=delete % f"old{number}")
        assert (hub.read(BUCKET, f"old{number}") is None) is landed
    hub.faults.add("batch", "lose_answer")
    upload(hub, {"new": b"new"})
    assert hub.counts["batch"] == 4, "the client sent it again"
    hub.faults.add("s3.put", "lose_answer")
    with pytest.raises(obstore.exceptions.GenericError):
        obstore.put(s3(hub), "landed", b"data", mode="create")
    assert hub.read(BUCKET, "landed") == b"data"


def test_damage_in_store_reaches_readers_unnoticed(hub: LoopbackHub, tmp_path: Path) -> None:
    floats = (DATA[:150_000] + bytes(150_000)) * 3
    files = {"noise": DATA, "packed": floats}
    upload(hub, files)
    for path, data in files.items():
        for place in (0, 150_123, len(data) - 1):
            hub.damage(BUCKET, path, place)
            found = download(hub, [path], tmp_path)[path]
            assert len(found) == len(data)
            assert hashlib.sha256(found).digest() != hashlib.sha256(data).digest()
            assert found == xet_read(hub, path) == resolve(hub, path).content
            assert found[place] != data[place]
            hub.damage(BUCKET, path, place)  # and back
            assert xet_read(hub, path) == data


def test_an_answer_can_be_corrupt_short_or_cut(hub: LoopbackHub) -> None:
    hub.faults.add("resolve", "corrupt", n=7)
    found = resolve(hub, "file").content
    assert [i for i in range(len(DATA)) if found[i] != DATA[i]] == [7]
    hub.faults.add("resolve", "truncate", n=1000)
    assert resolve(hub, "file").content == DATA[:1000]
    hub.faults.add("resolve", "cut", n=1000)
    with pytest.raises(httpx.RemoteProtocolError):
        resolve(hub, "file")
    assert resolve(hub, "file").content == DATA
    hub.faults.add("xorb", "corrupt", n=5000)
    assert xet_read(hub, "file") != DATA
    assert xet_read(hub, "file") == DATA


@pytest.mark.parametrize("kind", ["truncate", "cut"])
def test_the_xet_client_asks_again_for_what_ended_early(hub: LoopbackHub, kind: Any) -> None:
    hub.faults.add("xorb", kind, n=1000)
    assert xet_read(hub, "file") == DATA
    hub.faults.add("xorb", kind, n=1000, times=None)
    assert xet_tries(xet_group(hub), xet_info(hub, "file")) is None


def test_what_is_newest_can_be_unseen(hub: LoopbackHub) -> None:
    hub.write(BUCKET, "a", b"newest")
    for where in ("tree", "paths-info", "resolve", "s3.list"):
        hub.faults.add(where, "stale", n=1)
    api = hf(hub)
    for expected in (["file"], ["a", "file"]):
        assert [one.path for one in api.list_bucket_tree(BUCKET)] == expected
        found = api.get_bucket_paths_info(BUCKET, ["a", "file"])
        assert [one.path for one in found] == expected
        assert resolve(hub, "a").is_success == ("a" in expected)
        assert [one["path"] for one in obstore.list(s3(hub)).collect()] == expected


def test_a_batch_can_fail_in_part_or_stop_half_way(hub: LoopbackHub) -> None:
    api = hf(hub)
    new = [(name.encode(), name) for name in "abc"]
    hub.faults.add("batch", "refuse", n=2)
    with pytest.raises(BucketBatchError) as caught:
        api.batch_bucket_files(BUCKET, add=new)
    assert caught.value.response.status_code == 200
    assert [one["path"] for one in caught.value.failures] == ["a", "b"]
    assert hub.paths(BUCKET) == ["c", "file"]
    hub.faults.add("batch", "half", n=1)
    delete = '{"type":"deleteFile","path":"c"}\n{"type":"deleteFile","path":"file"}'
    with http(hub) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post(f"/api/buckets/{BUCKET}/batch", content=delete)
    assert hub.paths(BUCKET) == ["file"]


def test_a_token_can_be_good_for_nothing(hub: LoopbackHub) -> None:
    hub.faults.add("xet-read-token", "expired")
    assert xet_tries(xet_group(hub), xet_info(hub, "file")) is None
    assert xet_read(hub, "file") == DATA


def test_two_writers_who_look_write_and_look_can_both_think_they_won(hub: LoopbackHub) -> None:
    answers: dict[str, bool] = {}
    done = {name: threading.Event() for name in ("first", "second")}

    def look_write_look(name: str) -> None:
        assert resolve(hub, "m/1").status_code == 404
        upload(hub, {"m/1": name.encode()})
        answers[name] = resolve(hub, "m/1").content == name.encode()
        done[name].set()

    hub.faults.add("batch", "hold", times=2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(look_write_look, "first")]
        hub.faults.wait_held(1)
        jobs.append(pool.submit(look_write_look, "second"))
        hub.faults.wait_held(2)
        for name in ("first", "second"):
            assert hub.faults.release(1) == 1
            assert done[name].wait(30)
        for job in jobs:
            job.result()
    assert answers == {"first": True, "second": True}
    assert hub.read(BUCKET, "m/1") == b"second"


def test_a_fault_that_could_never_strike_is_refused(hub: LoopbackHub) -> None:
    with pytest.raises(ValueError, match="no route or class 'bach'"):
        hub.faults.add("bach", "status")
    with pytest.raises(ValueError, match="unknown fault"):
        hub.faults.add("batch", "nonsense")


def test_faults_strike_where_when_and_as_often_as_said() -> None:
    faults = HubFaults()
    faults.add("api", "status", times=2, skip=1, path="/batch")
    faults.add("tree", "stale", times=None)
    drawn = [faults.draw("api", "batch", "/batch") for _ in range(5)]
    assert [one is not None for one in drawn] == [False, True, True, False, False]
    assert faults.draw("resolver", "resolve", "/batch") is None
    assert all(faults.draw("api", "tree", "/tree") for _ in range(5))
    assert len(faults.suffered) == 7
    faults.clear()
    assert faults.draw("api", "tree", "/tree") is None


def test_another_process_has_it_do_wrong_by_the_control_route(hub: LoopbackHub) -> None:
    def act(name: str, **facts: object) -> Any:
        with http(hub, "nobody's") as client:
            return client.post(f"/_control/{name}", json=facts).raise_for_status().json()

    upload(hub, {"new": b"new"})
    act("fault", where="info", kind="delay", delay_s=1)
    began = time.monotonic()
    assert hf(hub).bucket_info(BUCKET).total_files == 2
    assert time.monotonic() - began >= 1
    act("fault", where="resolve", kind="status", times=None, status=500)
    assert resolve(hub, "new").status_code == 500
    act("clear_faults")
    assert resolve(hub, "new").status_code == 200
    assert act("counts")["resolve"] == 2
    act("damage", bucket=BUCKET, path="new", place=1)
    assert resolve(hub, "new").content == b"ndw"
    act("reset_counts")
    assert act("counts") == {}
    act("limits", api=0)
    with pytest.raises(HfHubHTTPError, match="429"):
        hf(hub).bucket_info(BUCKET)
    act("limits")
    act("expire_tokens")
    assert xet_group(hub) is not None
