"""Sealed objects: AES-256-GCM in segments, under a key of the object's own.

What an object is a part of (its channel, record and place) is authenticated with every segment,
and so are the object's head, the segment's number and whether it is the last: a sealed object
opens whole, in its own place, or not at all. `FORMAT.md` has the layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_delta.errors import DigestError, SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"vdseal\x00\x01"
KEY_BYTES = 32
HEAD_BYTES = 32
SEGMENT_BYTES = 1 << 20
"""What a segment holds; a smaller one costs calls, a larger one the processor's cache."""

TAG_BYTES = 16
_KEY_ID_BYTES = 8
_SALT_BYTES = HEAD_BYTES - len(MAGIC) - _KEY_ID_BYTES
_STRIDE = SEGMENT_BYTES + TAG_BYTES


def sealed_bytes(n_bytes: int) -> int:
    """How long a sealed object is that holds so many bytes."""
    return HEAD_BYTES + n_bytes + TAG_BYTES * max(1, -(-n_bytes // SEGMENT_BYTES))


def is_sealed(data: bytes | bytearray) -> bool:
    """Whether this is a sealed object; no other object begins like one."""
    return data.startswith(MAGIC)


def seal(key: bytes, data: bytes, about: bytes, *, always_the_same: bool = False) -> bytes:
    """Seal an object.

    Args:
        about: what the object is a part of; authenticated, not stored.
        always_the_same: draw the salt from key, content and `about`, so that equal objects stay
            equal. Else it is random.
    """
    salt = _salt_of(key, data, about) if always_the_same else os.urandom(_SALT_BYTES)
    head = b"".join([MAGIC, sealing_key_id(key), salt])
    cipher, bound = _cipher(key, salt), head + about
    plain = memoryview(data)

    def fill(view: memoryview) -> None:
        view[:HEAD_BYTES] = head
        for number, (start, stop, last) in enumerate(_segments(len(data))):
            place = HEAD_BYTES + number * _STRIDE
            out = view[place : place + stop - start + TAG_BYTES]
            cipher.encrypt_into(_nonce(number, last), plain[start:stop], bound, out)

    return _filled(sealed_bytes(len(data)), fill)


def unseal(
    keys: Sequence[bytes], data: bytes | bytearray, about: bytes, *, drop_bytes: int = 0
) -> bytes:
    """What is in a sealed object.

    Args:
        keys: one of them must be the one it was sealed with.
        drop_bytes: of the content's end, what to leave out of the answer.

    Raises:
        SettingsError: none of the keys is.
        DigestError: it was sealed for another place, or altered.
    """
    wanted = data[len(MAGIC) : len(MAGIC) + _KEY_ID_BYTES]
    key = next((key for key in keys if sealing_key_id(key) == wanted), None)
    if key is None:
        raise SettingsError("sealed with a key that is not at hand", key_id=wanted.hex())
    body_bytes = len(data) - HEAD_BYTES
    n_bytes = body_bytes - TAG_BYTES * -(-body_bytes // _STRIDE)
    if n_bytes < drop_bytes or sealed_bytes(n_bytes) != len(data):
        raise DigestError("a sealed object is cut short", n_bytes=len(data))
    from cryptography.exceptions import InvalidTag

    view = memoryview(data)
    cipher = _cipher(key, bytes(data[HEAD_BYTES - _SALT_BYTES : HEAD_BYTES]))
    bound = data[:HEAD_BYTES] + about

    def fill(out: memoryview) -> None:
        for number, (start, stop, last) in enumerate(_segments(n_bytes)):
            place = HEAD_BYTES + number * _STRIDE
            segment = view[place : place + stop - start + TAG_BYTES]
            cipher.decrypt_into(_nonce(number, last), segment, bound, out[start:stop])

    try:
        return _filled(n_bytes, fill, drop_bytes)
    except InvalidTag as error:
        raise DigestError("a sealed object does not open in this place") from error


def sealing_key_id(key: bytes) -> bytes:
    """8 bytes that name a sealing key and tell nothing about it."""
    return hashlib.sha256(b"vllm_delta sealing key" + key).digest()[:_KEY_ID_BYTES]


@contextlib.contextmanager
def needing_cryptography() -> Iterator[None]:
    """Say what to install where an import fails."""
    try:
        yield
    except ImportError as error:
        raise _not_installed() from error


def _not_installed() -> SettingsError:
    return SettingsError(
        "signatures and seals need the package cryptography, 47 or later",
        install="pip install 'cryptography>=47'",
    )


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    """The cipher of one object: its key is used for nothing else, so its nonces can count."""
    # Imported when wanted: most channels are not sealed.
    with needing_cryptography():
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    if not hasattr(AESGCM, "decrypt_into"):
        raise _not_installed()
    return AESGCM(hmac.digest(key, b"vllm_delta object key" + salt, "sha256"))


def _salt_of(key: bytes, data: bytes, about: bytes) -> bytes:
    mac = hmac.new(key, b"vllm_delta salt" + len(about).to_bytes(8, "little"), "sha256")
    mac.update(about)
    mac.update(data)
    return mac.digest()[:_SALT_BYTES]


def _segments(n_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Where each segment of so much content begins and ends, and whether it is the last."""
    for start in range(0, max(n_bytes, 1), SEGMENT_BYTES):
        stop = min(start + SEGMENT_BYTES, n_bytes)
        yield start, stop, stop == n_bytes


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(8, "little") + int(last).to_bytes(4, "little")


def _filled(n_bytes: int, fill: Callable[[memoryview], None], drop_bytes: int = 0) -> bytes:
    """Bytes written in place: most of the time goes into fresh memory, so it is taken once."""
    buffer = io.BytesIO()
    if n_bytes:
        buffer.seek(n_bytes - 1)
        buffer.write(b"\0")
    with buffer.getbuffer() as view:
        fill(view)
    buffer.truncate(n_bytes - drop_bytes)
    return buffer.getvalue()
