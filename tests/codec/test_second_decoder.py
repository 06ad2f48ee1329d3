"""FORMAT.md is enough: a decoder written from it alone gives what the package's decoder gives."""

from __future__ import annotations

import numpy as np
import pytest

from scripts._soak.deltas import Delta, delta
from tests.codec import second_decoder
from tests.golden import make
from vllm_delta import codec
from vllm_delta.codec import writer
from vllm_delta.codec.blob import HAZARD, BlobKind
from vllm_delta.codec.hazard import encoder
from vllm_delta.format import TensorSpec

STEPPED = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"]


def agree(some: Delta, shards: int = 1, blob_bytes: int = 64 << 20) -> list[second_decoder.Entry]:
    """Checks that both decoders give what was encoded; returns the entries of all blobs."""
    blobs = list(
        codec.encode_delta(
            some.schema,
            some.changes,
            codec="hazard",
            base=some.bits,
            shards=shards,
            blob_bytes=blob_bytes,
        )
    )
    found: list[second_decoder.Entry] = []
    changes: list[codec.Change] = []
    for data in blobs:
        found += second_decoder.decode(
            data, some.schema.to_bytes(), lambda tensor: some.base[tensor].tolist()
        )
        changes += codec.decode(data, some.schema, "delta", codec.HostLanes(some.bits))
    assert len(found) == len(changes) == len(some.changes)
    for entry, change, wanted in zip(found, changes, some.changes, strict=True):
        assert entry.tensor == change.tensor == wanted.tensor
        assert entry.target == change.target == wanted.target
        assert entry.touched == change.touched
        if entry.indices is None or change.indices is None or change.steps is None:
            assert entry.indices is None
            assert change.bits is not None
            assert entry.bits == change.bits.tolist() == some.target[entry.tensor].tolist()
            continue
        assert wanted.indices is not None
        assert wanted.steps is not None
        assert entry.touched == wanted.touched
        assert entry.indices == change.indices.tolist()
        assert entry.steps == change.steps.tolist()
        assert np.array_equal(change.indices, wanted.indices)
        assert np.array_equal(change.steps, wanted.steps)
    return found


@pytest.mark.parametrize("size", [0.003, 0.1, 1, 20])
@pytest.mark.parametrize("dtype", STEPPED)
def test_every_stepped_type(dtype: str, size: float) -> None:
    """From rare to dense changes, small steps and large."""
    found = agree(delta([TensorSpec("w", dtype, (90, 50))], size, 1))
    assert [entry.codec for entry in found] == [HAZARD] or dtype.startswith("F8")


def test_many_small_tensors_of_every_type_and_several_models() -> None:
    """A whole tensor in between begins another model; tensors share them otherwise."""
    specs = [
        TensorSpec(f"{place:03}", "U8" if place % 50 == 49 else STEPPED[place % 5], (place + 1, 7))
        for place in range(160)
    ]
    found = agree(delta(specs, 0.2, 2))
    models = [entry.models for entry in found if entry.codec == HAZARD]
    assert len({id(model) for model in models}) == 4
    assert len(models) > 130


def test_several_blobs() -> None:
    """Each blob stands alone."""
    specs = [TensorSpec(f"{place}", "BF16", (60, 60)) for place in range(5)]
    assert len(agree(delta(specs, 0.3, 3), blob_bytes=1)) == 5


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_tiles_of_matrices_cubes_and_odd_shapes(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of rows and columns that divide and that do not, experts, and what stays whole."""
    monkeypatch.setattr(encoder, "_CHANGES_IN_TILE", 1)
    monkeypatch.setattr(encoder, "_CHANGES_IN_LANE", 40)
    monkeypatch.setattr(writer, "_WORTH_GAP", 1 << 40)
    specs = [
        TensorSpec("cube", "BF16", (3, 72, 50)),
        TensorSpec("experts", "F16", (2, 3, 24, 40)),
        TensorSpec("matrix", "F32", (96, 120)),
        TensorSpec("norm", "BF16", (16,)),
        TensorSpec("prime", "BF16", (131, 67)),
        TensorSpec("vector", "BF16", (9000,)),
        TensorSpec("wide", "F8_E4M3", (1, 5000)),
    ]
    by_name = dict(zip([s.name for s in specs], agree(delta(specs, 0.5, 4), shards), strict=True))
    cut = {name for name, entry in by_name.items() if entry.codec == HAZARD and entry.cut}
    assert cut == ({"cube", "experts", "matrix", "prime", "wide"} if shards > 1 else set())
    assert (by_name["norm"].codec, by_name["norm"].cut) == (HAZARD, False)
    assert (by_name["vector"].codec == HAZARD) == (shards == 1)


@pytest.mark.parametrize("lane_bits", [8, 9, 11, 13, 15, 17, 22])
def test_lanes_of_every_length(lane_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also lanes without changes, a short last one, and one lane longer than the tensor."""
    monkeypatch.setattr(encoder, "_lane_bits", lambda *_: lane_bits)
    monkeypatch.setattr(writer, "_WORTH_GAP", 1 << 40)
    (entry,) = agree(delta([TensorSpec("w", "BF16", (307, 251))], 0.004, 5))
    assert entry.log_lane == lane_bits
    assert len(entry.lanes) == -(-307 * 251 >> lane_bits)


@pytest.mark.parametrize("kind", ["delta", "anchor", "reference"])
def test_the_other_codecs(kind: BlobKind) -> None:
    """Gap, raw and references, from the golden files."""
    data = (make.HERE / f"{kind}.blob").read_bytes()
    found = list(second_decoder.decode(data, make.SCHEMA.to_bytes()))
    changes = list(codec.decode(data, make.SCHEMA, kind))
    assert len(found) == len(changes) > 0
    for entry, change in zip(found, changes, strict=True):
        assert (entry.tensor, entry.target) == (change.tensor, change.target)
        for mine, theirs in (
            (entry.indices, change.indices),
            (entry.steps, change.steps),
            (entry.bits, change.bits),
        ):
            assert mine == (None if theirs is None else theirs.tolist())
