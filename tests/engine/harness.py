"""Starts engines for tests, trains their models by perturbing bits, and looks at their weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.codec.forced import forced
from vllm_delta import Publisher, Reference
from vllm_delta.codec import Codec
from vllm_delta.engine.settings import Settings
from vllm_delta.publisher import PublisherSettings

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 25,
    "max_num_seqs": 8,
    "block_size": 32,
    "seed": 0,
}
PROMPT = "the quick brown fox jumps over the lazy dog a delta of weights " * 3
PROMPTS = ("the quick brown fox", PROMPT, "a delta of weights", "lazy dog jumps over the fox")


class Trainer:
    """Publishes a checkpoint to a channel and changes it step by step.

    Args:
        checkpoint: a directory with ``model.safetensors``.
        channel: the channel's directory or URL.
        codec: of its deltas; by hazard whatever may be.
        shards: parts that they are cut for.
    """

    def __init__(
        self,
        checkpoint: Path,
        channel: Path | str,
        reference: Reference | None = None,
        *,
        codec: Codec = "gap",
        shards: int = 1,
    ) -> None:
        self.weights = load_file(checkpoint / "model.safetensors")
        self.channel = Path(channel)
        self.url = str(channel)
        self.codec = codec
        self._rng = np.random.default_rng(0)
        self.publisher = Publisher(
            channel,
            self.weights,
            reference=reference,
            settings=PublisherSettings(
                blob_bytes=100_000, anchor_ratio=1e9, codec=codec, shards=shards
            ),
        )

    def step(self, percent: float = 1.0, *, only: str = "") -> int:
        """Changes a share of every tensor whose name contains ``only``, publishes, and says
        which version that is."""
        for name, tensor in self.weights.items():
            if only in name:
                self._change(tensor, percent)
        with forced():
            return self.publisher.publish().version.number

    def _change(self, tensor: torch.Tensor, percent: float) -> None:
        flat = tensor.view(-1)
        n = max(1, round(flat.numel() * percent / 100))
        places = torch.from_numpy(self._rng.choice(flat.numel(), n, replace=False))
        noise = torch.from_numpy(self._rng.standard_normal(n).astype(np.float32))
        flat[places] = (flat[places].float() + 0.3 * noise).to(flat.dtype)

    def save(self, directory: Path, like: Path) -> Path:
        """Writes the weights as a checkpoint with the config and tokenizer of another."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in like.iterdir():
            if file.name != "model.safetensors":
                (directory / file.name).write_bytes(file.read_bytes())
        save_file(self.weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def digest_weights(worker: Any) -> str:
    """Digest of every bit of every parameter of a worker's model, whatever our code says."""
    return digest_model(worker.model_runner.get_model())


def digest_model(model: torch.nn.Module) -> str:
    """Digest of every bit of every parameter."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        data = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()
        found.update(name.encode() + data.tobytes())
    return found.hexdigest()


def fresh_digest(checkpoint: Path) -> str:
    """Digest of the weights as vLLM's own loader loads a checkpoint, next to a running engine."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(model=str(checkpoint), enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        return digest_model(get_model(vllm_config=config))


class LocalEngine:
    """A tiny ``LLM`` in this process that can be stepped by hand.

    Args:
        checkpoint: what it is started from.
    """

    def __init__(self, checkpoint: Path, **arguments: Any) -> None:
        from vllm import LLM

        self.checkpoint = checkpoint
        extension = {"worker_extension_cls": "vllm_delta"}
        with warnings.catch_warnings():
            # vLLM's start touches deprecated corners of torch; what it warns of is not ours.
            warnings.simplefilter("ignore")
            self.llm = LLM(str(checkpoint), **ARGUMENTS | extension | arguments)
        self._followed: Any = None

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        """The one worker."""
        return self.core.model_executor.driver_worker.worker

    @property
    def rank(self) -> Any:
        """Our state in the worker."""
        return self.worker.__dict__["_delta_state"]

    def begin(
        self, channel: Path | str, reference: Reference | None = None, **codec: Any
    ) -> Trainer:
        """Publishes the engine's checkpoint to a new channel, by gap unless told otherwise."""
        self.trainer = Trainer(self.checkpoint, channel, reference, **codec)
        return self.trainer

    def follow(self, **settings: Any) -> Any:
        """Follows the channel and goes to its newest version."""
        from vllm_delta import follow

        self.end()
        settings = {"rollback_bytes": 1 << 24} | settings
        self._followed = follow(self.llm, self.trainer.url, Settings(**settings))
        self._followed.step()
        return self._followed

    def end(self) -> None:
        """Stops following, and leaves nothing running or paused."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self.core.resume_scheduler()
        if self._followed is not None:
            self._followed.close()
            self._followed = None

    def digest(self) -> str:
        """Digest of the live weights."""
        return digest_weights(self.worker)

    def damage(self, name: str, place: int) -> None:
        """Flips the lowest bit of a resident weight, behind everybody's back."""
        parameter = dict(self.worker.model_runner.get_model().named_parameters())[name]
        parameter.data.view(-1).view(torch.int16)[place] ^= 1

    def start(self, name: str, prompt: str, n_tokens: int, **fields: Any) -> None:
        """Adds a greedy request; `step` runs it."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=n_tokens, temperature=0, logprobs=1, ignore_eos=True, **fields
        )
        self.llm.llm_engine.add_request(name, prompt, sampling)

    def run(self, n_steps: int = 10_000) -> dict[str, Any]:
        """Runs so many engine steps, or until nothing is left; the finished requests' outputs."""
        finished = {}
        for _ in range(n_steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            for output in self.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = output
        return finished

    def complete(self, prompt: Any, n_tokens: int = 8) -> Any:
        """One greedy completion with its count of cached tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=n_tokens, temperature=0, logprobs=1, ignore_eos=True)
        return self.llm.generate([prompt], sampling, use_tqdm=False)[0]


def completions(llm: Any, prompts: Sequence[str], n_tokens: int = 12) -> list[Any]:
    """Greedy completions, one request at a time: tokens and log-probability of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=n_tokens, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for prompt in prompts:
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        found.append([list(output.token_ids), output.cumulative_logprob])
    return found


def fresh_completions(checkpoint: Path, **arguments: Any) -> list[Any]:
    """`completions` of a new engine without our extension, in a process of its own."""
    job = json.dumps([str(checkpoint), ARGUMENTS | arguments])
    done = run_module("tests.engine.harness", job)
    lines = [line for line in done.splitlines() if line.startswith("COMPLETIONS")]
    found: list[Any] = json.loads(lines[0].removeprefix("COMPLETIONS"))
    return found


def run_module(name: str, *arguments: str) -> str:
    """Runs a module in a process of its own; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        capture_output=True,
        text=True,
        timeout=550,
        env=environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _complete_alone() -> None:
    from vllm import LLM

    checkpoint, arguments = json.loads(sys.argv[1])
    print("COMPLETIONS" + json.dumps(completions(LLM(checkpoint, **arguments), PROMPTS)))


def environment(**more: str) -> dict[str, str]:
    """The environment of a vLLM next to this process."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_DELTA_")}
    ours.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return ours | more


@dataclass
class Server:
    """A running ``vllm serve``."""

    process: subprocess.Popen[bytes]
    url: str
    channel: Path
    checkpoint: Path
    log: Path

    def request(self, method: str, path: str, *, key: str | None = "secret", **more: Any) -> Any:
        """One HTTP request."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **more)

    def status(self) -> dict[str, Any]:
        """``/v1/delta/status``."""
        answer = self.request("GET", "/v1/delta/status")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_for_version(self, number: int) -> dict[str, Any]:
        """Polls the status until that version is served."""

        def served() -> dict[str, Any] | None:
            status = self.status()
            reached = status["version"] is not None and status["version"]["number"] == number
            return status if reached and status["state"] in ("following", "pinned") else None

        return wait_until(served)

    def complete(self, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        """One greedy completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True} | fields
        answer = self.request("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@contextlib.contextmanager
def start_server(
    checkpoint: Path,
    channel: Path | None,
    *arguments: str,
    log: Path,
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Runs ``vllm serve`` until the block ends, and waits for it to be ready."""
    process, port = launch(
        checkpoint, channel, *arguments, log=log, settings=settings, variables=variables
    )
    running = Server(process, f"http://127.0.0.1:{port}", channel or log, checkpoint, log)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(httpx.TransportError):
                return bool(running.request("GET", "/health").status_code == 200)
            return False

        wait_until(ready, timeout_s=280)
        yield running
    finally:
        stop(process)


def launch(
    checkpoint: Path,
    channel: Path | None,
    *arguments: str,
    log: Path,
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts ``vllm serve`` on a free port of the loopback; does not wait."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {} if channel is None else {"channel": str(channel), "poll_interval_s": 0.05}
    ours |= settings or {}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(1 << 25), "--block-size", "32", "--seed", "0"]
    command += ["--enable-prompt-tokens-details", "--uvicorn-log-level", "warning", *arguments]
    if ours:
        command += ["--additional-config", json.dumps({"vllm_delta": ours})]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(**variables or {}),
            start_new_session=True,
        )
    return process, port


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and whatever it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Polls until the condition holds, and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s"
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    _complete_alone()
