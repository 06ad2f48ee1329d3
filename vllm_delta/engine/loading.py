"""Notices what vLLM does to weights after it has loaded them.

After ``load_weights`` vLLM lets every layer transpose, pad, repack or copy its weights. There are
too many such places to list, so they are found by looking: at every parameter and buffer, and at
every tensor that the model's objects hold, before and after. Comparing needs torch, not vLLM.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_delta.engine import cpu
from vllm_delta.engine.copies import find_homes

_SAMPLES = 4096
_DEPTH = 6
_SKIPPED = ("vllm.config", "vllm.distributed", "vllm.forward_context", "vllm.platforms")

_reports: weakref.WeakKeyDictionary[nn.Module, LoadReport] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights between loading and serving.

    Args:
        addresses: of every storage of parameters and buffers, when all was done.
        permutations: storage address to the permutation that was applied there.
        unexplained: storage address to what happened there that is not understood.
        problems: what is wrong with the model as a whole: name and reason.
    """

    addresses: frozenset[int]
    permutations: Mapping[int, cpu.Digits]
    unexplained: Mapping[int, str]
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Body:
    """A tensor's place, form and some of its bits."""

    address: int
    form: tuple[Any, ...]
    sample: bytes

    @property
    def is_constant(self) -> bool:
        """Whether all sampled elements are alike, so that moving them would not show."""
        n = self.form[-1]
        n_sampled = len(self.sample) // n
        return bool(n_sampled > 1 and self.sample == self.sample[:n] * n_sampled)

    def has_the_value_of(self, other: Body | None) -> bool:
        return other is not None and (self.form, self.sample) == (other.form, other.sample)


@dataclass(frozen=True)
class Look:
    """The model's tensors at one moment; holds none of them alive.

    Args:
        homes: storage address to the first name that uses it.
        named: name of a parameter or buffer to its body.
        private: path to a tensor that is neither, nor a view of one, to its body.
    """

    homes: Mapping[int, str]
    named: Mapping[str, Body]
    private: Mapping[str, Body]


def install_detector() -> None:
    """Wraps vLLM's post-processing of weights in this process; changes nothing it does.

    Must run before the model is loaded. Can run more than once.
    """
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if not hasattr(original, "vllm_delta"):
        base_loader.process_weights_after_loading = _watched(original)


def report_of(model: nn.Module) -> LoadReport | None:
    """What was noticed when the model was loaded; None when nobody looked."""
    return _reports.get(model)


def look(model: nn.Module) -> Look:
    """Notes where all tensors of the model are, in what form, and some of their bits."""
    homes = find_homes(model)
    named = {name: _body(h.tensor) for h in homes.values() for name in h.names}
    private = {
        path: _body(tensor)
        for path, tensor in _held_tensors(model)
        if tensor.untyped_storage().data_ptr() not in homes
    }
    return Look({address: home.name for address, home in homes.items()}, named, private)


def compare(before: Look, after: Look, packed: Mapping[int, cpu.Digits]) -> LoadReport:
    """Explains the difference between two looks, as far as it can be.

    Args:
        packed: storage address to the permutation of tensors whose packing is understood.
    """
    unexplained: dict[int, str] = {}
    for address, name in after.homes.items():
        old, new = before.named.get(name), after.named[name]
        if reason := _difference(old, new, is_packed=address in packed):
            unexplained[address] = reason
    problems = [
        (name, "vLLM replaced it by something else after loading")
        for name, body in before.named.items()
        if name not in after.named and len(body.sample) > body.form[-1]
    ]
    known = {(body.address, body.form, body.sample) for body in before.private.values()}
    problems += [
        (path, "vLLM made a private copy of weights after loading")
        for path, body in after.private.items()
        if (body.address, body.form, body.sample) not in known
        and not body.has_the_value_of(before.private.get(path))
    ]
    permutations = {address: packed[address] for address in packed if address in after.homes}
    return LoadReport(frozenset(after.homes), permutations, unexplained, tuple(problems))


def _difference(old: Body | None, new: Body, *, is_packed: bool) -> str | None:
    if old is None:
        return "vLLM made it after loading"
    if old.form != new.form:
        return "vLLM changed its shape, strides or type after loading"
    if is_packed:
        return None
    if old.sample != new.sample:
        return "vLLM changed its values or their order after loading"
    if old.address != new.address and old.is_constant:
        return "vLLM copied it after loading, and all its values are alike: its order is unknown"
    return None


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        cpu.take_packed()
        before = look(model)
        original(model, *args, **kwargs)
        _reports[model] = compare(before, look(model), cpu.take_packed())

    process.vllm_delta = True  # type: ignore[attr-defined]
    return process


def _body(tensor: torch.Tensor) -> Body:
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    form = (
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.dtype,
        size,
    )
    n = storage.nbytes() // size
    flat = torch.as_strided(tensor.detach(), (n,), (1,), 0)
    generator = torch.Generator().manual_seed(0)
    if n > _SAMPLES:
        places = torch.randint(0, n, (_SAMPLES,), generator=generator)
        flat = flat[places.to(flat.device)]
    bits = flat.view(torch.uint8).cpu().contiguous()
    return Body(storage.data_ptr(), form, bits.numpy().tobytes())


def _held_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor reachable from the modules' attributes, with the path to it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in ("_modules", "_parameters", "_buffers"):
                yield from _walk(f"{name}.{key}", value, seen, _DEPTH)


def _walk(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.is_meta and value.layout is torch.strided:
            yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, str, bytes, type)):
        return
    children = _children(value)
    if children:
        seen.add(id(value))
    for key, child in children:
        yield from _walk(f"{path}.{key}", child, seen, depth - 1)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        names = value.__code__.co_freevars
        return [(n, c.cell_contents) for n, c in zip(names, cells, strict=True) if _is_full(c)]
    home = type(value).__module__
    if home.startswith("vllm") and not home.startswith(_SKIPPED) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return []


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
