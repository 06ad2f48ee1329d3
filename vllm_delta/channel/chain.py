"""Records of a channel's log, and what makes one the rightful successor of another."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_delta.channel.keys import NO_KEYS, Keys
from vllm_delta.errors import ChainError, FormatError, SignatureError, UnsupportedError
from vllm_delta.format import (
    NO_PARENT,
    Manifest,
    digest,
    manifest_key,
    parse_manifest,
    seal,
    unseal,
)


@dataclass(frozen=True)
class Record:
    """A manifest as it stands in the log: its envelope's bytes and their sha256.

    Attributes:
        signer: id of the trusted key that signed it; None where none is required.
    """

    manifest: Manifest
    envelope: bytes = field(repr=False)
    digest: str
    signer: str | None = None

    @property
    def seq(self) -> int:
        return self.manifest.seq


def parse_record(envelope: bytes, seq: int, keys: Keys = NO_KEYS) -> Record:
    """Parse the envelope found under the key of `seq`.

    Raises:
        FormatError, UnsupportedError: the bytes are not a manifest this release can read.
        SignatureError: no trusted key signed it, and one has to.
        ChainError: the manifest names another place in the log.
    """
    try:
        payload, signatures = unseal(envelope)
        signer = keys.verify(payload, signatures)
        manifest = parse_manifest(payload)
    except (FormatError, SignatureError, UnsupportedError) as error:
        raise type(error)(error.message, **{**error.facts, "key": manifest_key(seq)}) from error
    if manifest.seq != seq:
        raise ChainError("a manifest stands in another's place", seq=seq, named=manifest.seq)
    return Record(manifest, envelope, digest(envelope), signer)


def verify_link(previous: Record | None, record: Record) -> None:
    """Check that `record` continues the log right after `previous` (None: that it begins one).

    Raises:
        ChainError: it does not; the message names the field that disagrees.
    """
    manifest = record.manifest
    expected = _first() if previous is None else _next(previous, manifest)
    for name, value in expected.items():
        actual = getattr(manifest, name)
        if actual != value:
            raise ChainError(
                "a manifest does not continue its channel",
                seq=record.seq,
                field=name,
                expected=_plain(value),
                actual=_plain(actual),
            )
    # Blobs from the newest anchor on are what a newcomer needs, so the mark may not pass it.
    lowest = 1 if previous is None else previous.manifest.low
    highest = manifest.anchor or 1
    if not lowest <= manifest.low <= highest:
        raise ChainError(
            "a manifest's low-water mark is out of its range",
            seq=record.seq,
            field="low",
            expected=f"{lowest} to {highest}",
            actual=manifest.low,
        )


def fence_after(previous: Record | None, writer: str, time: float) -> Manifest:
    """The fence that claims a log after `previous`: it restates all that the log stands at."""
    if previous is None:
        return Manifest(
            channel=uuid.uuid4().hex,
            seq=1,
            epoch=1,
            parent=NO_PARENT,
            kind="fence",
            base=None,
            target=None,
            anchor=None,
            low=1,
            schema=None,
            blobs=(),
            reference=None,
            writer=writer,
            time=time,
        )
    before = previous.manifest
    return replace(
        before,
        seq=before.seq + 1,
        epoch=before.epoch + 1,
        parent=previous.digest,
        kind="fence",
        base=before.target,
        blobs=(),
        reference=None,
        writer=writer,
        time=time,
    )


def checked(previous: Record | None, manifest: Manifest, keys: Keys = NO_KEYS) -> Record:
    """Sign and wrap a manifest of ours, or raise ValueError when a reader would refuse it."""
    try:
        payload = manifest.to_bytes()
        record = parse_record(seal(payload, keys.sign(payload)), manifest.seq, keys)
        verify_link(previous, record)
    except (ChainError, FormatError) as error:
        raise ValueError(f"not a record that may follow: {error}") from error
    return record


def _first() -> dict[str, Any]:
    return {"seq": 1, "kind": "fence", "epoch": 1, "target": None, "anchor": None}


def _next(previous: Record, manifest: Manifest) -> dict[str, Any]:
    before, kind = previous.manifest, manifest.kind
    expected: dict[str, Any] = {
        "channel": before.channel,
        "seq": before.seq + 1,
        "parent": previous.digest,
        "epoch": before.epoch + (kind == "fence"),
        "anchor": manifest.seq if kind == "anchor" else before.anchor,
    }
    if kind != "fence":
        expected["writer"] = before.writer
    if before.schema is not None:
        expected["schema"] = before.schema
    if kind in ("fence", "delta"):
        expected["base"] = before.target
    if kind == "merged" or (kind == "anchor" and not _begins_a_version(before, manifest)):
        expected["target"] = before.target
    return expected


def _begins_a_version(before: Manifest, manifest: Manifest) -> bool:
    """Whether an anchor may bring a new version here: an epoch's first record, next number.

    Any other anchor, and each merged delta, restates the version that the channel stands at.
    """
    number = 0 if before.target is None else before.target.number + 1
    target = manifest.target
    return before.kind == "fence" and target is not None and target.number == number


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, str)) else str(value)
