"""Lanes of the `hazard` codec on a GPU, decoded against the weights that it holds.

It also runs on CPU tensors in Triton's interpreter, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import vllm_delta_kernels as kernels
from vllm_delta.codec.hazard import Lane, Part, Tile, tables
from vllm_delta.codec.hazard.lanes import PROBLEMS, lane_seed, sort_bands, to_indices
from vllm_delta.codec.hazard.model import Tables
from vllm_delta.codec.order import SIGNED, Signed
from vllm_delta.errors import FormatError
from vllm_delta_kernels.decode import ALIGNMENT

Gather = Callable[[int, Tile, int, int, torch.Tensor], bool]

GATHERED_BYTES = 256 << 20
_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class GpuLanes:
    """Decodes lanes where the weights are; a `codec.LaneDecoder`.

    Weights are read through `gather` and never written. Work is queued on a stream of its own
    behind what the caller's stream holds, so forward steps go on beside it; whoever changes the
    weights must not do so meanwhile. `decode` returns when everything is on the host. One call at
    a time, from any thread.

    Memory on the device: the copies of weights, and for their lanes the words and 4 bytes and a
    step for each change.

    Args:
        gather: ``gather(tensor, tile, start, n, out)`` copies n elements of a tile of the tensor,
            counted row by row from `start` on, as they are before the change, to `out`: signed
            integers of the type's width, [n], contiguous, on the device; on the current stream.
            False: this rank does not want the lane.
        device: a CPU works in Triton's interpreter only.
        gathered_bytes: copies held at a time, or one lane where that takes more (16 MiB at most).
    """

    def __init__(
        self, gather: Gather, device: torch.device, *, gathered_bytes: int = GATHERED_BYTES
    ) -> None:
        self._gather = gather
        self._device = device
        self._gathered_bytes = gathered_bytes
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        with self._queue():
            self._constants = tuple(
                self._upload(array.astype(np.int32))
                for array in (tables.POSITIONS, tables.NODE_OF, tables.STEPS)
            )

    def decode(self, parts: Sequence[Part]) -> list[tuple[Signed, Signed]]:
        """See `LaneDecoder.decode`: of the lanes that `gather` wants."""
        found: list[_Found] = [_Found(part) for part in parts]
        with self._queue():
            for itemsize in sorted({part.spec.itemsize for part in parts}):
                some = [one for one in found if one.part.spec.itemsize == itemsize]
                self._decode(some, itemsize)
        return [one.finish() for one in found]

    def _decode(self, found: Sequence[_Found], itemsize: int) -> None:
        """Lanes of one width, batch by batch."""
        sizes = [_aligned(lane.n_elements * itemsize) for one in found for lane in one.part.lanes]
        room = min(sum(sizes), max(self._gathered_bytes, *sizes, 0)) if sizes else 0
        buffer = torch.empty(room, dtype=torch.uint8, device=self._device)
        batch = _Batch()
        used = 0
        for one in found:
            for lane in one.part.lanes:
                n_bytes = lane.n_elements * itemsize
                if used + n_bytes > room:
                    self._run(batch, itemsize)
                    batch, used = _Batch(), 0
                out = buffer[used : used + n_bytes].view(_TYPES[itemsize])
                tensor, n = one.part.tensor, lane.n_elements
                if self._gather(tensor, lane.tile, lane.start, n, out):
                    batch.add(one, lane, out.data_ptr())
                    used += _aligned(n_bytes)
        self._run(batch, itemsize)

    def _run(self, batch: _Batch, itemsize: int) -> None:
        """Decodes a batch and hands its outputs to the parts."""
        if not batch.lanes:
            return
        order = np.argsort([-lane.n_elements for _, lane in batch.lanes], kind="stable")
        nodes, node_of, magnitudes = self._constants
        positions = self._empty(batch.n_changes, torch.int32)
        steps = self._empty(batch.n_changes, _TYPES[itemsize])
        status = self._empty(len(order), torch.int32)
        kernels.decode_lanes(
            self._upload(np.array(batch.rows, np.int64)[order]),  # the longest begins first
            self._upload(np.concatenate(batch.words)),
            nodes,
            node_of,
            self._upload(np.concatenate([one.rates for one in batch.tables]).astype(np.int32)),
            self._upload(np.concatenate([one.scales for one in batch.tables]).astype(np.int32)),
            magnitudes,
            positions,
            steps,
            status,
            width=itemsize,
        )
        problems = np.empty(len(order), np.int32)
        problems[order] = status.cpu().numpy()
        batch.hand_out(positions.cpu().numpy(), steps.cpu().numpy(), problems)

    def _empty(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device=self._device)

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array's bits on the device, as signed integers."""
        host = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}"))
        if self._stream is None:
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    @contextmanager
    def _queue(self) -> Iterator[None]:
        """Makes the own stream the current one, behind the caller's."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield


class _Found:
    """The changes of one part's lanes that are wanted."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._lanes: list[Lane] = []
        self._indices: list[Signed] = []
        self._steps: list[Signed] = []

    def add(self, lane: Lane, positions: Signed, steps: Signed) -> None:
        indices = positions.astype(self.part.index_type)
        to_indices(indices, self.part.spec, lane)
        self._lanes.append(lane)
        self._indices.append(indices)
        self._steps.append(steps)

    def finish(self) -> tuple[Signed, Signed]:
        if not self._lanes:
            spec = self.part.spec
            return np.empty(0, self.part.index_type), np.empty(0, SIGNED[spec.itemsize])
        indices, steps = np.concatenate(self._indices), np.concatenate(self._steps)
        sort_bands(indices, steps, self._lanes)
        return indices, steps


class _Batch:
    """Lanes of one width that are decoded together, and the kernel's rows for them."""

    def __init__(self) -> None:
        self.lanes: list[tuple[_Found, Lane]] = []
        self.rows: list[list[int]] = []
        self.words: list[npt.NDArray[np.uint32]] = []
        self.n_changes = 0
        self._n_words = 0
        self._n_entries = 0
        self._models: dict[int, tuple[int, Tables]] = {}

    @property
    def tables(self) -> list[Tables]:
        return [one for _, one in self._models.values()]

    def add(self, found: _Found, lane: Lane, address: int) -> None:
        part = found.part
        model = part.tables
        if id(model) not in self._models:
            self._models[id(model)] = self._n_entries, model
            self._n_entries += model.rates.size
        entry, _ = self._models[id(model)]
        seed = lane_seed(part.tensor, lane.number)
        where = [address, lane.n_elements, self._n_words, lane.n_words]
        self.rows.append([*where, lane.n_changes, seed, self.n_changes, entry, model.shift])
        self.lanes.append((found, lane))
        self.words.append(part.words_of(lane))
        self._n_words += lane.n_words
        self.n_changes += lane.n_changes

    def hand_out(self, positions: Signed, steps: Signed, problems: Signed) -> None:
        """Gives each part what its lanes hold.

        Raises:
            FormatError: a lane has a problem.
        """
        at = 0
        for (found, lane), problem in zip(self.lanes, problems.tolist(), strict=True):
            if problem:
                name = found.part.spec.name
                raise FormatError(PROBLEMS[problem], name=name, lane=lane.number)
            some = slice(at, at + lane.n_changes)
            found.add(lane, positions[some], steps[some])
            at += lane.n_changes


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
