"""A table of SQLite, as `table.py` follows it.

Rows never become visible out of order: there is one writer at a time. It has the database to itself from its first
change to its commit, and ids are drawn within that; so who draws the higher id commits later. (Ids that a program
chooses itself are its own matter.) An `INTEGER PRIMARY KEY` without `AUTOINCREMENT` may use the id of the last row
again once that is deleted; such a row would not be sent.

The database is opened to be read only, so what is not there is not made.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from railgun.ingest.ready.table import Database, GoneError, TableError, named, whole

BUSY: Final = 5.0  # seconds that a query waits for a writer
_PASSES: Final = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL", "SQLITE_INTERRUPT",
)  # fmt: skip


def quoted(name: str) -> str:
    """A name in a query.

    >>> quoted('or"ders')
    '"or""ders"'
    """
    return '"' + name.replace('"', '""') + '"'


class Sqlite(Database):
    """A table of a file."""

    def __init__(
        self,
        path: str,
        table: str,
        id: str,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        time: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.table, self.id, self.columns, self.key, self.time = table, id, columns, key, time
        self._connection: sqlite3.Connection | None = None
        self._select = ""

    def open(self) -> None:
        """Connect, and look at the columns: SQLite takes a quoted name that it does not know for text."""
        self.close()
        with self._told():
            uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False
            )
            found = self._all("SELECT name, pk FROM pragma_table_xinfo(?)", self.table)
            if not found:
                raise TableError(f"{self.path} has no table {self.table!r}")
            known = [name for name, _ in found]
            named("--id", self.id, known, self.table)
            self.names = [named("--columns", c, known, self.table) for c in self.columns or known]
            more = [
                named(option, column, known, self.table)
                for option, column in (("--key", self.key), ("--time", self.time))
                if column is not None
            ]
            keys = [name for name, pk in found if pk]
            if keys != [self.id] and not self._is_unique():
                raise TableError(
                    f"{self.table}.{self.id} is not unique: of rows with the same id one would be sent. Make it the "
                    "primary key, or give it a unique index"
                )
        wanted = ", ".join(map(quoted, [self.id, *self.names, *more]))
        self._select = f"SELECT {wanted} FROM {quoted(self.table)}"

    def _is_unique(self) -> bool:
        indexes = self._all(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', self.table
        )
        return any(
            self._all("SELECT name FROM pragma_index_info(?)", name) == [(self.id,)]
            for (name,) in indexes
        )

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """End the query that runs."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.interrupt()

    def last(self) -> int | None:
        """The highest id there is."""
        with self._told():
            [(last,)] = self._all(f"SELECT max({quoted(self.id)}) FROM {quoted(self.table)}")
        return whole(self.table, last)

    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """Rows after an id."""
        column = quoted(self.id)
        with self._told():
            if after is None:
                return self._all(
                    f"{self._select} WHERE {column} NOT NULL ORDER BY {column} LIMIT ?", most
                )
            return self._all(
                f"{self._select} WHERE {column} > ? ORDER BY {column} LIMIT ?", after, most
            )

    def _all(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise GoneError(f"{self.path} is closed")
        return self._connection.execute(query, given).fetchall()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = str(getattr(error, "sqlite_errorname", ""))
            kind = GoneError if name.startswith(_PASSES) else TableError
            raise kind(f"{self.path}: {error}") from error
