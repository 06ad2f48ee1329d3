"""A trainer that keeps its channel small, by a clock that tests turn."""

from __future__ import annotations

from tests.nets import BF16, Net, assert_same, expected, nudge
from vllm_delta.channel import NO_KEYS, Log
from vllm_delta.commit import PublisherSettings
from vllm_delta.events import Collected, Published
from vllm_delta.publisher import Publisher
from vllm_delta.subscriber import Subscriber
from vllm_delta.testing import MemoryStore

HOUR = 3600.0
DAY = 24 * HOUR


class Clock:
    """Hands that tests turn; `timer` only goes forward."""

    def __init__(self) -> None:
        self.now = 1e9
        self.timer = 0.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds
        self.timer += seconds


class Run:
    """A trainer's life on a channel, and what each version holds."""

    def __init__(self, store=None, clock=None, net=None, keys=NO_KEYS, **settings) -> None:
        self.store = MemoryStore() if store is None else store
        self.clock = clock or Clock()
        self.net = net or Net()
        self.events: list = []
        self.truth: dict[str, dict] = {}
        settings = {"strides": (), "anchor_ratio": 1e9} | settings
        self.publisher = Publisher(
            self.store,
            self.net,
            dtype=BF16,
            settings=PublisherSettings(**settings),
            keys=keys,
            hooks=[self.events.append],
            clock=self.clock,
            timer=lambda: self.clock.timer,
        )
        self.note()

    def note(self) -> None:
        self.truth[self.publisher.version.root] = expected(self.net)

    def publish(self, n: int = 3) -> Published:
        nudge(self.net, n)
        published = self.publisher.publish()
        self.note()
        return published

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events if isinstance(e, Published)]

    def tail(self):
        return Log(self.store).tail().manifest

    def n_collected(self) -> int:
        return sum(e.n_objects for e in self.events if isinstance(e, Collected))


def assert_all_versions_stand(store, truth, keys=NO_KEYS) -> int:
    """Every version that a reader can name can be had, bit for bit."""
    subscriber = Subscriber(store, keys=keys)
    subscriber.refresh()
    roots = {m.target for m in subscriber._held() if m.target is not None}
    for version in roots:
        assert_same(subscriber.materialise(version.number), truth[version.root])
    return len(roots)
