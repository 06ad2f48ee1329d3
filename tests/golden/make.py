"""The inputs behind the golden files, and the command that writes them.

`python -m tests.golden.make` writes anew. Do that only together with a change of the format.
"""

from __future__ import annotations

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
    }


if __name__ == "__main__":
    for name, data in golden().items():
        (HERE / name).write_bytes(data)
