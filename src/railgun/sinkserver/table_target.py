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
5. If rows can exclude each other (keys, references to the table itself, triggers), they are tried together with all
   that was promised before and is not applied yet: after what comes first for certain, and then before the others.
   So a key that is there twice is found, whichever comes first; and a reference is good only if what it refers to
   comes first for certain. The vote then costs what these rows cost, too. One of the others that cannot be applied
   any more, since somebody has changed the table, does not count.
6. A database that cannot be reached is an error that may pass. Both tables are looked for each time, and made if they
   are gone: a database may be made anew while the sink runs.
7. Several sinks may fill a table. Each has its own ids in `railgun_applied`: `target` is the table and the sink's id.
   (It was the table alone before; such ids are still known.)

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
from railgun.sinkserver.targets import REMEMBERED, BadRecordError, Records, Target, TargetError

Promised = Mapping[str, Records]  # transactions, in the order in which they are applied
SOME: Final = 500  # rows inserted together
_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")


class _PromisedError(TargetError):
    """What was promised before cannot be applied, or not together with what is asked for."""


class TableTarget(Target):
    """A table of a database.

    >>> import os, tempfile
    >>> from railgun.sinkserver.staged import Given
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
        self.columns: dict[str, Column] | None = None
        """Those of the table; None until there is a table."""
        self._ending = False

    def __str__(self) -> str:
        return f"{self.table} in {self.database}"

    def open(self) -> None:
        """Look at the table, and make the one beside it."""
        self._ending = False
        with self.database.transaction() as db:
            self._find(db)

    def interrupt(self) -> None:
        """End what is being done."""
        self._ending = True
        self.database.interrupt()

    def close(self) -> None:
        """Leave the database."""
        self.database.close()

    def _find(self, db: Transaction) -> None:
        if db.columns(APPLIED) is None:  # asked first: whoever may not make tables can have it made
            db.run(self.database.make_applied)
        self.columns = db.columns(self.table)

    # ------------------------------------------------------------ the two phases

    def check(self, records: Records) -> None:
        """Try it, and let the database forget it."""
        self.check_beside(records, {}, {})

    def check_beside(self, records: Records, first: Promised, others: Promised) -> None:
        """Try it together with what was promised before."""
        with self.database.transaction(keep=False) as db:
            missing = db.columns(APPLIED) is None or db.columns(self.table) is None
        if missing:
            with self.database.transaction() as db:
                self._find(db)
                if self.columns is None:
                    self._make(db, records)
        try:
            self._try(first, records, others)
        except _PromisedError:
            if not others:
                raise
            try:  # who is to blame: these, or one of the others even without them
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
                if str(late) in str(error):  # else it is good in the end, and another is to blame
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
            self.columns = db.columns(self.table)  # somebody may have mended it
            if not db.looks_around(self.table):
                first = others = {}
            self._insert_promised(db, first)
            if others_first:
                self._insert_promised(db, others, skip=True)
            if at_once:
                db.at_once()
            self._insert(db, records)
            db.tried()
            if not others_first:
                self._insert_promised(db, others)

    def _insert_promised(self, db: Transaction, promised: Promised, skip: bool = False) -> None:
        """What was promised before; what cannot be applied any more is an error, or skipped."""
        for transaction, records in promised.items():
            db.run("SAVEPOINT railgun_promised")
            try:
                self._apply(db, transaction, records)
                db.tried()
            except (BadRecordError, SinkError, RefusedError) as error:
                if not skip:
                    raise _PromisedError(
                        f"{self}: another transaction, which was promised before, could not be applied: {error}"
                    ) from error
                db.run("ROLLBACK TO SAVEPOINT railgun_promised")
            db.run("RELEASE SAVEPOINT railgun_promised")

    def apply(self, transaction: str, records: Records) -> None:
        """The rows and the id, at once."""
        with self.database.transaction() as db:
            self._find(db)
            self._apply(db, transaction, records)

    def _apply(self, db: Transaction, transaction: str, records: Records) -> None:
        mine = f"{self.table} {self.sink}".strip()
        if db.run(self.database.mark, (mine, transaction, self.table, transaction)):
            if self.columns is None:
                self._make(db, records)
            self._insert(db, records)
            db.run(self.database.forget, (mine, mine, REMEMBERED))

    def _insert(self, db: Transaction, records: Records) -> None:
        number = 0
        for batch in records.batches():
            for at in range(0, len(batch), SOME):
                if self._ending:
                    raise TargetError(f"{self}: the sink is about to end")
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
            except (ValueError, RecursionError) as error:
                raise self._bad(number, name, str(error), record) from error
        return row

    def _object(self, number: int, record: bytes) -> dict[str, Any]:
        try:
            row = json.loads(record)
        except (ValueError, RecursionError) as error:
            why = "it is no JSON" if isinstance(error, ValueError) else "it goes too deep"
            raise self._bad(number, None, f"{why}: {error}", record) from error
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

    def _make(self, db: Transaction, records: Records) -> None:
        """A table with the columns of these records."""
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
                        raise self._bad(
                            at,
                            name,
                            f"it is {kind}, and was {before} before: make the table yourself",
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
        """Whether a field can be a column of a new table."""
        try:
            size = len(name.encode())
        except ValueError as error:
            raise self._bad(number, name, f"this is no name: {error}", record) from error
        most = self.database.longest_name
        if not 0 < size <= most or "\0" in name:
            why = f"a column's name has at most {most} bytes, and this has {size}"
            if size <= most:
                why = "this is no name of a column"
            raise self._bad(number, name, why, record)


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
