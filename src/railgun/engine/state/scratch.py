"""Scratch directories: one for each worker that keeps state on disk, gone with it.

A worker that is killed cannot delete its directory. Whoever makes the next one in the same place does it: a directory
belongs to a living process as long as that holds a lock (`flock`) on the file `lock` in it, which the system lets go of
when the process ends, however it ends.
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
YOUNG: Final = 3_600.0  # seconds in which a directory without a lock may still be in the making


class Scratch:
    """A directory of this process, below a given one or where the system has its temporary files.

    >>> scratch = Scratch()
    >>> path = scratch.path
    >>> path.is_dir()
    True
    >>> scratch.close()
    >>> path.exists()
    False
    """

    def __init__(self, below: str | None = None) -> None:
        above = Path(below or tempfile.gettempdir())
        try:
            above.mkdir(parents=True, exist_ok=True)
            sweep(above)
            self.path, lock = _make(above)
        except OSError as error:
            raise StateError(
                f"no directory for state on disk can be made in {above}: {error.strerror}. "
                "Another one can be given: OnDisk(directory=…)"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete it with all that is in it."""
        self._finalizer()


def sweep(above: Path) -> list[Path]:
    """Delete the directories that processes which are no more have left; which ones."""
    swept = []
    for path in above.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # someone else's, or in use, or swept by someone else
            if _sweep(path):
                swept.append(path)
    return swept


def _sweep(path: Path) -> bool:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        if time.time() - found.st_mtime < YOUNG:
            return False
        shutil.rmtree(path)
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)  # while it is locked: whoever is just making it sees that it is lost
    finally:
        os.close(lock)
    return True


def _make(above: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=above))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:  # nobody swept it before it was locked
                return path, lock
        os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked from it
        with contextlib.suppress(
            OSError
        ):  # the lock stays then, and the next one can tell that this is left
            for inside in path.iterdir():
                if inside.is_dir():
                    shutil.rmtree(inside)
                elif inside.name != LOCK:
                    inside.unlink()
            shutil.rmtree(path)
    os.close(lock)
