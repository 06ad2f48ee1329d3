from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.channel.buckets import no_cloud, s3_bucket, seaweed
from tests.channel.hubs import opened
from vllm_delta.channel.hub import HubStore
from vllm_delta.testing.hub import LoopbackHub

__all__ = ["no_cloud", "s3_bucket", "seaweed"]

_numbers = itertools.count()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the tests together are offline; here the Hub is on loopback."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def running_hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: LoopbackHub, online: None) -> Iterator[LoopbackHub]:
    running_hub.reset_counts()
    yield running_hub
    running_hub.faults.clear()


@pytest.fixture
def bucket(hub: LoopbackHub) -> str:
    name = f"me/bucket-{next(_numbers)}"
    hub.create_bucket(name)
    return name


@pytest.fixture
def store(hub: LoopbackHub, bucket: str) -> HubStore:
    return opened(hub, bucket)
