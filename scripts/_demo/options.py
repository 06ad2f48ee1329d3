"""The command line of `scripts/demo`. Needs the standard library only.

`scripts/demo` runs this file alone before it makes an environment: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Codec = Literal["gap", "hazard"]

_DESCRIPTION = """
A language model learns by reinforcement while a live vLLM follows it, bit for bit.

Each step samples completions from the served engine, takes one policy-gradient step on them and
publishes the weights that changed; the engine follows without a reload while other clients stream
from it. Then everything that is claimed is proven. Exit status 0 only if all of it holds.
"""

_LEARNING_RATE = 2e-6
"""Changes 0.5 to 1.2 % of this model's bfloat16 weights in a step."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user chose.

    Attributes:
        work_dir: For checkpoints and logs; empty, or not there yet.
        channel: `local`, `hf` or `s3` for a store of the demo's own, or a directory or URL.
        signed, sealed: Whether manifests are signed, and blobs encrypted.
        codec: Of the deltas.
        json, plot: Files to write.
    """

    n_versions: int
    learning_rate: float
    seed: int
    channel: str
    signed: bool
    sealed: bool
    work_dir: Path
    codec: Codec
    json: Path | None
    plot: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line; ends the program on a mistake, or after `--help`."""
    parsed = _read(arguments)
    work_dir = parsed.work_dir or Path(tempfile.mkdtemp(prefix="vllm-delta-demo-"))
    work_dir = work_dir.absolute()
    return Options(
        n_versions=parsed.versions,
        learning_rate=parsed.learning_rate,
        seed=parsed.seed,
        channel=parsed.channel,
        signed=parsed.signed,
        sealed=parsed.sealed,
        work_dir=work_dir,
        codec=parsed.codec,
        json=parsed.json,
        plot=parsed.plot,
    )


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.versions < 1:
        parser.error("--versions is below 1")
    if not parsed.learning_rate > 0:
        parser.error("--learning-rate is not above 0")
    for file in (parsed.json, parsed.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"there is no directory for {file}")
    folder = parsed.work_dir
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{folder} is not an empty directory")
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--versions", type=int, default=8, help="how many to make, default 8")
    parser.add_argument(
        "--channel",
        default="local",
        metavar="{local,hf,s3}|ADDRESS",
        help="a directory in the work directory (default), a Hub or SeaweedFS on loopback, which "
        "the demo starts and stops, or any address: a directory, hf://buckets/…, s3://…",
    )
    parser.add_argument("--signed", action="store_true", help="sign manifests, and require it")
    parser.add_argument("--sealed", action="store_true", help="encrypt blobs")
    parser.add_argument("--learning-rate", type=float, default=_LEARNING_RATE)
    parser.add_argument("--codec", choices=["hazard", "gap"], default="hazard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="an empty one, default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw payload and lag there")
    return parser


if __name__ == "__main__":
    _read(sys.argv[1:])
