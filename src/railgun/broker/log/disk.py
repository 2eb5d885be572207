"""The disk of a node: files that grow at their end, and what their users may rely on.

Rules:

1. `File.write` adds all pieces at the end, or raises. After an error a part of them may be there; the caller cuts it
   off.
2. Bytes written before `File.sync` began survive a power cut once it has returned. If it raises, the content of the
   disk is unknown, and a second sync would not tell: the system may have dropped what it could not write. The sync
   also raises if the file is not at its place any more (somebody has moved, replaced or removed it, or a directory
   above it), because the next open would not find it.
3. Changes of names (`create`, `rename`, `remove`) are durable once `sync_directory` has returned. Without it, each of
   them may happen or not, in any order. A rename happens wholly or not at all.
4. Any thread may call `File.read` while another thread writes. A file that is closed during a read is closed when the
   last reader is done.
5. `File.forget` is a hint: these synced bytes will not be read soon. A bulk write that nobody waits for should not
   drive out of the page cache what others read; and memory that is used again is written to faster.
6. Errors are those of the system (`OSError`); the callers, which know what a file is for, translate them.
7. Paths are relative, use `/`, and stay inside the directory of the disk.
8. Files on a read-only disk can be opened and read. Writes fail with `EROFS` until the disk is mounted for writing.
   Leftover files are not tidied up meanwhile (`unless_read_only`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from railgun.broker.errors import StorageError
from railgun.storage.formats import FORMAT_FILE, Format
from railgun.storage.lock import FileLock, Lock
from railgun.transport.records import Bytes

_MAX_WRITEV_PIECES: Final = 1024  # every system takes as many in one call
_fdatasync: Final = getattr(os, "fdatasync", os.fsync)
GONE: Final = "somebody has moved, replaced or removed it, or a directory above it"
"""Why a file is not at its place any more, for error messages."""


class File(Protocol):
    """An open file that grows at its end."""

    def size(self) -> int:
        """Return the size in bytes."""
        ...

    def write(self, pieces: Sequence[Bytes]) -> None:
        """Add these pieces at the end: see rule 1."""
        ...

    def sync(self) -> None:
        """Make the written bytes durable: see rule 2."""
        ...

    def read(self, at: int, size: int) -> bytes:
        """Return `size` bytes from byte `at` on; fewer if the file ends before."""
        ...

    def forget(self, at: int, size: int) -> None:
        """Hint that these bytes need not be cached: see rule 5."""
        ...

    def has_name(self) -> bool:
        """Return whether the path still leads to this file.

        It does not if somebody has moved, replaced or removed the file, or its directory.
        """
        ...

    def truncate(self, size: int) -> None:
        """Cut the file off at this size."""
        ...

    def close(self) -> None:
        """Close the file; reads that are under way finish first."""
        ...


class Disk(Protocol):
    """Files and directories, by their relative paths."""

    def make_directory(self, path: str) -> None:
        """Make a directory, and make it durable, also if it was there before."""
        ...

    def create(self, path: str) -> File:
        """Create an empty file, in place of one that is there, and open it."""
        ...

    def open(self, path: str) -> File:
        """Open a file; raise `FileNotFoundError` if there is none."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the names of the files in a directory, sorted; an empty list if there is no directory."""
        ...

    def directories(self, path: str) -> Sequence[str]:
        """Return the names of the directories in a directory, sorted."""
        ...

    def clear(self, path: str) -> None:
        """Remove a directory with all its content."""
        ...

    def lock(self, path: str) -> Lock:
        """Take a lock that one program holds at a time; raise `LockedError` if another program holds it."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Rename a file, in place of one that has the new name."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; do nothing if there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in this directory durable: see rule 3."""
        ...

    def where(self, path: str) -> str:
        """Return the full path of a file, for messages to people."""
        ...

    def free(self) -> int:
        """Return how many bytes may still be written, as far as the system knows."""
        ...


class NodeDisk:
    """A disk in a directory of this machine.

    >>> import tempfile
    >>> disk = NodeDisk(tempfile.mkdtemp())
    >>> disk.make_directory("orders")
    >>> file = disk.create("orders/a")
    >>> file.write([b"hel", b"lo"])
    >>> file.sync()
    >>> disk.sync_directory("orders")
    >>> disk.list("orders"), file.read(1, 100)
    (['a'], b'ello')
    >>> file.close()
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._opened: weakref.WeakValueDictionary[str, _NodeFile] = weakref.WeakValueDictionary()

    def __repr__(self) -> str:
        return f"NodeDisk({str(self.root)!r})"

    def where(self, path: str) -> str:
        """Return the full path of a file."""
        return str(self._at(path))

    def free(self) -> int:
        """Return the free bytes that an unprivileged user may write."""
        return shutil.disk_usage(self.root).free

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it, and sync the parent of each."""
        target = self._at(path)
        ancestors = [self.root, *(self.root / above for above in reversed(Path(path).parents[:-1]))]
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for directory in dict.fromkeys([*ancestors, target]):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
            _sync(directory.parent)  # also if it was there: its maker may have crashed before this

    def create(self, path: str) -> File:
        """Create an empty file and open it."""
        return self._open(path, _FLAGS | os.O_CREAT | os.O_TRUNC)

    def open(self, path: str) -> File:
        """Open a file, for reading only if the disk is read-only."""
        return self._open(path, _FLAGS)

    def _open(self, path: str, flags: int) -> _NodeFile:
        place = str(self._at(path))
        try:
            file = _NodeFile(os.open(place, flags, 0o666), place)
        except OSError as error:
            if error.errno != errno.EROFS or flags & os.O_CREAT:
                raise
            file = _NodeFile(os.open(place, os.O_RDONLY | os.O_CLOEXEC), place, read_only=True)
        self._opened[place] = file
        return file

    def list(self, path: str) -> list[str]:
        """Return the names of the files in a directory, sorted."""
        try:
            with os.scandir(self._at(path)) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def directories(self, path: str) -> Sequence[str]:
        """Return the names of the directories in a directory, sorted."""
        with os.scandir(self._at(path)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def clear(self, path: str) -> None:
        """Remove a directory with all its content."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._at(path))

    def lock(self, path: str) -> Lock:
        """Take a lock that the system releases when this process ends."""
        return FileLock(self._at(path), on_read_only=True)

    def rename(self, path: str, to: str) -> None:
        """Rename a file; files that are open know their new path."""
        place = str(self._at(to))
        os.replace(self._at(path), place)
        file = self._opened.pop(str(self._at(path)), None)
        if file is not None:  # open files must know their new path: see `has_name`
            file.place, self._opened[place] = place, file

    def remove(self, path: str) -> None:
        """Remove a file; do nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(path))

    def sync_directory(self, path: str) -> None:
        """Make the names in this directory durable."""
        _sync(self._at(path))

    def _at(self, path: str) -> Path:
        return self.root / check_path(path)


_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


class _NodeFile:
    def __init__(self, number: int, place: str, read_only: bool = False) -> None:
        self.place = place
        self._number = number
        self._read_only = read_only  # whether the disk was read-only when the file was opened
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False

    def size(self) -> int:
        return os.fstat(self._number).st_size

    def _open_for_writing(self) -> None:
        """Reopen the file for writing if it was opened read-only; raise `OSError` while the disk still is."""
        if not self._read_only:
            return
        number = os.open(self.place, _FLAGS)
        try:
            if not os.path.sameopenfile(number, self._number):
                raise OSError(errno.ENOENT, GONE)
            os.dup2(number, self._number, inheritable=False)
            self._read_only = False
        finally:
            os.close(number)

    def write(self, pieces: Sequence[Bytes]) -> None:
        self._open_for_writing()
        for start in range(0, len(pieces), _MAX_WRITEV_PIECES):
            batch = pieces[start : start + _MAX_WRITEV_PIECES]
            written = os.writev(self._number, batch)
            if written != sum(map(len, batch)):
                self._write_remainder(batch, written)

    def _write_remainder(self, pieces: Sequence[Bytes], written: int) -> None:
        """Write what the system did not take at once, because of a signal or for lack of room."""
        left = memoryview(b"".join(pieces))[written:]
        while left:
            left = left[os.write(self._number, left) :]

    def sync(self) -> None:
        _fdatasync(self._number)
        if not self.has_name():
            raise OSError(errno.ENOENT, GONE)

    def has_name(self) -> bool:
        mine = os.fstat(self._number)
        try:
            there = os.stat(self.place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the path cannot be examined, say without permission: ask the file itself
            return mine.st_nlink > 0
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def read(self, at: int, size: int) -> bytes:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the file is closed")
            self._readers += 1
        try:
            data = os.pread(self._number, size, at)
            if 0 < len(data) < size:  # the end of the file, or the limit of one call
                pieces = [data]
                while data and sum(map(len, pieces)) < size:
                    done = sum(map(len, pieces))
                    data = os.pread(self._number, size - done, at + done)
                    pieces.append(data)
                return b"".join(pieces)
            return data
        finally:
            with self._lock:
                self._readers -= 1
                last = self._closed and not self._readers
            if last:
                os.close(self._number)

    def forget(self, at: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._number, at, size, os.POSIX_FADV_DONTNEED)

    def truncate(self, size: int) -> None:
        self._open_for_writing()
        os.ftruncate(self._number, size)

    def close(self) -> None:
        with self._lock:
            now = not self._closed and not self._readers
            self._closed = True
        if now:
            os.close(self._number)


@contextlib.contextmanager
def unless_read_only() -> Iterator[None]:
    """Run the block, and ignore that the disk is read-only: the block does work that can be done later as well."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def put(disk: Disk, path: str, pieces: Sequence[Bytes]) -> File:
    """Write a new file with this content, sync it, and return it open."""
    file = disk.create(path)
    try:
        file.write(pieces)
        file.sync()
    except BaseException:
        file.close()
        raise
    return file


def check_format(disk: Disk, directory: str, expected: Format) -> bool:
    """Check the format file of a directory ("": the root) before anything in the directory is changed.

    Return whether `write_format` is due. Raise `LaterVersionError` or `OtherFormatError`: see `Format.needs_writing`.
    """
    path = f"{directory}/{FORMAT_FILE}" if directory else FORMAT_FILE
    where = disk.where(path).removesuffix(f"/{FORMAT_FILE}")
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return expected.needs_writing(None, where)
    try:
        return expected.needs_writing(file.read(0, file.size()), where)
    finally:
        file.close()


def write_format(disk: Disk, directory: str, expected: Format) -> None:
    """Write the format file of an existing directory, in place of an older one.

    An error of the disk is ignored for version 1, because a directory without the file counts as version 1.
    """
    path = f"{directory}/{FORMAT_FILE}" if directory else FORMAT_FILE
    try:
        put(disk, f"{path}.new", [expected.dump()]).close()
        disk.rename(f"{path}.new", path)
        if directory:
            disk.sync_directory(directory)
    except OSError:
        if expected.version > 1:
            raise


def check_path(path: str) -> str:
    """Return the path; raise `StorageError` if it could lead outside of the disk."""
    if any(piece in ("", ".", "..") for piece in path.split("/")) or "\0" in path:
        raise StorageError(f"{path!r} is no path inside of the directory of a node")
    return path


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        # This disk does not sync directories, or is read-only and so has nothing to sync.
        if error.errno not in (errno.EINVAL, errno.EROFS):
            raise
    finally:
        os.close(number)
