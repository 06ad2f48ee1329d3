"""`GpuLanes` against `HostLanes`, on blobs as an encoder writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.codec.forced import encode, parts_of
from tests.kernels.memory import DEVICE
from vllm_delta import codec
from vllm_delta.codec import Change, HostLanes
from vllm_delta.codec.hazard import Part, Tile
from vllm_delta.codec.hazard.lanes import elements
from vllm_delta.codec.order import SIGNED, UNSIGNED, Unsigned
from vllm_delta.errors import FormatError
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.patch.gpu_lanes import GpuLanes
from vllm_delta_kernels.decode import ALIGNMENT

SCHEMA = Schema.of(
    [
        TensorSpec("a.weight", "BF16", (40, 60)),
        TensorSpec("b.scale", "F32", (300,)),
        TensorSpec("c.weight", "BF16", (30, 20)),
        TensorSpec("d.weight", "F8_E4M3", (9, 33)),
        TensorSpec("e.weight", "F16", (400,)),
    ]
)
CHANGED = {0: 40, 1: 6, 2: 12, 3: 8, 4: 6}
"""Tensor to how many of its elements change."""


class Model:
    """Weights of `SCHEMA`, changes of them, and the blob of those."""

    def __init__(self, seed: int, shards: int) -> None:
        rng = np.random.default_rng(seed)
        self.bits = [
            np.frombuffer(rng.bytes(spec.n_bytes), UNSIGNED[spec.itemsize])
            for spec in SCHEMA.tensors
        ]
        self.changes = []
        for tensor, n in CHANGED.items():
            spec = SCHEMA.tensors[tensor]
            indices = np.sort(rng.choice(spec.numel, n, replace=False)).astype(np.int32)
            steps = rng.choice([-2, -1, 1, 50], n).astype(SIGNED[spec.itemsize])
            self.changes.append(Change(tensor, indices, steps, None, 0, 0))
        self.data = encode(
            SCHEMA, self.changes, self.base, shards=shards, changes_in_tile=2, changes_in_lane=2
        )
        self.parts = parts_of(self.data, SCHEMA)
        self.gathered: list[torch.Tensor] = []

    def base(self, tensor: int) -> Unsigned:
        return self.bits[tensor]

    def gather(self, tensor: int, tile: Tile, start: int, n: int, out: torch.Tensor) -> bool:
        assert out.numel() == n
        some = elements(self.bits[tensor], SCHEMA.tensors[tensor], tile, start, n)
        out.copy_(torch.from_numpy(some.view(SIGNED[some.itemsize]).copy()))
        self.gathered.append(out)
        return True

    def decoder(self, gathered_bytes: int = 1 << 20) -> GpuLanes:
        return GpuLanes(self.gather, torch.device(DEVICE), gathered_bytes=gathered_bytes)


def require_changes(found: Sequence[Change], expected: Sequence[Change]) -> None:
    """The same tensors, indices and steps, types included."""
    assert [change.tensor for change in found] == [change.tensor for change in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, right in ((one.indices, other.indices), (one.steps, other.steps)):
            assert mine is not None
            assert right is not None
            assert mine.dtype == right.dtype
            assert mine.tolist() == right.tolist()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_blob_decodes_to_what_was_coded(shards: int) -> None:
    """Types of three widths, tensors of many lanes and of one, whole and cut into tiles: the
    changes that the encoder was given, in order; and not more copies at a time than allowed."""
    model = Model(shards, shards)
    coded = list(CHANGED) if shards == 1 else [0, 2, 3]  # vectors are not cut
    assert [part.tensor for part in model.parts] == coded
    assert max(len(part.lanes) for part in model.parts) > 2
    tiles = {lane.tile for part in model.parts for lane in part.lanes}
    assert (len(tiles) > len(coded)) == (shards > 1)
    allowed = 1100
    changes = list(codec.decode(model.data, SCHEMA, "delta", model.decoder(allowed)))
    require_changes(changes, model.changes)
    n_lanes = sum(len(part.lanes) for part in model.parts)
    assert len(model.gathered) == n_lanes
    assert all(out.data_ptr() % ALIGNMENT == 0 for out in model.gathered)
    held = {out.untyped_storage().data_ptr(): out.untyped_storage() for out in model.gathered}
    largest = max(out.numel() * out.element_size() for out in model.gathered)
    assert max(storage.nbytes() for storage in held.values()) <= max(allowed, largest + 15)
    assert sum(out.numel() * out.element_size() for out in model.gathered) > 2 * allowed


def test_lanes_that_the_rank_does_not_want_are_left_out() -> None:
    """Of each tensor there is what lies in the lanes that were gathered, and of one that has none
    nothing, in the types of a change."""
    model = Model(3, 1)

    def wanted(part: Part, number: int) -> bool:
        return part.tensor != 2 and number % 2 == 0

    def gather(tensor: int, tile: Tile, start: int, n: int, out: torch.Tensor) -> bool:
        part = next(part for part in model.parts if part.tensor == tensor)
        number = next(lane.number for lane in part.lanes if lane.start == start)
        return wanted(part, number) and model.gather(tensor, tile, start, n, out)

    found = GpuLanes(gather, torch.device(DEVICE)).decode(model.parts)
    everything = HostLanes(model.base).decode(model.parts)
    for part, mine, whole in zip(model.parts, found, everything, strict=True):
        kept = [
            np.arange(lane.first_change, lane.first_change + lane.n_changes)
            for lane in part.lanes
            if wanted(part, lane.number)
        ]
        places = np.concatenate([np.empty(0, np.int64), *kept])
        for one, other in zip(mine, whole, strict=True):
            assert one.dtype == other.dtype
            assert one.tolist() == other[places].tolist()
    assert found[2][0].size == 0 < found[0][0].size < everything[0][0].size


def refusal(lanes: codec.LaneDecoder, parts: Sequence[Part]) -> tuple[str, dict[str, object]]:
    with pytest.raises(FormatError) as caught:
        lanes.decode(parts)
    return str(caught.value), caught.value.facts


def test_damage_is_refused_in_the_same_words() -> None:
    """A flipped bit in the words, a first state that is none, and another base: `FormatError`
    with the message and the facts that a CPU gives."""
    model = Model(4, 1)
    (part,) = (part for part in model.parts if part.tensor == 2)
    assert len(part.lanes) > 1
    lane = part.lanes[-1]
    seen = set()
    for word, mask in ((lane.n_words - 1, 1 << 9), (0, 1 << 31)):
        words = part.words.copy()
        words[lane.first_word + word] ^= np.uint32(mask)
        # Of the next tensor's lanes the kernel takes some before the damaged one.
        damaged = [replace(one, words=words) for one in model.parts if one.tensor in (2, 4)]
        sizes = [one.n_elements for two in damaged for one in two.lanes]
        assert sizes != sorted(sizes, reverse=True)
        mine = refusal(model.decoder(), damaged)
        assert mine == refusal(HostLanes(model.base), damaged)
        assert mine[1] == {"name": "c.weight", "lane": lane.number}
        seen.add(mine[0])
    assert len(seen) == 2

    other = model.bits[2].copy()
    assert model.changes[2].indices is not None
    other[model.changes[2].indices[0]] ^= 1
    model.bits[2] = other
    assert refusal(model.decoder(), [part]) == refusal(HostLanes(model.base), [part])


def test_nothing_to_decode() -> None:
    """No parts, and parts whose lanes nobody wants."""
    model = Model(5, 1)
    assert model.decoder().decode([]) == []
    unwanted = GpuLanes(lambda *_: False, torch.device(DEVICE)).decode(model.parts)
    assert [indices.size + steps.size for indices, steps in unwanted] == [0] * len(model.parts)
