"""Huge pages change where the kernel keeps weights and nothing that a program sees."""

from __future__ import annotations

import mmap
import pathlib

import numpy as np
import pytest
import torch

from vllm_delta.patch.pages import HUGE_PAGE_BYTES, use_huge_pages


def huge_bytes(address: int) -> int:
    """AnonHugePages of the mapping that holds an address, from the kernel's own account."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "AnonHugePages:":
            return 1024 * int(line.split()[1])
    raise AssertionError("the address is in no mapping")


def test_bits_and_address_stay() -> None:
    """The same bits at the same address, and the kernel's account shows huge pages if it moved."""
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, 8 << 20, np.uint16))
    before, address = tensor.clone(), tensor.data_ptr()
    moved = use_huge_pages(address, tensor.nbytes)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.view(torch.int16), before.view(torch.int16))
    if moved:
        assert huge_bytes(address + tensor.nbytes // 2) >= tensor.nbytes - 2 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("n_bytes", [0, 1, HUGE_PAGE_BYTES - 1])
def test_small_ranges_are_left_alone(n_bytes: int) -> None:
    """Below one huge page nothing is asked of the kernel."""
    assert not use_huge_pages(1 << 40, n_bytes)


def test_memory_that_cannot_move_is_left_alone() -> None:
    """A range that is not mapped is refused by the kernel, without harm."""
    with mmap.mmap(-1, 2 * HUGE_PAGE_BYTES) as held:
        address = np.frombuffer(held, np.uint8).ctypes.data
    assert not use_huge_pages(address, 2 * HUGE_PAGE_BYTES)
