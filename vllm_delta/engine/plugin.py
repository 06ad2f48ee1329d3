"""The general plugin: makes ``--worker-extension vllm_delta`` work, and nothing else.

vLLM calls `register` in every process, whether our extension is wanted or not. What it puts in
place does nothing until an engine asks for the extension.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_delta.engine.settings import Settings, read_settings
from vllm_delta.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = init_logger(f"vllm.{__name__}")

NAME = "vllm_delta"
EXTENSION = "vllm_delta.engine.worker.WorkerExtension"
_ALIASES = (NAME, "vllm-delta", "vllm_delta.WorkerExtension", EXTENSION)

_selected: Settings | None = None


def register() -> None:
    """Hooks into vLLM; may be called any number of times and never raises."""
    try:
        _shield_llvmlite()
        _wrap_engine_args()
        _wrap_endpoint_plugins()
        _register_transfer_engine()
        if "vllm.v1.engine.core" in sys.modules:
            _install_utilities()
    except Exception:
        logger.exception("vllm_delta could not hook into this vLLM; it is not available.")


def selected() -> Settings | None:
    """The settings of the engine that this process configured with our extension, if it did."""
    return _selected


def _wrap_engine_args() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if _is_ours(original):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _selected
        _shield_llvmlite()
        asked = self.worker_extension_cls in _ALIASES
        if asked:
            self.worker_extension_cls = EXTENSION
        config = original(self, *args, **kwargs)
        _selected = _check(config) if asked else None
        if asked:
            # A forked engine core inherits the utilities; a spawned one installs them itself.
            _install_utilities()
        return config

    EngineArgs.create_engine_config = _ours(create_engine_config)


def _check(config: Any) -> Settings:
    """Refuses by name what cannot be followed, before anything is loaded."""
    size = config.parallel_config.data_parallel_size
    if size > 1:
        raise SettingsError(
            "vllm_delta does not follow a channel with data parallelism; start one server per "
            "replica instead",
            field="--data-parallel-size",
            value=size,
        )
    settings = read_settings(config.additional_config, os.environ)
    _check_channel(settings)
    if settings.kv_policy == "fresh" and config.model_config.is_multimodal_model:
        raise SettingsError(
            "embeddings of images and sound are cached without a version; set kv_policy to reset",
            field="kv_policy",
            value=settings.kv_policy,
        )
    return settings


def _check_channel(settings: Settings) -> None:
    """What cannot be an address, a key or a cache is told at once; a directory may come later."""
    from vllm_delta.engine import access

    if (error := access.check(settings)) is not None:
        logger.warning("The channel is out of reach for now: %s", error)


def _wrap_endpoint_plugins() -> None:
    import vllm.plugins

    original = vllm.plugins.load_endpoint_plugins
    if _is_ours(original):
        return

    @functools.wraps(original)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if _selected is None or any(plugin.name == NAME for plugin in found):
            return found
        from vllm_delta.engine.routes import DeltaEndpoints

        return [*found, DeltaEndpoints(_selected)]

    vllm.plugins.load_endpoint_plugins = _ours(load_endpoint_plugins)


def _register_transfer_engine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "vllm_delta.engine.transfer", "ChannelTransferEngine"
        )


def _install_utilities() -> None:
    from vllm_delta.engine import utilities

    utilities.install()


def _shield_llvmlite() -> None:
    """Lets vLLM's CPU workers start in a process that has already imported numba.

    They look for kernels in the ``__dict__`` of everything in every module. llvmlite's library
    object claims to have one, as it claims to have any attribute, and the search fails on it.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None or _is_ours(wrapper.__getattr__):
        return
    original = wrapper.__getattr__

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 - it becomes one
        if name == "__dict__":
            raise AttributeError(name)
        return original(self, name)

    wrapper.__getattr__ = _ours(__getattr__)


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__dict__["_vllm_delta"] = True
    return function


def _is_ours(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "_vllm_delta", False))
