"""Entry of `scripts/bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from scripts._bench import apply


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("what", choices=["apply", "model", "scaling"], metavar="apply")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "apply":
        return apply.main(options.json, options.seed)
    if options.what == "model":
        name, folder, seed = options.rest
        rows = apply.run_model(name, Path(folder), int(seed))
    else:
        rows = apply.run_scaling()
    options.child.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
