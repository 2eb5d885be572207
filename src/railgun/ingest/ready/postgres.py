"""A table of PostgreSQL, as `table.py` follows it.

Rows do become visible out of order here: two transactions draw the ids 5 and 6, and the one with 6 commits first. To
send 6 then would be to lose 5. Comparing the transactions of rows with the oldest that runs (`xmin`) is not enough: ids
are not drawn in the order of transactions, and a transaction that has drawn an id may have no number yet. But whoever
inserts has a lock on the table, of the mode ROW EXCLUSIVE, before the id is drawn and up to the end of the
transaction. So:

1. Look which ids there are after the position, up to some id `high`.
2. List who holds that lock now (`pg_locks`). Whoever drew an id below `high` did so before `high` was committed: they
   are in the list, or have ended.
3. Wait until all in the list have ended. Nobody is kept from anything by that, and who comes later does not count.
4. Now all rows up to `high` that will ever be are visible: read them.

It follows that ids have to be drawn by the INSERT itself, from a sequence without a cache (serial, identity): one that
gives each session a stock of ids is refused. So is a server that follows another one: it does not know the locks. A
transaction that writes to the table and does not end holds up all rows after it. psycopg 3 is needed (the extra
`postgres`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from railgun.ingest.ready.table import Database, GoneError, TableError, named, whole

CONNECT: Final = {
    "connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "application_name": "railgun connector",
}  # fmt: skip
"""Unless the URL says otherwise: a server that is gone is noticed within half a minute."""
WAIT: Final = 1.0  # seconds in one call, for transactions to end
LOOK: Final = (0.002, 0.1)  # seconds between two looks whether they have

_KIND: Final = "SELECT relkind, pg_is_in_recovery() FROM pg_class WHERE oid = to_regclass(%s)"
_COLUMNS: Final = """
    SELECT attname FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_UNIQUE: Final = """
    SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attname = %s
"""
_OWN: Final = "SELECT pg_get_serial_sequence(%s, %s)"
_SEQUENCES: Final = """
    SELECT s.seqcache, s.seqrelid::regclass::text FROM pg_sequence s
    WHERE s.seqrelid = pg_get_serial_sequence(%s, %s)::regclass OR s.seqrelid IN (
        SELECT d.refobjid FROM pg_attrdef a
        JOIN pg_attribute c ON c.attrelid = a.adrelid AND c.attnum = a.adnum
        JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid
        WHERE d.refclassid = 'pg_class'::regclass AND a.adrelid = to_regclass(%s) AND c.attname = %s
    )
"""
"""Those that a column's ids are drawn from, by its default: its own, or one that it shares."""
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
"""Also of parts of a table, and of what it is a part of: an id may be drawn before the part is known, and locked."""


class Postgres(Database):
    """A table of a server."""

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
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # which tells the password
            raise _no_url() from None
        host, port = str(given.get("host", "localhost")), str(given.get("port", 5432))
        if "@" in host or not port.replace(",", "").isdecimal():  # a part of the password
            raise _no_url()
        self.settings: dict[str, Any] = {**CONNECT, **given}
        self.where = f"{host}:{port}"
        self.table, self.id, self.columns, self.key, self.time = table, id, columns, key, time
        self._name = sql.Identifier(*table.split(".", 1))
        self._connection: Any = None
        self._high: int | None = (
            None  # up to where rows are looked for, and whose ends are waited for
        )
        self._writers: dict[str, int] = {}

    def open(self) -> None:
        """Connect, and look whether the table can be followed."""
        self.close()
        self._high, self._writers, self.waits = None, {}, ""
        with self._told():
            self._connection = self._psycopg.connect(autocommit=True, **self.settings)
            self._regclass = self._name.as_string(self._connection)
            found = self._all(_KIND, self._regclass)
            if not found:
                raise TableError(f"{self.where} has no table {self.table!r}")
            [(kind, follows)] = found
            if kind not in ("r", "p", b"r", b"p"):
                raise TableError(
                    f"{self.table} is no table: in which order its rows appear cannot be known"
                )
            if follows:
                raise TableError(
                    f"{self.where} follows another server, and does not know who writes there: rows may appear out of "
                    "order. Give the other one"
                )
            known = [name for (name,) in self._all(_COLUMNS, self._regclass)]
            named("--id", self.id, known, self.table)
            self.names = [named("--columns", c, known, self.table) for c in self.columns or known]
            more = [
                named(option, column, known, self.table)
                for option, column in (("--key", self.key), ("--time", self.time))
                if column is not None
            ]
            self._check_id()
        sql = self._sql
        self._select = sql.SQL("SELECT {} FROM {} ").format(
            sql.SQL(", ").join(map(sql.Identifier, [self.id, *self.names, *more])), self._name
        )

    def _check_id(self) -> None:
        given = (self._regclass, self.id)
        if self._all(_OWN, *given) == [(None,)] and not self._all(_UNIQUE, *given):
            raise TableError(
                f"{self.table}.{self.id} is not unique: of rows with the same id only one would be sent. Make it the "
                "primary key, or give it a unique index"
            )
        for cache, name in self._all(_SEQUENCES, *given, *given):
            if cache > 1:
                raise TableError(
                    f"{name} gives each session {cache} ids at a time: ids do not tell the order of rows then. "
                    f"ALTER SEQUENCE {name} CACHE 1"
                )

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """End the query that runs."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                connection.cancel()

    def last(self) -> int | None:
        """The highest id there is."""
        sql = self._sql
        with self._told():
            query = sql.SQL("SELECT max({}) FROM {}").format(sql.Identifier(self.id), self._name)
            [(last,)] = self._all(query)
        return whole(self.table, last)

    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """Rows after an id, as far as all are visible that will ever be."""
        sql, column = self._sql, self._sql.Identifier(self.id)
        beyond = sql.SQL("true") if after is None else sql.SQL("{} > {}").format(column, after)
        while True:
            with self._told():
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
                some = sql.SQL("WHERE {b} AND {c} <= {h} ORDER BY {c} LIMIT {n}")
                query = self._select + some.format(c=column, b=beyond, h=self._high, n=most)
                found = self._all(query)
            if len(found) < most:
                self._high = None
            if found:
                return found  # else they were deleted meanwhile: there may be others

    def _have_ended(self) -> bool:
        """Wait a while until those who wrote have ended; whether they have."""
        until, pause = time.monotonic() + WAIT, LOOK[0]
        while self._writers:
            now = dict(self._all(_WRITERS, self._regclass))
            self._writers = {who: now[who] for who in self._writers if who in now}
            if not self._writers:
                break
            if time.monotonic() > until:
                pids = ", ".join(str(pid or "prepared") for pid in self._writers.values())
                self.waits = f"waits for transactions that write to {self.table} (processes {pids})"
                return False
            time.sleep(pause)
            pause = min(2 * pause, LOOK[1])
        self.waits = ""
        return True

    def _all(self, query: Any, *given: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise GoneError(f"the connection to {self.where} is closed")
        found: list[tuple[Any, ...]] = self._connection.execute(query, given or None).fetchall()
        return found

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong, as what passes or does not. Never with the password."""
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
