"""Tensors with sentinels around them, on the device that the kernels run on."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
GUARD_BYTES = 256
SENTINEL = 0x5A
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guarded:
    """A contiguous tensor between two guards; fresh memory is poison, not zero."""

    def __init__(self, values: torch.Tensor, sentinel: int = SENTINEL) -> None:
        n_bytes = values.numel() * values.element_size()
        self._sentinel = sentinel
        self._whole = torch.full(
            (n_bytes + 2 * GUARD_BYTES,), sentinel, dtype=torch.uint8, device=DEVICE
        )
        inside = self._whole[GUARD_BYTES : GUARD_BYTES + n_bytes]
        self.tensor = inside.view(values.dtype).view(values.shape)
        self.tensor.copy_(values)
        self.original = values.clone()

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def guards_hold(self) -> bool:
        edges = torch.cat([self._whole[:GUARD_BYTES], self._whole[-GUARD_BYTES:]])
        return bool((edges == self._sentinel).all())

    @property
    def untouched(self) -> bool:
        return self.guards_hold and torch.equal(self.tensor.cpu(), self.original)


class Fenced(Guarded):
    """A tensor in main memory whose end is the end of what may be read: a read past it does not
    go unnoticed, it ends the process."""

    def __init__(self, values: torch.Tensor, sentinel: int = SENTINEL) -> None:
        n_bytes = values.numel() * values.element_size()
        size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fence = ctypes.c_void_p(address + size)
        no_access = 0
        assert ctypes.CDLL(None).mprotect(fence, mmap.PAGESIZE, no_access) == 0
        self._sentinel = sentinel
        self._whole = torch.frombuffer(memory, dtype=torch.uint8, count=size).fill_(sentinel)
        self._start = size - n_bytes
        self.tensor = self._whole[self._start :].view(values.dtype).view(values.shape)
        self.tensor.copy_(values)
        self.original = values.clone()

    @property
    def guards_hold(self) -> bool:
        return bool((self._whole[: self._start] == self._sentinel).all())


def random_bits(rng: np.random.Generator, n: int, width: int) -> torch.Tensor:
    kind = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[width]
    return torch.from_numpy(np.frombuffer(rng.bytes(n * width), kind).copy())


def table(rows: list[list[int]], n_columns: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=DEVICE).reshape(-1, n_columns)


def poisoned_sums(n: int) -> torch.Tensor:
    """Sums that start anywhere: a kernel adds to what is there."""
    return torch.full((n, 2), -0x5A5A5A5A5A5A5A5B, dtype=torch.int64, device=DEVICE)


def flag(value: int) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=DEVICE)


def added(sums: torch.Tensor) -> list[list[int]]:
    """What was added to `poisoned_sums`, mod 2^64, as int64."""
    return (sums.cpu() + 0x5A5A5A5A5A5A5A5B).tolist()
