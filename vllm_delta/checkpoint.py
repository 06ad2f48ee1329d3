"""Checkpoints in directories of safetensors files, as raw bits.

Written out here rather than taken from the safetensors package, whose numpy side knows neither
bfloat16 nor fp8 and whose writer wants a second copy of every tensor.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta.codec.order import UNSIGNED, Unsigned
from vllm_delta.errors import ChannelFullError, ModelMismatchError, SettingsError
from vllm_delta.format import DTYPES, TensorSpec

SHARD_BYTES = 5 << 30
"""Where a checkpoint's next file begins."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_EXTRAS = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})


def read_checkpoint(folder: Path) -> dict[str, Unsigned]:
    """The tensors of a checkpoint: read-only views of its files, unsigned bits in each's shape.

    Raises:
        SettingsError: there is no readable checkpoint in `folder`.
    """
    tensors: dict[str, Unsigned] = {}
    for path in _files(folder):
        for name, bits in _read_file(path):
            if name in tensors:
                raise SettingsError("a tensor stands in two files", name=name, path=str(path))
            tensors[name] = bits
    return tensors


def write_checkpoint(
    out: Path,
    specs: tuple[TensorSpec, ...],
    tensors: Mapping[str, Unsigned],
    *,
    extras: Path | None = None,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint that is either whole or not there.

    Args:
        out: the directory to make; one that is there must be empty.
        specs: what to write; `tensors` has the raw bits by name.
        extras: a checkpoint whose configuration and tokenizer files are copied.

    Returns:
        Names of the files written.

    Raises:
        SettingsError: `out` is taken or cannot be written.
        ModelMismatchError: a tensor's name is one that these files keep for themselves.
        ChannelFullError: the disk is full.
    """
    check_free(out)
    if any(spec.name == _METADATA for spec in specs):
        raise ModelMismatchError("safetensors files hold no tensor of this name", name=_METADATA)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write_shards(temporary, specs, tensors, {"format": "pt", **(metadata or {})}, shard_bytes)
        if extras is not None:
            for path in sorted(extras.iterdir()):
                if path.is_file() and path.suffix in _EXTRAS and path.name != _INDEX:
                    shutil.copyfile(path, temporary / path.name)
        names = sorted(path.name for path in temporary.iterdir())
        for name in names:
            _force(temporary / name)
        _force(temporary)
        os.rename(temporary, out)
        _force(out.parent)
    except OSError as error:
        kind = ChannelFullError if error.errno in _FULL else SettingsError
        raise kind("the checkpoint cannot be written", path=str(out), cause=str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return names


def check_free(out: Path) -> None:
    """Raise SettingsError unless `out` is absent or an empty directory."""
    try:
        taken = out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir())))
    except OSError as error:
        raise SettingsError(
            "the output directory cannot be used", path=str(out), cause=str(error)
        ) from error
    if taken:
        raise SettingsError("the output directory is taken", path=str(out))


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    try:
        if index.is_file():
            places = json.loads(index.read_bytes())["weight_map"]
            return [folder / Path(name).name for name in sorted(set(places.values()))]
    except (*_MALFORMED, OSError) as error:
        raise SettingsError("not a checkpoint's index", path=str(index)) from error
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise SettingsError("no safetensors files in the directory", path=str(folder))


def _read_file(path: Path) -> Iterator[tuple[str, Unsigned]]:
    try:
        data = np.memmap(path, np.uint8, mode="r")
        n_header = int.from_bytes(data[:8].tobytes(), "little")
        if not 0 < n_header <= min(_MAX_HEADER_BYTES, data.size - 8):
            raise ValueError("the header does not fit")
        header = json.loads(data[8 : 8 + n_header].tobytes())
        header.pop(_METADATA, None)
        tensors = [_view(data[8 + n_header :], name, entry) for name, entry in header.items()]
    except (*_MALFORMED, OSError) as error:
        raise SettingsError("not a safetensors file", path=str(path), cause=str(error)) from error
    yield from tensors


def _view(data: Unsigned, name: str, entry: Mapping[str, Any]) -> tuple[str, Unsigned]:
    start, stop = entry["data_offsets"]
    spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
    if spec.dtype not in DTYPES or not 0 <= start <= stop <= data.size:
        raise ValueError(f"tensor {name} of type {spec.dtype} cannot be read")
    # A plain view: slices of a memmap are slow to make.
    flat = np.asarray(data[start:stop]).view(UNSIGNED[spec.itemsize])
    return name, flat.reshape(spec.shape)


def _write_shards(
    folder: Path,
    specs: tuple[TensorSpec, ...],
    tensors: Mapping[str, Unsigned],
    metadata: Mapping[str, str],
    shard_bytes: int,
) -> None:
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if shards[-1] and sum(s.n_bytes for s in shards[-1]) + spec.n_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    if len(shards) == 1:
        _write_file(folder / _SINGLE, shards[0], tensors, metadata)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, tensors, metadata)
        places |= {spec.name: name for spec in shard}
    total = sum(spec.n_bytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path,
    specs: list[TensorSpec],
    tensors: Mapping[str, Unsigned],
    metadata: Mapping[str, str],
) -> None:
    # Widest types first, so that every tensor is aligned.
    ordered = sorted(specs, key=lambda spec: (-spec.itemsize, spec.name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for spec in ordered:
        start, end = end, end + spec.n_bytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in ordered:
            bits = tensors[spec.name]
            if bits.nbytes != spec.n_bytes:
                raise ValueError(f"{bits.nbytes} bytes for {spec}")
            file.write(np.ascontiguousarray(bits).data)


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
