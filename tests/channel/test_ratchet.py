"""What a reader's note on disk stops: older copies, other channels, and nothing that is right."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.channel.toy import append_anchor, append_delta, begin, fetched, moved
from vllm_delta.channel import NO_KEYS, Keys, Log, LogReader
from vllm_delta.channel import ratchet as ratchet_module
from vllm_delta.channel.keys import key_id
from vllm_delta.channel.ratchet import UNSIGNED, Ratchet
from vllm_delta.errors import (
    ChainError,
    ChannelError,
    ChannelFullError,
    FormatError,
    SettingsError,
)
from vllm_delta.format import manifest_key, seal, unseal
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore

URL = "memory://channel"


def private(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def public(seed: int):
    return private(seed).public_key()


def signed(seed: int, *trusted: int) -> Keys:
    return Keys(signing=private(seed), trusted=tuple(map(public, trusted)))


def trusting(*seeds: int) -> Keys:
    return Keys(trusted=tuple(map(public, seeds)))


A, B = 1, 2
BOTH_WAYS = pytest.mark.parametrize("seed", [None, A], ids=["unsigned", "signed"])


def writing(seed) -> Keys:
    return NO_KEYS if seed is None else signed(seed)


def reading(seed) -> Keys:
    return NO_KEYS if seed is None else trusting(seed)


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for key in store.list(""):
        copy.put(key, fetched(store, key))
    return copy


def become(store: MemoryStore, other: MemoryStore) -> None:
    """What somebody with write access makes of a store: a copy of another."""
    store.delete(store.list(""))
    for key in other.list(""):
        store.put(key, fetched(other, key))


def reader(store, folder: Path, keys: Keys = NO_KEYS) -> Subscriber:
    return Subscriber(store, keys=keys, ratchet=Ratchet(folder, URL))


def restarted(store, folder: Path, keys: Keys = NO_KEYS) -> Subscriber:
    subscriber = reader(store, folder, keys)
    subscriber.refresh()
    return subscriber


# What is refused


@BOTH_WAYS
def test_an_older_copy_of_the_channel_is_refused_by_a_restarted_reader(tmp_path, seed):
    store = MemoryStore()
    log = Log(store, keys=writing(seed))
    weights = begin(log, 2)
    old = copy_of(store)
    append_delta(log, weights, 0, 1)
    good = copy_of(store)
    assert restarted(store, tmp_path, reading(seed)).newest.number == 3
    become(store, old)
    subscriber = reader(store, tmp_path, reading(seed))
    for _ in range(2):
        with pytest.raises(ChainError, match="went back") as caught:
            subscriber.refresh()
        assert (caught.value.expected, caught.value.actual) == (5, 4)
        assert subscriber.newest is None
    become(store, good)
    subscriber.refresh()
    assert subscriber.newest.number == 3


@BOTH_WAYS
def test_a_channel_that_is_empty_now_is_refused(tmp_path, seed):
    store = MemoryStore()
    begin(Log(store, keys=writing(seed)), 1)
    restarted(store, tmp_path, reading(seed))
    with pytest.raises(ChainError, match="empty, but was not"):
        restarted(MemoryStore(), tmp_path, reading(seed))


@BOTH_WAYS
def test_another_channel_at_the_address_is_refused_however_far_it_is(tmp_path, seed):
    store, other = MemoryStore(), MemoryStore()
    begin(Log(store, keys=writing(seed)), 1)
    begin(Log(other, keys=writing(seed)), 9)
    restarted(store, tmp_path, reading(seed))
    with pytest.raises(ChainError, match="another channel") as caught:
        restarted(other, tmp_path, reading(seed))
    assert caught.value.ratchet == str(Ratchet(tmp_path, URL).path)


def test_another_record_in_a_place_that_was_seen_is_refused(tmp_path):
    """A fork of the same length, and one that went on."""
    store = MemoryStore()
    log = Log(store, keys=signed(A))
    weights = begin(log, 2)
    fork = copy_of(store)
    append_delta(log, weights, 0, 1)
    restarted(store, tmp_path, trusting(A))
    zombie = Log(fork, keys=signed(A))
    zombie._position = LogReader(fork, keys=trusting(A)).tail()
    append_delta(zombie, weights, 1, 1)
    for _ in range(2):
        with pytest.raises(ChainError, match="another record"):
            restarted(fork, tmp_path, trusting(A))
        append_delta(zombie, moved(weights, 1, 1), 1, 1)


def test_a_running_reader_that_finds_the_channel_cut_short_is_told(tmp_path):
    """Another reader on this machine saw more of it."""
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    slow = restarted(store, tmp_path)
    short = copy_of(store)
    append_delta(log, weights, 0, 1)
    restarted(store, tmp_path)
    full = copy_of(store)
    become(store, short)
    with pytest.raises(ChainError, match="went back"):
        slow.refresh()
    assert slow.newest.number == 1
    become(store, full)
    assert [m.seq for m in slow.refresh()] == [4]


def test_a_fork_is_refused_also_where_the_store_fails_before_its_end(tmp_path):
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    slow = restarted(store, tmp_path)
    fork = copy_of(store)
    append_delta(log, weights, 0, 1)
    restarted(store, tmp_path)
    zombie = Log(fork)
    zombie._position = Log(fork).tail()
    append_delta(zombie, weights, 1, 1)
    faulty = FaultyChannel(fork)
    slow._log = LogReader(faulty)
    faulty.script([None, "transport"])
    with pytest.raises(ChainError, match="another record"):
        slow.refresh()
    assert slow.newest.number == 1


def test_the_way_around_a_broken_record_leads_to_nothing_older_either(tmp_path):
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    slow, trusting_all = restarted(store, tmp_path), Subscriber(store)
    trusting_all.refresh()
    fork = copy_of(store)
    for _ in range(3):
        append_delta(log, weights, 0, 1)
        weights = moved(weights, 0, 1)
    restarted(store, tmp_path)
    zombie = Log(fork)
    zombie._position = Log(fork).tail()
    append_delta(zombie, weights, 1, 1)
    append_anchor(zombie, moved(weights, 1, 1))
    fork.put(manifest_key(4), b"{}")
    become(store, fork)
    with pytest.raises(FormatError):
        slow.refresh()
    assert slow.newest.number == 1
    assert [m.seq for m in trusting_all.refresh()] == [5], "which only the note could tell"


# What is not


@BOTH_WAYS
def test_a_channel_that_goes_on_is_followed_over_restarts(tmp_path, seed):
    store = MemoryStore()
    log = Log(store, keys=writing(seed))
    weights = begin(log, 1)
    subscriber = restarted(store, tmp_path, reading(seed))
    for step in range(6):
        append_delta(log, weights, step, 1)
        weights = moved(weights, step, 1)
        if step % 2:
            append_anchor(log, weights)
        if step == 3:
            log.claim("again")
        assert subscriber.refresh()
        assert subscriber.refresh() == []
        assert restarted(store, tmp_path, reading(seed)).newest == subscriber.newest


def test_what_a_trainer_restored_and_claimed_anew_is_followed(tmp_path):
    """Its epoch is later than all that was seen, and only a trusted key can write that."""
    store = MemoryStore()
    log = Log(store, keys=signed(A))
    weights = begin(log, 1)
    old = copy_of(store)
    for step in range(3):
        append_delta(log, weights, step, 1)
        weights = moved(weights, step, 1)
    restarted(store, tmp_path, trusting(A))
    become(store, old)
    with pytest.raises(ChainError, match="went back"):
        restarted(store, tmp_path, trusting(A))
    Log(store, keys=signed(A)).claim("after the restore")
    assert restarted(store, tmp_path, trusting(A)).newest.number == 1
    become(store, old)
    with pytest.raises(ChainError, match="went back"):
        restarted(store, tmp_path, trusting(A))


def test_a_reader_far_behind_the_others_reads_on_in_peace(tmp_path):
    """What others saw meanwhile does not make the records in between old ones."""

    class Slow(FaultyChannel):
        def get(self, key, *, max_bytes):
            if key == manifest_key(4) and self.overtake:
                self.overtake = False
                append_delta(log, weights, 0, 1)
                restarted(store, tmp_path)
            return super().get(key, max_bytes=max_bytes)

    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    slow_store = Slow(store)
    slow_store.overtake = False
    slow = restarted(slow_store, tmp_path)
    slow_store.overtake = True
    assert [m.seq for m in slow.refresh()] == [4]
    slow_store = Slow(store)
    slow_store.overtake = False
    weights = moved(weights, 0, 1)
    for step in range(3):
        append_delta(log, weights, step, 1)
        weights = moved(weights, step, 1)
    restarted(store, tmp_path)
    slow._log = LogReader(FaultyChannel(store))
    slow._log.store.script([None, "transport"])
    assert [m.seq for m in slow.refresh()] == [5], "kept, though not as far as others were"
    assert [m.seq for m in slow.refresh()] == [6, 7]


def test_a_record_that_comes_after_the_note_was_read_is_no_step_back(tmp_path):
    """Another reader sees it, and notes it, while this one has just been told: nothing new."""

    class Race(MemoryStore):
        armed = False

        def get(self, key, *, max_bytes):
            data = super().get(key, max_bytes=max_bytes)
            if self.armed and data is None:
                self.armed = False
                append_delta(log, weights, 0, 1)
                restarted(self, tmp_path)
            return data

    store = Race()
    log = Log(store)
    weights = begin(log, 1)
    subscriber = restarted(store, tmp_path)
    store.armed = True
    assert [m.seq for m in subscriber.refresh()] in ([], [4])
    subscriber.refresh()
    assert subscriber.newest.number == 2


def test_signatures_added_by_others_make_no_other_record(tmp_path):
    store = MemoryStore()
    begin(Log(store, keys=signed(A)), 1)
    restarted(store, tmp_path, trusting(A))
    payload, signatures = unseal(fetched(store, manifest_key(3)))
    more = seal(payload, [*signatures, *signed(B).sign(payload)])
    store.put(manifest_key(3), more)
    assert restarted(store, tmp_path, trusting(A)).newest.number == 1


# Keys


def test_a_key_that_leaked_holds_nobody_up_once_it_is_trusted_no_more(tmp_path):
    """It led readers far ahead; with it gone, the true trainer's new key is followed at once."""
    store = MemoryStore()
    weights = begin(Log(store, keys=signed(A)), 1)
    truth = Log(store, keys=signed(B, A))
    truth.claim("new key")
    append_anchor(truth, weights)
    restarted(store, tmp_path, trusting(A, B))
    good = copy_of(store)
    thief = Log(store, keys=signed(A, B))
    thief.claim("thief")
    for step in range(20):
        append_delta(thief, weights, step, 1)
        weights = moved(weights, step, 1)
    restarted(store, tmp_path, trusting(A, B))
    become(store, good)
    with pytest.raises(ChainError, match="went back"):
        restarted(store, tmp_path, trusting(A, B))
    assert restarted(store, tmp_path, trusting(B)).newest.number == 1
    assert set(Ratchet(tmp_path, URL).seen([key_id(public(B))]).marks) == {key_id(public(B))}
    # What B's own signature led to still holds.
    log = Log(store, keys=signed(B))
    append_anchor_after_claim(log)
    restarted(store, tmp_path, trusting(B))
    become(store, good)
    with pytest.raises(ChainError, match="went back"):
        restarted(store, tmp_path, trusting(B))


def append_anchor_after_claim(log: Log) -> None:
    log.claim("B")
    append_anchor(log, (9, 9, 9, 9))


def test_rolled_back_to_where_the_old_key_ended_is_refused_while_both_are_trusted(tmp_path):
    store = MemoryStore()
    weights = begin(Log(store, keys=signed(A)), 2)
    old = copy_of(store)
    new = Log(store, keys=signed(B, A))
    new.claim("new key")
    append_delta(new, weights, 0, 1)
    restarted(store, tmp_path, trusting(A, B))
    become(store, old)
    for keys in (trusting(A, B), trusting(B)):
        with pytest.raises(ChainError):
            restarted(store, tmp_path, keys)


def test_the_furthest_is_what_the_latest_claim_led_to_though_an_older_key_counted_higher(tmp_path):
    store = MemoryStore()
    log = Log(store, keys=signed(A))
    weights = begin(log, 1)
    old = copy_of(store)
    for _ in range(5):
        append_delta(log, weights, 0, 1)
        weights = moved(weights, 0, 1)
    restarted(store, tmp_path, trusting(A, B))
    become(store, old)
    new = Log(store, keys=signed(B, A))
    new.claim("restored, with a new key")
    cut = copy_of(store)
    append_delta(new, weights, 0, 1)
    restarted(store, tmp_path, trusting(A, B))
    become(store, cut)
    with pytest.raises(ChainError, match="went back") as caught:
        restarted(store, tmp_path, trusting(A, B))
    assert (caught.value.expected, caught.value.expected_epoch) == (5, 2)


def test_signed_and_unsigned_notes_do_not_count_for_each_other(tmp_path):
    store, other = MemoryStore(), MemoryStore()
    begin(Log(store), 5)
    begin(Log(other, keys=signed(A)), 1)
    restarted(store, tmp_path)
    assert restarted(other, tmp_path, trusting(A)).newest.number == 1
    assert set(Ratchet(tmp_path, URL).seen().marks) == {UNSIGNED}
    with pytest.raises(ChainError, match="another channel"):
        restarted(other, tmp_path)
    assert restarted(store, tmp_path).newest.number == 5


# The file


def test_the_note_is_kept_by_address_and_says_which(tmp_path):
    store = MemoryStore()
    begin(Log(store), 1)
    restarted(store, tmp_path / "made" / "when needed")
    ratchet = Ratchet(tmp_path / "made" / "when needed", URL)
    fields = json.loads(ratchet.path.read_bytes())
    assert fields["url"] == URL
    assert list(fields["keys"]) == [UNSIGNED]
    assert (fields["keys"][UNSIGNED]["epoch"], fields["keys"][UNSIGNED]["seq"]) == (1, 3)
    assert sorted(p.suffix for p in ratchet.path.parent.iterdir()) == [".json", ".lock"]
    assert Ratchet(ratchet.path.parent, "memory://other").seen().marks == {}


DAMAGED = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "noise": lambda data: b"\xff" * 50,
    "other json": lambda data: b"[]",
    "number": lambda data: b"1",
    "no keys": lambda data: b"{}",
    "deep": lambda data: b"[" * 100_000,
    "huge": lambda data: b" " * (1 << 20) + data,
    "format": lambda data: data.replace(b'"format": 1', b'"format": 2'),
    "address": lambda data: data.replace(URL.encode(), b"memory://elsewhere"),
    "seq": lambda data: data.replace(b'"seq": 3', b'"seq": 0'),
    "seq text": lambda data: data.replace(b'"seq": 3', b'"seq": "3"'),
    "seq huge": lambda data: data.replace(b'"seq": 3', b'"seq": 9999999999999'),
    "epoch": lambda data: data.replace(b'"epoch": 1', b'"epoch": true'),
    "channel": lambda data: data.replace(b'"channel": "', b'"channel": "x'),
    "payload": lambda data: data.replace(b'"payload": "', b'"payload": "x'),
    "null": lambda data: data.replace(b'"keys": {', b'"keys": null, "x": {'),
    "extra": lambda data: data.replace(b'"seq": 3', b'"seq": 3, "more": 1'),
    "mark": lambda data: b'{"format":1,"url":"memory://channel","keys":{"unsigned":[]}}',
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_note_is_never_taken_for_none(tmp_path, how):
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    subscriber = restarted(store, tmp_path)
    path = Ratchet(tmp_path, URL).path
    good = path.read_bytes()
    bad = DAMAGED[how](good)
    assert bad != good
    path.write_bytes(bad)
    append_delta(log, weights, 0, 1)
    for one in (subscriber, reader(store, tmp_path)):
        with pytest.raises(SettingsError, match="remove it to trust the channel as it") as caught:
            one.refresh()
        assert (caught.value.path, caught.value.action) == (str(path), "fix")
    with pytest.raises(SettingsError):
        Ratchet(tmp_path, URL).advance([log.position])
    assert path.read_bytes() == bad
    path.unlink()
    assert [m.seq for m in subscriber.refresh()] == [4]


def test_nothing_is_adopted_that_could_not_be_noted(tmp_path, monkeypatch):
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 1)
    subscriber = restarted(store, tmp_path)
    before = Ratchet(tmp_path, URL).path.read_bytes()
    append_delta(log, weights, 0, 1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, kind in (("fsync", ChannelFullError), ("replace", ChannelFullError)):
        with monkeypatch.context() as patched:
            patched.setattr(ratchet_module.os, name, full)
            with pytest.raises(kind):
                subscriber.refresh()
        assert subscriber.newest.number == 1
        assert Ratchet(tmp_path, URL).path.read_bytes() == before
        assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".lock"]
    assert [m.seq for m in subscriber.refresh()] == [4]


def test_a_place_where_no_note_can_be_kept_is_told(tmp_path):
    store = MemoryStore()
    begin(Log(store), 1)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SettingsError, match="cannot be kept"):
        restarted(store, blocked)


def test_a_store_out_of_reach_changes_no_note(tmp_path):
    store = MemoryStore()
    begin(Log(store), 1)
    restarted(store, tmp_path)
    before = Ratchet(tmp_path, URL).path.read_bytes()
    faulty = FaultyChannel(store)
    faulty.script(["transport"] * 3)
    with pytest.raises(ChannelError):
        restarted(faulty, tmp_path)
    assert Ratchet(tmp_path, URL).path.read_bytes() == before


def test_a_note_never_goes_back_whoever_writes_last(tmp_path):
    store = MemoryStore()
    log = Log(store)
    begin(log, 5)
    records = list(log.read_chain(1, 7))
    ratchet = Ratchet(tmp_path, URL)
    for record in (records[6], records[2], records[4]):
        Ratchet(tmp_path, URL).advance([record])
        assert ratchet.seen().marks[UNSIGNED].seq == 7
    other = MemoryStore()
    begin(Log(other), 9)
    ratchet.advance([Log(other).tail()])
    assert ratchet.seen().marks[UNSIGNED].channel == records[0].manifest.channel
    ratchet.advance([])
    assert ratchet.seen().marks[UNSIGNED].place == (1, 7)


def test_servers_of_one_machine_never_write_over_each_other_s_notes(tmp_path, monkeypatch):
    """From before the note is read until the new one stands, nobody else gets the lock."""
    store = MemoryStore()
    log = Log(store)
    begin(log, 1)
    ratchet = Ratchet(tmp_path, URL)
    ratchet.advance([log.read(1)])
    lock = ratchet.path.with_suffix(".lock").open()
    held = []

    def watched(call):
        def watching(*arguments):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(call.__name__)
            else:
                fcntl.flock(lock, fcntl.LOCK_UN)
            return call(*arguments)

        return watching

    with lock, monkeypatch.context() as patched:
        patched.setattr(Ratchet, "_read", watched(Ratchet._read))
        patched.setattr(ratchet_module.os, "replace", watched(os.replace))
        ratchet.advance([log.position])
        assert held == ["_read", "replace"]
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ratchet.seen().marks[UNSIGNED].seq == 3
