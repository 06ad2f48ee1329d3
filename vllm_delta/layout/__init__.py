"""Where checkpoint elements live in the running engine, as strided rectangles.

Checkpoint coordinates (flat indices into a tensor) become offsets into a parameter's storage here
and nowhere else. Pure arithmetic on numpy arrays; nothing here touches a weight.
"""

from __future__ import annotations

from vllm_delta.layout.coverage import Coverage, ParameterSpec, RankLayout, find_gap, judge
from vllm_delta.layout.rectangle import I64, Dim, Rectangle, Strided

__all__ = [
    "I64",
    "Coverage",
    "Dim",
    "ParameterSpec",
    "RankLayout",
    "Rectangle",
    "Strided",
    "find_gap",
    "judge",
]
