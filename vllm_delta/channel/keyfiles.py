"""Files that hold keys: what `vllm-delta keygen` writes, read back with care."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta.channel.sealing import KEY_BYTES, needing_cryptography
from vllm_delta.errors import SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_MAX_BYTES = 1 << 16
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_private_key(path: str | Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key: PEM, PKCS #8, without a passphrase, closed to others."""
    with needing_cryptography():
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path, secret=True), None)
    except (TypeError, ValueError, UnsupportedAlgorithm, InternalError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError("not an Ed25519 private key in PEM, unencrypted", path=str(path))
    return key


def read_public_keys(path: str | Path) -> list[Ed25519PublicKey]:
    """Read Ed25519 public keys in PEM, one after another."""
    with needing_cryptography():
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

    end = b"-----END PUBLIC KEY-----"
    *blocks, rest = _read(path).split(end)
    keys = []
    for block in blocks:
        try:
            key = load_pem_public_key(block.lstrip() + end + b"\n")
        except (ValueError, UnsupportedAlgorithm, InternalError):
            break
        if isinstance(key, Ed25519PublicKey):
            keys.append(key)
    if not keys or len(keys) != len(blocks) or rest.strip():
        raise SettingsError("not Ed25519 public keys in PEM", path=str(path))
    return keys


def read_sealing_key(path: str | Path) -> bytes:
    """Read a sealing key: 32 bytes in base64, closed to others."""
    try:
        key = base64.b64decode(_read(path, secret=True).strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError("not a sealing key, 32 bytes in base64", path=str(path))
    return key


def write_signing_key(path: Path) -> Ed25519PublicKey:
    """Make a signing key: the private half at `path`, the public one beside it, in `.pub`.

    Raises:
        SettingsError: one of them is there already, or cannot be written; nothing is changed.
    """
    with needing_cryptography():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    beside = public_path(path)
    _write_new(beside, public, 0o644)
    try:
        _write_new(path, private, 0o600)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return key.public_key()


def write_sealing_key(path: Path) -> bytes:
    """Make a sealing key; raises as `write_signing_key`."""
    key = os.urandom(KEY_BYTES)
    _write_new(path, base64.b64encode(key) + b"\n", 0o600)
    return key


def public_path(path: Path) -> Path:
    """Where the public half of a private key stands.

    Raises:
        SettingsError: the path names no file.
    """
    if not path.name:
        raise SettingsError("not the name of a file for a key", path=str(path))
    return path.with_name(path.name + ".pub")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except FileExistsError as error:
        raise SettingsError("a key is never written over another file", path=str(path)) from error
    except (OSError, ValueError) as error:
        raise SettingsError("a key's file cannot be written", path=str(path)) from error
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise SettingsError("a key's file cannot be written", path=str(path)) from error


def _read(path: str | Path, *, secret: bool = False) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            if secret:
                _refuse_if_open_to_others(path, os.fstat(file.fileno()))
            return file.read(_MAX_BYTES)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError("a key's file cannot be read", path=str(path)) from error


def _refuse_if_open_to_others(path: str | Path, status: os.stat_result) -> None:
    """As ssh does: of one's own files only, since others' may be what a system hands out."""
    if status.st_uid == os.getuid() and status.st_mode & _OPEN_TO_OTHERS:
        raise SettingsError(
            "a secret key's file is open to other users; chmod 600 closes it",
            path=str(path),
            mode=f"{stat.S_IMODE(status.st_mode):04o}",
        )
