"""Kernels run in Triton's interpreter on a machine without a GPU.

Triton reads TRITON_INTERPRET when it is imported, and vLLM imports Triton, so the interpreter
gets a process of its own: `test_own_process.py` starts it. There, and on a machine with a GPU,
the tests of the kernels themselves are collected.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_TESTS = [
    "test_backend.py",
    "test_changes.py",
    "test_decode.py",
    "test_gpu_lanes.py",
    "test_rank_lanes.py",
    "test_rectangles.py",
]

collect_ignore = (
    ["test_own_process.py"]
    if INTERPRETED
    else []
    if torch.cuda.is_available()
    else list(KERNEL_TESTS)
)
