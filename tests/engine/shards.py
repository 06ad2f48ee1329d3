"""Plain tensors laid out as tensor or expert parallelism does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from vllm_delta.codec import order
from vllm_delta.format import Schema
from vllm_delta.layout import ParameterSpec, RankLayout, Rectangle

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}
AS_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Weights = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The same memory, flat, as unsigned numbers."""
    itemsize = tensor.element_size()
    return tensor.view(-1).view(AS_BITS[itemsize]).numpy().view(order.UNSIGNED[itemsize])


class Builder:
    """Lays one rank's parts out, parameter by parameter, with rubbish between them."""

    def __init__(self, weights: Weights, rank: int) -> None:
        self._weights = weights
        self._rank = rank
        self._rectangles: list[tuple[str, Any]] = []
        self._sizes: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}

    def add(
        self, name: str, *box: slice, into: str | None = None, transposed: bool = False
    ) -> None:
        """Puts a box of a tensor behind what the parameter holds already."""
        tensor = self._weights[name]
        parameter = into or name
        whole = torch.arange(tensor.numel()).view(tensor.shape)[box]
        if not whole.numel():
            return
        start = self._sizes.get(parameter, 0) + 3
        sizes = tuple(whole.shape)
        strides = torch.empty(sizes).stride()
        if transposed:
            strides = torch.empty((*sizes[:-2], sizes[-1], sizes[-2])).mT.stride()
        first = int(whole.flatten()[0])
        self._rectangles.append(
            (name, (sizes, first, tensor.stride(), parameter, start, tuple(strides)))
        )
        self._sizes[parameter] = start + whole.numel()
        self._dtypes[parameter] = NAMES[tensor.dtype]

    def layout(self, schema: Schema) -> RankLayout:
        return RankLayout(
            schema.digest,
            self._rank,
            tuple(Rectangle(schema.index(name), *rest) for name, rest in self._rectangles),
            {p: ParameterSpec(self._dtypes[p], n + 5) for p, n in self._sizes.items()},
        )


@dataclass
class Shard:
    """One rank's weights."""

    layout: RankLayout
    storages: dict[str, torch.Tensor]

    def pairs(self, weights: Weights, schema: Schema) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each rectangle here, and the same of whole tensors."""
        for r in self.layout.rectangles:
            here = bits_of(self.storages[r.parameter].cpu())
            there = bits_of(weights[schema.tensors[r.tensor].name])
            width = here.itemsize
            yield (
                as_strided(here[r.target_offset :], r.sizes, [width * s for s in r.target_strides]),
                as_strided(
                    there[r.source_offset :], r.sizes, [width * s for s in r.source_strides]
                ),
            )

    def holds(self, weights: Weights, schema: Schema) -> bool:
        return all(np.array_equal(here, there) for here, there in self.pairs(weights, schema))

    def held(self, schema: Schema) -> dict[int, np.ndarray]:
        """By tensor, which elements it holds."""
        found = {i: np.zeros(spec.numel, np.bool_) for i, spec in enumerate(schema.tensors)}
        for r in self.layout.rectangles:
            as_strided(found[r.tensor][r.source_offset :], r.sizes, r.source_strides)[...] = True
        return found


def load(
    layout: RankLayout, weights: Weights, schema: Schema, device: torch.device | None
) -> Shard:
    rng = np.random.default_rng(layout.rank)
    storages = {}
    for name, spec in layout.parameters.items():
        tensor = torch.empty(spec.n_elements, dtype=TORCH[spec.dtype])
        bits_of(tensor)[...] = rng.integers(0, 200, spec.n_elements)
        storages[name] = tensor
    shard = Shard(layout, storages)
    for here, there in shard.pairs(weights, schema):
        here[...] = there
    if device is not None:
        shard.storages = {name: tensor.to(device) for name, tensor in storages.items()}
    return shard


def random_weights(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Weights:
    rng = np.random.default_rng(5)
    return {
        name: torch.from_numpy(0.05 * rng.standard_normal(shape, dtype=np.float32)).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }
