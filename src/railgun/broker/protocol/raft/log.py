"""The Raft log in memory: a snapshot, the entries after it, and how many of them are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from railgun.broker.protocol.raft.messages import Entry, Members, Snapshot
from railgun.errors import ProtocolError

ENTRY_OVERHEAD_BYTES: Final = 32  # approximate size of an entry besides its data


class Log:
    """A snapshot up to index `base`, and entries from `base + 1` on."""

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
        """Return the last index of the snapshot."""
        return self.snapshot.index

    @property
    def last(self) -> int:
        """Return the last index."""
        return self.snapshot.index + len(self.entries)

    @property
    def last_term(self) -> int:
        """Return the term of the last entry."""
        return self.entries[-1].term if self.entries else self.snapshot.term

    @property
    def members(self) -> Members:
        """Return the members after the last change of members, committed or not."""
        return self.changes[-1][1] if self.changes else self.snapshot.members

    @property
    def changed_at(self) -> int:
        """Return the index of the last change of members."""
        return self.changes[-1][0] if self.changes else self.snapshot.index

    def members_at(self, index: int) -> Members:
        """Return the members after the last change up to an index."""
        members = self.snapshot.members
        for at, changed in self.changes:
            if at <= index:
                members = changed
        return members

    def term(self, index: int) -> int | None:
        """Return the term of an entry, or None if the log does not have it."""
        if index == self.snapshot.index:
            return self.snapshot.term
        at = index - self.snapshot.index - 1
        return self.entries[at].term if 0 <= at < len(self.entries) else None

    def has(self, index: int, term: int) -> bool:
        """Return whether the entry at `index` is of this term."""
        return self.term(index) == term

    def after(self, index: int, size: int | None = None) -> tuple[Entry, ...]:
        """Return the entries after an index: all, or at most `size` bytes of them, but at least one."""
        entries = self.entries[index - self.base :]
        if size is None:
            return tuple(entries)
        for count, entry in enumerate(entries):
            size -= len(entry.data) + ENTRY_OVERHEAD_BYTES
            if size < 0:
                return tuple(entries[: max(1, count)])
        return tuple(entries)

    def between(self, after: int, to: int) -> tuple[Entry, ...]:
        """Return the entries after one index, up to and including another."""
        return tuple(self.entries[after - self.base : to - self.base])

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries at the end."""
        self.entries += entries
        self.changes += [(e.index, e.members) for e in entries if e.members is not None]

    def cut(self, index: int) -> None:
        """Remove the entry at `index` and all after it."""
        del self.entries[index - self.base - 1 :]
        while self.changes and self.changes[-1][0] >= index:
            self.changes.pop()
        self.durable = min(self.durable, index - 1)

    def written(self, index: int, term: int) -> None:
        """Record that entries up to `index` are on disk, unless they were cut meanwhile."""
        if self.has(index, term):
            self.durable = max(self.durable, index)

    def last_possible_match(self, index: int, term: int) -> int:
        """Return the last index up to `index` whose term is at most `term`: where two logs may agree.

        If there is none, return `base - 1`.
        """
        index = min(index, self.last)
        while index >= self.base and (self.term(index) or 0) > term:
            index -= 1
        return index

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the whole log by a snapshot."""
        self.snapshot, self.entries, self.changes = snapshot, [], []
        self.durable = snapshot.index

    def compact(self, snapshot: Snapshot) -> None:
        """Replace the entries up to the snapshot's index by the snapshot."""
        del self.entries[: snapshot.index - self.base]
        self.changes = [(index, m) for index, m in self.changes if index > snapshot.index]
        self.snapshot = snapshot
