"""Tables, pushed into a flow: whatever happens, its output is the rows of the table, in the order of their ids."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from tests.ingest.ready_connectors import Fed, eventually, fed, running, stop
from tests.services import postgres

from railgun.ingest.ready.table import Database, TableError, as_json, as_time, open_database


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Fed]:
    with fed(tmp_path) as running_flow:
        yield running_flow


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.server() as made:
        yield made


@pytest.fixture
def connection(server: postgres.Server) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server.url, autocommit=True) as made:
        made.execute("SET lock_timeout = '20s'")
        for (left,) in made.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            made.execute(psycopg.sql.SQL("ROLLBACK PREPARED {}").format(left))
        made.execute("DROP SCHEMA public CASCADE")
        made.execute("CREATE SCHEMA public")
        yield made


def rows(flow: Fed, stream: str) -> list[dict[str, Any]]:
    """What the flow has committed; each message has the id of its row."""
    flow.job.snapshot()
    found = flow.rows().get(stream, [])
    told = [json.loads(row[3].encode("latin-1")) for row in found]
    assert [row[0] for row in found] == [one["id"] for one in told]
    return told


@contextlib.contextmanager
def opened(*given: Any) -> Iterator[Database]:
    database = open_database(*given)
    try:
        database.open()
        yield database
    finally:
        database.close()


# ---------------------------------------------------------------- values


def test_values_as_json() -> None:
    row = {
        "text": "é\n\"", "none": None, "true": True, "float": 0.1, "big": 2**62,
        "decimal": Decimal("1.10"), "bytes": b"\x00\xff", "day": datetime.date(2026, 1, 2),
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        "length": datetime.timedelta(hours=1, milliseconds=1), "list": [1, Decimal("2.0")],
    }  # fmt: skip
    assert json.loads(as_json(list(row), list(row.values()))) == {
        "text": "é\n\"", "none": None, "true": True, "float": 0.1, "big": 2**62,
        "decimal": "1.10", "bytes": base64.b64encode(b"\x00\xff").decode(), "day": "2026-01-02",
        "at": "2026-01-02T03:04:05.000006+00:00", "length": 3600.001, "list": [1, "2.0"],
    }  # fmt: skip
    assert as_json(["a", "b"], [float("nan"), float("-inf")]) == b'{"a":"NaN","b":"-Infinity"}'
    deep = {"a": [{"b": float("inf")}, float("nan")], "c": Decimal("NaN")}
    assert as_json(["j"], [deep]) == b'{"j":{"a":[{"b":"Infinity"},"NaN"],"c":"NaN"}}'
    with pytest.raises(TableError, match="type object"):
        as_json(["a"], [object()])
    for bad in ("\ud800", {"a": ["\ud800"]}):
        with pytest.raises(TableError, match=r"as JSON in UTF-8 .*--columns"):
            as_json(["a"], [bad])


def test_times() -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    micros = 1767323045000006
    assert as_time(at) == as_time(at.replace(tzinfo=datetime.UTC)) == as_time(str(at)) == micros
    assert as_time(micros / 1e6) == pytest.approx(micros, abs=1)
    for bad in ("yesterday", True and object(), float("nan")):
        with pytest.raises(TableError):
            as_time(bad)


# ---------------------------------------------------------------- SQLite


def test_sqlite_refuses_what_cannot_be_followed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute('CREATE TABLE "or""ders" (id INTEGER PRIMARY KEY, "na me" TEXT)')
        db.execute("CREATE TABLE loose (id INTEGER, n INTEGER)")
        db.execute("CREATE TABLE fixed (n INTEGER, id INTEGER UNIQUE)")
        db.execute('INSERT INTO "or""ders" VALUES (3, \'x\')')
    with opened(url, 'or"ders', "id") as database:
        assert database.rows(None, 10) == [(3, 3, "x")]
        assert database.last() == 3
    with opened(url, "fixed", "id", ["n"]) as database:
        assert (database.rows(None, 10), database.last(), list(database.names)) == ([], None, ["n"])
    for given, match in (
        (("loose", "id"), "not unique"),
        (("fixed", "nope"), "no column 'nope' for --id"),
        (("fixed", "id", ["x"]), "no column 'x' for --columns"),
        (("fixed", "id", None, "k"), "no column 'k' for --key"),
        (("missing; DROP TABLE fixed", "id"), "has no table"),
    ):
        with pytest.raises(TableError, match=match), opened(url, *given):
            pass
    with sqlite3.connect(tmp_path / "a.db") as db:
        for table, ids in {
            "reals": "1.0), (2.0",
            "texts": "1), (2), ('z'",
            "parts": "1), (2.5",
        }.items():
            db.execute(f"CREATE TABLE {table} (id {'REAL' * (table == 'reals')} UNIQUE)")
            db.execute(f"INSERT INTO {table} VALUES ({ids})")
    for table in ("reals", "texts", "parts"):
        with (
            opened(url, table, "id") as database,
            pytest.raises(TableError, match=f"{table}: an id is a whole number from 0 on, not"),
        ):
            database.last()
    (tmp_path / "b.db").write_bytes(b"this is something else" * 100)
    with (
        pytest.raises(TableError, match="not a database"),
        opened(f"sqlite:///{tmp_path / 'b.db'}", "t", "id"),
    ):
        pass
    for url in ("mysql://h/d", "sqlite://", "x", "host=h password=hidden-word"):
        with pytest.raises(TableError, match="not known") as told:
            open_database(url, "t", "id")
        assert "hidden" not in str(told.value)


def test_a_table_of_sqlite_is_followed_while_it_grows(flow: Fed, tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    db = sqlite3.connect(path, timeout=30)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, who TEXT, at TEXT, price REAL, x BLOB)"
    )

    def insert(count: int) -> None:
        with db:
            for n in range(count):
                at = f"2026-01-01T00:00:{n % 60:02}"
                values = (f"who-{n % 7}", at, n / 8, bytes([n % 256]))
                db.execute("INSERT INTO orders (who, at, price, x) VALUES (?, ?, ?, ?)", values)

    insert(5000)
    words = (
        "table", f"sqlite:///{path}", "orders", "--id", "id", "--key", "who", "--time", "at",
        "--poll", "0.02", "--batch", "300",
    )  # fmt: skip
    for _ in range(4):
        with running(flow.start(*words)) as process:
            insert(2000)
            before = flow.count()
            eventually(lambda before=before: flow.count() > before)  # type: ignore[misc]
            process.kill()
    insert(10)
    code, told = flow.type(*words, "--once")
    assert code == 0, told
    want = [
        {
            "id": row[0], "who": row[1], "at": row[2], "price": row[3],
            "x": base64.b64encode(row[4]).decode(),
        }
        for row in db.execute("SELECT * FROM orders ORDER BY id")
    ]  # fmt: skip
    assert len(want) == 13_010
    eventually(lambda: flow.count() >= len(want))
    assert rows(flow, "orders") == want
    for _, key, time, payload in flow.rows()["orders"][:100]:
        row = json.loads(payload)
        assert (key, time) == (row["who"], as_time(row["at"]))
    code, told = flow.type(*words, "--once")
    assert (code, told[-1]["progress"]["sent"]) == (0, 0)


def test_bad_rows_and_commands_are_told(flow: Fed, tmp_path: Path) -> None:
    path = tmp_path / "bad.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, at TEXT)")
        db.execute("INSERT INTO t VALUES (1, '2026-01-01'), (2, 'yesterday')")
    url = f"sqlite:///{path}"
    code, told = flow.type("table", url, "t", "--id", "id", "--time", "at", "--once")
    assert code == 1
    assert "row 2: the time 'yesterday'" in told[-1]["error"]["message"]
    code, told = flow.type("table", "mysql://x", "t", "--id", "id")
    assert (code, told[-1]["error"]["kind"]) == (2, "usage")
    missing = f"sqlite:///{tmp_path / 'missing.db'}"
    code, told = flow.type("table", missing, "t", "--id", "id", "--timeout", "1")
    assert code == 1
    assert "unable to open" in told[-1]["error"]["message"]
    assert not (tmp_path / "missing.db").exists()


# ---------------------------------------------------------------- PostgreSQL


def test_postgres_refuses_what_cannot_be_followed(
    server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE good (id bigint GENERATED ALWAYS AS IDENTITY, n int)")
    connection.execute("CREATE TABLE loose (id int, n int)")
    connection.execute("CREATE TABLE cached (id serial PRIMARY KEY)")
    connection.execute("ALTER SEQUENCE cached_id_seq CACHE 20")
    connection.execute("CREATE SEQUENCE shared CACHE 5")
    connection.execute("CREATE TABLE sharing (id int PRIMARY KEY DEFAULT 1 + nextval('shared'))")
    connection.execute("CREATE TABLE numbers (id numeric PRIMARY KEY)")
    connection.execute("INSERT INTO numbers VALUES (1), (2.5)")
    connection.execute("CREATE VIEW seen AS SELECT * FROM good")
    connection.execute('CREATE SCHEMA "a b"')
    connection.execute('CREATE TABLE "a b"."t""t" (id int PRIMARY KEY)')
    connection.execute('INSERT INTO "a b"."t""t" VALUES (7)')
    with opened(server.url, 'a b.t"t', "id") as database:
        assert database.rows(None, 10) == [(7, 7)]
    connection.execute('DROP SCHEMA "a b" CASCADE')
    with opened(server.url, "good", "id") as database:
        assert (database.rows(None, 10), database.last()) == ([], None)
    with (
        opened(server.url, "numbers", "id") as database,
        pytest.raises(TableError, match="a whole number from 0 on"),
    ):
        database.last()
    for given, match in (
        (("loose", "id"), "not unique"),
        (("cached", "id"), "ALTER SEQUENCE cached_id_seq CACHE 1"),
        (("sharing", "id"), "ALTER SEQUENCE shared CACHE 1"),
        (("seen", "id"), "no table"),
        (("nothing", "id"), "has no table"),
        (("good", "nope"), "no column 'nope' for --id"),
    ):
        with pytest.raises(TableError, match=match), opened(server.url, *given):
            pass
    with (
        pytest.raises(TableError) as wrong,
        opened(server.url.replace("secret", "hidden-word"), "good", "id"),
    ):
        pass
    for bad in ("%zz@h/db", "@[::1]x/db", "@h:99x/db", "@x@h/db", "/1@h/db"):
        with pytest.raises(TableError, match="no URL of a database") as told:
            open_database(f"postgresql://u:hidden-word{bad}", "t", "id")
        assert "hidden" not in str(told.value)
        assert told.value.__suppress_context__ or told.value.__context__ is None
    assert "password authentication failed" in str(wrong.value)
    assert "hidden-word" not in str(wrong.value)


def test_a_server_that_follows_another_is_refused(
    server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    with (
        server.followed() as other,
        pytest.raises(TableError, match="is a replica"),
        opened(other.url, "t", "id"),
    ):
        pass


def test_rows_wait_for_those_with_lower_ids(
    server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    """The commits are in the wrong order: 2 before 1. Nothing is read before 1 has come, or will never come."""
    connection.execute("CREATE TABLE t (id serial PRIMARY KEY, who text)")
    for early in (
        False,
        True,
    ):  # whether the slow one has the lower transaction number, or the higher
        for ends in ("COMMIT", "ROLLBACK"):
            connection.execute("TRUNCATE t RESTART IDENTITY")
            with psycopg.connect(server.url) as slow, psycopg.connect(server.url) as fast:
                if not early:
                    fast.execute("SELECT pg_current_xact_id()")
                slow.execute("INSERT INTO t (who) VALUES ('slow')")
                fast.execute("INSERT INTO t (who) VALUES ('fast')")
                fast.commit()
                with opened(server.url, "t", "id") as database:
                    assert database.last() == 2
                    assert database.rows(None, 10) == []
                    assert "waits for transactions" in database.waits
                    slow.execute(ends)
                    found = [row[2] for row in database.rows(None, 10)]
                    assert found == (["slow", "fast"] if ends == "COMMIT" else ["fast"])
                    assert database.waits == ""


def test_later_writers_hold_up_nobody(
    server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    with (
        psycopg.connect(server.url) as slow,
        psycopg.connect(server.url) as later,
        opened(server.url, "t", "id") as database,
    ):
        slow.execute("INSERT INTO t DEFAULT VALUES")
        connection.execute("INSERT INTO t DEFAULT VALUES")
        assert database.rows(None, 10) == []
        later.execute("INSERT INTO t DEFAULT VALUES")
        slow.commit()
        assert [row[0] for row in database.rows(None, 10)] == [1, 2]
        assert database.rows(2, 10) == []  # 3 is not visible, so there is nothing to wait for
        assert database.waits == ""


def test_writers_of_parts_and_prepared_transactions_count(
    server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE t (id serial, day int) PARTITION BY RANGE (day)")
    connection.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    connection.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)")
    with psycopg.connect(server.url) as slow, opened(server.url, "t", "id") as database:
        slow.execute("INSERT INTO t1 (day) VALUES (1)")
        connection.execute("INSERT INTO t2 (day) VALUES (11)")
        assert database.rows(None, 10) == []
        slow.execute("PREPARE TRANSACTION 'p'")
        assert database.rows(None, 10) == []
        assert "prepared" in database.waits
        connection.execute("COMMIT PREPARED 'p'")
        assert [row[0] for row in database.rows(None, 10)] == [1, 2]


def writing(url: str, seed: int, until: threading.Event) -> Callable[[], None]:
    """Transactions of all lengths, some of which fail."""

    def write() -> None:
        chance = Random(seed)
        with psycopg.connect(url) as db:
            while not until.is_set():
                for n in range(chance.randrange(1, 4)):
                    db.execute("INSERT INTO t (who, n) VALUES (%s, %s)", (seed, Decimal(n) / 4))
                    until.wait(chance.choice((0, 0, 0.001, 0.01)))
                if chance.random() < 0.1:
                    db.rollback()
                else:
                    db.commit()

    return write


@pytest.mark.slow
def test_commits_out_of_order_kills_and_strict_equality(
    flow: Fed, server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(
        "CREATE TABLE t (id bigserial PRIMARY KEY, who int, n numeric, at timestamptz DEFAULT now())"
    )
    until = threading.Event()
    writers = [threading.Thread(target=writing(server.url, seed, until)) for seed in range(6)]
    for writer in writers:
        writer.start()
    words = ("table", server.url, "t", "--id", "id", "--time", "at", "--key", "who")
    try:
        for turn in range(3):
            with running(flow.start(*words, "--poll", "0.01", "--batch", "20")) as process:
                count = flow.count()
                eventually(lambda count=count: flow.count() > count + 100)  # type: ignore[misc]
                if turn == 1:
                    flow.kill_worker()
                    eventually(lambda count=count: flow.count() > count + 200)  # type: ignore[misc]
                process.kill()
    finally:
        until.set()
        for writer in writers:
            writer.join()
    code, told = flow.type(*words, "--once")
    assert code == 0, told
    found = connection.execute("SELECT id, who, n, at FROM t ORDER BY id").fetchall()
    assert len(found) > 400
    want = [{"id": i, "who": w, "n": str(n), "at": at.isoformat()} for i, w, n, at in found]
    eventually(lambda: flow.count() >= len(want))
    assert rows(flow, "t") == want


def test_a_server_that_goes_away_is_waited_for(
    flow: Fed, server: postgres.Server, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    connection.execute("INSERT INTO t SELECT FROM generate_series(1, 500)")
    words = ("table", server.url, "t", "--id", "id", "--poll", "0.02")
    with running(flow.start(*words)) as process:
        eventually(lambda: flow.count() == 500)
        server.stop()
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any('"warning"' in line and "trying again" in line for line in lines)
        finally:
            server.start()
        with psycopg.connect(server.url, autocommit=True) as again:
            again.execute("INSERT INTO t SELECT FROM generate_series(1, 500)")
            eventually(lambda: flow.count() >= 1000)
            want = again.execute("SELECT id FROM t ORDER BY id").fetchall()
        assert rows(flow, "t") == [{"id": id_} for (id_,) in want]
        code, _ = stop(process)
        assert code == 0
