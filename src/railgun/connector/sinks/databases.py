"""Databases of a `TableTarget`: what it needs of them, and SQLite and PostgreSQL.

Rules:

1. A transaction is kept or rolled back as a whole; whatever goes wrong between the two rolls it back.
2. Errors are `RefusedError` for a row the database does not take, with the row and if it is known the column; all else
   is a `TargetError`, and the next transaction begins with a new connection.
3. Names are quoted, values are never in the text of a statement.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import unquote

from railgun.connector.errors import SinkError
from railgun.connector.sinks.targets import TargetError

if TYPE_CHECKING:
    import psycopg

APPLIED: Final = "railgun_applied"
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


class Transaction(ABC):
    """What is done in one transaction of a database."""

    @abstractmethod
    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """A statement; how many rows it touched."""

    @abstractmethod
    def columns(self, table: str) -> dict[str, str] | None:
        """The columns of a table with their types; None if there is none."""

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
        """What the database looks at when a transaction ends, is looked at now."""

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

    @abstractmethod
    def transaction(self, keep: bool = True) -> contextlib.AbstractContextManager[Transaction]:
        """A transaction; what is not to be kept is rolled back."""

    @abstractmethod
    def fitting(self, kind: str, value: Any) -> Any:
        """A value for a column of this type; `ValueError` if it does not fit."""

    @abstractmethod
    def close(self) -> None:
        """Leave it."""


def open_database(url: str) -> Database:
    """The database at a URL; nothing is connected yet."""
    if url.startswith("sqlite:///"):
        return _SQLite(unquote(url.removeprefix("sqlite:///")))
    if url.startswith(("postgresql://", "postgres://")):
        return _PostgreSQL(url)
    shown = url.partition("://")[0][:40]
    raise SinkError(
        "BAD_URL",
        f"{shown!r} is no URL of a database: sqlite:///file.db, or postgresql://user@host/database",
    )


_WHOLE: Final = re.compile(r"\b(big|small|tiny|medium)?(int(eger|\d)?|serial)\b")
_KINDS: Final = (
    (re.compile(r"real|float|double|numeric|decimal"), (int, float), "a number"),
    (re.compile(r"bool"), (bool,), "true or false"),
    (re.compile(r"char|clob|text"), (str,), "text"),
    (re.compile(r""), (int, float, bool, str), "a single value"),
)


def _check_kind(kind: str, value: Any) -> None:
    """Whether a value of JSON is what a column of this type is for, if we know the type."""
    lower = kind.lower()
    if "json" in lower or lower.endswith("[]"):
        return
    if _WHOLE.search(lower):
        fits, expected = type(value) is int, "a whole number of 64 bits"
    else:
        known, expected = next((types, told) for form, types, told in _KINDS if form.search(lower))
        fits = type(value) in known
    if type(value) is int and "numeric" not in lower and not -(2**63) <= value < 2**63:
        fits, expected = False, "a number of 64 bits"
    if not fits:
        raise ValueError(f"{json.dumps(value)[:100]} does not fit {kind}: {expected} is expected")
    if isinstance(value, str):
        value.encode()  # half a pair of surrogates is no text


# ---------------------------------------------------------------- SQLite


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
    mark = f"INSERT INTO {APPLIED} (target, txn) VALUES (?, ?) ON CONFLICT DO NOTHING"
    forget = _FORGET.replace("%s", "?")

    def __init__(self, path: str) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None

    def __str__(self) -> str:
        return f"sqlite:///{self.path}"

    @contextlib.contextmanager
    def transaction(self, keep: bool = True) -> Iterator[Transaction]:
        try:
            if self._db is None:
                self._db = sqlite3.connect(
                    self.path, timeout=10.0, isolation_level=None, check_same_thread=False
                )
                self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield _SQLiteTransaction(self._db)
                self._db.execute("COMMIT" if keep else "ROLLBACK")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self.close()
            raise TargetError(f"{self}: {error}") from error

    def fitting(self, kind: str, value: Any) -> Any:
        if value is None:
            return None
        _check_kind(kind, value)
        if isinstance(value, dict | list) or "json" in kind.lower():
            return json.dumps(value, ensure_ascii=False)
        return value

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

    def columns(self, table: str) -> dict[str, str] | None:
        schema, _, name = table.rpartition(".")
        before = f"{quoted(schema)}." if schema else ""
        found = self._db.execute(f"PRAGMA {before}table_info({quoted(name)})").fetchall()
        return {row[1]: row[2] or "any" for row in found} or None

    def told(self, error: Exception) -> tuple[str, str | None] | None:
        if not isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
            return None
        named = re.fullmatch(r"(?:NOT NULL|UNIQUE) constraint failed: \S+\.(\w+)", str(error))
        return str(error), named[1] if named else None


# ---------------------------------------------------------------- PostgreSQL


class _PostgreSQL(Database):
    types: ClassVar = {
        "integer": "bigint", "real": "double precision", "boolean": "boolean", "text": "text", "json": "jsonb",
    }  # fmt: skip
    make_applied = (
        f"CREATE TABLE IF NOT EXISTS {APPLIED} (number bigserial PRIMARY KEY, target text NOT NULL, txn text NOT NULL, "
        "UNIQUE (target, txn))"
    )
    mark = f"INSERT INTO {APPLIED} (target, txn) VALUES (%s, %s) ON CONFLICT DO NOTHING"
    forget = _FORGET

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise SinkError(
                "NO_DRIVER", "tables of PostgreSQL need psycopg: pip install 'railgun[postgres]'"
            ) from error
        self.url = url
        self._error = psycopg.Error
        self._connect = psycopg.connect
        self._db: psycopg.Connection[Any] | None = None

    def __str__(self) -> str:
        return re.sub(r"//[^@/]*@", "//", self.url.partition("?")[0])

    @contextlib.contextmanager
    def transaction(self, keep: bool = True) -> Iterator[Transaction]:
        try:
            if self._db is None:
                self._db = self._connect(
                    self.url,
                    connect_timeout=10,
                    keepalives_idle=30,
                    keepalives_interval=10,
                    keepalives_count=3,
                )
            try:
                yield _PostgreSQLTransaction(self._db)
                if keep:
                    self._db.commit()
                else:
                    self._db.rollback()
            except BaseException:
                with contextlib.suppress(self._error):
                    self._db.rollback()
                raise
        except self._error as error:
            self.close()
            raise TargetError(f"{self}: {str(error).strip()}") from error

    def fitting(self, kind: str, value: Any) -> Any:
        if value is None:
            return None
        _check_kind(kind, value)
        if kind.startswith("json") or (isinstance(value, dict | list) and not kind.endswith("[]")):
            return json.dumps(value, ensure_ascii=False)
        return value

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
        self._db.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def columns(self, table: str) -> dict[str, str] | None:
        found = self._db.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = to_regclass(%s) "
            "AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (quoted_table(table),),
        ).fetchall()
        return dict(found) or None

    def told(self, error: Exception) -> tuple[str, str | None] | None:
        from psycopg import errors

        if not isinstance(
            error, errors.IntegrityError | errors.DataError | errors.ProgrammingError
        ):
            return None
        return error.diag.message_primary or str(error), error.diag.column_name


def _plain(sql: str) -> Any:
    """SQL that was put together here: names in it are quoted, values are not in it."""
    return sql
