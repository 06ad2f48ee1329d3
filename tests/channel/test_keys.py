"""Signatures over records and seals around blobs: what is believed, and by whom it is read."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import pathlib
import pickle
import stat
import struct
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.channel.toy import ROOT, append_anchor, append_delta, begin, fetched, moved, replay
from vllm_delta.channel import NO_KEYS, Keys, Log, LogReader
from vllm_delta.channel.chain import parse_record
from vllm_delta.channel.keyfiles import public_path, write_sealing_key, write_signing_key
from vllm_delta.channel.keys import about_blob, about_schema, key_id, pre_authentication
from vllm_delta.channel.sealing import (
    HEAD_BYTES,
    MAGIC,
    SEGMENT_BYTES,
    TAG_BYTES,
    is_sealed,
    sealed_bytes,
)
from vllm_delta.errors import (
    ChainError,
    DigestError,
    FormatError,
    SettingsError,
    SignatureError,
    UnsupportedError,
)
from vllm_delta.format import PAYLOAD_TYPE, blob_key, manifest_key, open_envelope, seal, unseal
from vllm_delta.testing import MemoryStore


def private(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def public(seed: int):
    return private(seed).public_key()


A, B = 1, 2
ABOUT = about_blob("c" * 32, 7, 0)
SEALING, OTHER_SEALING = b"s" * 32, b"t" * 32


def signed(seed: int = A, *trusted: int) -> Keys:
    return Keys(signing=private(seed), trusted=tuple(map(public, trusted)))


def trusting(*seeds: int) -> Keys:
    return Keys(trusted=tuple(map(public, seeds)))


def sealing(*keys: bytes) -> Keys:
    return Keys(sealing=keys)


# Signatures


def test_what_is_signed_is_dsse_s_encoding():
    payload = b'{"a":1}'
    assert pre_authentication(payload) == (
        b"DSSEv1 43 application/vnd.vllm-delta.manifest.v1+json 7 " + payload
    )
    assert len(PAYLOAD_TYPE) == 43
    (signature,) = signed().sign(payload)
    public(A).verify(base64.b64decode(signature["sig"]), pre_authentication(payload))
    assert signature["keyid"] == key_id(public(A))


def test_a_signed_channel_is_read_by_who_trusts_its_key_and_names_the_signer():
    store = MemoryStore()
    weights = begin(Log(store, keys=signed()), 2)
    reader = LogReader(store, keys=trusting(A))
    records = reader.read_from_anchor(reader.tail())
    assert {record.signer for record in records} == {key_id(public(A))}
    assert replay(reader, records) == weights


def test_who_requires_nothing_reads_signed_and_unsigned_records_alike():
    store = MemoryStore()
    begin(Log(store, keys=signed()), 1)
    assert LogReader(store).tail().signer is None


def test_a_record_without_a_signature_is_refused_where_one_is_required():
    store = MemoryStore()
    begin(Log(store), 1)
    with pytest.raises(SignatureError, match="no signature by a trusted key") as caught:
        LogReader(store, keys=trusting(A)).tail()
    assert caught.value.signed_by == []
    assert caught.value.action == "reseed"


def test_a_key_that_is_not_trusted_is_refused_and_named():
    store = MemoryStore()
    begin(Log(store, keys=signed(B)), 1)
    with pytest.raises(SignatureError) as caught:
        LogReader(store, keys=trusting(A)).tail()
    assert caught.value.signed_by == [key_id(public(B))]
    assert caught.value.trusted == [key_id(public(A))]


def test_a_key_id_only_chooses_and_is_never_believed():
    """B signs and says that it was A."""
    payload = b"payload"
    (signature,) = signed(B).sign(payload)
    forged = {**signature, "keyid": key_id(public(A))}
    with pytest.raises(SignatureError):
        trusting(A).verify(payload, [forged])
    with pytest.raises(SignatureError):
        trusting(A, B).verify(payload, [forged])
    (true,) = signed(A).sign(payload)
    assert trusting(A).verify(payload, [forged, true]) == key_id(public(A))


def test_a_signature_is_of_one_payload_and_of_its_type():
    (signature,) = signed().sign(b"payload")
    with pytest.raises(SignatureError):
        trusting(A).verify(b"payloae", [signature])
    bare = {**signature, "sig": base64.b64encode(private(A).sign(b"payload")).decode()}
    with pytest.raises(SignatureError):
        trusting(A).verify(b"payload", [bare])


def test_no_bit_of_a_signed_envelope_can_be_turned():
    store = MemoryStore()
    begin(Log(store, keys=signed()), 1)
    envelope = fetched(store, manifest_key(3))
    keys = trusting(A)
    assert parse_record(envelope, 3, keys).signer is not None
    for place in range(len(envelope)):
        for bit in range(8):
            turned = bytearray(envelope)
            turned[place] ^= 1 << bit
            # Unsupported: a bit of the payload's type.
            with pytest.raises((FormatError, SignatureError, UnsupportedError)):
                parse_record(bytes(turned), 3, keys)


def test_an_envelope_has_one_form_only():
    """Another of the same meaning would have another digest, which no successor names."""
    payload = b'{"some":"payload"}x'
    good = seal(payload, signed().sign(payload))
    assert unseal(good)[0] == payload
    fields = json.loads(good)
    text = fields["payload"]
    assert text.endswith("==")
    spare = {**fields, "payload": text[:-3] + chr(ord(text[-3]) + 1) + "=="}
    assert base64.b64decode(spare["payload"]) == payload
    compact = {"sort_keys": True, "separators": (",", ":")}
    for other in (
        json.dumps(fields, sort_keys=True).encode(),
        json.dumps(dict(reversed(fields.items())), separators=(",", ":")).encode(),
        json.dumps(spare, **compact).encode(),
        good + b" ",
        good.replace(b"keyid", rb"\u006beyid"),
    ):
        assert other != good
        with pytest.raises(FormatError, match="canonical"):
            unseal(other)


@pytest.mark.parametrize(
    "change",
    [
        {"keyid": "nobody"},
        {"keyid": "\N{SNOWMAN}"},
        {"keyid": key_id(private(A).public_key()).upper()},
        {"sig": "!"},
        {"sig": "AAAA"},
        {"sig": "\N{SNOWMAN}"},
        {"sig": base64.b64encode(bytes(64)).decode()},
        {"sig": base64.b64encode(bytes(65)).decode()},
        {"sig": base64.b64encode(b"\xff" * 64).decode()},
    ],
    ids=str,
)
def test_a_malformed_signature_is_no_signature(change):
    payload = b"payload"
    (signature,) = signed().sign(payload)
    with pytest.raises(SignatureError):
        trusting(A).verify(payload, [{**signature, **change}])
    envelope = seal(payload, [{**signature, **change}])
    with pytest.raises((SignatureError, FormatError)):
        parse_record(envelope, 1, trusting(A))


@pytest.mark.parametrize(
    "signatures",
    [None, {}, "x", [1], [[]], [{}], [{"keyid": "a"}], [{"keyid": 1, "sig": "AA=="}],
     [{"keyid": "a", "sig": None}], [{"keyid": "", "sig": "AA=="}],
     [{"keyid": "a" * 300, "sig": "AA=="}], [{"keyid": "\ud800", "sig": "AA=="}],
     [{"keyid": "a", "sig": "AA==", "x": 1}], [{"keyid": "a", "sig": "AA=="}] * 17],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_malformed_lists_of_signatures_are_format_errors(signatures):
    envelope = json.loads(seal(b"payload"))
    envelope["signatures"] = signatures
    data = json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(FormatError):
        parse_record(data, 1, trusting(A))


def test_a_signature_written_in_another_way_is_refused():
    """base64 leaves bits over at the end; turned, they would make another envelope of the same."""
    payload = b"payload"
    (signature,) = signed().sign(payload)
    text = signature["sig"]
    assert text.endswith("==")
    last = chr(ord(text[-3]) + 1)
    other = text[:-3] + last + "=="
    assert base64.b64decode(other) == base64.b64decode(text)
    with pytest.raises(SignatureError):
        trusting(A).verify(payload, [{**signature, "sig": other}])


def test_the_signature_is_checked_before_the_payload_is_parsed():
    for payload in (b"no manifest", b'{"format":2}', b"[" * 100_000):
        with pytest.raises(SignatureError):
            parse_record(seal(payload), 1, trusting(A))
        with pytest.raises(SignatureError):
            parse_record(seal(payload, signed(B).sign(payload)), 1, trusting(A))


# Rotation


def test_a_trainer_s_key_is_replaced_while_readers_trust_both():
    store = MemoryStore()
    weights = begin(Log(store, keys=signed(A)), 2)
    both, old, new = (LogReader(store, keys=trusting(*keys)) for keys in ((A, B), (A,), (B,)))
    taken_over = Log(store, keys=signed(B, A))
    taken_over.claim("next")
    append_delta(taken_over, weights, 0, 5)
    weights = moved(weights, 0, 5)
    records = both.read_from_anchor(both.tail())
    assert [record.signer for record in records] == [key_id(public(A))] * 3 + [
        key_id(public(B))
    ] * 2
    assert replay(both, records) == weights
    with pytest.raises(SignatureError):
        old.tail()
    with pytest.raises(SignatureError):
        new.read_from_anchor(new.tail())
    append_anchor(taken_over, weights)
    assert replay(new, new.read_from_anchor(new.tail())) == weights


def test_a_trainer_that_signs_takes_over_no_channel_whose_signer_it_does_not_trust():
    store = MemoryStore()
    begin(Log(store, keys=signed(A)), 1)
    before = store.list("")
    for keys in (signed(B), trusting(B)):
        with pytest.raises(SignatureError):
            Log(store, keys=keys).claim("mallory")
    assert store.list("") == before


def test_a_trainer_that_does_not_sign_writes_no_record_that_its_readers_would_refuse():
    store = MemoryStore()
    begin(Log(store, keys=signed(A)), 1)
    with pytest.raises(ValueError, match="no signature"):
        Log(store, keys=trusting(A)).claim("without its key")
    assert LogReader(store, keys=trusting(A)).tail().seq == 3


# What a signature alone does not stop is stopped by the chain


def test_an_old_tail_or_a_record_of_another_channel_is_refused_though_well_signed():
    ours, theirs = MemoryStore(), MemoryStore()
    begin(Log(ours, keys=signed()), 3)
    begin(Log(theirs, keys=signed()), 5)
    reader = LogReader(ours, keys=trusting(A))
    newest = reader.tail()
    for seq in (3, 4):
        ours.put(manifest_key(6), fetched(ours, manifest_key(seq)))
        with pytest.raises(ChainError, match="another's place"):
            reader.read_next(newest)
    ours.put(manifest_key(6), fetched(theirs, manifest_key(6)))
    with pytest.raises(ChainError, match="'channel'"):
        reader.read_next(newest)


def test_signatures_of_two_records_cannot_be_swapped():
    store = MemoryStore()
    begin(Log(store, keys=signed()), 2)
    payload = open_envelope(fetched(store, manifest_key(3)))
    _, signatures = unseal(fetched(store, manifest_key(4)))
    store.put(manifest_key(3), seal(payload, signatures))
    with pytest.raises(SignatureError):
        LogReader(store, keys=trusting(A)).read(3)


# Seals


@pytest.mark.parametrize(
    "n_bytes", [0, 1, 8, 9, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES]
)
@pytest.mark.parametrize("always_the_same", [False, True])
def test_what_was_sealed_opens_again(n_bytes, always_the_same):
    data = os.urandom(n_bytes)
    keys = sealing(SEALING)
    sealed = keys.seal(data, ABOUT, always_the_same=always_the_same)
    assert type(sealed) is bytes
    assert len(sealed) == sealed_bytes(n_bytes)
    opened = keys.open(sealed, ABOUT)
    assert (type(opened), opened) == (bytes, data)
    for n in {0, 1, min(8, n_bytes), n_bytes}:
        if n <= n_bytes:
            assert keys.open(sealed, ABOUT, drop_bytes=n) == data[: n_bytes - n]
    assert (keys.seal(data, ABOUT, always_the_same=always_the_same) == sealed) == always_the_same
    if n_bytes > 8:
        assert data not in sealed


def test_a_sealed_object_is_laid_out_as_the_format_says():
    """Opened by what stands in `FORMAT.md`, with nothing of ours."""
    data = os.urandom(2 * (1 << 20) + 77)
    sealed = sealing(SEALING).seal(data, ABOUT)
    assert sealed[:8] == bytes.fromhex("76 64 73 65 61 6c 00 01")
    assert sealed[8:16] == hashlib.sha256(b"vllm_delta sealing key" + SEALING).digest()[:8]
    own = hmac.digest(SEALING, b"vllm_delta object key" + sealed[16:32], "sha256")
    bound = sealed[:32] + b"vllm_delta|" + b"c" * 32 + b"|7|0"
    stride = (1 << 20) + 16
    opened = [
        AESGCM(own).decrypt(struct.pack("<QI", i, i == 2), sealed[at : at + stride], bound)
        for i, at in enumerate(range(32, len(sealed), stride))
    ]
    assert b"".join(opened) == data
    same = sealing(SEALING).seal(b"{}", about_schema("c" * 32), always_the_same=True)
    about = b"vllm_delta|" + b"c" * 32 + b"|0|schema"
    message = b"vllm_delta salt" + struct.pack("<Q", len(about)) + about + b"{}"
    assert same[16:32] == hmac.digest(SEALING, message, "sha256")[:16]


def test_objects_are_sealed_under_keys_of_their_own():
    """So the counting nonces never meet: not one block of equal objects comes out equal."""
    sealed = [sealing(SEALING).seal(bytes(4096), ABOUT) for _ in range(3)]
    blocks = {s[i : i + 16] for s in sealed for i in range(HEAD_BYTES, HEAD_BYTES + 4096, 16)}
    assert len(blocks) == 3 * 4096 // 16


@pytest.mark.parametrize("n_bytes", [0, 20, 2 * SEGMENT_BYTES + 5])
def test_no_bit_of_a_sealed_object_can_be_turned(n_bytes):
    keys = sealing(SEALING)
    sealed = keys.seal(bytes(n_bytes), ABOUT)
    places = range(len(sealed)) if n_bytes < 100 else (*range(40), 1 << 20, -20, -1)
    for place in places:
        for bit in range(8):
            turned = bytearray(sealed)
            turned[place] ^= 1 << bit
            with pytest.raises((DigestError, SettingsError)):
                keys.open(bytes(turned), ABOUT)


def test_a_sealed_object_opens_whole_or_not_at_all():
    """Segments left out, cut off, doubled or in another order."""
    keys = sealing(SEALING)
    sealed = keys.seal(os.urandom(2 * SEGMENT_BYTES + 100), ABOUT)
    stride = SEGMENT_BYTES + TAG_BYTES
    head, body = sealed[:HEAD_BYTES], sealed[HEAD_BYTES:]
    first, second, third = body[:stride], body[stride : 2 * stride], body[2 * stride :]
    assert keys.open(b"".join([head, first, second, third]), ABOUT)
    for parts in (
        (first, second),
        (first,),
        (),
        (second, third),
        (first, third),
        (second, first, third),
        (first, second, second),
        (first, second, third, third),
        (first, second, third[:-1]),
        (first, second, third, b"x"),
        (first, second, third[:15]),
    ):
        with pytest.raises(DigestError):
            keys.open(b"".join([head, *parts]), ABOUT)
    full = keys.seal(os.urandom(SEGMENT_BYTES), ABOUT)
    for more in (b"x", bytes(TAG_BYTES), bytes(TAG_BYTES + 1), full[HEAD_BYTES:]):
        with pytest.raises(DigestError):
            keys.open(full + more, ABOUT)
    with pytest.raises(DigestError, match="cut short"):
        keys.open(keys.seal(b"123", ABOUT), ABOUT, drop_bytes=8)
    for n in range(HEAD_BYTES):
        with pytest.raises((DigestError, SettingsError)):
            keys.open(head[:n], ABOUT)


@pytest.mark.parametrize(
    "about",
    [
        about_blob("d" * 32, 7, 0),
        about_blob("c" * 32, 8, 0),
        about_blob("c" * 32, 7, 1),
        b"",
    ],
)
def test_a_blob_opens_in_its_channel_record_and_place_only(about):
    with pytest.raises(DigestError, match="does not open in this place"):
        sealing(SEALING).open(sealing(SEALING).seal(b"weights", ABOUT), about)


def test_sealed_and_not_sealed_are_told_apart():
    sealed = sealing(SEALING).seal(b"weights", ABOUT)
    with pytest.raises(SettingsError, match="give its sealing key"):
        NO_KEYS.open(sealed, ABOUT)
    with pytest.raises(SettingsError, match="not sealed"):
        sealing(SEALING).open(b"weights", ABOUT)
    with pytest.raises(SettingsError, match="not at hand"):
        sealing(OTHER_SEALING).open(sealed, ABOUT)


def test_the_key_s_id_in_an_object_only_chooses():
    mine = sealing(SEALING).seal(b"weights", ABOUT)
    other = sealing(OTHER_SEALING).seal(b"weights", ABOUT)
    relabelled = mine[: len(MAGIC)] + other[len(MAGIC) : len(MAGIC) + 8] + mine[16:]
    with pytest.raises(DigestError):
        sealing(SEALING, OTHER_SEALING).open(relabelled, ABOUT)


def test_a_sealing_key_is_replaced_while_readers_have_both():
    old = sealing(SEALING).seal(b"old", ABOUT)
    new = sealing(OTHER_SEALING, SEALING).seal(b"new", ABOUT)
    both = sealing(SEALING, OTHER_SEALING)
    assert (both.open(old, ABOUT), both.open(new, ABOUT)) == (b"old", b"new")
    assert sealing(OTHER_SEALING).open(new, ABOUT) == b"new"
    with pytest.raises(SettingsError, match="not at hand"):
        sealing(OTHER_SEALING).open(old, ABOUT)


def test_blobs_of_a_sealed_channel_are_readable_with_its_key_and_nowhere_else():
    store, keys = MemoryStore(), sealing(SEALING)
    log = Log(store, keys=keys)
    weights = begin(log, 2)
    reader = LogReader(store, keys=keys)
    records = reader.read_from_anchor(reader.tail())
    assert replay(reader, records) == weights
    assert all(is_sealed(fetched(store, key)) for key in store.list("b/"))
    manifest = records[-1].manifest
    with pytest.raises(SettingsError, match="give its sealing key"):
        LogReader(store).get_blob(manifest, 0)
    with pytest.raises(SettingsError, match="give its sealing key"):
        LogReader(store).get_schema(manifest)
    # Put by somebody with write access under a record of their own making.
    moved_blob = manifest.blobs[0]
    for change in (
        {"seq": manifest.seq + 1},
        {"channel": "0" * 32},
        {"blobs": (records[0].manifest.blobs[0], moved_blob)},
    ):
        forged = type(manifest)(**{**vars(manifest), **change})
        with pytest.raises(DigestError, match="does not open"):
            reader.get_blob(forged, len(forged.blobs) - 1)
    with pytest.raises(DigestError, match="does not open"):
        reader.get_schema(type(manifest)(**{**vars(manifest), "schema": moved_blob}))


def test_the_schema_of_a_sealed_channel_stays_one_object_over_restarts():
    store = MemoryStore()
    weights = begin(Log(store, keys=sealing(SEALING)), 1)
    again = Log(store, keys=sealing(SEALING))
    again.claim("next")
    append_anchor(again, weights)
    refs = [LogReader(store).read(seq).manifest.schema for seq in (2, 3, 5)]
    assert len(set(refs)) == 1
    assert is_sealed(fetched(store, blob_key(refs[0].sha256)))


# Files


def test_key_files_are_written_for_their_owner_alone_and_read_back(tmp_path):
    signing, seal_file = tmp_path / "trainer.key", tmp_path / "seal.key"
    made = write_signing_key(signing)
    write_sealing_key(seal_file)
    for path in (signing, seal_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = Keys.load(signing=signing, sealing=[seal_file])
    trusted = Keys.load(trusted=[str(public_path(signing))])
    assert trusted.signers == keys.signers == {key_id(made)}
    assert trusted.verify(b"x", keys.sign(b"x")) == key_id(made)
    assert keys.open(keys.seal(b"x", ABOUT), ABOUT) == b"x"
    assert write_signing_key(tmp_path / "other.key") != made


def test_a_file_may_hold_several_public_keys(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    ids = {key_id(write_signing_key(path)) for path in files}
    joined = tmp_path / "trusted.pem"
    joined.write_bytes(b"\n".join(public_path(path).read_bytes() for path in files))
    assert Keys.load(trusted=[joined]).signers == ids


@pytest.mark.parametrize("taken", ["key", "key.pub"])
def test_no_key_is_ever_written_over_another_file(tmp_path, taken):
    (tmp_path / taken).write_text("precious")
    with pytest.raises(SettingsError, match="never written over"):
        write_signing_key(tmp_path / "key")
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "precious"
    if taken == "key":
        with pytest.raises(SettingsError, match="never written over"):
            write_sealing_key(tmp_path / "key")


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_is_no_place_for_a_key(path):
    with pytest.raises(SettingsError, match="not the name of a file"):
        write_signing_key(pathlib.Path(path))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o611])
def test_a_secret_that_is_open_to_others_is_refused(tmp_path, mode):
    signing, seal_file = tmp_path / "trainer.key", tmp_path / "seal.key"
    write_signing_key(signing)
    write_sealing_key(seal_file)
    for path in (signing, seal_file):
        path.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600") as caught:
        Keys.load(signing=signing)
    assert (caught.value.path, caught.value.mode) == (str(signing), f"{mode:04o}")
    with pytest.raises(SettingsError, match="chmod 600"):
        Keys.load(sealing=[seal_file])


def test_files_that_hold_no_key_of_the_kind_are_refused_by_name(tmp_path):
    signing, seal_file = tmp_path / "trainer.key", tmp_path / "seal.key"
    write_signing_key(signing)
    write_sealing_key(seal_file)
    pub = public_path(signing)
    pub.chmod(0o600)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = generate_private_key(SECP256R1())
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    contents = {
        "empty": b"",
        "noise": b"\xff" * 100,
        "short": base64.b64encode(bytes(31)),
        "half": signing.read_bytes()[:60],
        "locked": private(A).private_bytes(
            pem, form, serialization.BestAvailableEncryption(b"secret")
        ),
        "curve": other.private_bytes(pem, form, serialization.NoEncryption()),
        "curve.pub": other.public_key().public_bytes(pem, spki),
        "tail.pub": pub.read_bytes() + b"more",
        "mixed.pub": pub.read_bytes() + other.public_key().public_bytes(pem, spki),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    for name in [*contents, "absent", "seal.key", "trainer.key.pub"]:
        with pytest.raises(SettingsError, match=name):
            Keys.load(signing=tmp_path / name)
    for name in [*contents, "absent", "seal.key", "trainer.key"]:
        with pytest.raises(SettingsError, match=name):
            Keys.load(trusted=[tmp_path / name])
    for name in [*contents, "absent", "trainer.key", "trainer.key.pub"]:
        with pytest.raises(SettingsError, match=name):
            Keys.load(sealing=[tmp_path / name])
    with pytest.raises(SettingsError, match="cannot be read"):
        Keys.load(trusted=["~no-such-user-of-ours/x"])
    with pytest.raises(SettingsError, match="32 bytes"):
        Keys(sealing=(b"short",))


def test_no_secret_is_in_a_repr_or_an_error(tmp_path):
    keys = Keys(signing=private(A), sealing=(SEALING,))
    raw = private(A).private_bytes_raw()
    secrets = [raw, raw.hex(), base64.b64encode(raw), SEALING, SEALING.hex(), SEALING.decode()]
    shown = [repr(keys), str(keys), repr(Log(MemoryStore(), keys=keys).keys)]
    body = base64.b64encode(raw[:31])
    for write in (body, b"-----BEGIN PRIVATE KEY-----\n" + body + b"\n-----END PRIVATE KEY-----\n"):
        path = tmp_path / "bad"
        path.write_bytes(write)
        path.chmod(0o600)
        secrets.append(body)
        for load in (
            {"signing": path},
            {"trusted": [path]},
            {"sealing": [path]},
        ):
            with pytest.raises(SettingsError) as caught:
                Keys.load(**load)
            error: BaseException | None = caught.value
            while error is not None:
                shown.append(f"{error!r} {error}")
                error = error.__cause__ or error.__context__
    sealed = keys.seal(b"x", ABOUT)
    for wrong in (sealing(OTHER_SEALING), NO_KEYS):
        with pytest.raises(SettingsError) as caught:
            wrong.open(sealed, ABOUT)
        shown.append(repr(caught.value))
    for secret in secrets:
        text = secret if isinstance(secret, str) else secret.decode("latin-1")
        assert not [line for line in shown if text in line]
    with pytest.raises(TypeError):
        pickle.dumps(keys)


def test_without_the_package_the_error_says_what_to_install(tmp_path):
    write_signing_key(tmp_path / "key")
    program = """
import sys
sys.modules["cryptography"] = None
from vllm_delta.channel import Keys, NO_KEYS, Log
from vllm_delta.channel.keyfiles import write_signing_key
from vllm_delta.errors import SettingsError
from pathlib import Path
assert NO_KEYS.verify(b"x", []) is None and NO_KEYS.sign(b"x") == []
folder = Path(sys.argv[1])
for call in (
    lambda: Keys.load(signing=folder / "key"),
    lambda: Keys.load(trusted=[folder / "key.pub"]),
    lambda: Keys(sealing=(bytes(32),)).seal(b"x", b""),
    lambda: write_signing_key(folder / "new"),
):
    try:
        call()
    except SettingsError as error:
        assert "pip install 'cryptography>=47'" in error.install, error
    else:
        raise AssertionError
"""
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_release_of_the_package_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", type("Old", (), {}))
    with pytest.raises(SettingsError, match="47 or later"):
        sealing(SEALING).seal(b"x", ABOUT)


def test_a_channel_without_keys_never_imports_the_package():
    program = """
import sys
from tests.channel.toy import begin
from vllm_delta.channel import Log
from vllm_delta.testing import MemoryStore
begin(Log(MemoryStore()), 1)
assert "cryptography" not in sys.modules
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
