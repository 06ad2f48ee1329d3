"""Times the patcher alone on random weights in the shapes of SmolLM2-135M.

    python scripts/_bench/patch_micro.py [--threads N] [--repeats N] [--percent 0.2 0.4 1.3]

Each repetition flushes the caches, then checks and applies one delta, or rolls it back. The
answer is compared bit for bit before a number is printed. One process, one model, one delta.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import coefficients, weigh
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.layout import ParameterSpec, RankLayout, Rectangle
from vllm_delta.patch import Patch, Patcher
from vllm_delta.patch.cpu import CpuBackend

VOCABULARY, HIDDEN, KEYS, INNER, LAYERS = 49152, 576, 192, 1536, 30
FUSED = {
    "qkv_proj": (("q_proj", HIDDEN), ("k_proj", KEYS), ("v_proj", KEYS)),
    "gate_up_proj": (("gate_proj", INNER), ("up_proj", INNER)),
}


def parts() -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Checkpoint name and shape, and the parameter and first element that hold it."""
    yield "embed", (VOCABULARY, HIDDEN), "embed", 0
    for layer in range(LAYERS):
        for fused, members in FUSED.items():
            start = 0
            for name, rows in members:
                yield f"{layer}.{name}", (rows, HIDDEN), f"{layer}.{fused}", start * HIDDEN
                start += rows
        for name, shape in (("o_proj", (HIDDEN, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            yield f"{layer}.{name}", shape, f"{layer}.{name}", 0
        for norm in ("input_norm", "post_norm"):
            yield f"{layer}.{norm}", (HIDDEN,), f"{layer}.{norm}", 0


def model(backend: CpuBackend) -> tuple[Patcher, dict[str, torch.Tensor]]:
    rows = list(parts())
    schema = Schema.of(TensorSpec(name, "BF16", shape) for name, shape, _, _ in rows)
    sizes: dict[str, int] = {}
    rectangles: list[Rectangle] = []
    for name, shape, parameter, first in rows:
        n = int(np.prod(shape))
        sizes[parameter] = sizes.get(parameter, 0) + n
        tensor = schema.index(name)
        rectangles.append(Rectangle(tensor, (n,), 0, (1,), parameter, first, (1,)))
    generator = torch.Generator().manual_seed(0)
    storages = {
        name: (torch.randn(n, generator=generator) * 0.05).bfloat16() for name, n in sizes.items()
    }
    layout = RankLayout(
        schema.digest, 0, tuple(rectangles), {n: ParameterSpec("BF16", s) for n, s in sizes.items()}
    )
    return Patcher(schema, layout, storages, backend=backend), storages


def delta(patcher: Patcher, storages: dict[str, torch.Tensor], share: float) -> Iterator[Change]:
    rng = np.random.default_rng(int(share * 1e6))
    steps = np.array([-1, 1, -1, 1, -1, 1, -1, 1, -2, 300], np.int16)
    for rectangle in sorted(patcher.layout.rectangles, key=lambda r: r.tensor):
        spec = patcher.schema.tensors[rectangle.tensor]
        n = max(1, round(share * spec.numel))
        indices = np.unique(rng.integers(0, spec.numel, n)).astype(np.int32)
        chosen = rng.choice(steps[:9], indices.size)
        chosen[rng.random(indices.size) < 0.002] = steps[9]
        bits = storages[rectangle.parameter].view(torch.uint16).numpy()[rectangle.target_offset :]
        touched = weigh(bits[indices], coefficients(spec, indices))
        yield Change(rectangle.tensor, indices, chosen, None, touched, 0)


def expected(
    patcher: Patcher, storages: dict[str, torch.Tensor], changes: list[Change]
) -> dict[str, npt.NDArray[np.uint16]]:
    bits = {name: tensor.view(torch.uint16).numpy().copy() for name, tensor in storages.items()}
    held = {rectangle.tensor: rectangle for rectangle in patcher.layout.rectangles}
    for change in changes:
        rectangle = held[change.tensor]
        places = change.indices + rectangle.target_offset
        flat = bits[rectangle.parameter]
        flat[places] = order.add_steps(flat[places], change.steps)
    return bits


def measure(patcher: Patcher, patch: Patch, repeats: int) -> tuple[list[float], list[float]]:
    other = torch.ones(1 << 26, dtype=torch.int64)
    check, apply = [], []
    for repeat in range(repeats):
        other.sum()
        start = time.perf_counter()
        if repeat % 2 == 0:
            patcher.check(patch)
        middle = time.perf_counter()
        (patcher.rollback if patch.applied else patcher.apply)(patch)
        if repeat % 2 == 0:
            check.append(middle - start)
            apply.append(time.perf_counter() - middle)
    return check, apply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=14)
    parser.add_argument("--percent", type=float, nargs="+", default=[0.2, 0.4, 1.3])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    patcher, storages = model(CpuBackend(options.threads))
    print(f"construct (with compile or cache) {time.perf_counter() - start:.2f} s")
    for _ in range(3):
        start = time.perf_counter()
        patcher.scan()
        seconds = time.perf_counter() - start
        print(f"scan {1e3 * seconds:.1f} ms, {patcher.schema.n_bytes / seconds / 1e9:.1f} GB/s")
    for percent in options.percent:
        changes = list(delta(patcher, storages, percent / 100))
        target = expected(patcher, storages, changes)
        start = time.perf_counter()
        patch = patcher.stage(changes)
        stage = time.perf_counter() - start
        sums = patcher.check(patch)
        assert sums.touched == {
            i: changes[r.tensor].touched for i, r in enumerate(patcher.layout.rectangles)
        }
        patcher.apply(patch)
        for name, tensor in storages.items():
            assert np.array_equal(tensor.view(torch.uint16).numpy(), target[name]), name
        patcher.rollback(patch)
        check, apply = measure(patcher, patch, options.repeats)
        both = [1e3 * (a + b) for a, b in zip(check, apply, strict=True)]
        print(
            f"{percent} % ({patch.nnz} changes, {patch.n_bytes / patch.nnz:.2f} B each): "
            f"stage {1e3 * stage:.1f} ms, check {1e3 * statistics.median(check):.2f}, "
            f"apply {1e3 * statistics.median(apply):.2f}, "
            f"both {statistics.median(both):.2f} (least {min(both):.2f}) ms"
        )


if __name__ == "__main__":
    main()
