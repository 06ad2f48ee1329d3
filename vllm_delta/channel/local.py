"""A channel in a local directory, safe against crashes at any point and against racing processes.

An object is written to a temporary file beside its place, forced to disk, then linked (put-if-
absent) or renamed into place, and the directory is forced to disk. So no reader ever sees a part
of an object, whatever dies when. What a crash leaves is a temporary file, which no key names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vllm_delta.channel.store import Store, check_key, is_key
from vllm_delta.errors import (
    ChannelError,
    ChannelFullError,
    DeltaError,
    DigestError,
    FormatError,
    SettingsError,
)

TEMPORARY_AGE_S = 86_400.0
"""Age at which a temporary file is taken for a dead process's; no live write takes a day."""

_ROOT = "."
_FOLDERS = (_ROOT, "m", "b")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore(Store):
    """A `Store` in a directory: `head`, `m/` and `b/` under it. Safe to use from any thread.

    A directory that does not exist yet is an empty channel, and the first write makes it, but not
    the directories above. One that this object has seen is never made again: when it vanishes (an
    unmounted disk, a clean-up) every call raises `ChannelError`. The directory itself may be a
    symbolic link; nothing below it is followed.

    Raises:
        SettingsError: `path` is there and is not a directory, or no path at all.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._root = Path(path).absolute()
        try:
            os.fsencode(self._root)
        except UnicodeEncodeError as error:
            raise SettingsError("no path can hold this text", path=ascii(str(path))) from error
        self._clock = clock
        self._swept = False
        self._seen: set[str] = set()
        for folder in _FOLDERS:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                descriptor = self._open_folder(folder)
                if descriptor is not None:
                    os.close(descriptor)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    def put(self, key: str, data: bytes) -> None:
        with self._writing(key, data) as (folder, temporary, name):
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            _sync_folder(folder)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._writing(key, data) as (folder, temporary, name):
            if key.startswith("m/") and not self._swept:
                # Whoever writes its first manifest is claiming the channel, and owners sweep.
                self.sweep_temporaries(TEMPORARY_AGE_S)
                self._swept = True
            try:
                os.link(
                    temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                )
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise SettingsError(
                        "this file system has no hard links, which a channel needs", url=self.url
                    ) from error
                raise
            _sync_folder(folder)
        return True

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        folder_name, name = _place(key)
        with self._errors(key):
            folder = self._open_folder(folder_name)
            if folder is None:
                return None
            with _closing(folder):
                return _read(folder, name, key, max_bytes)

    def delete(self, keys: Iterable[str]) -> None:
        places: dict[str, list[str]] = {}
        for key in keys:
            folder_name, name = _place(key)
            places.setdefault(folder_name, []).append(name)
        for folder_name, names in places.items():
            with self._errors():
                folder = self._open_folder(folder_name)
                if folder is None:
                    continue
                with _closing(folder):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
                    _sync_folder(folder)

    def list(self, prefix: str) -> list[str]:
        keys: list[str] = []
        with self._errors():
            for folder_name in _FOLDERS:
                folder = self._open_folder(folder_name)
                if folder is None:
                    continue
                stem = "" if folder_name == _ROOT else f"{folder_name}/"
                with _closing(folder):
                    keys += [stem + name for name in os.listdir(folder)]
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    def sweep_temporaries(self, older_than_s: float) -> int:
        """Remove the temporary files of writes that began at least `older_than_s` seconds ago.

        Returns:
            How many files were removed.
        """
        n_removed = 0
        with self._errors():
            for folder_name in _FOLDERS:
                folder = self._open_folder(folder_name)
                if folder is None:
                    continue
                with _closing(folder):
                    n_removed += _sweep(folder, self._clock() - older_than_s)
        return n_removed

    @contextlib.contextmanager
    def _writing(self, key: str, data: bytes) -> Iterator[tuple[int, str, str]]:
        """Have `data` on disk under a temporary name: (folder's descriptor, that name, final)."""
        folder_name, name = _place(key)
        with self._errors(key):
            folder = self._open_folder(folder_name, make=True)
            assert folder is not None
            with _closing(folder):
                temporary = f".{uuid.uuid4().hex}.tmp"
                try:
                    _write(folder, temporary, data)
                    yield folder, temporary, name
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temporary, dir_fd=folder)

    def _open_folder(self, folder: str, *, make: bool = False) -> int | None:
        """A descriptor of `folder`; None when it is not there and this object never saw it."""
        # By path each time: a descriptor kept open would go on working in a deleted directory.
        root = self._open_seen(self._root, _ROOT, None, make=make)
        if folder == _ROOT or root is None:
            return root
        with _closing(root):
            return self._open_seen(folder, folder, root, make=make)

    def _open_seen(
        self, path: str | Path, folder: str, parent: int | None, *, make: bool
    ) -> int | None:
        # Below the root nothing is followed; the root's own address is the user's to choose.
        flags = _FOLDER_FLAGS if parent is None else _FOLDER_FLAGS | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, dir_fd=parent)
        except FileNotFoundError:
            if folder in self._seen:
                raise
            if not make:
                # Raises when even the directory above is missing: an unmounted disk, a typing slip.
                if parent is None:
                    os.stat(self._root.parent)
                return None
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, dir_fd=parent)
            _sync_path(self._root.parent if parent is None else parent)
            descriptor = os.open(path, flags, dir_fd=parent)
        self._seen.add(folder)
        return descriptor

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        """Turn the operating system's errors into ours."""
        try:
            yield
        except OSError as error:
            raise self._typed(error, key) from error

    def _typed(self, error: OSError, key: str) -> DeltaError:
        facts = {"url": self.url, **({"key": key} if key else {}), "cause": error.strerror}
        if error.errno in _FULL:
            return ChannelFullError("no room left in the channel's directory", **facts)
        if error.errno in _DENIED:
            return SettingsError("not allowed in the channel's directory", **facts)
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return SettingsError("the channel's path is not a plain directory", **facts)
        if error.errno == errno.ENOENT:
            if not os.path.isdir(self._root.parent):
                # Said apart: a first user waits for it to be made, and it never is.
                return ChannelError(
                    "the folder above the channel's directory is not there; make or mount it",
                    **facts,
                )
            return ChannelError("the channel's directory is not there", **facts)
        return ChannelError("the channel's directory cannot be used", **facts)


def _place(key: str) -> tuple[str, str]:
    folder, _, name = check_key(key).rpartition("/")
    return folder or _ROOT, name


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with _closing(os.open(name, flags, 0o666, dir_fd=folder)) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)


def _read(folder: int, name: str, key: str, max_bytes: int) -> bytes | None:
    # Non-blocking, so that a named pipe put in an object's place cannot hold a reader for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FormatError("an object is not a plain file", key=key) from error
        raise
    with _closing(descriptor):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("an object is not a plain file", key=key)
        if status.st_size > max_bytes:
            raise DigestError(
                "an object is too large", key=key, n_bytes=status.st_size, max_bytes=max_bytes
            )
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            data = file.read(status.st_size)
            while len(data) < status.st_size and (more := file.read(status.st_size - len(data))):
                data += more
    return data


def _sync_path(folder: Path | int) -> None:
    if isinstance(folder, int):
        _sync_folder(folder)
        return
    with _closing(os.open(folder, _FOLDER_FLAGS)) as descriptor:
        _sync_folder(descriptor)


def _sync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network and user-space file systems cannot; they give no promise to lose.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sweep(folder: int, newest_s: float) -> int:
    n_removed = 0
    for name in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        # Another owner may sweep at the same time, or the file may be another user's to remove.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime <= newest_s:
                os.unlink(name, dir_fd=folder)
                n_removed += 1
    return n_removed
