"""What one process fetched, the others of its machine need not; and a cache never gets in the way.

The processes are real.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.channel.toy import ROOT
from vllm_delta.channel.cache import BlobCache
from vllm_delta.errors import ChannelError, SettingsError
from vllm_delta.format import BlobRef, digest

BIG = 1 << 40
N_BYTES = 5000


class Place:
    """A cache's folder, blobs that could be fetched, and a note of each load."""

    def __init__(self, root: Path, n_blobs: int = 20) -> None:
        self.folder, self.blobs, self.notes = root / "cache", root / "blobs", root / "notes"
        self.blobs.mkdir()
        self.notes.touch()
        for n in range(n_blobs):
            data = bytes([n]) * N_BYTES
            (self.blobs / digest(data)).write_bytes(data)
        self.refs = [BlobRef(path.name, N_BYTES, 0) for path in sorted(self.blobs.iterdir())]
        self.children: list[subprocess.Popen[bytes]] = []

    def child(self, action: str, *arguments: object, quota: int = BIG) -> subprocess.Popen[bytes]:
        fixed = [action, self.folder, quota, self.blobs, self.notes, *arguments]
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.channel.cache_child", *map(str, fixed)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.children.append(child)
        return child

    def loads(self) -> Counter[str]:
        return Counter(line.split()[1] for line in self.notes.read_text().splitlines())

    def cache(self, quota: int = BIG, **more: Any) -> BlobCache:
        return BlobCache(self.folder, quota_bytes=quota, **more)

    def fetch(self, cache: BlobCache, ref: BlobRef) -> bytes:
        def load() -> bytes:
            with self.notes.open("a") as file:
                file.write(f"{os.getpid()} {ref.sha256}\n")
            return (self.blobs / ref.sha256).read_bytes()

        data = cache.fetch(ref, load)
        assert digest(data) == ref.sha256
        return data

    def kept(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.blob")}

    def file(self, ref: BlobRef) -> Path:
        return self.folder / f"{ref.sha256}.blob"

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(30)
            for pipe in (child.stdin, child.stdout, child.stderr):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """On disk and in shared memory."""
    place = Place(tmp_path)
    if request.param == "memory":
        shared = Path("/dev/shm")
        place.folder = shared / f"vllm-delta-test-{os.getpid()}-{tmp_path.name}"
    yield place
    place.close()
    with contextlib.suppress(FileNotFoundError):
        for path in place.folder.iterdir():
            path.unlink()
        place.folder.rmdir()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, 4)
    yield place
    place.close()


def hear(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline().decode().strip()
    if not line:
        child.wait(30)
        assert child.stderr is not None
        raise AssertionError(child.stderr.read().decode()[-2000:])
    return line


def tell(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()


def test_four_processes_load_each_blob_once(place: Place) -> None:
    """All at the same time, and again when everything is there."""
    children = [place.child("fetch", 2) for _ in range(4)]
    assert [hear(child) for child in children] == ["ready"] * 4
    for _ in range(2):
        for child in children:
            tell(child)
        assert [hear(child) for child in children] == ["done"] * 4
        assert place.loads() == Counter({ref.sha256: 1 for ref in place.refs})
    assert place.kept() == {ref.sha256 for ref in place.refs}
    assert not list(place.folder.glob("*.tmp"))


def test_threads_of_one_process_load_each_blob_once(place: Place) -> None:
    cache = place.cache()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(place.fetch, cache, ref) for ref in place.refs for _ in range(4)]
        assert all(job.result() for job in jobs)
    assert set(place.loads().values()) == {1}


def test_a_process_that_is_killed_while_it_loads_holds_nobody_up(place: Place) -> None:
    """The next one loads, the others wait for that."""
    victim = place.child("stuck")
    assert hear(victim) == "loading"
    others = [place.child("fetch") for _ in range(2)]
    assert [hear(other) for other in others] == ["ready"] * 2
    for other in others:
        tell(other)
    victim.send_signal(signal.SIGKILL)
    assert [hear(other) for other in others] == ["done"] * 2
    first, *rest = place.refs
    assert place.loads() == Counter({first.sha256: 2, **{ref.sha256: 1 for ref in rest}})


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_believed(
    place: Place,
) -> None:
    """Half a file under a temporary name; it goes when room is made the next time."""
    victim = place.child("cut")
    assert hear(victim) == "dying"
    victim.wait(30)
    (half,) = place.folder.glob("*.tmp")
    assert place.kept() == set()
    other = next(ref for ref in place.refs if ref.sha256[:2] != half.name[:2])
    place.fetch(place.cache(), other)
    assert not half.exists()
    for ref in place.refs:
        place.fetch(place.cache(), ref)
    assert place.loads()[half.stem] == 2


def test_an_error_of_loading_is_raised_to_whom_it_came(place: Place) -> None:
    """Who waited for it loads by itself and has no error."""
    failing = place.child("fail")
    assert hear(failing) == "loading"
    other = place.child("fetch")
    assert hear(other) == "ready"
    tell(other)
    tell(failing)
    assert hear(failing) == "mine"
    assert hear(other) == "done"
    assert place.loads()[place.refs[0].sha256] == 2


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:]),
    "too short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_loaded_anew(on_disk: Place, kind: str) -> None:
    cache, (ref, *_) = on_disk.cache(), on_disk.refs
    on_disk.fetch(cache, ref)
    DAMAGE[kind](on_disk.file(ref))
    for _ in range(2):
        on_disk.fetch(cache, ref)
    assert on_disk.loads()[ref.sha256] == 2
    assert stat.S_ISREG(on_disk.file(ref).lstat().st_mode)


def test_a_damaged_file_is_dropped_though_nothing_better_comes(on_disk: Place) -> None:
    cache, (ref, *_) = on_disk.cache(), on_disk.refs
    on_disk.fetch(cache, ref)
    DAMAGE["a bit"](on_disk.file(ref))

    def away() -> bytes:
        raise ChannelError("away")

    with pytest.raises(ChannelError):
        cache.fetch(ref, away)
    assert on_disk.kept() == set()


def test_what_was_used_longest_ago_makes_room(on_disk: Place) -> None:
    """Reading counts as use."""
    cache = on_disk.cache(quota=3 * N_BYTES)
    first, second, third, fourth = on_disk.refs
    for number, ref in enumerate((first, second, third)):
        on_disk.fetch(cache, ref)
        os.utime(on_disk.file(ref), (number, number))
    on_disk.fetch(cache, first)
    on_disk.fetch(cache, fourth)
    assert on_disk.kept() == {first.sha256, third.sha256, fourth.sha256}


def test_processes_with_different_quotas_share_a_folder(place: Place) -> None:
    """The small one keeps less and still uses what the large one left; no blob is ever wrong."""
    large, small = place.child("fetch", 2), place.child("fetch", 2, quota=7 * N_BYTES)
    for child in (large, small, small, large):
        if child is large and not place.loads():
            assert [hear(each) for each in (large, small)] == ["ready"] * 2
        tell(child)
        assert hear(child) == "done"
    # All were there when the small one came, which loaded and removed nothing.
    assert set(place.loads().values()) == {1}
    small_cache = place.cache(quota=7 * N_BYTES)
    place.file(place.refs[0]).unlink()
    place.fetch(small_cache, place.refs[0])
    assert len(place.kept()) == 7
    assert place.refs[0].sha256 in place.kept()


def test_a_blob_larger_than_the_quota_is_loaded_and_not_kept(on_disk: Place) -> None:
    small = on_disk.cache(quota=N_BYTES - 1)
    first, second, *_ = on_disk.refs
    on_disk.fetch(on_disk.cache(), first)
    for ref in (first, second):
        on_disk.fetch(small, ref)
    assert on_disk.kept() == {first.sha256}
    assert on_disk.loads() == Counter({first.sha256: 1, second.sha256: 1})


def test_what_others_are_writing_counts_and_is_left_alone(on_disk: Place) -> None:
    """A file that is being written while its lock is held is neither swept nor overdrawn."""
    first, second, *_ = on_disk.refs
    cache = on_disk.cache(quota=2 * N_BYTES - 1)
    lock = cache._lock(f"{first.sha256[:2]}.lock")
    assert lock is not None
    temporary = on_disk.folder / f"{first.sha256}.tmp"
    temporary.write_bytes(bytes(N_BYTES))
    on_disk.fetch(cache, second)
    assert temporary.exists()
    assert on_disk.kept() == set()
    os.close(lock)
    on_disk.fetch(cache, second)
    assert not temporary.exists()
    assert on_disk.kept() == {second.sha256}


def test_a_file_counts_whole_from_the_beginning_of_its_writing(
    on_disk: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So two that are written at a time do not overdraw the quota together."""
    cache, write, sizes = on_disk.cache(), os.write, []

    def slow(file: int, data: Any) -> int:
        sizes.append(os.fstat(file).st_size)
        return write(file, data[:2000])

    monkeypatch.setattr(os, "write", slow)
    on_disk.fetch(cache, on_disk.refs[0])
    assert sizes == [N_BYTES] * 3
    assert on_disk.kept() == {on_disk.refs[0].sha256}


def test_a_full_disk_never_fails_a_fetch(
    on_disk: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a file is written, then no more. Told once; asked again only after a while."""
    now = [0.0]
    cache = on_disk.cache(clock=lambda: now[0])
    write, writes = os.write, []

    def full(file: int, data: Any) -> int:
        writes.append(len(data))
        if len(writes) % 2:
            return write(file, data[:2000])
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for ref in on_disk.refs:
            on_disk.fetch(cache, ref)
        assert len(writes) == 4, "after two tries with the first blob it is let be"
        assert len(caplog.records) == 1
        assert on_disk.kept() == set()
        assert not list(on_disk.folder.glob("*.tmp"))
        now[0] += 61.0
        on_disk.fetch(cache, on_disk.refs[0])
        assert len(writes) == 8
        assert len(caplog.records) == 1
    now[0] += 61.0
    on_disk.fetch(cache, on_disk.refs[0])
    assert on_disk.kept() == {on_disk.refs[0].sha256}


def test_on_a_full_disk_what_the_cache_holds_makes_room(
    on_disk: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that others filled: the oldest blob goes, and the new one is kept in its place."""
    cache, write = on_disk.cache(), os.write
    first, second, third, _ = on_disk.refs
    for number, ref in enumerate((first, second)):
        on_disk.fetch(cache, ref)
        os.utime(on_disk.file(ref), (number, number))

    def full(file: int, data: Any) -> int:
        if len(on_disk.kept()) >= 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    on_disk.fetch(cache, third)
    assert on_disk.kept() == {second.sha256, third.sha256}


def test_a_process_that_may_not_write_so_much_fetches_all_the_same(on_disk: Place) -> None:
    child = on_disk.child("limited", N_BYTES - 1)
    assert hear(child) == "ready"
    tell(child)
    assert hear(child) == "done"
    _, said = child.communicate(timeout=30)
    assert said.count(b"cannot be kept") == 1
    assert on_disk.kept() == set()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user: root")


@needs_root
def test_a_folder_that_cannot_be_made_never_fails_a_fetch(on_disk: Place) -> None:
    place = on_disk
    for path in place.folder.parents[:3]:
        path.chmod(0o755)
    place.notes.chmod(0o666)
    child = place.child("unprivileged", 65534)
    assert hear(child) == "ready"
    tell(child)
    assert hear(child) == "done"
    _, said = child.communicate(timeout=30)
    assert said.count(b"cannot be kept") == 1
    assert not place.folder.exists()


@needs_root
def test_another_user_s_folder_is_refused(tmp_path: Path) -> None:
    """So is a link that somebody put in its place, and what is not a folder."""
    place = Place(tmp_path, 1)
    place.folder.mkdir()
    os.chown(place.folder, 65534, 65534)
    with pytest.raises(SettingsError, match="not a folder of this user"):
        place.cache()
    place.folder.rmdir()
    place.folder.symlink_to(place.blobs)
    with pytest.raises(SettingsError, match="not a folder of this user"):
        place.cache()
    assert len(list(place.blobs.iterdir())) == 1
    place.folder.unlink()
    place.folder.touch()
    with pytest.raises(SettingsError, match="not a folder of this user"):
        place.cache()


def test_a_folder_is_for_its_user_alone_and_made_again(on_disk: Place) -> None:
    """A clean-up while the cache is in use costs a load."""
    cache, (ref, *_) = on_disk.cache(), on_disk.refs
    on_disk.fetch(cache, ref)
    assert stat.S_IMODE(on_disk.folder.stat().st_mode) == 0o700
    for path in on_disk.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
    on_disk.folder.rmdir()
    for _ in range(2):
        on_disk.fetch(cache, ref)
    assert on_disk.loads()[ref.sha256] == 2


def test_a_folder_that_was_taken_over_never_fails_a_fetch(on_disk: Place) -> None:
    """Refused at the start; later it is only not used."""
    cache, (ref, *_) = on_disk.cache(), on_disk.refs
    on_disk.folder.rmdir()
    on_disk.folder.symlink_to(on_disk.folder.with_name("nowhere"))
    on_disk.fetch(cache, ref)


def test_a_process_that_hangs_while_it_loads_holds_nobody_up_for_ever(on_disk: Place) -> None:
    """After a while the others load by themselves."""
    stuck = on_disk.child("stuck")
    assert hear(stuck) == "loading"
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    cache = on_disk.cache(clock=lambda: now[0], sleep=sleep)
    for ref in on_disk.refs:
        on_disk.fetch(cache, ref)
    assert 120 <= now[0] < 121
    assert on_disk.kept() == {ref.sha256 for ref in on_disk.refs[1:]}


@pytest.mark.parametrize("lock", ["room.lock", "blob"])
def test_who_holds_a_lock_for_ever_is_waited_for_once(
    on_disk: Place, lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a while, and it is said, once; the cache is used again when the lock is free."""
    cache_now = [0.0]

    def sleep(seconds: float) -> None:
        cache_now[0] += seconds

    cache = on_disk.cache(clock=lambda: cache_now[0], sleep=sleep)
    ref = on_disk.refs[0]
    name = lock if lock != "blob" else f"{ref.sha256[:2]}.lock"
    with (on_disk.folder / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(5):
            on_disk.fetch(cache, ref)
            cache_now[0] += 1000.0
        assert 5120 <= cache_now[0] < 5121
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert not on_disk.kept()
    on_disk.fetch(cache, ref)
    assert on_disk.kept() == {ref.sha256}


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_what_cannot_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="not a folder's name"):
        BlobCache(name, quota_bytes=1)


def test_a_quota_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        BlobCache(tmp_path, quota_bytes=-1)
