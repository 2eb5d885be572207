"""Databases of a `TableTarget`: the interface, and its implementations for SQLite and PostgreSQL.

Rules:

1. A transaction is committed or rolled back as a whole; any error before the end rolls it back.
2. A row that the database does not take raises `RefusedError`, with the row and, if known, the column; all other errors
   are `TargetError`, and the next transaction begins with a new connection.
3. Names are quoted, values are never in the text of a statement.
4. Committed data survives a loss of power, whatever the database does by default. SQLite: `synchronous=EXTRA`, since
   its commit deletes a file, which FULL does not sync. PostgreSQL: `synchronous_commit` is not off.
5. A lock is waited for at most `LOCK_TIMEOUT_S` seconds; then the error is one that may pass. `interrupt` ends a wait,
   from any thread.
6. A connection that was lost while it was idle is opened again, without an error; so is a connection to a file of
   SQLite that was removed or replaced.
7. A value is stored as it is, or refused. Where a database would store a different value (a number for text that looks
   like one, NULL for NaN, a real that cannot hold the integer), the database is not asked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal
from urllib.parse import unquote

from railgun.ingest.errors import SinkError
from railgun.sinkserver.targets import TargetError

if TYPE_CHECKING:
    import psycopg

APPLIED: Final = "railgun_applied"
LOCK_TIMEOUT_S: Final = 10.0
Kind = Literal["whole", "real", "exact", "boolean", "text", "json", "list", "single"]
_MARK_SQL: Final = (
    f"INSERT INTO {APPLIED} (target, txn) SELECT %s, %s WHERE NOT EXISTS "
    f"(SELECT 1 FROM {APPLIED} WHERE target = %s AND txn = %s) ON CONFLICT DO NOTHING"
)
_FORGET_SQL: Final = (
    f"DELETE FROM {APPLIED} WHERE target = %s AND number < (SELECT min(number) FROM "
    f"(SELECT number FROM {APPLIED} WHERE target = %s ORDER BY number DESC LIMIT %s) AS last)"
)


def quoted(name: str) -> str:
    """Quote a name for SQL.

    >>> print(quoted('na"me'))
    "na""me"
    """
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: str) -> str:
    """Quote the name of a table for SQL; it may have a schema before it.

    >>> print(quoted_table("public.totals"))
    "public"."totals"
    """
    return ".".join(map(quoted, name.split(".")))


class RefusedError(Exception):
    """The database refuses a row."""

    def __init__(self, text: str, row: int | None, column: str | None) -> None:
        super().__init__(text)
        self.row, self.column = row, column


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its type, as the database calls it, and the kind of values it takes."""

    type: str
    kind: Kind
    numeric: bool = False
    """Whether the database turns text that looks like a number into a number."""


class Transaction(ABC):
    """The statements of one transaction of a database."""

    @abstractmethod
    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Execute a statement; return how many rows it changed."""

    @abstractmethod
    def columns(self, table: str) -> dict[str, Column] | None:
        """Return the columns of a table; None if the table does not exist."""

    @abstractmethod
    def depends_on_other_rows(self, table: str) -> bool:
        """Return whether other rows of the table may decide if a row is taken: keys, references to itself, triggers."""

    @abstractmethod
    def insert_all(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Execute one statement for many rows."""

    @abstractmethod
    def refusal(self, error: Exception) -> tuple[str, str | None] | None:
        """Return why the database refuses a row, and the column if known; None for any other error."""

    placeholder: str

    def name(self, quoted: str) -> str:
        """Escape a quoted name for a statement that has placeholders."""
        return quoted

    def check_deferred(self) -> None:  # noqa: B027
        """Check now the constraints that are deferred to the end; raise `RefusedError`, without a row."""

    def check_immediately(self) -> None:  # noqa: B027
        """Check all constraints immediately from now on, and defer none to the end."""

    def insert(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Insert rows, in this order; raise `RefusedError` for the first that is refused."""
        for shape, batch, first in _runs_of_same_columns(rows):
            marks = ", ".join([self.placeholder] * len(shape))
            sql = f"INSERT INTO {self.name(quoted_table(table))} ({self.name(', '.join(map(quoted, shape)))}) "
            sql += f"VALUES ({marks})"
            self.run("SAVEPOINT railgun_rows")
            try:
                self.insert_all(sql, batch)
            except Exception as error:
                if self.refusal(error) is None:
                    raise
                self.run("ROLLBACK TO SAVEPOINT railgun_rows")
                self._raise_for_row(sql, batch, first)
                raise
            self.run("RELEASE SAVEPOINT railgun_rows")

    def _raise_for_row(self, sql: str, rows: list[tuple[Any, ...]], first: int) -> None:
        """Insert rows one by one, to raise `RefusedError` for the one that is refused."""
        for n, row in enumerate(rows):
            try:
                self.insert_all(sql, [row])
            except Exception as error:
                refusal = self.refusal(error)
                if refusal is None:
                    raise
                raise RefusedError(refusal[0], first + n, refusal[1]) from error


def _runs_of_same_columns(
    rows: list[dict[str, Any]],
) -> Iterator[tuple[tuple[str, ...], list[tuple[Any, ...]], int]]:
    """Yield runs of rows with the same columns: the columns, the values, and the number of the first row."""
    at = 0
    while at < len(rows):
        shape = tuple(rows[at])
        end = at
        while end < len(rows) and tuple(rows[end]) == shape:
            end += 1
        yield shape, [tuple(row.values()) for row in rows[at:end]], at
        at = end


class Database(ABC):
    """A database that has tables."""

    types: ClassVar[Mapping[str, str]]
    make_applied: ClassVar[str]
    mark: ClassVar[str]
    forget: ClassVar[str]
    max_name_bytes: ClassVar[int] = 1 << 30
    """Maximum length of a column's name; the database would cut off the rest of a longer one."""

    @abstractmethod
    def transaction(self, keep: bool = True) -> contextlib.AbstractContextManager[Transaction]:
        """Open a transaction, which is committed at the end, or rolled back if not `keep`."""

    @abstractmethod
    def adapt(self, column: Column, value: Any) -> Any:
        """Convert a value for a column; raise `ValueError` if it does not fit."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the current statement fail soon; may be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the next transaction opens a new one."""


def open_database(url: str) -> Database:
    """Return the database at a URL, without connecting; raise `SinkError` for a URL that is none."""
    if url.startswith("sqlite:///"):
        path = unquote(url.removeprefix("sqlite:///"))
        if path in ("", ":memory:"):
            raise SinkError(
                "BAD_URL",
                f"{url} is no file, so all would be gone when the sink ends: sqlite:///file.db",
            )
        return _SQLite(path)
    if url.startswith(("postgresql://", "postgres://")):
        return _PostgreSQL(url)
    shown = url.partition("://")[0][:40]
    raise SinkError(
        "BAD_URL",
        f"{shown!r} is no URL of a database: sqlite:///file.db, or postgresql://user@host/database",
    )


_EXPECTED: Final[Mapping[Kind, tuple[tuple[type, ...], str]]] = {
    "whole": ((int,), "a whole number of 64 bits"),
    "real": ((int, float), "a number"),
    "exact": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "text": ((str,), "text"),
    "single": ((int, float, bool, str), "a single value"),
}


def _fits_64(value: Any) -> bool:
    return type(value) is not int or -(2**63) <= value < 2**63


def _check(column: Column, value: Any) -> None:
    """Raise `ValueError` unless a column can store a JSON value as it is."""
    if column.kind == "json":
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return
    if column.kind == "list":
        json.dumps(value, ensure_ascii=False).encode()
        return
    types, expected = _EXPECTED[column.kind]
    fits = type(value) in types
    if column.kind != "exact" and not _fits_64(value):
        fits, expected = False, "a number of 64 bits"
    elif column.kind == "real" and type(value) is int and int(float(value)) != value:
        fits, expected = False, "a number that a real can hold exactly"
    if not fits:
        shown = json.dumps(value)[:100]
        raise ValueError(f"{shown} does not fit {column.type}: {expected} is expected")
    if isinstance(value, str):
        value.encode()  # raises for half a pair of surrogates


# ---------------------------------------------------------------- SQLite

_SQLITE_KINDS: Final[Sequence[tuple[re.Pattern[str], Kind]]] = (
    (re.compile(r"json"), "json"),
    (re.compile(r"\b(big|small|tiny|medium)?(int(eger|\d)?|serial)\b"), "whole"),
    (re.compile(r"real|float|double"), "real"),
    (re.compile(r"numeric|decimal"), "exact"),
    (re.compile(r"bool"), "boolean"),
    (re.compile(r"char|clob|text"), "text"),
    (re.compile(r""), "single"),
)
_KEPT_AS_TEXT: Final = re.compile(
    r"(?!.*int)(|.*(char|clob|text|blob).*)"
)  # SQLite's rules of affinity
_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE | re.ASCII)


def _sqlite_column(declared: str) -> Column:
    """Return the column for a declared type, which in SQLite may be any words.

    >>> _sqlite_column("STRING")
    Column(type='STRING', kind='single', numeric=True)
    """
    lower = declared.lower()
    kind = next(kind for form, kind in _SQLITE_KINDS if form.search(lower))
    return Column(declared or "any", kind, numeric=_KEPT_AS_TEXT.fullmatch(lower) is None)


class _SQLite(Database):
    types: ClassVar = {
        "integer": "INTEGER",
        "real": "REAL",
        "boolean": "BOOLEAN",
        "text": "TEXT",
        "json": "JSON",
    }
    make_applied = (
        f"CREATE TABLE IF NOT EXISTS {APPLIED} (number INTEGER PRIMARY KEY AUTOINCREMENT, target TEXT NOT NULL, "
        "txn TEXT NOT NULL, UNIQUE (target, txn))"
    )
    mark = _MARK_SQL.replace("%s", "?")
    forget = _FORGET_SQL.replace("%s", "?")

    def __init__(self, path: str) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"sqlite:///{self.path}"

    @contextlib.contextmanager
    def transaction(self, keep: bool = True) -> Iterator[Transaction]:
        try:
            db = self._begin_transaction()
            try:
                yield _SQLiteTransaction(db)
                db.execute("COMMIT" if keep else "ROLLBACK")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self.close()
            raise TargetError(f"{self}: {error}") from error

    def _begin_transaction(self) -> sqlite3.Connection:
        """Begin a transaction in the file at the path: writes to a file that was removed would be lost."""
        while True:
            if self._db is None:
                self._file = None
                self._db = sqlite3.connect(
                    self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
                )
                self._db.execute("PRAGMA synchronous=EXTRA")
            self._db.execute("BEGIN IMMEDIATE")
            current = None
            with contextlib.suppress(OSError):
                status = os.stat(self.path)
                current = status.st_dev, status.st_ino
            if self._file in (None, current):
                self._file = current
                return self._db
            self.close()

    def adapt(self, column: Column, value: Any) -> Any:
        if value is None:
            return None
        _check(column, value)
        if not _fits_64(value):
            raise ValueError(f"{value} does not fit {column.type}: a number of 64 bits is expected")
        if column.kind == "json" and type(value) not in (int, float):
            return json.dumps(value, ensure_ascii=False)
        if type(value) is float and math.isnan(value):
            raise ValueError(f"NaN does not fit {column.type}: SQLite would store NULL")
        if column.numeric and isinstance(value, str) and _NUMBER.fullmatch(value):
            raise ValueError(
                f"{json.dumps(value)[:100]} does not fit {column.type}: SQLite would store a number; "
                "make it a column of type TEXT"
            )
        return value

    def interrupt(self) -> None:
        if (db := self._db) is not None:
            with contextlib.suppress(sqlite3.Error):
                db.interrupt()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class _SQLiteTransaction(Transaction):
    placeholder = "?"

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(sql, values).rowcount

    def insert_all(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        self._db.executemany(sql, rows)

    def columns(self, table: str) -> dict[str, Column] | None:
        return {row[1]: _sqlite_column(row[2]) for row in self._pragma("table_info", table)} or None

    def depends_on_other_rows(self, table: str) -> bool:
        schema, name = _schema(table)
        triggers = self._db.execute(
            f"SELECT 1 FROM {schema}sqlite_master WHERE type = 'trigger' AND lower(tbl_name) = lower(?)",
            (name,),
        ).fetchall()
        unique = any(row[2] for row in self._pragma("index_list", table))
        return unique or bool(triggers) or any(row[5] for row in self._pragma("table_info", table))

    def _pragma(self, pragma: str, table: str) -> list[Any]:
        schema, name = _schema(table)
        return self._db.execute(f"PRAGMA {schema}{pragma}({quoted(name)})").fetchall()

    def refusal(self, error: Exception) -> tuple[str, str | None] | None:
        if not isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
            return None
        named = re.fullmatch(r"(?:NOT NULL|UNIQUE) constraint failed: \S+\.(\w+)", str(error))
        return str(error), named[1] if named else None


def _schema(table: str) -> tuple[str, str]:
    """Split the name of a table into the quoted schema with its dot, or nothing, and the name."""
    schema, _, name = table.rpartition(".")
    return f"{quoted(schema)}." if schema else "", name


# ---------------------------------------------------------------- PostgreSQL

_POSTGRES_KINDS: Final[Mapping[str, Kind]] = {
    "int2": "whole", "int4": "whole", "int8": "whole", "float4": "real", "float8": "real", "numeric": "exact",
    "bool": "boolean", "json": "json", "jsonb": "json",
}  # fmt: skip
_CATEGORIES: Final[Mapping[str, Kind]] = {"A": "list", "S": "text"}
_COLUMNS: Final = """
WITH RECURSIVE found AS (
    SELECT attnum, attname, format_type(atttypid, atttypmod) AS shown, atttypid AS type FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
  UNION ALL
    SELECT attnum, attname, shown, typbasetype FROM found JOIN pg_type ON oid = type WHERE typtype = 'd'
)
SELECT attname, shown, CASE WHEN typnamespace = 'pg_catalog'::regnamespace THEN typname END, typcategory::text
FROM found JOIN pg_type ON oid = type WHERE typtype <> 'd' ORDER BY attnum
"""
_DEPENDS_ON_OTHER_ROWS: Final = """
SELECT relkind <> 'r' OR EXISTS (SELECT FROM pg_index WHERE indrelid = t.oid AND (indisunique OR indisexclusion))
    OR EXISTS (SELECT FROM pg_constraint WHERE conrelid = t.oid AND contype = 'f' AND confrelid = conrelid)
    OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = t.oid AND NOT tgisinternal)
FROM pg_class AS t WHERE t.oid = to_regclass(%s)
"""
_BEGIN: Final = """
SELECT set_config('lock_timeout', %s, true),
    set_config('synchronous_commit', CASE how WHEN 'off' THEN 'on' ELSE how END, true)
FROM current_setting('synchronous_commit') AS how
"""
# Classes of errors about a row: data, constraints, types, check options of views, limits, triggers.
_ROW_ERROR_CLASSES: Final = ("22", "23", "42", "44", "54", "P0")
_TABLE_ERRORS: Final = ("42501", "42P01")  # no permission to write the table; no such table


class _PostgreSQL(Database):
    types: ClassVar = {
        "integer": "bigint", "real": "double precision", "boolean": "boolean", "text": "text", "json": "jsonb",
    }  # fmt: skip
    make_applied = (
        f"CREATE TABLE IF NOT EXISTS {APPLIED} (number bigserial PRIMARY KEY, target text NOT NULL, txn text NOT NULL, "
        "UNIQUE (target, txn))"
    )
    mark = _MARK_SQL
    forget = _FORGET_SQL
    max_name_bytes = 63

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise SinkError(
                "NO_DRIVER", "tables of PostgreSQL need psycopg: pip install 'railgun[postgres]'"
            ) from error
        self.url = url
        self._error = psycopg.Error
        self._lost = psycopg.OperationalError
        self._connect = psycopg.connect
        self._db: psycopg.Connection[Any] | None = None

    def __str__(self) -> str:
        return re.sub(r"//[^@/]*@", "//", self.url.partition("?")[0])

    @contextlib.contextmanager
    def transaction(self, keep: bool = True) -> Iterator[Transaction]:
        try:
            db = self._begin_transaction()
            try:
                yield _PostgreSQLTransaction(db)
                if keep:
                    db.commit()
                else:
                    db.rollback()
            except BaseException:
                with contextlib.suppress(self._error):
                    db.rollback()
                raise
        except self._error as error:
            self.close()
            raise TargetError(f"{self}: {str(error).strip()}") from error

    def _begin_transaction(self) -> psycopg.Connection[Any]:
        """Begin a transaction. If an idle connection was lost, open a new one: nothing is lost with it."""
        while True:
            reused = self._db is not None
            try:
                if self._db is None:
                    self._db = self._connect(
                        self.url,
                        connect_timeout=10,
                        keepalives_idle=30,
                        keepalives_interval=10,
                        keepalives_count=3,
                        tcp_user_timeout=60_000,
                    )
                self._db.execute(_plain(_BEGIN), (f"{1000 * LOCK_TIMEOUT_S:.0f}",))
                return self._db
            except self._lost:
                self.close()
                if not reused:
                    raise

    def adapt(self, column: Column, value: Any) -> Any:
        if value is None:
            return None
        _check(column, value)
        return json.dumps(value, ensure_ascii=False) if column.kind == "json" else value

    def interrupt(self) -> None:
        if (db := self._db) is not None:
            with contextlib.suppress(self._error):
                db.cancel_safe(timeout=5.0)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class _PostgreSQLTransaction(Transaction):
    placeholder = "%s"

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(_plain(sql), values or None).rowcount

    def insert_all(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(_plain(sql), rows)

    def name(self, quoted: str) -> str:
        return quoted.replace("%", "%%")

    def check_deferred(self) -> None:
        self.run("SAVEPOINT railgun_tried")
        try:
            self.check_immediately()
        except Exception as error:
            refusal = self.refusal(error)
            if refusal is None:
                raise
            raise RefusedError(refusal[0], None, refusal[1]) from error
        self.run("ROLLBACK TO SAVEPOINT railgun_tried")  # constraints are deferred again

    def check_immediately(self) -> None:
        self.run("SET CONSTRAINTS ALL IMMEDIATE")

    def columns(self, table: str) -> dict[str, Column] | None:
        rows = self._db.execute(_plain(_COLUMNS), (quoted_table(table),)).fetchall()
        return {
            name: Column(shown, _POSTGRES_KINDS.get(type) or _CATEGORIES.get(category) or "single")
            for name, shown, type, category in rows
        } or None

    def depends_on_other_rows(self, table: str) -> bool:
        row = self._db.execute(_plain(_DEPENDS_ON_OTHER_ROWS), (quoted_table(table),)).fetchone()
        return row is not None and bool(row[0])

    def refusal(self, error: Exception) -> tuple[str, str | None] | None:
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        state = error.sqlstate
        if state is None:  # the driver refuses the row, without asking the database
            is_refusal = isinstance(error, psycopg.DataError | psycopg.ProgrammingError)
        else:
            is_refusal = state[:2] in _ROW_ERROR_CLASSES and state not in _TABLE_ERRORS
        if not is_refusal:
            return None
        detail = (error.diag.message_detail or "")[:200]
        key = re.match(r"Key \((\w+)\)=", detail)
        text = error.diag.message_primary or str(error)
        column = error.diag.column_name or (key[1] if key else None)
        return (f"{text} ({detail})" if detail else text), column


def _plain(sql: str) -> Any:
    """Return SQL that was built here as a type psycopg takes: names in it are quoted, values are not in it."""
    return sql
