"""The soak: some of it here, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest

from scripts._soak import codec as soak
from scripts._soak import judge, options, subjects
from vllm_delta import codec
from vllm_delta.codec import Change
from vllm_delta.replay import Replica

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def some() -> list[subjects.Subject]:
    return subjects.subjects(0)


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The soak in a process of its own, which it may limit."""
    paths = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "scripts._soak.main", "codec", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_two_thousand_mutations(tmp_path: Path) -> None:
    """All are refused or harmless, in bounded memory; every way to be refused is seen."""
    file = tmp_path / "soak.json"
    done = command("--n", "2000", "--seed", "20", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    counts = report["counts"]
    assert sum(counts.values()) == report["n"] == 2000
    assert counts["undetected"] == counts["failed"] == 0
    assert min(counts[way] for way in ("parse", "lane", "fingerprint", "harmless")) > 20
    assert len(report["by_kind"]) == 9
    assert report["grown_bytes"] < 64 << 20  # a copy of the large tensor, twice
    assert "undetected=0 failed=0" in done.stdout


def test_no_access_is_out_of_bounds(tmp_path: Path) -> None:
    """The same loops, compiled so that each access is checked, raise nothing."""
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = command("--n", "1000", "--seed", "21", **checked)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_number_names_a_mutation(some: list[subjects.Subject]) -> None:
    """The same seed and number give the same again, whatever was done before."""

    def kinds(first: int, n: int) -> dict[str, object]:
        report = soak.Report(0, first)
        for number in range(first, first + n):
            soak.one(number, 0, some, report)
        return report.to_dict()["by_kind"]

    assert kinds(40, 60) == kinds(40, 60)
    assert kinds(41, 1) == kinds(41, 1)


class Blind(Replica):
    """A reader that looks at no fingerprint."""

    root = ANY

    def apply(self, change: Change) -> None:
        bits = self.bits[change.tensor] = self.bits[change.tensor].copy()
        if change.bits is not None:
            bits[:] = change.bits
        elif change.indices is not None and change.steps is not None:
            bits[change.indices] = codec.order.add_steps(bits[change.indices], change.steps)


def test_what_passes_unnoticed_is_told(
    some: list[subjects.Subject],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without fingerprints some damage leads to other weights, and the soak says so."""
    monkeypatch.setattr(judge, "Reader", Blind)
    report = soak.Report(0, 0)
    for number in range(400):
        soak.one(number, 0, some, report)
    assert report.totals["undetected"] > 10
    assert not report.good
    first = report.troubles[0]
    assert f"seed 0 number {first['number']}: undetected" in capsys.readouterr().err
    assert f"number {first['number']} ({first['kind']} of" in report.summary()


@pytest.mark.parametrize(
    "bad",
    [
        Change(1, np.array([3, 2], np.int32), np.array([1, 1], np.int16), None, 0, 0),
        Change(1, np.array([2, 99_999_999], np.int32), np.array([1, 1], np.int16), None, 0, 0),
        Change(1, np.array([-1, 2], np.int32), np.array([1, 1], np.int16), None, 0, 0),
        Change(1, np.array([2, 3], np.int32), np.array([1, 0], np.int16), None, 0, 0),
        Change(1, np.array([2, 3], np.int32), np.array([1], np.int16), None, 0, 0),
        Change(1, None, None, None, 0, 0),
        Change(1, None, None, np.zeros(3, np.uint16), 0, 0),
        IndexError("out of range"),
        MemoryError("no room"),
    ],
)
def test_what_no_reader_may_be_given_is_a_failure(
    bad: Change | Exception, some: list[subjects.Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices out of order or range, steps of 0, and any error without a type of ours."""

    def decode(*_: object) -> Iterator[Change]:
        if isinstance(bad, Exception):
            raise bad
        yield bad

    monkeypatch.setattr(codec, "decode", decode)
    report = soak.Report(0, 0)
    soak.one(5, 0, some[:4], report)
    assert report.totals["failed"] == 1
    assert not report.good


def test_a_mutation_that_hangs_ends_the_soak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watchdog names it and leaves with status 1."""
    left: list[int] = []
    over = threading.Event()

    def leave(status: int) -> None:
        left.append(status)
        over.set()

    monkeypatch.setattr(soak, "_LIMIT_S", 0.0)
    monkeypatch.setattr(soak, "os", SimpleNamespace(_exit=leave))
    with soak.Watchdog(7) as watchdog:
        watchdog.begins(123)
        assert over.wait(60)
    assert left[0] == 1
    assert "seed 7 number 123: still running" in capsys.readouterr().err


def test_memory_is_limited() -> None:
    """What wants more room than the limit leaves gets a MemoryError."""
    code = (
        "import numpy\nfrom scripts._soak import codec\ncodec.limit_memory()\n"
        "try:\n    numpy.empty(1 << 29, numpy.uint8)\nexcept MemoryError:\n    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "refused"


def test_a_mistake_in_the_arguments_is_told() -> None:
    """Wrong counts end with status 2; the defaults are what the file says."""
    for wrong in (["codec", "--n", "-1"], ["codec", "--n", "many"], ["weights"], []):
        with pytest.raises(SystemExit) as left:
            options.parse(wrong)
        assert left.value.code == 2
    assert options.parse(["codec"]).n == 100_000
