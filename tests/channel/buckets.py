"""Fixtures: one S3 server for all tests, and an environment that leads to a new bucket of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_delta.testing.seaweed import Seaweed

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    with Seaweed() as server:
        yield server


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that names no cloud: no endpoint, no credentials, no machine that has any."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def s3_bucket(seaweed: Seaweed, no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new bucket, which the environment leads to."""
    name = f"bucket-{next(_numbers)}"
    seaweed.make_bucket(name)
    for variable, value in seaweed.environment.items():
        monkeypatch.setenv(variable, value)
    return name
