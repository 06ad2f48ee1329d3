"""Traces of consecutive weights: a base and what each next step changed, seen in two ways.

A trace is a folder: `v0.safetensors` holds the base, whole; `v1`, `v2`, … what each next step
changed, as `<name>:indices` (flat, ascending) and `<name>:values` (the new bits, unsigned).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from vllm_delta.codec.order import UNSIGNED, Unsigned
from vllm_delta.format import Schema, TensorSpec

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class View:
    """One way to cut the same weights into tensors.

    Attributes:
        name: "tensors", as they are, or "large", those of one type in one.
        schema: of the tensors in this view.
        types: of each tensor; see `type_of`.
        base: unsigned[numel] bits of each tensor; both views alias the same memory.
        target: the same after the step.
    """

    name: str
    schema: Schema
    types: tuple[str, ...]
    base: tuple[Unsigned, ...]
    target: tuple[Unsigned, ...]


@dataclass(frozen=True)
class Step:
    """One step of a trace. Valid until the next one is asked for, which moves the weights on."""

    trace: str
    number: int
    n_changed: int
    views: tuple[View, View]

    @property
    def changed_percent(self) -> float:
        return 100 * self.n_changed / self.views[0].schema.n_weights


def find_traces(folder: Path) -> list[Path]:
    """The traces in `folder`: itself, or the folders in it.

    Raises:
        FileNotFoundError: there is none.
    """
    if (folder / "v0.safetensors").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/v0.safetensors"))
    if not found:
        raise FileNotFoundError(f"no v0.safetensors in {folder} or in a folder in it")
    return found


def read_steps(folder: Path) -> Iterator[Step]:
    """The steps of one trace, in order. Memory: the weights twice."""
    weights = _Weights(folder / "v0.safetensors")
    for number in count(1):
        file = folder / f"v{number}.safetensors"
        if not file.is_file():
            return
        n_changed = weights.advance(file)
        yield Step(folder.resolve().name, number, n_changed, weights.views)


def type_of(spec: TensorSpec) -> str:
    """A checkpoint name without layer and expert numbers; all norms are one type.

    What is not bf16 is a type of its own, so that tensors of one type can be one tensor.
    """
    name = "norm" if "norm" in spec.name else _NUMBER.sub("", spec.name)
    return name if spec.dtype == "BF16" else f"{name} {spec.dtype}"


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the concatenation of its type."""

    spec: TensorSpec
    type: str
    start: int

    def part(self, whole: dict[str, Unsigned]) -> Unsigned:
        return whole[self.type][self.start : self.start + self.spec.numel]


class _Weights:
    """Base and target of the step at hand, same-type tensors next to one another."""

    def __init__(self, file: Path) -> None:
        with safe_open(file, framework="pt") as data:
            specs = []
            for name in data.keys():  # noqa: SIM118 (it is no mapping)
                part = data.get_slice(name)
                specs.append(TensorSpec(name, part.get_dtype(), tuple(part.get_shape())))
            self._places = _arrange(Schema.of(specs))
            large = _large_schema(self._places)
            self._base = {s.name: np.empty(s.numel, UNSIGNED[s.itemsize]) for s in large.tensors}
            for place in self._places.values():
                place.part(self._base)[:] = _bits(data.get_tensor(place.spec.name))
        self._target = {name: bits.copy() for name, bits in self._base.items()}
        self._changes: list[tuple[_Place, np.ndarray, Unsigned]] = []
        self.views = (self._as_they_are(), self._large(large))

    def advance(self, file: Path) -> int:
        """Make the target the base, apply the file's step to the target; how many changed."""
        for place, indices, values in self._changes:
            place.part(self._base)[indices] = values
        self._changes, n_changed = [], 0
        with safe_open(file, framework="pt") as data:
            for key in data.keys():  # noqa: SIM118
                name, _, what = key.rpartition(":")
                if what != "indices":
                    continue
                place, indices = self._places[name], data.get_tensor(key).numpy()
                values, part = _bits(data.get_tensor(f"{name}:values")), place.part(self._target)
                n_changed += int(np.count_nonzero(part[indices] != values))
                part[indices] = values
                self._changes.append((place, indices, values))
        return n_changed

    def _as_they_are(self) -> View:
        places = self._places.values()
        return View(
            "tensors",
            Schema(tuple(place.spec for place in places)),
            tuple(place.type for place in places),
            tuple(place.part(self._base) for place in places),
            tuple(place.part(self._target) for place in places),
        )

    def _large(self, schema: Schema) -> View:
        names = tuple(spec.name for spec in schema.tensors)
        base = tuple(self._base[name] for name in names)
        return View("large", schema, names, base, tuple(self._target[name] for name in names))


def _arrange(schema: Schema) -> dict[str, _Place]:
    """A place for every tensor by name, in schema order."""
    sizes: dict[str, int] = {}
    places = {}
    for spec in schema.tensors:
        kind = type_of(spec)
        start = sizes.get(kind, 0)
        places[spec.name] = _Place(spec, kind, start)
        sizes[kind] = start + spec.numel
    return places


def _large_schema(places: dict[str, _Place]) -> Schema:
    """One tensor per type: the rows of all, when they have rows of one length; else one row."""
    members: dict[str, list[TensorSpec]] = {}
    for place in places.values():
        members.setdefault(place.type, []).append(place.spec)
    specs = []
    for kind, parts in members.items():
        numel, n_cols = sum(spec.numel for spec in parts), parts[0].n_cols
        have_rows = all(len(spec.shape) > 1 and spec.n_cols == n_cols for spec in parts)
        shape = (numel // n_cols, n_cols) if have_rows else (numel,)
        specs.append(TensorSpec(kind, parts[0].dtype, shape))
    return Schema.of(specs)


def _bits(tensor: torch.Tensor) -> Unsigned:
    """unsigned[numel] bits of a tensor, flat; aliases it."""
    itemsize = tensor.element_size()
    bits = tensor.contiguous().view(_TORCH_BITS[itemsize]).flatten().numpy()
    return bits.view(UNSIGNED[itemsize])
