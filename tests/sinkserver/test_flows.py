"""Flows that write to a sink outside, on real processes: whatever is killed, what comes out is what went in."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.engine.controller import flows, tallies
from tests.engine.controller.tallies import (
    committed,
    expected,
    kill,
    record,
    recovered,
    saved,
    tally,
)
from tests.sinkserver import sinks
from tests.sinkserver.sinks import Process, eventually

from railgun import Flow, FlowFailedError, Generate, Outside, Settings
from railgun.job import Job

RATE = 4_000.0
KILLS = 3
PATIENT = Settings(restarts_within=0.01)  # failures do not add up: they are many, and on purpose


def tallying(
    sink: Process, count: int | None = None, *, rows: bool = False, **options: Any
) -> Flow:
    """Numbered records, counted by key, to a sink outside."""
    flow = Flow("tallies")
    source = Generate(record, rate=RATE, count=count, partitions=tallies.PARTS)
    keyed = flow.source(source, name="records").key_by(lambda item: item[0], name="keys")
    lines: Any = keyed.stateful_map(tally, initial=int, name="tally")
    if rows:
        lines = lines.map(
            lambda line: dict(zip(("key", "number", "seen"), line, strict=True)), name="rows"
        )
    lines.sink(Outside(data=sink.data, **options), name="out")
    return flow


def started(flow: Flow, tmp_path: Path, workers: int = 2, **options: Any) -> Any:
    options.setdefault("snapshots", saved(tmp_path, 0.2))
    options.setdefault("by_value", [sys.modules[__name__], tallies, flows, sinks])
    options.setdefault("settings", PATIENT)
    return flows.started(flow, workers, **options)


def check(found: list[list[int]], *, in_order: bool = True) -> None:
    """What was read of each part of the source is there once, and what is of a key in its order."""
    by_key: dict[int, list[int]] = {}
    read = [0] * tallies.PARTS
    for key, number, _ in found:
        by_key.setdefault(key, []).append(number)
        part = key % tallies.PARTS
        read[part] = max(read[part], (number * tallies.KEYS + key) // tallies.PARTS + 1)
    for key, numbers in by_key.items():
        assert not in_order or numbers == list(range(len(numbers))), f"key {key}"
    whole = [line for part in range(tallies.PARTS) for line in tallies.lines_of(part, read[part])]
    assert sorted(found) == sorted(whole)
    assert len(found) > RATE / 4


def drained(job: Job) -> None:
    """Let the sources end, and all come out."""
    assert job.stop(drain=True, timeout=flows.DEADLINE)


def in_file(path: Path) -> list[list[int]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_sqlite(path: Path) -> list[list[int]]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [
            list(row) for row in db.execute("SELECT key, number, seen FROM counted ORDER BY rowid")
        ]


def in_postgres(url: str) -> list[list[int]]:
    with psycopg.connect(url) as db:
        return [
            list(row) for row in db.execute("SELECT key, number, seen FROM counted ORDER BY place")
        ]


def kill_in_a_loop(sink: Process, seen: Callable[[], int], times: int = KILLS) -> None:
    """Kill the sink whenever something has come out since, and start it again."""
    for _ in range(times):
        before = seen()
        eventually(lambda: seen() > before, "more comes out")  # noqa: B023
        sink.kill()
        sink.start()


def test_the_sink_is_killed_in_a_loop_and_fills_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = Process(tmp_path / "sink", "files", str(out))
    sink.start()
    try:
        with started(tallying(sink), tmp_path) as job:
            kill_in_a_loop(sink, lambda: out.stat().st_size)
            drained(job)
        check(in_file(out))
        sink.stop()
        assert list((sink.data / "staged").iterdir()) == [], "nothing is left over"
        sink.stop()
        check(in_file(out))
    finally:
        sink.kill()


def test_the_sink_is_killed_in_a_loop_and_fills_a_table_of_sqlite(tmp_path: Path) -> None:
    db = tmp_path / "out.db"
    sink = Process(tmp_path / "sink", "table", f"sqlite:///{db}", "counted")
    sink.start()

    def seen() -> int:
        with contextlib.closing(sqlite3.connect(db)) as made, contextlib.suppress(sqlite3.Error):
            return int(made.execute("SELECT count(*) FROM counted").fetchone()[0])
        return 0  # there is no table yet, or somebody writes

    try:
        with started(tallying(sink, rows=True), tmp_path) as job:
            kill_in_a_loop(sink, seen)
            drained(job)
        check(in_sqlite(db))
    finally:
        sink.kill()


def test_the_sink_is_killed_in_a_loop_and_fills_a_table_of_postgres(
    tmp_path: Path, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url) as made:
        made.execute(
            "CREATE TABLE counted (place bigserial, key bigint, number bigint, seen bigint)"
        )
    sink = Process(tmp_path / "sink", "table", postgres_url, "counted")
    sink.start()
    try:
        with (
            psycopg.connect(postgres_url, autocommit=True) as db,
            started(tallying(sink, rows=True), tmp_path) as job,
        ):

            def seen() -> int:
                [count] = db.execute("SELECT count(*) FROM counted").fetchone() or (0,)
                return int(count)

            kill_in_a_loop(sink, seen)
            drained(job)
        check(in_postgres(postgres_url))
    finally:
        sink.kill()


def test_workers_and_the_sink_die_and_the_flow_is_scaled(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = Process(tmp_path / "sink", "files", str(out))
    with started(tallying(sink), tmp_path) as job:
        sink.start()  # late
        try:
            committed(job)
            kill(job, 1)
            recovered(job)
            sink.kill()
            job.scale(3)
            sink.start()
            committed(job)
            kill(job, 0)
            recovered(job, 2)
            job.scale(1)
            committed(job)
            kill_in_a_loop(sink, lambda: out.stat().st_size, 2)
            drained(job)
            check(in_file(out), in_order=False)  # a key that moves may change places in a snapshot
            sink.stop()
            assert list((sink.data / "staged").iterdir()) == []
        finally:
            sink.kill()


def test_a_second_run_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = Process(tmp_path / "sink", "files", str(out))
    sink.start()
    try:
        for turn in range(2):
            with started(tallying(sink), tmp_path) as job:
                committed(job, 2)
                assert job.stop(drain=turn == 1, timeout=flows.DEADLINE)
            sink.stop()
            sink.start()
        check(in_file(out))
    finally:
        sink.kill()


def test_without_snapshots_all_comes_out(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sink = Process(tmp_path / "sink", "files", str(out))
    sink.start()
    try:
        with started(tallying(sink, 4000), tmp_path, snapshots=None) as job:
            sink.kill()
            sink.start()
            assert job.wait(flows.DEADLINE)
        assert sorted(in_file(out)) == expected(4000)
    finally:
        sink.kill()


def test_a_record_the_table_cannot_take_stops_the_flow_and_loses_nothing(tmp_path: Path) -> None:
    db = tmp_path / "out.db"
    with contextlib.closing(sqlite3.connect(db)) as made:
        made.execute("CREATE TABLE counted (key INTEGER, number INTEGER)")
    sink = Process(tmp_path / "sink", "table", f"sqlite:///{db}", "counted")
    sink.start()
    flow = tallying(sink, 2000, rows=True)
    try:
        with (
            started(flow, tmp_path, settings=Settings(restarts=1)) as job,
            pytest.raises(FlowFailedError, match="column 'seen': the table has no such column"),
        ):
            job.wait(flows.DEADLINE)
        with contextlib.closing(sqlite3.connect(db)) as mended:
            assert mended.execute("SELECT count(*) FROM counted").fetchone() == (0,)
            mended.execute("ALTER TABLE counted ADD COLUMN seen INTEGER")
        with started(flow, tmp_path) as job:
            assert job.wait(flows.DEADLINE)
        assert sorted(in_sqlite(db)) == expected(2000)
    finally:
        sink.kill()
