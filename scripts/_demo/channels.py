"""Where the demonstration's channel lies: a directory, a server on loopback, or a given address."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_delta.channel import Keys
from vllm_delta.cli import main as vllm_delta

_BUCKETS = {"hf": "demo/channel", "s3": "demo"}
_ADDRESSES = {"hf": "hf://buckets/demo/channel/run-1", "s3": "s3://demo/run-1"}
_NAMES = {"hf": "a Hub on loopback", "s3": "SeaweedFS on loopback"}


class ChannelServerError(Exception):
    """A store's server did not start."""


@dataclass(frozen=True)
class KeyFiles:
    """Key files of a signed or sealed channel; None where it is not.

    Attributes:
        signing, trusted: The trainer's private key, and its public one.
        sealing: Of both sides.
    """

    signing: Path | None = None
    trusted: Path | None = None
    sealing: Path | None = None

    @property
    def trainer(self) -> Keys:
        return Keys.load(signing=self.signing, sealing=_some(self.sealing))

    @property
    def reader(self) -> Keys:
        return Keys.load(trusted=_some(self.trusted), sealing=_some(self.sealing))

    @property
    def settings(self) -> dict[str, Any]:
        """For a server that follows the channel."""
        settings: dict[str, Any] = {}
        if self.trusted is not None:
            settings["trusted_keys"] = [str(self.trusted)]
            settings["state_dir"] = str(self.trusted.with_name("server-state"))
        if self.sealing is not None:
            settings["sealing_keys"] = [str(self.sealing)]
        return settings

    @property
    def arguments(self) -> list[str]:
        """For the command line `vllm-delta`."""
        arguments = [] if self.trusted is None else ["--trusted-key", str(self.trusted)]
        return arguments + ([] if self.sealing is None else ["--sealing-key", str(self.sealing)])


@dataclass(frozen=True)
class Channel:
    """A channel to demonstrate on.

    Attributes:
        address: Directory or URL.
        store: What it is, for people.
    """

    address: str
    store: str
    keys: KeyFiles = field(default_factory=KeyFiles)


@contextlib.contextmanager
def open_demo_channel(
    kind: str, work_dir: Path, *, signed: bool, sealed: bool
) -> Iterator[Channel]:
    """Have a channel; a server that was started for it is stopped at the end.

    What its clients need is in this process's environment meanwhile, for child processes too.

    Args:
        kind: `local`, `hf` or `s3`, or an address.

    Raises:
        ChannelServerError: the server did not start.
    """
    keys = _make_keys(work_dir / "keys", signed=signed, sealed=sealed)
    if kind not in _ADDRESSES:
        address = str(work_dir / "channel") if kind == "local" else kind
        yield Channel(address, "a directory" if kind == "local" else "the address given", keys)
        return
    with (_hub if kind == "hf" else _s3)(work_dir) as environment, _environment(environment):
        yield Channel(_ADDRESSES[kind], _NAMES[kind], keys)


@contextlib.contextmanager
def _hub(work_dir: Path) -> Iterator[dict[str, str]]:
    """Run a Hub in a process of its own; gives what its clients need in their environment."""
    from huggingface_hub import HfApi

    log = work_dir / "hub.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_delta.testing.hub"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            text = log.read_text(errors="replace")[-2000:]
            raise ChannelServerError(f"{_NAMES['hf']} did not start\n{text}")
        told = json.loads(line)
        api = HfApi(endpoint=told["endpoint"], token=told["token"])
        api.create_bucket(_BUCKETS["hf"], private=True)
        yield {"HF_ENDPOINT": told["endpoint"], "HF_TOKEN": told["token"]}
    finally:
        # It ends when its standard input does.
        process.communicate()


@contextlib.contextmanager
def _s3(work_dir: Path) -> Iterator[dict[str, str]]:
    """Run SeaweedFS; gives what its clients need in their environment."""
    from vllm_delta.testing.seaweed import Seaweed

    with Seaweed() as server:
        server.make_bucket(_BUCKETS["s3"])
        yield server.environment


@contextlib.contextmanager
def _environment(added: dict[str, str]) -> Iterator[None]:
    """Add to this process's environment for as long as the context lasts."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _make_keys(folder: Path, *, signed: bool, sealed: bool) -> KeyFiles:
    if not signed and not sealed:
        return KeyFiles()
    folder.mkdir()
    signing, sealing = folder / "trainer.pem", folder / "channel.key"
    if signed:
        _keygen(str(signing))
    if sealed:
        _keygen("--sealing", str(sealing))
    return KeyFiles(
        signing=signing if signed else None,
        trusted=Path(f"{signing}.pub") if signed else None,
        sealing=sealing if sealed else None,
    )


def _keygen(*arguments: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        status = vllm_delta(["keygen", *arguments])
    if status:
        raise ChannelServerError(f"vllm-delta keygen ended with {status}")


def _some(path: Path | None) -> list[Path]:
    return [] if path is None else [path]
