"""The group log: what the groups of a stream must not forget, as changes one after the other.

It does not know what a group is. A state is folded from changes, which are bytes, by functions of whoever uses it.

Rules:

1. One file of notes (`railgun.broker.log.notes`): a change of a group, the whole state of one, or the end of one.
2. `append` writes all of its changes or none; they are for good after `sync`. After a crash all changes that were
   synced are there, and of the others the first so many.
3. `load` folds what is there. What is torn at the end is cut off; what was there for good and is bad is damage, which
   is told with the states before it, and nothing is changed. Marks tell which it is (`railgun.broker.log.tail`).
   A change of None is the end of a group. If it comes again, it begins anew. What a later version of Railgun has
   written is refused, and nothing is changed (`LaterVersionError`).
4. When it has grown to twice what the states alone took, and at least `rewrite_bytes`, it is written anew: the states
   of all groups. A crash leaves the old file or the new one; both have the same states.
5. A damaged one can be begun anew from the states before the damage (`anew`); what is damaged is kept beside it.
6. A full disk or a failed sync: as in `railgun.broker.log.tail`. A rewrite that cannot be written is put off.
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
    """A group log is damaged; `states` is what could be read before that. Groups begun from it get messages again."""

    def __init__(self, told: str, offset: int, states: Mapping[str, Any]) -> None:
        super().__init__(told, offset)
        self.states = states


@dataclass(frozen=True)
class Fold(Generic[S]):
    """How states come from changes.

    `apply` gets the state before (None: there was none) and may change it; `dump` and `load` are of a whole state.
    """

    apply: Callable[[S | None, bytes], S]
    dump: Callable[[S], bytes]
    load: Callable[[bytes], S]


class GroupLog(Generic[S]):
    """See the rules of the module. Made by `open`.

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
        self._fold, self._least = fold, rewrite_bytes
        self._notes = _notes(disk, directory)
        self._whole = 0  # bytes the states alone took when it was written anew
        self._closed = False

    @classmethod
    def open(
        cls, disk: Disk, directory: str, fold: Fold[S], rewrite_bytes: int = 1 << 20
    ) -> tuple[GroupLog[S], dict[str, S]]:
        """The group log in a directory, made if there is none, and the states of its groups."""
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
        """A group log with these states, in place of a damaged one, which is kept beside it."""
        path = f"{directory}/{_NAME}"
        try:
            damaged = disk.open(path)
            kept = next(
                name
                for name in (f"{path}.damaged-{n}" for n in itertools.count(1))
                if name.rpartition("/")[2] not in disk.list(directory)
            )
            put(disk, kept, [damaged.read(0, damaged.size())]).close()
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
        """So much was torn at the end when it was opened, and is cut off."""
        return self._notes.cut_bytes

    @property
    def size(self) -> int:
        """Bytes of its file."""
        return self._notes.tail.size

    @property
    def failed(self) -> StorageError | None:
        """Why it takes no more, if so."""
        return self._notes.tail.failed

    @property
    def refused(self) -> StorageError | None:
        """Why the last write was refused, while it is not known that writing works again."""
        return self._notes.tail.refused

    def probe(self) -> None:
        """Find out whether what was refused can be written now; raise as `append` would, if not."""
        self._check()
        self._notes.tail.probe()

    def has_file(self) -> bool:
        """Return whether the file is still there, and as long as it was written. Any thread may ask."""
        return self._closed or self._notes.tail.is_there()

    def check_files(self) -> None:
        """Take nothing more if somebody has moved, replaced, removed or cut off the file: `LogFailedError`."""
        self._check()
        self._notes.tail.check_file()

    def append(self, changes: Sequence[tuple[str, bytes | None]]) -> None:
        """Write changes, each of a group (None: it is no more): all of them or none."""
        self._check()
        self._notes.append([pack_change(group, change) for group, change in changes])

    def sync(self) -> None:
        """Let all that was appended be there for good, and write the file anew if it has grown."""
        self._check()
        self._notes.sync()
        if self.size > max(self._least, 2 * self._whole):
            with contextlib.suppress(OSError):
                self._rewrite()

    def load(self) -> dict[str, S]:
        """The states of all groups, folded from the file."""
        self._check()
        states: dict[str, S] = {}
        self._notes.read(self._taker(states))
        return states

    def close(self) -> None:
        """Sync, and leave the file."""
        if not self._closed:
            self._closed = True
            self._notes.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._notes.what} is closed")
        self._notes.tail.check()

    def _recover(self) -> dict[str, S]:
        states: dict[str, S] = {}
        found = self._notes.recover(self._taker(states))
        if found is None:
            self._notes.create()
        elif found.damaged:
            raise DamagedGroupLogError(
                f"{self._notes.what} is damaged at byte {found.size}, after {found.count} changes: "
                f"{found.problem}. Nothing was changed. Restore the file; the node of a cluster fetches it from "
                "the others.",
                found.count,
                states,
            )
        return states

    def _taker(self, states: dict[str, S]) -> Take:
        """What folds notes into these states."""

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
        """The states of all groups in a new file, in place of this one."""
        notes, states = self._notes, dict[str, S]()
        found = notes.read(self._taker(states))
        if found.problem:
            raise DamagedGroupLogError(
                f"{notes.what} is damaged at byte {found.size}: {found.problem}. Nothing was changed; the "
                "groups in memory are right. Look after the disk.",
                found.count,
                states,
            )
        self._put(states)

    def replace(self, states: Mapping[str, S]) -> None:
        """These are the states of all groups from now on, for good when it returns."""
        self._check()
        try:
            self._put(states)
        except OSError as error:
            raise storage_error(error, f"{self._notes.what} cannot be written anew") from error

    def _put(self, states: Mapping[str, S]) -> None:
        notes = self._notes
        records = [pack_state(name, self._fold.dump(state)) for name, state in states.items()]
        size = sum(map(len, records))
        self._whole = max(size, notes.tail.size // 2)  # if it fails, not at once again
        notes.replace(records)
        self._whole = size


def pack_change(group: str, change: bytes | None) -> bytes:
    """A change as it stands in the file."""
    return pack(_MAGIC, _GONE if change is None else _CHANGE, change or b"", group)


def pack_state(group: str, state: bytes) -> bytes:
    """A whole state, as it was dumped, as it stands in the file."""
    return pack(_MAGIC, _WHOLE, state, group)


def unpack_records(data: bytes) -> list[tuple[str, bytes | None]]:
    """What was packed: groups, and their changes or states.

    >>> unpack_records(pack_change("billing", b"3") + pack_change("mail", None))
    [('billing', b'3'), ('mail', None)]
    """
    found: list[tuple[str, bytes | None]] = []
    at = 0
    while at < len(data):
        record = unpack(_MAGIC, data, at)
        if record is None:
            raise BatchError(f"what should be changes of groups is not, at byte {at}")
        kind, group, body, at = record
        found.append((group, None if kind == _GONE else body))
    return found


def _notes(disk: Disk, directory: str) -> Notes:
    where = disk.where(f"{directory}/{_NAME}")
    what = f"the group log of stream {directory!r} ({where})"
    return Notes(disk, directory, _NAME, _MAGIC, what)
