"""Damaged hazard blobs, each with the error it must name and nothing allocated on the way."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc

import numpy as np
import pytest

from tests.codec.test_codec import same
from vllm_delta import codec
from vllm_delta.codec import blob, hazard
from vllm_delta.codec.blob import GAP, HAZARD, HAZARD_LANES, HAZARD_MODELS, HAZARD_WORDS, Entry
from vllm_delta.codec.hazard import parse
from vllm_delta.errors import FormatError, UnsupportedError
from vllm_delta.format import Schema, TensorSpec

SMALL = Schema.of([TensorSpec("w", "BF16", (40, 30))])
BASE = np.full(1200, 0x3C80, np.uint16)
CLASS = 0x3C80 >> 7
CHANGE = codec.Change(
    0, np.array([3, 70, 1100], np.int32), np.array([1, -2, 300], np.int16), None, 1, 2
)


def uvarint(value: int) -> bytes:
    out = bytearray()
    blob.put_uvarint(out, value)
    return bytes(out)


@functools.cache
def good() -> blob.Blob:
    """One tensor of 1,200 elements, three of them changed, as `encode_delta` would write it."""
    tiling = hazard.Tiling(SMALL, 1)
    whole = tiling.tiles(0, cut=False)
    pending = hazard.Pending(CHANGE, SMALL.tensors[0], BASE, False, whole)
    (coded,) = hazard.encode([pending], tiling, 1)
    sections = {
        HAZARD_MODELS: b"\1\1" + coded.model.to_bytes({"BF16"}),
        HAZARD_LANES: coded.directory,
        HAZARD_WORDS: coded.words,
    }
    entries = [Entry(0, HAZARD, 3, 1, 2)]
    return blob.parse_blob(blob.build_blob("delta", SMALL, entries, sections), SMALL, "delta")


def with_(schema: Schema = SMALL, entries: list[Entry] | None = None, **parts: bytes) -> bytes:
    """The good blob with some sections, or its entries, replaced."""
    tags = {"models": HAZARD_MODELS, "lanes": HAZARD_LANES, "words": HAZARD_WORDS}
    sections = {tag: bytes(part) for tag, part in good().sections.items()}
    sections |= {tags[name]: part for name, part in parts.items()}
    return blob.build_blob("delta", schema, entries or list(good().entries), sections)


def decoded(data: bytes, schema: Schema = SMALL) -> list[codec.Change]:
    return list(codec.decode(data, schema, "delta", codec.HostLanes(lambda _: BASE)))


def entry(**fields: int) -> list[Entry]:
    return [dataclasses.replace(good().entries[0], **fields)]


def test_the_good_blob_is_good() -> None:
    """What the table of damage starts from decodes."""
    (change,) = decoded(with_())
    assert change.indices is not None
    assert change.steps is not None
    assert change.indices.tolist() == [3, 70, 1100]
    assert change.steps.tolist() == [1, -2, 300]
    assert good().sections[HAZARD_LANES][1:] == bytes([3, N_WORDS - 2])
    assert good().sections[HAZARD_MODELS][:4] == bytes([1, 1, CLASS, 0])


def model(*body: int) -> bytes:
    return b"\1\1" + bytes(body)


N_WORDS = len(good().sections[HAZARD_WORDS]) // 4
WORDS = bytes(good().sections[HAZARD_WORDS])
MODEL = bytes(good().sections[HAZARD_MODELS])
LONG = b"\xff" * 9
"""A number of 63 bits that goes on."""

TABLE: dict[str, tuple[bytes, str]] = {
    "no shards": (with_(models=b"\0" + MODEL[1:]), "not a number of shards"),
    "too many shards": (with_(models=uvarint(1025) + MODEL[1:]), "not a number of shards"),
    "shards cut off": (with_(models=b"\x80"), "hazard: bytes end too early"),
    "shards too long": (with_(models=LONG + MODEL), "hazard: a number is too long"),
    "shards padded": (with_(models=b"\x81\0" + MODEL[1:]), "not in its shortest form"),
    "no model": (with_(models=b"\1"), "tensors without a model"),
    "a model of none": (with_(models=b"\1\0" + MODEL[1:]), "a model of no tensor"),
    "a model of too many": (with_(models=b"\1\2" + MODEL[2:]), "a model of no tensor"),
    "a model of 2^60": (with_(models=b"\1" + uvarint(1 << 60) + MODEL[2:]), "a model of no tensor"),
    "a model more": (with_(models=MODEL + MODEL[1:]), "a model of no tensor"),
    "a model's number too long": (with_(models=b"\1" + LONG + MODEL), "a number is too long"),
    "a model without head": (with_(models=MODEL[:3]), "a model ends too early"),
    "a model without rates": (with_(models=MODEL[:4]), "a model ends too early"),
    "a model without scales": (with_(models=MODEL[:-1]), "a model ends too early"),
    "a model and a byte": (with_(models=MODEL + b"\1"), "a model of no tensor"),
    "classes beyond": (with_(models=model(255, 1, 9, 9, 9, 9)), "no such class, rate or scale"),
    "no such rate": (with_(models=model(CLASS, 0, 161, 0)), "no such class, rate or scale"),
    "no such scale": (with_(models=model(CLASS, 0, 9, 129)), "no such class, rate or scale"),
    "no directory": (with_(lanes=b""), "a section is missing or not wanted"),
    "no words": (with_(words=b""), "a section is missing or not wanted"),
    "no models": (with_(models=b""), "a section is missing or not wanted"),
    "odd bytes": (with_(words=WORDS + b"\0"), "not whole words"),
    "lanes too short": (with_(lanes=bytes([7, 3, N_WORDS - 2])), "not a tensor's lanes"),
    "lanes too long": (with_(lanes=bytes([23, 3, N_WORDS - 2])), "not a tensor's lanes"),
    "cut without shards": (with_(lanes=bytes([0x8B, 3, N_WORDS - 2])), "not a tensor's lanes"),
    "lanes too long for shards": (
        with_(models=b"\2" + MODEL[1:], lanes=bytes([0x80 | 21])),
        "not a tensor's lanes",
    ),
    "not cut, with shards": (with_(models=b"\2" + MODEL[1:]), "not a tensor's lanes"),
    "directory ends": (with_(lanes=b"\x0b"), "more tiles than bytes"),
    "directory ends before words": (with_(lanes=b"\x0b\3"), "hazard: bytes end too early"),
    "changes too long": (with_(lanes=b"\x0b" + LONG + b"\1"), "a number is too long"),
    "changes padded": (with_(lanes=b"\x0b\x83\0\1"), "not in its shortest form"),
    "more changes than elements": (
        with_(lanes=b"\x0b" + uvarint(1201) + uvarint(98), words=bytes(400)),
        "a lane does not fit",
    ),
    "more changes than bits": (
        with_(entries=entry(n_changed=33), lanes=b"\x0b\x21\0", words=WORDS[:8]),
        "a lane does not fit",
    ),
    "more words than there are": (with_(lanes=bytes([11, 3, N_WORDS - 1])), "a lane does not fit"),
    "2^62 words": (with_(lanes=b"\x0b\3" + uvarint(1 << 62)), "a lane does not fit"),
    "fewer words than there are": (with_(words=WORDS + bytes(4)), "bytes left over"),
    "directory goes on": (with_(lanes=bytes([11, 3, N_WORDS - 2, 0])), "bytes left over"),
    "another number of changes": (with_(entries=entry(n_changed=4)), "another number of changes"),
    "no changes at all": (with_(lanes=b"\x0b\0"), "another number of changes"),
    "no changes in the entry": (with_(entries=entry(n_changed=0)), "more changes than elements"),
    "more in the entry": (with_(entries=entry(n_changed=1201)), "more changes than elements"),
    "one change fewer": (
        with_(entries=entry(n_changed=2), lanes=bytes([11, 2, N_WORDS - 2])),
        "does not end as it was begun",
    ),
    "one change more": (
        with_(entries=entry(n_changed=4), lanes=bytes([11, 4, N_WORDS - 2])),
        "hazard: a (lane|step)",
    ),
    "a word more": (
        with_(lanes=bytes([11, 3, N_WORDS - 1]), words=WORDS + bytes(4)),
        "does not end as it was begun",
    ),
    "a word fewer": (with_(lanes=bytes([11, 3, N_WORDS - 3]), words=WORDS[:-4]), "ends too early"),
    "a first state too low": (with_(words=bytes(8) + WORDS[8:]), "not a lane's state"),
    "a first state too high": (with_(words=b"\xff" * 8 + WORDS[8:]), "not a lane's state"),
    "a last word changed": (with_(words=WORDS[:-1] + b"\x55"), "hazard: a (lane|step)"),
    "another tensor's scale": (with_(models=model(CLASS, 0, MODEL[4], 128)), "hazard: a"),
    "another lane length": (with_(lanes=bytes([10, 3, N_WORDS - 2, 0])), "hazard: a lane"),
}


@pytest.mark.parametrize("what", sorted(TABLE))
def test_damage_is_refused_by_name(what: str) -> None:
    """Every length and number of sections 7, 8 and 9, out of its range."""
    data, words = TABLE[what]
    with pytest.raises(FormatError, match=words):
        decoded(data)


def test_a_change_past_the_end_is_refused() -> None:
    """A lane that begins with hazards so small that no change comes before its end."""
    with pytest.raises(FormatError, match="fewer changes than it says"):
        decoded(with_(models=model(CLASS, 0, 160, 0), words=b"\xff\xff\xff\x3f" + WORDS[4:]))


def test_hazard_belongs_into_deltas_of_stepped_types() -> None:
    """Not into anchors, not for integers, and not without a base."""
    schema = Schema.of([TensorSpec("w", "I16", (40, 30))])
    with pytest.raises(FormatError, match="steps for a type without"):
        decoded(with_(schema), schema)
    sections = {tag: bytes(part) for tag, part in good().sections.items()}
    for kind in ("anchor", "reference"):
        data = blob.build_blob(kind, SMALL, good().entries, sections)
        with pytest.raises(UnsupportedError, match="unknown codec"):
            list(codec.decode(data, SMALL, kind, codec.HostLanes(lambda _: BASE)))
    with pytest.raises(ValueError, match="hazard needs the weights"):
        list(codec.decode(with_(), SMALL, "delta"))


def test_sections_without_hazard_entries_are_refused() -> None:
    """A blob of gap entries alone carries none of the three sections."""
    (plain,) = codec.encode_delta(SMALL, [CHANGE])
    parsed = blob.parse_blob(plain, SMALL, "delta")
    for tag in (HAZARD_MODELS, HAZARD_LANES, HAZARD_WORDS):
        parts = {key: bytes(part) for key, part in parsed.sections.items()} | {tag: b"\1\1\1\1"}
        data = blob.build_blob("delta", SMALL, [Entry(0, GAP, 3, 1, 2)], parts)
        with pytest.raises(FormatError, match="missing or not wanted"):
            decoded(data)


def test_too_many_changes_in_a_blob_are_refused() -> None:
    """Counts whose sum is over the limit are refused before memory is taken."""
    n = parse.MAX_CHANGES + 1
    schema = Schema.of([TensorSpec("w", "BF16", (n,))])
    data = with_(schema, [Entry(0, HAZARD, n, 0, 0)])
    with pytest.raises(FormatError, match="too many changes"):
        decoded(data, schema)


def peak_of_refusal(data: bytes, schema: Schema) -> int:
    """Bytes allocated at most while the data is refused."""
    with pytest.raises(FormatError):
        decoded(data, schema)
    tracemalloc.start()
    with pytest.raises(FormatError):
        decoded(data, schema)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_numbers_alone_allocate_nothing() -> None:
    """Changes, words, lanes and tiles that the bytes do not account for take no memory."""
    large = Schema.of([TensorSpec("w", "BF16", (64, 4096, 4096))])
    many = [Entry(0, HAZARD, 1 << 26, 0, 0)]
    one = [Entry(0, HAZARD, 1, 0, 0)]
    for data in (
        with_(large, many, lanes=b"\x16" + uvarint(1 << 22) + uvarint(1 << 40)),
        with_(large, many, lanes=b"\x16" + uvarint(1 << 22) + b"\0"),
        with_(large, one, lanes=b"\x08" + bytes(1000)),
        with_(large, one, models=uvarint(1024) + MODEL[1:], lanes=b"\x94" + bytes(1000)),
        with_(large, one, models=uvarint(64) + MODEL[1:], lanes=b"\x94" + bytes(1000)),
    ):
        assert peak_of_refusal(data, large) < 1 << 18


def test_tiles_without_changes_take_no_memory() -> None:
    """However many there are."""
    square = Schema.of([TensorSpec("w", "BF16", (1024, 1024))])
    data = with_(
        square,
        [Entry(0, HAZARD, 1, 0, 0)],
        models=uvarint(256) + MODEL[1:],
        lanes=b"\x88" + bytes(256 * 256),
    )
    assert peak_of_refusal(data, square) < 1 << 18


def test_words_at_any_address() -> None:
    """A section of words need not be aligned: every length of the entries before it."""
    for n in range(1, 9):
        schema = Schema.of([TensorSpec(f"w{place}", "BF16", (40, 30)) for place in range(n)])
        changes = [dataclasses.replace(CHANGE, tensor=place) for place in range(n)]
        blobs = codec.encode_delta(schema, changes, codec="hazard", base=lambda _: BASE)
        (data,) = blobs
        back = list(codec.decode(data, schema, "delta", codec.HostLanes(lambda _: BASE)))
        assert [change.nnz for change in back] == [3] * n


def test_every_flip_of_a_small_blob_is_noticed() -> None:
    """Any single bit of the entry, or of sections 7, 8 and 9, but for those of a lane's length
    that is longer than the tensor anyway."""
    data, harmless = with_(), []
    start = blob._HEADER.size
    for bit in range(8 * start, 8 * len(data)):
        damaged = bytearray(data)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        try:
            (change,) = decoded(bytes(damaged))
        except (FormatError, UnsupportedError):
            continue
        if (change.touched, change.target) == (1, 2):
            assert same(change, CHANGE), bit
            harmless.append(bit)
    directory = len(data) - len(WORDS) - 3
    assert set(harmless) <= set(range(8 * directory, 8 * directory + 5))
