"""One tensor's part of a delta or an anchor, decoded."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta.codec.order import Signed, Unsigned


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to one tensor.

    Attributes:
        tensor: its place in the schema.
        indices: int32 or int64[nnz], strictly ascending flat checkpoint indices; None when the
            whole tensor is replaced or (in a reference) nothing but its fingerprint is known.
        steps: signed[nnz] of the type's width, never 0; None without `indices`.
        bits: unsigned[numel], the new raw bits, when the whole tensor is replaced.
        touched: in a delta, the fingerprint of the base restricted to the elements that change
            (the whole tensor's when it is replaced); 0 elsewhere.
        target: fingerprint of the whole tensor afterwards.
    """

    tensor: int
    indices: Signed | None
    steps: Signed | None
    bits: Unsigned | None
    touched: int
    target: int

    @property
    def nnz(self) -> int:
        """How many elements the change names (all of them when the tensor is replaced)."""
        if self.indices is not None:
            return int(self.indices.size)
        return 0 if self.bits is None else int(self.bits.size)
