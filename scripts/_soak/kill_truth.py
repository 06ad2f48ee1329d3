"""What the weights of each step are: for the trainer, and for whoever checks what readers show."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from scripts._soak.protocol_truth import Tensors, any_weights, bits_of, copied, move
from vllm_delta.codec.order import Unsigned
from vllm_delta.fingerprint import fingerprint, root
from vllm_delta.format import Schema
from vllm_delta.weights import ModelWeights


class Steps:
    """Weights by step: the same for the same seed, in every process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._tensors = any_weights(random.Random(f"{seed} weights"))
        self.schema: Schema = ModelWeights(self._tensors).schema

    def at(self, step: int) -> Tensors:
        """The weights of a step; a copy."""
        if step < self._step:
            self._step, self._tensors = 0, any_weights(random.Random(f"{self._seed} weights"))
        while self._step < step:
            self._step += 1
            move(self._tensors, random.Random(f"{self._seed} step {self._step}"))
        return copied(self._tensors)

    def bits(self, step: int) -> list[Unsigned]:
        """Its bits, in the schema's order."""
        tensors = self.at(step)
        return [bits_of(tensors[spec.name]) for spec in self.schema.tensors]

    def root(self, step: int) -> str:
        """Its root, by the definition: each tensor's fingerprint anew."""
        return root_of(self.schema, self.bits(step))


def root_of(schema: Schema, bits: Iterable[Unsigned]) -> str:
    """The root of what stands in memory now."""
    marks = [fingerprint(one, spec) for one, spec in zip(bits, schema.tensors, strict=True)]
    return root(schema, marks)


def digest_of(bits: Iterable[Unsigned]) -> str:
    """One sha256 over all bits."""
    hasher = hashlib.sha256()
    for one in bits:
        hasher.update(one.tobytes())
    return hasher.hexdigest()
