"""The soak of parsers: a hundredth of it, and that each thing it looks for is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts._soak import options, parse
from scripts._soak.parse_mutants import MUTANTS
from scripts._soak.parse_mutations import MUTATIONS
from scripts._soak.parse_worker import Bench, Found
from vllm_delta.errors import FormatError

REPOSITORY = Path(__file__).parents[2]


def test_a_hundredth_of_the_inputs_is_refused_or_taken_for_what_it_is() -> None:
    report = parse.run(10_000, seed=10, mutants=())
    assert report.good, "\n".join(report.troubles)
    assert report.n_rounds == 10_000
    assert set(report.found.faults) == set(MUTATIONS)
    assert len(report.found.verdicts) == 31
    assert all(one["refused"] for one in report.found.verdicts.values()), "a parser refuses nothing"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_parser_that_lacks_a_part_is_caught(mutant: str) -> None:
    assert parse.find(mutant, seed=0) is not None


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    from scripts._soak.parse_subjects import Parser, formats

    some = [parser for parser in formats(3) if parser.name in ("manifest", "schema")]
    bench = Bench.__new__(Bench)
    bench.seed, bench.parsers, bench._up_to = 3, some, [1.0, 2.0]
    assert all(isinstance(parser, Parser) for parser in some)
    return bench


def verdicts(bench: Bench, n: int = 40) -> Found:
    found = Found()
    for number in range(n):
        bench.one(number, found)
    return found


def test_whatever_is_no_typed_error_is_a_violation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not verdicts(bench).wrong
    for error in (ValueError("x"), RecursionError(), MemoryError(), KeyError("x"), SystemExit(1)):

        def broken(data: bytes, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr("scripts._soak.parse_subjects.parse_manifest", broken)
        wrong = verdicts(bench).wrong
        assert {parser for _, parser, *_ in wrong} == {"manifest"}
        assert all(said.startswith(type(error).__name__) for *_, said in wrong)


def test_a_parse_of_something_else_is_a_violation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_delta.format import parse_schema

    def sloppy(data: bytes) -> Any:
        try:
            return parse_schema(data)
        except FormatError:
            return parse_schema(bench.parsers[1].inputs[0])

    monkeypatch.setattr("scripts._soak.parse_subjects.parse_schema", sloppy)
    wrong = verdicts(bench).wrong
    assert wrong
    assert all("another schema" in said for *_, said in wrong)


def test_a_number_names_an_input_however_many_processes_there_are() -> None:
    one = parse.run(300, 4, 100, mutants=(), n_processes=1)
    three = parse.run(300, 4, 100, mutants=(), n_processes=3)
    assert one.found.verdicts == three.found.verdicts
    assert one.found.faults == three.found.faults


def test_a_process_that_dies_is_a_violation_of_the_input_it_died_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parse, "work", dies)
    report = parse.run(10, 7, mutants=(), n_processes=1)
    assert report.n_violations == 1
    assert "seed 7 number 5: the process ended with 9" in report.troubles[0]


def dies(pipe: Any, place: Any, *_: object) -> None:
    place.value = 5
    os._exit(9)


def test_a_mutant_that_is_not_caught_is_a_failure() -> None:
    report = parse.Report(0, 0)
    assert report.good
    report.mutants["harmless"] = None
    assert not report.good
    assert "NOT CAUGHT" in report.summary()


def test_the_command_writes_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    arguments = ["--rounds", "50", "--seed", "2", "--first", "9", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts._soak.main", "parse", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["rounds"] == 50
    assert report["violations"] == 0
    assert sum(report["faults"].values()) == 50
    assert len(report["mutants_caught"]) == len(MUTANTS)
    assert report["stores"] == {}
    assert sum(n for one in report["by_parser"].values() for n in one.values()) == 50


def test_settings_are_read_without_an_engine() -> None:
    code = "import sys, vllm_delta.engine.settings; sys.exit('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0


def test_a_mistake_in_the_arguments_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["parse", "--rounds", "few"])
    assert "not a number" in capsys.readouterr().err
