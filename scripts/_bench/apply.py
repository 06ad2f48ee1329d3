"""`scripts/bench apply`: our patch, vLLM's sparse path and a full load, in one engine per model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PERCENTS = (0.2, 0.5, 1.3)
MODELS = {"SmolLM2-135M": True, "llama-135M-untied": False}
REQUIRED = {0.2: 30.0, 0.5: 15.0, 1.3: 8.0}
MAX_SCALING = 1.25
_COLUMNS = "{:<19} {:>8} {:<12} {:>10} {:>12} {:>10}"


def main(json_file: Path | None, seed: int) -> int:
    """Run everything; returns the exit status: 0 when every claim holds."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vllm-delta-bench-") as folder:
        for place, name in enumerate(MODELS):
            _say(f"{place + 1}/{len(MODELS) + 1} {name}: real optimizer steps, then one engine")
            found = _in_a_process(["model", name, folder, str(seed)])
            _print(found)
            rows += found
        _say(f"{len(MODELS) + 1}/{len(MODELS) + 1} scaling: the same changes, 4 times the model")
        (scaling,) = _in_a_process(["scaling", folder])
    _print_scaling(scaling)
    problems = _problems(rows, scaling)
    for problem in problems:
        _say(f"does not hold: {problem}")
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": rows, "scaling": scaling}, indent=1) + "\n")
    return 1 if problems else 0


def run_model(name: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """In a process of its own: make the steps, start the engine, measure."""
    checkpoint, steps = _make_steps(name, folder, seed)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM

    engine = LLM(
        str(checkpoint),
        worker_extension_cls="scripts._bench.worker.BenchExtension",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        dtype="bfloat16",
    )
    arguments = (str(checkpoint / "model.safetensors"), [str(file) for file in steps])
    (rows,) = engine.collective_rpc("delta_bench", args=arguments)
    return [{"model": name, "tied": MODELS[name], **row} for row in rows]


def run_scaling() -> list[dict[str, Any]]:
    from scripts._bench import scaling
    from scripts._bench.worker import FLUSH_BYTES

    return [scaling.measure(np.ones(FLUSH_BYTES // 8))]


def _make_steps(name: str, folder: Path, seed: int) -> tuple[Path, list[Path]]:
    from scripts._bench.models import build, save
    from scripts._bench.steps import Stepper

    model = build(name, seed)
    checkpoint = save(model, folder / name)
    _say("  gradients")
    stepper = Stepper(model.network, seed)
    files = []
    for percent in PERCENTS:
        actual, changes = stepper.at_percent(percent)
        _say(f"  a step that changes {actual:.3f} %")
        arrays: dict[str, Any] = {}
        for tensor, change in changes.items():
            arrays[f"{tensor}:indices"] = change.indices
            arrays[f"{tensor}:old"] = change.old
            arrays[f"{tensor}:new"] = change.new
        files.append(folder / f"{name}-{percent}.npz")
        np.savez(files[-1], **arrays)
    return checkpoint, files


def _in_a_process(arguments: list[str]) -> list[dict[str, Any]]:
    """Rows of a child process, so that each model has a fresh one and its memory goes with it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [sys.executable, "-m", "scripts._bench.main", "--child", answer.name, *arguments]
        subprocess.run(command, check=True)
        rows: list[dict[str, Any]] = json.loads(Path(answer.name).read_text())
        return rows


def _speedup(rows: list[dict[str, Any]], row: dict[str, Any], method: str) -> float | None:
    """How many times faster ours is than `method` on the same model and step."""
    for ours in rows:
        if ours["method"] == "vllm_delta" and _case(ours) == _case(row):
            for theirs in rows:
                if theirs["method"] == method and _case(theirs) == _case(row):
                    return float(theirs["seconds"] / ours["seconds"])
    return None


def _case(row: dict[str, Any]) -> tuple[str, float]:
    return row["model"], row["changed_percent"]


def _problems(rows: list[dict[str, Any]], scaling: dict[str, Any]) -> list[str]:
    problems = []
    for row in rows:
        where = f"{row['model']} at {row['changed_percent']:.2f} %"
        if row["method"] == "vllm_delta":
            if not row["exact"]:
                problems.append(f"{where}: ours is not exact")
            wanted = min(REQUIRED.items(), key=lambda item: abs(item[0] - row["changed_percent"]))
            if not row["tied"] and (_speedup(rows, row, "vllm_sparse") or 0) < wanted[1]:
                problems.append(f"{where}: less than {wanted[1]:.0f} times vLLM's sparse path")
            if row["changed_percent"] < 1 and (_speedup(rows, row, "load") or 0) < 1:
                problems.append(f"{where}: slower than a full load")
        elif not row["tied"] and not row["exact"]:
            problems.append(f"{where}: {row['method']} came out wrong on the untied model")
    if scaling["ratio"] > MAX_SCALING:
        problems.append(f"scaling: {scaling['ratio']:.2f} on a model 4 times larger")
    return problems


def _print(rows: list[dict[str, Any]]) -> None:
    print(_COLUMNS.format("model", "changed", "method", "ms", "extra MiB", "ours is"))
    for row in rows:
        milliseconds = f"{1e3 * row['seconds']:.1f}" if row["exact"] else "wrong"
        ratio = _speedup(rows, row, row["method"])
        faster = f"{ratio:.1f} x" if row["exact"] and row["method"] != "vllm_delta" else ""
        extra = f"{row['extra_bytes'] / 2**20:.1f}"
        changed = f"{row['changed_percent']:.2f} %"
        print(_COLUMNS.format(row["model"], changed, row["method"], milliseconds, extra, faster))


def _print_scaling(scaling: dict[str, Any]) -> None:
    small, large = (1e3 * seconds for seconds in scaling["seconds"])
    print(
        f"scaling: {scaling['n_changes']} changes take {small:.2f} ms in {scaling['n_weights'][0]}"
        f" weights, {large:.2f} ms in {scaling['n_weights'][1]}: ratio {scaling['ratio']:.2f}"
    )


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)
