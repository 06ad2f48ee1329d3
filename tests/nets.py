"""A small model to publish, what its checkpoint must be, and what a reader makes of a channel."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from vllm_delta.format import manifest_key
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore

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


def spoil(store: MemoryStore, seq: int, how: str) -> None:
    """Lose or damage a record, as a store may."""
    store.delete([manifest_key(seq)])
    if how == "damaged":
        store.put(manifest_key(seq), b"{}")
