"""The fewest bytes that lead from the weights at hand to a published version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from vllm_delta.errors import ChainError, SettingsError
from vllm_delta.format import Manifest, Version


def cheapest(
    manifests: Iterable[Manifest],
    goal: Version,
    resident: Version | None,
    reference_bytes: int | None,
    *,
    may_take: Callable[[Manifest], bool] = lambda manifest: True,
) -> list[Manifest]:
    """Deltas from `resident` to `goal`, single or merged, or an anchor and deltas from there.

    Args:
        manifests: the verified chain, the newest first, as far back as blobs are kept; read no
            further than a cheaper way can lie.
        reference_bytes: what an anchor by reference counts; None where it is no way.
        may_take: whether a record may be on the way.

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
        takes = may_take(manifest)
        if manifest.kind == "anchor":
            whole = _whole(manifest, reference_bytes)
            start, cost = [manifest], ways.here + whole if takes else math.inf
            refused = manifest if takes and whole == math.inf else refused
        else:
            ways.take(manifest, usable=takes)
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


def peak_bytes(manifest: Manifest) -> int:
    """What of a record is in memory at once: all blobs of a delta, one by one those of an anchor.

    Decoding takes more, about in proportion.
    """
    if manifest.kind == "anchor":
        return max(ref.n_bytes for ref in manifest.blobs)
    return manifest.payload_bytes


def cheapest_within(
    at_most_bytes: int,
    find: Callable[[float], list[Manifest]],
    held: Callable[[], Iterable[Manifest]],
) -> list[Manifest]:
    """The cheapest way of which no record takes more memory than `at_most_bytes`.

    Args:
        find: gives the cheapest way within so many bytes, or raises ChainError.
        held: gives all records; asked only to say what would be needed.

    Raises:
        SettingsError: no way fits; it names what the one that needs least does need.
        ChainError: there is no way at all.
    """
    try:
        return find(at_most_bytes)
    except ChainError:
        find(math.inf)
    needed = sorted({peak_bytes(m) for m in held() if m.kind != "fence"})
    low, high = 0, len(needed) - 1
    while low < high:  # more memory never takes a way away
        middle = (low + high) // 2
        try:
            find(needed[middle])
            high = middle
        except ChainError:
            low = middle + 1
    raise SettingsError(
        "no way to the version fits into the memory allowed for a record",
        at_most_bytes=at_most_bytes,
        needed_bytes=needed[low],
    )


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
        self._costs: dict[Version, float] = {goal: 0}
        self._next: dict[Version, Manifest] = {}

    @property
    def here(self) -> float:
        """The fewest bytes from the version reached."""
        return self.cost(self.at)

    @property
    def floor(self) -> float:
        """From no version still to be reached does it take fewer."""
        return min(self._costs.values(), default=math.inf)

    def cost(self, version: Version) -> float:
        """The fewest bytes from a version; infinite where no way is known."""
        return self._costs.get(version, math.inf)

    def take(self, manifest: Manifest, *, usable: bool = True) -> None:
        """Go back over a delta to the version reached, or learn of a merged one to it.

        Args:
            usable: whether it may be on a way; else it only tells which version was before.
        """
        base = manifest.base
        assert base is not None
        cost = self.here + manifest.payload_bytes if usable else math.inf
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
