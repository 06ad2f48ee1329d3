"""The loopback Hub's Xet CAS over HTTP: xorbs and shards in, reconstructions and xorbs out."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_files import send
from vllm_delta.testing.hub_state import HubState
from vllm_delta.testing.hub_xet import Reconstruction, XetError


class CasApi:
    """Handlers of the CAS. Its address differs from Hub to Hub, see `HubState.cas_path`."""

    def __init__(self, state: HubState) -> None:
        self.state = state

    async def put_xorb(self, request: web.Request, fault: HubFault | None) -> web.Response:
        try:
            new = self.state.cas.put_xorb(request.match_info["name"], await request.read())
        except XetError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"was_inserted": new})

    async def put_shard(self, request: web.Request, fault: HubFault | None) -> web.Response:
        try:
            n_new = self.state.cas.put_shard(await request.read())
        except XetError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"result": int(n_new > 0)})

    async def find_chunk(self, request: web.Request, fault: HubFault | None) -> web.Response:
        """Whether the CAS has a chunk already: never, as far as a client is told."""
        return web.Response(status=404)

    async def telemetry(self, request: web.Request, fault: HubFault | None) -> web.Response:
        await request.read()
        return web.json_response({})

    async def reconstruct_v1(self, request: web.Request, fault: HubFault | None) -> web.Response:
        found = self._reconstruct(request)
        if isinstance(found, web.Response):
            return found
        fetches: dict[str, list[dict[str, Any]]] = {}
        for name, runs in _runs(found).items():
            packed = self.state.cas.xorbs[name].packed
            fetches[name] = [
                {
                    "range": {"start": start, "end": end},
                    "url": self._xorb_url(name),
                    "url_range": {"start": packed[start], "end": packed[end] - 1},
                }
                for start, end in runs
            ]
        return web.json_response(_terms(found) | {"fetch_info": fetches})

    async def reconstruct_v2(self, request: web.Request, fault: HubFault | None) -> web.Response:
        if self.state.settings.reconstruction == "v1":
            return web.Response(status=404)
        found = self._reconstruct(request)
        if isinstance(found, web.Response):
            return found
        xorbs: dict[str, list[dict[str, Any]]] = {}
        for name, runs in _runs(found).items():
            packed = self.state.cas.xorbs[name].packed
            # One address for each run: clients ask for several ranges at once only when told to.
            xorbs[name] = [
                {
                    "url": self._xorb_url(name),
                    "ranges": [
                        {
                            "chunks": {"start": start, "end": end},
                            "bytes": {"start": packed[start], "end": packed[end] - 1},
                        }
                    ],
                }
                for start, end in runs
            ]
        return web.json_response(_terms(found) | {"xorbs": xorbs})

    async def get_xorb(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        xorb = self.state.cas.xorbs.get(request.match_info["name"])
        if xorb is None:
            return web.Response(status=404)
        data = memoryview(xorb.data)
        headers = {"Content-Type": "application/octet-stream"}
        return await send(
            request, len(data), lambda start, stop: [data[start:stop]], headers, fault
        )  # fmt: skip

    def _reconstruct(self, request: web.Request) -> Reconstruction | web.Response:
        name = request.match_info["name"]
        size = self.state.cas.size(name)
        if size is None:
            return web.Response(status=404)
        try:
            start, stop, _ = request.http_range.indices(size)
        except ValueError:
            return web.Response(status=416)
        if start >= stop:
            return web.Response(status=416)
        found = self.state.cas.reconstruct(name, start, stop)
        assert found is not None
        return found

    def _xorb_url(self, name: str) -> str:
        return f"{self.state.endpoint}/xorb/{name}"


def _terms(found: Reconstruction) -> dict[str, Any]:
    terms = [
        {
            "hash": term.xorb,
            "unpacked_length": term.n_bytes,
            "range": {"start": term.start, "end": term.end},
        }
        for term in found.terms
    ]
    return {"offset_into_first_range": found.skip, "terms": terms}


def _runs(found: Reconstruction) -> dict[str, list[tuple[int, int]]]:
    """The chunks of each xorb to fetch, as disjoint runs: clients mix up runs that overlap."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for term in sorted(found.terms, key=lambda term: term.start):
        of_xorb = runs.setdefault(term.xorb, [])
        if of_xorb and term.start <= of_xorb[-1][1]:
            start, end = of_xorb.pop()
            of_xorb.append((start, max(end, term.end)))
        else:
            of_xorb.append((term.start, term.end))
    return runs
