from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tests.channel.hubs import BLOB, LARGE, asking, opened, told
from vllm_delta.channel import hub_client
from vllm_delta.channel.hub import HubStore
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
from vllm_delta.format import HEAD_KEY, manifest_key
from vllm_delta.testing.hub import LoopbackHub

IN_A_DAY = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)

pytestmark = pytest.mark.usefixtures("online")


def test_each_refusal_is_an_error_of_its_kind(hub: LoopbackHub, store: HubStore) -> None:
    for status, kind in [
        (401, AuthError), (403, AuthError), (429, RateLimitError), (413, ChannelFullError),
        (507, ChannelFullError), (500, ChannelError), (503, ChannelError), (418, SettingsError),
    ]:  # fmt: skip
        for route, call in (
            ("resolve", lambda: store.get(HEAD_KEY, max_bytes=1)),
            ("resolve", lambda: store.stream(BLOB, max_bytes=LARGE)),
            ("batch", lambda: store.put(HEAD_KEY, b"x")),
            ("batch", lambda: store.delete([HEAD_KEY])),
            ("tree", lambda: store.list("")),
        ):
            hub.faults.add(route, "status", status=status)
            with pytest.raises(DeltaError) as caught:
                call()
            assert type(caught.value) is kind, (status, route, caught.value)
            assert hub.token not in str(caught.value)
    assert len(hub.faults.suffered) == 40, "something was tried again"


def test_a_token_for_xet_that_is_not_given_is_an_error_of_its_kind(
    hub: LoopbackHub, store: HubStore
) -> None:
    for status, kind in [(401, AuthError), (429, RateLimitError), (500, ChannelError)]:
        hub.faults.add("xet-write-token", "status", status=status)
        with pytest.raises(DeltaError) as caught:
            store.put(HEAD_KEY, b"x")
        assert type(caught.value) is kind


def test_a_missing_bucket_is_not_an_empty_channel(hub: LoopbackHub) -> None:
    store = opened(hub, "me/nobody-made-it")
    for call in (
        lambda: store.get(HEAD_KEY, max_bytes=1), lambda: store.stream(BLOB, max_bytes=LARGE),
        lambda: store.put(HEAD_KEY, b"x"), lambda: store.delete([HEAD_KEY]),
        lambda: store.list(""), lambda: store.put_new(manifest_key(1), b"x"),
    ):  # fmt: skip
        with pytest.raises(NotFoundError, match="me/nobody-made-it"):
            call()


def test_a_404_that_does_not_say_of_what_is_looked_into(hub: LoopbackHub, bucket: str) -> None:
    nobodys, store = opened(hub, "me/nobody-made-it"), opened(hub, bucket)
    hub.faults.add("resolve", "status", status=404, times=None)
    with pytest.raises(NotFoundError):
        nobodys.get(HEAD_KEY, max_bytes=1)
    for _ in range(3):
        assert store.get(HEAD_KEY, max_bytes=1) is None
    assert hub.counts["info"] == 2, "asked more than once"


def test_a_token_that_may_only_read_cannot_write(hub: LoopbackHub, store: HubStore) -> None:
    store.put(HEAD_KEY, b"x")
    reader = opened(hub, store._bucket, token=hub.read_token)
    assert reader.get(HEAD_KEY, max_bytes=1) == b"x"
    with pytest.raises(AuthError):
        reader.put(HEAD_KEY, b"y")
    with pytest.raises(AuthError):
        reader.delete([HEAD_KEY])
    assert store.get(HEAD_KEY, max_bytes=1) == b"x"


def test_a_hub_that_is_not_there_is_a_channel_error_soon(unused_port: int) -> None:
    store = HubStore("me/b", endpoint=f"http://127.0.0.1:{unused_port}", token="hf_x")
    start_s = time.monotonic()
    for call in (lambda: store.get(HEAD_KEY, max_bytes=1), lambda: store.put(HEAD_KEY, b"x")):
        with pytest.raises(ChannelError):
            call()
    assert time.monotonic() - start_s < 5


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("route", ["resolve", "batch", "tree"])
def test_a_connection_that_breaks_is_a_channel_error_after_one_try(
    hub: LoopbackHub, store: HubStore, route: str
) -> None:
    store.put(HEAD_KEY, b"x")
    hub.faults.add(route, "drop", times=None)
    before = hub.counts[route]
    with pytest.raises(ChannelError):
        {
            "resolve": lambda: store.get(HEAD_KEY, max_bytes=1),
            "batch": lambda: store.put(HEAD_KEY, b"y"),
            "tree": lambda: store.list(""),
        }[route]()
    assert hub.counts[route] == before + 1


def test_a_body_that_breaks_off_is_a_channel_error(hub: LoopbackHub, store: HubStore) -> None:
    store.put(HEAD_KEY, bytes(1000))
    hub.faults.add("resolve", "cut", n=10)
    with pytest.raises(ChannelError, match="cannot be reached"):
        store.get(HEAD_KEY, max_bytes=1000)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"x";q=9;w=300'}, 55.0),
        ({"Retry-After": "3", "RateLimit": '"api";r=0;t=55'}, 3.0),
        ({"RateLimit": '"api";r=5;t=55'}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Mon, 01 Jan 1990 00:00:00 GMT"}, 0.0),
        ({"Retry-After": IN_A_DAY}, 86_400.0),
        ({}, None),
    ],
)  # fmt: skip
def test_how_long_to_wait_is_taken_from_either_header(
    headers: dict[str, str], wait_s: float | None
) -> None:
    with told((429, headers, b"{}")) as endpoint:
        with pytest.raises(RateLimitError) as caught:
            asking(endpoint).get(HEAD_KEY, max_bytes=1)
        found = caught.value.facts.get("retry_after_s")
        assert found == wait_s if wait_s in (None, 0.0) else abs(found - wait_s) < 120


@pytest.mark.parametrize("told_in", ["Content-Length", "X-Linked-Size", "nothing"])
def test_an_object_that_is_too_large_is_refused_before_it_is_read(told_in: str) -> None:
    n_bytes = 10 if told_in == "nothing" else 1 << 40
    headers = {} if told_in == "nothing" else {told_in: str(n_bytes)}
    refused = pytest.raises(DigestError, match="too large")
    body = bytes(10 if told_in == "nothing" else 5)
    with told((200, headers, body)) as endpoint, refused:
        asking(endpoint).get(HEAD_KEY, max_bytes=9)


def test_a_compressed_answer_is_refused() -> None:
    refused = pytest.raises(ChannelError, match="compressed")
    with told((200, {"Content-Encoding": "gzip"}, b"x")) as endpoint, refused:
        asking(endpoint).get(HEAD_KEY, max_bytes=9)


def test_a_redirect_to_another_host_goes_without_the_token_and_one_within_the_hub_with_it() -> None:
    with (elsewhere := told((200, {}, b"there"))) as other:
        moved = (307, {"Location": "/buckets/new/name/resolve/head"}, b"")
        away = (302, {"Location": other + "/x?signature=secret"}, b"")
        with (hub := told(moved, away)) as endpoint:
            assert asking(endpoint).get(HEAD_KEY, max_bytes=5) == b"there"
    assert [asked.get("authorization") for asked in hub.asked] == ["Bearer hf_secret"] * 2
    assert "authorization" not in elsewhere.asked[0]
    assert "cookie" not in elsewhere.asked[0]
    assert elsewhere.asked[0]["accept-encoding"] == "identity"


def test_redirects_come_to_an_end_and_errors_hold_no_signature() -> None:
    away = (302, {"Location": "?signature=secret"}, b"")
    with told(*[away] * 10) as endpoint:
        with pytest.raises(ChannelError, match="too often") as caught:
            asking(endpoint).get(HEAD_KEY, max_bytes=5)
        assert "secret" not in str(caught.value)


def test_storage_that_is_full_is_told_apart_from_a_right_that_is_missing() -> None:
    full = json.dumps({"error": "Private storage limit reached, upgrade your plan"}).encode()
    with told((403, {}, full), (403, {}, b"{}")) as endpoint:
        for kind in (ChannelFullError, AuthError):
            with pytest.raises(kind):
                asking(endpoint).get(HEAD_KEY, max_bytes=5)


def test_a_hub_that_says_nothing_is_a_channel_error(
    hub: LoopbackHub, store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "READ_TIMEOUT_S", 0.3)
    calls = {
        "resolve": lambda: store.get(HEAD_KEY, max_bytes=1),
        "batch": lambda: store.put(HEAD_KEY, b"x"),
        "tree": lambda: store.list(""),
        "xet-read-token": lambda: b"".join(store._xet.stream("ab" * 32, 10)),
    }
    for route, call in calls.items():
        hub.faults.add(route, "hold")
        with pytest.raises(ChannelError, match="cannot be reached"):
            call()
        hub.faults.release()


@pytest.mark.parametrize(
    "where",
    [
        "ftp://x/y",
        "http://[",
        "http:///x",
        "http://x:y/",
        "http://xn--/",
        "/" + "x" * 20_000,
        "\x7f:",
    ],
)
def test_a_redirect_to_no_address_is_a_channel_error(where: str) -> None:
    with told((302, {"Location": where}, b""), (302, {}, b"")) as endpoint:
        for _ in range(2):
            with pytest.raises(ChannelError):
                asking(endpoint).get(HEAD_KEY, max_bytes=1)
