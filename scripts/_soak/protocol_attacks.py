"""What whoever can write to the store tries at the end of a round; no reader may be taken in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts._soak.protocol_stores import objects_of, refill
from scripts._soak.protocol_truth import copied, move
from vllm_delta.channel import Keys, Record
from vllm_delta.channel.tail import head_bytes
from vllm_delta.errors import ChainError, DeltaError, DigestError, SignatureError
from vllm_delta.format import HEAD_KEY, Manifest, Version, manifest_key, seal
from vllm_delta.publisher import Publisher, PublisherSettings
from vllm_delta.testing import MemoryStore

if TYPE_CHECKING:
    from scripts._soak.protocol_reader import Reader
    from scripts._soak.protocol_round import Round

Objects = dict[str, bytes]

_PLAIN = PublisherSettings(strides=(), anchor_ratio=1e9, anchor_every_s=None, n_threads=1)


def attack(its: Round) -> None:
    """Try one or two of the attacks, and see that afterwards the channel is as good as before."""
    kinds = sorted(ATTACKS if its.script.signed else ATTACKS.keys() - {"wrong_key"})
    for kind in its.draw.sample(kinds, 1 if its.script.light else 2):
        its.stage.note(f"- attack: {kind}")
        its.stage.faults[kind] += 1
        ATTACKS[kind](its)


def replay(its: Round) -> None:
    """The store as it was some records ago, every byte of it genuine."""
    now, tail = objects_of(its.bare), _tail(its)
    last = its.draw.randrange(0, tail.seq)
    old = {key: data for key, data in now.items() if not _after(key, last)}
    old[HEAD_KEY] = head_bytes(last or 1)
    refill(its.bare, old)
    for reader in its.readers:
        if reader.ratchet is not None and its.draw.random() < 0.5:
            reader.restart()
            _refuses(its, reader, "a replay", (ChainError,))
        else:
            _keeps(its, reader, "a replay")
    refill(its.bare, now)
    its.arrive()


def wrong_key(its: Round) -> None:
    """Records that continue the log, signed by somebody else."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    now, good = objects_of(its.bare), its.script.keys
    assert good.signing is not None
    evil = Ed25519PrivateKey.from_private_bytes(b"stranger" * 4)
    keys = Keys(signing=evil, trusted=(good.signing.public_key(),), sealing=good.sealing)
    refill(its.bare, _forked(its, now, keys, n_claims=1))
    for reader in its.readers:
        _refuses(its, reader, "a stranger's records", (SignatureError,))
    refill(its.bare, now)
    its.arrive()


def other_channel(its: Round) -> None:
    """Records of another channel, signed by the same key."""
    now, tail = objects_of(its.bare), _tail(its)
    if its.draw.random() < 0.5:
        refill(its.bare, _forked(its, {}, its.script.keys, n_claims=its.draw.randint(1, 3)))
        for reader in its.readers:
            if reader.ratchet is not None:
                reader.restart()
                _refuses(its, reader, "another channel", (ChainError,))
            else:
                _keeps(its, reader, "another channel")
    else:
        manifest = replace(_next(tail), channel=its.draw.randbytes(16).hex())
        its.bare.put(manifest_key(manifest.seq), _signed(its, manifest))
        for reader in its.readers:
            _refuses(its, reader, "another channel's record", (ChainError,))
    refill(its.bare, now)
    its.arrive()


def forged_head(its: Round) -> None:
    """A `head` that lies, before and after the next version."""
    from scripts._soak.protocol_round import forged_head as forged

    its.bare.put(HEAD_KEY, forged(its.draw))
    for reader in its.readers:
        _keeps(its, reader, "a forged head")
    its.go_on()
    its.bare.put(HEAD_KEY, forged(its.draw))
    its.arrive()


def mixed_manifests(its: Round) -> None:
    """The next record is genuine, those after it are of a fork of the same channel."""
    now, tail = objects_of(its.bare), _tail(its)
    fork = _forked(its, now, its.script.keys, n_claims=2)
    its.go_on()
    new = objects_of(its.bare)
    mixed = {**new, **{key: data for key, data in fork.items() if _after(key, tail.seq + 1)}}
    refill(its.bare, {**{key: data for key, data in fork.items() if key[:2] == "b/"}, **mixed})
    for reader in its.readers:
        _refuses(its, reader, "mixed manifests", (ChainError,))
    refill(its.bare, new)
    its.arrive()


def swapped_blob(its: Round) -> None:
    """A well-signed record whose blobs are another record's, or blobs under each other's names."""
    now, tail = objects_of(its.bare), _tail(its)
    victim = its.reader("victim")
    its.readers.remove(victim)
    victim.look()
    blobs = sorted(key for key in now if key.startswith("b/"))
    if its.script.sealed:
        others = [r for r in its.truth.log.values() if r.manifest.kind == "delta"]
        if not others:
            return
        manifest = replace(_next(tail), blobs=its.draw.choice(others).manifest.blobs)
        envelope = _signed(its, manifest)
        its.truth.digests.setdefault(manifest.to_bytes(), set())
        its.bare.put(manifest_key(manifest.seq), envelope)
        _refuses(its, victim, "a blob of another record", (DigestError,))
    else:
        victim.forget()
        shuffled = its.draw.sample(blobs, len(blobs))
        refill(its.bare, {**now, **{a: now[b] for a, b in zip(blobs, shuffled, strict=True)}})
        victim.look()
        victim.check()
    refill(its.bare, now)
    its.arrive()


ATTACKS: dict[str, Callable[[Round], None]] = {
    "replay": replay,
    "wrong_key": wrong_key,
    "other_channel": other_channel,
    "forged_head": forged_head,
    "mixed_manifests": mixed_manifests,
    "swapped_blob": swapped_blob,
}


def _keeps(its: Round, reader: Reader, what: str) -> None:
    """A reader must keep what it holds."""
    held = reader.held
    reader.look()
    reader.check()
    if reader.held != held:
        its.stage.violate(f"{reader.name} went from {held} to {reader.held} by {what}")


def _refuses(its: Round, reader: Reader, what: str, errors: tuple[type[DeltaError], ...]) -> None:
    """A reader must keep what it holds, and say why."""
    _keeps(its, reader, what)
    if not reader.errors:  # what came before it is told first
        _keeps(its, reader, what)
    if not any(isinstance(error, errors) for error in reader.errors):
        said = "; ".join(f"{type(e).__name__}: {e}" for e in reader.errors) or "nothing"
        its.stage.violate(f"{reader.name} says {said} of {what}")


def _forked(its: Round, objects: Objects, keys: Keys, *, n_claims: int) -> Objects:
    """What the channel would hold if another trainer went on from these objects."""
    store = MemoryStore()
    refill(store, objects)
    tensors = copied(its.trainers[-1].tensors)
    for _ in range(n_claims):
        publisher = Publisher(store, tensors, settings=_PLAIN, keys=keys, clock=its.stage.clock)
    for _ in range(2):
        move(tensors, its.draw)
        publisher.publish()
    return objects_of(store)


def _tail(its: Round) -> Record:
    tail = its.truth.tail
    assert tail is not None
    return tail


def _next(tail: Record) -> Manifest:
    """A delta that would continue the log."""
    before = tail.manifest
    assert before.target is not None
    target = Version(before.target.number + 1, "e" * 64)
    schema = before.schema
    assert schema is not None
    return replace(
        before,
        seq=tail.seq + 1,
        parent=tail.digest,
        kind="delta",
        base=before.target,
        target=target,
        blobs=(schema,),
    )


def _signed(its: Round, manifest: Manifest) -> bytes:
    payload = manifest.to_bytes()
    return seal(payload, its.script.keys.sign(payload))


def _after(key: str, seq: int) -> bool:
    return key.startswith("m/") and "." not in key and int(key[2:]) > seq
