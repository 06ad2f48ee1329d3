"""Settings and processes that obstore does not get along with."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import traceback

import pytest

from tests.channel.toy import ROOT
from vllm_delta.channel import RetryPolicy, open_channel
from vllm_delta.errors import SettingsError
from vllm_delta.format import blob_key

BLOB = blob_key("ab" * 32)


@pytest.fixture(autouse=True)
def somewhere(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that suffice to open an address of each cloud. Nobody listens there."""
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:8333",
        "nonsense",
        "http://[::1",
        "ftp://host",
        "https://",
        "http://host:99999",
        "http://host:abc",
        "http://host\n",
        "http://host/?key=PaSsWoRd",
    ],
)
@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL"),
        ("gs://bucket", "GOOGLE_BASE_URL"),
        ("az://container", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_what_is_no_endpoint_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str, endpoint: str
) -> None:
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(SettingsError, match=variable) as caught:
        open_channel(url)
    assert "PaSsWoRd" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket", "AWS_SESSION_TOKEN"),
        ("s3://bucket", "AWS_REGION"),
        ("az://container", "AZURE_STORAGE_TOKEN"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_a_line_break_in_a_setting_is_a_setting(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str, many: bool
) -> None:
    """obstore panics, which is no `Exception`, in whichever thread."""
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "PaSsWoRd",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/account",
        variable: "PaSsWoRd\n",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    store = open_channel(url, policy=RetryPolicy(deadline_s=0))
    with pytest.raises(SettingsError, match="settings do not work") as caught:
        store.put_many({BLOB: b"", "head": b""}) if many else store.get(BLOB, max_bytes=1)
    assert "PaSsWoRd" not in "".join(traceback.format_exception(caught.value))


def test_who_has_no_home_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "~nobody-of-this-name/x")
    open_channel("s3://bucket")
    monkeypatch.delenv("AWS_CONFIG_FILE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", dict[int, pwd.struct_passwd]().__getitem__)
    open_channel("s3://bucket")


FORKS = """
import os, signal, sys, time
from vllm_delta.channel import ObjectStore
from vllm_delta.errors import DeltaError

def ask(store):
    try:
        store.get("head", max_bytes=1)
    except DeltaError as error:
        return type(error).__name__

store = ObjectStore("s3://bucket")
if sys.argv[1] == "used":
    ask(store)
child = os.fork()
if not child:
    print(ask(store), ask(ObjectStore("s3://bucket")), flush=True)
    os._exit(0)
until = time.monotonic() + 20
while not os.waitpid(child, os.WNOHANG)[0]:
    if time.monotonic() > until:
        os.kill(child, signal.SIGKILL)
        sys.exit("the child hangs")
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("parent", "said"),
    [("used", "SettingsError SettingsError"), ("opened", "ChannelError ChannelError")],
)
def test_a_fork_of_who_asked_a_store_is_refused_and_hangs_nowhere(
    monkeypatch: pytest.MonkeyPatch, parent: str, said: str
) -> None:
    """A fork of who only opened one is not."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, parent],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
