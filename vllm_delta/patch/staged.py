"""What a patch is made of, and what a backend has to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_delta.codec.order import Signed, Unsigned
from vllm_delta.fingerprint import U64
from vllm_delta.layout import I64, Rectangle

if TYPE_CHECKING:
    import torch

Totals = dict[int, tuple[int, int]]
"""Per rectangle, two sums of g(bits)·P·Q mod 2^64: over the old bits, and over the new."""


@dataclass(frozen=True)
class Sums:
    """What a patch finds, per rectangle (its index in the layout), mod 2^64.

    Attributes:
        touched: Σ g(resident)·P·Q over the elements that the patch touches.
        change: Σ (g(new) − g(resident))·P·Q over them.
    """

    touched: dict[int, int]
    change: dict[int, int]


class Storage(NamedTuple):
    """The memory behind a parameter: its address, and its elements' number and bytes."""

    address: int
    n_elements: int
    itemsize: int


@dataclass(frozen=True, eq=False)
class Walk:
    """A rectangle in memory, with what its fingerprint needs."""

    index: int
    rectangle: Rectangle
    storage: Storage
    n_cols: int
    row_seed: int
    col_seed: int


@dataclass(frozen=True, eq=False)
class Piece:
    """Some changes of one rectangle.

    Attributes:
        index: the rectangle's.
        offsets: int32 or int64[n], below the storage's number of elements.
        steps: signed[n], at most the weights' width.
        coefficients: uint64[n], P·Q.
    """

    index: int
    storage: Storage
    offsets: Signed
    steps: Signed
    coefficients: U64

    @property
    def n_bytes(self) -> int:
        return self.offsets.nbytes + self.steps.nbytes + self.coefficients.nbytes


class Plan(Protocol):
    """A staged patch where its backend wants it."""

    n_bytes: int

    def check(self) -> Totals:
        """Sums over the bits that are there and over those that would be; changes nothing."""

    def apply(self, *, forward: bool) -> Totals:
        """Changes the weights; the sums are over what was there and what is there now."""


class Builder(Protocol):
    """Takes a patch piece by piece."""

    def add_steps(self, piece: Piece) -> None: ...

    def add_bits(self, walk: Walk, bits: Unsigned) -> None:
        """`bits`: unsigned[walk.rectangle.numel] in checkpoint order; taken over, not copied."""

    def finish(self) -> Plan: ...


class Backend(Protocol):
    """Runs the loops where the weights are."""

    @property
    def device(self) -> torch.device | None:
        """Where that is; None: in main memory."""

    def warm(self, storages: Iterable[Storage]) -> None:
        """Does ahead what patching these storages would otherwise do at its first call."""

    def scan(self, walks: Sequence[Walk]) -> dict[int, int]:
        """Rectangle index to the fingerprint of its resident bits."""

    def gather(self, grids: I64, tensors: Sequence[torch.Tensor], out: Any) -> None:
        """Copies grids of elements out of storages; done when it returns.

        Args:
            grids: int64[n, 9], as `Places.crossings` gives them.
            tensors: a tensor in each grid's storage.
            out: [m] in main memory unsigned, on a device a tensor of signed integers, of the
                weights' width, contiguous; elements of no grid stay as they are.
        """

    def builder(self) -> Builder: ...


class Patch:
    """A decoded delta, mapped to this rank's storages; made by `Patcher.stage`.

    Attributes:
        entries: per changed tensor, in the order staged: its place in the schema, `touched` and
            target fingerprint, as the delta says.
        nnz: elements of this rank that the patch names.
        n_bytes: memory held.
        applied: whether the weights hold the patch now.
    """

    def __init__(self, entries: tuple[tuple[int, int, int], ...], nnz: int, plan: Plan) -> None:
        self.entries = entries
        self.nnz = nnz
        self.applied = False
        self._plan = plan

    @property
    def n_bytes(self) -> int:
        return self._plan.n_bytes

    @property
    def plan(self) -> Plan:
        return self._plan


def split_by_width(steps: Signed) -> list[tuple[slice | npt.NDArray[np.bool_], Signed]]:
    """Cuts steps so that the many small ones take a byte each.

    Returns:
        pairs of which steps, and those steps in the type to keep them in; new memory.
    """
    small = steps.astype(np.int8)
    wide = small != steps
    n_wide = int(np.count_nonzero(wide))
    if n_wide == 0:
        return [(slice(None), small)]
    if n_wide > steps.size // 4:
        return [(slice(None), steps.copy())]
    return [(~wide, small[~wide]), (wide, steps[wide])]
