"""A channel in a bucket: of S3, Google Cloud Storage or Azure, or of a server that speaks S3."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from vllm_delta.channel.object_clients import Address, connect, parse_address
from vllm_delta.channel.object_errors import Answer, is_panic, panicked
from vllm_delta.channel.store import Store, check_key, is_key
from vllm_delta.errors import ChannelError, DeltaError, DigestError, SettingsError
from vllm_delta.format import HEAD_KEY

if TYPE_CHECKING:
    from obstore import GetResult

    from vllm_delta.channel.object_clients import Client

_FOLDERS = ("m", "b")
_IN_FLIGHT = 8
_PIECE_BYTES = 1 << 20

# A larger object is written in parts, each a request of its own with its own time.
_SINGLE_PUT_BYTES = 32 << 20
_PART_BYTES = 16 << 20
_PARTS_IN_FLIGHT = 4

_asked_in: int | None = None
"""The process that made the first request; in a fork of it obstore's threads are missing."""


class ObjectStore(Store):
    """A `Store` under a prefix of a bucket, by obstore. Safe to use from any thread.

    Credentials, region and server are those of the cloud's usual environment; see ADR 0007. A
    large object is written in parts, and is there when the last one is: readers see it whole.
    Once a process made a request, processes that fork from it can make none: any call then raises.
    Tested against SeaweedFS; of `gs` and `az` only what is sent is checked, never by the clouds.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        client: for that place; None for one with the environment's settings.

    Raises:
        SettingsError: not such an address, obstore is missing, or settings that do not fit.
    """

    def __init__(self, url: str | Address, *, client: Client | None = None) -> None:
        self._address = parse_address(url) if isinstance(url, str) else url
        self._client = client or connect(self._address)
        self._has_worked = False
        self._is_probed = False
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._address.url

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def put(self, key: str, data: bytes) -> None:
        with self._errors(check_key(key)):
            self._client.put(
                key,
                data,
                use_multipart=len(data) > _SINGLE_PUT_BYTES,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_IN_FLIGHT,
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there, in one step over all processes.

        The first call of a handle writes a probe twice, and refuses a store that lets it be
        overwritten: three more requests, by writers only.

        False can be wrong, in that what stands there is this very write: one whose answer was
        lost and which was sent again, by `RetryingStore` or by a proxy. And after a conflict with
        another write, which S3 answers with 409, there may be nothing at all: where the store
        says so this is a `ChannelError`, but not every store does. `Log` therefore reads back.

        Raises:
            SettingsError: the store ignores the condition, or does not know it.
        """
        check_key(key)
        self._probe()
        return self._create(key, data)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        for key in objects:
            check_key(key)
        self._together([partial(self.put, key, data) for key, data in objects.items()])

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        with self._errors(check_key(key)):
            result = self._open(key, max_bytes, 0)
            return None if result is None else bytes(result.bytes())

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        with self._errors(check_key(key)):
            try:
                result = self._open(key, max_bytes, start)
            except Exception as error:
                if start == 0 or Answer(error).status != 416:
                    raise
                return self._nothing_after(key, max_bytes, start)
        return None if result is None else self._pieces(result, key)

    def delete(self, keys: Iterable[str]) -> None:
        listed = [check_key(key) for key in keys]
        if self._address.scheme == "s3" and listed:
            # All in one request; where that is one a key, an absent one ends it.
            with self._errors(), self._absent_passed_over():
                self._client.delete(listed)
                return
        # Elsewhere, an absent object is an error that hides what became of the others.
        self._together([partial(self._delete, key) for key in listed])

    def list(self, prefix: str) -> list[str]:
        keys: list[str] = []
        with self._errors():
            for folder in _FOLDERS:
                stem = f"{folder}/"
                if stem.startswith(prefix) or prefix.startswith(stem):
                    # obstore lists whole folders only.
                    for page in self._client.list(folder, chunk_size=1000):
                        keys += [entry["path"] for entry in page]
            if HEAD_KEY.startswith(prefix):
                with self._absent_passed_over():
                    self._client.head(HEAD_KEY)
                    keys.append(HEAD_KEY)
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    def _open(self, key: str, max_bytes: int, start: int) -> GetResult | None:
        """An object whose body is still to be read, and not too large."""
        try:
            # Without a range from 0 on: an empty object has none.
            result = self._client.get(key, options={"range": {"offset": start}} if start else {})
        except FileNotFoundError as error:
            if Answer(error).lacks_object:
                return None
            raise
        _check_size(result.meta["size"], key, max_bytes)
        return result

    def _nothing_after(self, key: str, max_bytes: int, start: int) -> Iterator[bytes] | None:
        """What a stream gives whose start the store refuses: it is not inside of the object."""
        with self._absent_passed_over():
            n_bytes = self._client.head(key)["size"]
            _check_size(n_bytes, key, max_bytes)
            if n_bytes > start:
                raise ChannelError("an object was replaced", url=self.url, key=key)
            return iter(())
        return None

    def _pieces(self, result: GetResult, key: str) -> Iterator[bytes]:
        with self._errors(key):
            yield from result.stream(min_chunk_size=_PIECE_BYTES)

    def _delete(self, key: str) -> None:
        with self._errors(key), self._absent_passed_over():
            self._client.delete(key)

    def _create(self, path: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        with self._errors(path):
            try:
                self._client.put(path, data, mode="create")
            except AlreadyExistsError as error:
                if Answer(error).is_conflict:
                    raise
                return False
        return True

    def _probe(self) -> None:
        """Refuse a store that ignores conditions: there two trainers would both believe to own."""
        with self._lock:
            if self._is_probed:
                return
            # No key of a channel, so that no reader ever looks at it.
            path = f"probe/{uuid.uuid4().hex}"
            if not self._create(path, b"probe"):
                raise ChannelError("the store has what nobody wrote", url=self.url, key=path)
            try:
                if self._create(path, b"probe"):
                    raise SettingsError("the store ignores conditional writes", url=self.url)
            finally:
                # A few bytes that stay behind harm nobody.
                with contextlib.suppress(DeltaError):
                    self._delete(path)
            self._is_probed = True

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls, several at a time. After an error none is still under way."""
        if len(calls) < 2:
            for call in calls:
                call()
            return
        with ThreadPoolExecutor(min(_IN_FLIGHT, len(calls))) as pool:
            jobs = [pool.submit(call) for call in calls]
            done, waiting = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in waiting:
                job.cancel()
        for job in done:
            job.result()

    @contextlib.contextmanager
    def _absent_passed_over(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if not Answer(error).lacks_object:
                raise

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        """Turn obstore's errors into ours."""
        from obstore.exceptions import BaseError

        _refuse_after_fork(self.url)
        try:
            yield
        except (BaseError, OSError) as error:
            raise Answer(error).typed(
                self.url, key, bucket=self._address.bucket, has_worked=self._has_worked
            ) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise panicked(self.url) from None
        self._has_worked = True


def _refuse_after_fork(url: str) -> None:
    """Raise where obstore would hang for ever."""
    global _asked_in
    if _asked_in is None:
        _asked_in = os.getpid()
    elif _asked_in != os.getpid():
        raise SettingsError(
            "a process that forked after its parent used an object store cannot use one; "
            "start processes by spawn, or open the channel in the child only",
            url=url,
        )


def _check_size(n_bytes: int, key: str, max_bytes: int) -> None:
    if n_bytes > max_bytes:
        raise DigestError("an object is too large", key=key, n_bytes=n_bytes, max_bytes=max_bytes)
