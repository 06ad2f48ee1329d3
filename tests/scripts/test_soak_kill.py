"""The soak that kills processes: a tenth of it, and that each thing it looks for is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts._soak import kill, options
from scripts._soak.kill_judge import Judge
from scripts._soak.kill_truth import Steps
from scripts._soak.kill_zygote import Zygote
from vllm_delta.channel import LocalStore, Record
from vllm_delta.channel.ratchet import Ratchet
from vllm_delta.events import Event, Published
from vllm_delta.format import manifest_key
from vllm_delta.publisher import Publisher, PublisherSettings

REPOSITORY = Path(__file__).parents[2]
SEED = 5


class Channel:
    """A channel with a few versions, and a judge who was told of all of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.url = str(folder / "channel")
        self.store = LocalStore(self.url)
        self.judge = Judge(SEED, self.url, self.store, folder)
        self.steps = Steps(SEED)
        self.acks: list[dict[str, Any]] = []
        tensors = self.steps.at(0)
        self._step = 0

        def hook(event: Event) -> None:
            if isinstance(event, Published):
                version = event.version
                ack = [event.seq, version.number, version.root, event.kind]
                self.acks.append({"ack": ack, "step": self._step})

        settings = PublisherSettings(n_threads=1, strides=())
        with Publisher(self.url, tensors, settings=settings, hooks=[hook]) as publisher:
            for self._step in range(1, 5):
                for name, tensor in self.steps.at(self._step).items():
                    tensors[name].copy_(tensor)
                publisher.publish()
        self.acks[0]["step"] = 0

    def tell(self) -> None:
        for facts in self.acks:
            self.judge.heard("trainer", facts)

    def told(self, words: str) -> None:
        """The judge must say this, and nothing else."""
        self.tell()
        said = list(self.judge.check(alone=True))
        assert said
        assert all(words in one for one in said), said


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    return Channel(tmp_path)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


def test_a_tenth_of_the_rounds_ends_well() -> None:
    report = kill.run(10, seed=10)
    assert report.good, "\n".join(report.troubles)
    assert report.n_rounds == report.faults.total() == 10
    assert report.facts["acknowledged_delta"] > 10
    assert report.facts["shown"] > 10


def test_a_channel_that_is_whole_has_nothing_wrong(channel: Channel) -> None:
    channel.tell()
    shown = channel.acks[3]["ack"][1:3]
    channel.judge.heard("reader-0", {"shown": shown})
    assert not list(channel.judge.check(alone=True))
    assert not list(channel.judge.check_whole())


def test_a_lost_acknowledged_version_is_noticed(channel: Channel) -> None:
    (channel.folder / "channel" / manifest_key(6)).unlink()
    channel.told("is lost, which was acknowledged as record 6")


def test_an_acknowledgement_of_another_kind_is_noticed(channel: Channel) -> None:
    channel.acks[1]["ack"][3] = "merged"
    channel.told("is no merged")


def test_weights_of_another_step_are_noticed(channel: Channel) -> None:
    channel.acks[1]["step"] = 3
    channel.told("does not have the weights of step 3")


def test_weights_that_no_trainer_had_are_noticed(channel: Channel) -> None:
    del channel.acks[-1]
    channel.told("record 6 names weights that no trainer had")


def test_a_record_that_changed_is_noticed(channel: Channel) -> None:
    channel.tell()
    assert not list(channel.judge.check(alone=True))
    path = channel.folder / "channel" / manifest_key(6)
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    assert any("cannot be read" in said for said in channel.judge.check(alone=True))
    (channel.folder / "channel" / manifest_key(6)).unlink()
    assert "the log ends at 5, but went to 6" in list(channel.judge.check(alone=True))


def test_a_record_that_does_not_continue_the_chain_is_noticed(channel: Channel) -> None:
    folder = channel.folder / "channel"
    other = Channel(channel.folder / "other")
    data = (other.folder / "channel" / manifest_key(5)).read_bytes()
    (folder / manifest_key(5)).write_bytes(data)
    channel.tell()
    said = list(channel.judge.check(alone=True))
    assert any("does not continue its channel" in one for one in said)


def test_a_record_beyond_a_hole_is_noticed(channel: Channel) -> None:
    folder = channel.folder / "channel"
    (folder / manifest_key(40)).write_bytes(b"x")
    (folder / "head").write_bytes(b'{"seq":6}')
    channel.told("records beyond the newest")


@pytest.mark.parametrize("damage", [b"", b"part"])
def test_an_object_that_is_there_in_part_is_noticed(channel: Channel, damage: bytes) -> None:
    path = next((channel.folder / "channel" / "b").iterdir())
    path.write_bytes(damage)
    channel.told("is there in part")


def test_a_missing_object_is_noticed(channel: Channel) -> None:
    record = channel.judge._reader.read(4)
    assert isinstance(record, Record)
    (channel.folder / "channel" / "b" / record.manifest.blobs[0].sha256).unlink()
    channel.told("which a record names, is missing")


def test_showing_what_was_never_published_is_noticed(channel: Channel) -> None:
    channel.judge.heard("reader-0", {"shown": [2, channel.acks[3]["ack"][2]]})
    channel.told("reader-0 showed version 2 with a root that was never published")


def test_a_reader_that_goes_back_is_noticed(channel: Channel) -> None:
    for place in (3, 1):
        channel.judge.heard("reader-1", {"shown": channel.acks[place]["ack"][1:3]})
    channel.told("reader-1 went back from 3 to 1")


def test_a_process_that_ends_by_itself_is_noticed(channel: Channel) -> None:
    channel.judge.heard("reader-1", {"failed": "ZeroDivisionError"})
    channel.told("reader-1 ended by itself: ZeroDivisionError")


def test_a_part_of_a_blob_in_the_cache_is_noticed(channel: Channel) -> None:
    (channel.folder / "cache").mkdir()
    (channel.folder / "cache" / f"{'ab' * 32}.blob").write_bytes(b"part")
    channel.told("is in the cache in part")


def test_a_ratchet_that_is_damaged_or_ahead_is_noticed(channel: Channel) -> None:
    record = channel.judge._reader.read(6)
    assert record is not None
    ratchet = Ratchet(channel.folder / "ratchet", channel.url)
    ratchet.advance([record])
    channel.tell()
    assert not list(channel.judge.check(alone=True))
    text = ratchet.path.read_text()
    ratchet.path.write_text(text.replace('"seq": 6', '"seq": 7'))
    assert list(channel.judge.check(alone=True)) == [
        "the ratchet is at record 7, ahead of the channel"
    ]
    ratchet.path.write_text(text[:40])
    assert any("is damaged" in said for said in channel.judge.check(alone=True))


def test_readers_with_other_bits_than_the_trainers_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Judge, "digest", lambda *_: "another")
    report = kill.run(1, seed=3)
    assert [said.rpartition(": ")[2] for said in report.troubles] == [
        f"{name} does not hold the trainer's bits" for name in kill.READERS
    ]


def test_a_process_that_says_nothing_any_more_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kill, "_STALLED_S", 0.0)
    report = kill.run(1, seed=3)
    assert "do not get going" in report.troubles[0]


def test_a_trainer_that_fails_is_noticed(zygote: Zygote, tmp_path: Path) -> None:
    judge = Judge(SEED, "s3://", LocalStore(tmp_path), tmp_path)
    arguments = {"url": "s3://", "seed": SEED, "step": 0, "life": 1, "environment": {}}
    farm = kill.Farm(zygote, judge, lambda _: ("trainer", dict(arguments)))
    farm.start("trainer")
    with pytest.raises(kill.StalledError, match="trainer has ended"):
        farm.listen(lambda *_: False, 60)
    assert farm.bury("trainer") == "trainer ended with 1"
    assert any("SettingsError" in said for said in judge.check(alone=False))


def test_all_that_was_started_ends_with_who_started_it(tmp_path: Path) -> None:
    with Zygote() as zygote:
        arguments = {"url": str(tmp_path / "channel"), "seed": SEED, "step": 0, "life": 1}
        pid, line = zygote.start("trainer", {**arguments, "environment": {}})
        assert line.recv(1)
        os.kill(pid, 0)
    with line:
        while line.recv(1 << 16):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_command_writes_what_was_played(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    arguments = ["kill", "--rounds", "2", "--seed", "2", "--first", "9", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts._soak.main", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["rounds"] == sum(report["faults"].values()) == 2
    assert report["violations"] == 0
    assert report["stores"] == {"local": 2}


def test_a_mistake_in_the_arguments_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["kill", "--store", "memory"])
    assert "invalid choice" in capsys.readouterr().err
