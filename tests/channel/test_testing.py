from __future__ import annotations

from vllm_delta.channel import Store
from vllm_delta.testing import ChannelContract, FaultyChannel, MemoryStore


class TestMemoryStore(ChannelContract):
    def open_store(self, place: object) -> Store:
        return self.__dict__.setdefault("store", MemoryStore())


class TestFaultyChannelWithoutFaults(ChannelContract):
    def open_store(self, place: object) -> Store:
        return FaultyChannel(self.__dict__.setdefault("store", MemoryStore()))
