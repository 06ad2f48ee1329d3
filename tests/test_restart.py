"""Publishers that start on a channel: empty, theirs, damaged, another's."""

from __future__ import annotations

import pytest
from torch import nn

from tests.nets import BF16, Net, assert_same, expected, nudge, read, spoil
from vllm_delta.channel import Keys, Log
from vllm_delta.errors import (
    FencedError,
    ModelMismatchError,
    SettingsError,
)
from vllm_delta.events import Claimed, Failed, Published
from vllm_delta.format import Reference, Version
from vllm_delta.publisher import Publisher
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore


def test_version_0_by_reference_holds_fingerprints_only():
    store, net, events = MemoryStore(), Net(), []
    reference = Reference("someone/model", "abc")
    publisher = Publisher(store, net, dtype=BF16, reference=reference, hooks=[events.append])
    wanted = expected(net)
    (published,) = [event for event in events if isinstance(event, Published)]
    assert published.payload_bytes < published.model_bytes / 2
    nudge(net)
    publisher.publish()
    with pytest.raises(SettingsError, match="someone/model"):
        read(store)
    assert_same(read(store, base=wanted), expected(net))


def test_a_restart_with_the_same_weights_goes_on():
    store, net, events = MemoryStore(), Net(), []
    nudge(net)
    first = Publisher(store, net, dtype=BF16)
    nudge(net)
    first.publish()
    second = Publisher(store, net, dtype=BF16, hooks=[events.append])
    assert second.version == first.version
    assert [type(event) for event in events] == [Claimed]
    assert events[0].resumed
    assert events[0].epoch == 2
    nudge(net)
    assert second.publish().version.number == 2
    assert_same(read(store), expected(net))
    assert [m.kind for m in Subscriber(store).refresh()] == ["anchor", "delta", "fence", "delta"]


def test_a_restart_with_other_weights_begins_anew():
    store, net = MemoryStore(), Net()
    older = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    publisher = Publisher(store, net, dtype=BF16)
    nudge(net)
    publisher.publish()
    net.load_state_dict(older)
    again = Publisher(store, net, dtype=BF16)
    assert again.version.number == 2
    nudge(net, 5)
    again.publish()
    assert_same(read(store, 2), read(store, 0))
    assert_same(read(store), expected(net))


def test_beginning_anew_from_the_reference_is_by_reference_only_if_it_is_that():
    reference = Reference("someone/model")
    for change, kind in ((False, True), (True, False)):
        store, net = MemoryStore(), Net()
        wanted = expected(net)
        publisher = Publisher(store, net, dtype=BF16, reference=reference)
        older = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        nudge(net)
        publisher.publish()
        net.load_state_dict(older)
        if change:
            nudge(net, 9)
        Publisher(store, net, dtype=BF16, reference=reference)
        anchor = Log(store).tail().manifest
        assert anchor.kind == "anchor"
        assert (anchor.reference == reference) == kind
        assert_same(read(store, base=wanted), expected(net))


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("seq", [2, 3, 4])
def test_a_restart_on_a_broken_chain_gives_newcomers_an_anchor_at_once(how, seq):
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    for _ in range(3):
        nudge(net)
        publisher.publish()
    spoil(store, seq, how)
    follower = Subscriber(store)
    for number, begun in ((3, ["fence", "anchor"]), (4, ["fence"])):
        before = Log(store).tail().seq
        publisher = Publisher(store, net, dtype=BF16)
        assert publisher.version.number == number
        since = range(before + 1, Log(store).tail().seq + 1)
        assert [Log(store).read(seq).manifest.kind for seq in since] == begun
        nudge(net)
        publisher.publish()
        assert_same(read(store), expected(net))
        follower.refresh()
        assert follower.newest == publisher.version


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_beginning_anew_survives_the_loss_of_the_first_anchor(how):
    reference = Reference("someone/model")
    store, net = MemoryStore(), Net()
    older = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    publisher = Publisher(store, net, dtype=BF16, reference=reference)
    nudge(net)
    publisher.publish()
    spoil(store, 2, how)
    net.load_state_dict(older)
    assert Publisher(store, net, dtype=BF16, reference=reference).version.number == 2
    assert_same(read(store), expected(net))


def test_a_delta_names_the_version_it_was_made_from():
    """A publisher that has lost count is refused, whatever the log takes its place for."""
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    records = store.list("m/")
    publisher._version = Version(0, "1" * 64)
    nudge(net)
    with pytest.raises(ValueError, match="field='base'"):
        publisher.publish()
    assert store.list("m/") == records


def test_a_successor_that_seals_with_a_newer_key_writes_anchors_too():
    """The channel's schema stays the one that the older key sealed."""
    old, new = bytes(32), bytes(range(32))
    store, net = MemoryStore(), Net()
    Publisher(store, net, dtype=BF16, keys=Keys(sealing=(old,)))
    keys = Keys(sealing=(new, old))
    publisher = Publisher(store, net, dtype=BF16, keys=keys)
    nudge(net)
    publisher.publish()
    assert publisher.anchor().version.number == 1
    subscriber = Subscriber(store, keys=keys)
    subscriber.refresh()
    assert_same(subscriber.materialise(), expected(net))


def test_a_channel_of_another_model_is_left_alone():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = store.list("")
    other = Net()
    other.up = nn.Linear(16, 34)
    with pytest.raises(ModelMismatchError, match=r"up\."):
        Publisher(store, other, dtype=BF16)
    with pytest.raises(ModelMismatchError, match="type or shape"):
        Publisher(store, net)
    assert store.list("") == before
    nudge(net)
    publisher.publish()


def test_the_older_of_two_trainers_stops_for_good():
    store, net, events = MemoryStore(), Net(), []
    older = Publisher(store, net, dtype=BF16, hooks=[events.append])
    newer = Publisher(store, net, dtype=BF16)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    nudge(net)
    for call in (older.publish, older.publish, older.anchor):
        with pytest.raises(FencedError):
            call()
    after = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(before)
    with pytest.raises(FencedError):
        older.publish()  # nothing changed, and still it says so
    net.load_state_dict(after)
    failed = [event.operation for event in events if isinstance(event, Failed)]
    assert failed == ["publish", "publish", "anchor", "publish"]
    assert newer.publish().version.number == 1
    assert_same(read(store), expected(net))


def test_a_closed_publisher_says_so():
    publisher = Publisher(MemoryStore(), Net())
    publisher.close()
    with pytest.raises(ValueError, match="closed"):
        publisher.publish()
