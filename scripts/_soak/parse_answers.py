"""Parsers of what stores answer: the Hub over HTTP, and the texts of obstore's errors.

An answer is written as `status`, header lines, an empty line and the body. It goes through the
real HTTP client, of which only the connection is another one.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from scripts._soak.parse_subjects import FAITHFUL, REFUSED, SAME, Parser, WrongError, demand
from vllm_delta.channel.hub import HubStore
from vllm_delta.channel.hub_events import LONGEST_WAIT_S, _Follower
from vllm_delta.channel.object_errors import Answer
from vllm_delta.channel.store import is_key
from vllm_delta.errors import DeltaError

_BLOB = "b/" + "5a" * 32
_HASH = "3c" * 32
_FIELD = re.compile(rb"[A-Za-z0-9-]+")
_GOOD_STREAM = b'200\ncontent-type: text/event-stream\n\nevent: ready\ndata: {"cursor":"9"}\n\n'
_MAX_HEAD_BYTES = 64


class Line:
    """Answers the next request with what it was given, and all that follow with an empty list."""

    def __init__(self) -> None:
        from huggingface_hub import constants, set_client_factory
        from huggingface_hub.errors import HfHubHTTPError

        library = import_module(HfHubHTTPError.__bases__[0].__module__)
        self._library, self._next = library, b"200\n\n[]"
        constants.HF_HUB_OFFLINE = False
        set_client_factory(lambda: library.Client(transport=library.MockTransport(self._answer)))

    def will_say(self, data: bytes) -> None:
        self._next = data

    def _answer(self, request: Any) -> Any:
        if "agent-harnesses" in request.url.path:  # what the client asks once for itself
            return self._library.Response(404)
        data, self._next = self._next, b"200\n\n[]"
        status, headers, body = told(data)
        stream = self._library.ByteStream(b"" if request.method == "HEAD" else body)
        return self._library.Response(status, headers=headers, stream=stream)


def told(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body; what no HTTP client lets through is left out."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    status = int(first) if first.isdigit() and len(first) == 3 and first[0] in b"12345" else 200
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        value = value.strip()
        if _FIELD.fullmatch(name) and not re.search(rb"[\r\n\0]", value) and len(line) < 60_000:
            headers.append((name, value))
    return status, headers, body


def answers() -> Iterator[Parser]:
    """Of each kind of answer that the Hub gives, and of obstore's errors."""
    line = Line()
    store = HubStore("me/run", "one", endpoint="http://127.0.0.1:9", token="hf_token")
    store.list("")  # the first request of a process is not the only one

    def hub(
        name: str, intact: list[bytes], ask: Callable[[bytes], object], share: float = 1.0
    ) -> Parser:
        def judge(data: bytes) -> str:
            line.will_say(data)
            store._hub._bucket_seen = False
            store._xet._tokens.clear()
            try:
                ask(data)
            except DeltaError as error:
                wait_s = error.facts.get("retry_after_s", 0.0)
                demand(isinstance(wait_s, float) and 0 <= wait_s < math.inf, f"waits {wait_s}")
                demand("hf_token" not in str(error), "tells the token")
                json.dumps(error.to_dict())
                raise
            return SAME if data in intact else FAITHFUL

        return Parser(name, intact, judge, share)

    yield hub("hub_token", _TOKENS, lambda data: _token(store, data))
    yield hub("hub_tree", _TREES, lambda data: _tree(store))
    yield hub("hub_batch", _BATCHES, lambda data: _batch(store, data))
    yield hub("hub_object", _OBJECTS, lambda data: _object(store, data))
    yield hub("hub_found", _FOUND, lambda data: _found(store, data))
    yield _refusals(hub("", [], lambda data: _object(store, data)).judge)
    yield _events(store, line)
    yield _object_errors()


_TOKENS = [
    (
        b'200\ncontent-type: application/json\n\n{"casUrl":"https://cas.example","accessToken":"eyJ0",'
        b'"exp":1999999999}'
    ),
    b'200\nx-request-id: 1\n\n{"casUrl": "http://127.0.0.1:9", "accessToken": "t", "exp": 2e9}',
]
_TREES = [
    (
        b'200\nlink: <http://127.0.0.1:9/api/buckets/me/run/tree?cursor=a>; rel="next"\n\n'
        b'[{"type":"file","path":"one/m/000000000001","size":700},{"type":"directory","path":"one/b"}]'
    ),
    b'200\n\n[{"type":"file","path":"one/head","size":11,"xetHash":"%s"}]' % _HASH.encode(),
    b"200\n\n[]",
]
_BATCHES = [
    b'200\n\n{"success":true,"processed":2,"succeeded":2,"failed":[]}',
    b'422\n\n{"success":false,"failed":[{"path":"one/head","error":"Entry not found"}]}',
]
_OBJECTS = [b'200\ncontent-length: 11\netag: "a"\n\n{"seq":120}', b"200\n\n"]
_FOUND = [
    b"302\nlocation: https://cdn.example/x?sig=secret\nx-linked-size: 7000\nx-xet-hash: %s\n\n"
    % _HASH.encode(),
    b"200\ncontent-length: 12\nx-xet-hash: %s\n\n" % _HASH.encode(),
]
_ERRORS = [
    b"429\nretry-after: 17\nx-error-message: slow down\n\n",
    b'429\nratelimit: "api";r=0;t=42\nratelimit-policy: "fixed window";"api";q=500;w=300\n\n{}',
    b"503\nretry-after: Wed, 21 Oct 2099 07:28:00 GMT\n\n",
    b"404\nx-error-code: RepoNotFound\n\n",
    b'403\n\n{"error":"storage quota exceeded for me"}',
    b"401\nx-error-message: Invalid credentials\n\n",
    b"307\nlocation: /elsewhere\n\n",
]
_STREAMS = [
    _GOOD_STREAM,
    (
        b'200\ncontent-type: text/event-stream\n\n: hello\n\nevent: changes\ndata: {"cursor":"12",'
        b'"changes":[{"op":"add","path":"one/head"}]}\n\nevent: reconnect\ndata: {}\n\n'
    ),
    b"200\ncontent-type: text/event-stream\n\nevent: reset\r\ndata: {}\r\n\r\n",
]
_TEXTS = [
    (b"GenericError\nGeneric S3 error: Error performing PUT http://127.0.0.1:9/bucket/run/head in "
    b"3ms - Server returned non-2xx status code: 503 Service Unavailable: <?xml version=\"1.0\"?>"
    b"<Error><Code>SlowDown</Code><Message>x</Message></Error>\n\nDebug source:\nGeneric {}"),
    (b"PermissionDeniedError\nThe operation lacked the necessary privileges: Error performing GET "
    b"http://127.0.0.1:9/bucket/run/head in 1ms - Server returned non-2xx status code: 403 "
    b"Forbidden: <Error><Code>AccessDenied</Code></Error>"),
    (b"GenericError\nGeneric S3 error: Error performing GET http://127.0.0.1:9/bucket/run/head?a=b "
    b"in 9ms, after 0 retries - HTTP error: error sending request\n\nkind: Connect"),
    b"NotFoundError\nObject at location run/head not found: <Code>NoSuchBucket</Code>",
    (b"GenericError\nReceived redirect without LOCATION, this normally indicates an incorrectly "
    b"configured region <Region>eu-west-1</Region>"),
]  # fmt: skip


def _token(store: HubStore, data: bytes) -> None:
    token, is_new = store._xet._token("read")
    demand(is_new and math.isfinite(token.expires_s), "no time at which it ends")
    said = json.loads(told(data)[2])
    demand(token.endpoint == str(said["casUrl"]), "another endpoint")
    demand(token.secret == str(said["accessToken"]), "another token")
    demand(token.expires_s == float(said["exp"]), "another end")
    # A secret of a letter or two stands in every text.
    short = len(token.secret) < 4
    demand(
        short or token.secret not in repr(token) or token.secret in token.endpoint,
        "tells the secret",
    )


def _tree(store: HubStore) -> None:
    for key in store.list(""):
        demand(is_key(key), f"not a key: {key!r}")


def _batch(store: HubStore, data: bytes) -> None:
    store._change([{"type": "deleteFile", "path": "one/head"}, {"type": "addFile", "path": "o"}])
    status, _, body = told(data)
    failed = json.loads(body).get("failed", [])
    demand(status in (200, 422), "believed with another status")
    demand(all(one["path"] == "one/head" for one in failed), "believed, and something failed")


def _object(store: HubStore, data: bytes) -> None:
    found = store.get("head", max_bytes=_MAX_HEAD_BYTES)
    status, _, body = told(data)
    demand(found is None or len(found) <= _MAX_HEAD_BYTES, "larger than was asked for")
    if status == 200:
        demand(found == body, "other bytes")


def _found(store: HubStore, data: bytes) -> None:
    found = store._find(_BLOB)
    if found is not None:
        demand(found[0].encode() in data and str(found[1]).encode() in data, "another object")


def _refusals(judge: Callable[[bytes], str]) -> Parser:
    """Errors are meant here, so an intact input is one that gives the error that it gave first."""

    def kind(data: bytes) -> str:
        try:
            judge(data)
        except DeltaError as error:
            return f"{type(error).__name__} {error.facts.get('retry_after_s', 0.0) > 0}"
        return FAITHFUL

    expected = {data: kind(data) for data in _ERRORS}

    def refused(data: bytes) -> str:
        found = kind(data)
        if data in expected:
            demand(found == expected[data], f"{found} instead of {expected[data]}")
            return SAME
        return FAITHFUL if found == FAITHFUL else REFUSED

    return Parser("hub_error", _ERRORS, refused)


def _events(store: HubStore, line: Line) -> Parser:
    woken: list[int] = []
    follower = _Follower(store._hub, is_key, lambda: woken.append(1))

    def judge(data: bytes) -> str:
        follower._cursor, follower._n_failures = None, 0
        refused = False
        asked_s: float | None = None
        line.will_say(data)
        try:
            follower._follow_once()
        except DeltaError as error:
            refused, asked_s = True, error.facts.get("retry_after_s")
        except (OSError, RuntimeError, ValueError):
            refused = True  # as its thread takes them
        demand(0 <= follower._delay_s(asked_s) <= LONGEST_WAIT_S, "waits too long")
        # Whatever came, the next connection must be able to tell again.
        woken.clear()
        line.will_say(_GOOD_STREAM)
        try:
            demand(follower._follow_once() and woken, "the feed tells nothing any more")
        except (DeltaError, OSError, RuntimeError, ValueError) as error:
            raise WrongError(f"the feed cannot be opened again: {error}") from error
        return SAME if data in _STREAMS else REFUSED if refused else FAITHFUL

    return Parser("hub_events", _STREAMS, judge)


def _object_errors() -> Parser:
    library = import_module("obstore.exceptions")
    kinds = {name: getattr(library, name) for name in dir(library) if name.endswith("Error")}

    def typed(data: bytes) -> DeltaError:
        name, _, text = data.partition(b"\n")
        kind = kinds.get(name.decode(errors="replace"), kinds["GenericError"])
        answer = Answer(kind(text.decode(errors="surrogateescape")))
        demand(isinstance(answer.lacks_object, bool), "no answer")
        demand(isinstance(answer.is_conflict, bool), "no answer")
        error = answer.typed(
            "s3://bucket/run", "head", bucket="bucket", has_worked=bool(len(data) % 2)
        )
        demand(isinstance(error, DeltaError), "not an error of ours")
        demand(len(str(error)) < 1000, "as long as what it was told")
        json.dumps(error.to_dict())
        return error

    expected: dict[bytes, type[DeltaError]] = {}
    with contextlib.suppress(Exception):
        expected = {data: type(typed(data)) for data in _TEXTS}

    def judge(data: bytes) -> str:
        error = typed(data)
        if data in expected:
            demand(type(error) is expected[data], "another error")
            return SAME
        return REFUSED

    return Parser("object_error", _TEXTS, judge)
