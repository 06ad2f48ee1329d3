"""An engine follows a channel bit for bit: forward, back, and around damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import LocalEngine, fresh_digest
from vllm_delta.codec import Codec

pytestmark = pytest.mark.engine


@pytest.fixture(params=["gap", "hazard"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every test by both."""
    found: Codec = request.param
    return found


def test_versions_are_applied_bit_for_bit(engine: LocalEngine, tmp_path: Path) -> None:
    """After several versions the weights are those of a fresh load of the last checkpoint."""
    follow = engine.follow()
    for _ in range(3):
        engine.trainer.step()
        follow.step()
    assert follow.status()["version"]["number"] == 3
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_a_rollback_restores_every_bit_and_stays(engine: LocalEngine) -> None:
    """A rollback leads to the version before, is not followed by an apply, and says so."""
    follow = engine.follow()
    engine.trainer.step()
    follow.step()
    before = engine.digest()
    engine.trainer.step()
    follow.step()
    after = engine.digest()
    follow.rollback()
    assert engine.digest() == before != after
    assert engine.llm.get_weight_version().startswith("1-")
    status = follow.step()
    assert (status["state"], status["version"]["number"], status["lag_versions"]) == (
        "pinned",
        1,
        1,
    )
    follow.apply()
    assert engine.digest() == after
    assert follow.status()["state"] == "following"


def test_a_batch_that_takes_two_commits_keeps_their_distance(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Lanes on top of a version that was too large to keep are decoded once that is resident: the
    second commit waits for its time, unless somebody commands it."""
    engine.begin(tmp_path / "spaced", codec="hazard")
    engine.follow()
    follow = engine.follow(min_interval_s=1000.0)
    engine.trainer.step(100.0)
    engine.trainer.step()
    assert follow.step()["version"]["number"] == 1
    assert follow.status()["wait_s"] > 900
    assert follow.apply()["version"]["number"] == 2
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)
