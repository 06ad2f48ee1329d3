"""Merging that fails half way: nothing is lost, doubled or wrong."""

from __future__ import annotations

import contextlib

import pytest

import vllm_delta.coding as coding_module
from tests.merging import Run, settings
from tests.nets import assert_same, read
from vllm_delta.channel import Log
from vllm_delta.errors import ChannelError, DeltaError
from vllm_delta.publisher import Publisher
from vllm_delta.replay import replay
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash


@pytest.mark.parametrize("codec", ["gap", "hazard"])
@pytest.mark.parametrize("fault", ["transport", "lost_answer", "late"])
def test_after_a_failed_merge_the_next_publish_has_everything(fault, codec):
    """Whichever call fails and however: no version is lost, none doubled, merged ones are true."""
    at, reached = 0, True
    while reached:
        store = MemoryStore()
        channel = FaultyChannel(store)
        run = Run(3, channel, codec=codec, strides=(4,))
        run.weights.step()
        channel.script([None] * at + [fault])
        with contextlib.suppress(ChannelError):
            run.publisher.publish()
        reached = not channel._script
        channel._script.clear()
        channel.deliver()
        for _ in range(2):
            run.weights.step()
            run.publisher.publish()
        run.store = store
        assert run.publisher.version == Log(store).tail().manifest.target
        assert_same(read(store), run.weights.bits())
        subscriber = Subscriber(store)
        subscriber.refresh()
        path = subscriber.plan(subscriber.version(0), number=5)
        start = subscriber.plan(number=0)
        *_, (_, replica) = replay(subscriber.schema, [*start, *path], subscriber.changes)
        assert replica.root == subscriber.version(5).root
        replica.tensors()
        at += 2
    assert at > 9


def test_a_trainer_that_dies_while_merging_leaves_the_version_that_stands():
    for at in range(6, 12):
        store = MemoryStore()
        channel = FaultyChannel(store)
        run = Run(3, channel, strides=(4,))
        run.weights.step()
        channel.script([None] * at + ["crash"])
        with contextlib.suppress(SimulatedCrash):
            run.publisher.publish()
        successor = Publisher(store, run.weights.tensors, settings=settings())
        assert successor.version.number == 4
        assert_same(read(store), run.weights.bits())


@pytest.mark.parametrize("codec", ["gap", "hazard"])
def test_a_wrong_merge_publishes_nothing_and_later_publishes_go_on(monkeypatch, codec):
    """The proof sees it, the delta stands, and the next stride is merged again."""
    run = Run(3, codec=codec)
    right = coding_module.encode_delta

    def wrong(schema, changes, **options):
        if n_calls := len(calls):
            for change in changes:
                if change.steps is not None:
                    change.steps[n_calls] += 1
                yield from right(schema, [change], **options)
        else:
            calls.append(1)
            yield from right(schema, changes, **options)

    calls: list[int] = []
    run.weights.step()
    with monkeypatch.context() as patch:
        patch.setattr(coding_module, "encode_delta", wrong)
        with pytest.raises(DeltaError, match=r"does not decode|do not lead"):
            run.publisher.publish()
    assert run.publisher.version.number == 4
    run.versions.append(run.weights.bits())
    assert_same(read(run.store), run.versions[4])
    for _ in range(4):
        run.publish()
    assert run.merged() == [(4, 8)]
    assert_same(read(run.store), run.versions[8])


@pytest.mark.parametrize("at", ["encode", "back", "forward"])
def test_an_interrupt_while_the_shadow_stands_at_the_base_is_survived_or_told(monkeypatch, at):
    """Interrupted while encoding it moves back; interrupted while moving the publisher stops."""
    run = Run(3, codec="hazard")
    shadow = run.publisher._shadow
    moves, right_move, right_before = [], shadow._move, shadow.before
    inside = [False]

    @contextlib.contextmanager
    def before(*arguments):
        inside[0] = True
        with right_before(*arguments):
            if at == "encode":
                raise KeyboardInterrupt
            yield

    def move(change, sign):
        if inside[0]:
            moves.append(sign)
            if moves.count(-1 if at == "back" else 1) == 1 and at != "encode":
                raise KeyboardInterrupt
        return right_move(change, sign)

    run.weights.step()
    with monkeypatch.context() as patch:
        patch.setattr(shadow, "before", before)
        patch.setattr(shadow, "_move", move)
        with pytest.raises(KeyboardInterrupt):
            run.publisher.publish()
    run.weights.step()
    if at == "encode":
        assert run.publisher.publish().version.number == 5
    else:
        with pytest.raises(DeltaError, match="make a new publisher"):
            run.publisher.publish()
        again = Publisher(run.store, run.weights.tensors, settings=settings("hazard"))
        assert again.version.number == 5
    assert_same(read(run.store), run.weights.bits())
