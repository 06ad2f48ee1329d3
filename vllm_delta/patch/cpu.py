"""The backend for weights in main memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta.codec import workers
from vllm_delta.codec.order import SIGNED, UNSIGNED, Unsigned
from vllm_delta.fingerprint import U64
from vllm_delta.patch import loops
from vllm_delta.patch.pages import use_huge_pages
from vllm_delta.patch.staged import Piece, Storage, Totals, Walk

Table = npt.NDArray[np.int64]
Kind = tuple[type[Any], type[Any], type[Any]]

_JOB = 1 << 20
"""Elements of a rectangle that one job walks."""
_WORTH_A_THREAD = 1 << 14
_MAX_THREADS = 8


class CpuBackend:
    """Runs the numba loops on the calling thread and, where the process may, on a few more.

    Args:
        n_threads: threads to use; by default what torch uses, at most the cores that the calling
            thread may run on.
    """

    def __init__(self, n_threads: int | None = None) -> None:
        allowed = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MAX_THREADS)
        self.n_threads = allowed if n_threads is None else n_threads
        self.device: torch.device | None = None

    def warm(self, storages: Iterable[Storage]) -> None:
        unique = set(storages)
        for storage in unique:
            use_huge_pages(storage.address, storage.n_elements * storage.itemsize)
        self._compile({storage.itemsize for storage in unique})

    def _compile(self, itemsizes: set[int]) -> None:
        walks = np.empty((0, loops.FIRST_DIM), np.int64)
        jobs = np.empty((0, 3), np.int64)
        for itemsize in sorted(itemsizes):
            bits = np.empty(0, UNSIGNED[itemsize])
            loops.walk_jobs(walks, jobs, bits, loops.SCAN, _no_sums(0))
            if itemsize <= 4:
                nothing = np.empty((0, 9), np.int64)
                loops.gather_grids(nothing, np.empty(0, np.int64), bits)
                for step in {SIGNED[1], SIGNED[itemsize]}:
                    self.run_pieces((np.uint32, step, UNSIGNED[itemsize]), _no_pieces(), 1, False)

    def scan(self, walks: Sequence[Walk]) -> dict[int, int]:
        plans = _by_width([(walk, 0) for walk in walks])
        found: dict[int, int] = {}
        for itemsize, (table, jobs, owners) in plans.items():
            sums = self.run_walks(itemsize, table, jobs, loops.SCAN)
            found |= {index: old for index, (old, _) in _totals([(owners, sums)]).items()}
        return found

    def gather(self, grids: Table, tensors: Sequence[torch.Tensor], out: Any) -> None:
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        loops.gather_grids(grids, np.array(addresses, np.int64), out)

    def builder(self) -> CpuPlan:
        return CpuPlan(self)

    def run_pieces(self, kind: Kind, pieces: Table, sign: int, write: bool) -> U64:
        """Sums of each piece: uint64[n, 2]."""
        sums = _no_sums(len(pieces))
        kinds = [np.empty(0, element) for element in kind]

        def run(part: slice) -> None:
            loops.run_pieces(pieces[part], *kinds, np.int64(sign), write, sums[part])

        self._spread(run, pieces[:, loops.N_CHANGES])
        return sums

    def run_walks(self, itemsize: int, walks: Table, jobs: Table, mode: int) -> U64:
        """Sums of each job: uint64[n, 2]."""
        sums = _no_sums(len(jobs))
        bits = np.empty(0, UNSIGNED[itemsize])

        def run(part: slice) -> None:
            loops.walk_jobs(walks, jobs[part], bits, mode, sums[part])

        self._spread(run, jobs[:, loops.STOP] - jobs[:, loops.START])
        return sums

    def _spread(self, run: Callable[[slice], None], work: Table) -> None:
        """Runs over all rows of a table, in as many parts of equal work as there are threads."""
        ends = np.cumsum(work)
        total = int(ends[-1]) if len(ends) else 0
        n = max(1, min(self.n_threads, total // _WORTH_A_THREAD, len(work)))
        cuts = [int(np.searchsorted(ends, total * i // n, "right")) for i in range(1, n)]
        parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, len(work)], strict=True)]
        workers.run(run, parts, n)


class CpuPlan:
    """A patch in main memory, being built and then run. One table per kind of piece."""

    def __init__(self, backend: CpuBackend) -> None:
        self.n_bytes = 0
        self._backend = backend
        self._pieces: list[Piece] = []
        self._bits: list[tuple[Walk, Unsigned]] = []

    def add_steps(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.n_bytes += piece.n_bytes

    def add_bits(self, walk: Walk, bits: Unsigned) -> None:
        self._bits.append((walk, bits))
        self.n_bytes += bits.nbytes

    def finish(self) -> CpuPlan:
        rows: dict[Kind, list[Piece]] = {}
        for piece in self._pieces:
            offset = np.uint32 if piece.offsets.itemsize == 4 else np.uint64
            kind = (offset, piece.steps.dtype.type, UNSIGNED[piece.storage.itemsize])
            rows.setdefault(kind, []).append(piece)
        self._tables = {kind: _piece_table(pieces) for kind, pieces in rows.items()}
        self._walks = _by_width([(walk, bits.ctypes.data) for walk, bits in self._bits])
        return self

    def check(self) -> Totals:
        return self._run(1, write=False)

    def apply(self, *, forward: bool) -> Totals:
        return self._run(1 if forward else -1, write=True)

    def _run(self, sign: int, *, write: bool) -> Totals:
        backend, sums = self._backend, []
        for kind, (pieces, owners) in self._tables.items():
            sums.append((owners, backend.run_pieces(kind, pieces, sign, write)))
        mode = loops.SWAP if write else loops.CHECK
        for itemsize, (walks, jobs, owners) in self._walks.items():
            sums.append((owners, backend.run_walks(itemsize, walks, jobs, mode)))
        return _totals(sums)


def _no_sums(n: int) -> U64:
    return np.zeros((n, 2), np.uint64)


def _no_pieces() -> Table:
    return np.empty((0, loops.N_PIECE_COLUMNS), np.int64)


def _piece_table(pieces: Sequence[Piece]) -> tuple[Table, Table]:
    """The loops' table of pieces, and which rectangle each is of."""
    table = np.array(
        [
            (
                piece.storage.address,
                piece.storage.n_elements,
                piece.offsets.ctypes.data,
                piece.steps.ctypes.data,
                piece.coefficients.ctypes.data,
                piece.offsets.size,
            )
            for piece in pieces
        ],
        np.int64,
    )
    return table, np.array([piece.index for piece in pieces], np.int64)


def _by_width(walks: Sequence[tuple[Walk, int]]) -> dict[int, tuple[Table, Table, Table]]:
    """Per itemsize: the loops' tables of walks and jobs, and which rectangle each job is of."""
    groups: dict[int, list[tuple[Walk, int]]] = {}
    for walk, buffer in walks:
        groups.setdefault(walk.storage.itemsize, []).append((walk, buffer))
    return {itemsize: _walk_tables(group) for itemsize, group in groups.items()}


def _walk_tables(walks: Sequence[tuple[Walk, int]]) -> tuple[Table, Table, Table]:
    n_dims = max(len(walk.rectangle.dims) for walk, _ in walks)
    table = np.zeros((len(walks), loops.FIRST_DIM + 3 * n_dims), np.int64)
    jobs: list[tuple[int, int, int]] = []
    for row, (walk, buffer) in enumerate(walks):
        rectangle = walk.rectangle
        head = [walk.storage.address, walk.storage.n_elements, walk.n_cols]
        head += [_signed(walk.row_seed), _signed(walk.col_seed)]
        head += [rectangle.source_offset, rectangle.target_offset, buffer, len(rectangle.dims)]
        head += [number for dim in rectangle.dims for number in dim]
        table[row, : len(head)] = head
        n = rectangle.numel
        jobs += [(row, start, min(start + _JOB, n)) for start in range(0, n, _JOB)]
    job_table = np.array(jobs, np.int64)
    owners = np.array([walk.index for walk, _ in walks], np.int64)
    return table, job_table, owners[job_table[:, loops.WALK]]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _totals(parts: Sequence[tuple[Table, U64]]) -> Totals:
    """Adds up, mod 2^64, what the parts found for each rectangle."""
    if not parts:
        return {}
    owners = np.concatenate([owner for owner, _ in parts])
    indices, places = np.unique(owners, return_inverse=True)
    totals = _no_sums(len(indices))
    np.add.at(totals, places, np.concatenate([sums for _, sums in parts]))
    return {i: (old, new) for i, (old, new) in zip(indices.tolist(), totals.tolist(), strict=True)}
