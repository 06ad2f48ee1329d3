"""Learns where every checkpoint element lives in the running model, or refuses the model by name.

The model's own ``load_weights`` is traced (`copies`), what vLLM did to the weights afterwards is
composed in (`loading`), and whatever is not understood is a `LayoutError` that names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_delta.engine.copies import (
    TORCH_DTYPES,
    Copies,
    Home,
    check_whole,
    trace_copies,
)
from vllm_delta.engine.loading import LoadReport, install_detector, report_of
from vllm_delta.errors import LayoutError
from vllm_delta.format import Schema
from vllm_delta.layout import ParameterSpec, RankLayout, Rectangle

__all__ = ["Traced", "install_detector", "trace_layout"]

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_LAZY = {
    "_fse_fuse_gate": "fuses the router and the shared expert's gate at its first step",
    "_merged_conv_weight": "merges its convolutions at its first step",
}
"""Attributes of layers that make a private copy of weights while serving, unseen at load time."""


@dataclass(frozen=True)
class Traced:
    """A rank's layout and the tensors that it speaks of.

    Args:
        layout: where the rank holds which checkpoint elements.
        storages: per parameter of the layout, the live tensor; offsets count from the start of
            its storage.
    """

    layout: RankLayout
    storages: dict[str, torch.Tensor]


def trace_layout(model: nn.Module, vllm_config: Any, schema: Schema, rank: int) -> Traced:
    """Learns where this rank holds the elements of a checkpoint. Changes and moves nothing.

    Args:
        model: a model that vLLM loaded after `install_detector`.
        vllm_config: the engine's configuration.
        schema: the checkpoint's tensors, under the names that ``load_weights`` takes.
        rank: the rank's number, for messages and to tell the layouts apart.

    Raises:
        LayoutError: something about the model cannot be patched in place; names it.
    """
    from vllm.config import set_current_vllm_config

    _refuse_settings(vllm_config)
    _refuse_layers(model)
    report = _checked_report(model)
    with set_current_vllm_config(vllm_config):
        copies = trace_copies(model, schema)
    check_whole(copies, schema)
    used = {address: home for address, home in copies.homes.items() if address in copies.rectangles}
    layout = RankLayout(
        schema_digest=schema.digest,
        rank=rank,
        rectangles=tuple(_composed(copies, report, schema)),
        parameters={home.name: _spec(home) for home in used.values()},
    )
    return Traced(layout, {home.name: home.tensor for home in used.values()})


def _composed(copies: Copies, report: LoadReport, schema: Schema) -> Iterator[Rectangle]:
    """The rectangles after what vLLM did to the storages they are in."""
    for address, rectangles in copies.rectangles.items():
        home = copies.homes[address]
        reason = report.unexplained.get(address)
        if address not in report.addresses:
            reason = "it moved to another storage since it was loaded"
        if reason:
            raise LayoutError(f"cannot be patched in place: {reason}", name=home.name)
        digits = report.permutations.get(address)
        for rectangle in rectangles:
            after = rectangle if digits is None else rectangle.permuted(digits)
            if after is None:
                raise LayoutError(
                    "cannot be patched in place: vLLM packed the parameter across its edges",
                    name=schema.tensors[rectangle.tensor].name,
                    parameter=home.name,
                )
            yield after


def _spec(home: Home) -> ParameterSpec:
    return ParameterSpec(_DTYPE_NAMES[home.tensor.dtype], home.n_elements)


def _checked_report(model: nn.Module) -> LoadReport:
    report = report_of(model)
    if report is None:
        raise LayoutError(
            "nobody saw how vLLM processed the weights; use a load format that vLLM's base loader "
            "handles, such as safetensors",
            name=type(model).__name__,
        )
    for name, reason in report.problems:
        raise LayoutError(f"cannot be patched in place: {reason}", name=name)
    return report


def _refuse_settings(vllm_config: Any) -> None:
    if vllm_config.parallel_config.enable_eplb:
        raise LayoutError("experts move between ranks; serve without --enable-eplb", name="experts")
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise LayoutError("weights are offloaded; serve without offloading", name="weights")


def _refuse_layers(model: nn.Module) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        method = getattr(method, "old_quant_method", method)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, plain):
            raise LayoutError(
                "a quantised layer has no rule; serve the model without quantisation",
                name=name,
                method=type(method).__name__,
            )
        for attribute, habit in _LAZY.items():
            if vars(module).get(attribute, False) is not False:
                raise LayoutError(f"the layer {habit} and would keep old weights", name=name)
