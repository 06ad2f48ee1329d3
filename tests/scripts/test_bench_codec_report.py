"""What `scripts/bench codec` says of the requirements, on made-up figures."""

from __future__ import annotations

import pytest

from scripts._bench import codec_report


def row(name: str, n_bytes: int, speed: float, *, view: str, step: int = 1, percent: float = 1.0):
    return {
        "trace": "t", "step": step, "view": view, "codec": name, "exact": True, "bytes": n_bytes,
        "encode_mb_s": speed, "decode_mb_s": speed, "changed_percent": percent,
        "entropy_percent": 1.0, "entropy_untyped_percent": 1.0, "model_bytes": 10_000_000,
    }  # fmt: skip


def test_requirements_are_judged_by_the_worst_step():
    """1.9 times smaller is enough where much changed and too little where little did."""
    rows = []
    for step, percent, theirs in ((1, 2.0, 190_000), (2, 1.0, 190_000)):
        rows.append(row("hazard", 100_000, 10.0, view="tensors", step=step, percent=percent))
        rows.append(row("arc3", theirs, 2.0, view="tensors", step=step, percent=percent))
    (size,) = (v for v in codec_report.judge(rows, []) if v["what"].startswith("times smaller"))
    assert (size["step"], size["wanted"], size["met"]) == (2, 2.0, False)
    assert size["value"] == pytest.approx(1.9)
    (size,) = (v for v in codec_report.judge(rows[:2], []) if v["what"].startswith("times smaller"))
    assert (size["wanted"], size["met"]) == (1.8, True)


@pytest.mark.parametrize(("n_bytes", "met"), [(104_536, True), (104_537, False)])
def test_the_distance_to_the_entropy_allows_a_part_and_some_bytes(n_bytes, met):
    """Three percent of 100,000 bytes and 1,536 bytes more."""
    verdicts = codec_report.judge([row("hazard", n_bytes, 1.0, view="large")], [])
    assert [v["met"] for v in verdicts if "over entropy" in v["what"]] == [met, met]


def test_a_machine_whose_control_gains_nothing_judges_no_threads():
    """Two threads are judged where pure arithmetic shows that there are two cores."""
    for control, ratio, met in ((1.95, 1.75, True), (1.95, 1.65, False), (1.5, 1.2, None)):
        threads = [
            {
                "trace": "t",
                "step": 1,
                "work": work,
                "ratio": control if work == "control" else ratio,
            }
            for work in ("control", "encode", "decode")
        ]
        rows = [row("hazard", 1, 1.0, view="tensors")]
        verdicts = [v for v in codec_report.judge(rows, threads) if "threads" in v["what"]]
        assert [v["met"] for v in verdicts] == [met, met]
