"""Parsers of what a user gives: key files, the ratchet's file, addresses, settings, numbers."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from scripts._soak.parse_subjects import FAITHFUL, REFUSED, SAME, Parser, demand
from vllm_delta import cli
from vllm_delta.channel import Keys, LocalStore, ObjectStore, RetryingStore, open_channel
from vllm_delta.channel import object as objects
from vllm_delta.channel.hub import HubStore
from vllm_delta.channel.object_clients import connect
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.engine.settings import read_settings
from vllm_delta.errors import DeltaError, SettingsError

_PEM = re.compile(rb"-----BEGIN [A-Z ]+-----(.*?)-----END", re.DOTALL)
_WRITES = {
    "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.symlink", "os.truncate",
    "os.chmod", "os.utime", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.bind", "socket.sendto", "subprocess.Popen", "os.system",
}  # fmt: skip
_REAL_CLIENTS = 50
"""One in so many addresses of objects is opened with a real client, which takes long to make."""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "GOOGLE_BASE_URL": "http://127.0.0.1:9",
    "AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
    "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9",
    "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_token",
}  # fmt: skip
"""With which no client has a reason to ask anybody, or anybody to ask but nobody."""


def files(seed: int, folder: Path) -> Iterator[Parser]:
    """Of everything a user or an operator gives."""
    draw = random.Random(f"{seed} files")
    yield from _key_files(draw, folder)
    yield _ratchet(draw, folder)
    yield _address(folder)
    yield from _settings()
    yield _numbers()


def _key_files(draw: random.Random, folder: Path) -> Iterator[Parser]:
    path = folder / "key"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def given(data: bytes) -> Path:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return path

    some = [Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)) for _ in range(3)]
    private = [
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for key in some
    ]
    public = [
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for key in some
    ]

    def signing(data: bytes) -> str:
        key = Keys.load(signing=given(data)).signing
        assert key is not None
        demand(_holds(data, key.private_bytes_raw()), "a key that does not stand there")
        return SAME if data in private else FAITHFUL

    def trusted(data: bytes) -> str:
        keys = Keys.load(trusted=[given(data)])
        demand(keys.required, "no key, and none required")
        for key in keys.trusted:
            demand(_holds(data, key.public_bytes_raw()), "a key that does not stand there")
        return SAME if data in several else FAITHFUL

    def sealing(data: bytes) -> str:
        (key,) = Keys.load(sealing=[given(data)]).sealing
        demand(len(key) == 32, "a key of another length")
        demand(base64.b64encode(key)[:-2] in data, "a key that does not stand there")
        return SAME if data in seals else FAITHFUL

    several = [*public, b"".join(public)]
    seals = [base64.b64encode(draw.randbytes(32)) + b"\n" for _ in range(2)]
    yield Parser("signing_key", private, signing, 0.5)
    yield Parser("trusted_keys", several, trusted, 0.5)
    yield Parser("sealing_key", seals, sealing, 0.5)


def _holds(data: bytes, raw: bytes) -> bool:
    """Whether a key's bytes are in one of a file's PEM blocks."""
    for block in _PEM.findall(data):
        for text in re.split(rb"-----BEGIN [A-Z ]*-----", block):  # a block may begin in another
            kept = re.sub(rb"[^A-Za-z0-9+/]", b"", text)
            with contextlib.suppress(ValueError):
                if raw in base64.b64decode(kept + b"=" * (-len(kept) % 4)):
                    return True
    return False


def _ratchet(draw: random.Random, folder: Path) -> Parser:
    ratchet = Ratchet(folder, "s3://bucket/run")
    marks = {
        name: {
            "channel": draw.randbytes(16).hex(),
            "epoch": 3,
            "seq": 70 + place,
            "payload": draw.randbytes(32).hex(),
        }
        for place, name in enumerate(("unsigned", "0123456789abcdef"))
    }
    fields = {"format": 1, "url": "s3://bucket/run", "keys": marks}
    intact = [
        json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n",
        json.dumps({**fields, "keys": {}}).encode(),
    ]
    ratchet.path.touch()
    descriptor = os.open(ratchet.path, os.O_RDWR)

    def judge(data: bytes) -> str:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        found = ratchet.seen(["0123456789abcdef"]).marks
        stands = json.loads(data[: 1 << 20])["keys"]
        for name, mark in found.items():
            demand(asdict(mark) == stands[name], "another mark")
        demand(("0123456789abcdef" in stands) == bool(found), "a mark is missing")
        return SAME if data in intact else FAITHFUL

    return Parser("ratchet", intact, judge, 0.7)


class _Quiet:
    """Counts what a process writes to disk, and whom it calls, where it is not to."""

    def __init__(self) -> None:
        self.armed = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        written = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
        if written or event in _WRITES:
            self.heard.append(f"{event} {arguments}"[:200])

    @contextlib.contextmanager
    def demanded(self) -> Iterator[None]:
        self.heard.clear()
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
        demand(not self.heard, f"something was written or asked: {self.heard[:2]}")


def _address(folder: Path) -> Parser:
    quiet = _Quiet()
    texts = [
        str(folder), "channel", "~/channel", f"file://{folder}/a%20b", "s3://bucket/runs/7",
        "gs://bucket/run", "az://container/run", "hf://buckets/me/name/runs/7?manifests=s3",
        "hf://buckets/me/name",
    ]  # fmt: skip
    intact = [text.encode() for text in texts]

    def judge(data: bytes) -> str:
        text = _text(data)
        # What may be opened without a client is seen by the parts of the address alone.
        real = zlib.crc32(data) % _REAL_CLIENTS == 0
        objects.connect = connect if real else _no_client  # type: ignore[attr-defined]
        try:
            with quiet.demanded():
                store = open_channel(text)
            demand(_is_right(text, store), f"another store: {store!r}")
            demand(open_channel(store.url).url == store.url, "its own address is another's")
        except DeltaError as error:
            demand(isinstance(error, SettingsError), f"refused by {type(error).__name__}")
            raise
        finally:
            objects.connect = connect  # type: ignore[attr-defined]
        return SAME if data in intact else FAITHFUL

    return Parser("address", intact, judge, 0.7)


def _no_client(address: object) -> Any:
    return object()


def _text(data: bytes) -> str:
    """As text from anywhere may be: lone surrogates included."""
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return data.decode(errors="surrogateescape")


def _is_right(text: str, store: Any) -> bool:
    """Whether an address led to the kind of store that it names, and to no other place."""
    scheme = text.partition(":/")[0].lower() if ":/" in text else ""
    if isinstance(store, RetryingStore):
        kinds = {"s3": ObjectStore, "gs": ObjectStore, "az": ObjectStore, "hf": HubStore}
        inside = text.partition("//")[2].rstrip("/")
        same = store.url.partition("//")[2] == inside if scheme != "hf" else True
        return isinstance(store.store, kinds.get(scheme, ())) and same
    if not isinstance(store, LocalStore) or scheme in ("s3", "gs", "az", "hf"):
        return False
    path = os.fsdecode(unquote_to_bytes(urlsplit(store.url).path))
    if scheme == "file":
        return path.startswith("/")
    return path == str(Path(text).expanduser().absolute())


def _settings() -> Iterator[Parser]:
    configs = [
        {"vllm_delta": {"channel": "/x", "kv_policy": "reset", "min_interval_s": 1.5}},
        {
            "vllm_delta": {
                "channel": "s3://b/p", "poll_interval_s": None, "stage_ahead": 3, "cache_bytes": 0,
                "trusted_keys": ["a.pub", "b.pub"], "rollback_bytes": 1 << 30,
            },
            "other": [1],
        },
        {},
    ]  # fmt: skip
    intact = [json.dumps(config).encode() for config in configs]

    def config(data: bytes) -> str:
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            return REFUSED  # by whoever reads the command line
        if not isinstance(given, Mapping):
            return REFUSED
        found = read_settings(given, {})
        for name, value in given.get("vllm_delta", {}).items():
            expected = tuple(value) if isinstance(value, list) else value
            demand(getattr(found, name) == expected, f"another {name}")
        return SAME if data in intact else FAITHFUL

    lines = [
        b"VLLM_DELTA_CHANNEL=/x\nPATH=/bin\nVLLM_DELTA_POLL_INTERVAL_S=0.25",
        b'VLLM_DELTA_STAGE_AHEAD=4\nVLLM_DELTA_TRUSTED_KEYS=["a", "b"]\nVLLM_DELTA_CACHE_BYTES=9',
        b"VLLM_DELTA_SEALING_KEYS=a, b\nVLLM_DELTA_KV_POLICY=keep",
    ]

    def environment(data: bytes) -> str:
        pairs = (os.fsdecode(line).partition("=") for line in data.split(b"\n"))
        given = {name: value for name, sign, value in pairs if sign}
        found = read_settings(None, given)
        for name, value in given.items():
            if not name.startswith("VLLM_DELTA_"):
                continue
            there = getattr(found, name.removeprefix("VLLM_DELTA_").lower())
            if isinstance(there, (int, float)):
                demand(type(there)(value) == there, f"another {name}")
            elif isinstance(there, str):
                demand(value == there, f"another {name}")
        return SAME if data in lines else FAITHFUL

    yield Parser("config", intact, config)
    yield Parser("environment", lines, environment, 0.7)


def _numbers() -> Parser:
    intact = [b"n 0", b"n 17", b"s 3600", b"s 0.5", b"s 1e3"]

    def judge(data: bytes) -> str:
        text = os.fsdecode(data[2:])
        if data[:1] == b"s":
            seconds = cli._seconds(text)
            demand(0 <= seconds < float("inf") and seconds == float(text), "another number")
        else:
            number = cli._number(text)
            demand(number >= 0 and number == int(text), "another number")
        return SAME if data in intact else FAITHFUL

    return Parser("cli_number", intact, judge, 0.4, refusals=(argparse.ArgumentTypeError,))
