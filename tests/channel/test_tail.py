from __future__ import annotations

import pytest

from tests.channel.toy import (
    begin,
    replay,
)
from vllm_delta.channel import Log
from vllm_delta.channel.tail import MAX_TAIL_REQUESTS, find_tail, head_bytes
from vllm_delta.format import (
    HEAD_KEY,
    MAX_SEQ,
)
from vllm_delta.testing import MemoryStore


class Counting(MemoryStore):
    """A store that counts reads."""

    n_reads = 0

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        self.n_reads += 1
        return super().get(key, max_bytes=max_bytes)


class Dense(Counting):
    """A store that looks as if it held manifests 1 to `n`, without their bytes."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        there = super().get(key, max_bytes=max_bytes)
        if key.startswith("m/"):
            return b"?" if int(key[2:]) <= self.n else None
        return there


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 1000, 12_345, MAX_SEQ - 1, MAX_SEQ])
@pytest.mark.parametrize(
    "head",
    [
        None, b"", b"{}", b"\xff" * 64, b"x" * 1000, b"[" * 60, b'{"seq":-1}', b'{"seq":0}',
        b'{"seq":1e9}', b'{"seq":true}', b'{"seq":"7"}', b'{"seq":1000000000000}',
        b'{"seq":99999999999999999999}', b'{"seq":007}', b'{"seq":7}', b'{"seq":1}',
        b'{"seq":1001}', b'{"seq":999999999999}', b'{"seq":500000000000}', b'{"seq": 7}',
        b'{"seq":\xd9\xa1}',
    ],
)  # fmt: skip
def test_the_tail_is_found_whatever_head_says_with_few_reads(n: int, head: bytes | None) -> None:
    store = Dense(n)
    if head is not None:
        store.put(HEAD_KEY, head)
    assert find_tail(store) == n
    assert store.n_reads <= MAX_TAIL_REQUESTS


def test_a_good_head_finds_the_tail_in_three_reads() -> None:
    for n, behind in ((1_000_000, 0), (1, 0)):
        store = Dense(n)
        store.put(HEAD_KEY, head_bytes(n - behind))
        assert find_tail(store) == n
        assert store.n_reads == 3


def test_without_a_head_the_reads_grow_with_the_logarithm() -> None:
    store = Dense(1_000_000)
    find_tail(store)
    assert store.n_reads <= 2 + 2 * 20


@pytest.mark.parametrize("head", [b'{"seq":2}', b'{"seq":400}', b"junk"])
def test_a_forged_head_changes_neither_reader_nor_trainer(head: bytes) -> None:
    store = MemoryStore()
    log = Log(store)
    weights = begin(log, 5)
    store.put(HEAD_KEY, head)
    tail = Log(store).tail()
    assert tail == log.position
    assert replay(log, Log(store).read_from_anchor(tail)) == weights
    assert Log(store).claim("next").seq == tail.seq + 1


def test_reading_needs_no_listing() -> None:
    class Unlistable(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            raise AssertionError("listed")

    log = Log(Unlistable())
    weights = begin(log, 3)
    assert replay(log, Log(log.store).read_from_anchor(log.tail())) == weights
