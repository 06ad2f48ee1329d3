"""The codecs: exact round trips over every pattern, golden files, and refusals by name."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import make
from vllm_delta import codec
from vllm_delta.codec import Change, blob, entropy, gap, order
from vllm_delta.errors import DeltaError, FormatError, ModelMismatchError, UnsupportedError
from vllm_delta.fingerprint import fingerprint
from vllm_delta.format import Schema, TensorSpec

STEPPED = ["F8_E4M3", "BF16", "F16", "F32"]


def same(left: Change, right: Change) -> bool:
    """All fields equal, arrays by value and type."""
    for name in ("tensor", "touched", "target"):
        if getattr(left, name) != getattr(right, name):
            return False
    for name in ("indices", "steps", "bits"):
        a, b = getattr(left, name), getattr(right, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or not np.array_equal(a, b)):
            return False
    return True


def one(dtype: str, numel: int) -> Schema:
    return Schema.of([TensorSpec("w", dtype, (numel,))])


@pytest.mark.parametrize("itemsize", [1, 2])
def test_order_is_a_bijection_and_monotone(itemsize: int) -> None:
    """Every pattern has its own key; keys follow the numbers; -0 comes right before +0."""
    n = 1 << 8 * itemsize
    bits = np.arange(n, dtype=order.UNSIGNED[itemsize])
    keys = order.to_key(bits)
    assert np.array_equal(np.sort(keys), np.arange(-n // 2, n // 2))
    assert np.array_equal(order.from_key(keys), bits)
    sign = n // 2
    assert (int(keys[sign]), int(keys[0])) == (-1, 0)
    if itemsize == 2:
        values = bits.view(np.float16).astype(np.float64)
        finite = np.isfinite(values)
        by_key = values[finite][np.argsort(keys[finite])]
        assert (np.diff(by_key) >= 0).all()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_steps_lead_from_old_to_new(itemsize: int) -> None:
    """For random patterns of each width, old plus step is new, also across the wrap."""
    rng = np.random.default_rng(itemsize)
    kind = order.UNSIGNED[itemsize]
    old = rng.integers(0, np.iinfo(kind).max, 5000, dtype=kind, endpoint=True)
    new = rng.integers(0, np.iinfo(kind).max, 5000, dtype=kind, endpoint=True)
    steps = order.steps_between(old, new)
    assert np.array_equal(order.add_steps(old, steps), new)
    assert np.array_equal(order.add_steps(new, -steps), old)


def test_all_bf16_pairs_of_neighbours_travel() -> None:
    """A delta from every one of the 65,536 patterns to another is exact."""
    old = np.arange(65536, dtype=np.uint16)
    new = np.roll(old, 12345)
    schema = one("BF16", old.size)
    steps = order.steps_between(old, new)
    change = Change(0, np.arange(old.size, dtype=np.int32), steps, None, 1, 2)
    (data,) = codec.encode_delta(schema, [change])
    (back,) = codec.decode(data, schema, "delta")
    assert same(back, change)
    assert back.indices is not None
    assert back.steps is not None
    assert np.array_equal(order.add_steps(old[back.indices], back.steps), new)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_delta_round_trip(data: st.DataObject) -> None:
    """Any set of changes to any tensors comes back as it was, in as many blobs as needed."""
    specs, changes = [], []
    for place in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(STEPPED))
        numel = data.draw(st.integers(1, 400))
        specs.append(TensorSpec(f"t{place}", dtype, (numel,)))
        seed = data.draw(st.integers(0, 2**32))
        rng = np.random.default_rng(seed)
        nnz = data.draw(st.integers(1, numel))
        kind = order.SIGNED[specs[-1].itemsize]
        indices = np.sort(rng.choice(numel, nnz, replace=False)).astype(np.int32)
        info = np.iinfo(kind)
        steps = rng.integers(info.min, info.max, nnz, dtype=kind, endpoint=True)
        steps[steps == 0] = 1
        steps[rng.random(nnz) < 0.7] = -1
        marks = [int(mark) for mark in rng.integers(0, 2**63, 2)]
        changes.append(Change(place, indices, steps, None, *marks))
    schema = Schema.of(specs)
    limit = data.draw(st.sampled_from([1, 64 << 20]))
    blobs = list(codec.encode_delta(schema, changes, blob_bytes=limit))
    assert len(blobs) == (len(changes) if limit == 1 else 1)
    back = [change for item in blobs for change in codec.decode(item, schema, "delta")]
    assert len(back) == len(changes)
    assert all(same(*pair) for pair in zip(changes, back, strict=True))


@pytest.mark.parametrize("numel", [0, 1, 7, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
@pytest.mark.parametrize("dtype", ["U8", "BF16"])
def test_raw_round_trip_around_the_chunk(numel: int, dtype: str) -> None:
    """Whole tensors of no, one and around one chunk of elements are exact."""
    schema = one(dtype, numel)
    kind = order.UNSIGNED[schema.tensors[0].itemsize]
    bits = np.random.default_rng(numel).integers(0, 256, numel).astype(kind)
    change = Change(0, None, None, bits, 0, 5)
    (data,) = codec.encode_anchor(schema, [change])
    (back,) = codec.decode(data, schema, "anchor")
    assert same(back, change)


def test_wide_gaps_and_indices() -> None:
    """A tensor of more than 2^31 elements has int64 indices, exact at both of its ends."""
    schema = Schema.of([TensorSpec("w", "BF16", (1 << 20, 1 << 20))])
    indices = np.array([0, 1, (1 << 31) + 5, (1 << 40) - 1], np.int64)
    change = Change(0, indices, np.array([1, -1, 300, -32768], np.int16), None, 0, 0)
    (data,) = codec.encode_delta(schema, [change])
    (back,) = codec.decode(data, schema, "delta")
    assert same(back, change)


def test_nothing_changed_is_no_blob() -> None:
    """A delta without changes has no blobs."""
    assert list(codec.encode_delta(make.SCHEMA, [])) == []


def test_reference_carries_fingerprints() -> None:
    """A reference blob gives each tensor's fingerprint and nothing else."""
    marks = list(range(len(make.SCHEMA)))
    data = codec.encode_reference(make.SCHEMA, marks)
    back = list(codec.decode(data, make.SCHEMA, "reference"))
    assert [change.target for change in back] == marks
    assert all(change.nnz == 0 for change in back)


@pytest.mark.parametrize(("name", "kind"), [("delta", "delta"), ("anchor", "anchor")])
def test_golden_blobs_decode(name: str, kind: blob.BlobKind) -> None:
    """The stored blobs decode to the stored inputs, for ever."""
    data = (make.HERE / f"{name}.blob").read_bytes()
    expected = make.changes() if kind == "delta" else make.anchor()
    back = list(codec.decode(data, make.SCHEMA, kind))
    assert len(back) == len(expected)
    assert all(same(*pair) for pair in zip(expected, back, strict=True))


@pytest.mark.parametrize("shards", [1, 2])
def test_golden_hazard_blobs_decode(shards: int) -> None:
    """The stored hazard blobs decode to the stored inputs, with the base that a script makes."""
    data, base = (make.HERE / f"hazard_{shards}.blob").read_bytes(), make.hazard_base()
    lanes = codec.HostLanes(base.__getitem__)
    back = list(codec.decode(data, make.HAZARD_SCHEMA, "delta", lanes))
    expected = make.hazard_changes()
    assert len(back) == len(expected)
    assert all(same(*pair) for pair in zip(expected, back, strict=True))
    taken = {entry.codec for entry in blob.parse_blob(data, make.HAZARD_SCHEMA, "delta").entries}
    assert taken == ({blob.HAZARD, blob.RAW} | ({blob.GAP} if shards > 1 else set()))


@pytest.mark.parametrize("name", sorted(make.golden()))
def test_golden_bytes(name: str) -> None:
    """Encoding gives the stored bytes; behind a frame, where another zstandard may differ, the
    stored content."""
    stored, now = (make.HERE / name).read_bytes(), make.golden()[name]
    if not name.endswith(".blob"):
        assert stored == now
        return
    kind: blob.BlobKind = "delta"
    if name in ("anchor.blob", "reference.blob"):
        kind = "anchor" if name == "anchor.blob" else "reference"
    schema = make.HAZARD_SCHEMA if name.startswith("hazard") else make.SCHEMA
    old, new = (blob.parse_blob(data, schema, kind) for data in (stored, now))
    assert old.entries == new.entries
    assert old.sections.keys() == new.sections.keys()
    for tag, part in old.sections.items():
        if tag in (blob.GAP_SYMBOLS, blob.STEP_SYMBOLS):
            n = zstandard.frame_content_size(part)
            assert entropy.decompress(part, n) == entropy.decompress(new.sections[tag], n)
        elif tag not in (blob.RAW_FRAMES, blob.RAW_SIZES):
            assert bytes(part) == bytes(new.sections[tag])


def delta_blob() -> bytes:
    return make.golden()["delta.blob"]


def rebuilt(sections: dict[int, bytes], entries: tuple[blob.Entry, ...] | None = None) -> bytes:
    """The golden delta with some of its parts replaced."""
    good = blob.parse_blob(delta_blob(), make.SCHEMA, "delta")
    parts = {tag: bytes(part) for tag, part in good.sections.items()} | sections
    return blob.build_blob("delta", make.SCHEMA, entries or good.entries, parts)


def entries_with(place: int, **fields: int) -> tuple[blob.Entry, ...]:
    good = blob.parse_blob(delta_blob(), make.SCHEMA, "delta")
    entries = list(good.entries)
    entries[place] = blob.Entry(**{**entries[place].__dict__, **fields})
    return tuple(entries)


def symbols(tag: int) -> bytes:
    part = blob.parse_blob(delta_blob(), make.SCHEMA, "delta").sections[tag]
    return entropy.decompress(part, zstandard.frame_content_size(part))


def test_damaged_blobs_are_refused_by_name() -> None:
    """One table of damage, each with the error and the words it must name."""
    good = delta_blob()
    head = struct.Struct("<8sBBHII32s")
    gaps, steps = symbols(blob.GAP_SYMBOLS), symbols(blob.STEP_SYMBOLS)
    frame = zstandard.ZstdCompressor().compress
    n_stepped = make.SCHEMA.tensors[0].numel
    table: list[tuple[bytes, type[DeltaError], str]] = [
        (b"", FormatError, "shorter than its header"),
        (good[:20], FormatError, "shorter than its header"),
        (good[:-1], FormatError, "section does not fit"),
        (good[: head.size + 5], FormatError, "entries do not fit"),
        (good + b"x", FormatError, "bytes after the last section"),
        (b"x" + good[1:], FormatError, "not a blob"),
        (good[:7] + b"\x02" + good[8:], UnsupportedError, "newer format"),
        (good[:8] + b"\x02" + good[9:], FormatError, "of another kind"),
        (good[:9] + b"\x01" + good[10:], UnsupportedError, "unknown feature"),
        (good[:20] + bytes(32) + good[52:], FormatError, "another schema"),
        (good[:12] + b"\xff" * 4 + good[16:], FormatError, "entries do not fit"),
        (rebuilt({}, entries_with(0, codec=9)), UnsupportedError, "unknown codec"),
        (rebuilt({}, entries_with(0, n_changed=0)), FormatError, "more changes than elements"),
        (
            rebuilt({}, entries_with(0, n_changed=n_stepped + 1)),
            FormatError,
            "more changes than elements",
        ),
        (rebuilt({}, entries_with(5, codec=blob.GAP)), FormatError, "steps for a type without"),
        (rebuilt({}, entries_with(5, tensor=7)), FormatError, "unknown tensor"),
        (rebuilt({}, entries_with(5, n_changed=3)), FormatError, "counts no changes"),
        (rebuilt({}, entries_with(0, n_changed=3)), FormatError, "another content size"),
        (rebuilt({blob.GAP_SYMBOLS: b""}), FormatError, "stream is missing"),
        (rebuilt({blob.GAP_SYMBOLS: b"xxxx"}), FormatError, "zstandard"),
        (rebuilt({blob.GAP_SYMBOLS: frame(gaps) + b"x"}), FormatError, "zstandard"),
        (rebuilt({blob.GAP_SYMBOLS: frame(gaps + b"\0")}), FormatError, "another content size"),
        (rebuilt({blob.GAP_SYMBOLS: frame(b"\xff" + gaps[1:])}), FormatError, "unknown symbol"),
        (rebuilt({blob.GAP_SYMBOLS: frame(b"\x9f" + gaps[1:])}), FormatError, "out of range"),
        (rebuilt({blob.GAP_SYMBOLS: frame(gaps[:-1] + b"\x2f")}), FormatError, "low bits"),
        (rebuilt({blob.GAP_BITS: b""}), FormatError, "low bits end too early"),
        (rebuilt({blob.STEP_SYMBOLS: frame(steps[:-1] + b"\x9f")}), FormatError, "gap: "),
        (rebuilt({blob.STEP_BITS: b"\0" * 5000}), FormatError, "bytes left over"),
        (rebuilt({blob.RAW_SIZES: b"\1\0\0\0"}), FormatError, "do not fill their section"),
        (rebuilt({blob.RAW_SIZES: b""}), FormatError, "another number of frames"),
        (rebuilt({blob.RAW_FRAMES: b"abc"}), FormatError, "do not fill their section"),
        (rebuilt({77: b"abc"}), UnsupportedError, "unknown section"),
    ]
    for data, kind, words in table:
        with pytest.raises(kind, match=words):
            list(codec.decode(data, make.SCHEMA, "delta"))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flips_and_cuts_never_crash(data: st.DataObject) -> None:
    """A damaged blob gives a typed error, or changes that stay inside their tensors."""
    damaged = bytearray(make.golden()[data.draw(st.sampled_from(["delta.blob", "anchor.blob"]))])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    for kind in ("delta", "anchor", "reference"):
        try:
            for change in codec.decode(bytes(damaged), make.SCHEMA, kind):
                spec = make.SCHEMA.tensors[change.tensor]
                if change.indices is not None:
                    assert change.indices[0] >= 0
                    assert change.indices[-1] < spec.numel
                    assert (np.diff(change.indices) > 0).all()
                if change.bits is not None:
                    assert change.bits.size == spec.numel
        except DeltaError:
            continue


def test_a_frame_that_claims_too_much_allocates_nothing() -> None:
    """A small frame that states a huge content size is refused before memory is taken."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    data = rebuilt({blob.GAP_SYMBOLS: bomb})
    tracemalloc.start()
    with pytest.raises(FormatError, match="another content size"):
        list(codec.decode(data, make.SCHEMA, "delta"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_too_many_changes_in_a_blob_are_refused() -> None:
    """Counts whose sum is over the limit are refused before memory is taken."""
    n = gap.MAX_CHANGES + 1
    schema = one("BF16", n)
    data = blob.build_blob("delta", schema, [blob.Entry(0, blob.GAP, n, 0, 0)], {1: b"x"})
    with pytest.raises(FormatError, match="too many changes"):
        list(codec.decode(data, schema, "delta"))


def test_encoders_refuse_disorder() -> None:
    """Changes out of schema order, or without content, are the caller's mistake."""
    first, second = make.changes()[:2]
    with pytest.raises(ValueError, match="schema order"):
        list(codec.encode_delta(make.SCHEMA, [second, first]))
    with pytest.raises(ValueError, match="neither"):
        list(codec.encode_delta(make.SCHEMA, [Change(0, None, None, None, 0, 0)]))


def test_encoding_is_deterministic() -> None:
    """Equal changes give equal bytes, and the target fingerprints are those of the new bits."""
    assert delta_blob() == next(codec.encode_delta(make.SCHEMA, make.changes()))
    for change in make.changes():
        spec = make.SCHEMA.tensors[change.tensor]
        bits = make.base()[change.tensor].copy()
        if change.bits is not None:
            bits = change.bits
        elif change.indices is not None and change.steps is not None:
            bits[change.indices] = order.add_steps(bits[change.indices], change.steps)
        assert fingerprint(bits, spec) == change.target


def test_a_tensor_larger_than_a_blob_is_told_by_name(monkeypatch):
    monkeypatch.setattr(codec.writer, "MAX_BLOB_BYTES", 4000)
    bits = np.random.default_rng(0).integers(0, 1 << 16, 4096, dtype=np.uint16)
    with pytest.raises(UnsupportedError, match="name='w'"):
        list(codec.encode_anchor(one("BF16", 4096), [Change(0, None, None, bits, 0, 0)]))


def test_a_tensor_larger_than_any_memory_is_told_by_name():
    schema = one("F64", 1 << 40)
    n = 1 << 18
    sections = {blob.RAW_SIZES: np.ones(n, "<u4").tobytes(), blob.RAW_FRAMES: bytes(n)}
    data = blob.build_blob("anchor", schema, [blob.Entry(0, blob.RAW, 0, 0, 5)], sections)
    with pytest.raises(ModelMismatchError, match="name='w'"):
        list(codec.decode(data, schema, "anchor"))
