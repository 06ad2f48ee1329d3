"""A server is ready once it has joined its channel, not before, and stays so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import Trainer
from tests.engine.followed import Followed, kind, number
from tests.engine.shards import random_weights
from vllm_delta.errors import AuthError, ChannelError, DeltaError, NotFoundError
from vllm_delta.format import Manifest

pytestmark = pytest.mark.engine


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(tmp_path / "channel", monkeypatch)


def blob(followed: Followed, manifest: Manifest) -> Path:
    return followed.channel / "b" / manifest.blobs[0].sha256


def test_it_is_ready_when_it_stands_at_the_newest_version(followed: Followed) -> None:
    """Not before it has looked; a replica that comes late takes all that it missed first."""
    for _ in range(3):
        followed.step()
    follower = followed.follow()
    assert not follower.ready
    assert follower.status()["ready"] is False
    follower.cycle()
    assert (follower.ready, number(follower)) == (True, 3)
    assert follower.status()["ready"] is True


def test_it_does_not_keep_commits_apart_before_it_is_ready(followed: Followed) -> None:
    """It takes several batches at once, whatever the interval; then the interval counts."""
    for _ in range(3):
        followed.step()
    follower = followed.follow(stage_ahead=1, min_interval_s=1000.0)
    for reached in (1, 2, 3):
        assert not follower.ready
        follower.cycle()
        assert number(follower) == reached
    assert follower.ready
    followed.step()
    follower.cycle()
    assert (follower.ready, number(follower)) == (True, 3)
    followed.now += 1001
    follower.cycle()
    assert number(follower) == 4


def test_what_is_published_while_it_joins_does_not_keep_it_out(followed: Followed) -> None:
    """It is ready at what was the newest when it first looked."""
    for _ in range(2):
        followed.step()
    follower = followed.follow(stage_ahead=1)
    for reached in (1, 2):
        assert not follower.ready
        follower.cycle()
        followed.step()
        assert number(follower) == reached
    assert follower.ready


def test_an_empty_channel_is_joined_by_looking(followed: Followed, tmp_path: Path) -> None:
    """The base model is what there is to serve."""
    followed.store = type(followed.store)(tmp_path / "empty")
    follower = followed.follow()
    assert not follower.ready
    follower.cycle()
    assert (follower.ready, follower.status()["state"]) == (True, "waiting for the channel")


def test_no_channel_is_ready_from_the_start(followed: Followed) -> None:
    follower = followed.follow(channel=None)
    assert follower.ready
    follower.cycle()
    assert follower.ready


@pytest.mark.parametrize(
    "error", [ChannelError("away"), AuthError("expired"), NotFoundError("no such bucket")]
)
def test_a_channel_out_of_reach_keeps_it_out_and_says_why(
    followed: Followed, error: DeltaError
) -> None:
    """Until it is there; rights and buckets can be put right, too, without a restart."""
    followed.step()
    followed.store.error = error
    follower = followed.follow()
    for _ in range(3):
        followed.now += 100
        follower.cycle()
        status = follower.status()
        assert (status["ready"], status["state"]) == (False, "starting")
        assert (kind(follower), status["error"]["message"]) == (
            type(error).__name__,
            error.message,
        )
    followed.store.error = None
    followed.now += 100
    follower.cycle()
    assert (follower.ready, number(follower), kind(follower)) == (True, 1, None)


@pytest.mark.parametrize("error", [AuthError("expired"), NotFoundError("no such bucket")])
def test_rights_that_are_missing_when_it_attaches_are_no_refusal(
    followed: Followed, error: DeltaError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank opens the channel for itself, perhaps on a machine with other credentials."""
    attach = followed.fleet.delta_attach

    def failing(*args: Any) -> Any:
        raise error

    followed.step()
    monkeypatch.setattr(followed.fleet, "delta_attach", failing)
    follower = followed.follow()
    follower.cycle()
    assert (follower.status()["state"], follower.ready) == ("starting", False)
    assert kind(follower) == type(error).__name__
    monkeypatch.setattr(followed.fleet, "delta_attach", attach)
    followed.now += 100
    follower.cycle()
    assert (follower.ready, number(follower), kind(follower)) == (True, 1, None)


def test_a_version_that_cannot_be_had_keeps_it_out(followed: Followed) -> None:
    """What it holds is not what its peers serve."""
    path = blob(followed, followed.step())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    follower = followed.follow()
    follower.cycle()
    assert (follower.ready, number(follower), kind(follower)) == (False, 0, "DigestError")
    path.write_bytes(whole)
    followed.now += 100
    follower.cycle()
    assert (follower.ready, number(follower)) == (True, 1)


def test_once_ready_it_stays_so(followed: Followed) -> None:
    """A channel that goes away or a bad blob later leaves the last good version served."""
    follower = followed.follow()
    follower.cycle()
    assert follower.ready
    path = blob(followed, followed.step())
    whole = path.read_bytes()
    path.write_bytes(b"")
    follower.cycle()
    assert (follower.ready, number(follower), kind(follower)) == (True, 0, "DigestError")
    path.write_bytes(whole)
    followed.store.error = ChannelError("away")
    follower.cycle()
    assert (follower.ready, number(follower), kind(follower)) == (True, 0, "ChannelError")


def test_a_fence_takes_readiness_away_and_its_end_gives_it_back(followed: Followed) -> None:
    follower = followed.follow()
    follower.cycle()
    follower._driver._core["fence"] = {"kind": "EngineError"}
    assert not follower.ready
    assert follower.status()["ready"] is False
    follower._driver._core["fence"] = None
    assert follower.ready


def test_one_that_is_pinned_where_it_stands_is_ready(followed: Followed) -> None:
    follower = followed.follow(channel=None)
    follower.take(str(followed.channel))
    followed.step()
    follower.cycle()
    assert (follower.ready, number(follower), follower.status()["state"]) == (True, 0, "pinned")
    other = followed.follow(stage_ahead=1)
    followed.step()
    assert not other.ready
    other.apply(1)
    assert (other.ready, number(other)) == (True, 1)


def test_a_channel_that_cannot_be_followed_at_all_is_no_reason_to_wait(
    followed: Followed, tmp_path: Path
) -> None:
    """Another model's: refused, told, and the base model is served."""
    shapes = {"other": ((4, 4), next(iter(followed.fleet.trainer.weights.values())).dtype)}
    Trainer(tmp_path / "other", random_weights(shapes))
    followed.store = type(followed.store)(tmp_path / "other")
    followed.fleet.delta_attach = refuse  # type: ignore[method-assign]
    follower = followed.follow()
    follower.cycle()
    assert (follower.ready, follower.status()["state"]) == (True, "refused")


def refuse(*args: Any) -> Any:
    from vllm_delta.errors import ModelMismatchError

    raise ModelMismatchError("another model")
