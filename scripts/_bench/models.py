"""The benchmark's models as checkpoints that vLLM serves."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from scripts._demo.model import Model, load_model


def build(name: str, seed: int) -> Model:
    """SmolLM2-135M, or a random Llama of its shape whose output layer is its own."""
    model = load_model(seed)
    if name == "SmolLM2-135M":
        return model
    torch.manual_seed(seed)
    config = type(model.network.config).from_dict(model.network.config.to_dict())
    config.tie_word_embeddings = False
    return Model(LlamaForCausalLM(config), model.tokenizer, "random")


def save(model: Model, folder: Path) -> Path:
    """Write a bf16 checkpoint; returns its folder."""
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.save(folder)
