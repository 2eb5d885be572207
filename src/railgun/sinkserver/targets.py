"""Targets: where committed transactions go.

A `SinkServer` keeps what flows send until it is committed; a target is what it then gives it to. To write one, subclass
`Target`:

>>> class Shelf(Target):
...     def __init__(self):
...         self.done, self.items = set(), []
...     def apply(self, transaction, records):
...         if transaction not in self.done:
...             self.done.add(transaction)
...             self.items += records
>>> shelf = Shelf()
>>> shelf.apply("a", [b"1", b"2"]); shelf.apply("a", [b"1", b"2"]); shelf.items
[b'1', b'2']

Rules:

1. `apply` is atomic, and for good when it returns: all records of the transaction are there, or (it raised, the process
   or the machine died) none.
2. `apply` may come again for a transaction that was applied, also in another process, and then does nothing. So
   a target remembers which it has applied, *in the same atomic step*. The server applies one at a time and writes that
   down, so it asks again for the last ones only: to remember the last `REMEMBERED` is enough. It also asks by records
   that cannot be read: a target looks whether it knows the transaction before it reads, and lets their error pass.
3. `check` says whether `apply` could take these records, and changes nothing. It raises `BadRecordError` for one that
   can never be taken. What it let pass is promised to the flow: `apply` may then fail for a while (`TargetError`), and
   is called again until it succeeds.
4. Others have been promised before, and are not applied yet. A target whose records can exclude each other (keys of
   a table) looks at them too: the server calls `check_beside`, which by default is `check`.
5. `open` raises `TargetError` if it may pass (a database that is not up yet), so that it can be called again; any other
   error means that somebody has to do something first.
6. All calls come from one thread, one after the other, but not always the same thread. Only `interrupt` comes from
   another, at any time: what is being done should fail soon, by a `TargetError`, until the next `open`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Protocol

from railgun.errors import RailgunError

REMEMBERED: Final = 1000


class TargetError(RailgunError):
    """The target cannot take something now; it may pass."""

    code: ClassVar[str] = "TARGET"


class BadRecordError(TargetError):
    """A record that the target can never take; `record` is its number in the transaction, `column` is what is wrong."""

    code: ClassVar[str] = "BAD_RECORD"

    def __init__(self, text: str, record: int = -1, column: str | None = None) -> None:
        super().__init__(text)
        self.record, self.column = record, column


class Records(Protocol):
    """The records of a transaction, read from disk each time they are gone through."""

    def __iter__(self) -> Iterator[bytes]:
        """One by one."""
        ...

    def batches(self) -> Iterable[list[bytes]]:
        """Many at a time; never all of a large transaction."""
        ...


class Target(ABC):
    """Where committed transactions go."""

    sink: str = ""
    """An id of the sink it belongs to, the same at each start. Others may fill the same place."""

    def open(self) -> None:  # noqa: B027
        """The server starts: whatever a crash has left half done is put in order."""

    def check(self, records: Records) -> None:  # noqa: B027
        """Raise for records that `apply` could not take."""

    def check_beside(
        self, records: Records, first: Mapping[str, Records], others: Mapping[str, Records]
    ) -> None:
        """`check`, of records that are applied after the transactions `first`, and before or after `others`, or without
        them. One of these may have been applied by now."""
        self.check(records)

    @abstractmethod
    def apply(self, transaction: str, records: Records) -> None:
        """Take all records of a transaction, unless it was applied before."""

    def interrupt(self) -> None:  # noqa: B027
        """Let what is being done fail soon; from any thread."""

    def close(self) -> None:  # noqa: B027
        """The server ends."""
