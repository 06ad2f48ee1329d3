"""How another process has the loopback Hub do wrong: the routes below `/_control/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vllm_delta.testing.hub_events import Events
from vllm_delta.testing.hub_state import HubState

Action = Callable[[dict[str, Any]], Any]


class Control:
    """Each action takes and gives JSON by POST. `LoopbackHub` has the same, in this process."""

    def __init__(self, state: HubState, events: Events) -> None:
        self.state = state
        self.events = events

    def routes(self) -> list[web.RouteDef]:
        actions: dict[str, Action] = {
            "counts": lambda facts: self.state.counts.read(),
            "reset_counts": lambda facts: self.state.counts.reset(),
            "fault": lambda facts: self.state.faults.add(**facts) and None,
            "clear_faults": lambda facts: self.state.faults.clear(),
            "release": lambda facts: self.state.faults.release(facts.get("n_requests")),
            "limits": lambda facts: self.set_limits(facts),
            "expire_tokens": lambda facts: self.expire_tokens(),
            "end_streams": lambda facts: self.events.end_streams(),
            "damage": lambda facts: self.damage(**facts),
        }
        return [web.post(f"/_control/{name}", _handler(act)) for name, act in actions.items()]

    def set_limits(self, limits: dict[str, int]) -> None:
        self.state.limits.limits = dict(limits)

    def expire_tokens(self) -> None:
        """Have every token for the CAS given out so far be good for nothing."""
        self.state.cas_tokens.clear()

    def damage(self, bucket: str, path: str, place: int = 0) -> None:
        """Flip a bit of what is stored for a file."""
        self.state.cas.damage(self.state.buckets[bucket].files[path].name, place)


def _handler(action: Action) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        facts = await request.json() if request.can_read_body else {}
        return web.json_response(action(facts))

    return handle
