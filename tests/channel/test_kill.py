from __future__ import annotations

import random
import re
import select
import signal
from pathlib import Path

from tests.channel.toy import child, replay
from vllm_delta.channel import LocalStore, Log
from vllm_delta.format import digest

N_ROUNDS = 15


def publish_until_killed(root: Path, rng: random.Random) -> list[int]:
    """Run a trainer, kill it after some records at some moment; what it had acknowledged."""
    trainer = child("publish", root)
    assert trainer.stdout is not None
    try:
        first = trainer.stdout.readline()
        assert first, "the trainer died by itself"
        said = first + b"".join(trainer.stdout.readline() for _ in range(rng.randrange(6)))
        # The moment of the kill within an append is drawn too; this waits for nothing.
        select.select([], [], [], rng.random() * 0.006)
        trainer.send_signal(signal.SIGKILL)
        rest, errors = trainer.communicate(timeout=60)
        assert trainer.returncode == -signal.SIGKILL, errors.decode()
        # The last line may be cut short by the kill.
        return [int(line) for line in re.findall(rb"(\d+)\n", said + rest)]
    finally:
        trainer.kill()
        trainer.communicate()


def test_killing_trainers_loses_no_acknowledged_record_and_shows_no_partial_one(
    tmp_path: Path,
) -> None:
    root = tmp_path / "channel"
    rng = random.Random(20)
    acknowledged: dict[int, bytes] = {}
    n_left_over = 0
    for round_number in range(N_ROUNDS):
        said = publish_until_killed(root, rng)
        log = Log(LocalStore(root))
        tail = log.tail()
        assert tail is not None
        assert tail.manifest.epoch == round_number + 1
        assert tail.seq >= max(said)
        records = list(log.read_chain(1, tail.seq))
        assert replay(log, records) is not None
        there = {record.seq: record.envelope for record in records}
        for seq, envelope in acknowledged.items():
            assert there[seq] == envelope
        acknowledged |= {seq: there[seq] for seq in said}
        for key in log.store.list("b/"):
            assert digest((root / key).read_bytes()) == key[2:], "a partial blob is visible"
        n_left_over = sum(path.suffix == ".tmp" for path in root.rglob("*"))
    assert len(acknowledged) >= N_ROUNDS
    assert n_left_over <= 2 * N_ROUNDS
    owner = Log(LocalStore(root))
    owner.claim("sweeper")
    store = owner.store
    assert isinstance(store, LocalStore)
    assert store.sweep_temporaries(0.0) == n_left_over
    assert not [path for path in root.rglob("*") if path.suffix == ".tmp"]
