"""Manifests, schemas and envelopes: round trips, and one named error for each lie."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta.errors import (
    EXIT_CODES,
    BaseMismatchError,
    DeltaError,
    FormatError,
    ModelMismatchError,
    UnsupportedError,
)
from vllm_delta.format import (
    DTYPES,
    MAX_BLOB_BYTES,
    NO_PARENT,
    BlobRef,
    Manifest,
    Reference,
    Schema,
    TensorSpec,
    Version,
    canonical,
    open_envelope,
    parse_manifest,
    parse_schema,
    seal,
    unseal,
)

HEX = "0123456789abcdef" * 4
V0, V1 = Version(0, HEX), Version(1, HEX[::-1])
SCHEMA = Schema.of(
    [TensorSpec("b", "BF16", (3, 4)), TensorSpec("a", "F32", (5,)), TensorSpec("c", "I64", ())]
)


def delta(**changes: Any) -> Manifest:
    manifest = Manifest(
        channel="c" * 32,
        seq=7,
        epoch=2,
        parent=HEX,
        kind="delta",
        base=V0,
        target=V1,
        anchor=3,
        low=1,
        schema=BlobRef(HEX, 100),
        blobs=(BlobRef(HEX, 1000, 2),),
        reference=None,
        writer="trainer",
        time=12.5,
    )
    return replace(manifest, **changes)


MANIFESTS = [
    delta(),
    delta(kind="fence", base=V0, target=V0, blobs=()),
    delta(
        kind="fence",
        seq=1,
        parent=NO_PARENT,
        base=None,
        target=None,
        blobs=(),
        anchor=None,
        schema=None,
    ),
    delta(kind="merged", target=Version(2, HEX[::-1])),
    delta(kind="merged", base=V1, target=Version(70, HEX)),
    delta(kind="anchor", base=None, anchor=7),
    delta(kind="anchor", base=None, anchor=7, reference=Reference("org/model", "abc")),
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.kind)
def test_manifest_round_trip(manifest: Manifest) -> None:
    """A manifest comes back equal, and equal content gives equal bytes."""
    data = manifest.to_bytes()
    assert parse_manifest(data) == manifest
    assert parse_manifest(open_envelope(seal(data))) == manifest
    assert parse_manifest(data).to_bytes() == data


LIES: list[tuple[str, Any]] = [
    ("channel", "x"),
    ("channel", "C" * 32),
    ("seq", 0),
    ("seq", True),
    ("seq", 7.0),
    ("seq", "7"),
    ("seq", 10**12),
    ("epoch", 0),
    ("epoch", -1),
    ("parent", "00"),
    ("parent", NO_PARENT),
    ("kind", "fence"),
    ("kind", "anchor"),
    ("base", None),
    ("base", {"number": 5, "root": HEX}),
    ("base", {"number": 0}),
    ("base", {"number": 0, "root": HEX, "more": 1}),
    ("target", None),
    ("target", {"number": 2, "root": HEX}),
    ("target", {"number": -1, "root": HEX}),
    ("target", {"number": 1, "root": "zz"}),
    ("anchor", None),
    ("anchor", 7),
    ("anchor", 8),
    ("low", 0),
    ("low", 8),
    ("schema", None),
    ("blobs", []),
    ("blobs", {}),
    ("blobs", [1]),
    ("blobs", [{"sha256": HEX, "bytes": 0, "shard": 0}]),
    ("blobs", [{"sha256": HEX, "bytes": MAX_BLOB_BYTES + 1, "shard": 0}]),
    ("blobs", [{"sha256": HEX, "bytes": 10, "shard": -1}]),
    ("blobs", [{"sha256": HEX + "0", "bytes": 10, "shard": 0}]),
    ("blobs", [{"sha256": HEX, "bytes": 10, "shard": 0}] * 9000),
    ("reference", {"repository": "x", "revision": "y"}),
    ("reference", "x"),
    ("writer", ""),
    ("writer", "w" * 300),
    ("writer", "\ud800"),
    ("time", "now"),
    ("time", None),
    ("time", True),
]


@pytest.mark.parametrize(("field", "value"), LIES, ids=lambda value: str(value)[:24])
def test_a_lying_manifest_is_refused(field: str, value: Any) -> None:
    """Each field that lies is a `FormatError`."""
    fields = json.loads(delta().to_bytes())
    fields[field] = value
    with pytest.raises(FormatError):
        parse_manifest(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format":1}',
        b"null",
        b"[" * 100_000,
        b'{"format":1,"format":1}',
        b'{"format":NaN}',
        b'{"format":' + b"9" * 5000 + b"}",
        b" " * (1 << 21),
    ],
    ids=["empty", "cut", "list", "binary", "bare", "null", "deep", "twice", "nan", "long", "big"],
)
def test_damaged_json_is_refused(data: bytes) -> None:
    """Anything that is not the JSON we write is a `FormatError`, for every parser."""
    for parse in (parse_manifest, parse_schema, unseal):
        with pytest.raises(FormatError):
            parse(data)


def test_missing_and_unknown_fields_are_refused() -> None:
    """A manifest has its fields and no others."""
    fields = json.loads(delta().to_bytes())
    for name in fields:
        if name == "format":
            continue
        without = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(FormatError, match="missing or unknown"):
            parse_manifest(canonical(without))
    with pytest.raises(FormatError, match="missing or unknown"):
        parse_manifest(canonical({**fields, "extra": 1}))


def test_a_key_that_stands_twice_is_refused() -> None:
    """Of two values for one field neither is believed, in a manifest that is good without."""
    good = delta().to_bytes()
    assert parse_manifest(good) == delta()
    with pytest.raises(FormatError, match="not JSON"):
        parse_manifest(good[:-1] + b',"epoch":2}')


def test_newer_format_asks_for_an_upgrade() -> None:
    """A higher format number, kind or payload type is `UnsupportedError`, not damage."""
    fields = json.loads(delta().to_bytes())
    for change in ({"format": 2}, {"kind": "tile"}):
        with pytest.raises(UnsupportedError) as caught:
            parse_manifest(canonical({**fields, **change}))
        assert caught.value.action == "upgrade"
    with pytest.raises(UnsupportedError):
        unseal(canonical({"payloadType": "text/plain", "payload": "", "signatures": []}))


def test_schema_round_trip_and_order() -> None:
    """A schema sorts its tensors, finds them by name and comes back equal."""
    assert [spec.name for spec in SCHEMA.tensors] == ["a", "b", "c"]
    assert parse_schema(SCHEMA.to_bytes()) == SCHEMA
    assert SCHEMA.index("b") == 1
    assert (SCHEMA.n_weights, SCHEMA.n_bytes) == (5 + 12 + 1, 20 + 24 + 8)
    with pytest.raises(ModelMismatchError) as caught:
        SCHEMA.index("d")
    assert caught.value.name == "d"


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([["b", "BF16", [1]], ["a", "BF16", [1]]], FormatError),
        ([["a", "BF16", [1]], ["a", "BF16", [1]]], FormatError),
        ([["a", "BF16", [-1]]], FormatError),
        ([["a", "BF16", [1.0]]], FormatError),
        ([["a", "BF16", [1 << 41]]], FormatError),
        ([["a", "BF16", [1 << 30, 1 << 30]]], FormatError),
        ([["a", "BF16", [1] * 9]], FormatError),
        ([["", "BF16", [1]]], FormatError),
        ([["a" * 600, "BF16", [1]]], FormatError),
        ([["a", "BF16"]], FormatError),
        (["a"], FormatError),
        ([["a", "F4", [1]]], UnsupportedError),
    ],
)
def test_a_lying_schema_is_refused(rows: list[Any], kind: type[DeltaError]) -> None:
    """Order, duplicates, sizes, names and types are checked."""
    with pytest.raises(kind):
        parse_schema(canonical({"format": 1, "tensors": rows}))


def test_a_schema_has_one_form() -> None:
    """Other bytes for the same schema are refused, so that its digest is its identity."""
    loose = json.dumps(json.loads(SCHEMA.to_bytes())).encode()
    with pytest.raises(FormatError, match="canonical"):
        parse_schema(loose)


@pytest.mark.parametrize(
    "changes",
    [
        {"base": None},
        {"target": None, "schema": None},
        {"target": V1},
        {"base": Version(2, HEX)},
        {"base": Version(3, HEX)},
        {"blobs": ()},
        {"anchor": None},
        {"anchor": 7},
        {"reference": Reference("org/model", "abc")},
    ],
    ids=str,
)
def test_a_merged_delta_leads_over_several_versions(changes: dict[str, Any]) -> None:
    """One version, none or backwards is no merged delta, nor is one without a base or blobs."""
    merged = delta(kind="merged", target=Version(2, HEX))
    assert merged.content == parse_manifest(merged.to_bytes()).content == "delta"
    with pytest.raises(FormatError, match="do not fit"):
        parse_manifest(replace(merged, **changes).to_bytes())


def test_what_the_blobs_of_each_kind_are() -> None:
    """A fence has none; a merged delta's are a delta's."""
    contents = {m.kind: m.content for m in MANIFESTS if m.kind != "fence" and not m.reference}
    assert contents == {"delta": "delta", "merged": "delta", "anchor": "anchor"}
    assert MANIFESTS[-1].content == "reference"
    with pytest.raises(ValueError, match="fence"):
        _ = MANIFESTS[1].content


@given(st.binary(max_size=200))
def test_parsers_never_crash(data: bytes) -> None:
    """Random bytes give a typed error and nothing else."""
    for parse in (parse_manifest, parse_schema, unseal):
        with pytest.raises(DeltaError):
            parse(data)


def test_rows_and_columns() -> None:
    """The two-dimensional view: the last dimension is a row; vectors and scalars are one row."""
    for shape, expected in (
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((3, 4), (3, 4)),
        ((2, 3, 4), (6, 4)),
        ((0, 4), (0, 4)),
        ((4, 0), (0, 1)),
    ):
        spec = TensorSpec("t", "BF16", shape)
        assert (spec.n_rows, spec.n_cols) == expected


def test_every_dtype_has_a_width() -> None:
    """Stepped types are floats of 1, 2 or 4 bytes."""
    assert {d.itemsize for d in DTYPES.values()} == {1, 2, 4, 8}
    assert all(d.itemsize < 8 and d.name[0] in "BF" for d in DTYPES.values() if d.stepped)


def test_errors_travel_between_processes() -> None:
    """An error becomes plain values and comes back with its kind, action and facts."""
    error = BaseMismatchError("another base", name="w", expected=1)
    back = DeltaError.from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(back) is BaseMismatchError
    assert (str(back), back.action, back.name) == (
        "another base name='w' expected=1",
        "reseed",
        "w",
    )
    assert set(EXIT_CODES) >= {cls.action for cls in DeltaError.__subclasses__()}
