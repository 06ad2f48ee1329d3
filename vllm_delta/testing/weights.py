"""Tiny weights and their versions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta.format import DTYPES, Schema, TensorSpec, Version

Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Tiny weights and their consecutive versions, the same for the same arguments.

    Version 0 holds any bit patterns, NaN payloads included. Each later version changes a few
    elements of the one before, mostly by one in the raw bits, sometimes to any pattern, and leaves
    some tensors alone.

    Args:
        seed: of everything below.
        dtypes: element types, dealt out to the tensors in turn.
        n_tensors: tensors beside the three fixed ones: a scalar, an empty one and a single row.
        max_size: longest dimension.
        changed: share of elements that a version changes, at least one element.
    """

    seed: int = 0
    dtypes: tuple[str, ...] = ("BF16", "F16", "F32", "I32")
    n_tensors: int = 4
    max_size: int = 12
    changed: float = 0.05

    @cached_property
    def schema(self) -> Schema:
        rng = np.random.default_rng([self.seed, 0])
        shapes: list[tuple[int, ...]] = [(), (0, 3), (1, self.max_size)]
        for _ in range(self.n_tensors):
            n_dimensions = int(rng.integers(1, 4))
            shapes.append(tuple(int(n) for n in rng.integers(1, self.max_size + 1, n_dimensions)))
        return Schema.of(
            TensorSpec(f"layers.{i}.weight", self.dtypes[i % len(self.dtypes)], shape)
            for i, shape in enumerate(shapes)
        )

    def weights(self, number: int) -> dict[str, Bits]:
        """Raw bits of version `number`: name → unsigned[numel], flat, new arrays each call."""
        rng = np.random.default_rng([self.seed, 1])
        bits = {spec.name: _any_bits(rng, spec, spec.numel) for spec in self.schema.tensors}
        for version in range(1, number + 1):
            self._step(np.random.default_rng([self.seed, 1, version]), bits)
        return bits

    def version(self, number: int) -> Version:
        """Version `number` with the root of its fingerprints."""
        from vllm_delta.fingerprint import fingerprint, root

        weights = self.weights(number)
        sums = [fingerprint(weights[spec.name], spec) for spec in self.schema.tensors]
        return Version(number, root(self.schema, sums))

    def _step(self, rng: np.random.Generator, bits: dict[str, Bits]) -> None:
        filled = [spec for spec in self.schema.tensors if spec.numel]
        touched = [spec for spec in filled if rng.random() < 0.7] or filled[:1]
        for spec in touched:
            n = max(1, round(spec.numel * self.changed))
            places = rng.choice(spec.numel, n, replace=False)
            old = bits[spec.name][places]
            by_one = old + rng.choice(np.array([1, -1]).astype(old.dtype), n)
            bits[spec.name][places] = np.where(rng.random(n) < 0.9, by_one, ~old)


def _any_bits(rng: np.random.Generator, spec: TensorSpec, n: int) -> Bits:
    dtype = np.dtype(f"u{DTYPES[spec.dtype].itemsize}")
    bits: Bits = rng.integers(0, np.iinfo(dtype).max, n, dtype=dtype, endpoint=True)
    return bits
