"""Folding deltas: what one merged change does is bit for bit what its parts did."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta import merge as merge_module
from vllm_delta.codec import Change, HostLanes, decode, encode_delta
from vllm_delta.codec.order import UNSIGNED, add_steps
from vllm_delta.errors import DeltaError
from vllm_delta.fingerprint import fingerprint
from vllm_delta.format import DTYPES, Schema, TensorSpec, Version
from vllm_delta.merge import History, Segment, fold, merge, most_bytes
from vllm_delta.shadow import Shadow

STEPPED = [name for name, dtype in DTYPES.items() if dtype.stepped]
OLDEST = Version(0, "0" * 64)


def same(actual: Change | None, wanted: Change | None) -> bool:
    if actual is None or wanted is None:
        return actual is wanted
    parts = zip(
        (actual.indices, actual.steps, actual.bits),
        (wanted.indices, wanted.steps, wanted.bits),
        strict=True,
    )
    equal = all(
        a is b or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in parts
    )
    names = ("tensor", "touched", "target")
    return equal and all(getattr(actual, name) == getattr(wanted, name) for name in names)


def folded(schema: Schema, versions: list[list[np.ndarray]], *, raw_above=1.0) -> Change | None:
    """The merged change of a one-tensor history, and beside it the proof that it is right."""
    first, shadow, parts = Shadow(schema, versions[0]), Shadow(schema, versions[0]), []
    for (bits,) in versions[1:]:
        change = shadow.diff(0, bits, raw_above=raw_above)
        if change is not None:
            parts.append(change)
            shadow.advance([change])
    if not parts:
        return None
    base = first.fingerprints[0]
    change = merge(schema, parts, versions[-1][0], base=base, raw_above=raw_above)
    if all(part.indices is not None for part in parts):
        assert same(change, first.diff(0, versions[-1][0], raw_above=raw_above))
    elif change is not None:
        assert (change.indices, change.touched, change.target) == (None, base, parts[-1].target)
        np.testing.assert_array_equal(change.bits, versions[-1][0])
    return change


@given(st.data())
@settings(max_examples=150)
def test_a_merged_change_is_the_difference_of_the_two_ends(data):
    """Whatever the values, the number of parts and what was replaced whole on the way."""
    dtype = data.draw(st.sampled_from(STEPPED))
    kind = UNSIGNED[DTYPES[dtype].itemsize]
    top = int(np.iinfo(kind).max)
    n = data.draw(st.integers(1, 12))
    values = st.lists(st.integers(0, top) | st.sampled_from([0, 1, top]), min_size=n, max_size=n)
    n_parts = data.draw(st.integers(1, 9))
    versions = [[np.array(data.draw(values), kind)] for _ in range(n_parts + 1)]
    schema = Schema((TensorSpec("w", dtype, (n,)),))
    folded(schema, versions, raw_above=data.draw(st.sampled_from([0.3, 0.7, 1.0])))


def test_every_pattern_comes_back_from_every_kind_of_step():
    """All 65,536 patterns, by steps that wrap around the order's ends on the way."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    schema = Schema((TensorSpec("w", "BF16", (256, 256)),))
    for steps in ((1, 1), (0x7FFF, 2), (-0x8000, -0x8000 + 1), (-1, 5, -3), (0x4000, 0x4000, 1)):
        versions = [patterns]
        for step in steps:
            versions.append(add_steps(versions[-1], np.full(1 << 16, step, np.int16)))
        change = folded(schema, [[bits] for bits in versions])
        np.testing.assert_array_equal(change.indices, np.arange(1 << 16))
        total = np.array(sum(steps)).astype(np.int16)
        assert set(change.steps.tolist()) == {int(total)}
        np.testing.assert_array_equal(add_steps(patterns, change.steps), versions[-1])


def test_changes_that_cancel_are_left_out():
    old = np.arange(100, dtype=np.uint16)
    schema = Schema((TensorSpec("w", "BF16", (100,)),))
    middle, end = old.copy(), old.copy()
    middle[10:20] += 1
    end[15:25] += 1
    change = folded(schema, [[old], [middle], [end]])
    assert change.indices.tolist() == [*range(15, 25)]
    assert folded(schema, [[old], [middle], [old]]) is None
    assert folded(schema, [[old], [middle], [end], [middle], [old]]) is None


def test_more_changes_than_the_limit_replace_the_tensor_whole():
    old = np.zeros(1000, np.uint16)
    schema = Schema((TensorSpec("w", "BF16", (1000,)),))
    one, two = old.copy(), old.copy()
    one[:200] = 1
    two[:301] = 1
    change = folded(schema, [[old], [one], [two]], raw_above=0.3)
    assert change.bits is two
    assert folded(schema, [[old], [one], [two]], raw_above=0.31).nnz == 301


def test_parts_that_do_not_lead_to_the_bits_at_hand_are_refused():
    """A part missing, one too many, or another base: nothing is made of it."""
    rng = np.random.default_rng(1)
    schema = Schema((TensorSpec("w", "F16", (50, 20)),))
    bits = rng.integers(0, 1 << 16, 1000, dtype=np.uint16)
    shadow, parts = Shadow(schema, [bits]), []
    base = shadow.fingerprints[0]
    for _ in range(3):
        bits = bits.copy()
        bits[rng.choice(1000, 90, replace=False)] += 1
        parts.append(shadow.diff(0, bits, raw_above=1.0))
        shadow.advance(parts[-1:])
    assert merge(schema, parts, bits, base=base) is not None
    other = bits.copy()
    other[parts[1].indices[3]] ^= 1
    for wrong, now, start in (
        (parts[:1] + parts[2:], bits, base),
        (parts[:2], bits, base),
        ([parts[0], *parts], bits, base),
        (parts, other, base),
        (parts, bits, base ^ 1),
    ):
        with pytest.raises(DeltaError, match="do not lead"):
            merge(schema, wrong, now, base=start)


# Whole deltas

SPECS = (
    TensorSpec("a.matrix", "BF16", (300, 70)),
    TensorSpec("b.counter", "I64", ()),
    TensorSpec("c.single", "F32", (64, 9)),
    TensorSpec("d.small", "F8_E4M3", (33,)),
    TensorSpec("e.still", "BF16", (40,)),
    TensorSpec("f.half", "F16", (999,)),
)
SCHEMA = Schema(SPECS)


class Chain:
    """Versions of a small checkpoint and the segments between them, in blobs of one codec."""

    def __init__(self, n_deltas: int, codec: str = "gap", *, whole: int | None = None) -> None:
        rng = np.random.default_rng(4)
        bits = [
            rng.integers(0, 1 << 8 * min(s.itemsize, 4), s.numel, dtype=UNSIGNED[s.itemsize])
            for s in SPECS
        ]
        self.versions = [bits]
        self.shadow = Shadow(SCHEMA, bits)
        self.segments: list[Segment] = []
        for number in range(n_deltas):
            self._step(rng, number, codec, whole=number == whole)

    def _step(self, rng, number: int, codec: str, *, whole: bool) -> None:
        bits = [b.copy() for b in self.versions[-1]]
        for place, spec in enumerate(SPECS):
            if spec.name == "b.counter":
                bits[place] += np.array(number % 2, bits[place].dtype)
            elif spec.name != "e.still":
                some = rng.choice(spec.numel, max(1, spec.numel // 12), replace=False)
                bits[place][some] += rng.choice(np.array([1, 255], bits[place].dtype), some.size)
        if whole:
            bits[0][:] = ~bits[0]
        before = Shadow(SCHEMA, self.versions[-1])
        changes = [before.diff(i, b, raw_above=0.5) for i, b in enumerate(bits)]
        changes = [change for change in changes if change is not None]
        base = self.versions[-1].__getitem__
        blobs = list(encode_delta(SCHEMA, changes, codec=codec, base=base, blob_bytes=900))
        prints = np.array(before.fingerprints, np.uint64)
        self.segments.append(
            Segment(
                before.version(number),
                Version(number + 1, "0" * 64),
                prints,
                blobs,
                sum(change.nnz for change in changes),
                sum(map(len, blobs)),
            )
        )
        self.versions.append(bits)
        self.shadow.advance(changes)

    def decoded(self, first: int) -> list[Segment]:
        """The segments from one on, in blobs that need no base, whatever theirs are."""
        out = []
        for segment, bits in zip(self.segments[first:], self.versions[first:], strict=False):
            lanes = HostLanes(bits.__getitem__)
            changes = [c for blob in segment.blobs for c in decode(blob, SCHEMA, "delta", lanes)]
            blobs = list(encode_delta(SCHEMA, changes))
            out.append(Segment(segment.base, segment.target, segment.fingerprints, blobs, 0, 0))
        return out


@pytest.mark.parametrize("whole", [None, 0, 2, 3])
@pytest.mark.parametrize("to", ["gap", "hazard"])
@pytest.mark.parametrize("source", ["gap", "hazard"])
def test_deltas_of_any_codec_fold_to_one_of_any_codec(source, to, whole):
    """What the merged blobs decode to leads from the first version's bits to the last one's."""
    chain = Chain(4, source, whole=whole)
    segments = chain.segments if source == "gap" else chain.decoded(0)
    merged = list(fold(SCHEMA, segments, chain.shadow.bits.__getitem__, raw_above=0.5))
    base = chain.versions[0].__getitem__
    blobs = encode_delta(SCHEMA, merged, codec=to, base=base, blob_bytes=2000)
    replica = Shadow(SCHEMA, chain.versions[0])
    lanes = HostLanes(replica.bits.__getitem__)
    for blob in blobs:
        for change in decode(blob, SCHEMA, "delta", lanes):
            replica.advance([change])
    for place, spec in enumerate(SPECS):
        np.testing.assert_array_equal(replica.bits[place], chain.versions[-1][place], spec.name)
        assert replica.fingerprints[place] == fingerprint(chain.versions[-1][place], spec)
    names = [SPECS[change.tensor].name for change in merged]
    assert names == sorted(names)
    assert "e.still" not in names
    assert "b.counter" in names, "it was replaced on the way, and nothing says what it was before"


def test_folding_what_was_folded_is_folding_all():
    chain = Chain(8)
    bits = chain.shadow.bits.__getitem__
    at_four = chain.versions[4].__getitem__
    halves = []
    for part, now in ((chain.segments[:4], at_four), (chain.segments[4:], bits)):
        blobs = list(encode_delta(SCHEMA, fold(SCHEMA, part, now, raw_above=1.0)))
        halves.append(Segment(part[0].base, part[-1].target, part[0].fingerprints, blobs, 0, 0))
    at_once = list(fold(SCHEMA, chain.segments, bits, raw_above=1.0))
    by_halves = list(fold(SCHEMA, halves, bits, raw_above=1.0))
    assert len(at_once) == len(by_halves) > 3
    assert all(same(a, b) for a, b in zip(at_once, by_halves, strict=True))


# What is kept


def numbered(number: int, n_bytes: int = 10, payload_bytes: int = 1 << 20) -> Segment:
    versions = [Version(n, f"{n:064x}") for n in (number - 1, number)]
    return Segment(*versions, np.zeros(0, np.uint64), [b"x" * n_bytes], 5, payload_bytes)


def run(history: History, first: int, last: int, *, replace=True) -> dict[int, list[list[int]]]:
    """Versions come and are folded where due; the bounds of what was folded at each version."""
    found: dict[int, list[list[int]]] = {}
    for number in range(first + 1, last + 1):
        history.add(numbered(number), at_most_bytes=1e9)
        for window in history.due():
            bounds = [window[0].base.number, *(segment.target.number for segment in window)]
            found.setdefault(number, []).append(bounds)
            assert all(a.target == b.base for a, b in pairwise(window))
            if replace:
                ends = (window[0].base, window[-1].target)
                history.replace(Segment(*ends, window[0].fingerprints, [b"y"], 5, 4 << 20))
    return found


def test_each_stride_is_due_where_its_multiples_end_and_begins_from_what_was_folded():
    found = run(History((4, 16)), 0, 33)
    assert sorted(found) == [4, 8, 12, 16, 20, 24, 28, 32]
    assert found[4] == [[0, 1, 2, 3, 4]]
    assert found[16] == [[12, 13, 14, 15, 16], [0, 4, 8, 12, 16]]
    assert found[32] == [[28, 29, 30, 31, 32], [16, 20, 24, 28, 32]]


def test_what_was_not_folded_is_still_there_for_the_larger_stride():
    found = run(History((4, 16)), 0, 16, replace=False)
    assert found[16][1] == [*range(17)]


@pytest.mark.parametrize("first", range(1, 17))
def test_a_history_that_begins_in_between_waits_for_the_next_multiple(first):
    found = run(History((4, 16)), first, 40)
    fours = [n for n in range(4, 41, 4) if n - 4 >= first]
    assert sorted(found) == fours
    assert [n for n in found if len(found[n]) == 2] == [n for n in (16, 32) if n - 16 >= first]


def test_only_what_a_stride_still_needs_is_kept():
    history = History((4, 16))
    run(history, 0, 15)
    assert [s.base.number for s in history._segments] == [0, 4, 8, 12, 13, 14]
    run(history, 15, 17)
    assert [s.base.number for s in history._segments] == [16]
    history = History((4, 16))
    run(history, 5, 11)
    assert [s.base.number for s in history._segments] == [8, 9, 10]
    run(history, 11, 13)
    assert [s.base.number for s in history._segments] == [12]


def test_without_strides_nothing_is_kept():
    history = History(())
    assert run(history, 0, 20) == {}
    assert history.n_bytes == 0


def test_a_history_that_takes_too_much_is_forgotten_and_begun_anew():
    history = History((4,))
    for number in (1, 2, 3):
        history.add(numbered(number, n_bytes=100), at_most_bytes=250)
        assert history.n_bytes == (100 * number if number < 3 else 0)
    assert sorted(run(history, 3, 12)) == [8, 12]


def test_what_cannot_save_enough_is_not_due():
    history = History((4,))
    for number in range(1, 5):
        history.add(numbered(number, payload_bytes=16 << 10), at_most_bytes=1e9)
    assert list(history.due()) == []
    history.add(numbered(5), at_most_bytes=1e9)
    for number in range(6, 9):
        history.add(numbered(number, payload_bytes=1), at_most_bytes=1e9)
    assert len(list(history.due())) == 1


def test_a_merged_delta_pays_from_a_quarter_and_64_kib_on():
    assert most_bytes([numbered(1, payload_bytes=1 << 20)] * 4) == 3 << 20
    assert most_bytes([numbered(1, payload_bytes=25_000)] * 4) == 100_000 - (64 << 10)
    assert merge_module.LARGEST_SHARE == 0.75
