"""What a publisher sends, coded and proven: every blob decodes to what was meant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from vllm_delta.codec import (
    Change,
    HostLanes,
    decode,
    encode_anchor,
    encode_delta,
    encode_reference,
)
from vllm_delta.codec.order import Unsigned
from vllm_delta.commit import PublisherSettings
from vllm_delta.format import Schema, Version
from vllm_delta.merge import Segment, fold, most_bytes, most_changes
from vllm_delta.shadow import Proof, Shadow


class _TooManyError(Exception):
    """A merged delta has more changes than pay."""


class Coder:
    """Codes deltas, merged deltas and anchors of a shadow's weights.

    Args:
        shadow: the published bits, which deltas start from and merged ones lead to. Only `merged`
            moves it, for a while.
        settings: the publisher's.
    """

    def __init__(self, shadow: Shadow, settings: PublisherSettings) -> None:
        self._shadow = shadow
        self._settings = settings
        self._lanes = HostLanes(self._bits, settings.threads)

    @property
    def _schema(self) -> Schema:
        return self._shadow.schema

    def delta(self, changes: Iterable[Change]) -> Iterator[bytes]:
        """Proven blobs of changes from the shadow, one after the other."""
        proof = Proof(self._schema, "delta", self._shadow)
        blobs = encode_delta(
            self._schema,
            proof.watch(changes),
            codec=self._settings.codec,
            base=self._bits,
            shards=self._settings.shards,
            n_threads=self._settings.threads,
            blob_bytes=self._settings.blob_bytes,
        )
        for blob in blobs:
            proof.check(blob, self._lanes)
            yield blob
        proof.finish()

    def changes(self, blobs: Iterable[bytes]) -> Iterator[Change]:
        """What a delta's blobs hold; the shadow of a tensor may move once its change is given."""
        for blob in blobs:
            yield from decode(blob, self._schema, "delta", self._lanes)

    def kept(self, changes: Iterable[Change], blobs: list[bytes]) -> list[bytes]:
        """A delta in blobs that decode without a base; goes through its changes either way.

        Args:
            blobs: it, as it was sent.
        """
        if self._settings.codec != "gap" and self._settings.strides:
            return list(encode_delta(self._schema, changes, blob_bytes=self._settings.blob_bytes))
        for _ in changes:
            pass
        return blobs

    def anchor(self) -> Iterator[bytes]:
        """Proven blobs of the whole shadow."""
        proof = Proof(self._schema, "anchor")
        tensors = proof.watch(map(self._shadow.whole, range(len(self._schema))))
        for blob in encode_anchor(self._schema, tensors, blob_bytes=self._settings.blob_bytes):
            proof.check(blob)
            yield blob
        proof.finish()

    def reference(self) -> Iterator[bytes]:
        """One proven blob of the shadow's fingerprints."""
        proof = Proof(self._schema, "reference")
        proof.expect(map(self._shadow.named, range(len(self._schema))))
        blob = encode_reference(self._schema, self._shadow.fingerprints)
        proof.check(blob)
        proof.finish()
        yield blob

    def fold(self, window: Sequence[Segment], target: Version) -> Segment | None:
        """Deltas that led to the shadow as one, which decodes without a base.

        None as soon as it is clear that a merged delta would not pay. Coding is begun before the
        changes are counted: counting them first takes longer than coding them.
        """
        n_most, n_changed = most_changes(window), 0

        def counted() -> Iterator[Change]:
            nonlocal n_changed
            raw_above = self._settings.replaced_above
            for change in fold(self._schema, window, self._bits, raw_above=raw_above):
                n_changed += change.nnz
                if n_changed > n_most:
                    raise _TooManyError
                yield change

        try:
            blobs = _within(self._plain(counted()), self._most_bytes(window))
        except _TooManyError:
            return None
        if not blobs:
            return None
        return Segment(
            base=window[0].base,
            target=target,
            fingerprints=window[0].fingerprints,
            blobs=blobs,
            n_changed=n_changed,
            payload_bytes=sum(segment.payload_bytes for segment in window),
        )

    def merged(self, segment: Segment) -> list[bytes]:
        """Proven blobs of a folded segment that led to the shadow; none where they do not pay."""
        if self._settings.codec == "gap":
            return list(segment.blobs)

        def changes() -> Iterator[Change]:
            return segment.changes(self._schema)

        with self._shadow.before(changes, segment.fingerprints.tolist()):
            return _within(self.delta(changes()), most_bytes([segment]))

    def _plain(self, changes: Iterable[Change]) -> Iterator[bytes]:
        """Proven blobs that decode without a base."""
        proof = Proof(self._schema, "delta")
        blob_bytes = self._settings.blob_bytes
        for blob in encode_delta(self._schema, proof.watch(changes), blob_bytes=blob_bytes):
            proof.check(blob)
            yield blob
        proof.finish()

    def _most_bytes(self, window: Sequence[Segment]) -> float:
        """Where a folded segment is what is sent, what it may take; else any number."""
        return most_bytes(window) if self._settings.codec == "gap" else math.inf

    def _bits(self, tensor: int) -> Unsigned:
        return self._shadow.bits[tensor]


def _within(blobs: Iterable[bytes], most: float) -> list[bytes]:
    """All blobs; none when they take more bytes than `most`."""
    kept: list[bytes] = []
    n_bytes = 0
    for blob in blobs:
        n_bytes += len(blob)
        if n_bytes > most:
            return []
        kept.append(blob)
    return kept
