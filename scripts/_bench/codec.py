"""`scripts/bench codec`: our codecs and the published ones on the same steps, in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts._bench import codec_report as report
from scripts._bench.codec_entropy import entropy_bytes
from scripts._bench.codec_ours import Ours, manifest_bytes
from scripts._bench.codec_peers import Coder, peers
from scripts._bench.codec_timing import measure, measure_threads
from scripts._bench.codec_traces import Step, View, find_traces, read_steps
from vllm_delta.shadow import Shadow

SHARDS = (2, 8)
Row = dict[str, Any]


def main(folder: Path, json_file: Path | None, plot_file: Path | None) -> int:
    """Measure every step of every trace; 0 unless a round trip was not exact."""
    torch.set_num_threads(1)
    found: dict[str, list[Row]] = {"rows": [], "entropy": [], "tiles": [], "threads": []}
    report.print_head()
    for trace in find_traces(folder):
        _say(f"reading {trace}")
        for step in read_steps(trace):
            for view in step.views:
                _run_view(step, view, found)
    verdicts = report.judge(found["rows"], found["threads"])
    report.print_verdicts(verdicts)
    if json_file is not None:
        json_file.write_text(json.dumps(found | {"requirements": verdicts}, indent=1) + "\n")
    if plot_file is not None:
        from scripts._bench.codec_plot import draw

        draw(found["rows"], plot_file)
    wrong = [row for row in found["rows"] + found["tiles"] if not row["exact"]]
    for row in wrong:
        name = row.get("codec") or f"hazard in tiles for {row['shards']}"
        _say(f"not exact: {name} on {row['trace']}, step {row['step']}, {row['view']}")
    if not found["rows"]:
        _say("no steps: a trace has v1.safetensors beside v0.safetensors")
    return 1 if wrong or not found["rows"] else 0


def _run_view(step: Step, view: View, found: dict[str, list[Row]]) -> None:
    case = _case(step, view)
    found["entropy"].append(case)
    report.print_case(case)
    shadow = Shadow(view.schema, view.base)
    _say("every codec once, checked; then they take turns")
    coders = _coders(view, shadow)
    for coder, figures in zip(coders, measure(coders, view.schema.n_bytes), strict=True):
        row = case | {"codec": coder.name} | figures
        if isinstance(coder, Ours) and row["exact"]:
            row["manifest_bytes"] = manifest_bytes(view, shadow, coder.encode())
        found["rows"].append(row)
        report.print_row(row)
    if view.name == "large":
        tiles = [case | tile for tile in _tiles(view, shadow)]
        report.print_tiles(tiles)
        found["tiles"] += tiles
        if step.number == 1:
            _say("two threads against one")
            threads = [case | row for row in measure_threads(view, shadow)]
            report.print_threads(threads)
            found["threads"] += threads


def _coders(view: View, shadow: Shadow) -> list[Coder]:
    return [Ours(view, "gap", shadow), Ours(view, "hazard", shadow), *peers(view)]


def _case(step: Step, view: View) -> Row:
    """What all rows of a step and view have in common."""
    n_bytes = view.schema.n_bytes
    return {
        "trace": step.trace,
        "step": step.number,
        "view": view.name,
        "changed_percent": step.changed_percent,
        "model_bytes": n_bytes,
        "entropy_percent": 100 * entropy_bytes(view, by_type=True) / n_bytes,
        "entropy_untyped_percent": 100 * entropy_bytes(view, by_type=False) / n_bytes,
    }


def _tiles(view: View, shadow: Shadow) -> Iterator[Row]:
    """What tiles for more readers' shards add to one."""
    one = Ours(view, "hazard", shadow)
    whole = one.n_bytes(one.encode())
    for shards in SHARDS:
        coder = Ours(view, "hazard", shadow, shards=shards)
        payload = coder.encode()
        n_bytes = coder.n_bytes(payload)
        exact = coder.holds(payload)
        yield {"shards": shards, "bytes": n_bytes, "added_bytes": n_bytes - whole, "exact": exact}


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)
