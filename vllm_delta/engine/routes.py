"""The routes under ``/v1/delta`` and the follower behind them, in vLLM's API server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_delta.engine import transfer
from vllm_delta.engine.calls import Answer, new_call
from vllm_delta.engine.follower import Follower
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.settings import Settings
from vllm_delta.errors import DeltaError, EngineError, SettingsError

logger = init_logger(f"vllm.{__name__}")

ANSWER_TIMEOUT_S = 600.0
"""How long one call into the engine may take; a whole anchor is loaded in one."""

STATUS = {"fix": 400, "retry": 503, "refetch": 502, "reseed": 409, "upgrade": 501, "stop": 409}
"""HTTP status by an error's action; anything else is 503."""


class ServerPort:
    """The follower thread's way into the engine, through the API server's event loop.

    Blocking; never called on the loop's own thread.
    """

    def __init__(self, engine_client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client = engine_client
        self._loop = loop

    def rpc(self, method: str, *args: Any) -> list[Answer]:
        answers: list[Answer] = self._wait(lambda: self._client.collective_rpc(method, args=args))
        return answers

    def utility(self, method: str, *args: Any) -> Answer:
        core = self._client.engine_core
        answer: Answer = self._wait(lambda: core.call_utility_async(method, *args))
        return answer

    def _wait(self, start: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return await start()

        try:
            future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            return future.result(ANSWER_TIMEOUT_S)
        except Exception as error:
            raise EngineError("the engine did not answer", reason=repr(error)) from error


class DeltaEndpoints:
    """vLLM endpoint plugin: attaches the routes, then starts the follower."""

    name = "vllm_delta"
    required_tasks = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def attach_router(self, app: FastAPI) -> None:
        """Registers the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Starts the follower, in the first API server only."""
        if engine_client is None:
            return
        if engine_client.vllm_config.parallel_config._api_process_rank > 0:
            logger.info("Another API server of this engine follows the channel.")
            return
        port = ServerPort(engine_client, asyncio.get_running_loop())
        follower = Follower(port, self._settings, metrics=Metrics())
        state.delta_follower = follower
        _guard_health(engine_client, follower)
        if transfer.is_configured(engine_client.vllm_config):
            transfer.open_server_door(engine_client, follower)
        threading.Thread(target=follower.run, name="delta-follower", daemon=True).start()


def _guard_health(engine_client: Any, follower: Follower) -> None:
    """Makes ``/health`` say 503 until the engine has joined its channel, and while it is fenced."""
    check = engine_client.check_health

    async def check_health() -> None:
        await check()
        if follower.fenced:
            raise EngineDeadError("vllm_delta fenced the engine; see /v1/delta/status")
        if not follower.ready:
            raise EngineDeadError("the engine has not joined its channel; see /v1/delta/status")

    engine_client.check_health = check_health


router = APIRouter(prefix="/v1/delta")


@router.get("/status")
async def status(request: Request) -> JSONResponse:
    """Version, verdict and lag, of the engine and of every rank."""
    try:
        follower = _follower(request)
        answers = await request.app.state.engine_client.collective_rpc(
            "delta_status", args=(new_call(),)
        )
    except DeltaError as error:
        return _failure(error)
    newest = follower.newest
    return JSONResponse(
        {**follower.status(), "ranks": [_rank(answer, newest) for answer in answers]}
    )


def _rank(answer: Answer, newest: Any) -> dict[str, Any]:
    rank = {key: value for key, value in answer.items() if key != "call"}
    for key in ("version", "rollback_to"):
        pair = rank.get(key)
        rank[key] = None if pair is None else {"number": pair[0], "root": pair[1]}
    number = -1 if rank["version"] is None else rank["version"]["number"]
    return rank | {"lag_versions": 0 if newest is None else newest.number - number}


@router.post("/apply")
async def apply(request: Request) -> JSONResponse:
    """Body ``{"version": n}`` goes there and stays; none goes to the newest and follows on."""
    try:
        follower, number = _follower(request), await _number(request)
    except DeltaError as error:
        return _failure(error)
    return await _run(follower, lambda: follower.apply(number))


@router.post("/rollback")
async def rollback(request: Request) -> JSONResponse:
    """Goes back to the version before and stays there until ``apply``."""
    try:
        follower = _follower(request)
    except DeltaError as error:
        return _failure(error)
    return await _run(follower, follower.rollback)


@router.post("/verify")
async def verify(request: Request) -> JSONResponse:
    """Scans all resident weights against the published fingerprints."""
    try:
        follower = _follower(request)
    except DeltaError as error:
        return _failure(error)
    return await _run(follower, follower.verify)


def _follower(request: Request) -> Follower:
    follower: Follower | None = getattr(request.app.state, "delta_follower", None)
    if follower is None:
        raise EngineError("another API server of this engine follows the channel; ask again")
    return follower


async def _number(request: Request) -> int | None:
    body = await request.body()
    if not body:
        return None
    try:
        fields = await request.json()
    except (ValueError, RecursionError) as error:
        raise SettingsError("the body is not JSON") from error
    number = fields.get("version") if isinstance(fields, dict) else fields
    unknown = isinstance(fields, dict) and set(fields) - {"version"}
    if unknown or not (number is None or type(number) is int) or isinstance(fields, list):
        raise SettingsError('the body is not {"version": number}')
    return number


async def _run(follower: Follower, command: Callable[[], dict[str, Any]]) -> JSONResponse:
    try:
        result = await asyncio.wrap_future(follower.submit(command))
    except DeltaError as error:
        return _failure(error)
    return JSONResponse(result)


def _failure(error: DeltaError) -> JSONResponse:
    return JSONResponse({"error": error.to_dict()}, status_code=STATUS.get(error.action, 503))
