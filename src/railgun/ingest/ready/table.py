"""Table: rows of a database table, pushed into a flow in the order of a column that goes up. A row is a message.

Rules:

1. The id of a message is the row's id: a column of whole numbers from 0 on that is unique, which a new row gets from
   the database. Rows after the flow's position are asked for, so nothing is kept here. Rows that change or go later
   are not told.
2. A row must not become visible after a row with a higher id was sent: it would never be. How that is so depends on the
   database, and is told in `sqlite.py` and `postgres.py`.
3. Queries run in one thread of their own. Names of tables and columns are looked up, and quoted.
4. A database that does not answer is waited for, with longer and longer pauses; at the start not for ever. What
   cannot pass, such as a column that is not there, is an error.
5. A payload is the row as a JSON object: numbers, text, true, false and null as they are; dates and times in ISO 8601;
   intervals in seconds; decimals as text, so that no digit is lost; bytes in base64; JSON columns as they are;
   numbers that JSON has not (NaN, infinities), UUIDs and addresses as text.
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

POLL: Final = 1.0  # seconds until the next look at a table that had nothing new
BATCH: Final = 1_000  # rows that are read at once
PAUSES: Final = (0.2, 10.0)  # seconds until the next attempt: at first, and at most
R = TypeVar("R")


class TableError(FeedError):
    """A table cannot be followed."""


class GoneError(TableError):
    """The database does not answer, which may pass."""


class Database(ABC):
    """A table in a database. All but `interrupt` is called in one thread; raises `GoneError` for what may pass."""

    @abstractmethod
    def open(self) -> None:
        """Connect, and check that the table can be followed; also after the connection was lost."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the query that runs; called in another thread."""

    @abstractmethod
    def last(self) -> int | None:
        """The highest id there is; raises `TableError` if that is no whole number."""

    @abstractmethod
    def rows(self, after: int | None, most: int) -> list[tuple[Any, ...]]:
        """So many rows after an id, in order: no row between them, or before, may become visible later.

        The id is the first column, then come those of the payload, the key and the time, if they are wanted.
        """

    waits = ""
    """What is waited for, if rows are there and may not be sent yet."""
    names: Sequence[str] = ()
    """The columns of the payload, in order."""


def as_json(names: Sequence[str], row: Sequence[Any]) -> bytes:
    """A row as a payload.

    >>> as_json(["id", "price", "at"], [1, decimal.Decimal("1.10"), datetime.date(2026, 1, 2)])
    b'{"id":1,"price":"1.10","at":"2026-01-02"}'
    """
    fields = dict(zip(names, row, strict=True))
    try:
        try:
            return _dumped(fields)
        except ValueError:  # a number that JSON has not, most likely
            return _dumped(_finite(fields))
    except ValueError as error:
        raise TableError(
            f"it cannot be told as JSON in UTF-8 ({error}): mend it, or leave its column out (--columns)"
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
            return [_finite(one) for one in value]
        case dict():
            return {name: _finite(one) for name, one in value.items()}
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
        f"a value of the type {type(value).__name__} cannot be told as JSON: leave its column out (--columns), or "
        "let a column of another type hold it"
    )


def as_time(value: Any) -> int | None:
    """An event time in µs: of a date (without a zone: UTC), of text in ISO 8601, or of seconds since 1970.

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
    """Follows a table. `key`, `time`: whether rows of the database have them, in this order, at their end."""

    def __init__(
        self,
        connector: Connector,
        database: Database,
        stream: str,
        *,
        key: bool = False,
        time: bool = False,
        batch: int = BATCH,
        poll: float = POLL,
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
        """Follow the table for ever; or, with `once`, until what is in it now is acknowledged."""
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
        """The rows after an id."""
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
        """Do something with the database, as soon as it is there."""
        loop = asyncio.get_running_loop()
        pause, until = PAUSES[0], loop.time() + patience

        def ask() -> R:
            if not self._open:
                self.database.open()
                self._open = True
            return query()

        while True:
            try:
                done = await loop.run_in_executor(self._thread, ask)
            except GoneError as error:
                self._open = False
                if loop.time() + pause > until:
                    raise
                self.progress.waits = "waits for the database"
                if pause == PAUSES[0] and self._on_trouble is not None:
                    self._on_trouble(f"{error}; trying again until it is back")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, PAUSES[1])
            else:
                self.progress.waits = ""
                return done


def whole(table: str, last: Any) -> int | None:
    """The highest id of a table, if it has rows."""
    if last is None or type(last) is int:
        return last
    raise TableError(f"{table}: an id is a whole number from 0 on, not {last!r:.80}")


def named(what: str, told: str, known: Sequence[str], table: str) -> str:
    """A column that there is."""
    if told not in known:
        raise TableError(
            f"{table} has no column {told!r} for {what}, but {', '.join(known) or 'none'}"
        )
    return told


def open_database(
    url: str,
    table: str,
    id: str,
    columns: Sequence[str] | None = None,
    key: str | None = None,
    time: str | None = None,
) -> Database:
    """A table of the database at a URL: `sqlite:///path`, or `postgresql://…`."""
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        from railgun.ingest.ready.sqlite import Sqlite

        return Sqlite(rest[1:], table, id, columns, key, time)
    if scheme in ("postgresql", "postgres"):
        from railgun.ingest.ready.postgres import Postgres

        return Postgres(url, table, id, columns, key, time)
    told = repr(scheme) if scheme != url else "this"  # which may have a password in it
    raise TableError(
        f"{told} is not known: sqlite:///path/file.db (four slashes for a path from the root), or "
        "postgresql://user@host/database"
    )
