from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from huggingface_hub import close_session

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


SECRET = "hf_hidden"


def all_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "endpoint",
    ["http://[::1", "http://h:99999", "http://h:abc", "http://", "/", "htps://h", "http://h\n",
     f"http://me:{SECRET}@h", f"htps://me:{SECRET}@h", f"http://h?key={SECRET}"],
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_refused_and_its_secrets_are_not_repeated(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="HF_ENDPOINT") as caught:
        HubStore("me/b", endpoint=endpoint, token="hf_x")
    assert SECRET not in all_of(caught.value)
    monkeypatch.setenv("HF_S3_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_S3_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("HF_S3_SECRET_ACCESS_KEY", "b")
    store = HubStore("me/b", endpoint="http://127.0.0.1:9", token="hf_x", manifests_by_s3=True)
    with pytest.raises(SettingsError, match="HF_S3_ENDPOINT") as caught:
        store.put_new(manifest_key(1), b"x")
    assert SECRET not in all_of(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", f"nonsense://me:{SECRET}@x"), ("HTTP_PROXY", "http://x:abc"),
     ("SSL_CERT_FILE", "/nonexistent")],
)  # fmt: skip
def test_a_proxy_or_a_certificate_that_cannot_be_used_is_a_settings_error(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.delenv(name.lower(), raising=False)
    close_session()
    try:
        with pytest.raises(SettingsError, match="no HTTP client") as caught:
            asking("http://192.0.2.1").get(HEAD_KEY, max_bytes=1)
    finally:
        close_session()
    assert SECRET not in all_of(caught.value)


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_what_the_client_did_not_foresee_is_a_channel_error(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise kind(f"http://me:{SECRET}@h/x?y")

    with told((200, {}, b"x")) as endpoint:
        store = asking(endpoint)
        monkeypatch.setattr(type(store._hub._utils.get_session()), "stream", breaks)
        with pytest.raises(ChannelError, match="cannot be reached") as caught:
            store.get(HEAD_KEY, max_bytes=1)
    assert SECRET not in all_of(caught.value)


def test_a_token_that_fits_into_no_header_is_an_auth_error_that_does_not_tell_it() -> None:
    for token in (SECRET + "\x0bx", SECRET + "\n", SECRET + "é"):
        with pytest.raises(AuthError) as caught:
            HubStore("me/b", endpoint="http://127.0.0.1:9", token=token).get(HEAD_KEY, max_bytes=1)
        assert SECRET not in all_of(caught.value)


def test_what_a_hub_says_is_shown_without_the_token_that_it_echoes() -> None:
    for said in ("hf_secret is no token", "got 'Authorization: Bearer hf_secret'"):
        body = json.dumps({"error": said}).encode()
        with told((403, {"X-Error-Message": said}, b""), (500, {}, body)) as endpoint:
            for kind in (AuthError, ChannelError):
                with pytest.raises(kind) as caught:
                    asking(endpoint).get(HEAD_KEY, max_bytes=1)
                assert "hf_secret" not in all_of(caught.value)
                assert "***" in str(caught.value)


def test_texts_are_shown_without_what_lets_one_in() -> None:
    for text in (
        f"b'Bearer {SECRET}'", f"authorization: bearer  {SECRET} x", f"http://me:{SECRET}@h/x",
        f"me:{SECRET}@h", f"http://me:a/{SECRET}@h", f"http://me:a?{SECRET}@h", f"http://h/?a={SECRET}",
        "hf_" + "hidden" * 6,
    ):  # fmt: skip
        assert "hidden" not in hub_client.plain(text), text
    told = "error sending request for url (http://h:80/x) of hf_xet"
    assert hub_client.plain(told) == told


@pytest.mark.parametrize("exp", [-5, 0, 1e12, 1e300, float("nan"), "x", None])
def test_a_token_for_xet_with_no_sensible_end_is_a_channel_error(exp: object) -> None:
    answer = json.dumps({"casUrl": "http://127.0.0.1:9", "accessToken": "x", "exp": exp}).encode()
    with told((200, {}, answer)) as endpoint, pytest.raises(ChannelError, match="no Xet token"):
        asking(endpoint).put(HEAD_KEY, b"x")


def test_a_client_that_cannot_make_its_headers_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = asking("http://127.0.0.1:9")
    for kind, typed in [
        (AttributeError, SettingsError), (PermissionError, SettingsError), (OSError, ChannelError),
    ]:  # fmt: skip

        def breaks(kind: type[Exception] = kind, **_: object) -> None:
            raise kind("'list' object has no attribute 'get'")

        monkeypatch.setattr(store._hub._utils, "build_hf_headers", breaks)
        with pytest.raises(typed, match="no attribute 'get'"):
            store.get(HEAD_KEY, max_bytes=1)


def test_an_endpoint_that_keeps_the_hubs_client_from_being_imported_is_a_settings_error() -> None:
    script = (
        "from vllm_delta.channel.hub import HubStore\n"
        "from vllm_delta.errors import SettingsError\n"
        "try: HubStore.open('hf://buckets/me/b')\n"
        "except SettingsError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://[::1"}
    said = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=60, check=True
    )
    assert b"HF_ENDPOINT is not an http address" in said.stdout


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_listing_that_goes_around_in_a_circle_is_a_channel_error_at_once(n: int) -> None:
    def page(i: int) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Link": f'</api/buckets/me/b/tree?cursor={i % n}>; rel="next"'}, b"[]"

    circle = pytest.raises(ChannelError, match="circle")
    with (hub := told(*map(page, range(20)))) as endpoint, circle:
        asking(endpoint).list("")
    assert len(hub.asked) == n + 1
