from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.channel.toy import begin, child, replay
from vllm_delta.channel import LocalStore, Log, Store, open_channel
from vllm_delta.channel.local import TEMPORARY_AGE_S
from vllm_delta.errors import (
    ChannelError,
    ChannelFullError,
    DeltaError,
    FormatError,
    SettingsError,
)
from vllm_delta.format import blob_key, manifest_key
from vllm_delta.testing import ChannelContract

BLOB = blob_key("ab" * 32)


class TestLocalStore(ChannelContract):
    def open_store(self, place: Path) -> Store:
        return LocalStore(place)


def files_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_opening_and_reading_write_nothing(tmp_path: Path) -> None:
    log = Log(open_channel(tmp_path / "channel"))
    assert log.tail() is None
    assert log.read(1) is None
    assert log.store.list("") == []
    assert list(tmp_path.iterdir()) == []


def test_directories_above_the_channel_are_not_made(tmp_path: Path) -> None:
    store = open_channel(tmp_path / "unmounted" / "channel")
    with pytest.raises(ChannelError, match="folder above the channel"):
        store.get("head", max_bytes=1)
    with pytest.raises(ChannelError, match="folder above the channel"):
        store.put("head", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gone", [".", "m", "b"])
def test_a_vanished_directory_is_an_error_and_stays_vanished(tmp_path: Path, gone: str) -> None:
    root = tmp_path / "channel"
    log = Log(LocalStore(root))
    begin(log, 2)
    reader = LocalStore(root)
    shutil.rmtree(root / gone)
    key = {".": "head", "m": manifest_key(1), "b": BLOB}[gone]
    for store in (log.store, reader):
        with pytest.raises(ChannelError, match="not there"):
            store.get(key, max_bytes=100)
        with pytest.raises(ChannelError, match="not there"):
            store.put(key, b"x")
        with pytest.raises(ChannelError, match="not there"):
            store.put_new(key, b"x")
        with pytest.raises(ChannelError, match="not there"):
            store.delete([key])
        with pytest.raises(ChannelError, match="not there"):
            store.list("")
    assert not (root / gone).exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "socket", "directory"])
def test_what_is_not_a_plain_file_is_never_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put(BLOB, b"x")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    place = tmp_path / BLOB
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(place.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)
    else:
        place.symlink_to(secret if kind == "link" else tmp_path / "nothing")
    with pytest.raises(FormatError, match="not a plain file"):
        store.get(BLOB, max_bytes=100)
    assert store.put_new(BLOB, b"new") is False
    if kind != "directory":
        store.put(BLOB, b"new")
        assert store.get(BLOB, max_bytes=100) == b"new"
    assert secret.read_bytes() == b"secret", "a write went through a link"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("folder", ["m", "b"])
def test_a_linked_folder_is_not_followed(tmp_path: Path, folder: str) -> None:
    root, elsewhere = tmp_path / "channel", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / folder).symlink_to(elsewhere)
    key = {"m": manifest_key(1), "b": BLOB}[folder]
    with pytest.raises(SettingsError, match="plain directory"):
        LocalStore(root).put(key, b"x")
    assert list(elsewhere.iterdir()) == []


def test_the_channel_s_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalStore(tmp_path / "link").put("head", b"x")
    assert LocalStore(tmp_path / "real").get("head", max_bytes=1) == b"x"


def test_temporary_files_are_invisible_and_swept_by_age_by_the_owner(tmp_path: Path) -> None:
    now = 1_000_000_000.0
    log = Log(LocalStore(tmp_path, clock=lambda: now))
    begin(log, 1)
    ages = {f".{i:032x}.tmp": age for i, age in enumerate([0.0, TEMPORARY_AGE_S - 1, 2e5, 1e6])}
    for folder in (".", "m", "b"):
        for name, age in ages.items():
            (tmp_path / folder / name).write_bytes(b"part")
            os.utime(tmp_path / folder / name, (now - age, now - age))
    (tmp_path / "m/mine.tmp").write_bytes(b"not ours to remove")
    os.utime(tmp_path / "m/mine.tmp", (0, 0))
    before = files_under(tmp_path)

    reader = Log(LocalStore(tmp_path, clock=lambda: now))
    assert not any(".tmp" in key for key in reader.store.list(""))
    tail = reader.tail()
    assert tail is not None
    replay(reader, reader.read_from_anchor(tail))
    assert files_under(tmp_path) == before, "a reader removed something"

    owner = Log(LocalStore(tmp_path, clock=lambda: now))
    owner.claim("next")
    old = {name for name, age in ages.items() if age >= TEMPORARY_AGE_S}
    gone = {str(Path(folder, name)) for folder in (".", "m", "b") for name in old}
    assert before - files_under(tmp_path) == gone


def test_racing_processes_have_one_winner_each_time(tmp_path: Path) -> None:
    n_rounds, names = 60, ["zero", "one", "two", "three"]
    racers = [child("race", tmp_path, name, n_rounds) for name in names]
    won = dict.fromkeys(names, 0)
    try:
        for seq in range(1, n_rounds + 1):
            for racer in racers:
                racer.stdin.write(b"go\n")
                racer.stdin.flush()
            answers = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(answers) == [b"lost", b"lost", b"lost", b"won"], answers
            winner = names[answers.index(b"won")]
            won[winner] += 1
            assert (tmp_path / manifest_key(seq)).read_bytes() == winner.encode()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert max(won.values()) < n_rounds, f"no race happened: {won}"


@pytest.mark.parametrize("operation", ["put", "put_new", "claim"])
def test_a_crash_before_any_system_call_leaves_old_or_new_whole(
    tmp_path: Path, operation: str
) -> None:
    """The process dies before each call in turn; what can then be read is whole."""
    seen = set()
    for step in range(100):
        root = tmp_path / str(step)
        begin(Log(LocalStore(root)))
        LocalStore(root).put(BLOB, b"old" * 1000)
        if operation == "put_new":
            (root / manifest_key(2)).unlink()
        process = child("crash", root, operation, step)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, 9), errors.decode()
        store = LocalStore(root)
        if operation == "put":
            found = store.get(BLOB, max_bytes=10_000)
            assert found in (b"old" * 1000, b"new" * 1000)
            seen.add(found)
        elif operation == "put_new":
            found = store.get(manifest_key(2), max_bytes=10_000)
            assert found in (None, b"new" * 1000)
            seen.add(found)
        else:
            log = Log(store)
            tail = log.tail()
            assert tail is not None
            replay(log, log.read_chain(1, tail.seq))
            seen.add(tail.seq)
            assert log.claim("third").seq == tail.seq + 1
        if process.returncode == 0:
            break
    assert process.returncode == 0, "never got through"
    assert step >= 4, "no step was cut"
    assert len(seen) == 2, "the crashes all fell on one side of the write"


def test_a_file_too_large_is_channel_full_and_leaves_nothing(tmp_path: Path) -> None:
    LocalStore(tmp_path).put(BLOB, b"before")
    process = child("fill", tmp_path, 4096)
    out, errors = process.communicate(timeout=60)
    assert out == b"ChannelFullError fix\n", errors.decode()
    assert files_under(tmp_path) == {BLOB}
    assert (tmp_path / BLOB).read_bytes() == b"before"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    mounted = (
        subprocess.run(command, capture_output=True, check=False) if os.getuid() == 0 else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip("needs to be root and allowed to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_channel_full_and_the_channel_stays_good(tiny_disk: Path) -> None:
    log = Log(LocalStore(tiny_disk / "channel"))
    weights = begin(log, 3)
    with pytest.raises(ChannelFullError, match="no room left") as caught:
        log.put_blob(b"x" * 300_000)
    assert caught.value.action == "fix"
    (tiny_disk / "filler").write_bytes(b"x" * shutil.disk_usage(tiny_disk).free)
    with pytest.raises(ChannelFullError):
        log.append("delta", target=log_next(log), blobs=[some_ref(log)])
    assert log.in_doubt is None, "a full disk is a definite answer"
    assert not [name for name in files_under(tiny_disk) if name.endswith(".tmp")]
    tail = log.tail()
    assert tail == log.position
    assert replay(log, log.read_from_anchor(tail)) == weights

    (tiny_disk / "filler").unlink()
    record = log.append("delta", target=log_next(log), blobs=[some_ref(log)])
    assert log.tail() == record


def log_next(log: Log):  # type: ignore[no-untyped-def]
    at = log.position.manifest.target
    return type(at)(at.number + 1, at.root)


def some_ref(log: Log):  # type: ignore[no-untyped-def]
    return log.position.manifest.blobs[0]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user may pass through; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        if not all(parent.stat().st_mode & 0o001 for parent in place.parents):
            pytest.skip("needs a temporary directory that every user may pass through")
        yield place


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30), "a\ud800b"])
def test_a_path_that_no_system_can_have_is_a_setting_to_fix(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError):
        LocalStore(tmp_path / name)


def test_a_directory_one_may_not_write_is_a_setting_to_fix(open_place: Path) -> None:
    root = open_place / "channel"
    begin(Log(LocalStore(root)))
    for folder in (root, root / "m", root / "b"):
        folder.chmod(0o555)
    try:
        process = child("unprivileged", root, 65534)
        out, errors = process.communicate(timeout=60)
    finally:
        for folder in (root, root / "m", root / "b"):
            folder.chmod(0o755)
    assert out.splitlines()[:2] == [b"SettingsError fix"] * 2, errors.decode()
    assert out.splitlines()[2] == b"returned b'{\"seq\":2}'"


def test_threads_may_share_a_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "channel")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                key = blob_key(f"{number:032x}{i:032x}")
                store.put(key, b"x" * number)
                assert store.get(key, max_bytes=100) == b"x" * number
        except (DeltaError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(store.list("b/")) == 120
