"""A node's disk in memory that crashes, loses power, is full, fails to sync, and flips bits, on a test's order.

It keeps two views: the one that programs see, and the one that a power cut would leave. `lose_power` decides by a
seeded random generator about all that was not synced: each name that came or went is there or is not; of each file that
has grown nothing is left, all, a part, a part and zeros, or some sectors and zeros for the others. Most file systems
are kinder.

A hook is called before each step that changes something, and may raise `Crash`: the program is gone, the disk stays.
A sync that fails loses what it should have kept, and the next sync succeeds: so do real systems.

>>> disk = LogDisk(seed=1)
>>> disk.make_directory("a")
>>> file = disk.create("a/x")
>>> disk.sync_directory("a")
>>> file.write([b"kept"])
>>> file.sync()
>>> file.write([b" lost"])
>>> disk.lose_power(kinds=["nothing"])
>>> disk.open("a/x").read(0, 100)
b'kept'
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from railgun.broker.log.disk import File, check_path
from railgun.storage.lock import Lock
from railgun.testing.disks import DirectoryEntries, SimulatedLock, crash_hook, flip_bit
from railgun.transport.records import Bytes

Step = Literal[
    "write", "sync", "truncate", "create", "rename", "remove", "sync directory", "make directory"
]
Hook = Callable[[Step, str], None]
Kind = Literal["nothing", "all", "part", "zeros", "sectors"]
KINDS: Final[tuple[Kind, ...]] = ("nothing", "all", "part", "zeros", "sectors")
SECTOR: Final = 32
"""Bytes that are lost or kept together; small, as the files of tests are small."""


@dataclass(eq=False, slots=True)
class _Content:
    seen: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty: int | None = None
    """The offset of the first byte that differs between the two views."""

    def touch(self, at: int) -> None:
        self.dirty = at if self.dirty is None else min(at, self.dirty)

    def kept(self, to: int) -> bytearray:
        """Return the durable bytes before `to`; zeros where a failed sync has lost them."""
        return self.durable[:to] + bytes(max(0, to - len(self.durable)))


class LogDisk:
    """A `Disk` for tests of logs."""

    def __init__(self, seed: int = 0) -> None:
        self.hook: Hook | None = None
        self.room: int | None = None
        """Free bytes; None: unlimited. A write that does not fit is written in part before it is refused."""
        self.fail_syncs = 0
        """How many of the next syncs of files fail."""
        self.syncs = 0
        """How many syncs of files have been called."""
        self._chance = random.Random(seed)
        self._names: DirectoryEntries[_Content] = DirectoryEntries()
        self._owners: dict[str, SimulatedLock] = {}
        self._life = 0
        self.guard = threading.RLock()  # several threads of a program use it

    # ------------------------------------------------------------ a disk

    def where(self, path: str) -> str:
        """Return the name of a file for people."""
        return f"simulated:{path}"

    def free(self) -> int:
        """Return how many bytes may be written."""
        return 1 << 40 if self.room is None else max(0, self.room - self.used())

    def make_directory(self, path: str) -> None:
        """Count a step; directories need no creation."""
        self.step("make directory", check_path(path))

    def create(self, path: str) -> File:
        """Create a file."""
        self.step("create", check_path(path))
        if self.room is not None and self.used() >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content = _Content()
        self._change(path, {path: content})
        return _LogFile(self, path, content)

    def open(self, path: str) -> File:
        """Open an existing file."""
        if check_path(path) not in self._names.seen:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _LogFile(self, path, self._names.seen[path])

    def list(self, path: str) -> list[str]:
        """Return the names of the files in a directory."""
        return sorted(name for name in self._below(path) if "/" not in name)

    def directories(self, path: str) -> Sequence[str]:
        """Return the names of the directories in a directory: those that have files."""
        return sorted({name.partition("/")[0] for name in self._below(path) if "/" in name})

    def clear(self, path: str) -> None:
        """Remove a directory with its content, file by file."""
        for name in self._below(path):
            self.remove(f"{path}/{name}")

    def lock(self, path: str) -> Lock:
        """Take a lock, which ends with `crash` as those of a system do."""
        return SimulatedLock.take(self._owners, path, self.where(path))

    def rename(self, path: str, to: str) -> None:
        """Rename a file."""
        self.step("rename", check_path(path))
        self._change(path, {check_path(to): self._names.seen[path], path: None})

    def remove(self, path: str) -> None:
        """Remove a file."""
        if check_path(path) in self._names.seen:
            self.step("remove", path)
            self._change(path, {path: None})

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        self.step("sync directory", path)
        with self.guard:
            self._names.sync(path)

    def has_name(self, path: str, content: _Content) -> bool:
        """Return whether a file that is open still has a name."""
        with self.guard:
            return any(seen is content for seen in self._names.seen.values())

    # ------------------------------------------------------------ faults

    def crash_at(self, step: int) -> None:
        """Raise `Crash` before the step of this number, counted from now on; 0 is the next one."""
        self.hook = crash_hook(step, self.crash)

    def crash(self) -> None:
        """End all programs and close their files; the disk stays as it is."""
        self.hook = None
        self._life += 1
        self._owners.clear()

    def lose_power(self, kinds: Sequence[Kind] = KINDS) -> None:
        """End all programs; data that was not synced is lost, torn or kept, at random."""
        self.crash()
        self._names.settle(self._chance)
        for content in self._names.durable.values():
            if content.dirty is not None:
                content.durable = self._torn(content, self._chance.choice(kinds))
            content.seen, content.dirty = bytearray(content.durable), None

    def _torn(self, content: _Content, kind: Kind) -> bytearray:
        start = content.dirty or 0
        old, new = content.durable, content.kept(start) + content.seen[start:]
        if kind == "nothing":
            return old
        if kind == "all":
            return new
        kept = self._chance.randint(start, max(start, len(new)))
        if kind == "part":
            return new[:kept]
        if kind == "zeros":
            return new[:kept] + bytes(len(new) - kept)
        torn = bytearray(new)
        for at in range(start - start % SECTOR, len(new), SECTOR):
            if self._chance.random() < 0.5:
                low, high = max(at, start), min(at + SECTOR, len(new))
                was = old[low:high]
                torn[low:high] = was + bytes(high - low - len(was))
        return torn

    def flip(self, path: str, bit: int | None = None) -> None:
        """Flip one bit of a file, a random one by default."""
        self.replace(path, flip_bit(self._names.seen[path].seen, bit, self._chance))

    def replace(self, path: str, data: Bytes) -> None:
        """Replace the content of a file, without any program."""
        self._names.put(path, _Content(bytearray(data), bytearray(data)))

    def forget(self, path: str) -> None:
        """Remove a file, without any program."""
        del self._names.seen[path], self._names.durable[path]

    def content(self, path: str) -> bytes:
        """Return the content of a file."""
        return bytes(self._names.seen[path].seen)

    def used(self) -> int:
        """Return how many bytes all files have."""
        return sum(len(content.seen) for content in self._names.seen.values())

    # ------------------------------------------------------------ inside

    def step(self, step: Step, path: str) -> None:
        """Call the hook before a step that changes something."""
        if self.hook is not None:
            self.hook(step, path)

    def chance(self) -> bool:
        """Return a random decision."""
        return self._chance.random() < 0.5

    def life(self) -> int:
        """Return how often all programs have ended."""
        return self._life

    def _below(self, path: str) -> Sequence[str]:
        """Return the names of all files below a directory."""
        start = f"{check_path(path)}/"
        return [name[len(start) :] for name in self._names.seen if name.startswith(start)]

    def _change(self, path: str, names: dict[str, _Content | None]) -> None:
        with self.guard:
            self._names.change(path.rpartition("/")[0], names)


class _LogFile:
    def __init__(self, disk: LogDisk, path: str, content: _Content) -> None:
        self._disk, self._path, self._content = disk, path, content
        self._life = disk.life()
        self._closed = False

    def _check(self) -> None:
        if self._closed or self._life != self._disk.life():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def size(self) -> int:
        self._check()
        return len(self._content.seen)

    def write(self, pieces: Sequence[Bytes]) -> None:
        self._check()
        self._disk.step("write", self._path)
        content, data = self._content, b"".join(pieces)
        with self._disk.guard:
            self._check()
            room = self._disk.room
            fits = len(data) if room is None else max(0, min(len(data), room - self._disk.used()))
            content.touch(len(content.seen))
            content.seen += data[:fits]
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        self._check()
        self._disk.step("sync", self._path)
        with self._disk.guard:
            self._check()
            self._sync()

    def _sync(self) -> None:
        self._disk.syncs += 1
        content = self._content
        dirty, content.dirty = content.dirty, None
        if self._disk.fail_syncs:
            self._disk.fail_syncs -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if dirty is not None:
            del content.durable[dirty:]
            content.durable += bytes(dirty - len(content.durable)) + content.seen[dirty:]

    def read(self, at: int, size: int) -> bytes:
        self._check()
        return bytes(self._content.seen[at : at + size])

    def has_name(self) -> bool:
        return self._disk.has_name(self._path, self._content)

    def forget(self, at: int, size: int) -> None:
        pass

    def truncate(self, size: int) -> None:
        self._check()
        self._disk.step("truncate", self._path)
        with self._disk.guard:
            self._check()
            if (
                self._disk.chance()
            ):  # the system had written back by itself the bytes that are cut off now
                self._content.durable = bytearray(self._content.seen)
            self._content.touch(size)
            del self._content.seen[size:]

    def close(self) -> None:
        self._closed = True
