"""What each KV policy promises; every test fails under the other two where they differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import PROMPT, LocalEngine, wait_until
from vllm_delta.codec import Codec

pytestmark = pytest.mark.engine


@pytest.fixture(params=["gap", "hazard"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every test by both."""
    found: Codec = request.param
    return found


N_BEFORE = 6
"""Tokens that a running request has when the version changes."""


def warm(engine: LocalEngine) -> None:
    """Fills the prefix cache with the prompt and proves that it is used."""
    engine.complete(PROMPT)
    assert engine.complete(PROMPT).num_cached_tokens > 0


def cross(engine: LocalEngine, follow: Any) -> tuple[list[int], float, list[int], float]:
    """Runs one request across a commit.

    Returns:
        The tokens and log-probability of what it continued with, and those that the new version
        gives for the same context computed afresh.
    """
    engine.start("running", PROMPT, 24)
    engine.run(N_BEFORE)
    engine.trainer.step(5.0)
    follow.step()
    (output,) = engine.run().values()
    tokens = list(output.outputs[0].token_ids)
    score = output.outputs[0].logprobs[N_BEFORE][tokens[N_BEFORE]].logprob
    context = {"prompt_token_ids": output.prompt_token_ids + tokens[:N_BEFORE]}
    engine.llm.reset_prefix_cache()
    after = engine.complete(context, 24 - N_BEFORE).outputs[0]
    fresh = after.logprobs[0][after.token_ids[0]].logprob
    return tokens[N_BEFORE:], score, list(after.token_ids), fresh


def test_fresh_keeps_running_contexts_and_hides_older_kv(engine: LocalEngine) -> None:
    """New requests compute their prompt again; a running one goes on with what it has."""
    follow = engine.follow(kv_policy="fresh")
    warm(engine)
    continued, score, fresh, fresh_score = cross(engine, follow)
    assert continued != fresh
    assert score != fresh_score
    engine.trainer.step()
    follow.step()
    assert engine.complete(PROMPT).num_cached_tokens == 0
    assert engine.complete(PROMPT).num_cached_tokens > 0


def test_fresh_does_not_preempt(engine: LocalEngine) -> None:
    """A running request loses no computed token at a commit, and counts as one version old."""
    follow = engine.follow(kv_policy="fresh")
    engine.start("running", PROMPT, 24)
    engine.run(N_BEFORE)
    request = next(iter(engine.core.scheduler.requests.values()))
    n_computed = request.num_computed_tokens
    engine.trainer.step()
    follow.step()
    assert (request.num_computed_tokens, request.num_preemptions) == (n_computed, 0)
    follow.step()
    assert follow.status()["oldest_kv_versions"] == 1
    engine.run()
    follow.step()
    assert follow.status()["oldest_kv_versions"] == 0


def test_reset_continues_as_the_new_version_would(engine: LocalEngine) -> None:
    """After a commit everything is computed under the new weights, running requests included."""
    follow = engine.follow(kv_policy="reset", max_recompute_share=1.0)
    warm(engine)
    continued, score, fresh, fresh_score = cross(engine, follow)
    assert continued == fresh
    assert score == fresh_score
    warm(engine)
    engine.trainer.step()
    follow.step()
    assert engine.complete(PROMPT).num_cached_tokens == 0


def test_keep_leaves_the_cache_alone(engine: LocalEngine) -> None:
    """New requests reuse KV of the older version, and running ones go on with theirs."""
    follow = engine.follow(kv_policy="keep")
    warm(engine)
    continued, score, fresh, fresh_score = cross(engine, follow)
    assert continued != fresh
    assert score != fresh_score
    warm(engine)
    engine.trainer.step()
    follow.step()
    assert engine.complete(PROMPT).num_cached_tokens > 0


def test_a_request_that_waited_across_a_commit_uses_no_older_kv(engine: LocalEngine) -> None:
    """It was admitted under the old version but nothing of it was computed."""
    follow = engine.follow(kv_policy="fresh")
    warm(engine)
    engine.start("waiting", PROMPT, 2)
    engine.trainer.step()
    follow.step()
    assert engine.run()["waiting"].num_cached_tokens == 0


def test_a_rollback_does_not_bring_older_kv_back(engine: LocalEngine) -> None:
    """The version is the same again, but a request that ran on may have mixed its KV."""
    follow = engine.follow(kv_policy="fresh")
    engine.trainer.step()
    follow.step()
    warm(engine)
    engine.trainer.step()
    follow.step()
    follow.rollback()
    assert follow.status()["version"]["number"] == 1
    assert engine.complete(PROMPT).num_cached_tokens == 0


def test_users_salts_still_keep_users_apart(engine: LocalEngine) -> None:
    """A prompt is reused by requests of the same salt and version only."""
    follow = engine.follow(kv_policy="fresh")
    engine.trainer.step()
    follow.step()

    def cached(salt: str) -> int:
        n: int = engine.complete({"prompt": PROMPT, "cache_salt": salt}).num_cached_tokens
        return n

    assert cached("alice") == 0
    assert cached("bob") == 0
    assert cached("alice") > 0
    engine.trainer.step()
    follow.step()
    assert cached("alice") == 0


def test_recompute_spaces_commits_and_the_newest_version_is_next(engine: LocalEngine) -> None:
    """While requests are prefilled again no commit is made; then one goes to the newest."""
    follow = engine.follow(kv_policy="reset", max_recompute_share=0.5)
    engine.start("running", PROMPT, 40)
    engine.run(N_BEFORE)
    assert engine.trainer.step() == 1
    assert follow.step()["version"]["number"] == 1
    engine.trainer.step()
    engine.trainer.step()
    assert follow.step()["version"]["number"] == 1
    assert follow.status()["wait_s"] > 0
    engine.run(2)
    wait_until(lambda: follow.step()["version"]["number"] == 3)
    assert follow.status()["last_commit"]["versions"] == [2, 3]
    engine.run()


def test_a_minimum_interval_holds_back(engine: LocalEngine) -> None:
    """Within the interval after a commit nothing is committed, only staged."""
    follow = engine.follow(min_interval_s=3600.0)
    engine.trainer.step()
    follow.step()
    engine.trainer.step()
    status = follow.step()
    first = status["version"]["number"]
    assert status["lag_versions"] == 2 - first
    assert status["wait_s"] > 3000
    wait_until(lambda: engine.rank.status()["staged"] != [])
    assert follow.step()["version"]["number"] == first
    assert follow.apply()["version"]["number"] == 2
