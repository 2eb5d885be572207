"""Push the rows of a database table into a flow, in the order of an increasing id column. A row is a message.

Rules:

1. The id of a message is the row's id: a unique column of whole numbers from 0 on, which the database assigns to a new
   row. Rows after the flow's position are queried, so nothing is kept here. Later changes and deletions of rows are not
   reported.
2. A row must not become visible after a row with a higher id was sent: it would never be sent. What ensures that
   depends on the database: see `sqlite.py` and `postgres.py`.
3. Queries run in one thread of their own. Names of tables and columns are looked up, and quoted.
4. A database that does not answer is retried, with growing pauses; at the start only for a limited time. A permanent
   error, such as a missing column, is raised.
5. A payload is the row as a JSON object: numbers, text, true, false and null as they are; dates and times in ISO 8601;
   intervals in seconds; decimals as text, so that no digit is lost; bytes in base64; JSON columns as they are;
   numbers that JSON cannot express (NaN, infinities), UUIDs and addresses as text.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import decimal
import ipaddress
import json
import math
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from railgun.ingest.client import Connector
from railgun.ingest.errors import FeedError
from railgun.ingest.ready.progress import Progress

POLL_S: Final = 1.0  # until the next query of a table without new rows
BATCH_ROWS: Final = 1_000  # read by one query
RETRY_PAUSES_S: Final = (0.2, 10.0)  # until the next attempt: at first, and at most
R = TypeVar("R")


class TableError(FeedError):
    """A table cannot be followed."""


class GoneError(TableError):
    """The database does not answer, which may be transient."""


class Database(ABC):
    """A table in a database. All methods but `interrupt` are called in one thread; transient errors are `GoneError`."""

    @abstractmethod
    def open(self) -> None:
        """Connect, also again after the connection was lost; raise `TableError` if the table cannot be followed."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, if it is open."""

    @abstractmethod
    def interrupt(self) -> None:
        """Cancel the running query; called from another thread."""

    @abstractmethod
    def last(self) -> int | None:
        """Return the highest id, or None if there are no rows; raise `TableError` if it is no whole number."""

    @abstractmethod
    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """Return up to `most` rows after an id, in order. No row before or between them may become visible later.

        The columns are the id, those of the payload, and the key and the time if they were requested.
        """

    waits = ""
    """What the database waits for while it has rows that may not be sent yet."""
    names: Sequence[str] = ()
    """The columns of the payload, in order."""


def as_json(names: Sequence[str], row: Sequence[Any]) -> bytes:
    """Return a row as a payload: a JSON object; see rule 5. Raises `TableError` if JSON cannot express it.

    >>> as_json(["id", "price", "at"], [1, decimal.Decimal("1.10"), datetime.date(2026, 1, 2)])
    b'{"id":1,"price":"1.10","at":"2026-01-02"}'
    """
    fields = dict(zip(names, row, strict=True))
    try:
        try:
            return _dumped(fields)
        except ValueError:  # most likely a NaN or an infinity
            return _dumped(_finite(fields))
    except ValueError as error:
        raise TableError(
            f"the row cannot be written as JSON in UTF-8 ({error}): correct it, or leave the column out (--columns)"
        ) from error


def _dumped(value: Any) -> bytes:
    return json.dumps(
        value, default=_plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [_finite(item) for item in value]
        case dict():
            return {name: _finite(item) for name, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    match value:
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case ipaddress.IPv4Address() | ipaddress.IPv6Address() | ipaddress.IPv4Network():
            return str(value)
        case ipaddress.IPv6Network() | ipaddress.IPv4Interface() | ipaddress.IPv6Interface():
            return str(value)
    raise TableError(
        f"a value of the type {type(value).__name__} cannot be written as JSON: leave its column out (--columns), or "
        "let a column of another type hold it"
    )


def as_time(value: Any) -> int | None:
    """Return an event time in µs: of a date (without a zone: UTC), of text in ISO 8601, or of seconds since 1970.

    Raises `TableError` for other values.

    >>> as_time("1970-01-02"), as_time(1.5), as_time(None)
    (86400000000, 1500000, None)
    """
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError as error:
            raise TableError(f"the time {value!r} is not ISO 8601: {error}") from error
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.UTC)
        since = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        return int(since // datetime.timedelta(microseconds=1))
    if value is None:
        return None
    if isinstance(value, int | float | decimal.Decimal) and math.isfinite(value):
        return int(value * 1_000_000)
    raise TableError(f"{value!r} is no time: a date, ISO 8601 or seconds since 1970 are")


class Table:
    """A connector that follows a table.

    `key`, `time`: whether the rows of `database` end with these columns, in this order. `batch`: rows of one query.
    `poll`: seconds until the next query after one without new rows. `patience`: seconds to connect at the start.
    `on_trouble` is called with a text when the database cannot be reached.
    """

    def __init__(
        self,
        connector: Connector,
        database: Database,
        stream: str,
        *,
        key: bool = False,
        time: bool = False,
        batch: int = BATCH_ROWS,
        poll: float = POLL_S,
        once: bool = False,
        patience: float = 30.0,
        progress: Progress | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.connector, self.database, self.stream = connector, database, stream
        self.has_key, self.has_time = key, time
        self.batch, self.poll, self.once, self.patience = batch, poll, once, patience
        self.progress = progress or Progress()
        self._on_trouble = on_trouble
        self._thread = ThreadPoolExecutor(1, "railgun-table")
        self._open = False
        self._last: int | None = None

    async def run(self) -> None:
        """Follow the table for ever; with `once`, until the rows it has now are acknowledged."""
        try:
            await self._ask(lambda: None, patience=self.patience)
            if self.once:
                self._last = await self._ask(self.database.last)
                if self._last is None:
                    return
            self.progress.streams = 1
            await self.connector.feed(self.stream, self._rows)
        finally:
            self.database.interrupt()
            self._thread.submit(self.database.close)
            self._thread.shutdown(wait=False)

    async def _rows(self, por: int | None) -> AsyncIterator[list[Any]]:
        """Yield the items of the rows after an id, in batches."""
        self.progress.again(self.stream, por)
        after = por
        while self._last is None or after is None or after < self._last:
            at = after
            rows = await self._ask(lambda at=at: self.database.rows(at, self.batch))  # type: ignore[misc]
            self.progress.waits = self.database.waits
            if not rows and self._last is not None and not self.database.waits:
                return  # the last ones were deleted
            if rows:
                items = [self._item(row) for row in rows]
                after = items[-1][0]
                self.progress.took(self.stream, after, len(items))
                yield items
            if len(rows) < self.batch:
                await asyncio.sleep(min(self.poll, 0.05) if self.database.waits else self.poll)

    def _item(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        id_ = row[0]
        if type(id_) is not int or id_ < 0:
            raise TableError(f"{self.stream}: an id is a whole number from 0 on, not {id_!r:.80}")
        names = self.database.names
        try:
            payload = as_json(names, row[1 : 1 + len(names)])
            key = row[1 + len(names)] if self.has_key else None
            time = as_time(row[-1]) if self.has_time else None
        except TableError as error:
            raise TableError(f"{self.stream}, row {id_}: {error}") from error
        return id_, payload, None if key is None else str(key), time

    async def _ask(self, query: Callable[[], R], patience: float = math.inf) -> R:
        """Run a query in the thread, connecting first if necessary; retry for `patience` seconds on `GoneError`."""
        loop = asyncio.get_running_loop()
        pause, until = RETRY_PAUSES_S[0], loop.time() + patience

        def ask() -> R:
            if not self._open:
                self.database.open()
                self._open = True
            return query()

        while True:
            try:
                result = await loop.run_in_executor(self._thread, ask)
            except GoneError as error:
                self._open = False
                if loop.time() + pause > until:
                    raise
                self.progress.waits = "waits for the database"
                if pause == RETRY_PAUSES_S[0] and self._on_trouble is not None:
                    self._on_trouble(f"{error}; trying again until it is back")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, RETRY_PAUSES_S[1])
            else:
                self.progress.waits = ""
                return result


def whole_id(table: str, last: Any) -> int | None:
    """Return `last`, the highest id of a table or None; raise `TableError` if it is no whole number."""
    if last is None or type(last) is int:
        return last
    raise TableError(f"{table}: an id is a whole number from 0 on, not {last!r:.80}")


def existing_column(what: str, name: str, existing: Sequence[str], table: str) -> str:
    """Return the column `name`, given for the option `what`; raise `TableError` if the table does not have it."""
    if name not in existing:
        raise TableError(
            f"{table} has no column {name!r} for {what}, but {', '.join(existing) or 'none'}"
        )
    return name


def open_database(
    url: str,
    table: str,
    id: str,
    columns: Sequence[str] | None = None,
    key: str | None = None,
    time: str | None = None,
) -> Database:
    """Return a table of the database at a URL, `sqlite:///path` or `postgresql://…`; raise `TableError` for others."""
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        from railgun.ingest.ready.sqlite import Sqlite

        return Sqlite(rest[1:], table, id, columns, key, time)
    if scheme in ("postgresql", "postgres"):
        from railgun.ingest.ready.postgres import Postgres

        return Postgres(url, table, id, columns, key, time)
    shown = repr(scheme) if scheme != url else "this"  # the URL may contain a password
    raise TableError(
        f"{shown} is not known: sqlite:///path/file.db (four slashes for a path from the root), or "
        "postgresql://user@host/database"
    )
