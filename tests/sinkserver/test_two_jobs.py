"""Two jobs of one flow (two snapshot directories) that write through one sink: neither touches what is the other's."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message
from tests.engine.controller import flows, tallies
from tests.engine.controller.tallies import committed, kill, record, recovered, tally
from tests.sinkserver import sinks
from tests.sinkserver.sinks import Process, Served, Shelf, eventually, new, outside, place, served
from tests.sinkserver.tables import Database

from railgun import Flow, Generate, Outside, Settings
from railgun.flows.errors import ConnectorError
from railgun.flows.sink import Place, Token
from railgun.job import Snapshots
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.journal import Journal
from railgun.sinkserver.participant import TURNS_PER_SNAPSHOT
from railgun.sinkserver.server import SinkServer
from railgun.sinkserver.staged import Log
from railgun.sinkserver.table_target import TableTarget
from railgun.storage.formats import Format
from railgun.transport.commands import Frame
from railgun.transport.packed_records import pack
from railgun.transport.proto import sinks_pb2 as s

Seen = Callable[[], list[str]]


@pytest.fixture(params=["file", "sqlite", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Served, Seen]]:
    """A sink, and what its target holds, in order."""
    if request.param == "file":
        path = tmp_path / "out.jsonl"
        with served(tmp_path / "sink", FileTarget(path)) as sink:
            yield (
                sink,
                lambda: [json.loads(line)["item"] for line in path.read_text().splitlines()],
            )
        return
    database = (
        Database(f"sqlite:///{tmp_path}/out.db")
        if request.param == "sqlite"
        else request.getfixturevalue("postgres")
    )
    with served(tmp_path / "sink", TableTarget(database.url, "items")) as sink:
        yield sink, lambda: [str(row[0]) for row in database.ask("SELECT item FROM items")]


class Job:
    """A job of the flow `demo`, by the identity of its snapshot directory."""

    def __init__(self, sink: Served, store: str, generation: int = 1) -> None:
        self.sink = outside(sink)
        self.store = store
        self.generation = generation

    def place(self) -> Place:
        return place(self.generation, store=self.store)

    def prepare(self, snapshot: int, *items: str) -> Token:
        writer = self.sink.open(self.place())
        writer.write([{"item": item} for item in items])
        token = writer.prepare(snapshot)  # type: ignore[attr-defined]
        writer.close()
        return token

    def restart(self, *tokens: Token, generation: int | None = None) -> None:
        """Begin the next generation, from a snapshot that holds these tokens."""
        self.generation = generation or self.generation + 1
        self.sink.recover_at(self.place(), tokens)


def test_a_recovery_leaves_alone_what_another_job_has_prepared(filled: tuple[Served, Seen]) -> None:
    sink, seen = filled
    one, two = Job(sink, "1111", 3), Job(sink, "2222", 7)
    token = one.prepare(5, "a", "b")
    two.restart()
    one.sink.commit(token)
    assert seen() == ["a", "b"]


def test_a_commit_pulls_along_nothing_of_another_job(filled: tuple[Served, Seen]) -> None:
    sink, seen = filled
    one, two = Job(sink, "1111", 4), Job(sink, "2222", 4)
    one.prepare(2, "never complete")
    two.sink.commit(two.prepare(9, "x"))
    assert seen() == ["x"]
    one.restart()  # without that token: its snapshot came to nothing
    assert seen() == ["x"]


def test_a_later_generation_of_another_job_fences_nobody(filled: tuple[Served, Seen]) -> None:
    sink, seen = filled
    one, two = Job(sink, "1111", 3), Job(sink, "2222", 99)
    two.restart()
    one.sink.commit(one.prepare(4, "a"))
    assert seen() == ["a"]
    late = Job(sink, "1111", 2)
    one.restart()
    with pytest.raises(ConnectorError, match="generation 2 is over"):
        late.prepare(5, "b")


def test_jobs_go_back_to_older_snapshots_and_forth_beside_each_other(
    filled: tuple[Served, Seen],
) -> None:
    sink, seen = filled
    for seed in range(4):
        draw = Random(seed)
        jobs = [Job(sink, f"{seed}-{n}", draw.randint(1, 5)) for n in range(2)]
        history: dict[str, list[Token]] = {job.store: [] for job in jobs}
        expected = {job.store: [] for job in jobs}  # type: ignore[var-annotated]
        for number in range(1, 13):
            job = draw.choice(jobs)
            saved = history[job.store]
            match draw.randrange(4):
                case 0:  # a snapshot is complete, and its commit is under way when the process dies
                    saved.append(job.prepare(number, f"{job.store}/{number}"))
                    expected[job.store].append(f"{job.store}/{number}")
                    job.restart(saved[-1])
                case 1:  # prepared, and the snapshot comes to nothing
                    job.prepare(number, f"{job.store}/never {number}")
                    job.restart(*saved[-1:])
                case 2 if (
                    saved
                ):  # --from an older snapshot, whose tokens are all committed, and back
                    job.restart(draw.choice(saved))
                    job.restart(saved[-1])
                case _:
                    saved.append(job.prepare(number, f"{job.store}/{number}"))
                    expected[job.store].append(f"{job.store}/{number}")
                    job.sink.commit(saved[-1])
        for job in jobs:
            assert [one for one in seen() if one.startswith(job.store)] == expected[job.store]


# ---------------------------------------------------------------- upgrades


def older_sink(directory: Path, prepared: dict[str, tuple[int, int, bytes]]) -> None:
    """Write the directory of a sink of an older Railgun: no identity anywhere.

    `prepared`: transactions with their generation, snapshot and one record.
    """
    staged = directory / "staged"
    staged.mkdir(parents=True)
    (directory / "format").write_bytes(Format("railgun sink", 1).dump())
    journal, _ = Journal.open(directory / "ledger")
    journal.add({"sink": "0" * 32}, {"fence": ["demo", "out", 4]})
    journal.add({"committed": ["c" * 32], "of": ["demo", "out"]})
    for txn, (generation, snapshot, content) in prepared.items():
        names = {"flow": "demo", "step": "out", "generation": generation}
        names |= {"worker": 0, "alone": False}
        log = Log.create(staged / f"{txn}.log", names)
        log.append(pack([content]))
        numbers = {
            "snapshot": snapshot,
            "turn": snapshot * TURNS_PER_SNAPSHOT,
            "end": log.end,
            "count": 1,
        }
        journal.add({"prepared": txn, **names, **numbers})
    journal.close()


def test_what_an_older_railgun_has_prepared_is_recovered_once(tmp_path: Path) -> None:
    known, left = new(), new()
    older_sink(tmp_path / "sink", {known: (4, 8, b'{"n": 1}'), left: (4, 9, b'{"n": 2}')})
    url = f"sqlite:///{tmp_path}/out.db"
    database = Database(url)
    database.ask("CREATE TABLE items (n INTEGER PRIMARY KEY)")
    token = {"txn": known, "generation": 4, "snapshot": 8}
    with served(tmp_path / "sink", TableTarget(url, "items")) as sink:
        job, other = Job(sink, "1111", 4), Job(sink, "2222", 40)
        other.restart()  # another job must not answer for it
        assert database.ask("SELECT n FROM items") == []
        for _ in range(
            2
        ):  # the second time from the same snapshot, which still holds the old token
            job.restart(token)
            job.sink.commit({"txn": "c" * 32, "generation": 3, "snapshot": 7})
            assert database.ask("SELECT n FROM items") == [(1,)]
        writer = job.sink.open(job.place())
        writer.write([{"n": 2}])  # comes again: the snapshot it was prepared for came to nothing
        job.sink.commit(writer.prepare(10))  # type: ignore[attr-defined]
        writer.close()
        assert database.ask("SELECT n FROM items") == [(1,), (2,)]
        assert [txn.id for txn in sink.server.participant.txns.values()] == [left]
    assert json.loads((tmp_path / "sink" / "format").read_bytes())["version"] == 2


def test_an_older_flow_throws_away_nothing_of_a_job_with_an_identity(tmp_path: Path) -> None:
    shelf = Shelf()
    with served(tmp_path / "sink", shelf) as sink:
        job, older = Job(sink, "1111", 3), Job(sink, "", 7)
        token = job.prepare(5, "a")
        older.restart()
        older.sink.commit(older.prepare(9, "b"))
        job.sink.commit(token)
    assert [json.loads(item)["item"] for item in shelf.items] == ["b", "a"]


class OlderServer(SinkServer):
    """Answers as a sink does that knows nothing of identities."""

    def _answer(self, frame: Frame, heard: list[Any]) -> Message:
        answer = super()._answer(frame, heard)
        if isinstance(answer, s.Listed):
            answer.store = ""
        return answer


def test_a_sink_that_cannot_tell_jobs_apart_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "sink", Shelf(), kind=OlderServer) as sink:
        with pytest.raises(ConnectorError, match="upgrade the sink before its flows") as refused:
            Job(sink, "1111").restart()
        assert refused.value.__cause__ is None, "it does not pass by itself"
        Job(sink, "").restart()


# ---------------------------------------------------------------- real processes


def tallying(sink: Process, job: int) -> Flow:
    flow = Flow("tallies")
    source = Generate(record, rate=2_000.0, partitions=tallies.PARTS)
    keyed = flow.source(source, name="records").key_by(lambda item: item[0], name="keys")
    lines = keyed.stateful_map(tally, initial=int, name="tally")
    rows = lines.map(
        lambda line: dict(zip(("job", "key", "number", "seen"), (job, *line), strict=True)),
        name="rows",
    )
    rows.sink(Outside(data=sink.data, timeout=60.0), name="out")
    return flow


def test_two_jobs_of_one_flow_fill_one_table_while_workers_and_the_sink_die(tmp_path: Path) -> None:
    db = tmp_path / "out.db"
    sink = Process(tmp_path / "sink", "table", f"sqlite:///{db}", "counted")
    sink.start()

    def rows(job: int) -> list[list[int]]:
        with contextlib.closing(sqlite3.connect(db)) as made, contextlib.suppress(sqlite3.Error):
            asked = "SELECT key, number, seen FROM counted WHERE job = ? ORDER BY rowid"
            return [list(row) for row in made.execute(asked, (job,))]
        return []

    def begun(job: int) -> Any:
        return flows.started(
            tallying(sink, job),
            2,
            snapshots=Snapshots(str(tmp_path / f"snapshots-{job}"), every=0.2),
            by_value=[sys.modules[__name__], tallies, flows, sinks],
            settings=Settings(restarts_within=0.01),
        )

    draw = Random(7)
    try:
        with begun(0) as one, begun(1) as two:
            jobs, restarts = [one, two], [0, 0]
            for _ in range(4):
                which = draw.randrange(2)
                committed(jobs[1 - which])
                kill(jobs[which], draw.randrange(2))
                restarts[which] += 1
                recovered(jobs[which], restarts[which])
            sink.kill()
            sink.start()
            for n, job in enumerate(jobs):
                before = len(rows(n))
                eventually(lambda n=n, before=before: len(rows(n)) > before, "more comes out")  # type: ignore[misc]
                assert job.stop(drain=True, timeout=flows.DEADLINE)
        for n in range(2):
            check(rows(n))
        sink.stop()
        assert list((sink.data / "staged").iterdir()) == [], "nothing is left over"
    finally:
        sink.kill()


def check(found: list[list[int]]) -> None:
    """Each record that was read is there once, and those of a key are in order."""
    read = [0] * tallies.PARTS
    by_key: dict[int, list[int]] = {}
    for key, number, _ in found:
        by_key.setdefault(key, []).append(number)
        part = key % tallies.PARTS
        read[part] = max(read[part], (number * tallies.KEYS + key) // tallies.PARTS + 1)
    assert all(numbers == list(range(len(numbers))) for numbers in by_key.values())
    whole = [line for part in range(tallies.PARTS) for line in tallies.lines_of(part, read[part])]
    assert sorted(found) == sorted(whole)
    assert found
