"""Reading a channel: what is believed, which way is taken, and what comes out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import vllm_delta.subscriber as subscriber_module
from vllm_delta.channel import Log, LogReader
from vllm_delta.channel.tail import MAX_ENVELOPE_BYTES
from vllm_delta.codec import Change, encode_anchor, encode_delta, encode_reference
from vllm_delta.errors import (
    BaseMismatchError,
    ChainError,
    ChannelError,
    DeltaError,
    DigestError,
    FormatError,
    ModelMismatchError,
    SettingsError,
    UnsupportedError,
)
from vllm_delta.events import Fetched
from vllm_delta.fingerprint import root
from vllm_delta.format import (
    BlobRef,
    Reference,
    Version,
    blob_key,
    digest,
    manifest_key,
    open_envelope,
    parse_manifest,
    seal,
)
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.shadow import Shadow
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import DeltaSpec, FaultyChannel, MemoryStore

SPEC = DeltaSpec(seed=3)


class Channel:
    """Writes versions of `SPEC` through the log, and keeps what each holds."""

    def __init__(self, *, reference: Reference | None = None) -> None:
        self.store = MemoryStore()
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

    def changes(self, number: int) -> list[Change]:
        diffs = (
            self.shadow.diff(place, bits, raw_above=0.5)
            for place, bits in enumerate(self.weights(number))
        )
        return [change for change in diffs if change is not None]

    def append(self, kind, number, blobs, *, reference=None, prints=None) -> None:
        prints = self.shadow.fingerprints if prints is None else prints
        self.log.append(
            kind,
            target=Version(number, root(self.schema, prints)),
            blobs=[self.log.put_blob(blob) for blob in blobs],
            schema=self.log.put_blob(self.schema.to_bytes()),
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


# Following


def test_an_empty_channel_has_nothing():
    store = MemoryStore()
    subscriber = Subscriber(store)
    assert subscriber.refresh() == []
    assert (subscriber.newest, subscriber.channel_id) == (None, None)
    with pytest.raises(ChannelError, match="nothing is published"):
        subscriber.plan()
    Log(store).claim("me")
    assert [m.kind for m in subscriber.refresh()] == ["fence"]
    assert subscriber.newest is None
    with pytest.raises(ChannelError, match="nothing is published"):
        subscriber.materialise()


def test_a_directory_that_is_not_there_yet_is_an_empty_channel(tmp_path):
    assert Subscriber(tmp_path / "absent").refresh() == []
    assert not (tmp_path / "absent").exists()


def test_refresh_gives_what_came_and_nothing_twice():
    channel = Channel()
    subscriber = Subscriber(channel.store)
    assert seqs(subscriber.refresh()) == [2]
    assert subscriber.refresh() == []
    channel.delta()
    channel.delta()
    assert seqs(subscriber.refresh()) == [3, 4]
    assert subscriber.newest == SPEC.version(2)


def test_a_newcomer_begins_at_the_newest_anchor_and_can_look_back():
    channel = Channel()
    channel.delta()
    channel.anchor(1)
    channel.delta()
    subscriber = Subscriber(channel.store)
    assert seqs(subscriber.refresh()) == [4, 5]
    assert subscriber.find(SPEC.version(0).root) == SPEC.version(0)
    assert subscriber.find("0" * 64) is None
    assert seqs(subscriber.history()) == [1, 2, 3, 4, 5]
    assert subscriber.refresh() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"channel": "0" * 32},
        {"epoch": 9},
        {"parent": "1" * 64},
        {"writer": "mallory"},
        {"base": Version(1, "2" * 64)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_manifest_that_does_not_continue_the_chain_is_refused(fields):
    channel = Channel()
    channel.delta()
    subscriber = channel.subscriber()
    channel.delta()
    channel.delta()
    good = channel.store.get(manifest_key(4), max_bytes=1 << 20)
    forge(channel.store, 4, **fields)
    for _ in range(2):
        with pytest.raises(ChainError):
            subscriber.refresh()
        assert subscriber.newest == SPEC.version(1)
        assert_version(subscriber.materialise(), 1)
    channel.store.put(manifest_key(4), good)
    assert seqs(subscriber.refresh()) == [4, 5]
    assert_version(subscriber.materialise(), 3)


BAD_RECORDS = {
    FormatError: b"{}",
    DigestError: b"0" * (MAX_ENVELOPE_BYTES + 1),
    UnsupportedError: seal(b'{"format":2}'),
}


@pytest.mark.parametrize("kind", BAD_RECORDS)
def test_a_record_that_cannot_be_read_is_told_and_crossed_only_by_an_anchor(kind):
    channel = Channel()
    subscriber = channel.subscriber()
    channel.delta()
    channel.delta()
    channel.store.put(manifest_key(3), BAD_RECORDS[kind])
    for _ in range(2):
        with pytest.raises(kind):
            subscriber.refresh()
        assert subscriber.newest == SPEC.version(0)
    channel.anchor(2)
    channel.delta()
    assert seqs(subscriber.refresh()) == [5, 6]
    assert_version(subscriber.materialise(), 3)
    assert subscriber.refresh() == []


@pytest.mark.parametrize("bad", [None, *BAD_RECORDS.values()])
def test_what_was_verified_before_a_bad_record_is_kept_and_the_error_told_after_it(bad):
    channel = Channel()
    subscriber = channel.subscriber()
    for _ in range(5):
        channel.delta()
    good = channel.store.get(manifest_key(6), max_bytes=1 << 20)
    channel.store.delete([manifest_key(6)])
    if bad is not None:
        channel.store.put(manifest_key(6), bad)
    assert seqs(subscriber.refresh()) == [3, 4, 5]
    assert subscriber.newest == SPEC.version(3)
    assert_version(subscriber.materialise(), 3)
    with pytest.raises((ChainError, *BAD_RECORDS)):
        subscriber.refresh()
    channel.store.put(manifest_key(6), good)
    assert seqs(subscriber.refresh()) == [6, 7]
    assert_version(subscriber.materialise(), 5)


def test_what_came_before_the_store_went_away_is_kept():
    channel = Channel()
    faulty = FaultyChannel(channel.store)
    subscriber = Subscriber(faulty)
    subscriber.refresh()
    channel.delta()
    channel.delta()
    faulty.script([None, "transport", "transport"])
    assert seqs(subscriber.refresh()) == [3]
    with pytest.raises(ChannelError):
        subscriber.refresh()
    assert seqs(subscriber.refresh()) == [4]


def test_a_record_that_was_bad_for_a_moment_gives_nothing_twice():
    """The whole chain is read again, and only what is new in it came."""
    channel = Channel()
    subscriber = channel.subscriber()
    channel.delta()
    assert seqs(subscriber.refresh()) == [3]
    channel.delta()
    store = BadOnce(channel.store, manifest_key(4))
    subscriber._log = LogReader(store)
    assert seqs(subscriber.refresh()) == [4]


class BadOnce:
    """A store that gives garbage for a key the first time."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key = store, key

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        if key == self._key:
            self._key = ""
            return b"{}"
        return self._store.get(key, max_bytes=max_bytes)


class Counting(FaultyChannel):
    """A store that counts what is read from it."""

    def reads(self, call) -> int:
        before = self.n_calls
        call()
        return self.n_calls - before


def test_a_root_is_looked_for_where_deltas_from_it_can_cost_less_than_an_anchor():
    """Each version that deltas are the way from is found; for an unknown root little is read."""
    channel = Channel()
    for number in range(1, 31):
        channel.delta()
        if number % 10 == 0:
            channel.anchor(number)
    channel.delta()
    ways = set()
    for number in range(32):
        version = SPEC.version(number)
        by_deltas = all(m.kind == "delta" for m in channel.subscriber().plan(version))
        ways.add(by_deltas)
        if by_deltas:
            assert channel.subscriber().find(version.root) == version
    assert ways == {True, False}
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema
    assert store.reads(lambda: subscriber.find("0" * 64)) < 10


def test_nothing_is_read_below_the_low_water_mark():
    channel = Channel()
    for _ in range(20):
        channel.delta()
    blobs = [channel.log.put_blob(blob) for blob in _anchor_blobs(channel)]
    for low in (channel.log.position.seq + 1, None):
        channel.log.append("anchor", target=SPEC.version(20), blobs=blobs, low=low)
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema

    def version_3() -> None:
        with pytest.raises(ChainError, match="number=3"):
            subscriber.plan(number=3)

    assert store.reads(lambda: subscriber.find("0" * 64)) <= 1
    assert store.reads(lambda: subscriber.plan(SPEC.version(3))) == 0
    assert store.reads(version_3) == 0


def test_a_version_beyond_the_newest_is_refused_without_reading_back():
    channel = Channel()
    for _ in range(5):
        channel.delta()
    channel.anchor(5)
    store = Counting(channel.store)
    subscriber = Subscriber(store)
    subscriber.refresh()
    _ = subscriber.schema

    def version_9() -> None:
        with pytest.raises(ChainError, match="number=9"):
            subscriber.plan(number=9)

    assert store.reads(version_9) == 0


def test_a_long_follower_keeps_a_bounded_part_of_the_log_and_still_finds_its_way(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_KEPT", 4)
    channel = Channel()
    subscriber = channel.subscriber()
    for number in range(1, 13):
        channel.delta()
        subscriber.refresh()
        assert len(subscriber._records) <= 4
        assert seqs(subscriber.plan(SPEC.version(number - 1))) == [number + 2]
    assert seqs(subscriber.plan(SPEC.version(2))) == list(range(5, 15))
    assert_version(subscriber.materialise(), 12)
    assert subscriber.find(SPEC.version(0).root) == SPEC.version(0)
    assert seqs(subscriber.history()) == list(range(1, 15))
    channel.delta()
    assert seqs(subscriber.refresh()) == [15]
    assert len(subscriber._records) == 4


def test_a_gap_is_told_and_crossed_only_by_an_anchor():
    channel = Channel()
    subscriber = channel.subscriber()
    channel.delta()
    channel.delta()
    channel.store.delete([manifest_key(3)])
    with pytest.raises(ChainError, match="missing"):
        subscriber.refresh()
    assert subscriber.newest == SPEC.version(0)
    channel.anchor(2)
    channel.delta()
    assert seqs(subscriber.refresh()) == [5, 6]
    assert_version(subscriber.materialise(), 3)


def test_after_a_broken_link_a_newer_anchor_of_the_channel_is_taken():
    channel = Channel()
    subscriber = channel.subscriber()
    channel.delta()
    channel.delta()
    channel.anchor(2)
    channel.delta()
    forge(channel.store, 3, writer="mallory")
    assert seqs(subscriber.refresh()) == [5, 6]
    assert_version(subscriber.materialise(), 3)


def test_a_broken_link_never_leads_to_an_older_version_or_another_channel():
    channel, other = Channel(), Channel()
    for _ in range(3):
        channel.delta()
    subscriber = channel.subscriber()
    other.delta()
    for seq in range(1, 6):
        channel.store.delete([manifest_key(seq)])
    for _ in range(9):
        other.anchor(1)
    for seq in range(1, 13):
        record = other.store.get(manifest_key(seq), max_bytes=1 << 20)
        channel.store.put(manifest_key(seq), record)
    with pytest.raises(ChainError):
        subscriber.refresh()
    assert subscriber.newest == SPEC.version(3)


def test_a_forged_head_changes_nothing():
    channel = Channel()
    channel.delta()
    for head in (b'{"seq":999}', b'{"seq":1}', b"nonsense", b""):
        channel.store.put("head", head)
        assert channel.subscriber().newest == SPEC.version(1)


# Planning


def test_a_reader_at_the_newest_version_needs_nothing():
    channel = Channel()
    channel.delta()
    assert channel.subscriber().plan(SPEC.version(1)) == []


def test_a_reader_that_lags_takes_the_deltas_in_order():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(SPEC.version(1))) == [4, 5, 6]
    assert seqs(subscriber.plan(SPEC.version(1), number=3)) == [4, 5]


def test_a_reader_without_a_version_takes_an_anchor():
    channel = Channel()
    channel.delta()
    channel.anchor(1)
    channel.delta()
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(None)) == [4, 5]
    assert seqs(subscriber.plan(Version(1, "9" * 64))) == [4, 5]
    assert seqs(subscriber.plan(None, number=0)) == [2]


def test_the_way_with_fewer_bytes_wins_whichever_it_is():
    store, tensors = MemoryStore(), {"w": torch.rand(5000)}
    publisher = Publisher(store, tensors, settings=PublisherSettings(anchor_ratio=100))
    versions = [publisher.version]
    subscriber = Subscriber(store)
    anchor_bytes = subscriber.refresh()[-1].payload_bytes
    deltas = []
    while sum(delta.payload_bytes for delta in deltas) < 1.5 * anchor_bytes:
        tensors["w"][::20] += 1.0
        versions.append(publisher.publish().version)
        deltas += subscriber.refresh()
    publisher.anchor()
    (anchor,) = subscriber.refresh()
    ways = set()
    for n_behind in range(1, len(versions)):
        chain = deltas[-n_behind:]
        by_deltas = sum(delta.payload_bytes for delta in chain) < anchor.payload_bytes
        assert subscriber.plan(versions[-1 - n_behind]) == (chain if by_deltas else [anchor])
        ways.add(by_deltas)
    assert ways == {True, False}


def test_a_plan_crosses_a_fence_but_not_a_new_beginning():
    store, tensors = MemoryStore(), {"w": torch.zeros(4000)}
    settings = PublisherSettings(anchor_ratio=100)

    def publish(publisher):
        tensors["w"][:5] += 1
        return publisher.publish().version

    publisher = Publisher(store, tensors, settings=settings)
    first = publish(publisher)
    publisher = Publisher(store, tensors, settings=settings)
    second = publish(publisher)
    subscriber = Subscriber(store)
    subscriber.refresh()
    assert seqs(subscriber.plan(first)) == [5]
    tensors["w"].zero_()
    tensors["w"][7] = 3
    publisher = Publisher(store, tensors, settings=settings)
    publish(publisher)
    subscriber.refresh()
    assert [m.kind for m in subscriber.plan(second)] == ["anchor", "delta"]
    assert seqs(subscriber.plan(second)) == [7, 8]


def test_what_lies_below_the_low_water_mark_is_no_way():
    channel = Channel()
    channel.delta()
    channel.anchor(1)
    channel.log.append(
        "anchor",
        target=SPEC.version(1),
        blobs=[channel.log.put_blob(b) for b in _anchor_blobs(channel)],
        low=4,
    )
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(SPEC.version(0))) == [5]
    with pytest.raises(ChainError, match="no longer kept"):
        subscriber.plan(None, number=0)


def _anchor_blobs(channel: Channel) -> list[bytes]:
    whole = map(channel.shadow.whole, range(len(channel.schema)))
    return list(encode_anchor(channel.schema, whole))


def test_a_version_that_was_never_published_is_told():
    with pytest.raises(ChainError, match="number=7"):
        Channel().subscriber().plan(number=7)


# Blobs


def test_every_version_is_rebuilt_bit_for_bit():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    channel.anchor(4)
    channel.delta()
    subscriber = channel.subscriber()
    for number in range(6):
        assert_version(subscriber.materialise(number), number)


def test_fetching_is_told_to_hooks():
    channel, events = Channel(), []
    channel.delta()
    subscriber = Subscriber(channel.store, hooks=[events.append])
    manifest = subscriber.refresh()[-1]
    blobs = subscriber.fetch(manifest)
    assert [digest(blob) for blob in blobs] == [ref.sha256 for ref in manifest.blobs]
    assert [type(event) for event in events] == [Fetched]
    assert events[0].n_bytes == sum(map(len, blobs))


def test_a_blob_that_arrives_damaged_once_is_asked_for_again():
    channel = Channel()
    channel.delta()
    faulty = FaultyChannel(channel.store)
    subscriber = Subscriber(faulty)
    manifest = subscriber.refresh()[-1]
    faulty.script(["corrupt"])
    subscriber.fetch(manifest)
    assert faulty.suffered == ["corrupt"]
    faulty.script(["corrupt", "corrupt"])
    with pytest.raises(DigestError):
        subscriber.fetch(manifest)


def damage(data: bytes, how: str) -> bytes | None:
    return {
        "missing": None,
        "empty": b"",
        "truncated": data[:-1],
        "flipped": data[:9] + bytes([data[9] ^ 4]) + data[10:],
        "longer": data + b"\0",
    }[how]


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "flipped", "longer"])
@pytest.mark.parametrize("which", ["schema", "anchor", "delta"])
def test_a_bad_blob_is_refused_and_named(which, how):
    channel = Channel()
    channel.delta()
    manifests = Subscriber(channel.store).refresh()
    refs = {"schema": manifests[0].schema, "anchor": manifests[0].blobs[-1]}
    ref = refs.get(which, manifests[1].blobs[-1])
    good = channel.store.get(blob_key(ref.sha256), max_bytes=1 << 20)
    bad = damage(good, how)
    channel.store.delete([blob_key(ref.sha256)])
    if bad is not None:
        channel.store.put(blob_key(ref.sha256), bad)
    subscriber = channel.subscriber()
    with pytest.raises(DigestError):
        subscriber.materialise()
    channel.store.put(blob_key(ref.sha256), good)
    assert_version(subscriber.materialise(), 1)


def test_a_delta_gives_no_change_before_all_its_blobs_are_there():
    channel = Channel()
    channel.delta()
    subscriber = channel.subscriber()
    manifest = subscriber.newest_manifest
    assert len(manifest.blobs) > 1
    channel.store.delete([blob_key(manifest.blobs[-1].sha256)])
    with pytest.raises(DigestError):
        next(subscriber.changes(manifest))


def test_a_fence_has_no_changes():
    store = MemoryStore()
    Log(store).claim("me")
    subscriber = Subscriber(store)
    (fence,) = subscriber.refresh()
    with pytest.raises(ValueError, match="fence"):
        next(subscriber.changes(fence))


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
    channel.append("delta", 1, _anchor_blobs(channel))


def lie_about_size(channel: Channel) -> None:
    blob = b"".join(encode_delta(channel.schema, channel.changes(1)))
    channel.log.put_blob(blob)
    ref = BlobRef(digest(blob), len(blob) - 1)
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


def test_an_anchor_by_reference_counts_as_the_model_in_a_plan():
    channel = Channel(reference=Reference("someone/model"))
    channel.delta()
    channel.anchor(1)
    subscriber = channel.subscriber()
    assert seqs(subscriber.plan(None)) == [4]
    assert [m.reference is None for m in subscriber.plan(None, number=0)] == [False]


def test_every_error_has_an_action():
    with pytest.raises(DeltaError) as caught:
        Channel().subscriber().plan(number=3)
    assert caught.value.action == "reseed"
