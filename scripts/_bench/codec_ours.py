"""Our codecs as a publisher and a reader use them, and what a version of theirs takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scripts._bench.codec_traces import View
from vllm_delta.codec import Change, Codec, HostLanes, decode, encode_delta
from vllm_delta.codec.order import Signed, Unsigned, steps_between
from vllm_delta.commit import PublisherSettings
from vllm_delta.format import NO_PARENT, BlobRef, Manifest, Version, digest, seal
from vllm_delta.shadow import Shadow


class Ours:
    """`gap` or `hazard` on one view of one step.

    Encoding is what a publisher does: compare every tensor with the shadow, weigh the changes for
    the fingerprints, code them as blobs. Decoding is what a reader does before it writes: blobs
    to indices and steps, checked to the end. The shadow itself is made beforehand.

    Args:
        view: base and target.
        codec: also the coder's name; with the publisher's default settings for it.
        shadow: of the view's base.
        shards: parts into which readers split tensors; more take more tiles (`hazard`).
        n_threads: threads that compare tensors and code lanes.
    """

    def __init__(
        self, view: View, codec: Codec, shadow: Shadow, *, shards: int = 1, n_threads: int = 1
    ) -> None:
        self.name: str = codec
        self._codec: Codec = codec
        self._raw_above = PublisherSettings(codec=codec).replaced_above
        self._view, self._shadow = view, shadow
        self._shards, self._n_threads = shards, n_threads

    def changes(self) -> Iterator[Change]:
        """What a publisher finds changed."""
        return self._shadow.diffs(
            self._view.target, raw_above=self._raw_above, n_threads=self._n_threads
        )

    def code(self, changes: Iterator[Change]) -> list[bytes]:
        """The second half of `encode`: changes to blobs."""
        return list(
            encode_delta(
                self._view.schema,
                changes,
                codec=self._codec,
                base=self._base,
                shards=self._shards,
                n_threads=self._n_threads,
            )
        )

    def encode(self) -> list[bytes]:
        return self.code(self.changes())

    def settle(self) -> None:
        """Nothing is left behind."""

    def decode(self, payload: list[bytes]) -> Iterator[Change]:
        lanes = HostLanes(self._base, self._n_threads)
        for blob in payload:
            yield from decode(blob, self._view.schema, "delta", lanes)

    def n_bytes(self, payload: list[bytes]) -> int:
        """All blobs and the manifest."""
        return sum(map(len, payload)) + manifest_bytes(self._view, self._shadow, payload)

    def holds(self, payload: list[bytes]) -> bool:
        """Whether every change is there with its very indices and steps, and no other."""
        left = dict(enumerate(zip(self._view.base, self._view.target, strict=True)))
        for change in self.decode(payload):
            if not _is_change(change, *left.pop(change.tensor)):
                return False
        return all(np.array_equal(old, new) for old, new in left.values())

    def _base(self, tensor: int) -> Unsigned:
        return self._shadow.bits[tensor]


def manifest_bytes(view: View, shadow: Shadow, blobs: list[bytes]) -> int:
    """Size of the record that names the blobs, as a channel of some age would hold it."""
    schema = view.schema
    manifest = Manifest(
        channel="0" * 32,
        seq=1234,
        epoch=2,
        parent=NO_PARENT,
        kind="delta",
        base=Version(1200, shadow.root),
        target=Version(1201, shadow.root),
        anchor=1034,
        low=1,
        schema=BlobRef(schema.digest, len(schema.to_bytes()), 0),
        blobs=tuple(BlobRef(digest(blob), len(blob), 0) for blob in blobs),
        reference=None,
        writer="trainer-0.example.internal:12345:0123456789ab",
        time=1767225600.123456,
    )
    return len(seal(manifest.to_bytes()))


def _is_change(change: Change, old: Unsigned, new: Unsigned) -> bool:
    if change.bits is not None:
        return np.array_equal(change.bits, new)
    indices: Signed | None = change.indices
    steps: Signed | None = change.steps
    assert indices is not None
    assert steps is not None
    places = np.flatnonzero(old != new)
    return np.array_equal(indices, places) and np.array_equal(
        steps, steps_between(old[places], new[places])
    )
