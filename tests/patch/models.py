"""Random ranks and changes, and a brute-force model of what a patch does to them.

The model moves every element one by one, in plain numpy; it shares nothing with the patcher but
the words of the format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import coefficients, fingerprint, weigh
from vllm_delta.format import DTYPES, Schema, TensorSpec
from vllm_delta.layout import ParameterSpec, RankLayout, Rectangle
from vllm_delta.patch import Patcher

Bits = npt.NDArray[Any]

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
AS_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
PADDING = 5


def grid(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Every position of a strided set, in order; the slow and obvious way."""
    places = [
        offset + sum(k * s for k, s in zip(at, strides, strict=True))
        for at in itertools.product(*map(range, sizes))
    ]
    return np.array(places, np.int64)


def random_bits(rng: np.random.Generator, n: int, itemsize: int) -> Bits:
    return np.frombuffer(rng.bytes(n * itemsize), order.UNSIGNED[itemsize]).copy()


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    """A tensor of the dtype over the same memory."""
    return torch.from_numpy(bits).view(TORCH[dtype])


@dataclass
class Rank:
    """One rank: its checkpoint part, its storages, and the patcher over them."""

    schema: Schema
    layout: RankLayout
    base: dict[int, Bits]
    storages: dict[str, Bits]
    tensors: dict[str, torch.Tensor]

    def patcher(self, **options: Any) -> Patcher:
        return Patcher(self.schema, self.layout, self.tensors, **options)

    def loaded(self, checkpoint: dict[int, Bits]) -> dict[str, Bits]:
        """What the storages hold once the checkpoint is in them; padding stays as it is."""
        out = {name: bits.copy() for name, bits in self.storages.items()}
        for r in self.layout.rectangles:
            source = grid(r.source_offset, r.sizes, r.source_strides)
            target = grid(r.target_offset, r.sizes, r.target_strides)
            out[r.parameter][target] = checkpoint[r.tensor][source]
        return out

    def holds(self, expected: dict[str, Bits]) -> bool:
        return all(np.array_equal(self.storages[name], expected[name]) for name in expected)

    def partial(self, rectangle: Rectangle, bits: Bits, some: Bits | None = None) -> int:
        """Σ g·P·Q over the rectangle's elements (those in `some` only), from checkpoint bits."""
        spec = self.schema.tensors[rectangle.tensor]
        source = grid(rectangle.source_offset, rectangle.sizes, rectangle.source_strides)
        if some is not None:
            source = np.intersect1d(source, some)
        return weigh(bits[source], coefficients(spec, source))


def boxes(rng: np.random.Generator, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Cuts a tensor into boxes along random dimensions."""
    whole = [tuple(slice(0, n) for n in shape)]
    for axis, n in enumerate(shape):
        if n > 1 and rng.random() < 0.6:
            cut = int(rng.integers(1, n))
            halves = (slice(0, cut), slice(cut, n))
            whole = [(*b[:axis], half, *b[axis + 1 :]) for b in whole for half in halves]
    return whole


def random_rank(rng: np.random.Generator, specs: list[TensorSpec]) -> Rank:
    """A rank that holds random boxes of the tensors in random order, transposed or not, with
    padding around each, several boxes to a parameter."""
    schema = Schema.of(specs)
    base = {i: random_bits(rng, s.numel, s.itemsize) for i, s in enumerate(schema.tensors)}
    sizes: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    rectangles = []
    for tensor, spec in enumerate(schema.tensors):
        source_strides = grid_strides(spec.shape)
        for box in boxes(rng, spec.shape):
            if rng.random() < 0.15:
                continue  # another rank's
            parameter = f"{spec.dtype}.{rng.integers(2)}"
            start = sizes.get(parameter, 0) + PADDING
            shape = tuple(b.stop - b.start for b in box)
            axes = rng.permutation(len(shape)) if rng.random() < 0.5 else np.arange(len(shape))
            stretch = int(rng.integers(1, 3))  # 2 leaves holes between elements
            packed = grid_strides(tuple(shape[a] for a in axes))
            target = [0] * len(shape)
            for a, stride in zip(axes, packed, strict=True):
                target[a] = stride * stretch
            first = sum(b.start * s for b, s in zip(box, source_strides, strict=True))
            rectangles.append(
                Rectangle(tensor, shape, first, source_strides, parameter, start, tuple(target))
            )
            sizes[parameter] = start + int(np.prod(shape)) * stretch
            dtypes[parameter] = spec.dtype
    layout = RankLayout(
        schema.digest,
        0,
        tuple(rectangles),
        {name: ParameterSpec(dtypes[name], n + PADDING) for name, n in sizes.items()},
    )
    storages = {
        name: random_bits(rng, p.n_elements, DTYPES[p.dtype].itemsize)
        for name, p in layout.parameters.items()
    }
    tensors = {n: tensor_of(bits, layout.parameters[n].dtype) for n, bits in storages.items()}
    rank = Rank(schema, layout, base, storages, tensors)
    for name, bits in rank.loaded(base).items():
        storages[name][...] = bits
    return rank


def grid_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[a + 1 :])) for a in range(len(shape)))


def whole_rank(bits: dict[str, tuple[str, tuple[int, ...], Bits]]) -> Rank:
    """A rank that holds each tensor whole, as a parameter of the same name."""
    schema = Schema.of(TensorSpec(name, dtype, shape) for name, (dtype, shape, _) in bits.items())
    base = {schema.index(name): old.copy() for name, (_, _, old) in bits.items()}
    layout = RankLayout(
        schema.digest,
        0,
        tuple(
            Rectangle(i, (s.numel,), 0, (1,), s.name, 0, (1,)) for i, s in enumerate(schema.tensors)
        ),
        {s.name: ParameterSpec(s.dtype, s.numel) for s in schema.tensors},
    )
    storages = {name: old for name, (_, _, old) in bits.items()}
    tensors = {n: tensor_of(old, layout.parameters[n].dtype) for n, old in storages.items()}
    return Rank(schema, layout, base, storages, tensors)


def random_change(
    rng: np.random.Generator, rank: Rank, tensor: int, share: float
) -> tuple[Change, Bits]:
    """A change and the tensor's bits after it: by steps where the type has them, else raw."""
    spec, old = rank.schema.tensors[tensor], rank.base[tensor]
    new = old.copy()
    chosen = np.flatnonzero(rng.random(spec.numel) < share)
    kind = new.dtype.type
    small = rng.choice(np.array([1, 2, 3], new.dtype), chosen.size)
    new[chosen] += np.where(rng.random(chosen.size) < 0.5, small, kind(0) - small)
    wild = chosen[rng.random(chosen.size) < rng.choice([0.0, 0.05, 1.0])]
    new[wild] = random_bits(rng, wild.size, new.itemsize)
    target = fingerprint(new, spec)
    if not spec.stepped or rng.random() < 0.2:
        return Change(tensor, None, None, new.copy(), fingerprint(old, spec), target), new
    indices = np.flatnonzero(old != new).astype(rng.choice([np.int32, np.int64]))
    steps = order.steps_between(old[indices], new[indices])
    touched = weigh(old[indices], coefficients(spec, indices))
    return Change(tensor, indices, steps, None, touched, target), new


SHAPES = [(), (1,), (13,), (7, 11), (64, 48), (5, 6, 9), (2, 3, 4, 5), (1, 301), (97, 1)]


def random_specs(rng: np.random.Generator, dtypes: list[str]) -> list[TensorSpec]:
    return [
        TensorSpec(f"t{i}", dtypes[i % len(dtypes)], shape)
        for i, shape in enumerate(SHAPES[k] for k in rng.permutation(len(SHAPES)))
    ]


def stepped(rank: Rank, tensor: int, indices: list[int], step: int = 1) -> Change:
    spec, old = rank.schema.tensors[tensor], rank.base[tensor]
    places = np.array(indices, np.int32)
    steps = np.full(len(indices), step, order.SIGNED[spec.itemsize])
    new = old.copy()
    new[places] = order.add_steps(old[places], steps)
    touched = weigh(old[places], coefficients(spec, places))
    return Change(tensor, places, steps, None, touched, fingerprint(new, spec))


def simple_rank(shape: tuple[int, ...] = (8, 16)) -> Rank:
    bits = random_bits(np.random.default_rng(2), int(np.prod(shape)), 2)
    return whole_rank({"w": ("BF16", shape, bits)})


def large_rank(n_tensors: int, shape: tuple[int, int]) -> Rank:
    rng = np.random.default_rng(9)
    n = shape[0] * shape[1]
    return whole_rank({f"w{i}": ("BF16", shape, random_bits(rng, n, 2)) for i in range(n_tensors)})


def sparse_change(rank: Rank, tensor: int, share: float) -> Change:
    rng = np.random.default_rng(tensor)
    numel = rank.schema.tensors[tensor].numel
    indices = np.unique(rng.integers(0, numel, int(numel * share), dtype=np.int32))
    steps = rng.choice(np.array([-1, 1, 2], np.int16), indices.size)
    steps[rng.random(indices.size) < 0.002] = 2000
    return Change(tensor, indices, steps, None, 0, 0)


def sparse_changes(rank: Rank, share: float) -> Iterator[Change]:
    return (sparse_change(rank, tensor, share) for tensor in range(len(rank.schema)))
