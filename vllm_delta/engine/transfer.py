"""The second door: vLLM's own weight-transfer calls, for trainers that already speak them.

With ``--weight-transfer-config '{"backend": "vllm_delta"}'`` the calls init, start, update and
finish mean "this channel" and "go to version N". The weights still come from the channel and are
still checked over all ranks, so the update is the follower's; the workers' part is to say so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vllm_delta.engine.follower import Follower
from vllm_delta.errors import EngineError, SettingsError

BACKEND = "vllm_delta"


@dataclass
class ChannelInitInfo(WeightTransferInitInfo):
    """Which channel; none when the server was started with one."""

    channel: str | None = None


@dataclass
class VersionUpdateInfo(WeightTransferUpdateInfo):
    """Which version to go to; none for the newest."""

    version: int | None = None


class ChannelTransferEngine(WeightTransferEngine[ChannelInitInfo, VersionUpdateInfo]):
    """What a worker knows of the second door: the shape of its calls."""

    init_info_cls = ChannelInitInfo
    update_info_cls = VersionUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ChannelInitInfo) -> None:
        """Nothing to do: the follower opens the channel."""

    def start_weight_update(self) -> None:
        """Nothing to do: weights change in one commit."""

    def finish_weight_update(self) -> None:
        """Nothing to do: weights change in one commit."""

    def receive_weights(self, update_info: VersionUpdateInfo) -> None:
        """Only a follower can do this, and it was not there to take the call."""
        raise EngineError(
            "nothing follows a channel here; serve with --worker-extension vllm_delta, or call "
            "vllm_delta.follow on the LLM"
        )

    def shutdown(self) -> None:
        """Nothing is held."""


def is_configured(vllm_config: Any) -> bool:
    """Whether the engine's weight-transfer backend is ours."""
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def open_server_door(engine_client: Any, follower: Follower) -> None:
    """Gives init and update calls of an API server's engine client to its follower."""
    init = engine_client.init_weight_transfer_engine

    async def init_weight_transfer_engine(request: Any) -> None:
        channel = _channel_of(request.init_info)
        await init(request)
        if channel is not None:
            await asyncio.wrap_future(follower.submit(lambda: follower.take(channel)))

    async def update_weights(request: Any) -> None:
        number = _version_of(request.update_info)
        await asyncio.wrap_future(follower.submit(lambda: follower.apply(number)))

    engine_client.init_weight_transfer_engine = init_weight_transfer_engine
    engine_client.update_weights = update_weights


def open_local_door(llm: Any, follower: Follower) -> None:
    """Gives init and update calls of an ``LLM`` to its follower."""
    init = llm.init_weight_transfer_engine

    def init_weight_transfer_engine(request: Any) -> None:
        info = request["init_info"] if isinstance(request, dict) else request.init_info
        channel = _channel_of(info)
        init(request)
        if channel is not None:
            follower.take(channel)

    def update_weights(request: Any) -> None:
        info = request["update_info"] if isinstance(request, dict) else request.update_info
        follower.apply(_version_of(info))

    llm.init_weight_transfer_engine = init_weight_transfer_engine
    llm.update_weights = update_weights


def _channel_of(info: Any) -> str | None:
    try:
        return ChannelInitInfo(**info).channel
    except TypeError as error:
        raise SettingsError('init info is not {"channel": address}') from error


def _version_of(info: Any) -> int | None:
    try:
        return VersionUpdateInfo(**info).version
    except TypeError as error:
        raise SettingsError('update info is not {"version": number}') from error
