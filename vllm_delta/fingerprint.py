"""Fingerprints of weights: a 64-bit sum over raw bits in checkpoint coordinates.

F = sum of g(u) * P(row) * Q(col) mod 2^64 over a tensor's elements, where u is the element's raw
unsigned bits, g a fixed non-linear mix, P and Q odd constants made from the tensor's name. The sum
does not depend on the order or the partition of the elements, and a change of n elements changes
it in O(n). It is not a defence against an adversary: blobs have their own sha256.
`FORMAT.md` is the definition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from vllm_delta.format import Schema, TensorSpec

U64 = npt.NDArray[np.uint64]

MASK64 = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
"""splitmix64's increment and finaliser constants (Steele, Lea, Flood 2014)."""
BITS_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
"""An odd 64-bit constant with about as many ones as zeros (from the xxh3 avalanche)."""

_ONE = np.uint64(1)
_COLUMNS = 1 << 14
_ROOT_TAG = b"vllm_delta root 1"


@numba.njit(cache=True, inline="always")
def odd_key(seed: np.uint64, index: np.uint64) -> np.uint64:
    """The odd 64-bit constant of a row or column."""
    h = np.uint64(seed + np.uint64(index) * GOLDEN)
    h = (h ^ (h >> np.uint64(30))) * MIX_1
    h = (h ^ (h >> np.uint64(27))) * MIX_2
    return np.uint64((h ^ (h >> np.uint64(31))) | _ONE)


@numba.njit(cache=True, inline="always")
def mix(bits: np.uint64) -> np.uint64:
    """g: an injective, non-linear mix of an element's raw bits."""
    x = (np.uint64(bits) + _ONE) * BITS_MULTIPLIER
    return np.uint64(x ^ (x >> np.uint64(32)))


@numba.njit(cache=True, nogil=True)
def _odd_keys(seed: np.uint64, start: np.uint64, out: U64) -> None:
    for i in range(out.size):
        out[i] = odd_key(seed, start + np.uint64(i))


@numba.njit(cache=True, nogil=True)
def _coefficients(row_seed, col_seed, n_cols, indices, out):  # type: ignore[no-untyped-def]
    row, first, p = np.int64(-1), np.int64(0), np.uint64(0)
    for i in range(indices.size):
        index = np.int64(indices[i])
        if row < 0 or index < first or index >= first + n_cols:
            row = index // n_cols
            first = row * n_cols
            p = odd_key(row_seed, np.uint64(row))
        out[i] = p * odd_key(col_seed, np.uint64(index - first))


@numba.njit(cache=True, nogil=True)
def _weigh(bits, coefficients):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(bits.size):
        total += mix(np.uint64(bits[i])) * coefficients[i]
    return total


@numba.njit(cache=True, nogil=True)
def _strip(bits, n_rows, n_cols, first, row_seed, keys):  # type: ignore[no-untyped-def]
    """Fingerprint of the columns [first, first + keys.size) of a row-major matrix."""
    total = np.uint64(0)
    for row in range(n_rows):
        start = row * n_cols + first
        part = np.uint64(0)
        for col in range(keys.size):
            part += mix(np.uint64(bits[start + col])) * keys[col]
        total += part * odd_key(row_seed, np.uint64(row))
    return total


def tensor_seeds(name: str) -> tuple[int, int]:
    """Seeds of the row and column constants of the tensor called `name`."""
    data = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")


def odd_keys(seed: int, start: int, n: int) -> U64:
    """The constants of rows or columns start … start + n - 1: uint64[n], all odd."""
    out = np.empty(n, np.uint64)
    _odd_keys(np.uint64(seed), np.uint64(start), out)
    return out


def mix_bits(bits: npt.NDArray[np.unsignedinteger]) -> U64:
    """g of each element of `bits` (unsigned, any width): uint64 of the same shape."""
    x = (bits.astype(np.uint64) + _ONE) * BITS_MULTIPLIER
    return np.asarray(x ^ (x >> np.uint64(32)), np.uint64)


def coefficients(spec: TensorSpec, indices: npt.NDArray[np.signedinteger]) -> U64:
    """P(row) * Q(col) mod 2^64 of each flat index: uint64[n]. Fastest when ascending."""
    row_seed, col_seed = tensor_seeds(spec.name)
    out = np.empty(indices.size, np.uint64)
    _coefficients(np.uint64(row_seed), np.uint64(col_seed), np.int64(spec.n_cols), indices, out)
    return out


def weigh(bits: npt.NDArray[np.unsignedinteger], coefficients: U64) -> int:
    """Sum of g(bits) * coefficients mod 2^64; both flat and of one length."""
    return int(_weigh(bits, coefficients))


def fingerprint(bits: npt.NDArray[np.unsignedinteger], spec: TensorSpec) -> int:
    """Fingerprint of a whole tensor.

    Args:
        bits: unsigned[spec.numel], contiguous, row-major raw bits; not modified.
        spec: the tensor's name and shape.
    """
    if bits.size != spec.numel:
        raise ValueError(f"{bits.size} elements for a tensor of {spec.numel}")
    flat = np.ascontiguousarray(bits).reshape(-1)
    row_seed, col_seed = tensor_seeds(spec.name)
    total = 0
    for first in range(0, spec.n_cols if spec.numel else 0, _COLUMNS):
        keys = odd_keys(col_seed, first, min(_COLUMNS, spec.n_cols - first))
        total += int(_strip(flat, spec.n_rows, spec.n_cols, first, np.uint64(row_seed), keys))
    return total & MASK64


def root(schema: Schema, fingerprints: Sequence[int]) -> str:
    """Root of a version: sha256 over the schema's digest and every tensor's fingerprint."""
    if len(fingerprints) != len(schema):
        raise ValueError(f"{len(fingerprints)} fingerprints for {len(schema)} tensors")
    state = hashlib.sha256(_ROOT_TAG + bytes.fromhex(schema.digest))
    state.update(np.array(fingerprints, dtype="<u8").tobytes())
    return state.hexdigest()
