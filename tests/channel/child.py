"""Processes that the channel's tests start and kill. First argument: what to be."""

from __future__ import annotations

import os
import resource
import sys

from tests.channel.toy import START, append_anchor, append_delta, moved, replay
from vllm_delta.channel import LocalStore, Log
from vllm_delta.errors import DeltaError
from vllm_delta.format import blob_key, manifest_key

STEPS = ("open", "os.link", "os.rename", "os.remove", "os.mkdir")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def publish(root: str) -> None:
    """Claim the channel and publish until killed; say each record's number once it is committed."""
    log = Log(LocalStore(root))
    before = log.tail()
    weights = None if before is None else replay(log, log.read_from_anchor(before))
    log.claim(f"pid {os.getpid()}")
    if weights is None:
        weights = START
        say(str(append_anchor(log, weights).seq))
    number = 0
    while True:
        number += 1
        if number % 7 == 0:
            record = append_anchor(log, weights)
        else:
            record = append_delta(log, weights, number, number)
            weights = moved(weights, number, number)
        say(str(record.seq))


def race(root: str, name: str, n_rounds: str) -> None:
    """For each line on stdin try to create the next manifest; say whether we did."""
    store = LocalStore(root)
    for seq in range(1, int(n_rounds) + 1):
        sys.stdin.readline()
        say("won" if store.put_new(manifest_key(seq), name.encode()) else "lost")


def crash(root: str, operation: str, step: str) -> None:
    """Do one write and die before its system call number `step`; say so when it got through."""
    store = LocalStore(root)
    left = int(step)

    def die(event: str, _: object) -> None:
        nonlocal left
        if event in STEPS:
            if left == 0:
                os._exit(9)
            left -= 1

    sys.addaudithook(die)
    if operation == "put":
        store.put(blob_key("ab" * 32), b"new" * 1000)
    elif operation == "put_new":
        store.put_new(manifest_key(2), b"new" * 1000)
    else:
        log = Log(store)
        log.claim("second")
    os._exit(0)


def fill(root: str, limit: str) -> None:
    """Write a blob past the largest file this process may make; say the error's kind."""
    store = LocalStore(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    _tell(lambda: store.put(blob_key("ab" * 32), b"x" * 100_000))


def unprivileged(root: str, uid: str) -> None:
    """Write, create and read as another user; say each error's kind."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    _tell(lambda: LocalStore(root).put(blob_key("ab" * 32), b"x"))
    _tell(lambda: LocalStore(root).put_new(manifest_key(1), b"x"))
    _tell(lambda: LocalStore(root).get("head", max_bytes=10))


def _tell(action) -> None:  # type: ignore[no-untyped-def]
    try:
        say(f"returned {action()!r}")
    except DeltaError as error:
        say(f"{type(error).__name__} {error.action}")


if __name__ == "__main__":
    actions = (publish, race, crash, fill, unprivileged)
    {action.__name__: action for action in actions}[sys.argv[1]](*sys.argv[2:])
