"""The loopback Hub's API of buckets: making, listing and changing them, and tokens for the CAS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_files import refusal
from vllm_delta.testing.hub_state import Bucket, Entry, HubState, Role

_MAX_OPERATIONS = 1000


class BucketApi:
    """Handlers of `/api/`. Those of one bucket are called only when it exists."""

    def __init__(self, state: HubState) -> None:
        self.state = state

    async def whoami(self, request: web.Request, fault: HubFault | None) -> web.Response:
        role = self.state.role(bearer(request))
        auth = {"type": "access_token", "accessToken": {"role": role}}
        return web.json_response({"type": "user", "name": "me", "orgs": [], "auth": auth})

    async def create(self, request: web.Request, fault: HubFault | None) -> web.Response:
        name = bucket_id(request)
        body = await request.json() if request.can_read_body else {}
        facts = {"id": name, "name": name, "url": f"{self.state.endpoint}/buckets/{name}"}
        if name in self.state.buckets:
            taken = {**facts, "error": "You already created this bucket"}
            return web.json_response(taken, status=409)
        private = body.get("visibility") == "private" or bool(body.get("private"))
        self.state.buckets[name] = Bucket(name, private)
        return web.json_response(facts)

    async def list_buckets(self, request: web.Request, fault: HubFault | None) -> web.Response:
        prefix, wanted = f"{request.match_info['namespace']}/", request.query.get("search", "")
        buckets = [self.state.buckets[name] for name in sorted(self.state.buckets)]
        return web.json_response(
            [one.facts() for one in buckets if one.id.startswith(prefix) and wanted in one.id]
        )

    async def info(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        return web.json_response(bucket.facts())

    async def delete(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        del self.state.buckets[bucket.id]
        return web.json_response({})

    async def settings(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        bucket.private = (await request.json()).get("private", bucket.private)
        return web.json_response({})

    async def read_token(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        return self._cas_token("read", bucket, fault)

    async def write_token(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        return self._cas_token("write", bucket, fault)

    def _cas_token(self, role: Role, bucket: Bucket, fault: HubFault | None) -> web.Response:
        expired = fault is not None and fault.kind == "expired"
        token, end = self.state.issue_cas_token(role, bucket.id, expired=expired)
        url = self.state.endpoint + self.state.cas_path
        headers = {
            "X-Xet-Cas-Url": url,
            "X-Xet-Token-Expiration": str(end),
            "X-Xet-Access-Token": token,
        }
        facts = {"casUrl": url, "exp": end, "accessToken": token}
        return web.json_response(facts, headers=headers)

    async def batch(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        """Do operations one by one: those that fail undo nothing."""
        try:
            operations = [json.loads(line) for line in (await request.text()).splitlines() if line]
        except ValueError:
            return refusal(400, None, "a line is not JSON")
        if not 0 < len(operations) <= _MAX_OPERATIONS:
            return refusal(400, None, f"1 to {_MAX_OPERATIONS} operations, not {len(operations)}")
        kind, n = (None, 0) if fault is None else (fault.kind, fault.n)
        done = operations[: -n or None] if kind == "half" else operations
        changes: list[dict[str, Any]] = []
        failed: list[dict[str, str]] = []
        for place, operation in enumerate(done):
            wrong = "Internal error" if kind == "refuse" and place < n else None
            wrong = wrong or self._operate(bucket, operation, changes)
            if wrong is not None:
                failed.append({"path": str(operation.get("path")), "error": wrong})
        self.state.tell(bucket, changes, told=kind != "lose_event")
        report = {
            "success": not failed,
            "processed": len(operations),
            "succeeded": len(operations) - len(failed),
            "failed": failed,
        }
        return web.json_response(report, status=422 if len(failed) == len(operations) else 200)

    def _operate(
        self, bucket: Bucket, operation: dict[str, Any], changes: list[dict[str, Any]]
    ) -> str | None:
        """Do one operation of a batch. Returns what is wrong with it."""
        verb, path = operation.get("type"), operation.get("path")
        if not isinstance(path, str) or not _is_path(path):
            return "Invalid path"
        if verb == "deleteFile":
            if bucket.files.pop(path, None) is None:
                return "File not found"
            changes.append({"op": "delete", "path": path})
            return None
        if verb not in ("addFile", "copyFile"):
            return f"Unknown operation {verb!r}"
        name = operation.get("xetHash")
        if not isinstance(name, str) or self.state.cas.size(name) is None:
            return f"Xet file {name} not found"
        mtime_ms, content_type = operation.get("mtime"), operation.get("contentType")
        write = self.state.write_file
        changes.append(write(bucket, path, name, mtime_ms=mtime_ms, content_type=content_type))
        return None

    async def paths_info(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        paths = (await request.json())["paths"]
        files = bucket.seen(_n_unseen(fault))
        return web.json_response([files[path].facts(path) for path in paths if path in files])

    async def tree(
        self, request: web.Request, bucket: Bucket, fault: HubFault | None
    ) -> web.Response:
        """One page of a listing, sorted by path; a prefix need not end where a name does."""
        prefix, query = request.match_info.get("prefix", ""), request.query
        recursive = query.get("recursive", "false").lower() in ("true", "1")
        limit = min(int(query.get("limit", self.state.settings.page)), self.state.settings.page)
        entries = dict(_entries(bucket.seen(_n_unseen(fault)), prefix, recursive))
        paths = sorted(path for path in entries if path > query.get("cursor", ""))
        headers = {}
        if len(paths) > limit:
            paths = paths[:limit]
            rest = urlencode({**query, "cursor": paths[-1]})
            url = f"{self.state.endpoint}{request.rel_url.raw_path}?{rest}"
            headers["Link"] = f'<{url}>; rel="next"'
        return web.json_response([entries[path] for path in paths], headers=headers)


def bearer(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def bucket_id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['bucket']}"


def _n_unseen(fault: HubFault | None) -> int:
    return fault.n if fault is not None and fault.kind == "stale" else 0


def _is_path(path: str) -> bool:
    parts = path.split("/")
    return "\\" not in path and all(part not in ("", ".", "..") for part in parts)


def _entries(
    files: dict[str, Entry], prefix: str, recursive: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    depth = len(prefix.rstrip("/")) + 1 if prefix else 0
    for path, entry in files.items():
        if not path.startswith(prefix):
            continue
        cut = -1 if recursive else path.find("/", depth)
        if cut < 0:
            yield path, entry.facts(path)
        else:
            folder = {"type": "directory", "path": path[:cut], "uploadedAt": entry.uploaded}
            yield path[:cut], folder
