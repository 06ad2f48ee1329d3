from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.channel.hubs import BLOB, LARGE, opened, streamed
from vllm_delta.channel import Log, LogReader, Store, hub_xet
from vllm_delta.channel.hub import HubStore
from vllm_delta.errors import AuthError, ChannelError, DigestError, RateLimitError, SettingsError
from vllm_delta.format import HEAD_KEY, Version, blob_key, manifest_key
from vllm_delta.testing import ChannelContract
from vllm_delta.testing.hub import LoopbackHub

pytestmark = pytest.mark.usefixtures("online")


class TestHubStore(ChannelContract):
    hub: ClassVar[LoopbackHub]

    @pytest.fixture(autouse=True)
    def _hub(self, hub: LoopbackHub) -> None:
        type(self).hub = hub

    def open_store(self, place: Path) -> Store:
        name = "me/" + hashlib.sha256(bytes(place)).hexdigest()[:20]
        self.hub.create_bucket(name)
        return opened(self.hub, name)


class TestHubStoreBehindACdn(TestHubStore):
    @pytest.fixture(autouse=True)
    def _hub(self) -> Iterator[None]:  # type: ignore[override]
        with LoopbackHub(cdn=True, page=2, reconstruction="v1") as hub:
            type(self).hub = hub
            yield


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("hf://buckets/me/b", "me/b", ""),
        ("hf://buckets/me/b/", "me/b", ""),
        ("HF://buckets/me.x/b_1-2/run%201/%C3%BC", "me.x/b_1-2", "run 1/ü"),
        ("hf://buckets/me/b/a/c?manifests=s3", "me/b", "a/c"),
    ],
)
def test_an_address_names_bucket_and_folder_and_opens_the_same_again(
    url: str, bucket: str, prefix: str
) -> None:
    for store in (first := HubStore.open(url), HubStore.open(first.url)):
        assert (store._bucket, store._prefix) == (bucket, prefix)
        assert store.atomic is url.endswith("s3")
        assert store.url == first.url


@pytest.mark.parametrize(
    "url",
    ["hf://buckets/me", "hf://buckets//b", "hf://models/me/b", "hf://buckets/me/..", "s3://me/b",
     "hf://buckets/me/b/../c", "hf://buckets/me/b//c", "hf://buckets/me/b/a%2F..%2Fc",
     "hf://buckets/me/b/%5C", "hf://buckets/me/b?manifests=s4", "hf://buckets/me/b?x=1",
     "hf://buckets/me/b?manifests=s3&manifests=s3", "hf://buckets/me/b#c", "hf:/buckets/me/b",
     "hf://token@buckets/me/b", "hf://buckets/me/b/%FF", "hf://buckets/me/b/%00"],
)  # fmt: skip
def test_other_addresses_are_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(SettingsError, match=r"supported='hf://buckets/") as caught:
        HubStore.open(url)
    assert "token" not in str(caught.value)


def test_endpoint_and_token_come_from_the_environment(
    hub: LoopbackHub, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    store = HubStore.open(f"hf://buckets/{bucket}/run")
    store.put(HEAD_KEY, b"x")
    assert hub.read(bucket, "run/head") == b"x"


def test_opening_sends_nothing_and_a_prefix_is_no_part_of_a_longer_one(
    hub: LoopbackHub, bucket: str
) -> None:
    store, longer = opened(hub, bucket, "run"), opened(hub, bucket, "run2")
    assert sum(hub.counts.values()) == 0
    longer.put(HEAD_KEY, b"x")
    assert store.list("") == []
    assert store.get(HEAD_KEY, max_bytes=1) is None


@pytest.mark.parametrize("missing", ["huggingface_hub.utils", "hf_xet"])
def test_a_missing_client_is_named_with_what_to_install(
    hub: LoopbackHub, bucket: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=rf"install='{missing.split('.')[0]}>="):
        opened(hub, bucket).put(HEAD_KEY, b"x")


def test_offline_mode_is_refused(hub: LoopbackHub, bucket: str) -> None:
    script = (
        "from vllm_delta.channel.hub import HubStore\n"
        "from vllm_delta.errors import SettingsError\n"
        "try: HubStore.open('hf://buckets/me/b')\n"
        "except SettingsError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=60, check=True
    )
    assert b"HF_HUB_OFFLINE is set" in said.stdout


def test_reads_writes_and_events_say_who_asks(hub: LoopbackHub, store: HubStore) -> None:
    assert store._hub.headers()["user-agent"].startswith("vllm-delta/")


def test_many_objects_are_one_upload_and_one_change(hub: LoopbackHub, store: HubStore) -> None:
    store.put(HEAD_KEY, b"x")
    hub.reset_counts()
    store.put_many({blob_key(f"{i:064x}"): os.urandom(100) for i in range(20)})
    assert hub.counts["api"] == hub.counts["batch"] == 1
    assert hub.counts["xorb.put"] == hub.counts["shard.put"] == 1
    assert len(store.list("b/")) == 20
    store.put_many({})
    assert hub.counts["batch"] == 1


def test_more_changes_than_the_hub_takes_are_sent_in_several_requests(
    hub: LoopbackHub, store: HubStore
) -> None:
    keys = [blob_key(f"{i:064x}") for i in range(1001)]
    store.put_many(dict.fromkeys(keys, b"same"))
    assert hub.counts["batch"] == 2
    assert len(store.list("")) == 1001
    store.delete(keys)
    assert hub.counts["batch"] == 4
    assert store.list("") == []


def test_a_change_that_was_done_in_part_is_an_error(hub: LoopbackHub, store: HubStore) -> None:
    objects = {manifest_key(1): b"1", manifest_key(2): b"2", manifest_key(3): b"3"}
    hub.faults.add("batch", "refuse", n=1)
    with pytest.raises(ChannelError, match="not do all") as caught:
        store.put_many(objects)
    assert (caught.value.n_failed, caught.value.n_sent) == (1, 3)
    assert store.list("m/") == [manifest_key(2), manifest_key(3)]
    hub.faults.add("batch", "refuse", n=3)
    with pytest.raises(ChannelError, match="not do all"):
        store.put_many(objects)
    hub.faults.add("batch", "refuse", n=1)
    with pytest.raises(ChannelError, match="not do all"):
        store.delete([manifest_key(2), manifest_key(9)])
    assert store.list("m/") == [manifest_key(2), manifest_key(3)]


def test_a_delete_of_nothing_is_done_however_the_hub_words_it(
    hub: LoopbackHub, store: HubStore
) -> None:
    store.delete([manifest_key(9)])
    assert hub.counts["resolve"] == 0, "looked though it was told"
    hub.faults.add("batch", "refuse", n=1)
    store.delete([manifest_key(9)])


@pytest.mark.parametrize("kind", ["lose_answer", "half"])
def test_a_lost_answer_is_an_error_and_the_write_may_stand(
    hub: LoopbackHub, store: HubStore, kind: Any
) -> None:
    hub.faults.add("batch", kind)
    with pytest.raises(ChannelError):
        store.put(HEAD_KEY, b"x")
    assert store.get(HEAD_KEY, max_bytes=1) == (b"x" if kind == "lose_answer" else None)


def test_nothing_is_visible_when_the_upload_fails(hub: LoopbackHub, store: HubStore) -> None:
    hub.faults.add("cas", "status", status=500, times=None)
    start_s = time.monotonic()
    with pytest.raises(ChannelError, match="Xet"):
        store.put(BLOB, os.urandom(1000))
    assert time.monotonic() - start_s < 15
    assert hub.counts["batch"] == 0


def test_our_requests_are_those_of_the_hubs_own_client(hub: LoopbackHub, bucket: str) -> None:
    # Our own, since that client tries six times, has no timeout, and shows progress bars. When
    # the protocol changes this is where it is seen.
    import huggingface_hub as hh
    from huggingface_hub.utils import disable_progress_bars

    sent: dict[str, list[Any]] = {}
    disable_progress_bars()
    session = hh.utils.get_session()

    def note(request: Any) -> None:
        lines = [json.loads(line) for line in request.read().splitlines()]
        for line in lines:
            line["mtime"] = type(line.get("mtime"))
        kind = request.headers.get("content-type")
        sent.setdefault(name, []).append((request.method, request.url.path, kind, lines))

    session.event_hooks["request"].append(note)
    try:
        name = "theirs"
        api = hh.HfApi(endpoint=hub.endpoint, token=hub.token)
        api.batch_bucket_files(bucket, add=[(b"data", "run/head")])
        name = "theirs, small"
        api.get_bucket_file_metadata(bucket, "run/head")
        name = "ours"
        store = opened(hub, bucket)
        store.put(HEAD_KEY, b"data")
        name = "ours, small"
        store._find(HEAD_KEY)
    finally:
        session.event_hooks["request"].remove(note)
    assert sent["ours"][-1] == sent["theirs"][-1]
    assert sent["ours, small"] == sent["theirs, small"]
    # They have Xet fetch its token, we keep it.
    assert [path for _, path, _, _ in sent["ours"][:-1]] == [
        f"/api/buckets/{bucket}/xet-write-token"
    ]


def test_a_large_blob_comes_through_xet_and_a_small_one_by_one_plain_request(
    hub: LoopbackHub, store: HubStore
) -> None:
    large, small = os.urandom(LARGE), os.urandom(LARGE - 1)
    keys = [blob_key(hashlib.sha256(data).hexdigest()) for data in (large, small)]
    store.put_many(dict(zip(keys, (large, small), strict=True)))
    for _ in range(2):
        hub.reset_counts()
        assert streamed(store, keys[0], len(large)) == large
        assert streamed(store, keys[1], len(small)) == small
    assert (hub.counts["resolve:HEAD"], hub.counts["resolve:GET"], hub.counts["cas"]) == (1, 1, 2)
    assert hub.counts["api"] == 0, "the token was not kept"


@pytest.mark.parametrize("n_bytes", [0, 1, LARGE - 1, LARGE, 3 << 20])
def test_a_stream_begins_where_it_is_told(store: HubStore, n_bytes: int) -> None:
    data = os.urandom(n_bytes)
    store.put(BLOB, data)
    for start in {0, 1, n_bytes // 2, n_bytes - 1, n_bytes, n_bytes + 1} - {-1}:
        assert streamed(store, BLOB, max(n_bytes, LARGE), start) == data[start:], start
        assert streamed(store, BLOB, n_bytes, start) == data[start:], start
    assert store.stream(blob_key("cd" * 32), max_bytes=LARGE) is None
    if n_bytes:
        with pytest.raises(DigestError, match="too large"):
            store.stream(BLOB, max_bytes=n_bytes - 1)


def test_a_token_that_soon_expires_is_renewed_before_every_use(bucket: str) -> None:
    with LoopbackHub(token_life_s=2) as hub:
        hub.create_bucket(bucket)
        store, data = opened(hub, bucket), os.urandom(LARGE)
        for _ in range(3):
            store.put(BLOB, data)
            assert streamed(store, BLOB, LARGE) == data
        assert hub.counts["xet-read-token"] >= 3
        assert hub.counts["xet-write-token"] >= 3
        hub.faults.add("xet-read-token", "status", status=429, retry_after_s=7)
        with pytest.raises(RateLimitError) as caught:
            streamed(store, BLOB, LARGE)
        assert caught.value.retry_after_s == 7


def test_a_token_that_is_refused_is_renewed_once(hub: LoopbackHub, store: HubStore) -> None:
    data = os.urandom(LARGE)
    store.put(BLOB, data)
    assert streamed(store, BLOB, LARGE) == data
    hub.expire_tokens()
    assert streamed(store, BLOB, LARGE) == data
    store.put(BLOB, data[::-1])
    assert streamed(store, BLOB, LARGE) == data[::-1]
    hub.expire_tokens()
    hub.faults.add("xet-read-token", "expired", times=None)
    hub.faults.add("xet-write-token", "expired", times=None)
    before = hub.counts
    with pytest.raises((AuthError, ChannelError)):  # which one, hf_xet leaves to chance
        streamed(store, BLOB, LARGE)
    with pytest.raises(AuthError):
        store.put(BLOB, data)
    asked = hub.counts - before
    assert asked["xet-read-token"] == asked["xet-write-token"] == 1


@pytest.mark.parametrize(
    ("where", "kind"),
    [("xorb", "corrupt"), ("xorb", "truncate"), ("xorb", "cut"), ("xorb", "status"),
     ("xorb", "drop"), ("reconstruct", "status"), ("reconstruct", "drop")],
)  # fmt: skip
def test_damage_in_xet_is_noticed_in_bounded_time(
    hub: LoopbackHub, store: HubStore, where: str, kind: Any
) -> None:
    log, data = Log(store), os.urandom(LARGE)
    log.claim("trainer")
    schema, blob = log.put_schema(b"schema"), log.put_blob(data)
    record = log.append("anchor", target=Version(0, "0" * 64), blobs=[blob], schema=schema)
    hub.faults.add(where, kind, n=1000, status=500, times=None)
    reader, start_s = LogReader(opened(hub, store._bucket)), time.monotonic()
    with pytest.raises((ChannelError, DigestError)):
        reader.get_blob(record.manifest, 0)
    assert time.monotonic() - start_s < 15
    hub.faults.clear()
    assert reader.get_blob(record.manifest, 0) == data


def test_content_that_xet_has_lost_is_an_error_and_never_the_end_of_a_blob(
    hub: LoopbackHub, store: HubStore
) -> None:
    # hf_xet 1.8 ends the stream without an error in about one of three cases.
    store.put(BLOB, os.urandom(LARGE))
    hub.faults.add("reconstruct", "status", status=404, times=None)
    errors = []
    for _ in range(30):
        with pytest.raises((ChannelError, DigestError)) as caught:
            streamed(store, BLOB, LARGE)
        errors.append(caught.value)
    assert any(isinstance(error, DigestError) for error in errors)


def test_many_threads_share_a_store(store: HubStore) -> None:
    def work(number: int) -> bool:
        key, data = blob_key(f"{number:064x}"), os.urandom(LARGE + number)
        store.put(key, data)
        return streamed(store, key, len(data)) == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_a_child_of_a_fork_makes_connections_of_its_own(hub: LoopbackHub, bucket: str) -> None:
    script = (
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from vllm_delta.channel.hub import HubStore\n"
        f"store = HubStore({bucket!r}, endpoint={hub.endpoint!r}, token={hub.token!r})\n"
        f"data = os.urandom({LARGE})\n"
        f"store.put({BLOB!r}, data)\n"
        f"assert store.get({BLOB!r}, max_bytes={LARGE}) == data\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    store.put({BLOB!r}, data[::-1])\n"
        f"    os._exit(0 if store.get({BLOB!r}, max_bytes={LARGE}) == data[::-1] else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.parametrize("is_on", [False, True])
def test_telemetry_of_xet_stays_as_its_user_set_it(
    hub: LoopbackHub, store: HubStore, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DO_NOT_TRACK")
    monkeypatch.setenv("HF_XET_TELEMETRY_ENABLED", str(int(is_on)))
    monkeypatch.setattr(hub_xet, "_sessions", {})
    store.put(BLOB, os.urandom(LARGE))
    assert bool(hub.counts["telemetry"]) is is_on
    assert os.environ["HF_XET_TELEMETRY_ENABLED"] == str(int(is_on))
    assert "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS" not in os.environ
