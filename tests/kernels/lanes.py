"""Lanes of `hazard` coded with any model, and the kernel's launch over them in guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels.memory import INTEGERS, SENTINEL, Guarded
from vllm_delta.codec.hazard import definition, loops, tables
from vllm_delta.codec.hazard.model import SHIFTS, n_classes
from vllm_delta.codec.order import SIGNED, UNSIGNED
from vllm_delta.errors import FormatError
from vllm_delta.format import DTYPES
from vllm_delta_kernels import decode_lanes, reference
from vllm_delta_kernels.decode import ALIGNMENT, N_COLUMNS

Array = npt.NDArray[Any]
Result = tuple[list[int], list[int], int]
"""Positions, steps and status."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A lane before the change, its words, and index of rate and scale per class."""

    dtype: str
    bits: Array
    words: Array
    n_changes: int
    seed: int
    rates: Array
    scales: Array

    @property
    def shift(self) -> int:
        return SHIFTS[self.dtype]

    @property
    def signed_rates(self) -> Array:
        """λ by class, sign included."""
        return np.tile(tables.RATES[self.rates], 2)

    @property
    def signed_scales(self) -> Array:
        return np.tile(self.scales.astype(np.int64), 2)

    def but(self, **changes: Any) -> Sample:
        return replace(self, **changes)

    def flipped(self, bit: int) -> Sample:
        words = self.words.copy()
        words[bit // 32] ^= np.uint32(1 << bit % 32)
        return self.but(words=words)

    def by_host(self) -> Result:
        """What the loop for CPUs makes of it."""
        positions = np.zeros(self.n_changes, np.int32)
        steps = np.zeros(self.n_changes, SIGNED[self.bits.itemsize])
        status = loops.decode_lane(
            self.bits, self.words, np.uint64(self.seed), self.shift, self.signed_rates,
            self.signed_scales, tables.STEPS, tables.POSITIONS, tables.NODE_OF, positions, steps,
        )  # fmt: skip
        return positions.tolist(), steps.tolist(), int(status)

    def by_definition(self) -> tuple[list[int], list[int]] | None:
        """What the codec's definition makes of it; None where it refuses."""
        try:
            return definition.decode_lane(
                self.bits.tolist(), self.words.tolist(), self.n_changes,
                rates=self.rates.tolist(), scales=self.scales.tolist(), shift=self.shift,
                width=8 * self.bits.itemsize, seed=self.seed,
            )  # fmt: skip
        except FormatError:
            return None

    def by_reference(self) -> Result:
        """What the kernel's own definition makes of it."""
        return reference.decode_lanes(
            _tensor(self.bits), _tensor(self.words), self.n_changes, seed=self.seed,
            shift=self.shift, nodes=_tensor(tables.POSITIONS, np.int32),
            rates=_tensor(self.signed_rates, np.int32),
            scales=_tensor(self.signed_scales, np.int32), magnitudes=_tensor(tables.STEPS),
        )  # fmt: skip


def sample(
    dtype: str,
    bits: Array,
    positions: Sequence[int] | Array,
    steps: Sequence[int] | Array,
    rates: int | Array,
    scales: int | Array,
    seed: int = 1 << 32,
) -> Sample:
    """Codes changes; `rates` and `scales` are one for all classes or one for each."""
    n = n_classes(dtype)
    bits = bits.astype(UNSIGNED[DTYPES[dtype].itemsize])
    coded = Sample(
        dtype, bits, np.empty(0, np.uint32), len(positions), seed,
        np.broadcast_to(rates, n), np.broadcast_to(scales, n),
    )  # fmt: skip
    room = 3 * len(positions) + 4 * bits.size + 16
    words = np.empty(room, np.uint32)
    n_words = loops.encode_lane(
        bits, np.array(positions, np.int32), np.array(steps, SIGNED[bits.itemsize]),
        np.uint64(seed), coded.shift, coded.signed_rates, coded.signed_scales, tables.STEPS,
        tables.POSITIONS, np.empty(room, np.uint8), np.empty(room, np.uint32),
        np.empty(room, np.uint32), words,
    )  # fmt: skip
    assert n_words > 0
    return coded.but(words=words[-n_words:].copy())


def random_sample(rng: np.random.Generator, dtype: str, n: int, n_changes: int) -> Sample:
    """Any patterns, changes, steps and models."""
    kind = SIGNED[DTYPES[dtype].itemsize]
    bits = np.frombuffer(rng.bytes(n * kind().itemsize), UNSIGNED[kind().itemsize])
    steps = rng.integers(-40, 41, n_changes)
    some = rng.random(n_changes) < 0.2
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    steps[some] = rng.integers(low, high, int(some.sum()), endpoint=True)
    steps[steps == 0] = 1
    positions = np.sort(rng.choice(n, n_changes, replace=False))
    rates = rng.integers(0, 90, n_classes(dtype))
    scales = rng.integers(0, tables.N_SCALES, n_classes(dtype))
    return sample(dtype, bits, positions, steps, rates, scales, int(rng.integers(1 << 62)))


class Launch:
    """One launch over lanes of one width. Every buffer is guarded, and the outputs are poison.

    Args:
        sentinel: the byte that stands wherever nothing of a lane is.
        guard: what every buffer is made by.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        sentinel: int = SENTINEL,
        guard: type[Guarded] = Guarded,
    ) -> None:
        self.samples = samples
        self._guard = partial(guard, sentinel=sentinel)
        width = samples[0].bits.itemsize
        self._bases = [self._guard(_tensor(one.bits)) for one in samples]
        gap = np.frombuffer(bytes([sentinel]) * 16, np.uint32)
        self._words = self._guard(
            _tensor(np.concatenate([part for one in samples for part in (gap, one.words)]))
        )
        self._rates = self._tables([one.signed_rates for one in samples])
        self._scales = self._tables([one.signed_scales for one in samples])
        self._rows = self._guard(torch.tensor(list(self._table()), dtype=torch.int64))
        n = sum(one.n_changes for one in samples)
        self._positions = self._guard(_poison(n, 4))
        self._steps = self._guard(_poison(n, width))
        self._status = self._guard(_poison(len(samples), 4))
        constants = [tables.POSITIONS, tables.NODE_OF, tables.STEPS]
        self._constants = [self._guard(_tensor(a, np.int32).reshape(-1)) for a in constants]
        nodes, node_of, magnitudes = (one.tensor for one in self._constants)
        decode_lanes(
            self._rows.tensor, self._words.tensor, nodes, node_of, self._rates.tensor,
            self._scales.tensor, magnitudes, self._positions.tensor, self._steps.tensor,
            self._status.tensor, width=width,
        )  # fmt: skip

    def _table(self) -> Any:
        word, change, entry = 0, 0, 0
        for one, base in zip(self.samples, self._bases, strict=True):
            word += 4
            assert base.address % ALIGNMENT == 0
            yield [
                base.address, one.bits.size, word, one.words.size, one.n_changes,
                reference.signed(one.seed), change, entry, one.shift,
            ]  # fmt: skip
            word += one.words.size
            change += one.n_changes
            entry += 2 * one.rates.size
        assert self._words.tensor.numel() == word
        assert N_COLUMNS == 9

    def _tables(self, arrays: list[Array]) -> Guarded:
        return self._guard(_tensor(np.concatenate(arrays), np.int32))

    @property
    def inputs_hold(self) -> bool:
        """Nothing was written but the outputs, each within its bounds."""
        inputs = [*self._bases, self._words, self._rates, self._scales, self._rows]
        outputs = [self._positions, self._steps, self._status]
        return all(one.untouched for one in [*inputs, *self._constants]) and all(
            one.guards_hold for one in outputs
        )

    def results(self) -> list[Result]:
        positions = self._positions.tensor.tolist()
        steps = self._steps.tensor.tolist()
        found: list[Result] = []
        at = 0
        for one, status in zip(self.samples, self._status.tensor.tolist(), strict=True):
            some = slice(at, at + one.n_changes)
            found.append((positions[some], steps[some], status))
            at += one.n_changes
        return found

    @property
    def statuses(self) -> list[int]:
        found: list[int] = self._status.tensor.tolist()
        return found


def _tensor(array: Array, kind: Any = None) -> torch.Tensor:
    array = np.ascontiguousarray(array if kind is None else array.astype(kind))
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy())


def _poison(n: int, width: int) -> torch.Tensor:
    return torch.full((n * width,), 0xA7, dtype=torch.uint8).view(INTEGERS[width])
