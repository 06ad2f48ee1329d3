"""Watches a model's own ``load_weights`` on tensors without data and records every copy.

Nothing is executed that would touch a weight: a copy into a parameter becomes a rectangle, a fill
becomes padding, and anything else that would compute with a checkpoint tensor or change a
parameter is refused. Needs torch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_delta.errors import LayoutError
from vllm_delta.format import Schema
from vllm_delta.layout import Rectangle, Strided, find_gap

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}

_ATEN = torch.ops.aten
_FILLS = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)
_VALUE_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)


@dataclass(frozen=True)
class Home:
    """One storage of the model that weights can be loaded into.

    Args:
        name: the first parameter or buffer that uses it.
        names: every one that does (tied weights have several).
        tensor: the one called ``name``.
        is_parameter: whether some parameter uses it, not only buffers.
    """

    name: str
    names: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def n_elements(self) -> int:
        return self.tensor.untyped_storage().nbytes() // self.tensor.element_size()


@dataclass(frozen=True)
class Copies:
    """What ``load_weights`` would do, in the layout that it loads into.

    Args:
        homes: storage address to the model's storages.
        rectangles: storage address to what is copied there from the checkpoint.
        fills: storage address to what is filled with a constant (padding).
    """

    homes: Mapping[int, Home]
    rectangles: Mapping[int, Sequence[Rectangle]]
    fills: Mapping[int, Sequence[Strided]]


def find_homes(model: nn.Module) -> dict[int, Home]:
    """The model's storages by address: parameters first, then buffers; empty ones left out."""
    found: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}
    for name, tensor, is_parameter in _named_tensors(model):
        if tensor.numel() and not tensor.is_meta:
            address = tensor.untyped_storage().data_ptr()
            found.setdefault(address, []).append((name, tensor, is_parameter))
    return {
        address: Home(
            name=users[0][0],
            names=tuple(name for name, _, _ in users),
            tensor=users[0][1],
            is_parameter=any(is_parameter for _, _, is_parameter in users),
        )
        for address, users in found.items()
    }


def trace_copies(model: Any, schema: Schema) -> Copies:
    """Runs ``model.load_weights`` on data-less tensors and records where every element would go.

    The model is left as it was: weights, buffers, and the attributes of modules and parameters.

    Raises:
        LayoutError: the loader does something that is not a plain copy; names the tensor.
    """
    homes = find_homes(model)
    sources = {
        spec.name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        for spec in schema.tensors
    }
    tracer = _Tracer(schema, sources, homes)
    with _untouched(model), torch.no_grad(), tracer:
        try:
            model.load_weights(tracer.feed())
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(
                "the model's loader fails on the channel's checkpoint; publish the checkpoint "
                "that the engine serves",
                name=tracer.current,
                reason=repr(error),
            ) from error
    if tracer.refusal is not None:  # the loader swallowed it
        raise tracer.refusal
    return Copies(homes, tracer.rectangles, tracer.fills)


def check_whole(copies: Copies, schema: Schema) -> None:
    """Checks that every element of every loaded storage is one checkpoint element or padding.

    Raises:
        LayoutError: names the parameter, or the checkpoint tensor that is tied to another.
    """
    copied = {r.tensor for parts in copies.rectangles.values() for r in parts}
    stored = {spec.name for n, spec in enumerate(schema.tensors) if n not in copied}
    for address, home in copies.homes.items():
        rectangles = copies.rectangles.get(address, ())
        for name in stored.intersection(home.names):
            raise LayoutError(
                "the checkpoint stores a tensor that the engine ties to another; publish without "
                "it, or untie it (tie_word_embeddings false and different weights)",
                name=name,
                tied_to=home.name,
            )
        if not rectangles:
            if home.is_parameter:
                raise LayoutError("no tensor of the checkpoint is loaded into it", name=home.name)
            continue
        if home.tensor.numel() != home.n_elements:
            raise LayoutError("it shares its storage with something else", name=home.name)
        parts = [rectangle.target for rectangle in rectangles] + list(copies.fills.get(address, ()))
        if problem := find_gap(parts, home.n_elements):
            names = sorted({schema.tensors[rectangle.tensor].name for rectangle in rectangles})
            raise LayoutError(
                f"the checkpoint does not fill it exactly once: {problem}",
                name=home.name,
                tensors=names[:8],
            )


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from the sources into the homes; executes none of them."""

    def __init__(
        self, schema: Schema, sources: Mapping[str, torch.Tensor], homes: Mapping[int, Home]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rectangles: dict[int, list[Rectangle]] = {}
        self.fills: dict[int, list[Strided]] = {}
        self.current = ""
        self.refusal: LayoutError | None = None
        self._schema = schema
        self._sources = sources
        self._names = {_key(tensor): name for name, tensor in sources.items()}
        self._homes = homes

    def feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint, as ``load_weights`` takes it."""
        for name, tensor in self._sources.items():
            self.current = name
            yield name, tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default:
            return self._copy(func, args, kwargs)
        written = [tensor for tensor in _written(func, args, kwargs) if self._is_tracked(tensor)]
        if written and func in _FILLS and written[0].device.type != "meta":
            return self._fill(func, args)
        if written:
            self._refuse(f"the loader changes a tensor in place by {func}", written[0])
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if self._source(leaf)]
        if not sources:
            return func(*args, **kwargs)
        if func in _VALUE_COPIES and kwargs.get("dtype") in (None, sources[0].dtype):
            # The copy has the same values; which device or strides it has does not matter here.
            return _ATEN.alias.default(sources[0])
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            self._refuse(f"the loader computes with it by {func}", sources[0], error)
        leaves = tree_leaves(result)
        if not leaves or any(self._source(leaf) != self._source(sources[0]) for leaf in leaves):
            self._refuse(f"the loader computes with it by {func}", sources[0])
        return result

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target, source = args[0], args[1]
        name = self._source(source)
        if name is None and not self._is_tracked(target):
            return func(*args, **kwargs)
        home = self._homes.get(_address(target))
        if home is None:
            self._refuse("the loader copies it to where the model keeps no weight", source)
        if name is None:
            self._refuse("the loader writes values that are not the checkpoint's", target)
        if source.dtype != target.dtype:
            self._refuse(
                f"the engine keeps it as {target.dtype}, the checkpoint has {source.dtype}; "
                "publish in the engine's type",
                source,
            )
        if target.numel():
            self._record(name, source.expand(target.shape), home, target)
        return target

    def _record(self, name: str, source: torch.Tensor, home: Home, target: torch.Tensor) -> None:
        try:
            rectangle = Rectangle(
                tensor=self._schema.index(name),
                sizes=tuple(target.shape),
                source_offset=int(source.storage_offset()),
                source_strides=tuple(source.stride()),
                parameter=home.name,
                target_offset=int(target.storage_offset()),
                target_strides=tuple(target.stride()),
            )
        except ValueError as error:
            self._refuse("the loader copies one element to several places", source, error)
        self.rectangles.setdefault(_address(target), []).append(rectangle)

    def _fill(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        target: torch.Tensor = args[0]
        if any(self._source(arg) for arg in args[1:]):
            self._refuse(f"the loader computes with it by {func}", args[1])
        if target.numel():
            part = Strided(int(target.storage_offset()), tuple(target.shape), target.stride())
            self.fills.setdefault(_address(target), []).append(part)
        return target

    def _source(self, value: Any) -> str | None:
        return self._names.get(_key(value)) if isinstance(value, torch.Tensor) else None

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        return self._source(tensor) is not None or _address(tensor) in self._homes

    def _refuse(
        self, reason: str, tensor: torch.Tensor, error: Exception | None = None
    ) -> NoReturn:
        home = self._homes.get(_address(tensor))
        name = self._source(tensor) or (home.name if home else self.current)
        self.refusal = self.refusal or LayoutError(
            f"cannot be patched in place: {reason}", name=name
        )
        raise self.refusal from error


def _key(tensor: torch.Tensor) -> int:
    """Identity of a storage, also of one without data."""
    return int(tensor.untyped_storage()._cdata)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, False


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Puts every attribute of modules, parameters and buffers back as it was.

    Raises:
        LayoutError: a parameter or buffer was given another storage (it has its own again).
    """
    owners: list[Any] = [*model.modules(), *(tensor for _, tensor, _ in _named_tensors(model))]
    attributes = [(owner.__dict__, dict(owner.__dict__)) for owner in owners]
    # A module keeps its parameters, buffers and children in dicts of their own.
    tables = [(t, dict(t)) for table, _ in attributes for t in table.values() if type(t) is dict]
    bodies = [(n, t, t.data, t.data_ptr(), t.shape) for n, t, _ in _named_tensors(model)]
    try:
        yield
    finally:
        for table, before in [*attributes, *tables]:
            if len(table) != len(before) or any(table.get(k) is not v for k, v in before.items()):
                table.clear()
                table.update(before)
        moved = [name for name, t, _, *body in bodies if [t.data_ptr(), t.shape] != body]
        for name, tensor, body, *_ in bodies:
            if name in moved:
                tensor.data = body
    if moved:
        raise LayoutError("the loader gives it another storage", name=moved[0])
