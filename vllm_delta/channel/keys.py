"""A channel's keys: Ed25519 signatures over manifests, AES-256-GCM around blobs.

Both are off until keys are given. A signature is over DSSE's pre-authentication encoding of the
envelope's payload. A sealed object is `MAGIC`, the key's id, a nonce and the ciphertext with its
tag; what it is a part of (channel, record, place) is authenticated with it, so that it opens
nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta.errors import DigestError, SettingsError, SignatureError
from vllm_delta.format import PAYLOAD_TYPE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

MAGIC = b"vdseal\x00\x01"
_KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEAD_BYTES = len(MAGIC) + _KEY_ID_BYTES + _NONCE_BYTES
SEAL_BYTES = _HEAD_BYTES + _TAG_BYTES
"""How much longer a sealed object is than what is in it."""

_SEALING_KEY_BYTES = 32
_MAX_KEY_FILE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What a trainer signs and seals with, and what a reader requires. Safe to share by threads.

    Attributes:
        signing: signs what is written.
        trusted: with any, every manifest must bear a signature by one of them; that of `signing`
            is trusted too. Two at a time let a trainer's key be replaced.
        sealing: with any, every blob must be sealed by one of them; the first is written with.
    """

    signing: Ed25519PrivateKey | None = field(default=None, repr=False)
    trusted: tuple[Ed25519PublicKey, ...] = field(default=(), repr=False)
    sealing: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if any(len(key) != _SEALING_KEY_BYTES for key in self.sealing):
            raise SettingsError("a sealing key has 32 bytes")

    @classmethod
    def load(
        cls,
        *,
        signing: str | Path | None = None,
        trusted: Iterable[str | Path] = (),
        sealing: Iterable[str | Path] = (),
    ) -> Keys:
        """Read keys from files as `vllm-delta keygen` writes them.

        Args:
            signing: an Ed25519 private key, PEM (PKCS #8, not encrypted).
            trusted: Ed25519 public keys, PEM; a file may hold several.
            sealing: 32 bytes each, in base64.

        Raises:
            SettingsError: a file is not there, or is not a key of its kind.
        """
        return cls(
            signing=None if signing is None else _private_key(signing),
            trusted=tuple(key for path in trusted for key in _public_keys(path)),
            sealing=tuple(map(_sealing_key, sealing)),
        )

    @property
    def required(self) -> bool:
        """Whether every manifest must be signed."""
        return bool(self._verifying)

    @property
    def _verifying(self) -> tuple[Ed25519PublicKey, ...]:
        own = () if self.signing is None else (self.signing.public_key(),)
        return (*self.trusted, *own)

    def sign(self, payload: bytes) -> list[dict[str, str]]:
        """Signatures for an envelope; none without a signing key."""
        if self.signing is None:
            return []
        signature = self.signing.sign(pre_authentication(payload))
        return [
            {
                "keyid": key_id(self.signing.public_key()),
                "sig": base64.b64encode(signature).decode(),
            }
        ]

    def verify(self, payload: bytes, signatures: Sequence[dict[str, str]]) -> str | None:
        """The id of a trusted key that signed the payload; None where none is required.

        Raises:
            SignatureError: no trusted key did.
        """
        if not self.required:
            return None
        # Imported when wanted: most channels bear no signatures.
        from cryptography.exceptions import InvalidSignature

        message = pre_authentication(payload)
        trusted = {key_id(key): key for key in self._verifying}
        for signature in signatures:
            key = trusted.get(signature["keyid"])
            if key is None:
                continue
            with contextlib.suppress(InvalidSignature, binascii.Error, ValueError):
                key.verify(base64.b64decode(signature["sig"], validate=True), message)
                return signature["keyid"]
        raise SignatureError(
            "a manifest bears no signature by a trusted key",
            signed_by=[signature["keyid"][:64] for signature in signatures],
            trusted=sorted(trusted),
        )

    def seal(self, data: bytes, about: bytes, *, always_the_same: bool = False) -> bytes:
        """Seal an object, or give it back as it is without a sealing key.

        Args:
            about: what the object is a part of; authenticated, not stored.
            always_the_same: derive the nonce from key, content and `about`, so that equal
                objects stay equal. Else it is random.
        """
        if not self.sealing:
            return data
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self.sealing[0]
        if always_the_same:
            nonce = hmac.digest(key, b"vllm_delta nonce" + about + data, "sha256")[:_NONCE_BYTES]
        else:
            nonce = os.urandom(_NONCE_BYTES)
        return b"".join([MAGIC, _sealing_id(key), nonce, AESGCM(key).encrypt(nonce, data, about)])

    def open(self, data: bytes, about: bytes) -> bytes:
        """What is in a sealed object; without a sealing key, an object as it is.

        Raises:
            SettingsError: it is sealed and there is no key, or it is not sealed and there is one.
            DigestError: it was sealed for another place, or altered.
        """
        sealed = data.startswith(MAGIC) and len(data) >= SEAL_BYTES
        if not self.sealing:
            if sealed:
                raise SettingsError("the channel is sealed; give its sealing key")
            return data
        if not sealed:
            raise SettingsError("the channel is not sealed, but a sealing key is set")
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        view = memoryview(data)
        wanted = data[len(MAGIC) : len(MAGIC) + _KEY_ID_BYTES]
        key = next((key for key in self.sealing if _sealing_id(key) == wanted), None)
        if key is None:
            raise SettingsError("sealed with a key that is not at hand", key_id=wanted.hex())
        try:
            nonce = view[_HEAD_BYTES - _NONCE_BYTES : _HEAD_BYTES]
            return AESGCM(key).decrypt(nonce, view[_HEAD_BYTES:], about)
        except InvalidTag as error:
            raise DigestError("a sealed object does not open in this place") from error


NO_KEYS = Keys()


def pre_authentication(payload: bytes) -> bytes:
    """What is signed: DSSE's encoding of type and payload."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(key: Ed25519PublicKey) -> str:
    """16 hexadecimal digits that name a public key: the first of the sha256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def about_blob(channel: str, seq: int, place: int) -> bytes:
    """What a blob is a part of: a channel's record and its place there."""
    return b"vllm_delta|%s|%d|%d" % (channel.encode(), seq, place)


def about_schema(channel: str) -> bytes:
    """What a schema is a part of: all records of a channel share it."""
    return b"vllm_delta|%s|0|schema" % channel.encode()


def _sealing_id(key: bytes) -> bytes:
    return hashlib.sha256(b"vllm_delta sealing key" + key).digest()[:_KEY_ID_BYTES]


def _private_key(path: str | Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    try:
        key = load_pem_private_key(data, None)
    except (TypeError, ValueError) as error:
        raise SettingsError("not an Ed25519 private key in PEM", path=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError("not an Ed25519 private key in PEM", path=str(path))
    return key


def _public_keys(path: str | Path) -> list[Ed25519PublicKey]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    end = b"-----END PUBLIC KEY-----"
    blocks = _read(path).split(end)
    keys = []
    for block in blocks[:-1]:
        try:
            key = load_pem_public_key(block.lstrip() + end + b"\n")
        except ValueError as error:
            raise SettingsError("not Ed25519 public keys in PEM", path=str(path)) from error
        if not isinstance(key, Ed25519PublicKey):
            raise SettingsError("not Ed25519 public keys in PEM", path=str(path))
        keys.append(key)
    if not keys or blocks[-1].strip():
        raise SettingsError("not Ed25519 public keys in PEM", path=str(path))
    return keys


def _sealing_key(path: str | Path) -> bytes:
    try:
        key = base64.b64decode(_read(path).strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SettingsError("not a sealing key", path=str(path)) from error
    if len(key) != _SEALING_KEY_BYTES:
        raise SettingsError("not a sealing key", path=str(path))
    return key


def _read(path: str | Path) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise SettingsError("a key's file cannot be read", path=str(path)) from error
