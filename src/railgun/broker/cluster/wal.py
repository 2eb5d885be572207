"""Persist the Raft log: everything that a node must not forget of its promises.

Rules:

1. One file of notes (`railgun.broker.log.notes`): a snapshot first, then hard states and entries. An entry replaces all
   entries written before with its index or a higher one.
2. What was written is durable after `sync`. After a crash everything that was synced is there, and of the rest a
   prefix.
3. A snapshot begins the file anew: the snapshot, the hard state, the entries after it. It is there wholly or not at
   all, and is durable when `write` or `compact` returns. So the very first write, which must have a snapshot, makes the
   file; a file without a whole snapshot is damaged.
4. `compact` keeps the entries after its snapshot, `write` does not.
5. A torn end is cut off. Bad data that was synced is damage: it is unknown what this node has promised to others, so it
   must not come back under its name (`DamagedWalError`), and nothing is changed. The only doubt is about notes of the
   last sync before a crash that rot before they are read again: they look torn. Data of a later version of Railgun is
   not damage: `LaterFormatError`, and nothing is changed.
6. A disk that refuses a write (full, a limit, read-only): `NoSpaceError` or `StorageError`. Nothing of the write is on
   disk then, and the driver ends all the same, because it cannot go on without it; `probe` tells when it can. A
   `compact` may be tried again later. A write or a sync that fails otherwise: `LogFailedError`, for ever.
7. One writer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from google.protobuf.message import DecodeError

from railgun.broker.cluster import raft_messages as raft
from railgun.broker.errors import ClosedError, StorageError, later_format, storage_error
from railgun.broker.log.disk import Disk
from railgun.broker.log.notes import Notes
from railgun.broker.protocol.raft.messages import Entry, Hard, Snapshot
from railgun.errors import ProtocolError
from railgun.transport.proto import raft_pb2 as r

_NAME: Final = "wal"
_MAGIC: Final = b"RGW1"
_HARD, _ENTRY, _SNAPSHOT = 1, 2, 3
_PROBE_BYTES: Final = 4096


class DamagedWalError(StorageError):
    """The Raft log has lost something that was synced: this node must not come back under its name."""

    code: ClassVar[str] = "WAL_DAMAGED"


@dataclass(slots=True)
class Recovered:
    """What was on disk; the log is empty if `snapshot` is None."""

    hard: Hard | None = None
    snapshot: Snapshot | None = None
    entries: tuple[Entry, ...] = ()
    warnings: list[str] = field(default_factory=list)
    """Warnings for people."""


class Wal:
    """See the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.broker.protocol.raft.messages import Members
    >>> from railgun.broker.log.disk import NodeDisk
    >>> disk = NodeDisk(tempfile.mkdtemp())
    >>> wal, found = Wal.open(disk, "raft")
    >>> wal.write(None, Snapshot(0, 0, Members(("a",))), ())
    >>> wal.write(Hard(1, "a"), None, [Entry(1, 1), Entry(2, 1, b"x")])
    >>> wal.sync()
    >>> wal.close()
    >>> wal, found = Wal.open(disk, "raft")
    >>> found.hard, found.snapshot.members.voters, len(found.entries)
    (Hard(term=1, vote='a'), ('a',), 2)
    >>> wal.close()
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        what = f"the log of Raft ({disk.where(f'{directory}/{_NAME}')})"
        self._notes = Notes(disk, directory, _NAME, _MAGIC, what)
        self._hard: Hard | None = None
        self._snapshot: Snapshot | None = None
        self._entries: list[Entry] = []  # the same objects as in the machine's log
        self._closed = False
        self._refused_bytes = _PROBE_BYTES  # size of a new file that could not be made

    @classmethod
    def open(cls, disk: Disk, directory: str) -> tuple[Wal, Recovered]:
        """Open the log in a directory. Return it with its content. If there is none, the first write makes it."""
        wal = cls(disk, directory)
        try:
            warnings = wal._recover()
        except OSError as error:
            raise storage_error(error, f"{wal._notes.what} cannot be opened") from error
        return wal, Recovered(wal._hard, wal._snapshot, tuple(wal._entries), warnings)

    @property
    def size(self) -> int:
        """Bytes of its file."""
        return 0 if self._snapshot is None else self._notes.tail.size

    def has_file(self) -> bool:
        """Return whether the file still exists. It may seem missing while it is replaced by a shorter file."""
        return self._closed or self._snapshot is None or self._notes.tail.is_there()

    def write(self, hard: Hard | None, snapshot: Snapshot | None, entries: Sequence[Entry]) -> None:
        """Write the parts of a `Ready`, in the order of the parameters."""
        self._check()
        hard = hard or self._hard
        after = self._last if snapshot is None else snapshot.index
        if entries and not self._base(snapshot) < entries[0].index <= after + 1:
            raise ProtocolError(f"entry {entries[0].index} cannot be written after {after}")
        if snapshot is not None:
            try:
                self._begin(hard, snapshot, entries)
            except OSError as error:
                raise storage_error(error, f"{self._notes.what} cannot be written") from error
            return
        notes = [self._pack_hard(hard)] if hard != self._hard and hard is not None else []
        notes += map(self._pack_entry, entries)
        self._notes.append(notes)
        self._hard = hard
        for entry in entries:
            self._put(entry)

    def sync(self) -> None:
        """Make everything written durable."""
        self._check()
        self._notes.sync()

    def probe(self) -> None:
        """Check whether as much as was last refused can be written now. Raise that write's error if it still cannot."""
        if self._snapshot is not None:
            self._notes.tail.probe(self._refused_bytes)

    def compact(self, snapshot: Snapshot) -> None:
        """Replace the entries up to a snapshot's index by the snapshot. If it cannot be written, everything stays as
        before."""
        self._check()
        if not self._base(None) <= snapshot.index <= self._last:
            raise ProtocolError(
                f"there are entries after {self._base(None)} up to {self._last}, so there is no snapshot of "
                f"{snapshot.index}"
            )
        kept = self._entries[snapshot.index - self._base(None) :]
        try:
            self._begin(self._hard, snapshot, kept)
        except OSError as error:
            raise storage_error(error, f"{self._notes.what} cannot be compacted") from error

    def close(self) -> None:
        """Sync and close the file."""
        if not self._closed:
            self._closed = True
            if self._snapshot is not None:
                self._notes.close()

    # ------------------------------------------------------------ internals

    @property
    def _last(self) -> int:
        return self._base(None) + len(self._entries)

    def _base(self, snapshot: Snapshot | None) -> int:
        """Return the index of `snapshot`, or of the current snapshot."""
        snapshot = snapshot or self._snapshot
        if snapshot is None:
            raise ProtocolError(f"{self._notes.what} begins with a snapshot")
        return snapshot.index

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._notes.what} is closed")
        if self._snapshot is not None:
            self._notes.tail.check()

    def _begin(self, hard: Hard | None, snapshot: Snapshot, entries: Sequence[Entry]) -> None:
        body = raft.encode_snapshot(snapshot).SerializeToString()
        notes = [self._notes.pack(_SNAPSHOT, body)]
        notes += [self._pack_hard(hard)] if hard is not None else []
        notes += map(self._pack_entry, entries)
        self._refused_bytes = sum(map(len, notes))
        self._notes.replace(notes, sealed=True)
        self._refused_bytes = _PROBE_BYTES
        self._hard, self._snapshot, self._entries = hard, snapshot, list(entries)

    def _put(self, entry: Entry) -> None:
        del self._entries[entry.index - self._base(None) - 1 :]
        self._entries.append(entry)

    def _pack_hard(self, hard: Hard) -> bytes:
        return self._notes.pack(_HARD, raft.encode_hard(hard).SerializeToString())

    def _pack_entry(self, entry: Entry) -> bytes:
        return self._notes.pack(_ENTRY, raft.encode_entry(entry).SerializeToString())

    def _recover(self) -> list[str]:
        notes = self._notes
        recovered = notes.recover(self._take, least=1)
        if recovered is None:
            return []
        if recovered.damaged:
            raise self._damaged(
                f"at byte {recovered.size}, after {recovered.count} records: {recovered.problem}"
            )
        if notes.cut_bytes:
            return [f"{notes.what}: {notes.cut_bytes} bytes were torn at the end, and are cut off"]
        return []

    def _take(self, kind: int, _: str, body: bytes) -> None:
        try:
            if kind == _SNAPSHOT:
                self._snapshot = raft.decode_snapshot(r.Snapshot.FromString(body))
                self._entries = []
            elif self._snapshot is None:
                raise self._damaged("it does not begin with a snapshot")
            elif kind == _HARD:
                self._hard = raft.decode_hard(r.Hard.FromString(body))
            elif kind == _ENTRY:
                entry = raft.decode_entry(r.Entry.FromString(body))
                if not self._base(None) < entry.index <= self._last + 1:
                    raise self._damaged(f"entry {entry.index} comes after {self._last}")
                self._put(entry)
            else:
                raise later_format(self._notes.what, f"a record of kind {kind}")
        except DecodeError as error:
            raise self._damaged(f"a record cannot be read: {error}") from error

    def _damaged(self, why: str) -> DamagedWalError:
        return DamagedWalError(
            f"{self._notes.what} is damaged: {why}. Nothing was changed. It is unknown what this node has promised to "
            "others, so it must not come back under its name: remove it from the cluster, and let it join anew with an "
            "empty directory."
        )
