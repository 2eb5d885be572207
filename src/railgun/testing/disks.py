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
from typing import Final, Literal

from railgun.snapshots.disk import check_path, disk_error
from railgun.snapshots.lock import Lock, Owner, locked

Step = Literal["write", "sync", "rename", "sync directory", "delete", "done"]
STEPS: Final[tuple[Step, ...]] = ("write", "sync", "rename", "sync directory", "done")
"""Of a write, in their order; a hook is called before each of them."""

Hook = Callable[[Step, str], None]


class Crash(BaseException):  # nothing may take it for an error and go on
    """The program is gone, at this very point."""


@dataclass(eq=False, slots=True)
class _Content:
    data: bytes
    synced: bool = False


@dataclass(slots=True)
class _Change:
    """Of a directory: these names get these contents, or none."""

    directory: str
    names: dict[str, _Content | None]


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
        self._seen: dict[str, _Content] = {}
        self._durable: dict[str, _Content] = {}
        self._changes: list[_Change] = []
        self._owners: dict[str, _SimulatedLock] = {}
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
        self._change(directory, {temporary: content})
        self._step("sync", path)
        content.synced = "sync" not in self._without
        self._step("rename", path)
        self._change(directory, {path: content, temporary: None})
        self._step("sync directory", path)
        if "sync directory" not in self._without:
            self.sync(directory)
        self.writes.append(path)
        self._step("done", path)

    def read(self, path: str) -> bytes:
        """The file."""
        check_path(path)
        if path not in self._seen:
            raise disk_error("read", self.where(path), _os_error(errno.ENOENT))
        return self._seen[path].data

    def list(self, path: str) -> list[str]:
        """The names of all files below a directory."""
        start = f"{check_path(path)}/" if path else ""
        names = [name[len(start) :] for name in self._seen if name.startswith(start)]
        return sorted(n for n in names if not any(p.startswith(".") for p in n.split("/")))

    def delete(self, path: str) -> None:
        """Take a file away; nothing is synced by that."""
        check_path(path)
        if path not in self._seen:
            return
        if self.read_only:
            raise disk_error("delete", self.where(path), _os_error(errno.EROFS))
        self._step("delete", path)
        self._change(path.rpartition("/")[0], {path: None})

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return check_path(path) in self._seen

    def sync(self, path: str) -> None:
        """What is seen in this directory now, is there for good."""
        left = []
        for change in self._changes:
            if change.directory == path:
                _apply(change, self._durable)
            else:
                left.append(change)
        self._changes = left

    def lock(self, path: str) -> Lock:
        """A lock, which is gone with `crash` as those of a system are."""
        if self.read_only:
            raise disk_error("lock", self.where(path), _os_error(errno.EROFS))
        if path in self._owners:
            raise locked(self.where(path), self._owners[path].owner, certain=True)
        self._owners[path] = _SimulatedLock(self._owners, path)
        return self._owners[path]

    def holder(self, path: str) -> str | None:
        """Who has a lock."""
        return str(self._owners[path].owner) if path in self._owners else None

    # ------------------------------------------------------------ what goes wrong

    def crash_at(self, step: int) -> None:
        """Let the program be gone before the step of this number, counted from now on; 0 is the next one."""
        count = itertools.count()

        def hook(name: Step, path: str) -> None:
            if next(count) == step:
                self.crash()
                raise Crash(f"before {name} of {path}")

        self.hook = hook

    def crash(self) -> None:
        """All programs are gone, and their locks with them; the disk stays as it is."""
        self._owners.clear()
        self.hook = None

    def lose_power(self) -> None:
        """All programs are gone, and what was not synced is lost, torn or there, as it happens."""
        self.crash()
        for change in self._changes:
            if self._chance.random() < 0.5:
                _apply(change, self._durable)
        self._changes = []
        for content in self._durable.values():
            if not content.synced:
                content.data = self._torn(content.data)
                content.synced = True
        self._seen = dict(self._durable)

    def _torn(self, data: bytes) -> bytes:
        kept = self._chance.randrange(len(data) + 1)
        return self._chance.choice([b"", data, data[:kept], data[:kept] + bytes(len(data) - kept)])

    def flip(self, path: str, bit: int | None = None) -> None:
        """Turn one bit of a file, a random one unless told which."""
        data = bytearray(self._seen[path].data)
        at = self._chance.randrange(8 * len(data)) if bit is None else bit
        data[at // 8] ^= 1 << at % 8
        self.replace(path, bytes(data))

    def truncate(self, path: str, size: int) -> None:
        """Cut a file off."""
        self.replace(path, self._seen[path].data[:size])

    def replace(self, path: str, data: bytes) -> None:
        """Put other content into a file, behind the back of all programs."""
        self._seen[path] = self._durable[path] = _Content(data, synced=True)

    def leftovers(self) -> int:
        """How many temporary files there are."""
        return sum(name.endswith(".tmp") for name in self._seen)

    # ------------------------------------------------------------ inside

    def _step(self, step: Step, path: str) -> None:
        if self.hook is not None:
            self.hook(step, path)

    def _change(self, directory: str, names: dict[str, _Content | None]) -> None:
        change = _Change(directory, names)
        _apply(change, self._seen)
        self._changes.append(change)

    def _refuse(self, verb: str, path: str, size: int) -> None:
        if self.read_only:
            raise disk_error(verb, self.where(path), _os_error(errno.EROFS))
        used = sum(len(content.data) for content in self._seen.values())
        if self.full or (self.room is not None and used + size > self.room):
            raise disk_error(verb, self.where(path), _os_error(errno.ENOSPC))


class _SimulatedLock:
    def __init__(self, owners: dict[str, _SimulatedLock], path: str) -> None:
        self.owner = Owner.me()
        self._owners, self._path = owners, path

    def held(self) -> bool:
        return self._owners.get(self._path) is self

    def release(self) -> None:
        if self.held():
            del self._owners[self._path]


def _apply(change: _Change, names: dict[str, _Content]) -> None:
    for name, content in change.names.items():
        if content is None:
            names.pop(name, None)
        else:
            names[name] = content


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
