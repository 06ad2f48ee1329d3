"""Reading a channel: what is believed, and what comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.spec_channel import SPEC, Channel, assert_version, forge, seqs
from vllm_delta.channel import NO_KEYS, Keys, Log, LogReader
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.channel.reader import SALT_BYTES
from vllm_delta.channel.sealing import is_sealed
from vllm_delta.channel.tail import MAX_ENVELOPE_BYTES
from vllm_delta.codec import encode_delta
from vllm_delta.errors import (
    ChainError,
    ChannelError,
    DeltaError,
    DigestError,
    FormatError,
    SettingsError,
    SignatureError,
    UnsupportedError,
)
from vllm_delta.events import Fetched
from vllm_delta.format import (
    Version,
    blob_key,
    manifest_key,
    open_envelope,
    seal,
)
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore

BF16 = torch.bfloat16


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


def test_merged_deltas_lead_to_the_same_bits():
    """The whole way by merged deltas where they are shorter, and from their base on."""
    channel = Channel()
    for number in range(1, 10):
        channel.delta()
        if number % 3 == 0:
            channel.merged(number - 3)
    channel.merged(0)
    subscriber = channel.subscriber()
    kinds = {m.kind for n in range(10) for m in subscriber.plan(number=n)}
    assert "merged" in kinds
    for number in range(10):
        assert_version(subscriber.materialise(number), number)


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_a_version_is_not_lost_by_a_bad_merged_delta(how):
    """Those that it stands for are taken instead."""
    channel = Channel()
    for _ in range(4):
        channel.delta()
    channel.merged(0)
    subscriber = channel.subscriber()
    (merged,) = subscriber.plan(SPEC.version(0))
    assert merged.kind == "merged"
    ref = merged.blobs[0]
    bad = damage(channel.store.get(blob_key(ref.sha256), max_bytes=1 << 20), how)
    channel.store.delete([blob_key(ref.sha256)])
    if bad is not None:
        channel.store.put(blob_key(ref.sha256), bad)
    with pytest.raises(DigestError):
        list(subscriber.changes(merged))
    assert_version(subscriber.materialise(), 4)


def test_a_version_is_not_lost_by_a_merged_delta_that_lies():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    wrong = [replace(c, touched=c.touched ^ 1) for c in channel.changes(4, since=0)]
    channel.append("merged", 4, encode_delta(channel.schema, wrong), base=SPEC.version(0))
    subscriber = channel.subscriber()
    assert [m.kind for m in subscriber.plan()] == ["anchor", "merged"]
    assert_version(subscriber.materialise(), 4)


def test_the_time_after_a_version_is_that_of_the_next_whatever_merged_deltas_there_are():
    now = [0.0]
    channel = Channel()
    channel.log._clock = lambda: now[0]
    for number in range(1, 6):
        now[0] = 10.0 * number
        channel.delta()
    now[0] = 100.0
    channel.merged(1)
    subscriber = channel.subscriber()
    assert subscriber.plan(SPEC.version(1))[0].kind == "merged"
    assert [subscriber.time_after(SPEC.version(n)) for n in range(6)] == [10, 20, 30, 40, 50, None]


def test_fetching_is_told_to_hooks():
    channel, events = Channel(), []
    channel.delta()
    subscriber = Subscriber(channel.store, hooks=[events.append])
    manifest = subscriber.refresh()[-1]
    blobs = subscriber.fetch(manifest)
    assert [len(blob) + SALT_BYTES for blob in blobs] == [ref.n_bytes for ref in manifest.blobs]
    assert [type(event) for event in events] == [Fetched]
    assert events[0].n_bytes == manifest.payload_bytes


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


def test_every_error_has_an_action():
    with pytest.raises(DeltaError) as caught:
        Channel().subscriber().plan(number=3)
    assert caught.value.action == "reseed"


# Signed and sealed


KEYS = Keys(signing=Ed25519PrivateKey.from_private_bytes(b"k" * 32), sealing=(b"s" * 32,))
READERS = Keys(trusted=(KEYS.signing.public_key(),), sealing=KEYS.sealing)


def test_a_signed_and_sealed_channel_is_followed_over_the_trainer_s_restarts(tmp_path):
    store, tensors = MemoryStore(), {"w": torch.arange(4000.0), "v": torch.ones(3, dtype=BF16)}
    settings = PublisherSettings(anchor_ratio=100)
    subscriber = Subscriber(store, keys=READERS, ratchet=Ratchet(tmp_path, store.url))
    for number in range(0, 6, 2):
        with Publisher(store, tensors, keys=KEYS, settings=settings) as publisher:
            assert publisher.version.number == number, "it goes on, and begins nothing anew"
            for _ in range(2):
                tensors["w"][number::97] += 1
                publisher.publish()
                subscriber.refresh()
                made = subscriber.materialise()
                for name, tensor in tensors.items():
                    assert made[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    chain = subscriber.history()
    assert [m.kind for m in chain].count("anchor") == 1
    assert len({m.schema for m in chain if m.schema}) == 1
    for key in store.list("b/"):
        data = store.get(key, max_bytes=1 << 20)
        assert is_sealed(data)
        assert b"vdelta" not in data
    late = Subscriber(store, keys=READERS, ratchet=Ratchet(tmp_path, store.url))
    late.refresh()
    assert late.materialise().keys() == tensors.keys()


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (NO_KEYS, SettingsError),
        (replace(READERS, sealing=()), SettingsError),
        (replace(READERS, sealing=(b"t" * 32,)), SettingsError),
        (replace(READERS, trusted=(Ed25519PrivateKey.generate().public_key(),)), SignatureError),
    ],
    ids=["no keys", "no sealing key", "another sealing key", "another trusted key"],
)
def test_without_the_right_keys_nothing_of_a_channel_is_given_out(keys, kind):
    store, tensors = MemoryStore(), {"w": torch.ones(100)}
    with Publisher(store, tensors, keys=KEYS) as publisher:
        tensors["w"][3] = 2
        publisher.publish()
    subscriber = Subscriber(store, keys=keys)
    with pytest.raises(kind):
        _ = (subscriber.refresh(), subscriber.materialise())


def test_a_channel_that_is_neither_signed_nor_sealed_is_refused_by_who_requires_it():
    store, tensors = MemoryStore(), {"w": torch.ones(100)}
    Publisher(store, tensors).close()
    with pytest.raises(SignatureError):
        Subscriber(store, keys=READERS).refresh()
    subscriber = Subscriber(store, keys=replace(READERS, trusted=()))
    subscriber.refresh()
    with pytest.raises(SettingsError, match="not sealed"):
        subscriber.materialise()


@pytest.mark.parametrize("seq", [3, 4, 5])
def test_a_forged_record_is_refused_by_signature_and_the_way_around_it_too(seq):
    """Unsigned, or well formed and signed by another: no anchor of the forger's is taken."""
    store, tensors = MemoryStore(), {"w": torch.ones(100)}
    publisher = Publisher(store, tensors, keys=KEYS)
    subscriber = Subscriber(store, keys=READERS)
    subscriber.refresh()
    for _ in range(3):
        tensors["w"][3] += 1
        publisher.publish()
    for keys in (NO_KEYS, Keys(signing=Ed25519PrivateKey.generate())):
        forged = MemoryStore()
        for key in store.list(""):
            forged.put(key, store.get(key, max_bytes=1 << 20))
        payload = open_envelope(forged.get(manifest_key(seq), max_bytes=1 << 20))
        forged.put(manifest_key(seq), seal(payload, keys.sign(payload)))
        thief = Log(forged)
        thief.claim("mallory")
        append_whole(thief)
        subscriber._log = LogReader(forged, keys=READERS)
        for _ in range(2):
            try:
                subscriber.refresh()
            except SignatureError:
                continue
        assert subscriber.newest == LogReader(store).read(seq - 1).manifest.target
        assert subscriber.newest_manifest.writer != "mallory"
    subscriber._log = LogReader(store, keys=READERS)
    subscriber.refresh()
    assert subscriber.newest == publisher.version


def append_whole(log: Log) -> None:
    """An anchor of the forger's, right after its fence: a version of the next number."""
    number = log.position.manifest.target.number
    log.append("anchor", target=Version(number + 1, "6" * 64), blobs=[log.put_blob(b"lies")])


def test_a_record_missing_after_a_new_one_is_noticed_by_the_next_look():
    channel = Channel()
    for _ in range(4):
        channel.delta()
    subscriber = Subscriber(channel.store)
    subscriber.refresh()
    for _ in range(3):
        channel.delta()
    first = subscriber.newest_manifest.seq + 1
    channel.store.delete([manifest_key(first + 1)])
    assert seqs(subscriber.refresh()) == [first]
    with pytest.raises(ChainError, match="missing"):
        subscriber.refresh()


def test_a_reader_that_took_nothing_yet_follows_whoever_began_the_channel_in_the_end(tmp_path):
    """In a store without a conditional write two trainers can both begin it."""
    store = MemoryStore()
    Log(store).claim("overwritten")
    ratchet = Ratchet(tmp_path, store.url)
    readers = [Subscriber(store), Subscriber(store, ratchet=ratchet)]
    for reader in readers:
        assert len(reader.refresh()) == 1
    store.delete([manifest_key(1)])
    channel = Channel(store=store)
    for reader in readers:
        reader.refresh()
        assert reader.channel_id == channel.log.position.manifest.channel
        assert_version(reader.materialise(), 0)
