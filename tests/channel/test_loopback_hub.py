"""The loopback Hub serves unmodified clients as the real one is known to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import obstore
import pytest
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, HfHubHTTPError

from tests.channel.loopback import (
    BUCKET,
    download,
    hf,
    http,
    noise,
    resolve,
    resolve_url,
    s3,
    s3_read,
    upload,
    use_clients,
    xet_group,
    xet_info,
    xet_read,
    xet_token,
    xet_tries,
)
from vllm_delta.testing.hub import LoopbackHub

FILES = {
    "empty": b"",
    "b/seven": b"1234567",
    "b/five": noise(5_000_000),
    "b/thirty": noise(30_000_000, 1),
    "zeros": bytes(3_000_000),
    "floats": np.random.default_rng(0).normal(size=500_000).astype("f4").tobytes(),
}


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_clients(monkeypatch, tmp_path / "cache")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.create_bucket(BUCKET)
        yield hub


@pytest.mark.parametrize("reconstruction", ["v1", "v2"])
def test_files_of_any_size_come_back_through_every_door(
    reconstruction: str, tmp_path: Path
) -> None:
    with LoopbackHub(reconstruction=reconstruction) as hub:
        assert hf(hub).create_bucket(BUCKET).bucket_id == BUCKET
        upload(hub, FILES)
        assert hub.paths(BUCKET) == sorted(FILES)
        assert download(hub, list(FILES), tmp_path) == FILES
        for path, data in FILES.items():
            assert resolve(hub, path).content == data, path
            assert s3_read(hub, path) == data, path
            assert hub.read(BUCKET, path) == data, path
            if data:
                assert xet_read(hub, path) == data, path


def test_ranges_are_those_asked_for_and_nothing_else(hub: LoopbackHub) -> None:
    for path in ("b/five", "floats", "zeros"):
        data = FILES[path]
        upload(hub, {path: data})
        for start, end in ((0, 1), (65_535, 65_537), (131_071, 1_900_001), (5, len(data))):
            there = f"{path}[{start}:{end}]"
            answer = resolve(hub, path, Range=f"bytes={start}-{end - 1}")
            assert answer.status_code == 206
            assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(data)}"
            assert answer.content == data[start:end], there
            assert xet_read(hub, path, start, end) == data[start:end], there
            assert bytes(obstore.get_range(s3(hub), path, start=start, end=end)) == data[start:end]
        assert resolve(hub, path, Range="bytes=-9").content == data[-9:]
        assert resolve(hub, path, Range=f"bytes={len(data)}-").status_code == 416


def test_buckets_are_made_once_described_listed_and_deleted(hub: LoopbackHub) -> None:
    api = hf(hub)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_bucket(BUCKET)
    assert api.create_bucket(BUCKET, exist_ok=True).bucket_id == BUCKET
    upload(hub, {"a": b"123", "b": b"4567"})
    info = api.bucket_info(BUCKET)
    assert (info.id, info.size, info.total_files, info.private) == (BUCKET, 7, 2, True)
    api.create_bucket("me/other", private=False)
    assert [one.id for one in api.list_buckets("me")] == [BUCKET, "me/other"]
    api.delete_bucket(BUCKET)
    with pytest.raises(BucketNotFoundError):
        api.bucket_info(BUCKET)
    with pytest.raises(ConnectionError, match="404"):  # so says hf_xet, which asks for a token
        upload(hub, {"a": b"1"})


def test_a_listing_is_by_lexical_prefix_and_in_pages() -> None:
    paths = ["logs/1", "logs/2/x", "logs/2/y", "logs_x/1", "other"]
    with LoopbackHub(page=2) as hub:
        hub.create_bucket(BUCKET)
        for path in paths:
            hub.write(BUCKET, path, path.encode())
        api = hf(hub)
        listed = api.list_bucket_tree(BUCKET, recursive=True)
        assert [one.path for one in listed] == paths
        assert hub.counts["tree"] == 3
        listed = api.list_bucket_tree(BUCKET, prefix="logs", recursive=True)
        assert [one.path for one in listed] == paths[:4]
        listed = api.list_bucket_tree(BUCKET, prefix="logs/")
        assert [(one.type, one.path) for one in listed] == [
            ("file", "logs/1"),
            ("directory", "logs/2"),
        ]
        found = list(api.get_bucket_paths_info(BUCKET, ["other", "absent"]))
        assert [(one.path, one.size) for one in found] == [("other", 5)]
        assert [one["path"] for one in obstore.list(s3(hub), "logs").collect()] == paths[:3]
        assert obstore.list_with_delimiter(s3(hub))["common_prefixes"] == ["logs", "logs_x"]


def test_a_thousand_files_are_one_batch(hub: LoopbackHub) -> None:
    files = {f"many/{i:03}": b"%d" % i * 1000 for i in range(1000)}
    upload(hub, files)
    assert (hub.counts["api"], hub.counts["batch"]) == (2, 1)
    assert {path: hub.read(BUCKET, path) for path in files} == files
    one_too_many = b'{"type":"deleteFile","path":"x"}\n' * 1001
    with http(hub) as client:
        answer = client.post(f"/api/buckets/{BUCKET}/batch", content=one_too_many)
    assert answer.status_code == 400


def test_the_operations_of_a_batch_fail_one_by_one(hub: LoopbackHub) -> None:
    api = hf(hub)
    upload(hub, {"old": b"old"})
    with pytest.raises(BucketBatchError) as caught:
        api.batch_bucket_files(BUCKET, add=[(b"new", "new"), (b"bad", "../bad")], delete=["old"])
    assert [one["path"] for one in caught.value.failures] == ["../bad"]
    assert hub.paths(BUCKET) == ["new"]
    with pytest.raises(BucketBatchError) as caught:
        api.batch_bucket_files(BUCKET, delete=["absent"])
    assert caught.value.response.status_code == 422


def test_only_tokens_that_may_are_served(hub: LoopbackHub, tmp_path: Path) -> None:
    upload(hub, {"file": b"data"})
    reader, stranger = hf(hub, hub.read_token), hf(hub, "hf_stranger")
    assert [one.path for one in reader.list_bucket_tree(BUCKET)] == ["file"]
    reader.download_bucket_files(BUCKET, [("file", str(tmp_path / "file"))])
    for token, status in (("hf_stranger", 401), (hub.read_token, 403)):
        with http(hub, token) as client:
            assert client.get(f"/api/buckets/{BUCKET}/xet-write-token").status_code == status
    with pytest.raises(HfHubHTTPError, match="403"):
        reader.batch_bucket_files(BUCKET, delete=["file"])
    with pytest.raises(HfHubHTTPError, match="401"):
        stranger.bucket_info(BUCKET)
    assert httpx.get(hub.endpoint + resolve_url("file"), trust_env=False).status_code == 401
    hub.create_bucket("me/public", private=False)
    assert httpx.get(f"{hub.endpoint}/api/buckets/me/public", trust_env=False).is_success
    with pytest.raises(HfHubHTTPError, match="401"):
        stranger.bucket_info("me/public")


def test_the_cas_takes_no_token_that_is_wrong_expired_or_for_reading(hub: LoopbackHub) -> None:
    upload(hub, {"file": b"data"})
    info = xet_info(hub, "file")
    read, write = xet_token(hub), xet_token(hub, "write")
    with httpx.Client(base_url=read["casUrl"], trust_env=False) as client:
        for token, url, status in (
            ("wrong", f"/v1/reconstructions/{info.hash}", 401),
            (read["accessToken"], f"/v1/reconstructions/{info.hash}", 200),
            (write["accessToken"], f"/v1/reconstructions/{info.hash}", 200),
        ):
            headers = {"Authorization": f"Bearer {token}"}
            assert client.get(url, headers=headers).status_code == status
        headers = {"Authorization": f"Bearer {read['accessToken']}"}
        assert client.post("/v1/shards", headers=headers).status_code == 403
    hub.expire_tokens()
    group = xet_group(
        hub, endpoint=read["casUrl"], token=read["accessToken"], token_expiry_unix_secs=read["exp"]
    )
    assert xet_tries(group, info) is None, "a client renews a token by its time alone"


def test_a_token_that_ends_soon_is_renewed_by_the_client() -> None:
    with LoopbackHub(token_life_s=20) as hub:  # clients renew half a minute early
        hub.create_bucket(BUCKET)
        upload(hub, {"file": b"data"})
        group = xet_group(
            hub,
            token_refresh_url=f"{hub.endpoint}/api/buckets/{BUCKET}/xet-read-token",
            token_refresh_headers={"Authorization": f"Bearer {hub.token}"},
        )
        info = xet_info(hub, "file")
        assert [xet_tries(group, info) for _ in range(3)] == [b"data"] * 3
        assert hub.counts["xet-read-token"] >= 3


def test_a_read_sent_to_the_cdn_needs_and_shows_no_credentials(tmp_path: Path) -> None:
    with LoopbackHub(cdn=True) as hub:
        hub.create_bucket(BUCKET)
        upload(hub, {"file": FILES["b/five"]})
        with http(hub, follow_redirects=True) as client:
            assert client.get(resolve_url("file")).content == FILES["b/five"]
        assert s3_read(hub, "file") == FILES["b/five"]
        assert download(hub, ["file"], tmp_path)["file"] == FILES["b/five"]
        answer = resolve(hub, "file")
        assert answer.status_code == 302
        assert answer.headers["X-Linked-Size"] == "5000000"
        assert httpx.get(answer.headers["Location"], trust_env=False).content == FILES["b/five"]
        assert (hub.counts["cdn.get"], hub.counts["cdn.authorization"]) == (3, 0)
        with http(hub) as client:
            client.get(answer.headers["Location"])
        assert hub.counts["cdn.authorization"] == 1


def test_requests_are_counted_by_class_and_route(hub: LoopbackHub, tmp_path: Path) -> None:
    upload(hub, {"file": b"data"})
    assert {name: hub.counts[name] for name in ("api", "resolver", "s3")} == {
        "api": 2, "resolver": 0, "s3": 0,
    }  # fmt: skip
    assert hub.counts["xorb.put"] == hub.counts["shard.put"] == 1
    hub.reset_counts()
    download(hub, ["file"], tmp_path)
    counts = hub.counts
    assert (counts["api"], counts["resolver"], counts["resolve:HEAD"]) == (2, 1, 1)
    assert (counts["paths-info"], counts["xet-read-token"]) == (1, 1)
    assert (counts["reconstruct"], counts["xorb"]) == (1, 1)


def test_telemetry_of_transfers_is_counted(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(hub, {"file": b"data"})
    info = xet_info(hub, "file")
    hub.reset_counts()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for n_posts, quiet in enumerate(("1", "0")):
        monkeypatch.setenv("DO_NOT_TRACK", quiet)
        group = xet_group(hub)
        assert xet_tries(group, info) == b"data"
        group.finish()
        assert hub.counts["telemetry"] == n_posts


def test_it_serves_other_processes_until_its_input_ends(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm_delta.testing.hub", "--settings", '{"page": 7}'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        facts = json.loads(server.stdout.readline())
        client = """if True:
            import huggingface_hub
            api = huggingface_hub.HfApi()
            api.create_bucket("me/channel")
            api.batch_bucket_files("me/channel", add=[(b"data", "file")])
            print([one.path for one in api.list_bucket_tree("me/channel")])
        """
        settings = {"HF_ENDPOINT": facts["endpoint"], "HF_TOKEN": facts["token"]}
        settings |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", client], env={**os.environ, **settings},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == "['file']\n"
        counts = httpx.post(facts["endpoint"] + "/_control/counts", trust_env=False).json()
        assert counts["batch"] == 1
        server.stdin.close()
        assert server.wait(30) == 0


def test_what_it_needs_is_said_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ImportError, match=r"vllm-delta\[testing\]"):
        LoopbackHub()
