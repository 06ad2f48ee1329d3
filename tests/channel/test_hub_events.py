from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import huggingface_hub.utils
import pytest

from tests.channel.hubs import BLOB, Woken, opened
from vllm_delta.channel import hub_events
from vllm_delta.channel.hub import HubStore
from vllm_delta.format import HEAD_KEY, manifest_key
from vllm_delta.testing.hub import LoopbackHub


@pytest.fixture
def watched(store: HubStore) -> Iterator[Woken]:
    woken = Woken()
    stop = store.watch(woken)
    assert stop is not None
    assert woken.wait(1, 10), "not woken when the stream began"
    yield woken
    stop()


def test_a_watch_wakes_within_a_second_of_anothers_write_in_its_own_channel_only(
    hub: LoopbackHub, store: HubStore, watched: Woken
) -> None:
    other = opened(hub, store._bucket)
    for elsewhere in ("run2", "x/run", ""):
        opened(hub, store._bucket, elsewhere).put(manifest_key(1), b"x")
    other.put(BLOB, b"x")
    other.put(manifest_key(1) + "." + "a" * 32, b"x")
    for n, key in enumerate((manifest_key(1), HEAD_KEY), 2):
        other.put(key, b"x")
        start_s = time.monotonic()
        assert watched.wait(n, 1.0), f"{key}: {time.monotonic() - start_s}"
    other.delete([HEAD_KEY])
    other.put(HEAD_KEY, b"y")
    assert watched.wait(4, 1.0)
    assert watched.n == 4, "woken for what is no news"


def test_a_watch_goes_on_after_the_stream_ends_and_misses_nothing(
    hub: LoopbackHub, store: HubStore, watched: Woken
) -> None:
    n = 1
    for fault in (None, "reset", "reconnect", "drop", "status"):
        if fault is not None:
            hub.faults.add("events", fault)
        hub.end_streams()
        store.put(manifest_key(n), b"x")
        n = watched.n + 1
        assert watched.wait(n, 10), fault
    n_before = watched.n
    store.put(manifest_key(999), b"x")
    assert watched.wait(n_before + 1, 10)


def test_a_watch_goes_on_where_it_was_and_anew_where_that_is_too_long_ago(
    bucket: str, online: None
) -> None:
    asked: list[str | None] = []

    def note(request: Any) -> None:
        if request.url.path.endswith("/events"):
            asked.append(request.url.params.get("cursor"))

    hooks = huggingface_hub.utils.get_session().event_hooks["request"]
    hooks.append(note)
    with LoopbackHub(replay=1) as hub:
        hub.create_bucket(bucket)
        store, woken = opened(hub, bucket), Woken()
        stop = store.watch(woken)
        assert stop is not None
        assert woken.wait(1, 10)
        store.put(HEAD_KEY, b"x")
        assert woken.wait(2, 10)
        hub.end_streams()
        assert woken.wait(3, 10)
        hub.faults.add("events", "hold")
        hub.end_streams()
        hub.faults.wait_held(1)
        for _ in range(3):
            store.put(HEAD_KEY, b"x")
        n_before = woken.n
        hub.faults.release()
        assert woken.wait(n_before + 1, 10), "asks for what is gone, over and over"
        stop()
    hooks.remove(note)
    assert asked == [None, "1", "1", None]


def test_a_watch_ends_at_stop_at_once_and_wakes_no_more(hub: LoopbackHub, store: HubStore) -> None:
    woken = Woken()
    threads = set(threading.enumerate())
    stop = store.watch(woken)
    assert stop is not None
    assert woken.wait(1, 10)
    start_s = time.monotonic()
    stop()
    assert time.monotonic() - start_s < 1
    assert not [t for t in set(threading.enumerate()) - threads if "events" in t.name]
    store.put(HEAD_KEY, b"x")
    assert woken.n == 1
    stop()


@pytest.mark.parametrize("status", [404, 501])
def test_a_watch_ends_silently_where_there_are_no_events(
    hub: LoopbackHub, store: HubStore, status: int
) -> None:
    hub.faults.add("events", "status", status=status, times=None)
    threads = set(threading.enumerate())
    stop = store.watch(Woken())
    for thread in set(threading.enumerate()) - threads:
        if "events" in thread.name:
            thread.join(10)
            assert not thread.is_alive()
    assert hub.counts["events"] == 1
    assert stop is not None
    stop()


def test_a_watch_waits_as_long_as_it_is_asked_to(hub: LoopbackHub, store: HubStore) -> None:
    hub.faults.add("events", "status", status=429, retry_after_s=600, times=None)
    woken = Woken()
    stop = store.watch(woken)
    assert stop is not None
    assert not woken.wait(1, 1.5)
    assert hub.counts["events"] == 1
    start_s = time.monotonic()
    stop()
    assert time.monotonic() - start_s < 1


def test_a_stream_that_is_silent_for_too_long_is_begun_anew(
    hub: LoopbackHub, store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_events, "SILENCE_S", 0.2)
    woken = Woken()
    stop = store.watch(woken)
    assert stop is not None
    assert woken.wait(3, 15), "not connected anew"
    stop()


def test_events_are_parsed_however_they_are_cut_and_rubbish_is_passed_over() -> None:
    stream = (
        b': ping\n\nevent: ready\r\ndata: {"cursor": "1"}\r\n\r\n'
        b'event:changes\ndata:{"changes":\ndata: []}\n\nid: 7\nevent: odd\ndata: no JSON\n\n'
        b"event: list\ndata: []\n\ndata: {}\n\nevent: reset\n\nevent: cut off\ndata: {}\n"
    )
    wanted = [("ready", {"cursor": "1"}), ("changes", {"changes": []}), ("reset", {})]
    for n in (1, 2, 7, len(stream)):
        pieces = [stream[start : start + n] for start in range(0, len(stream), n)]
        assert list(hub_events._events(pieces)) == wanted
    with pytest.raises(ValueError, match="no end"):
        list(hub_events._events([b"data: x"] * 10 + [bytes(hub_events.MAX_EVENT_BYTES)]))
