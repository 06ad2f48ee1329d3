"""A trainer in a process that tests kill: `python -m tests.trainer_child CHANNEL`.

It loads everything once, then for each line on its standard input forks a trainer that publishes
until it is killed, says its process id, and waits for its end.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore

Weights = dict[str, torch.Tensor]


def weights(step: int) -> Weights:
    """The weights after that many steps, the step among them."""
    made = {"step": torch.tensor(step)}
    for name, shape in (("a", (64, 50)), ("b", (2000,)), ("frozen", (9, 9))):
        generator = torch.Generator().manual_seed(len(name))
        values = torch.randn(shape, generator=generator)
        if name != "frozen":
            values.view(-1)[step % 7 :: 11] += step
        made[name] = values.to(torch.bfloat16)
    return made


def step_on(channel: str | Path) -> int | None:
    """The step of the newest version on the channel; None where there is none."""
    subscriber = Subscriber(channel)
    subscriber.refresh()
    return None if subscriber.newest is None else int(subscriber.materialise()["step"])


def train(channel: str, back: int) -> None:
    """Go on from the newest version or `back` steps before it, and publish until killed."""
    step = max(0, (step_on(channel) or 0) - back)
    current = weights(step)
    settings = PublisherSettings(anchor_ratio=0.5, blob_bytes=2000, retain_s=0, grace_s=0)
    with Publisher(channel, lambda: current, settings=settings) as publisher:
        while True:
            step += 1
            current = weights(step)
            publisher.publish()


def main(channel: str) -> None:
    with Publisher(MemoryStore(), weights(0)) as warm_up:
        warm_up.publish()
    for line in sys.stdin:
        trainer = os.fork()
        if trainer == 0:
            try:
                train(channel, int(line))
            except BaseException:  # noqa: BLE001 - a fork must not run its parent's code
                traceback.print_exc()
            os._exit(1)
        print(trainer, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
