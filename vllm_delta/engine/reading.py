"""The changes of a version, fetched, verified and decoded."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_delta.channel import LogReader
from vllm_delta.codec import Change, LaneDecoder, decode
from vllm_delta.errors import FormatError, ModelMismatchError
from vllm_delta.fingerprint import root
from vllm_delta.format import Manifest, Schema


def read_changes(
    log: LogReader, schema: Schema, manifest: Manifest, lanes: LaneDecoder | None = None
) -> Iterator[Change]:
    """Reads a delta or an anchor blob by blob; nothing of it may be used before its end.

    Args:
        lanes: decodes `hazard` entries.

    Raises:
        DigestError, ChannelError: a blob is damaged or cannot be had.
        FormatError: the bytes break the format.
        ModelMismatchError: the anchor is a public checkpoint, which holds no bytes.
    """
    if manifest.reference is not None:
        raise ModelMismatchError(
            "the channel's anchor is a public checkpoint; start the engine from it",
            repository=manifest.reference.repository,
            revision=manifest.reference.revision,
        )
    kind = manifest.content
    targets: list[int] = []
    last = -1
    for place in range(len(manifest.blobs)):
        for change in decode(log.get_blob(manifest, place), schema, kind, lanes):
            if change.tensor <= last:
                raise FormatError("a tensor stands in two blobs", tensor=change.tensor)
            last = change.tensor
            targets.append(change.target)
            yield change
    if kind == "anchor" and (
        manifest.target is None
        or len(targets) != len(schema)
        or root(schema, targets) != manifest.target.root
    ):
        raise FormatError("an anchor's tensors are not its version's", seq=manifest.seq)
