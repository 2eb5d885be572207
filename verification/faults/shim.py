"""A disk for real processes that forgets what was not synced, and fails in other ways on order; a clock that jumps.

Rules:

1. Written data is seen by the process, and reaches the system with the next sync of its file: a killed process loses
   it. Names (create, rename, remove) and truncations apply at once, so an unsynced file with a name is empty.
2. With `torn`, half of each write reaches the system at once: a kill leaves a torn end.
3. With `full`, nothing can be written or created: `ENOSPC`. With `slow_sync` (seconds) a sync takes longer.
4. With `fail_sync`, a sync fails with `EIO`, and the data it should have kept is gone, though the process sees it; the
   next sync of the file succeeds. So do real systems.
5. With `refuse` (an errno), files below `refuse_at` (by default those of streams) cannot be written, though there is
   room: a limit, a quota, a disk that has become read-only. All other files can.
6. All of this is read from a file, at most every `LOOK_PAUSE_S` seconds. Writers replace the whole file.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from railgun.broker.clock import time_of_day
from railgun.broker.log.disk import Disk, File
from railgun.broker.settings import SECOND
from railgun.storage.lock import Lock
from railgun.transport.records import Bytes

LOOK_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Orders:
    """The faults of a disk and a clock."""

    full: bool = False
    fail_sync: bool = False
    slow_sync: float = 0.0
    torn: bool = False
    refuse: int = 0
    """The errno of every write to a file below `refuse_at`; 0: writes work."""
    refuse_at: str = "streams/"
    """How the paths begin of files that cannot be written."""
    ahead: float = 0.0
    """How far the clock is ahead, in seconds."""

    def write(self, file: Path) -> None:
        """Replace the content of `file` by these orders."""
        temporary = file.with_name(f"{file.name}.new")
        temporary.write_text(json.dumps(asdict(self)), "utf-8")
        os.replace(temporary, file)

    @staticmethod
    def read(file: Path) -> Orders:
        """Read the orders of a file; without the file nothing is wrong."""
        try:
            content: dict[str, Any] = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            return Orders()
        names = {field.name for field in fields(Orders)}
        return Orders(**{name: value for name, value in content.items() if name in names})

    def but(self, **changes: Any) -> Orders:
        """Return a copy with `changes`."""
        return replace(self, **changes)


class Control:
    """The current orders of a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._orders = Orders() if file is None else Orders.read(file)
        self._looked = -LOOK_PAUSE_S
        self._stamp = (0, 0)

    @property
    def orders(self) -> Orders:
        """Return the current orders."""
        now = time.monotonic()
        if self._file is not None and now - self._looked >= LOOK_PAUSE_S:
            self._looked = now
            try:
                stat = os.stat(self._file)
                stamp = (stat.st_mtime_ns, stat.st_ino)
            except FileNotFoundError:
                stamp = (0, 0)
            if stamp != self._stamp:
                self._stamp = stamp
                self._orders = Orders.read(self._file)
        return self._orders


class JumpingClock:
    """The time of day in µs, with the error that the orders set."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __call__(self) -> int:
        """Return the time in µs."""
        return time_of_day() + int(self._control.orders.ahead * SECOND)


class _Content:
    """The data of a file that the process sees and the system does not have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending = bytearray()
        self.void = False
        """A sync has failed: unsynced data of the file is lost."""


class ShimDisk:
    """A `Disk` over another one (rules 1 to 4).

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> root = tempfile.mkdtemp()
    >>> file = ShimDisk(NodeDisk(root)).create("a")
    >>> file.write([b"kept"])
    >>> file.sync()
    >>> file.write([b", lost"])
    >>> file.read(0, 100), NodeDisk(root).open("a").read(0, 100)
    (b'kept, lost', b'kept')
    """

    def __init__(self, disk: Disk, control: Control | None = None) -> None:
        self._disk = disk
        self._control = control or Control(None)
        self._contents: dict[str, _Content] = {}
        self._lock = threading.Lock()

    @property
    def orders(self) -> Orders:
        """Return the current orders."""
        return self._control.orders

    def where(self, path: str) -> str:
        """Return the name of a file for people."""
        return self._disk.where(path)

    def free(self) -> int:
        """Return how many bytes may be written."""
        return 0 if self.orders.full else self._disk.free()

    def make_directory(self, path: str) -> None:
        """Create a directory."""
        self._disk.make_directory(path)

    def create(self, path: str) -> File:
        """Create a file."""
        self.check_room()
        content = _Content()
        file = self._disk.create(path)
        with self._lock:
            self._contents[path] = content
        return _ShimFile(self, file, content, path)

    def open(self, path: str) -> File:
        """Open an existing file."""
        file = self._disk.open(path)
        with self._lock:
            content = self._contents.setdefault(path, _Content())
        return _ShimFile(self, file, content, path)

    def list(self, path: str) -> list[str]:
        """Return the names of the files in a directory."""
        return self._disk.list(path)

    def directories(self, path: str) -> Sequence[str]:
        """Return the names of the directories in a directory."""
        return self._disk.directories(path)

    def clear(self, path: str) -> None:
        """Remove a directory with its content."""
        self._disk.clear(path)
        with self._lock:
            for name in [content for content in self._contents if content.startswith(f"{path}/")]:
                del self._contents[name]

    def lock(self, path: str) -> Lock:
        """Take a lock that ends with this process."""
        return self._disk.lock(path)

    def rename(self, path: str, to: str) -> None:
        """Rename a file."""
        self._disk.rename(path, to)
        with self._lock:
            content = self._contents.pop(path, None)
            self._contents.pop(to, None)
            if content is not None:
                self._contents[to] = content

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._disk.remove(path)
        with self._lock:
            self._contents.pop(path, None)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        self.wait()
        self._disk.sync_directory(path)

    def check_room(self) -> None:
        """Raise `OSError` if the disk is full (rule 3)."""
        if self.orders.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait(self) -> None:
        """Wait as long as a sync takes (rule 3)."""
        slow = self.orders.slow_sync
        if slow > 0:
            time.sleep(slow)


class _ShimFile:
    def __init__(self, disk: ShimDisk, file: File, content: _Content, path: str) -> None:
        self._disk, self._file, self._content = disk, file, content
        self._path = path

    def size(self) -> int:
        with self._content.lock:
            return self._file.size() + len(self._content.pending)

    def write(self, pieces: Sequence[Bytes]) -> None:
        self._disk.check_room()
        orders = self._disk.orders
        if orders.refuse and self._path.startswith(orders.refuse_at):
            raise OSError(orders.refuse, os.strerror(orders.refuse))
        content = self._content
        with content.lock:
            for piece in pieces:
                content.pending += piece
            if self._disk.orders.torn and not content.void:
                half = len(content.pending) // 2
                self._file.write([bytes(content.pending[:half])])
                del content.pending[:half]

    def sync(self) -> None:
        self._disk.wait()
        content = self._content
        with content.lock:
            if self._disk.orders.fail_sync:
                content.void = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if content.void:
                return
            if content.pending:
                self._file.write([bytes(content.pending)])
                content.pending.clear()
        self._file.sync()

    def read(self, at: int, size: int) -> bytes:
        content = self._content
        with content.lock:
            data = self._file.read(at, size)
            if len(data) < size and content.pending:
                begin = max(0, at + len(data) - self._file.size())
                data += bytes(content.pending[begin : begin + size - len(data)])
            return data

    def has_name(self) -> bool:
        return self._file.has_name()

    def forget(self, at: int, size: int) -> None:
        self._file.forget(at, size)

    def truncate(self, size: int) -> None:
        content = self._content
        with content.lock:
            there = self._file.size()
            del content.pending[max(0, size - there) :]
            if size < there:
                self._file.truncate(size)

    def close(self) -> None:
        self._file.close()
