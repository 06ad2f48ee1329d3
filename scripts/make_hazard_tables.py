"""Makes the constant integer tables of the `hazard` codec (FORMAT.md, section 5.3).

    python scripts/make_hazard_tables.py [FILE]

Decimal arithmetic with far more digits than are kept, so that the result is the same everywhere.
The file is part of the package: nothing computes an exponential or a logarithm at run time.
"""

from __future__ import annotations

import sys
from decimal import Decimal, getcontext
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_delta.codec.hazard import tables

getcontext().prec = 90

ZERO, ONE, TWO, HALF = Decimal(0), Decimal(1), Decimal(2), Decimal("0.5")
PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534"
)
FAR = Decimal(13)
"""Standard deviations beyond which a Gaussian counts as zero: far below 2^-16."""


def rounded(value: Decimal) -> int:
    return int(value.to_integral_value(rounding="ROUND_HALF_EVEN"))


def log2(value: Decimal) -> Decimal:
    return value.ln() / TWO.ln()


@cache
def tail_mean(z: Decimal) -> Decimal:
    """E[max(x - z, 0)] of a standard Gaussian x, z >= 0: φ(z) − z·(1 − Φ(z))."""
    if z > FAR:
        return ZERO
    density = (-z * z / 2).exp() / (TWO * PI).sqrt()
    # Φ(z) − 1/2 = φ(z)·Σ z^(2n+1) / (1·3·5·…·(2n+1)), all terms positive.
    term = total = z
    n = 1
    while abs(term) > Decimal(10) ** -60:
        term = term * z * z / (2 * n + 1)
        total += term
        n += 1
    return density - z * (HALF - density * total)


def positions() -> npt.NDArray[np.uint32]:
    """F at the nodes: round(2^24·(1 − e^(−k/1024)))."""
    scale = Decimal(1 << tables.POSITION_BITS)
    nodes = range(tables.N_NODES + 1)
    return np.array([rounded(scale * (1 - (-Decimal(k) / 1024).exp())) for k in nodes], np.uint32)


def rates() -> npt.NDArray[np.uint32]:
    """λ: round(2^22·2^(−q/8))."""
    eighth = TWO ** (ONE / 8)
    return np.array(
        [rounded(Decimal(tables.LIMIT) / eighth**q) for q in range(tables.N_RATES)], np.uint32
    )


def rate_bounds() -> npt.NDArray[np.uint32]:
    """Shares of changed weights, times 2^32, from which on rate q is taken, not q + 1."""
    sixteenth = TWO ** (ONE / 16)
    unit = Decimal(1 << 20)
    shares = []
    for q in range(tables.N_RATES - 1):
        between = Decimal(tables.LIMIT) / sixteenth ** (2 * q + 1) / unit
        shares.append(rounded(Decimal(1 << 32) * (1 - (-between).exp())))
    return np.array(shares, np.uint32)


def buckets() -> list[tuple[int, int]]:
    """First and last magnitude of each symbol."""
    found = [(a, a) for a in range(1, 17)]
    for k in range(4, 32):
        width = 1 << (k - 2)
        found += [((4 + sub) * width, (5 + sub) * width - 1) for sub in range(4)]
    found[16] = (17, found[16][1])  # 16 has a symbol of its own
    return found


def step_frequencies() -> npt.NDArray[np.uint16]:
    """Per scale, the share of each magnitude among the steps that are not 0, in 2^-16.

    A weight's master moves by a Gaussian of standard deviation s and lies anywhere in its
    rounding cell, so the step is k with probability s·(G(k+1) − 2·G(k) + G(k−1)), G(k) being
    E[max(x − k/s, 0)]. Sums over a bucket telescope.
    """
    out = np.empty((tables.N_SCALES, tables.N_MAGNITUDES), np.uint16)
    quarter = TWO ** (ONE / 4)
    for j in range(tables.N_SCALES - 1):
        s = quarter**j / 4

        def g(k: int, s: Decimal = s) -> Decimal:
            return s * tail_mean(Decimal(k) / s)

        all_steps = g(0) - g(1)
        shares = [
            (g(last + 1) - g(last) - g(first) + g(first - 1)) / all_steps
            for first, last in buckets()
        ]
        out[j] = apportioned(shares)
        tail_mean.cache_clear()
    out[-1] = apportioned([ONE / tables.N_MAGNITUDES] * tables.N_MAGNITUDES)
    return out


def apportioned(shares: list[Decimal]) -> npt.NDArray[np.uint16]:
    """Shares of 2^16, each at least 1, the largest taking what rounding leaves."""
    total = 1 << tables.MAGNITUDE_BITS
    parts = [max(1, rounded(share * total)) for share in shares]
    largest = max(range(len(parts)), key=lambda i: (parts[i], -i))
    parts[largest] += total - sum(parts)
    return np.array(parts, np.uint16)


def logarithms() -> npt.NDArray[np.uint16]:
    """log2(1 + m/256) in 2^-12, m from 0 to 256."""
    return np.array([rounded(4096 * log2(1 + Decimal(m) / 256)) for m in range(257)], np.uint16)


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else tables.PATH
    frequencies = step_frequencies()
    parts: list[npt.NDArray[np.unsignedinteger]] = [
        positions(),
        rates(),
        rate_bounds(),
        frequencies,
        logarithms(),
    ]
    data = b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)
    path.write_bytes(data)
    print(f"{path}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
