"""Weights and deltas that look like real ones, for the soak and the tests of the codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import MASK64, coefficients, fingerprint, weigh
from vllm_delta.format import Schema, TensorSpec

MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F8_E4M3": 3, "F8_E5M2": 2}
TYPICAL = 0.02


@dataclass(frozen=True)
class Delta:
    """A schema, its tensors' bits before and after, and what leads from one to the other."""

    schema: Schema
    base: list[order.Unsigned]
    target: list[order.Unsigned]
    changes: list[Change]

    def bits(self, tensor: int) -> order.Unsigned:
        return self.base[tensor]


def weights(spec: TensorSpec, rng: np.random.Generator) -> order.Unsigned:
    """Patterns of normally distributed numbers: unsigned[numel], flat."""
    unsigned = order.UNSIGNED[spec.itemsize]
    if not spec.stepped:
        return rng.integers(0, 256, spec.numel).astype(unsigned)
    mantissa, width = MANTISSA[spec.dtype], 8 * spec.itemsize
    bias = (1 << (width - 2 - mantissa)) - 1
    values = rng.normal(0, 0.5 if width == 8 else TYPICAL, spec.numel)
    fractions, exponents = np.frexp(np.abs(values))
    fields = np.clip(exponents - 1 + bias, 0, 2 * bias).astype(np.uint64)
    low = ((2 * fractions - 1) * (1 << mantissa)).astype(np.uint64)
    signs = (values < 0).astype(np.uint64) << np.uint64(width - 1)
    bits: order.Unsigned = (signs | fields << np.uint64(mantissa) | low).astype(unsigned)
    return bits


def moves(
    spec: TensorSpec, bits: order.Unsigned, size: float, rng: np.random.Generator
) -> order.Signed:
    """Steps as an optimiser takes them: a Gaussian seen through rounding, 0 for most.

    Args:
        size: standard deviation in units of the last place of a typical weight.
    """
    mantissa, width = MANTISSA[spec.dtype], 8 * spec.itemsize
    bias = (1 << (width - 2 - mantissa)) - 1
    top = np.log2(0.5 if width == 8 else TYPICAL)
    fields = (bits.astype(np.int64) & ((1 << (width - 1)) - 1)) >> mantissa
    ulps = size * np.exp2(top - np.maximum(fields - bias, 1 - bias))
    drift = np.floor(rng.normal(0, 1, bits.size) * ulps + rng.random(bits.size))
    most = (1 << (width - 3)) - 1
    steps: order.Signed = np.clip(drift, -most, most).astype(order.SIGNED[spec.itemsize])
    return steps


def between(
    schema: Schema, base: Sequence[order.Unsigned], target: Sequence[order.Unsigned]
) -> list[Change]:
    """The changes that lead from one to the other: steps, or whole where a type has none."""
    changes = []
    for place, (spec, old, new) in enumerate(zip(schema.tensors, base, target, strict=True)):
        before, after = fingerprint(old, spec), fingerprint(new, spec)
        if before == after:
            continue
        if not spec.stepped:
            changes.append(Change(place, None, None, new, before, after))
            continue
        indices = np.flatnonzero(old != new).astype(np.int32)
        steps = order.steps_between(old[indices], new[indices])
        touched = weigh(old[indices], coefficients(spec, indices)) & MASK64
        changes.append(Change(place, indices, steps, None, touched, after))
    return changes


def delta(specs: Sequence[TensorSpec], size: float | Sequence[float], seed: int) -> Delta:
    """A delta over seeded weights; `size` as in `moves`, for all tensors or for each."""
    schema, rng = Schema.of(specs), np.random.default_rng(seed)
    sizes = [size] * len(schema) if isinstance(size, (int, float)) else list(size)
    base, target = [], []
    for spec, ulps in zip(schema.tensors, sizes, strict=True):
        bits = weights(spec, rng)
        base.append(bits)
        if spec.stepped:
            target.append(order.add_steps(bits, moves(spec, bits, ulps, rng)))
        else:
            target.append(bits ^ (rng.random(bits.size) < 0.01))
    return Delta(schema, base, target, between(schema, base, target))
