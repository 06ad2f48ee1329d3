"""The S3 server of the tests: whom it talks to, and that it does not outlive them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_delta.errors import SettingsError
from vllm_delta.testing.seaweed import Seaweed


@pytest.mark.parametrize("end", ["its input ends", "it is killed"])
def test_the_server_ends_with_who_started_it(end: str) -> None:
    command = [sys.executable, "-m", "vllm_delta.testing.seaweed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        environment = json.loads(starter.stdout.readline())
        host, port = environment["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
        socket.create_connection((host, int(port))).close()
        if end == "it is killed":
            starter.kill()
    deadline = time.monotonic() + 30
    while answers(host, int(port)):
        assert time.monotonic() < deadline, "it is still there"


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except OSError:
        return False
    return True


def test_the_server_leaves_nothing_behind() -> None:
    with Seaweed() as server:
        folder, ports = server._folder, server._ports
        assert (folder / "s3.json").exists()
    assert not folder.exists()
    left = {path.name for path in Path("/tmp").glob("seaweedfs-*.sock")}
    assert not {name for name in left for port in ports.values() if f"-{port}." in name}


def test_the_server_listens_on_loopback_only(seaweed: Seaweed) -> None:
    assert seaweed._guard is not None
    guard = seaweed._guard.pid
    (server,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    links = {os.readlink(entry) for entry in Path(f"/proc/{server}/fd").iterdir()}
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{server}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in links:
                places.append((table, local.partition(":")[0]))
    assert len(places) >= 8
    assert set(places) == {("tcp", "0100007F")}


def test_without_its_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", absent)
    with pytest.raises(SettingsError, match=r"vllm-delta\[testing\]"):
        Seaweed()
