"""What happens to weights after loading is noticed, and a packing is learned or given up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from vllm_delta.engine import cpu, loading  # noqa: E402

Act = Callable[[nn.Module], object]


class Holder:
    """Stands for one of vLLM's own objects that a layer holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        return self.tensor


Holder.__module__ = "vllm.model_executor.layers.holder"


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64))
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_()
    model.register_buffer("scale", torch.ones(1))
    model.cache = torch.zeros(9)
    return model


def after(act: Act) -> tuple[nn.Module, loading.LoadReport]:
    model = make()
    before = loading.look(model)
    act(model)
    return model, loading.compare(before, loading.look(model), cpu.take_packed())


def is_clean(report: loading.LoadReport) -> bool:
    return not (report.permutations or report.unexplained or report.problems)


def rebind(model: Any, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model[0].weight = nn.Parameter(new(model[0].weight.data), requires_grad=False)


def nothing(model: Any) -> None:
    pass


def new_scale(model: Any) -> None:
    model.scale = torch.ones(1)


def view_kept(model: Any) -> None:
    model.view = Holder(model[0].weight.t())


def cache_made_anew(model: Any) -> None:
    model.cache = torch.zeros(9)


@pytest.mark.parametrize("act", [nothing, new_scale, view_kept, cache_made_anew])
def test_harmless_habits_are_not_reported(act) -> None:
    """Views of weights and values that did not change are no reason to refuse a model."""
    _, report = after(act)
    assert is_clean(report)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m: rebind(m, lambda w: w.t().contiguous()), "shape"),
        (lambda m: rebind(m, lambda w: w.t().contiguous().t()), "strides"),
        (lambda m: rebind(m, lambda w: w.half()), "type"),
        (lambda m: rebind(m, lambda w: w.flip(0)), "order"),
        (lambda m: m[0].weight.copy_(m[0].weight.flip(1)), "order"),
        (lambda m: m[0].weight.mul_(2), "values"),
    ],
    ids=["transposed", "restrided", "cast", "moved", "permuted in place", "scaled in place"],
)
def test_a_weight_that_is_not_what_was_loaded_is_reported(act, message) -> None:
    """A change of form, order or value is unexplained, at that weight's storage alone."""
    model, report = after(act)
    address = model[0].weight.untyped_storage().data_ptr()
    assert list(report.unexplained) == [address]
    assert message in report.unexplained[address]
    assert report.problems == ()


def test_a_copy_of_equal_values_is_told_from_a_permutation_only_if_they_differ() -> None:
    """A weight copied as it was is fine; one whose values are all alike hides its order."""
    _, report = after(lambda m: rebind(m, torch.clone))
    assert is_clean(report)
    model = make()
    model[0].weight.fill_(2)
    before = loading.look(model)
    rebind(model, torch.clone)
    report = loading.compare(before, loading.look(model), {})
    assert ["order is unknown" in reason for reason in report.unexplained.values()] == [True]


def keep(model: Any, kept: Any) -> None:
    model.kept = kept


def closure(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x @ tensor


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda w: w, ".kept"),
        (lambda w: [0, {"k": (w,)}], ".kept.1.k.0"),
        (Holder, ".kept.tensor"),
        (closure, ".kept.tensor"),
        (lambda w: functools.partial(torch.add, w), ".kept.args.0"),
        (lambda w: Holder(w).get, ".kept.self.tensor"),
    ],
    ids=["attribute", "containers", "object", "closure", "partial", "method"],
)
def test_private_copies_are_found_wherever_a_layer_keeps_them(wrap, path) -> None:
    """A new tensor that is no view of a weight is a problem, named by the path to it."""
    _, report = after(lambda m: keep(m, wrap(m[0].weight.clone())))
    assert [name for name, _ in report.problems] == [path]


def test_a_private_tensor_that_is_filled_is_found() -> None:
    """A tensor that was there before but has other values now is a problem too."""
    _, report = after(lambda m: m.cache.fill_(1))
    assert [name for name, _ in report.problems] == [".cache"]


def test_a_weight_that_is_gone_is_a_problem() -> None:
    """A weight replaced by an empty one lives on somewhere else."""
    _, report = after(lambda m: rebind(m, lambda w: w[:0]))
    assert [name for name, _ in report.problems] == ["0.weight"]


def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Groups 16 rows and transposes each group, as vLLM's CPU experts are packed."""
    n, rows, cols = weight.shape
    return weight.view(n, rows // 16, 16, cols).transpose(2, 3).contiguous().view(n, rows, cols)


def scramble(weight: torch.Tensor, isa: str) -> torch.Tensor:
    order = torch.randperm(weight[0].numel(), generator=torch.Generator().manual_seed(1))
    return weight.flatten(1)[:, order].view(weight.shape)


def alternate(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Packs the first expert only: what one expert teaches is wrong for the others."""
    return torch.cat([pack(weight[:1], isa), weight[1:]])


def lose(weight: torch.Tensor, isa: str) -> torch.Tensor:
    return torch.zeros_like(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_packing_is_learned_exactly(dtype) -> None:
    """The learned digits say where every element of every expert went."""
    cpu.take_packed()
    weight = torch.randn(3, 32, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    packed = cpu._learning(pack)(weight, "vec")
    [(address, digits)] = cpu.take_packed().items()
    assert address == packed.untyped_storage().data_ptr()
    assert digits == ((24, 16), (16, 1), (2, 384), (3, 768))
    rest, moved = np.arange(weight.numel()), np.zeros(weight.numel(), dtype=np.int64)
    for radix, stride in digits:
        moved += rest % radix * stride
        rest //= radix
    assert torch.equal(packed.flatten()[moved], weight.flatten())
    assert cpu.take_packed() == {}


@pytest.mark.parametrize("packing", [scramble, alternate, lose])
def test_a_packing_that_is_not_understood_is_not_explained(packing) -> None:
    """No digits are kept for a packing that they would describe wrongly."""
    cpu.take_packed()
    weight = torch.randn(3, 32, 24, generator=torch.Generator().manual_seed(2))
    cpu._learning(packing)(weight, "vec")
    assert cpu.take_packed() == {}


@given(st.data())
def test_factor_reproduces_or_gives_up(data) -> None:
    """Digits made from a permutation give that permutation; mixed-radix ones always factor."""
    radices = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(radices))))
    shape = [radices[place] for place in order]
    moved = np.arange(np.prod(shape)).reshape(shape).transpose(np.argsort(order)).ravel()
    spoil = data.draw(st.booleans())
    if spoil:
        i, j = data.draw(st.tuples(*[st.integers(0, moved.size - 1)] * 2))
        moved[[i, j]] = moved[[j, i]]
    digits = cpu.factor(moved)
    assert digits is not None or spoil
    if digits is not None:
        rest, made = np.arange(moved.size), np.zeros_like(moved)
        for radix, stride in digits:
            made += rest % radix * stride
            rest //= radix
        assert np.array_equal(made, moved)


def test_a_packed_weight_is_explained_by_its_permutation() -> None:
    """A weight whose packing was learned is no surprise, and its report carries the digits."""

    def act(model: Any) -> None:
        experts = cpu._learning(pack)(model[0].weight.data.view(1, 128, 64), "vec")
        model[0].weight = nn.Parameter(experts.view(128, 64), requires_grad=False)

    model, report = after(act)
    address = model[0].weight.untyped_storage().data_ptr()
    assert report.unexplained == {}
    assert report.problems == ()
    assert address in report.addresses
    assert report.permutations == {address: ((64, 16), (16, 1), (8, 1024), (1, 8192))}
