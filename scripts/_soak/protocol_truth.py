"""What is true on a stage: what landed in the bare store, and what each version's weights are."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from scripts._soak.protocol_stage import Stage
from vllm_delta.channel import NO_KEYS, Keys
from vllm_delta.channel.chain import Record, parse_record
from vllm_delta.channel.store import Store
from vllm_delta.channel.tail import MAX_ENVELOPE_BYTES
from vllm_delta.codec.order import UNSIGNED, Unsigned
from vllm_delta.errors import DeltaError
from vllm_delta.format import Manifest, Schema, Version, manifest_key
from vllm_delta.shadow import Shadow
from vllm_delta.weights import ModelWeights

Tensors = dict[str, torch.Tensor]

_SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding": ((48, 24), torch.bfloat16),
    "experts": ((2, 10, 12), torch.float32),
    "half": ((40,), torch.float16),
    "ids": ((9,), torch.int32),
    "scale": ((), torch.bfloat16),
}
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NANS = {
    torch.bfloat16: (0x7FC1, 0xFFC1),
    torch.float16: (0x7E01, 0xFFFE),
    torch.float32: (0x7FC00123, 0xFF800001),
}
_HOT = 12


def any_weights(draw: random.Random) -> Tensors:
    """A small model's weights, any patterns, NaN payloads included."""
    generator = np.random.default_rng(draw.getrandbits(32))
    tensors = {}
    for name, (shape, dtype) in _SHAPES.items():
        n_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        raw = torch.from_numpy(generator.integers(0, 256, n_bytes, dtype=np.uint8))
        tensors[name] = raw.view(dtype).reshape(shape).clone()
    return tensors


def move(tensors: Tensors, draw: random.Random) -> None:
    """A step of training: small steps mostly, at the same places mostly; some of any kind."""
    for name in draw.sample(sorted(tensors), draw.randint(1, 3)):
        tensor = tensors[name]
        bits = bits_of(tensor)
        hot = min(_HOT, bits.size)
        for _ in range(draw.randint(1, 10)):
            place = draw.randrange(hot if draw.random() < 0.8 else bits.size)
            kind = draw.random()
            if kind < 0.8 or tensor.dtype not in _NANS:
                bits[place : place + 1] += bits.dtype.type(1)  # an array wraps round without a word
            elif kind < 0.9:
                bits[place] = draw.choice(_NANS[tensor.dtype])
            else:
                bits[place] = ~bits[place]
        if draw.random() < 0.03:
            bits ^= bits.dtype.type(1 << draw.randrange(8))


def bits_of(tensor: torch.Tensor) -> Unsigned:
    """A tensor's bits, flat, in its own memory."""
    bits = tensor.view(_VIEWS[tensor.dtype.itemsize]).reshape(-1).numpy()
    return bits.view(UNSIGNED[tensor.dtype.itemsize])


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Truth:
    """Weights by root, every manifest that ever landed, and what trainers were told.

    Attributes:
        log: the records as they stand, by number.
        replaced: a record that was overwritten, and the one that came in its place.
    """

    def __init__(self, stage: Stage, keys: Keys = NO_KEYS, *, atomic: bool = True) -> None:
        self.stage = stage
        self.keys = keys
        self.atomic = atomic
        self.bits: dict[str, list[Unsigned]] = {}
        self.log: dict[int, Record] = {}
        self.published: set[Version] = set()
        self.digests: dict[bytes, set[str]] = {}
        self.fenced: set[str] = set()
        self.replaced: list[tuple[Record, Record]] = []
        self._schema: Schema | None = None

    def learn(self, tensors: Tensors) -> str:
        """Take note of weights that may be published; their root."""
        schema = self._schema or ModelWeights(tensors).schema
        self._schema = schema
        shadow = Shadow(schema, (bits_of(tensors[spec.name]) for spec in schema.tensors))
        self.bits.setdefault(shadow.root, shadow.bits)
        return shadow.root

    def landed(self, seq: int, envelope: bytes) -> None:
        """A manifest has landed in the bare store."""
        try:
            record = parse_record(envelope, seq, self.keys)
        except DeltaError as error:
            self.stage.violate(f"what no reader can read landed at {seq}: {error}")
            return
        manifest, before = record.manifest, self.log.get(seq)
        if self.atomic:
            if before is not None and before != record:
                self.stage.violate(f"record {seq} was replaced")
            if manifest.writer in self.fenced and before is None:
                self.stage.violate(f"a fenced trainer committed record {seq}")
            if seq > 1 and seq - 1 not in self.log:
                self.stage.violate(f"a hole before record {seq}")
        self.stage.note(f"- lands: {seq} {manifest.kind} {_said(manifest)}")
        if before is not None and before != record:
            self.replaced.append((before, record))
        self.log[seq] = record
        self.digests.setdefault(manifest.to_bytes(), set()).add(record.digest)
        if manifest.target is not None:
            self.published.add(manifest.target)

    def record(self, seq: int) -> Record | None:
        """What stands there."""
        return self.log.get(seq)

    @property
    def tail(self) -> Record | None:
        return self.record(max(self.log, default=0))

    def check_held(self, who: str, version: Version, bits: Iterable[Unsigned]) -> None:
        """What a reader shows as a version must be that version's bits, and published."""
        if version not in self.published:
            self.stage.violate(f"{who} holds {version}, which nobody published")
        elif version.root not in self.bits:
            self.stage.violate(f"{who} holds {version}, which no trainer had")
        elif not _same(bits, self.bits[version.root]):
            self.stage.violate(f"{who} shows other bits than those of {version}")

    def check_links(self, who: str, manifests: Iterable[Manifest]) -> None:
        """What a reader believes must have landed, each right after the one before."""
        before: Manifest | None = None
        for manifest in manifests:
            if manifest.to_bytes() not in self.digests:
                self.stage.violate(f"{who} believes record {manifest.seq}, which never landed")
                return
            # An anchor needs nothing before it: where the chain broke it is begun anew at one.
            next_to = before is not None and before.seq + 1 == manifest.seq
            digests = self.digests[before.to_bytes()] if before is not None and next_to else None
            if digests is not None and manifest.kind != "anchor" and manifest.parent not in digests:
                self.stage.violate(f"{who} believes record {manifest.seq} after another's")
            before = manifest


class Witness(Store):
    """The bare store, with every manifest noted the moment it lands."""

    def __init__(self, store: Store, truth: Truth) -> None:
        self.store = store
        self.truth = truth

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def atomic(self) -> bool:
        return self.store.atomic

    def put(self, key: str, data: bytes) -> None:
        if _is_record(key) and self.atomic:
            self.truth.stage.violate(f"{key} was written without a condition")
        with self._noting(key, data):
            self.store.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._noting(key, data):
            return self.store.put_new(key, data)

    @contextlib.contextmanager
    def _noting(self, key: str, data: bytes) -> Iterator[None]:
        """Whatever the store says of a write, what stands there afterwards has landed."""
        try:
            yield
        finally:
            if _is_record(key) and self.store.get(key, max_bytes=MAX_ENVELOPE_BYTES) == data:
                seq = int(key[2:])
                known = self.truth.record(seq)
                if known is None or known.envelope != data:
                    self.truth.landed(seq, data)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        self.store.put_many(objects)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return self.store.get(key, max_bytes=max_bytes)

    def stream(self, key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes] | None:
        return self.store.stream(key, max_bytes=max_bytes, start=start)

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        if any(map(_is_record, listed)):
            self.truth.stage.violate("a manifest was deleted")
        self.store.delete(listed)

    def list(self, prefix: str) -> list[str]:
        return self.store.list(prefix)

    def check(self) -> None:
        """The bare store must hold what landed."""
        for seq, record in self.truth.log.items():
            if self.store.get(manifest_key(seq), max_bytes=MAX_ENVELOPE_BYTES) != record.envelope:
                self.truth.stage.violate(f"record {seq} is not what landed there")


def _is_record(key: str) -> bool:
    return key.startswith("m/") and "." not in key


def _said(manifest: Manifest) -> str:
    target = manifest.target
    version = "nothing" if target is None else f"{target.number}:{target.root[:6]}"
    return f"{version} epoch {manifest.epoch} by {manifest.writer[-6:]}"


def _same(some: Iterable[Unsigned], others: list[Unsigned]) -> bool:
    bits = list(some)
    return len(bits) == len(others) and all(map(np.array_equal, bits, others))
