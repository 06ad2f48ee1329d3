"""Versions built up from anchors and deltas in plain memory, each step proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from vllm_delta.codec import HostLanes
from vllm_delta.codec.order import UNSIGNED, Unsigned, add_steps
from vllm_delta.errors import (
    BaseMismatchError,
    FormatError,
    ModelMismatchError,
    SettingsError,
)
from vllm_delta.fingerprint import MASK64, coefficients, fingerprint, root, weigh

if TYPE_CHECKING:
    from vllm_delta.codec import Change, LaneDecoder
    from vllm_delta.codec.hazard import Part
    from vllm_delta.format import Manifest, Reference, Schema, Version

Changes = Callable[["Manifest", "LaneDecoder | None"], "Iterator[Change]"]


class Replica:
    """A version's fingerprints and, where they are known, its bits: flat unsigned arrays.

    Attributes:
        proven: whether the bits are known, so that changes are checked against them.
    """

    def __init__(self, schema: Schema, fingerprints: list[int], bits: list[Unsigned]) -> None:
        self.schema = schema
        self.fingerprints = fingerprints
        self.bits = bits
        self.proven = len(bits) == len(schema)

    @property
    def root(self) -> str:
        return root(self.schema, self.fingerprints)

    def tensors(self) -> dict[str, Unsigned]:
        """The bits by name, in the tensors' shapes.

        Raises:
            FormatError: a full scan does not give the fingerprints that the deltas led to.
        """
        for spec, bits, expected in zip(
            self.schema.tensors, self.bits, self.fingerprints, strict=True
        ):
            if fingerprint(bits, spec) != expected:
                raise FormatError("a tensor's bits are not its fingerprint's", name=spec.name)
        return {
            spec.name: bits.reshape(spec.shape)
            for spec, bits in zip(self.schema.tensors, self.bits, strict=True)
        }

    def apply(self, change: Change) -> None:
        """Apply a delta's change, in place.

        Raises:
            BaseMismatchError: the bits at hand are not those that the change was made for.
            FormatError: the change does not lead to the fingerprint that it names.
        """
        before = self.fingerprints[change.tensor]
        if self.proven:
            spec, bits = self.schema.tensors[change.tensor], self.bits[change.tensor]
            if change.indices is not None and change.steps is not None:
                weights = coefficients(spec, change.indices)
                old = bits[change.indices]
                new = add_steps(old, change.steps)
                touched = weigh(old, weights)
                reached = (before + weigh(new, weights) - touched) & MASK64
            else:
                assert change.bits is not None
                touched, reached = before, fingerprint(change.bits, spec)
            if touched != change.touched:
                raise BaseMismatchError("the weights are not the delta's base", name=spec.name)
            if reached != change.target:
                raise FormatError("a delta misses the fingerprint it names", name=spec.name)
            if change.bits is not None:
                bits[:] = change.bits
            else:
                bits[change.indices] = new
        self.fingerprints[change.tensor] = change.target

    def lanes(self, n_threads: int) -> LaneDecoder:
        """Decodes `hazard` against the bits at hand, if they are known."""
        if not self.proven:
            return _NoLanes()
        return HostLanes(lambda tensor: self.bits[tensor], n_threads)

    def is_reached_by(self, change: Change, before: int | None) -> bool:
        """Whether a merged delta's change leads to the bits at hand, as far as they are known.

        Args:
            before: the tensor's fingerprint in the delta's base, where that is known.
        """
        if change.target != self.fingerprints[change.tensor]:
            return False
        if change.indices is None or change.steps is None:
            assert change.bits is not None
            if before is not None and change.touched != before:
                return False
            return not self.proven or np.array_equal(change.bits, self.bits[change.tensor])
        if not self.proven:
            return True
        spec, new = self.schema.tensors[change.tensor], self.bits[change.tensor][change.indices]
        weights = coefficients(spec, change.indices)
        touched = weigh(add_steps(new, np.negative(change.steps)), weights)
        moved = weigh(new, weights) - touched
        reached = change.target if before is None else (before + moved) & MASK64
        return touched == change.touched and reached == change.target


class _NeedsBaseError(Exception):
    """A delta cannot be decoded without weights that are not at hand."""


class _NoLanes:
    """Decodes nothing: the weights that it takes are not known."""

    def decode(self, parts: Sequence[Part]) -> NoReturn:
        raise _NeedsBaseError


def replay(
    schema: Schema,
    manifests: Iterable[Manifest],
    changes: Changes,
    base: Mapping[str, Unsigned] | None = None,
    *,
    n_threads: int = 1,
) -> Iterator[tuple[Manifest, Replica]]:
    """Go through a chain from an anchor on, and prove every version on the way.

    A merged delta whose base the replica stands at is applied like any delta. One that leads to
    where the replica stands already, as in a log read record by record, is checked without being
    applied: its steps are taken back from the bits at hand, and must give what it says of its
    base. Where it is coded by `hazard`, which takes the weights of its base, it is left out.

    Args:
        manifests: in order, the first that is no fence being an anchor.
        changes: fetches a manifest's blobs and decodes them.
        base: raw bits by name for anchors by reference; not modified. Without it the versions
            after such an anchor are proven as far as fingerprints go.
        n_threads: threads to decode with.

    Yields:
        Each anchor and delta that was proven, with the one replica that then stands at its version.

    Raises:
        BaseMismatchError, FormatError: a version is not what its manifest says.
        SettingsError: the base checkpoint is needed.
    """
    replica: Replica | None = None
    reference: Reference | None = None
    passed = Passed()
    for manifest in manifests:
        if manifest.kind == "fence" or manifest.target is None:
            continue
        if manifest.kind == "anchor":
            replica = _from_anchor(schema, manifest, changes, base, replica)
            reference = manifest.reference
        elif replica is None:
            raise AssertionError("a chain begins with an anchor")
        elif manifest.kind == "merged" and passed.newest == manifest.target:
            if not passed.check(manifest, replica, changes(manifest, _NoLanes())):
                continue
        else:
            _apply(replica, changes(manifest, replica.lanes(n_threads)), reference)
        if replica.root != manifest.target.root:
            raise FormatError(
                "the fingerprints reached are not the version's",
                number=manifest.target.number,
                expected=manifest.target.root,
                actual=replica.root,
            )
        passed.note(manifest.target, replica)
        yield manifest, replica


def _apply(replica: Replica, changes: Iterator[Change], reference: Reference | None) -> None:
    try:
        for change in changes:
            replica.apply(change)
    except _NeedsBaseError:
        assert reference is not None, "only after an anchor by reference are weights unknown"
        raise SettingsError(
            "the channel refers to a public checkpoint; give it as the base",
            repository=reference.repository,
            revision=reference.revision,
        ) from None


class Passed:
    """Fingerprints of the newest versions of a replay, to check merged deltas by."""

    KEPT = 64
    """Versions; a merged delta from further back is checked by what it says itself."""

    def __init__(self) -> None:
        self._fingerprints: dict[Version, npt.NDArray[np.uint64]] = {}
        self.newest: Version | None = None

    def note(self, version: Version, replica: Replica) -> None:
        """Take note of where the replica stands."""
        self.newest = version
        self._fingerprints[version] = np.array(replica.fingerprints, np.uint64)
        while len(self._fingerprints) > self.KEPT:
            del self._fingerprints[next(iter(self._fingerprints))]

    def check(self, manifest: Manifest, replica: Replica, changes: Iterator[Change]) -> bool:
        """Check a merged delta to the version at which the replica stands.

        Returns:
            Whether it could be checked.

        Raises:
            FormatError: from its base it leads elsewhere.
        """
        assert manifest.base is not None
        base = self._fingerprints.get(manifest.base)
        left = set(range(len(replica.schema)))
        try:
            for change in changes:
                left.discard(change.tensor)
                before = None if base is None else int(base[change.tensor])
                if not replica.is_reached_by(change, before):
                    raise _astray(manifest, replica.schema, change.tensor)
        except _NeedsBaseError:
            return False
        if base is not None:
            for tensor in left:
                if int(base[tensor]) != replica.fingerprints[tensor]:
                    raise _astray(manifest, replica.schema, tensor)
        return True


def _astray(manifest: Manifest, schema: Schema, tensor: int) -> FormatError:
    name = schema.tensors[tensor].name
    return FormatError("a merged delta does not lead here", seq=manifest.seq, name=name)


def _from_anchor(
    schema: Schema,
    manifest: Manifest,
    changes: Changes,
    base: Mapping[str, Unsigned] | None,
    before: Replica | None,
) -> Replica:
    """The anchor's version. One that restates a version leaves that version's bits in place."""
    fingerprints: list[int] = []
    arrays: list[Unsigned] = []
    target = manifest.target
    stands = before is not None and target is not None and before.root == target.root
    for change in changes(manifest, None):
        spec, bits = schema.tensors[change.tensor], change.bits
        if manifest.reference is not None and base is not None:
            bits = _base_bits(base, spec.name, UNSIGNED[spec.itemsize], spec.shape)
        if bits is not None:
            if fingerprint(bits, spec) != change.target:
                if change.bits is None:
                    raise BaseMismatchError("not the channel's base checkpoint", name=spec.name)
                raise FormatError("a tensor's bits are not its fingerprint's", name=spec.name)
            if stands and before is not None and before.proven:
                bits = before.bits[change.tensor]
            else:
                bits = np.array(bits, copy=True)
            arrays.append(bits)
        fingerprints.append(change.target)
    if not arrays and stands and before is not None:
        arrays = before.bits
    return Replica(schema, fingerprints, arrays)


def _base_bits(
    base: Mapping[str, Unsigned], name: str, dtype: type[np.unsignedinteger], shape: tuple[int, ...]
) -> Unsigned:
    bits = base.get(name)
    if bits is None:
        raise ModelMismatchError("the base checkpoint lacks a tensor", name=name)
    if bits.dtype != dtype or bits.shape != shape:
        raise ModelMismatchError(
            "a base tensor's type or shape is not the channel's",
            name=name,
            expected=[np.dtype(dtype).name, list(shape)],
            actual=[bits.dtype.name, list(bits.shape)],
        )
    return np.ascontiguousarray(bits).reshape(-1)
