"""The kernels' tests where there is no GPU: the interpreter and the compiler, each by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.conftest import KERNEL_TESTS

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**clean, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=280,
    )


@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_the_kernels_equal_their_definition_in_the_interpreter(name: str) -> None:
    """Every other file of this folder passes in a process with TRITON_INTERPRET=1."""
    test = f"tests/kernels/{name}"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", test, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary
    assert "skipped" not in summary


def compiled(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    report = tmp_path / "report.json"
    done = run(
        "scripts/compile_kernels.py",
        "--json",
        str(report),
        *arguments,
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    assert all(row["spilled"] == 0 and row["registers"] > 0 for row in rows)
    return rows


def test_every_variant_compiles_for_sm80_and_sm90_with_no_spill(tmp_path: Path) -> None:
    """The compiler takes what the interpreter took, and no register goes to memory."""
    rows = compiled(tmp_path, "--targets", "sm80", "sm90")
    assert len(rows) == 2 * 35
    assert {row["target"] for row in rows} == {"sm80", "sm90"}


def test_the_bf16_variants_compile_for_sm100_and_gfx942_with_no_spill(tmp_path: Path) -> None:
    """The same for Blackwell and for AMD, where most weights are 16 bits wide."""
    rows = compiled(tmp_path, "--targets", "sm100", "gfx942", "--only", ".w2")
    assert len(rows) == 2 * 12
