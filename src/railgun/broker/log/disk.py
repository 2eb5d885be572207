"""The disk of a node: files that grow at their end, and what may be relied on.

Rules:

1. `File.write` adds all of its pieces at the end, or raises; then a part of them may be there, and the caller cuts it
   off.
2. What was written before `File.sync` began is there after a power cut, once it has returned. If it raises, nobody
   knows what is there, and a second sync would not tell: the system may have thrown away what it could not write.
   A file that is not at its place any more (somebody has moved, replaced or removed it, or a directory above it) is
   not what the next open finds: its sync raises.
3. Names are for good (`create`, `rename`, `remove`) once `sync_directory` has returned. Without it each of them may
   come about or not, in any order. A rename happens wholly or not at all.
4. `File.read` may be called by any thread while another one writes. A file that is closed while it is read, is closed
   when the last reader has left it.
5. `File.forget` is a hint: these bytes, which are synced, will not be read soon. Whoever writes much that nobody waits
   for should not drive out of memory what others read; and memory that is used again is written to faster.
6. Errors are those of the system (`OSError`); what they mean is said by those who know what the file is.
7. Paths are relative, with `/`, and stay inside.
8. A file of a read-only disk can be opened and read; it refuses to be written (`EROFS`) until the disk is mounted for
   writing. What is left to be tidied up stays there meanwhile (`unless_read_only`).
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

_MOST_PIECES: Final = 1024  # of one writev; what every system takes
_fdatasync: Final = getattr(os, "fdatasync", os.fsync)
GONE: Final = "somebody has moved, replaced or removed it, or a directory above it"
"""What is told of a file that is not at its place any more."""


class File(Protocol):
    """An open file."""

    def size(self) -> int:
        """How many bytes it has."""
        ...

    def write(self, pieces: Sequence[Bytes]) -> None:
        """Add these at the end."""
        ...

    def sync(self) -> None:
        """What is written is there for good."""
        ...

    def read(self, at: int, size: int) -> bytes:
        """These bytes; fewer where the file ends."""
        ...

    def forget(self, at: int, size: int) -> None:
        """These bytes need not be kept in memory."""
        ...

    def has_name(self) -> bool:
        """Return whether the file still has its name: nobody has moved, replaced or removed it, or its directory."""
        ...

    def truncate(self, size: int) -> None:
        """Cut it off there."""
        ...

    def close(self) -> None:
        """Leave it."""
        ...


class Disk(Protocol):
    """Files by their names."""

    def make_directory(self, path: str) -> None:
        """A directory that is there for good, also if it was there before."""
        ...

    def create(self, path: str) -> File:
        """A new file, empty; in place of one that is there."""
        ...

    def open(self, path: str) -> File:
        """A file that is there."""
        ...

    def list(self, path: str) -> list[str]:
        """The names of the files in a directory, in order; none if there is no directory."""
        ...

    def directories(self, path: str) -> Sequence[str]:
        """The names of the directories in a directory, in order."""
        ...

    def clear(self, path: str) -> None:
        """Take away a directory with all that is in it."""
        ...

    def lock(self, path: str) -> Lock:
        """A lock that one program has at a time; `LockedError` if another has it."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Give a file another name, in place of what has it."""
        ...

    def remove(self, path: str) -> None:
        """Take a file away; no error if there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """The names in this directory are there for good."""
        ...

    def where(self, path: str) -> str:
        """The name of a file for people."""
        ...

    def free(self) -> int:
        """Bytes that may be written, as far as the system knows."""
        ...


class NodeDisk:
    """A directory of this machine.

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
        """The name of a file for people."""
        return str(self._at(path))

    def free(self) -> int:
        """Bytes that are free, for who has no privileges."""
        return shutil.disk_usage(self.root).free

    def make_directory(self, path: str) -> None:
        """A directory, and those above it; each is known for good to the one it lies in."""
        target = self._at(path)
        made = [self.root, *(self.root / above for above in reversed(Path(path).parents[:-1]))]
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for directory in dict.fromkeys([*made, target]):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
            _sync(directory.parent)  # also if it was there: whoever made it may not have got so far

    def create(self, path: str) -> File:
        """A new file."""
        return self._open(path, _FLAGS | os.O_CREAT | os.O_TRUNC)

    def open(self, path: str) -> File:
        """A file that is there."""
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
        """The names of the files in a directory."""
        try:
            with os.scandir(self._at(path)) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def directories(self, path: str) -> Sequence[str]:
        """The names of the directories in a directory."""
        with os.scandir(self._at(path)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def clear(self, path: str) -> None:
        """Take away a directory with all that is in it."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._at(path))

    def lock(self, path: str) -> Lock:
        """A lock that is gone with this process."""
        return FileLock(self._at(path), on_read_only=True)

    def rename(self, path: str, to: str) -> None:
        """Give a file another name."""
        place = str(self._at(to))
        os.replace(self._at(path), place)
        file = self._opened.pop(str(self._at(path)), None)
        if file is not None:  # whoever has it open has it under the new name
            file.place, self._opened[place] = place, file

    def remove(self, path: str) -> None:
        """Take a file away."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(path))

    def sync_directory(self, path: str) -> None:
        """The names in this directory are there for good."""
        _sync(self._at(path))

    def _at(self, path: str) -> Path:
        return self.root / check_path(path)


_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


class _NodeFile:
    def __init__(self, number: int, place: str, read_only: bool = False) -> None:
        self.place = place
        self._number = number
        self._read_only = read_only  # it was, when it was opened
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False

    def size(self) -> int:
        return os.fstat(self._number).st_size

    def _need_to_write(self) -> None:
        """Raise `OSError` while the disk is read-only; later, have the same file open for writing."""
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
        self._need_to_write()
        for start in range(0, len(pieces), _MOST_PIECES):
            some = pieces[start : start + _MOST_PIECES]
            written = os.writev(self._number, some)
            if written != sum(map(len, some)):
                self._rest(some, written)

    def _rest(self, pieces: Sequence[Bytes], written: int) -> None:
        """The system took a part: a signal came, or there was room for no more."""
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
        except OSError:  # it cannot be looked at, as without permissions: so much is known
            return mine.st_nlink > 0
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def read(self, at: int, size: int) -> bytes:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the file is closed")
            self._readers += 1
        try:
            data = os.pread(self._number, size, at)
            if 0 < len(data) < size:  # the end, or the most that one call gives
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
        self._need_to_write()
        os.ftruncate(self._number, size)

    def close(self) -> None:
        with self._lock:
            now = not self._closed and not self._readers
            self._closed = True
        if now:
            os.close(self._number)


@contextlib.contextmanager
def unless_read_only() -> Iterator[None]:
    """Do what is within, which may be done at another time as well; not at all on a read-only disk."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def put(disk: Disk, path: str, pieces: Sequence[Bytes]) -> File:
    """A new file with this content, which is synced."""
    file = disk.create(path)
    try:
        file.write(pieces)
        file.sync()
    except BaseException:
        file.close()
        raise
    return file


def check_format(disk: Disk, directory: str, known: Format) -> bool:
    """Check the format file of a directory ("": the root) before anything in it is changed.

    Return whether `write_format` is due. Raise `LaterVersionError` or `OtherFormatError`: see `Format.needs_writing`.
    """
    path = f"{directory}/{FORMAT_FILE}" if directory else FORMAT_FILE
    where = disk.where(path).removesuffix(f"/{FORMAT_FILE}")
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return known.needs_writing(None, where)
    try:
        return known.needs_writing(file.read(0, file.size()), where)
    finally:
        file.close()


def write_format(disk: Disk, directory: str, known: Format) -> None:
    """Write the format file of a directory that is there, in place of an older one.

    A disk that takes nothing is no error for version 1, which is what a directory without the file has.
    """
    path = f"{directory}/{FORMAT_FILE}" if directory else FORMAT_FILE
    try:
        put(disk, f"{path}.new", [known.dump()]).close()
        disk.rename(f"{path}.new", path)
        if directory:
            disk.sync_directory(directory)
    except OSError:
        if known.version > 1:
            raise


def check_path(path: str) -> str:
    """A path that stays inside of its disk."""
    if any(piece in ("", ".", "..") for piece in path.split("/")) or "\0" in path:
        raise StorageError(f"{path!r} is no path inside of the directory of a node")
    return path


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.EROFS,
        ):  # there is no such thing on this disk, or no change
            raise
    finally:
        os.close(number)
