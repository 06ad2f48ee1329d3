"""`vllm-delta`: look into a channel, prove it, and turn a version into a checkpoint.

Exit status: 0 done; 1 an unexpected failure; 2 wrong use or settings, or another model; 3 the
store is out of reach; 4 damaged bytes; 5 the chain or the base does not fit; 6 a newer format;
7 and 8 are the errors of trainers and engines (`vllm_delta.errors.EXIT_CODES`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from vllm_delta import report
from vllm_delta.channel import LocalStore, open_channel
from vllm_delta.checkpoint import check_free, read_checkpoint, write_checkpoint
from vllm_delta.codec.blob import GAP, HAZARD, RAW, REFERENCE
from vllm_delta.commit import usable_threads
from vllm_delta.errors import EXIT_CODES, ChannelError, DeltaError
from vllm_delta.format import Manifest
from vllm_delta.replay import Replica, replay
from vllm_delta.subscriber import Subscriber

Row = dict[str, Any]

CODECS = {RAW: "raw", GAP: "gap", HAZARD: "hazard", REFERENCE: "reference"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        result = options.run(options)
        _print(json.dumps(result, indent=2).splitlines() if options.json else options.text(result))
    except DeltaError as error:
        if options.json:
            _print(json.dumps({"error": error.to_dict()}, indent=2).splitlines())
        _say(f"vllm-delta: {type(error).__name__}: {error}")
        return EXIT_CODES[error.action]
    except KeyboardInterrupt:
        return 130
    return 0


def _print(lines: Iterable[str]) -> None:
    """Print the result; a reader that has seen enough is no error."""
    try:
        for line in lines:
            print(report.printable(line, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # Keep the interpreter from telling it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    epilog = "exit status: " + ", ".join(
        ["0 done", "1 unexpected", *(f"{code} {action}" for action, code in EXIT_CODES.items())]
    )
    parser = argparse.ArgumentParser(
        prog="vllm-delta", description="Look into a channel of weight deltas.", epilog=epilog
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: Any, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        sub.add_argument("channel", metavar="CHANNEL", help="the channel's directory or URL")
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run, text=text)
        return sub

    command("ls", _ls, report.ls, "list the versions of a channel")
    show = command("show", _show, report.show, "show a version's manifest and changes per tensor")
    verify = command("verify", _verify, report.verify, "prove the chain, the blobs and the weights")
    apply = command("apply", _apply, report.apply, "write a version as a safetensors checkpoint")
    for sub in (show, verify):
        sub.add_argument("version", metavar="VERSION", nargs="?", type=_number, help="its number")
    apply.add_argument("out", metavar="OUT_DIR", type=Path, help="a directory to make")
    apply.add_argument("--version", metavar="N", type=_number, help="default: the newest")
    for sub in (verify, apply):
        sub.add_argument(
            "--base", metavar="DIR", type=Path, help="the checkpoint that the channel refers to"
        )
    return parser


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"not the number of a version: {text[:64]!r}")
    return number


def _open(options: argparse.Namespace) -> Subscriber:
    """The channel as it stands; unlike for those who follow one, it must be there."""
    store = open_channel(options.channel)
    if isinstance(store, LocalStore):
        path = os.fsdecode(unquote_to_bytes(urlsplit(store.url).path))
        if not os.path.exists(path):
            raise ChannelError("the channel's directory is not there", path=path)
    subscriber = Subscriber(store, n_threads=usable_threads())
    subscriber.refresh()
    return subscriber


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(report.printable(text, sys.stderr.encoding), file=sys.stderr, flush=True)


def _ls(options: argparse.Namespace) -> Row:
    subscriber = _open(options)
    manifests = subscriber.history()
    newest = subscriber.newest_manifest
    return {
        "channel": subscriber.channel_id,
        "epoch": newest and newest.epoch,
        "seq": newest and newest.seq,
        "low": newest and newest.low,
        "newest": newest and newest.target and newest.target.number,
        "versions": [_version_row(manifest) for manifest in manifests if manifest.kind != "fence"],
    }


def _version_row(manifest: Manifest) -> Row:
    assert manifest.target is not None
    reference = manifest.reference
    return {
        "number": manifest.target.number,
        "root": manifest.target.root,
        "kind": manifest.kind,
        "base": manifest.base and {"number": manifest.base.number, "root": manifest.base.root},
        "seq": manifest.seq,
        "epoch": manifest.epoch,
        "n_blobs": len(manifest.blobs),
        "payload_bytes": manifest.payload_bytes,
        "reference": reference
        and {"repository": reference.repository, "revision": reference.revision},
        "writer": manifest.writer,
        "time": manifest.time,
        "age_s": max(0.0, time.time() - manifest.time),
    }


def _show(options: argparse.Namespace) -> Row:
    subscriber = _open(options)
    manifest = _find(subscriber, options.version)
    schema = subscriber.schema
    tensors = []
    for entry in subscriber.entries(manifest):
        spec = schema.tensors[entry.tensor]
        n_changed = entry.n_changed or None
        tensors.append(
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "codec": CODECS[entry.codec],
                "n_changed": n_changed,
                "changed_percent": n_changed and 100.0 * n_changed / spec.numel,
                "fingerprint": f"{entry.target:016x}",
            }
        )
    return {
        **_version_row(manifest),
        "channel": manifest.channel,
        "parent": manifest.parent,
        "blobs": [{"sha256": ref.sha256, "bytes": ref.n_bytes} for ref in manifest.blobs],
        "payload_percent": 100.0 * manifest.payload_bytes / max(schema.n_bytes, 1),
        "n_tensors": len(schema),
        "n_weights": schema.n_weights,
        "model_bytes": schema.n_bytes,
        "tensors": tensors,
    }


def _find(subscriber: Subscriber, number: int | None) -> Manifest:
    """The first record that leads to the version: a delta before what restates it."""
    if subscriber.newest is None:
        raise ChannelError("nothing is published on the channel yet")
    wanted = subscriber.newest.number if number is None else number
    found = [
        manifest
        for manifest in subscriber.history()
        if manifest.target is not None
        and manifest.target.number == wanted
        and manifest.kind != "fence"
    ]
    if not found:
        subscriber.plan(number=wanted)  # says why
    return found[0]


def _verify(options: argparse.Namespace) -> Row:
    base = None if options.base is None else read_checkpoint(options.base)
    subscriber = _open(options)
    if subscriber.newest is None:
        raise ChannelError("nothing is published on the channel yet")
    chain = subscriber.history()
    if options.version is not None:
        chosen = subscriber.plan(number=options.version)
    else:
        low = chain[-1].low if chain else 1
        held = [manifest for manifest in chain if manifest.seq >= low]
        first = [place for place, manifest in enumerate(held) if manifest.kind == "anchor"]
        chosen = held[first[0] :] if first else []
    versions = []
    steps = replay(subscriber.schema, chosen, subscriber.changes, base, n_threads=usable_threads())
    for manifest, replica in steps:
        row = _version_row(manifest) | {"proven": _prove(replica)}
        versions.append(row)
        word = "weights" if row["proven"] else "fingerprints"
        _say(f"version {row['number']} {manifest.kind}: {word} match the root")
    n_left = sum(manifest.kind != "fence" for manifest in chosen) - len(versions)
    return {
        "channel": subscriber.channel_id,
        "n_records": len(chain),
        "n_versions": len(versions),
        "n_unproven": n_left,
        "proven": bool(versions) and all(row["proven"] for row in versions),
        "versions": versions,
    }


def _prove(replica: Replica) -> bool:
    """Whether the bits are known; those of the replica are scanned whole."""
    if replica.proven:
        replica.tensors()
    return replica.proven


def _apply(options: argparse.Namespace) -> Row:
    check_free(options.out)
    base = None if options.base is None else read_checkpoint(options.base)
    subscriber = _open(options)
    path = subscriber.plan(number=options.version)
    target = path[-1].target
    assert target is not None
    _say(f"rebuilding version {target.number}: {report.size(sum(m.payload_bytes for m in path))}")
    tensors = subscriber.materialise(target.number, base=base)
    schema = subscriber.schema
    if base is not None and (extra := sorted(base.keys() - tensors.keys())):
        _say(f"left out: {len(extra)} tensors of the base that are not the channel's: {extra[:3]}")
    _say(f"writing {report.size(schema.n_bytes)} to {options.out}")
    metadata = {"vllm_delta_version": str(target.number), "vllm_delta_root": target.root}
    files = write_checkpoint(
        options.out, schema.tensors, tensors, extras=options.base, metadata=metadata
    )
    return {
        "number": target.number,
        "root": target.root,
        "out": str(options.out),
        "n_tensors": len(schema),
        "model_bytes": schema.n_bytes,
        "files": files,
    }


if __name__ == "__main__":
    sys.exit(main())
