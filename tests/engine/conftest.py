"""Engines for the tests: a tiny ``LLM`` in this process, and real servers next to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import LocalEngine, Server, start_server
from tests.engine.models import TinyModel, write_model
from vllm_delta.codec import Codec

# vLLM keeps what it first read of these for the life of the process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_CI_ENV"] = "1"

LLAMA = TinyModel(architecture="llama")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Llama checkpoint."""
    return write_model(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="session")
def engine_in_process(llama: Path) -> LocalEngine:
    """One engine in this process with our extension; `engine` is how a test gets it."""
    from vllm.config import WeightTransferConfig

    return LocalEngine(llama, weight_transfer_config=WeightTransferConfig(backend="vllm_delta"))


@pytest.fixture
def codec() -> Codec:
    """Of the deltas that `engine` follows; a module that wants both overrides it."""
    return "gap"


@pytest.fixture
def engine(engine_in_process: LocalEngine, codec: Codec, tmp_path: Path) -> Iterator[LocalEngine]:
    """The engine, with a new channel at version 0 that is the checkpoint it was started from."""
    engine_in_process.begin(tmp_path / "channel", codec=codec)
    yield engine_in_process
    engine_in_process.end()


@pytest.fixture(scope="session")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``vllm serve`` with the short flag, an API key, and a channel that is empty at first."""
    directory = tmp_path_factory.mktemp("served")
    with start_server(
        llama,
        directory / "channel",
        "--worker-extension",
        "vllm_delta",
        "--api-key",
        "secret",
        log=directory / "log",
    ) as running:
        yield running
