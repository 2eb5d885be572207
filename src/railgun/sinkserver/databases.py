"""Databases of a `TableTarget`: what it needs of them, and SQLite and PostgreSQL.

Rules:

1. A transaction is kept or rolled back as a whole; whatever goes wrong between the two rolls it back.
2. Errors are `RefusedError` for a row the database does not take, with the row and if it is known the column; all else
   is a `TargetError`, and the next transaction begins with a new connection.
3. Names are quoted, values are never in the text of a statement.
4. What is committed survives a loss of power, whatever the database does by default. SQLite: `synchronous=EXTRA`, since
   its commit is a file that is deleted, which FULL does not make safe. PostgreSQL: `synchronous_commit` is not off.
5. Nobody is waited for longer than `LOCKED` seconds: then it is an error that may pass. `interrupt` ends what is being
   waited for, from any thread.
6. A connection that was lost while nothing was done is made anew, without an error; so is one to a file of SQLite
   that somebody has taken away or replaced.
7. A value is stored as it is, or refused. Where a database would take another in its place (text that looks like a
   number, NaN, an integer as a real that cannot hold it) it is not asked.
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
LOCKED: Final = 10.0
Kind = Literal["whole", "real", "exact", "boolean", "text", "json", "list", "single"]
_MARK: Final = (
    f"INSERT INTO {APPLIED} (target, txn) SELECT %s, %s WHERE NOT EXISTS "
    f"(SELECT 1 FROM {APPLIED} WHERE target = %s AND txn = %s) ON CONFLICT DO NOTHING"
)
_FORGET: Final = (
    f"DELETE FROM {APPLIED} WHERE target = %s AND number < (SELECT min(number) FROM "
    f"(SELECT number FROM {APPLIED} WHERE target = %s ORDER BY number DESC LIMIT %s) AS last)"
)


def quoted(name: str) -> str:
    """A name in SQL.

    >>> print(quoted('na"me'))
    "na""me"
    """
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: str) -> str:
    """The name of a table in SQL, which may have a schema before it.

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
    """A column: its type, as the database calls it, and what it is for."""

    type: str
    kind: Kind
    numeric: bool = False
    """Whether text that looks like a number becomes one."""


class Transaction(ABC):
    """What is done in one transaction of a database."""

    @abstractmethod
    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """A statement; how many rows it touched."""

    @abstractmethod
    def columns(self, table: str) -> dict[str, Column] | None:
        """The columns of a table; None if there is none."""

    @abstractmethod
    def looks_around(self, table: str) -> bool:
        """Whether it may depend on other rows of the table if one is taken: keys, references to itself, triggers."""

    @abstractmethod
    def insert_all(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """One statement for many rows."""

    @abstractmethod
    def told(self, error: Exception) -> tuple[str, str | None] | None:
        """What the database says of a row it refuses, and of which column; None if the error is no such thing."""

    placeholder: str

    def name(self, quoted: str) -> str:
        """A name in a statement that has placeholders."""
        return quoted

    def tried(self) -> None:  # noqa: B027
        """What the database looks at when a transaction ends, is looked at now: `RefusedError`, without a row."""

    def at_once(self) -> None:  # noqa: B027
        """From now on nothing is left for the end."""

    def insert(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Rows, in this order; `RefusedError` for the first that cannot be."""
        for shape, some, first in _of_one_shape(rows):
            marks = ", ".join([self.placeholder] * len(shape))
            sql = f"INSERT INTO {self.name(quoted_table(table))} ({self.name(', '.join(map(quoted, shape)))}) "
            sql += f"VALUES ({marks})"
            self.run("SAVEPOINT railgun_rows")
            try:
                self.insert_all(sql, some)
            except Exception as error:
                if self.told(error) is None:
                    raise
                self.run("ROLLBACK TO SAVEPOINT railgun_rows")
                self._find(sql, some, first)
                raise
            self.run("RELEASE SAVEPOINT railgun_rows")

    def _find(self, sql: str, rows: list[tuple[Any, ...]], first: int) -> None:
        """Which row it is."""
        for n, row in enumerate(rows):
            try:
                self.insert_all(sql, [row])
            except Exception as error:
                told = self.told(error)
                if told is None:
                    raise
                raise RefusedError(told[0], first + n, told[1]) from error


def _of_one_shape(
    rows: list[dict[str, Any]],
) -> Iterator[tuple[tuple[str, ...], list[tuple[Any, ...]], int]]:
    """Runs of rows that have the same columns, with the number of their first."""
    at = 0
    while at < len(rows):
        shape = tuple(rows[at])
        end = at
        while end < len(rows) and tuple(rows[end]) == shape:
            end += 1
        yield shape, [tuple(row.values()) for row in rows[at:end]], at
        at = end


class Database(ABC):
    """Where tables are."""

    types: ClassVar[Mapping[str, str]]
    make_applied: ClassVar[str]
    mark: ClassVar[str]
    forget: ClassVar[str]
    longest_name: ClassVar[int] = 1 << 30
    """Bytes of the name of a column; of a longer one the rest would be left off."""

    @abstractmethod
    def transaction(self, keep: bool = True) -> contextlib.AbstractContextManager[Transaction]:
        """A transaction; what is not to be kept is rolled back."""

    @abstractmethod
    def fitting(self, column: Column, value: Any) -> Any:
        """A value for a column; `ValueError` if it does not fit."""

    @abstractmethod
    def interrupt(self) -> None:
        """From any thread: what is being done fails soon."""

    @abstractmethod
    def close(self) -> None:
        """Leave it."""


def open_database(url: str) -> Database:
    """The database at a URL; nothing is connected yet."""
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
    """Whether a value of JSON is what a column is for, and can be there as it is."""
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
        fits, expected = False, "a number that is the same as a real"
    if not fits:
        told = json.dumps(value)[:100]
        raise ValueError(f"{told} does not fit {column.type}: {expected} is expected")
    if isinstance(value, str):
        value.encode()  # half a pair of surrogates is no text


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
_KEPT_AS_TEXT: Final = re.compile(r"(?!.*int)(|.*(char|clob|text|blob).*)")  # its rules of affinity
_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE | re.ASCII)


def _sqlite_column(declared: str) -> Column:
    """What SQLite makes of a declared type, which may be any words.

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
    mark = _MARK.replace("%s", "?")
    forget = _FORGET.replace("%s", "?")

    def __init__(self, path: str) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"sqlite:///{self.path}"

    @contextlib.contextmanager
    def transaction(self, keep: bool = True) -> Iterator[Transaction]:
        try:
            db = self._begun()
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

    def _begun(self) -> sqlite3.Connection:
        """A transaction has begun, in the file that is there: what is written to one that was taken away is gone."""
        while True:
            if self._db is None:
                self._file = None
                self._db = sqlite3.connect(
                    self.path, timeout=LOCKED, isolation_level=None, check_same_thread=False
                )
                self._db.execute("PRAGMA synchronous=EXTRA")
            self._db.execute("BEGIN IMMEDIATE")
            there = None
            with contextlib.suppress(OSError):
                found = os.stat(self.path)
                there = found.st_dev, found.st_ino
            if self._file in (None, there):
                self._file = there
                return self._db
            self.close()

    def fitting(self, column: Column, value: Any) -> Any:
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
        return {row[1]: _sqlite_column(row[2]) for row in self._about("table_info", table)} or None

    def looks_around(self, table: str) -> bool:
        schema, name = _schema(table)
        triggers = self._db.execute(
            f"SELECT 1 FROM {schema}sqlite_master WHERE type = 'trigger' AND lower(tbl_name) = lower(?)",
            (name,),
        ).fetchall()
        unique = any(row[2] for row in self._about("index_list", table))
        return unique or bool(triggers) or any(row[5] for row in self._about("table_info", table))

    def _about(self, what: str, table: str) -> list[Any]:
        schema, name = _schema(table)
        return self._db.execute(f"PRAGMA {schema}{what}({quoted(name)})").fetchall()

    def told(self, error: Exception) -> tuple[str, str | None] | None:
        if not isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
            return None
        named = re.fullmatch(r"(?:NOT NULL|UNIQUE) constraint failed: \S+\.(\w+)", str(error))
        return str(error), named[1] if named else None


def _schema(table: str) -> tuple[str, str]:
    """What stands before the name of a table in SQL, and the name."""
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
_LOOKS_AROUND: Final = """
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
_OF_A_ROW: Final = (
    "22",
    "23",
    "42",
    "44",
    "54",
    "P0",
)  # classes of errors: data, constraints, types, limits, triggers
_OF_THE_TABLE: Final = ("42501", "42P01")  # it may not be written; it is gone


class _PostgreSQL(Database):
    types: ClassVar = {
        "integer": "bigint", "real": "double precision", "boolean": "boolean", "text": "text", "json": "jsonb",
    }  # fmt: skip
    make_applied = (
        f"CREATE TABLE IF NOT EXISTS {APPLIED} (number bigserial PRIMARY KEY, target text NOT NULL, txn text NOT NULL, "
        "UNIQUE (target, txn))"
    )
    mark = _MARK
    forget = _FORGET
    longest_name = 63

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
            db = self._begun()
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

    def _begun(self) -> psycopg.Connection[Any]:
        """A transaction has begun. A connection from before may be lost by now, and nothing is lost with it."""
        while True:
            known = self._db is not None
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
                self._db.execute(_plain(_BEGIN), (f"{1000 * LOCKED:.0f}",))
                return self._db
            except self._lost:
                self.close()
                if not known:
                    raise

    def fitting(self, column: Column, value: Any) -> Any:
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

    def tried(self) -> None:
        self.run("SAVEPOINT railgun_tried")
        try:
            self.at_once()
        except Exception as error:
            told = self.told(error)
            if told is None:
                raise
            raise RefusedError(told[0], None, told[1]) from error
        self.run("ROLLBACK TO SAVEPOINT railgun_tried")  # from here on as it was before

    def at_once(self) -> None:
        self.run("SET CONSTRAINTS ALL IMMEDIATE")

    def columns(self, table: str) -> dict[str, Column] | None:
        found = self._db.execute(_plain(_COLUMNS), (quoted_table(table),)).fetchall()
        return {
            name: Column(shown, _POSTGRES_KINDS.get(type) or _CATEGORIES.get(category) or "single")
            for name, shown, type, category in found
        } or None

    def looks_around(self, table: str) -> bool:
        found = self._db.execute(_plain(_LOOKS_AROUND), (quoted_table(table),)).fetchone()
        return found is not None and bool(found[0])

    def told(self, error: Exception) -> tuple[str, str | None] | None:
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        state = error.sqlstate
        if state is None:  # the driver refuses it, without asking
            known = isinstance(error, psycopg.DataError | psycopg.ProgrammingError)
        else:
            known = state[:2] in _OF_A_ROW and state not in _OF_THE_TABLE
        if not known:
            return None
        detail = (error.diag.message_detail or "")[:200]
        key = re.match(r"Key \((\w+)\)=", detail)
        text = error.diag.message_primary or str(error)
        column = error.diag.column_name or (key[1] if key else None)
        return (f"{text} ({detail})" if detail else text), column


def _plain(sql: str) -> Any:
    """SQL that was put together here: names in it are quoted, values are not in it."""
    return sql
