"""The command line of `scripts/soak`. Needs the standard library only.

`scripts/soak` runs this file alone before it makes an environment: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ends the program on a mistake, or after `--help`."""
    parser = argparse.ArgumentParser(prog="scripts/soak")
    commands = parser.add_subparsers(dest="what", required=True, metavar="{codec}")
    codec = commands.add_parser("codec", help="damaged deltas and bases")
    codec.add_argument("--n", type=_count, default=100_000, help="how many (default: 100000)")
    codec.add_argument("--seed", type=int, default=0)
    codec.add_argument("--first", type=_count, default=0, metavar="K", help="number to begin with")
    codec.add_argument("--json", type=Path, metavar="FILE", help="also write the counts to this")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"there is no directory for {options.json}")
    return options


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of mutations: {text}")
    return int(text)


if __name__ == "__main__":
    parse(sys.argv[1:])
