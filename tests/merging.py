"""Channels whose steps mostly change the same weights, so that merging deltas pays."""

from __future__ import annotations

import numpy as np
import torch

from tests.nets import BF16, bits_of
from vllm_delta.codec.order import add_steps
from vllm_delta.events import Published
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore

N_HOT = 120_000
ROOMY = 1e9


def settings(codec: str = "gap", **more) -> PublisherSettings:
    return PublisherSettings(codec=codec, **({"anchor_ratio": ROOMY} | more))


class Weights:
    """A checkpoint whose steps mostly change the same weights, as an optimizer's do."""

    def __init__(self, n: int = 1_200_000) -> None:
        rng = np.random.default_rng(2)
        values = rng.normal(0, 0.02, n).astype(np.float32)
        self.tensors = {
            "matrix": torch.from_numpy(values).to(BF16).reshape(-1, 400),
            "norm": torch.ones(300, dtype=torch.float32),
            "n_steps": torch.tensor(0),
        }
        self._order = rng.permutation(n)
        self._rng = rng
        self.hot = self._order[:N_HOT]

    def step(self, *, spread: bool = False) -> None:
        """Change three quarters of the hot weights, or (`spread`) each time others."""
        flat = self.tensors["matrix"].view(-1).view(torch.int16)
        some = self._rng.choice(self.hot, 3 * N_HOT // 4, replace=False)
        if spread:
            some, self._order = self._order[: N_HOT // 2], np.roll(self._order, N_HOT // 2)
        bits = flat.numpy().view(np.uint16)
        steps = self._rng.choice(np.array([-1, 1, 1, 2], np.int16), some.size)
        bits[some] = add_steps(bits[some], steps)
        self.tensors["norm"][:7] += 1
        self.tensors["n_steps"] += 1

    def bits(self) -> dict[str, np.ndarray]:
        return {name: bits_of(tensor).copy() for name, tensor in self.tensors.items()}


class Run:
    """A channel with so many deltas, and what each version holds."""

    def __init__(self, n: int, store=None, **options) -> None:
        self.store = store or MemoryStore()
        self.weights = Weights()
        self.events: list[Published] = []
        reference = options.pop("reference", None)
        self.publisher = Publisher(
            self.store,
            self.weights.tensors,
            reference=reference,
            settings=settings(**options),
            hooks=[lambda e: self.events.append(e) if isinstance(e, Published) else None],
        )
        self.versions = [self.weights.bits()]
        for _ in range(n):
            self.publish()

    def publish(self, **how) -> None:
        self.weights.step(**how)
        assert self.publisher.publish().kind == "delta"
        self.versions.append(self.weights.bits())

    def manifests(self):
        subscriber = Subscriber(self.store)
        subscriber.refresh()
        return subscriber.history()

    def merged(self) -> list[tuple[int, int]]:
        found = [m for m in self.manifests() if m.kind == "merged"]
        return [(m.base.number, m.target.number) for m in found]
