"""Entry of `scripts/soak`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, Protocol

from scripts._soak.options import parse


class Report(Protocol):
    """What a soak gives back."""

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""

    def summary(self) -> str:
        """It as text for people."""


def codec(options: argparse.Namespace) -> Report:
    from scripts._soak import codec

    return codec.run(options.n, options.seed, options.first)


def protocol(options: argparse.Namespace) -> Report:
    from scripts._soak import protocol

    return protocol.main(options.store, options.rounds, options.seed, options.first)


def parse_soak(options: argparse.Namespace) -> Report:
    from scripts._soak import parse

    return parse.run(options.rounds, options.seed, options.first)


def kill(options: argparse.Namespace) -> Report:
    from scripts._soak import kill

    return kill.run(options.rounds, options.seed, options.first, where=options.store)


# Each imports its own when it is asked for: what one limits or patches is no matter of the others.
SOAKS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "codec": codec,
    "protocol": protocol,
    "parse": parse_soak,
    "kill": kill,
}


def main() -> int:
    """Run the soak that was asked for; returns the exit status."""
    options = parse(sys.argv[1:])
    report = SOAKS[options.what](options)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    print(report.summary())
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
