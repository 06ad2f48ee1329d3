from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.channel.toy import (
    START,
    append_delta,
    begin,
    fetched,
    reseal,
)
from vllm_delta.channel import Log
from vllm_delta.errors import (
    ChainError,
    DeltaError,
    DigestError,
    FormatError,
    UnsupportedError,
)
from vllm_delta.format import (
    MAX_BLOB_BYTES,
    digest,
    manifest_key,
    seal,
)
from vllm_delta.testing import MemoryStore


def set_field(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.__setitem__(name, value)


OTHER = {"number": 1, "root": "9" * 64}
SCHEMA = {"sha256": "9" * 64, "bytes": 13, "shard": 0}
# Record 4 is a delta from version 1 to 2 in epoch 1, its channel's last; anchor 2, low 1.
LIES: dict[str, tuple[Callable[[dict[str, Any]], object], type[DeltaError], str]] = {
    "channel": (set_field("channel", "9" * 32), ChainError, "'channel'"),
    "channel, malformed": (set_field("channel", "9"), FormatError, "channel"),
    "seq before": (set_field("seq", 3), ChainError, "another's place"),
    "seq after": (set_field("seq", 5), ChainError, "another's place"),
    "seq, huge": (set_field("seq", 10**12), FormatError, "seq"),
    "seq, a fraction": (set_field("seq", 4.0), FormatError, "seq"),
    "epoch lower": (set_field("epoch", 0), FormatError, "epoch"),
    "epoch higher": (set_field("epoch", 2), ChainError, "'epoch'"),
    "parent": (set_field("parent", "9" * 64), ChainError, "'parent'"),
    "no parent": (set_field("parent", "0" * 64), FormatError, "parent"),
    "kind fence": (set_field("kind", "fence"), FormatError, "kind"),
    "kind anchor": (set_field("kind", "anchor"), FormatError, "kind"),
    "kind, unknown": (set_field("kind", "merge"), UnsupportedError, "kind"),
    "base root": (set_field("base", OTHER), ChainError, "'base'"),
    "base number": (set_field("base", {"number": 0, "root": "9" * 64}), FormatError, "kind"),
    "no base": (set_field("base", None), FormatError, "kind"),
    "target number": (set_field("target", OTHER), FormatError, "kind"),
    "no target": (set_field("target", None), FormatError, "kind"),
    "anchor": (set_field("anchor", 3), ChainError, "'anchor'"),
    "anchor, its own": (set_field("anchor", 4), FormatError, "kind"),
    "anchor ahead": (set_field("anchor", 5), FormatError, "anchor"),
    "no anchor": (set_field("anchor", None), FormatError, "kind"),
    "low past the anchor": (set_field("low", 3), ChainError, "'low'"),
    "low ahead": (set_field("low", 5), FormatError, "low"),
    "low, none": (set_field("low", 0), FormatError, "low"),
    "schema": (set_field("schema", SCHEMA), ChainError, "'schema'"),
    "no schema": (set_field("schema", None), FormatError, "kind"),
    "no blobs": (set_field("blobs", []), FormatError, "kind"),
    "blob, huge": (
        set_field("blobs", [{"sha256": "9" * 64, "bytes": MAX_BLOB_BYTES + 1, "shard": 0}]),
        FormatError,
        "blob bytes",
    ),
    "blob, a path": (
        set_field("blobs", [{"sha256": "../" * 21 + "x", "bytes": 1, "shard": 0}]),
        FormatError,
        "sha256",
    ),
    "reference": (
        set_field("reference", {"repository": "a", "revision": "b"}), FormatError, "kind"
    ),
    "writer": (set_field("writer", "somebody else"), ChainError, "'writer'"),
    "time": (set_field("time", "now"), FormatError, "time"),
    "format": (set_field("format", 2), UnsupportedError, "newer"),
    "a field more": (set_field("more", 1), FormatError, "fields"),
    "a field less": (lambda fields: fields.pop("low"), FormatError, "fields"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_each_field_that_lies_is_a_named_error(lie: str) -> None:
    store = MemoryStore()
    begin(Log(store), 2)
    change, kind, words = LIES[lie]
    reseal(store, 4, change)
    reader = Log(store)
    previous = list(reader.read_chain(1, 3))[-1]
    with pytest.raises(kind, match=words) as caught:
        reader.read_next(previous)
    assert type(caught.value) is kind
    assert manifest_key(4) in str(caught.value) or caught.value.seq == 4, "the record is not named"
    with pytest.raises(kind, match=words):
        list(reader.read_chain(2, 4))


def test_resealing_without_a_lie_is_accepted() -> None:
    """The control of the test above: it is the lie that is refused, not the new envelope."""
    store = MemoryStore()
    begin(Log(store), 2)
    reseal(store, 4, lambda fields: None)
    assert [r.seq for r in Log(store).read_chain(1, 4)] == [1, 2, 3, 4]


def test_any_change_of_an_earlier_record_breaks_the_chain_after_it() -> None:
    store = MemoryStore()
    begin(Log(store), 3)
    reseal(store, 3, set_field("time", 1.0))
    reader = Log(store)
    with pytest.raises(ChainError, match="'parent'") as caught:
        list(reader.read_chain(1, 5))
    assert caught.value.seq == 4
    assert caught.value.action == "reseed"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", FormatError),
        (b"{}", FormatError),
        (b"\0" * 100, FormatError),
        (b"[" * 100_000, FormatError),
        (b"x" * (3 << 20), DigestError),
        (seal(b"{}"), FormatError),
        (b'{"payload":"","payloadType":"other","signatures":[]}', UnsupportedError),
    ],
    ids=["empty", "no fields", "zeros", "deep", "oversized", "empty payload", "other payload"],
)
def test_what_is_not_a_manifest_is_a_named_error(data: bytes, kind: type[DeltaError]) -> None:
    store = MemoryStore()
    log = Log(store)
    begin(log, 2)
    store.put(manifest_key(4), data)
    with pytest.raises(kind, match=manifest_key(4)):
        Log(store).read(4)
    with pytest.raises(kind):
        Log(store).tail()
    with pytest.raises(ChainError, match="gone"):
        append_delta(log, START, 0, 1)


def test_a_truncated_or_flipped_manifest_is_never_taken() -> None:
    store = MemoryStore()
    log = Log(store)
    begin(log, 2)
    whole = fetched(store, manifest_key(4))
    previous = log.read(3)
    for cut in range(0, len(whole), 7):
        store.put(manifest_key(4), whole[:cut])
        with pytest.raises(DeltaError):
            log.read_next(previous)
    for place in range(0, len(whole), 3):
        store.put(manifest_key(4), whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        record = None
        try:
            record = log.read_next(previous)
        except DeltaError:
            continue
        # Flips in what nothing can vouch for but a signature: the record's own new content.
        assert record.digest != digest(whole)
    store.put(manifest_key(4), whole)
    assert log.read_next(previous) == log.position
