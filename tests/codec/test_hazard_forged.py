"""Lanes that no encoder writes, whole in every other way: their steps alone decide."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec import forced, second_lane
from vllm_delta.codec import order
from vllm_delta.codec.hazard import definition, tables
from vllm_delta.codec.hazard.lanes import Lane, Part, decode_lane, lane_seed
from vllm_delta.codec.hazard.model import Model, n_classes
from vllm_delta.codec.hazard.tiles import Tile
from vllm_delta.errors import FormatError
from vllm_delta.format import TensorSpec

RATE, SCALE = 40, 128
PATTERNS = {"BF16": 0x3C80, "F32": 0x3C800000, "F8_E4M3": 0x38}
PLACE = 5


def words(dtype: str, negative: int, symbol: int, low: int) -> tuple[np.ndarray, int]:
    """One change at PLACE, by that symbol and those low bits; words and the step they stand for."""
    n_low = 2 + (symbol - 16 >> 2) if symbol >= 16 else 0
    magnitude = ((4 + (symbol & 3)) << n_low | low) if n_low else symbol + 1
    step = -magnitude if negative else magnitude
    width = second_lane.WIDTH[dtype]
    new = second_lane.add_step(PATTERNS[dtype], step, width)
    x = (1 << 31) + (definition.mixed(lane_seed(0, 0), PLACE, new) >> 33)
    rate = int(tables.RATES[RATE])
    start, end = (definition.cumulated(n * rate) for n in (PLACE, PLACE + 1))
    first, last = (int(n) for n in tables.STEPS[SCALE, symbol : symbol + 2])
    out: list[int] = []

    def room(x: int, share: int, precision: int) -> int:
        if x >= share << (63 - precision):
            out.append(x & 0xFFFFFFFF)
            x >>= 32
        return x

    if n_low:
        x = room(x, 1, n_low) << n_low | low
    x = room(x, last - first, 17)
    x = x // (last - first) << 17 | (first + x % (last - first)) << 1 | negative
    x = room(x, end - start, 24)
    x = (x // (end - start) << 24) + start + x % (end - start)
    return np.array([x >> 32, x & 0xFFFFFFFF, *reversed(out)], np.uint32), step


def verdicts(dtype: str, some: np.ndarray) -> list[list[int] | None]:
    """Steps by the compiled decoder, the definition, and the second decoder; None: refused."""
    spec, n = TensorSpec("w", dtype, (9,)), n_classes(dtype)
    bits = np.full(9, PATTERNS[dtype], order.UNSIGNED[spec.itemsize])
    classes = {dtype: (0, bytes([RATE] * n), bytes([SCALE] * n))}
    lane = Lane(Tile(0, 0, 1, 9), 0, 0, 9, 1, 0, 0, some.size)
    part = Part(0, spec, Model(classes).tables[dtype], 1, (lane,), some)
    places, steps = np.empty(1, np.int32), np.empty(1, order.SIGNED[spec.itemsize])
    found: list[list[int] | None] = []
    try:
        decode_lane(part, lane, bits, places, steps)
        assert places.tolist() == [PLACE]
        found.append(steps.tolist())
    except FormatError as error:
        found.append(None)
        assert error.message == "hazard: a step does not fit its type"  # noqa: PT017
    try:
        found.append(forced.by_definition(part, lane, bits)[1])
    except FormatError:
        found.append(None)
    model, seed = [(RATE, SCALE)] * n, lane_seed(0, 0)
    try:
        second = second_lane.Lane(
            some.tolist(), bits.tolist(), dtype, model, seed, second_lane.Constants()
        )
        found.append(second.decode(1)[1])
    except second_lane.RefusedError:
        found.append(None)
    return found


@pytest.mark.parametrize("dtype", sorted(PATTERNS))
@pytest.mark.parametrize("negative", [0, 1])
def test_each_step_has_one_symbol_and_fits_its_type(dtype: str, negative: int) -> None:
    """Every symbol with its first and last low bits: taken up to half-way around, which is
    reached downwards only, and 16 by its own symbol alone."""
    half = 1 << (second_lane.WIDTH[dtype] - 1)
    n_refused = n_taken = 0
    for symbol in range(tables.N_MAGNITUDES):
        n_low = 2 + (symbol - 16 >> 2) if symbol >= 16 else 0
        for low in sorted({0, 1, (1 << n_low) - 1}) if n_low else [0]:
            some, step = words(dtype, negative, symbol, low)
            fits = -half <= step < half and (abs(step) != 16 or symbol == 15)
            assert verdicts(dtype, some) == [[step] if fits else None] * 3, (symbol, low)
            n_taken, n_refused = n_taken + fits, n_refused + (not fits)
    assert n_taken > 30
    assert n_refused > (0 if dtype == "F32" else 30)
