"""Stores without a conditional write: what a rival sent before it knew may land late."""

from __future__ import annotations

import pytest

from tests.channel.toy import append_delta, begin, moved
from vllm_delta.channel import Log
from vllm_delta.channel.contest import Contest
from vllm_delta.errors import ChainError
from vllm_delta.format import manifest_key
from vllm_delta.testing import MemoryStore


class LooseStore(MemoryStore):
    @property
    def atomic(self) -> bool:
        return False


def test_a_version_overwritten_after_later_ones_were_committed_is_told_as_lost() -> None:
    """Found by the soak: a trainer looked at its newest record only, and went on past the loss."""
    store = LooseStore()
    log = Log(store)
    weights = begin(log, 1)
    Contest(store).enter(4, 1)
    lost = append_delta(log, weights, 0, 1)
    weights = moved(weights, 0, 1)
    for _ in range(2):
        append_delta(log, weights, 1, 1)
        weights = moved(weights, 1, 1)
    store.put(manifest_key(4), b"what the rival sent long ago")
    with pytest.raises(ChainError, match="overwritten") as caught:
        append_delta(log, weights, 2, 1)
    assert caught.value.facts["lost"] == str(lost.manifest.target)
    assert caught.value.facts["seq"] == lost.seq == 4


def test_places_where_nobody_was_met_are_not_read_again() -> None:
    store = LooseStore()
    log = Log(store)
    weights = begin(log, 3)
    store.put(manifest_key(4), b"damaged by somebody who left no intent")
    assert append_delta(log, weights, 0, 1).seq == 6
