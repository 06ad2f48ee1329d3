"""Versions rebuilt step by step: publishers that lie, and bases that are others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.spec_channel import SPEC, Channel, anchor_blobs, assert_version
from vllm_delta.codec import encode_anchor, encode_delta
from vllm_delta.errors import (
    BaseMismatchError,
    DigestError,
    FormatError,
    ModelMismatchError,
    SettingsError,
)
from vllm_delta.fingerprint import MASK64, coefficients, weigh
from vllm_delta.format import (
    BlobRef,
    Reference,
    Version,
)
from vllm_delta.replay import replay
from vllm_delta.shadow import Shadow
from vllm_delta.subscriber import Subscriber

# Publishers that lie: the digests are right, the contents are not


def lie_twice(channel: Channel) -> None:
    """The same delta again, for another version number."""
    channel.delta()
    again = Subscriber(channel.store).refresh()[-1]
    channel.log.append("delta", target=Version(2, again.target.root), blobs=again.blobs)


def lie_about_touched(channel: Channel) -> None:
    first, *rest = channel.changes(1)
    changes = [replace(first, touched=first.touched ^ 1), *rest]
    prints = advanced(channel, changes)
    channel.append("delta", 1, encode_delta(channel.schema, changes), prints=prints)


def lie_about_target(channel: Channel) -> None:
    first, *rest = channel.changes(1)
    changes = [replace(first, target=first.target ^ 1), *rest]
    prints = advanced(channel, changes)
    channel.append("delta", 1, encode_delta(channel.schema, changes), prints=prints)


def lie_about_root(channel: Channel) -> None:
    changes = channel.changes(1)
    channel.append("delta", 1, encode_delta(channel.schema, changes))


def lie_by_two_blobs_of_a_tensor(channel: Channel) -> None:
    changes = channel.changes(1)
    blobs = [*encode_delta(channel.schema, changes), *encode_delta(channel.schema, changes[:1])]
    channel.append("delta", 1, blobs, prints=advanced(channel, changes))


def lie_about_the_base(channel: Channel) -> None:
    """A delta of version 2 on 3, published on 0."""
    old = Shadow(channel.schema, channel.weights(2))
    changes = [old.diff(i, bits, raw_above=0.5) for i, bits in enumerate(channel.weights(3))]
    changes = [change for change in changes if change is not None]
    prints = advanced(channel, changes)
    channel.append("delta", 1, encode_delta(channel.schema, changes), prints=prints)


def lie_by_an_anchor_in_parts(channel: Channel) -> None:
    whole = [channel.shadow.whole(i) for i in range(1, len(channel.schema))]
    channel.append("anchor", 0, encode_anchor(channel.schema, whole))


def lie_by_an_anchor_of_other_bits(channel: Channel) -> None:
    whole = [channel.shadow.whole(i) for i in range(len(channel.schema))]
    whole[-1] = replace(whole[-1], bits=~whole[-1].bits)
    channel.append("anchor", 0, encode_anchor(channel.schema, whole))


def lie_by_another_versions_anchor(channel: Channel) -> None:
    other = Shadow(channel.schema, channel.weights(1))
    whole = [other.whole(i) for i in range(len(channel.schema))]
    channel.append("anchor", 0, encode_anchor(channel.schema, whole))


def lie_about_the_kind(channel: Channel) -> None:
    channel.append("delta", 1, anchor_blobs(channel))


def lie_about_size(channel: Channel) -> None:
    blob = b"".join(encode_delta(channel.schema, channel.changes(1)))
    ref = channel.log.put_blob(blob)
    ref = BlobRef(ref.sha256, ref.n_bytes - 1)
    channel.log.append("delta", target=Version(1, "1" * 64), blobs=[ref])


def advanced(channel: Channel, changes) -> list[int]:
    prints = list(channel.shadow.fingerprints)
    for change in changes:
        prints[change.tensor] = change.target
    return prints


@pytest.mark.parametrize(
    ("lie", "kind", "message"),
    [
        (lie_twice, BaseMismatchError, "not the delta's base"),
        (lie_about_touched, BaseMismatchError, "not the delta's base"),
        (lie_about_the_base, BaseMismatchError, "not the delta's base"),
        (lie_about_target, FormatError, "misses the fingerprint"),
        (lie_about_root, FormatError, "not the version's"),
        (lie_by_two_blobs_of_a_tensor, FormatError, "two blobs"),
        (lie_by_an_anchor_in_parts, FormatError, "lacks tensors"),
        (lie_by_an_anchor_of_other_bits, FormatError, "not its fingerprint's"),
        (lie_by_another_versions_anchor, FormatError, "not its version's"),
        (lie_about_the_kind, FormatError, "another kind"),
        (lie_about_size, DigestError, "too large"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_publisher_that_lies_is_found_out(lie, kind, message):
    channel = Channel()
    lie(channel)
    subscriber = channel.subscriber()
    with pytest.raises(kind, match=message):
        subscriber.materialise()


# Merged deltas, read record by record


def merged_lie(channel: Channel, change) -> None:
    """A merged delta of which one change is `change`d, or left out."""
    for _ in range(4):
        channel.delta()
    changes = channel.changes(4, since=1)
    place = next(i for i, c in enumerate(changes) if c.indices is not None and c.nnz > 1)
    wrong = change(changes[place])
    kept = [*changes[:place], *([wrong] if wrong else []), *changes[place + 1 :]]
    blobs = encode_delta(channel.schema, kept)
    channel.append("merged", 4, blobs, base=SPEC.version(1))


def one_less(change):
    """The change without its first element, and with the fingerprint that then is touched."""
    spec, bits = SPEC.schema.tensors[change.tensor], SPEC.weights(1)
    first = change.indices[:1]
    touched = change.touched - weigh(bits[spec.name][first], coefficients(spec, first))
    indices, steps = change.indices[1:], change.steps[1:]
    assert indices.size
    return replace(change, indices=indices, steps=steps, touched=touched & MASK64)


MERGED_LIES = {
    "another step": lambda c: replace(c, steps=np.where(c.steps == -1, 1, -c.steps)),
    "touched": lambda c: replace(c, touched=c.touched ^ 1),
    "target": lambda c: replace(c, target=c.target ^ 1),
    "a change less": one_less,
    "a tensor less": lambda c: None,
}


@pytest.mark.parametrize("lie", MERGED_LIES)
def test_a_merged_delta_that_lies_is_found_out_on_the_way(lie):
    channel = Channel()
    merged_lie(channel, MERGED_LIES[lie])
    subscriber = channel.subscriber()
    with pytest.raises(FormatError, match="does not lead here"):
        for _ in replay(subscriber.schema, subscriber.history(), subscriber.changes):
            pass


def test_a_merged_delta_that_names_a_base_that_it_is_not_made_for_is_found_out():
    """Its fingerprints are right for the version that it was made from."""
    channel = Channel()
    for _ in range(4):
        channel.delta()
    blobs = encode_delta(channel.schema, channel.changes(4, since=1))
    channel.append("merged", 4, blobs, base=SPEC.version(2))
    subscriber = channel.subscriber()
    with pytest.raises(FormatError, match="does not lead here"):
        for _ in replay(subscriber.schema, subscriber.history(), subscriber.changes):
            pass


def test_a_true_merged_delta_is_proven_on_the_way():
    channel = Channel()
    for _ in range(5):
        channel.delta()
        if channel.number > 2:
            channel.merged(channel.number - 2)
    channel.merged(0)
    subscriber = channel.subscriber()
    steps = replay(subscriber.schema, subscriber.history(), subscriber.changes)
    proven = [(m.kind, replica.proven) for m, replica in steps]
    assert proven.count(("merged", True)) == 4
    assert len(proven) == 10


def test_after_an_anchor_by_reference_a_merged_delta_is_proven_as_far_as_fingerprints_go():
    channel = Channel(reference=Reference("someone/model"))
    for _ in range(3):
        channel.delta()
    channel.merged(0)
    subscriber = channel.subscriber()
    steps = replay(subscriber.schema, subscriber.history(), subscriber.changes)
    assert [(m.kind, replica.proven) for m, replica in steps][-1] == ("merged", False)
    channel = Channel(reference=Reference("someone/model"))
    merged_lie(channel, MERGED_LIES["target"])
    subscriber = channel.subscriber()
    with pytest.raises(FormatError, match="does not lead here"):
        for _ in replay(subscriber.schema, subscriber.history(), subscriber.changes):
            pass


# Anchors by reference


def test_an_anchor_by_reference_needs_that_checkpoint():
    channel = Channel(reference=Reference("someone/model", "rev"))
    channel.delta()
    subscriber = channel.subscriber()
    shapes = {spec.name: spec.shape for spec in SPEC.schema.tensors}
    base = {name: bits.reshape(shapes[name]) for name, bits in SPEC.weights(0).items()}
    kept = {name: bits.copy() for name, bits in base.items()}
    assert_version(subscriber.materialise(base=base), 1)
    for name, bits in kept.items():
        np.testing.assert_array_equal(base[name], bits, err_msg="the base was modified")

    with pytest.raises(SettingsError, match="someone/model"):
        subscriber.materialise()
    name = max(base, key=lambda name: base[name].size)
    changed = base[name].copy()
    changed.flat[0] ^= 1
    for broken, kind in (
        ({n: b for n, b in base.items() if n != name}, ModelMismatchError),
        (base | {name: base[name].reshape(-1)}, ModelMismatchError),
        (base | {name: base[name].view("u1")}, ModelMismatchError),
        (base | {name: changed}, BaseMismatchError),
    ):
        with pytest.raises(kind, match=f"name='{name}'"):
            subscriber.materialise(base=broken)
