"""A Hub on this machine's loopback that the unmodified huggingface_hub and hf_xet talk to.

    with LoopbackHub() as hub:
        api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_bucket("me/channel")
        hub.faults.add("batch", "status", status=503, times=2)

or, for other processes, `python -m vllm_delta.testing.hub`, which prints its addresses and tokens
as one line of JSON and ends when its standard input does. Clients find it by `HF_ENDPOINT`.

It serves buckets, the Xet CAS behind them, the stream of their changes, and the S3 gateway (at
`/s3/<namespace>`, any signature will do; any access key may write). All is in memory and gone at
the end.

It shows what a client does when told something, not what the real Hub tells. In particular:

- Nothing is known of the real service's consistency, so here every read sees every finished
  write, unless a `stale` fault hides the newest. Its times, rates and quotas are not its own.
- The CDN is a second port of this server: no signed or expiring addresses, no caches, no regions.
- Xet: hashes are taken from clients and never computed, so a client that names its data wrongly is
  believed; chunks are never found by others' uploads; no grants for xorbs, no second version of
  shards, no several ranges in one request, no removal of what no file uses.
- Objects put through the S3 gateway get a name that is no Merkle hash of them.
- S3: no signatures, copies, versions, tags or lifecycle; parts have no least size.
- Buckets: no owners, organisations, moves, resource groups, webhooks or storage limits; any token
  may read any bucket; no size limits but memory.
- Nothing but buckets: no models, datasets, commits or login.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from vllm_delta.testing.hub_control import Control
    from vllm_delta.testing.hub_faults import HubFaults
    from vllm_delta.testing.hub_state import HubSettings, HubState

Result = TypeVar("Result")

_START_S = 30.0


class LoopbackHub:
    """A Hub in a thread of this process, for as long as the context lasts. Safe from any thread.

    Args:
        port: to listen on; 0 for any that is free.
        settings: the fields of `HubSettings`, one by one.

    Attributes:
        endpoint, cdn_endpoint: its addresses, without a slash at the end.
        token, read_token: the one that may write, and the one that may only read.
        faults: what is to go wrong.
    """

    endpoint: str
    cdn_endpoint: str
    _control: Control

    def __init__(self, *, port: int = 0, **settings: Any) -> None:
        _need_packages()
        self._port = port
        self._state = _make_state(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loopback-hub", daemon=True)

    @property
    def token(self) -> str:
        return self._state.token

    @property
    def read_token(self) -> str:
        return self._state.read_token

    @property
    def settings(self) -> HubSettings:
        return self._state.settings

    @property
    def faults(self) -> HubFaults:
        return self._state.faults

    @property
    def counts(self) -> Counter[str]:
        """Requests so far by class (`api`, `resolver`, `cas`, `s3`, `cdn`), by route (`batch`), and
        by route and method (`resolve:HEAD`); a copy."""
        return self._state.counts.read()

    def reset_counts(self) -> None:
        self._state.counts.reset()

    def create_bucket(self, bucket: str, *, private: bool = True) -> None:
        from vllm_delta.testing.hub_state import Bucket

        self._call(lambda: self._state.buckets.setdefault(bucket, Bucket(bucket, private)))

    def write(self, bucket: str, path: str, data: bytes) -> None:
        """Put a file into a bucket, as if it had been uploaded."""

        def work() -> None:
            there = self._state.buckets[bucket]
            change = self._state.write_file(there, path, self._state.cas.put_plain(data))
            self._state.tell(there, [change])

        self._call(work)

    def read(self, bucket: str, path: str) -> bytes | None:
        """What a bucket holds at a path."""

        def work() -> bytes | None:
            entry = self._state.buckets[bucket].files.get(path)
            if entry is None:
                return None
            return b"".join(self._state.cas.read(entry.name, 0, entry.size))

        return self._call(work)

    def paths(self, bucket: str) -> list[str]:
        return self._call(lambda: sorted(self._state.buckets[bucket].files))

    def damage(self, bucket: str, path: str, place: int = 0) -> None:
        """Flip a bit of the stored byte at `place` of a file, for good."""
        self._call(lambda: self._control.damage(bucket, path, place))

    def expire_tokens(self) -> None:
        """Have every token for the CAS given out so far be good for nothing."""
        self._call(lambda: self._control.expire_tokens())

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Limit requests a window by class, `api` and `resolvers`; the others are free."""
        self._call(lambda: self._control.set_limits(dict(limits)))

    def end_streams(self) -> None:
        """Have every open stream of events end with a `reconnect`."""
        self._call(lambda: self._control.events.end_streams())

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(_START_S):
            raise TimeoutError("the loopback Hub did not start")
        if self._failure is not None:
            raise self._failure
        self.endpoint, self.cdn_endpoint = self._state.endpoint, self._state.cdn_endpoint
        return self

    def __exit__(self, *exc: object) -> None:
        self.faults.clear()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it ended by itself
                loop.call_soon_threadsafe(self._state.closing.set)
        self._thread.join()

    def _call(self, work: Callable[[], Result]) -> Result:
        """Do something in the Hub's thread and wait for it."""
        if self._loop is None:
            raise RuntimeError("the loopback Hub is not running")

        async def do() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to whoever started the thread
            self._failure = error
        finally:
            self._loop = None
            self._started.set()

    async def _serve(self) -> None:
        from aiohttp import web

        from vllm_delta.testing.hub_app import make_app

        state = self._state
        app, self._control = make_app(state)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            for port in (self._port, 0):
                await web.TCPSite(runner, "127.0.0.1", port).start()
            (_, port), (_, cdn_port) = runner.addresses
            state.endpoint = f"http://127.0.0.1:{port}"
            # Some clients tell other hosts by their names alone.
            state.cdn_endpoint = f"http://localhost:{cdn_port}"
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await state.closing.wait()
        finally:
            await runner.cleanup()


def _need_packages() -> None:
    try:
        import aiohttp  # noqa: F401
        import lz4.frame  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the loopback Hub needs aiohttp and lz4: pip install 'vllm-delta[testing]'"
        ) from error


def _make_state(settings: dict[str, Any]) -> HubState:
    from vllm_delta.testing.hub_state import HubSettings, HubState

    return HubState(HubSettings(**settings))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_delta.testing.hub")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--settings", type=json.loads, default={}, help="HubSettings, as JSON")
    options = parser.parse_args(arguments)
    with LoopbackHub(port=options.port, **options.settings) as hub:
        facts = {
            "endpoint": hub.endpoint,
            "cdn_endpoint": hub.cdn_endpoint,
            "token": hub.token,
            "read_token": hub.read_token,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        while sys.stdin.read(4096):
            pass


if __name__ == "__main__":
    main()
