"""The loopback Hub's routes, and what every request goes through: counts, faults, limits, roles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web

from vllm_delta.testing.hub_api import BucketApi, bearer, bucket_id
from vllm_delta.testing.hub_cas import CasApi
from vllm_delta.testing.hub_control import Control
from vllm_delta.testing.hub_events import Events
from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_files import Files, refusal
from vllm_delta.testing.hub_s3 import S3Gateway
from vllm_delta.testing.hub_state import Bucket, HubState

Class = Literal["api", "resolver", "cas", "s3", "cdn", "other"]
Need = Literal["", "any", "read", "write", "cas-read", "cas-write"]
Answer = Awaitable[web.StreamResponse]
Handler = Callable[[web.Request, HubFault | None], Answer]
BucketHandler = Callable[[web.Request, Bucket, HubFault | None], Answer]

_LIMITED = {"api": "api", "resolver": "resolvers"}
_MAX_BODY_BYTES = 1 << 31


@dataclass(frozen=True)
class Route:
    """What is asked with `method` at `path`: its class, its name in the counts, who may ask.

    `of_bucket` is set for routes that need their bucket to exist and `handler` for the others.
    """

    method: str
    path: str
    kind: Class
    name: str
    need: Need
    handler: Handler | None = None
    of_bucket: BucketHandler | None = None


def make_app(state: HubState) -> tuple[web.Application, Control]:
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    files, events = Files(state), Events(state)
    control = Control(state, events)
    app.add_routes(control.routes())
    routes = [*_api_routes(state, files, events), *_cas_routes(state), *_s3_routes(state, files)]
    routes.append(Route("*", "/{rest:.*}", "other", "other.any", "", _nothing))
    for route in routes:
        app.router.add_route(route.method, route.path, _serve(state, route))
    names = {name for route in routes for name in (route.kind, route.name)}
    state.faults.names = frozenset(names | {"*"})
    return app, control


def _api_routes(state: HubState, files: Files, events: Events) -> list[Route]:
    api, one = BucketApi(state), "/api/buckets/{namespace}/{bucket}"
    return [
        Route("GET", "/api/whoami-v2", "api", "whoami", "read", api.whoami),
        Route("GET", "/api/buckets/{namespace}", "api", "list", "read", api.list_buckets),
        Route("POST", one, "api", "create", "write", api.create),
        Route("GET", one, "api", "info", "any", of_bucket=api.info),
        Route("DELETE", one, "api", "delete", "write", of_bucket=api.delete),
        Route("PUT", one + "/settings", "api", "settings", "write", of_bucket=api.settings),
        Route("GET", one + "/xet-read-token", "api", "xet-read-token", "any",
              of_bucket=api.read_token),
        Route("GET", one + "/xet-write-token", "api", "xet-write-token", "write",
              of_bucket=api.write_token),
        Route("POST", one + "/batch", "api", "batch", "write", of_bucket=api.batch),
        Route("POST", one + "/paths-info", "api", "paths-info", "any", of_bucket=api.paths_info),
        Route("GET", one + "/tree", "api", "tree", "any", of_bucket=api.tree),
        Route("GET", one + "/tree/{prefix:.*}", "api", "tree", "any", of_bucket=api.tree),
        Route("GET", one + "/events", "api", "events", "any", of_bucket=events.follow),
        Route("*", "/buckets/{namespace}/{bucket}/resolve/{path:.+}", "resolver", "resolve",
              "any", of_bucket=files.resolve),
        Route("*", "/cdn/{name}", "cdn", "cdn.get", "", files.cdn),
    ]  # fmt: skip


def _cas_routes(state: HubState) -> list[Route]:
    cas, base = CasApi(state), state.cas_path
    chunk, recon = "/v1/chunks/default/{name}", "/reconstructions/{name}"
    return [
        Route("POST", base + "/v1/xorbs/default/{name}", "cas", "xorb.put", "cas-write",
              cas.put_xorb),
        Route("POST", base + "/v1/shards", "cas", "shard.put", "cas-write", cas.put_shard),
        Route("GET", base + chunk, "cas", "chunk", "cas-read", cas.find_chunk),
        Route("GET", base + "/v1" + recon, "cas", "reconstruct", "cas-read", cas.reconstruct_v1),
        Route("GET", base + "/v2" + recon, "cas", "reconstruct", "cas-read", cas.reconstruct_v2),
        Route("*", base + "/{rest:.*}", "cas", "cas.other", "", _nothing),
        Route("POST", "/v1/telemetry", "cas", "telemetry", "", cas.telemetry),
        Route("GET", "/xorb/{name}", "cas", "xorb", "", cas.get_xorb),
    ]  # fmt: skip


def _s3_routes(state: HubState, files: Files) -> list[Route]:
    s3, bucket = S3Gateway(state, files), "/s3/{namespace}/{bucket}"
    key = bucket + "/{key:.+}"
    routes = [
        Route("POST", bucket + end, "s3", "s3.delete", "", s3.post_bucket) for end in ("", "/")
    ]
    for end in ("", "/"):
        routes.append(Route("GET", bucket + end, "s3", "s3.list", "", s3.list))
        routes.append(Route("HEAD", bucket + end, "s3", "s3.list", "", s3.list))
    return [
        *routes,
        Route("PUT", key, "s3", "s3.put", "", s3.put),
        Route("GET", key, "s3", "s3.get", "", s3.get),
        Route("HEAD", key, "s3", "s3.head", "", s3.get),
        Route("DELETE", key, "s3", "s3.delete", "", s3.delete),
        Route("POST", key, "s3", "s3.upload", "", s3.post),
    ]


async def _nothing(request: web.Request, fault: HubFault | None) -> web.StreamResponse:
    await request.read()
    return web.Response(status=404)


def _serve(state: HubState, route: Route) -> Callable[[web.Request], Answer]:
    async def serve(request: web.Request) -> web.StreamResponse:
        state.counts.add(route.kind, route.name, f"{route.name}:{request.method}")
        fault = state.faults.draw(route.kind, route.name, request.path)
        suffered = None if fault is None else await _suffer(state, request, route, fault)
        if suffered is not None:
            return suffered
        may_pass, headers = state.limits.take(_LIMITED.get(route.kind, ""))
        if may_pass:
            answer = await _ask(state, request, route, fault)
        else:
            answer = refusal(429, None, "Too many requests")
        if not answer.prepared:
            answer.headers.update(headers)
        if fault is not None and fault.kind in ("lose_answer", "half"):
            _hang_up(request)
        return answer

    return serve


async def _suffer(
    state: HubState, request: web.Request, route: Route, fault: HubFault
) -> web.StreamResponse | None:
    """What goes wrong before a request is looked at; an answer when that is all there is to it."""
    if fault.kind == "delay":
        await asyncio.sleep(fault.delay_s)
    elif fault.kind == "hold":
        let_go, loop = asyncio.Event(), asyncio.get_running_loop()
        await request.read()
        state.faults.hold(lambda: loop.call_soon_threadsafe(let_go.set))
        await let_go.wait()
    elif fault.kind == "drop":
        await request.read()
        _hang_up(request)
        return web.Response(status=500)
    elif fault.kind == "status":
        await request.read()
        return _status(route, fault)
    return None


def _status(route: Route, fault: HubFault) -> web.Response:
    headers: dict[str, Any] = {}
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(fault.retry_after_s)
    if fault.reset_s is not None:
        kind = _LIMITED.get(route.kind, route.kind)
        headers["RateLimit"] = f'"{kind}";r=0;t={fault.reset_s}'
        headers["RateLimit-Policy"] = f'"fixed window";"{kind}";q=1000;w=300'
    return web.json_response({"error": "asked for"}, status=fault.status, headers=headers)


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


async def _ask(
    state: HubState, request: web.Request, route: Route, fault: HubFault | None
) -> web.StreamResponse:
    refused = _refused(state, request, route)
    if refused is not None:
        await request.read()
        return refused
    if route.handler is not None:
        return await route.handler(request, fault)
    assert route.of_bucket is not None
    bucket = state.buckets.get(bucket_id(request))
    if bucket is None:
        await request.read()
        return refusal(404, "RepoNotFound", "Bucket not found")
    return await route.of_bucket(request, bucket, fault)


def _refused(state: HubState, request: web.Request, route: Route) -> web.Response | None:
    """Why whoever asks may not, if so."""
    token = bearer(request)
    if not route.need:
        return None
    if route.need in ("cas-read", "cas-write"):
        role = state.cas_role(token)
        if role is None:
            return refusal(401, None, "Invalid or expired token")
        allowed = role == "write" or route.need == "cas-read"
        return None if allowed else refusal(403, None, "The token is for reading")
    role = state.role(token)
    if token is not None and role is None:
        return refusal(401, None, "Invalid credentials in Authorization header")
    if role is None:
        bucket = state.buckets.get(bucket_id(request)) if route.need == "any" else None
        public = bucket is not None and not bucket.private
        return None if public else refusal(401, None, "Invalid username or password.")
    if route.need == "write" and role != "write":
        return refusal(403, None, "The token is for reading")
    return None
