"""The hazard codec: exact for every pattern, step, shape and share of changes; lanes alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts._soak.deltas import MANTISSA, between, delta
from tests.codec import forced
from tests.codec.test_codec import same
from vllm_delta import codec
from vllm_delta.codec import Change, order
from vllm_delta.codec.hazard import tables
from vllm_delta.codec.hazard.lanes import Lane, Part, decode_lane
from vllm_delta.errors import FormatError
from vllm_delta.format import Schema, TensorSpec

STEPPED = sorted(MANTISSA)


def round_trip(
    schema: Schema, base: list[order.Unsigned], changes: list[Change], shards: int = 1, **how: int
) -> bytes:
    """The blob, once it has been seen to decode to the changes."""
    data = forced.encode(schema, changes, base.__getitem__, shards=shards, **how)
    back = list(codec.decode(data, schema, "delta", codec.HostLanes(base.__getitem__)))
    assert len(back) == len(changes)
    assert all(same(*pair) for pair in zip(changes, back, strict=True))
    return data


def specials(dtype: str) -> np.ndarray:
    """±0, the smallest and largest subnormals and normals, ±infinity, quiet and other NaNs."""
    mantissa, width = MANTISSA[dtype], 8 * TensorSpec("w", dtype, ()).itemsize
    one, top = 1 << mantissa, (1 << (width - 1)) - 1
    infinity = top - (one - 1)
    plain = {0, 1, one - 1, one, infinity - 1, infinity, infinity + 1, infinity | one >> 1, top}
    signed = sorted(plain | {value | (top + 1) for value in plain})
    return np.array(signed, order.UNSIGNED[width // 8])


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, order.Unsigned, order.Unsigned]:
    """A tensor of some type, shape, patterns and changes; at least one element changes."""
    dtype = draw(st.sampled_from(STEPPED))
    shape = draw(
        st.one_of(
            st.just(()),
            st.just((1,)),
            st.tuples(st.integers(1, 700)),
            st.tuples(st.integers(1, 40), st.integers(1, 40)),
            st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20)),
        )
    )
    spec = TensorSpec("w", dtype, shape)
    unsigned = order.UNSIGNED[spec.itemsize]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    patterns = draw(st.sampled_from(["all", "special", "one", "narrow"]))
    if patterns == "all":
        old = rng.integers(0, np.iinfo(unsigned).max, spec.numel, unsigned, endpoint=True)
    elif patterns == "special":
        old = rng.choice(specials(dtype), spec.numel)
    elif patterns == "one":
        old = np.full(spec.numel, rng.choice(specials(dtype)), unsigned)
    else:
        old = rng.integers(1 << MANTISSA[dtype], 4 << MANTISSA[dtype], spec.numel).astype(unsigned)
    n = draw(st.one_of(st.just(1), st.just(spec.numel), st.integers(1, spec.numel)))
    picks = np.sort(rng.choice(spec.numel, n, replace=False))
    info = np.iinfo(order.SIGNED[spec.itemsize])
    sizes = rng.integers(info.min, info.max, n, info.dtype, endpoint=True)
    small = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    sizes = np.where(rng.random(n) < small, rng.choice([-2, -1, 1, 2, 16, 17], n), sizes)
    extremes = rng.choice(np.array([info.min, info.min + 1, info.max], np.int64), n)
    sizes = np.where(rng.random(n) < 0.05, extremes, sizes)
    steps = np.where(sizes == 0, 1, sizes).astype(info.dtype)
    new = old.copy()
    new[picks] = order.add_steps(old[picks], steps)
    return spec, old, new


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Any changes of any tensors come back as they were, for any number of shards."""
    drawn = data.draw(st.lists(tensors(), min_size=1, max_size=4))
    specs = [
        TensorSpec(f"{place}", spec.dtype, spec.shape) for place, (spec, _, _) in enumerate(drawn)
    ]
    schema, base = Schema.of(specs), [old for _, old, _ in drawn]
    changes = between(schema, base, [new for _, _, new in drawn])
    assert len(changes) == len(specs)
    shards = data.draw(st.sampled_from([1, 1, 2, 3, 5]))
    in_lane = data.draw(st.sampled_from([1, 20, 1 << 11]))
    round_trip(schema, base, changes, shards, changes_in_lane=in_lane)


@pytest.mark.parametrize("dtype", STEPPED)
def test_every_pattern_can_go_anywhere(dtype: str) -> None:
    """From every pattern (of 32 bits: a spread of them and all special ones) by every distance."""
    spec = TensorSpec("w", dtype, ())
    bits = 8 * spec.itemsize
    unsigned = order.UNSIGNED[spec.itemsize]
    count = min(1 << bits, 1 << 16)
    spread = np.arange(count, dtype=np.uint64) * np.uint64((1 << bits) // count)
    old = np.concatenate([spread.astype(unsigned), np.repeat(specials(dtype), 40)])
    schema = Schema.of([TensorSpec("w", dtype, (old.size,))])
    for shift in (1, 12345, old.size // 2):
        new = np.roll(old, shift)
        round_trip(schema, [old], between(schema, [old], [new]))


@pytest.mark.parametrize("dtype", STEPPED)
def test_the_largest_steps(dtype: str) -> None:
    """Half-way around, one less, and every power of two with its neighbours."""
    bits = 8 * TensorSpec("w", dtype, ()).itemsize
    half = 1 << (bits - 1)
    sizes = {s for k in range(bits) for s in ((1 << k) - 1, 1 << k, (1 << k) + 1)}
    steps = sorted({s for n in sizes for s in (n, -n) if s and -half <= s < half})
    assert {-half, half - 1} <= set(steps)
    old = np.resize(specials(dtype), len(steps) * 18)
    picks = np.arange(0, old.size, 18)
    new = old.copy()
    new[picks] = order.add_steps(old[picks], np.array(steps, order.SIGNED[bits // 8]))
    schema = Schema.of([TensorSpec("w", dtype, (old.size,))])
    round_trip(schema, [old], between(schema, [old], [new]))


@pytest.mark.parametrize("at", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 98])
def test_one_change_in_millions(at: int) -> None:
    """At either end of a lane and of the tensor."""
    old = np.full((1 << 22) + 99, 0x3C00, np.uint16)
    new = old.copy()
    new[at] += 1
    schema = Schema.of([TensorSpec("w", "BF16", (old.size,))])
    assert len(round_trip(schema, [old], between(schema, [old], [new]))) < 150


def test_a_dense_half_and_then_nothing() -> None:
    """Where hazards add up far beyond the limit between two changes, escapes lead on."""
    old = np.full(40_000, 0x3C00, np.uint16)
    new = old.copy()
    new[:39_000] += 1
    new[39_999] -= 3
    schema = Schema.of([TensorSpec("w", "BF16", (old.size,))])
    data = round_trip(schema, [old], between(schema, [old], [new]), changes_in_lane=1 << 16)
    (part,) = forced.parts_of(data, schema)
    rate = part.tables.rates[0x3C00 >> 7]
    assert len(part.lanes) == 1
    assert 999 * rate > 100 * tables.LIMIT


def test_indices_beyond_31_bits() -> None:
    """A tensor of more than 2^31 elements is exact at both ends and where int32 ends."""
    n = (1 << 31) + 300
    old = np.broadcast_to(np.uint8(0x38), (n,))
    schema = Schema.of([TensorSpec("w", "F8_E4M3", (n,))])
    indices = np.array([0, (1 << 31) - 1, 1 << 31, n - 1], np.int64)
    change = Change(0, indices, np.array([1, -1, 7, -128], np.int8), None, 1, 2)
    round_trip(schema, [old], [change])


def test_a_base_that_may_not_be_written() -> None:
    """Mapped files are read-only: both ways read the base, and neither writes it."""
    some = delta([TensorSpec("w", "BF16", (100, 90))], 0.3, 9)
    some.base[0].flags.writeable = False
    for shards in (1, 2):
        round_trip(some.schema, some.base, some.changes, shards)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_threads_do_not_change_the_bytes(shards: int) -> None:
    """Any number of threads writes the same and reads the same."""
    some = delta([TensorSpec(f"{n}", "BF16", (200, 300)) for n in range(3)], 0.3, 1)
    how = {"shards": shards, "changes_in_lane": 100}
    data = round_trip(some.schema, some.base, some.changes, **how)
    for n_threads in (2, 5):
        again = forced.encode(some.schema, some.changes, some.bits, n_threads=n_threads, **how)
        assert again == data
        decoder = codec.HostLanes(some.bits, n_threads)
        back = list(codec.decode(data, some.schema, "delta", decoder))
        assert all(same(*pair) for pair in zip(some.changes, back, strict=True))


@pytest.mark.parametrize("dtype", STEPPED)
def test_the_definition_decodes_the_same(dtype: str) -> None:
    """Plain Python and numba agree lane by lane, on good words, and on words, bases and counts
    that are damaged: both refuse, or both give the same."""
    some = delta([TensorSpec("w", dtype, (60, 70))], 0.5, 2)
    data = forced.encode(some.schema, some.changes, some.bits, changes_in_lane=60)
    (part,) = forced.parts_of(data, some.schema)
    assert len(part.lanes) > 1
    draw = random.Random(3)
    for lane in part.lanes:
        bits = forced.bits_of(part, lane, some.bits)
        assert compiled(part, lane, bits) == forced.by_definition(part, lane, bits)
        n_refused = 0
        for _ in range(60):
            first, n = lane.first_word, lane.n_words
            words, other = part.words.copy(), bits.copy()
            words[draw.randrange(first, first + n)] ^= np.uint32(1 << draw.randrange(32))
            if draw.random() < 0.3:
                other[draw.randrange(other.size)] ^= other.dtype.type(1 << draw.randrange(7))
            n_changes = max(1, lane.n_changes + draw.choice([0, 0, 1, -1]))
            damaged = Part(0, part.spec, part.tables, n_changes, (), words)
            n_refused += agree(damaged, lane._replace(n_changes=n_changes), other)
        assert n_refused == 60


def compiled(part: Part, lane: Lane, bits: order.Unsigned) -> tuple[list[int], list[int]]:
    places = np.empty(lane.n_changes, np.int32)
    steps = np.empty(lane.n_changes, order.SIGNED[part.spec.itemsize])
    decode_lane(part, lane, bits, places, steps)
    return places.tolist(), steps.tolist()


def agree(part: Part, lane: Lane, bits: order.Unsigned) -> bool:
    """Whether both refuse; else both must give the same."""
    try:
        expected = forced.by_definition(part, lane, bits)
    except FormatError:
        with pytest.raises(FormatError):
            compiled(part, lane, bits)
        return True
    assert compiled(part, lane, bits) == expected
    return False


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_lanes_decode_alone_and_in_any_order(shards: int) -> None:
    """A reader that wants some lanes gets their changes and needs nothing of the others."""
    specs = [TensorSpec("a", "BF16", (120, 110)), TensorSpec("b", "F32", (3, 50, 40))]
    some = delta(specs, 0.4, 4)
    data = round_trip(some.schema, some.base, some.changes, shards, changes_in_lane=60)
    draw = random.Random(5)
    found: list[set[tuple[int, int]]] = [set(), set()]
    total = sum(len(part.lanes) for part in forced.parts_of(data, some.schema))
    n_decoded = 0
    for third in range(3):
        blind = [bits.copy() for bits in some.base]
        wanted = forced.SomeLanes(
            blind.__getitem__,
            lambda _, lane, third=third: lane.number % 3 == third,
            lambda lanes: draw.sample(lanes, len(lanes)),
        )
        for part in forced.parts_of(data, some.schema):
            for lane in part.lanes:
                if lane.number % 3 != third and lane.tile.n_cols == part.spec.n_cols:
                    forced.bits_of(part, lane, blind.__getitem__)[:] = 0
        for change in codec.decode(data, some.schema, "delta", wanted):
            assert change.indices is not None
            assert change.steps is not None
            pairs = set(zip(change.indices.tolist(), change.steps.tolist(), strict=True))
            assert not pairs & found[change.tensor]
            found[change.tensor] |= pairs
        n_decoded += wanted.n_decoded
    assert n_decoded == total > 6
    for change in some.changes:
        assert change.indices is not None
        assert change.steps is not None
        pairs = set(zip(change.indices.tolist(), change.steps.tolist(), strict=True))
        assert found[change.tensor] == pairs
