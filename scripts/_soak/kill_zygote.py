"""A process that has imported and compiled everything, and forks trainers and readers on request.

So a killed process is followed by another one within milliseconds. It opens no remote store
itself: their clients have threads, which no fork takes along.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_REPOSITORY = Path(__file__).parents[2]
_LONGEST_REQUEST = 1 << 16


class Zygote:
    """The parent's end: starts processes, and says how they ended. Not thread-safe."""

    def __enter__(self) -> Zygote:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            **dict.fromkeys(_THREADS, "1"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_REPOSITORY), *sys.path])),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts._soak.kill_zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        assert self._line.recv(_LONGEST_REQUEST) == b"ready", "the zygote did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()  # it ends, and with it all that it forked
        self._process.wait()

    def start(self, role: str, arguments: dict[str, Any]) -> tuple[int, socket.socket]:
        """Fork a process; its number, and the line that it talks through."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"role": role, "arguments": arguments}).encode()
            socket.send_fds(self._line, [request], [theirs.fileno()])
            return int(self._line.recv(_LONGEST_REQUEST)), ours

    def reap(self, pid: int) -> int:
        """Wait for a process to end; its exit code, or the signal below 0."""
        self._line.send(json.dumps({"reap": pid}).encode())
        return int(self._line.recv(_LONGEST_REQUEST))


def main(number: int) -> None:
    """Serve requests until the line is closed."""
    _die_with_parent()
    from scripts._soak import kill_roles

    line = socket.socket(fileno=number)
    with tempfile.TemporaryDirectory(prefix="vllm-delta-kill-") as folder:
        kill_roles.warm_up(Path(folder))
    line.send(b"ready")
    children: set[int] = set()
    while True:
        data, handles, _, _ = socket.recv_fds(line, _LONGEST_REQUEST, 1)
        if not data:
            break
        request = json.loads(data)
        if "reap" in request:
            children.discard(request["reap"])
            _, status = os.waitpid(request["reap"], 0)
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            _perform(request, socket.socket(fileno=handles[0]), kill_roles.ROLES)
        os.close(handles[0])
        children.add(pid)
        line.send(str(pid).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _perform(request: dict[str, Any], line: socket.socket, roles: dict[str, Any]) -> None:
    """Play a role, and be gone."""
    code = 1
    try:
        _die_with_parent()
        os.environ.update(request["arguments"].pop("environment"))
        roles[request["role"]](line, **request["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001, told to the parent
        told = json.dumps({"failed": traceback.format_exc()[-3000:]}) + "\n"
        line.sendall(told.encode())
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
