"""Fingerprints: equal to a definition in plain integers, and what they can and cannot miss."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vllm_delta import fingerprint as fp
from vllm_delta.codec import order
from vllm_delta.format import Schema, TensorSpec

M = (1 << 64) - 1


def by_definition(bits: np.ndarray, spec: TensorSpec) -> int:
    """FORMAT.md in plain Python integers."""
    seeds = hashlib.sha256(spec.name.encode()).digest()
    row_seed = int.from_bytes(seeds[:8], "little")
    col_seed = int.from_bytes(seeds[8:16], "little")

    def odd(seed: int, i: int) -> int:
        h = (seed + i * 0x9E3779B97F4A7C15) & M
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & M
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & M
        return (h ^ (h >> 31)) | 1

    total = 0
    cols = max(spec.shape[-1], 1) if spec.shape else 1
    for i, u in enumerate(int(u) for u in bits):
        x = (u + 1) * 0x9FB21C651E98DF25 & M
        total += (x ^ (x >> 32)) * odd(row_seed, i // cols) * odd(col_seed, i % cols)
    return total & M


def random_bits(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    kind = order.UNSIGNED[spec.itemsize]
    rng = np.random.default_rng(seed)
    return rng.integers(0, np.iinfo(kind).max, spec.numel, dtype=kind, endpoint=True)


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
@pytest.mark.parametrize("shape", [(), (1,), (251,), (13, 17), (2, 3, 5), (0,), (3, 0), (1, 16500)])
def test_equals_the_definition(dtype: str, shape: tuple[int, ...]) -> None:
    """Every width and shape, also rows longer than a strip of columns."""
    spec = TensorSpec("model.layers.0.w", dtype, shape)
    bits = random_bits(spec)
    expected = by_definition(bits, spec)
    assert fp.fingerprint(bits, spec) == expected
    indices = np.arange(spec.numel, dtype=np.int32)
    assert fp.weigh(bits, fp.coefficients(spec, indices)) == expected


def test_a_partition_adds_up_and_order_does_not_matter() -> None:
    """Parts, in any order, sum to the whole."""
    spec = TensorSpec("w", "BF16", (40, 30))
    bits = random_bits(spec)
    shuffled = np.random.default_rng(1).permutation(spec.numel)
    total = 0
    for part in np.array_split(shuffled, 7):
        total += fp.weigh(bits[part], fp.coefficients(spec, part))
    assert total & M == fp.fingerprint(bits, spec)


def test_every_single_change_is_seen() -> None:
    """From one value to each of the other 65,535 the fingerprint differs each time."""
    every = np.arange(65536, dtype=np.uint16)
    assert np.unique(fp.mix_bits(every)).size == every.size
    spec = TensorSpec("w", "BF16", (8, 8))
    coefficients = fp.coefficients(spec, np.arange(64))
    assert (coefficients & np.uint64(1)).all()
    assert np.unique(coefficients).size == 64


def test_a_step_weighs_by_the_value_it_starts_from() -> None:
    """The mix is not linear: one step changes the sum by another amount from each base, so a
    change of the fingerprint also says what was there before."""
    g = fp.mix_bits(np.arange(65536, dtype=np.uint16))
    assert np.unique(np.diff(g)).size > 65000


def test_names_and_places_matter() -> None:
    """The same bits under another name or in another place have another fingerprint."""
    bits = random_bits(TensorSpec("a", "BF16", (6, 5)))
    a = fp.fingerprint(bits, TensorSpec("a", "BF16", (6, 5)))
    assert a != fp.fingerprint(bits, TensorSpec("b", "BF16", (6, 5)))
    assert a != fp.fingerprint(bits[::-1].copy(), TensorSpec("a", "BF16", (6, 5)))


def test_the_root_binds_schema_and_every_fingerprint() -> None:
    """Another schema, value or order gives another root; a wrong count is refused."""
    schema = Schema.of([TensorSpec("a", "BF16", (2,)), TensorSpec("b", "BF16", (2,))])
    other = Schema.of([TensorSpec("a", "BF16", (2,)), TensorSpec("c", "BF16", (2,))])
    roots = {
        fp.root(schema, [1, 2]),
        fp.root(schema, [2, 1]),
        fp.root(schema, [1, M]),
        fp.root(other, [1, 2]),
    }
    assert len(roots) == 4
    with pytest.raises(ValueError, match="1 fingerprints for 2"):
        fp.root(schema, [1])
    with pytest.raises(ValueError, match="elements"):
        fp.fingerprint(np.zeros(3, np.uint16), schema.tensors[0])
