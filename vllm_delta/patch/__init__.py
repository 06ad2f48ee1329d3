"""Changes resident weights in place: stage, check, apply, roll back, and scan.

`Patcher` works on raw bits through storage offsets, with numba loops where the weights are in
main memory and Triton kernels where they are on a GPU.
"""

from __future__ import annotations

from vllm_delta.patch.patcher import Patcher
from vllm_delta.patch.staged import Backend, Patch, Sums

__all__ = ["Backend", "Patch", "Patcher", "Sums"]
