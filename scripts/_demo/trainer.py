"""One policy-gradient step on completions that the served engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

_MAX_RATIO = 2.0
_MAX_GRADIENT_NORM = 1.0
_PADDING = 0


@dataclass(frozen=True)
class Sample:
    """One completion: its tokens, what its sampler thought of them, and what it earned.

    Attributes:
        tokens: Token ids of the completion.
        log_probabilities: Of each token under the served weights, at temperature 1.
        reward: 0 to 1.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    reward: float


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, which are judged against one another."""

    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def mean_reward(self) -> float:
        """Mean reward, 0 to 1."""
        return sum(sample.reward for sample in self.samples) / len(self.samples)

    @property
    def is_varied(self) -> bool:
        """Whether its samples did not all earn the same; only then can it teach."""
        return len({sample.reward for sample in self.samples}) > 1

    def advantages(self) -> torch.Tensor:
        """Returns float32[n_samples], mean 0 and deviation 1; for a varied group."""
        rewards = torch.tensor([sample.reward for sample in self.samples])
        return (rewards - rewards.mean()) / rewards.std(correction=0)


@dataclass(frozen=True)
class Step:
    """What a step saw.

    Attributes:
        mean_reward: Over all samples.
        n_varied: Groups whose samples did not all earn the same.
        mean_ratio: Of the masters' probability of a sampled token to the sampler's.
        gradient_norm: Before clipping.
    """

    mean_reward: float
    n_varied: int
    mean_ratio: float
    gradient_norm: float


class Trainer:
    """AdamW on float32 masters.

    The gradient is taken at the masters. What was sampled from are the masters rounded to
    bfloat16, so each token's gradient is weighted by the ratio of the two probabilities, cut at 2.
    """

    def __init__(self, network: LlamaForCausalLM, learning_rate: float) -> None:
        self._network = network
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def step(self, groups: Sequence[Group]) -> Step:
        """Changes the masters in place by one step of the optimizer.

        Args:
            groups: At least one of them varied.
        """
        self._optimizer.zero_grad(set_to_none=True)
        n_tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        varied = [group for group in groups if group.is_varied]
        ratios: list[float] = []
        for group in varied:
            loss, ratio = self._loss(group)
            torch.autograd.backward(loss / n_tokens)
            ratios.append(ratio)
        norm = torch.nn.utils.clip_grad_norm_(self._network.parameters(), _MAX_GRADIENT_NORM)
        self._optimizer.step()
        return Step(
            mean_reward=sum(group.mean_reward for group in groups) / len(groups),
            n_varied=len(varied),
            mean_ratio=sum(ratios) / len(ratios),
            gradient_norm=float(norm),
        )

    def _loss(self, group: Group) -> tuple[torch.Tensor, float]:
        """Returns the summed loss of a group and its mean ratio."""
        tokens = _padded([torch.tensor(sample.tokens) for sample in group.samples])
        sampled = _padded([torch.tensor(sample.log_probabilities) for sample in group.samples])
        lengths = torch.tensor([len(sample.tokens) for sample in group.samples])
        is_token = torch.arange(tokens.shape[1]) < lengths[:, None]

        log_probabilities = self._log_probabilities(group.prompt_tokens, tokens)
        ratio = torch.exp(log_probabilities.detach() - sampled)
        weight = ratio.clamp(max=_MAX_RATIO) * group.advantages()[:, None] * is_token
        return -(weight * log_probabilities).sum(), float(ratio[is_token].mean())

    def _log_probabilities(self, prompt: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Returns float32[n_samples, n_tokens]: of each token after all before it."""
        prompts = torch.tensor(prompt).expand(len(tokens), -1)
        # Padding stands on the right, so causal attention hides it from every real token.
        hidden = self._network.model(torch.cat([prompts, tokens], 1)[:, :-1]).last_hidden_state
        logits = self._network.lm_head(hidden[:, len(prompt) - 1 :])
        return torch.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=_PADDING)
