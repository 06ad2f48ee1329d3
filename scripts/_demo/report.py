"""What the demonstration found: on the terminal, as JSON, and as a plot."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_MIN_ACROSS_A_SWAP = 20
_MIN_VERSIONS_FOR_THAT = 8
_MIN_COMPARED = 32


@dataclass(frozen=True)
class VersionRow:
    """One version: how it came about and what it cost.

    Attributes:
        rollout_version: The version whose completions it was trained on; reward: their mean.
        mean_ratio: Of the masters' probability of those tokens to the served weights'.
        payload_percent: Of the model's bytes.
        stage_s: From the server seeing it to every rank having it decoded.
        pause_ms: How long the engine made no step.
        lag_s: From its manifest being written to it being served.
    """

    number: int
    rollout_version: int
    reward: float
    n_groups_varied: int
    mean_ratio: float
    changed_percent: float
    payload_percent: float
    payload_bytes: int
    publish_s: float
    stage_s: float
    check_ms: float
    apply_ms: float
    pause_ms: float
    lag_s: float


@dataclass
class Findings:
    """Everything that `--json` writes. A proof that was not reached stays False."""

    model: str
    seed: int
    learning_rate: float
    store: str = ""
    signed: bool = False
    sealed: bool = False
    versions: list[VersionRow] = field(default_factory=list)
    bit_equal: bool = False
    roots_equal: bool = False
    rebuilt_equal: bool = False
    digests_equal: bool = False
    completions_equal: bool = False
    control_equal: bool = False
    n_completions_compared: int = 0
    n_requests: int = 0
    n_requests_across_a_swap: int = 0
    failed_requests: int = 0
    rollback_bit_equal: bool = False
    forward_again_bit_equal: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rollout_versions(self) -> list[int]:
        """The version that each step's completions were sampled from."""
        return [row.rollout_version for row in self.versions]

    def proofs(self) -> dict[str, bool]:
        """Every claim, and whether it holds."""
        n_swaps = len(self.versions)
        few = n_swaps < _MIN_VERSIONS_FOR_THAT
        n_across = n_swaps if few else _MIN_ACROSS_A_SWAP
        return {
            "served root, by a full scan = root of the trainer's weights": self.roots_equal,
            "rebuilt from the channel alone = the trainer's weights": self.rebuilt_equal,
            "vLLM's sha256 of each parameter = a fresh engine's": self.digests_equal,
            f"{self.n_completions_compared} greedy completions = a fresh engine's": (
                self.completions_equal and self.n_completions_compared >= _MIN_COMPARED
            ),
            "control: two fresh engines agree": self.control_equal,
            f"none of {self.n_requests} requests failed": self.failed_requests == 0,
            f"{self.n_requests_across_a_swap} streams ran across a swap, at least {n_across}": (
                self.n_requests_across_a_swap >= n_across
            ),
            "each step sampled from the version before it": all(
                row.rollout_version == row.number - 1 for row in self.versions
            ),
            "rolled back to the version before, bit for bit": self.rollback_bit_equal,
            "forward again, bit for bit": self.forward_again_bit_equal,
        }

    def to_json(self) -> str:
        """Returns the findings as JSON."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        derived = {"rollout_versions": self.rollout_versions, "proofs": self.proofs()}
        return json.dumps(fields | derived, indent=2) + "\n"


class Progress:
    """Prints what goes on, with the seconds since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._began

    def say(self, text: str) -> None:
        """Prints one line."""
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


_COLUMNS: tuple[tuple[str, str, Callable[[VersionRow], object]], ...] = (
    ("version", "{:d}", lambda row: row.number),
    ("changed %", "{:.3f}", lambda row: row.changed_percent),
    ("payload %", "{:.3f}", lambda row: row.payload_percent),
    ("payload kB", "{:.1f}", lambda row: row.payload_bytes / 1e3),
    ("publish s", "{:.2f}", lambda row: row.publish_s),
    ("stage s", "{:.2f}", lambda row: row.stage_s),
    ("check ms", "{:.1f}", lambda row: row.check_ms),
    ("apply ms", "{:.1f}", lambda row: row.apply_ms),
    ("paused ms", "{:.1f}", lambda row: row.pause_ms),
    ("lag s", "{:.2f}", lambda row: row.lag_s),
    ("reward", "{:.3f}", lambda row: row.reward),
)


def table_head() -> str:
    """Returns the head of the table of versions."""
    return "  ".join(name for name, _, _ in _COLUMNS)


def table_row(row: VersionRow) -> str:
    """Returns one line of the table of versions."""
    return "  ".join(form.format(value(row)).rjust(len(name)) for name, form, value in _COLUMNS)


def print_proofs(findings: Findings) -> bool:
    """Prints every claim with its verdict; whether all hold."""
    proofs = findings.proofs()
    for claim, holds in proofs.items():
        print(f"  {'proven' if holds else 'FAILED'}  {claim}", flush=True)
    return all(proofs.values())


def draw_plot(findings: Findings, path: Path) -> None:
    """Draws payload and lag per version."""
    rows = findings.versions
    numbers = [row.number for row in rows]
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    payload, lag = figure.subplots(2, 1, sharex=True)
    payload.bar(numbers, [row.payload_percent for row in rows], color="tab:blue", label="payload")
    payload.plot(
        numbers, [row.changed_percent for row in rows], "o-", color="tab:orange", label="changed"
    )
    payload.set_ylabel("payload, % of the model's bytes\nchanged, % of its weights")
    payload.legend()
    lag.bar(numbers, [row.lag_s for row in rows], color="tab:green")
    lag.set_ylabel("lag, s from published to served")
    lag.set_xlabel("version")
    lag.set_xticks(numbers)
    for axes in (payload, lag):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(f"SmolLM2-135M, AdamW at {findings.learning_rate:g}, one step per version")
    figure.savefig(path)
