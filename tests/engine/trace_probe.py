"""One tensor-parallel rank of a vLLM without an engine: loads models and traces them.

Run as ``python -m tests.engine.trace_probe RANK WORLD PORT MODELS OUT``. It loads every model in
the directory MODELS, checks the traced layout against the checkpoints bit by bit, and writes what
it found to the JSON file OUT. The tests start it and judge the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model

from vllm_delta.engine import cpu
from vllm_delta.engine.trace import Traced, install_detector, trace_layout
from vllm_delta.errors import LayoutError
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import Rectangle

Bits = dict[str, np.ndarray]

REFUSING = "qwen3_moe-untied-kv2"
"""The model that every kind of refusal is tried on."""


def read(checkpoint: Path) -> Bits:
    """Raw bits of every tensor, in its shape."""
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: tensor.view(torch.int16).numpy() for name, tensor in tensors.items()}


def load(checkpoint: Path, config: VllmConfig) -> nn.Module:
    config.model_config.model = str(checkpoint)
    # Attention layers are registered by name; a second model of one process needs its own table.
    config.compilation_config.static_forward_context.clear()
    return get_model(vllm_config=config)


def config_of(checkpoint: Path, world: int) -> VllmConfig:
    return EngineArgs(
        model=str(checkpoint),
        tensor_parallel_size=world,
        enforce_eager=True,
        max_model_len=128,
        load_format="safetensors",
    ).create_engine_config()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything that tracing must leave alone."""
    bodies = {
        name: (id(t), t.data_ptr(), t.shape, t.stride(), t.detach().clone(), sorted(vars(t)))
        for name, t in tensors_of(model).items()
    }
    attributes = {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    return {"bodies": bodies, "attributes": attributes}


def is_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before["attributes"] != after["attributes"] or list(before["bodies"]) != list(
        after["bodies"]
    ):
        return False
    return all(
        (*old[:4], *old[5:]) == (*new[:4], *new[5:]) and torch.equal(_bytes(old[4]), _bytes(new[4]))
        for old, new in zip(before["bodies"].values(), after["bodies"].values(), strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def flat_bits(tensor: torch.Tensor) -> np.ndarray:
    """int16 view of the whole storage, writable."""
    n = tensor.untyped_storage().nbytes() // 2
    return torch.as_strided(tensor.detach(), (n,), (1,), 0).view(torch.int16).numpy()


def mismatches(traced: Traced, schema: Schema, weights: Bits) -> dict[str, int]:
    """Per tensor, how many resident elements differ from a checkpoint's; all are compared."""
    found: dict[str, int] = {}
    for rectangle, name, offsets, indices in every(traced, schema):
        resident = flat_bits(traced.storages[rectangle.parameter])[offsets]
        n_bad = int((resident != weights[name].reshape(-1)[indices]).sum())
        found[name] = found.get(name, 0) + n_bad
    return found


def every(
    traced: Traced, schema: Schema
) -> Iterator[tuple[Rectangle, str, np.ndarray, np.ndarray]]:
    for rectangle in traced.layout.rectangles:
        spec = schema.tensors[rectangle.tensor]
        positions, offsets = rectangle.locate(np.arange(spec.numel))
        yield rectangle, spec.name, offsets, positions


def patch(traced: Traced, schema: Schema, old: Bits, new: Bits) -> None:
    """Writes the changed elements through the layout, and nothing else."""
    for rectangle in traced.layout.rectangles:
        name = schema.tensors[rectangle.tensor].name
        changed = np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1))
        positions, offsets = rectangle.locate(changed)
        values = new[name].reshape(-1)[changed[positions]]
        flat_bits(traced.storages[rectangle.parameter])[offsets] = values


def differing(model: nn.Module, fresh: nn.Module) -> list[str]:
    """Parameters and buffers whose bits are not those of a freshly loaded model."""
    others = tensors_of(fresh)
    mine = tensors_of(model)
    assert list(mine) == list(others)
    return [n for n, t in mine.items() if not torch.equal(_bytes(t), _bytes(others[n]))]


def forward(model: Any) -> dict[str, torch.Tensor]:
    """What some linear layers and the head make of one fixed input."""
    layer = model.model.layers[0].self_attn
    layers = {"qkv_proj": layer.qkv_proj, "o_proj": layer.o_proj, "lm_head": model.lm_head}
    outputs = {}
    for name, module in layers.items():
        width = module.weight.shape[1]
        x = torch.linspace(-1, 1, 3 * width, dtype=torch.bfloat16).view(3, width)
        outputs[name] = module.quant_method.apply(module, x, None)
    return outputs


def probe(models: Path, world: int, rank: int) -> dict[str, Any]:
    config = config_of(models / "A", world)
    old, new = read(models / "A"), read(models / "B")
    schema = Schema.of(TensorSpec(name, "BF16", bits.shape) for name, bits in old.items())
    with set_current_vllm_config(config):
        model = load(models / "A", config)
        before = photograph(model)
        start = time.perf_counter()
        try:
            traced = trace_layout(model, config, schema, rank)
        except LayoutError as error:
            unchanged = is_same(before, photograph(model))
            return {"error": error.to_dict(), "unchanged": unchanged}
        result: dict[str, Any] = {
            "trace_s": time.perf_counter() - start,
            "unchanged": is_same(before, photograph(model)),
            "layout": traced.layout.to_dict(),
            "schema": schema.to_bytes().decode(),
            "n_padding": sum(t.numel() for t in traced.storages.values())
            - sum(r.numel for r in traced.layout.rectangles),
            "mismatches": mismatches(traced, schema, old),
            "control": mismatches(traced, schema, new),
        }
        if models.name == REFUSING:
            result["refusals"] = dict(refusals(model, config, schema, rank))
            result["refusals"] |= dict(packed_refusals(models, config, schema, rank))
        outputs = forward(model)
        patch(traced, schema, old, new)
        fresh = load(models / "B", config)
        result["differing"] = differing(model, fresh)
        patched, expected = forward(model), forward(fresh)
        result["forward"] = {
            name: [
                bool(torch.equal(patched[name], expected[name])),
                bool(torch.equal(patched[name], outputs[name])),
            ]
            for name in outputs
        }
    return result


def refusals(
    model: Any, config: VllmConfig, schema: Schema, rank: int
) -> Iterator[tuple[str, Any]]:
    """What each way to be unpatchable is answered with; all is put back in between."""

    class Quantised(QuantizeMethodBase):
        def create_weights(self, *args: Any, **kwargs: Any) -> None: ...
        def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

    layer = model.model.layers[1]
    cases = {
        "quantised": (layer.self_attn.o_proj, "quant_method", Quantised()),
        "lazy": (layer.mlp, "_fse_fuse_gate", True),
        "eplb": (config.parallel_config, "enable_eplb", True),
        "offload": (config.offload_config.uva, "cpu_offload_gb", 1.0),
    }
    for case, (owner, name, value) in cases.items():
        with swapped(owner, name, value):
            yield case, refusal(model, config, schema, rank)
    norm = schema.index("model.norm.weight")
    without = schema.tensors[:norm] + schema.tensors[norm + 1 :]
    wide = TensorSpec("model.norm.weight", "F32", schema.tensors[norm].shape)
    for case, tensors in {
        "unknown": (*schema.tensors, TensorSpec("model.norm.unknown", "BF16", (4,))),
        "missing": without,
        "dtype": (*without, wide),
    }.items():
        yield case, refusal(model, config, Schema.of(tensors), rank)
    moved = nn.Parameter(model.model.norm.weight.clone(), requires_grad=False)
    with swapped(model.model.norm, "_parameters", {"weight": moved}):
        yield "moved", refusal(model, config, schema, rank)
    other = nn.Module()
    other.load_weights = model.load_weights
    yield "unseen", refusal(other, config, schema, rank)


def packed_refusals(
    models: Path, config: VllmConfig, schema: Schema, rank: int
) -> Iterator[tuple[str, Any]]:
    """What a model is answered with whose weights vLLM packed and nobody unpacks."""
    for case, owner, name in (
        ("dense packed", utils, "dispatch_cpu_unquantized_gemm"),
        ("experts packed", cpu_moe, "cpu_prepack_moe_weight"),
    ):
        with swapped(owner, name, vars(owner)[name].__wrapped__):
            model = load(models / "A", config)
        yield case, refusal(model, config, schema, rank)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


def refusal(model: Any, config: VllmConfig, schema: Schema, rank: int) -> dict[str, Any] | None:
    try:
        trace_layout(model, config, schema, rank)
    except LayoutError as error:
        return error.to_dict()
    return None


def main() -> None:
    rank, world, port = (int(argument) for argument in sys.argv[1:4])
    directory, out = Path(sys.argv[4]), Path(sys.argv[5])
    os.environ["VLLM_DIST_IDENT"] = f"trace-{port}"  # vLLM's executor would set it
    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    cpu.install()
    install_detector()
    models = sorted(path for path in directory.iterdir() if path.is_dir())
    # Any model will do to set up the groups, but only a mixture of experts sets up all of them.
    widest = max(models, key=lambda path: "moe" in path.name)
    with set_current_vllm_config(config_of(widest / "A", world)):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(tensor_model_parallel_size=world)
        found = {path.name: probe(path, world, rank) for path in models}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    # vLLM's groups wait for each other when torn down in an orderly way; nothing is left to do.
    sys.stdout.flush()
    os._exit(0)
