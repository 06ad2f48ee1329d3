"""The trainer's copy of the published bits, and the exact difference to the weights of now."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from vllm_delta.codec import Change, LaneDecoder, decode, gap
from vllm_delta.codec.blob import BlobKind
from vllm_delta.codec.order import Unsigned, add_steps
from vllm_delta.difference import Difference, Pair, differences
from vllm_delta.errors import DeltaError
from vllm_delta.fingerprint import MASK64, fingerprint, root
from vllm_delta.format import Schema, Version

_CHUNK = 1 << 18
"""Elements looked at together where only their number counts."""
_BATCH = 1 << 23
"""Elements of small tensors that are compared together."""


class Shadow:
    """The published bits of every tensor, with their fingerprints.

    One flat unsigned array per tensor, owned by the shadow. Not thread-safe.

    Attributes:
        torn: its bits may be of no version, since a move was interrupted.

    Args:
        schema: the checkpoint's tensors.
        tensors: unsigned[numel] each, in schema order; copied, one at a time.
    """

    def __init__(self, schema: Schema, tensors: Iterable[Unsigned]) -> None:
        self.schema = schema
        self.torn = False
        self.bits: list[Unsigned] = []
        self.fingerprints: list[int] = []
        for spec, bits in zip(schema.tensors, tensors, strict=True):
            self.bits.append(np.array(bits, copy=True, order="C").reshape(-1))
            self.fingerprints.append(fingerprint(self.bits[-1], spec))

    @property
    def root(self) -> str:
        """Root of the bits held."""
        return root(self.schema, self.fingerprints)

    def version(self, number: int) -> Version:
        """The version that the bits held are, under that number."""
        return Version(number, self.root)

    def diff(
        self, tensor: int, new: Unsigned, *, raw_above: float, n_threads: int = 1
    ) -> Change | None:
        """The change from the shadow to `new`, or None when every bit is equal.

        Reads both once. A tensor whose type has no steps, or with more than `raw_above` of its
        elements (or more than a blob holds) changed, is replaced whole: the change then aliases
        `new`.

        Args:
            tensor: place in the schema.
            new: unsigned[numel], flat, contiguous; not modified.
            raw_above: share of the elements, 0 to 1.
            n_threads: threads to use, the calling one included.
        """
        return self._diffs([(tensor, new)], raw_above, n_threads)[0]

    def diffs(
        self, tensors: Iterable[Unsigned], *, raw_above: float, n_threads: int = 1
    ) -> Iterator[Change]:
        """The changes from the shadow to these tensors, of those that differ: see `diff`.

        Small tensors are compared together, so that several threads have enough to do.

        Args:
            tensors: unsigned[numel] each, in schema order; each is held until those of about
                eight million elements are.
        """
        batch: list[tuple[int, Unsigned]] = []
        n_elements = 0
        for tensor, bits in enumerate(tensors):
            batch.append((tensor, bits))
            n_elements += bits.size
            if n_elements >= _BATCH:
                yield from filter(None, self._diffs(batch, raw_above, n_threads))
                batch, n_elements = [], 0
        yield from filter(None, self._diffs(batch, raw_above, n_threads))

    def _diffs(
        self, batch: Sequence[tuple[int, Unsigned]], raw_above: float, n_threads: int
    ) -> list[Change | None]:
        pairs = []
        for tensor, new in batch:
            spec = self.schema.tensors[tensor]
            if spec.stepped:
                most = min(int(raw_above * spec.numel), gap.MAX_CHANGES)
                pairs.append(Pair(spec, self.bits[tensor], new, most))
        found = iter(differences(pairs, n_threads))
        return [
            self._change(tensor, new, next(found))
            if self.schema.tensors[tensor].stepped
            else self._replaced(tensor, new)
            for tensor, new in batch
        ]

    def _change(self, tensor: int, new: Unsigned, found: Difference | None) -> Change | None:
        if found is None:
            return self._replacement(tensor, new)
        if not found.indices.size:
            return None
        target = (self.fingerprints[tensor] + found.moved) & MASK64
        return Change(tensor, found.indices, found.steps, None, found.touched, target)

    def _replaced(self, tensor: int, new: Unsigned) -> Change | None:
        equal = np.array_equal(self.bits[tensor], new)
        return None if equal else self._replacement(tensor, new)

    def whole(self, tensor: int) -> Change:
        """The tensor as an anchor holds it; aliases the shadow."""
        return Change(tensor, None, None, self.bits[tensor], 0, self.fingerprints[tensor])

    def named(self, tensor: int) -> Change:
        """The tensor as an anchor by reference holds it: its fingerprint alone."""
        return Change(tensor, None, None, None, 0, self.fingerprints[tensor])

    def n_different(self, change: Change) -> int:
        """How many elements of the shadow `change` gives other bits."""
        if change.bits is None:
            return change.nnz
        old, new = self.bits[change.tensor], change.bits
        return sum(
            int(np.count_nonzero(old[start : start + _CHUNK] != new[start : start + _CHUNK]))
            for start in range(0, old.size, _CHUNK)
        )

    def advance(self, changes: Iterable[Change]) -> None:
        """Move to the version after `changes`, which must have been made from this one."""
        for change in changes:
            if not self._move(change, 1):
                assert change.bits is not None
                self.bits[change.tensor][:] = change.bits
            self.fingerprints[change.tensor] = change.target

    @contextlib.contextmanager
    def before(
        self, changes: Callable[[], Iterable[Change]], fingerprints: Sequence[int]
    ) -> Iterator[None]:
        """Hold the bits from before `changes`, which led here, until the block ends.

        Moves in place, so that it takes no memory. What was replaced whole stays as it is.

        Args:
            changes: gives them from the first on.
            fingerprints: of all tensors at that version.
        """
        self.torn = True
        now = self.fingerprints
        self.fingerprints = list(now)
        for change in changes():
            if self._move(change, -1):
                self.fingerprints[change.tensor] = fingerprints[change.tensor]
        try:
            yield
        finally:
            for change in changes():
                self._move(change, 1)
            self.fingerprints = now
            self.torn = False

    def _move(self, change: Change, sign: int) -> bool:
        """Take a change's steps, backwards if the sign is turned; False: it has none."""
        if change.indices is None or change.steps is None:
            return False
        bits = self.bits[change.tensor]
        steps = change.steps if sign > 0 else np.negative(change.steps)
        bits[change.indices] = add_steps(bits[change.indices], steps)
        return True

    def _replacement(self, tensor: int, new: Unsigned) -> Change:
        target = fingerprint(new, self.schema.tensors[tensor])
        return Change(tensor, None, None, new, self.fingerprints[tensor], target)


class Proof:
    """Proves that blobs decode to the very changes that were encoded, in one pass over each.

    Digests of the changes are kept, not the changes, so nothing outlives its encoding.

    Args:
        shadow: the bits that a delta was made from, to see that a tensor which the encoder chose
            to replace whole becomes what its steps would have made of it; None where it has no
            choice.
    """

    def __init__(self, schema: Schema, kind: BlobKind, shadow: Shadow | None = None) -> None:
        self._schema, self._kind, self._shadow = schema, kind, shadow
        self._expected: dict[int, bytes] = {}

    def watch(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Pass the changes on to the encoder, noting each."""
        for change in changes:
            self._expected[change.tensor] = _digest(change)
            yield change

    def expect(self, changes: Iterable[Change]) -> None:
        """Note changes that the encoder gets in another form."""
        for _ in self.watch(changes):
            pass

    def check(self, blob: bytes, lanes: LaneDecoder | None = None) -> None:
        """Decode a blob and compare.

        Args:
            lanes: decodes `hazard` against the bits that the delta was made from.

        Raises:
            DeltaError: it does not hold what was encoded. Nothing of it may be published.
        """
        for change in decode(blob, self._schema, self._kind, lanes):
            expected = self._expected.pop(change.tensor, None)
            if expected is None or (
                expected != _digest(change) and expected != self._digest_of_steps(change)
            ):
                name = self._schema.tensors[change.tensor].name
                raise DeltaError("a blob does not decode to what was encoded", name=name)

    def _digest_of_steps(self, change: Change) -> bytes | None:
        """Digest of a replacement as the steps that it stands for."""
        if self._shadow is None or change.bits is None:
            return None
        if change.touched != self._shadow.fingerprints[change.tensor]:
            return None
        steps = self._shadow.diff(change.tensor, change.bits, raw_above=1.0)
        if steps is None or steps.target != change.target:
            return None
        return _digest(steps)

    def finish(self) -> None:
        """Raise DeltaError when a change is in no blob."""
        if self._expected:
            name = self._schema.tensors[min(self._expected)].name
            raise DeltaError("a change was not encoded", name=name)


def _digest(change: Change) -> bytes:
    state = hashlib.sha256(f"{change.tensor} {change.touched} {change.target}".encode())
    for part in (change.indices, change.steps, change.bits):
        state.update(b"|" if part is None else f"|{part.dtype.str}{part.size}:".encode())
        if part is not None:
            state.update(np.ascontiguousarray(part).data)
    return state.digest()
