"""Dense and expert models over one and two ranks: bits, output with its control, failing ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import fresh_completions, run_module
from tests.engine.models import HEAD_DIM, HEADS, LAYERS, TinyModel, write_model
from vllm_delta.codec import Codec

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    model: TinyModel
    n_ranks: int
    codec: Codec = "gap"


CASES = {
    "dense, one rank": Case(TinyModel(architecture="llama"), 1),
    "dense, two ranks": Case(TinyModel(architecture="qwen3", tied=True), 2),
    "experts, one rank": Case(TinyModel(architecture="qwen3_moe"), 1),
    "lanes, two ranks": Case(TinyModel(architecture="qwen2"), 2, "hazard"),
}

Probed = tuple[Case, Path, dict[str, Any]]

_found: dict[str, tuple[Path, dict[str, Any]]] = {}


def probe(name: str, factory: pytest.TempPathFactory) -> Probed:
    """What one engine of its own process found, once per case."""
    if name not in _found:
        directory = factory.mktemp("probe")
        checkpoint = write_model(directory / "base", CASES[name].model)
        job = str(CASES[name].n_ranks), CASES[name].codec
        run_module("tests.engine.parallel_probe", str(checkpoint), *job, str(directory))
        _found[name] = directory, json.loads((directory / "found.json").read_text())
    return CASES[name], *_found[name]


@pytest.fixture(params=CASES)
def probed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """The figures of each case."""
    return probe(request.param, tmp_path_factory)


def test_every_rank_holds_the_final_version_bit_for_bit(probed: Probed) -> None:
    """After three versions each rank's weights are what vLLM's own loader makes of the final
    checkpoint, and a full scan says so too."""
    _, _, found = probed
    forward = found["forward"]
    assert forward["moved"]
    assert forward["bits_equal"]
    assert (forward["status"]["version"]["number"], forward["status"]["error"]) == (3, None)


def test_a_rollback_and_a_new_apply_are_exact_on_every_rank(probed: Probed) -> None:
    """Back to the version before and forward again, bit for bit."""
    _, _, found = probed
    assert found["back"] == {"bits_equal": True, "again": True}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.codec == "gap"])
def test_completions_equal_those_of_fresh_engines(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One request at a time, a plain engine on the final checkpoint says the same; that a second
    one does too, and one on the base checkpoint does not, makes it mean something."""
    case, directory, found = probe(name, tmp_path_factory)
    fresh, control = (
        fresh_completions(directory / "final", tensor_parallel_size=case.n_ranks) for _ in range(2)
    )
    assert fresh == control
    assert found["completions"] == fresh
    assert any(
        mine != others
        for mine, others in zip(
            found["completions"],
            fresh_completions(directory / "base", tensor_parallel_size=case.n_ranks),
            strict=True,
        )
    )


def test_ranks_decode_their_lanes_and_keep_a_halo(faults: dict[str, Any]) -> None:
    """Each rank decodes lanes; of the projections' biases, which are not cut, it keeps the other
    rank's half."""
    assert all(rank["n_decoded"] > 100 for rank in faults["lanes"])
    n_bias = LAYERS * (HEADS + 2 * CASES["lanes, two ranks"].model.n_kv_heads) * HEAD_DIM
    assert [rank["halo_bytes"] for rank in faults["lanes"]] == [n_bias // 2 * 2] * 2


@pytest.fixture
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found when one of them failed."""
    return probe("lanes, two ranks", tmp_path_factory)[2]


def test_a_rank_that_cannot_stage_stops_both(faults: dict[str, Any]) -> None:
    """Nobody applies, nobody pauses, and the next try succeeds."""
    stage = faults["stage"]
    assert (stage["error"]["kind"], stage["state"]) == ("DigestError", "following")
    assert (stage["untouched"], stage["paused"], stage["healed"]) == (True, False, True)


def test_a_rank_that_fails_before_it_writes_makes_the_others_roll_back(
    faults: dict[str, Any],
) -> None:
    """Both ranks hold the base again, the engine runs on, and the next try succeeds."""
    apply = faults["apply"]
    assert "no room" in json.dumps(apply["error"])
    assert (apply["untouched"], apply["paused"], apply["state"]) == (True, False, "following")
    assert apply["healed"]


def test_a_rank_that_is_half_applied_fences_the_engine(faults: dict[str, Any]) -> None:
    """It stays paused and says so, until an anchor was loaded on every rank."""
    half = faults["half"]
    assert half["error"] is not None
    assert (half["state"], half["paused"]) == ("fenced", True)
    assert (half["healed"], half["state_after"], half["paused_after"]) == (
        True,
        "following",
        False,
    )


def test_ranks_that_disagree_about_a_shared_weight_are_refused(faults: dict[str, Any]) -> None:
    """A weight that both hold is damaged on one: the delta is refused before a pause, by name,
    and an anchor heals both."""
    check = faults["check"]
    assert check["last_error"]["kind"] == "BaseMismatchError"
    assert check["last_error"]["facts"] == {"name": "model.norm.weight", "ranks": [0, 1]}
    assert check["healed"]
    assert check["state_after"] == "following"


def test_a_dead_rank_is_an_error_of_ours(faults: dict[str, Any]) -> None:
    """The engine cannot go on without it, and whoever steps is told so."""
    assert faults["dead"]["kind"] == "EngineError"
