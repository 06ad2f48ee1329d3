"""`scripts/bench codec`: its rows, its check of every answer, and the bound it compares with."""

from __future__ import annotations

import json
import math
import threading
import time

import numpy as np
import pytest
import torch
from fireworks_delta_compression.backends import arc3
from safetensors.torch import save_file

from scripts._bench import codec, codec_timing
from scripts._bench.codec_entropy import entropy_bytes
from scripts._bench.codec_ours import Ours
from scripts._bench.codec_peers import XorZstd, peers
from scripts._bench.codec_traces import View, find_traces, read_steps, type_of
from scripts._bench.options import parse
from vllm_delta.codec.order import add_steps
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.shadow import Shadow

CODECS = ["gap", "hazard", "arc2", "arc3", "arc3_best", "xor_zstd", "raw_sparse"]
SHAPES = {
    "model.embed.weight": (300, 96),
    "model.layers.0.mlp.experts.0.up.weight": (128, 96),
    "model.layers.0.mlp.experts.1.up.weight": (128, 96),
    "model.layers.1.mlp.experts.0.up.weight": (131, 96),
    "model.layers.0.input_layernorm.weight": (96,),
    "model.layers.1.input_layernorm.weight": (97,),
    "model.norm.weight": (96,),
}
UNCHANGED = "model.norm.weight"
N_STEPS = 2


def write_trace(folder, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """A trace whose small weights change more often; returns the bits of every version."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    bits = {}
    for name, shape in SHAPES.items():
        weights = torch.from_numpy(rng.normal(0, 0.02, shape).astype(np.float32))
        bits[name] = weights.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).ravel()
    save_file({n: as_tensor(b, torch.bfloat16, SHAPES[n]) for n, b in bits.items()}, file(folder))
    versions = [bits]
    for number in range(1, N_STEPS + 1):
        bits = {name: old.copy() for name, old in bits.items()}
        step = {}
        for name, old in bits.items():
            exponents = (old >> 7 & 0xFF).astype(float)
            rate = 0.0 if name == UNCHANGED else 0.01 * 2.0 ** (120 - exponents)
            places = np.flatnonzero(rng.random(old.size) < np.minimum(rate, 0.5)).astype(np.int32)
            steps = rng.choice([-1, 1, 2], places.size).astype(np.int16)
            old[places] = add_steps(old[places], steps)
            step[f"{name}:indices"] = torch.from_numpy(places)
            step[f"{name}:values"] = as_tensor(old[places], torch.uint16, places.shape)
        save_file(step, file(folder, number))
        versions.append(bits)
    return versions


def as_tensor(bits, dtype, shape):
    return torch.from_numpy(bits.view(np.int16).copy()).view(dtype).reshape(shape)


def file(folder, number: int = 0):
    return folder / f"v{number}.safetensors"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "toy"
    return folder, write_trace(folder)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(codec_timing, "ENOUGH_S", 0.0)
    monkeypatch.setattr(codec_timing, "VARYING_RUNS", 3)
    monkeypatch.setattr(codec_timing, "CONTROL_ROUNDS", 1000)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(trace, tmp_path, *more: str) -> tuple[int, dict]:
    out = tmp_path / "figures.json"
    options = parse(["codec", "--trace", str(trace), "--json", str(out), *more])
    status = codec.main(options.trace, options.json, options.plot)
    return status, json.loads(out.read_text())


def test_every_codec_has_a_row_for_every_step_and_view(trace, tmp_path, quick, capsys):
    """The figures are complete, agree with one another, and each case names its bound."""
    folder, versions = trace
    status, found = run(folder, tmp_path)
    assert status == 0
    cases = [(step, view) for step in range(1, N_STEPS + 1) for view in ("tensors", "large")]
    rows = found["rows"]
    assert [(r["step"], r["view"], r["codec"]) for r in rows] == [
        (*case, name) for case in cases for name in CODECS
    ]
    model_bytes = 2 * sum(math.prod(shape) for shape in SHAPES.values())
    for row in rows:
        assert row["trace"] == "toy"
        assert row["exact"] is True
        assert row["percent"] == 100 * row["bytes"] / model_bytes
        assert min(row["encode_mb_s"], row["decode_mb_s"]) > 0
        old, new = versions[row["step"] - 1], versions[row["step"]]
        n_changed = sum(int((old[name] != new[name]).sum()) for name in SHAPES)
        if row["codec"] == "raw_sparse":
            assert row["bytes"] == 6 * n_changed
        if row["codec"] in ("gap", "hazard"):
            assert 0 < row["manifest_bytes"] < row["bytes"]
        entropy = [r for r in found["entropy"] if same_case(r, row)]
        assert [r["entropy_percent"] for r in entropy] == [row["entropy_percent"]]
        assert 0 < row["entropy_percent"] < row["percent"]
    for step, view in cases:
        by_name = {r["codec"]: r for r in rows if (r["step"], r["view"]) == (step, view)}
        assert by_name["arc3_best"]["bytes"] <= by_name["arc3"]["smallest_bytes"]
    assert [(r["step"], r["shards"], r["exact"]) for r in found["tiles"]] == [
        (step, shards, True) for step in (1, 2) for shards in codec.SHARDS
    ]
    assert [r["work"] for r in found["threads"]] == ["control", "encode", "code", "decode"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in CODECS)
    assert "times smaller than arc3_best, large" in printed


def same_case(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in ("trace", "step", "view"))


def test_a_wrong_answer_has_no_figures(trace, tmp_path, quick, capsys, monkeypatch):
    """One bit off in one codec: its row says so, holds no number, and the exit status is 1."""

    def decode(self, payload):
        for bits in right(self, payload):
            yield bits ^ np.uint16(1)

    right = XorZstd.decode
    monkeypatch.setattr(XorZstd, "decode", decode)
    status, found = run(trace[0], tmp_path)
    assert status == 1
    for row in found["rows"]:
        assert row["exact"] is (row["codec"] != "xor_zstd")
        assert ("bytes" in row) is row["exact"]
        assert ("decode_mb_s" in row) is row["exact"]
    assert "NOT EXACT" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "waits"), [("arc3", False), ("arc3_best", True)])
def test_only_arc3_best_waits_for_slow_candidates(trace, monkeypatch, name, waits):
    """As released ARC3 leaves behind what is slow; its best case takes all four into account."""
    finished = []

    def slow(*, raw: bytes, codec: str) -> bytes:
        if codec == "bz2":
            time.sleep(0.3)
        finished.append(codec)
        return real(raw=raw, codec=codec)

    real = arc3._compress_pickled_payload
    monkeypatch.setattr(arc3, "_compress_pickled_payload", slow)
    (coder,) = (coder for coder in peers(next(read_steps(trace[0])).views[1]) if coder.name == name)
    before = set(threading.enumerate())
    payload = coder.encode()
    assert (finished.count("bz2") == 2 * len(payload)) is waits
    coder.settle()
    assert set(threading.enumerate()) <= before, "the losers of the race still run"
    assert coder.holds(payload)
    assert arc3._CANDIDATE_WAIT_MULTIPLIER == 1.5


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("place", [0, 1])
def test_the_check_sees_a_single_bit(trace, name, place):
    """What was encoded is held against other weights: in a changed tensor, in an unchanged one."""
    for view in next(read_steps(trace[0])).views:
        shadow = Shadow(view.schema, view.base)
        ours = [Ours(view, "gap", shadow), Ours(view, "hazard", shadow)]
        (coder,) = (coder for coder in [*ours, *peers(view)] if coder.name == name)
        payload = coder.encode()
        coder.settle()
        assert coder.holds(payload)
        tensor = [0, len(view.schema) - 1][place]
        view.target[tensor][5] ^= 1
        assert not coder.holds(payload)
        view.target[tensor][5] ^= 1
        assert coder.holds(payload)


def test_the_large_view_joins_tensors_of_one_type(trace):
    """Both views hold the trace's bits at every step; layers, experts and norms are joined."""
    folder, versions = trace
    assert find_traces(folder) == find_traces(folder.parent) == [folder]
    for step in read_steps(folder):
        tensors, large = step.views
        old, new = versions[step.number - 1], versions[step.number]
        for place, spec in enumerate(tensors.schema.tensors):
            assert spec.shape == SHAPES[spec.name]
            np.testing.assert_array_equal(tensors.base[place], old[spec.name])
            np.testing.assert_array_equal(tensors.target[place], new[spec.name])
        assert {spec.name: spec.shape for spec in large.schema.tensors} == {
            "model.embed.weight": (300, 96),
            "model.layers.mlp.experts.up.weight": (387, 96),
            "norm": (289,),
        }
        for place, spec in enumerate(large.schema.tensors):
            members = sorted(
                name for name, t in zip(SHAPES, kinds(), strict=True) if t == spec.name
            )
            np.testing.assert_array_equal(
                large.base[place], np.concatenate([old[n] for n in members])
            )
            np.testing.assert_array_equal(
                large.target[place], np.concatenate([new[n] for n in members])
            )
        assert step.n_changed == sum(int((old[name] != new[name]).sum()) for name in SHAPES)
    assert step.number == N_STEPS


def kinds() -> list[str]:
    return [type_of(TensorSpec(name, "BF16", shape)) for name, shape in SHAPES.items()]


def test_the_entropy_is_what_it_is_by_hand():
    """8 weights of one exponent, 2 changed by +1 and -1; 4 of another exponent, 1 changed."""
    old = [
        np.full(8, 0x3F80, np.uint16),
        np.full(4, 0x3F80, np.uint16),
        np.full(4, 0x3E80, np.uint16),
    ]
    new = [bits.copy() for bits in old]
    new[0][[1, 6]] = 0x3F81, 0x3F7F
    new[2][3] = 0x3E85
    specs = [TensorSpec(name, "BF16", bits.shape) for name, bits in zip("abc", old, strict=True)]
    view = View("tensors", Schema(tuple(specs)), ("t", "u", "t"), tuple(old), tuple(new))
    quarter = 2 - 0.75 * math.log2(3)  # bits of a coin that falls one time in four
    sixth = math.log2(6) - 5 / 6 * math.log2(5)
    by_type = 8 * quarter + 2 + 4 * quarter
    assert entropy_bytes(view, by_type=True) == pytest.approx(by_type / 8, rel=1e-12)
    by_exponent = 12 * sixth + 2 + 4 * quarter
    assert entropy_bytes(view, by_type=False) == pytest.approx(by_exponent / 8, rel=1e-12)


def test_nothing_changed_has_no_entropy():
    """No changes: no bits, and no division by nothing."""
    bits = np.arange(100, dtype=np.uint16)
    schema = Schema((TensorSpec("a", "BF16", (100,)),))
    view = View("tensors", schema, ("a",), (bits,), (bits.copy(),))
    assert entropy_bytes(view, by_type=True) == 0


def test_a_plot_is_drawn(trace, tmp_path, quick):
    """`--plot` writes a picture."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (scripts/bench installs it)")
    plot = tmp_path / "plot.png"
    status, _ = run(trace[0].parent, tmp_path, "--plot", str(plot))
    assert status == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_trace_is_refused(tmp_path, capsys):
    """Said at once, by the command line."""
    with pytest.raises(SystemExit):
        parse(["codec", "--trace", str(tmp_path)])
    assert "no v0.safetensors" in capsys.readouterr().err
