"""Float patterns in the order of the numbers they stand for, and the steps between them.

A pattern's key is its place in that order as a signed integer of the same width: non-negative
floats keep their bits, negative ones are mirrored, so that -0 comes right before +0. The mapping
is a bijection on all patterns (NaN payloads and subnormals included) and its own inverse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Unsigned = npt.NDArray[np.unsignedinteger]
Signed = npt.NDArray[np.signedinteger]

UNSIGNED: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}
SIGNED: dict[int, type[np.signedinteger]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _mirror(patterns: Signed) -> Signed:
    width = 8 * patterns.itemsize
    largest = np.array((1 << (width - 1)) - 1, patterns.dtype)
    return patterns ^ ((patterns >> patterns.dtype.type(width - 1)) & largest)


def to_key(bits: Unsigned) -> Signed:
    """Keys of raw patterns: signed of the same width and shape."""
    return _mirror(bits.view(SIGNED[bits.itemsize]))


def from_key(keys: Signed) -> Unsigned:
    """Raw patterns of keys: unsigned of the same width and shape."""
    return _mirror(keys).view(UNSIGNED[keys.itemsize])


def steps_between(old: Unsigned, new: Unsigned) -> Signed:
    """Signed steps from `old` to `new`, modulo 2^width."""
    return np.subtract(to_key(new), to_key(old))


def add_steps(bits: Unsigned, steps: Signed) -> Unsigned:
    """Patterns that lie `steps` away from `bits`, modulo 2^width."""
    return from_key(np.add(to_key(bits), steps.astype(SIGNED[bits.itemsize], copy=False)))
