"""Databases that sinks fill, for tests: SQLite and PostgreSQL; the fixture `database` is both."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

import psycopg

from railgun.sinkserver.staged import InMemoryRecords


class Database:
    """A database of a test, by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Carry out a statement; its rows."""
        if self.is_sqlite:
            with contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as db, db:
                return db.execute(sql).fetchall()
        with psycopg.connect(self.url) as other:
            cursor = other.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


def rows(*items: Any) -> InMemoryRecords:
    return InMemoryRecords([json.dumps(item).encode() for item in items])
