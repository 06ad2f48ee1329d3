"""Blobs that were fetched, kept on this machine, so that its readers fetch each of them once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_delta.errors import SettingsError
from vllm_delta.format import BlobRef

Object = bytes | bytearray
"""A stored object as it was fetched; nobody changes it any more."""

logger = logging.getLogger("vllm_delta")

_BLOB = re.compile(r"[0-9a-f]{64}\.blob")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.tmp")
_ROOM_LOCK = "room.lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATIENCE_S = 120.0
_REST_S = 60.0
_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.02


class BlobCache:
    """A folder of blobs that the processes of one user on one machine share.

    Of those that want one blob, one holds a lock and loads it; the others wait and read its file.
    The kernel takes the lock from a process that dies. A file is believed only with the blob's size
    and sha256, each time it is read. Whatever is wrong with the folder, a blob is still loaded: it
    is just not kept, which is logged once. Safe from any thread; `fetch` blocks on the loading.

    Args:
        folder: where; made when it is needed, for this user alone. In memory (`/dev/shm`) or on
            disk.
        quota_bytes: most bytes kept there; what was used longest ago goes first. Processes with
            different quotas may share a folder; it then holds as much as the largest allows.
        clock: seconds that never go back.
        sleep: waits so many seconds; may raise to give up waiting.

    Raises:
        SettingsError: the folder is another user's, a link, or not a folder, or cannot be one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        quota_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if quota_bytes < 0:
            raise SettingsError("a quota is below 0", quota_bytes=quota_bytes)
        self.folder = own_folder(folder)
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._sleep = sleep
        self._warned = False
        self._rests_until = -math.inf
        self._stuck: set[str] = set()
        try:
            self._make_folder()
        except OSError as error:
            self._complain(error)

    def fetch(self, ref: BlobRef, load: Callable[[], Object]) -> Object:
        """A blob's object, from the folder or else from `load`.

        Args:
            load: gives the object with the right digest. What it raises is raised here, and only
                here: who waited for it loads by itself.
        """
        if (data := self._read(ref)) is not None:
            return data
        lock: int | None = None
        if ref.n_bytes <= self._quota_bytes and self._clock() >= self._rests_until:
            lock = self._lock_or_complain(_lock_of(ref.sha256))
        if lock is None:
            return load()
        with _held(lock):
            if (data := self._read(ref, drop_damaged=True)) is not None:
                return data
            loaded = load()
            self._keep(ref, loaded)
            return loaded

    def _read(self, ref: BlobRef, *, drop_damaged: bool = False) -> bytes | None:
        path = self.folder / f"{ref.sha256}.blob"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb", buffering=0) as file:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_size == ref.n_bytes:
                    data = file.readall()
                    if hashlib.sha256(data).hexdigest() == ref.sha256:
                        os.utime(descriptor)  # what is used stays
                        return data
            if drop_damaged:
                path.unlink()
        except OSError:
            return None  # whatever it is, it is loaded and written anew
        return None

    def _keep(self, ref: BlobRef, data: Object) -> None:
        try:
            try:
                self._write(ref.sha256, data)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # The disk is fuller than the quota knows of; what we keep there may be why.
                self._write(ref.sha256, data, to_free=len(data))
        except (OSError, SettingsError) as error:
            self._complain(error)

    def _write(self, name: str, data: Object, *, to_free: int = 0) -> None:
        """Write under a temporary name, which nobody else does while this blob's lock is held."""
        temporary = self.folder / f"{name}.tmp"
        if (lock := self._lock_or_complain(_ROOM_LOCK)) is None:
            return
        file = -1
        try:
            with _held(lock):
                if not self._make_room(len(data), to_free):
                    return
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(temporary, flags, 0o600)
                os.ftruncate(file, len(data))  # counted by others from now on
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.rename(temporary, self.folder / f"{name}.blob")
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            if file >= 0:
                os.close(file)

    def _make_room(self, n_bytes: int, to_free: int) -> bool:
        """Remove what was used longest ago until there is room for so many bytes.

        Args:
            to_free: bytes to remove even if the quota does not ask for it.
        """
        total = 0
        kept: list[tuple[int, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if _BLOB.fullmatch(path.name):
                    kept.append((status.st_mtime_ns, status.st_size, path))
                elif not _TEMPORARY.fullmatch(path.name) or self._sweep(path):
                    continue
                total += status.st_size
        most = min(self._quota_bytes - n_bytes, total - to_free)
        for _, size, path in sorted(kept):
            if total <= most:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= size
        return total <= self._quota_bytes - n_bytes

    def _sweep(self, temporary: Path) -> bool:
        """Remove a temporary file whose writer is dead: nobody holds its blob's lock."""
        lock = self._lock(_lock_of(temporary.name), 0.0)
        if lock is None:
            return False
        with _held(lock):
            temporary.unlink()
        return True

    def _lock_or_complain(self, name: str) -> int | None:
        """As `_lock`; who holds a lock for too long is waited for once."""
        is_stuck = name in self._stuck
        try:
            lock = self._lock(name, 0.0 if is_stuck else _PATIENCE_S)
        except (OSError, SettingsError) as error:
            self._complain(error)
            return None
        if lock is not None:
            self._stuck.discard(name)
        elif not is_stuck:
            self._stuck.add(name)
            rest_s = _REST_S if name == _ROOM_LOCK else 0.0  # other blobs have other locks
            self._complain(f"{name} is held by a process that does not go on", rest_s)
        return lock

    def _lock(self, name: str, patience_s: float = _PATIENCE_S) -> int | None:
        """An open file that is locked; None when another process holds it for too long.

        That one may be stopped, or hang on a store; nobody else should with it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(self.folder / name, flags, 0o600)
        except FileNotFoundError:
            self._make_folder()  # somebody cleaned up
            lock = os.open(self.folder / name, flags, 0o600)
        until, wait_s = self._clock() + patience_s, _FIRST_WAIT_S
        try:
            while not _is_locked(lock):
                if self._clock() >= until:
                    os.close(lock)
                    return None
                self._sleep(wait_s)
                wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _make_folder(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        status = self.folder.lstat()
        # Of a folder in a place where all may write, another user could be the maker.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise SettingsError(
                "the cache's folder is not a folder of this user", path=str(self.folder)
            )

    def _complain(self, error: OSError | SettingsError | str, rest_s: float = _REST_S) -> None:
        """The folder is not to be had; leave it alone for a while, so that nobody waits for it.

        Args:
            rest_s: for how long.
        """
        self._rests_until = self._clock() + rest_s
        if not self._warned:
            self._warned = True
            logger.warning(
                "Blobs cannot be kept in %s; each process loads its own: %s", self.folder, error
            )


def own_folder(folder: str | Path) -> Path:
    """An absolute path, `~` and `~user` resolved.

    Raises:
        SettingsError: there is no such home, or no folder can have this name.
    """
    try:
        path = Path(folder).expanduser().absolute()
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a zero byte")
    except (RuntimeError, ValueError) as error:
        raise SettingsError("not a folder's name", path=ascii(str(folder))) from error
    return path


def _lock_of(name: str) -> str:
    """The lock of a blob; a few share one, so that none is ever removed."""
    return f"{name[:2]}.lock"


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _held(lock: int) -> Iterator[None]:
    try:
        yield
    finally:
        # Told apart from closing: a forked child may have inherited the file.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
