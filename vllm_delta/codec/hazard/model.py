"""Rates and scales per class of the base's exponent: what the lanes of some tensors share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_delta.codec.hazard import tables
from vllm_delta.errors import FormatError
from vllm_delta.format import DTYPES

I64 = npt.NDArray[np.int64]

SHIFTS = {"BF16": 7, "F16": 10, "F32": 23, "F8_E4M3": 3, "F8_E5M2": 2}
"""Bits below the exponent: an element's class is ``pattern >> shift``, without the sign."""
assert {name for name, dtype in DTYPES.items() if dtype.stepped} == set(SHIFTS)

_SLOWEST = tables.N_RATES - 1
N_SHORT_MAGNITUDES = 64
"""Symbols of magnitudes up to 2^15, all that a type of 16 bits has."""


def n_classes(dtype: str) -> int:
    """Classes of a type."""
    return 1 << (8 * DTYPES[dtype].itemsize - 1 - SHIFTS[dtype])


@dataclass(frozen=True, eq=False)
class Tables:
    """One type's tables, indexed by class with the sign above it.

    Attributes:
        rates: int64[2·classes], λ.
        scales: int64[2·classes], row of `tables.STEPS`.
    """

    shift: int
    rates: I64
    scales: I64


@dataclass(frozen=True)
class Model:
    """Per type: the first class that the model names, then index of rate and scale of each."""

    classes: Mapping[str, tuple[int, bytes, bytes]]

    def to_bytes(self, dtypes: Collection[str]) -> bytes:
        """What tensors of these types need of it."""
        out = bytearray()
        for name in SHIFTS:
            if name in dtypes:
                first, rates, scales = self.classes[name]
                out += bytes([first, len(rates) - 1]) + rates + scales
        return bytes(out)

    @cached_property
    def tables(self) -> dict[str, Tables]:
        found = {}
        for name, (first, rates, scales) in self.classes.items():
            n = n_classes(name)
            some = slice(first, first + len(rates))
            rate, scale = np.full(n, _SLOWEST), np.zeros(n, np.int64)
            rate[some] = np.frombuffer(rates, np.uint8)
            scale[some] = np.frombuffer(scales, np.uint8)
            by_class = tables.RATES[rate]
            found[name] = Tables(SHIFTS[name], np.tile(by_class, 2), np.tile(scale, 2))
        return found


def parse_model(data: memoryview, at: int, dtypes: Collection[str]) -> tuple[Model, int]:
    """Read the model of tensors of these types at a place; also where it ends.

    Raises:
        FormatError: it is cut off, or names a class, rate or scale that there is not.
    """
    classes = {}
    for name in SHIFTS:
        if name not in dtypes:
            continue
        if at + 2 > len(data):
            raise FormatError("hazard: a model ends too early")
        first, n = data[at], data[at + 1] + 1
        rates = bytes(data[at + 2 : at + 2 + n])
        scales = bytes(data[at + 2 + n : at + 2 + 2 * n])
        at += 2 + 2 * n
        if len(scales) != n:
            raise FormatError("hazard: a model ends too early")
        if first + n > n_classes(name) or max(rates) > _SLOWEST or max(scales) >= tables.N_SCALES:
            raise FormatError("hazard: no such class, rate or scale", dtype=name)
        classes[name] = (first, rates, scales)
    return Model(classes), at


class Statistics:
    """What a model is chosen from: elements and magnitudes of steps per type and class."""

    def __init__(self) -> None:
        self.elements: dict[str, I64] = {}
        self.magnitudes: dict[str, I64] = {}

    def of(self, dtype: str) -> tuple[I64, I64]:
        """The type's counts, to be added to: int64[classes] elements, int64[classes, symbols]
        magnitudes of steps."""
        if dtype not in self.elements:
            n = n_classes(dtype)
            n_symbols = tables.N_MAGNITUDES if DTYPES[dtype].itemsize > 2 else N_SHORT_MAGNITUDES
            self.elements[dtype] = np.zeros(n, np.int64)
            self.magnitudes[dtype] = np.zeros((n, n_symbols), np.int64)
        return self.elements[dtype], self.magnitudes[dtype]

    def add(self, other: Statistics) -> None:
        """Count what another has counted too."""
        for dtype in other.elements:
            for mine, theirs in zip(
                self.of(dtype), (other.elements[dtype], other.magnitudes[dtype]), strict=True
            ):
                mine += theirs

    def model(self) -> Model:
        """Rate and scale per class that take the fewest bits, in integers."""
        classes = {}
        for name in sorted(self.magnitudes):
            magnitudes = self.magnitudes[name]
            changed = magnitudes.sum(axis=1)
            present = np.flatnonzero(changed)
            first, last = int(present[0]), int(present[-1])
            some = slice(first, last + 1)
            n = changed[some]
            shares = (n << 32) // np.maximum(np.maximum(self.elements[name][some], n), 1)
            # Bounds fall: the rate is the number of those above the share.
            rates = len(tables.RATE_BOUNDS) - np.searchsorted(
                tables.RATE_BOUNDS[::-1], shares, side="right"
            )
            costs = tables.COSTS[:, : magnitudes.shape[1]]
            scales = np.argmin(magnitudes[some] @ costs.T, axis=1)
            rates, scales = np.where(n, rates, _SLOWEST), np.where(n, scales, 0)
            classes[name] = (
                first,
                rates.astype(np.uint8).tobytes(),
                scales.astype(np.uint8).tobytes(),
            )
        return Model(classes)
