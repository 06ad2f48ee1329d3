"""What a reader makes of damaged bytes, or of another base."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from scripts._soak.deltas import MANTISSA
from scripts._soak.subjects import Subject
from vllm_delta import codec
from vllm_delta.codec import Change, order
from vllm_delta.codec.hazard import lanes
from vllm_delta.errors import (
    BaseMismatchError,
    DeltaError,
    FormatError,
    ModelMismatchError,
    UnsupportedError,
)
from vllm_delta.replay import Replica

VERDICTS = ("parse", "lane", "fingerprint", "harmless", "undetected", "failed")
"""Refused when the bytes are read, by a lane, or by a fingerprint; harmless: right nevertheless."""

_REFUSALS = (FormatError, UnsupportedError, ModelMismatchError)
_LANES = frozenset(lanes.PROBLEMS.values())


class SoakError(Exception):
    """The decoder gave what no reader may be given, whatever becomes of it later."""


class Reader(Replica):
    """Applies changes to copies of the tensors."""

    def apply(self, change: Change) -> None:
        self.bits[change.tensor] = self.bits[change.tensor].copy()
        super().apply(change)


def same(a: object, b: object) -> bool:
    return np.array_equal(a, b)  # type: ignore[arg-type]


def refused_by(error: DeltaError) -> str:
    return "lane" if error.message in _LANES else "parse"


def judge_blob(subject: Subject, data: bytes) -> str:
    """The verdict on a damaged blob: decoded, applied to the right base, and compared."""
    replica = Reader(subject.schema, list(subject.fingerprints), list(subject.base))
    changes = decoded(subject, data, subject.base)
    while True:
        try:
            change = next(changes, None)
        except _REFUSALS as error:
            return refused_by(error)
        if change is None:
            break
        try:
            replica.apply(change)
        except (BaseMismatchError, FormatError):
            # A reader looks at the whole blob first: what is refused later on is so as well.
            try:
                for _ in changes:
                    pass
            except _REFUSALS as error:
                return refused_by(error)
            return "fingerprint"
    if replica.root != subject.root:
        return "fingerprint"
    right = all(map(same, replica.bits, subject.target))
    return "harmless" if right else "undetected"


def judge_base(subject: Subject, base: Sequence[order.Unsigned]) -> str:
    """The verdict on weights that are not the delta's base, though a reader takes them for it."""
    replica = Reader(subject.schema, list(subject.fingerprints), list(base))
    expected = {change.tensor: change for change in subject.changes}
    right = True
    try:
        for change in decoded(subject, subject.data, base):
            replica.apply(change)
            meant = expected[change.tensor]
            if change.indices is None or meant.indices is None or meant.steps is None:
                continue
            right &= same(change.indices, meant.indices) and same(change.steps, meant.steps)
            # Where a weight that moves is another, its step leads to another as well.
            old = base[change.tensor], subject.base[change.tensor]
            right &= same(*(bits[meant.indices] for bits in old))
    except _REFUSALS as error:
        return refused_by(error) if "hazard: " in error.message else "fingerprint"
    except BaseMismatchError:
        return "fingerprint"
    return "harmless" if right else "undetected"


def decoded(subject: Subject, data: bytes, base: Sequence[order.Unsigned]) -> Iterator[Change]:
    """The changes, each seen to keep within its tensor.

    Raises:
        SoakError: one does not.
    """
    before = -1
    for change in codec.decode(data, subject.schema, "delta", codec.HostLanes(base.__getitem__)):
        spec = subject.schema.tensors[change.tensor]
        if change.tensor <= before:
            raise SoakError("tensors out of order")
        before = change.tensor
        if change.bits is not None:
            if change.bits.size != spec.numel or change.bits.itemsize != spec.itemsize:
                raise SoakError("a tensor of another size")
        elif change.indices is None or change.steps is None:
            raise SoakError("a change of nothing")
        else:
            indices, steps = change.indices, change.steps
            if indices.size == 0 or indices.size != steps.size or not steps.all():
                raise SoakError("changes without steps")
            if indices[0] < 0 or indices[-1] >= spec.numel or (np.diff(indices) <= 0).any():
                raise SoakError("indices beyond the tensor, or not ascending")
            if indices.dtype != np.int32 or steps.dtype != order.SIGNED[spec.itemsize]:
                raise SoakError("another type of indices or steps")
        yield change


def other_base(
    draw: random.Random, subject: Subject, others: Sequence[Subject]
) -> list[order.Unsigned]:
    """The base with one bit turned: of a weight that changes, of an exponent, or of any; seldom
    the weights of another version."""
    way = draw.random()
    if way < 0.02:
        versions = [one.base for one in others if one.schema is subject.schema]
        base = draw.choice([subject.target, *versions])
        if not all(map(same, base, subject.base)):
            return base
    tensor, indices = draw.choice(subject.changed)
    spec = subject.schema.tensors[tensor]
    width = 8 * spec.itemsize
    at, bit = draw.randrange(spec.numel), draw.randrange(width)
    if way < 0.5:
        at = int(indices[draw.randrange(indices.size)])
    elif way < 0.8:
        bit = draw.randrange(MANTISSA[spec.dtype], width - 1)
    other = list(subject.base)
    other[tensor] = other[tensor].copy()
    other[tensor][at] ^= other[tensor].dtype.type(1 << bit)
    return other
