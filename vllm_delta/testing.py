"""Aids for tests, ours and those of people who write a store: a contract, faults, tiny weights."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vllm_delta.channel import Log, Store
from vllm_delta.channel.store import check_key
from vllm_delta.errors import ChannelError, DigestError
from vllm_delta.format import DTYPES, HEAD_KEY, Schema, TensorSpec, Version, blob_key, manifest_key

Fault = Literal["transport", "lost_answer", "late", "corrupt", "stale_list", "crash"]
"""What can go wrong with one call of a store.

transport: `ChannelError`, and nothing happened. lost_answer: it happened, then `ChannelError`.
late: `ChannelError` now; a write happens when `FaultyChannel.deliver` is called. corrupt: a blob
is read with one byte changed. stale_list: a listing misses its newest keys. crash: `SimulatedCrash`
before the call, and before every later one.
"""

Bits = npt.NDArray[np.unsignedinteger[Any]]


class SimulatedCrash(BaseException):
    """The process is dead: nothing may catch this and go on."""


class MemoryStore:
    """A `Store` in this process's memory, for tests. Safe to use from any thread."""

    def __init__(self) -> None:
        self.url = f"memory://{id(self):x}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._lock:
            taken = check_key(key) in self._objects
            if not taken:
                self._objects[key] = bytes(data)
            return not taken

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is not None and len(data) > max_bytes:
            raise DigestError(
                "an object is too large", key=key, n_bytes=len(data), max_bytes=max_bytes
            )
        return data

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))


class FaultyChannel:
    """A store whose calls fail now and then: by seed, by script, or by a crash at one step.

    Args:
        store: the store that calls reach when they do.
        seed: of the faults drawn by `rates` and of which byte is corrupted.
        rates: for each fault the probability that a call which can suffer it does.
        crash_at: the number of the call, from 0, before which the process dies.
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        crash_at: int | None = None,
    ) -> None:
        self.store = store
        self.url = store.url
        self.crash_at = crash_at
        self.n_calls = 0
        self.suffered: list[Fault] = []
        self._rates = dict(rates or {})
        self._random = random.Random(seed)
        self._script: list[Fault | None] = []
        self._late: list[Callable[[], object]] = []
        self._dead = False
        unknown = set(self._rates) - set(get_args(Fault))
        if unknown:
            raise ValueError(f"unknown faults: {sorted(unknown)}")

    def script(self, faults: Iterable[Fault | None]) -> None:
        """Have the next calls suffer these, one each, in place of what was left of a script.

        A call that cannot suffer its fault passes unharmed.
        """
        self._script = list(faults)

    def deliver(self) -> int:
        """Let every late write happen now, in the order sent. Returns how many there were."""
        late, self._late = self._late, []
        for write in late:
            with contextlib.suppress(ChannelError):
                write()
        return len(late)

    def put(self, key: str, data: bytes) -> None:
        self._write(lambda: self.store.put(key, data), key)

    def put_new(self, key: str, data: bytes) -> bool:
        return bool(self._write(lambda: self.store.put_new(key, data), key))

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        self._write(lambda: self.store.delete(listed), ",".join(listed))

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        corruptible: tuple[Fault, ...] = ("corrupt",) if key.startswith("b/") else ()
        fault = self._next_fault(("transport", *corruptible), key)
        data = self.store.get(key, max_bytes=max_bytes)
        if fault == "corrupt" and data:
            place = self._random.randrange(len(data))
            flipped = data[place] ^ self._random.randint(1, 255)
            return data[:place] + bytes([flipped]) + data[place + 1 :]
        return data

    def list(self, prefix: str) -> list[str]:
        fault = self._next_fault(("transport", "stale_list"), prefix)
        keys = self.store.list(prefix)
        return keys[: -self._random.randint(1, 3)] if fault == "stale_list" else keys

    def _write(self, write: Callable[[], Any], key: str) -> Any:
        fault = self._next_fault(("transport", "lost_answer", "late"), key)
        if fault == "late":
            self._late.append(write)
            raise ChannelError("simulated time-out", key=key)
        answer = write()
        if fault == "lost_answer":
            raise ChannelError("simulated loss of the answer", key=key)
        return answer

    def _next_fault(self, possible: tuple[Fault, ...], key: str) -> Fault | None:
        fault: Fault | None = None
        if self._script:
            fault = self._script.pop(0)
        else:
            for name in ("crash", *possible):
                if self._random.random() < self._rates.get(name, 0.0):
                    fault = name
                    break
        self._dead |= fault == "crash" or self.n_calls == self.crash_at
        self.n_calls += 1
        if self._dead:
            raise SimulatedCrash(key)
        if fault not in possible:
            return None
        self.suffered.append(fault)
        if fault == "transport":
            raise ChannelError("simulated transport error", key=key)
        return fault


class ChannelContract:
    """What every `Store` must do. Subclass it in a test file and say how to open yours.

        class TestMyStore(ChannelContract):
            def open_store(self, place: Path) -> Store:
                return MyStore(...)

    pytest finds the tests by itself; `tmp_path` is its fixture.
    """

    def open_store(self, place: Path) -> Store:
        """A new handle on the store that belongs to `place`, an empty directory at first."""
        raise NotImplementedError

    def test_an_absent_object_is_none(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        for key in _keys():
            assert store.get(key, max_bytes=10) is None, key
        assert store.list("") == []

    def test_an_object_comes_back_as_it_was_through_another_handle(self, tmp_path: Path) -> None:
        data = bytes(range(256)) * 4099
        for key in _keys():
            for sent in (data, b"", data[:1]):
                self.open_store(tmp_path).put(key, sent)
                got = self.open_store(tmp_path).get(key, max_bytes=len(data))
                assert got == sent, f"{key}: {len(sent)} bytes sent"

    def test_put_new_keeps_what_is_there(self, tmp_path: Path) -> None:
        store, other = self.open_store(tmp_path), self.open_store(tmp_path)
        for key in _keys():
            assert store.put_new(key, b"first") is True, key
            assert store.put_new(key, b"first") is False, f"{key}: the same bytes are no exception"
            assert other.put_new(key, b"second") is False, key
            assert other.get(key, max_bytes=10) == b"first", key

    def test_put_new_has_one_winner(self, tmp_path: Path) -> None:
        n_writers = 8
        stores = [self.open_store(tmp_path) for _ in range(n_writers)]
        with ThreadPoolExecutor(n_writers) as pool:
            for seq in range(1, 26):
                barrier = threading.Barrier(n_writers)
                jobs = [
                    pool.submit(_race, store, barrier, manifest_key(seq), b"%d" % writer)
                    for writer, store in enumerate(stores)
                ]
                winners = [writer for writer, job in enumerate(jobs) if job.result()]
                assert len(winners) == 1, f"winners {winners}"
                there = stores[0].get(manifest_key(seq), max_bytes=10)
                assert there == b"%d" % winners[0], "what is there is not the winner's"

    def test_a_read_is_bounded(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        for key in _keys():
            store.put(key, b"12345")
            assert store.get(key, max_bytes=5) == b"12345", key
            with _raises(DigestError):
                store.get(key, max_bytes=4)

    def test_a_deleted_object_is_gone_and_its_key_free(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        store.delete(_keys())
        for key in _keys():
            store.put(key, b"data")
        store.delete(_keys()[1:])
        assert store.get(_keys()[0], max_bytes=10) == b"data", "deleted too much"
        for key in _keys()[1:]:
            assert store.get(key, max_bytes=10) is None, key
            assert store.put_new(key, b"again") is True, key

    def test_a_listing_is_sorted_and_by_prefix(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        manifests = [manifest_key(seq) for seq in (12, 1, 2, 999_999_999_999)]
        for key in [*manifests, blob_key("0" * 64), HEAD_KEY]:
            store.put(key, b"data")
        assert store.list("m/") == sorted(manifests)
        assert store.list("m/00000000000") == [manifest_key(1), manifest_key(2)]
        assert store.list("b/") == [blob_key("0" * 64)]
        assert store.list("head") == [HEAD_KEY]

    def test_other_keys_are_refused(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        for key in BAD_KEYS:
            with _raises(ValueError):
                store.put(key, b"data")
            with _raises(ValueError):
                store.put_new(key, b"data")
            with _raises(ValueError):
                store.get(key, max_bytes=10)
            with _raises(ValueError):
                store.delete([key])

    def test_a_log_is_written_and_read_through_two_handles(self, tmp_path: Path) -> None:
        log = Log(self.open_store(tmp_path))
        fence = log.claim("contract")
        schema, blob = log.put_blob(b"schema"), log.put_blob(b"weights")
        record = log.append("anchor", target=Version(0, "0" * 64), blobs=[blob], schema=schema)
        reader = Log(self.open_store(tmp_path))
        assert reader.tail() == record
        chain = list(reader.read_chain(1, record.seq))
        assert [link.manifest for link in chain] == [fence, record.manifest]
        assert reader.get_blob(blob) == b"weights"
        self.open_store(tmp_path).put(HEAD_KEY, b"nonsense")
        assert reader.tail() == record


BAD_KEYS = (
    "", "/", "m", "m/", "b/", "m/1", "m/0000000000001", "m/00000000000a", "m/..", "m/../head",
    "../head", "/head", "head/", "heads", "Head", "head\0", "head\n", "b/" + "0" * 63,
    "b/" + "0" * 65, "b/" + "A" * 64, "b/../" + "0" * 61, "m/٠٠٠٠٠٠٠٠٠٠٠٠",
)  # fmt: skip
"""Keys that no store may accept: escapes, near misses, digits of another script."""


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Tiny weights and their consecutive versions, the same for the same arguments.

    Version 0 holds any bit patterns, NaN payloads included. Each later version changes a few
    elements of the one before, mostly by one in the raw bits, sometimes to any pattern, and leaves
    some tensors alone.

    Args:
        seed: of everything below.
        dtypes: element types, dealt out to the tensors in turn.
        n_tensors: tensors beside the three fixed ones: a scalar, an empty one and a single row.
        max_size: longest dimension.
        changed: share of elements that a version changes, at least one element.
    """

    seed: int = 0
    dtypes: tuple[str, ...] = ("BF16", "F16", "F32", "I32")
    n_tensors: int = 4
    max_size: int = 12
    changed: float = 0.05

    @cached_property
    def schema(self) -> Schema:
        rng = np.random.default_rng([self.seed, 0])
        shapes: list[tuple[int, ...]] = [(), (0, 3), (1, self.max_size)]
        for _ in range(self.n_tensors):
            n_dimensions = int(rng.integers(1, 4))
            shapes.append(tuple(int(n) for n in rng.integers(1, self.max_size + 1, n_dimensions)))
        return Schema.of(
            TensorSpec(f"layers.{i}.weight", self.dtypes[i % len(self.dtypes)], shape)
            for i, shape in enumerate(shapes)
        )

    def weights(self, number: int) -> dict[str, Bits]:
        """Raw bits of version `number`: name → unsigned[numel], flat, new arrays each call."""
        rng = np.random.default_rng([self.seed, 1])
        bits = {spec.name: _any_bits(rng, spec, spec.numel) for spec in self.schema.tensors}
        for version in range(1, number + 1):
            self._step(np.random.default_rng([self.seed, 1, version]), bits)
        return bits

    def version(self, number: int) -> Version:
        """Version `number` with the root of its fingerprints."""
        from vllm_delta.fingerprint import fingerprint, root

        weights = self.weights(number)
        sums = [fingerprint(weights[spec.name], spec) for spec in self.schema.tensors]
        return Version(number, root(self.schema, sums))

    def _step(self, rng: np.random.Generator, bits: dict[str, Bits]) -> None:
        filled = [spec for spec in self.schema.tensors if spec.numel]
        touched = [spec for spec in filled if rng.random() < 0.7] or filled[:1]
        for spec in touched:
            n = max(1, round(spec.numel * self.changed))
            places = rng.choice(spec.numel, n, replace=False)
            old = bits[spec.name][places]
            by_one = old + rng.choice(np.array([1, -1]).astype(old.dtype), n)
            bits[spec.name][places] = np.where(rng.random(n) < 0.9, by_one, ~old)


def _any_bits(rng: np.random.Generator, spec: TensorSpec, n: int) -> Bits:
    dtype = np.dtype(f"u{DTYPES[spec.dtype].itemsize}")
    bits: Bits = rng.integers(0, np.iinfo(dtype).max, n, dtype=dtype, endpoint=True)
    return bits


def _keys() -> list[str]:
    return [manifest_key(1), blob_key("ab" * 32), HEAD_KEY]


def _race(store: Store, barrier: threading.Barrier, key: str, data: bytes) -> bool:
    barrier.wait(30)
    return store.put_new(key, data)


@contextlib.contextmanager
def _raises(kind: type[Exception]) -> Iterator[None]:
    # Not pytest's: importing this module must not need pytest.
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
