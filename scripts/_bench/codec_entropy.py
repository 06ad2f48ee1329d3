"""How few bytes a step takes for one who knows how often weights of each exponent change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scripts._bench.codec_traces import View
from vllm_delta.codec.order import Unsigned, steps_between

_EXPONENT = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}
"""Type → bits below the exponent, bits of the exponent."""
_CHUNK = 1 << 20


def entropy_bytes(view: View, *, by_type: bool) -> float:
    """Empirical entropy of a step in bytes, at no cost for the model.

    For the weights of one context, N of which n change: N times the entropy of a coin that falls
    n of N times, for the mask; and n times the entropy of the changes' own distribution of steps.
    Summed over contexts: the base's exponent, with `by_type` the exponent and the tensor's type
    (as many tables again, which nobody pays for here, so always a little lower).
    """
    seen: dict[str, _Counts] = {}
    for place, spec in enumerate(view.schema.tensors):
        context = view.types[place] if by_type else spec.dtype
        counts = seen.setdefault(context, _Counts(spec.dtype))
        counts.add(view.base[place], view.target[place])
    return sum(counts.bits() for counts in seen.values()) / 8


class _Counts:
    """Weights, changes and steps of each exponent."""

    def __init__(self, dtype: str) -> None:
        self._low, self._n_bits = _EXPONENT.get(dtype, (0, 0))
        self._weights = np.zeros(1 << self._n_bits, np.int64)
        self._exponents: list[npt.NDArray[np.int64]] = []
        self._steps: list[npt.NDArray[np.int64]] = []

    def add(self, base: Unsigned, target: Unsigned) -> None:
        for start in range(0, base.size, _CHUNK):
            old, new = base[start : start + _CHUNK], target[start : start + _CHUNK]
            exponents = self._exponent(old)
            self._weights += np.bincount(exponents, minlength=self._weights.size)
            changed = np.flatnonzero(old != new)
            self._exponents.append(exponents[changed])
            self._steps.append(steps_between(old[changed], new[changed]).astype(np.int64))

    def bits(self) -> float:
        exponents, steps = np.concatenate(self._exponents), np.concatenate(self._steps)
        changed = np.bincount(exponents, minlength=self._weights.size)
        mask = _cost(changed, self._weights) + _cost(self._weights - changed, self._weights)
        order = np.lexsort((steps, exponents))
        exponents, steps = exponents[order], steps[order]
        differs = (np.diff(exponents) != 0) | (np.diff(steps) != 0)
        starts = np.flatnonzero(np.concatenate([[exponents.size > 0], differs]))
        counts = np.diff(np.append(starts, exponents.size))
        return mask + _cost(counts, changed[exponents[starts]])

    def _exponent(self, bits: Unsigned) -> npt.NDArray[np.int64]:
        return bits.astype(np.int64) >> self._low & (1 << self._n_bits) - 1


def _cost(counts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]) -> float:
    """Bits of `counts` outcomes, each of probability count / total."""
    there = counts > 0
    return float(-(counts[there] * np.log2(counts[there] / totals[there])).sum())
