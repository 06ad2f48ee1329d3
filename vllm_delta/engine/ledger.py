"""What is resident: the version, its fingerprints, and the judgement of the next delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_delta.errors import BaseMismatchError, EngineError
from vllm_delta.fingerprint import root
from vllm_delta.format import Schema, Version
from vllm_delta.layout import Coverage, RankLayout, judge


class Ledger:
    """The checkpoint's fingerprints as they are in the engine, over all ranks.

    Args:
        schema: the channel's tensors.
        layouts: one per rank, in the order of the ranks' answers.

    Raises:
        LayoutError: the ranks do not hold every element exactly once.
    """

    def __init__(self, schema: Schema, layouts: Sequence[RankLayout]) -> None:
        self.schema = schema
        self.coverage = Coverage(schema, layouts)
        self.version: Version | None = None
        self.fingerprints: list[int] = []

    def measure(self, scans: Sequence[Mapping[int, int]]) -> list[int]:
        """Adds the ranks' full scans up to one fingerprint per tensor."""
        totals = self.coverage.total(scans)
        return [totals.get(place, 0) for place in range(len(self.schema))]

    def root(self, fingerprints: Sequence[int]) -> str:
        """The root of a version with these fingerprints."""
        return root(self.schema, fingerprints)

    def judge(self, answers: Sequence[Mapping[str, Any]], target: Version) -> list[int]:
        """Decides on a delta from the ranks' answers to ``delta_check``.

        Returns:
            The fingerprints that the delta leads to.

        Raises:
            BaseMismatchError: it does not fit what is resident.
        """
        entries = answers[0]["entries"]
        if any(answer["entries"] != entries for answer in answers):
            raise EngineError("ranks decoded different deltas", version=str(target))
        return judge(
            self.schema,
            self.fingerprints,
            [(tensor, touched, after) for tensor, touched, after in entries],
            self.coverage.total([answer["touched"] for answer in answers]),
            self.coverage.total([answer["change"] for answer in answers]),
            target.root,
        )

    def adopt(self, version: Version | None, fingerprints: Sequence[int]) -> None:
        """Takes a proven state as the resident one."""
        self.version = version
        self.fingerprints = list(fingerprints)

    def compare(self, fingerprints: Sequence[int]) -> None:
        """Compares a full scan with what should be resident.

        Raises:
            BaseMismatchError: a weight changed by itself; names the first tensor.
        """
        pairs = zip(self.schema.tensors, self.fingerprints, fingerprints, strict=True)
        bad = [spec.name for spec, expected, found in pairs if expected != found]
        if bad:
            raise BaseMismatchError(
                "resident weights are not the version's", name=bad[0], n_others=len(bad) - 1
            )
