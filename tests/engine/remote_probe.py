"""Follows a channel in a remote store with an engine of its own process, over two ranks.

Run as ``python -m tests.engine.remote_probe CHECKPOINT URL CACHE``; prints a line of JSON that
begins with ``FOUND``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine.harness import LocalEngine
from vllm_delta.channel import LogReader, open_channel


def main() -> None:
    checkpoint, url, cache = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = LocalEngine(Path(checkpoint), tensor_parallel_size=2)
    trainer = engine.begin(url)
    follow = engine.follow(cache_dir=cache)
    for _ in range(2):
        trainer.step(50.0)
        status: dict[str, Any] = follow.step()
    follow.verify()
    log = LogReader(open_channel(url))
    tail = log.tail()
    assert tail is not None
    deltas = [record.manifest for record in log.read_from_anchor(tail)][1:]
    found = {
        "status": status,
        "blobs": [ref.sha256 for manifest in deltas for ref in manifest.blobs],
    }
    print("FOUND" + json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
