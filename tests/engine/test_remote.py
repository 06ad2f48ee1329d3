"""Engines on a channel in a real object store, and a server whose channel comes late."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.channel.buckets import no_cloud, s3_bucket, seaweed
from tests.channel.wire import Wire
from tests.engine.harness import Server, Trainer, launch, run_module, stop, wait_until
from tests.engine.models import TinyModel, write_model

__all__ = ["no_cloud", "s3_bucket", "seaweed"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_ranks_cost_the_store_one_read_a_blob(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the server: whichever rank is first fetches, the other one reads its file."""
    checkpoint = write_model(tmp_path / "base", TinyModel(architecture="qwen3", tied=True))
    with Wire(os.environ["AWS_ENDPOINT_URL"]) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        url = f"s3://{s3_bucket}/run"
        out = run_module("tests.engine.remote_probe", str(checkpoint), url, str(tmp_path / "cache"))
    (line,) = (line for line in out.splitlines() if line.startswith("FOUND"))
    found = json.loads(line.removeprefix("FOUND"))
    status = found["status"]
    assert (status["version"]["number"], status["error"]) == (2, None)
    assert len(found["blobs"]) >= 4
    reads = Counter(one.path.rpartition("/b/")[2] for one in wire.seen if one.method == "GET")
    assert {blob: reads[blob] for blob in found["blobs"]} == dict.fromkeys(found["blobs"], 1)


def test_a_server_whose_channel_is_out_of_reach_is_not_ready_and_says_why(
    llama: Path, tmp_path: Path
) -> None:
    """Until the disk is mounted; then it goes to the newest version before it is ready."""
    channel = tmp_path / "disk" / "channel"
    elsewhere = tmp_path / "trained"
    elsewhere.mkdir()
    trainer = Trainer(llama, elsewhere / "channel")
    newest = [trainer.step() for _ in range(3)][-1]
    log = tmp_path / "log"
    process, port = launch(llama, channel, "--worker-extension", "vllm_delta", log=log)
    server = Server(process, f"http://127.0.0.1:{port}", channel, llama, log)
    try:

        def answered() -> int | None:
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(httpx.TransportError):
                return int(server.request("GET", "/health").status_code)
            return None

        assert wait_until(answered, timeout_s=280) == 503
        status = wait_until(lambda: (s := server.status())["error"] and s)
        assert (status["ready"], status["version"]) == (False, None)
        assert status["error"]["kind"] == "ChannelError"
        assert "mount" in status["error"]["message"]
        assert answered() == 503
        elsewhere.rename(tmp_path / "disk")
        wait_until(lambda: answered() == 200)
        status = server.status()
        assert (status["ready"], status["version"]["number"]) == (True, newest)
    finally:
        stop(process)
