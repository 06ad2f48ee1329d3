"""`vllm-delta`: look into a channel, prove it, turn a version into a checkpoint; keys and upkeep.

Exit status: 0 done; 1 an unexpected failure; 2 wrong use or settings, or another model; 3 the
store is out of reach, or nothing is published there; 4 damaged bytes; 5 the chain, a signature or
the base does not fit; 6 a newer format; 7 and 8 are the errors of trainers and engines
(`vllm_delta.errors.EXIT_CODES`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from vllm_delta import report
from vllm_delta.channel import Keys, LocalStore, Record, Store, open_channel
from vllm_delta.channel.collect import GRACE_S, collect
from vllm_delta.channel.keyfiles import public_path, write_sealing_key, write_signing_key
from vllm_delta.channel.keys import key_id
from vllm_delta.channel.sealing import sealing_key_id
from vllm_delta.checkpoint import check_free, read_checkpoint, write_checkpoint
from vllm_delta.codec.blob import GAP, HAZARD, RAW, REFERENCE
from vllm_delta.commit import usable_threads
from vllm_delta.errors import EXIT_CODES, ChannelError, DeltaError
from vllm_delta.format import Manifest, unseal
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

    def plain(name: str, run: Any, text: Any, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run, text=text)
        return sub

    def command(name: str, run: Any, text: Any, summary: str) -> argparse.ArgumentParser:
        sub = plain(name, run, text, summary)
        sub.add_argument("channel", metavar="CHANNEL", help="the channel's directory or URL")
        for flag, meaning in _KEY_FLAGS.items():
            sub.add_argument(flag, metavar="FILE", action="append", default=[], help=meaning)
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
    gc = command("gc", _gc, report.gc, "delete the blobs that no record needs any more")
    gc.add_argument("--signing-key", metavar="FILE", help="the trainer's, where records are signed")
    gc.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    gc.add_argument(
        "--grace", metavar="S", type=_seconds, default=GRACE_S, help="leave what is younger"
    )
    gc.add_argument(
        "--orphans",
        action="store_true",
        help="delete what dead trainers left, too; stops a trainer that lives",
    )
    keygen = plain("keygen", _keygen, report.keygen, "make a key to sign or to seal with")
    keygen.add_argument("file", metavar="FILE", type=Path, help="for the secret; never replaced")
    keygen.add_argument("--sealing", action="store_true", help="to seal with, for all who read")
    return parser


_KEY_FLAGS = {
    "--trusted-key": "a public key; with any, each record must be signed by one (repeatable)",
    "--sealing-key": "what blobs are sealed with (repeatable)",
}


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"not the number of a version: {text[:64]!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text[:64]!r}")
    return seconds


def _keys(options: argparse.Namespace, signing: str | None = None) -> Keys:
    return Keys.load(signing=signing, trusted=options.trusted_key, sealing=options.sealing_key)


def _store(options: argparse.Namespace) -> Store:
    """The channel's store; unlike for those who follow one, a directory must be there."""
    store = open_channel(options.channel)
    if isinstance(store, LocalStore):
        path = os.fsdecode(unquote_to_bytes(urlsplit(store.url).path))
        if not os.path.exists(path):
            raise ChannelError("the channel's directory is not there", path=path)
    return store


def _open(options: argparse.Namespace) -> Subscriber:
    """The channel as it stands, with a version or more."""
    store = _store(options)
    subscriber = Subscriber(store, keys=_keys(options), n_threads=usable_threads())
    subscriber.refresh()
    if subscriber.newest is None:
        raise ChannelError("nothing is published here yet", url=store.url)
    return subscriber


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(report.printable(text, sys.stderr.encoding), file=sys.stderr, flush=True)


def _ls(options: argparse.Namespace) -> Row:
    subscriber = _open(options)
    records = [subscriber.record(manifest.seq) for manifest in subscriber.history()]
    newest = records[-1].manifest
    return {
        "channel": newest.channel,
        "epoch": newest.epoch,
        "seq": newest.seq,
        "low": newest.low,
        "newest": newest.target and newest.target.number,
        "versions": [_version_row(record) for record in records if record.manifest.kind != "fence"],
    }


def _signature(record: Record) -> Row | None:
    """Who signed, and whether that was checked; None where nobody did."""
    if record.signer is not None:
        return {"key_id": record.signer, "trusted": True}
    _, signatures = unseal(record.envelope)
    return {"key_id": signatures[0]["keyid"], "trusted": False} if signatures else None


def _version_row(record: Record) -> Row:
    manifest = record.manifest
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
        "signature": _signature(record),
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
        **_version_row(subscriber.record(manifest.seq)),
        "sealed": bool(options.sealing_key),
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
    assert subscriber.newest is not None
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
    chain = subscriber.history()
    if options.version is not None:
        chosen = subscriber.plan(number=options.version)
    else:
        held = [manifest for manifest in chain if manifest.seq >= chain[-1].low]
        first = [place for place, manifest in enumerate(held) if manifest.kind == "anchor"]
        chosen = held[first[0] :] if first else []
    versions = []
    steps = replay(subscriber.schema, chosen, subscriber.changes, base, n_threads=usable_threads())
    for manifest, replica in steps:
        row = _version_row(subscriber.record(manifest.seq)) | {"proven": _prove(replica)}
        versions.append(row)
        word = "weights" if row["proven"] else "fingerprints"
        _say(f"version {row['number']} {manifest.kind}: {word} match the root")
    n_left = sum(manifest.kind != "fence" for manifest in chosen) - len(versions)
    return {
        "channel": subscriber.channel_id,
        "n_records": len(chain),
        "n_versions": len(versions),
        "n_unproven": n_left,
        "signed": bool(options.trusted_key),
        "sealed": bool(options.sealing_key),
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


def _gc(options: argparse.Namespace) -> Row:
    collected = collect(
        _store(options),
        keys=_keys(options, options.signing_key),
        grace_s=options.grace,
        dry_run=options.dry_run,
        orphans=options.orphans,
        writer=f"{socket.gethostname()[:64]}:{os.getpid()}:gc",
        clock=time.time,
        say=_say,
    )
    return {**asdict(collected), "dry_run": options.dry_run}


def _keygen(options: argparse.Namespace) -> Row:
    path: Path = options.file
    if options.sealing:
        key = write_sealing_key(path)
        return {"file": str(path), "public_file": None, "key_id": sealing_key_id(key).hex()}
    public = write_signing_key(path)
    return {"file": str(path), "public_file": str(public_path(path)), "key_id": key_id(public)}


if __name__ == "__main__":
    sys.exit(main())
