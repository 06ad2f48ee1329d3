"""A store is asked on time, when it says that there is news, and not while it wants none of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.followed import Followed, kind, number
from tests.engine.harness import wait_until
from vllm_delta.engine import follower as module
from vllm_delta.engine.follower import Follower
from vllm_delta.engine.lookout import Lookout
from vllm_delta.errors import ChannelError, RateLimitError, SettingsError

pytestmark = pytest.mark.engine


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(tmp_path / "channel", monkeypatch)


@contextmanager
def running(follower: Follower) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=follower.run)
    thread.start()
    try:
        yield thread
    finally:
        follower.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_a_store_that_asks_for_patience_is_left_alone(followed: Followed) -> None:
    """For as long as it asked, whoever wakes or commands; then it is asked again."""
    follower, store = followed.follow(), followed.store
    follower.cycle()
    store.error = RateLimitError("slow down", retry_after_s=300)
    followed.now += 10
    follower.cycle()
    followed.step()
    store.error, store.n_asked = None, 0
    for _ in range(29):
        followed.now += 10
        follower.cycle()
        follower.cycle(eager=True)
        with pytest.raises(RateLimitError) as caught:
            follower.apply()
        assert caught.value.retry_after_s == pytest.approx(1310 - followed.now)
    assert store.n_asked == 0
    assert (kind(follower), number(follower)) == ("RateLimitError", 0)
    followed.now += 10
    follower.cycle()
    assert (kind(follower), number(follower)) == (None, 1)


def test_a_rollback_and_a_scan_need_no_store_that_asks_for_patience(followed: Followed) -> None:
    """They ask nobody, and the limit is still told."""
    followed.step()
    follower, store = followed.follow(), followed.store
    follower.cycle()
    store.error = RateLimitError("slow down", retry_after_s=300)
    follower.cycle()
    store.n_asked = 0
    follower.verify()
    assert follower.rollback()["version"]["number"] == 0
    follower.cycle()
    assert (store.n_asked, kind(follower)) == (0, "RateLimitError")


def test_a_limit_that_a_rank_met_counts_for_all(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error travels with how long to wait."""
    follower, store = followed.follow(), followed.store
    follower.cycle()
    followed.step()

    def limited(*args: Any) -> Any:
        raise RateLimitError("slow down", retry_after_s=120)

    with monkeypatch.context() as patched:
        patched.setattr(followed.fleet.ranks[1], "ready", limited)
        follower.cycle()
    assert kind(follower) == "RateLimitError"
    assert follower._idle_s() == pytest.approx(120)
    store.n_asked, followed.fleet.calls[:] = 0, []
    followed.now += 119
    follower.cycle()
    assert (store.n_asked, followed.fleet.calls) == (0, [])
    followed.now += 1
    follower.cycle()
    assert (kind(follower), number(follower)) == (None, 1)


def test_a_limit_without_a_time_is_an_error_like_any(followed: Followed) -> None:
    follower, store = followed.follow(), followed.store
    store.error = RateLimitError("slow down")
    follower.cycle()
    store.error = None
    follower.cycle()
    assert kind(follower) is None


def test_nobody_is_obeyed_for_ever(followed: Followed) -> None:
    """A store that asks for a year is asked again after an hour."""
    follower, store = followed.follow(), followed.store
    store.error = RateLimitError("slow down", retry_after_s=3e7)
    follower.cycle()
    store.error = None
    followed.now += 3600
    follower.cycle()
    assert kind(follower) is None


def test_news_that_the_store_tells_of_are_taken_at_once(followed: Followed) -> None:
    """Not at the next poll, which is far away; the watch ends with the follower."""
    follower = followed.follow(poll_interval_s=1000.0)
    with running(follower):
        wait_until(lambda: follower.ready and followed.store.wake is not None)
        followed.step()
        assert followed.store.wake is not None
        followed.store.wake()
        wait_until(lambda: number(follower) == 1)
    assert followed.store.wake is None


def test_a_store_that_cannot_be_watched_is_polled(followed: Followed) -> None:
    """That it cannot is told once, and nothing else changes."""
    followed.store.no_watch = ChannelError("no events")
    follower = followed.follow(poll_interval_s=0.01)
    advancing = threading.Event()
    original = follower._monotonic
    follower._lookout._monotonic = lambda: original() + (1 if advancing.is_set() else 0)
    with running(follower):
        wait_until(lambda: follower.ready)
        followed.step()
        advancing.set()
        wait_until(lambda: number(follower) == 1)
    assert follower.status()["last_error"]["message"] == "no events"


def test_waiting_for_requests_to_recompute_asks_no_store(followed: Followed) -> None:
    """Twenty looks a second at the engine are none at the store."""
    followed.step()
    follower = followed.follow()
    follower.cycle()
    followed.store.n_asked = 0
    followed.step()
    for _ in range(5):
        follower.cycle(look=False)
    assert (followed.store.n_asked, number(follower)) == (0, 1)
    followed.store.error = ChannelError("away")
    follower.cycle()
    follower.cycle(look=False)
    assert kind(follower) == "ChannelError", "not looking is no success"


def test_who_is_behind_does_not_wait_for_the_next_look(followed: Followed) -> None:
    """Batch follows batch, also where the store is looked at now and then."""
    for _ in range(3):
        followed.step()
    follower = followed.follow(poll_interval_s=1000.0, stage_ahead=1)
    with running(follower):
        wait_until(lambda: number(follower) == 3)


def test_it_idles_until_there_is_something_to_do(followed: Followed) -> None:
    """Until the next look, the next commit or the next try."""
    follower = followed.follow(min_interval_s=100.0, poll_interval_s=7.0)
    follower.cycle()
    assert follower._idle_s() == float("inf")
    followed.step()
    follower.cycle()
    followed.now += 30
    followed.step()
    follower.cycle()
    assert follower._idle_s() == pytest.approx(70)
    followed.now += 71
    follower.cycle()
    assert number(follower) == 2
    manifest = followed.step()
    (followed.channel / "b" / manifest.blobs[0].sha256).write_bytes(b"")
    followed.now += 101
    follower.cycle()
    assert follower._idle_s() == pytest.approx(14)


class Panic(BaseException):
    """As extensions raise that are not written in Python."""


@pytest.mark.parametrize("kind", [OverflowError, Panic])
def test_no_error_of_a_command_or_of_waiting_ends_following(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    follower = followed.follow()
    faults = iter([kind()])

    def idle_s() -> float:
        for fault in faults:
            raise fault
        return 0.001

    def fail() -> None:
        raise kind

    monkeypatch.setattr(follower, "_idle_s", idle_s)
    with running(follower):
        assert isinstance(follower.submit(fail).exception(30), kind)
        assert follower.submit(lambda: 7).result(30) == 7


def test_an_error_is_over_when_it_was_put_right_between_two_looks(followed: Followed) -> None:
    follower = followed.follow()
    follower.cycle()
    manifest = followed.step()
    path = followed.channel / "b" / manifest.blobs[0].sha256
    whole = path.read_bytes()
    path.write_bytes(b"")
    follower.cycle()
    assert kind(follower) == "DigestError"
    path.write_bytes(whole)
    followed.now += 100
    follower.cycle(look=False)
    assert (number(follower), kind(follower)) == (1, None)


def test_an_offline_engine_looks_at_a_remote_store_now_and_then(followed: Followed) -> None:
    """Once per interval however often it generates, and later while the store fails."""
    assert followed.follow().due()
    assert followed.follow().due()
    follower = followed.follow(channel="s3://bucket/run")

    def looks(n: int) -> int:
        followed.store.n_asked, n_looks = 0, 0
        for _ in range(n):
            followed.now += 1
            if follower.due():
                n_looks += 1
                follower.cycle()
            else:
                follower.cycle(look=False)
        assert (followed.store.n_asked > 0) == (n_looks > 0)
        return n_looks

    assert looks(50) == 10
    followed.store.error = ChannelError("away")
    assert looks(50) == 3


def test_manifests_are_not_waited_for_longer_than_a_command_may_take(followed: Followed) -> None:
    """The follower's own policy is short; ranks open the channel with the default one."""
    followed.follow().cycle()
    (policy,) = followed.policies
    assert policy is not None
    assert policy.deadline_s == module._POLICY.deadline_s == 5.0


class Watched:
    """A store that is only watched."""

    def __init__(self, error: SettingsError | None = None) -> None:
        self.error = error
        self.n_watched = self.n_ended = 0

    def watch(self, wake: Any) -> Any:
        self.n_watched += 1
        if self.error is not None:
            raise self.error
        return self.end

    def end(self) -> None:
        self.n_ended += 1


def test_a_lookout_is_due_on_time_and_when_woken() -> None:
    now = [0.0]
    lookout = Lookout(lambda: now[0])
    assert lookout.due(5.0)
    assert not lookout.due(5.0)
    now[0] = 4.9
    lookout.wait(0.0)
    assert not lookout.due(5.0)
    now[0] = 5.0
    lookout.wait(100.0)
    assert lookout.due(5.0)
    lookout.wake()
    lookout.wait(100.0)
    assert lookout.due(5.0)
    lookout.wait(0.0)
    assert not lookout.due(5.0), "a wake counts once"


def test_a_lookout_asks_each_store_once_for_a_watch() -> None:
    lookout = Lookout(lambda: 0.0)
    first, second = Watched(), Watched(SettingsError("no"))
    for _ in range(3):
        assert lookout.watch(first) is None  # type: ignore[arg-type]
    assert lookout.watch(second) is second.error  # type: ignore[arg-type]
    assert first.n_ended == 1
    assert lookout.watch(second) is None  # type: ignore[arg-type]
    lookout.end()
    lookout.end()
    assert (first.n_watched, first.n_ended) == (1, 1)
    assert (second.n_watched, second.n_ended) == (1, 0)
