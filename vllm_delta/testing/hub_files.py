"""How the loopback Hub answers with bytes: ranges, damage on request, and reads of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from aiohttp import web

from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_state import Bucket, Entry, HubState

Piece = bytes | memoryview
_WRITE_BYTES = 256 * 1024


def refusal(status: int, code: str | None, message: str) -> web.Response:
    """An error as the Hub tells it."""
    headers = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code})
    return web.json_response({"error": message}, status=status, headers=headers)


async def send(
    request: web.Request,
    n_bytes: int,
    read: Callable[[int, int], Iterable[Piece]],
    headers: dict[str, str],
    fault: HubFault | None,
) -> web.StreamResponse:
    """Answer with `n_bytes` that `read(start, stop)` gives, or with the range asked for."""
    try:
        start, stop, _ = request.http_range.indices(n_bytes)
        ranged = request.headers.get("Range") is not None
        if ranged and start >= stop:
            raise ValueError("nothing in the range")
    except ValueError:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{n_bytes}"})
    length, kind = stop - start, fault.kind if fault is not None else None
    kept = min(fault.n, length) if fault is not None and kind in ("truncate", "cut") else length
    answer = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    answer.headers["Accept-Ranges"] = "bytes"
    if ranged:
        answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{n_bytes}"
    answer.content_length = kept if kind == "truncate" else length
    await answer.prepare(request)
    pieces = _first(read(start, stop), kept) if request.method != "HEAD" else iter(())
    if fault is not None and kind == "corrupt":
        pieces = _corrupted(pieces, fault.n)
    for piece in _gathered(pieces):
        await answer.write(piece)
    if kind == "cut":
        if request.transport is not None:
            request.transport.close()
        return answer
    await answer.write_eof()
    return answer


def _first(pieces: Iterable[Piece], n_bytes: int) -> Iterator[Piece]:
    for piece in pieces:
        if n_bytes <= 0:
            return
        yield piece[:n_bytes]
        n_bytes -= len(piece)


def _corrupted(pieces: Iterable[Piece], place: int) -> Iterator[Piece]:
    for piece in pieces:
        if 0 <= place < len(piece):
            damaged = bytearray(piece)
            damaged[place] ^= 1
            yield bytes(damaged)
        else:
            yield piece
        place -= len(piece)


def _gathered(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in pieces that are worth a write each."""
    waiting: list[Piece] = []
    n_waiting = 0
    for piece in pieces:
        if len(piece) >= _WRITE_BYTES and not waiting:
            view = memoryview(piece)
            for start in range(0, len(view), _WRITE_BYTES):
                yield view[start : start + _WRITE_BYTES]
            continue
        waiting.append(piece)
        n_waiting += len(piece)
        if n_waiting >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, n_waiting = [], 0
    if waiting:
        yield b"".join(waiting)


class Files:
    """Reads of whole files and ranges: `/resolve`, and the CDN that it may point at."""

    def __init__(self, state: HubState) -> None:
        self.state = state

    async def resolve(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.StreamResponse:
        n_unseen = fault.n if fault is not None and fault.kind == "stale" else 0
        entry = bucket.seen(n_unseen).get(request.match_info["path"])
        if entry is None:
            return refusal(404, "EntryNotFound", "Entry not found")
        token_url = f"{self.state.endpoint}/api/buckets/{bucket.id}/xet-read-token"
        headers = {
            "X-Xet-Hash": entry.name,
            "X-Linked-Size": str(entry.size),
            "X-Linked-Etag": f'"{entry.name}"',
            "ETag": f'"{entry.name}"',
            "Link": f'<{token_url}>; rel="xet-auth"',
        }
        if self.state.settings.cdn:
            return self.redirect(entry, headers)
        return await self.send_entry(request, entry, headers, fault)

    async def send_entry(
        self,
        request: web.Request,
        entry: Entry,
        headers: dict[str, str],
        fault: HubFault | None,
    ) -> web.StreamResponse:
        kind = {"Content-Type": entry.content_type or "application/octet-stream"}
        read = lambda start, stop: self.state.cas.read(entry.name, start, stop)  # noqa: E731
        return await send(request, entry.size, read, kind | headers, fault)

    def redirect(self, entry: Entry, headers: dict[str, str]) -> web.Response:
        """Point at another origin, which wants no credentials."""
        place = f"{self.state.cdn_endpoint}/cdn/{entry.name}"
        return web.Response(status=302, headers={**headers, "Location": place})

    async def cdn(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        name = request.match_info["name"]
        if "Authorization" in request.headers:
            self.state.counts.add("cdn.authorization")
        size = self.state.cas.size(name)
        if size is None:
            return web.Response(status=404)
        headers = {"Content-Type": "application/octet-stream", "ETag": f'"{name}"'}
        read = lambda start, stop: self.state.cas.read(name, start, stop)  # noqa: E731
        return await send(request, size, read, headers, fault)
