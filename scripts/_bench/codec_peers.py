"""The codecs that ours is measured against, each on one view of one step.

A `Coder` turns a step into a payload and back. `decode` yields tensor by tensor, so that what is
decoded never stands in memory as a whole.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from fireworks_delta_compression import delta_compress, delta_decompress
from fireworks_delta_compression.backends import arc3

from scripts._bench.codec_traces import View
from vllm_delta.codec.order import UNSIGNED, Unsigned
from vllm_delta.format import TensorSpec

XOR_LEVEL = 3
NO_RACE = 1e6
"""Times the first candidate's seconds that all others get: none runs that long."""

_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Coder(Protocol):
    """One codec on one step's weights. Payloads are its own affair."""

    name: str

    def encode(self) -> Any:
        """Find what changed and code it: from base and target to a payload."""

    def settle(self) -> None:
        """Wait for work that an `encode` left behind in other threads."""

    def decode(self, payload: Any) -> Iterator[Any]:
        """Everything a reader does before it can write, tensor by tensor."""

    def n_bytes(self, payload: Any) -> int:
        """Everything that has to reach the reader."""

    def holds(self, payload: Any) -> bool:
        """Whether it decodes to the very target, compared as bits."""


class Peer:
    """What the peers share."""

    name: str

    def __init__(self, view: View) -> None:
        self._view = view

    def settle(self) -> None:
        """None of them but ARC3 leaves work behind."""


class Arc(Peer):
    """ARC2 or ARC3 by its package's own functions, as released unless `wait_for` is given.

    Every tensor goes through them, unchanged ones too: the package asks for all keys on both
    sides, and emits about 200 bytes where nothing changed. Counted are the bytes it returns and
    its checksum strings; names and the file around them are not.

    Args:
        wait_for: ARC3 codes in several ways at once and takes the smallest that is ready within
            a time, so its size depends on the machine's load. This many times the first one's
            time is given to the others; None: the package's default.
    """

    def __init__(self, view: View, name: str, scheme: str, wait_for: float | None = None) -> None:
        super().__init__(view)
        self.name = name
        self._scheme, self._wait_for = scheme, wait_for
        tensors = zip(view.schema.tensors, view.base, view.target, strict=True)
        self._pairs = [(_tensor(spec, old), _tensor(spec, new)) for spec, old, new in tensors]
        self._left: set[threading.Thread] = set()

    def encode(self) -> list[tuple[torch.Tensor, str]]:
        before = set(threading.enumerate())
        with _waiting(self._wait_for):
            payload = [
                delta_compress(src=old, dst=new, compression_format=self._scheme)
                for old, new in self._pairs
            ]
        self._left = set(threading.enumerate()) - before
        return payload

    def settle(self) -> None:
        """Wait for losers of ARC3's race: each call has a pool of its own, which then ends."""
        for thread in self._left:
            if thread.is_alive():
                thread.join()
        self._left.clear()

    def decode(self, payload: list[tuple[torch.Tensor, str]]) -> Iterator[torch.Tensor]:
        for (old, _), (diff, checksum) in zip(self._pairs, payload, strict=True):
            with warnings.catch_warnings():
                # ARC2 reads its own buffer through torch, which warns that it is not writable.
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                result = delta_decompress(
                    src=old,
                    compressed_diff=diff,
                    checksum=checksum,
                    compression_format=self._scheme,
                )
            yield result

    def n_bytes(self, payload: list[tuple[torch.Tensor, str]]) -> int:
        return sum(diff.numel() + len(checksum) for diff, checksum in payload)

    def holds(self, payload: list[tuple[torch.Tensor, str]]) -> bool:
        results = zip(self.decode(payload), self._pairs, strict=True)
        return all(torch.equal(_raw(got), _raw(new)) for got, (_, new) in results)


class XorZstd(Peer):
    """Base XOR target, compressed tensor by tensor."""

    name = "xor_zstd"

    def encode(self) -> list[bytes]:
        compressor = zstandard.ZstdCompressor(level=XOR_LEVEL)
        pairs = zip(self._view.base, self._view.target, strict=True)
        return [compressor.compress(np.bitwise_xor(old, new).data) for old, new in pairs]

    def decode(self, payload: list[bytes]) -> Iterator[Unsigned]:
        decompressor = zstandard.ZstdDecompressor()
        for old, frame in zip(self._view.base, payload, strict=True):
            yield np.bitwise_xor(np.frombuffer(decompressor.decompress(frame), old.dtype), old)

    def n_bytes(self, payload: list[bytes]) -> int:
        return sum(map(len, payload))

    def holds(self, payload: list[bytes]) -> bool:
        results = zip(self.decode(payload), self._view.target, strict=True)
        return all(np.array_equal(got, new) for got, new in results)


class RawSparse(Peer):
    """Indices of four bytes and the new values, as they are; unchanged tensors take nothing.

    Its `decode` only copies them out of the payload: nothing is compressed and nothing checked.
    """

    name = "raw_sparse"

    def encode(self) -> list[tuple[bytes, bytes]]:
        payload = []
        for old, new in zip(self._view.base, self._view.target, strict=True):
            places = np.flatnonzero(old != new)
            kind = np.int32 if new.size < 1 << 31 else np.int64
            payload.append((places.astype(kind).tobytes(), new[places].tobytes()))
        return payload

    def decode(
        self, payload: list[tuple[bytes, bytes]]
    ) -> Iterator[tuple[np.ndarray[Any, Any], Unsigned]]:
        for spec, (places, values) in zip(self._view.schema.tensors, payload, strict=True):
            kind = np.int32 if spec.numel < 1 << 31 else np.int64
            bits = np.frombuffer(values, UNSIGNED[spec.itemsize])
            yield np.frombuffer(places, kind).copy(), bits.copy()

    def n_bytes(self, payload: list[tuple[bytes, bytes]]) -> int:
        return sum(len(places) + len(values) for places, values in payload)

    def holds(self, payload: list[tuple[bytes, bytes]]) -> bool:
        for place, (places, values) in enumerate(self.decode(payload)):
            bits = self._view.base[place].copy()
            bits[places] = values
            if not np.array_equal(bits, self._view.target[place]):
                return False
        return True


def peers(view: View) -> list[Coder]:
    """Every peer on one view of a step."""
    return [
        Arc(view, "arc2", "arc_v2"),
        Arc(view, "arc3", "arc_v3"),
        Arc(view, "arc3_best", "arc_v3", NO_RACE),
        XorZstd(view),
        RawSparse(view),
    ]


@contextlib.contextmanager
def _waiting(times: float | None) -> Iterator[None]:
    """Let ARC3's candidates have `times` the first one's seconds; None changes nothing.

    The package reads ARC3_CANDIDATE_WAIT_MULTIPLIER into this name once, when it is imported.
    """
    default = arc3._CANDIDATE_WAIT_MULTIPLIER
    if times is not None:
        arc3._CANDIDATE_WAIT_MULTIPLIER = times
    try:
        yield
    finally:
        arc3._CANDIDATE_WAIT_MULTIPLIER = default


def _tensor(spec: TensorSpec, bits: Unsigned) -> torch.Tensor:
    """The tensor that the bits are; aliases them. Types that no peer steps on stay integers."""
    signed = bits if bits.itemsize == 1 else bits.view(f"i{bits.itemsize}")
    flat = torch.from_numpy(signed)
    return flat.view(_TORCH.get(spec.dtype, flat.dtype)).reshape(spec.shape)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])
