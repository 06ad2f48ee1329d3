"""Payload against changed weights, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ENTROPY = "entropy"
_STYLES: dict[str, dict[str, Any]] = {
    _ENTROPY: {"color": "black", "linestyle": ":"},
    "xor_zstd": {"marker": "x", "linestyle": "--"},  # lies on arc2
}


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """One panel per view, both axes logarithmic, a line per codec and one for the entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.5), sharex=True, sharey=True)
    for axis, view in zip(axes, ("tensors", "large"), strict=True):
        there = [row for row in rows if row["view"] == view and row["exact"]]
        for name, points in _lines(there).items():
            style = _STYLES.get(name, {"marker": "o"})
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1, markersize=4, **style)
        axis.set(xscale="log", yscale="log", xlabel="weights changed by the step, %")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter("{x:g}")
            scale.set_minor_formatter(ticker.NullFormatter())
        axis.set_title({"tensors": "tensors as they are", "large": "same types as one"}[view])
        axis.grid(visible=True, which="both", linewidth=0.3)
    axes[0].set_ylabel("bytes of the version, % of the weights'")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        for name, percent in ((row["codec"], row["percent"]), (_ENTROPY, row["entropy_percent"])):
            if percent > 0 and row["changed_percent"] > 0:
                lines.setdefault(name, set()).add((row["changed_percent"], percent))
    entropy = lines.pop(_ENTROPY, set())
    lines |= {_ENTROPY: entropy} if entropy else {}
    return {name: sorted(points) for name, points in lines.items()}
