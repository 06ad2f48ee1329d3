"""The plugin does nothing unless the extension was asked for, and refuses by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.harness import ARGUMENTS, environment
from vllm_delta.engine import plugin
from vllm_delta.errors import SettingsError

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugin.register()
    yield
    plugin._selected = None


def configure(llama: Path, **arguments: Any) -> Any:
    return EngineArgs(model=str(llama), **ARGUMENTS | arguments).create_engine_config()


@pytest.mark.parametrize(
    "name",
    ["vllm_delta", "vllm-delta", "vllm_delta.WorkerExtension", plugin.EXTENSION],
)
def test_every_spelling_selects_the_extension(llama: Path, name: str) -> None:
    """The short form, the public name and the full name all mean our class."""
    config = configure(llama, worker_extension_cls=name)
    assert config.parallel_config.worker_extension_cls == plugin.EXTENSION
    assert plugin.selected() is not None


def test_another_extension_is_not_ours(llama: Path) -> None:
    """A foreign extension is passed on as it is, and selects nothing."""
    config = configure(llama, worker_extension_cls="someone.Extension")
    assert config.parallel_config.worker_extension_cls == "someone.Extension"
    assert plugin.selected() is None


def test_data_parallelism_is_refused_by_name(llama: Path) -> None:
    """The error names the flag and what to do instead; without our extension it is allowed."""
    with pytest.raises(SettingsError, match="--data-parallel-size"):
        configure(llama, worker_extension_cls="vllm_delta", data_parallel_size=2)
    assert configure(llama, data_parallel_size=2).parallel_config.data_parallel_size == 2


def test_settings_are_checked_at_start_up(llama: Path) -> None:
    """A bad setting stops the server before it loads anything; nobody else's start is touched."""
    bad = {"additional_config": {"vllm_delta": {"kv_policy": "never"}}}
    with pytest.raises(SettingsError, match="kv_policy"):
        configure(llama, worker_extension_cls="vllm_delta", **bad)
    configure(llama, **bad)


@pytest.mark.parametrize("channel", ["ftp://bucket/run", "~nobody-of-this-name/x", "{file}"])
def test_an_address_that_is_none_is_told_at_start_up(
    llama: Path, tmp_path: Path, channel: str
) -> None:
    """The follower would tell it again and again, with a server that serves the base model."""
    (tmp_path / "file").write_text("")
    ours = {"vllm_delta": {"channel": channel.format(file=tmp_path / "file")}}
    with pytest.raises(SettingsError, match="field='channel'"):
        configure(llama, worker_extension_cls="vllm_delta", additional_config=ours)


def test_a_directory_that_is_not_there_yet_is_an_address(llama: Path, tmp_path: Path) -> None:
    """Disks are mounted late, and the trainer makes the channel."""
    ours = {"vllm_delta": {"channel": str(tmp_path / "not" / "yet")}}
    configure(llama, worker_extension_cls="vllm_delta", additional_config=ours)


def test_registering_again_wraps_nothing_twice() -> None:
    """vLLM may call the plugin several times in a process."""
    before = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is before


SCRIPT = """
import json, sys
import vllm.v1.engine.core as core
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import base_loader
before = dict(vars(core.EngineCore))
packing, processing = utils.dispatch_cpu_unquantized_gemm, base_loader.process_weights_after_loading
if __name__ == "__main__":
    model, arguments, extension = json.loads(sys.argv[1])
    from vllm import LLM
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    more = {"worker_extension_cls": extension} if extension else {}
    llm = LLM(model, **arguments, **more)
    llm.generate(["the quick brown fox"], use_tqdm=False)
    import httpx, asyncio
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model])
    app = build_app(args, ("generate",))
    async def get():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/v1/delta/status")).status_code
    engine = llm.llm_engine.engine_core.engine_core
    after = vars(core.EngineCore)
    print("FOUND" + json.dumps({
        "changed": sorted(n for n, v in before.items() if after[n] is not v),
        "added": sorted(set(after) - set(before)),
        "on instance": sorted(n for n in vars(engine) if callable(getattr(type(engine), n, None))),
        "scheduler": "set_pause_state" in vars(engine.scheduler),
        "packing": utils.dispatch_cpu_unquantized_gemm is packing,
        "processing": base_loader.process_weights_after_loading is processing,
        "worker": "vllm_delta.engine.worker" in sys.modules,
        "heavy": sorted(n for n in ("numba", "vllm_delta.codec") if n in sys.modules),
        "plugin": "vllm_delta.engine.plugin" in sys.modules,
        "route": asyncio.run(get()),
    }))
"""


def run_script(llama: Path, directory: Path, extension: str | None) -> dict[str, Any]:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([str(llama), ARGUMENTS, extension])],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND"))
    return found


def test_installed_but_not_asked_for_vllm_is_unchanged(llama: Path, tmp_path: Path) -> None:
    """Engine core, scheduler, weight packing and routes are vLLM's own; our extension and its
    dependencies are not even imported."""
    found = run_script(llama, tmp_path, None)
    assert found["plugin"], "the plugin is not installed in this environment"
    assert (found["changed"], found["on instance"], found["scheduler"]) == ([], [], False)
    assert all(name.startswith("delta_") for name in found["added"])
    assert (found["packing"], found["processing"]) == (True, True)
    assert (found["worker"], found["heavy"], found["route"]) == (False, [], 404)


def test_asked_for_the_extension_is_there(llama: Path, tmp_path: Path) -> None:
    """The same script sees the difference when the extension is asked for."""
    found = run_script(llama, tmp_path, "vllm_delta")
    assert (found["packing"], found["processing"], found["worker"]) == (False, False, True)
    assert "delta_commit" in found["added"]
    assert found["route"] != 404
