from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tests.channel.toy import (
    START,
    append_anchor,
    append_delta,
    begin,
    fetched,
    root_of,
)
from vllm_delta.channel import Log
from vllm_delta.channel.chain import parse_record
from vllm_delta.errors import (
    ChainError,
    ChannelError,
    DigestError,
    FencedError,
)
from vllm_delta.format import (
    HEAD_KEY,
    MAX_BLOB_BYTES,
    BlobRef,
    Manifest,
    Reference,
    Version,
    blob_key,
    digest,
    manifest_key,
    seal,
)
from vllm_delta.testing import MemoryStore


def test_a_new_channel_begins_with_a_fence_and_an_anchor() -> None:
    log = Log(MemoryStore(), clock=lambda: 12.5)
    fence = log.claim("trainer")
    assert (fence.seq, fence.epoch, fence.kind, fence.target) == (1, 1, "fence", None)
    assert (fence.writer, fence.time, fence.low, fence.anchor) == ("trainer", 12.5, 1, None)
    anchor = append_anchor(log, START).manifest
    assert (anchor.seq, anchor.anchor, anchor.target.number) == (2, 2, 0)
    delta = append_delta(log, START, 0, 1).manifest
    assert (delta.seq, delta.epoch, delta.anchor, delta.base) == (3, 1, 2, anchor.target)
    assert delta.schema == anchor.schema
    assert {delta.channel, anchor.channel} == {fence.channel}
    assert fetched(log.store, HEAD_KEY) == b'{"seq":3}'


def test_two_new_channels_have_different_ids() -> None:
    assert Log(MemoryStore()).claim("a").channel != Log(MemoryStore()).claim("a").channel


def test_a_restart_restates_what_the_channel_stands_at() -> None:
    store = MemoryStore()
    begin(Log(store), 3)
    tail = Log(store).tail()
    assert tail is not None
    fence = Log(store).claim("next")
    assert (fence.seq, fence.epoch) == (tail.seq + 1, 2)
    assert fence.base == fence.target == tail.manifest.target
    assert (fence.anchor, fence.schema, fence.low) == (2, tail.manifest.schema, 1)
    assert fence.blobs == ()
    assert fence.reference is None


def test_an_anchor_by_reference_is_restated_by_the_fence_without_it() -> None:
    store = MemoryStore()
    log = Log(store)
    log.claim("trainer")
    reference = Reference("someone/model", "abc")
    record = log.append(
        "anchor",
        target=Version(0, "0" * 64),
        blobs=[log.put_blob(b"fingerprints")],
        schema=log.put_schema(b"schema"),
        reference=reference,
    )
    assert log.tail() == record
    assert record.manifest.reference == reference
    assert Log(store).claim("next").reference is None


def test_a_fenced_trainer_never_commits_again() -> None:
    store = MemoryStore()
    old, new = Log(store), Log(store)
    begin(old, 2)
    new.claim("new")
    for _ in range(3):
        with pytest.raises(FencedError, match="owns") as caught:
            append_delta(old, START, 0, 1)
        assert caught.value.action == "stop"
        with pytest.raises(FencedError):
            old.claim("old")
        with pytest.raises(FencedError):
            old.put_blob(b"x")
        append_delta(new, START, 0, 1)
    tail = new.tail()
    assert tail == new.position
    assert [r.manifest.epoch for r in new.read_chain(1, tail.seq)] == [1] * 4 + [2] * 4


def test_the_error_of_a_fenced_trainer_names_the_other() -> None:
    store = MemoryStore()
    old = Log(store)
    begin(old)
    Log(store).claim("the other one")
    with pytest.raises(FencedError, match="writer='the other one'") as caught:
        append_anchor(old, START)
    assert caught.value.seq == 3


def test_a_trainer_that_lost_the_channel_does_not_claim_it_back() -> None:
    store = MemoryStore()
    old, new = Log(store), Log(store)
    begin(old)
    new.claim("new")
    with pytest.raises(FencedError):
        old.claim("old")
    append_delta(new, START, 0, 1)


def test_a_trainer_may_claim_its_own_channel_again() -> None:
    log = Log(MemoryStore())
    begin(log, 1)
    assert log.claim("same").epoch == 2
    append_delta(log, START, 0, 1)


def test_claiming_goes_on_past_another_s_claim() -> None:
    """Between our look at the tail and our write another trainer gets in."""

    class Overtaken(MemoryStore):
        n_left = 3

        def put_new(self, key: str, data: bytes) -> bool:
            if self.n_left:
                n_left, self.n_left = self.n_left, 0
                Log(self).claim("faster")
                self.n_left = n_left - 1
            return super().put_new(key, data)

    store = Overtaken()
    log = Log(store)
    fence = log.claim("slower")
    assert (fence.seq, fence.epoch) == (4, 4)
    assert log.tail() == log.position


def test_claiming_gives_up_when_others_never_stop() -> None:
    class Busy(MemoryStore):
        def put_new(self, key: str, data: bytes) -> bool:
            previous = Log(self).tail()
            fields = {} if previous is None else {"parent": previous.digest}
            manifest = parse_record(data, int(key[2:])).manifest
            other = dataclasses.replace(manifest, writer="busy", **fields)
            return super().put_new(key, seal(other.to_bytes()))

    with pytest.raises(ChannelError, match="keep writing"):
        Log(Busy()).claim("patient")


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": Version(3, "1" * 64)},
        {"target": Version(1, "1" * 64)},
        {"base": Version(0, "0" * 64)},
        {"base": Version(1, "0" * 64)},
        {"blobs": []},
        {"anchor": 3},
        {"low": 3},
        {"schema": BlobRef("0" * 64, 5)},
        {"reference": Reference("a", "b")},
        {"kind": "anchor", "target": Version(2, "1" * 64)},
        {"kind": "anchor", "target": Version(1, "1" * 64)},
        {"kind": "fence"},
    ],
    ids=str,
)
def test_a_record_that_a_reader_would_refuse_is_the_caller_s_mistake(wrong: dict[str, Any]) -> None:
    log = Log(MemoryStore())
    begin(log, 1)
    blob = log.put_blob(b"x")
    good = {"kind": "delta", "target": Version(2, "1" * 64), "blobs": [blob]}
    with pytest.raises(ValueError, match="may follow"):
        log.append(**{**good, **wrong})
    assert log.tail() == log.position
    log.append(**good)


def test_appending_needs_a_claim() -> None:
    log = Log(MemoryStore())
    with pytest.raises(ValueError, match="claim"):
        log.append("delta", target=Version(1, "1" * 64), blobs=[])


def test_a_new_version_by_anchor_comes_only_right_after_a_fence() -> None:
    store = MemoryStore()
    begin(Log(store), 2)
    log = Log(store)
    log.claim("other weights")
    other = (9, 9, 9, 9)
    record = append_anchor(log, other)
    assert record.manifest.target == Version(3, root_of(other))
    assert append_anchor(log, other).manifest.target == record.manifest.target
    with pytest.raises(ValueError, match="target"):
        append_anchor(log, START)


def test_the_low_water_mark_rises_to_the_newest_anchor_at_most() -> None:
    log = Log(MemoryStore())
    weights = begin(log, 2)
    anchor = append_anchor(log, weights)
    blob = [log.put_blob(b"x")]
    with pytest.raises(ValueError, match="low"):
        log.append("delta", target=Version(3, "3" * 64), blobs=blob, low=anchor.seq + 1)
    log.append("delta", target=Version(3, "3" * 64), blobs=blob, low=anchor.seq)
    with pytest.raises(ValueError, match="low"):
        log.append("delta", target=Version(4, "4" * 64), blobs=blob, low=anchor.seq - 1)
    assert log.append("delta", target=Version(4, "4" * 64), blobs=blob).manifest.low == anchor.seq


@pytest.mark.parametrize("loss", ["restored from an older copy", "replaced by another channel"])
def test_a_trainer_does_not_build_on_a_store_that_lost_its_record(loss: str) -> None:
    store = MemoryStore()
    log = Log(store)
    begin(log, 3)
    if loss == "restored from an older copy":
        store.delete([manifest_key(4), manifest_key(5)])
    else:
        other = MemoryStore()
        begin(Log(other), 3)
        for seq in range(1, 6):
            store.put(manifest_key(seq), fetched(other, manifest_key(seq)))
    before = store.list("m/")
    for action in (lambda: append_delta(log, START, 0, 1), lambda: log.claim("again")):
        with pytest.raises(ChainError, match="gone"):
            action()
    assert store.list("m/") == before


def with_blob(log: Log, data: bytes) -> Manifest:
    """A manifest, as a reader would have it, that names one blob of these bytes."""
    begin(log, 1)
    ref = log.put_blob(data, shard=3)
    assert log.position is not None
    assert ref.shard == 3
    before = log.position.manifest
    return dataclasses.replace(before, seq=before.seq + 1, blobs=(ref,))


def test_a_blob_is_checked_in_size_and_digest() -> None:
    log = Log(MemoryStore())
    manifest = with_blob(log, b"payload")
    (ref,) = manifest.blobs
    key = blob_key(ref.sha256)
    stored = log.store.get(key, max_bytes=100)
    assert stored is not None
    assert stored.startswith(b"payload")
    assert ref == BlobRef(digest(stored), len(stored), 3)
    assert log.get_blob(manifest, 0) == b"payload"
    for damaged, message in (
        (b"", "wrong size"),
        (stored[:-1], "wrong size"),
        (stored + b"!", "too large"),
        (b"P" + stored[1:], "wrong digest"),
    ):
        log.store.put(key, damaged)
        with pytest.raises(DigestError, match=message) as caught:
            log.get_blob(manifest, 0)
        assert caught.value.key == key
    log.store.delete([key])
    with pytest.raises(DigestError, match="missing"):
        log.get_blob(manifest, 0)


def test_no_two_writes_of_a_blob_are_of_one_object() -> None:
    """So that a delete sent long ago cannot hit what was written since."""
    log = Log(MemoryStore())
    first, second = with_blob(log, b"payload"), log.put_blob(b"payload")
    assert first.blobs[0].sha256 != second.sha256
    log.store.delete([blob_key(second.sha256)])
    assert log.get_blob(first, 0) == b"payload"


def test_a_large_blob_comes_in_pieces_and_is_checked_all_the_same() -> None:
    class Pieces(MemoryStore):
        def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
            data = self.get(key, max_bytes=max_bytes)
            assert data is not None
            return (data[place : place + (1 << 20)] for place in range(start, len(data), 1 << 20))

    log = Log(Pieces())
    data = random.Random(0).randbytes(5_000_000)
    manifest = with_blob(log, data)
    assert log.get_blob(manifest, 0) == data
    key = blob_key(manifest.blobs[0].sha256)
    stored = log.store.get(key, max_bytes=6_000_000)
    assert stored is not None
    log.store.put(key, stored[:-9] + bytes([stored[-9] ^ 1]) + stored[-8:])
    with pytest.raises(DigestError, match="wrong digest"):
        log.get_blob(manifest, 0)


def test_blobs_have_a_least_and_a_most_size() -> None:
    log = Log(MemoryStore())
    with pytest.raises(ValueError, match="at least 1"):
        log.put_blob(b"")
    with pytest.raises(ValueError, match="1 to"):
        log.put_schema(b"")

    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_BLOB_BYTES + 1

    with pytest.raises(ValueError, match="1 to"):
        log.put_schema(Huge())


def test_a_manifest_s_own_claims_do_not_size_the_read() -> None:
    """A blob is read up to the size its manifest names, and no further."""

    class Bounded(MemoryStore):
        asked: ClassVar[list[int]] = []

        def get(self, key: str, *, max_bytes: int) -> bytes | None:
            self.asked.append(max_bytes)
            return super().get(key, max_bytes=max_bytes)

    log = Log(Bounded())
    manifest = with_blob(log, b"12345")
    assert max(log.store.asked) <= 2 << 20
    log.get_blob(manifest, 0)
    assert log.store.asked[-1] == manifest.blobs[0].n_bytes


def test_manifests_are_immutable_objects() -> None:
    log = Log(MemoryStore())
    manifest: Manifest = log.claim("trainer")
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.epoch = 7  # type: ignore[misc]
