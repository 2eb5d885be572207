"""Make a scratch directory for each worker that keeps state on disk, and delete it when the worker ends.

A worker that is killed cannot delete its directory. The next worker that makes one in the same place does: a directory
belongs to a living process as long as that process holds a lock (`flock`) on the file `lock` in it, and the system
releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from railgun.engine.state.errors import StateError

PREFIX: Final = "railgun-state-"
LOCK: Final = "lock"
MIN_AGE_S: Final = 3_600.0  # a younger directory without a lock file may be about to get one


class Scratch:
    """A directory of this process, made inside `below` or, by default, where the system has its temporary files.

    Raises `StateError` if it cannot be made.

    >>> scratch = Scratch()
    >>> path = scratch.path
    >>> path.is_dir()
    True
    >>> scratch.close()
    >>> path.exists()
    False
    """

    def __init__(self, below: str | None = None) -> None:
        parent = Path(below or tempfile.gettempdir())
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            self.path, lock = _make(parent)
        except OSError as error:
            raise StateError(
                f"no directory for state on disk can be made in {parent}: {error.strerror}. "
                "Another one can be given: OnDisk(directory=…)"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete the directory with its content."""
        self._finalizer()


def sweep(parent: Path) -> list[Path]:
    """Delete the directories in `parent` of processes that have ended, and return them."""
    deleted = []
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or deleted meanwhile
            if _sweep(path):
                deleted.append(path)
    return deleted


def _sweep(path: Path) -> bool:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        if time.time() - status.st_mtime < MIN_AGE_S:
            return False
        shutil.rmtree(path)
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)  # while it is locked, so that a process that just made it notices
    finally:
        os.close(lock)
    return True


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:  # no other process deleted it before it was locked
                return path, lock
        os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        with contextlib.suppress(OSError):
            # On an error the lock file stays, so the next worker recognizes the directory.
            for entry in path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
            shutil.rmtree(path)
    os.close(lock)
