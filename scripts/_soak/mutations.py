"""Seeded damage of blobs: anywhere, and where it does most."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from scripts._soak.subjects import Subject
from vllm_delta.codec import encode_delta
from vllm_delta.codec.blob import Entry, build_blob, put_uvarint

Mutation = Callable[[random.Random, Subject, Sequence[Subject]], bytes]
"""Makes damaged bytes of a subject; the others of its schema and all others give parts."""

_HEADER_BYTES = 52
_LINE_BYTES = 9


def regions(subject: Subject) -> list[tuple[int, int]]:
    """Where header, entries, section table and each section lie."""
    data, sections = subject.data, subject.blob.sections
    total = sum(len(part) for part in sections.values())
    table = len(data) - total - _LINE_BYTES * len(sections)
    ends = [_HEADER_BYTES, table, len(data) - total]
    for part in sections.values():
        ends.append(ends[-1] + len(part))
    return list(zip([0, *ends], ends, strict=False))


def _place(draw: random.Random, subject: Subject) -> int:
    """A byte: half the time of a region drawn first, so that short ones are hit as well."""
    if draw.random() < 0.5:
        return draw.randrange(len(subject.data))
    return draw.randrange(*draw.choice(regions(subject)))


def flips(draw: random.Random, subject: Subject, _: Sequence[Subject]) -> bytes:
    """One bit, or a few."""
    data = bytearray(subject.data)
    for _n in range(draw.choice([1, 1, 1, 2, 4])):
        data[_place(draw, subject)] ^= 1 << draw.randrange(8)
    return bytes(data)


def numbers(draw: random.Random, subject: Subject, _: Sequence[Subject]) -> bytes:
    """Bytes of another value, or a run of one value."""
    data = bytearray(subject.data)
    for _n in range(draw.choice([1, 1, 2])):
        at = _place(draw, subject)
        data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    if draw.random() < 0.2:
        at, n = _place(draw, subject), draw.randrange(1, 12)
        data[at : at + n] = bytes([draw.choice([0, 0xFF])]) * len(data[at : at + n])
    return bytes(data)


def truncations(draw: random.Random, subject: Subject, _: Sequence[Subject]) -> bytes:
    """The end cut off, bytes missing from the middle, or bytes too many."""
    data, at = subject.data, _place(draw, subject)
    way = draw.randrange(4)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + data[at + draw.randrange(1, 16) :]
    if way == 2:
        return data[:at] + draw.randbytes(draw.randrange(1, 16)) + data[at:]
    return data + draw.randbytes(draw.randrange(1, 16))


def splices(draw: random.Random, subject: Subject, others: Sequence[Subject]) -> bytes:
    """A piece of this blob or of another, over what was there or beside it."""
    data = bytearray(subject.data)
    donor = draw.choice([subject, *others]).data
    n = draw.choice([1, 4, 4, 8, 32, 200])
    source, at = draw.randrange(max(1, len(donor) - n)), _place(draw, subject)
    if draw.random() < 0.3:
        source = min(at, len(donor) - 1)  # the same place in the other
    piece = donor[source : source + n]
    data[at : at + (len(piece) if draw.random() < 0.7 else 0)] = piece
    return bytes(data)


def section_splices(draw: random.Random, subject: Subject, others: Sequence[Subject]) -> bytes:
    """Whole sections from another delta of the model, words turned, or sizes shifted."""
    sections = {tag: bytes(part) for tag, part in subject.blob.sections.items()}
    tag = draw.choice(sorted(sections))
    same = [other for other in others if other.schema is subject.schema]
    way = draw.randrange(4)
    if way == 0:
        donor = draw.choice(same).blob
        for wanted in draw.sample(sorted(donor.sections), draw.randrange(1, 4)):
            sections[wanted] = bytes(donor.sections[wanted])
    elif way == 1:
        n = 4 * draw.randrange(1, 64)
        sections[tag] = sections[tag][n:] + sections[tag][:n]
    elif way == 2:
        part, n = sections[tag], draw.choice([4, 8, 16])
        a, b = draw.randrange(len(part)) & ~3, draw.randrange(len(part)) & ~3
        low, high = sorted((a, b))
        if low + n <= high:
            part = (
                part[:low] + part[high : high + n] + part[low + n : high] + part[low : low + n]
            ) + part[high + n :]
        sections[tag] = part
    else:
        del sections[tag]
    return build_blob("delta", subject.schema, subject.blob.entries, sections)


def directories(draw: random.Random, subject: Subject, _: Sequence[Subject]) -> bytes:
    """Numbers of the models or of the directory, read and written anew with some others."""
    sections = {tag: bytes(part) for tag, part in subject.blob.sections.items()}
    tag = draw.choice([7, 8, 8, 8])
    values = _uvarints(sections[tag])
    for _n in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(values))
        way = draw.randrange(8)
        if way == 0:
            values[at] = max(0, values[at] + draw.choice([-2, -1, 1, 2]))
        elif way == 1:
            values[at] = draw.choice([0, 1, 2, 1 << draw.randrange(62), (1 << 63) - 1])
        elif way == 2:
            other = draw.randrange(len(values))
            values[at], values[other] = values[other], values[at]
        elif way == 3:
            values.insert(at, draw.choice([0, values[at]]))
        elif way == 4 and len(values) > 1:
            del values[at]
        else:  # one more here, one fewer near by, as in the next lane: sums stay
            other, n = (at + draw.choice([1, 2, 2, 2, 4])) % len(values), draw.choice([1, 1, 2, 9])
            values[at], values[other] = values[at] + n, max(0, values[other] - n)
    out = bytearray()
    for value in values:
        put_uvarint(out, value)
    sections[tag] = bytes(out)
    return build_blob("delta", subject.schema, subject.blob.entries, sections)


def entries(draw: random.Random, subject: Subject, others: Sequence[Subject]) -> bytes:
    """Entries left out, exchanged, taken from another delta, or with another number."""
    lines = list(subject.blob.entries)
    at = draw.randrange(len(lines))
    way = draw.randrange(6)
    if way == 0 and len(lines) > 1:
        del lines[at]
    elif way == 1:
        same = [other for other in others if other.schema is subject.schema]
        donor = {entry.tensor: entry for entry in draw.choice(same).blob.entries}
        lines[at] = donor.get(lines[at].tensor, lines[at])
    elif way == 2:
        other = draw.randrange(len(lines))
        lines[at], lines[other] = _exchanged(draw, lines[at], lines[other])
    elif way == 3:
        lines[at] = replace(lines[at], codec=draw.choice([0, 1, 2, 3, 255]))
    elif way == 4:
        n = max(0, lines[at].n_changed + draw.choice([-1, 1, 1 << draw.randrange(40)]))
        lines[at] = replace(lines[at], n_changed=n)
    else:
        field = draw.choice(["touched", "target"])
        value = getattr(lines[at], field) ^ 1 << draw.randrange(64)
        lines[at] = replace(lines[at], **{field: value})
    sections = {tag: bytes(part) for tag, part in subject.blob.sections.items()}
    return build_blob("delta", subject.schema, lines, sections)


def omissions(draw: random.Random, subject: Subject, others: Sequence[Subject]) -> bytes:
    """A good blob, but of a delta that lacks a tensor, or of another delta."""
    same = [other.data for other in others if other.schema is subject.schema]
    if draw.random() < 0.3:
        return draw.choice(same)
    changes = list(subject.changes)
    del changes[draw.randrange(len(changes))]
    (data,) = encode_delta(
        subject.schema,
        changes,
        codec="hazard",
        base=subject.base.__getitem__,
        shards=subject.shards,
    )
    return data


def _exchanged(draw: random.Random, a: Entry, b: Entry) -> tuple[Entry, Entry]:
    """Two entries that have exchanged all but their tensors, or one field."""
    if draw.random() < 0.5:
        return replace(b, tensor=a.tensor), replace(a, tensor=b.tensor)
    field = draw.choice(["codec", "n_changed", "touched", "target"])
    mine, theirs = getattr(a, field), getattr(b, field)
    return replace(a, **{field: theirs}), replace(b, **{field: mine})


def _uvarints(data: bytes) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
    return values


BLOBS: dict[str, Mutation] = {
    "flips": flips,
    "numbers": numbers,
    "truncations": truncations,
    "splices": splices,
    "sections": section_splices,
    "directories": directories,
    "entries": entries,
    "omissions": omissions,
}
"""What damages blobs, by name."""
