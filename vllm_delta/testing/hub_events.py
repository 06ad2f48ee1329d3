"""The loopback Hub's stream of a bucket's changes, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_files import refusal
from vllm_delta.testing.hub_state import Bucket, Happening, HubState


class Events:
    """One `follow` for each open stream."""

    def __init__(self, state: HubState) -> None:
        self.state = state
        self._ended: set[asyncio.Event] = set()

    def end_streams(self) -> None:
        """Have every open stream end with a `reconnect`, as when its server goes away."""
        for ended in self._ended:
            ended.set()

    async def follow(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.StreamResponse:
        if "text/event-stream" not in request.headers.get("Accept", ""):
            return refusal(406, None, "this is a stream of events")
        try:
            cursor = _resume_at(request, bucket)
        except ValueError:
            return refusal(400, None, "not a cursor")
        answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await answer.prepare(request)
        if fault is not None and fault.kind == "reconnect":
            await _tell(answer, "reconnect", {"cursor": str(bucket.cursor)})
        elif (fault is not None and fault.kind == "reset") or cursor is None:
            await _tell(answer, "reset", {"reason": "cursor_too_old"})
        else:
            with contextlib.suppress(ConnectionError):
                await self._stream(answer, bucket, cursor)
        return answer

    async def _stream(self, answer: web.StreamResponse, bucket: Bucket, cursor: int) -> None:
        changed, ended = asyncio.Event(), asyncio.Event()
        bucket.wakers.add(changed)
        self._ended.add(ended)
        try:
            cursor = await _tell_since(answer, bucket, cursor)
            await _tell(answer, "ready", {"cursor": str(cursor)})
            while not self.state.closing.is_set():
                woken = await self._wait(changed, ended)
                if ended.is_set():
                    await _tell(answer, "reconnect", {"cursor": str(cursor)})
                    return
                if not woken:
                    await answer.write(b": ping\n\n")
                    continue
                await asyncio.sleep(self.state.settings.coalesce_s)
                changed.clear()
                cursor = await _tell_since(answer, bucket, cursor)
        finally:
            bucket.wakers.discard(changed)
            self._ended.discard(ended)

    async def _wait(self, *events: asyncio.Event) -> bool:
        """Wait for one of these, the end of the server or the next ping; False for the ping."""
        waits = [asyncio.ensure_future(event.wait()) for event in (*events, self.state.closing)]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=self.state.settings.ping_s, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            for wait in waits:
                wait.cancel()


def _resume_at(request: web.Request, bucket: Bucket) -> int | None:
    """The cursor after which a stream begins; None when what came after it is forgotten."""
    kept = bucket.happenings
    oldest = kept[0].cursor - 1 if kept else bucket.cursor
    if "cursor" in request.query:
        cursor = int(request.query["cursor"])
        if not 0 <= cursor <= bucket.cursor:
            raise ValueError("never given out")
        return cursor if cursor >= oldest else None
    if "since" in request.query:
        since = request.query["since"]
        # Times are in whole milliseconds: what happened in the same one is told, perhaps again.
        if oldest > 0 and (not kept or kept[0].at >= since):
            return None
        return next((one.cursor - 1 for one in kept if one.at >= since), bucket.cursor)
    return bucket.cursor


async def _tell_since(answer: web.StreamResponse, bucket: Bucket, cursor: int) -> int:
    news = [one for one in bucket.happenings if one.cursor > cursor]
    for one in news:
        await _tell(answer, "changes", _as_event(one))
    return news[-1].cursor if news else cursor


def _as_event(one: Happening) -> dict[str, Any]:
    return {"cursor": str(one.cursor), "changes": one.changes}


async def _tell(answer: web.StreamResponse, event: str, facts: dict[str, Any]) -> None:
    await answer.write(f"event: {event}\ndata: {json.dumps(facts)}\n\n".encode())
