"""What is proven after the last version, each by a witness that can say no."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from scripts._demo.channels import Channel
from scripts._demo.client import Client, Completion
from scripts._demo.delta import Follower
from scripts._demo.server import Server
from vllm_delta.fingerprint import fingerprint, root
from vllm_delta.weights import ModelWeights

Digests = dict[str, str]


@dataclass(frozen=True)
class Fresh:
    """What an engine says that loaded the final checkpoint and never followed anything."""

    completions: list[Completion]
    digests: Digests


@dataclass(frozen=True)
class RolledBack:
    """What was resident after a rollback, and after going forward again.

    Attributes:
        back_equal: The version before: root by a full scan, and vLLM's digests.
        forth_equal: The newest version again, by the same.
    """

    back_equal: bool
    forth_equal: bool


@dataclass(frozen=True)
class Served:
    """A version as it was when it was served: its root, and vLLM's digests of the parameters."""

    number: int
    root: str
    digests: Digests


def root_of(weights: dict[str, torch.Tensor]) -> str:
    """Returns the fingerprint root of a trainer's bfloat16 weights, computed from all of them."""
    read = ModelWeights(weights)
    pairs = zip(read.schema.tensors, read.read(), strict=True)
    return root(read.schema, [fingerprint(bits, spec) for spec, bits in pairs])


def rebuild(channel: Channel, base: Path, out: Path) -> Path:
    """Rebuilds the newest version from the channel alone with `vllm-delta apply`.

    Args:
        base: Gives configuration and tokenizer; its weights are not needed.
        out: A directory to make.
    """
    tool = Path(sys.executable).with_name("vllm-delta")
    command = [str(tool), "apply", channel.address, str(out), "--base", str(base)]
    command += channel.keys.arguments
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit for bit."""
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    if ours.keys() != theirs.keys():
        return False
    return all(
        tensor.dtype == theirs[name].dtype
        and tensor.shape == theirs[name].shape
        and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, tensor in ours.items()
    )


def roll_back_and_forth(follower: Follower, before: Served, newest: Served) -> RolledBack:
    """Rolls the engine back by one version and lets it go forward again."""
    follower.roll_back()
    back_equal = _stands_at(follower, before)
    follower.go_on()
    return RolledBack(back_equal, _stands_at(follower, newest))


def _stands_at(follower: Follower, served: Served) -> bool:
    return (
        follower.number == served.number
        and follower.verify() == served.root
        and follower.digests() == served.digests
    )


def ask_one_by_one(client: Client, prompts: Sequence[str]) -> list[Completion]:
    """Greedy completions, each alone in the engine, so that nothing depends on batching."""
    return [client.complete_greedily(prompt) for prompt in prompts]


def ask_fresh(name: str, checkpoint: Path, work_dir: Path, prompts: Sequence[str]) -> Fresh:
    """Starts an engine on a checkpoint, with the extension and without a channel; asks it."""
    with Server(name, checkpoint, work_dir, delta={}) as server:
        server.wait_until_ready()
        with Client(server.url) as client, Follower(server) as witness:
            return Fresh(ask_one_by_one(client, prompts), witness.digests())
