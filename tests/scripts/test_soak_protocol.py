"""The soak of the protocol: a tenth of it, and that each thing it looks for is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts._soak import options, protocol, protocol_round
from scripts._soak.protocol_mutants import MUTANTS
from scripts._soak.protocol_reader import Reader
from scripts._soak.protocol_stage import Stage
from scripts._soak.protocol_stores import STORES, LooseStore
from scripts._soak.protocol_truth import Truth
from vllm_delta.channel import Log, Record
from vllm_delta.channel.contest import Contest
from vllm_delta.channel.ratchet import Seen
from vllm_delta.channel.store import Store
from vllm_delta.errors import FencedError
from vllm_delta.format import manifest_key
from vllm_delta.replay import Replica
from vllm_delta.testing import MemoryStore

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("store", STORES)
def test_a_tenth_of_the_rounds_ends_well(store: str) -> None:
    report = protocol.run({store: protocol.FULL[store] // 10}, seed=10, mutants=False)
    assert report.good, "\n".join(report.troubles)
    assert report.n_rounds == protocol.FULL[store] // 10
    if store == "memory":
        missing = {kind for kind in protocol.KINDS if not report.faults[kind]}
        assert missing <= protocol.RARE


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_that_lacks_a_part_is_caught(mutant: str) -> None:
    with protocol.settled():
        assert protocol.find(mutant, seed=0) is not None


def caught(
    words: str,
    *,
    numbers: range = range(60),
    fresh: Callable[[int], Store] | None = None,
    others: bool = False,
) -> None:
    """What the first round that notices anything says must be about what is wrong.

    Args:
        others: the same fault may show in other ways before.
    """
    with protocol.settled():
        for number in numbers:
            stage = protocol.play(5, number, "memory", fresh or (lambda _: MemoryStore()))
            said = [text.splitlines()[0] for text in stage.violations]
            if any(words in text for text in said):
                return
            assert others or not said, said
    raise AssertionError("nothing was noticed")


def loose(_: int) -> Store:
    return LooseStore()


def test_a_reader_that_shows_bits_of_no_version_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied = Reader.applied

    def wrong(reader: Reader, manifest: Any) -> Replica:
        replica = applied(reader, manifest)
        replica.bits[0][0] ^= np.uint8(1)
        return replica

    monkeypatch.setattr(Reader, "applied", wrong)
    caught("shows other bits")


def test_a_reader_that_shows_what_nobody_published_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied = Reader.applied

    def ahead(reader: Reader, manifest: Any) -> Replica:
        replica = applied(reader, manifest)
        object.__setattr__(manifest, "target", type(manifest.target)(10**6, manifest.target.root))
        return replica

    monkeypatch.setattr(Reader, "applied", ahead)
    caught("which nobody published")


def test_a_reader_that_stays_behind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_go", lambda reader: True)
    caught("ends at None")


def test_a_reader_that_believes_others_records_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta.channel.chain._next", lambda *_: {})
    caught("never landed")


def test_a_restarted_reader_without_a_ratchet_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "check", lambda *_: None)
    caught("never landed")


class Forgetful(MemoryStore):
    """Says that it wrote a record, and gives it back once, before it is gone."""

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        data = super().get(key, max_bytes=max_bytes)
        if key == manifest_key(9) and super().get(manifest_key(10), max_bytes=max_bytes):
            self.delete([key])
        return data


def test_a_version_that_is_lost_is_caught() -> None:
    caught("is not what landed there", fresh=lambda _: Forgetful())


def test_an_acknowledged_version_that_never_landed_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hopeful(log: Log, record: Record) -> bool:
        with contextlib.suppress(Exception):
            log.store.put_new(manifest_key(record.seq), record.envelope)
        log._position, log._in_doubt = record, None
        return True

    monkeypatch.setattr(Log, "_commit", hopeful)
    caught("is acknowledged, not there")


def test_a_record_that_replaces_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def rude(log: Log, record: Record) -> None:
        log.store.put(manifest_key(record.seq), record.envelope)

    monkeypatch.setattr(Log, "_put_new", rude)
    caught("was replaced")


def test_a_fenced_trainer_that_commits_is_caught() -> None:
    """Nothing that is there does, whatever is taken out; so the truth itself is asked."""
    store, stage = MemoryStore(), Stage(protocol_round.random.Random(0))
    truth, log = Truth(stage), Log(store)
    log.claim("one")
    truth.fenced.add("one")
    assert log.position is not None
    truth.landed(1, log.position.envelope)
    assert "a fenced trainer committed record 1" in stage.violations[0]


def test_a_trainer_that_is_fenced_for_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def shy(log: Log, position: Record) -> None:
        if position.seq == 5:
            raise FencedError("another trainer owns the channel", seq=position.seq + 1)

    monkeypatch.setattr(Log, "_check_ground", shy)
    caught("where nobody else is")


def test_without_a_condition_a_version_overwritten_untold_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose = Log._lose

    def silent(log: Log, seq: int, *, lost: str | None = None) -> Any:
        lose(log, seq)

    monkeypatch.setattr(Log, "_lose", silent)
    monkeypatch.setattr(Log, "_check_contested", lambda _: None)  # which tells of it, too
    caught("overwritten, untold", numbers=range(40, 300), fresh=loose)


def test_without_a_condition_a_trainer_that_learns_of_no_clash_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Contest, "rival", lambda *_: None)
    caught("a clash at", numbers=range(40, 300), fresh=loose, others=True)


def test_a_number_names_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed, store and number give the same calls again, whatever was played before."""

    def calls(number: int) -> list[str]:
        made: list[str] = []
        note = Stage.note

        def noting(stage: Stage, call: str) -> None:
            made.append(f"{stage.now_s} {call.partition(' ratchet=')[0]}")
            note(stage, call)

        with monkeypatch.context() as patch, protocol.settled():
            patch.setattr(Stage, "note", noting)
            protocol.play(3, number, "memory", lambda _: MemoryStore())
        return made

    first = calls(7)
    assert len(first) > 100
    calls(8)
    assert calls(7) == first
    assert calls(8) != first


def test_too_few_faults_in_a_full_run_are_a_failure() -> None:
    report = protocol.Report(0, 0, full=True)
    report.faults.update(dict.fromkeys(protocol.KINDS, protocol.LEAST))
    assert report.good
    report.faults["late"] -= 1
    assert not report.good
    assert "too rare: late" in report.summary()


def test_a_mutant_that_is_not_caught_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def harmless() -> Iterator[None]:
        yield

    monkeypatch.setattr(protocol, "_MUTANT_ROUNDS", 1)
    monkeypatch.setattr(protocol, "MUTANTS", {"harmless": harmless})
    report = protocol.run({"memory": 1}, seed=0)
    assert report.missed == ["harmless"]
    assert not report.good


def test_the_command_writes_what_was_played(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    arguments = ["protocol", "--store", "memory", "--rounds", "1", "--first", "3", "--seed", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts._soak.main", *arguments, "--json", str(file)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["rounds"] == 1
    assert report["violations"] == 0
    assert report["stores"] == {"memory": 1}
    assert set(report["faults"]) == set(protocol.KINDS)
    assert report["mutants_caught"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["protocol", "--rounds", "5"],
        ["protocol", "--store", "tape"],
        ["protocol", "--store", "memory", "--rounds", "few"],
        ["protocol", "--json", "/nowhere/at/all.json"],
        [],
    ],
)
def test_a_mistake_in_the_arguments_is_told(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert "error" in capsys.readouterr().err
