"""Processes that share a cache of blobs. Arguments: what to be, the cache's folder, its quota, a
folder with the blobs and a file to note each load in; then what the action needs."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from tests.channel.child import say
from vllm_delta.channel.cache import BlobCache
from vllm_delta.errors import DeltaError, SettingsError
from vllm_delta.format import BlobRef


def refs(blobs: Path) -> list[BlobRef]:
    return [BlobRef(path.name, path.stat().st_size, 0) for path in sorted(blobs.iterdir())]


class Reader:
    """Fetches blobs through a cache, and notes what was loaded."""

    def __init__(self, folder: str, quota: str, blobs: str, notes: str) -> None:
        self.blobs, self.notes = Path(blobs), notes
        self.cache = BlobCache(folder, quota_bytes=int(quota))

    def load(self, ref: BlobRef) -> bytes:
        with open(self.notes, "ab", buffering=0) as file:
            file.write(f"{os.getpid()} {ref.sha256}\n".encode())
        return (self.blobs / ref.sha256).read_bytes()

    def fetch(self, ref: BlobRef) -> bytes:
        data = self.cache.fetch(ref, lambda: self.load(ref))
        assert data == (self.blobs / ref.sha256).read_bytes()
        return data


def fetch(reader: Reader, n_rounds: str = "1") -> None:
    """For each line on stdin fetch all blobs, in an order that all processes share."""
    say("ready")
    for _ in range(int(n_rounds)):
        sys.stdin.readline()
        for ref in refs(reader.blobs):
            reader.fetch(ref)
        say("done")


def stuck(reader: Reader) -> None:
    """Begin to load the first blob, say so, and never end."""
    ref = refs(reader.blobs)[0]

    def load() -> bytes:
        reader.load(ref)
        say("loading")
        sys.stdin.readline()
        return b""

    reader.cache.fetch(ref, load)


def cut(reader: Reader) -> None:
    """Die in the middle of writing the first blob's file."""
    write = os.write

    def die(file: int, data: memoryview) -> int:
        write(file, data[: len(data) // 2])
        say("dying")
        os.kill(os.getpid(), 9)
        return 0

    os.write = die  # type: ignore[assignment]
    reader.fetch(refs(reader.blobs)[0])


def fail(reader: Reader) -> None:
    """Load the first blob with an error, once told to."""
    ref = refs(reader.blobs)[0]

    def load() -> bytes:
        reader.load(ref)
        say("loading")
        sys.stdin.readline()
        raise ValueError("mine")

    try:
        reader.cache.fetch(ref, load)
    except ValueError as error:
        say(str(error))


def limited(reader: Reader, limit: str) -> None:
    """Fetch where no file may be larger than so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    fetch(reader)


def main(action: str, folder: str, quota: str, blobs: str, notes: str, *arguments: str) -> None:
    if action == "unprivileged":
        os.setgroups([])
        os.setgid(int(arguments[0]))
        os.setuid(int(arguments[0]))
        try:
            fetch(Reader(folder, quota, blobs, notes))
        except SettingsError as error:
            say(f"refused {error.path}")
        return
    reader = Reader(folder, quota, blobs, notes)
    actions = {each.__name__: each for each in (fetch, stuck, cut, fail, limited)}
    try:
        actions[action](reader, *arguments)
    except DeltaError as error:
        say(type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
