"""A trainer's tensors as the checkpoint holds them: names, types, ties and raw bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from vllm_delta.codec.order import Unsigned
from vllm_delta.conversion import Conversion
from vllm_delta.errors import FormatError, ModelMismatchError
from vllm_delta.format import Schema, TensorSpec, parse_schema

Model = nn.Module | Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]

NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_CAST_FROM = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_CAST_TO = frozenset({torch.float32, torch.float16, torch.bfloat16})
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class ModelWeights:
    """Reads a model's tensors as raw checkpoint bits, one tensor at a time.

    Args:
        model: an `nn.Module`, whose `state_dict` names are taken, in the form in which transformers
            would save them; or the tensors by checkpoint
            name; or a function that returns them. Tensors are read anew at each `read`.
        dtype: type the checkpoint has where the model holds masters: the floating parameters
            are rounded to it as `Tensor.to` does. Buffers of a module keep their type; in a
            mapping, where the two look alike, every floating tensor is cast. fp8 is never cast.

    Raises:
        ModelMismatchError: a tensor of a kind that a checkpoint of this format cannot hold.
    """

    def __init__(self, model: Model, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype not in _CAST_TO:
            raise ValueError(f"cannot publish as {dtype}; one of bfloat16, float16, float32")
        self._model = _unwrap(model) if isinstance(model, nn.Module) else model
        self._dtype = dtype
        self._buffers: frozenset[str] = frozenset()
        if isinstance(self._model, nn.Module):
            named_buffers = self._model.named_buffers(remove_duplicate=False)
            self._buffers = frozenset(name for name, _ in named_buffers)
        named = self._tensors()
        self._held = self._schema(named)
        self._conversion = Conversion(self._model, named)
        self.schema = self._schema(self._conversion.tensors)
        _check_readable(self.schema)

    def read(self) -> Iterator[Unsigned]:
        """The tensors' bits of now in schema order: unsigned[numel], flat, contiguous.

        An array may alias the model's memory; it is valid as long as the model does not change.

        Raises:
            ModelMismatchError: names, shapes or types are no longer the schema's.
        """
        named = self._tensors()
        held = self._schema(named)
        if held != self._held:
            raise mismatch(expected=self._held, actual=held)
        try:
            for spec in self.schema.tensors:
                yield self._bits(self._conversion.get(spec.name, named), spec.name)
        finally:
            self._conversion.forget()

    def _tensors(self) -> dict[str, torch.Tensor]:
        if isinstance(self._model, nn.Module):
            named = dict(self._model.state_dict())
            second = _second_names(self._model)
        else:
            named = dict(self._model if isinstance(self._model, Mapping) else self._model())
            second = []
        for name, tensor in named.items():
            _check(name, tensor)
        return _untied(named, second)

    def _schema(self, named: Mapping[str, torch.Tensor]) -> Schema:
        return Schema.of(
            TensorSpec(name, NAMES[self._published(tensor, name)], tuple(tensor.shape))
            for name, tensor in named.items()
        )

    def _published(self, tensor: torch.Tensor, name: str) -> torch.dtype:
        """Type that the checkpoint holds `tensor` in."""
        if self._dtype is None or name in self._buffers or tensor.dtype not in _CAST_FROM:
            return tensor.dtype
        return self._dtype

    def _bits(self, tensor: torch.Tensor, name: str) -> Unsigned:
        data = tensor.detach().resolve_neg().to(self._published(tensor, name)).cpu()
        data = data.reshape(-1).contiguous()  # a vector's reshape keeps gaps between elements
        bits: Unsigned = data.view(_UNSIGNED[data.element_size()]).numpy()
        return bits


def mismatch(*, expected: Schema, actual: Schema) -> ModelMismatchError:
    """The error for a model whose schema is not the channel's; names the first difference."""
    before = {spec.name: spec for spec in expected.tensors}
    after = {spec.name: spec for spec in actual.tensors}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if new is None:
            return ModelMismatchError("the model lacks a tensor of the channel", name=name)
        if old is None:
            return ModelMismatchError("the model has a tensor the channel lacks", name=name)
        return ModelMismatchError(
            "a tensor's type or shape is not the channel's",
            name=name,
            expected=[old.dtype, list(old.shape)],
            actual=[new.dtype, list(new.shape)],
        )
    raise AssertionError("the schemas are equal")


def _unwrap(model: nn.Module) -> nn.Module:
    """The module whose names are the checkpoint's, inside DDP and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _check_readable(schema: Schema) -> None:
    """Raise ModelMismatchError for a schema that no reader would take."""
    if not schema.tensors:
        raise ModelMismatchError("the model has no tensors")
    for spec in schema.tensors:
        try:
            parse_schema(Schema((spec,)).to_bytes())
        except FormatError as error:
            raise ModelMismatchError(
                "a tensor that the format cannot hold",
                name=spec.name[:64],
                shape=list(spec.shape),
                cause=str(error),
            ) from error
    try:
        parse_schema(schema.to_bytes())
    except FormatError as error:
        raise ModelMismatchError("a model that the format cannot hold", cause=str(error)) from error


def _check(name: str, tensor: torch.Tensor) -> None:
    # Text that is no UTF-8 has no digest; the other name is taken in safetensors files.
    if not isinstance(name, str) or name == "__metadata__" or not _is_utf8(name):
        raise ModelMismatchError("not a name for a tensor", name=name)
    if not isinstance(tensor, torch.Tensor):
        raise ModelMismatchError("not a tensor", name=name, type=type(tensor).__name__)
    if hasattr(tensor, "full_tensor"):
        raise ModelMismatchError("a sharded tensor; pass the whole one", name=name)
    if tensor.is_meta:
        raise ModelMismatchError("a tensor without data", name=name, device="meta")
    if tensor.layout != torch.strided or tensor.dtype not in NAMES:
        raise ModelMismatchError(
            "a tensor of a type that cannot be published",
            name=name,
            dtype=str(tensor.dtype),
            layout=str(tensor.layout),
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _untied(named: Mapping[str, torch.Tensor], second: list[str]) -> dict[str, torch.Tensor]:
    """Each tensor once: of the names of one memory, the first that is not a second name.

    Args:
        second: patterns of names that the checkpoint leaves out when the tensor has another.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in named.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        groups.setdefault(place if tensor.numel() else name, []).append(name)
    kept = set()
    for names in groups.values():
        first = [name for name in names if not any(re.fullmatch(key, name) for key in second)]
        kept.add((first or names)[0])
    return {name: tensor for name, tensor in named.items() if name in kept}


def _second_names(model: nn.Module) -> list[str]:
    """Patterns from `_tied_weights_keys`, where transformers lists what a checkpoint leaves out.

    A list of names or patterns, or a mapping from them to the name that stays.
    """
    patterns = []
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None) or ()
        patterns += [(re.escape(prefix) + r"\." if prefix else "") + key for key in keys]
    return patterns
