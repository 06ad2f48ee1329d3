"""What the loopback Hub holds: buckets, their files, what happened to them, and tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal

from vllm_delta.testing.hub_faults import Counts, HubFaults, RateLimits
from vllm_delta.testing.hub_xet import Cas

Role = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """How the loopback Hub behaves when nothing goes wrong.

    Args:
        limits: requests a window by class, `api` and `resolvers`; no limit when left out.
        window_s: length of such a window.
        token_life_s: how long a token for the CAS is good. Clients renew half a minute early.
        page: entries in one page of a listing.
        reconstruction: newest version of that route of the CAS that is served.
        cdn: whether reads are answered by a redirect to another origin.
        ping_s: how often a stream of events is pinged.
        coalesce_s: how long changes are gathered before followers are told.
        replay: how many groups of changes a follower can catch up with.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    window_s: float = 300.0
    token_life_s: float = 3600.0
    page: int = 1000
    reconstruction: Literal["v1", "v2"] = "v2"
    cdn: bool = False
    ping_s: float = 30.0
    coalesce_s: float = 0.0
    replay: int = 1000


@dataclass(frozen=True)
class Entry:
    """A file of a bucket. `order` grows with every write to the Hub."""

    name: str
    size: int
    mtime: str
    uploaded: str
    content_type: str | None
    order: int

    def facts(self, path: str) -> dict[str, Any]:
        facts = {"type": "file", "path": path, "size": self.size, "xetHash": self.name}
        times = {"mtime": self.mtime, "uploadedAt": self.uploaded}
        kind = {} if self.content_type is None else {"contentType": self.content_type}
        return facts | times | kind


@dataclass(frozen=True)
class Happening:
    """A group of changes as followers are told of it."""

    cursor: int
    at: str
    changes: list[dict[str, Any]]


@dataclass
class Bucket:
    id: str
    private: bool
    created: str = field(default_factory=lambda: iso_time())
    updated: str = field(default_factory=lambda: iso_time())
    files: dict[str, Entry] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    cursor: int = 0
    wakers: set[asyncio.Event] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        return {
            "_id": self.id,
            "id": self.id,
            "private": self.private,
            "createdAt": self.created,
            "updatedAt": self.updated,
            "size": sum(entry.size for entry in self.files.values()),
            "totalFiles": len(self.files),
        }

    def seen(self, n_unseen: int = 0) -> dict[str, Entry]:
        """Its files but the newest few."""
        if not n_unseen:
            return self.files
        newest = set(sorted(self.files, key=lambda path: self.files[path].order)[-n_unseen:])
        return {path: entry for path, entry in self.files.items() if path not in newest}

    def happened(self, changes: list[dict[str, Any]], *, told: bool, replay: int) -> None:
        self.updated = iso_time()
        if not changes or not told:
            return
        self.cursor += 1
        self.happenings.append(Happening(self.cursor, self.updated, changes))
        del self.happenings[:-replay]
        for waker in self.wakers:
            waker.set()


@dataclass
class HubState:
    """Everything the loopback Hub holds. Used by its own thread, but for faults and counts."""

    settings: HubSettings
    token: str = field(default_factory=lambda: f"hf_write_{secrets.token_hex(8)}")
    read_token: str = field(default_factory=lambda: f"hf_read_{secrets.token_hex(8)}")
    faults: HubFaults = field(default_factory=HubFaults)
    counts: Counts = field(default_factory=Counts)
    cas: Cas = field(default_factory=Cas)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    endpoint: str = ""
    cdn_endpoint: str = ""
    # Clients keep what they once uploaded by the CAS's address: no two Hubs may share one.
    cas_path: str = field(default_factory=lambda: f"/cas/{secrets.token_hex(8)}")
    cas_tokens: dict[str, tuple[Role, str, float]] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.limits = RateLimits(self.settings.limits, self.settings.window_s)
        self._orders = count()

    def role(self, token: str | None) -> Role | None:
        roles: dict[str | None, Role] = {self.token: "write", self.read_token: "read"}
        return roles.get(token)

    def issue_cas_token(self, role: Role, bucket: str, *, expired: bool = False) -> tuple[str, int]:
        """A token for the CAS and when it ends, in whole Unix seconds."""
        token = f"xet-{role}-{secrets.token_hex(8)}"
        end = int(time.time() + self.settings.token_life_s)
        self.cas_tokens[token] = (role, bucket, 0.0 if expired else end)
        return token, end

    def cas_role(self, token: str | None) -> Role | None:
        role, _, end = self.cas_tokens.get(token or "", (None, "", 0.0))
        return role if time.time() < end else None

    def write_file(
        self, bucket: Bucket, path: str, name: str, *, mtime_ms: float | None = None,
        content_type: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Have a path of a bucket be a stored file. Returns the change, as followers see it."""
        size = self.cas.size(name)
        if size is None:
            raise KeyError(name)
        verb = "update" if path in bucket.files else "add"
        entry = Entry(
            name, size, iso_time(mtime_ms), iso_time(), content_type, next(self._orders)
        )  # fmt: skip
        bucket.files[path] = entry
        facts = entry.facts(path)
        return {"op": verb, **{key: facts[key] for key in facts if key != "type"}}

    def tell(
        self, bucket: Bucket, changes: Iterable[dict[str, Any]], *, told: bool = True
    ) -> None:  # fmt: skip
        bucket.happened(list(changes), told=told, replay=self.settings.replay)


def iso_time(unix_ms: float | None = None) -> str:
    when = time.time() if unix_ms is None else unix_ms / 1000
    text = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
