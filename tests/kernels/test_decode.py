"""`decode_lanes` against its definition, that of the codec, and the loop for CPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.lanes import Launch, Sample, random_sample, sample
from tests.kernels.memory import DEVICE, Fenced
from vllm_delta.codec.hazard import loops, tables
from vllm_delta.codec.hazard.model import n_classes
from vllm_delta_kernels import decode_lanes, reference
from vllm_delta_kernels.decode import BLOCK

SHAPES = [(1, 1), (2, 1), (251, 9), (BLOCK, 12), (BLOCK + 1, 5), (997, 20), (40, 40)]
"""Elements and changes of a lane."""


def require_equal(samples: list[Sample]) -> Launch:
    """All lanes are good, and every decoder agrees on them."""
    launch = Launch(samples)
    for one, found in zip(samples, launch.results(), strict=True):
        assert found == one.by_host()
        assert found[2] == loops.OK
        assert found[:2] == one.by_definition()
    assert launch.inputs_hold
    return launch


@pytest.mark.parametrize("dtypes", [["F8_E4M3", "F8_E5M2"], ["BF16", "F16"], ["F32"]])
def test_lanes_of_any_size_and_model_in_one_launch(dtypes: list[str]) -> None:
    """One element to several blocks, types of one width mixed, a model each: positions, steps and
    status as defined, and every byte around them as it was."""
    rng = np.random.default_rng(len(dtypes[0]))
    samples = [
        random_sample(rng, dtypes[i % len(dtypes)], n, n_changes)
        for i, (n, n_changes) in enumerate(SHAPES)
    ]
    launch = require_equal(samples)
    assert [one.by_reference() for one in samples] == launch.results()


def test_every_16_bit_pattern() -> None:
    """A lane of all 65,536 patterns, one of each exponent changed: NaN, infinities, -0 and
    subnormals are found by their exponent like any other."""
    rng = np.random.default_rng(3)
    bits = rng.permutation(1 << 16).astype(np.uint16)
    _, positions = np.unique(bits >> 7 & 0xFF, return_index=True)
    assert positions.size == n_classes("BF16")
    positions = np.sort(positions)
    steps = rng.choice([-3, -1, 1, 2, 700], positions.size)
    rates = rng.integers(40, 70, n_classes("BF16"))
    require_equal([sample("BF16", bits, positions, steps, rates, 30)])


def test_escapes_and_certain_changes() -> None:
    """Gaps many times as long as hazards may add up to, the smallest hazard before a change, and
    hazards so large that every element left as it is takes an escape."""
    rng = np.random.default_rng(4)
    bits = np.frombuffer(rng.bytes(2 * 1300), np.uint16)
    mixed = rng.choice([0, 8, 160], n_classes("BF16"))
    one = np.arange(1300) == 1299
    some = np.sort(rng.choice(40, 25, replace=False))
    require_equal(
        [
            sample("BF16", bits, np.flatnonzero(one), [1], 40, 0),
            sample("BF16", bits[:600], [0, 300, 599], [1, -1, 2], 16, 4),
            sample("BF16", bits[:300], [2, 299], [1, -1], 160, 4),
            sample("BF16", bits[:40], some, rng.choice([-1, 1], 25), 0, 128),
            sample("BF16", bits[:30], np.arange(30), rng.choice([-1, 1], 30), 0, 128),
            sample("BF16", bits[:60], np.arange(0, 60, 3), [1] * 20, mixed, 9),
        ]
    )


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F16", "F32"])
def test_steps_of_every_length(dtype: str) -> None:
    """Magnitudes from 1 to half of all patterns, on both sides of each power of two."""
    width = {"F8_E5M2": 8, "F16": 16, "F32": 32}[dtype]
    most = 1 << (width - 1)
    near = {(1 << k) + d for k in range(width) for d in (-1, 0)}
    magnitudes = sorted(m for m in near | {17, 23, most - 2} if 0 < m < most)
    steps = [s for m in magnitudes for s in (m, -m)] + [-most]
    rng = np.random.default_rng(width)
    bits = np.frombuffer(rng.bytes(2 * len(steps) * width // 8), f"<u{width // 8}")
    positions = np.arange(0, 2 * len(steps), 2)
    require_equal([sample(dtype, bits, positions, steps, 10, 128)])


def test_each_flipped_bit_of_a_lane_is_noticed() -> None:
    """Every single-bit flip of a lane's words: refused for the reason that the loop for CPUs
    gives, or decoded to the same."""
    rng = np.random.default_rng(5)
    bits = np.frombuffer(rng.bytes(2 * 50), np.uint16)
    good = sample("BF16", bits, [3, 20, 41], [1, -40, 3], 44, 20, 123)
    assert good.words.size == 3
    samples = [good, *(good.flipped(bit) for bit in range(32 * good.words.size))]
    launch = Launch(samples)
    results = launch.results()
    assert [found[2] for found in results] == [one.by_host()[2] for one in samples]
    assert results[0][2] == loops.OK
    assert all(found[2] != loops.OK or found == results[0] for found in results)
    assert len(set(launch.statuses)) >= 4
    assert launch.inputs_hold


def sixteen_the_long_way(good: Sample) -> Sample:
    """A lane whose only step says 16 by another symbol than its own."""
    share, ends = int(tables.POSITIONS[-1]), tables.STEPS[128].tolist()
    for x in range(1 << 62, 1 << 63, 1 << 24):
        after = share * (x >> 24)
        slot = (after >> 1) & 0xFFFF
        low_bits = (ends[17] - ends[16]) * (after >> 17) + slot - ends[16]
        if ends[16] <= slot < ends[17] and low_bits % 4 == 0:
            break
    words = np.array([x >> 32, x & 0xFFFFFFFF], np.uint32)
    rates, scales = np.zeros_like(good.rates), np.full_like(good.scales, 128)
    lane = good.but(words=words, rates=rates, scales=scales, n_changes=1)
    assert lane.by_host()[2] == loops.BAD_STEP
    return lane


def hostile(rng: np.random.Generator) -> list[Sample]:
    """Lanes cut short, with other numbers, other weights, and of random words."""
    good = random_sample(rng, "F8_E4M3", 300, 5)
    other = good.bits.copy()
    other[7] ^= 0x10
    first = good.words.copy()
    first[0] = 1 << 31
    cut = [good.but(words=good.words[:n]) for n in range(good.words.size)]
    made = [
        good.but(n_changes=good.n_changes - 1),
        good.but(n_changes=good.n_changes + 1),
        good.but(bits=good.bits[:-250]),
        good.but(bits=good.bits[:0]),
        good.but(bits=other),
        good.but(seed=good.seed + 1),
        good.but(words=first),
        good.but(words=np.append(good.words, np.uint32(0))),
        sixteen_the_long_way(good),
        good.but(words=np.zeros_like(good.words)),
        good.but(words=np.full_like(good.words, 0x7FFFFFFF)),
    ]
    wild = []
    for _ in range(10):
        words = np.frombuffer(rng.bytes(8), np.uint32).copy()
        words[0] &= 0x7FFFFFFF
        rates, scales = np.full(16, rng.integers(0, 40)), np.full(16, 128)
        wild.append(good.but(words=words, rates=rates, scales=scales, n_changes=3))
    return [*cut, *made, *wild]


def test_damaged_lanes_stop_and_touch_nothing_else() -> None:
    """Each is refused for the reason that the loop for CPUs gives; good lanes between them come
    out whole; nothing is written but the lanes' own outputs."""
    rng = np.random.default_rng(6)
    good = random_sample(rng, "F8_E4M3", 60, 2)
    bad = hostile(rng)
    samples = [*bad]
    for place in range(len(bad), -1, -4):
        samples.insert(place, good)
    launch = Launch(samples)
    expected = good.by_host()
    for one, found in zip(samples, launch.results(), strict=True):
        if one is good:
            assert found == expected
        else:
            assert found[2] == one.by_host()[2] == one.by_reference()[2] != loops.OK
            assert one.by_definition() is None
    assert set(launch.statuses) == set(range(6)), "not every problem came up"
    assert launch.inputs_hold


def test_a_lane_depends_on_nothing_around_it() -> None:
    """Whatever lies before and after elements, words and tables, a lane, good or damaged, comes
    out the same: it reads nothing but its own."""
    zeros, ones = (
        Launch(
            [*hostile(rng)[:12], *(random_sample(rng, "F8_E5M2", n, 3) for n in (5, 255, 257))],
            byte,
        )
        for byte, rng in ((0, np.random.default_rng(8)), (0xFF, np.random.default_rng(8)))
    )
    assert zeros.statuses[-3:] == [loops.OK] * 3
    assert zeros.results() == ones.results()


@pytest.mark.skipif(DEVICE != "cpu", reason="memory that may not be read is made on a CPU")
def test_no_read_goes_past_the_end() -> None:
    """Elements, words and tables each end where memory does: a good lane, one that lacks its last
    word and two that look for changes where no elements are all come to their end."""
    rng = np.random.default_rng(9)
    n = BLOCK + 8  # a multiple of the alignment, so that it can end there
    good = random_sample(rng, "BF16", n, 4)
    steep = sample("BF16", good.bits, [n - 1], [40], 30, 128)
    twice = sample("BF16", good.bits, [100, 200], [1, 1], 50, 5)
    for one, status in (
        (good, loops.OK),
        (steep, loops.OK),
        (steep.but(words=steep.words[:-1]), loops.SHORT),
        (good.but(rates=np.full_like(good.rates, 160)), loops.TOO_FEW),
        (twice.but(bits=twice.bits[:104]), loops.TOO_FEW),
    ):
        launch = Launch([one], guard=Fenced)
        assert launch.statuses == [status]
        assert launch.inputs_hold


def test_no_lanes() -> None:
    """A table without rows is a no-op."""
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    status = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    table = torch.empty((0, 9), dtype=torch.int64, device=DEVICE)
    decode_lanes(table, *[empty] * 8, status, width=2)
    assert int(status) == 7


def test_one_window_of_nodes_holds_the_answer() -> None:
    """From the node where a search begins, the last one below u and the next are within 32."""
    nodes = tables.POSITIONS[:-1]
    u = np.arange(1 << 12, (1 << 24) + 1, 1 << 12) - 1
    node = np.searchsorted(nodes, u, side="right") - 1
    assert (node - tables.NODE_OF).max() <= 30
    assert (nodes[tables.NODE_OF] <= u - 4095).all()
    assert tables.RATES.max() <= reference.LIMIT
    assert tables.RATES.min() >= 1
    assert int(tables.RATES.max()) * BLOCK <= 1 << 30
