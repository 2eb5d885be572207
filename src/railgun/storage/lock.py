"""Locks: one job works in a directory of snapshots, and who comes second is told who was first.

Rules:

1. On a local disk the system keeps the lock (`flock`): it is gone with the process that had it, however it ended. The
   file also says who has it, for people; it stays when the lock is gone, because a lock on a deleted file is none.
2. A process that is forked while a lock is held does not hold it too.
3. Elsewhere (s3, gs, hdfs) a file says who has the lock: which process (`processes`), and since when. If it is certain
   that the process has ended, the lock is taken over; of another host, or another container, nothing can be known, and
   a person has to delete the file. Two jobs that come within the same instant are told apart by reading the file again;
   that is likely, not certain.
4. A lock can be lost: its file deleted or replaced. Its holder asks (`held`) before it writes what others rely on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from railgun.storage.errors import LockedError, MissingError
from railgun.storage.processes import Process


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a lock, and since when."""

    host: str
    pid: int
    birth: str
    since: float
    token: str
    """Tells two locks of one process from each other."""
    machine_id: str = ""
    boot_id: str = ""
    namespace: str = ""

    @staticmethod
    def me() -> Owner:
        """This process, with a lock that is taken now."""
        process = Process.this()
        return Owner(since=time.time(), token=uuid.uuid4().hex, **asdict(process))

    @staticmethod
    def read(data: bytes) -> Owner | None:
        """Return the owner that a lock's file names; None if it names nobody."""
        try:
            told: dict[str, Any] = json.loads(data)
            return Owner(
                str(told["host"]),
                int(told["pid"]),
                str(told["birth"]),
                float(told["since"]),
                str(told["token"]),
                *(str(told.get(name, "")) for name in ("machine_id", "boot_id", "namespace")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def as_bytes(self) -> bytes:
        """Return what a lock's file says."""
        return json.dumps(asdict(self)).encode()

    @property
    def process(self) -> Process:
        """The process alone."""
        return Process(
            self.host, self.pid, self.birth, self.machine_id, self.boot_id, self.namespace
        )

    def is_gone(self) -> bool:
        """Whether it is certain that this process has ended."""
        return self.process.is_gone()

    @property
    def began(self) -> str:
        """When the lock was taken, for people."""
        return time.strftime("%F %T", time.localtime(self.since))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.began}"


class Lock(Protocol):
    """A lock that is held until it is released or lost."""

    def held(self) -> bool:
        """Whether it still is."""
        ...

    def release(self) -> None:
        """Give it up; a second time is nothing."""
        ...


class FileLock:
    """A lock the system keeps, on a file of a local disk."""

    def __init__(self, path: Path, on_read_only: bool = False) -> None:
        """Take the lock. `on_read_only`: also on a read-only disk, where it does not say who has it."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if not on_read_only or error.errno != errno.EROFS or not path.exists():
                raise
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Owner.read(os.pread(self._file, 4096, 0))
            os.close(self._file)
            self._file = -1
            raise locked(str(path), owner, certain=True) from None
        except OSError:
            os.close(self._file)
            self._file = -1
            raise
        _held.add(self)
        with contextlib.suppress(OSError):  # a full disk: the lock is what counts
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, Owner.me().as_bytes(), 0)

    def held(self) -> bool:
        """Whether the file is still the one that was locked."""
        if self._file < 0:
            return False
        try:
            there, mine = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Give it up."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a child that has just been forked
            self.forget()

    def forget(self) -> None:
        """Close the file and leave the rest alone."""
        file, self._file = self._file, -1
        _held.discard(self)
        if file >= 0:
            os.close(file)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()  # closing leaves the lock to the parent, which has the file open


os.register_at_fork(after_in_child=_forget_all)


class OwnerLock:
    """A lock that is a file which names its owner, where there is nothing better."""

    def __init__(
        self,
        name: str,
        read: Callable[[], bytes],
        write: Callable[[bytes], None],
        delete: Callable[[], None],
    ) -> None:
        self.name = name
        self._read, self._delete = read, delete
        there = self._owner()
        if there is not None and not there.is_gone():
            raise locked(name, there)
        self._me: Owner | None = Owner.me()
        write(self._me.as_bytes())
        there = self._owner()
        if there != self._me:
            self._me = None
            raise locked(name, there)

    def held(self) -> bool:
        """Whether the file still names this lock."""
        return self._me is not None and self._owner() == self._me

    def release(self) -> None:
        """Delete the file, if it is ours."""
        if self.held():
            self._delete()
        self._me = None

    def _owner(self) -> Owner | None:
        try:
            return Owner.read(self._read())
        except MissingError:
            return None


def locked(name: str, owner: Owner | None, certain: bool = False) -> LockedError:
    """Make the error for whoever comes second. `certain`: the holder is known to be alive."""
    who = str(owner) if owner is not None else "a process that has not said which"
    advice = "" if certain else f" If you know that it is gone, delete {name}."
    if owner is not None and owner.process == Process.this():
        who += ", which is this very process"
        advice = " A job that was started earlier in this program is ended by its stop()."
    return LockedError(
        f"another job works in this directory: {name} is held by {who}. Stop it, or give this job another "
        f"directory of snapshots or another name.{advice}"
    )
