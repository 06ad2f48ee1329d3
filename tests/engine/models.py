"""Writes tiny seeded checkpoints that vLLM and transformers load: config, tokenizer, safetensors.

A checkpoint has about half a million random bf16 weights. The vocabulary (515) is odd, so that
tensor parallelism over two ranks pads it. Run as a script, it writes one directory per model:
``python tests/engine/models.py DIRECTORY``.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

VOCAB = 515
HIDDEN = 128
LAYERS = 2
HEADS = 4
HEAD_DIM = 32
INTERMEDIATE = 192
EXPERTS = 8
EXPERT_INTERMEDIATE = 64

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ARCHITECTURES = tuple(_CLASSES)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A tiny model to write.

    Args:
        architecture: one of ``ARCHITECTURES``.
        tied: whether the head is the embedding.
        n_kv_heads: key and value heads; 1 means that two ranks hold replicas of them.
        retied: also store an ``lm_head.weight`` next to a config that says tied.
    """

    architecture: str
    tied: bool = False
    n_kv_heads: int = 2
    retied: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in _CLASSES:
            raise ValueError(f"no tiny model of architecture {self.architecture!r}")
        if self.retied and not self.tied:
            raise ValueError("a retied model is a tied one")

    @property
    def name(self) -> str:
        """A directory name that says what the model is."""
        head = "retied" if self.retied else "tied" if self.tied else "untied"
        return f"{self.architecture}-{head}-kv{self.n_kv_heads}"


def write_model(directory: str | Path, model: TinyModel, *, seed: int = 7) -> Path:
    """Writes the checkpoint of a tiny model; the same arguments give the same bytes.

    Returns:
        The directory, which ``vllm serve`` and ``from_pretrained`` accept.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape) for name, shape in _shapes(model).items()}
    if model.retied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_config(model), indent=1))
    _write_tokenizer(path)
    return path


def perturb(
    checkpoint_dir: str | Path, out_dir: str | Path, percent: float, seed: int, *, jump: float = 0.3
) -> Path:
    """Writes the next checkpoint: ``percent`` of every tensor's elements differ, at least one.

    Half of the changes are a small step in the type's order, as training makes them; the other
    half jump by about ``jump``, so that completions change too. The two copies of a retied head
    stay equal.

    Returns:
        ``out_dir``, a whole checkpoint with the same config and tokenizer.
    """
    source, path = Path(checkpoint_dir), Path(out_dir)
    shutil.copytree(source, path, dirs_exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    head, embedding = tensors.get("lm_head.weight"), tensors["model.embed_tokens.weight"]
    retied = head is not None and torch.equal(head.view(torch.int16), embedding.view(torch.int16))
    after = {name: _perturbed(rng, tensors[name], percent, jump) for name in sorted(tensors)}
    if retied:
        after["lm_head.weight"] = after["model.embed_tokens.weight"].clone()
    save_file(after, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _perturbed(
    rng: np.random.Generator, tensor: torch.Tensor, percent: float, jump: float
) -> torch.Tensor:
    flat = tensor.flatten().clone()
    n = min(flat.numel(), max(1, round(flat.numel() * percent / 100)))
    chosen = torch.from_numpy(np.sort(rng.choice(flat.numel(), n, replace=False)))
    bits = flat[chosen].view(torch.int16)
    # Away from zero by one to three steps: never a NaN at these magnitudes, never unchanged.
    stepped = bits + torch.from_numpy(rng.integers(1, 4, n, dtype=np.int16))
    noise = torch.from_numpy(rng.standard_normal(n).astype(np.float32) * jump)
    jumped = (flat[chosen].float() + noise).to(flat.dtype).view(torch.int16)
    jumps = torch.from_numpy(rng.random(n) < 0.5) & (jumped != bits)
    flat[chosen] = torch.where(jumps, jumped, stepped).view(flat.dtype)
    return flat.view(tensor.shape)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    else:
        values *= 0.1 if len(shape) == 1 else 0.06
    return torch.from_numpy(values).to(torch.bfloat16)


def _shapes(model: TinyModel) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not model.tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in _layer_shapes(model).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(model: TinyModel) -> dict[str, tuple[int, ...]]:
    width, kv_width = HEADS * HEAD_DIM, model.n_kv_heads * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (width, HIDDEN),
        "self_attn.k_proj.weight": (kv_width, HIDDEN),
        "self_attn.v_proj.weight": (kv_width, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, width),
    }
    if model.architecture == "qwen2":
        for name, size in (("q", width), ("k", kv_width), ("v", kv_width)):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if model.architecture.startswith("qwen3"):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (HEAD_DIM,)
    if model.architecture != "qwen3_moe":
        return shapes | _mlp_shapes("mlp", INTERMEDIATE)
    shapes["mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", EXPERT_INTERMEDIATE)
    return shapes


def _mlp_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, HIDDEN),
        f"{prefix}.up_proj.weight": (width, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, width),
    }


def _config(model: TinyModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model.architecture]],
        "model_type": model.architecture,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": model.tied,
    }
    if model.architecture == "qwen3_moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return config


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = ["the quick brown fox jumps over the lazy dog " * 4, "a delta of weights " * 9]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 512,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def all_models() -> list[TinyModel]:
    """Every combination that the layout must support, and the variants around it."""
    models = [TinyModel(architecture=a, tied=tied) for a in ARCHITECTURES for tied in (False, True)]
    models.append(TinyModel(architecture="qwen3", tied=True, n_kv_heads=1))
    models.append(TinyModel(architecture="qwen3", tied=True, retied=True))
    return models


def n_weights(model: TinyModel) -> int:
    """How many weights the model's checkpoint holds."""
    return sum(math.prod(shape) for shape in _shapes(model).values())


if __name__ == "__main__":
    for tiny in all_models():
        base = write_model(Path(sys.argv[1]) / tiny.name / "A", tiny)
        perturb(base, base.parent / "B", 2.0, 11)
        print(f"{base.parent}: {n_weights(tiny)} weights")
