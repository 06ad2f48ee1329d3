"""The `hazard` codec: positions by the rate at which weights of an exponent change.

P(change) halves with every octave of a weight, and a decoder knows the weight: each element adds
the hazard of its exponent, and a change is one symbol of the interval in which the sum then lies.
"""

from __future__ import annotations

from vllm_delta.codec.hazard.encoder import Coded, Pending, encode
from vllm_delta.codec.hazard.lanes import HostLanes, Lane, LaneDecoder, Part
from vllm_delta.codec.hazard.parse import MAX_CHANGES, parse_parts
from vllm_delta.codec.hazard.tiles import Tile, Tiling

__all__ = [
    "MAX_CHANGES",
    "Coded",
    "HostLanes",
    "Lane",
    "LaneDecoder",
    "Part",
    "Pending",
    "Tile",
    "Tiling",
    "encode",
    "parse_parts",
]
