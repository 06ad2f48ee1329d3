"""Triton kernels that patch weights in place by their raw bits. See `kernels/README.md`.

They import torch and triton and nothing else. `reference` defines what each entry does.
"""

from __future__ import annotations

from vllm_delta_kernels.decode import decode_lanes
from vllm_delta_kernels.fingerprint import check_bits, scan_weights, swap_bits
from vllm_delta_kernels.patch import BLOCK, check_patch, scatter_patch

__all__ = [
    "BLOCK",
    "check_bits",
    "check_patch",
    "decode_lanes",
    "scan_weights",
    "scatter_patch",
    "swap_bits",
]
