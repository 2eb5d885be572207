"""The group log: what the consumer groups of a stream must not forget, as changes one after the other.

The log does not know what a group is. Functions of its user fold the changes, which are bytes, into states.

Rules:

1. The log is one file of notes (`railgun.broker.log.notes`). A note is a change of a group, the whole state of a
   group, or the end of a group.
2. `append` writes all of its changes or none; they are durable after `sync`. After a crash all synced changes are
   there, and of the others the first few.
3. `load` folds the notes in the file. A torn end is cut off. Bytes that were synced and are bad now are damage, which
   is reported together with the states before it; the file is not changed. Marks tell the two apart
   (`railgun.broker.log.tail`). A change of None is the end of a group; if the group comes again, it begins anew. Notes
   of a later version of Railgun are refused, and the file is not changed (`LaterVersionError`).
4. When the file has grown to twice the size that the states alone took, and to at least `rewrite_bytes`, it is
   rewritten with the states of all groups. A crash leaves the old file or the new one; both have the same states.
5. A damaged log can be begun anew from the states before the damage (`anew`); the damaged file is kept beside it.
6. A full disk and a failed sync are handled as in `railgun.broker.log.tail`. A rewrite that fails is put off.
7. One writer at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from railgun.broker.errors import (
    ClosedError,
    DamagedLogError,
    LaterFormatError,
    StorageError,
    later_format,
    storage_error,
)
from railgun.broker.log.disk import Disk, put
from railgun.broker.log.notes import Notes, Take, pack, unpack
from railgun.errors import LaterVersionError
from railgun.transport.records import BatchError

S = TypeVar("S")

_MAGIC: Final = b"RGG1"
_CHANGE, _WHOLE, _GONE = 1, 2, 3
_NAME: Final = "groups"


class DamagedGroupLogError(DamagedLogError):
    """A group log is damaged; `states` is what could be read before the damage.

    Groups that begin from these states get messages again.
    """

    def __init__(self, text: str, offset: int, states: Mapping[str, Any]) -> None:
        super().__init__(text, offset)
        self.states = states


@dataclass(frozen=True)
class Fold(Generic[S]):
    """Functions that turn changes into states.

    `apply` gets the state before a change (None: there was none), may change it, and returns the state after it. `dump`
    and `load` convert a whole state to bytes and back.
    """

    apply: Callable[[S | None, bytes], S]
    dump: Callable[[S], bytes]
    load: Callable[[bytes], S]


class GroupLog(Generic[S]):
    """The group log of one stream: see the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> longest = Fold[int](lambda n, change: max(n or 0, int(change)), lambda n: b"%d" % n, int)
    >>> disk = NodeDisk(tempfile.mkdtemp())
    >>> log, states = GroupLog.open(disk, "orders", longest)
    >>> log.append([("billing", b"3"), ("billing", b"5"), ("mail", b"4")])
    >>> log.sync()
    >>> log.close()
    >>> log, states = GroupLog.open(disk, "orders", longest)
    >>> states
    {'billing': 5, 'mail': 4}
    >>> log.close()
    """

    def __init__(self, disk: Disk, directory: str, fold: Fold[S], rewrite_bytes: int) -> None:
        self.directory = directory
        self._fold, self._rewrite_bytes = fold, rewrite_bytes
        self._notes = _notes(disk, directory)
        self._states_bytes = 0  # what the states alone took when the file was rewritten last
        self._closed = False

    @classmethod
    def open(
        cls, disk: Disk, directory: str, fold: Fold[S], rewrite_bytes: int = 1 << 20
    ) -> tuple[GroupLog[S], dict[str, S]]:
        """Open the group log in a directory, or make it; return it and the states of its groups.

        Raise `DamagedGroupLogError` if it is damaged, `LaterFormatError` if a later version has written it.
        """
        log = cls(disk, directory, fold, rewrite_bytes)
        try:
            return log, log._recover()
        except LaterFormatError:
            raise
        except LaterVersionError as error:
            raise later_format(log._notes.what, error) from error
        except OSError as error:
            raise storage_error(error, f"{log._notes.what} cannot be opened") from error

    @classmethod
    def anew(
        cls,
        disk: Disk,
        directory: str,
        fold: Fold[S],
        states: Mapping[str, S],
        rewrite_bytes: int = 1 << 20,
    ) -> tuple[GroupLog[S], dict[str, S]]:
        """Write a group log with these states in place of a damaged one, which is kept beside it."""
        path = f"{directory}/{_NAME}"
        try:
            damaged = disk.open(path)
            copy = next(
                name
                for name in (f"{path}.damaged-{n}" for n in itertools.count(1))
                if name.rpartition("/")[2] not in disk.list(directory)
            )
            put(disk, copy, [damaged.read(0, damaged.size())]).close()
            disk.sync_directory(directory)
            damaged.close()
            records = [pack_state(name, fold.dump(state)) for name, state in states.items()]
            put(disk, f"{path}.tmp", records).close()
            disk.rename(f"{path}.tmp", path)
        except OSError as error:
            what = f"the group log {disk.where(path)}"
            raise storage_error(error, f"{what} is damaged, and cannot be written anew") from error
        return cls.open(disk, directory, fold, rewrite_bytes)

    @property
    def cut_bytes(self) -> int:
        """Bytes of a torn end that were cut off when the log was opened."""
        return self._notes.cut_bytes

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._notes.tail.size

    @property
    def failed(self) -> StorageError | None:
        """Why the log takes no more writes, or None."""
        return self._notes.tail.failed

    @property
    def refused(self) -> StorageError | None:
        """Why the last write was refused, until writing is known to work again; or None."""
        return self._notes.tail.refused

    def probe(self) -> None:
        """Find out whether a refused write would succeed now; raise as `append` would, if not."""
        self._check()
        self._notes.tail.probe()

    def has_file(self) -> bool:
        """Return whether the file is still at its place, and as long as it was written. May be called by any thread."""
        return self._closed or self._notes.tail.is_there()

    def check_files(self) -> None:
        """Raise `LogFailedError`, now and later, if somebody has moved, replaced, removed or cut off the file."""
        self._check()
        self._notes.tail.check_file()

    def append(self, changes: Sequence[tuple[str, bytes | None]]) -> None:
        """Write changes of groups, all or none; a change of None is the end of its group."""
        self._check()
        self._notes.append([pack_change(group, change) for group, change in changes])

    def sync(self) -> None:
        """Make all appended changes durable, and rewrite the file if it has grown (rule 4)."""
        self._check()
        self._notes.sync()
        if self.size > max(self._rewrite_bytes, 2 * self._states_bytes):
            with contextlib.suppress(OSError):
                self._rewrite()

    def load(self) -> dict[str, S]:
        """Return the states of all groups, folded from the file."""
        self._check()
        states: dict[str, S] = {}
        self._notes.read(self._folder(states))
        return states

    def close(self) -> None:
        """Sync, and close the file."""
        if not self._closed:
            self._closed = True
            self._notes.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._notes.what} is closed")
        self._notes.tail.check()

    def _recover(self) -> dict[str, S]:
        states: dict[str, S] = {}
        summary = self._notes.recover(self._folder(states))
        if summary is None:
            self._notes.create()
        elif summary.damaged:
            raise DamagedGroupLogError(
                f"{self._notes.what} is damaged at byte {summary.size}, after {summary.count} changes: "
                f"{summary.problem}. Nothing was changed. Restore the file; the node of a cluster fetches it from "
                "the others.",
                summary.count,
                states,
            )
        return states

    def _folder(self, states: dict[str, S]) -> Take:
        """Return a function that folds notes into these states."""

        def take(kind: int, group: str, body: bytes) -> None:
            if kind == _CHANGE:
                states[group] = self._fold.apply(states.get(group), body)
            elif kind == _WHOLE:
                states[group] = self._fold.load(body)
            elif kind == _GONE:
                states.pop(group, None)
            else:
                raise later_format(self._notes.what, f"a record of kind {kind}")

        return take

    def _rewrite(self) -> None:
        """Write the states of all groups to a new file, in place of this one."""
        notes, states = self._notes, dict[str, S]()
        summary = notes.read(self._folder(states))
        if summary.problem:
            raise DamagedGroupLogError(
                f"{notes.what} is damaged at byte {summary.size}: {summary.problem}. Nothing was changed; the "
                "groups in memory are right. Look after the disk.",
                summary.count,
                states,
            )
        self._put(states)

    def replace(self, states: Mapping[str, S]) -> None:
        """Replace the states of all groups, durably."""
        self._check()
        try:
            self._put(states)
        except OSError as error:
            raise storage_error(error, f"{self._notes.what} cannot be written anew") from error

    def _put(self, states: Mapping[str, S]) -> None:
        notes = self._notes
        records = [pack_state(name, self._fold.dump(state)) for name, state in states.items()]
        size = sum(map(len, records))
        self._states_bytes = max(
            size, notes.tail.size // 2
        )  # if it fails, do not try again at once
        notes.replace(records)
        self._states_bytes = size


def pack_change(group: str, change: bytes | None) -> bytes:
    """Return a change as a note of the file."""
    return pack(_MAGIC, _GONE if change is None else _CHANGE, change or b"", group)


def pack_state(group: str, state: bytes) -> bytes:
    """Return a whole state, which was dumped before, as a note of the file."""
    return pack(_MAGIC, _WHOLE, state, group)


def unpack_records(data: bytes) -> list[tuple[str, bytes | None]]:
    """Return the groups in packed notes, each with its change or state (None: the end of the group).

    >>> unpack_records(pack_change("billing", b"3") + pack_change("mail", None))
    [('billing', b'3'), ('mail', None)]
    """
    changes: list[tuple[str, bytes | None]] = []
    at = 0
    while at < len(data):
        record = unpack(_MAGIC, data, at)
        if record is None:
            raise BatchError(f"there is no change of a group at byte {at}")
        kind, group, body, at = record
        changes.append((group, None if kind == _GONE else body))
    return changes


def _notes(disk: Disk, directory: str) -> Notes:
    where = disk.where(f"{directory}/{_NAME}")
    what = f"the group log of stream {directory!r} ({where})"
    return Notes(disk, directory, _NAME, _MAGIC, what)
