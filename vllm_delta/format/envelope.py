"""The DSSE envelope around a manifest."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping

from vllm_delta.errors import FormatError, UnsupportedError
from vllm_delta.format.objects import MAX_MANIFEST_BYTES, canonical
from vllm_delta.format.values import expect_keys, load_object, text

PAYLOAD_TYPE = "application/vnd.vllm-delta.manifest.v1+json"


def seal(payload: bytes, signatures: Iterable[Mapping[str, str]] = ()) -> bytes:
    """Wrap a manifest's payload in a DSSE envelope."""
    return canonical(
        {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [dict(signature) for signature in signatures],
        }
    )


def unseal(data: bytes) -> tuple[bytes, tuple[dict[str, str], ...]]:
    """Open a DSSE envelope: its payload and its signatures, which are not checked here."""
    fields = load_object(data, "envelope", 2 * MAX_MANIFEST_BYTES)
    expect_keys(fields, {"payloadType", "payload", "signatures"}, "envelope")
    if fields["payloadType"] != PAYLOAD_TYPE:
        raise UnsupportedError("envelope: unknown payload type", type=str(fields["payloadType"]))
    signatures = fields["signatures"]
    if not isinstance(signatures, list) or len(signatures) > 16:
        raise FormatError("envelope: signatures is not a list within the limit", limit=16)
    for signature in signatures:
        if not isinstance(signature, dict) or set(signature) != {"keyid", "sig"}:
            raise FormatError("envelope: a signature is not {keyid, sig}")
        text(signature["keyid"], "envelope: keyid", 256)
        text(signature["sig"], "envelope: sig", 1024)
    payload = text(fields["payload"], "envelope: payload", 2 * MAX_MANIFEST_BYTES)
    try:
        content = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError("envelope: payload is not base64") from error
    if seal(content, signatures) != data:
        raise FormatError("envelope: not in canonical form")
    return content, tuple(signatures)


def open_envelope(data: bytes) -> bytes:
    """The payload of a DSSE envelope."""
    return unseal(data)[0]
