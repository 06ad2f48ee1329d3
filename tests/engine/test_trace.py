"""Real vLLM models, loaded rank by rank without an engine, against their checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import ARCHITECTURES, TinyModel, all_models, perturb, write_model
from vllm_delta.errors import BaseMismatchError
from vllm_delta.format import parse_schema
from vllm_delta.layout import Coverage, RankLayout

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
REFUSING = "qwen3_moe-untied-kv2"
GOOD = [model.name for model in all_models() if not model.retied]
RETIED = next(model.name for model in all_models() if model.retied)

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """What every rank found, by tensor-parallel size: each loads all models one after another."""
    directory = tmp_path_factory.mktemp("models")
    for model in all_models():
        base = write_model(directory / model.name / "A", model)
        perturb(base, directory / model.name / "B", 2.0, seed=11)
    return {
        size: _run_ranks(size, directory, tmp_path_factory.mktemp(f"tp{size}")) for size in (1, 2)
    }


def _run_ranks(size: int, models: Path, out: Path) -> list[Found]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    processes = []
    for rank in range(size):
        arguments = [rank, size, port, models, out / f"{rank}.json"]
        with (out / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.engine.trace_probe", *map(str, arguments)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path},
                )
            )
    try:
        for rank, process in enumerate(processes):
            if process.wait(timeout=240):
                pytest.fail((out / f"{rank}.log").read_text()[-4000:])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def test_every_required_combination_is_probed() -> None:
    """Every architecture is here tied and untied, and one with replicated key and value heads."""
    wanted = {TinyModel(architecture=a, tied=t).name for a in ARCHITECTURES for t in (True, False)}
    assert wanted < set(GOOD)
    assert any(name.endswith("kv1") for name in GOOD)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", GOOD)
class TestEveryModel:
    """What holds for every supported model at every tensor-parallel size."""

    def test_resident_bits_are_the_checkpoint_s(self, probes, name, size) -> None:
        """All bits gathered through the map are the loaded checkpoint's, and not the next one's."""
        found = [rank[name] for rank in probes[size]]
        tensors = parse_schema(found[0]["schema"].encode()).tensors
        for rank in found:
            assert set(rank["mismatches"]) == {spec.name for spec in tensors}
            assert not any(rank["mismatches"].values())
        for spec in tensors:
            assert any(rank["control"][spec.name] for rank in found), spec.name

    def test_the_ranks_cover_the_checkpoint(self, probes, name, size) -> None:
        """Over all ranks every element is held exactly once; replicas that disagree are seen."""
        found = [rank[name] for rank in probes[size]]
        schema = parse_schema(found[0]["schema"].encode())
        layouts = [RankLayout.from_dict(rank["layout"]) for rank in found]
        coverage = Coverage(schema, layouts)
        sizes = [{n: r.numel for n, r in enumerate(layout.rectangles)} for layout in layouts]
        assert coverage.total(sizes) == {n: spec.numel for n, spec in enumerate(schema.tensors)}
        norm = schema.index("model.norm.weight")
        for sums, layout in zip(sizes, layouts, strict=True):
            assert sum(r.tensor == norm for r in layout.rectangles) == 1
            sums.update({n: 1 for n, r in enumerate(layout.rectangles) if r.tensor == norm})
        assert coverage.total(sizes)[norm] == 1
        if size > 1:
            sizes[1].update(dict.fromkeys(sizes[1], 2))
            with pytest.raises(BaseMismatchError):
                coverage.total(sizes)

    def test_patched_weights_are_a_fresh_load_of_the_next_checkpoint(
        self, probes, name, size
    ) -> None:
        """Changed elements written through the map give every bit of a fresh load."""
        assert [rank[name]["differing"] for rank in probes[size]] == [[]] * size

    def test_the_forward_pass_uses_patched_weights(self, probes, name, size) -> None:
        """Linear layers and the head give what a fresh model gives, and no longer the old."""
        for rank in probes[size]:
            outputs = rank[name]["forward"]
            assert outputs == {n: [True, False] for n in ("qkv_proj", "o_proj", "lm_head")}

    def test_tracing_leaves_the_model_alone(self, probes, name, size) -> None:
        """No bit, address, form or attribute of the model changes."""
        assert all(rank[name]["unchanged"] for rank in probes[size])

    def test_only_the_vocabulary_is_padded(self, probes, name, size) -> None:
        """The 515 rows are padded to 576 on the last rank, once or twice; all else is covered."""
        n_tables = 1 if "-tied" in name else 2
        padding = [0] * (size - 1) + [(576 - 515) * 128 * n_tables]
        assert [rank[name]["n_padding"] for rank in probes[size]] == padding


@pytest.mark.parametrize("size", [1, 2])
def test_a_stored_head_that_vllm_ties_again_is_refused_by_name(probes, size) -> None:
    """A checkpoint with a redundant head is refused: later changes to it would have no home."""
    for rank in probes[size]:
        error = rank[RETIED]["error"]
        assert error["kind"] == "LayoutError"
        assert error["facts"]["name"] == "lm_head.weight"
        assert rank[RETIED]["unchanged"]


def test_key_and_value_heads_are_replicated_over_ranks(probes) -> None:
    """With one head on two ranks, both hold all of it, and it is one region."""
    found = [rank["qwen3-tied-kv1"] for rank in probes[2]]
    schema = parse_schema(found[0]["schema"].encode())
    tensor = schema.index("model.layers.0.self_attn.k_proj.weight")
    regions = [
        [r.region for r in RankLayout.from_dict(rank["layout"]).rectangles if r.tensor == tensor]
        for rank in found
    ]
    assert len(regions[0]) == 1
    assert regions[0] == regions[1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        ("quantised", "model.layers.1.self_attn.o_proj", "quantised"),
        ("lazy", "model.layers.1.mlp", "first step"),
        ("eplb", "experts", "--enable-eplb"),
        ("offload", "weights", "offload"),
        ("unknown", "model.norm.unknown", "loader fails"),
        ("missing", "model.norm.weight", "no tensor of the checkpoint"),
        ("dtype", "model.norm.weight", "float32"),
        ("moved", "model.norm.weight", "another storage since"),
        ("unseen", "Module", "nobody saw"),
        ("dense packed", "model.layers.0.self_attn.qkv_proj.weight", "replaced"),
        ("experts packed", "model.layers.0.mlp.experts.routed_experts.w2_weight", "order"),
    ],
)
def test_what_cannot_be_patched_is_refused_by_name(probes, size, case, name, message) -> None:
    """Each kind of model or setting that a patch would get wrong is refused and named."""
    for rank in probes[size]:
        error = rank[REFUSING]["refusals"][case]
        assert error is not None
        assert (error["kind"], error["action"]) == ("LayoutError", "fix")
        assert error["facts"]["name"] == name
        assert message in error["message"]
