"""Tables as targets: rows and the id of their transaction at once; what does not fit is named and refused before."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.sinkserver.sinks import new, outside, place, served
from tests.sinkserver.tables import Database, rows

from railgun.flows.errors import ConnectorError
from railgun.flows.sink import TwoPhaseWriter
from railgun.ingest.errors import SinkError
from railgun.sinkserver.databases import APPLIED
from railgun.sinkserver.table_target import TableTarget
from railgun.sinkserver.targets import BadRecordError, TargetError


@pytest.fixture
def target(database: Database) -> Iterator[TableTarget]:
    made = TableTarget(database.url, "totals")
    yield made
    made.close()


def test_rows_come_once_however_often_they_are_applied(
    target: TableTarget, database: Database
) -> None:
    database.ask("CREATE TABLE totals (name TEXT, n BIGINT)")
    target.open()
    some = rows({"name": "ada", "n": 1}, {"n": 2}, {"n": 3, "name": None}, {"name": "grace"})
    target.check(some)
    assert database.ask("SELECT * FROM totals") == [], "trying leaves nothing"
    for _ in range(2):
        target.apply("a" * 32, some)
    target.close()
    target.open()
    target.apply("a" * 32, some)
    target.apply("b" * 32, rows({"n": 5}))
    assert database.ask("SELECT name, n FROM totals") == [
        ("ada", 1), (None, 2), (None, 3), ("grace", None), (None, 5),
    ]  # fmt: skip
    assert database.ask(f"SELECT target, txn FROM {APPLIED} ORDER BY number") == [
        ("totals", "a" * 32), ("totals", "b" * 32),
    ]  # fmt: skip


def test_a_table_is_made_of_the_first_records(target: TableTarget, database: Database) -> None:
    target.open()
    first = rows(
        {"i": 1, "r": 1, "b": True, "t": "x", "j": {"a": [1]}, "odd %s \"name\"": 1, "a.b": 2},
        {"r": 1.5, "none": None, "late": 1},
    )  # fmt: skip
    target.check(first)
    target.apply("a" * 32, first)
    kinds = {name: column.type for name, column in (target.columns or {}).items()}
    integer, real, boolean, text, plain = (
        ("INTEGER", "REAL", "BOOLEAN", "TEXT", "JSON")
        if database.is_sqlite
        else ("bigint", "double precision", "boolean", "text", "jsonb")
    )
    assert kinds == {
        "i": integer, "r": real, "b": boolean, "t": text, "j": plain, 'odd %s "name"': integer,
        "a.b": integer, "none": text, "late": integer,
    }  # fmt: skip
    [one, two] = database.ask('SELECT i, r, b, t, j, "odd %s ""name""", "a.b" FROM totals')
    read = (json.loads if database.is_sqlite else lambda value: value)(one[4])
    assert (*one[:4], read, *one[5:]) == (1, 1.0, True, "x", {"a": [1]}, 1, 2)
    assert two[1] == 1.5


def test_records_that_make_no_table_are_told(target: TableTarget, database: Database) -> None:
    target.open()
    with pytest.raises(
        BadRecordError, match=r"record 1, column 'n': it is text, and was integer before"
    ):
        target.check(rows({"n": 1}, {"n": "x"}))
    assert target.columns is None


@pytest.mark.parametrize(
    ("bad", "column", "why"),
    [
        ({"n": 1, "m": 2}, "m", "no such column: it has name, n, r, ok"),
        ({"n": "1"}, "n", "a whole number of 64 bits is expected"),
        ({"n": 1.5}, "n", "a whole number"),
        ({"n": True}, "n", "a whole number"),
        ({"n": 2**63}, "n", "64 bits"),
        ({"r": "1"}, "r", "a number is expected"),
        ({"r": 10**400}, "r", "64 bits"),
        ({"name": 5}, "name", "text is expected"),
        ({"name": {"first": "ada"}}, "name", "text is expected"),
        ({"ok": 1}, "ok", "true or false"),
        ({"name": "\ud83d"}, "name", "surrogates"),
        ({"n": -1}, None, "the database says"),
        ({"n": None, "name": "none"}, "n", "the database says"),
        ([1, 2], None, "no JSON object"),
        ({}, None, "no JSON object"),
    ],
)
def test_what_does_not_fit_is_refused_by_record_and_column(
    target: TableTarget, database: Database, bad: Any, column: str | None, why: str
) -> None:
    database.ask(
        "CREATE TABLE totals (name TEXT, n BIGINT NOT NULL DEFAULT 0 CHECK (n >= 0), r DOUBLE PRECISION, ok BOOLEAN)"
    )
    target.open()
    some = [{"name": "x", "n": n} for n in range(700)]
    with pytest.raises(BadRecordError, match=f"^table totals, record 600.*{why}") as caught:
        target.check(rows(*some[:600], bad, *some[600:]))
    assert (caught.value.record, caught.value.column) == (600, column)
    target.check(rows(*some))
    assert database.ask("SELECT * FROM totals") == []


def test_two_rows_of_one_transaction_that_exclude_each_other_are_found(
    target: TableTarget, database: Database
) -> None:
    database.ask("CREATE TABLE totals (n BIGINT PRIMARY KEY)")
    target.open()
    target.apply("a" * 32, rows({"n": 1}, {"n": 2}))
    with pytest.raises(BadRecordError, match=r"record 2.*the database says"):
        target.check(rows({"n": 3}, {"n": 4}, {"n": 3}))
    with pytest.raises(BadRecordError, match=r"record 1.*the database says"):
        target.apply("b" * 32, rows({"n": 3}, {"n": 1}))
    assert database.ask("SELECT n FROM totals") == [(1,), (2,)], "wholly or not at all"
    database.ask("DELETE FROM totals WHERE n = 1")
    target.apply("b" * 32, rows({"n": 3}, {"n": 1}))
    assert sorted(database.ask("SELECT n FROM totals")) == [(1,), (2,), (3,)]


def test_only_the_last_transactions_are_remembered(
    target: TableTarget, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railgun.sinkserver.table_target.REMEMBERED_TRANSACTIONS", 3)
    database.ask("CREATE TABLE totals (n BIGINT)")
    target.open()
    for n in range(10):
        for _ in range(2):
            target.apply(f"{n:032x}", rows({"n": n}))
    assert database.ask("SELECT n FROM totals") == [(n,) for n in range(10)]
    assert len(database.ask(f"SELECT * FROM {APPLIED}")) == 3


def test_a_table_that_is_mended_takes_what_it_refused(database: Database, tmp_path: Path) -> None:
    database.ask("CREATE TABLE totals (name TEXT)")
    with served(tmp_path / "sink", TableTarget(database.url, "totals")) as sink:
        flow = outside(sink)
        writer = flow.open(place())
        assert isinstance(writer, TwoPhaseWriter)
        writer.write([{"name": "ada", "n": 1}])
        with pytest.raises(
            ConnectorError, match=r"votes no: table totals, record 0, column 'n'.*\(BAD_RECORD\)"
        ):
            writer.prepare(1)
        writer.close()
        database.ask("ALTER TABLE totals ADD COLUMN n BIGINT")
        writer = flow.open(place(2))
        assert isinstance(writer, TwoPhaseWriter)
        writer.write([{"name": "ada", "n": 1}])
        flow.commit(writer.prepare(2))
        writer.close()
    assert database.ask("SELECT name, n FROM totals") == [("ada", 1)]


def test_a_table_with_a_schema(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as db:
        db.execute("CREATE SCHEMA IF NOT EXISTS deep")
    target = TableTarget(postgres_url, "deep.sums")
    target.open()
    target.check(rows({"n": 1}))
    target.apply(new(), rows({"n": 1}))
    target.close()
    assert Database(postgres_url).ask("SELECT n FROM deep.sums") == [(1,)]


def test_types_of_postgres_that_json_has_not(postgres_url: str) -> None:
    database = Database(postgres_url)
    database.ask(
        "CREATE TABLE kinds (at timestamptz, amount numeric(30, 2), tags text[], span interval, id uuid)"
    )
    target = TableTarget(postgres_url, "kinds")
    target.open()
    good = {
        "at": "2024-05-01T12:00:00Z", "amount": 12345678901234567890, "tags": ["a", "b"], "span": "2 days",
        "id": "5f0c9d1e-0000-4000-8000-000000000000",
    }  # fmt: skip
    target.check(rows(good))
    target.apply(new(), rows(good))
    with pytest.raises(
        BadRecordError,
        match=r"record 1.*the database says: invalid input syntax for type timestamp",
    ):
        target.check(rows(good, {"at": "yesterdayish"}))
    target.close()
    [found] = database.ask(
        "SELECT extract(epoch FROM at)::bigint, amount::text, tags, span::text FROM kinds"
    )
    assert found == (1714564800, "12345678901234567890.00", ["a", "b"], "2 days")


def test_a_constraint_that_waits_for_the_end_is_looked_at_before_the_vote(
    postgres_url: str,
) -> None:
    database = Database(postgres_url)
    database.ask("CREATE TABLE waits (n bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    target = TableTarget(postgres_url, "waits")
    target.open()
    with pytest.raises(BadRecordError, match="duplicate key") as caught:
        target.check(rows({"n": 0}, {"n": 1}, {"n": 1}))
    assert (caught.value.record, caught.value.column) == (2, "n")
    target.check(rows({"n": 1}, {"n": 2}))
    target.close()


def test_a_database_that_is_gone_comes_back(database: Database, target: TableTarget) -> None:
    database.ask("CREATE TABLE totals (n BIGINT)")
    target.open()
    if database.is_sqlite:
        with contextlib.closing(sqlite3.connect(database.url.removeprefix("sqlite:///"))) as other:
            target.database._db.execute("PRAGMA busy_timeout=10")  # type: ignore[attr-defined]
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(TargetError, match="locked"):
                target.apply("a" * 32, rows({"n": 1}))
    else:
        me = "pid <> pg_backend_pid() AND datname = current_database()"
        database.ask(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {me}")
    target.apply("a" * 32, rows({"n": 1}))
    assert database.ask("SELECT n FROM totals") == [(1,)]


def test_urls_names_and_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SinkError, match="'mysql' is no URL of a database"):
        TableTarget("mysql://user:hidden@host/db", "t")
    with pytest.raises(SinkError, match="is no name of a table"):
        TableTarget("sqlite:///x.db", "t; DROP TABLE t")
    shown = str(TableTarget("postgresql://user:hidden@host/db?password=hidden", "t"))
    assert shown == "t in postgresql://host/db"
    for nowhere in ("sqlite:///", "sqlite:///:memory:"):
        with pytest.raises(SinkError, match="is no file, so all would be gone") as caught:
            TableTarget(nowhere, "t")
        assert caught.value.code == "BAD_URL"
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SinkError, match=r"pip install 'railgun\[postgres\]'"):
        TableTarget("postgresql://host/db", "t")
