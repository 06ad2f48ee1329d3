"""The fewest bytes that lead from the weights at hand to a published version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_delta.errors import ChainError, SettingsError
from vllm_delta.format import Manifest, Version


def cheapest(
    manifests: Iterable[Manifest],
    goal: Version,
    resident: Version | None,
    reference_bytes: int | None,
) -> list[Manifest]:
    """Deltas from `resident` to `goal`, or an anchor and deltas from there, whichever is smaller.

    Args:
        manifests: the verified chain, the newest first, as far back as blobs are kept; read no
            further than a cheaper way can lie.
        reference_bytes: what an anchor by reference counts; None where it is no way.

    Raises:
        ChainError: nothing leads to `goal`.
        SettingsError: nothing but an anchor by reference does, and that is no way.
    """
    best: list[Manifest] | None = None
    least = cost = 0
    path: list[Manifest] = []
    refused: Manifest | None = None
    for manifest in _leading_to(goal, manifests):
        if best is not None and cost >= least:
            break
        if manifest.kind == "delta":
            path.insert(0, manifest)
            cost += manifest.payload_bytes
            if manifest.base == resident and (best is None or cost < least):
                return path
            continue
        whole = manifest.payload_bytes if manifest.reference is None else reference_bytes
        if whole is None:
            refused = manifest
        elif best is None or cost + whole < least:
            best, least = [manifest, *path], cost + whole
    if best is None:
        raise _no_way(goal, refused)
    return best


def within_reach(manifests: Iterable[Manifest], reference_bytes: int) -> Iterator[Manifest]:
    """The newest part of a chain: as far back as deltas to its end may cost less than an anchor.

    Args:
        manifests: the verified chain, the newest first; read no further than that.
        reference_bytes: what an anchor by reference counts.
    """
    least: int | None = None
    cost = 0
    for manifest in manifests:
        yield manifest
        if manifest.kind == "delta":
            cost += manifest.payload_bytes
        elif manifest.kind == "anchor":
            whole = manifest.payload_bytes if manifest.reference is None else reference_bytes
            least = cost + whole if least is None else min(least, cost + whole)
        if least is not None and cost >= least:
            return


def _leading_to(goal: Version, manifests: Iterable[Manifest]) -> Iterable[Manifest]:
    """The anchors and deltas on the way to `goal`, the newest first."""
    at: Version | None = goal
    begun = False
    for manifest in manifests:
        if manifest.target != at:
            if begun:
                return  # the versions begin anew here: nothing before leads to the goal
            continue
        begun = True
        if manifest.kind != "fence":
            yield manifest
        if manifest.kind == "delta":
            at = manifest.base


def _no_way(goal: Version, refused: Manifest | None) -> ChainError | SettingsError:
    if refused is None or refused.reference is None:
        return ChainError("no anchor leads to the version any more", number=goal.number)
    return SettingsError(
        "the channel refers to a public checkpoint; give it as the base",
        repository=refused.reference.repository,
        revision=refused.reference.revision,
    )
