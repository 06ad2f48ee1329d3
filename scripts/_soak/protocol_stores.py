"""Where a round is played: a fresh, empty store for each, and the entropy that the seed gives."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_delta.channel import LocalStore, Store
from vllm_delta.testing import MemoryStore

_MOST_BYTES = 1 << 22


class LooseStore(MemoryStore):
    """In memory, without a conditional write."""

    @property
    def atomic(self) -> bool:
        return False


Fresh = Callable[[int], Store]
"""Gives an empty store for a round of that number; each call another one."""


@contextlib.contextmanager
def memory() -> Iterator[Fresh]:
    """Every third round is over a store that has no conditional write."""
    yield lambda number: LooseStore() if number % 3 == 2 else MemoryStore()


@contextlib.contextmanager
def local() -> Iterator[Fresh]:
    with folder() as root:
        count = itertools.count()
        yield lambda number: LocalStore(root / f"{number}-{next(count)}")


@contextlib.contextmanager
def s3() -> Iterator[Fresh]:
    """Prefixes of a bucket of SeaweedFS, a real server."""
    from vllm_delta.channel import ObjectStore
    from vllm_delta.testing.seaweed import Seaweed

    kept = dict(os.environ)
    for name in kept:
        if name.startswith("AWS_"):
            del os.environ[name]
    try:
        with Seaweed() as server:
            os.environ.update(server.environment)
            server.make_bucket("soak")
            count = itertools.count()
            yield lambda number: ObjectStore(f"s3://soak/{number}-{next(count)}")
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def hub() -> Iterator[Fresh]:
    """Folders of a bucket of a Hub on loopback, without its gateway: no conditional write."""
    import huggingface_hub.constants

    from vllm_delta.channel.hub import HubStore
    from vllm_delta.testing.hub import LoopbackHub

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    try:
        with LoopbackHub() as server:
            server.create_bucket("me/soak")
            count = itertools.count()
            yield lambda number: HubStore(
                "me/soak",
                f"{number}-{next(count)}",
                endpoint=server.endpoint,
                token=server.token,
            )
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = offline


STORES: dict[str, Callable[[], contextlib.AbstractContextManager[Fresh]]] = {
    "memory": memory,
    "local": local,
    "s3": s3,
    "hub": hub,
}


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that goes away, in memory where the system has such."""
    shm = Path("/dev/shm")
    within = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="vllm-delta-soak-", dir=within) as path:
        yield Path(path)


@contextlib.contextmanager
def entropy(draw: random.Random) -> Iterator[None]:
    """Have names, salts and nonces come from the seed, so that a round is the same each time."""
    urandom = os.urandom
    os.urandom = draw.randbytes
    try:
        yield
    finally:
        os.urandom = urandom


def objects_of(store: Store) -> dict[str, bytes]:
    """All that a store holds."""
    found = {key: store.get(key, max_bytes=_MOST_BYTES) for key in store.list("")}
    return {key: data for key, data in found.items() if data is not None}


def refill(store: Store, objects: dict[str, bytes]) -> None:
    """Make a store hold exactly these, as whoever may write to it can."""
    now = objects_of(store)
    store.delete([key for key in now if key not in objects])
    for key, data in objects.items():
        if now.get(key) != data:
            store.put(key, data)
