"""The inputs behind the golden files, and the command that writes them.

`python -m tests.golden.make` writes anew. Do that only together with a change of the format.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from vllm_delta import codec
from vllm_delta.codec import Change, order
from vllm_delta.fingerprint import MASK64, coefficients, fingerprint, weigh
from vllm_delta.format import Schema, TensorSpec

HERE = pathlib.Path(__file__).parent
SCHEMA = Schema.of(
    [
        TensorSpec("bf16.matrix", "BF16", (37, 53)),
        TensorSpec("bf16.vector", "BF16", (301,)),
        TensorSpec("f16.cube", "F16", (3, 5, 7)),
        TensorSpec("f32.matrix", "F32", (16, 33)),
        TensorSpec("f8.matrix", "F8_E4M3", (20, 20)),
        TensorSpec("i64.scalar", "I64", ()),
        TensorSpec("u8.empty", "U8", (0,)),
    ]
)

HAZARD_SCHEMA = Schema.of(
    [
        TensorSpec("bf16.cube", "BF16", (2, 70, 66)),
        TensorSpec("bf16.matrix", "BF16", (160, 130)),
        TensorSpec("bf16.norm", "BF16", (60,)),
        TensorSpec("bf16.vector", "BF16", (2500,)),
        TensorSpec("f16.matrix", "F16", (70, 131)),
        TensorSpec("f32.matrix", "F32", (96, 97)),
        TensorSpec("f8.four", "F8_E4M3", (90, 91)),
        TensorSpec("f8.five", "F8_E5M2", (90, 92)),
        TensorSpec("i64.counts", "I64", (33,)),
        TensorSpec("z.late", "BF16", (50, 100)),
    ]
)
"""What the two hazard blobs are over: for one shard and for two."""
_TOP = {"BF16": (7, 122), "F16": (10, 11), "F32": (23, 121), "F8_E4M3": (3, 9), "F8_E5M2": (2, 17)}
"""Mantissa bits, and the field of the largest exponent."""


def words(seed: int, n: int) -> np.ndarray:
    """n words of a linear congruential generator (Knuth's MMIX constants): uint64[n]."""
    state, out = seed, []
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) & MASK64
        out.append(state >> 16)
    return np.array(out, np.uint64)


def base() -> list[np.ndarray]:
    """Raw bits of every tensor: flat unsigned arrays."""
    return [
        words(place + 1, spec.numel).astype(order.UNSIGNED[spec.itemsize])
        for place, spec in enumerate(SCHEMA.tensors)
    ]


def hazard_base() -> list[np.ndarray]:
    """Raw bits whose exponents fall off as those of weights do: flat unsigned arrays."""
    out = []
    for place, spec in enumerate(HAZARD_SCHEMA.tensors):
        drawn = words(place + 300, spec.numel)
        if spec.stepped:
            mantissa, top = _TOP[spec.dtype]
            low = drawn & np.uint64((1 << mantissa) - 1)
            fields = np.uint64(top) - octaves(drawn >> np.uint64(30))
            signs = (drawn >> np.uint64(29) & np.uint64(1)) << np.uint64(8 * spec.itemsize - 1)
            drawn = signs | fields << np.uint64(mantissa) | low
        out.append(drawn.astype(order.UNSIGNED[spec.itemsize]))
    return out


def octaves(drawn: np.ndarray) -> np.ndarray:
    """How many zeros the words end in, at most 8: each number half as often as the one before."""
    found = np.zeros(drawn.size, np.uint64)
    for bit in range(8):
        found += drawn & np.uint64((2 << bit) - 1) == 0
    return found


def hazard_changes() -> list[Change]:
    """A delta over `hazard_base`: the smaller a weight, the likelier and larger its step."""
    out = []
    for place, (spec, old) in enumerate(zip(HAZARD_SCHEMA.tensors, hazard_base(), strict=True)):
        whole = fingerprint(old, spec)
        if not spec.stepped:
            new = old ^ np.array(3, old.dtype)
            out.append(Change(place, None, None, new, whole, fingerprint(new, spec)))
            continue
        mantissa, top = _TOP[spec.dtype]
        half = 1 << (8 * spec.itemsize - 1)
        depths = np.uint64(top) - ((old & np.array(half - 1, old.dtype)) >> mantissa)
        drawn = words(place + 400, spec.numel)
        likely = drawn % np.uint64(256) < np.uint64(32) << depths
        indices = np.flatnonzero(likely).astype(np.int32)
        sizes = 1 + (drawn[indices] >> np.uint64(20)) % (np.uint64(1) << depths[indices])
        sizes = np.minimum(sizes, half - 1)
        sizes[:: max(1, sizes.size // 3)] = half - 1 - place
        steps = sizes.astype(order.SIGNED[spec.itemsize])
        steps[(drawn[indices] >> np.uint64(40)) % 2 == 1] *= -1
        new = old.copy()
        new[indices] = order.add_steps(old[indices], steps)
        touched = weigh(old[indices], coefficients(spec, indices))
        out.append(Change(place, indices, steps, None, touched, fingerprint(new, spec)))
    return out


def hazard_delta(shards: int) -> bytes:
    """The hazard delta for a number of shards."""
    base = hazard_base()
    (data,) = codec.encode_delta(
        HAZARD_SCHEMA, hazard_changes(), codec="hazard", base=base.__getitem__, shards=shards
    )
    return data


def changes() -> list[Change]:
    """A delta over `base`: sparse steps of every size, and one tensor replaced."""
    out = []
    for place, (spec, old) in enumerate(zip(SCHEMA.tensors, base(), strict=True)):
        whole = fingerprint(old, spec)
        if not spec.stepped:
            if spec.numel:
                new = old + np.array(1, old.dtype)
                out.append(Change(place, None, None, new, whole, fingerprint(new, spec)))
            continue
        picks = np.flatnonzero(words(place + 100, spec.numel) % np.uint64(11) == 0)
        indices = picks.astype(np.int32)
        sizes = words(place + 200, picks.size).astype(order.SIGNED[spec.itemsize])
        small = np.where(np.arange(picks.size) % 4 == 0, sizes | 1, np.sign(sizes | 1))
        steps = small.astype(order.SIGNED[spec.itemsize])
        new = old.copy()
        new[indices] = order.add_steps(old[indices], steps)
        weights = coefficients(spec, indices)
        touched = weigh(old[indices], weights)
        target = (whole - touched + weigh(new[indices], weights)) & MASK64
        out.append(Change(place, indices, steps, None, touched, target))
    return out


def anchor() -> list[Change]:
    """Every tensor of `base`, whole."""
    return [
        Change(place, None, None, bits, 0, fingerprint(bits, SCHEMA.tensors[place]))
        for place, bits in enumerate(base())
    ]


@functools.cache
def golden() -> dict[str, bytes]:
    """File name → bytes of each golden file."""
    (delta,) = codec.encode_delta(SCHEMA, changes())
    (whole,) = codec.encode_anchor(SCHEMA, anchor())
    reference = codec.encode_reference(SCHEMA, [change.target for change in anchor()])
    return {
        "schema.json": SCHEMA.to_bytes(),
        "delta.blob": delta,
        "anchor.blob": whole,
        "reference.blob": reference,
        "hazard_schema.json": HAZARD_SCHEMA.to_bytes(),
        "hazard_1.blob": hazard_delta(1),
        "hazard_2.blob": hazard_delta(2),
    }


if __name__ == "__main__":
    for name, data in golden().items():
        (HERE / name).write_bytes(data)
