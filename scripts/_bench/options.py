"""The command line of `scripts/bench`. Needs the standard library only.

`scripts/bench` runs this file alone before it makes an environment: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ends the program on a mistake, or after `--help`."""
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        dest="what", required=True, metavar="{apply,codec,channel,fleet}"
    )
    apply = commands.add_parser("apply", help="in-place patch against vLLM's own ways")
    apply.add_argument("--seed", type=int, default=0)
    codec = commands.add_parser("codec", help="bytes and speed of codecs on real steps")
    codec.add_argument(
        "--trace",
        type=_trace,
        required=True,
        metavar="DIR",
        help="v0.safetensors, v1.safetensors, … or a folder of such folders",
    )
    codec.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw payload against changed weights"
    )
    channel = commands.add_parser("channel", help="publish and fetch against the bare clients")
    channel.add_argument(
        "--store", choices=["local", "s3", "hub"], action="append", help="default: all three"
    )
    fleet = commands.add_parser("fleet", help="lag of many readers on one directory")
    fleet.add_argument(
        "--channel",
        type=_directory,
        required=True,
        metavar="DIR",
        help="the channel that scripts/demo left in its work directory",
    )
    fleet.add_argument("--readers", type=int, default=8)
    fleet.add_argument("--versions", type=int, default=200)
    for command in (apply, codec, channel, fleet):
        command.add_argument(
            "--json", type=Path, metavar="FILE", help="also write every figure to this file"
        )
    for name in ("model", "scaling", "reader"):  # processes of their own
        commands.add_parser(name).add_argument("rest", nargs="*")
    return parser.parse_args(arguments)


def _directory(text: str) -> Path:
    if not Path(text, "m").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no channel's directory")
    return Path(text)


def _trace(text: str) -> Path:
    folder = Path(text)
    if not any(folder.glob("v0.safetensors")) and not any(folder.glob("*/v0.safetensors")):
        raise argparse.ArgumentTypeError(f"no v0.safetensors in {folder} or in a folder in it")
    return folder


if __name__ == "__main__":
    parse(sys.argv[1:])
