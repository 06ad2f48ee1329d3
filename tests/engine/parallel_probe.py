"""Follows a channel with an engine of its own process and notes what happens.

Run as ``python -m tests.engine.parallel_probe CHECKPOINT N_RANKS CODEC DIRECTORY``; by hazard,
deltas are cut for the ranks, and then the ranks fail in turn. It writes its figures to
``DIRECTORY/found.json`` and the final checkpoint to ``DIRECTORY/final``; the tests judge them.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, get_args

from tests.engine.harness import PROMPTS, LocalEngine, completions, digest_model, digest_weights
from vllm_delta.codec import Codec
from vllm_delta.errors import DeltaError

NORM = "model.norm.weight"


def fresh_worker_digest(worker: Any, checkpoint: str) -> str:
    """Digest of this rank's weights as vLLM's own loader loads them from a checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = copy.copy(worker.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model = checkpoint
    # Layers enter themselves here by name; a second model of one process needs its own table.
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_current_vllm_config(config):
        return digest_model(get_model(vllm_config=config))


def rank_of(worker: Any) -> Any:
    """Our state in a worker, which vLLM hands over in its wrapper."""
    return worker.worker.__dict__["_delta_state"]


def read_elsewhere(worker: Any, channel: str) -> None:
    """Makes rank 1 read another copy of the channel."""
    from vllm_delta.channel import LogReader, open_channel

    if worker.rank == 1:
        rank_of(worker)._log = LogReader(open_channel(channel))


def fail_to_apply(worker: Any, *, half: bool) -> None:
    """Makes rank 1's next apply fail: before it writes, or after it has written something."""
    if worker.rank != 1:
        return
    patcher = rank_of(worker)._patcher
    apply = patcher.apply

    def failing(patch: Any) -> Any:
        del patcher.apply
        if half:
            apply(patch)
            damage(worker)
        raise MemoryError("no room")

    patcher.apply = failing


def damage(worker: Any) -> None:
    """Flips a bit of a weight that every rank holds, on rank 1 only."""
    import torch

    if worker.rank == 1:
        parameter = dict(worker.model_runner.get_model().named_parameters())[NORM]
        parameter.data.view(torch.int16)[3] ^= 1


def process_of(worker: Any) -> int:
    return os.getpid()


def lanes_of(worker: Any) -> dict[str, int]:
    """How many lanes a rank decoded, and the bytes that it keeps of other ranks' weights."""
    rank = rank_of(worker)
    return {"n_decoded": rank._residence.n_lanes, "halo_bytes": rank.status()["halo_bytes"]}


class Probe:
    def __init__(self, checkpoint: Path, n_ranks: int, codec: Codec, directory: Path) -> None:
        self.directory = directory
        self.engine = LocalEngine(checkpoint, tensor_parallel_size=n_ranks)
        self.trainer = self.engine.begin(directory / "channel", codec=codec, shards=n_ranks)
        self.follow = self.engine.follow()
        self.found: dict[str, Any] = {}

    def digests(self) -> list[str]:
        found: list[str] = self.engine.llm.collective_rpc(digest_weights)
        return found

    def fresh(self, name: str) -> list[str]:
        final = self.trainer.save(self.directory / name, self.engine.checkpoint)
        found: list[str] = self.engine.llm.collective_rpc(fresh_worker_digest, args=(str(final),))
        return found

    def forward(self) -> None:
        before = self.digests()
        for _ in range(3):
            previous = self.digests()
            self.trainer.step(2.0)
            self.follow.step()
        self.follow.verify()
        self.found["forward"] = {
            "status": self.follow.status(),
            "moved": all(old != new for old, new in zip(before, self.digests(), strict=True)),
            "bits_equal": self.digests() == self.fresh("final"),
        }
        self.found["lanes"] = self.engine.llm.collective_rpc(lanes_of)
        if self.trainer.codec == "gap":
            self.found["completions"] = completions(self.engine.llm, PROMPTS)
        after = self.digests()
        self.follow.rollback()
        rolled_back = self.digests() == previous
        self.follow.apply()
        self.found["back"] = {"bits_equal": rolled_back, "again": self.digests() == after}

    def attempt(self, name: str) -> None:
        """One step that should fail, and what it left."""
        before = self.digests()
        error: DeltaError | None = None
        try:
            self.follow.step()
        except DeltaError as caught:
            error = caught
        self.found[name] = {
            "error": None if error is None else error.to_dict(),
            "last_error": self.follow.status()["last_error"],
            "state": self.follow.status()["state"],
            "untouched": self.digests() == before,
            "paused": self.engine.core.is_scheduler_paused(),
        }
        self.follow.step()
        self.found[name] |= {
            "healed": self.digests() == self.fresh(name),
            "state_after": self.follow.status()["state"],
            "paused_after": self.engine.core.is_scheduler_paused(),
        }

    def faults(self) -> None:
        rpc = self.engine.llm.collective_rpc
        copied = self.directory / "copied"
        self.trainer.step()
        shutil.copytree(self.trainer.channel, copied)
        blob = self.newest_blob(copied)
        whole = blob.read_bytes()
        blob.write_bytes(whole[:-1])
        rpc(read_elsewhere, args=(str(copied),))
        stage = self.follow.status()
        assert stage["state"] == "following"
        self.attempt_staging(blob, whole)
        rpc(read_elsewhere, args=(str(self.trainer.channel),))
        self.trainer.step()
        rpc(fail_to_apply, kwargs={"half": False})
        self.attempt("apply")
        self.trainer.step()
        rpc(fail_to_apply, kwargs={"half": True})
        self.attempt("half")
        self.trainer.step(100.0, only=NORM)
        rpc(damage)
        self.attempt("check")
        self.die()

    def attempt_staging(self, blob: Path, whole: bytes) -> None:
        """Like `attempt`, with the blob made whole before the second try."""
        step = self.follow.step

        def repaired() -> Any:
            self.follow.step = step_again
            return step()

        def step_again() -> Any:
            blob.write_bytes(whole)
            return step()

        self.follow.step = repaired
        self.attempt("stage")
        self.follow.step = step

    def newest_blob(self, channel: Path) -> Path:
        from vllm_delta.channel import LogReader, open_channel

        record = LogReader(open_channel(channel)).tail()
        assert record is not None
        return channel / "b" / record.manifest.blobs[0].sha256

    def die(self) -> None:
        """Rank 1 is killed; the next step must end in an error of ours, soon."""
        os.kill(self.engine.llm.collective_rpc(process_of)[1], signal.SIGKILL)
        self.trainer.step()
        try:
            self.follow.step()
        except DeltaError as error:
            self.found["dead"] = error.to_dict()


def main() -> None:
    checkpoint, directory = Path(sys.argv[1]), Path(sys.argv[4])
    n_ranks, codec = int(sys.argv[2]), sys.argv[3]
    assert codec in get_args(Codec)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    probe = Probe(checkpoint, n_ranks, codec, directory)
    probe.forward()
    if n_ranks > 1 and codec == "hazard":
        probe.faults()
    (directory / "found.json").write_text(json.dumps(probe.found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a killed rank leaves nothing that could be ended in an orderly way
