"""The worker's side of the benchmark: every method on one engine, checked, then timed."""

from __future__ import annotations

import ctypes
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vllm_delta.codec import Change, order
from vllm_delta.engine.trace import trace_layout
from vllm_delta.engine.worker import WorkerExtension
from vllm_delta.fingerprint import MASK64, coefficients, fingerprint, root, weigh
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import Coverage, judge
from vllm_delta.patch import Patch, Patcher

FLUSH_BYTES = 256 << 20
N_REPETITIONS = 7

Step = Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]


class BenchExtension(WorkerExtension):
    """Adds the benchmark's calls to the extension that users load."""

    def delta_bench(self, base_file: str, step_files: list[str]) -> list[dict[str, Any]]:
        """Run every method on every step.

        Args:
            base_file: the served checkpoint (safetensors).
            step_files: .npz files, `<name>:indices|old|new` per changed tensor.
        """
        from safetensors.torch import load_file

        model = self.model_runner.get_model()
        bench = Bench(model, load_file(base_file), self.vllm_config)
        return [row for file in step_files for row in bench.run(_read_step(file))]


class Bench:
    """One model in one engine."""

    def __init__(self, model: Any, base: dict[str, torch.Tensor], vllm_config: Any) -> None:
        self._model, self._base, self._config = model, base, vllm_config
        specs = [TensorSpec(name, "BF16", tuple(t.shape)) for name, t in base.items()]
        self._schema = Schema.of(specs)
        traced = trace_layout(model, vllm_config, self._schema, 0)
        self._coverage = Coverage(self._schema, [traced.layout])
        self._patcher = Patcher(self._schema, traced.layout, traced.storages)
        totals = self._coverage.total([self._patcher.scan()])
        self._fingerprints = [totals[place] for place in range(len(self._schema))]
        for spec, resident in zip(self._schema.tensors, self._fingerprints, strict=True):
            assert resident == fingerprint(_bits(base[spec.name]), spec), spec.name
        self._flush = np.ones(FLUSH_BYTES // 8)

    def run(self, step: Step) -> list[dict[str, Any]]:
        """Rows for one step: each method checked for exactness, then timed."""
        target = self._target(step)
        n_changed = sum(indices.size for indices, _, _ in step.values())
        percent = 100 * n_changed / self._schema.n_weights
        ours = Ours(self._schema, self._coverage, self._patcher, self._fingerprints, step)
        methods: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "vllm_delta": (ours.apply, ours.roll_back),
            "vllm_sparse": (self._sparse(step, forward=True), self._sparse(step, forward=False)),
            "load": (self._load(target), self._load(self._base)),
        }
        rows = []
        for name, (forward, back) in methods.items():
            row = {"changed_percent": round(percent, 4), "method": name}
            rows.append(row | self._measure(forward, back, target))
            self._load(self._base)()
            assert self._holds(self._base), "the base was not restored"
        return rows

    def _measure(
        self,
        forward: Callable[[], None],
        back: Callable[[], None],
        target: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        before = _reset_peak()
        forward()
        extra = max(_peak_bytes() - before, 0)
        exact = self._holds(target)
        back()
        exact = exact and self._holds(self._base)
        seconds = []
        for _ in range(N_REPETITIONS):
            self._flush.sum()
            start = time.perf_counter()
            forward()
            seconds.append(time.perf_counter() - start)
            back()
        return {"seconds": statistics.median(seconds), "extra_bytes": extra, "exact": exact}

    def _target(self, step: Step) -> dict[str, torch.Tensor]:
        target = {}
        for name, tensor in self._base.items():
            copy = tensor.clone()
            if name in step:
                indices, _, new = step[name]
                _bits(copy)[indices] = new
            target[name] = copy
        return target

    def _load(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        from vllm.config import set_current_vllm_config

        def method() -> None:
            with set_current_vllm_config(self._config), torch.no_grad():
                self._model.load_weights(weights.items())

        return method

    def _sparse(self, step: Step, *, forward: bool) -> Callable[[], None]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        patches = []
        for name, (indices, old, new) in step.items():
            values = torch.from_numpy((new if forward else old).view(np.int16).copy())
            tensor = self._base[name]
            places = torch.from_numpy(indices.astype(np.int32))
            patches.append(
                CheckpointWeightPatch(
                    name, tuple(tensor.shape), tensor.dtype, values.view(torch.bfloat16), places
                )
            )

        def method() -> None:
            with set_current_vllm_config(self._config):
                load_checkpoint_weight_patches(self._model, patches)

        return method

    def _holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the resident parameters are these weights, by Llama's own fusing rules and not
        by the map under test."""
        resident = dict(self._model.named_parameters())
        for name, parameter in resident.items():
            if not torch.equal(parameter.view(torch.int16), _fused(name, weights)):
                return False
        return True


class Ours:
    """Our patch, staged once; apply and roll back are timed up to proven, changed weights."""

    def __init__(
        self,
        schema: Schema,
        coverage: Coverage,
        patcher: Patcher,
        fingerprints: list[int],
        step: Step,
    ) -> None:
        self._schema, self._coverage, self._patcher = schema, coverage, patcher
        base, target = list(fingerprints), list(fingerprints)
        forward, backward = [], []
        for place, spec in enumerate(schema.tensors):
            if spec.name not in step:
                continue
            indices, old, new = step[spec.name]
            places = indices.astype(np.int32)
            factors = coefficients(spec, places)
            before, after = weigh(old, factors), weigh(new, factors)
            target[place] = (target[place] - before + after) & MASK64
            steps = order.steps_between(old, new)
            forward.append(Change(place, places, steps, None, before, target[place]))
            backward.append((place, after, base[place]))
        self._patch: Patch = patcher.stage(forward)
        self._there = (base, list(self._patch.entries), root(schema, target))
        self._back = (target, backward, root(schema, base))

    def apply(self) -> None:
        sums = self._patcher.check(self._patch)
        resident, entries, wanted = self._there
        touched = self._coverage.total([sums.touched])
        change = self._coverage.total([sums.change])
        judge(self._schema, resident, entries, touched, change, wanted)
        assert self._patcher.apply(self._patch) == sums.change

    def roll_back(self) -> None:
        self._patcher.rollback(self._patch)


def _fused(name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int16 bits that a Llama parameter of this name must hold."""
    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        if fused in name:
            return torch.cat([weights[name.replace(fused, part)] for part in parts]).view(
                torch.int16
            )
    return weights[name].view(torch.int16)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)


def _read_step(file: str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    with np.load(file) as data:
        names = {key.rpartition(":")[0] for key in data.files}
        return {
            name: (data[f"{name}:indices"], data[f"{name}:old"], data[f"{name}:new"])
            for name in sorted(names)
        }


def _reset_peak() -> int:
    """Forget the peak of resident memory; returns what is resident now, in bytes (Linux).

    Memory that was freed is given back first, or a method could take it again unseen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")
