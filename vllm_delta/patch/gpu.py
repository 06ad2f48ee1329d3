"""The backend for weights on a GPU: the kernels of `vllm_delta_kernels`, one launch for a patch.

It also runs on CPU tensors in Triton's interpreter, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import vllm_delta_kernels as kernels
from vllm_delta.codec.order import Unsigned
from vllm_delta.fingerprint import MASK64
from vllm_delta.patch.grids import grids
from vllm_delta.patch.staged import Piece, Storage, Totals, Walk
from vllm_delta_kernels.fingerprint import LANES

Kind = tuple[int, int, int]
"""Bytes of a weight, of an offset and of a step."""

_ROWS = 128
"""Rows of a job."""


class GpuBackend:
    """Launches on the current stream of the device, and reads the sums back.

    Staged arrays are uploaded on a stream of their own, from pinned memory. The kernels wait for
    them on the device. Every call returns when its sums are on the host, so nothing it used is
    still in use.

    Args:
        device: where the weights are. A CPU works in Triton's interpreter only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._uploads = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._walks: Sequence[Walk] = ()
        self._jobs: list[tuple[int, torch.Tensor]] = []

    def warm(self, storages: Iterable[Storage]) -> None:
        closed, n_bad = self.zeros(1), self.zeros(1)
        sums = self.zeros(1, 2, dtype=torch.int64)
        for itemsize in sorted({storage.itemsize for storage in storages}):
            jobs = self.zeros(1, 14, dtype=torch.int64)
            with self.on_device():
                kernels.scan_weights(jobs, sums, width=itemsize)
                kernels.check_bits(jobs, sums, width=itemsize)
                kernels.swap_bits(jobs, closed, sums, width=itemsize)
            for step_bytes in {1, itemsize} if itemsize <= 4 else ():
                table = self.zeros(1, 7, dtype=torch.int64)
                kind = {"width": itemsize, "offset_bytes": 4, "step_bytes": step_bytes}
                with self.on_device():
                    kernels.check_patch(table, sums, n_bad, **kind)
                    kernels.scatter_patch(table, closed, sums, n_bad, **kind, forward=True)

    def scan(self, walks: Sequence[Walk]) -> dict[int, int]:
        if self._walks is not walks:
            places = {walk.index: place for place, walk in enumerate(walks)}
            self._jobs = self.jobs([(walk, 0) for walk in walks], places)
            self._walks = walks
        sums = self.zeros(len(walks), 2, dtype=torch.int64)
        with self.on_device():
            for itemsize, jobs in self._jobs:
                kernels.scan_weights(jobs, sums, width=itemsize)
        found = sums[:, 0].cpu().tolist()
        return {walk.index: old & MASK64 for walk, old in zip(walks, found, strict=True)}

    def gather(
        self, grids: npt.NDArray[np.int64], tensors: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        with self.on_device():
            for grid, tensor in zip(grids.tolist(), tensors, strict=True):
                _, offset, row_stride, col_stride, n_rows, n_cols, at, pitch, step = grid
                whole = torch.empty(0, dtype=out.dtype, device=tensor.device)
                whole.set_(tensor.untyped_storage())
                source = whole.as_strided((n_rows, n_cols), (row_stride, col_stride), offset)
                base = out.storage_offset() + at
                out.as_strided((n_rows, n_cols), (pitch, step), base).copy_(source)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def builder(self) -> GpuPlan:
        return GpuPlan(self)

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array's bits on the device, as signed integers; the array itself on a CPU."""
        host = torch.from_numpy(array.view(f"i{array.itemsize}"))
        if self._uploads is None:
            return host
        with torch.cuda.stream(self._uploads):
            return host.pin_memory().to(self.device, non_blocking=True)

    def uploaded(self) -> Callable[[], None]:
        """A call that makes the current stream wait for all uploads until now."""
        if self._uploads is None:
            return lambda: None
        event = self._uploads.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def jobs(
        self, walks: Iterable[tuple[Walk, int]], places: dict[int, int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Per bytes of a weight, the kernels' table for walks with the addresses of buffers.

        Args:
            places: rectangle index to the row of the sums that it counts to.
        """
        rows: dict[int, list[list[int]]] = {}
        for walk, buffer in walks:
            itemsize = walk.storage.itemsize
            seeds = _signed(walk.row_seed), _signed(walk.col_seed)
            for whole in grids(walk.rectangle, walk.n_cols):
                for g in whole.cut(_ROWS, LANES):
                    address = walk.storage.address + g.offset * itemsize
                    source = g.row, g.row_step, g.col, g.col_step, g.n_rows, g.n_cols
                    row = [address, g.row_stride, g.col_stride, *source, *seeds]
                    row += [places[walk.index], buffer + g.at * itemsize, g.pitch]
                    rows.setdefault(itemsize, []).append(row)
        return [(n, self.upload(np.array(table, np.int64))) for n, table in rows.items()]


class GpuPlan:
    """A patch on the device, being built and then run. One table per kind of piece."""

    def __init__(self, backend: GpuBackend) -> None:
        self.n_bytes = 0
        self._backend = backend
        self._kept: list[torch.Tensor] = []
        self._rows: dict[Kind, list[npt.NDArray[np.int64]]] = {}
        self._bits: list[tuple[Walk, int]] = []
        self._places: dict[int, int] = {}

    def add_steps(self, piece: Piece) -> None:
        parts = piece.offsets, piece.steps, piece.coefficients
        addresses = [self._keep(part) for part in parts]
        n = piece.offsets.size
        starts = np.arange(0, n, kernels.BLOCK)
        rows = np.empty((len(starts), 7), np.int64)
        rows[:, 0] = piece.storage.address
        rows[:, 1] = piece.storage.n_elements
        for column, (address, part) in enumerate(zip(addresses, parts, strict=True), 2):
            rows[:, column] = address + starts * part.itemsize
        rows[:, 5] = np.minimum(n - starts, kernels.BLOCK)
        rows[:, 6] = self._place(piece.index)
        kind = piece.storage.itemsize, piece.offsets.itemsize, piece.steps.itemsize
        self._rows.setdefault(kind, []).append(rows)

    def add_bits(self, walk: Walk, bits: Unsigned) -> None:
        self._place(walk.index)
        self._bits.append((walk, self._keep(bits)))

    def finish(self) -> GpuPlan:
        upload = self._backend.upload
        self._tables = {kind: upload(np.concatenate(rows)) for kind, rows in self._rows.items()}
        self._jobs = self._backend.jobs(self._bits, self._places)
        self._rows.clear()
        self._wait = self._backend.uploaded()
        return self

    def check(self) -> Totals:
        def launch(sums: torch.Tensor, n_bad: torch.Tensor) -> None:
            for kind, table in self._tables.items():
                kernels.check_patch(table, sums, n_bad, **_bytes(kind))
            for itemsize, jobs in self._jobs:
                kernels.check_bits(jobs, sums, width=itemsize)

        return self._run(launch)

    def apply(self, *, forward: bool) -> Totals:
        def launch(sums: torch.Tensor, n_bad: torch.Tensor) -> None:
            gate = self._backend.zeros(1).fill_(1)
            for kind, table in self._tables.items():
                kernels.scatter_patch(table, gate, sums, n_bad, **_bytes(kind), forward=forward)
            for itemsize, jobs in self._jobs:
                kernels.swap_bits(jobs, gate, sums, width=itemsize)

        return self._run(launch)

    def _run(self, launch: Callable[[torch.Tensor, torch.Tensor], None]) -> Totals:
        sums = self._backend.zeros(max(len(self._places), 1), 2, dtype=torch.int64)
        n_bad = self._backend.zeros(1)
        self._wait()
        with self._backend.on_device():
            launch(sums, n_bad)
        found = sums.cpu().tolist()
        assert not int(n_bad), "an offset is outside of its storage, though staging checked it"
        return {
            index: (found[place][0] & MASK64, found[place][1] & MASK64)
            for index, place in sorted(self._places.items())
        }

    def _keep(self, array: npt.NDArray[Any]) -> int:
        tensor = self._backend.upload(array)
        self._kept.append(tensor)
        self.n_bytes += array.nbytes
        return tensor.data_ptr()

    def _place(self, index: int) -> int:
        return self._places.setdefault(index, len(self._places))


def _bytes(kind: Kind) -> dict[str, int]:
    return dict(zip(("width", "offset_bytes", "step_bytes"), kind, strict=True))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
