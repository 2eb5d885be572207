"""Lock a directory of snapshots for one job. A second job is refused with an error that names the holder.

Rules:

1. On a local disk the operating system keeps the lock (`flock`): it ends with the process that holds it, however that
   ends. The file also names the holder, for people; it stays when the lock ends, because a lock on a deleted file is
   void.
2. A process that is forked while a lock is held does not hold the lock.
3. Elsewhere (s3, gs, hdfs) a file names the holder: the process (`processes`), and since when it holds the lock. If the
   process has certainly ended, the lock is taken over. The state of a process on another host, or in another container,
   is unknown, and a person must delete the file. If two jobs take the lock at the same instant, each reads the file
   again to see which of them won; that is likely to work, not certain.
4. A lock can be lost: its file can be deleted or replaced. The holder calls `held` before it writes data that others
   rely on.
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
    """The process that holds a lock, and since when."""

    host: str
    pid: int
    birth: str
    since: float
    token: str
    """A random text that distinguishes two locks of one process."""
    machine_id: str = ""
    boot_id: str = ""
    namespace: str = ""

    @staticmethod
    def me() -> Owner:
        """Return this process as the owner of a lock that is taken now."""
        process = Process.this()
        return Owner(since=time.time(), token=uuid.uuid4().hex, **asdict(process))

    @staticmethod
    def read(data: bytes) -> Owner | None:
        """Return the owner that the content of a lock's file names; None if it is malformed."""
        try:
            fields: dict[str, Any] = json.loads(data)
            return Owner(
                str(fields["host"]),
                int(fields["pid"]),
                str(fields["birth"]),
                float(fields["since"]),
                str(fields["token"]),
                *(str(fields.get(name, "")) for name in ("machine_id", "boot_id", "namespace")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def as_bytes(self) -> bytes:
        """Return the content of a lock's file."""
        return json.dumps(asdict(self)).encode()

    @property
    def process(self) -> Process:
        """The process, without the lock."""
        return Process(
            self.host, self.pid, self.birth, self.machine_id, self.boot_id, self.namespace
        )

    def is_gone(self) -> bool:
        """Return whether this process has certainly ended."""
        return self.process.is_gone()

    @property
    def began(self) -> str:
        """The local time at which the lock was taken, as text."""
        return time.strftime("%F %T", time.localtime(self.since))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.began}"


class Lock(Protocol):
    """A lock that is held until it is released or lost."""

    def held(self) -> bool:
        """Return whether the lock is still held."""
        ...

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        ...


class FileLock:
    """A lock that the operating system keeps, on a file of a local disk."""

    def __init__(self, path: Path, on_read_only: bool = False) -> None:
        """Take the lock; raise `LockedError` if another process holds it.

        `on_read_only`: also on a read-only disk, where the file cannot name the holder.
        """
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
        with contextlib.suppress(
            OSError
        ):  # on a full disk the file names no holder; the lock still holds
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, Owner.me().as_bytes(), 0)

    def held(self) -> bool:
        """Return whether the file at the path is still the one that was locked."""
        if self._file < 0:
            return False
        try:
            current, locked_file = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return False
        return (current.st_dev, current.st_ino) == (locked_file.st_dev, locked_file.st_ino)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                fcntl.flock(
                    self._file, fcntl.LOCK_UN
                )  # also releases it for a child that was just forked
            self.forget()

    def forget(self) -> None:
        """Close the file without releasing the lock, which a parent process may still hold."""
        file, self._file = self._file, -1
        _held.discard(self)
        if file >= 0:
            os.close(file)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()  # the parent, which has the file open, keeps the lock


os.register_at_fork(after_in_child=_forget_all)


class OwnerLock:
    """A lock in the form of a file that names its owner, for filesystems without locks of their own."""

    def __init__(
        self,
        name: str,
        read: Callable[[], bytes],
        write: Callable[[bytes], None],
        delete: Callable[[], None],
    ) -> None:
        self.name = name
        self._read, self._delete = read, delete
        owner = self._owner()
        if owner is not None and not owner.is_gone():
            raise locked(name, owner)
        self._me: Owner | None = Owner.me()
        write(self._me.as_bytes())
        owner = self._owner()
        if owner != self._me:
            self._me = None
            raise locked(name, owner)

    def held(self) -> bool:
        """Return whether the file still names this lock."""
        return self._me is not None and self._owner() == self._me

    def release(self) -> None:
        """Delete the file, if it still names this lock."""
        if self.held():
            self._delete()
        self._me = None

    def _owner(self) -> Owner | None:
        try:
            return Owner.read(self._read())
        except MissingError:
            return None


def locked(name: str, owner: Owner | None, certain: bool = False) -> LockedError:
    """Return the error for a job that finds the lock held. `certain`: the holder is known to be alive."""
    who = str(owner) if owner is not None else "a process that has not said which"
    advice = "" if certain else f" If you know that it is gone, delete {name}."
    if owner is not None and owner.process == Process.this():
        who += ", which is this very process"
        advice = " A job that was started earlier in this program is ended by its stop()."
    return LockedError(
        f"another job works in this directory: {name} is held by {who}. Stop it, or give this job another "
        f"directory of snapshots or another name.{advice}"
    )
