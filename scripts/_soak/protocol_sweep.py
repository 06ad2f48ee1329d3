"""A trainer that dies at every call of one publish in turn, and another that goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path

from scripts._soak.protocol_round import Round, Script
from scripts._soak.protocol_stage import Stage
from scripts._soak.protocol_stores import Fresh
from scripts._soak.protocol_truth import Tensors, any_weights, bits_of
from vllm_delta.publisher import PublisherSettings
from vllm_delta.testing import SimulatedCrash

_FULL = PublisherSettings(
    strides=(2, 4),
    anchor_ratio=0.01,
    anchor_every_s=None,
    retain_s=0.0,
    grace_s=5.0,
    n_threads=1,
    blob_bytes=1500,
)
"""With these a publish brings all that one can: a delta, merged ones, an anchor, a collection."""

_BEFORE = 4
_BETWEEN_S = 20.0
_MOST_CALLS = 200
_N_MOVED = 40


def sweep(script: Script, fresh: Fresh, folder: Path | None) -> Stage:
    """Play the publish once for each of its calls; the stage has what went wrong in any."""
    total: Stage | None = None
    for call in range(_MOST_CALLS):
        draw = random.Random(f"{script.seed} {script.where} {script.number} {call}")
        one = dataclasses.replace(script, draw=draw, settings=_FULL, rate=0.0)
        its = Round(one, fresh(script.number), folder and folder / str(call))
        died = _play(its, call)
        if total is None:
            total = its.stage
        else:
            total.faults += its.stage.faults
            total.violations += [f"crash at call {call}: {text}" for text in its.stage.violations]
        if not died:
            return total
    assert total is not None
    total.violate(f"a publish takes more than {_MOST_CALLS} calls")
    return total


def _play(its: Round, call: int) -> bool:
    """One of them; whether the trainer died."""
    its.stage.calm = True
    trainer = its.trainer("T", any_weights(its.draw), 0)
    reader, idle = its.reader("R"), its.reader("idle")
    for _ in range(_BEFORE):
        _train(trainer.tensors, its)
        trainer.publish()
        idle.look()
    reader.look()
    assert trainer.staged is not None
    first, told = trainer.staged.n_calls, len(trainer.acknowledged)
    trainer.staged.crash_at, trainer.staged.lands = first + call, its.draw.random() < 0.5
    _train(trainer.tensors, its)
    died = False
    try:
        trainer.publish()
    except SimulatedCrash:
        died = True
        its.stage.faults["crash_in_publish"] += 1
        trainer.die()
    else:
        trainer.staged.crash_at = None
        kinds = {told.kind for told in trainer.acknowledged[told:]}
        if kinds != {"delta", "merged", "anchor"} or not its.stage.faults["collection"]:
            its.stage.violate(f"the publish brought no more than {sorted(kinds)}")
    reader.look()
    if its.draw.random() < 0.5 and died:
        with contextlib.suppress(SimulatedCrash):
            trainer.publish()
    its.finish(attacked=False)
    return died


def _train(tensors: Tensors, its: Round) -> None:
    """A step at the same places each time, so that merging pays."""
    its.stage.cue(_BETWEEN_S)
    bits_of(tensors["embedding"])[:_N_MOVED] += 1
