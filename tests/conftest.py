"""What holds for every test: a quiet, reproducible vLLM, no network, no GPU test without a GPU."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import pytest
from hypothesis import settings

# Read by vLLM, torch and the Hub when they are imported, which is later than here.
# `nobind` and one thread: otherwise two ranks on one NUMA node are refused on a CPU.
for _name, _value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@cache
def _missing_for_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


@cache
def _missing_for_engine() -> str | None:
    return None if importlib.util.find_spec("vllm") else "needs vLLM (scripts/test installs it)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this machine cannot run and says what is missing."""
    if item.get_closest_marker("gpu") and (missing := _missing_for_gpu()):
        pytest.skip(missing)
    if item.get_closest_marker("engine") and (missing := _missing_for_engine()):
        pytest.skip(missing)
