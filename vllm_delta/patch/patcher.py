"""`Patcher`: one rank's weights, changed in place by decoded deltas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from vllm_delta.codec import Change
from vllm_delta.codec.order import Signed
from vllm_delta.errors import LayoutError
from vllm_delta.fingerprint import MASK64, U64, coefficients, tensor_seeds
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import I64, RankLayout, Rectangle
from vllm_delta.patch.cpu import CpuBackend
from vllm_delta.patch.places import N_COLS, N_ROWS, RECTANGLE, Places, Run
from vllm_delta.patch.staged import (
    Backend,
    Builder,
    Patch,
    Piece,
    Storage,
    Sums,
    Totals,
    Walk,
    split_by_width,
)

_CHUNK = 1 << 15
"""Indices mapped at a time. Bounds what staging takes beside the patch to about two megabytes."""


class Patcher:
    """Patches the parameters of one rank in place, by their raw bits.

    Nothing is ever re-bound: CUDA graphs and the engine's own references keep their addresses. A
    parameter whose storage has moved since construction is refused.

    `stage` may run on any thread beside the engine's forward steps; it reads no weight. `scan`
    and `check` read weights, `apply` and `rollback` change them: call them where no forward step
    runs, one at a time.

    Args:
        schema: the checkpoint's tensors.
        layout: where this rank holds them.
        storages: every parameter that the layout names: its tensor, as the engine uses it.
        backend: what runs the loops; by default the one for the tensors' device.

    Raises:
        LayoutError: the layout does not fit the schema or the tensors.
    """

    def __init__(
        self,
        schema: Schema,
        layout: RankLayout,
        storages: Mapping[str, torch.Tensor],
        *,
        backend: Backend | None = None,
    ) -> None:
        if layout.schema_digest != schema.digest:
            raise LayoutError("the layout is of another checkpoint", rank=layout.rank)
        self.schema = schema
        self.layout = layout
        self.places = Places(schema, layout)
        self._tensors = {name: _tensor(storages, name) for name in layout.parameters}
        self._storages = {name: _storage(tensor) for name, tensor in self._tensors.items()}
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self._walks = [self._walk(i, r) for i, r in enumerate(layout.rectangles)]
        self._by_tensor: dict[int, list[Walk]] = {}
        for walk in self._walks:
            self._by_tensor.setdefault(walk.rectangle.tensor, []).append(walk)
        self._backend = backend or _backend_for(self._tensors.values())
        self._backend.warm(walk.storage for walk in self._walks)

    @property
    def device(self) -> torch.device | None:
        """Where `gather` wants tensors; None: it wants arrays in main memory."""
        return self._backend.device

    def scan(self) -> dict[int, int]:
        """Fingerprints the resident bits, all of them.

        Returns:
            rectangle index to its part of the tensor's fingerprint.

        Raises:
            LayoutError: a parameter's storage has moved.
        """
        self._require_in_place()
        return self._backend.scan(self._walks)

    def gather(self, run: Run, out: Any) -> int:
        """Copies the resident bits of a run, as far as this rank holds it. Any thread, as long as
        nobody changes the weights meanwhile; forward steps may go on.

        Args:
            out: [run.n], contiguous: unsigned in main memory, or signed integers on the device
                that the weights are on; what the rank does not hold stays as it is.

        Returns:
            the number of elements copied.

        Raises:
            LayoutError: a parameter's storage has moved.
        """
        self._require_in_place()
        found = self.places.crossings(run)
        names = [self.layout.rectangles[index].parameter for index in found[:, RECTANGLE]]
        self._backend.gather(found, [self._tensors[name] for name in names], out)
        return int((found[:, N_ROWS] * found[:, N_COLS]).sum())

    def stage(self, changes: Iterable[Change]) -> Patch:
        """Maps a decoded delta to this rank's storages. Writes no weight.

        Memory: at most 14 bytes for each change of a 16-bit weight that this rank holds (offset
        4, step 1 or 2, coefficient 8), the weights' own bytes for tensors that are replaced, and
        about two megabytes. Changes are consumed one by one.

        Args:
            changes: valid for the schema, as `codec.decode` yields them; not modified.
        """
        builder = self._backend.builder()
        entries: list[tuple[int, int, int]] = []
        nnz = 0
        for change in changes:
            spec = self.schema.tensors[change.tensor]
            walks = self._by_tensor.get(change.tensor, [])
            if change.indices is not None and change.steps is not None:
                nnz += _stage_steps(builder, spec, walks, change)
            elif change.bits is not None:
                nnz += _stage_bits(builder, spec, walks, change)
            else:
                raise ValueError(f"the change of {spec.name!r} has neither indices nor bits")
            entries.append((change.tensor, change.touched, change.target))
            del change  # or it would live until the next one is decoded
        return Patch(tuple(entries), nnz, builder.finish())

    def check(self, patch: Patch) -> Sums:
        """Reads what the patch touches and computes what it would become. Writes nothing.

        Returns:
            sums for the rectangles that the patch touches.

        Raises:
            LayoutError: a parameter's storage has moved.
        """
        self._require_in_place()
        totals = patch.plan.check()
        return Sums({i: old for i, (old, _) in totals.items()}, _change(totals))

    def apply(self, patch: Patch) -> dict[int, int]:
        """Changes the weights.

        Tensors that are replaced change places with the staged bits.

        Returns:
            the change per rectangle, computed from the bits that were really there.

        Raises:
            LayoutError: a parameter's storage has moved; nothing was written.
            ValueError: the patch is applied already.
        """
        return self._write(patch, forward=True)

    def rollback(self, patch: Patch) -> dict[int, int]:
        """Takes an applied patch back, bit for bit.

        Returns:
            the change per rectangle, as `apply` does.

        Raises:
            LayoutError: a parameter's storage has moved; nothing was written.
            ValueError: the patch is not applied.
        """
        return self._write(patch, forward=False)

    def _write(self, patch: Patch, *, forward: bool) -> dict[int, int]:
        if patch.applied == forward:
            raise ValueError("the patch is applied already" if forward else "it is not applied")
        self._require_in_place()
        patch.applied = forward
        return _change(patch.plan.apply(forward=forward))

    def _require_in_place(self) -> None:
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() != self._addresses[name]:
                raise LayoutError(
                    "a parameter's storage has moved; patches need weights that stay in place "
                    "(no sleep mode, no offloading, no reload that re-creates parameters)",
                    parameter=name,
                )

    def _walk(self, index: int, rectangle: Rectangle) -> Walk:
        spec = self.schema.tensors[rectangle.tensor]
        storage = self._storages[rectangle.parameter]
        held = self.layout.parameters[rectangle.parameter]
        facts = {"name": spec.name, "parameter": rectangle.parameter}
        if held.dtype != spec.dtype or storage.itemsize != spec.itemsize:
            raise LayoutError(
                "the engine holds the tensor in another type; serve it in the checkpoint's",
                **facts,
                expected=spec.dtype,
                actual=held.dtype,
            )
        if rectangle.target.stop > min(storage.n_elements, held.n_elements):
            raise LayoutError("the layout reaches past the parameter's storage", **facts)
        if rectangle.source.stop > spec.numel:
            raise LayoutError("the layout reaches past the checkpoint's tensor", **facts)
        row_seed, col_seed = tensor_seeds(spec.name)
        return Walk(index, rectangle, storage, spec.n_cols, row_seed, col_seed)


def _stage_steps(builder: Builder, spec: TensorSpec, walks: list[Walk], change: Change) -> int:
    assert change.indices is not None
    assert change.steps is not None
    n = 0
    for start in range(0, change.indices.size, _CHUNK):
        indices = change.indices[start : start + _CHUNK]
        steps = change.steps[start : start + _CHUNK]
        for walk in walks:
            positions, offsets = walk.rectangle.locate(indices)
            if not positions.size:
                continue
            n += positions.size
            mine = slice(None) if positions.size == indices.size else positions
            factors = coefficients(spec, indices[mine])
            for which, part in split_by_width(steps[mine]):
                builder.add_steps(_piece(walk, offsets[which], part, factors[which]))
    return n


def _piece(walk: Walk, offsets: I64, steps: Signed, factors: U64) -> Piece:
    n_elements = walk.storage.n_elements
    assert offsets.min() >= 0, walk.rectangle
    assert offsets.max() < n_elements, walk.rectangle
    kind = np.int32 if n_elements < 1 << 31 else np.int64
    return Piece(walk.index, walk.storage, offsets.astype(kind), steps, factors)


def _stage_bits(builder: Builder, spec: TensorSpec, walks: list[Walk], change: Change) -> int:
    bits = change.bits
    assert bits is not None
    if bits.size != spec.numel or bits.itemsize != spec.itemsize:
        raise ValueError(f"{bits.size} elements of {bits.itemsize} bytes for {spec}")
    for walk in walks:
        rectangle = walk.rectangle
        strides = [stride * bits.itemsize for stride in rectangle.source_strides]
        first = bits[rectangle.source_offset :]
        view = np.lib.stride_tricks.as_strided(first, rectangle.sizes, strides, writeable=False)
        builder.add_bits(walk, np.array(view, order="C").reshape(-1))
    return sum(walk.rectangle.numel for walk in walks)


def _change(totals: Totals) -> dict[int, int]:
    return {index: (new - old) & MASK64 for index, (old, new) in totals.items()}


def _tensor(storages: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = storages.get(name)
    if tensor is None:
        raise LayoutError("a parameter of the layout is not in the model", parameter=name)
    return tensor


def _storage(tensor: torch.Tensor) -> Storage:
    storage = tensor.untyped_storage()
    itemsize = tensor.element_size()
    return Storage(storage.data_ptr(), storage.nbytes() // itemsize, itemsize)


def _backend_for(tensors: Iterable[torch.Tensor]) -> Backend:
    devices = {tensor.device for tensor in tensors}
    kinds = {device.type for device in devices}
    if kinds <= {"cpu"}:
        return CpuBackend()
    if kinds == {"cuda"} and len(devices) == 1:
        from vllm_delta.patch.gpu import GpuBackend  # triton, which a CPU does without

        return GpuBackend(devices.pop())
    raise LayoutError(
        "weights must be in main memory, or all on one CUDA device",
        devices=sorted(map(str, devices)),
    )
