"""What the figures must reach, whether they do, and the tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

FEW_PERCENT = 1.5
"""Changed weights, in percent, below which more is asked."""
ENTROPY_FACTOR, ENTROPY_BYTES = 1.03, 1536
THREADS_RATIO, CONTROL_RATIO = 1.7, 1.9

_ROW = "{:<11} {:>11} {:>9} {:>10} {:>10} {:>10} {:>10}  {}"
_VERDICT = "{:<52} {:<16} {:>8} {:>5} {:>8}  {}"


@dataclass(frozen=True)
class _Claim:
    """One requirement on every step of one view: `ratio` of two codecs' rows is at least `least`.

    Attributes:
        ratio: (ours, theirs) → how many times better ours is.
        least: changed percent → what is asked.
    """

    what: str
    view: str
    theirs: str
    ratio: Callable[[Row, Row], float]
    least: Callable[[float], float]


def _smaller(ours: Row, theirs: Row) -> float:
    return float(theirs["bytes"] / ours["bytes"])


def _faster(key: str) -> Callable[[Row, Row], float]:
    return lambda ours, theirs: float(ours[key] / theirs[key])


def _claims() -> Iterable[_Claim]:
    yield _Claim(
        "times smaller than arc3", "tensors", "arc3", _smaller, lambda p: _few(p, 2.0, 1.8)
    )
    yield _Claim("times smaller than arc3_best", "tensors", "arc3_best", _smaller, lambda _: 1.7)
    yield _Claim("times smaller than arc3", "large", "arc3", _smaller, lambda _: 1.65)
    yield _Claim("times smaller than arc3_best", "large", "arc3_best", _smaller, lambda _: 1.65)
    for view in ("tensors", "large"):
        faster = _faster("encode_mb_s")
        yield _Claim("times faster than arc3 to encode", view, "arc3", faster, lambda _: 5.0)
    for view in ("tensors", "large"):
        faster = _faster("decode_mb_s")
        yield _Claim(
            "times faster than arc3 to decode", view, "arc3", faster, lambda p: _few(p, 1.8, 1.0)
        )


def _few(percent: float, below: float, above: float) -> float:
    return below if percent < FEW_PERCENT else above


def judge(rows: list[Row], threads: list[Row]) -> list[Row]:
    """Every requirement on every trace, by the trace's worst step; wrong answers are left out."""
    verdicts = []
    found = {(r["trace"], r["step"], r["view"], r["codec"]): r for r in rows if r["exact"]}
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for claim in _claims():
            cases = [
                (claim.ratio(ours, theirs), claim.least(ours["changed_percent"]), step)
                for (name, step, view, codec), ours in found.items()
                if (name, view, codec) == (trace, claim.view, "hazard")
                and (theirs := found.get((trace, step, view, claim.theirs)))
            ]
            if cases:
                ratio, least, step = min(cases, key=lambda case: case[0] / case[1])
                what = f"{claim.what}, {claim.view}"
                verdicts.append(_verdict(what, trace, step, ratio, least, ratio >= least))
        verdicts += _entropy(trace, found)
        verdicts += _threads(trace, [row for row in threads if row["trace"] == trace])
    return verdicts


def _entropy(trace: str, found: dict[tuple[str, int, str, str], Row]) -> Iterable[Row]:
    """Bytes over what is allowed above the entropy, in percent of the entropy; large view."""
    for key, what in (("entropy", "exponent and type"), ("entropy_untyped", "exponent")):
        cases = []
        for (name, step, view, codec), row in found.items():
            if (name, view, codec) == (trace, "large", "hazard"):
                entropy = row[f"{key}_percent"] * row["model_bytes"] / 100
                if entropy > 0:
                    above = 100 * ((row["bytes"] - ENTROPY_BYTES) / entropy - 1)
                    cases.append((above, step))
        if cases:
            above, step = max(cases)
            most = 100 * (ENTROPY_FACTOR - 1)
            name = f"% over entropy given {what}, less 1.5 KB"
            yield _verdict(name, trace, step, above, most, above <= most, at_most=True)


def _threads(trace: str, rows: list[Row]) -> Iterable[Row]:
    ratios = {row["work"]: row["ratio"] for row in rows}
    for work in ("encode", "decode"):
        if work in ratios:
            met = ratios[work] >= THREADS_RATIO if ratios["control"] >= CONTROL_RATIO else None
            what = f"two threads over one, {work} (control {ratios['control']:.2f})"
            yield _verdict(what, trace, rows[0]["step"], ratios[work], THREADS_RATIO, met)


def _verdict(
    what: str,
    trace: str,
    step: int,
    value: float,
    wanted: float,
    met: bool | None,
    *,
    at_most: bool = False,
) -> Row:
    """`met` None: it does not apply on this machine."""
    return {
        "what": what,
        "trace": trace,
        "step": step,
        "value": value,
        "wanted": wanted,
        "at_most": at_most,
        "met": met,
    }


def print_head() -> None:
    """Say what the columns are."""
    print(
        "MB/s: 10^6 bytes of weights per CPU second of the process, all threads summed, best of\n"
        "several; by the clock beside it. arc3 is a race against time: its median size counts.",
        flush=True,
    )


def print_case(row: Row) -> None:
    """The line above the rows of one step and view; `row` is any of them."""
    print(
        f"\n{row['trace']}, step {row['step']}, {row['view']}: {row['changed_percent']:.3f} % "
        f"changed, entropy {row['entropy_percent']:.4f} % of {row['model_bytes']} bytes"
    )
    print(
        _ROW.format("codec", "bytes", "%", "encode", "(clock)", "decode", "(clock)", ""), flush=True
    )


def print_row(row: Row) -> None:
    if not row["exact"]:
        print(_ROW.format(row["codec"], *["wrong"] * 6, "NOT EXACT"), flush=True)
        return
    speeds = [row[f"{way}{clock}_mb_s"] for way in ("encode", "decode") for clock in ("", "_wall")]
    spread = "" if row["smallest_bytes"] == row["largest_bytes"] else _spread(row)
    figures = (f"{speed:.0f}" for speed in speeds)
    print(
        _ROW.format(row["codec"], row["bytes"], f"{row['percent']:.4f}", *figures, spread),
        flush=True,
    )


def _spread(row: Row) -> str:
    return f"from {row['smallest_bytes']} to {row['largest_bytes']} bytes"


def print_tiles(tiles: list[Row]) -> None:
    for row in tiles:
        added = f"{row['added_bytes']:+d} bytes" if row["exact"] else "NOT EXACT"
        print(f"hazard with tiles for {row['shards']} shards: {added}")


def print_threads(rows: list[Row]) -> None:
    for row in rows:
        print(
            f"two threads, {row['work']}: {1e3 * row['one_s']:.1f} → {1e3 * row['two_s']:.1f} ms,"
            f" {row['ratio']:.2f} times faster"
        )


def print_verdicts(verdicts: list[Row]) -> None:
    """Every requirement beside what was reached, on the trace's worst step."""
    if not verdicts:
        return
    print("\n" + _VERDICT.format("hazard, worst step", "trace", "", "step", "required", ""))
    for verdict in sorted(verdicts, key=lambda verdict: verdict["what"]):
        met = {True: "met", False: "NOT MET", None: "does not apply"}[verdict["met"]]
        sign = "≤" if verdict["at_most"] else "≥"
        value, wanted = f"{verdict['value']:.2f}", f"{sign} {verdict['wanted']:.2f}"
        print(
            _VERDICT.format(verdict["what"], verdict["trace"], value, verdict["step"], wanted, met)
        )
