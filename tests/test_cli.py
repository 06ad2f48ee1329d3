"""The command line, run as its users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.channel import toy
from vllm_delta import cli
from vllm_delta.channel import NO_KEYS, Keys, LocalStore, Log
from vllm_delta.errors import DeltaError
from vllm_delta.format import Reference, blob_key, manifest_key
from vllm_delta.publisher import Publisher, PublisherSettings

BF16 = torch.bfloat16


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "embed.weight": torch.randn(300, 64, dtype=BF16),
        "norm.weight": torch.randn(64, dtype=torch.float32),
        "n_calls": torch.tensor(3),
        "odd": torch.randint(0, 255, (7,), dtype=torch.uint8),
        "scale": torch.randn(5, 3).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def run(tmp_path):
    """A channel of three versions, and its weights; by reference to `base` if asked."""

    class Run:
        channel = tmp_path / "channel"
        base = tmp_path / "base"
        out = tmp_path / "out"
        tensors = make_tensors()
        keys = NO_KEYS

        def publish(self, reference: Reference | None = None) -> None:
            self.base.mkdir()
            save_file(self.tensors, self.base / "model.safetensors")
            (self.base / "config.json").write_text('{"model_type": "tiny"}')
            (self.base / "tokenizer.json").write_text("{}")
            (self.base / "model.safetensors.index.json.bak").write_text("no")
            (self.base / "optimizer.pt").write_bytes(b"no")
            with Publisher(
                self.channel, self.tensors, reference=reference, keys=self.keys
            ) as publisher:
                self.tensors["embed.weight"][7, :9] += 1
                publisher.publish()
                self.tensors["n_calls"] += 1
                self.tensors["norm.weight"][::13] *= 1.5
                publisher.publish()

    return Run()


def command(*arguments, env=None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "vllm_delta.cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=env)


def told(capsys, *arguments) -> tuple[int, dict, str]:
    """Exit status, JSON and standard error of a command, in this process."""
    status = cli.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# The round trip


def test_a_channel_becomes_a_checkpoint_in_a_process_of_its_own(run):
    run.publish()
    done = command("apply", run.channel, run.out)
    assert done.returncode == 0, done.stderr
    assert "version 2" in done.stdout
    assert "rebuilding" in done.stderr
    loaded = load_file(run.out / "model.safetensors")
    assert sorted(loaded) == sorted(run.tensors)
    for name, tensor in run.tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(loaded[name]), as_bytes(tensor)), name


def test_an_older_version_and_the_base_checkpoints_files(run, capsys):
    run.publish(Reference("someone/model", "abc"))
    status, result, _ = told(
        capsys, "apply", run.channel, run.out, "--version", 0, "--base", run.base
    )
    assert status == 0
    assert result["number"] == 0
    assert result["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in run.out.iterdir()) == result["files"]
    made = load_file(run.out / "model.safetensors")
    for name, tensor in load_file(run.base / "model.safetensors").items():
        assert torch.equal(as_bytes(made[name]), as_bytes(tensor)), name
    assert (run.out / "config.json").read_bytes() == (run.base / "config.json").read_bytes()


def test_apply_leaves_nothing_behind_when_it_fails(run, capsys):
    run.publish()
    store = LocalStore(run.channel)
    ref = Log(store).tail().manifest.blobs[0]
    store.delete([blob_key(ref.sha256)])
    before = sorted(run.out.parent.iterdir())
    status, result, error = told(capsys, "apply", run.channel, run.out)
    assert status == 4
    assert result["error"]["kind"] == "DigestError"
    assert ref.sha256 in error
    assert sorted(run.out.parent.iterdir()) == before


def test_apply_overwrites_nothing(run, capsys):
    run.publish()
    run.out.mkdir()
    (run.out / "mine").write_text("precious")
    status, result, _ = told(capsys, "apply", run.channel, run.out)
    assert (status, result["error"]["kind"]) == (2, "SettingsError")
    assert [path.name for path in run.out.iterdir()] == ["mine"]
    (run.out / "mine").unlink()
    assert told(capsys, "apply", run.channel, run.out)[0] == 0


def test_the_version_is_written_into_the_checkpoint(run, capsys):
    run.publish()
    _, result, _ = told(capsys, "apply", run.channel, run.out)
    header = (run.out / "model.safetensors").read_bytes()[:4096]
    assert b'"vllm_delta_version":"2"' in header
    assert result["root"].encode() in header


# Looking


def test_ls_lists_every_version(run, capsys):
    run.publish(Reference("someone/model", "abc"))
    status, result, _ = told(capsys, "ls", run.channel)
    assert status == 0
    assert (result["newest"], result["epoch"], result["seq"]) == (2, 1, 4)
    rows = result["versions"]
    assert [(row["number"], row["kind"], row["seq"]) for row in rows] == [
        (0, "anchor", 2),
        (1, "delta", 3),
        (2, "delta", 4),
    ]
    assert rows[0]["reference"] == {"repository": "someone/model", "revision": "abc"}
    assert all(row["payload_bytes"] > 0 and row["age_s"] >= 0 for row in rows)
    assert cli.main(["ls", str(run.channel)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["VERSION", "KIND", "BYTES", "BLOBS", "AGE", "EPOCH", "SEQ", "ROOT"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
    assert len({line.rindex(rows[i]["root"][:12]) for i, line in enumerate(lines[2:])}) == 1


@pytest.mark.parametrize("claimed", [False, True])
def test_where_nothing_is_published_is_told_and_is_no_success(tmp_path, capsys, claimed):
    if claimed:
        Log(LocalStore(tmp_path / "c")).claim("a trainer that is about to begin")
    (tmp_path / "c").mkdir(exist_ok=True)
    channel = (tmp_path / "c").as_uri()
    for words in (["ls"], ["show"], ["verify"]):
        status, result, error = told(capsys, words[0], channel)
        assert (status, result["error"]["kind"]) == (3, "ChannelError")
        assert "nothing is published here yet" in error
        assert cli.main([words[0], channel]) == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "nothing is published here yet" in captured.err
    assert told(capsys, "apply", channel, tmp_path / "out")[0] == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_mistyped_path_is_told_and_not_taken_for_an_empty_channel(run, capsys, form):
    run.publish()
    typo = form.format(run.channel.with_name("chanel"))
    for words in (["ls", typo], ["show", typo], ["verify", typo], ["apply", typo, run.out]):
        status, result, error = told(capsys, *words)
        assert (status, result["error"]["kind"]) == (3, "ChannelError")
        assert "is not there" in error
        assert "chanel" in error
    assert not run.channel.with_name("chanel").exists()
    assert not run.out.exists()


def test_show_tells_what_changed_in_each_tensor(run, capsys):
    run.publish()
    status, result, _ = told(capsys, "show", run.channel, 1)
    assert status == 0
    (row,) = result["tensors"]
    assert (row["name"], row["dtype"], row["shape"]) == ("embed.weight", "BF16", [300, 64])
    assert row["n_changed"] == 9
    assert row["changed_percent"] == pytest.approx(100 * 9 / (300 * 64))
    _, newest, _ = told(capsys, "show", run.channel)
    assert [(row["name"], row["n_changed"]) for row in newest["tensors"]] == [
        ("n_calls", None),
        ("norm.weight", 5),
    ]
    assert newest["base"]["number"] == 1
    assert cli.main(["show", str(run.channel)]) == 0
    text = capsys.readouterr().out
    assert "norm.weight" in text
    assert "7.8125" in text
    assert cli.main(["show", str(run.channel), "0"]) == 0
    assert capsys.readouterr().out.count("whole") == 6


@pytest.mark.parametrize("number", [3, 10**9])
def test_a_version_that_is_not_there(run, capsys, number):
    run.publish()
    for words in (["show", run.channel, number], ["verify", run.channel, number]):
        status, result, error = told(capsys, *words)
        assert (status, result["error"]["kind"]) == (5, "ChainError")
        assert f"number={number}" in error


def test_nothing_that_a_channel_says_steers_a_terminal(run, capsys):
    run.tensors["\x1b]0;title\x07\nred\u202e"] = torch.zeros(2)
    run.tensors["\u00e9"] = torch.zeros(2)
    run.publish()
    for words in (["ls"], ["show"], ["show", "0"], ["verify"]):
        assert cli.main([words[0], str(run.channel), *words[1:]]) == 0
        captured = capsys.readouterr()
        assert all(c.isprintable() or c == "\n" for c in captured.out + captured.err)
    command_line = ("show", run.channel, "0")
    done = command(*command_line, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"\x1b]0;title\x07\nred\u202e" in done.stdout
    assert r"\xe9" in done.stdout


def test_ls_and_show_tell_merged_deltas_and_codecs(tmp_path, capsys):
    channel, tensors = tmp_path / "channel", {"w": torch.randn(600_000).to(BF16)}
    settings = PublisherSettings(codec="hazard", strides=(2,))
    small = tensors["w"].abs().argsort()[:150_000]
    with Publisher(channel, tensors, settings=settings) as publisher:
        for _ in range(2):
            some = small[torch.randperm(150_000)[:120_000]]
            tensors["w"].view(torch.int16)[some] += torch.randint(1, 200, (120_000,)).short()
            publisher.publish()
    status, result, _ = told(capsys, "ls", channel)
    assert [(row["kind"], row["number"]) for row in result["versions"]] == [
        ("anchor", 0),
        ("delta", 1),
        ("delta", 2),
        ("merged", 2),
    ]
    assert result["versions"][-1]["base"]["number"] == 0
    assert cli.main(["ls", str(channel)]) == 0
    assert "merged (on 0)" in capsys.readouterr().out
    status, result, _ = told(capsys, "show", channel)
    (row,) = result["tensors"]
    assert (status, result["kind"], row["codec"]) == (0, "delta", "hazard")
    assert row["n_changed"] == 120_000
    status, result, _ = told(capsys, "verify", channel)
    assert (status, result["n_versions"], result["n_unproven"]) == (0, 3, 1)
    assert cli.main(["verify", str(channel)]) == 0
    assert "1 merged delta fetched" in capsys.readouterr().out
    status, result, _ = told(capsys, "verify", channel, 2)
    assert (status, result["proven"], result["n_unproven"]) == (0, True, 0)
    assert [row["kind"] for row in result["versions"]] == ["anchor", "merged"]
    status, result, _ = told(capsys, "apply", channel, tmp_path / "out")
    assert status == 0
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(as_bytes(made["w"]), as_bytes(tensors["w"]))


# Proving


def test_verify_proves_every_version(run, capsys):
    run.publish()
    status, result, error = told(capsys, "verify", run.channel)
    assert status == 0
    assert (result["proven"], result["n_records"], result["n_versions"]) == (True, 4, 3)
    assert [row["proven"] for row in result["versions"]] == [True] * 3
    assert "version 2 delta: weights match the root" in error


def test_verify_with_a_reference_says_what_it_could_prove(run, capsys):
    run.publish(Reference("someone/model", "abc"))
    status, result, _ = told(capsys, "verify", run.channel)
    assert (status, result["proven"]) == (0, False)
    assert cli.main(["verify", str(run.channel)]) == 0
    assert "--base" in capsys.readouterr().out
    status, result, _ = told(capsys, "verify", run.channel, 2, "--base", run.base)
    assert (status, result["proven"]) == (0, True)
    wrong = make_tensors()
    wrong["embed.weight"][0, 0] += 1
    save_file(wrong, run.base / "model.safetensors")
    status, result, error = told(capsys, "verify", run.channel, "--base", run.base)
    assert (status, result["error"]["kind"]) == (5, "BaseMismatchError")
    assert "embed.weight" in error


@pytest.mark.parametrize("which", ["blob", "manifest"])
@pytest.mark.parametrize("place", [0, 40, -1])
def test_verify_finds_any_flipped_bit(run, capsys, which, place):
    run.publish()
    store = LocalStore(run.channel)
    manifest = Log(store).read(3).manifest
    key = manifest_key(3) if which == "manifest" else blob_key(manifest.blobs[0].sha256)
    data = bytearray(store.get(key, max_bytes=1 << 20))
    data[place] ^= 1
    store.put(key, bytes(data))
    status, result, error = told(capsys, "verify", run.channel)
    assert status in (4, 5), error
    assert result["error"]["action"] in ("refetch", "reseed")


# Keys


@pytest.fixture
def keys(tmp_path, capsys):
    """Files of a signing key, its public half, another's, and a sealing key."""

    class Files:
        signing = tmp_path / "trainer.key"
        public = tmp_path / "trainer.key.pub"
        other = tmp_path / "other.key.pub"
        sealing = tmp_path / "seal.key"

    for path in (Files.signing, tmp_path / "other.key"):
        assert told(capsys, "keygen", path)[0] == 0
    assert told(capsys, "keygen", Files.sealing, "--sealing")[0] == 0
    return Files()


def test_keygen_makes_a_key_once_and_shows_no_secret(tmp_path, capsys):
    for words in ([tmp_path / "a"], [tmp_path / "b", "--sealing"]):
        status, result, _ = told(capsys, "keygen", *words)
        assert (status, result["file"]) == (0, str(words[0]))
        path = words[0]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text()
        status, result, error = told(capsys, "keygen", *words)
        assert (status, result["error"]["kind"]) == (2, "SettingsError")
        assert "never written over" in error
        assert path.read_text() == secret
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.pub", "b"]
    done = command("keygen", tmp_path / "c")
    assert done.returncode == 0
    assert "--trusted-key" in done.stdout
    done = command("keygen", tmp_path / "d", "--sealing")
    assert "--sealing-key" in done.stdout
    lines = [(tmp_path / name).read_text().splitlines() for name in "cd"]
    secrets = [lines[0][1], lines[1][0]]
    assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
    assert cli.main(["keygen", str(tmp_path / "no folder" / "e")]) == 2


def test_every_command_checks_signatures_and_opens_seals_when_told(run, keys, capsys):
    run.keys = Keys.load(signing=keys.signing, sealing=[keys.sealing])
    run.publish()
    key_id = next(iter(run.keys.signers))
    good = ["--trusted-key", keys.public, "--sealing-key", keys.sealing]
    both = [*good, "--trusted-key", keys.other]
    for words in (good, both):
        status, result, _ = told(capsys, "ls", run.channel, *words)
        assert status == 0
        signatures = [row["signature"] for row in result["versions"]]
        assert signatures == [{"key_id": key_id, "trusted": True}] * 3
    status, result, _ = told(capsys, "show", run.channel, *good)
    assert (status, result["sealed"], result["signature"]["trusted"]) == (0, True, True)
    status, result, _ = told(capsys, "verify", run.channel, *good)
    assert (status, result["proven"], result["signed"], result["sealed"]) == (0, True, True, True)
    assert told(capsys, "apply", run.channel, run.out, *good)[0] == 0
    made = load_file(run.out / "model.safetensors")
    assert torch.equal(made["norm.weight"], run.tensors["norm.weight"])
    wrong = ["--trusted-key", keys.other, "--sealing-key", keys.sealing]
    for words in (["ls"], ["show"], ["verify"]):
        status, result, error = told(capsys, words[0], run.channel, *wrong)
        assert (status, result["error"]["kind"]) == (5, "SignatureError")
        assert key_id in error
        if words[0] == "ls":
            continue
        status, result, error = told(capsys, words[0], run.channel, "--trusted-key", keys.public)
        assert (status, result["error"]["kind"]) == (2, "SettingsError")
        assert "give its sealing key" in error


def test_show_says_whether_a_record_is_signed_and_sealed(run, keys, capsys):
    run.keys = Keys.load(signing=keys.signing)
    run.publish()
    status, result, _ = told(capsys, "show", run.channel)
    assert (status, result["sealed"], result["signature"]["trusted"]) == (0, False, False)
    key_id = result["signature"]["key_id"]
    assert cli.main(["show", str(run.channel)]) == 0
    out = capsys.readouterr().out
    assert f"signature by {key_id} not checked, for want of --trusted-key, not sealed" in out
    assert cli.main(["show", str(run.channel), "--trusted-key", str(keys.public)]) == 0
    assert f"signed by {key_id}, a trusted key, not sealed" in capsys.readouterr().out
    assert cli.main(["verify", str(run.channel), "--trusted-key", str(keys.public)]) == 0
    assert "every record is signed by a trusted key" in capsys.readouterr().out
    assert cli.main(["verify", str(run.channel)]) == 0
    assert "signed" not in capsys.readouterr().out


def test_a_channel_that_is_not_signed_or_not_sealed_is_refused_where_it_has_to_be(
    run, keys, capsys
):
    run.publish()
    status, result, _ = told(capsys, "show", run.channel)
    assert (status, result["signature"], result["sealed"]) == (0, None, False)
    assert cli.main(["show", str(run.channel)]) == 0
    assert "not signed, not sealed" in capsys.readouterr().out
    status, result, _ = told(capsys, "verify", run.channel, "--trusted-key", keys.public)
    assert (status, result["error"]["kind"]) == (5, "SignatureError")
    status, result, error = told(capsys, "verify", run.channel, "--sealing-key", keys.sealing)
    assert (status, result["error"]["kind"]) == (2, "SettingsError")
    assert "not sealed" in error


def test_a_secret_key_in_the_wrong_place_or_open_to_others_is_told(run, keys, capsys):
    run.publish()
    keys.sealing.chmod(0o644)
    for words in (
        ["--trusted-key", keys.signing],
        ["--sealing-key", keys.public],
        ["--sealing-key", keys.sealing],
        ["--trusted-key", run.base / "absent"],
    ):
        status, result, error = told(capsys, "ls", run.channel, *words)
        assert (status, result["error"]["kind"]) == (2, "SettingsError")
        assert str(words[1]) in error
        assert keys.signing.read_text().splitlines()[1] not in error


# Upkeep


def test_gc_deletes_what_no_record_needs_and_first_tells_what_it_would(run, keys, capsys):
    run.keys = Keys.load(signing=keys.signing)
    run.publish()
    store = LocalStore(run.channel)
    orphan = "b/" + "0" * 64
    store.put(orphan, b"left by a trainer that died")
    words = ["gc", run.channel, "--trusted-key", keys.public, "--grace", 0]
    status, result, _ = told(capsys, *words, "--orphans", "--dry-run")
    assert (status, result["dry_run"], result["n_objects"]) == (0, True, 1)
    assert orphan in store.list("b/")
    n_records = len(store.list("m/"))
    status, result, _ = told(capsys, *words, "--orphans", "--signing-key", keys.signing)
    assert (status, result["n_objects"]) == (0, 1)
    assert orphan not in store.list("b/")
    assert len(store.list("m/")) == n_records + 1, "it claimed the channel"
    assert cli.main([*map(str, words)]) == 0
    assert "0 objects deleted" in capsys.readouterr().out
    assert told(capsys, "verify", run.channel, "--trusted-key", keys.public)[1]["proven"]
    for grace in ("-1", "nan", "inf", "x"):
        done = command("gc", run.channel, "--grace", grace)
        assert done.returncode == 2
        assert "not a number of seconds" in done.stderr


def test_gc_waits_out_its_grace(tmp_path, capsys):
    log = Log(LocalStore(tmp_path / "channel"))
    weights = toy.begin(log, 3)
    blob = log.put_blob(json.dumps(weights).encode())
    low = log.position.seq + 1
    log.append("anchor", target=log.position.manifest.target, blobs=[blob], low=low)
    words = ["gc", tmp_path / "channel"]
    assert told(capsys, *words)[1]["n_objects"] == 0
    assert told(capsys, *words, "--grace", 0)[1]["n_objects"] == 4
    assert told(capsys, *words, "--grace", 0)[1]["n_objects"] == 0
    assert Log(log.store).get_blob(log.position.manifest, 0)


# Wrong use


def test_wrong_use_exits_with_2_and_says_how(run):
    for words in ([], ["frobnicate"], ["show", run.channel, "-1"], ["apply", run.channel]):
        done = command(*words)
        assert done.returncode == 2
        assert "usage: vllm-delta" in done.stderr
        assert "_number" not in done.stderr
    done = command("ls", "s3://bucket/x")
    assert done.returncode == 2
    assert "s3://bucket/x" in done.stderr
    assert "Traceback" not in done.stderr
    run.publish()
    for words in (["ls", "~nobody-of-this-name/x"], ["apply", run.channel, "x" * 300]):
        done = command(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("vllm-delta: SettingsError: ")


def test_help_documents_the_exit_status():
    done = command("verify", "--help")
    assert done.returncode == 0
    assert "4 refetch" in " ".join(done.stdout.split())


def test_a_base_that_is_no_checkpoint_is_told(run, capsys):
    run.publish()
    for name, data in (("config.json", b"{}"), ("model.safetensors", b"\x10" + b"\0" * 7 + b"{}")):
        run.base.joinpath("model.safetensors").unlink(missing_ok=True)
        run.base.joinpath(name).write_bytes(data)
        status, _, error = told(capsys, "verify", run.channel, "--base", run.base)
        assert status == 2
        assert "safetensors" in error


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [(["show"], 0, b""), (["show", "9"], 5, b"ChainError"), (["show", "9", "--json"], 5, b"Chain")],
)
def test_a_reader_that_stops_reading_is_no_error(run, words, status, said):
    run.publish()
    words = [sys.executable, "-m", "vllm_delta.cli", words[0], str(run.channel), *words[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == status
    assert error.count(b"\n") == (status != 0)
    assert said in error


def test_exit_statuses_cover_every_action():
    for kind in DeltaError.__subclasses__():
        assert kind.action in cli.EXIT_CODES
