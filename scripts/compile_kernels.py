"""Compiles every kernel variant ahead of time, with no GPU, and reads what it uses.

    python scripts/compile_kernels.py [--targets sm80 sm90 sm100 gfx942] [--only .w2] [--json FILE]

Exits with 1 if a variant does not compile, or spills registers to memory. The interpreter accepts
what the compiler refuses, so this is the other half of the kernels' tests. Run it in a process
without TRITON_INTERPRET, which Triton reads when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_delta_kernels import decode, fingerprint, patch
from vllm_delta_kernels.bits import INTEGERS, UNSIGNED

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARGUMENTS = {
    "table_ptr": "*i64",
    "jobs_ptr": "*i64",
    "sums_ptr": "*i64",
    "gate_ptr": "*i32",
    "n_bad_ptr": "*i32",
    "sign": "i32",
    "words_ptr": "*i32",
    "nodes_ptr": "*i32",
    "node_of_ptr": "*i32",
    "rates_ptr": "*i32",
    "scales_ptr": "*i32",
    "magnitudes_ptr": "*i32",
    "positions_ptr": "*i32",
    "status_ptr": "*i32",
}


class Variant(NamedTuple):
    """A kernel with the constants it is compiled for, and arguments whose type goes with them."""

    name: str
    kernel: Any
    options: dict[str, Any]
    arguments: Mapping[str, str] = {}


def variants() -> Iterator[Variant]:
    """Every variant that a patch of bf16, fp16, fp32 or fp8 weights, a scan, or lanes of such
    weights can ask for."""
    for width, steps in ((1, (1,)), (2, (1, 2)), (4, (1, 4))):
        for offset_bytes in (4, 8):
            for step_bytes in steps:
                kind = f"w{width}.o{offset_bytes}.s{step_bytes}"
                options = patch._options(width, offset_bytes, step_bytes)
                yield Variant(f"check_patch.{kind}", patch._check_patch_kernel, options)
                yield Variant(f"scatter_patch.{kind}", patch._scatter_patch_kernel, options)
    for width in INTEGERS:
        options = fingerprint._options(width)
        yield Variant(f"scan_weights.w{width}", fingerprint._scan_weights_kernel, options)
        yield Variant(f"check_bits.w{width}", fingerprint._check_bits_kernel, options)
        yield Variant(f"swap_bits.w{width}", fingerprint._swap_bits_kernel, options)
    for width in UNSIGNED:
        options = decode._options(width)
        pointer = {"steps_ptr": f"*i{8 * width}"}
        yield Variant(f"decode_lanes.w{width}", decode._decode_lanes_kernel, options, pointer)


def compile_for(variant: Variant, target: GPUTarget) -> Any:
    names = list(variant.kernel.arg_names)
    constants = {n: v for n, v in variant.options.items() if n in names}
    arguments = {**ARGUMENTS, **variant.arguments}
    source = ASTSource(
        variant.kernel,
        signature={n: arguments.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        # What the launcher finds of every tensor that torch allocates.
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")},
    )
    return triton.compile(
        source, target=target, options={"num_warps": variant.options["num_warps"]}
    )


def usage(compiled: Any) -> dict[str, int]:
    """Registers of a thread, and how many of them, or bytes, went to memory instead."""
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        found = {
            name: int(match[1]) if (match := re.search(rf"\.{name}:?\s+(\d+)", text)) else -1
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"]
        return {"registers": found["vgpr_count"], "spilled": spilled}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = _tool("cuobjdump", "-res-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    match = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    if match is None:
        raise RuntimeError(f"cuobjdump said: {resources[-300:]}")
    local = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    return {"registers": int(match[1]), "spilled": int(match[2]) + local}


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("unset TRITON_INTERPRET: the interpreter's kernels cannot be compiled")
    rows: list[dict[str, Any]] = []
    for variant in filter(lambda variant: options.only in variant.name, variants()):
        for target in options.targets:
            try:
                found: dict[str, Any] = usage(compile_for(variant, TARGETS[target]))
            except Exception as error:  # noqa: BLE001 - reported, and the exit status is 1
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            rows.append({"variant": variant.name, "target": target, **found})
            print(f"{variant.name:34} {target:7} {found}", flush=True)
    bad = [row for row in rows if "error" in row or row["spilled"]]
    print(f"triton {triton.__version__}: {len(rows)} compiled or tried, {len(bad)} bad")
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
