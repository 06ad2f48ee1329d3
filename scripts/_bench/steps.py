"""Real optimizer steps of a causal language model, at a wanted share of changed bf16 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

WARM_UP_STEPS = 3
N_SEQUENCES, N_TOKENS = 4, 48
BETAS, EPSILON = (0.9, 0.999), 1e-8
_SAMPLE_EVERY = 29
"""Elements looked at while the learning rate is sought: one in so many, coprime to row lengths."""


@dataclass(frozen=True)
class TensorChange:
    """What one tensor's step changed: int64[nnz] flat indices and uint16[nnz] old and new bits."""

    indices: np.ndarray
    old: np.ndarray
    new: np.ndarray


class Stepper:
    """Adam directions of a model from real gradients, and the bf16 changes they lead to.

    The masters lie anywhere inside their bf16 rounding cell, as in a long-running job, so how many
    weights change depends on the learning rate alone; `at_percent` finds the one for a share.
    """

    def __init__(self, model: LlamaForCausalLM, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._directions = _adam_directions(model, generator)
        self._bits: dict[str, torch.Tensor] = {}
        self._masters: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            rounded = parameter.detach().to(torch.bfloat16)
            self._bits[name] = rounded.view(torch.int16).flatten()
            self._masters[name] = _inside_the_cell(rounded, generator).flatten()

    @property
    def base(self) -> Mapping[str, torch.Tensor]:
        """bf16 bits of the base: name → int16[numel]."""
        return self._bits

    def at_percent(self, percent: float) -> tuple[float, dict[str, TensorChange]]:
        """The step whose share of changed weights is nearest `percent`: (percent, changes)."""
        low, high = 1e-9, 1e-2
        for _ in range(18):
            middle = (low * high) ** 0.5
            if self._sampled_percent(middle) > percent:
                high = middle
            else:
                low = middle
        changes = self._changes(low)
        n_changed = sum(change.indices.size for change in changes.values())
        return 100 * n_changed / self._n_weights, changes

    @property
    def _n_weights(self) -> int:
        return sum(bits.numel() for bits in self._bits.values())

    def _stepped(self, name: str, rate: float, every: int = 1) -> torch.Tensor:
        moved = self._masters[name][::every] - rate * self._directions[name][::every]
        return moved.to(torch.bfloat16).view(torch.int16)

    def _sampled_percent(self, rate: float) -> float:
        n_changed = n_seen = 0
        for name, bits in self._bits.items():
            new = self._stepped(name, rate, _SAMPLE_EVERY)
            n_changed += int((new != bits[::_SAMPLE_EVERY]).sum())
            n_seen += new.numel()
        return 100 * n_changed / n_seen

    def _changes(self, rate: float) -> dict[str, TensorChange]:
        changes = {}
        for name, bits in self._bits.items():
            new = self._stepped(name, rate)
            indices = (new != bits).nonzero().flatten()
            if indices.numel():
                old_bits, new_bits = bits[indices].numpy(), new[indices].numpy()
                changes[name] = TensorChange(
                    indices.numpy(), old_bits.view(np.uint16), new_bits.view(np.uint16)
                )
        return changes


def _adam_directions(
    model: LlamaForCausalLM, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Bias-corrected Adam directions after a few real gradients (Kingma and Ba 2015)."""
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    for _ in range(WARM_UP_STEPS):
        tokens = torch.randint(
            0, model.config.vocab_size, (N_SEQUENCES, N_TOKENS), generator=generator
        )
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.flatten()
            first.setdefault(name, torch.zeros_like(gradient)).lerp_(gradient, 1 - BETAS[0])
            second.setdefault(name, torch.zeros_like(gradient)).lerp_(
                gradient.square(), 1 - BETAS[1]
            )
    model.zero_grad(set_to_none=True)
    corrections = [1 - beta**WARM_UP_STEPS for beta in BETAS]
    return {
        name: (first[name] / corrections[0])
        .div_((second[name] / corrections[1]).sqrt_().add_(EPSILON))
        .detach()
        for name in first
    }


def _inside_the_cell(rounded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 values that round to the given bf16 ones, uniform between the halfway points."""
    bits = rounded.view(torch.int16).to(torch.int32) << 16
    jitter = torch.randint(
        -(1 << 15) + 1, 1 << 15, bits.shape, generator=generator, dtype=torch.int32
    )
    jitter[bits << 1 == 0] = 0  # below a zero's magnitude there is nothing
    return (bits + jitter).view(torch.float32)
