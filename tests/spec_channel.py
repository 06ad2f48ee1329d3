"""A channel of tiny versions, written through the log, and what each version holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_delta.channel import Log
from vllm_delta.codec import Change, encode_anchor, encode_delta, encode_reference
from vllm_delta.fingerprint import root
from vllm_delta.format import (
    Reference,
    Version,
    manifest_key,
    open_envelope,
    parse_manifest,
    seal,
)
from vllm_delta.shadow import Shadow
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import DeltaSpec, MemoryStore

SPEC = DeltaSpec(seed=3)


class Channel:
    """Writes versions of `SPEC` through the log, and keeps what each holds."""

    def __init__(
        self, *, reference: Reference | None = None, store: MemoryStore | None = None
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.log = Log(self.store)
        self.log.claim("test")
        self.schema = SPEC.schema
        self.shadow = Shadow(self.schema, self.weights(0))
        self.number = 0
        self.anchor(0, reference=reference)

    def weights(self, number: int) -> list[np.ndarray]:
        bits = SPEC.weights(number)
        return [bits[spec.name] for spec in self.schema.tensors]

    def anchor(self, number: int, *, reference: Reference | None = None) -> None:
        whole = [self.shadow.whole(i) for i in range(len(self.schema))]
        blobs = list(encode_anchor(self.schema, whole, blob_bytes=300))
        if reference is not None:
            blobs = [encode_reference(self.schema, self.shadow.fingerprints)]
        self.append("anchor", number, blobs, reference=reference)

    def delta(self) -> None:
        self.number += 1
        changes = self.changes(self.number)
        blobs = list(encode_delta(self.schema, changes, blob_bytes=40))
        self.shadow.advance(changes)
        self.append("delta", self.number, blobs)

    def merged(self, base: int) -> None:
        """What leads from an earlier version to the one that stands."""
        changes = self.changes(self.number, since=base)
        blobs = list(encode_delta(self.schema, changes, blob_bytes=60))
        self.append("merged", self.number, blobs, base=SPEC.version(base))

    def changes(self, number: int, *, since: int | None = None) -> list[Change]:
        old = self.shadow if since is None else Shadow(self.schema, self.weights(since))
        diffs = (
            old.diff(place, bits, raw_above=0.5) for place, bits in enumerate(self.weights(number))
        )
        return [change for change in diffs if change is not None]

    def append(self, kind, number, blobs, *, reference=None, prints=None, base=None) -> None:
        prints = self.shadow.fingerprints if prints is None else prints
        self.log.append(
            kind,
            base=base,
            target=Version(number, root(self.schema, prints)),
            blobs=self.log.put_blobs(list(blobs)),
            schema=self.log.put_schema(self.schema.to_bytes()),
            reference=reference,
        )

    def subscriber(self) -> Subscriber:
        subscriber = Subscriber(self.store)
        subscriber.refresh()
        return subscriber


def seqs(manifests) -> list[int]:
    return [manifest.seq for manifest in manifests]


def assert_version(tensors, number: int) -> None:
    wanted = SPEC.weights(number)
    assert sorted(tensors) == sorted(wanted)
    for spec in SPEC.schema.tensors:
        assert tensors[spec.name].shape == spec.shape
        np.testing.assert_array_equal(tensors[spec.name].reshape(-1), wanted[spec.name])


def forge(store: MemoryStore, seq: int, **fields) -> None:
    """Replace fields of a manifest in the store, as somebody without our keys could."""
    key = manifest_key(seq)
    manifest = parse_manifest(open_envelope(store.get(key, max_bytes=1 << 20)))
    store.put(key, seal(replace(manifest, **fields).to_bytes()))


def anchor_blobs(channel: Channel) -> list[bytes]:
    whole = map(channel.shadow.whole, range(len(channel.schema)))
    return list(encode_anchor(channel.schema, whole))
