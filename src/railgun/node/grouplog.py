"""The group log: what the groups of a stream must not forget, as changes one after the other.

It does not know what a group is. A state is folded from changes, which are bytes, by functions of whoever uses it.

Rules:

1. One file. A record is a change of a group, the whole state of one, or the end of one. Each has a checksum.
2. `append` writes all of its changes or none; they are for good after `sync`. After a crash all changes that were
   synced are there, and of the others the first so many.
3. `load` folds what is there. What is torn at the end is cut off; what was there for good and is bad is damage, which
   is told with the states before it, and nothing is changed. Marks tell which it is (`railgun.node.tail`).
   A change of None is the end of a group. If it comes again, it begins anew.
4. When it has grown to twice what the states alone took, and at least `rewrite_bytes`, it is written anew: the states
   of all groups into another file, synced, renamed over this one, and the directory synced. A crash leaves the one or
   the other; both have the same states.
5. A damaged one can be begun anew from the states before the damage (`anew`); what is damaged is kept beside it.
6. A full disk or a failed sync: as in `railgun.node.tail`. A rewrite that cannot be written is put off.
7. One writer at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from railgun.node.disk import Disk, File, put
from railgun.node.errors import (
    ClosedError,
    DamagedLogError,
    StorageError,
    storage_error,
)
from railgun.node.tail import MARK, MARK_SIZE, Tail, has_mark, read_mark
from railgun.wire.records import BatchError

S = TypeVar("S")

_RECORD: Final = struct.Struct(
    "<4sIIHH"
)  # magic, crc of the rest, size of all, kind, length of the group
_MAGIC: Final = b"RGG1"
_CHANGE, _WHOLE, _GONE = 1, 2, 3
_NAME: Final = "groups"
_CHUNK: Final = 1 << 18  # bytes read at once


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


@dataclass(slots=True)
class _Found(Generic[S]):
    states: dict[str, S]
    records: int
    size: int
    problem: str


class GroupLog(Generic[S]):
    """See the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.node.disk import NodeDisk
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
        self.cut_bytes = 0
        """So much was torn at the end when it was opened, and is cut off."""
        self._disk, self._fold, self._least = disk, fold, rewrite_bytes
        self._path = f"{directory}/{_NAME}"
        self._tail: Tail
        self._records = 0
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
        except OSError as error:
            raise storage_error(error, f"{log._what()} cannot be opened") from error

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
            records = [_pack(_WHOLE, name, fold.dump(state)) for name, state in states.items()]
            put(disk, f"{path}.tmp", records).close()
            disk.rename(f"{path}.tmp", path)
        except OSError as error:
            what = f"the group log {disk.where(path)}"
            raise storage_error(error, f"{what} is damaged, and cannot be written anew") from error
        return cls.open(disk, directory, fold, rewrite_bytes)

    @property
    def size(self) -> int:
        """Bytes of its file."""
        return self._tail.size

    @property
    def failed(self) -> StorageError | None:
        """Why it takes no more, if so."""
        return self._tail.failed

    def append(self, changes: Sequence[tuple[str, bytes | None]]) -> None:
        """Write changes, each of a group (None: it is no more): all of them or none."""
        records = [pack_change(group, change) for group, change in changes]
        self._check()
        if records:
            self._tail.append(records, self._records)
            self._records += len(records)

    def sync(self) -> None:
        """Let all that was appended be there for good, and write the file anew if it has grown."""
        self._check()
        self._tail.sync()
        if self._tail.size > max(self._least, 2 * self._whole):
            with contextlib.suppress(OSError):
                self._rewrite()

    def load(self) -> dict[str, S]:
        """The states of all groups, folded from the file."""
        self._check()
        return self._read(self._tail.file, self._tail.size).states

    def close(self) -> None:
        """Sync, and leave the file."""
        if not self._closed:
            self._closed = True
            self._tail.close(self._records)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._what()} is closed")
        self._tail.check()

    def _recover(self) -> dict[str, S]:
        disk = self._disk
        disk.make_directory(self.directory)
        names = disk.list(self.directory)
        if f"{_NAME}.tmp" in names:
            disk.remove(f"{self._path}.tmp")
        if _NAME not in names:
            self._tail = Tail(disk.create(self._path), self._what(), 0)
            disk.sync_directory(self.directory)
            return {}
        file = disk.open(self._path)
        found = self._read(file, file.size())
        if found.problem:
            if has_mark(file, found.size):
                file.close()
                raise DamagedGroupLogError(
                    f"{self._what()} is damaged at byte {found.size}, after {found.records} changes: "
                    f"{found.problem}. Nothing was changed. Restore the file, or fetch it from a replica.",
                    found.records,
                    found.states,
                )
            self.cut_bytes = file.size() - found.size
            file.truncate(found.size)
        file.sync()  # what a killed process has left may be in memory only
        disk.sync_directory(self.directory)
        self._records = found.records
        self._tail = Tail(file, self._what(), found.size)
        return found.states

    def _read(self, file: File, size: int) -> _Found[S]:
        data, at = b"", 0  # what was read and not looked at begins there
        found: _Found[S] = _Found({}, 0, 0, "")
        states = found.states
        while found.size < size:
            if data[at : at + 4] == MARK and len(data) - at >= MARK_SIZE:
                if read_mark(data, at, found.size) != found.records:
                    found.problem = "a mark that does not belong here"
                    break
                at += MARK_SIZE
                found.size += MARK_SIZE
                continue
            record = _unpack(data, at)
            if record is None:
                known = found.size + len(data) - at  # so far the file was read
                more = file.read(known, min(_CHUNK, size - known)) if known < size else b""
                if not more:
                    found.problem = "there is no record, or a part of one"
                    break
                data, at = data[at:] + more, 0
                continue
            kind, group, body, end = record
            if kind == _CHANGE:
                states[group] = self._fold.apply(states.get(group), body)
            elif kind == _WHOLE:
                states[group] = self._fold.load(body)
            else:
                states.pop(group, None)
            found.records += 1
            found.size += end - at
            at = end
        return found

    def _rewrite(self) -> None:
        """The states of all groups in a new file, in place of this one."""
        found = self._read(self._tail.file, self._tail.size)
        if found.problem:
            raise DamagedGroupLogError(
                f"{self._what()} is damaged at byte {found.size}: {found.problem}. Nothing was changed; the "
                "groups in memory are right. Look after the disk.",
                found.records,
                found.states,
            )
        self._put(found.states)

    def replace(self, states: Mapping[str, S]) -> None:
        """These are the states of all groups from now on, for good when it returns."""
        self._check()
        try:
            self._put(states)
        except OSError as error:
            raise storage_error(error, f"{self._what()} cannot be written anew") from error

    def _put(self, states: Mapping[str, S]) -> None:
        records = [_pack(_WHOLE, name, self._fold.dump(state)) for name, state in states.items()]
        size = sum(map(len, records))
        self._whole = max(size, self._tail.size // 2)  # if it fails, not at once again
        temporary = f"{self._path}.tmp"
        try:
            file = put(self._disk, temporary, records)
        except OSError:  # this one is as it was
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        try:
            self._disk.rename(temporary, self._path)
        except OSError as error:
            file.close()
            self._tail.fail("written anew", error)
            raise
        old, self._tail = self._tail, Tail(file, self._what(), size)
        old.file.close()
        self._records, self._whole = len(records), size
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            self._tail.fail("written anew", error)

    def _what(self) -> str:
        return f"the group log of stream {self.directory!r} ({self._disk.where(self._path)})"


def pack_change(group: str, change: bytes | None) -> bytes:
    """A change as it stands in the file."""
    return _pack(_GONE, group, b"") if change is None else _pack(_CHANGE, group, change)


def pack_state(group: str, state: bytes) -> bytes:
    """A whole state, as it was dumped, as it stands in the file."""
    return _pack(_WHOLE, group, state)


def unpack_records(data: bytes) -> list[tuple[str, bytes | None]]:
    """What was packed: groups, and their changes or states.

    >>> unpack_records(pack_change("billing", b"3") + pack_change("mail", None))
    [('billing', b'3'), ('mail', None)]
    """
    found: list[tuple[str, bytes | None]] = []
    at = 0
    while at < len(data):
        record = _unpack(data, at)
        if record is None:
            raise BatchError(f"what should be changes of groups is not, at byte {at}")
        kind, group, body, at = record
        found.append((group, None if kind == _GONE else body))
    return found


def _pack(kind: int, group: str, body: bytes) -> bytes:
    name = group.encode()
    size = _RECORD.size + len(name) + len(body)
    rest = _RECORD.pack(_MAGIC, 0, size, kind, len(name))[8:] + name + body
    return _MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest


def _unpack(data: bytes, at: int) -> tuple[int, str, bytes, int] | None:
    """Kind, group, body and end of the record that begins there, if it is whole."""
    if len(data) - at < _RECORD.size:
        return None
    magic, crc, size, kind, length = _RECORD.unpack_from(data, at)
    end = at + size
    if magic != _MAGIC or end > len(data) or size < _RECORD.size + length:
        return None
    if zlib.crc32(memoryview(data)[at + 8 : end]) != crc:
        return None
    body = at + _RECORD.size + length
    return kind, data[at + _RECORD.size : body].decode(), data[body:end], end
