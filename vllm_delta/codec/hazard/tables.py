"""Constant integer tables, read from a file that `scripts/make_hazard_tables.py` makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_delta.codec.order import Unsigned

PATH = Path(__file__).with_name("tables.bin")

POSITION_BITS = 24
"""Precision of a position's symbol."""
LIMIT = 1 << 22
"""X: what hazards may add up to before an escape; 2^20 stands for 1."""
NODE_BITS = 10
N_NODES = LIMIT >> NODE_BITS
N_RATES = 161
"""Rates in steps of an eighth of an octave, from LIMIT down to 4."""
MAGNITUDE_BITS = 16
"""Precision of a magnitude's symbol; with the sign it takes one bit more."""
N_MAGNITUDES = 128
N_SCALES = 129
"""128 scales, a quarter of an octave apart from 2^-2 on, and one table that is flat."""


def _read() -> tuple[Unsigned, ...]:
    data, at = PATH.read_bytes(), 0
    out = []
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("<u4", (N_NODES + 1,)),
        ("<u4", (N_RATES,)),
        ("<u4", (N_RATES - 1,)),
        ("<u2", (N_SCALES, N_MAGNITUDES)),
        ("<u2", (257,)),
    )
    for kind, shape in shapes:
        array = np.frombuffer(data, kind, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        out.append(array)
    assert at == len(data), PATH
    return tuple(out)


_positions, _rates, _bounds, _frequencies, _logarithms = _read()

POSITIONS = np.append(_positions, _positions[-1:]).astype(np.int64)
"""F at its nodes: int64[N_NODES + 2], the last twice so that a reader may look one ahead."""
NODE_OF = (
    np.searchsorted(_positions, np.arange(0, 1 << POSITION_BITS, 1 << 12), side="right") - 1
).astype(np.int32)
"""The last node at or below u, for u = 0, 4096, 8192, …: where a search for u begins."""
RATES = _rates.astype(np.int64)
"""λ of each rate: int64[N_RATES]."""
RATE_BOUNDS = _bounds.astype(np.int64)
"""Share of changed weights, times 2^32, from which on a rate is taken instead of the next."""
STEPS = np.zeros((N_SCALES, N_MAGNITUDES + 1), np.int32)
"""Cumulated frequencies of the magnitudes at each scale; the last of a row is 2^16."""
STEPS[:, 1:] = np.cumsum(_frequencies, axis=1, dtype=np.int64)
LOGARITHMS = _logarithms.astype(np.int64)
"""log2(1 + m/256) in 2^-12: int64[257]."""


def log2(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """log2 of positive integers in 2^-12, to about 0.003: int64, same shape."""
    wide = values.astype(np.int64)
    top = np.zeros(wide.shape, np.int64)
    for bit in (32, 16, 8, 4, 2, 1):
        higher = (wide >> (top + bit)) > 0
        top += np.where(higher, bit, 0)
    mantissa = np.where(top >= 8, wide >> np.maximum(top - 8, 0), wide << np.maximum(8 - top, 0))
    whole: npt.NDArray[np.int64] = (top << 12) + LOGARITHMS[mantissa - 256]
    return whole


COSTS = (MAGNITUDE_BITS << 12) - log2(_frequencies)
"""Bits that a magnitude costs at each scale, in 2^-12: int64[N_SCALES, N_MAGNITUDES]."""
