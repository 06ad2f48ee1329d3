"""The loopback Hub tells those who listen what changes in a bucket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest

from tests.channel.loopback import BUCKET, hf, http, s3, upload, use_clients
from vllm_delta.testing.hub import LoopbackHub

URL = f"/api/buckets/{BUCKET}/events"


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_clients(monkeypatch, tmp_path / "cache")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub(replay=3) as hub:
        hub.create_bucket(BUCKET)
        yield hub


class Follower:
    """Reads a stream of events one by one."""

    def __init__(self, hub: LoopbackHub, **query: str) -> None:
        self._client = http(hub, hub.read_token, timeout=30)
        headers = {"Accept": "text/event-stream"}
        self._stream = self._client.stream("GET", URL, headers=headers, params=query)

    def __enter__(self) -> Follower:
        answer = self._stream.__enter__()
        answer.raise_for_status()
        self._lines = answer.iter_lines()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stream.__exit__(*exc)
        self._client.close()

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event and what it says; a ping is an event that says nothing."""
        lines = []
        for line in self._lines:
            if not line:
                break
            lines.append(line)
        else:
            raise EOFError
        if lines == [": ping"]:
            return "ping", {}
        fields = dict(line.split(": ", 1) for line in lines)
        return fields["event"], json.loads(fields["data"])

    def changes(self) -> list[tuple[str, str]]:
        event, facts = self.next()
        assert event == "changes"
        return [(one["op"], one["path"]) for one in facts["changes"]]


def test_every_change_is_told_as_it_happens(hub: LoopbackHub) -> None:
    with Follower(hub) as follower:
        assert follower.next() == ("ready", {"cursor": "0"})
        upload(hub, {"a": b"12", "b": b"345"})
        event, facts = follower.next()
        assert (event, facts["cursor"]) == ("changes", "1")
        (a, b) = facts["changes"]
        (there,) = hf(hub).get_bucket_paths_info(BUCKET, ["a"])
        assert (a["op"], a["path"], a["size"], a["xetHash"]) == ("add", "a", 2, there.xet_hash)
        assert (b["op"], b["path"]) == ("add", "b")
        obstore.put(s3(hub), "a", b"other")
        assert follower.changes() == [("update", "a")]
        hf(hub).batch_bucket_files(BUCKET, delete=["b"])
        assert follower.changes() == [("delete", "b")]


def test_a_follower_resumes_after_its_cursor_or_a_time(hub: LoopbackHub) -> None:
    with http(hub) as client:
        before = client.get(f"/api/buckets/{BUCKET}").json()["updatedAt"]
    for name in "abc":
        hub.write(BUCKET, name, b"data")
    with Follower(hub, cursor="1") as follower:
        assert [follower.changes() for _ in range(2)] == [[("add", "b")], [("add", "c")]]
        assert follower.next() == ("ready", {"cursor": "3"})
    with Follower(hub, since="2000-01-01T00:00:00.000Z") as follower:
        assert follower.changes() == [("add", "a")]
    with Follower(hub, since="2999-01-01T00:00:00.000Z") as follower:
        assert follower.next() == ("ready", {"cursor": "3"})
    hub.write(BUCKET, "d", b"data")  # now the first is forgotten
    for query in ({"cursor": "0"}, {"since": before}):
        with Follower(hub, **query) as follower:
            assert follower.next() == ("reset", {"reason": "cursor_too_old"})
    for wrong in ("nonsense", "-1", "99"):
        with pytest.raises(httpx.HTTPStatusError, match="400"), Follower(hub, cursor=wrong):
            pass


def test_a_stream_is_pinged_and_can_be_ended() -> None:
    with LoopbackHub(ping_s=0.01) as hub:
        hub.create_bucket(BUCKET)
        with Follower(hub) as follower:
            assert [follower.next()[0] for _ in range(3)] == ["ready", "ping", "ping"]
            hub.end_streams()
            events = iter(lambda: follower.next()[0], "ping")
            assert next(events) == "reconnect"
            with pytest.raises(EOFError):
                follower.next()
        for kind in ("reconnect", "reset"):
            hub.faults.add("events", kind)  # type: ignore[arg-type]
            with Follower(hub) as follower:
                assert follower.next()[0] == kind
        hub.faults.add("events", "status", status=503, retry_after_s=3)
        with pytest.raises(httpx.HTTPStatusError) as caught, Follower(hub):
            pass
        assert caught.value.response.headers["Retry-After"] == "3"


def test_a_lost_event_is_never_told(hub: LoopbackHub) -> None:
    hub.faults.add("batch", "lose_event")
    with Follower(hub) as follower:
        assert follower.next()[0] == "ready"
        upload(hub, {"lost": b"1"})
        upload(hub, {"told": b"2"})
        assert follower.changes() == [("add", "told")]
    assert hub.paths(BUCKET) == ["lost", "told"]


def test_the_end_of_the_hub_ends_its_streams() -> None:
    with LoopbackHub() as hub:
        hub.create_bucket(BUCKET)
        follower = Follower(hub)
        follower.__enter__()
        assert follower.next()[0] == "ready"
    with pytest.raises(EOFError):
        follower.next()
    follower.__exit__(None, None, None)


def test_the_hubs_own_follower_is_told(hub: LoopbackHub) -> None:
    # A private module since 2.3: what `HfFileSystem(live_follow=True)` is made of.
    reason = "needs huggingface_hub 2.3 or newer"
    client = pytest.importorskip("huggingface_hub._bucket_live_follow", reason=reason)
    seen: list[str] = []
    ready, told = threading.Event(), threading.Event()

    def note(changes: list[Any]) -> None:
        seen.extend(change.path for change in changes)
        told.set()

    follower = client.BucketFollower(
        endpoint=hub.endpoint,
        bucket_id=BUCKET,
        token=hub.read_token,
        on_changes=note,
        on_reconcile=ready.set,
        is_alive=lambda: True,
    )
    follower.start()
    assert ready.wait(30)
    hub.write(BUCKET, "new", b"data")
    assert told.wait(30)
    assert seen == ["new"]
    follower.stop()
    hub.end_streams()
    follower.join(30)
    assert not follower.is_alive()
