"""Parsers of what a channel's store holds: intact inputs, and what each must make of any others.

A judge takes bytes, gives them to the real parser, and returns a verdict. It raises `WrongError`
where the parser took what it must refuse, or made something else of it than stands there.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from scripts._soak.deltas import Delta, delta
from scripts._soak.judge import judge_blob, same
from scripts._soak.subjects import Subject
from vllm_delta.channel import Keys
from vllm_delta.channel.chain import fence_after, parse_record
from vllm_delta.channel.contest import Contest
from vllm_delta.channel.keys import about_blob
from vllm_delta.channel.tail import read_head
from vllm_delta.codec import Change, Codec, decode, encode_anchor, encode_delta, encode_reference
from vllm_delta.codec.blob import BlobKind, build_blob, parse_blob
from vllm_delta.errors import DigestError
from vllm_delta.fingerprint import fingerprint
from vllm_delta.format import (
    MAX_MANIFEST_BYTES,
    MAX_SCHEMA_BYTES,
    BlobRef,
    Manifest,
    Reference,
    TensorSpec,
    Version,
    manifest_key,
    parse_manifest,
    parse_schema,
    seal,
    unseal,
)
from vllm_delta.testing import MemoryStore

REFUSED, SAME, FAITHFUL = "refused", "same", "faithful"
"""By a typed error; taken for what is intact; taken, and just what stands there."""

Wrap = Callable[[bytes], bytes]


class WrongError(Exception):
    """A parser took what it must refuse, or gave something else than stands there."""


def demand(true: object, said: str) -> None:
    if not true:
        raise WrongError(said)


@dataclass(frozen=True, eq=False)
class Parser:
    """A parser of bytes from outside.

    Attributes:
        inputs: intact ones, which its judge calls `same`.
        judge: raises what the parser raises.
        share: how often it is drawn, against 1.
        inner: what is damaged before something is put around it that nobody damaged.
        refusals: what beside a `DeltaError` is a refusal.
    """

    name: str
    inputs: Sequence[bytes]
    judge: Callable[[bytes], str]
    share: float = 1.0
    inner: Sequence[tuple[bytes, Wrap]] = ()
    refusals: tuple[type[Exception], ...] = ()


def pairs(data: bytes) -> Any:
    """JSON with an object as the list of its fields, so that none can stand twice unseen.

    A time is a float, however it is written.
    """

    def listed(fields: list[tuple[str, Any]]) -> Any:
        return [
            (name, float(value) if name == "time" else value)
            for name, value in sorted(fields, key=_name)
        ]

    return json.loads(data, object_pairs_hook=listed)


def _name(field: tuple[str, Any]) -> str:
    return field[0]


def formats(seed: int) -> Iterator[Parser]:
    """Of envelopes, manifests, schemas, `head`, intents, sealed objects and blobs."""
    draw = random.Random(f"{seed} parse")
    keys = Keys(
        signing=Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)),
        sealing=(draw.randbytes(32), draw.randbytes(32)),
    )
    manifests = _manifests(draw)
    yield from _records(manifests, keys)
    deltas = [_delta(seed)]
    yield _schema([one.schema.to_bytes() for one in deltas])
    yield _head()
    yield _intents()
    yield from _sealed(draw, keys)
    yield from _blobs(deltas[0])


def _manifests(draw: random.Random) -> list[Manifest]:
    """One of each kind."""

    def sha() -> str:
        return draw.randbytes(32).hex()

    def refs(n: int) -> tuple[BlobRef, ...]:
        return tuple(BlobRef(sha(), draw.randrange(1, 1 << 30), n) for n in range(n))

    first = replace(fence_after(None, "häger:12:ab", 1.7e9), channel=draw.randbytes(16).hex())
    versions = [Version(number, sha()) for number in range(6)]
    anchor = replace(
        first, seq=2, parent=sha(), kind="anchor", target=versions[0], anchor=2,
        schema=BlobRef(sha(), 700), blobs=refs(3), time=1.7e9 + 0.25,
    )  # fmt: skip
    by_reference = replace(anchor, reference=Reference("some/model", "main"), blobs=refs(1))
    one = replace(
        anchor, seq=7, kind="delta", base=versions[4], target=versions[5], blobs=refs(2), low=2
    )
    merged = replace(one, seq=8, kind="merged", base=versions[1])
    fence = replace(one, seq=9, epoch=2, kind="fence", base=versions[5], blobs=())
    return [first, anchor, by_reference, one, merged, fence]


def _records(manifests: Sequence[Manifest], keys: Keys) -> Iterator[Parser]:
    payloads = [manifest.to_bytes() for manifest in manifests]
    signed = {payload: seal(payload, keys.sign(payload)) for payload in payloads}
    bare = [seal(payload) for payload in payloads]
    seqs = {manifest.seq for manifest in manifests}

    def envelope(data: bytes) -> str:
        payload, signatures = unseal(data)
        demand(len(data) <= 2 * MAX_MANIFEST_BYTES, "larger than the limit")
        demand(seal(payload, signatures) == data, "another envelope has this content")
        return SAME if payload in signed else FAITHFUL

    def manifest(data: bytes) -> str:
        return _same_manifest(data, parse_manifest(data), payloads)

    def record(data: bytes, required: Keys) -> str:
        found = parse_record(data, _seq(data, seqs), required)
        demand(found.envelope == data, "another envelope than was given")
        payload, signatures = unseal(data)
        if required.required:
            theirs = [one["sig"] for one in signatures]
            mine = required.sign(payload)[0]["sig"]  # Ed25519 signs equal things equally
            demand(mine in theirs, "taken without a signature")
            demand(found.signer in required.signers, "signed by nobody who is trusted")
        return _same_manifest(payload, found.manifest, payloads)

    def signing(payload: bytes) -> bytes:
        return seal(payload, keys.sign(payload))

    yield Parser("envelope", [*bare, *signed.values()], envelope)
    yield Parser("manifest", payloads, manifest, 2)
    wrapped = [(payload, seal) for payload in payloads]
    yield Parser("record", bare, lambda data: record(data, Keys()), inner=wrapped)
    yield Parser(
        "signed_record",
        list(signed.values()),
        lambda data: record(data, keys),
        inner=[(payload, signing) for payload in payloads],
    )


def _seq(data: bytes, seqs: set[int]) -> int:
    """The place that a record is read from: the one it was written to, where one can tell."""
    with contextlib.suppress(Exception):
        found = json.loads(unseal(data)[0])["seq"]
        if type(found) is int and found in seqs:
            return found
    return min(seqs)


def _same_manifest(data: bytes, found: Manifest, payloads: Sequence[bytes]) -> str:
    demand(len(data) <= MAX_MANIFEST_BYTES, "larger than the limit")
    again = found.to_bytes()
    demand(parse_manifest(again) == found, "not read again as it was written")
    # Written in another way than the canonical one, it must still say the very same.
    demand(again == data or pairs(again) == pairs(data), "says something else than stands there")
    return SAME if data in payloads else FAITHFUL


def _schema(intact: list[bytes]) -> Parser:
    def judge(data: bytes) -> str:
        found = parse_schema(data)
        demand(len(data) <= MAX_SCHEMA_BYTES, "larger than the limit")
        demand(found.to_bytes() == data, "another schema's bytes")
        return SAME if data in intact else FAITHFUL

    return Parser("schema", intact, judge)


class Holding(MemoryStore):
    """Holds what it was given last under any key."""

    data = b""

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        if len(self.data) > max_bytes:
            raise DigestError("too large", key=key)
        return self.data

    def list(self, prefix: str) -> list[str]:
        return [f"{manifest_key(3)}.{'ab' * 16}"]


def _head() -> Parser:
    store, intact = Holding(), [b'{"seq":1}', b'{"seq":999999999999}', b'{"seq":120}']

    def judge(data: bytes) -> str:
        store.data = data
        found = read_head(store)
        demand(found is None or b'{"seq":%d}' % found == data, "another number")
        return REFUSED if found is None else SAME if data in intact else FAITHFUL

    return Parser("head", intact, judge)


def _intents() -> Parser:
    store, intact = Holding(), [b'{"epoch":1}', b'{"epoch":17}', b'{"epoch":9223372036854775807}']
    contest = Contest(store)

    def judge(data: bytes) -> str:
        store.data = data
        rival = contest.rival(3)
        demand(rival is None or b'{"epoch":%d}' % rival.epoch == data, "another epoch")
        return REFUSED if rival is None else SAME if data in intact else FAITHFUL

    return Parser("intent", intact, judge)


def _sealed(draw: random.Random, keys: Keys) -> Iterator[Parser]:
    about = about_blob(draw.randbytes(16).hex(), 7, 0)
    contents = [b"", b"x", draw.randbytes(700), draw.randbytes(70_000)]
    sealed = {keys.seal(content, about): content for content in contents}
    second = replace(keys, sealing=keys.sealing[1:])
    sealed |= {second.seal(content, about): content for content in contents[:3]}

    def judge(data: bytes) -> str:
        found = keys.open(data, about)
        demand(data in sealed and found == sealed[data], "opened, though it was altered")
        return SAME

    def unkeyed(data: bytes) -> str:
        demand(Keys().open(data, about) == data, "not as it is")
        return SAME if data in contents else FAITHFUL

    yield Parser("sealed", list(sealed), judge)
    yield Parser("sealed_without_key", contents[1:3], unkeyed, 0.2, [(b, bytes) for b in sealed])


CODECS: tuple[Codec, ...] = ("gap", "hazard")
_SPECS = (
    TensorSpec("a.counts", "I32", (7,)),
    TensorSpec("b.matrix", "BF16", (24, 30)),
    TensorSpec("c.f16", "F16", (11, 10)),
    TensorSpec("d.f8", "F8_E4M3", (30,)),
    TensorSpec("ä.scale", "F32", ()),
)


def _delta(seed: int) -> Delta:
    return delta(_SPECS, [0.0, 0.6, 0.6, 0.3, 3.0], seed)


def _blobs(one: Delta) -> Iterator[Parser]:
    """Containers, and what codecs make of them; `scripts/soak codec` damages many more of these."""
    schema = one.schema
    blobs = {
        codec: b"".join(encode_delta(schema, one.changes, codec=codec, base=one.bits))
        for codec in CODECS
    }
    whole = [
        Change(place, None, None, bits, 0, fingerprint(bits, spec))
        for place, (spec, bits) in enumerate(zip(schema.tensors, one.target, strict=True))
    ]
    anchor = b"".join(encode_anchor(schema, whole))
    reference = encode_reference(schema, [change.target for change in whole])

    def container(kind: BlobKind, intact: list[bytes]) -> Parser:
        def judge(data: bytes) -> str:
            found = parse_blob(data, schema, kind)
            sections = {tag: bytes(part) for tag, part in found.sections.items()}
            again = build_blob(kind, schema, found.entries, sections)
            demand(again == data, "other bytes hold the same")
            return SAME if data in intact else FAITHFUL

        return Parser(f"{kind}_container", intact, judge, 0.5)

    yield container("delta", list(blobs.values()))
    yield container("anchor", [anchor])
    yield container("reference", [reference])
    for codec, data in blobs.items():
        subject = Subject(codec, schema, one.base, one.target, one.changes, 1, data)
        yield Parser(f"{codec}_blob", [data], _judge_of(subject), 0.25)

    def judge_anchor(data: bytes) -> str:
        found = list(decode(data, schema, "anchor"))
        for change in found:
            spec = schema.tensors[change.tensor]
            bits = change.bits
            demand(bits is not None, "an anchor without bits")
            assert bits is not None
            demand(bits.size == spec.numel and bits.itemsize == spec.itemsize, "of another size")
            if fingerprint(bits, spec) != change.target:
                return REFUSED  # as every reader does
            if change.target == whole[change.tensor].target:
                demand(same(bits, one.target[change.tensor]), "other bits of this fingerprint")
        return SAME if data == anchor else FAITHFUL

    yield Parser("anchor_blob", [anchor], judge_anchor, 0.25)


def _judge_of(subject: Subject) -> Callable[[bytes], str]:
    def judge(data: bytes) -> str:
        verdict = judge_blob(subject, data)
        demand(verdict != "undetected", "other weights of this root")
        return SAME if verdict == "harmless" else REFUSED

    return judge
