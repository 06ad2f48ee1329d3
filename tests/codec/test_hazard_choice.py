"""What a channel with hazard writes: the smallest codec per tensor, little per tensor, and the
same bytes everywhere; what a decoder makes of another base; how much memory it takes."""

from __future__ import annotations

import runpy
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scripts._soak.deltas import MANTISSA, Delta, between, delta
from tests.codec import forced
from vllm_delta import codec
from vllm_delta.codec import Change, blob, hazard, order
from vllm_delta.codec.hazard import tables
from vllm_delta.errors import FormatError
from vllm_delta.fingerprint import fingerprint
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.replay import Replica

STEPPED = sorted(MANTISSA)
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_hazard_tables.py"


def smallest(some: Delta, shards: int = 1) -> bytes:
    (data,) = codec.encode_delta(
        some.schema, some.changes, codec="hazard", base=some.bits, shards=shards
    )
    return data


def taken(some: Delta) -> list[int]:
    """The codec of each entry."""
    return [entry.codec for entry in blob.parse_blob(smallest(some), some.schema, "delta").entries]


def alternatives(some: Delta) -> dict[int, int]:
    """Bytes of a blob by each codec alone."""
    (gap,) = codec.encode_delta(some.schema, some.changes)
    whole = [Change(c.tensor, None, None, some.target[c.tensor], 0, c.target) for c in some.changes]
    (raw,) = codec.encode_delta(some.schema, whole)
    lanes = forced.encode(some.schema, some.changes, some.bits)
    return {blob.GAP: len(gap), blob.RAW: len(raw), blob.HAZARD: len(lanes)}


def one_tensor(old: np.ndarray, new: np.ndarray, dtype: str = "BF16") -> Delta:
    schema = Schema.of([TensorSpec("w", dtype, (old.size,))])
    return Delta(schema, [old], [new], between(schema, [old], [new]))


def a_real_one() -> Delta:
    return delta([TensorSpec("w", "BF16", (300, 200))], 0.1, 1)


def an_even_one() -> Delta:
    """Every fiftieth element moves by one: gaps and steps repeat, whatever the exponents are."""
    old = a_real_one().base[0]
    new = old.copy()
    new[::50] = order.add_steps(old[::50], np.ones(old[::50].size, np.int16))
    return one_tensor(old, new)


def a_reset_one() -> Delta:
    """Everything becomes one number."""
    old = a_real_one().base[0]
    return one_tensor(old, np.full_like(old, 0x3F80))


@pytest.mark.parametrize(
    ("make", "expected"),
    [(a_real_one, blob.HAZARD), (an_even_one, blob.GAP), (a_reset_one, blob.RAW)],
)
def test_each_codec_is_taken_where_it_is_smallest(make: object, expected: int) -> None:
    """By bytes, not by the share of changes."""
    assert callable(make)
    some = make()
    n_bytes = alternatives(some)
    assert min(n_bytes, key=n_bytes.__getitem__) == expected, n_bytes
    assert taken(some) == [expected]
    assert len(smallest(some)) == n_bytes[expected]


@pytest.mark.parametrize("dtype", STEPPED)
@pytest.mark.parametrize("size", [0.001, 0.03, 1, 30, 3000])
def test_the_choice_is_never_far_from_the_smallest(dtype: str, size: float) -> None:
    """From rare to complete changes: within what a model and its sections may take."""
    some = delta([TensorSpec("w", dtype, (100, 90))], size, 2)
    assert len(smallest(some)) <= min(alternatives(some).values()) + 128


def test_many_small_matrices_are_not_cut() -> None:
    """A tile holds enough changes on average, over all matrices of a tensor."""
    for shape, expected in (((512, 16, 3, 3), blob.GAP), ((8, 96, 96), blob.HAZARD)):
        some = delta([TensorSpec("w", "BF16", shape)], 30, 3)
        assert some.changes[0].nnz >= 8 << 12
        (data,) = codec.encode_delta(
            some.schema, some.changes, codec="hazard", base=some.bits, shards=2
        )
        assert [entry.codec for entry in codec.parse_blob(data, some.schema, "delta").entries] == [
            expected
        ]


def test_one_blob_mixes_codecs() -> None:
    """Tensor by tensor; what has no steps is always whole."""
    ones = [a_real_one(), an_even_one(), a_reset_one()]
    specs = [TensorSpec(name, "BF16", (60_000,)) for name in "abc"] + [TensorSpec("d", "I32", (9,))]
    schema = Schema.of(specs)
    counts = np.arange(9, dtype=np.uint32)
    base = [one.base[0] for one in ones] + [counts]
    target = [one.target[0] for one in ones] + [counts + np.uint32(1)]
    some = Delta(schema, base, target, between(schema, base, target))
    assert taken(some) == [blob.HAZARD, blob.GAP, blob.RAW, blob.RAW]


def test_a_tensor_made_whole_by_choice_is_proven_whole() -> None:
    """Its `touched` is then the base's fingerprint, not that of the weights that change."""
    old = a_real_one().base[0]
    new = old.copy()
    new[:-700] = 0x3F80
    some = one_tensor(old, new)
    assert taken(some) == [blob.RAW]
    (change,) = codec.decode(smallest(some), some.schema, "delta")
    replica = Replica(some.schema, [fingerprint(old, some.schema.tensors[0])], [old.copy()])
    replica.apply(change)
    assert np.array_equal(replica.bits[0], new)


def test_a_tensor_that_is_sent_whole_spoils_no_model() -> None:
    """A tensor that was reset costs the tensors beside it nothing."""
    real, reset = a_real_one(), a_reset_one()
    schema = Schema.of([TensorSpec(name, "BF16", (60_000,)) for name in "ab"])
    base, target = [real.base[0], reset.base[0]], [real.target[0], reset.target[0]]
    some = Delta(schema, base, target, between(schema, base, target))
    assert len(smallest(some)) < len(smallest(real)) + len(smallest(reset))


def test_a_model_of_many_small_tensors_pays_almost_nothing_per_tensor() -> None:
    """At most 30 bytes more than one tensor with the same changes: 16 are the fingerprints, 4 the
    hash. All share one model."""
    some = delta([TensorSpec(f"{n:04}", "BF16", (256,)) for n in range(1500)], 0.05, 3)
    old, new = np.concatenate(some.base), np.concatenate(some.target)
    data, together = smallest(some), smallest(one_tensor(old, new))
    n = len(some.changes)
    assert n > 1490
    assert set(taken(some)) == {blob.HAZARD}
    assert (len(data) - len(together)) / n < 30
    models = blob.parse_blob(data, some.schema, "delta").sections[blob.HAZARD_MODELS]
    assert len(models) < 100
    (gap,) = codec.encode_delta(some.schema, some.changes)
    assert len(data) < len(gap)


def test_lanes_and_tiles_cost_little() -> None:
    """Twelve bytes a lane of two kilobytes; four shards cost under two percent here."""
    some = delta([TensorSpec("w", "BF16", (1000, 1000))], 0.2, 4)
    whole, tiled = smallest(some), smallest(some, shards=4)
    (part,) = forced.parts_of(tiled, some.schema)
    assert len({lane.tile for lane in part.lanes}) == 16
    assert len(tiled) < 1.02 * len(whole)
    words = blob.parse_blob(whole, some.schema, "delta").sections[blob.HAZARD_WORDS]
    assert len(words) / len(forced.parts_of(whole, some.schema)[0].lanes) > 1500


def test_encoders_refuse_disorder_and_a_base_of_another_shape() -> None:
    """The caller's mistakes are told as such."""
    some = delta([TensorSpec(name, "BF16", (50, 20)) for name in "ab"], 0.5, 5)
    with pytest.raises(ValueError, match="schema order"):
        forced.encode(some.schema, some.changes[::-1], some.bits)
    with pytest.raises(ValueError, match="weights before the change"):
        list(codec.encode_delta(some.schema, some.changes, codec="hazard"))
    for wrong in (some.base[0][:-1], some.base[0].astype(np.uint32)):
        with pytest.raises(ValueError, match="as base of"):
            forced.encode(some.schema, some.changes, lambda _, wrong=wrong: wrong)
    with pytest.raises(ValueError, match="shards"):
        forced.encode(some.schema, some.changes, some.bits, shards=0)


@pytest.mark.parametrize("dtype", STEPPED)
def test_another_base_is_refused_where_it_matters(dtype: str) -> None:
    """Any bit of a weight that changes, and the exponent of any on a lane's way where its rate is
    another; the rest of the base has no say."""
    some = delta([TensorSpec("w", dtype, (23, 20))], 0.5, 6)
    data = forced.encode(some.schema, some.changes, some.bits)
    (part,) = forced.parts_of(data, some.schema)
    (change,) = some.changes
    assert change.indices is not None
    changed, last = set(change.indices.tolist()), int(change.indices[-1])
    rates, shift = part.tables.rates, part.tables.shift
    seen: Counter[tuple[bool, bool]] = Counter()
    for bit in range(8 * part.spec.itemsize):
        for place in range(part.spec.numel):
            other = some.base[0].copy()
            before = other[place] >> shift
            other[place] ^= other.dtype.type(1 << bit)
            slower = rates[before] != rates[other[place] >> shift]
            matters = place in changed or bool(place < last and slower)
            refused = not decodes(data, some, other)
            assert refused == matters, (bit, place)
            seen[place in changed, matters] += 1
    assert min(seen[True, True], seen[False, True], seen[False, False]) > 100


def decodes(data: bytes, some: Delta, base: order.Unsigned) -> bool:
    """Whether the blob decodes against a base, which then gives the changes that were meant."""
    try:
        (back,) = codec.decode(data, some.schema, "delta", codec.HostLanes(lambda _: base))
    except FormatError:
        return False
    assert np.array_equal(back.indices, some.changes[0].indices)
    assert np.array_equal(back.steps, some.changes[0].steps)
    return True


@pytest.mark.parametrize(("shards", "bytes_per_change"), [(1, 6), (2, 20)])
def test_decoding_takes_the_memory_of_what_it_gives(shards: int, bytes_per_change: int) -> None:
    """An int32 and an int16 per change, for tiles twice that and what orders them; the words once;
    and half a megabyte."""
    some = delta([TensorSpec("w", "BF16", (1500, 1400))], 0.1, 7)
    data = smallest(some, shards)
    decoder = codec.HostLanes(some.bits)
    assert len(forced.parts_of(data, some.schema)[0].lanes) > 16

    def run() -> int:
        tracemalloc.start()
        n = sum(c.nnz for c in codec.decode(data, some.schema, "delta", decoder))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert n > 100_000
        return peak - bytes_per_change * n

    run()
    assert run() < len(data) + (1 << 19)


def test_small_tensors_are_decoded_some_at_a_time() -> None:
    """The changes of a blob of many tensors are never all in memory."""
    some = delta([TensorSpec(f"{n:02}", "BF16", (200, 200)) for n in range(40)], 0.3, 8)
    data = smallest(some)
    tracemalloc.start()
    n = sum(c.nnz for c in codec.decode(data, some.schema, "delta", codec.HostLanes(some.bits)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n > 400_000
    assert peak < len(data) + 6 * (n // 4)


def test_the_script_makes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants in the package are what the script makes, byte for byte."""
    made = tmp_path / "tables.bin"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(made)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert left.value.code == 0
    assert made.read_bytes() == tables.PATH.read_bytes()


def test_the_search_for_a_sum_is_exact() -> None:
    """The decoder's inverse of F is right at every node and for a spread of states, and sums of
    hazards up to the limit never fall."""
    nodes = tables.POSITIONS
    f = [hazard.loops._cumulated.py_func(y, nodes) for y in range(0, tables.LIMIT + 1, 37)]
    assert f == sorted(f)
    for u in [*range(0, 1 << 24, 9973), (1 << 24) - 1, *(int(n) for n in nodes[:4097:7])]:
        if u >= 1 << 24:
            continue
        y = int(hazard.loops._last_below.py_func(u, nodes, tables.NODE_OF))
        assert int(hazard.loops._cumulated.py_func(y, nodes)) <= u
        if y < tables.LIMIT:
            assert int(hazard.loops._cumulated.py_func(y + 1, nodes)) > u
