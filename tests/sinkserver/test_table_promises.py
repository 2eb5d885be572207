"""What a table promises: a yes can be kept, what is committed stays, nobody waits for ever, values are as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.sinkserver.sinks import eventually, new
from tests.sinkserver.tables import Database, rows

from railgun.ingest.errors import LostError
from railgun.sinkserver.databases import APPLIED
from railgun.sinkserver.participant import Participant
from railgun.sinkserver.staged import InMemoryRecords
from railgun.sinkserver.table_target import TableTarget
from railgun.sinkserver.targets import BadRecordError, TargetError
from railgun.transport.packed_records import pack


@pytest.fixture
def target(database: Database) -> Iterator[TableTarget]:
    made = TableTarget(database.url, "totals")
    yield made
    made.close()


def prepared(part: Participant, snapshot: int, worker: int, *items: Any, flow: str = "demo") -> str:
    """A transaction with these rows gets a yes."""
    txn = new()
    records = list(rows(*items))
    part.begin(txn, flow, "out", 1, worker)
    part.prepare(txn, snapshot, part.data(txn, 0, pack(records)), len(records))
    return txn


class Unread(InMemoryRecords):
    """Records that cannot be read."""

    def __init__(self) -> None:
        super().__init__([])

    def batches(self) -> Iterator[list[bytes]]:
        raise LostError("DAMAGED", "they are not whole")


# ---------------------------------------------------------------- a yes can be kept


def test_of_two_transactions_that_exclude_each_other_one_gets_a_no(
    database: Database, target: TableTarget, tmp_path: Path
) -> None:
    database.ask("CREATE TABLE totals (k BIGINT PRIMARY KEY, w TEXT)")
    part = Participant(tmp_path / "sink", target)
    part.open()
    one = prepared(part, 1, 0, {"k": 1, "w": "a"})
    for snapshot, flow in ((1, "demo"), (2, "demo"), (1, "other")):
        with pytest.raises(BadRecordError, match=r"record 1, column 'k'.*database says") as caught:
            prepared(part, snapshot, 1, {"k": 2}, {"k": 1, "w": "b"}, flow=flow)
        assert ("is prepared and not committed yet" in str(caught.value)) == (snapshot == 1)
    others = [prepared(part, 1, 1, {"k": 2}), prepared(part, 2, 1, {"k": 3})]
    for txn in (*others, one):
        part.commit(txn)
    again = prepared(part, 3, 0, {"k": 4})
    part.abort(again)
    part.commit(prepared(part, 3, 0, {"k": 4}))
    part.close()
    assert database.ask("SELECT k FROM totals ORDER BY k") == [(1,), (2,), (3,), (4,)]


def test_a_row_may_refer_only_to_what_comes_first_for_certain(
    postgres: Database, tmp_path: Path
) -> None:
    postgres.ask("CREATE TABLE tree (id bigint PRIMARY KEY, up bigint REFERENCES tree)")
    part = Participant(tmp_path / "sink", TableTarget(postgres.url, "tree"))
    part.open()
    prepared(part, 1, 0, {"id": 1})
    with pytest.raises(BadRecordError, match=r"record 0, column 'up'.*is not present"):
        prepared(part, 1, 1, {"id": 2, "up": 1})  # this one may be committed first
    part.commit(prepared(part, 2, 1, {"id": 2, "up": 1}))  # and this one cannot
    part.close()
    assert postgres.ask("SELECT id, up FROM tree") == [(1, None), (2, 1)]


def test_others_are_looked_at_only_where_rows_can_exclude_each_other(
    database: Database, target: TableTarget
) -> None:
    database.ask("CREATE TABLE totals (n BIGINT NOT NULL CHECK (n > 0))")
    target.open()
    target.check_beside(rows({"n": 1}), {new(): Unread()}, {new(): Unread()})
    database.ask("CREATE UNIQUE INDEX one_n ON totals (n)")
    with pytest.raises(TargetError, match=r"promised before.*they are not whole"):
        target.check_beside(rows({"n": 1}), {new(): Unread()}, {})
    broken = {"a": Unread(), "b": rows({"n": 2}), "c": rows({"n": 2})}  # since it was promised
    target.check_beside(rows({"n": 1}), {}, broken)
    with pytest.raises(BadRecordError, match=r"record 1.*database says.*not committed yet"):
        target.check_beside(rows({"n": 1}, {"n": 2}), {}, broken)
    assert database.ask("SELECT * FROM totals") == []
    target.apply("a" * 32, rows({"n": 2}))
    done = {"a" * 32: rows({"n": 2})}  # and the sink does not know it yet
    target.check_beside(rows({"n": 1}), done, {})
    target.check_beside(rows({"n": 1}), {}, done)


def test_what_is_refused_at_the_end_is_named_if_it_is_known(postgres: Database) -> None:
    postgres.ask(
        "CREATE TABLE tree (id bigint PRIMARY KEY, up bigint REFERENCES tree DEFERRABLE INITIALLY DEFERRED)"
    )
    target = TableTarget(postgres.url, "tree")
    target.open()
    late = ({"id": 1, "up": 2}, {"id": 2})
    target.check(rows(*late))
    target.check_beside(rows(*late), {new(): rows({"id": 3, "up": 4}, {"id": 4})}, {})
    with pytest.raises(BadRecordError, match=r"at the end.*\(9\)") as caught:
        target.check(rows(*late, {"id": 3, "up": 9}))
    assert (caught.value.record, caught.value.column) == (-1, "up"), "not the first, which is good"
    with pytest.raises(BadRecordError, match=r"\(9\)") as caught:
        target.check(rows({"id": 1}, {"id": 3, "up": 9}))
    assert (caught.value.record, caught.value.column) == (1, "up")
    target.close()


# ---------------------------------------------------------------- what is committed stays


def test_a_commit_is_safe_whatever_the_database_does_by_default(
    database: Database, target: TableTarget
) -> None:
    how = "" if database.is_sqlite else ", how text DEFAULT current_setting('synchronous_commit')"
    database.ask(f"CREATE TABLE totals (n BIGINT{how})")
    if not database.is_sqlite:
        name = database.url.rpartition("/")[2]
        database.ask(f"ALTER DATABASE {name} SET synchronous_commit = off")
    target.open()
    target.apply(new(), rows({"n": 1}))
    if database.is_sqlite:  # EXTRA: the directory is synced after the commit, too
        db = target.database._db  # type: ignore[attr-defined]
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)
    else:
        assert database.ask("SELECT n, how FROM totals") == [(1, "on")]


def test_each_sink_that_fills_a_table_remembers_its_own(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railgun.sinkserver.table_target.REMEMBERED_TRANSACTIONS", 3)
    database.ask("CREATE TABLE totals (n BIGINT)")
    old = TableTarget(database.url, "totals")  # as it was before sinks had ids
    old.open()
    old.apply("a" * 32, rows({"n": 1}))
    old.close()
    for start in range(2):
        parts = [Participant(tmp_path / name, TableTarget(database.url, "totals")) for name in "xy"]
        for part in parts:
            part.open()
        x, y = (part.target for part in parts)
        assert x.sink != y.sink
        x.apply("a" * 32, rows({"n": 1}))
        x.apply("b" * 32, rows({"n": 2}))
        for n in range(5):
            y.apply(new(), rows({"n": 10 + 5 * start + n}))
        for part in parts:
            part.close()
    assert database.ask("SELECT n FROM totals ORDER BY n") == [
        (1,),
        (2,),
        *((n,) for n in range(10, 20)),
    ]
    kept = database.ask(f"SELECT count(*) FROM {APPLIED} GROUP BY target ORDER BY 1")
    assert kept == [(1,), (1,), (3,)]


def test_a_database_may_be_made_anew_while_the_sink_runs(
    database: Database, target: TableTarget
) -> None:
    target.open()
    for way in (target.check, lambda some: None):
        way(rows({"n": 1}))
        target.apply(new(), rows({"n": 1}))
        assert database.ask("SELECT n FROM totals") == [(1,)]
        for table in ("totals", APPLIED):
            database.ask(f"DROP TABLE {table}")
    target.apply("a" * 32, rows({"n": 1}))
    database.ask("DROP TABLE totals")
    target.apply("a" * 32, Unread())  # it is known, and nothing else is asked
    with pytest.raises(BadRecordError, match="text, and was integer before"):
        target.check(rows({"n": 1}, {"n": "x"}))


def test_a_file_of_sqlite_that_is_taken_away_is_made_anew(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/out.db")
    target = TableTarget(database.url, "totals")
    target.open()
    for n in range(3):
        target.check(rows({"n": n}))
        target.apply(new(), rows({"n": n}))
        assert database.ask("SELECT n FROM totals") == [(n,)]
        (tmp_path / "out.db").unlink()
    target.close()


def test_a_database_that_is_not_there_yet_is_an_error_that_may_pass(tmp_path: Path) -> None:
    late = TableTarget(f"sqlite:///{tmp_path}/late/out.db", "totals")
    nobody = TableTarget("postgresql://tester@127.0.0.1:1/postgres", "totals")
    for target in (late, nobody):
        with pytest.raises(TargetError) as caught:
            target.open()
        assert caught.value.code == "TARGET"
    (tmp_path / "late").mkdir()
    late.open()
    late.close()


# ---------------------------------------------------------------- nobody waits for ever


def test_a_table_that_somebody_has_locked_is_an_error_that_may_pass(
    postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railgun.sinkserver.databases.LOCK_TIMEOUT_S", 0.02)
    postgres.ask("CREATE TABLE totals (n bigint)")
    target = TableTarget(postgres.url, "totals")
    target.open()
    with psycopg.connect(postgres.url) as other:
        other.execute("LOCK TABLE totals IN SHARE MODE")
        for way in (target.check, lambda some: target.apply("a" * 32, some)):
            with pytest.raises(TargetError, match="lock timeout"):
                way(rows({"n": 1}))
    target.apply("a" * 32, rows({"n": 1}))
    target.close()


def test_what_waits_is_interrupted(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railgun.sinkserver.databases.LOCK_TIMEOUT_S", 600.0)
    postgres.ask("CREATE TABLE totals (n bigint)")
    target = TableTarget(postgres.url, "totals")
    target.open()
    came: list[BaseException] = []

    def vote() -> None:
        try:
            target.check(rows({"n": 1}))
        except TargetError as error:
            came.append(error)

    with psycopg.connect(postgres.url) as other:
        other.execute("LOCK TABLE totals IN SHARE MODE")
        thread = threading.Thread(target=vote)
        thread.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        eventually(lambda: postgres.ask(waits), "the vote waits")
        target.interrupt()
        thread.join(60)
    assert "cancel" in str(came[0])
    target.close()


def test_what_is_interrupted_fails_until_it_is_opened_again(target: TableTarget) -> None:
    target.open()
    target.interrupt()
    with pytest.raises(TargetError, match="about to end"):
        target.check(rows({"n": 1}))
    target.open()
    target.check(rows({"n": 1}))


def test_whoever_may_not_make_tables_uses_those_that_are_there(postgres: Database) -> None:
    postgres.ask("CREATE TABLE totals (n bigint)")
    target = TableTarget(postgres.url, "totals")
    target.open()
    target.close()
    name = f"low{new()}"
    postgres.ask(f"CREATE ROLE {name} LOGIN PASSWORD 'low'")
    postgres.ask(f"GRANT SELECT, INSERT, DELETE ON ALL TABLES IN SCHEMA public TO {name}")
    postgres.ask(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {name}")
    low = TableTarget(postgres.url.replace("tester:secret", f"{name}:low"), "totals")
    low.open()
    low.check(rows({"n": 1}))
    low.apply(new(), rows({"n": 1}))
    postgres.ask(f"REVOKE INSERT ON totals FROM {name}")
    with pytest.raises(TargetError, match="permission denied") as caught:
        low.check(rows({"n": 1}))
    assert caught.value.code == "TARGET", "no record is to blame"
    low.close()


# ---------------------------------------------------------------- values are as they were


def test_types_are_known_by_what_they_are_and_not_by_their_names(postgres: Database) -> None:
    postgres.ask("CREATE TYPE realm AS ENUM ('north', 'south')")
    postgres.ask("CREATE DOMAIN pointtext AS integer CHECK (VALUE > 0)")
    postgres.ask("CREATE DOMAIN deeper AS pointtext")
    postgres.ask(
        "CREATE TABLE kinds (r realm, p deeper, c character(3), v varchar, d double precision[])"
    )
    target = TableTarget(postgres.url, "kinds")
    target.open()
    target.check(rows({"r": "north", "p": 1, "c": "abc", "v": "v", "d": [1.5, float("nan")]}))
    for bad, column in (
        ({"r": "west"}, None),
        ({"p": "1"}, "p"),
        ({"p": 0}, None),
        ({"v": 1}, "v"),
    ):
        with pytest.raises(BadRecordError) as caught:
            target.check(rows(bad))
        assert (caught.value.record, caught.value.column) == (0, column)
    target.close()


def test_values_that_cannot_be_there_as_they_are_are_bad_records(
    database: Database, target: TableTarget
) -> None:
    kind = "JSON" if database.is_sqlite else "jsonb"
    database.ask(f"CREATE TABLE totals (j {kind}, r DOUBLE PRECISION)")
    target.open()
    bad = [
        (b'{"j": "\\ud800"}', "j", "surrogates"),
        (b'{"j": {"a": ["\\ud800"]}}', "j", "surrogates"),
        (b'{"j": [NaN]}', "j", "not JSON compliant"),
        (b'{"j": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None, "nested too deeply|stack depth"),
        (b'{"r": 9007199254740993}', "r", "a number that a real can hold exactly"),
    ]
    for record, column, why in bad:
        with pytest.raises(BadRecordError, match=why) as caught:
            target.check(InMemoryRecords([b'{"r": 9007199254740992}', record]))
        assert (caught.value.record, caught.value.column) == (1, column)


def test_sqlite_takes_nothing_that_it_would_change(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/out.db")
    database.ask(
        "CREATE TABLE odd (r REAL, n NUMERIC, s STRING, t TEXT, x, d DATETIME, j JSON, c CHARINT)"
    )
    target = TableTarget(database.url, "odd")
    target.open()
    big = 2**63 - 1
    good = {
        "r": 0.5,
        "n": big,
        "s": "7a",
        "t": "007",
        "x": "007",
        "d": "2024-05-01",
        "j": big,
        "c": "c",
    }
    target.check(rows(good))
    target.apply(new(), rows(good, {"r": float("inf"), "s": 7, "j": "007"}))
    assert database.ask("SELECT * FROM odd") == [
        (0.5, big, "7a", "007", "007", "2024-05-01", big, "c"),
        (float("inf"), None, 7, None, None, None, '"007"', None),
    ]  # fmt: skip
    bad: list[tuple[dict[str, Any], str]] = [
        ({"r": float("nan")}, "would store NULL"),
        ({"n": 2**63}, "64 bits"),
        ({"j": 2**63}, "64 bits"),
        ({"s": "007"}, "would store a number"),
        ({"d": " 1e5 "}, "would store a number"),
        ({"c": "1"}, "would store a number"),
    ]
    for record, why in bad:
        with pytest.raises(BadRecordError, match=why) as caught:
            target.check(rows(record))
        assert (caught.value.record, caught.value.column) == (0, next(iter(record)))
    target.close()


def test_names_that_cannot_be_columns_make_no_table(
    database: Database, target: TableTarget
) -> None:
    target.open()
    names = ["", "a\0b", "\ud800"] + ([] if database.is_sqlite else ["ü" * 32])
    for name in names:
        with pytest.raises(BadRecordError, match="name") as caught:
            target.check(rows({"n": 1}, {name: 1}))
        assert (caught.value.record, caught.value.column) == (1, name)
        assert target.columns is None
    target.check(rows({"ü" * 31: 1}))
