"""The loopback Hub's S3 gateway: the files of a bucket as objects, path style."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

from vllm_delta.testing.hub_api import bucket_id
from vllm_delta.testing.hub_faults import HubFault
from vllm_delta.testing.hub_files import Files
from vllm_delta.testing.hub_state import Bucket, Entry, HubState

_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_DIRECT_READERS = ("aws-cli", "botocore", "aws-sdk-rust")
"""Clients that get an object itself where others are sent to the CDN."""


class S3Gateway:
    """Handlers of `/s3/<namespace>/<bucket>/<key>`."""

    def __init__(self, state: HubState, files: Files) -> None:
        self.state = state
        self.files = files

    async def put(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        data = await request.read()
        # From here to the write nothing is awaited: that is what makes conditions atomic.
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        if request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return _error(501, "NotImplemented", "no trailing checksums")
        if "partNumber" in request.query:
            return self._put_part(request, data)
        if "x-amz-copy-source" in request.headers:
            return _error(501, "NotImplemented", "no copies")
        key = request.match_info["key"]
        there = bucket.files.get(key)
        wanted = request.headers.get("If-Match")
        if request.headers.get("If-None-Match") == "*" and there is not None:
            return _error(412, "PreconditionFailed", "the object is there")
        if wanted is not None and (there is None or wanted != f'"{there.name}"'):
            return _error(412, "PreconditionFailed", "the object is another")
        return self._write(bucket, key, data, request.headers.get("Content-Type"), fault)

    def _write(
        self,
        bucket: Bucket,
        key: str,
        data: bytes,
        content_type: str | None,
        fault: HubFault | None,
    ) -> web.Response:
        name = self.state.cas.put_plain(data)
        change = self.state.write_file(bucket, key, name, content_type=content_type)
        told = fault is None or fault.kind != "lose_event"
        self.state.tell(bucket, [change], told=told)
        return web.Response(headers={"ETag": f'"{name}"'})

    async def get(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        entry = bucket.seen(_n_unseen(fault)).get(request.match_info["key"])
        if entry is None:
            return _error(404, "NoSuchKey", "no such object")
        headers = {"ETag": f'"{entry.name}"', "Last-Modified": _http_time(entry)}
        agent = request.headers.get("User-Agent", "").lower()
        direct = any(reader in agent for reader in _DIRECT_READERS)
        if self.state.settings.cdn and request.method == "GET" and not direct:
            return self.files.redirect(entry, headers)
        return await self.files.send_entry(request, entry, headers, fault)

    async def delete(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        if "uploadId" in request.query:
            self.state.uploads.pop(request.query["uploadId"], None)
        else:
            self._remove(bucket, [request.match_info["key"]])
        return web.Response(status=204)

    async def post_bucket(
        self, request: web.Request, fault: HubFault | None
    ) -> web.StreamResponse:  # fmt: skip
        """DeleteObjects."""
        body = await request.read()
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        if "delete" not in request.query:
            return _error(501, "NotImplemented", "only ?delete")
        root = ElementTree.fromstring(body)
        keys = [one.text or "" for one in root.iter() if one.tag.rpartition("}")[2] == "Key"]
        self._remove(bucket, keys)
        told = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult {_NAMESPACE}>{told}</DeleteResult>")

    def _remove(self, bucket: Bucket, keys: list[str]) -> None:
        gone = [key for key in keys if bucket.files.pop(key, None) is not None]
        self.state.tell(bucket, [{"op": "delete", "path": key} for key in gone])

    async def post(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        """Begin an upload in parts, or end one."""
        await request.read()
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        key, query = request.match_info["key"], request.query
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.state.uploads[upload] = {}
            return _xml(
                f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{escape(bucket.id)}</Bucket>"
                f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
        parts = self.state.uploads.pop(query.get("uploadId", ""), None)
        if parts is None:
            return _error(404, "NoSuchUpload", "no such upload")
        if request.headers.get("If-None-Match") == "*" and key in bucket.files:
            return _error(412, "PreconditionFailed", "the object is there")
        data = b"".join(parts[number] for number in sorted(parts))
        etag = self._write(bucket, key, data, None, fault).headers["ETag"]
        return _xml(
            f"<CompleteMultipartUploadResult {_NAMESPACE}><Key>{escape(key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _put_part(self, request: web.Request, data: bytes) -> web.Response:
        parts = self.state.uploads.get(request.query.get("uploadId", ""))
        if parts is None:
            return _error(404, "NoSuchUpload", "no such upload")
        number = int(request.query["partNumber"])
        parts[number] = data
        return web.Response(headers={"ETag": f'"part-{number}"'})

    async def list(self, request: web.Request, fault: HubFault | None) -> web.StreamResponse:
        """ListObjectsV2."""
        bucket = self._bucket(request)
        if isinstance(bucket, web.Response):
            return bucket
        if request.method == "HEAD":
            return web.Response()
        query = request.query
        if query.get("list-type") != "2" or query.get("delimiter", "") not in ("", "/"):
            return _error(501, "NotImplemented", "only ListObjectsV2 with delimiter /")
        limit = min(int(query.get("max-keys", self.state.settings.page)), self.state.settings.page)
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        shown = _shown(bucket.seen(_n_unseen(fault)), query)
        names = sorted(name for name in shown if name > after)
        more, names = len(names) > limit, names[:limit]
        rows = "".join(_row(name, shown[name]) for name in names)
        rest = f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult {_NAMESPACE}><Name>{escape(request.match_info['bucket'])}</Name>"
            f"<Prefix>{escape(query.get('prefix', ''))}</Prefix><KeyCount>{len(names)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{rest}{rows}</ListBucketResult>"
        )

    def _bucket(self, request: web.Request) -> Bucket | web.Response:
        if "Authorization" not in request.headers:
            return _error(403, "AccessDenied", "not signed")
        bucket = self.state.buckets.get(bucket_id(request))
        return _error(404, "NoSuchBucket", "no such bucket") if bucket is None else bucket


def _shown(files: Mapping[str, Entry], query: Mapping[str, str]) -> dict[str, Entry | None]:
    """What a listing shows: objects, and what is common to those below a delimiter as None."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    shown: dict[str, Entry | None] = {}
    for key, entry in files.items():
        if key.startswith(prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            shown[key if cut < 0 else key[: cut + 1]] = entry if cut < 0 else None
    return shown


def _row(name: str, entry: Entry | None) -> str:
    if entry is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>{entry.uploaded}</LastModified>"
        f"<ETag>&quot;{entry.name}&quot;</ETag><Size>{entry.size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _http_time(entry: Entry) -> str:
    from datetime import datetime
    from email.utils import format_datetime

    return format_datetime(datetime.fromisoformat(entry.uploaded), usegmt=True)


def _n_unseen(fault: HubFault | None) -> int:
    return fault.n if fault is not None and fault.kind == "stale" else 0


def _xml(body: str, status: int = 200, **facts: Any) -> web.Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>{body}'
    return web.Response(text=text, status=status, content_type="application/xml", **facts)


def _error(status: int, code: str, message: str) -> web.Response:
    return _xml(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>", status)
