"""Following a channel from a script that holds vLLM's offline ``LLM``."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_delta.engine import plugin, transfer, utilities
from vllm_delta.engine.calls import Answer
from vllm_delta.engine.follower import Follower
from vllm_delta.engine.metrics import Metrics
from vllm_delta.engine.settings import Settings, read_settings
from vllm_delta.errors import DeltaError, EngineError, SettingsError

_FOLLOWED = "_vllm_delta_followed"
_ENTRANCES = ("generate", "chat", "enqueue", "enqueue_chat")


class LocalPort:
    """The way into the engine of an ``LLM``; calls run on the caller's thread."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        client = llm.llm_engine.engine_core
        self._core = getattr(client, "engine_core", None)
        if self._core is None or not hasattr(self._core, "collective_rpc"):
            self._core = None  # the core is in a process of its own
        else:
            utilities.install()

    def rpc(self, method: str, *args: Any) -> list[Answer]:
        answers: list[Answer] = _answered(lambda: self._llm.collective_rpc(method, args=args))
        return answers

    def utility(self, method: str, *args: Any) -> Answer:
        client = self._llm.llm_engine.engine_core
        if self._core is not None:
            call = functools.partial(getattr(self._core, method), *args)
        else:
            call = functools.partial(client.call_utility, method, *args)
        answer: Answer = _answered(call)
        return answer


def _answered(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise EngineError("the engine did not answer", reason=repr(error)) from error


class Follow:
    """An ``LLM`` that follows a channel, one step at a time.

    Weights change only inside the methods here and at the start of ``llm.generate`` and its
    like, on the thread that calls them; those look at a remote channel once per poll interval.
    Threads in the background fetch and decode.
    Not thread-safe, as the ``LLM`` is not.
    """

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._llm = llm
        self._follower = Follower(LocalPort(llm), settings, metrics=Metrics(registry=None))
        self._originals = {name: getattr(llm, name) for name in _ENTRANCES}
        llm.__dict__[_FOLLOWED] = True
        for name, original in self._originals.items():
            setattr(llm, name, self._stepping(original))
        if transfer.is_configured(llm.llm_engine.vllm_config):
            transfer.open_local_door(llm, self._follower)

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            # What cannot be followed is in `status`; the last good version answers.
            self._follower.cycle(look=self._follower.due())
            return original(*args, **kwargs)

        return stepping

    def step(self) -> dict[str, Any]:
        """Goes to the newest version on the channel, as far as spacing and pins allow.

        Returns:
            `status` afterwards.

        Raises:
            DeltaError: something newer could not be taken; the last good version stays.
        """
        self._follower.cycle(eager=True)
        if (error := self._follower.status()["error"]) is not None:
            raise DeltaError.from_dict(error)
        return self._follower.status()

    def apply(self, number: int | None = None) -> dict[str, Any]:
        """`Follower.apply`."""
        return self._follower.apply(number)

    def rollback(self) -> dict[str, Any]:
        """`Follower.rollback`."""
        return self._follower.rollback()

    def verify(self) -> dict[str, Any]:
        """`Follower.verify`."""
        return self._follower.verify()

    def status(self) -> dict[str, Any]:
        """`Follower.status`."""
        return self._follower.status()

    def close(self) -> None:
        """Stops following; the weights stay at their version."""
        self._follower.stop()
        for name in (*_ENTRANCES, "init_weight_transfer_engine", "update_weights", _FOLLOWED):
            self._llm.__dict__.pop(name, None)


def follow(llm: Any, channel: str | Path | None = None, settings: Settings | None = None) -> Follow:
    """Makes an offline ``LLM`` follow a channel of weight deltas.

    Args:
        llm: made with ``worker_extension_cls="vllm_delta"``.
        channel: the channel; by default the one in the settings.
        settings: by default those of the ``LLM``'s additional config and the environment.

    Raises:
        SettingsError: the ``LLM`` has not our extension, or follows already, the settings make
            no sense, or a key's file cannot be read.
    """
    config = llm.llm_engine.vllm_config
    if config.parallel_config.worker_extension_cls != plugin.EXTENSION:
        raise SettingsError(
            'make the LLM with worker_extension_cls="vllm_delta"',
            field="worker_extension_cls",
            value=config.parallel_config.worker_extension_cls,
        )
    if llm.__dict__.get(_FOLLOWED):
        raise SettingsError("this LLM follows a channel already; close that first")
    if settings is None:
        settings = read_settings(config.additional_config, os.environ)
    if channel is not None:
        settings = dataclasses.replace(settings, channel=str(channel))
    return Follow(llm, settings)
