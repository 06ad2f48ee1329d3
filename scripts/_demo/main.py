"""Runs the demonstration: follows, learns, proves."""

from __future__ import annotations

import random
import shutil
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch

from scripts._demo import proofs
from scripts._demo.channels import Channel, ChannelServerError, open_demo_channel
from scripts._demo.client import Completion
from scripts._demo.delta import FollowError
from scripts._demo.loop import Loop
from scripts._demo.model import Model, NoModelError, load_model
from scripts._demo.options import Options, parse
from scripts._demo.proofs import Served
from scripts._demo.report import Findings, Progress, draw_plot, print_proofs
from scripts._demo.server import Server, ServerError
from scripts._demo.task import draw_prompts
from scripts._demo.trainer import Trainer
from vllm_delta import Publisher, PublisherSettings

_N_COMPARED = 32
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class _Followed:
    """What the following server left behind: versions it served, and completions at the end."""

    before: Served
    newest: Served
    completions: list[Completion]


def demonstrate(options: Options, progress: Progress) -> Findings:
    """Runs everything. Every server it starts has ended when it returns or raises."""
    progress.say("loading SmolLM2-135M")
    model = load_model(options.seed)
    findings = Findings(model.origin, options.seed, options.learning_rate)
    prompts = draw_prompts(random.Random(options.seed), _N_COMPARED)
    with open_demo_channel(
        options.channel, options.work_dir, signed=options.signed, sealed=options.sealed
    ) as channel:
        findings.store, findings.signed, findings.sealed = (
            channel.store,
            options.signed,
            options.sealed,
        )
        progress.say(f"the channel is {channel.address}, {channel.store}")
        followed = _follow(options, channel, progress, model, findings, prompts)
        _compare(options, channel, progress, model, findings, followed, prompts)
    findings.seconds = progress.seconds
    return findings


def _follow(
    options: Options,
    channel: Channel,
    progress: Progress,
    model: Model,
    findings: Findings,
    prompts: list[str],
) -> _Followed:
    """Trains and publishes while a server follows; then rolls it back and forth, and asks it."""
    progress.say(f"it comes from {model.origin}; writing it as a checkpoint")
    base = model.save(options.work_dir / "base")
    delta = {
        "channel": channel.address,
        "poll_interval_s": _POLL_INTERVAL_S,
        **channel.keys.settings,
    }
    with Server("following", base, options.work_dir, delta=delta) as server:
        progress.say(f"starting vllm serve, its log is {server.log_path}")
        settings = PublisherSettings(codec=options.codec)
        with Publisher(
            channel.address,
            model.network,
            dtype=torch.bfloat16,
            settings=settings,
            keys=channel.keys.trainer,
        ) as publisher:
            progress.say(f"version {publisher.version.number} is on the channel")
            progress.say(f"the server is ready after {server.wait_until_ready():.0f} s")
            with Loop(
                server=server,
                publisher=publisher,
                trainer=Trainer(model.network, options.learning_rate),
                channel=channel,
                seed=options.seed,
                progress=progress,
            ) as loop:
                loop.run(options.n_versions, findings)
                return _question(loop, progress, findings, prompts)


def _question(loop: Loop, progress: Progress, findings: Findings, prompts: list[str]) -> _Followed:
    before, newest = loop.served
    progress.say("scanning all resident weights")
    findings.roots_equal = loop.follower.verify() == newest.root
    progress.say(f"rolling back to version {before.number}, and going forward again")
    moved = proofs.roll_back_and_forth(loop.follower, before, newest)
    findings.rollback_bit_equal = moved.back_equal
    findings.forward_again_bit_equal = moved.forth_equal
    progress.say(f"{len(prompts)} greedy completions, one at a time")
    completions = proofs.ask_one_by_one(loop.client, prompts)
    findings.n_requests += len(completions)
    findings.metrics = counters = loop.follower.counters()
    progress.say(
        f"the server counts {counters['versions_total']:.0f} versions applied, "
        f"{counters['rollbacks_total']:.0f} rolled back, "
        f"{counters.get('errors_total', 0.0):.0f} errors"
    )
    return _Followed(before, newest, completions)


def _compare(
    options: Options,
    channel: Channel,
    progress: Progress,
    model: Model,
    findings: Findings,
    followed: _Followed,
    prompts: list[str],
) -> None:
    """Compares what was served with the trainer's weights and with two fresh engines."""
    progress.say("rebuilding the final version from the channel alone")
    final = model.save(options.work_dir / "final")
    base, out = options.work_dir / "base", options.work_dir / "rebuilt"
    findings.rebuilt_equal = proofs.same_bits(proofs.rebuild(channel, base, out), final)
    findings.roots_equal &= proofs.root_of(model.served_weights()) == followed.newest.root
    fresh = []
    for name in ("fresh-1", "fresh-2"):
        progress.say(f"a fresh engine on the trainer's final checkpoint, {name}")
        fresh.append(proofs.ask_fresh(name, final, options.work_dir, prompts))
    findings.digests_equal = all(one.digests == followed.newest.digests for one in fresh)
    findings.completions_equal = followed.completions == fresh[0].completions
    findings.control_equal = fresh[0].completions == fresh[1].completions
    findings.n_completions_compared = len(followed.completions)
    findings.bit_equal = findings.roots_equal and findings.rebuilt_equal and findings.digests_equal


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the program in an orderly way, once; a second signal must not stop the stopping."""
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    print(f"\nsignal {number}: stopping the servers", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def main() -> int:
    """Runs the demonstration; returns the exit status."""
    options = parse(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    try:
        findings = demonstrate(options, Progress())
    except (ChannelServerError, ServerError, FollowError, NoModelError) as error:
        print(f"scripts/demo: {error}", file=sys.stderr, flush=True)
        return 1
    if options.json is not None:
        options.json.write_text(findings.to_json())
    if options.plot is not None:
        draw_plot(findings, options.plot)
    all_hold = print_proofs(findings)
    if all_hold:
        for name in ("base", "final", "rebuilt"):
            shutil.rmtree(options.work_dir / name)
    kept = "logs and channel" if all_hold else "logs, channel and checkpoints"
    print(f"{findings.seconds:.0f} s in all; {kept} are in {options.work_dir}", flush=True)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
