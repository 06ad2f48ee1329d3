"""Changes resident weights in place: stage, check, apply, roll back, and scan.

`Patcher` works on raw bits through storage offsets, with numba loops where the weights are in
main memory and Triton kernels where they are on a GPU.
"""

from __future__ import annotations

from vllm_delta.patch.cpu_lanes import CpuLanes
from vllm_delta.patch.halo import Halo, HaloPatch, LackingError
from vllm_delta.patch.overlay import Overlay
from vllm_delta.patch.patcher import Patcher
from vllm_delta.patch.places import Places, Run
from vllm_delta.patch.staged import Backend, Patch, Sums

__all__ = [
    "Backend",
    "CpuLanes",
    "Halo",
    "HaloPatch",
    "LackingError",
    "Overlay",
    "Patch",
    "Patcher",
    "Places",
    "Run",
    "Sums",
]
