"""``vllm serve MODEL --worker-extension vllm_delta``, as a user meets it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.harness import PROMPT, Server, Trainer, fresh_completions, wait_until
from vllm_delta.channel import LocalStore, Log

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trainer(server: Server) -> Trainer:
    """Begins the server's channel, which is empty when the server starts."""
    status = server.status()
    assert (status["state"], status["version"]) == ("waiting for the channel", None)
    assert status["ranks"][0]["verdict"] == "unknown"
    assert server.complete()["usage"]["completion_tokens"] == 8
    trainer = Trainer(server.checkpoint, server.channel)
    server.wait_for_version(0)
    return trainer


def step(server: Server, trainer: Trainer, percent: float = 1.0) -> dict[str, Any]:
    """Publishes a version and waits until it is served."""
    return server.wait_for_version(trainer.step(percent))


def test_it_follows_and_says_so_for_every_rank(server: Server, trainer: Trainer) -> None:
    """Version, verdict and lag of engine and ranks, and vLLM's own label is ours."""
    for _ in range(3):
        status = step(server, trainer)
    version = status["version"]
    assert version == status["newest"]
    assert (status["state"], status["lag_versions"], status["lag_s"]) == ("following", 0, None)
    assert (status["error"], status["fence"], status["pause"]) == (None, None, "UNPAUSED")
    assert status["weight_version"] == f"{version['number']}-{version['root'][:12]}"
    (rank,) = status["ranks"]
    assert (rank["version"], rank["verdict"], rank["lag_versions"]) == (version, "proven", 0)
    assert rank["kept_bytes"] > 0
    commit = status["last_commit"]
    assert commit["versions"] == [version["number"]]
    assert all(commit[key] > 0 for key in ("stage_s", "check_ms", "apply_ms", "pause_ms"))


def test_requests_run_across_swaps_and_none_fails(server: Server, trainer: Trainer) -> None:
    """Streaming requests that are under way while versions are committed all end well."""
    reasons: list[str] = []
    crossed: list[bool] = []
    enough = threading.Event()

    def stream() -> None:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}
        headers = {"Authorization": "Bearer secret"}
        url = f"{server.url}/v1/completions"
        while not enough.is_set():
            before = server.status()["version"]
            more = {"json": body | {"stream": True}, "headers": headers, "timeout": 120}
            with httpx.stream("POST", url, **more) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
            last = json.loads(lines[-1].removeprefix("data: "))
            reasons.append(last["choices"][0]["finish_reason"])
            crossed.append(server.status()["version"] != before)

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        step(server, trainer)
    enough.set()
    for thread in threads:
        thread.join(120)
    assert set(reasons) == {"length"}
    assert any(crossed)
    assert len(reasons) == len(crossed) >= 4


def test_served_completions_equal_a_fresh_engines(
    server: Server, trainer: Trainer, tmp_path: Path
) -> None:
    """After all that the served weights answer as the published checkpoint does, and new
    requests use no KV of older versions."""
    server.complete()
    assert _cached(server.complete()) > 0
    step(server, trainer)
    assert _cached(server.complete()) == 0
    final = trainer.save(tmp_path / "final", server.checkpoint)
    served = [
        server.complete(prompt, max_tokens=12, logprobs=1, ignore_eos=True)
        for prompt in ("the quick brown fox", PROMPT)
    ]
    fresh = fresh_completions(final)
    for mine, (_, score) in zip(served, fresh[:2], strict=True):
        logprobs = mine["choices"][0]["logprobs"]["token_logprobs"]
        assert sum(logprobs) == pytest.approx(score, abs=0)


def _cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return 0 if details is None else int(details["cached_tokens"] or 0)


def test_rollback_pins_until_apply(server: Server, trainer: Trainer) -> None:
    """Back, not forward by itself, to a given version, and on to the newest."""
    number = step(server, trainer)["version"]["number"]
    answer = server.request("POST", "/v1/delta/rollback")
    assert (answer.status_code, answer.json()["state"]) == (200, "pinned")
    trainer.step()
    wait_until(lambda: server.status()["lag_versions"] == 2)
    status = server.status()
    assert status["version"]["number"] == number - 1
    assert status["lag_s"] > 0
    answer = server.request("POST", "/v1/delta/apply", json={"version": number})
    assert answer.json()["version"]["number"] == number
    assert server.status()["pinned"]
    answer = server.request("POST", "/v1/delta/apply")
    assert answer.json()["version"]["number"] == number + 1
    assert not server.status()["pinned"]
    assert server.request("POST", "/v1/delta/verify").json()["state"] == "following"


def test_commands_that_make_no_sense_are_told(server: Server, trainer: Trainer) -> None:
    """Typed errors as JSON with a fitting status code; the version stays."""
    before = server.status()["version"]
    answer = server.request("POST", "/v1/delta/apply", json={"version": 10_000})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "ChainError")
    for body in ("{", "[1]", '{"version": "x"}', '{"number": 1}', "true"):
        answer = server.request("POST", "/v1/delta/apply", content=body)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "SettingsError")
    server.request("POST", "/v1/delta/apply")
    assert server.status()["version"] == before


def test_the_api_key_guards_the_routes(server: Server, trainer: Trainer) -> None:
    """Without the key, nothing is told and nothing is done."""
    assert server.request("GET", "/v1/delta/status", key=None).status_code == 401
    for command in ("apply", "rollback", "verify"):
        assert server.request("POST", f"/v1/delta/{command}", key="guess").status_code == 401


def test_a_bad_blob_is_served_around(server: Server, trainer: Trainer) -> None:
    """The error is in status and metrics, the last good version is served, and a good blob or an
    anchor leads on."""
    before = server.status()["version"]
    blobs = trainer.channel / "b"
    known = set(blobs.iterdir())
    server.request("POST", "/v1/delta/apply", json={"version": before["number"]})
    number = trainer.step()
    record = Log(LocalStore(trainer.channel)).tail()
    assert record is not None
    (blob,) = (
        blobs / ref.sha256 for ref in record.manifest.blobs if blobs / ref.sha256 not in known
    )
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-2])
    answer = server.request("POST", "/v1/delta/apply")
    assert (answer.status_code, answer.json()["error"]["kind"]) == (502, "DigestError")
    status = server.status()
    assert (status["version"], status["error"]["kind"]) == (before, "DigestError")
    assert server.complete()["usage"]["completion_tokens"] == 8
    assert server.request("GET", "/health").status_code == 200
    blob.write_bytes(whole)
    server.wait_for_version(number)
    wait_until(lambda: server.status()["error"] is None)


def test_metrics_are_on_vllms_own_page(server: Server, trainer: Trainer) -> None:
    """Version, lag, bytes, seconds and errors by kind, with figures that fit what happened."""
    step(server, trainer)
    text = server.request("GET", "/metrics").text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm_delta") and not sample.labels
    }
    assert values["vllm_delta_version"] == server.status()["version"]["number"]
    assert values["vllm_delta_lag_versions"] == values["vllm_delta_lag_seconds"] == 0
    assert values["vllm_delta_payload_bytes_total"] > 1000
    assert values["vllm_delta_versions_total"] >= values["vllm_delta_commits_total"] > 0
    for name in ("stage", "check", "apply", "pause"):
        assert values[f"vllm_delta_{name}_seconds_count"] > 0
        assert values[f"vllm_delta_{name}_seconds_sum"] > 0
    assert 'vllm_delta_errors_total{kind="DigestError"}' in text
    assert "vllm:" in text


def test_a_client_that_goes_away_leaves_no_pause(server: Server, trainer: Trainer) -> None:
    """The request that asked for a commit is dropped at once; the commit is made or not, and the
    engine runs on either way."""
    for _ in range(3):
        server.request(
            "POST", "/v1/delta/apply", json={"version": trainer.publisher.version.number}
        )
        number = trainer.step()
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
            client.sendall(
                b"POST /v1/delta/apply HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n"
                b"Authorization: Bearer secret\r\n\r\n"
            )
        status = server.wait_for_version(number)
        assert status["pause"] == "UNPAUSED"
        assert server.complete()["usage"]["completion_tokens"] == 8
