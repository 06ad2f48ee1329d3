"""The same number of changes on a model and on one four times larger: is the patch O(changed)?"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import MASK64, coefficients, root, weigh
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import Coverage, ParameterSpec, RankLayout, Rectangle, judge
from vllm_delta.patch import Patch, Patcher

N_CHANGES = 270_000
N_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
N_REPETITIONS = 15


class Plain:
    """Tensors of a Llama's shapes in memory, each its own parameter, and one patch for them."""

    def __init__(self, factor: int, seed: int) -> None:
        width = {1: 1, 4: 2}[factor]
        self._rng = np.random.default_rng(seed)
        self.schema = Schema.of(_specs(width, factor // width))
        self._tensors = {spec.name: self._random(spec) for spec in self.schema.tensors}
        rectangles = tuple(
            Rectangle(place, (spec.numel,), 0, (1,), spec.name, 0, (1,))
            for place, spec in enumerate(self.schema.tensors)
        )
        parameters = {s.name: ParameterSpec(s.dtype, s.numel) for s in self.schema.tensors}
        layout = RankLayout(self.schema.digest, 0, rectangles, parameters)
        self._coverage = Coverage(self.schema, [layout])
        self._patcher = Patcher(self.schema, layout, self._tensors)
        scanned = self._coverage.total([self._patcher.scan()])
        self._resident = [scanned[place] for place in range(len(self.schema))]
        self._patch, self._root = self._stage()

    def apply(self) -> None:
        sums = self._patcher.check(self._patch)
        touched = self._coverage.total([sums.touched])
        change = self._coverage.total([sums.change])
        entries = list(self._patch.entries)
        judge(self.schema, self._resident, entries, touched, change, self._root)
        assert self._patcher.apply(self._patch) == sums.change

    def roll_back(self) -> None:
        self._patcher.rollback(self._patch)

    def _random(self, spec: TensorSpec) -> torch.Tensor:
        values = self._rng.standard_normal(spec.numel, np.float32) * np.float32(0.05)
        return torch.from_numpy(values).to(torch.bfloat16).reshape(spec.shape)

    def _stage(self) -> tuple[Patch, str]:
        total = self.schema.n_weights
        chosen = np.sort(self._rng.choice(total, N_CHANGES, replace=False))
        starts = np.cumsum([0, *(spec.numel for spec in self.schema.tensors)])
        target, changes = list(self._resident), []
        for place, spec in enumerate(self.schema.tensors):
            first, last = np.searchsorted(chosen, starts[place : place + 2])
            if first == last:
                continue
            indices = (chosen[first:last] - starts[place]).astype(np.int32)
            steps = self._rng.choice(np.array([-1, 1], np.int16), indices.size)
            bits = self._tensors[spec.name].view(torch.int16).numpy().view(np.uint16).reshape(-1)
            factors = coefficients(spec, indices)
            before = weigh(bits[indices], factors)
            after = weigh(order.add_steps(bits[indices], steps), factors)
            target[place] = (target[place] - before + after) & MASK64
            changes.append(Change(place, indices, steps, None, before, target[place]))
        return self._patcher.stage(changes), root(self.schema, target)


def measure(flush: np.ndarray) -> dict[str, Any]:
    """Times both sizes in turn, caches flushed before each; the ratio of the medians."""
    models = {factor: Plain(factor, seed=factor) for factor in (1, 4)}
    seconds: dict[int, list[float]] = {factor: [] for factor in models}
    for repetition in range(N_REPETITIONS + 1):
        for factor, model in models.items():
            flush.sum()
            start = time.perf_counter()
            model.apply()
            if repetition:
                seconds[factor].append(time.perf_counter() - start)
            model.roll_back()
    medians = {factor: statistics.median(times) for factor, times in seconds.items()}
    return {
        "n_changes": N_CHANGES,
        "n_weights": [models[1].schema.n_weights, models[4].schema.n_weights],
        "seconds": [medians[1], medians[4]],
        "ratio": medians[4] / medians[1],
    }


def _specs(width: int, length: int) -> list[TensorSpec]:
    hidden, inner = HIDDEN * width, INTERMEDIATE * width
    keys = hidden // 3
    shapes = {
        "q": (hidden, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "norm": (hidden,),
    }
    specs = [
        TensorSpec(f"layers.{layer:02d}.{name}", "BF16", shape)
        for layer in range(N_LAYERS)
        for name, shape in shapes.items()
    ]
    return [TensorSpec("embed", "BF16", (VOCABULARY * length, hidden)), *specs]
