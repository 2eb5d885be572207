"""Write and read whole files, atomically and durably, on a local disk or in an object store.

Rules:

1. `write` is atomic and durable: when it returns, the file survives a power failure; if it raises, or the process or
   the machine dies, the file has its previous content or all of the new content, never a part of it.
2. `LocalDisk` writes a temporary file in the same directory, syncs it, renames it over the name, and then syncs the
   directory, and the directories above it if they are new. Temporary files (their names begin with a dot) that a dead
   process left behind are never listed.
3. `ArrowDisk` gives what its filesystem guarantees. Object stores (s3, gs, abfs) show an object only when it is
   complete, and durably. On others (hdfs) a temporary file is moved; where moving over an existing file is refused,
   that file is deleted first, so for an instant there is none. Only files that can be rebuilt from others (`run.json`,
   attempts) are ever written twice.
4. Errors are typed, name the file and the cause, and leave behind only what was there before.
5. Paths are relative, with `/`, and stay inside the root.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from railgun.storage.errors import (
    DiskError,
    FullDiskError,
    MissingError,
    ReadOnlyError,
    StorageError,
)
from railgun.storage.lock import FileLock, Lock, Owner, OwnerLock

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_MISSING: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_WRITE_ATTEMPTS: Final = 5
_OBJECT_STORES: Final = {"s3", "gcs", "abfs", "mock"}


class Disk(Protocol):
    """A store of whole files by their paths. All methods raise `DiskError` if the disk fails."""

    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically and durably; replace an existing one."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise `MissingError` if it does not exist."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the paths of all files below a directory, relative to it, sorted; empty if it does not exist."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        ...

    def sync(self, path: str) -> None:
        """Make the present entries of a directory durable."""
        ...

    def lock(self, path: str) -> Lock:
        """Take the lock at this path; raise `LockedError`, which names the holder, if it is taken."""
        ...

    def holder(self, path: str) -> str | None:
        """Return the holder of a lock, for people; None if it is known to be free."""
        ...

    def where(self, path: str) -> str:
        """Return the full name of a file, for people."""
        ...


def open_disk(url: str) -> Disk:
    """Return the disk for a directory: a path, a `file:` URL, or any URL that pyarrow opens; raise `StorageError`.

    >>> import tempfile
    >>> disk = open_disk(tempfile.mkdtemp())
    >>> disk.write("a/b.txt", b"hello")
    >>> disk.list(""), disk.read("a/b.txt")
    (['a/b.txt'], b'hello')
    """
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        return LocalDisk(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError(
                f"{url} names the host {parts.netloc!r}; a local directory has three slashes: file:///"
            )
        return LocalDisk(unquote(parts.path))
    return ArrowDisk(url)


def check_path(path: str) -> str:
    """Return `path` if it stays inside of its disk; else raise `StorageError`."""
    pieces = path.split("/")
    if path and (any(piece in ("", ".", "..") for piece in pieces) or "\0" in path):
        raise StorageError(f"{path!r} is no path inside of a directory of snapshots")
    return path


class LocalDisk:
    """A local or mounted directory. It is created by the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._durable: set[Path] = set()  # directories whose entry in their parent is synced
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"LocalDisk({str(self.root)!r})"

    def where(self, path: str) -> str:
        """Return the full name of a file, for people."""
        return str(self._at(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically and durably: temporary file, sync, rename, sync of the directory."""
        target = self._at(path)
        with _disk_errors("write", target):
            for attempt in range(_WRITE_ATTEMPTS):
                try:
                    self._write(target, data)
                    return
                except FileNotFoundError:  # another process removed the empty directory
                    self._durable.clear()
                    if attempt == _WRITE_ATTEMPTS - 1:
                        raise

    def _write(self, target: Path, data: bytes) -> None:
        directory = target.parent
        self._make(directory)
        unique = f"{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
        temporary = directory / f".{target.name[:100]}.{unique}.tmp"
        was_there = target.exists()
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(file, left) :]
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        try:
            _sync(directory)
        except BaseException:
            if not was_there:  # visible, but not durable: better remove it
                with contextlib.suppress(OSError):
                    os.unlink(target)
            raise

    def _make(self, directory: Path) -> None:
        if directory in self._durable:
            return
        if directory == self.root:
            directory.mkdir(parents=True, exist_ok=True)
        else:
            self._make(directory.parent)
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
        _sync(directory.parent)  # also if it existed: its creator may have died before the sync
        self._durable.add(directory)

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise `MissingError` if it does not exist."""
        target = self._at(path)
        with _disk_errors("read", target):
            return target.read_bytes()

    def list(self, path: str) -> list[str]:
        """Return the paths of all files below a directory, relative to it, sorted."""
        top = self._at(path)
        paths: list[str] = []

        def refuse(error: OSError) -> None:
            if error.errno != errno.ENOENT:
                raise error

        with _disk_errors("list", top):
            for directory, inner, names in os.walk(top, onerror=refuse):
                inner[:] = [name for name in inner if not name.startswith(".")]
                below = Path(directory).relative_to(top)
                paths += [(below / name).as_posix() for name in names if not name.startswith(".")]
        return sorted(paths)

    def delete(self, path: str) -> None:
        """Delete a file, if it exists, and the directories that are empty without it."""
        target = self._at(path)
        with _disk_errors("delete", target):
            try:
                target.unlink()
            except FileNotFoundError:
                return
        for parent in itertools.takewhile(lambda parent: parent != self.root, target.parents):
            try:
                parent.rmdir()
            except OSError:
                break
            self._durable.discard(parent)

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        target = self._at(path)
        with _disk_errors("find", target):
            return target.is_file()

    def sync(self, path: str) -> None:
        """Make the present entries of a directory durable, or its deletion if it was deleted with its last file."""
        directory = self._at(path)
        while directory != self.root and not directory.exists():
            directory = directory.parent
        with _disk_errors("sync", directory), contextlib.suppress(FileNotFoundError):
            _sync(directory)

    def lock(self, path: str) -> Lock:
        """Take a lock that the operating system keeps; raise `LockedError` if it is taken."""
        target = self._at(path)
        with _disk_errors("lock", target):
            self._make(target.parent)
            return FileLock(target)

    def holder(self, path: str) -> str | None:
        """Return the holder of a lock, for people; None if it is known to be free."""
        try:
            owner = Owner.read(self.read(path))
        except MissingError:
            return None
        return None if owner is None or owner.is_gone() else str(owner)

    def _at(self, path: str) -> Path:
        return self.root / check_path(path) if path else self.root


class ArrowDisk:
    """A directory in a filesystem that pyarrow opens: s3, gs, abfs, hdfs."""

    def __init__(self, url: str, filesystem: Any = None) -> None:
        from pyarrow import fs  # here, because local disks do not need pyarrow

        self.url = url.rstrip("/")
        self._fs = fs
        try:
            if filesystem is None:
                self.filesystem, self.root = fs.FileSystem.from_uri(url)
            else:
                self.filesystem, self.root = filesystem, url
        except Exception as error:
            raise StorageError(
                f"snapshots cannot be kept at {url}: {error}. Name a directory, or a URL that pyarrow opens "
                "(s3://, gs://, abfs://, hdfs://)."
            ) from error
        self.root = self.root.rstrip("/")
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"ArrowDisk({self.url!r})"

    def where(self, path: str) -> str:
        """Return the full name of a file, for people."""
        return f"{self.url}/{path}" if path else self.url

    def write(self, path: str, data: bytes) -> None:
        """Write a file: directly if the filesystem shows files only when they are complete, else by a move."""
        target = self._at(path)
        with self._disk_errors("write", path):
            parent = target.rpartition("/")[0]
            if self.filesystem.type_name in _OBJECT_STORES:
                if self.filesystem.type_name == "mock":
                    self.filesystem.create_dir(parent, recursive=True)
                self._put(target, data)
                return
            self.filesystem.create_dir(parent, recursive=True)
            name = target.rpartition("/")[2]
            unique = f"{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
            temporary = f"{parent}/.{name[:100]}.{unique}.tmp"
            try:
                self._put(temporary, data)
                try:
                    self.filesystem.move(temporary, target)
                except OSError:
                    if not self._is_file(target):
                        raise
                    self.filesystem.delete_file(target)
                    self.filesystem.move(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.filesystem.delete_file(temporary)
                raise

    def _put(self, target: str, data: bytes) -> None:
        stream = self.filesystem.open_output_stream(target)
        try:
            stream.write(data)
        except BaseException:
            with contextlib.suppress(OSError):
                (getattr(stream, "abort", None) or stream.close)()
            raise
        stream.close()

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise `MissingError` if it does not exist."""
        target = self._at(path)
        with self._disk_errors("read", path):
            with self.filesystem.open_input_stream(target) as stream:
                data: bytes = stream.read()
            return data

    def list(self, path: str) -> list[str]:
        """Return the paths of all files below a directory, relative to it, sorted."""
        top = self._at(path) if path else self.root
        chosen = self._fs.FileSelector(top, allow_not_found=True, recursive=True)
        with self._disk_errors("list", path):
            paths = self.filesystem.get_file_info(chosen)
        start = len(top.rstrip("/")) + 1
        names = [info.path[start:] for info in paths if info.type == self._fs.FileType.File]
        return sorted(n for n in names if not any(p.startswith(".") for p in n.split("/")))

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        target = self._at(path)
        with self._disk_errors("delete", path), contextlib.suppress(FileNotFoundError):
            if self._is_file(target):
                self.filesystem.delete_file(target)

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        with self._disk_errors("find", path):
            return self._is_file(self._at(path))

    def sync(self, path: str) -> None:
        """Do nothing: entries are durable once they are visible."""

    def lock(self, path: str) -> Lock:
        """Take a lock by a file that names its owner; raise `LockedError` if it is taken."""
        return OwnerLock(
            self.where(path),
            lambda: self.read(path),
            lambda data: self.write(path, data),
            lambda: self.delete(path),
        )

    def holder(self, path: str) -> str | None:
        """Return the holder of a lock, for people; None if it is known to be free."""
        try:
            owner = Owner.read(self.read(path))
        except MissingError:
            return None
        return None if owner is None or owner.is_gone() else str(owner)

    def _is_file(self, target: str) -> bool:
        kind = self.filesystem.get_file_info(target).type
        return bool(kind == self._fs.FileType.File)

    def _at(self, path: str) -> str:
        return f"{self.root}/{check_path(path)}"

    def _disk_errors(self, verb: str, path: str) -> contextlib.AbstractContextManager[None]:
        return _disk_errors(verb, self.where(path))


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # these disks cannot sync directories
            raise
    finally:
        os.close(file)


@contextlib.contextmanager
def _disk_errors(verb: str, target: Path | str) -> Iterator[None]:
    """Translate `OSError` to `DiskError`, with the operation and the file."""
    try:
        yield
    except OSError as error:
        raise disk_error(verb, str(target), error) from error


def disk_error(verb: str, target: str, error: OSError) -> DiskError:
    """Return the `DiskError` for an error of the operating system, with the file, the cause and what to do."""
    cause = error.strerror or str(error)
    if error.errno in _FULL:
        return FullDiskError(
            f"cannot {verb} {target}: there is no room ({cause}). Make room on that disk, keep fewer snapshots, or "
            "use another directory."
        )
    if error.errno in _READ_ONLY:
        return ReadOnlyError(
            f"cannot {verb} {target}: {cause}. Let this user write there, or use another directory."
        )
    if verb == "read" and (error.errno in _MISSING or isinstance(error, FileNotFoundError)):
        return MissingError(f"cannot read {target}: there is no such file ({cause}).")
    if error.errno in _MISSING | {errno.EEXIST}:
        return DiskError(
            f"cannot {verb} {target}: {cause}. Something that is no directory may be in its place; move it away, or "
            "use another directory."
        )
    return DiskError(f"cannot {verb} {target}: {cause}. Check that disk, and try again.")
