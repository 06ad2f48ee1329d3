"""Publishing: what a reader rebuilds is bit for bit what the trainer holds."""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import vllm_delta.publisher as publisher_module
from vllm_delta.channel import Log
from vllm_delta.checkpoint import read_checkpoint
from vllm_delta.errors import (
    ChannelError,
    ChannelFullError,
    DeltaError,
    FencedError,
    ModelMismatchError,
    SettingsError,
)
from vllm_delta.events import Claimed, Failed, Published
from vllm_delta.format import Reference, Version, manifest_key
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import FaultyChannel, MemoryStore, SimulatedCrash

BF16 = torch.bfloat16


class Net(nn.Module):
    """A small language model with everything a checkpoint may hold."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(97, 16)
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 97, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("n_calls", torch.tensor(0))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return self.head(self.frozen(x))


def train(net: Net, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
    for _ in range(n_steps):
        ids = torch.randint(0, 97, (8, 12))
        loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.roll(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    flat = tensor.detach().cpu().contiguous()
    return flat.view(kinds[flat.element_size()]).numpy().copy()


def expected(net: Net) -> dict[str, np.ndarray]:
    """The checkpoint, written down by hand: masters rounded, buffers as they are, the tie once."""
    names = ["embed.weight", "up.weight", "up.bias", "down.weight", "down.bias"]
    parameters = dict(net.named_parameters())
    names += ["frozen.weight", "frozen.bias"]
    wanted = {name: bits_of(parameters[name].to(BF16)) for name in names}
    return wanted | {"n_calls": bits_of(net.n_calls), "scale": bits_of(net.scale)}


def read(store, number: int | None = None, base=None) -> dict[str, np.ndarray]:
    subscriber = Subscriber(store)
    subscriber.refresh()
    return subscriber.materialise(number, base=base)


def assert_same(actual, wanted) -> None:
    assert sorted(actual) == sorted(wanted)
    for name in wanted:
        assert actual[name].dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(actual[name], wanted[name], err_msg=name)


def nudge(net: Net, n: int = 3) -> None:
    with torch.no_grad():
        net.up.weight.view(-1)[:n] += 0.5


# What a reader gets


def test_optimizer_steps_reach_the_reader_bit_for_bit():
    """Any number of AdamW steps between publishes; every version, not only the last."""
    store, net = MemoryStore(), Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    versions = []
    with Publisher(store, net, dtype=BF16) as publisher:
        versions.append(expected(net))
        for n_steps in (1, 3, 1, 7):
            train(net, optimizer, n_steps)
            published = publisher.publish()
            versions.append(expected(net))
            assert published.version.number == len(versions) - 1
            assert 0 < published.n_changed < published.n_weights
    for number, wanted in enumerate(versions):
        assert_same(read(store, number), wanted)


def test_nothing_changed_writes_nothing():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = store.list("")
    with torch.no_grad():
        net.up.weight += 1e-12  # moves no bf16 value
        net.scratch += 1
    published = publisher.publish()
    assert (published.kind, published.payload_bytes, published.n_changed) == ("none", 0, 0)
    assert published.version == publisher.version
    assert store.list("") == before


def test_frozen_and_other_unchanged_tensors_cost_nothing():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    nudge(net)
    published = publisher.publish()
    assert published.n_changed == 3
    subscriber = Subscriber(store)
    manifest = subscriber.refresh()[-1]
    names = [subscriber.schema.tensors[c.tensor].name for c in subscriber.changes(manifest)]
    assert names == ["up.weight"]
    assert published.payload_bytes < 2000


def test_what_it_cost_is_what_was_written():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    before = set(store.list(""))
    nudge(net)
    published = publisher.publish()
    written = set(store.list("")) - before
    assert published.payload_bytes == sum(len(store.get(k, max_bytes=1 << 30)) for k in written)
    assert published.seconds >= published.diff_s + published.upload_s


def test_odd_values_are_exact():
    """NaN payloads, infinities and the sign of zero."""
    special = torch.tensor([0x7FC1, 0xFFA5, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x0000, 0x807F])
    odd = special.to(torch.int32).to(torch.int16).view(BF16)
    tensors = {"odd": torch.zeros(8, dtype=BF16), "many": torch.zeros(100, dtype=torch.float32)}
    store = MemoryStore()
    publisher = Publisher(store, tensors, settings=PublisherSettings(raw_above=1.0))
    tensors["odd"].copy_(odd)
    tensors["many"][:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    publisher.publish()
    assert_same(read(store), {name: bits_of(tensor) for name, tensor in tensors.items()})
    assert read(store)["odd"].tolist() == special.tolist()


def test_types_without_steps_travel_whole():
    tensors = {
        "a": torch.arange(10, dtype=torch.int64),
        "b": torch.rand(10, dtype=torch.float64),
        "c": torch.zeros(10, dtype=torch.bool),
        "d": torch.zeros((), dtype=torch.uint8),
    }
    store = MemoryStore()
    publisher = Publisher(store, tensors)
    tensors["a"][3], tensors["b"][0], tensors["c"][9] = -1, float("nan"), True
    tensors["d"].fill_(7)
    assert publisher.publish().n_changed == 4
    assert_same(read(store), {name: bits_of(tensor) for name, tensor in tensors.items()})


def test_fp8_changes_are_exact():
    tensors = {"w": torch.linspace(-3, 3, 999).to(torch.float8_e4m3fn)}
    store = MemoryStore()
    publisher = Publisher(store, tensors, dtype=BF16)
    tensors["w"].view(torch.uint8)[::50] += 1
    publisher.publish()
    assert_same(read(store), {"w": bits_of(tensors["w"])})


def test_tensors_that_are_not_contiguous_travel_in_their_shape():
    base = torch.randn(12, 20)
    tensors = {"w": base.t()[3:]}
    store = MemoryStore()
    publisher = Publisher(store, tensors, dtype=BF16)
    base[4, 5] = 99.0
    publisher.publish()
    assert read(store)["w"][2, 4] == bits_of(torch.tensor(99.0, dtype=BF16))
    assert_same(read(store), {"w": bits_of(tensors["w"].to(BF16))})


def test_a_function_gives_the_tensors_of_each_publish():
    store, current = MemoryStore(), {"w": torch.zeros(50)}
    publisher = Publisher(store, lambda: current, dtype=BF16)
    current = {"w": torch.zeros(50)}
    current["w"][7] = 1.0
    assert publisher.publish().n_changed == 1


# Names


@pytest.mark.parametrize("keys", [["first"], {"first": "second"}, [r"fir.*"], None])
def test_a_tied_tensor_has_the_name_that_transformers_keeps(keys):
    model = nn.Module()
    model.register_parameter("first", nn.Parameter(torch.zeros(4)))
    model.register_parameter("second", model.first)
    if keys is not None:
        model._tied_weights_keys = keys
    publisher = Publisher(MemoryStore(), model)
    assert [t.name for t in publisher.schema.tensors] == ["first" if keys is None else "second"]


def test_tied_keys_of_an_inner_model_are_understood():
    inner, outer = nn.Module(), nn.Module()
    inner.register_parameter("first", nn.Parameter(torch.zeros(4)))
    inner.register_parameter("second", inner.first)
    inner._tied_weights_keys = ["first"]
    outer.language = inner
    publisher = Publisher(MemoryStore(), outer)
    assert [t.name for t in publisher.schema.tensors] == ["language.second"]


def test_equal_values_in_two_memories_are_two_tensors():
    publisher = Publisher(MemoryStore(), {"a": torch.zeros(4), "b": torch.zeros(4)})
    assert len(publisher.schema) == 2


def test_views_that_only_overlap_are_not_one_tensor():
    memory = torch.zeros(8)
    publisher = Publisher(MemoryStore(), {"a": memory, "b": memory[:4], "c": memory.view(2, 4)})
    assert len(publisher.schema) == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_a_transformers_model_is_published_as_it_would_be_saved(kind, tied, tmp_path):
    """Names, types and bits of `save_pretrained`, from fp32 masters; fused experts taken apart."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1 + tied, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    store = MemoryStore()
    publisher = Publisher(store, model, dtype=BF16)
    n_changed = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::7] += 1
            n_changed += parameter.view(-1)[::7].numel()
    assert publisher.publish().n_changed == n_changed
    model.to(BF16).save_pretrained(tmp_path)
    assert_same(read(store), read_checkpoint(tmp_path))


# A model that cannot be published


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(3, dtype=torch.complex64)}, "name='w'"),
        ({"w": torch.zeros(3, device="meta")}, "without data"),
        ({"w": torch.zeros(3).to_sparse()}, "cannot be published"),
        ({"w": 3}, "not a tensor"),
    ],
)
def test_a_tensor_that_no_checkpoint_holds_is_refused_by_name(tensors, message):
    with pytest.raises(ModelMismatchError, match=message):
        Publisher(MemoryStore(), tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [("a", torch.zeros(5)), ("a", torch.zeros(4, dtype=torch.int32)), ("c", torch.zeros(1))],
)
def test_a_tensor_that_changes_its_shape_is_refused_and_nothing_written(name, value):
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    store = MemoryStore()
    publisher = Publisher(store, tensors)
    before = store.list("")
    broken = tensors | {name: value}
    publisher._weights._model = broken
    with pytest.raises(ModelMismatchError, match=f"name='{name}'"):
        publisher.publish()
    assert store.list("") == before
    publisher._weights._model = tensors
    tensors["b"][0] = 1
    assert publisher.publish().version.number == 1


def test_a_tensor_that_goes_is_refused():
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    publisher = Publisher(MemoryStore(), tensors)
    del tensors["a"]
    with pytest.raises(ModelMismatchError, match="lacks"):
        publisher.publish()


@pytest.mark.parametrize(
    "settings", [{"raw_above": 1.5}, {"anchor_ratio": 0}, {"blob_bytes": 0}, {"raw_above": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        PublisherSettings(**settings)


def test_a_type_that_cannot_be_rounded_to_is_refused():
    with pytest.raises(ValueError, match="int8"):
        Publisher(MemoryStore(), {"a": torch.zeros(4)}, dtype=torch.int8)


# Starting and restarting


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


def spoil(store: MemoryStore, seq: int, how: str) -> None:
    """Lose or damage a record, as a store may."""
    store.delete([manifest_key(seq)])
    if how == "damaged":
        store.put(manifest_key(seq), b"{}")


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


# Anchors


def test_an_anchor_is_written_once_the_deltas_cost_more():
    store, net, events = MemoryStore(), Net(), []
    settings = PublisherSettings(anchor_ratio=0.5, raw_above=1.0)
    publisher = Publisher(store, net, dtype=BF16, settings=settings, hooks=[events.append])
    anchor_bytes = Log(store).tail().manifest.payload_bytes
    spent = 0
    for _ in range(20):
        with torch.no_grad():
            net.embed.weight.mul_(1.05)
        publisher.publish()
        tail = Log(store).tail().manifest
        spent += events[-1 if tail.kind == "delta" else -2].payload_bytes
        if tail.kind == "anchor":
            break
    assert tail.kind == "anchor"
    assert spent > 0.5 * anchor_bytes
    assert tail.target == publisher.version
    assert publisher.publish().kind == "none"
    assert Log(store).tail().manifest == tail
    assert_same(read(store), expected(net))
    subscriber = Subscriber(store)
    assert [m.kind for m in subscriber.refresh()] == ["anchor"]


def test_a_restart_remembers_what_was_spent_since_the_anchor():
    store, net = MemoryStore(), Net()
    kinds = []
    for _ in range(6):
        settings = PublisherSettings(anchor_ratio=0.9, raw_above=1.0)
        publisher = Publisher(store, net, dtype=BF16, settings=settings)
        with torch.no_grad():
            net.embed.weight.mul_(1.05)
        publisher.publish()
        kinds.append(Log(store).tail().manifest.kind)
    assert "anchor" in kinds
    assert kinds[0] == "delta"


def test_an_anchor_that_failed_is_written_by_the_next_publish():
    store, net = MemoryStore(), Net()
    channel = FaultyChannel(store)
    settings = PublisherSettings(anchor_ratio=1e-9)
    publisher = Publisher(channel, net, dtype=BF16, settings=settings)
    nudge(net)
    # the delta: its blob, the record before it, its record, that read back, head; then the schema
    channel.script([None] * 5 + ["transport"])
    with pytest.raises(ChannelError):
        publisher.publish()
    assert Log(store).tail().manifest.kind == "delta"
    assert publisher.version.number == 1
    assert publisher.publish().kind == "none"
    assert Log(store).tail().manifest.kind == "anchor"
    assert_same(read(store), expected(net))


def test_an_anchor_can_be_asked_for():
    store, net = MemoryStore(), Net()
    publisher = Publisher(store, net, dtype=BF16)
    nudge(net)
    publisher.publish()
    nudge(net)  # not published, so not in the anchor
    wanted = read(store)
    assert publisher.anchor().version.number == 1
    assert_same(read(store), wanted)


# Faults


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
    right = publisher_module.encode_delta

    def wrong(schema, changes, **options):
        for change in changes:
            change.steps[0] += 1
            yield from right(schema, [change], **options)

    nudge(net)
    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, "encode_delta", wrong)
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
