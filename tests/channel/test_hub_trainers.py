"""Trainers and readers of a channel on the Hub: who wins, who learns of it, and what it costs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.channel.hubs import opened
from tests.channel.toy import append_delta, begin, moved
from tests.nets import BF16, Net, assert_same, expected, nudge, read
from vllm_delta.channel import Log, LogReader, Store
from vllm_delta.channel.hub import HubStore
from vllm_delta.errors import (
    AuthError,
    ChainError,
    ChannelError,
    DeltaError,
    FencedError,
    SettingsError,
)
from vllm_delta.format import manifest_key
from vllm_delta.publisher import Publisher
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import ChannelContract
from vllm_delta.testing.hub import LoopbackHub


@pytest.fixture
def gateway(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """The Hub with its S3 gateway, and keys for it."""
    monkeypatch.setenv("HF_S3_ENDPOINT", hub.endpoint + "/s3")
    monkeypatch.setenv("HF_S3_ACCESS_KEY_ID", "HFAKtest")
    monkeypatch.setenv("HF_S3_SECRET_ACCESS_KEY", "a secret")
    return hub


class TestHubStoreWithManifestsByS3(ChannelContract):
    hub: ClassVar[LoopbackHub]

    @pytest.fixture(autouse=True)
    def _hub(self, gateway: LoopbackHub) -> None:
        type(self).hub = gateway

    def open_store(self, place: Path) -> Store:
        name = "me/" + hashlib.sha256(bytes(place)).hexdigest()[:20]
        self.hub.create_bucket(name)
        return opened(self.hub, name, "a folder/ü", manifests_by_s3=True)


def test_only_new_manifests_go_through_the_gateway_after_one_probe(
    gateway: LoopbackHub, bucket: str
) -> None:
    store = opened(gateway, bucket, manifests_by_s3=True)
    log = Log(store)
    weights = begin(log)
    gateway.reset_counts()
    append_delta(log, weights, 0, 1)
    assert gateway.counts["s3"] == gateway.counts["s3.put"] == 1
    assert store.list("m/") == [manifest_key(seq) for seq in (1, 2, 3)]
    assert not [path for path in gateway.paths(bucket) if "probe" in path]


def test_a_reader_needs_no_keys_for_the_gateway_and_a_writer_is_told_which(
    gateway: LoopbackHub, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(Log(opened(gateway, bucket, manifests_by_s3=True)), 2)
    for name in ("HF_S3_SECRET_ACCESS_KEY", "HF_S3_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
        store = opened(gateway, bucket, manifests_by_s3=True, token=gateway.read_token)
        tail = LogReader(store).tail()
        assert tail is not None
        assert tail.seq == 4
        with pytest.raises(AuthError, match=name):
            store.put_new(manifest_key(9), b"x")


def test_a_gateway_that_ignores_conditions_is_refused(
    gateway: LoopbackHub, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("obstore.store.S3Store.put", lambda *_, **__: None)
    with pytest.raises(SettingsError, match="ignores conditional"):
        opened(gateway, bucket, manifests_by_s3=True).put_new(manifest_key(1), b"x")


def test_keys_that_are_not_let_in_are_an_auth_error_and_nothing_of_aws_is_used(
    gateway: LoopbackHub, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = opened(gateway, bucket, manifests_by_s3=True)
    gateway.faults.add("s3", "status", status=403)
    with pytest.raises(AuthError) as caught:
        store.put_new(manifest_key(1), b"x")
    assert "a secret" not in str(caught.value)
    assert store.put_new(manifest_key(1), b"x") is True
    gateway.faults.add("s3", "status", status=503)
    before = gateway.counts["s3"]
    with pytest.raises(ChannelError):
        store.put_new(manifest_key(2), b"x")
    assert gateway.counts["s3"] == before + 1, "tried again"


# Without a condition


class Paused(HubStore):
    """A trainer's store that stops between looking at a place and writing there."""

    def pause(self, seq: int) -> None:
        self._paused_at, self.reached, self.go = seq, threading.Event(), threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if key == manifest_key(self._paused_at):
            self.reached.set()
            assert self.go.wait(30)
        super().put(key, data)


@pytest.fixture
def paused(hub: LoopbackHub, bucket: str) -> Iterator[Paused]:
    store = Paused(bucket, "run", endpoint=hub.endpoint, token=hub.token)
    store.pause(0)
    yield store
    store.go.set()


def test_who_is_overwritten_between_writing_and_looking_is_told_false(
    hub: LoopbackHub, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(hub, bucket), opened(hub, bucket)

    def put(key: str, data: bytes) -> None:
        HubStore.put(store, key, data)
        other.put(key, b"them" if key == manifest_key(1) else b"longer than ours")

    monkeypatch.setattr(store, "put", put)
    assert store.put_new(manifest_key(1), b"ours") is False
    assert store.put_new(manifest_key(2), b"ours") is False


def test_an_owner_whose_record_a_claim_overwrites_learns_of_it_at_once(
    hub: LoopbackHub, bucket: str, paused: Paused
) -> None:
    owner, claimant = Log(opened(hub, bucket)), Log(paused)
    weights = begin(owner, 1)
    paused.pause(4)
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(claimant.claim, "claimant")
        assert paused.reached.wait(30)
        with pytest.raises(FencedError, match="claims the channel"):
            append_delta(owner, weights, 1, 1)
        assert owner.position is not None
        assert owner.position.seq == 4, "the owner did not win first"
        paused.go.set()
        assert claim.result(30).seq == 4
    assert claimant.rival is not None
    assert (claimant.rival.seq, claimant.rival.epoch) == (4, 1)
    assert owner.rival is not None
    assert owner.rival.epoch == 2
    with pytest.raises(FencedError):
        append_delta(owner, weights, 1, 1)
    append_delta(claimant, weights, 1, 1)
    reader = Subscriber(opened(hub, bucket))
    reader.refresh()
    assert reader.newest_manifest is not None
    assert reader.newest_manifest.seq == 5


def test_a_claimant_whose_fence_the_owner_overwrites_learns_of_it_before_it_writes_again(
    hub: LoopbackHub, bucket: str, paused: Paused
) -> None:
    owner, claimant = Log(paused), Log(opened(hub, bucket))
    weights = begin(owner, 1)
    paused.pause(4)
    with ThreadPoolExecutor(1) as pool:
        append = pool.submit(append_delta, owner, weights, 1, 1)
        assert paused.reached.wait(30)
        assert claimant.claim("claimant").seq == 4
        assert claimant.rival is not None
        assert claimant.rival.epoch == 1
        paused.go.set()
        with pytest.raises(FencedError, match="claims the channel"):
            append.result(30)
    assert owner.position is not None
    assert owner.position.seq == 4, "the owner did not win, too"
    with pytest.raises(ChainError, match="earlier epoch"):
        append_delta(claimant, weights, 1, 1)
    with pytest.raises(FencedError):
        append_delta(owner, weights, 1, 1)


def test_of_trainers_that_race_at_most_one_goes_on(hub: LoopbackHub) -> None:
    for number in range(12):
        bucket = f"me/race-{number}"
        hub.create_bucket(bucket)
        owner, claimant = Log(opened(hub, bucket)), Log(opened(hub, bucket))
        weights = begin(owner)
        barrier = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            jobs = (
                pool.submit(_goes_on, barrier, append_delta, owner, weights, 0, 1),
                pool.submit(_goes_on, barrier, claimant.claim, "claimant"),
            )
            won = [job.result(60) for job in jobs]
        after = moved(weights, 0, 1)
        again = [
            _goes_on(None, append_delta, log, state, 0, 1)
            for log, state, has_won in zip((owner, claimant), (after, weights), won, strict=True)
            if has_won
        ]
        assert sum(again) <= 1, "both go on"


def _goes_on(barrier: threading.Barrier | None, work: Callable[..., object], *facts: Any) -> bool:
    if barrier is not None:
        barrier.wait(30)
    try:
        work(*facts)
    except DeltaError:
        return False
    return True


# From end to end


@pytest.mark.parametrize("by_s3", [False, True])
def test_what_a_trainer_publishes_is_what_readers_of_the_bucket_rebuild(
    gateway: LoopbackHub, bucket: str, by_s3: bool
) -> None:
    net = Net()
    store = opened(gateway, bucket, manifests_by_s3=by_s3)
    with Publisher(store, net, dtype=BF16) as publisher:
        for _ in range(3):
            nudge(net)
            publisher.publish()
        reader = opened(gateway, bucket, manifests_by_s3=by_s3, token=gateway.read_token)
        assert_same(read(reader, 3), expected(net))


@pytest.mark.parametrize(
    ("by_s3", "expected_counts"),
    [
        (False, {"api": 5, "resolver": 4, "s3": 0, "batch": 3, "tree": 2}),
        (True, {"api": 2, "resolver": 2, "s3": 1, "batch": 2, "tree": 0}),
    ],
)
def test_what_a_version_costs_its_trainer_and_a_reader(
    gateway: LoopbackHub, bucket: str, by_s3: bool, expected_counts: dict[str, int]
) -> None:
    """The figures of ADR 0009."""
    log = Log(opened(gateway, bucket, manifests_by_s3=by_s3))
    weights = begin(log, 3)
    gateway.reset_counts()
    append_delta(log, weights, 0, 1)
    counts = gateway.counts
    assert {name: counts[name] for name in expected_counts} == expected_counts

    reader = Subscriber(opened(gateway, bucket, manifests_by_s3=by_s3))
    reader.refresh()
    gateway.reset_counts()
    assert reader.refresh() == []
    assert (gateway.counts["api"], gateway.counts["resolver"], gateway.counts["cas"]) == (0, 2, 0)
    append_delta(log, moved(weights, 0, 1), 1, 1)
    gateway.reset_counts()
    (manifest,) = reader.refresh()
    LogReader(reader._log.store).get_blob(manifest, 0)
    assert (gateway.counts["api"], gateway.counts["resolver"], gateway.counts["cas"]) == (0, 3, 0)
