"""Checkpoint names of transformers models that hold their tensors in another form than on disk.

Since version 5 transformers fuses tensors while loading (a mixture's experts become one tensor per
layer) and takes them apart again when it saves. A channel speaks of the tensors on disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from vllm_delta.errors import ModelMismatchError

_KEPT = 2
"""Fused tensors kept apart at a time: in a mixture's layer the parts of two alternate."""

Tensors = Mapping[str, torch.Tensor]


class Conversion:
    """Takes a model's tensors apart as `save_pretrained` does, a few at a time.

    Where a module's names are the checkpoint's, as in most, this does nothing and costs nothing.

    Args:
        model: the module whose `state_dict` is published.
        named: its tensors by their names in the module.

    Raises:
        ModelMismatchError: the model's form cannot be undone tensor by tensor.
    """

    def __init__(self, model: object, named: Tensors) -> None:
        self._revert = _reverter(model)
        self._sources: dict[str, str] = {}
        self._kept: dict[str, Tensors] = {}
        hollow = {name: tensor.detach().to("meta") for name, tensor in named.items()}
        self.tensors: Tensors = hollow
        """Stand-ins without data for the checkpoint's tensors."""
        if self._revert is None:
            return
        self.tensors = self._revert(hollow)
        for source in hollow.keys() - self.tensors.keys():
            parts = self._revert({source: hollow[source]})
            self._sources |= dict.fromkeys(parts, source)
        if self._sources.keys() != self.tensors.keys() - hollow.keys():
            names = sorted(self._sources.keys() ^ (self.tensors.keys() - hollow.keys()))
            raise ModelMismatchError(
                "the model's tensors are not the checkpoint's; pass a function that returns those",
                names=names[:3],
            )

    def get(self, name: str, named: Tensors) -> torch.Tensor:
        """The checkpoint's tensor, taken from the module's `named`."""
        source = self._sources.get(name)
        if source is None or self._revert is None:
            return named[name]
        if source not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[source] = self._revert({source: named[source].detach()})
        return self._kept[source][name]

    def forget(self) -> None:
        """Let go of what is kept: the model's tensors may have changed."""
        self._kept.clear()


def _reverter(model: object) -> Callable[[Tensors], Tensors] | None:
    """What `save_pretrained` does to a state dict; None for anything but a transformers 5 model."""
    # If it is such a model then the package has been imported; otherwise there is no need to.
    package: Any = sys.modules.get("transformers.modeling_utils")
    loading: Any = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if package is None or revert is None or not isinstance(model, nn.Module):
        return None
    if not isinstance(model, package.PreTrainedModel):
        return None
    return lambda named: dict(revert(model, dict(named)))
