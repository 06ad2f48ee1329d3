"""The offline ``LLM`` follows on its caller's thread, and through vLLM's own transfer calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import PROMPT, LocalEngine, Trainer, wait_until
from vllm_delta import follow
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import ChainError, EngineError, SettingsError

pytestmark = pytest.mark.engine


def test_weights_change_on_the_callers_thread_only(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Background threads stage; only the thread that generates or steps applies."""
    following = engine.follow()
    patcher = engine.rank._patcher
    seen: dict[str, set[int]] = {"stage": set(), "check": set(), "apply": set()}
    for name, threads in seen.items():
        original = getattr(patcher, name)

        def noting(argument: Any, original: Any = original, threads: Any = threads) -> Any:
            threads.add(threading.get_ident())
            return original(argument)

        monkeypatch.setattr(patcher, name, noting)
    engine.trainer.step()
    engine.complete(PROMPT)
    engine.trainer.step()
    following.step()
    here = threading.get_ident()
    assert seen["check"] == seen["apply"] == {here}
    assert here not in seen["stage"]
    assert len(seen["stage"]) > 0


def test_generate_answers_with_the_newest_version(engine: LocalEngine) -> None:
    """What was published before the call is what answers; after `close` nothing moves."""
    following = engine.follow()
    number = engine.trainer.step()
    engine.complete(PROMPT)
    assert following.status()["version"]["number"] == number
    engine.end()
    engine.trainer.step()
    engine.complete(PROMPT)
    assert engine.llm.get_weight_version().startswith(f"{number}-")


def test_generate_answers_although_the_channel_is_gone(engine: LocalEngine) -> None:
    """An error of the channel is in the status, not in the caller's way."""
    following = engine.follow()
    away = engine.trainer.channel.rename(engine.trainer.channel.with_name("away"))
    assert len(engine.complete(PROMPT).outputs[0].token_ids) == 8
    assert following.status()["error"]["kind"] == "ChannelError"
    away.rename(engine.trainer.channel)


def test_a_store_that_is_not_allowed_at_first_is_followed_later(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """A folder that cannot be opened is no reason to give the channel up for good."""
    following = follow(engine.llm, tmp_path / "later")
    try:
        assert following.step()["state"] == "waiting for the channel"
        Trainer(engine.checkpoint, tmp_path / "later")
        blobs = tmp_path / "later" / "b"
        away = blobs.rename(blobs.with_name("away"))
        blobs.symlink_to(away)
        with pytest.raises(SettingsError, match="plain directory"):
            following.step()
        assert following.status()["state"] == "starting"
        blobs.unlink()
        away.rename(blobs)
        assert following.step()["state"] == "following"
    finally:
        following.close()


def test_several_versions_are_one_pause(engine: LocalEngine) -> None:
    """A reader that lags goes through the deltas in between without serving them."""
    following = engine.follow()
    for _ in range(5):
        engine.trainer.step()
    assert following.step()["last_commit"]["versions"] == [1, 2, 3, 4, 5]
    following.rollback()
    assert following.rollback()["version"]["number"] == 3
    assert following.apply(5)["version"]["number"] == 5
    assert following.apply(2)["version"]["number"] == 2
    assert following.status()["pinned"]
    with pytest.raises(ChainError):
        following.apply(17)
    assert following.apply()["version"]["number"] == 5
    following.verify()


@pytest.mark.parametrize("number", [-5, 17, 10**30])
def test_a_version_that_is_not_there_moves_and_unpins_nothing(
    engine: LocalEngine, number: int
) -> None:
    """A slip in the number does not send a server that was rolled back to the bad version."""
    following = engine.follow()
    for _ in range(3):
        engine.trainer.step()
        following.step()
    for state, resident in (("following", 3), ("pinned", 2)):
        with pytest.raises(ChainError, match="never published"):
            following.apply(number)
        status = following.status()
        assert (status["state"], status["version"]["number"]) == (state, resident)
        following.rollback()


def test_a_fault_of_ours_does_not_end_following(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, commands are answered, and the next look goes on."""
    following = engine.follow()
    follower = following._follower
    monkeypatch.setattr(follower._pilot, "look", lambda: 1 / 0)
    thread = threading.Thread(target=follower.run)
    thread.start()
    try:
        error = wait_until(lambda: following.status()["error"])
        assert (error["kind"], "division" in error["facts"]["reason"]) == ("EngineError", True)
        monkeypatch.undo()
        engine.trainer.step()
        assert follower.submit(follower.apply).result(60)["version"]["number"] == 1
        wait_until(lambda: following.status()["error"] is None)
    finally:
        follower.stop()
        thread.join(60)


def test_an_llm_follows_once(engine: LocalEngine) -> None:
    """A second follower would fight the first, and end it on closing."""
    following = engine.follow()
    with pytest.raises(SettingsError, match="already"):
        follow(engine.llm, engine.trainer.channel)
    following.close()
    follow(engine.llm, engine.trainer.channel).close()


def test_a_chain_stops_before_the_version_that_does_not_fit(engine: LocalEngine) -> None:
    """The versions before a bad one are committed, in the same pause; the bad one is told of."""
    following = engine.follow()
    engine.trainer.step()
    known = set((engine.trainer.channel / "b").iterdir())
    engine.trainer.step()
    (blob,) = set((engine.trainer.channel / "b").iterdir()) - known
    whole = blob.read_bytes()
    blob.write_bytes(b"")
    with pytest.raises(Exception, match=blob.name):
        following.step()
    assert following.status()["version"]["number"] == 1
    blob.write_bytes(whole)
    assert following.step()["version"]["number"] == 2


def test_without_a_channel_it_says_so(engine: LocalEngine) -> None:
    """The extension loads, the status tells, and commands are refused."""
    following = follow(engine.llm, settings=Settings())
    assert following.step()["state"] == "no channel"
    with pytest.raises(EngineError, match="no channel"):
        following.apply()
    following.close()


def test_an_llm_without_the_extension_is_refused(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to make one that can follow."""
    config = engine.llm.llm_engine.vllm_config.parallel_config
    monkeypatch.setattr(config, "worker_extension_cls", "")
    with pytest.raises(SettingsError, match="worker_extension_cls"):
        follow(engine.llm, engine.trainer.channel)


def test_the_second_door_goes_to_a_version(engine: LocalEngine) -> None:
    """vLLM's init, start, update and finish name a channel and a version."""
    engine.follow()
    engine.trainer.step()
    engine.trainer.step()
    engine.end()
    llm, channel = engine.llm, str(engine.trainer.channel)
    following = follow(llm, settings=Settings())
    llm.init_weight_transfer_engine({"init_info": {"channel": channel}})
    following.step()
    assert (following.status()["state"], following.status()["version"]["number"]) == ("pinned", 0)
    for number in (1, 2):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": number}})
        llm.finish_weight_update()
        assert llm.get_weight_version().startswith(f"{number}-")
    with pytest.raises(SettingsError, match="another channel"):
        llm.init_weight_transfer_engine({"init_info": {"channel": "/elsewhere"}})
    with pytest.raises(SettingsError, match="version"):
        llm.update_weights({"update_info": {"number": 1}})
    following.close()


def test_the_second_door_needs_a_follower(engine: LocalEngine) -> None:
    """Without one, the workers refuse and say what is missing."""
    engine.end()
    engine.llm.init_weight_transfer_engine({"init_info": {}})
    engine.llm.start_weight_update()
    with pytest.raises(EngineError, match="nothing follows"):
        engine.llm.update_weights({"update_info": {"version": 1}})
