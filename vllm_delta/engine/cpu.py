"""Makes vLLM's CPU backend use weights that are patched in place.

Its matrix kernels keep a packed copy of every dense weight and drop the original; its expert
kernels read the parameter itself, in a permuted order. So dense layers are given a plain
``F.linear``, and the permutation of the experts is learned. Nothing changes on other platforms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Digits = tuple[tuple[int, int], ...]
"""A mixed-radix permutation, as `Rectangle.permuted` takes it."""

_packed: dict[int, tuple[torch.Tensor, Digits]] = {}


def install() -> None:
    """Replaces vLLM's weight packing in this process, on the CPU platform only.

    Must run before the model is loaded. Can run more than once.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if hasattr(utils.dispatch_cpu_unquantized_gemm, "vllm_delta"):
        return
    utils.dispatch_cpu_unquantized_gemm = _plain_linear(utils.dispatch_cpu_unquantized_gemm)
    cpu_moe.cpu_prepack_moe_weight = _learning(cpu_moe.cpu_prepack_moe_weight)
    init_logger(f"vllm.{__name__}").info(
        "CPU weight packing is off for dense layers: they use torch's linear on the weights that "
        "deltas patch."
    )


def take_packed() -> dict[int, Digits]:
    """Storage address to permutation of what was packed since the last call.

    Until then the packed tensors are kept alive, so no address can stand for another tensor.
    """
    taken = {address: digits for address, (_, digits) in _packed.items()}
    _packed.clear()
    return taken


def _plain_linear(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            # Convolutions and experts: not a linear layer, and their kernels want what they get.
            original(layer, remove_weight)
            return
        layer.cpu_linear = torch.nn.functional.linear

    dispatch.vllm_delta = True  # type: ignore[attr-defined]
    return dispatch


def _learning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def prepack(weight: torch.Tensor, isa: str) -> torch.Tensor:
        packed = original(weight, isa)
        expert = (1, *weight.shape[1:])
        digits = _digits_of(original, expert, weight.dtype, isa)
        if digits is not None and _is_permuted(weight, packed, digits):
            digits = (*digits, (weight.shape[0], math.prod(expert)))
            _packed[packed.untyped_storage().data_ptr()] = (packed, digits)
        return packed

    return prepack


@functools.cache
def _digits_of(
    pack: Callable[..., torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, isa: str
) -> Digits | None:
    """The permutation that packing one expert is, or None when it is not one in mixed radix.

    An expert's elements are numbered and packed, one base-256 digit of the numbers at a time,
    since every float type of two bytes or more holds 0 … 255 exactly. That all experts are packed
    alike is proven on the weights, by `_is_permuted`.
    """
    numbers = torch.arange(math.prod(shape))
    found = torch.zeros_like(numbers)
    for shift in range(0, max(numbers.numel() - 1, 1).bit_length(), 8):
        digit = (numbers >> shift & 255).to(dtype).view(shape)
        found += pack(digit, isa).flatten().to(torch.int64) << shift
    return factor(np.argsort(found.numpy(), kind="stable"))


def factor(moved: npt.NDArray[np.int64]) -> Digits | None:
    """Writes a permutation in mixed radix.

    Args:
        moved: int64[n], where each offset goes; ``moved[0]`` is 0.

    Returns:
        ``(radix, stride)`` from the fastest digit up, or None when it is not of that kind.
    """
    digits: list[tuple[int, int]] = []
    if moved[0] != 0:
        return None
    while moved.size > 1:
        stride = int(moved[1])
        breaks = np.flatnonzero(np.diff(moved) != stride)
        radix = int(breaks[0]) + 1 if breaks.size else moved.size
        if moved.size % radix:
            return None
        rows = moved.reshape(-1, radix)
        if not np.array_equal(rows, rows[:, :1] + np.arange(radix) * stride):
            return None
        digits.append((radix, stride))
        moved = rows[:, 0]
    return tuple(digits)


def _is_permuted(weight: torch.Tensor, packed: torch.Tensor, digits: Digits) -> bool:
    """Whether every bit of every expert is where the permutation of one puts it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if packed.shape != weight.shape or packed.dtype != weight.dtype:
        return False
    bits, moved = (t.view(integers[weight.element_size()]) for t in (weight, packed))
    radices = [radix for radix, _ in reversed(digits)]
    strides = [stride for _, stride in reversed(digits)]
    return all(
        torch.equal(old.reshape(radices), new.as_strided(radices, strides, new.storage_offset()))
        for old, new in zip(bits, moved, strict=True)
    )
