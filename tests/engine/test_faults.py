"""Whatever is wrong gets a typed error, and the last good version is served on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import PROMPT, LocalEngine, Trainer, fresh_digest
from tests.engine.models import TinyModel, write_model
from vllm_delta import Reference
from vllm_delta.channel import LocalStore, Log
from vllm_delta.codec import Codec
from vllm_delta.engine.calls import new_call
from vllm_delta.errors import (
    BaseMismatchError,
    ChannelError,
    DigestError,
    EngineError,
    FormatError,
    LayoutError,
    ModelMismatchError,
)
from vllm_delta.format import Manifest

pytestmark = pytest.mark.engine


@pytest.fixture(params=["gap", "hazard"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every test by both."""
    found: Codec = request.param
    return found


EMBEDDING = "model.embed_tokens.weight"


def newest(channel: Path) -> Manifest:
    record = Log(LocalStore(channel)).tail()
    assert record is not None
    return record.manifest


def blob_of(channel: Path, place: int = 0) -> Path:
    return channel / "b" / newest(channel).blobs[place].sha256


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-1],
    "bit-flipped": lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:],
    "oversized": lambda data: data + b"\0",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_blob_is_refused_and_taken_once_it_is_whole(
    engine: LocalEngine, kind: str
) -> None:
    """Nothing is written for a bad blob; the same version is applied when the blob is good."""
    follow = engine.follow()
    before = engine.digest()
    engine.trainer.step()
    blob = blob_of(engine.trainer.channel)
    whole = blob.read_bytes()
    blob.write_bytes(DAMAGE[kind](whole))
    with pytest.raises(DigestError, match=blob.name):
        follow.step()
    assert engine.digest() == before
    assert follow.status()["version"]["number"] == 0
    assert follow.status()["lag_versions"] == 1
    assert follow.status()["lag_s"] > 0
    blob.write_bytes(whole)
    assert follow.step()["version"]["number"] == 1


def test_a_missing_blob_is_skipped_by_a_later_anchor(engine: LocalEngine, tmp_path: Path) -> None:
    """An anchor after a version that cannot be fetched leads around it."""
    follow = engine.follow()
    engine.trainer.step()
    blob_of(engine.trainer.channel).unlink()
    with pytest.raises(DigestError):
        follow.step()
    engine.trainer.publisher.anchor()
    assert follow.step()["version"]["number"] == 1
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_a_damaged_touched_weight_is_refused_before_a_pause(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """A resident weight that a delta touches is damaged, the stored fingerprint is not: the
    delta is refused, nothing is written or paused, and an anchor heals it."""
    engine.follow()  # the weights of the checkpoint, whatever a test left behind
    engine.begin(tmp_path / "referred", Reference("tiny/llama"))
    follow = engine.follow()
    stored = list(engine.core._delta_committer.ledger.fingerprints)
    engine.trainer.step(100.0, only="embed_tokens")
    engine.damage(EMBEDDING, 1234)
    damaged = engine.digest()
    with pytest.raises(BaseMismatchError, match=EMBEDDING):
        follow.step()
    status = follow.status()
    assert engine.digest() == damaged
    assert engine.core._delta_committer.ledger.fingerprints == stored
    assert (status["state"], status["version"]["number"]) == ("damaged", 0)
    assert status["last_commit"] is None
    engine.trainer.publisher.anchor()
    assert follow.step()["state"] == "following"
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_a_damaged_weight_that_lanes_pass_is_refused_while_staging(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Lanes read every weight: one that no delta touches is damaged, the delta cannot be decoded,
    a scan says why, and an anchor heals it."""
    engine.begin(tmp_path / "lanes", codec="hazard")
    follow = engine.follow()
    engine.trainer.step()
    follow.step()
    engine.trainer.step()
    parameter = dict(engine.worker.model_runner.get_model().named_parameters())[EMBEDDING]
    parameter.data.view(-1).view(torch.int16)[4321] ^= 0x2000
    status = follow.step()
    assert status["last_error"]["kind"] == "BaseMismatchError"
    assert status["last_error"]["facts"]["name"] == EMBEDDING
    assert (status["state"], status["version"]["number"]) == ("following", 2)
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_a_damaged_untouched_weight_is_found_by_a_full_scan(engine: LocalEngine) -> None:
    """A verify names the tensor that no delta touched, and the anchor heals it."""
    follow = engine.follow()
    healthy = engine.digest()
    follow.verify()
    engine.damage(EMBEDDING, 7)
    with pytest.raises(BaseMismatchError, match=EMBEDDING):
        follow.verify()
    assert follow.status()["state"] == "damaged"
    follow.step()
    assert engine.digest() == healthy
    follow.verify()


def test_scans_are_made_periodically(engine: LocalEngine) -> None:
    """With a scan interval, damage is found without anybody asking."""
    follow = engine.follow(scan_interval_s=1e-6)
    healthy = engine.digest()
    engine.damage(EMBEDDING, 7)
    follow.step()
    assert follow.status()["last_error"]["kind"] == "BaseMismatchError"
    assert engine.digest() == healthy


def test_a_rank_that_fails_to_check_changes_nothing(engine: LocalEngine) -> None:
    """A parameter that moved is an error of the check: no pause, no write."""
    follow = engine.follow()
    before = follow.status()["last_commit"]
    engine.trainer.step()
    parameter = dict(engine.worker.model_runner.get_model().named_parameters())[EMBEDDING]
    home = parameter.data
    parameter.data = home.clone()
    try:
        with pytest.raises(LayoutError, match=EMBEDDING):
            follow.step()
    finally:
        parameter.data = home
    assert follow.status()["version"]["number"] == 0
    assert follow.status()["last_commit"] == before
    assert follow.step()["version"]["number"] == 1


def test_weights_that_change_between_check_and_apply_fence_the_engine(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Apply compares what it did with what was checked. A rank that cannot prove that it took
    itself back fences the engine, and the anchor heals it."""
    follow = engine.follow()
    engine.trainer.step(100.0, only="embed_tokens")
    patcher = engine.rank._patcher
    apply = patcher.apply

    def damage_first(patch: Any) -> Any:
        monkeypatch.undo()
        engine.damage(EMBEDDING, 99)
        return apply(patch)

    monkeypatch.setattr(patcher, "apply", damage_first)
    with pytest.raises(EngineError, match="half applied"):
        follow.step()
    assert follow.status()["state"] == "fenced"
    assert engine.core.is_scheduler_paused()
    assert follow.step()["state"] == "following"
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)
    assert not engine.core.is_scheduler_paused()


def test_an_anchor_that_fails_half_way_fences_until_one_succeeds(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a half-loaded anchor the engine stays paused whoever resumes it, says so, and serves
    again once an anchor is whole."""
    follow = engine.follow()
    engine.trainer.step()
    blob_of(engine.trainer.channel).unlink()
    engine.trainer.publisher.anchor()
    assert len(newest(engine.trainer.channel).blobs) > 2
    blob = blob_of(engine.trainer.channel, 1)
    load = engine.rank.load_anchor
    whole = blob.read_bytes()

    def damage_first(seq: int) -> Any:
        blob.write_bytes(whole[:-1])
        return load(seq)

    monkeypatch.setattr(engine.rank, "load_anchor", damage_first)
    with pytest.raises(DigestError):
        follow.step()
    assert follow.status()["state"] == "fenced"
    assert follow.status()["fence"]["kind"] == "EngineError"
    engine.core.resume_scheduler()
    assert engine.core.is_scheduler_paused()
    engine.start("stuck", PROMPT, 4)
    assert engine.run(20) == {}
    monkeypatch.undo()
    blob.write_bytes(whole)
    assert follow.step()["state"] == "following"
    assert not engine.core.is_scheduler_paused()
    assert list(engine.run()) == ["stuck"]
    final = engine.trainer.save(tmp_path / "final", engine.checkpoint)
    assert engine.digest() == fresh_digest(final)


def test_an_anchor_that_is_bad_before_the_first_write_does_not_fence(engine: LocalEngine) -> None:
    """A damaged anchor is found while staging: nothing is paused, the last version is served."""
    follow = engine.follow()
    before = engine.digest()
    engine.trainer.step()
    blob_of(engine.trainer.channel).unlink()
    engine.trainer.publisher.anchor()
    blob_of(engine.trainer.channel, 1).write_bytes(b"")
    with pytest.raises(DigestError):
        follow.step()
    assert engine.digest() == before
    assert (follow.status()["state"], follow.status()["fence"]) == ("following", None)
    assert not engine.core.is_scheduler_paused()


def test_a_delta_is_not_applied_twice(engine: LocalEngine) -> None:
    """A rank and the core both refuse a version whose base is no longer resident."""
    follow = engine.follow()
    engine.trainer.step()
    follow.step()
    after = engine.digest()
    manifest = newest(engine.trainer.channel)
    call = new_call()
    with pytest.raises(BaseMismatchError):
        follow._follower._driver.commit([manifest])
    (answer,) = engine.llm.collective_rpc("delta_apply", args=(call, manifest.seq))
    assert answer["error"]["kind"] == "EngineError"
    assert engine.digest() == after


def test_a_channel_of_another_model_is_refused_by_name(engine: LocalEngine, tmp_path: Path) -> None:
    """Not following, with the reason in the status; the base model is served on."""
    other = write_model(tmp_path / "qwen3", TinyModel(architecture="qwen3"))
    engine.trainer = Trainer(other, tmp_path / "other")
    before = engine.digest()
    with pytest.raises((LayoutError, ModelMismatchError)) as caught:
        engine.follow()
    assert "norm" in str(caught.value)
    assert engine.digest() == before
    assert engine.complete(PROMPT).outputs[0].token_ids


def test_a_forged_head_and_a_forged_manifest_change_nothing(engine: LocalEngine) -> None:
    """A head that points far ahead costs requests only; bytes that are no manifest are an
    error until the record is good."""
    follow = engine.follow()
    engine.trainer.step()
    record = engine.trainer.channel / "m" / f"{newest(engine.trainer.channel).seq:012d}"
    whole = record.read_bytes()
    (engine.trainer.channel / "head").write_bytes(b"999999999")
    record.write_bytes(b"{}")
    with pytest.raises(FormatError):
        follow.step()
    assert follow.status()["version"]["number"] == 0
    record.write_bytes(whole)
    assert follow.step()["version"]["number"] == 1


def test_a_vanished_channel_is_an_error_and_is_found_again(engine: LocalEngine) -> None:
    """A directory that goes away leaves the last version served; it is followed when back."""
    follow = engine.follow()
    engine.trainer.step()
    channel = engine.trainer.channel
    away = channel.rename(channel.with_name("away"))
    with pytest.raises(ChannelError):
        follow.step()
    assert engine.complete(PROMPT).outputs[0].token_ids
    away.rename(channel)
    assert follow.step()["version"]["number"] == 1


def test_a_version_that_is_not_kept_cannot_be_rolled_back_to(engine: LocalEngine) -> None:
    """Without memory for it, a rollback is refused by name and changes nothing."""
    follow = engine.follow(rollback_bytes=0)
    engine.trainer.step()
    follow.step()
    after = engine.digest()
    with pytest.raises(EngineError, match="not kept"):
        follow.rollback()
    assert engine.digest() == after
    assert follow.status()["state"] == "following"


def test_a_rollback_and_a_scan_need_no_channel(engine: LocalEngine) -> None:
    """While the store is away one can go back and scan; going forward is a typed error."""
    follow = engine.follow()
    before = engine.digest()
    engine.trainer.step()
    follow.step()
    channel = engine.trainer.channel
    away = channel.rename(channel.with_name("away"))
    follow.verify()
    follow.rollback()
    assert engine.digest() == before
    assert follow.status()["state"] == "pinned"
    with pytest.raises(ChannelError):
        follow.apply()
    assert engine.digest() == before
    away.rename(channel)
    follow.apply()
    assert follow.status()["version"]["number"] == 1


def test_what_was_verified_before_a_bad_record_is_applied(engine: LocalEngine) -> None:
    """A record that cannot be read stops nothing before it, also when that takes many cycles."""
    follow = engine.follow(stage_ahead=1)
    for _ in range(3):
        engine.trainer.step()
    record = engine.trainer.channel / "m" / f"{newest(engine.trainer.channel).seq:012d}"
    whole = record.read_bytes()
    record.write_bytes(b"{}")
    for _ in range(4):
        try:
            follow.step()
        except FormatError:
            continue
    assert follow.status()["version"]["number"] == 2
    assert follow.status()["error"]["kind"] == "FormatError"
    record.write_bytes(whole)
    assert follow.step()["version"]["number"] == 3
