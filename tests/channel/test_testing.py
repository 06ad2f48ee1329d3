from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.channel.toy import START, begin, replay
from vllm_delta.channel import Log, Store
from vllm_delta.errors import ChannelError, DigestError
from vllm_delta.format import DTYPES, blob_key, manifest_key, parse_schema
from vllm_delta.testing import (
    ChannelContract,
    DeltaSpec,
    FaultyChannel,
    MemoryStore,
    SimulatedCrash,
)

BLOB = blob_key("ab" * 32)


class TestMemoryStore(ChannelContract):
    def open_store(self, place: Path) -> Store:
        return self.__dict__.setdefault("store", MemoryStore())


class TestFaultyChannelWithoutFaults(ChannelContract):
    def open_store(self, place: Path) -> Store:
        return FaultyChannel(self.__dict__.setdefault("store", MemoryStore()))


class Overwriting(MemoryStore):
    def put_new(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class Unbounded(MemoryStore):
    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return super().get(key, max_bytes=1 << 40)


class Unsorted(MemoryStore):
    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[::-1]


class Loose(MemoryStore):
    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return None if ".." in key else super().get(key, max_bytes=max_bytes)


class Keeping(MemoryStore):
    def delete(self, keys: Any) -> None:
        super().delete(list(keys)[:1])


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (Overwriting, "test_put_new_keeps_what_is_there"),
        (Overwriting, "test_put_new_has_one_winner"),
        (Unbounded, "test_a_read_is_bounded"),
        (Unsorted, "test_a_listing_is_sorted_and_by_prefix"),
        (Loose, "test_other_keys_are_refused"),
        (Keeping, "test_a_deleted_object_is_gone_and_its_key_free"),
        (lambda: FaultyChannel(MemoryStore(), rates={"corrupt": 1.0}),
         "test_an_object_comes_back_as_it_was_through_another_handle"),
    ],
)  # fmt: skip
def test_the_contract_refuses_a_store_that_breaks_it(store: Any, test: str, tmp_path: Path) -> None:
    class Contract(ChannelContract):
        shared = store()

        def open_store(self, place: Path) -> Store:
            return self.shared

    with pytest.raises(AssertionError):
        getattr(Contract(), test)(tmp_path)


def test_each_fault_does_what_it_says() -> None:
    store = MemoryStore()
    faulty = FaultyChannel(store)

    faulty.script(["transport"])
    with pytest.raises(ChannelError):
        faulty.put(BLOB, b"data")
    assert store.get(BLOB, max_bytes=10) is None

    faulty.script(["lost_answer"])
    with pytest.raises(ChannelError):
        faulty.put_new(BLOB, b"data")
    assert store.get(BLOB, max_bytes=10) == b"data"

    faulty.script(["corrupt"])
    damaged = faulty.get(BLOB, max_bytes=10)
    assert damaged is not None
    assert sum(a != b for a, b in zip(damaged, b"data", strict=True)) == 1

    faulty.script(["late", "late"])
    for key in (BLOB, manifest_key(1)):
        with pytest.raises(ChannelError):
            faulty.put_new(key, b"late")
    assert store.get(manifest_key(1), max_bytes=10) is None
    assert faulty.deliver() == 2
    assert faulty.deliver() == 0
    assert store.get(manifest_key(1), max_bytes=10) == b"late"
    assert store.get(BLOB, max_bytes=10) == b"data"

    faulty.script(["stale_list"])
    assert faulty.list("") != [BLOB, manifest_key(1)]
    assert faulty.list("") == [BLOB, manifest_key(1)]
    assert faulty.suffered == [
        "transport", "lost_answer", "corrupt", "late", "late", "stale_list",
    ]  # fmt: skip

    faulty.script(["crash"])
    for _ in range(2):
        with pytest.raises(SimulatedCrash):
            faulty.delete([BLOB])
    assert store.get(BLOB, max_bytes=10) == b"data"


def test_manifests_are_not_corrupted_and_a_fault_that_cannot_be_passes() -> None:
    faulty = FaultyChannel(MemoryStore())
    faulty.put(manifest_key(1), b"data")
    faulty.script(["corrupt", "lost_answer"])
    assert faulty.get(manifest_key(1), max_bytes=10) == b"data"
    assert faulty.get(manifest_key(1), max_bytes=10) == b"data"
    assert faulty.suffered == []


def test_faults_by_seed_repeat_and_differ_between_seeds() -> None:
    def run(seed: int) -> list[str]:
        faulty = FaultyChannel(MemoryStore(), seed=seed, rates={"transport": 0.3, "corrupt": 0.3})
        for _ in range(50):
            try:
                faulty.put(BLOB, b"data")
                faulty.get(BLOB, max_bytes=10)
            except ChannelError:
                continue
        return faulty.suffered

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert {"transport", "corrupt"} == set(run(1))


def test_unknown_faults_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="gremlin"):
        FaultyChannel(MemoryStore(), rates={"gremlin": 1.0})  # type: ignore[dict-item]


def test_a_reader_under_seeded_faults_ends_at_the_truth() -> None:
    store = MemoryStore()
    weights = begin(Log(store), 20)
    rates: Any = {"transport": 0.1, "corrupt": 0.1}
    log = Log(FaultyChannel(store, seed=5, rates=rates))
    seen, shown, n_errors = None, START, 0
    while seen is None or seen.seq < 22:
        try:
            record = log.read_next(seen)
            assert record is not None
            shown = replay(log, [record], shown)
            seen = record
        except (ChannelError, DigestError):
            n_errors += 1
    assert shown == weights
    assert n_errors > 0


def test_specs_repeat_and_differ_between_seeds() -> None:
    one, same, other = DeltaSpec(seed=1), DeltaSpec(seed=1), DeltaSpec(seed=2)
    assert one.schema == same.schema
    assert parse_schema(one.schema.to_bytes()) == one.schema
    for number in range(3):
        a, b = one.weights(number), same.weights(number)
        assert all(np.array_equal(a[name], b[name]) for name in a)
        assert one.version(number) == same.version(number)
        assert one.version(number) != other.version(number)


def test_a_spec_s_weights_fit_its_schema_and_change_a_little() -> None:
    spec = DeltaSpec(seed=3, dtypes=("BF16", "F32", "U8"), n_tensors=6, changed=0.1)
    before = spec.weights(0)
    n_untouched = 0
    for number in range(1, 6):
        after = spec.weights(number)
        assert set(after) == {tensor.name for tensor in spec.schema.tensors}
        n_changed = 0
        for tensor in spec.schema.tensors:
            bits = after[tensor.name]
            assert bits.shape == (tensor.numel,)
            assert bits.dtype == np.dtype(f"u{DTYPES[tensor.dtype].itemsize}")
            changed = np.count_nonzero(bits != before[tensor.name])
            assert changed <= max(1, round(0.1 * tensor.numel))
            n_untouched += tensor.numel > 0 and not changed
            n_changed += changed
        assert n_changed > 0
        before = after
    assert n_untouched > 0
    shapes = {tensor.shape for tensor in spec.schema.tensors}
    assert () in shapes
    assert any(0 in shape for shape in shapes)
