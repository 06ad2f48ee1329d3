"""The story of one engine whose core has steps in flight; `test_async` runs it.

Run as ``python -m tests.engine.async_story CHECKPOINT DIRECTORY``. It ends well or with the
assertion that failed. It has a process of its own because vLLM leaves sockets open.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.engine.harness import ARGUMENTS, PROMPT, Trainer
from vllm_delta.engine.routes import DeltaEndpoints
from vllm_delta.engine.settings import Settings


class Served:
    """An ``AsyncLLM`` with our routes, and nothing between them and the test."""

    def __init__(self, engine: Any, trainer: Trainer, settings: Settings) -> None:
        self.engine = engine
        self.trainer = trainer
        self.app = FastAPI()
        self.app.state.engine_client = engine
        self._endpoints = DeltaEndpoints(settings)
        self._endpoints.attach_router(self.app)

    async def start(self) -> None:
        await self._endpoints.init_state(self.engine, self.app.state, SimpleNamespace())
        await self.until_version(0)

    async def stop(self) -> None:
        self.app.state.delta_follower.stop()

    async def request(self, method: str, path: str, **more: Any) -> Any:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **more)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.request("GET", "/v1/delta/status")).json()
        return found

    async def until(self, condition: Callable[[], Awaitable[Any]]) -> Any:
        deadline = asyncio.get_running_loop().time() + 60
        while not (found := await condition()):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        return found

    async def until_version(self, number: int) -> dict[str, Any]:
        async def reached() -> dict[str, Any] | None:
            status = await self.status()
            version = status["version"]
            return status if version is not None and version["number"] == number else None

        found: dict[str, Any] = await self.until(reached)
        return found

    async def paused(self) -> bool:
        return bool(await self.engine.is_paused())

    def stream(self, name: str, n_tokens: int) -> tuple[list[int], asyncio.Task[None]]:
        """A running request: how many tokens it has so far, and its task."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
        counts: list[int] = []

        async def run() -> None:
            outputs: AsyncIterator[Any] = self.engine.generate(PROMPT, sampling, name)
            async for output in outputs:
                counts.append(len(output.outputs[0].token_ids))

        return counts, asyncio.create_task(run())


async def _commits_cross_running_requests(served: Served) -> None:
    core = served.engine.engine_core
    assert await core.call_utility_async("__getattribute__", "async_scheduling")
    n_crossed = 0
    while n_crossed < 3:  # the test's own time limit ends this
        streams = [served.stream(f"a{served.trainer.publisher.version}{i}", 180) for i in range(4)]
        await served.until(lambda streams=streams: _true(all(counts for counts, _ in streams)))
        await served.until_version(served.trainer.step())
        n_crossed += any(not task.done() for _, task in streams)
        await asyncio.gather(*(task for _, task in streams))
        assert [counts[-1] for counts, _ in streams] == [180] * 4
    assert not await served.paused()


async def _a_foreign_pause_is_used_and_left(served: Served) -> None:
    counts, task = served.stream("b", 150)
    await served.until(lambda: _true(len(counts) > 3))
    await served.engine.pause_generation(mode="keep", clear_cache=False)
    before = len(counts)
    status = await served.until_version(served.trainer.step())
    assert await served.paused()
    assert (await served.until_version(status["version"]["number"]))["pause"] == "PAUSED_ALL"
    assert (before, task.done()) == (len(counts), False)
    await served.engine.resume_generation()
    await task
    assert counts[-1] == 150


async def _a_caller_that_is_cancelled_leaves_no_pause(served: Served) -> None:
    """The commit that a cancelled call had asked for is the core's; it ends and resumes."""
    counts, task = served.stream("c", 180)
    await served.until(lambda: _true(len(counts) > 3))
    here = (await served.status())["version"]["number"]
    await served.request("POST", "/v1/delta/apply", json={"version": here})
    core = served.engine.engine_core
    utility = core.call_utility_async
    cancelled = []

    async def cancelling(method: str, *args: Any) -> Any:
        call = asyncio.ensure_future(utility(method, *args))
        if method == "delta_commit" and not cancelled:
            await asyncio.sleep(0)  # the request is on its way
            cancelled.append(call.cancel())
        return await call

    core.call_utility_async = cancelling
    try:
        number = served.trainer.step()
        answer = await served.request("POST", "/v1/delta/apply")
    finally:
        del core.call_utility_async
    assert cancelled == [True]
    assert answer.json()["error"]["kind"] == "EngineError"
    await served.until_version(number)
    await served.request("POST", "/v1/delta/apply")
    await task
    assert counts[-1] == 180
    status = await served.status()
    assert (status["version"]["number"], status["pause"]) == (number, "UNPAUSED")
    assert status["last_error"]["kind"] == "EngineError"
    assert status["last_commit"]["versions"] != [number], "the version was loaded again"
    assert status["ranks"][0]["version"] == status["version"]
    assert status["weight_version"] == await served.engine.get_weight_version()


async def _the_second_door_goes_to_a_version(served: Served) -> None:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    engine, channel = served.engine, str(served.trainer.channel)
    here = (await served.status())["version"]["number"]
    await served.request("POST", "/v1/delta/apply", json={"version": here})
    number = served.trainer.step()
    await engine.init_weight_transfer_engine(WeightTransferInitRequest({"channel": channel}))
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest({"version": number}))
    await engine.finish_weight_update()
    assert await served.paused()
    await engine.resume_generation()
    assert (await engine.get_weight_version()).startswith(f"{number}-")


async def _health_says_when_nothing_is_served(served: Served) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    await served.engine.check_health()
    record = served.trainer.publisher.anchor()
    assert record.kind == "anchor"
    follower = served.app.state.delta_follower
    follower._driver._core = {**follower._driver.core, "fence": {"kind": "EngineError"}}
    assert (await served.status())["fence"] is not None
    with pytest.raises(EngineDeadError):
        await served.engine.check_health()


def _true(value: bool) -> Coroutine[Any, Any, bool]:
    async def answer() -> bool:
        return value

    return answer()


async def story(config: Any, trainer: Trainer) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    settings = Settings(channel=str(trainer.channel), poll_interval_s=0.02)
    engine = AsyncLLM(config, Executor.get_class(config), log_stats=False)
    served = Served(engine, trainer, settings)
    try:
        await served.start()
        await _commits_cross_running_requests(served)
        await _a_foreign_pause_is_used_and_left(served)
        await _a_caller_that_is_cancelled_leaves_no_pause(served)
        await _the_second_door_goes_to_a_version(served)
        await _health_says_when_nothing_is_served(served)
    finally:
        await served.stop()
        engine.shutdown()


def main() -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    checkpoint, directory = Path(sys.argv[1]), Path(sys.argv[2])
    arguments = ARGUMENTS | {"worker_extension_cls": "vllm_delta"}
    arguments |= {"weight_transfer_config": WeightTransferConfig(backend="vllm_delta")}
    config = AsyncEngineArgs(model=str(checkpoint), **arguments).create_engine_config()
    config.scheduler_config.async_scheduling = True  # vLLM leaves it off on a CPU
    asyncio.run(story(config, Trainer(checkpoint, directory / "channel")))
    print("THE END")


if __name__ == "__main__":
    main()
