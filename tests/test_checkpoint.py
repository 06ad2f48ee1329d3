"""Checkpoints in directories of safetensors files."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from safetensors.torch import load_file

from vllm_delta.checkpoint import read_checkpoint, write_checkpoint
from vllm_delta.errors import ChannelFullError, ModelMismatchError, SettingsError
from vllm_delta.format import TensorSpec


def some_bits(specs) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    kinds = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
    return {
        spec.name: rng.integers(0, 255, spec.shape).astype(kinds[spec.itemsize]) for spec in specs
    }


@pytest.mark.parametrize("shard_bytes", [1, 40, 1 << 30])
def test_a_checkpoint_is_read_back_whole_from_one_file_or_many(tmp_path, shard_bytes):
    specs = (
        TensorSpec("a", "BF16", (3, 5)),
        TensorSpec("b", "F64", (2,)),
        TensorSpec("c", "BOOL", ()),
        TensorSpec("d", "F32", (0, 4)),
        TensorSpec("e", "F8_E5M2", (7,)),
    )
    bits = some_bits(specs)
    files = write_checkpoint(tmp_path / "out", specs, bits, shard_bytes=shard_bytes)
    assert ("model.safetensors" in files) == (shard_bytes > 100)
    back = read_checkpoint(tmp_path / "out")
    assert sorted(back) == sorted(bits)
    for name in bits:
        assert back[name].dtype == bits[name].dtype
        np.testing.assert_array_equal(back[name], bits[name], err_msg=name)
    for path in (tmp_path / "out").glob("*.safetensors"):
        load_file(path)


def test_a_full_disk_leaves_no_part_of_a_checkpoint(tmp_path):
    specs = (TensorSpec("a", "BF16", (3, 5000)),)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ChannelFullError):
            write_checkpoint(tmp_path / "out", specs, some_bits(specs))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    specs = (TensorSpec("a", "BF16", (3,)),)
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SettingsError):
            write_checkpoint(out, specs, some_bits(specs))


def test_a_name_that_the_files_keep_for_themselves_is_refused(tmp_path):
    specs = (TensorSpec("__metadata__", "BF16", (3,)),)
    with pytest.raises(ModelMismatchError, match="__metadata__"):
        write_checkpoint(tmp_path / "out", specs, some_bits(specs))
    assert list(tmp_path.iterdir()) == []


def test_a_header_without_end_is_no_checkpoint(tmp_path):
    header = b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SettingsError, match="not a safetensors file"):
        read_checkpoint(tmp_path)
