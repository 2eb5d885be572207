"""Insert records into a table of SQLite or PostgreSQL as rows, each once.

Rules:

1. A record is a JSON object; its fields are the columns of the same names. A column without a field is NULL, or has the
   table's default.
2. One transaction of the database inserts all rows of a transaction, and its id into the table `railgun_applied`. So
   the table has exactly the committed rows, and a repeated transaction is noticed.
3. A table that does not exist is created when the first records are prepared, with the columns of these records:
   integer, real (double precision), boolean, and text for all else; lists and objects are JSON (jsonb in PostgreSQL). A
   column that is only null so far is text. An existing table is never changed.
4. Before the vote the rows are tried: a field without a column, and a value that does not fit its column, are refused
   here; then the database itself inserts the rows, and rolls back. So rows that the database would refuse (a
   constraint, a number too large) are refused now, with an error that names record and column, and nothing is lost: the
   flow stays at its last snapshot until the table or the flow is corrected.
5. If rows can exclude each other (keys, references to the table itself, triggers), they are tried together with all
   transactions that were promised and are not applied yet: after those that certainly come first, and before the
   others. So a duplicate key is found, whichever row comes first; and a reference is valid only if its row certainly
   comes first. The vote then costs the insertion of these rows, too. A promised transaction that cannot be applied any
   more, because the table was changed by others, does not count.
6. A database that cannot be reached is an error that may pass. Both tables are looked up each time, and created if they
   are gone: a database may be recreated while the sink runs.
7. Several sinks may fill a table. Each has its own ids in `railgun_applied`: `target` is the table and the sink's id.
   (Older versions wrote the table alone; such ids are still recognized.)

SQLite: `sqlite:///relative.db`, `sqlite:////absolute.db`. PostgreSQL: `postgresql://user@host/database`, with psycopg 3
(`pip install railgun[postgres]`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from railgun.ingest.errors import SinkError
from railgun.sinkserver.databases import (
    APPLIED,
    Column,
    RefusedError,
    Transaction,
    open_database,
    quoted,
    quoted_table,
)
from railgun.sinkserver.targets import (
    REMEMBERED_TRANSACTIONS,
    BadRecordError,
    Records,
    Target,
    TargetError,
)

Promised = Mapping[str, Records]  # transactions, in the order in which they are applied
INSERT_ROWS: Final = 500
"""Rows that are inserted by one call; `interrupt` is checked between calls."""
_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")


class _PromisedError(TargetError):
    """A transaction that was promised before cannot be applied, alone or together with the new one."""


class TableTarget(Target):
    """A target that inserts records into a table of a database.

    >>> import os, tempfile
    >>> from railgun.sinkserver.staged import InMemoryRecords
    >>> url = f"sqlite:///{tempfile.mkdtemp()}/totals.db"
    >>> target = TableTarget(url, "totals")
    >>> target.open()
    >>> rows = InMemoryRecords([b'{"name":"ada","n":1}', b'{"name":"grace","n":2}'])
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
        self.columns: dict[str, Column] | None = None
        """The columns of the table; None until the table exists."""
        self._ending = False

    def __str__(self) -> str:
        return f"{self.table} in {self.database}"

    def open(self) -> None:
        """Read the columns of the table, and create `railgun_applied` if it does not exist."""
        self._ending = False
        with self.database.transaction() as db:
            self._look_up(db)

    def interrupt(self) -> None:
        """Make the current call fail soon, and later ones until `open`."""
        self._ending = True
        self.database.interrupt()

    def close(self) -> None:
        """Close the connection to the database."""
        self.database.close()

    def _look_up(self, db: Transaction) -> None:
        if (
            db.columns(APPLIED) is None
        ):  # a role that may not create tables works if others have created it
            db.run(self.database.make_applied)
        self.columns = db.columns(self.table)

    # ------------------------------------------------------------ the two phases

    def check(self, records: Records) -> None:
        """Insert the records and roll back; raise `BadRecordError` for a record that is refused."""
        self.check_beside(records, {}, {})

    def check_beside(self, records: Records, first: Promised, others: Promised) -> None:
        """Insert the records together with promised transactions, in a transaction that is rolled back (rule 5)."""
        with self.database.transaction(keep=False) as db:
            missing = db.columns(APPLIED) is None or db.columns(self.table) is None
        if missing:
            with self.database.transaction() as db:
                self._look_up(db)
                if self.columns is None:
                    self._create_table(db, records)
        try:
            self._try(first, records, others)
        except _PromisedError:
            if not others:
                raise
            try:  # find out which to refuse: these records, or another transaction that fails even without them
                self._try(first, records, others, others_first=True)
            except BadRecordError as bad:
                why = "a transaction that is prepared and not committed yet excludes it"
                raise BadRecordError(f"{bad}; {why}", bad.record, bad.column) from bad

    def _try(
        self,
        first: Promised,
        records: Records,
        others: Promised,
        others_first: bool = False,
    ) -> None:
        try:
            self._rehearse(first, records, others, others_first)
        except RefusedError as late:
            try:
                self._rehearse(first, records, others, others_first, at_once=True)
            except BadRecordError as error:
                if str(late) in str(
                    error
                ):  # else this record is valid at the end, and another one is not
                    raise error from late
            raise BadRecordError(
                f"table {self.table}: at the end of the transaction the database says: {late}",
                column=late.column,
            ) from late

    def _rehearse(
        self,
        first: Promised,
        records: Records,
        others: Promised,
        others_first: bool,
        at_once: bool = False,
    ) -> None:
        with self.database.transaction(keep=False) as db:
            self.columns = db.columns(self.table)  # the table may have been corrected
            if not db.depends_on_other_rows(self.table):
                first = others = {}
            self._insert_promised(db, first)
            if others_first:
                self._insert_promised(db, others, skip=True)
            if at_once:
                db.check_immediately()
            self._insert(db, records)
            db.check_deferred()
            if not others_first:
                self._insert_promised(db, others)

    def _insert_promised(self, db: Transaction, promised: Promised, skip: bool = False) -> None:
        """Insert promised transactions; raise `_PromisedError` for one that cannot be applied, or skip it."""
        for transaction, records in promised.items():
            db.run("SAVEPOINT railgun_promised")
            try:
                self._apply(db, transaction, records)
                db.check_deferred()
            except (BadRecordError, SinkError, RefusedError) as error:
                if not skip:
                    raise _PromisedError(
                        f"{self}: another transaction, which was promised before, could not be applied: {error}"
                    ) from error
                db.run("ROLLBACK TO SAVEPOINT railgun_promised")
            db.run("RELEASE SAVEPOINT railgun_promised")

    def apply(self, transaction: str, records: Records) -> None:
        """Insert the rows and the id of a transaction, in one transaction of the database."""
        with self.database.transaction() as db:
            self._look_up(db)
            self._apply(db, transaction, records)

    def _apply(self, db: Transaction, transaction: str, records: Records) -> None:
        mine = f"{self.table} {self.sink}".strip()
        if db.run(self.database.mark, (mine, transaction, self.table, transaction)):
            if self.columns is None:
                self._create_table(db, records)
            self._insert(db, records)
            db.run(self.database.forget, (mine, mine, REMEMBERED_TRANSACTIONS))

    def _insert(self, db: Transaction, records: Records) -> None:
        number = 0
        for batch in records.batches():
            for at in range(0, len(batch), INSERT_ROWS):
                if self._ending:
                    raise TargetError(f"{self}: the sink is about to end")
                chunk = batch[at : at + INSERT_ROWS]
                rows = [self._row(number + n, record) for n, record in enumerate(chunk)]
                try:
                    db.insert(self.table, rows)
                except RefusedError as error:
                    which = 0 if error.row is None else error.row
                    raise self._bad_record(
                        number + which, error.column, f"the database says: {error}", chunk[which]
                    ) from error
                number += len(chunk)

    # ------------------------------------------------------------ records as rows

    def _row(self, number: int, record: bytes) -> dict[str, Any]:
        assert self.columns is not None
        row = self._object(number, record)
        for name, value in row.items():
            if name not in self.columns:
                raise self._bad_record(
                    number,
                    name,
                    f"the table has no such column: it has {', '.join(self.columns)}",
                    record,
                )
            try:
                row[name] = self.database.adapt(self.columns[name], value)
            except (ValueError, RecursionError) as error:
                raise self._bad_record(number, name, str(error), record) from error
        return row

    def _object(self, number: int, record: bytes) -> dict[str, Any]:
        try:
            row = json.loads(record)
        except (ValueError, RecursionError) as error:
            why = "it is no JSON" if isinstance(error, ValueError) else "it is nested too deeply"
            raise self._bad_record(number, None, f"{why}: {error}", record) from error
        if not isinstance(row, dict) or not row:
            raise self._bad_record(
                number, None, "it is no JSON object with fields for the columns", record
            )
        return row

    def _bad_record(
        self, number: int, column: str | None, why: str, record: bytes
    ) -> BadRecordError:
        where = f"record {number}" + ("" if column is None else f", column {column!r}")
        shown = record[:200].decode(errors="replace")
        return BadRecordError(
            f"table {self.table}, {where}: {why}; the record is {shown}", number, column
        )

    def _create_table(self, db: Transaction, records: Records) -> None:
        """Create the table with the columns of these records."""
        kinds: dict[str, str] = {}
        number = 0
        for batch in records.batches():
            for at, record in enumerate(batch, number):
                for name, value in self._object(at, record).items():
                    if name not in kinds:
                        self._check_name(at, name, record)
                    kind = _kind(value)
                    before = kinds.get(name, kind)
                    if {kind, before} == {"integer", "real"}:
                        kinds[name] = "real"
                    elif before == "" or kind == "":
                        kinds[name] = before or kind
                    elif kind != before:
                        raise self._bad_record(
                            at,
                            name,
                            f"it is {kind}, and was {before} before: create the table yourself",
                            record,
                        )
                    else:
                        kinds[name] = kind
            number += len(batch)
        if not kinds:
            return
        types = self.database.types
        columns = [f"{quoted(name)} {types[kind or 'text']}" for name, kind in kinds.items()]
        db.run(f"CREATE TABLE {quoted_table(self.table)} ({', '.join(columns)})")
        self.columns = db.columns(self.table)

    def _check_name(self, number: int, name: str, record: bytes) -> None:
        """Raise `BadRecordError` if a field cannot be a column of a new table."""
        try:
            size = len(name.encode())
        except ValueError as error:
            raise self._bad_record(number, name, f"this is no name: {error}", record) from error
        max_bytes = self.database.max_name_bytes
        if not 0 < size <= max_bytes or "\0" in name:
            why = f"a column's name has at most {max_bytes} bytes, and this has {size}"
            if size <= max_bytes:
                why = "this is no name of a column"
            raise self._bad_record(number, name, why, record)


def _kind(value: Any) -> str:
    """Return the type of a column for a value; empty for null."""
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
