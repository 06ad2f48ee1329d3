"""What of a model is published, under which names, and which models cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.models import ARCHITECTURES, TinyModel, write_model
from tests.nets import BF16, assert_same, bits_of, read
from vllm_delta.checkpoint import read_checkpoint
from vllm_delta.errors import (
    ModelMismatchError,
)
from vllm_delta.publisher import Publisher
from vllm_delta.testing import MemoryStore


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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_trained_model_is_published_under_the_names_that_vllm_loads(architecture, tied, tmp_path):
    """fp32 masters of a class of the user's own, compiled, after a step of AdamW."""
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path / "tiny", TinyModel(architecture=architecture, tied=tied))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = type("Mine", (type(loaded),), {})(loaded.config)
    model.load_state_dict(loaded.state_dict())
    store = MemoryStore()
    publisher = Publisher(store, torch.compile(model), dtype=BF16)
    wanted = read_checkpoint(folder)
    assert_same(read(store), wanted)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(24).view(2, 12)
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1).flatten()).backward()
    optimizer.step()
    assert publisher.publish().n_changed > 1000
    after = read(store)
    assert [(name, bits.shape) for name, bits in after.items()] == sorted(
        (name, bits.shape) for name, bits in wanted.items()
    )
    parameters = dict(model.named_parameters())
    for name in after.keys() & parameters.keys():
        np.testing.assert_array_equal(after[name], bits_of(parameters[name].to(BF16)), name)
    changed = " ".join(name for name in after if (after[name] != wanted[name]).any())
    for part in ("model.embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp"):
        assert part in changed


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[::2],
        lambda memory: memory[1:],
        lambda memory: memory[:1].expand(33),
        lambda memory: memory[:1, None].expand(3, 5),
        lambda memory: memory.view(2, 32).t(),
        lambda memory: torch._neg_view(memory),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.int16])
def test_any_view_of_memory_is_published_as_its_values_stand(view, dtype):
    memory = torch.arange(64).to(dtype)
    tensors = {"w": view(memory)}
    store = MemoryStore()
    publisher = Publisher(store, tensors)
    memory[:4] += 1
    assert publisher.publish().n_changed > 0
    assert_same(read(store), {"w": bits_of(tensors["w"].resolve_neg().clone())})


# A model that cannot be published


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(3, dtype=torch.complex64)}, "name='w'"),
        ({"w": torch.zeros(3, device="meta")}, "without data"),
        ({"w": torch.zeros(3).to_sparse()}, "cannot be published"),
        ({"w": 3}, "not a tensor"),
        ({"w": torch.zeros([1] * 9)}, "name='w'.*dimensions"),
        ({"": torch.zeros(3)}, "name=''.*empty"),
        ({"w" * 513: torch.zeros(3)}, "name='w+'.*too long"),
        ({"w\ud800": torch.zeros(3)}, "name='w"),
        ({3: torch.zeros(3)}, "name=3"),
        ({"__metadata__": torch.zeros(3)}, "name='__metadata__'"),
        ({}, "no tensors"),
    ],
)
def test_a_tensor_that_no_checkpoint_holds_is_refused_by_name(tensors, message):
    """And before the channel is claimed: whoever published there goes on."""
    store = MemoryStore()
    with pytest.raises(ModelMismatchError, match=message):
        Publisher(store, tensors)
    assert store.list("") == []


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


def test_a_type_that_cannot_be_rounded_to_is_refused():
    with pytest.raises(ValueError, match="int8"):
        Publisher(MemoryStore(), {"a": torch.zeros(4)}, dtype=torch.int8)
