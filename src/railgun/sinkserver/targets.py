"""Targets: the files, tables and systems to which committed transactions go.

A `SinkServer` keeps the transactions of flows until they are committed, and then gives them to its target. To write a
target, subclass `Target`:

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

1. `apply` is atomic and durable: when it returns, the target has all records of the transaction for good; if it raises,
   or the process or the machine dies, the target has all of them or none.
2. `apply` may be called again for a transaction that was applied, also in another process, and then does nothing. So a
   target remembers which transactions it has applied, *in the same atomic step*. The server applies one transaction at
   a time and writes that down, so it asks again only for the last ones: a target remembers the last
   `REMEMBERED_TRANSACTIONS`. The server also asks with records that cannot be read: a target checks whether it knows
   the transaction before it reads the records, and does not catch the error of reading.
3. `check` checks whether `apply` could take these records, and changes nothing. It raises `BadRecordError` for a record
   that can never be taken. Records that pass are promised to the flow: `apply` may then fail for a while
   (`TargetError`), and is called again until it succeeds.
4. Other transactions have been promised before, and are not applied yet. A target whose records can exclude each other
   (keys of a table) checks against them, too: the server calls `check_beside`, which by default calls `check`.
5. `open` raises `TargetError` for trouble that may pass (a database that is not up yet), and is then called again; any
   other error means that people have to do something first.
6. All calls come one after the other, not always from one thread. Only `interrupt` comes from another thread at any
   time: the current call should then fail soon with a `TargetError`, and so should later ones until the next `open`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Protocol

from railgun.errors import RailgunError

REMEMBERED_TRANSACTIONS: Final = 1000
"""Applied transactions that a target remembers at least (rule 2)."""


class TargetError(RailgunError):
    """The target cannot apply a transaction now; a later call may succeed."""

    code: ClassVar[str] = "TARGET"


class BadRecordError(TargetError):
    """A record that the target can never take; `record` is its number in the transaction, `column` the wrong column."""

    code: ClassVar[str] = "BAD_RECORD"

    def __init__(self, text: str, record: int = -1, column: str | None = None) -> None:
        super().__init__(text)
        self.record, self.column = record, column


class Records(Protocol):
    """The records of a transaction, read from disk on each iteration."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield each record."""
        ...

    def batches(self) -> Iterable[list[bytes]]:
        """Yield lists of many records; never all records of a large transaction at once."""
        ...


class Target(ABC):
    """A place that committed transactions are written to."""

    sink: str = ""
    """The id of the target's sink, the same at each start. Other sinks may write to the same place."""

    def open(self) -> None:  # noqa: B027
        """Prepare the target when the server starts, and repair what a crash has left half done."""

    def check(self, records: Records) -> None:  # noqa: B027
        """Raise `BadRecordError` for records that `apply` could not take."""

    def check_beside(
        self, records: Records, first: Mapping[str, Records], others: Mapping[str, Records]
    ) -> None:
        """Check records together with the transactions that are promised and not applied yet.

        The records are applied after the transactions `first`, and before or after `others`, or without them. Some of
        these may have been applied by now.
        """
        self.check(records)

    @abstractmethod
    def apply(self, transaction: str, records: Records) -> None:
        """Write all records of a transaction in one atomic step, unless it was applied before (rules 1 and 2)."""

    def interrupt(self) -> None:  # noqa: B027
        """Make the current call fail soon; may be called from any thread."""

    def close(self) -> None:  # noqa: B027
        """Release the target when the server stops."""
