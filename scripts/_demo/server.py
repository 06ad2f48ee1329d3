"""Starts `vllm serve` on loopback, waits until it answers, and always stops it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
import torch

MODEL_NAME = "demo"
MAX_CONTEXT = 512

_READY_TIMEOUT_S = 420.0
_STOP_TIMEOUT_S = 20.0
_N_TAIL_LINES = 40
_KV_CACHE_BYTES = 256 << 20


class ServerError(Exception):
    """A server did not start, or ended by itself; the message carries the end of its log."""


class Server:
    """One `vllm serve` process group; a context manager that starts it and always stops it.

    Args:
        name: Names the log file, `<name>.log` in `work_dir`.
        checkpoint: Directory of the model it loads.
        work_dir: Where logs are kept.
        delta: Settings of `vllm_delta`, or None for a server that follows nothing.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Path,
        work_dir: Path,
        *,
        delta: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.log_path = work_dir / f"{name}.log"
        self._began = 0.0
        self._port = _free_port()
        self._command = _command(checkpoint, self._port, delta)
        self._environment = _environment(delta)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._log = self.log_path.open("wb")
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if isinstance(error, Exception) and not isinstance(error, ServerError):
            print(self.log_tail(), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Ends the server and everything it started. Does nothing when it has ended."""
        process, self._process = self._process, None
        if process is not None:
            try:
                _signal_group(process, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def wait_until_ready(self) -> float:
        """Waits until requests are answered; returns the seconds since the start.

        Raises:
            ServerError: it ended, or took too long.
        """
        while time.monotonic() < self._began + _READY_TIMEOUT_S:
            self.check_running()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2.0).is_success:
                    return time.monotonic() - self._began
            time.sleep(0.25)
        raise ServerError(f"the server {self.name!r} was not ready in time\n{self.log_tail()}")

    def check_running(self) -> None:
        """Raises ServerError when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ServerError(f"the server {self.name!r} ended with {code}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Returns the last lines of the log, with its path."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_N_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log_path}", *lines, "---"])


def _command(checkpoint: Path, port: int, delta: Mapping[str, Any] | None) -> list[str]:
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(checkpoint), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT)]
    command += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES), "--max-num-seqs", "64"]
    if torch.cuda.is_available():
        command += ["--gpu-memory-utilization", "0.3"]
    else:
        # Compiling costs a minute per start on two cores; the block size makes prefixes reusable.
        command += ["--enforce-eager", "--block-size", "32"]
    if delta is not None:
        command += ["--worker-extension", "vllm_delta"]
        command += ["--additional-config", json.dumps({"vllm_delta": dict(delta)})]
    return command


def _environment(delta: Mapping[str, Any] | None) -> dict[str, str]:
    # An API key or settings from the caller's environment would change what is demonstrated.
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key != "VLLM_API_KEY" and not key.startswith("VLLM_DELTA_")
    }
    # The checkpoint is here; only a channel may be on the Hub.
    if not str((delta or {}).get("channel")).startswith("hf://"):
        inherited["HF_HUB_OFFLINE"] = "1"
    return inherited | {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The trainer computes at the same time: leave it cores, and never wait busily.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
        "OMP_WAIT_POLICY": "passive",
        # Opens vLLM's own weight checksums, a witness that shares no code with vllm_delta.
        "VLLM_SERVER_DEV_MODE": "1",
    }


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
