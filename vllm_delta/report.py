"""The command line's results as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def ls(result: Row) -> Iterator[str]:
    """A line per version."""
    yield f"channel {result['channel']}  epoch {result['epoch']}  records {result['seq']}"
    rows = [["VERSION", "KIND", "BYTES", "BLOBS", "AGE", "EPOCH", "SEQ", "ROOT"]]
    for row in result["versions"]:
        kind = row["kind"] + (" (reference)" if row["reference"] else "")
        if row["kind"] == "merged":
            kind += f" (on {row['base']['number']})"
        columns = [row["number"], kind, size(row["payload_bytes"]), row["n_blobs"]]
        columns += [_age(row["age_s"]), row["epoch"], row["seq"], row["root"][:12]]
        rows.append([str(column) for column in columns])
    yield from _table(rows, left={1, 7})


def show(result: Row) -> Iterator[str]:
    """A version's manifest and a line per tensor."""
    base = result["base"]
    reference = result["reference"]
    origin = f"on {base['number']}" if base else "whole"
    if reference:
        origin = f"of {reference['repository']} at {reference['revision']}"
    yield f"version {result['number']}  {result['kind']} {origin}  root {result['root']}"
    yield f"record {result['seq']}  epoch {result['epoch']}  {_age(result['age_s'])} ago"
    yield f"by {result['writer']}"
    yield f"{_signed(result['signature'])}, {'sealed' if result['sealed'] else 'not sealed'}"
    yield (
        f"payload {size(result['payload_bytes'])}, {_count(result['n_blobs'], 'blob')}, "
        f"{result['payload_percent']:.4f} % of {size(result['model_bytes'])}"
    )
    rows = [["TENSOR", "TYPE", "SHAPE", "CODEC", "CHANGED", "PERCENT"]]
    n_changed = 0
    for row in result["tensors"]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        columns = [row["name"], row["dtype"], shape, row["codec"]]
        if row["n_changed"] is None:
            rows.append([*columns, "" if row["codec"] == "reference" else "whole", ""])
        else:
            n_changed += row["n_changed"]
            rows.append([*columns, str(row["n_changed"]), f"{row['changed_percent']:.4f}"])
    yield from _table(rows, left={0, 1, 2, 3})
    percent = 100.0 * n_changed / max(result["n_weights"], 1)
    yield f"{len(rows) - 1} of {result['n_tensors']} tensors, {n_changed} steps ({percent:.4f} %)"


def verify(result: Row) -> Iterator[str]:
    """What has been proven."""
    yield f"channel {result['channel']}: {result['n_records']} records form one chain"
    n_proven = sum(row["proven"] for row in result["versions"])
    if result["signed"]:
        yield "every record is signed by a trusted key"
    yield f"{result['n_versions']} anchors and deltas fetched and checked, all roots match"
    if result["n_unproven"]:
        yield f"{_count(result['n_unproven'], 'merged delta')} fetched, provable from the base only"
    if result["proven"]:
        yield "every version's weights are proven bit for bit"
    elif result["versions"]:
        yield f"weights proven for {n_proven}; give the public checkpoint as --base for the others"


def apply(result: Row) -> Iterator[str]:
    """What has been written."""
    yield f"version {result['number']} in {result['out']}: {', '.join(result['files'])}"


def gc(result: Row) -> Iterator[str]:
    """What has been deleted."""
    verb = "would be deleted" if result["dry_run"] else "deleted"
    n_bytes = result["n_bytes"]
    known = "" if n_bytes is None else f", {size(n_bytes)}"
    yield f"{_count(result['n_objects'], 'object')} {verb}{known}"


def keygen(result: Row) -> Iterator[str]:
    """Which files hold what."""
    kind = "sealing" if result["public_file"] is None else "signing"
    yield f"{kind} key {result['key_id']} in {result['file']}: keep it secret"
    if result["public_file"] is None:
        yield "trainers and readers need this file: --sealing-key"
    else:
        yield f"readers need {result['public_file']}: --trusted-key"


def _signed(signature: Row | None) -> str:
    if signature is None:
        return "not signed"
    if signature["trusted"]:
        return f"signed by {signature['key_id']}, a trusted key"
    return f"signature by {signature['key_id']} not checked, for want of --trusted-key"


def printable(line: str, encoding: str | None) -> str:
    """A line as a terminal may show it: names come from a channel and might steer one."""
    safe = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
    encoding = encoding or "ascii"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def _table(rows: Sequence[Sequence[str]], *, left: set[int]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def size(n_bytes: float) -> str:
    """A number of bytes, with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < length:
            return f"{seconds:.0f} {unit}"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:.0f} d"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
