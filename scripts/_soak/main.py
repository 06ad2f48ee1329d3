"""Entry of `scripts/soak`."""

from __future__ import annotations

import json
import sys

from scripts._soak import codec
from scripts._soak.options import parse


def main() -> int:
    """Run the soak that was asked for; returns the exit status."""
    options = parse(sys.argv[1:])
    report = codec.run(options.n, options.seed, options.first)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    print(report.summary())
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
