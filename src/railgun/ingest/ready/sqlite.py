"""Read a table of SQLite in the order of its ids, for the connector in `table.py`.

In SQLite, rows never become visible out of order: there is only one writer at a time. A writer has the database to
itself from its first change to its commit, and draws ids within that time; so the writer that draws the higher id
commits later. (A program that chooses ids itself must see to that.) An `INTEGER PRIMARY KEY` without `AUTOINCREMENT`
may reuse the id of the last row once that is deleted; such a row would not be sent.

The database is opened read-only, so a missing file is not created.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from railgun.ingest.ready.table import Database, GoneError, TableError, existing_column, whole_id

BUSY_TIMEOUT_S: Final = 5.0  # seconds that a query waits for a writer
_TRANSIENT: Final = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL", "SQLITE_INTERRUPT",
)  # fmt: skip


def quoted(name: str) -> str:
    """Return a name quoted for a query.

    >>> quoted('or"ders')
    '"or""ders"'
    """
    return '"' + name.replace('"', '""') + '"'


class Sqlite(Database):
    """A table of an SQLite file."""

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
        """Connect, and raise `TableError` if the table cannot be followed.

        The columns are checked here, because SQLite takes an unknown quoted name for text.
        """
        self.close()
        with self._translated_errors():
            uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            columns = self._all("SELECT name, pk FROM pragma_table_xinfo(?)", self.table)
            if not columns:
                raise TableError(f"{self.path} has no table {self.table!r}")
            existing = [name for name, _ in columns]
            existing_column("--id", self.id, existing, self.table)
            self.names = [
                existing_column("--columns", c, existing, self.table)
                for c in self.columns or existing
            ]
            more = [
                existing_column(option, column, existing, self.table)
                for option, column in (("--key", self.key), ("--time", self.time))
                if column is not None
            ]
            keys = [name for name, pk in columns if pk]
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
        """Close the connection, if it is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Cancel the running query."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.interrupt()

    def last(self) -> int | None:
        """Return the highest id of the table; None if it has no rows."""
        with self._translated_errors():
            [(last,)] = self._all(f"SELECT max({quoted(self.id)}) FROM {quoted(self.table)}")
        return whole_id(self.table, last)

    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """Return up to `most` rows after an id, in order."""
        column = quoted(self.id)
        with self._translated_errors():
            if after is None:
                return self._all(
                    f"{self._select} WHERE {column} NOT NULL ORDER BY {column} LIMIT ?", most
                )
            return self._all(
                f"{self._select} WHERE {column} > ? ORDER BY {column} LIMIT ?", after, most
            )

    def _all(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise GoneError(f"{self.path} is closed")
        return self._connection.execute(query, arguments).fetchall()

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = str(getattr(error, "sqlite_errorname", ""))
            kind = GoneError if name.startswith(_TRANSIENT) else TableError
            raise kind(f"{self.path}: {error}") from error
