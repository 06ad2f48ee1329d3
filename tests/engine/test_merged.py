"""An engine that lags takes a merged delta, ends bit-equal, and is not stopped by a bad one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.harness import LocalEngine, fresh_digest
from vllm_delta.channel import LocalStore, Log
from vllm_delta.codec import Codec
from vllm_delta.format import Manifest

pytestmark = pytest.mark.engine


@pytest.fixture(params=["gap", "hazard"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every test by both."""
    found: Codec = request.param
    return found


def publish(engine: LocalEngine, n_versions: int) -> None:
    """Versions that change the same tenth of every tensor again and again."""
    rng = np.random.default_rng(5)
    for _ in range(n_versions):
        for tensor in engine.trainer.weights.values():
            flat = tensor.view(-1)
            n = max(1, flat.numel() // 10)
            noise = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
            flat[:n] = (flat[:n].float() + 0.01 * noise).to(flat.dtype)
        engine.trainer.publisher.publish()


def newest(engine: LocalEngine) -> Manifest:
    record = Log(LocalStore(engine.trainer.channel)).tail()
    assert record is not None
    return record.manifest


def test_a_follower_that_lags_takes_a_merged_delta_and_ends_bit_equal(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Four versions in one delta, back to its base, and forth again."""
    follow = engine.follow()
    before = engine.digest()
    publish(engine, 4)
    assert newest(engine).kind == "merged"
    status = follow.step()
    assert status["version"]["number"] == 4
    assert status["last_commit"]["versions"] == [4]
    assert status["last_commit"]["payload_bytes"] == newest(engine).payload_bytes
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)
    follow.rollback()
    assert engine.digest() == before
    assert follow.status()["version"]["number"] == 0
    follow.apply()
    assert engine.digest() == fresh_digest(final)
    publish(engine, 1)
    assert follow.step()["last_commit"]["versions"] == [5]


def test_what_a_bad_merged_delta_stands_for_is_taken_instead(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Its blob is damaged: the error is told, and the single deltas lead there."""
    follow = engine.follow()
    publish(engine, 4)
    blob = engine.trainer.channel / "b" / newest(engine).blobs[0].sha256
    blob.write_bytes(blob.read_bytes()[:-1])
    status = follow.step()
    assert status["last_error"]["kind"] == "DigestError"
    assert status["last_commit"]["versions"] == [1, 2, 3, 4]
    assert (status["version"]["number"], status["error"]) == (4, None)
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_a_bad_merged_delta_does_not_keep_a_command_from_its_version(engine: LocalEngine) -> None:
    """`apply` to a version number goes around it too."""
    follow = engine.follow()
    publish(engine, 4)
    (engine.trainer.channel / "b" / newest(engine).blobs[0].sha256).unlink()
    assert follow.apply(4)["version"]["number"] == 4
