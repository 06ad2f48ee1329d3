"""Ship only the weights that changed from an RL trainer to running vLLM servers, bit for bit.

vLLM imports this package in every process, so nothing heavy is imported until it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_delta.channel import Keys, open_channel
    from vllm_delta.commit import PublisherSettings
    from vllm_delta.engine.offline import follow
    from vllm_delta.engine.worker import WorkerExtension
    from vllm_delta.errors import DeltaError
    from vllm_delta.format import Reference
    from vllm_delta.publisher import Publisher
    from vllm_delta.subscriber import Subscriber

__version__ = "0.1.0"

_PUBLIC = {
    "DeltaError": "vllm_delta.errors",
    "Keys": "vllm_delta.channel",
    "Publisher": "vllm_delta.publisher",
    "PublisherSettings": "vllm_delta.commit",
    "Reference": "vllm_delta.format",
    "Subscriber": "vllm_delta.subscriber",
    "WorkerExtension": "vllm_delta.engine.worker",
    "follow": "vllm_delta.engine.offline",
    "open_channel": "vllm_delta.channel",
}

__all__ = [
    "DeltaError",
    "Keys",
    "Publisher",
    "PublisherSettings",
    "Reference",
    "Subscriber",
    "WorkerExtension",
    "follow",
    "open_channel",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
