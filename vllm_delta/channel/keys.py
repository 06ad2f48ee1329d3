"""A channel's keys: Ed25519 signatures over manifests, AES-256-GCM around blobs.

Both are off until keys are given. A signature is over DSSE's pre-authentication encoding of the
envelope's payload; `FORMAT.md` says what that defends, and what it does not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta.channel.keyfiles import read_private_key, read_public_keys, read_sealing_key
from vllm_delta.channel.sealing import KEY_BYTES, is_sealed, seal, unseal
from vllm_delta.errors import SettingsError, SignatureError
from vllm_delta.format import PAYLOAD_TYPE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


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
        if any(len(key) != KEY_BYTES for key in self.sealing):
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
            SettingsError: a file is not there, is not a key of its kind, or holds a secret and is
                open to other users.
        """
        return cls(
            signing=None if signing is None else read_private_key(signing),
            trusted=tuple(key for path in trusted for key in read_public_keys(path)),
            sealing=tuple(map(read_sealing_key, sealing)),
        )

    @property
    def required(self) -> bool:
        """Whether every manifest must be signed."""
        return bool(self._verifying)

    @property
    def signers(self) -> frozenset[str]:
        """Ids of the keys whose signatures count; none where none is required."""
        return frozenset(self._verifying)

    @cached_property
    def _verifying(self) -> Mapping[str, Ed25519PublicKey]:
        own = () if self.signing is None else (self.signing.public_key(),)
        return {key_id(key): key for key in (*self.trusted, *own)}

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

    def verify(self, payload: bytes, signatures: Sequence[Mapping[str, str]]) -> str | None:
        """The id of a trusted key that signed the payload; None where none is required.

        A signature's own key id chooses among the trusted keys and is believed in nothing else.

        Raises:
            SignatureError: no trusted key did.
        """
        if not self.required:
            return None
        # Imported when wanted: most channels bear no signatures.
        from cryptography.exceptions import InvalidSignature

        message = pre_authentication(payload)
        for signature in signatures:
            key = self._verifying.get(signature["keyid"])
            data = _decoded(signature["sig"])
            if key is None or data is None:
                continue
            try:
                key.verify(data, message)
            except InvalidSignature:
                continue
            return signature["keyid"]
        raise SignatureError(
            "a manifest bears no signature by a trusted key",
            signed_by=[signature["keyid"][:64] for signature in signatures],
            trusted=sorted(self.signers),
        )

    def seal(self, data: bytes, about: bytes, *, always_the_same: bool = False) -> bytes:
        """Seal an object, or give it back as it is without a sealing key.

        Args:
            about: what the object is a part of; authenticated, not stored.
            always_the_same: equal content makes an equal object.
        """
        if not self.sealing:
            return data
        return seal(self.sealing[0], data, about, always_the_same=always_the_same)

    def open(
        self, data: bytes | bytearray, about: bytes, *, drop_bytes: int = 0
    ) -> bytes | memoryview:
        """What is in a sealed object; without a sealing key, an object as it is, or a view of it.

        Args:
            drop_bytes: of the content's end, what to leave out of the answer.

        Raises:
            SettingsError: it is sealed and the key is not at hand, or it is not and there is one.
            DigestError: it was sealed for another place, or altered.
        """
        sealed = is_sealed(data)
        if self.sealing and sealed:
            return unseal(self.sealing, data, about, drop_bytes=drop_bytes)
        if sealed:
            raise SettingsError("the channel is sealed; give its sealing key")
        if self.sealing:
            raise SettingsError("the channel is not sealed, but a sealing key is set")
        # To cut it off would copy all that is left.
        return memoryview(data)[:-drop_bytes].toreadonly() if drop_bytes else bytes(data)


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


def _decoded(text: str) -> bytes | None:
    """A signature's bytes; None unless it is written the one way that base64 has for them."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if base64.b64encode(data).decode() == text else None
