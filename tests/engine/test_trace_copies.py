"""The tracer on small models whose loaders do what loaders do, and what they must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from vllm_delta.engine.copies import check_whole, trace_copies  # noqa: E402
from vllm_delta.errors import LayoutError  # noqa: E402
from vllm_delta.format import Schema, TensorSpec  # noqa: E402

SCHEMA = Schema.of([TensorSpec("a", "F32", (4, 6)), TensorSpec("b", "F32", (3,))])

Load = Callable[["Model", dict[str, torch.Tensor]], object]


class Model(nn.Module):
    """Two parameters, a buffer, and a loader that is given as a function."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(24.0).view(4, 6), requires_grad=False)
        self.v = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("cache", torch.ones(5))
        self.loaded = 0
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(weights))


def plain(model: Model, weights: dict[str, torch.Tensor]) -> None:
    model.w.data.copy_(weights["a"])
    model.v.data.copy_(weights["b"])


def with_w(load: Callable[[Model, torch.Tensor], object]) -> Load:
    """A loader that loads ``v`` plainly and ``w`` as given."""

    def loader(model: Model, weights: dict[str, torch.Tensor]) -> None:
        load(model, weights["a"])
        model.v.data.copy_(weights["b"])

    return loader


def halves(model: Model, a: torch.Tensor) -> None:
    for n, part in enumerate(a.chunk(2, dim=1)):
        model.w.data.narrow(1, 3 - 3 * n, 3).copy_(part)


def transposed(model: Model, a: torch.Tensor) -> None:
    model.w.data.view(6, 4).copy_(a.t())


def rows(model: Model, a: torch.Tensor) -> None:
    for n, row in enumerate(a.unbind()):
        model.w.data[3 - n] = row


def through_copies(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a.contiguous().clone().to("cpu").detach().reshape(2, 12).view(4, 6))


@pytest.mark.parametrize(
    "load", [halves, transposed, rows, through_copies], ids=lambda f: f.__name__
)
def test_rectangles_say_what_the_loader_does(load) -> None:
    """Really loading numbered weights puts each number where the rectangles say."""
    model = Model(with_w(load))
    copies = trace_copies(model, SCHEMA)
    check_whole(copies, SCHEMA)
    assert torch.equal(model.w, torch.arange(24.0).view(4, 6))
    numbers = {"a": torch.arange(100.0, 124).view(4, 6), "b": torch.arange(200.0, 203)}
    model.load_weights(numbers.items())
    n_elements = 0
    for address, rectangles in copies.rectangles.items():
        resident = copies.homes[address].tensor.flatten()
        for rectangle in rectangles:
            spec = SCHEMA.tensors[rectangle.tensor]
            positions, offsets = rectangle.locate(torch.arange(spec.numel).numpy())
            assert torch.equal(resident[offsets], numbers[spec.name].flatten()[positions])
            n_elements += rectangle.numel
    assert n_elements == 27


def padded(model: Model, a: torch.Tensor) -> None:
    model.w[:2].data.copy_(a[:2])
    model.w[2:].data.fill_(0)


def test_filled_rows_are_padding() -> None:
    """What the loader fills with a constant needs no checkpoint element, and is not executed."""
    model = Model(with_w(padded))
    copies = trace_copies(model, SCHEMA)
    check_whole(copies, SCHEMA)
    assert sum(r.numel for parts in copies.rectangles.values() for r in parts) == 15
    assert torch.equal(model.w, torch.arange(24.0).view(4, 6))


def test_buffers_that_are_not_loaded_are_left_out() -> None:
    """A cache that no checkpoint tensor fills is no part of the layout."""
    model = Model(plain)
    copies = trace_copies(model, SCHEMA)
    check_whole(copies, SCHEMA)
    assert {copies.homes[address].name for address in copies.rectangles} == {"w", "v"}


def computed(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a * 1)


def concatenated(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(torch.cat(a.split(2)))


def cast(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a.to(torch.float64).to(torch.float32))


def read(model: Model, a: torch.Tensor) -> None:
    model.w.data.fill_(a[0, 0].item())


def added(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a)
    model.w.data.add_(1)


def indexed(model: Model, a: torch.Tensor) -> None:
    model.w.data.index_copy_(0, torch.arange(4), a)


def changed_source(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a.zero_())


def elsewhere(model: Model, a: torch.Tensor) -> None:
    torch.empty(4, 6).copy_(a)


def foreign(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(torch.zeros(4, 6))


def broadcast(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a[:1])


def swallowed(model: Model, a: torch.Tensor) -> None:
    try:
        computed(model, a)
    except LayoutError:
        model.w.data.copy_(a)


def rebound(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a)
    model.w.data = torch.zeros(4, 6)


def test_a_parameter_of_another_type_is_refused() -> None:
    """A copy that would convert is refused by the tensor's name, and says both types."""
    model = Model(plain)
    model.v = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    with pytest.raises(LayoutError, match=r"float64, the checkpoint has torch\.float32") as caught:
        trace_copies(model, SCHEMA)
    assert caught.value.name == "b"


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (computed, "a", "aten.mul.Tensor"),
        (concatenated, "a", "aten.cat.default"),
        (cast, "a", "aten._to_copy.default"),
        (read, "a", "aten._local_scalar_dense.default"),
        (added, "w", "in place by aten.add_.Tensor"),
        (indexed, "w", "in place by aten.index_copy_.default"),
        (changed_source, "a", "in place by aten.zero_.default"),
        (elsewhere, "a", "where the model keeps no weight"),
        (foreign, "w", "not the checkpoint's"),
        (broadcast, "a", "several places"),
        (swallowed, "a", "aten.mul.Tensor"),
        (rebound, "w", "another storage"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_loader_that_does_more_than_copy_is_refused(load, name, message) -> None:
    """Anything but a plain copy names the tensor and the operation; the model stays as it was."""
    model = Model(with_w(load))
    bodies = {n: (id(t), t.data_ptr()) for n, t in model.named_parameters()}
    with pytest.raises(LayoutError, match=message) as caught:
        trace_copies(model, SCHEMA)
    assert caught.value.name == name
    assert torch.equal(model.w, torch.arange(24.0).view(4, 6))
    assert {n: (id(t), t.data_ptr()) for n, t in model.named_parameters()} == bodies


def twice(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a)
    model.w.data[:1].copy_(a[1:2])


def overwritten(model: Model, a: torch.Tensor) -> None:
    model.w.data.copy_(a)
    model.w.data[3:].zero_()


def partly(model: Model, a: torch.Tensor) -> None:
    model.w.data[:3].copy_(a[:3])


def not_at_all(model: Model, a: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (twice, "element 0 is covered twice"),
        (overwritten, "element 18 is covered twice"),
        (partly, "element 18 is missing"),
        (not_at_all, "no tensor of the checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_parameter_that_is_not_filled_once_is_refused(load, message) -> None:
    """Two writers of one element, a hole, or nothing at all: refused by the parameter's name."""
    copies = trace_copies(Model(with_w(load)), SCHEMA)
    with pytest.raises(LayoutError, match=message) as caught:
        check_whole(copies, SCHEMA)
    assert caught.value.name == "w"


def test_a_parameter_in_a_shared_storage_is_refused() -> None:
    """Offsets count from the storage's start, so a parameter that has it not alone is refused."""
    model = Model(plain)
    model.w = nn.Parameter(torch.zeros(30)[6:].view(4, 6), requires_grad=False)
    with pytest.raises(LayoutError, match="shares its storage") as caught:
        check_whole(trace_copies(model, SCHEMA), SCHEMA)
    assert caught.value.name == "w"


def test_tied_parameters_are_one_home() -> None:
    """An alias shares its home; if the checkpoint stores it as well, it is refused by name."""
    model = Model(plain)
    model.head = model.w
    copies = trace_copies(model, SCHEMA)
    check_whole(copies, SCHEMA)
    assert sorted(home.names for home in copies.homes.values()) == [
        ("cache",),
        ("v",),
        ("w", "head"),
    ]
    retied = Schema.of([*SCHEMA.tensors, TensorSpec("head", "F32", (4, 6))])
    with pytest.raises(LayoutError, match="ties to another") as caught:
        check_whole(trace_copies(model, retied), retied)
    assert (caught.value.name, caught.value.tied_to) == ("head", "w")


def test_attributes_that_a_loader_sets_are_put_back() -> None:
    """A loader may keep books on its module and parameters; tracing leaves none of it."""

    def loader(model: Model, weights: dict[str, torch.Tensor]) -> None:
        model.loaded += 1
        model.note = "loaded"
        model.w.is_loaded = True
        model.register_buffer("extra", torch.zeros(1))
        plain(model, weights)

    model = Model(loader)
    trace_copies(model, SCHEMA)
    assert model.loaded == 0
    assert not hasattr(model, "note")
    assert not hasattr(model.w, "is_loaded")
    assert [name for name, _ in model.named_buffers()] == ["cache"]


def test_a_loader_that_fails_is_refused_with_the_tensor_it_was_at() -> None:
    """An exception of the loader becomes a refusal that names the tensor."""

    class Picky(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                {"a": self.w}[name].data.copy_(tensor)

    with pytest.raises(LayoutError, match="KeyError") as caught:
        trace_copies(Picky(plain), SCHEMA)
    assert caught.value.name == "b"
