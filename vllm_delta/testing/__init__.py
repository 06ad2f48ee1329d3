"""Aids for tests, ours and those of people who write a store: a contract, faults, tiny weights."""

from __future__ import annotations

from vllm_delta.testing.contract import BAD_KEYS, ChannelContract
from vllm_delta.testing.faults import Fault, FaultyChannel, MemoryStore, SimulatedCrash
from vllm_delta.testing.weights import DeltaSpec

__all__ = [
    "BAD_KEYS",
    "ChannelContract",
    "DeltaSpec",
    "Fault",
    "FaultyChannel",
    "MemoryStore",
    "SimulatedCrash",
]
