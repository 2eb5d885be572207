"""Simulate a disk in memory that crashes, loses power, is full, is read-only, or flips bits.

It keeps two views: what programs see, and what would remain after a power cut. A write consists of the steps that
`LocalDisk` takes, and between any two of them a hook may raise `Crash`: then the program has ended, and the disk stays
as it is. `lose_power` discards what was not synced: each change of a directory that was not synced is kept or lost, and
each content that was not synced is whole, torn or empty, as drawn from a seed. Most file systems lose less.

>>> disk = SimulatedDisk(seed=1)
>>> disk.write("a", b"old")
>>> disk.crash_at(2)  # after the temporary file is synced, before it gets its name
>>> disk.write("a", b"new")
Traceback (most recent call last):
railgun.testing.disks.Crash: before rename of a
>>> disk.lose_power()
>>> disk.read("a")
b'old'
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from railgun.errors import ProcessEnd
from railgun.storage.lock import Lock, Owner, locked
from railgun.storage.object_store import check_path, disk_error

Step = Literal["write", "sync", "rename", "sync directory", "delete", "done"]
STEPS: Final[tuple[Step, ...]] = ("write", "sync", "rename", "sync directory", "done")
"""The steps of a write, in order. The hook is called before each of them."""

Hook = Callable[[Step, str], None]
C = TypeVar("C")
S = TypeVar("S", bound=str)


class Crash(ProcessEnd):  # no code may handle it as an error and go on
    """The simulated program ends at this point."""


def crash_hook(step: int, crash: Callable[[], None]) -> Callable[[S, str], None]:
    """Return a hook that ends the program before the step with this number; 0 is the next step."""
    count = itertools.count()

    def hook(name: S, path: str) -> None:
        if next(count) == step:
            crash()
            raise Crash(f"before {name} of {path}")

    return hook


def flip_bit(data: bytes | bytearray, bit: int | None, chance: random.Random) -> bytearray:
    """Return a copy of `data` with one bit flipped: the given one, or a random one."""
    flipped = bytearray(data)
    at = chance.randrange(8 * len(flipped)) if bit is None else bit
    flipped[at // 8] ^= 1 << at % 8
    return flipped


@dataclass(slots=True)
class _Change(Generic[C]):
    """A change of a directory: these names get these contents, or are removed."""

    directory: str
    names: dict[str, C | None]

    def apply(self, entries: dict[str, C]) -> None:
        for name, content in self.names.items():
            if content is None:
                entries.pop(name, None)
            else:
                entries[name] = content


class DirectoryEntries(Generic[C]):
    """File names with their contents, as programs see them and as they are after a power cut."""

    def __init__(self) -> None:
        self.seen: dict[str, C] = {}
        self.durable: dict[str, C] = {}
        self._changes: list[_Change[C]] = []

    def change(self, directory: str, names: dict[str, C | None]) -> None:
        """Set the contents of names in a directory, or remove names (None), without syncing."""
        change = _Change(directory, names)
        change.apply(self.seen)
        self._changes.append(change)

    def sync(self, directory: str) -> None:
        """Make the present names of this directory durable."""
        remaining = []
        for change in self._changes:
            if change.directory == directory:
                change.apply(self.durable)
            else:
                remaining.append(change)
        self._changes = remaining

    def settle(self, chance: random.Random) -> None:
        """Cut the power: keep or lose each change that was not synced, at random."""
        for change in self._changes:
            if chance.random() < 0.5:
                change.apply(self.durable)
        self._changes = []
        self.seen = dict(self.durable)

    def put(self, path: str, content: C) -> None:
        """Set a content durably, unseen by hooks."""
        self.seen[path] = self.durable[path] = content


@dataclass(eq=False, slots=True)
class _Content:
    data: bytes
    synced: bool = False


class SimulatedDisk:
    """A `Disk` for tests. Several stores may share one, as processes share a disk.

    `without`: steps that sync nothing, although their hooks are called, to prove that a test would notice.
    """

    def __init__(
        self, seed: int = 0, hook: Hook | None = None, without: Collection[Step] = ()
    ) -> None:
        self.hook = hook
        self.full = False
        self.read_only = False
        self.room: int | None = None
        """Capacity in bytes; None: unlimited."""
        self.writes: list[str] = []
        """The paths of all files that were written, in order."""
        self._without = without
        self._chance = random.Random(seed)
        self._names: DirectoryEntries[_Content] = DirectoryEntries()
        self._owners: dict[str, SimulatedLock] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------ a disk

    def where(self, path: str) -> str:
        """Return the name of a file, for messages."""
        return f"simulated:{path}"

    def write(self, path: str, data: bytes) -> None:
        """Write a file, step by step."""
        check_path(path)
        directory, _, name = path.rpartition("/")
        temporary = f"{directory}/.{name}.{next(self._numbers)}.tmp".lstrip("/")
        self._refuse("write", path, len(data))
        self._step("write", path)
        content = _Content(bytes(data))
        self._names.change(directory, {temporary: content})
        self._step("sync", path)
        content.synced = "sync" not in self._without
        self._step("rename", path)
        self._names.change(directory, {path: content, temporary: None})
        self._step("sync directory", path)
        if "sync directory" not in self._without:
            self.sync(directory)
        self.writes.append(path)
        self._step("done", path)

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        check_path(path)
        if path not in self._names.seen:
            raise disk_error("read", self.where(path), _os_error(errno.ENOENT))
        return self._names.seen[path].data

    def list(self, path: str) -> list[str]:
        """Return the names of all files below a directory."""
        start = f"{check_path(path)}/" if path else ""
        names = [name[len(start) :] for name in self._names.seen if name.startswith(start)]
        return sorted(n for n in names if not any(p.startswith(".") for p in n.split("/")))

    def delete(self, path: str) -> None:
        """Delete a file, without syncing."""
        check_path(path)
        if path not in self._names.seen:
            return
        if self.read_only:
            raise disk_error("delete", self.where(path), _os_error(errno.EROFS))
        self._step("delete", path)
        self._names.change(path.rpartition("/")[0], {path: None})

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        return check_path(path) in self._names.seen

    def sync(self, path: str) -> None:
        """Make the present names of this directory durable."""
        self._names.sync(path)

    def lock(self, path: str) -> Lock:
        """Return a lock, which `crash` releases as the system would."""
        if self.read_only:
            raise disk_error("lock", self.where(path), _os_error(errno.EROFS))
        return SimulatedLock.take(self._owners, path, self.where(path))

    def holder(self, path: str) -> str | None:
        """Return the owner of a lock, or None."""
        return str(self._owners[path].owner) if path in self._owners else None

    # ------------------------------------------------------------ faults

    def crash_at(self, step: int) -> None:
        """End the program before the step with this number, counted from now on; 0 is the next step."""
        self.hook = crash_hook(step, self.crash)

    def crash(self) -> None:
        """End all programs and release their locks; the disk stays as it is."""
        self._owners.clear()
        self.hook = None

    def lose_power(self) -> None:
        """End all programs, and lose, tear or keep at random what was not synced."""
        self.crash()
        self._names.settle(self._chance)
        for content in self._names.durable.values():
            if not content.synced:
                content.data = self._torn(content.data)
                content.synced = True

    def _torn(self, data: bytes) -> bytes:
        kept = self._chance.randrange(len(data) + 1)
        return self._chance.choice([b"", data, data[:kept], data[:kept] + bytes(len(data) - kept)])

    def flip(self, path: str, bit: int | None = None) -> None:
        """Flip one bit of a file: the given one, or a random one."""
        self.replace(path, bytes(flip_bit(self._names.seen[path].data, bit, self._chance)))

    def truncate(self, path: str, size: int) -> None:
        """Cut a file off after `size` bytes."""
        self.replace(path, self._names.seen[path].data[:size])

    def replace(self, path: str, data: bytes) -> None:
        """Replace the content of a file durably, unseen by hooks."""
        self._names.put(path, _Content(data, synced=True))

    def temporary_files(self) -> int:
        """Return the number of temporary files."""
        return sum(name.endswith(".tmp") for name in self._names.seen)

    # ------------------------------------------------------------ inside

    def _step(self, step: Step, path: str) -> None:
        if self.hook is not None:
            self.hook(step, path)

    def _refuse(self, verb: str, path: str, size: int) -> None:
        if self.read_only:
            raise disk_error(verb, self.where(path), _os_error(errno.EROFS))
        used = sum(len(content.data) for content in self._names.seen.values())
        if self.full or (self.room is not None and used + size > self.room):
            raise disk_error(verb, self.where(path), _os_error(errno.ENOSPC))


class SimulatedLock:
    """A lock of a simulated disk."""

    def __init__(self, owners: dict[str, SimulatedLock], path: str) -> None:
        self.owner = Owner.me()
        self._owners, self._path = owners, path

    @staticmethod
    def take(owners: dict[str, SimulatedLock], path: str, where: str) -> SimulatedLock:
        """Return the lock of a path. Raises `LockedError` if it is held."""
        if path in owners:
            raise locked(where, owners[path].owner, certain=True)
        owners[path] = SimulatedLock(owners, path)
        return owners[path]

    def held(self) -> bool:
        """Return whether the lock is still held."""
        return self._owners.get(self._path) is self

    def release(self) -> None:
        """Release the lock, unless it was lost."""
        if self.held():
            del self._owners[self._path]


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
