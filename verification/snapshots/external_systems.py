"""The external systems of a simulated job that crashes: a disk, a two-phase sink on it, and tables without Parquet."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from railgun.engine.snapshots.table import Rows
from railgun.flows.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter
from railgun.hashing import Hashes
from railgun.storage.object_store import disk_error
from railgun.testing.disks import Crash, SimulatedDisk, Step
from verification.rescale.model import Violation


class Disk(SimulatedDisk):
    """A disk that can fail to be read, and counts its changes."""

    def __init__(self, seed: int, without: Sequence[Step] = ()) -> None:
        super().__init__(seed, without=without)
        self.unreadable = False
        self.dead = False  # whether the program that uses the disk is gone
        self.changes = 0

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and count the change; no part or manifest may be written twice."""
        self._alive()
        self.changes += 1
        once = "/manifests/" in path or "/data/" in path
        if once and path in self._names.seen:
            raise Violation("numbers", f"{path} is written a second time")
        super().write(path, data)

    def delete(self, path: str) -> None:
        """Delete a file, and count the change."""
        self._alive()
        self.changes += 1
        super().delete(path)

    def _alive(self) -> None:
        if self.dead:  # a program that is gone cleans up nothing, either
            raise Crash("it is gone")

    def read(self, path: str) -> bytes:
        """Read a file; fails while the disk cannot be read."""
        self._alive()
        if self.unreadable:
            raise disk_error("read", self.where(path), OSError(errno.EIO, os.strerror(errno.EIO)))
        return super().read(path)

    def look(self, path: str) -> bytes:
        """Return a file's content for a check, without failures."""
        return self._names.seen[path].data


class Drawer(TwoPhaseSink[Any]):
    """Output on a disk: `staged/<generation>/<name>` is hidden, `shown/<name>` is visible."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.numbers = itertools.count()

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        """Return the writer of one worker."""
        return _DrawerWriter(self, place)

    def commit(self, token: Token) -> None:
        """Copy staged output to where it is visible, then delete the staged file; a second call does nothing."""
        staged, shown = f"staged/{token}", f"shown/{token.replace('/', '-')}"
        if self.disk.exists(shown):
            self.disk.sync("shown")  # the writer of the shown file may have died before the sync
        elif self.disk.exists(staged):
            self.disk.write(shown, self.disk.read(staged))
        else:
            raise Violation("output", f"{token} is to be published, and is gone")
        self.disk.delete(staged)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit these tokens, and delete what older generations staged."""
        for token in tokens:
            self.commit(token)
        for name in self.disk.list("staged"):
            if int(name.partition("/")[0]) < generation:
                self.disk.delete(f"staged/{name}")

    def shown(self) -> Counter[tuple[int, ...]]:
        """Return the visible output."""
        names = self.disk.list("shown")
        return Counter(x for name in names for x in pickle.loads(self.disk.look(f"shown/{name}")))


class SharedDrawer(Drawer):
    """A drawer of which one worker commits the tokens of all workers."""

    commits_together = True


class _DrawerWriter(TwoPhaseWriter[Any]):
    def __init__(self, drawer: Drawer, place: Place) -> None:
        self.drawer = drawer
        self.place = place
        self.items: list[Any] = []

    def write(self, items: Sequence[Any]) -> None:
        self.items += items

    def prepare(self, snapshot: int) -> Token | None:
        if not self.items:
            return None
        where = self.place
        token = f"{where.generation}/{snapshot}-{where.worker}-{next(self.drawer.numbers)}"
        self.drawer.disk.write(f"staged/{token}", pickle.dumps(self.items))
        self.items = []
        return token


class PlainTable:
    """A table that is encoded quickly; Parquet takes a hundred times as long, so most seeds do without."""

    def __init__(self, step: str, version: int) -> None:
        self.step, self.version = step, version
        self.rows = 0
        self.size = 0
        self._blocks: list[bytes] = []

    def add(
        self,
        hashes: Hashes,
        keys: list[Any],
        states: list[Any],
        timers: list[list[Any]] | None = None,
        ended: list[bool] | None = None,
        deleted: list[bool] | None = None,
    ) -> None:
        """Encode rows at once."""
        none: list[list[Any]] = [[]] * len(keys)
        no = [False] * len(keys)
        block = hashes.tolist(), keys, states, timers or none, ended or no, deleted or no
        self._blocks.append(pickle.dumps(block))
        self.rows += len(keys)

    def finish(self) -> bytes:
        """Return the content of the file."""
        return pickle.dumps((self.step, self.version, self._blocks))


def read_plain(
    data: bytes, mine: Callable[[Hashes], Any] | None = None, *_: Any, **options: Any
) -> Rows:
    """Return the rows of such a table."""
    step, version, blocks = pickle.loads(data)
    columns: list[list[Any]] = [[], [], [], [], [], []]
    for block in map(pickle.loads, blocks):
        for column, more in zip(columns, block, strict=True):
            column += more
    hashes = np.array(columns[0], dtype=np.uint64)
    if mine is not None and len(hashes):
        chosen = np.flatnonzero(mine(hashes))
        hashes = hashes[chosen]
        columns = [[column[row] for row in chosen.tolist()] for column in columns]
    return Rows(step, version, hashes, *columns[1:])
