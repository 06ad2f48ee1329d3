"""What every store of a channel must do, as tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_delta.channel import Log, Store
from vllm_delta.errors import DigestError
from vllm_delta.format import HEAD_KEY, Version, blob_key, manifest_key


class ChannelContract:
    """What every `Store` must do. Subclass it in a test file and say how to open yours.

        class TestMyStore(ChannelContract):
            def open_store(self, place: Path) -> Store:
                return MyStore(...)

    pytest finds the tests by itself; `tmp_path` is its fixture.
    """

    n_races = 25
    """How often writers race for a key; fewer are enough where a store makes the losers wait."""

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
            for seq in range(1, self.n_races + 1):
                barrier = threading.Barrier(n_writers)
                jobs = [
                    pool.submit(_race, store, barrier, manifest_key(seq), b"%d" % writer)
                    for writer, store in enumerate(stores)
                ]
                winners = [writer for writer, job in enumerate(jobs) if job.result()]
                there = stores[0].get(manifest_key(seq), max_bytes=10)
                if stores[0].atomic:
                    assert len(winners) == 1, f"winners {winners}"
                    assert there == b"%d" % winners[0], "what is there is not the winner's"
                else:
                    assert there in {b"%d" % writer for writer in range(n_writers)}, there
                    assert int(there) in winners, "whose bytes stand there was told False"

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
        schema, blob = log.put_schema(b"schema"), log.put_blob(b"weights")
        record = log.append("anchor", target=Version(0, "0" * 64), blobs=[blob], schema=schema)
        reader = Log(self.open_store(tmp_path))
        assert reader.tail() == record
        chain = list(reader.read_chain(1, record.seq))
        assert [link.manifest for link in chain] == [fence, record.manifest]
        assert reader.get_blob(record.manifest, 0) == b"weights"
        assert reader.get_schema(record.manifest) == b"schema"
        self.open_store(tmp_path).put(HEAD_KEY, b"nonsense")
        assert reader.tail() == record


BAD_KEYS = (
    "", "/", "m", "m/", "b/", "m/1", "m/0000000000001", "m/00000000000a", "m/..", "m/../head",
    "../head", "/head", "head/", "heads", "Head", "head\0", "head\n", "b/" + "0" * 63,
    "b/" + "0" * 65, "b/" + "A" * 64, "b/../" + "0" * 61, "m/٠٠٠٠٠٠٠٠٠٠٠٠",
)  # fmt: skip
"""Keys that no store may accept: escapes, near misses, digits of another script."""


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
