"""Opening a channel by its address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.channel.toy import ROOT
from tests.channel.wire import Wire
from tests.nets import BF16, Net, assert_same, expected, nudge, read
from vllm_delta.channel import (
    LocalStore,
    ObjectStore,
    RetryingStore,
    RetryPolicy,
    open_channel,
)
from vllm_delta.channel.object_clients import bucket_region, connect, parse_address
from vllm_delta.errors import AuthError, ChannelError, NotFoundError, RateLimitError, SettingsError
from vllm_delta.format import blob_key, manifest_key
from vllm_delta.publisher import Publisher
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing.seaweed import Seaweed

BLOB = blob_key("ab" * 32)


# Directories.


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_a_channel_opens_by_path_and_by_file_url(tmp_path: Path, form: str) -> None:
    place = tmp_path / "a channel"
    LocalStore(place).put("head", b"x")
    url = form.format(str(place).replace(" ", "%20") if "://" in form else place)
    store = open_channel(url)
    assert store.get("head", max_bytes=1) == b"x"
    assert open_channel(store.url).get("head", max_bytes=1) == b"x"
    assert open_channel(place).url == store.url


@pytest.mark.parametrize("name", [b"\xff\xfe", b"%41", b"a#b?c", b"x\ny", b" ", "é".encode()])
def test_the_url_of_any_directory_opens_it_again(tmp_path: Path, name: bytes) -> None:
    store = LocalStore(tmp_path / os.fsdecode(name))
    store.put("head", b"x")
    assert open_channel(store.url).get("head", max_bytes=1) == b"x"


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(SettingsError, match="~nobody-of-this-name"):
        open_channel("~nobody-of-this-name/x")


def test_a_relative_path_means_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_channel("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("head", b"x")
    assert (tmp_path / "here/head").exists()


@pytest.mark.parametrize(
    "url",
    ["https://x/y", "ftp://x/y", "file://host/x", "file:///x?y=1", "",
     "file:///x#y", "a\0b", "file:///a%00b"],
)  # fmt: skip
def test_other_addresses_are_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(SettingsError, match=r"supported=.*file://"):
        open_channel(url)


def test_a_file_is_no_channel(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match="plain directory"):
        open_channel(tmp_path / "file")


# Buckets.


@pytest.fixture
def somewhere(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that suffice to open an address of each cloud. Nobody listens there."""
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/a",
        "gs://bucket_1/a/b/c",
        "az://container/Run-1.2_(x)=@,;:+$&'!",
        "s3://my.bucket.with.dots/" + "/".join("abcdefgh"),
    ],
)
def test_the_url_of_a_bucket_opens_it_again(somewhere: None, url: str) -> None:
    for form in (url, url + "/", url.replace(url[:2], url[:2].upper(), 1)):
        store = open_channel(form)
        assert isinstance(store, RetryingStore)
        assert isinstance(store.store, ObjectStore)
        assert store.url == url
        assert open_channel(store.url).url == url
        assert store.atomic is True


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///", "s3:///a", "s3:/bucket", "s3://a", "s3://.b", "s3://-b/x", "s3://b b/x",
        "s3://bucket//x", "s3://bucket/x//y", "s3://bucket/x//", "s3://bucket//", "s3://bucket/./x",
        "s3://bucket/..", "s3://bucket/x/../y", "s3://bucket/x?y=1", "s3://bucket/x#y",
        "s3://bucket?y", "s3://bucket#y", "s3://bucket/a%2Fb", "s3://bucket/a b", "s3://bucket/a*",
        "s3://bucket/ä", "s3://bücket/a", "s3://bucket/a\0b", "s3://bucket/a\n", "s3://bucket/a\\b",
        "s3://bucket:99/x", "s3://bucket/" + "x" * 600, "gs://", "az://", "abfs://container/x",
        "https://bucket.s3.amazonaws.com/x", "s3a://bucket/x",
    ],
)  # fmt: skip
def test_a_bad_address_is_refused_with_what_is_supported(somewhere: None, url: str) -> None:
    with pytest.raises(SettingsError, match=r"supported=.*az://container/prefix"):
        open_channel(url)


@pytest.mark.parametrize(
    "url",
    ["s3://me:PaSsWoRd@bucket/x", "s3://PaSsWoRd@bucket", "s3://bucket/x?sig=PaSsWoRd",
     "az://container/x?sv=1&sig=PaSsWoRd#PaSsWoRd", "s3://bucket#PaSsWoRd", "gs://b@PaSsWoRd@b/x",
     "s3://bucket/x/?PaSsWoRd/y", "https://me:PaSsWoRd@host/x", "https://host/x?sig=PaSsWoRd"],
)  # fmt: skip
def test_a_secret_in_an_address_is_refused_and_not_repeated(somewhere: None, url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_channel(url)
    assert "PaSsWoRd" not in f"{caught.value} {caught.value.facts} {caught.value.__cause__}"
    if not url.startswith("https"):
        assert ("credentials do not" if "@" in url else "no query") in caught.value.message


def test_a_policy_of_the_callers_is_the_one_that_holds(somewhere: None) -> None:
    policy = RetryPolicy(deadline_s=1)
    store = open_channel("s3://bucket", policy=policy)
    assert isinstance(store, RetryingStore)
    assert store.policy is policy
    assert isinstance(open_channel("/tmp", policy=policy), LocalStore)


def test_without_obstore_it_is_said_what_to_install(
    somewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(SettingsError, match=r"obstore.*pip install"):
        open_channel("s3://bucket")


def test_a_channel_in_a_directory_loads_no_clients_of_other_stores() -> None:
    code = (
        "import sys; from vllm_delta.channel import open_channel; open_channel('/tmp');"
        "print([m for m in ('obstore','huggingface_hub','hf_xet','boto3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_what_is_published_to_a_bucket_is_read_from_it(s3_bucket: str) -> None:
    url, net = f"s3://{s3_bucket}/runs/7", Net()
    versions = [expected(net)]
    with Publisher(url, net, dtype=BF16) as publisher:
        for _ in range(3):
            nudge(net)
            publisher.publish()
            versions.append(expected(net))
    subscriber = Subscriber(url)
    subscriber.refresh()
    assert subscriber.newest == publisher.version
    for number, wanted in enumerate(versions):
        assert_same(read(open_channel(url), number), wanted)


def test_a_version_costs_no_more_requests_than_it_did(
    s3_bucket: str, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores charge by the request, and limit them."""
    with Wire(seaweed.endpoint) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        url, net = f"s3://{s3_bucket}/x", Net()
        with Publisher(url, net, dtype=BF16) as publisher:
            subscriber = Subscriber(url)
            subscriber.refresh()
            assert subscriber.schema == publisher.schema
            nudge(net)
            publisher.publish()  # the first one also looks for what others left
            subscriber.refresh()
            nudge(net)
            wire.count()
            publisher.publish()
            wrote = kinds(wire)
            (manifest,) = subscriber.refresh()
            assert kinds(wire) == {"GET m": 2}
            assert len(list(subscriber.changes(manifest))) > 0
            assert kinds(wire) == {"GET b": len(manifest.blobs)}
            assert wrote == {"PUT b": len(manifest.blobs), "GET m": 2, "PUT m": 1, "PUT head": 1}
            subscriber.refresh()
            assert kinds(wire) == {"GET m": 1, "GET head": 1}, "nothing new"


def kinds(wire: Wire) -> dict[str, int]:
    """How many requests of each kind there were since the last call."""
    asked = (line.split("/x/") for line in wire.count())
    return dict(Counter(f"{how.split()[0]} {key.split('/')[0]}" for how, key in asked))


# Where clients go, and as whom.


def test_plain_http_is_spoken_only_where_the_environment_says_so(
    somewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url, variable in (
        ("s3://bucket", "AWS_ENDPOINT_URL"),
        ("s3://bucket", "AWS_ENDPOINT_URL_S3"),
        ("gs://bucket", "GOOGLE_BASE_URL"),
        ("az://container", "AZURE_STORAGE_ENDPOINT"),
    ):
        for endpoint, allowed in ((None, False), ("https://x", False), ("http://x", True)):
            with monkeypatch.context() as patch:
                if endpoint is not None:
                    patch.setenv(variable, endpoint)
                options = connect(parse_address(url)).client_options
            assert options is not None
            assert (options.get("allow_http") == "true") is allowed, (variable, endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://x")
    options = connect(parse_address("s3://bucket")).client_options
    assert options is not None
    assert options.get("allow_http") == "false", "the more special variable is the one that holds"


def test_an_endpoint_with_a_password_is_refused(
    somewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:PaSsWoRd@host")
    with pytest.raises(SettingsError) as caught:
        open_channel("s3://bucket")
    assert "PaSsWoRd" not in str(caught.value)


# Not of gs: where Google's machines are asked for credentials cannot be set.
@pytest.mark.parametrize("url", ["s3://bucket/x", "az://container/x"])
def test_no_credentials_at_all_is_a_setting_and_no_outage(
    somewhere: None, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(AuthError, match="no credentials"):
        ObjectStore(url).get(BLOB, max_bytes=1)


def test_a_machine_gives_credentials_and_when_it_fails_later_that_may_pass(
    somewhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token-for-us")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    given = {"AccessKeyId": "GIVEN", "SecretAccessKey": "s", "Token": "t"}
    # So close to its end that it is asked for anew each time.
    soon = datetime.now(UTC) + timedelta(seconds=60)
    with Wire() as machine, Wire() as server:
        server.always = (404, "NoSuchKey")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{machine.endpoint}/give")
        store = ObjectStore("s3://bucket")
        machine.always = (500, "")
        with pytest.raises(AuthError, match="no credentials"):
            store.get(BLOB, max_bytes=1)
        machine.always = (200, "")
        machine.content = json.dumps(given | {"Expiration": f"{soon:%Y-%m-%dT%H:%M:%SZ}"}).encode()
        assert store.get(BLOB, max_bytes=1) is None
        assert "Credential=GIVEN/" in server.seen[-1].headers["authorization"]
        assert machine.seen[-1].headers["authorization"] == "token-for-us"
        for status, kind in ((500, ChannelError), (403, AuthError)):
            machine.always, machine.content = (status, ""), None
            with pytest.raises(kind, match=f"cause='{status}'"):
                ask_often(store)


def ask_often(store: ObjectStore) -> None:
    """Ask until credentials are asked for, which are kept for a tenth of a second."""
    for _ in range(10_000):
        store.get(BLOB, max_bytes=1)


def test_an_azure_account_must_be_named(no_cloud: None) -> None:
    with pytest.raises(SettingsError, match="Account must be specified"):
        open_channel("az://container")


def test_a_profile_needs_boto3(somewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "research")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"boto3.*research"):
        open_channel("s3://bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "keys outweigh a profile")
    open_channel("s3://bucket")


@pytest.mark.parametrize(
    ("status", "headers", "region"),
    [
        (200, {"x-amz-bucket-region": "eu-north-1"}, "eu-north-1"),
        (301, {"x-amz-bucket-region": "eu-north-1"}, "eu-north-1"),
        (403, {"x-amz-bucket-region": "us-east-1"}, "us-east-1"),
        (404, {}, None),
        (200, {"x-amz-bucket-region": "x/../y"}, None),
    ],
)
def test_aws_is_asked_for_the_region_of_a_bucket(
    status: int, headers: dict[str, str], region: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Wire() as wire:
        wire.always, wire.more_headers = (status, ""), headers
        assert bucket_region("bucket", asked=wire.endpoint) == region
        assert wire.count() == ["HEAD /bucket"]
    assert bucket_region("bucket", asked=wire.endpoint) is None


def test_the_region_is_asked_for_only_where_nothing_names_it(
    no_cloud: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "vllm_delta.channel.object_clients.bucket_region",
        lambda bucket: asked.append(bucket) or "eu-north-1",  # type: ignore[func-returns-value]
    )
    client = connect(parse_address("s3://bucket"))
    assert asked == ["bucket"]
    assert client.config.get("region") == "eu-north-1"
    for name, value in {"AWS_REGION": "x-1", "AWS_DEFAULT_REGION": "x-1",
                        "AWS_ENDPOINT_URL": "https://x"}.items():  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            connect(parse_address("s3://bucket"))
    assert asked == ["bucket"]


# The clouds that no server here stands in for: only the shape of what is asked is checked.


@pytest.fixture
def recorder(somewhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    with Wire() as wire:
        key = {"gcs_base_url": wire.endpoint, "disable_oauth": True, "client_email": "",
               "private_key": "", "private_key_id": ""}  # fmt: skip
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        monkeypatch.setenv("GOOGLE_BASE_URL", wire.endpoint)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{wire.endpoint}/account")
        monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2020&sig=PaSsWoRd")
        yield wire


def test_google_is_asked_in_its_own_words(recorder: Wire) -> None:
    store = ObjectStore("gs://bucket/run")
    assert store.get(BLOB, max_bytes=1) is None
    assert recorder.count() == [f"GET /bucket/run%2Fb%2F{BLOB[2:]}"]
    recorder.always = (412, "PreconditionFailed")
    assert store._create(manifest_key(1), b"x") is False
    (asked,) = recorder.seen
    assert (asked.method, asked.path) == ("PUT", "/bucket/run%2Fm%2F000000000001")
    assert asked.headers["x-goog-if-generation-match"] == "0"
    recorder.count()
    recorder.always = (404, "NoSuchKey")
    store.delete([BLOB, manifest_key(1)])
    assert sorted(recorder.count()) == [
        f"DELETE /bucket/run%2Fb%2F{BLOB[2:]}",
        "DELETE /bucket/run%2Fm%2F000000000001",
    ]
    recorder.always = (404, "NoSuchBucket")
    with pytest.raises(NotFoundError):
        store.get(BLOB, max_bytes=1)


def test_azure_is_asked_in_its_own_words_and_its_signature_is_in_no_error(recorder: Wire) -> None:
    store = ObjectStore("az://container/run")
    assert store.get(BLOB, max_bytes=1) is None
    assert recorder.count() == [f"GET /account/container/run/{BLOB}?sv"]
    recorder.always = (409, "BlobAlreadyExists")
    assert store._create(manifest_key(1), b"x") is False
    (asked,) = recorder.seen
    assert asked.path.startswith("/account/container/run/m/000000000001?")
    assert (asked.method, asked.headers["if-none-match"]) == ("PUT", "*")
    assert asked.headers["x-ms-blob-type"] == "BlockBlob"
    recorder.count()
    for answer, kind in {
        (404, "ContainerNotFound"): NotFoundError,
        (403, "AuthenticationFailed"): AuthError,
        (503, "ServerBusy"): RateLimitError,
    }.items():
        recorder.always = answer
        with pytest.raises(kind) as caught:
            store.get(BLOB, max_bytes=1)
        error: BaseException | None = caught.value
        while error is not None:
            assert "PaSsWoRd" not in f"{error!r} {error}"
            error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "url",
    [
        "/" + "a/" * 40_000,
        "s3:bucket/x",
        "HF:buckets/a/b",
        "file:x",
        "file:///srv/a\tb",
        "s3://bucket/a\nb",
        "~\ud800",
    ],
)
def test_a_slip_in_an_address_is_told_and_not_taken_for_a_directory(url: str) -> None:
    with pytest.raises(SettingsError, match=r"address|home"):
        open_channel(url)
