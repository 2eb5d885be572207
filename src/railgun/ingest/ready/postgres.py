"""Read a table of PostgreSQL in the order of its ids, for the connector in `table.py`.

In PostgreSQL, rows can become visible out of order: two transactions draw the ids 5 and 6, and the one with 6 commits
first. A connector that sends 6 then loses 5. Comparing the transactions of rows with the oldest running one (`xmin`) is
not enough: ids are not drawn in the order of transactions, and a transaction that has drawn an id may have no number
yet. But a transaction that inserts holds a lock on the table, of the mode ROW EXCLUSIVE, from before it draws the id
until it ends. So:

1. Find the ids after the position, up to some id `high`.
2. List the transactions that hold that lock now (`pg_locks`). A transaction that drew an id below `high` did so before
   `high` was committed: it is in the list, or has ended.
3. Wait until all transactions in the list have ended. This blocks none of them, and later ones do not matter.
4. Now all rows up to `high` that can ever exist are visible: read them.

Therefore ids must be drawn by the INSERT itself, from a sequence without a cache (serial, identity): a sequence that
gives each session a stock of ids is refused. So is a replica: it does not know the locks. A transaction that writes to
the table and does not end delays all rows after it. Requires psycopg 3 (the extra `postgres`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from railgun.ingest.ready.table import Database, GoneError, TableError, existing_column, whole_id

CONNECT_SETTINGS: Final = {
    "connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "application_name": "railgun connector",
}  # fmt: skip
"""Defaults that the URL may override: with these a lost server is noticed within half a minute."""
WRITERS_WAIT_S: Final = 1.0  # for transactions to end, in one call
WRITERS_POLL_S: Final = (0.002, 0.1)  # between two checks whether they have: at first, and at most

_KIND: Final = "SELECT relkind, pg_is_in_recovery() FROM pg_class WHERE oid = to_regclass(%s)"
_COLUMNS: Final = """
    SELECT attname FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_UNIQUE: Final = """
    SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attname = %s
"""
_OWN_SEQUENCE: Final = "SELECT pg_get_serial_sequence(%s, %s)"
_SEQUENCES: Final = """
    SELECT s.seqcache, s.seqrelid::regclass::text FROM pg_sequence s
    WHERE s.seqrelid = pg_get_serial_sequence(%s, %s)::regclass OR s.seqrelid IN (
        SELECT d.refobjid FROM pg_attrdef a
        JOIN pg_attribute c ON c.attrelid = a.adrelid AND c.attnum = a.adnum
        JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid
        WHERE d.refclassid = 'pg_class'::regclass AND a.adrelid = to_regclass(%s) AND c.attname = %s
    )
"""
"""The sequences from which a column's default draws ids: its own, or a shared one."""
_WRITERS: Final = """
    WITH RECURSIVE family(oid) AS (
        SELECT to_regclass(%s)::oid
        UNION SELECT CASE WHEN i.inhparent = f.oid THEN i.inhrelid ELSE i.inhparent END
        FROM pg_inherits i JOIN family f ON f.oid IN (i.inhparent, i.inhrelid)
    )
    SELECT DISTINCT l.virtualtransaction, l.pid FROM pg_locks l JOIN family f ON l.relation = f.oid
    WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""The transactions that write to a table, to its partitions, or to a table of which it is a partition.

An id may be drawn before the partition is known and locked.
"""


class Postgres(Database):
    """A table of a PostgreSQL server."""

    def __init__(
        self,
        url: str,
        table: str,
        id: str,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        time: str | None = None,
    ) -> None:
        try:
            import psycopg
            from psycopg import sql
        except ImportError as error:
            raise TableError(
                f"PostgreSQL needs psycopg, which is not installed ({error}): pip install 'psycopg[binary]>=3.2'"
            ) from error
        self._psycopg, self._sql = psycopg, sql
        try:
            settings = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # its text may contain the password
            raise _no_url() from None
        host, port = str(settings.get("host", "localhost")), str(settings.get("port", 5432))
        if "@" in host or not port.replace(",", "").isdecimal():  # part of the password
            raise _no_url()
        self.settings: dict[str, Any] = {**CONNECT_SETTINGS, **settings}
        self.where = f"{host}:{port}"
        self.table, self.id, self.columns, self.key, self.time = table, id, columns, key, time
        self._name = sql.Identifier(*table.split(".", 1))
        self._connection: Any = None
        self._high: int | None = None  # rows up to this id are read once `_writers` have ended
        self._writers: dict[str, int] = {}  # process ids, by transaction

    def open(self) -> None:
        """Connect, and raise `TableError` if the table cannot be followed."""
        self.close()
        self._high, self._writers, self.waits = None, {}, ""
        with self._translated_errors():
            self._connection = self._psycopg.connect(autocommit=True, **self.settings)
            self._regclass = self._name.as_string(self._connection)
            kinds = self._all(_KIND, self._regclass)
            if not kinds:
                raise TableError(f"{self.where} has no table {self.table!r}")
            [(kind, follows)] = kinds
            if kind not in ("r", "p", b"r", b"p"):
                raise TableError(
                    f"{self.table} is no table: the order in which its rows appear is unknown"
                )
            if follows:
                raise TableError(
                    f"{self.where} is a replica, and does not see the transactions of its primary: rows may appear "
                    "out of order. Give the primary"
                )
            existing = [name for (name,) in self._all(_COLUMNS, self._regclass)]
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
            self._check_id()
        sql = self._sql
        self._select = sql.SQL("SELECT {} FROM {} ").format(
            sql.SQL(", ").join(map(sql.Identifier, [self.id, *self.names, *more])), self._name
        )

    def _check_id(self) -> None:
        table_column = (self._regclass, self.id)
        if self._all(_OWN_SEQUENCE, *table_column) == [(None,)] and not self._all(
            _UNIQUE, *table_column
        ):
            raise TableError(
                f"{self.table}.{self.id} is not unique: of rows with the same id only one would be sent. Make it the "
                "primary key, or give it a unique index"
            )
        for cache, name in self._all(_SEQUENCES, *table_column, *table_column):
            if cache > 1:
                raise TableError(
                    f"{name} gives each session {cache} ids at a time: then rows do not appear in the order of ids. "
                    f"ALTER SEQUENCE {name} CACHE 1"
                )

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Cancel the running query."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                connection.cancel()

    def last(self) -> int | None:
        """Return the highest id of the table; None if it has no rows."""
        sql = self._sql
        with self._translated_errors():
            query = sql.SQL("SELECT max({}) FROM {}").format(sql.Identifier(self.id), self._name)
            [(last,)] = self._all(query)
        return whole_id(self.table, last)

    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """Return up to `most` rows after an id, as far as no row among them can become visible later.

        Return an empty list if there are none, or while transactions that write have not ended (`waits`).
        """
        sql, column = self._sql, self._sql.Identifier(self.id)
        beyond = sql.SQL("true") if after is None else sql.SQL("{} > {}").format(column, after)
        while True:
            with self._translated_errors():
                if self._high is None or (after is not None and self._high <= after):
                    ids = sql.SQL(
                        "SELECT max(i) FROM (SELECT {c} AS i FROM {t} WHERE {b} ORDER BY {c} LIMIT {n}) AS ids"
                    )
                    query = ids.format(c=column, t=self._name, b=beyond, n=most)
                    [(self._high,)] = self._all(query)
                    if self._high is None:
                        return []
                    self._writers = dict(self._all(_WRITERS, self._regclass))
                if not self._have_ended():
                    return []
                clauses = sql.SQL("WHERE {b} AND {c} <= {h} ORDER BY {c} LIMIT {n}")
                query = self._select + clauses.format(c=column, b=beyond, h=self._high, n=most)
                rows = self._all(query)
            if len(rows) < most:
                self._high = None
            if rows:
                return rows
            # The rows up to `high` were deleted meanwhile: there may be others.

    def _have_ended(self) -> bool:
        """Wait up to `WRITERS_WAIT_S` until the listed writers have ended; return whether they have."""
        until, pause = time.monotonic() + WRITERS_WAIT_S, WRITERS_POLL_S[0]
        while self._writers:
            running = dict(self._all(_WRITERS, self._regclass))
            self._writers = {who: running[who] for who in self._writers if who in running}
            if not self._writers:
                break
            if time.monotonic() > until:
                pids = ", ".join(str(pid or "prepared") for pid in self._writers.values())
                self.waits = f"waits for transactions that write to {self.table} (processes {pids})"
                return False
            time.sleep(pause)
            pause = min(2 * pause, WRITERS_POLL_S[1])
        self.waits = ""
        return True

    def _all(self, query: Any, *arguments: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise GoneError(f"the connection to {self.where} is closed")
        rows: list[tuple[Any, ...]] = self._connection.execute(query, arguments or None).fetchall()
        return rows

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate errors of psycopg to `GoneError` (transient) or `TableError`, never with the password."""
        try:
            yield
        except (self._psycopg.OperationalError, self._psycopg.InterfaceError) as error:
            raise GoneError(f"{self.where}: {_line(error)}") from error
        except self._psycopg.Error as error:
            raise TableError(f"{self.where}: {_line(error)}") from error


def _no_url() -> TableError:
    return TableError(
        "this is no URL of a database: postgresql://user@host:5432/database, and in a password %40 for @, %2F for /, "
        "%3A for :, %25 for %. Better give no password here, but PGPASSWORD"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
