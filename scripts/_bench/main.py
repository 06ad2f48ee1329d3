"""Entry of `scripts/bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts._bench.options import parse


def main() -> int:
    """Run the benchmark that was asked for; returns the exit status."""
    options = parse(sys.argv[1:])
    # Imported when wanted: each benchmark has an environment of its own.
    if options.what == "codec":
        from scripts._bench import codec

        return codec.main(options.trace, options.json, options.plot)
    if options.what == "channel":
        from scripts._bench import channel

        return channel.main(options.json, options.store)
    if options.what in ("fleet", "reader"):
        from scripts._bench import fleet

        if options.what == "fleet":
            return fleet.main(options.channel, options.json, options.readers, options.versions)
        source, n_versions, out = options.rest
        fleet.read(Path(source), int(n_versions), Path(out))
        return 0
    from scripts._bench import apply

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
