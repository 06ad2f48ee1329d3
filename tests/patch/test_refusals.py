"""What the patcher refuses, notices and reports."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.patch.models import simple_rank, stepped
from vllm_delta.codec import Change
from vllm_delta.errors import LayoutError
from vllm_delta.fingerprint import MASK64, fingerprint
from vllm_delta.layout import ParameterSpec, Rectangle
from vllm_delta.patch import Patcher, Sums


def test_a_damaged_weight_that_the_delta_touches_is_seen_by_the_check() -> None:
    """The stored fingerprint knows nothing of the damage; `touched` from the resident bits does,
    whichever of the touched weights and whichever of its bits it is."""
    rank = simple_rank()
    patcher = rank.patcher()
    change = stepped(rank, 0, [3, 17, 90])
    patch = patcher.stage([change])
    assert patcher.check(patch).touched == {0: change.touched}
    for place, bit in itertools.product([3, 17, 90], range(16)):
        rank.storages["w"][place] ^= 1 << bit
        damaged = rank.storages["w"].copy()
        assert patcher.check(patch).touched != {0: change.touched}, (place, bit)
        assert np.array_equal(rank.storages["w"], damaged)
        rank.storages["w"][place] ^= 1 << bit
    rank.storages["w"][50] ^= 1
    assert patcher.check(patch).touched == {0: change.touched}, "the delta does not touch 50"


def test_a_delta_applied_twice_is_seen_by_the_check() -> None:
    """A second patch of the same delta finds other bits than the delta's base."""
    rank = simple_rank()
    patcher = rank.patcher()
    change = stepped(rank, 0, [0, 1, 2])
    patcher.apply(patcher.stage([change]))
    assert patcher.check(patcher.stage([change])).touched != {0: change.touched}


def test_apply_reports_the_change_of_what_was_really_there() -> None:
    """A weight that changed after the check shows in what `apply` returns, and comes back."""
    rank = simple_rank()
    patcher = rank.patcher()
    patch = patcher.stage([stepped(rank, 0, [3, 17, 90])])
    checked = patcher.check(patch)
    rank.storages["w"][17] ^= 0x0101
    damaged = rank.storages["w"].copy()
    applied = patcher.apply(patch)
    assert applied != checked.change
    spec = rank.schema.tensors[0]
    expected = fingerprint(rank.storages["w"], spec) - fingerprint(damaged, spec)
    assert applied == {0: expected & MASK64}
    patcher.rollback(patch)
    assert np.array_equal(rank.storages["w"], damaged)


def test_a_patch_is_applied_once_and_taken_back_once() -> None:
    """Applying what is applied, or rolling back what is not, is refused and writes nothing."""
    rank = simple_rank()
    patcher = rank.patcher()
    patch = patcher.stage([stepped(rank, 0, [3])])
    with pytest.raises(ValueError, match="not applied"):
        patcher.rollback(patch)
    patcher.apply(patch)
    after = rank.storages["w"].copy()
    with pytest.raises(ValueError, match="applied already"):
        patcher.apply(patch)
    assert np.array_equal(rank.storages["w"], after)
    patcher.rollback(patch)
    patcher.apply(patch)
    assert np.array_equal(rank.storages["w"], after)


def test_an_empty_patch_does_nothing() -> None:
    """No changes, no indices, or a tensor of another rank: no sums, no writes."""
    rank = simple_rank()
    before = rank.storages["w"].copy()
    patcher = rank.patcher()
    none = Change(0, np.empty(0, np.int32), np.empty(0, np.int16), None, 0, 0)
    for changes in ([], [none]):
        patch = patcher.stage(changes)
        assert patcher.check(patch) == Sums({}, {})
        assert patcher.apply(patch) == {}
        assert (patch.nnz, patch.n_bytes) == (0, 0)
    elsewhere = Patcher(rank.schema, replace(rank.layout, rectangles=()), rank.tensors)
    patch = elsewhere.stage([stepped(rank, 0, [3])])
    assert elsewhere.apply(patch) == {}
    assert elsewhere.scan() == {}
    assert len(patch.entries) == 1
    assert np.array_equal(rank.storages["w"], before)


def test_a_moved_storage_is_refused() -> None:
    """Re-binding a parameter's data is noticed by every call before a weight is read or written."""
    rank = simple_rank()
    parameter = torch.nn.Parameter(rank.tensors["w"], requires_grad=False)
    rank.tensors["w"] = parameter
    patcher = rank.patcher()
    patch = patcher.stage([stepped(rank, 0, [3])])
    address = parameter.data_ptr()
    patcher.apply(patch)
    assert parameter.data_ptr() == address
    patcher.rollback(patch)
    before = rank.storages["w"].copy()
    kept = parameter.data
    parameter.data = parameter.data.clone()
    for call in (patcher.scan, lambda: patcher.check(patch), lambda: patcher.apply(patch)):
        with pytest.raises(LayoutError, match=r"moved.*parameter='w'"):
            call()
    assert np.array_equal(rank.storages["w"], before)
    assert not patch.applied
    parameter.data = kept
    patcher.apply(patch)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("schema", "another checkpoint"),
        ("missing", "not in the model.*parameter='w'"),
        ("dtype", "another type.*name='w'"),
        ("itemsize", "another type.*name='w'"),
        ("short storage", "past the parameter's storage.*name='w'"),
        ("past the tensor", "past the checkpoint's tensor.*name='w'"),
        ("device", "main memory"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(what: str, message: str) -> None:
    """Every way in which layout, schema and tensors can disagree is refused at construction."""
    rank = simple_rank()
    layout, tensors = rank.layout, dict(rank.tensors)
    if what == "schema":
        layout = replace(layout, schema_digest="0" * 64)
    elif what == "missing":
        tensors = {}
    elif what == "dtype":
        layout = replace(layout, parameters={"w": ParameterSpec("F16", 128)})
    elif what == "itemsize":
        tensors["w"] = tensors["w"].float()
    elif what == "short storage":
        tensors["w"] = tensors["w"][:127].clone()
    elif what == "past the tensor":
        layout = replace(layout, rectangles=(Rectangle(0, (128,), 1, (1,), "w", 0, (1,)),))
    else:
        tensors["w"] = tensors["w"].to("meta")
    with pytest.raises(LayoutError, match=message):
        Patcher(rank.schema, layout, tensors)


def test_a_change_that_says_nothing_is_a_callers_mistake() -> None:
    """The entry of a reference has neither indices nor bits: it cannot be staged."""
    rank = simple_rank()
    patcher = rank.patcher()
    with pytest.raises(ValueError, match="neither"):
        patcher.stage([Change(0, None, None, None, 0, 0)])
    with pytest.raises(ValueError, match="127 elements"):
        patcher.stage([Change(0, None, None, np.zeros(127, np.uint16), 0, 0)])
