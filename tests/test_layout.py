"""Rectangles against a model that writes every element out, and the two proofs built on them."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from vllm_delta.errors import BaseMismatchError, LayoutError
from vllm_delta.fingerprint import root
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import (
    Coverage,
    ParameterSpec,
    RankLayout,
    Rectangle,
    Strided,
    find_gap,
    judge,
)

MASK = (1 << 64) - 1
SCHEMA = Schema.of([TensorSpec("a", "BF16", (6, 4)), TensorSpec("b", "BF16", (5,))])


def places(rectangle: Rectangle) -> dict[int, int]:
    """Flat index to offset of every element, by walking the rectangle."""
    numbers = np.arange(1 << 14)
    views = [
        as_strided(numbers[offset:], rectangle.sizes, [8 * stride for stride in strides])
        for offset, strides in (
            (rectangle.source_offset, rectangle.source_strides),
            (rectangle.target_offset, rectangle.target_strides),
        )
    ]
    return dict(zip(views[0].ravel().tolist(), views[1].ravel().tolist(), strict=True))


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, dict[int, int], Rectangle]:
    """What a loader does: part of a tensor copied to a part of a parameter, axes in any order."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    source = np.arange(math.prod(shape)).reshape(shape)
    source = source[tuple(_part(draw, size) for size in shape)]
    source = source.transpose(draw(st.permutations(range(len(shape)))))
    margins = [draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) for _ in shape]
    room = [n + sum(margin) for n, margin in zip(source.shape, margins, strict=True)]
    start = draw(st.integers(0, 9))
    target = np.arange(start, start + math.prod(room)).reshape(room)
    inner = [slice(low, low + n) for n, (low, _) in zip(source.shape, margins, strict=True)]
    target = target[tuple(inner)]
    order = draw(st.permutations(range(len(shape))))
    source, target = source.transpose(order), target.transpose(order)
    rectangle = Rectangle(
        0,
        source.shape,
        int(source.flat[0]),
        tuple(stride // 8 for stride in source.strides),
        "p",
        int(target.flat[0]),
        tuple(stride // 8 for stride in target.strides),
    )
    expected = dict(zip(source.ravel().tolist(), target.ravel().tolist(), strict=True))
    return math.prod(shape), expected, rectangle


def _part(draw: st.DrawFn, size: int) -> slice:
    low = draw(st.integers(0, size - 1))
    return slice(low, draw(st.integers(low + 1, size)), draw(st.integers(1, 2)))


@settings(max_examples=300, deadline=None)
@given(copies(), st.data())
def test_locate_finds_exactly_the_elements_of_a_copy(copy, data) -> None:
    """For any strided copy and any ascending indices, locate says where each element went."""
    numel, expected, rectangle = copy
    chosen = data.draw(st.lists(st.integers(0, numel - 1), unique=True, max_size=numel))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    indices = np.array(sorted(chosen), dtype=dtype)
    positions, offsets = rectangle.locate(indices)
    assert positions.dtype == offsets.dtype == np.int64
    hits = [place for place, index in enumerate(indices.tolist()) if index in expected]
    assert positions.tolist() == hits
    assert offsets.tolist() == [expected[int(indices[place])] for place in hits]


@settings(max_examples=200, deadline=None)
@given(copies())
def test_normal_form_keeps_every_element(copy) -> None:
    """Merging dimensions changes neither the map nor the number of elements."""
    _, expected, rectangle = copy
    assert places(rectangle) == expected
    assert rectangle.numel == len(expected)
    assert list(rectangle.source_strides) == sorted(rectangle.source_strides, reverse=True)


@settings(max_examples=200, deadline=None)
@given(copies(), copies())
def test_regions_are_equal_exactly_when_the_elements_are(one, other) -> None:
    """Replicas are recognised however their parameters are laid out, and nothing else is."""
    same = set(one[1]) == set(other[1])
    assert (one[2].region == other[2].region) == same


def test_regions_of_a_transposed_and_a_plain_replica_are_equal() -> None:
    """A transposed copy of a block holds the same elements as a plain one."""
    plain = Rectangle(0, (4, 6), 0, (6, 1), "p", 0, (6, 1))
    transposed = Rectangle(0, (4, 6), 0, (6, 1), "q", 3, (1, 4))
    assert plain.region == transposed.region
    assert plain.sizes == (24,)
    assert transposed.sizes == (4, 6)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_locate_at_the_edge_of_the_index_types(dtype) -> None:
    """Spans that end past what int32 holds lose no index."""
    rectangle = Rectangle(0, (1 << 32,), 5, (1,), "p", 1 << 33, (1,))
    top = np.iinfo(np.int32).max
    positions, offsets = rectangle.locate(np.array([4, 5, top], dtype=dtype))
    assert positions.tolist() == [1, 2]
    assert offsets.tolist() == [1 << 33, (1 << 33) + top - 5]


@pytest.mark.parametrize(
    ("sizes", "source", "target"),
    [
        ((2, 0), (1, 1), (1, 1)),
        ((4,), (0,), (1,)),
        ((4,), (1,), (0,)),
        ((3, 3), (2, 1), (3, 1)),
        ((3, 3), (3, 1), (2, 1)),
    ],
)
def test_a_rectangle_that_is_no_bijection_is_refused(sizes, source, target) -> None:
    """An empty rectangle, or one that holds an element twice, cannot be made."""
    with pytest.raises(ValueError, match=r"rectangle|apart"):
        Rectangle(0, sizes, 0, source, "p", 0, target)


@st.composite
def permutations(draw: st.DrawFn) -> tuple[list[tuple[int, int]], np.ndarray]:
    """A mixed-radix permutation: its digits, and where each offset goes."""
    radices = draw(st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=4))
    strides, weight = [0] * len(radices), 1
    for digit in draw(st.permutations(range(len(radices)))):
        strides[digit] = weight
        weight *= radices[digit]
    moved, rest = np.zeros(weight, dtype=np.int64), np.arange(weight)
    for radix, stride in zip(radices, strides, strict=True):
        moved += rest % radix * stride
        rest //= radix
    return list(zip(radices, strides, strict=True)), moved


@settings(max_examples=400, deadline=None)
@given(permutations(), st.data())
def test_a_permuted_rectangle_is_right_or_refused(permutation, data) -> None:
    """Composing a rectangle with a permutation moves every element, or says that it cannot."""
    digits, moved = permutation
    n = data.draw(st.sampled_from([k for k in range(1, moved.size + 1) if moved.size % k == 0]))
    start = n * data.draw(st.integers(0, moved.size // n - 1))
    cols = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    rectangle = Rectangle(0, (n // cols, cols), 7, (2 * cols, 1), "p", start, (cols, 1))
    after = rectangle.permuted(digits)
    if start == 0 and n == moved.size and cols == n:
        assert after is not None
    if after is not None:
        assert places(after) == {k: moved[v] for k, v in places(rectangle).items()}


def test_expert_rectangles_survive_the_packing_that_vllm_does_on_cpu() -> None:
    """Experts of [8, 128, 64], packed 16 rows at a time, stay rectangles, row and column blocks."""
    digits = [(64, 16), (16, 1), (64, 1024)]
    moved = np.arange(1 << 16).reshape(64, 16, 64).transpose(0, 2, 1).ravel().argsort()
    # Element k of a [64, 16, 64] block moves to where the transposed block holds it.
    for expert, half in itertools.product(range(8), range(2)):
        base = expert * 8192 + half * 4096
        rectangle = Rectangle(0, (64, 64), 64 * half, (128, 1), "w", base, (64, 1))
        after = rectangle.permuted(digits)
        assert after is not None
        positions, offsets = after.locate(np.arange(64 * 128))
        before = rectangle.locate(np.arange(64 * 128))
        assert np.array_equal(positions, before[0])
        assert np.array_equal(offsets, moved[before[1]])


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, list[Strided]]:
    """A tensor cut into blocks along its axes, again and again."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    blocks = [np.arange(math.prod(shape)).reshape(shape)]
    for _ in range(draw(st.integers(0, 4))):
        block = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, block.shape[axis]))
        blocks += [part for part in np.split(block, [cut], axis) if part.size]
    parts = [
        Strided(int(b.flat[0]), b.shape, tuple(stride // 8 for stride in b.strides))
        for b in draw(st.permutations(blocks))
    ]
    return math.prod(shape), parts


@settings(max_examples=300, deadline=None)
@given(tilings(), st.data())
def test_find_gap_sees_every_hole_and_overlap(tiling, data) -> None:
    """A tiling has no gap; without one part, or with one part twice, it has."""
    numel, parts = tiling
    assert find_gap(parts, numel) is None
    victim = data.draw(st.integers(0, len(parts) - 1))
    assert "missing" in str(find_gap(parts[:victim] + parts[victim + 1 :], numel))
    assert "twice" in str(find_gap([*parts, parts[victim]], numel))
    assert "missing" in str(find_gap(parts, numel + 1))
    assert "past the end" in str(find_gap(parts, numel - 1))


def test_find_gap_needs_no_memory_for_blocks_of_rows_and_columns() -> None:
    """Row blocks, column blocks and fused experts are decided by their bounds alone."""
    huge = 1 << 50
    rows = [Strided(k * huge, (huge,), (1,)) for k in range(4)]
    columns = [Strided(k * 1024, (huge, 1024), (4096, 1)) for k in range(4)]
    assert find_gap(rows, 4 * huge) is None
    assert find_gap(columns, 4096 * huge) is None
    assert find_gap(columns[1:], 4096 * huge) == "element 0 is missing"


def layout(rank: int, *rectangles: Rectangle) -> RankLayout:
    parameters = {"p": ParameterSpec("BF16", 99)}
    return RankLayout(SCHEMA.digest, rank, rectangles, parameters)


def half(rank: int) -> Rectangle:
    """A column block of tensor a."""
    return Rectangle(0, (6, 2), 2 * rank, (4, 1), "p", 0, (2, 1))


WHOLE_B = Rectangle(1, (5,), 0, (1,), "p", 12, (1,))


def test_coverage_accepts_shards_and_replicas() -> None:
    """A sharded tensor and a replicated one are each held exactly once."""
    coverage = Coverage(SCHEMA, [layout(0, half(0), WHOLE_B), layout(1, half(1), WHOLE_B)])
    totals = coverage.total([{0: MASK, 1: 7}, {0: 3, 1: 7}])
    assert totals == {0: 2, 1: 7}
    assert coverage.total([{1: 7}, {1: 7}]) == {1: 7}


def test_coverage_counts_two_copies_on_one_rank_once() -> None:
    """A tensor that a rank keeps in two parameters is counted once and must agree."""
    other = Rectangle(1, (5,), 0, (1,), "q", 0, (1,))
    coverage = Coverage(SCHEMA, [layout(0, half(0), half(1), WHOLE_B, other)])
    assert coverage.total([{0: 1, 1: 1, 2: 5, 3: 5}]) == {0: 2, 1: 5}
    with pytest.raises(BaseMismatchError, match=r"disagree.*name='b'"):
        coverage.total([{2: 5, 3: 6}])


@pytest.mark.parametrize(
    ("layouts", "name"),
    [
        ([layout(0, half(0), half(1))], "b"),
        ([layout(0, half(0), WHOLE_B), layout(1, half(0), WHOLE_B)], "a"),
        (
            [
                layout(0, half(0), half(1), WHOLE_B),
                layout(1, Rectangle(0, (24,), 0, (1,), "p", 0, (1,))),
            ],
            "a",
        ),
    ],
    ids=["tensor without a rectangle", "half a tensor", "overlapping parts"],
)
def test_coverage_names_a_tensor_that_is_not_held_once(layouts, name) -> None:
    """A hole over all ranks, or parts that overlap and differ, is refused by name."""
    with pytest.raises(LayoutError, match="exactly once") as caught:
        Coverage(SCHEMA, layouts)
    assert caught.value.name == name


def test_coverage_refuses_a_layout_of_another_checkpoint() -> None:
    """Layouts of different schemas are never added up."""
    with pytest.raises(LayoutError, match="another checkpoint"):
        Coverage(SCHEMA, [RankLayout("0" * 64, 3, (), {})])


def test_replicas_that_disagree_are_named_with_their_ranks() -> None:
    """A replica damaged on one rank is a base mismatch that names tensor and ranks."""
    coverage = Coverage(SCHEMA, [layout(0, half(0), WHOLE_B), layout(1, half(1), WHOLE_B)])
    with pytest.raises(BaseMismatchError) as caught:
        coverage.total([{1: 7}, {1: 8}])
    assert (caught.value.name, caught.value.ranks) == ("b", [0, 1])
    with pytest.raises(BaseMismatchError):
        coverage.total([{1: 7}, {}])


def test_a_layout_survives_its_plain_form() -> None:
    """What travels between processes is JSON and gives the same layout back."""
    before = layout(1, half(1), WHOLE_B)
    assert RankLayout.from_dict(json.loads(json.dumps(before.to_dict()))) == before


def test_judge_returns_the_target_fingerprints() -> None:
    """A delta whose touched part and change are right leads to the target's fingerprints."""
    after = judge(SCHEMA, [MASK, 5], [(0, 11, 1)], {0: 11}, {0: 2}, root(SCHEMA, [1, 5]))
    assert after == [1, 5]


@pytest.mark.parametrize(
    ("fingerprints", "touched", "change", "target", "message"),
    [
        ([9, 5], {0: 12}, {0: 2}, [11, 5], "touches is not its base's"),
        ([9, 5], {}, {0: 2}, [11, 5], "touches is not its base's"),
        ([9, 5], {0: 11}, {0: 3}, [11, 5], "tensor would not become"),
        ([8, 5], {0: 11}, {0: 2}, [11, 5], "tensor would not become"),
        ([9, 6], {0: 11}, {0: 2}, [11, 5], "weights would not become"),
    ],
    ids=["damaged", "untouched", "wrong change", "wrong base", "another tensor"],
)
def test_judge_refuses(fingerprints, touched, change, target, message) -> None:
    """Anything that is not exactly the delta's base is refused, and the tensor named."""
    with pytest.raises(BaseMismatchError, match=message) as caught:
        judge(SCHEMA, fingerprints, [(0, 11, 11)], touched, change, root(SCHEMA, target))
    assert caught.value.facts.get("name", "a") == "a"


def test_judge_counts_the_other_bad_tensors() -> None:
    """The first bad tensor is named, the others are counted."""
    entries = [(0, 1, 1), (1, 1, 1)]
    with pytest.raises(BaseMismatchError) as caught:
        judge(SCHEMA, [0, 0], entries, {}, {}, root(SCHEMA, [1, 1]))
    assert (caught.value.name, caught.value.n_others) == ("a", 1)
