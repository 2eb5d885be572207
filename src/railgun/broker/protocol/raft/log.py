"""The log in memory: a snapshot, the entries after it, and how far they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from railgun.broker.protocol.raft.messages import Entry, Members, Snapshot
from railgun.errors import ProtocolError

OVERHEAD: Final = 32  # bytes of an entry besides its data, roughly


class Log:
    """Entries by their index, from `base + 1` on; `base` is the last one that the snapshot stands for."""

    __slots__ = ("changes", "durable", "entries", "snapshot")

    def __init__(self, snapshot: Snapshot, entries: Sequence[Entry] = ()) -> None:
        self.snapshot = snapshot
        self.entries = list(entries)
        for at, entry in enumerate(self.entries, self.base + 1):
            if entry.index != at:
                raise ProtocolError(f"the log has entry {entry.index} where {at} should be")
        self.durable = self.last
        self.changes = [(e.index, e.members) for e in self.entries if e.members is not None]

    @property
    def base(self) -> int:
        """The last index of the snapshot."""
        return self.snapshot.index

    @property
    def last(self) -> int:
        """The last index."""
        return self.snapshot.index + len(self.entries)

    @property
    def last_term(self) -> int:
        """The term of the last entry."""
        return self.entries[-1].term if self.entries else self.snapshot.term

    @property
    def members(self) -> Members:
        """Those of the last change, whether it is committed or not."""
        return self.changes[-1][1] if self.changes else self.snapshot.members

    @property
    def changed_at(self) -> int:
        """The index of the last change of members."""
        return self.changes[-1][0] if self.changes else self.snapshot.index

    def members_at(self, index: int) -> Members:
        """Those of the last change up to an index."""
        found = self.snapshot.members
        for at, members in self.changes:
            if at <= index:
                found = members
        return found

    def term(self, index: int) -> int | None:
        """The term of an entry; None if it is not here."""
        if index == self.snapshot.index:
            return self.snapshot.term
        at = index - self.snapshot.index - 1
        return self.entries[at].term if 0 <= at < len(self.entries) else None

    def has(self, index: int, term: int) -> bool:
        """Whether there is an entry of this term."""
        return self.term(index) == term

    def after(self, index: int, size: int | None = None) -> tuple[Entry, ...]:
        """The entries after an index: all of them, or the first, and those that fit into so many bytes with it."""
        some = self.entries[index - self.base :]
        if size is None:
            return tuple(some)
        for count, entry in enumerate(some):
            size -= len(entry.data) + OVERHEAD
            if size < 0:
                return tuple(some[: max(1, count)])
        return tuple(some)

    def between(self, after: int, to: int) -> tuple[Entry, ...]:
        """The entries after one index, up to another."""
        return tuple(self.entries[after - self.base : to - self.base])

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries at the end."""
        self.entries += entries
        self.changes += [(e.index, e.members) for e in entries if e.members is not None]

    def cut(self, index: int) -> None:
        """Forget the entry of this index, and all after it."""
        del self.entries[index - self.base - 1 :]
        while self.changes and self.changes[-1][0] >= index:
            self.changes.pop()
        self.durable = min(self.durable, index - 1)

    def written(self, index: int, term: int) -> None:
        """Entries up to this one are on disk; unless they were cut meanwhile."""
        if self.has(index, term):
            self.durable = max(self.durable, index)

    def fits(self, index: int, term: int) -> int:
        """The last index, from this one down, whose term is not above: where two logs may agree; or one before all."""
        index = min(index, self.last)
        while index >= self.base and (self.term(index) or 0) > term:
            index -= 1
        return index

    def restore(self, snapshot: Snapshot) -> None:
        """Begin anew with a snapshot."""
        self.snapshot, self.entries, self.changes = snapshot, [], []
        self.durable = snapshot.index

    def compact(self, snapshot: Snapshot) -> None:
        """A snapshot stands for the entries up to its index from now on."""
        del self.entries[: snapshot.index - self.base]
        self.changes = [(index, m) for index, m in self.changes if index > snapshot.index]
        self.snapshot = snapshot
