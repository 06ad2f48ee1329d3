"""The command line of `scripts/soak`. Needs the standard library only.

`scripts/soak` runs this file alone before it makes an environment: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

STORES = ("memory", "local", "s3", "hub")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ends the program on a mistake, or after `--help`."""
    parser = argparse.ArgumentParser(prog="scripts/soak")
    commands = parser.add_subparsers(
        dest="what", required=True, metavar="{codec,protocol,parse,kill}"
    )
    codec = commands.add_parser("codec", help="damaged deltas and bases")
    codec.add_argument("--n", type=_count, default=100_000, help="how many (default: 100000)")
    _seeded(codec)
    _rounds(commands, "protocol", "trainers and readers under faults", STORES)
    damage = commands.add_parser("parse", help="damaged bytes for every parser")
    damage.add_argument("--rounds", type=_count, default=1_000_000, help="default: 1000000")
    _seeded(damage)
    killed = commands.add_parser("kill", help="trainers and readers that are killed")
    killed.add_argument("--rounds", type=_count, default=100, help="default: 100")
    killed.add_argument("--store", choices=STORES[1:], default="local")
    _seeded(killed)
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"there is no directory for {options.json}")
    if options.what == "protocol" and options.store is None and options.rounds is not None:
        parser.error("--rounds needs --store; without it the whole set is played")
    return options


def _rounds(commands: Commands, name: str, title: str, stores: Sequence[str]) -> None:
    """A soak that is played in rounds, over one of the stores or over all of them."""
    command = commands.add_parser(name, help=title)
    command.add_argument("--store", choices=stores, help="default: each of them")
    command.add_argument("--rounds", type=_count, help="how many; with --store")
    _seeded(command)


def _seeded(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--first", type=_count, default=0, metavar="K", help="number to begin with"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the counts to this")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of these: {text}")
    return int(text)


if __name__ == "__main__":
    parse(sys.argv[1:])
