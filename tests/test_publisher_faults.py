"""Publishing while stores fail, processes die and memory is short."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

import vllm_delta.coding as coding_module
from tests import trainer_child
from tests.nets import BF16, Net, assert_same, bits_of, expected, nudge, read
from vllm_delta import cli
from vllm_delta.channel import LocalStore, Log
from vllm_delta.errors import (
    ChannelError,
    ChannelFullError,
    DeltaError,
)
from vllm_delta.events import Claimed
from vllm_delta.publisher import Publisher
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash


@pytest.mark.parametrize("fault", ["transport", "lost_answer", "late"])
def test_after_a_failed_publish_the_next_has_everything(fault):
    """Whichever call of a publish fails and however, no change is lost and none sent twice."""
    at, reached = 0, True
    while reached:
        store, net = MemoryStore(), Net()
        channel = FaultyChannel(store)
        publisher = Publisher(channel, net, dtype=BF16)
        channel.script([None] * at + [fault])
        nudge(net)
        with contextlib.suppress(ChannelError):
            publisher.publish()
        reached = not channel._script
        channel._script.clear()
        channel.deliver()
        nudge(net, 10)
        publisher.publish()
        assert_same(read(store), expected(net))
        assert publisher.version == Log(store).tail().manifest.target
        at += 1
    assert at > 5


def test_a_store_that_stays_away_keeps_the_version_in_doubt_until_it_is_back():
    store, net = MemoryStore(), Net()
    channel = FaultyChannel(store)
    publisher = Publisher(channel, net, dtype=BF16)
    nudge(net)
    # blob, the record before ours, then the write lands and every answer is lost
    channel.script([None, None, "lost_answer", *["transport"] * 30])
    for _ in range(2):
        with pytest.raises(ChannelError):
            publisher.publish()
    assert publisher.version.number == 0
    channel._script.clear()
    nudge(net, 10)
    assert publisher.publish().version.number == 2
    assert_same(read(store), expected(net))


def test_a_trainer_that_dies_anywhere_leaves_a_channel_the_next_one_takes_over():
    at = 0
    while True:
        store, net = MemoryStore(), Net()
        channel = FaultyChannel(store, crash_at=at)
        died = True
        try:
            publisher = Publisher(channel, net, dtype=BF16)
            nudge(net)
            publisher.publish()
            died = False
        except SimulatedCrash:
            pass
        successor = Publisher(store, net, dtype=BF16)
        nudge(net, 10)
        successor.publish()
        assert_same(read(store), expected(net))
        if not died:
            break
        at += 1
    assert at > 8


def test_a_wrong_encoder_publishes_nothing(monkeypatch):
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = store.list("")
    right = coding_module.encode_delta

    def wrong(schema, changes, **options):
        for change in changes:
            change.steps[0] += 1
            yield from right(schema, [change], **options)

    nudge(net)
    with monkeypatch.context() as patch:
        patch.setattr(coding_module, "encode_delta", wrong)
        with pytest.raises(DeltaError, match="does not decode"):
            publisher.publish()
    assert store.list("") == before
    assert publisher.publish().version.number == 1
    assert_same(read(store), expected(net))


def test_a_publisher_interrupted_while_its_shadow_moves_refuses_to_go_on(monkeypatch):
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)

    def interrupt(changes):
        raise KeyboardInterrupt

    nudge(net)
    monkeypatch.setattr(publisher._shadow, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    with pytest.raises(DeltaError, match="make a new publisher"):
        publisher.publish()
    again = Publisher(store, net, dtype=BF16)
    assert again.version.number == 1
    assert_same(read(store), expected(net))


@contextlib.contextmanager
def largest_file(n_bytes: int):
    """Have the operating system refuse files larger than this, as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_directory_is_told_and_the_next_publish_has_everything(tmp_path):
    net = Net()
    publisher = Publisher(tmp_path / "channel", net, dtype=BF16)
    nudge(net)
    files = sorted(tmp_path.rglob("*"))
    with largest_file(100), pytest.raises(ChannelFullError):
        publisher.publish()
    assert sorted(tmp_path.rglob("*")) == files
    nudge(net, 10)
    assert publisher.publish().version.number == 1
    assert_same(read(tmp_path / "channel"), expected(net))


def test_a_directory_that_vanishes_is_not_made_again(tmp_path):
    net = Net()
    publisher = Publisher(tmp_path / "channel", net, dtype=BF16)
    shutil.rmtree(tmp_path / "channel")
    nudge(net)
    with pytest.raises(ChannelError):
        publisher.publish()
    assert not (tmp_path / "channel").exists()


# Death


@pytest.fixture
def trainers(tmp_path):
    """A process that starts trainers of the test's channel, one after another, to be killed."""
    words = [sys.executable, "-m", "tests.trainer_child", str(tmp_path / "channel")]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield child
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def n_records(channel) -> int:
    tail = Log(LocalStore(channel)).tail()
    return 0 if tail is None else tail.seq


def assert_step(channel, step: int) -> None:
    truth = trainer_child.weights(step)
    assert_same(read(channel), {name: bits_of(tensor) for name, tensor in truth.items()})


def go_on(channel, step: int, events: list) -> None:
    """Take the channel over at a step and publish the next."""
    current = trainer_child.weights(step)
    with Publisher(channel, lambda: current, hooks=[events.append]) as successor:
        assert_step(channel, step)
        current = trainer_child.weights(step + 1)
        assert successor.publish().n_changed > 0
    assert_step(channel, step + 1)


def test_a_killed_trainer_leaves_exactly_what_it_published_and_the_next_goes_on(trainers, tmp_path):
    """Killed at any moment, six times; who comes next resumes, or begins anew from a step before.

    What stands on the channel says of which step it is, and must be that step's weights.
    """
    channel, rng, events = tmp_path / "channel", random.Random(7), []
    for back in (0, 0, 2, 0, 1, 0):
        enough = n_records(channel) + rng.randint(1, 20)
        print(back, file=trainers.stdin, flush=True)
        trainer = int(trainers.stdout.readline())
        while n_records(channel) < enough:
            died, _, _ = select.select([trainers.stdout], [], [], 0.001)
            assert not died, "the trainer died by itself"
        # The moment within a publish, of some milliseconds, is drawn too; this waits for nothing.
        select.select([], [], [], rng.random() * 0.02)
        os.kill(trainer, signal.SIGKILL)
        assert int(trainers.stdout.readline()) == -signal.SIGKILL

        step = trainer_child.step_on(channel)
        if step is not None:
            assert_step(channel, step)
        go_on(channel, step or 0, events)
    claims = [event for event in events if isinstance(event, Claimed)]
    assert [event.resumed for event in claims][1:] == [True] * 5
    assert cli.main(["verify", str(channel)]) == 0
    log = Log(LocalStore(channel))
    n_written = sum(len(log.read(seq).manifest.blobs) for seq in range(1, n_records(channel) + 1))
    assert len(log.store.list("b/")) < n_written / 2, "they collected while they were killed"


# Memory


def test_publishing_takes_the_shadow_and_one_tensor():
    """Peak memory beyond the model's, in a process of its own, at 1 % changed."""
    script = """
        import torch
        from vllm_delta.publisher import Publisher
        from vllm_delta.testing import MemoryStore
        from vllm_delta.format import Reference

        def make(n):
            return {f"w{i}": torch.zeros(n // 1000, 1000, dtype=torch.bfloat16) for i in range(8)}

        def cycle(tensors):
            publisher = Publisher(MemoryStore(), tensors, reference=Reference("a/b"))
            for tensor in tensors.values():
                tensor.view(-1).view(torch.int16)[::100] += 1
            assert publisher.publish().n_changed * 100 == sum(t.numel() for t in tensors.values())

        def peak():  # of this process alone; getrusage's starts at the parent's
            (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
            return 1024 * int(line.split()[1])

        cycle(make(10_000))  # compiles and imports
        tensors = make(16_000_000)
        for tensor in tensors.values():
            tensor.view(torch.int16).fill_(0x3F80)
        before = peak()
        cycle(tensors)
        print((peak() - before) / (16_000_000 * 2))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    in_tensors = float(result.stdout)
    assert 7.5 < in_tensors < 9.0, "8 tensors of shadow, and at most one more"
