"""Where the channel of a kill soak lives, and how processes find it: by address and environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

Place = tuple[str, dict[str, str]]
"""A channel's address, and the environment that it is to be opened in."""


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Place]:
    yield str(folder / "channel"), {}


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Place]:
    """A bucket of SeaweedFS, a real server."""
    from vllm_delta.testing.seaweed import Seaweed

    with Seaweed() as server:
        server.make_bucket("soak")
        yield "s3://soak/kill", server.environment


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[Place]:
    """A bucket of a Hub on loopback, manifests through its gateway: without a condition a killed
    trainer's last request may come late, and overwrite what the next one has committed."""
    from vllm_delta.testing.hub import LoopbackHub

    with LoopbackHub() as server:
        server.create_bucket("me/soak")
        yield (
            "hf://buckets/me/soak/kill?manifests=s3",
            {
                "HF_ENDPOINT": server.endpoint,
                "HF_TOKEN": server.token,
                "HF_HUB_OFFLINE": "0",
                "HF_S3_ENDPOINT": server.endpoint + "/s3",
                "HF_S3_ACCESS_KEY_ID": "soak",
                "HF_S3_SECRET_ACCESS_KEY": "soak",
            },
        )


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Place]]] = {
    "local": local,
    "s3": s3,
    "hub": hub,
}


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables of this process, for as long as the block lasts."""
    import os

    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
