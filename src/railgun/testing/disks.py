"""A disk in memory that crashes, loses power, is full, cannot be written, and flips bits, when a test says so.

It keeps two views: what programs see, and what would be there after a power cut. A write is made of the steps that
`LocalDisk` takes, and between any two of them a hook may raise `Crash`: the program is gone, the disk stays as it is.
`lose_power` then takes away what was not synced: each change of a directory that was not synced comes about or does
not, each content that was not synced is whole, torn or empty, as a seeded die falls. Most file systems are kinder.

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
"""Of a write, in their order; a hook is called before each of them."""

Hook = Callable[[Step, str], None]
C = TypeVar("C")
S = TypeVar("S", bound=str)


class Crash(ProcessEnd):  # nothing may take it for an error and go on
    """The program is gone, at this very point."""


def crashing_at(step: int, crash: Callable[[], None]) -> Callable[[S, str], None]:
    """A hook by which the program is gone before the step of this number; 0 is the next one."""
    count = itertools.count()

    def hook(name: S, path: str) -> None:
        if next(count) == step:
            crash()
            raise Crash(f"before {name} of {path}")

    return hook


def flipped(data: bytes | bytearray, bit: int | None, chance: random.Random) -> bytearray:
    """The same but for one bit, a random one unless told which."""
    made = bytearray(data)
    at = chance.randrange(8 * len(made)) if bit is None else bit
    made[at // 8] ^= 1 << at % 8
    return made


@dataclass(slots=True)
class _Change(Generic[C]):
    """Of a directory: these names get these contents, or none."""

    directory: str
    names: dict[str, C | None]

    def apply(self, to: dict[str, C]) -> None:
        for name, content in self.names.items():
            if content is None:
                to.pop(name, None)
            else:
                to[name] = content


class Names(Generic[C]):
    """Which names there are, for programs and after a power cut."""

    def __init__(self) -> None:
        self.seen: dict[str, C] = {}
        self.durable: dict[str, C] = {}
        self._changes: list[_Change[C]] = []

    def change(self, directory: str, names: dict[str, C | None]) -> None:
        """In a directory, these names get these contents, or none; nothing is synced by that."""
        change = _Change(directory, names)
        change.apply(self.seen)
        self._changes.append(change)

    def sync(self, directory: str) -> None:
        """What is seen in this directory now, is there for good."""
        left = []
        for change in self._changes:
            if change.directory == directory:
                change.apply(self.durable)
            else:
                left.append(change)
        self._changes = left

    def settle(self, chance: random.Random) -> None:
        """The power is gone: each change that was not synced has come about, or has not."""
        for change in self._changes:
            if chance.random() < 0.5:
                change.apply(self.durable)
        self._changes = []
        self.seen = dict(self.durable)

    def put(self, path: str, content: C) -> None:
        """Behind the back of all programs."""
        self.seen[path] = self.durable[path] = content


@dataclass(eq=False, slots=True)
class _Content:
    data: bytes
    synced: bool = False


class SimulatedDisk:
    """A `Disk` for tests. Several stores may share one, as processes share a disk.

    `without`: steps that are left out, to see that a test would notice. They happen, but nothing is synced by them.
    """

    def __init__(
        self, seed: int = 0, hook: Hook | None = None, without: Collection[Step] = ()
    ) -> None:
        self.hook = hook
        self.full = False
        self.read_only = False
        self.room: int | None = None
        """Bytes there is room for; None: any."""
        self.writes: list[str] = []
        """The names of all files that were written, in order."""
        self._without = without
        self._chance = random.Random(seed)
        self._names: Names[_Content] = Names()
        self._owners: dict[str, SimulatedLock] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------ a disk

    def where(self, path: str) -> str:
        """The name of a file for people."""
        return f"simulated:{path}"

    def write(self, path: str, data: bytes) -> None:
        """Put a file there, step by step."""
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
        """The file."""
        check_path(path)
        if path not in self._names.seen:
            raise disk_error("read", self.where(path), _os_error(errno.ENOENT))
        return self._names.seen[path].data

    def list(self, path: str) -> list[str]:
        """The names of all files below a directory."""
        start = f"{check_path(path)}/" if path else ""
        names = [name[len(start) :] for name in self._names.seen if name.startswith(start)]
        return sorted(n for n in names if not any(p.startswith(".") for p in n.split("/")))

    def delete(self, path: str) -> None:
        """Take a file away; nothing is synced by that."""
        check_path(path)
        if path not in self._names.seen:
            return
        if self.read_only:
            raise disk_error("delete", self.where(path), _os_error(errno.EROFS))
        self._step("delete", path)
        self._names.change(path.rpartition("/")[0], {path: None})

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return check_path(path) in self._names.seen

    def sync(self, path: str) -> None:
        """What is seen in this directory now, is there for good."""
        self._names.sync(path)

    def lock(self, path: str) -> Lock:
        """A lock, which is gone with `crash` as those of a system are."""
        if self.read_only:
            raise disk_error("lock", self.where(path), _os_error(errno.EROFS))
        return SimulatedLock.take(self._owners, path, self.where(path))

    def holder(self, path: str) -> str | None:
        """Who has a lock."""
        return str(self._owners[path].owner) if path in self._owners else None

    # ------------------------------------------------------------ what goes wrong

    def crash_at(self, step: int) -> None:
        """Let the program be gone before the step of this number, counted from now on; 0 is the next one."""
        self.hook = crashing_at(step, self.crash)

    def crash(self) -> None:
        """All programs are gone, and their locks with them; the disk stays as it is."""
        self._owners.clear()
        self.hook = None

    def lose_power(self) -> None:
        """All programs are gone, and what was not synced is lost, torn or there, as it happens."""
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
        """Turn one bit of a file, a random one unless told which."""
        self.replace(path, bytes(flipped(self._names.seen[path].data, bit, self._chance)))

    def truncate(self, path: str, size: int) -> None:
        """Cut a file off."""
        self.replace(path, self._names.seen[path].data[:size])

    def replace(self, path: str, data: bytes) -> None:
        """Put other content into a file, behind the back of all programs."""
        self._names.put(path, _Content(data, synced=True))

    def leftovers(self) -> int:
        """How many temporary files there are."""
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
    """A lock of a disk in memory."""

    def __init__(self, owners: dict[str, SimulatedLock], path: str) -> None:
        self.owner = Owner.me()
        self._owners, self._path = owners, path

    @staticmethod
    def take(owners: dict[str, SimulatedLock], path: str, where: str) -> SimulatedLock:
        """The lock of a path, unless somebody has it."""
        if path in owners:
            raise locked(where, owners[path].owner, certain=True)
        owners[path] = SimulatedLock(owners, path)
        return owners[path]

    def held(self) -> bool:
        """Whether it is held still."""
        return self._owners.get(self._path) is self

    def release(self) -> None:
        """Let it go."""
        if self.held():
            del self._owners[self._path]


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
