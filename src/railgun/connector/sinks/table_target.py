"""TableTarget: records as rows of a table, in SQLite or PostgreSQL, each once.

Rules:

1. A record is a JSON object; its fields are columns, by their names. A column that a record does not have is NULL, or
   what the table has for it by default.
2. One transaction of the database holds all rows of a transaction and its id, in the table `railgun_applied`. So the
   table holds exactly what was committed, and a second time is noticed.
3. If there is no such table it is made when the first records are prepared, with the columns they have: integer,
   real (double precision), boolean, and text for all else; what is a list or an object is written as JSON (jsonb in
   PostgreSQL). A column that is only null so far is text. A table that is there is never changed.
4. Before the vote the rows are tried: a field that is no column, and a value that does not fit its column, are found
   here; then they are inserted by the database itself, which is then told to forget it. So what the database would
   refuse (a constraint, a number too large) is refused now, by an error that names record and column, and nothing is
   lost: the flow stays at its last snapshot until the table or the flow is mended.
5. A database that cannot be reached is an error that may pass.

SQLite: `sqlite:///relative.db`, `sqlite:////absolute.db`. PostgreSQL: `postgresql://user@host/database`, with psycopg 3
(`pip install railgun[postgres]`).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from railgun.connector.errors import SinkError
from railgun.connector.sinks.databases import (
    RefusedError,
    Transaction,
    open_database,
    quoted,
    quoted_table,
)
from railgun.connector.sinks.targets import REMEMBERED, BadRecordError, Records, Target

SOME: Final = 500  # rows inserted together
_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")


class TableTarget(Target):
    """A table of a database.

    >>> import os, tempfile
    >>> from railgun.connector.sinks.staged import Given
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/totals.db"
    >>> target = TableTarget(url, "totals")
    >>> target.open()
    >>> rows = Given([b'{"name":"ada","n":1}', b'{"name":"grace","n":2}'])
    >>> target.check(rows); target.apply("t1", rows); target.apply("t1", rows)
    >>> target.close()
    >>> import contextlib, sqlite3
    >>> with contextlib.closing(sqlite3.connect(url[len("sqlite:///"):])) as db:
    ...     db.execute("SELECT name, n FROM totals ORDER BY n").fetchall()
    [('ada', 1), ('grace', 2)]
    """

    def __init__(self, url: str, table: str) -> None:
        if not _NAME.fullmatch(table):
            raise SinkError("BAD_TABLE", f"{table!r} is no name of a table: name, or schema.name")
        self.table = table
        self.database = open_database(url)
        self.columns: dict[str, str] | None = None
        """Those of the table, with their types; None until there is a table."""

    def __str__(self) -> str:
        return f"{self.table} in {self.database}"

    def open(self) -> None:
        """Look at the table, and make the one beside it."""
        with self.database.transaction() as db:
            db.run(self.database.make_applied)
            self.columns = db.columns(self.table)

    def close(self) -> None:
        """Leave the database."""
        self.database.close()

    # ------------------------------------------------------------ the two phases

    def check(self, records: Records) -> None:
        """Try it, and let the database forget it."""
        if self.columns is None:
            self._make(records)
        with self.database.transaction(keep=False) as db:
            self.columns = db.columns(self.table)  # somebody may have mended it
            self._insert(db, records)
            db.tried()

    def apply(self, transaction: str, records: Records) -> None:
        """The rows and the id, at once."""
        with self.database.transaction() as db:
            if db.run(self.database.mark, (self.table, transaction)):
                if self.columns is None:
                    self.columns = db.columns(self.table)
                self._insert(db, records)
                db.run(self.database.forget, (self.table, self.table, REMEMBERED))

    def _insert(self, db: Transaction, records: Records) -> None:
        number = 0
        for batch in records.batches():
            for at in range(0, len(batch), SOME):
                some = batch[at : at + SOME]
                rows = [self._row(number + n, record) for n, record in enumerate(some)]
                try:
                    db.insert(self.table, rows)
                except RefusedError as error:
                    which = 0 if error.row is None else error.row
                    raise self._bad(
                        number + which, error.column, f"the database says: {error}", some[which]
                    ) from error
                number += len(some)

    # ------------------------------------------------------------ records as rows

    def _row(self, number: int, record: bytes) -> dict[str, Any]:
        assert self.columns is not None
        row = self._object(number, record)
        for name, value in row.items():
            if name not in self.columns:
                raise self._bad(
                    number,
                    name,
                    f"the table has no such column: it has {', '.join(self.columns)}",
                    record,
                )
            try:
                row[name] = self.database.fitting(self.columns[name], value)
            except ValueError as error:
                raise self._bad(number, name, str(error), record) from error
        return row

    def _object(self, number: int, record: bytes) -> dict[str, Any]:
        try:
            row = json.loads(record)
        except ValueError as error:
            raise self._bad(number, None, f"it is no JSON: {error}", record) from error
        if not isinstance(row, dict) or not row:
            raise self._bad(
                number, None, "it is no JSON object with fields for the columns", record
            )
        return row

    def _bad(self, number: int, column: str | None, why: str, record: bytes) -> BadRecordError:
        where = f"record {number}" + ("" if column is None else f", column {column!r}")
        shown = record[:200].decode(errors="replace")
        return BadRecordError(
            f"table {self.table}, {where}: {why}; the record is {shown}", number, column
        )

    def _make(self, records: Records) -> None:
        """A table with the columns of these records."""
        kinds: dict[str, str] = {}
        number = 0
        for batch in records.batches():
            for at, record in enumerate(batch, number):
                for name, value in self._object(at, record).items():
                    kind = _kind(value)
                    before = kinds.get(name, kind)
                    if {kind, before} == {"integer", "real"}:
                        kinds[name] = "real"
                    elif before == "" or kind == "":
                        kinds[name] = before or kind
                    elif kind != before:
                        raise self._bad(
                            at,
                            name,
                            f"it is {kind}, and was {before} before: make the table yourself",
                            record,
                        )
                    else:
                        kinds[name] = kind
            number += len(batch)
        with self.database.transaction() as db:
            if db.columns(self.table) is None:
                types = self.database.types
                columns = [
                    f"{quoted(name)} {types[kind or 'text']}" for name, kind in kinds.items()
                ]
                db.run(f"CREATE TABLE {quoted_table(self.table)} ({', '.join(columns)})")
            self.columns = db.columns(self.table)


def _kind(value: Any) -> str:
    """The type of a column for a value; nothing for null."""
    match value:
        case None:
            return ""
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "real"
        case str():
            return "text"
    return "json"
