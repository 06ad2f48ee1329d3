"""What is damaged: deltas of small models, in every codec, for one shard and for two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scripts._soak.deltas import between, moves, weights
from vllm_delta import codec
from vllm_delta.codec import Change, order
from vllm_delta.codec.blob import GAP, HAZARD, RAW, Blob, parse_blob
from vllm_delta.fingerprint import fingerprint, root
from vllm_delta.format import Schema, TensorSpec

MIXED = (
    TensorSpec("a.counts", "I32", (37,)),
    TensorSpec("a.cube", "BF16", (3, 20, 24)),
    TensorSpec("b.matrix", "BF16", (112, 118)),
    TensorSpec("c.even", "BF16", (1500,)),
    TensorSpec("d.f16", "F16", (30, 40)),
    TensorSpec("e.f32", "F32", (25, 31)),
    TensorSpec("f.f8", "F8_E4M3", (34, 40)),
    TensorSpec("g.reset", "BF16", (400,)),
    TensorSpec("h.norm", "BF16", (40,)),
    TensorSpec("i.f8", "F8_E5M2", (20, 30)),
)
MANY = tuple(TensorSpec(f"layer.{n:02}", "BF16", (1 + n, 16)) for n in range(40))
LARGE = (
    TensorSpec("embedding", "BF16", (3000, 3000)),
    TensorSpec("matrix", "BF16", (120, 118)),
    TensorSpec("norm", "BF16", (120,)),
)
"""A damaged number must not make a reader take memory by the size of the tensor."""
SIZES = {"BF16": 0.3, "F16": 0.3, "F32": 2.0, "F8_E4M3": 0.1, "F8_E5M2": 0.1}


@dataclass(frozen=True, eq=False)
class Subject:
    """A delta's blob, the weights it starts from, and those it must lead to."""

    name: str
    schema: Schema
    base: list[order.Unsigned]
    target: list[order.Unsigned]
    changes: list[Change]
    shards: int
    data: bytes

    @cached_property
    def blob(self) -> Blob:
        return parse_blob(self.data, self.schema, "delta")

    @cached_property
    def fingerprints(self) -> list[int]:
        """Of the base."""
        return [
            fingerprint(bits, spec)
            for spec, bits in zip(self.schema.tensors, self.base, strict=True)
        ]

    @cached_property
    def root(self) -> str:
        """Of the target."""
        marks = [
            fingerprint(bits, spec)
            for spec, bits in zip(self.schema.tensors, self.target, strict=True)
        ]
        return root(self.schema, marks)

    @cached_property
    def changed(self) -> list[tuple[int, order.Signed]]:
        """Tensor and indices of every change with indices, as the blob codes them."""
        decoded = codec.decode(
            self.data, self.schema, "delta", codec.HostLanes(self.base.__getitem__)
        )
        return [(c.tensor, c.indices) for c in decoded if c.indices is not None]


def subjects(seed: int) -> list[Subject]:
    """Three models, steps of each, for one shard and for two.

    Raises:
        AssertionError: a codec is missing, and the soak would not say what it claims to.
    """
    found = []
    for place, (name, specs, n_steps) in enumerate(
        (("mixed", MIXED, 2), ("many", MANY, 2), ("large", LARGE, 1))
    ):
        rng = np.random.default_rng([seed, place])
        schema = Schema.of(specs)
        versions = [[_first(spec, rng) for spec in specs]]
        for step in range(n_steps):
            new = [
                _moved(spec, bits, step, rng)
                for spec, bits in zip(specs, versions[-1], strict=True)
            ]
            versions.append(new)
            changes = between(schema, versions[step], new)
            for shards in (1, 2):
                (data,) = codec.encode_delta(
                    schema,
                    changes,
                    codec="hazard",
                    base=versions[step].__getitem__,
                    shards=shards,
                )
                title = f"{name} {step} {shards}"
                found.append(Subject(title, schema, versions[step], new, changes, shards, data))
    taken = {entry.codec for one in found for entry in one.blob.entries}
    assert taken == {RAW, GAP, HAZARD}, taken
    return found


def _first(spec: TensorSpec, rng: np.random.Generator) -> order.Unsigned:
    """Weights; those of the embedding repeat, which takes less time to make."""
    if spec.name != "embedding":
        return weights(spec, rng)
    return np.tile(weights(replace(spec, shape=(spec.n_cols,)), rng), spec.n_rows)


def _moved(
    spec: TensorSpec, bits: order.Unsigned, step: int, rng: np.random.Generator
) -> order.Unsigned:
    """The tensor a step later."""
    if not spec.stepped:
        return bits + np.array(1, bits.dtype)
    new = bits.copy()
    if spec.name == "c.even":
        new[step::10] = order.add_steps(bits[step::10], np.ones(bits[step::10].size, np.int16))
    elif spec.name == "embedding":
        rows = rng.integers(0, spec.numel, 6000)
        new[rows] = order.add_steps(bits[rows], np.ones(rows.size, np.int16))
    elif spec.name == "g.reset":
        new[:-5] = 0x3F80 + step
    else:
        new = order.add_steps(bits, moves(spec, bits, SIZES[spec.dtype], rng))
        new[: 1 + step] ^= new.dtype.type(1)  # a large step or a small one, but always a change
        new[-1] ^= new.dtype.type(1) << new.dtype.type(8 * spec.itemsize - 2)
    return new
