"""The fewest bytes that lead from the weights at hand to a published version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from vllm_delta.errors import ChainError, SettingsError
from vllm_delta.format import Manifest, Version


def cheapest(
    manifests: Iterable[Manifest],
    goal: Version,
    resident: Version | None,
    reference_bytes: int | None,
) -> list[Manifest]:
    """Deltas from `resident` to `goal`, single or merged, or an anchor and deltas from there.

    Args:
        manifests: the verified chain, the newest first, as far back as blobs are kept; read no
            further than a cheaper way can lie.
        reference_bytes: what an anchor by reference counts; None where it is no way.

    Raises:
        ChainError: nothing leads to `goal`.
        SettingsError: nothing but an anchor by reference does, and that is no way.
    """
    ways = _Ways(goal)
    best: list[Manifest] | None = None
    least = math.inf
    refused: Manifest | None = None
    for manifest in _leading_to(goal, manifests):
        start: list[Manifest] = []
        if manifest.kind == "anchor":
            start, cost = [manifest], ways.here + _whole(manifest, reference_bytes)
            refused = manifest if cost == math.inf else refused
        else:
            ways.take(manifest)
            cost = ways.here if ways.at == resident else math.inf
        if cost < least:
            best, least = [*start, *ways.onward(ways.at)], cost
        if ways.floor >= least:
            break
    if resident is not None and ways.cost(resident) < least:
        return ways.onward(resident)
    if best is None:
        raise _no_way(goal, refused)
    return best


def within_reach(manifests: Iterable[Manifest], reference_bytes: int) -> Iterator[Manifest]:
    """The newest part of a chain: as far back as deltas to its end may cost less than an anchor.

    Args:
        manifests: the verified chain, the newest first; read no further than that.
        reference_bytes: what an anchor by reference counts.
    """
    ways: _Ways | None = None
    least = math.inf
    for manifest in manifests:
        yield manifest
        if manifest.target is None:
            continue
        ways = ways or _Ways(manifest.target)
        if manifest.target != ways.at:
            ways.begin_anew(manifest.target)
        if manifest.kind == "anchor":
            least = min(least, ways.here + _whole(manifest, reference_bytes))
        elif manifest.kind != "fence":
            ways.take(manifest)
        if ways.floor >= least:
            return


def _whole(manifest: Manifest, reference_bytes: int | None) -> float:
    """What an anchor counts; infinite where it is no way."""
    if manifest.reference is None:
        return manifest.payload_bytes
    return math.inf if reference_bytes is None else reference_bytes


class _Ways:
    """The fewest bytes of deltas from each version to a goal, found by going back from it.

    All records that lead on from a version come after those that lead to it, so once a version is
    reached, the newest record first, the fewest bytes from there are known.

    Attributes:
        at: the version reached.
    """

    def __init__(self, goal: Version) -> None:
        self.at = goal
        self._goal = goal
        self._costs = {goal: 0}
        self._next: dict[Version, Manifest] = {}

    @property
    def here(self) -> int:
        """The fewest bytes from the version reached."""
        return self._costs[self.at]

    @property
    def floor(self) -> int:
        """From no version still to be reached does it take fewer."""
        return min(self._costs.values())

    def cost(self, version: Version) -> float:
        """The fewest bytes from a version; infinite where no way is known."""
        return self._costs.get(version, math.inf)

    def take(self, manifest: Manifest) -> None:
        """Go back over a delta to the version reached, or learn of a merged one to it."""
        base = manifest.base
        assert base is not None
        cost = self.here + manifest.payload_bytes
        if cost < self.cost(base):
            self._costs[base], self._next[base] = cost, manifest
        if manifest.kind == "delta":
            self._reach(base)

    def begin_anew(self, version: Version) -> None:
        """Go on at a version from which nothing leads to the goal, as if its bytes were none."""
        self._costs[version] = self.floor
        self._reach(version)

    def _reach(self, version: Version) -> None:
        """Forget the costs of versions that cannot be reached any more: numbers only fall."""
        self.at = version
        number = version.number
        self._costs = {v: c for v, c in self._costs.items() if v.number < number or v == version}

    def onward(self, version: Version) -> list[Manifest]:
        """The way from a version to the goal."""
        path = []
        while version != self._goal:
            manifest = self._next[version]
            assert manifest.target is not None
            path.append(manifest)
            version = manifest.target
        return path


def _leading_to(goal: Version, manifests: Iterable[Manifest]) -> Iterable[Manifest]:
    """The anchors and all deltas on the way to `goal`, the newest first."""
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
