"""The `raw` codec: a whole tensor as byte planes, a zstandard frame per chunk of elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_delta.codec import entropy
from vllm_delta.codec.order import UNSIGNED, Unsigned

CHUNK = 1 << 22
"""Elements in a frame: bounds the memory beside the tensor itself."""


def n_frames(numel: int) -> int:
    return -(-numel // CHUNK)


def encode(bits: Unsigned) -> Iterator[bytes]:
    """Frames of a flat tensor, one per chunk."""
    for start in range(0, bits.size, CHUNK):
        part = np.ascontiguousarray(bits[start : start + CHUNK]).astype(
            bits.dtype.newbyteorder("<"), copy=False
        )
        planes = part.view(np.uint8).reshape(part.size, bits.itemsize).T
        yield entropy.compress(np.ascontiguousarray(planes).tobytes())


def decode(frames: Iterator[memoryview], numel: int, itemsize: int) -> Unsigned:
    """The tensor that `encode` wrote: unsigned[numel].

    Raises:
        FormatError: a frame is damaged or holds another number of bytes.
    """
    out = np.empty(numel, UNSIGNED[itemsize])
    for start in range(0, numel, CHUNK):
        n = min(CHUNK, numel - start)
        data = entropy.decompress(next(frames), n * itemsize)
        planes = np.frombuffer(data, np.uint8).reshape(itemsize, n)
        out[start : start + n].view(np.uint8).reshape(n, itemsize)[:] = planes.T
    return out
