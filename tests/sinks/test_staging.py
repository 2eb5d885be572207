"""Output that appears exactly once, whatever crashes, is repeated, comes late or comes twice at the same time."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.sinks.crashing_system import CrashError, crash_before, staged, system, visible

from railgun import (
    Collect,
    ConnectorError,
    Directory,
    Files,
    Flow,
    Items,
    Parquet,
    Place,
    Sink,
    TwoPhaseSink,
    TwoPhaseWriter,
    Writer,
)  # fmt: skip
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.writing import Writing
from railgun.flows.errors import LostOutputError, SinkError
from railgun.flows.plan import build
from railgun.sinks.staging import StagedFile, StagedSink
from railgun.transport.rows import RowBatch


def place(worker: int = 0, generation: int = 0, step: str = "out", flow: str = "flow") -> Place:
    return Place(flow, step, worker, generation, transactional=True)


def opened(sink: Sink[Any], at: Place | None = None) -> TwoPhaseWriter[Any]:
    writer = sink.open(at or place())
    assert isinstance(writer, TwoPhaseWriter)
    return writer


def prepared(sink: Sink[Any], items: list[Any], snapshot: int = 1, at: Place | None = None) -> Any:
    writer = opened(sink, at)
    writer.write(items)
    token = writer.prepare(snapshot)
    writer.close()
    return token


def lines(directory: Path) -> list[Any]:
    text = b"".join(visible(directory).values()).decode()
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------- one writer


def test_readers_see_only_what_is_committed(tmp_path: Path) -> None:
    sink = Files(tmp_path / "a" / "b")
    writer = opened(sink, place(3, 2))
    writer.write([1, 2])
    writer.flush()
    assert visible(tmp_path / "a" / "b") == {}
    first = writer.prepare(7)
    writer.write([3])
    second = writer.prepare(8)
    assert visible(tmp_path / "a" / "b") == {}
    sink.commit(second)
    [(name, data)] = visible(tmp_path / "a" / "b").items()
    assert name.startswith("part-out-8-3-2-")
    assert (name[-6:], data) == (".jsonl", b"3\n")
    sink.commit(first)
    assert sorted(lines(tmp_path / "a" / "b")) == [1, 2, 3]


def test_a_token_is_enough_in_any_later_process(tmp_path: Path) -> None:
    token = json.loads(json.dumps(prepared(Files(tmp_path), ["a"])))
    pickle.loads(pickle.dumps(Files(tmp_path))).commit(token)
    assert lines(tmp_path) == ["a"]


def test_nothing_written_is_nothing_to_commit(tmp_path: Path) -> None:
    writer = opened(Files(tmp_path))
    assert writer.prepare(1) is None
    writer.write([1])
    assert writer.prepare(2) is not None
    assert writer.prepare(3) is None
    assert len(staged(tmp_path)) == 1


def test_a_second_commit_does_nothing(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    token = prepared(sink, [1])
    sink.commit(token)
    before = visible(tmp_path)
    sink.commit(token)
    sink.recover("flow", "out", 1, [token])
    sink.commit(token)
    assert visible(tmp_path) == before


def test_what_is_neither_staged_nor_final_is_lost_and_named(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    token = prepared(sink, [1], snapshot=7, at=place(4))
    sink.commit(token)
    (tmp_path / token["name"]).unlink()
    told = r"sink 'out': .* is lost: .*part-out-7-4-0-"
    with pytest.raises(LostOutputError, match=told):
        sink.commit(token)
    with pytest.raises(LostOutputError, match=told):
        sink.recover("flow", "out", 1, [token])


def test_a_staged_file_that_was_cut_short_is_not_committed(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    token = prepared(sink, ["some", "lines"])
    os.truncate(tmp_path / token["staged"], 3)
    with pytest.raises(LostOutputError, match="has 3 bytes, and had 15"):
        sink.commit(token)
    assert visible(tmp_path) == {}


@pytest.mark.parametrize("make", [Files, Parquet])
def test_close_throws_away_what_was_not_prepared_and_nothing_else(
    tmp_path: Path, make: Callable[[Path], StagedSink]
) -> None:
    sink = make(tmp_path)
    writer = opened(sink)
    writer.write([{"n": 1}])
    token: Any = writer.prepare(1)
    writer.write([{"n": 2}])
    writer.flush()
    writer.close()
    writer.close()
    assert len(staged(tmp_path)) == 1
    sink.commit(token)
    assert staged(tmp_path) == []
    assert list(visible(tmp_path)) == [token["name"]]


def test_recover_throws_away_what_older_generations_staged_and_nothing_else(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    kept = prepared(sink, ["kept"], 1, place(0, 9))
    prepared(sink, ["older"], 2, place(0, 9))
    never = opened(sink, place(1, 9))
    never.write(["x" * 300_000])
    same = prepared(sink, ["same generation"], 3, place(0, 10))
    newer = prepared(sink, ["newer"], 3, place(0, 11))
    other_step = prepared(sink, ["other step"], 3, place(0, 1, step="out2"))
    other_flow = prepared(sink, ["other flow"], 3, place(0, 1, flow="flow2"))
    sink.recover("flow", "out", 10, [kept])
    assert lines(tmp_path) == ["kept"]
    assert len(staged(tmp_path)) == 4
    for token in (same, newer, other_step, other_flow):
        sink.commit(token)
    assert len(lines(tmp_path)) == 5
    never.close()


def test_recover_where_nothing_ever_was(tmp_path: Path) -> None:
    Files(tmp_path / "nowhere").recover("flow", "out", 5, [])
    assert not (tmp_path / "nowhere").exists()


def test_writers_never_meet_in_a_name(tmp_path: Path) -> None:
    """Two stages with one sink; a worker that came back; a flow that counts its snapshots anew; another flow."""
    sink = Files(tmp_path)
    first, second = opened(sink), opened(sink)
    first.write(["first"])
    second.write(["second"])
    tokens = [first.prepare(1), second.prepare(1), prepared(sink, ["came back"])]
    first.write(["twice"])
    tokens.append(first.prepare(1))
    for token in tokens:
        sink.commit(token)
    again = prepared(sink, ["began anew"])
    other = prepared(sink, ["other flow"], 1, place(flow="other"))
    sink.commit(again)
    sink.commit(other)
    assert Counter(lines(tmp_path)) == Counter(
        ["first", "second", "came back", "twice", "began anew", "other flow"]
    )


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../../a", "ü: %2E", "x" * 60, "a\\b\n", "*"])
def test_names_of_steps_and_flows_are_peoples(tmp_path: Path, name: str) -> None:
    sink = Files(tmp_path / "deep" / "out")
    token = prepared(sink, [1], at=place(step=name, flow=name))
    prepared(sink, [2], at=place(step=name, flow=name))
    sink.commit(token)
    sink.recover(name, name, 1, [token])
    assert lines(tmp_path / "deep" / "out") == [1]
    assert staged(tmp_path) == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_flow_may_go_on_in_another_directory_and_a_directory_may_be_moved(tmp_path: Path) -> None:
    old, new, moved = tmp_path / "old", tmp_path / "new", tmp_path / "moved"
    first = prepared(Files(old), [1])
    second = prepared(Files(old), [2])
    Files(new).commit(first)
    assert lines(old) == [1]
    Files(new).commit(first)
    old.rename(moved)
    Files(moved).recover("flow", "out", 1, [first, second])
    assert sorted(lines(moved)) == [1, 2]
    with pytest.raises(LostOutputError, match=r"there is neither .*old.*, neither .*new"):
        Files(new).commit(first)


def test_what_is_no_token_is_refused(tmp_path: Path) -> None:
    token = prepared(Files(tmp_path), [1])
    others: list[Any] = [None, "x", 3, [], {"step": "out"}, {**token, "size": "1"}]
    for bad in others:
        with pytest.raises(ConnectorError, match="is not a token of a sink that writes files"):
            Files(tmp_path).commit(bad)


# ---------------------------------------------------------------- what cannot work


@pytest.mark.parametrize("make", [Files, Parquet])
def test_what_cannot_work_is_refused_when_the_sink_is_opened(
    tmp_path: Path, make: Callable[..., StagedSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConnectorError, match=r"sink 'out' cannot write .*/file: "):
        make(tmp_path / "file").open(place())
    with pytest.raises(ConnectorError, match=r"sink 'out' cannot write .*: Not a directory"):
        make(tmp_path / "file" / "below").open(place())
    with pytest.raises(
        ConnectorError, match="'exactly-once' or 'at-least-once', not 'at-most-once'"
    ):
        make(tmp_path, mode="at-most-once")
    # Root may write everywhere, so permissions are only played.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "shut")
    with pytest.raises(ConnectorError, match=r"no files can be made in .*/shut"):
        make(tmp_path / "shut").open(place())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConnectorError, match="Permission denied"):
        Files(tmp_path).open(place())


@pytest.mark.parametrize("make", [Files, lambda path: Parquet(path, {"n": pyarrow.int64()})])
@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_a_file_that_could_not_be_written_is_never_prepared(
    tmp_path: Path,
    make: Callable[..., StagedSink],
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_: Any) -> None:
        raise full

    sink = make(tmp_path)
    writer = opened(sink)
    with monkeypatch.context() as patch:
        if broken == "fsync":
            patch.setattr(os, "fsync", fails)
        else:
            create = StagedFile.__init__

            def created(self: StagedFile, *arguments: Any) -> None:
                create(self, *arguments)
                self.file = Full(self.file)  # type: ignore[assignment]

            patch.setattr(StagedFile, "__init__", created)
        writer.write([{"n": 1}])
        with pytest.raises(ConnectorError, match=r"sink 'out' cannot write .*No space left"):
            writer.prepare(1)
    with pytest.raises(
        ConnectorError, match="sink 'out'"
    ):  # there is space again, but the file is not whole
        writer.prepare(2)
    writer.close()
    assert (visible(tmp_path), staged(tmp_path)) == ({}, [])


class Full:
    """A file on a disk that is full."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------- the order of steps


@pytest.mark.parametrize("make", [Files, Parquet])
def test_what_is_prepared_and_committed_outlives_a_loss_of_power(
    tmp_path: Path, make: Callable[[Path], StagedSink]
) -> None:
    sink = make(tmp_path / "out")
    with system() as calls:
        writer = opened(sink)
        made = [path for name, path in calls.log if name == "mkdir"]
        assert made
        for path in made:  # every directory is known to the one above before anything is reported
            at = calls.log.index(("mkdir", path))
            assert ("fsync", str(path.parent)) in calls.log[at:]
        writer.write([{"n": 1}])
        calls.log.clear()
        token: Any = writer.prepare(1)
        file = str(tmp_path / "out" / token["staged"])
        above = str(Path(file).parent)
        synced = [path for name, path in calls.log if name == "fsync"]
        assert synced == [file, above]
        calls.log.clear()
        sink.commit(token)
        done = [(name, str(path)) for name, path in calls.log if name in ("rename", "fsync")]
        assert done == [("rename", file), ("fsync", str(tmp_path / "out")), ("fsync", above)]
        calls.log.clear()
        sink.commit(token)  # by another, and the first one died before it had synced
        assert ("fsync", str(tmp_path / "out")) in calls.log


# ---------------------------------------------------------------- crashes


@dataclass
class Driver:
    """What the controller does, with one list of items to deliver, on two workers."""

    sink: StagedSink
    items: list[Any]
    # All that outlives a crash is what the last snapshot says:
    snapshot: int = 0
    position: int = 0
    tokens: list[Any] = field(default_factory=list)
    generation: int = 0

    def run(self, stop: int | None = None) -> None:
        """Begin a generation, and go on to the end."""
        self.generation += 1
        self.sink.recover("flow", "out", self.generation, self.tokens)
        writers = [opened(self.sink, place(worker, self.generation)) for worker in range(2)]
        number, position = self.snapshot, self.position
        while position < len(self.items):
            for writer in writers:
                writer.write(self.items[position : position + 2])
                writer.flush()
                position += 2
            number += 1
            tokens = [token for writer in writers if (token := writer.prepare(number))]
            self.snapshot, self.position, self.tokens = number, position, tokens  # at once
            for token in json.loads(json.dumps(tokens)):
                self.sink.commit(token)
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("kind", ["Files", "Parquet"])
def test_a_crash_between_any_two_steps_does_no_harm(tmp_path: Path, kind: str) -> None:
    items = [{"n": n} for n in range(12)]

    def attempt(*crashes: int) -> bool:
        """Whether all of the crashes came about."""
        directory = tmp_path / "-".join(map(str, crashes))
        sink = (Files if kind == "Files" else Parquet)(directory)
        driver = Driver(sink, items)
        crashed = 0
        for number in (*crashes, None):
            with system((lambda _: None) if number is None else crash_before(number)):
                try:
                    driver.run()
                except CrashError:
                    crashed += 1
                    seen = content(directory)
                    assert len(seen) == len(set(seen)), "twice"
                    assert set(seen) <= set(range(driver.position)), "before it was committed"
        with system():
            driver.sink.recover("flow", "out", driver.generation + 1, driver.tokens)
        assert sorted(content(directory)) == list(range(12))
        assert staged(directory) == []
        shutil.rmtree(directory)
        return crashed == len(crashes)

    def content(directory: Path) -> list[int]:
        if kind == "Files":
            return [row["n"] for row in lines(directory)]
        tables = [pyarrow.parquet.read_table(directory / name) for name in visible(directory)]
        return [n for table in tables for n in table["n"].to_pylist()]

    first = 0
    while attempt(first):
        first += 1
        second = 0
        while kind == "Files" and attempt(first, second):  # also while it recovers
            second += 9
    assert first > 50


def test_a_commit_may_run_at_the_same_time_in_two_processes(tmp_path: Path) -> None:
    """One commits wholly between any two steps of the other."""
    number = 0
    while True:
        directory = tmp_path / str(number)
        sink = Files(directory)
        token = prepared(sink, [1, 2])
        came: list[int] = []

        def meanwhile(
            call: int,
            at: int = number,
            other: Files = sink,
            token: Any = token,
            came: list[int] = came,
        ) -> None:
            if call == at and not came:
                came.append(call)
                with system():
                    other.recover("flow", "out", 1, [token])

        with system(meanwhile):
            sink.commit(token)
        assert lines(directory) == [1, 2]
        if not came:
            break
        number += 1
    assert number >= 3


def test_many_commit_many_at_the_same_time(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    tokens = [prepared(sink, [n], n) for n in range(50)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(sink.recover, "flow", "out", 1, tokens) for _ in range(4)]:
            done.result()
    assert sorted(lines(tmp_path)) == list(range(50))


# ---------------------------------------------------------------- anything, in any order

WORKERS = st.integers(0, 2)


class Sinks(RuleBasedStateMachine):
    """A driver that keeps its duties, workers and processes that do not, and a reader that looks after each step.

    What is to be seen is exactly the content of the tokens that were committed, byte by byte.
    """

    def __init__(self) -> None:
        super().__init__()
        self.system = system()
        self.system.__enter__()
        self.directory = Path(mkdtemp())
        self.generation = self.snapshot = self.item = 0
        self.content: dict[str, bytes] = {}  # of all tokens ever made, by name
        self.committed: dict[str, Any] = {}  # tokens whose commit has returned
        self.due: dict[str, Any] = {}  # tokens of safe snapshots whose commit has not returned
        self.manifest: list[Any] = []  # what the last safe snapshot says
        self.carried: list[
            Any
        ] = []  # prepared since then, for a snapshot that failed or by a worker that left
        self.zombies: list[TwoPhaseWriter[Any]] = []
        self.writers: dict[int, tuple[TwoPhaseWriter[Any], list[int]]] = {}
        self.begin()

    def teardown(self) -> None:
        self.system.__exit__(None, None, None)
        shutil.rmtree(self.directory)

    @property
    def sink(self) -> Files:
        return Files(self.directory)  # always another process

    def begin(self) -> None:
        self.generation += 1
        self.sink.recover("flow", "out", self.generation, self.manifest)
        self.done(*self.manifest)
        self.carried = []
        for worker in range(2):
            self.writers[worker] = opened(self.sink, place(worker, self.generation)), []

    def done(self, *tokens: Any) -> None:
        for token in tokens:
            self.committed[token["name"]] = token
            self.due.pop(token["name"], None)

    def prepare(self, worker: int) -> list[Any]:
        writer, items = self.writers[worker]
        token = json.loads(json.dumps(writer.prepare(self.snapshot)))
        assert (token is None) == (not items)
        if token is None:
            return []
        self.content[token["name"]] = "".join(f"{n}\n" for n in items).encode()
        items.clear()
        return [token]

    @rule(worker=WORKERS, count=st.integers(1, 3), flush=st.booleans())
    def write(self, worker: int, count: int, flush: bool) -> None:
        if worker in self.writers:
            writer, items = self.writers[worker]
            new = range(self.item, self.item + count)
            self.item += count
            writer.write(list(new))
            items += new
            if flush:
                writer.flush()

    @rule(safe=st.booleans())
    def take_snapshot(self, safe: bool) -> None:
        self.snapshot += 1
        tokens = [token for worker in self.writers for token in self.prepare(worker)]
        self.carried += tokens
        if safe:
            self.manifest = [*self.due.values(), *self.carried]
            self.due.update({token["name"]: token for token in self.carried})
            self.carried = []

    @rule(part=st.integers(0, 2))
    def crash_while_preparing(self, part: int) -> None:
        self.snapshot += 1
        for worker in list(self.writers)[:part]:
            self.prepare(worker)
        self.crash(kill=True)

    @rule(at=st.integers(0, 100))
    def commit(self, at: int) -> None:
        if self.due:
            token = list(self.due.values())[at % len(self.due)]
            self.sink.commit(token)
            self.done(token)

    @precondition(lambda self: self.committed)
    @rule(at=st.integers(0, 100))
    def commit_again(self, at: int) -> None:
        """By a process that was given up for dead, perhaps generations ago."""
        self.sink.commit(list(self.committed.values())[at % len(self.committed)])

    @rule(at=st.integers(0, 100), call=st.integers(0, 8))
    def crash_in_commit(self, at: int, call: int) -> None:
        if self.due:
            token = list(self.due.values())[at % len(self.due)]
            try:
                with system(crash_before(call)):
                    self.sink.commit(token)
            except CrashError:
                if (self.directory / token["name"]).exists():
                    self.done(token)  # seen, and not yet known: it is committed again
                    self.due[token["name"]] = token
            else:
                self.done(token)

    @rule(kill=st.booleans())
    def crash(self, kill: bool) -> None:
        """Back to the last snapshot. Workers close their writers, or are killed, or nobody knows."""
        for writer, _ in self.writers.values():
            if kill:
                self.zombies.append(writer)
            else:
                writer.close()
        self.writers = {}
        self.begin()

    @rule(call=st.integers(0, 12))
    def crash_in_recover(self, call: int) -> None:
        self.zombies += [writer for writer, _ in self.writers.values()]
        self.writers = {}
        try:
            with system(crash_before(call)):
                self.sink.recover("flow", "out", self.generation + 1, self.manifest)
        except CrashError:
            self.generation += 1
        self.begin()

    @rule(worker=WORKERS)
    def leave(self, worker: int) -> None:
        if worker in self.writers:
            self.carried += self.prepare(worker)
            self.writers.pop(worker)[0].close()

    @rule(worker=WORKERS)
    def join(self, worker: int) -> None:
        if worker not in self.writers:
            self.writers[worker] = opened(self.sink, place(worker, self.generation)), []

    @precondition(lambda self: self.zombies)
    @rule(at=st.integers(0, 100), end=st.booleans())
    def a_dead_worker_goes_on(self, at: int, end: bool) -> None:
        zombie = self.zombies[at % len(self.zombies)]
        try:
            if end:
                self.zombies.remove(zombie)
                zombie.close()
            else:
                zombie.write([-1] * 10)
                zombie.prepare(self.snapshot)
        except ConnectorError:
            pass  # its directory is gone

    @invariant()
    def exactly_what_was_committed_is_seen(self) -> None:
        expected = {name: self.content[name] for name in sorted(self.committed)}
        assert visible(self.directory) == expected

    @invariant()
    def what_is_due_is_not_lost(self) -> None:
        for token in (*self.due.values(), *self.carried):
            assert any((self.directory / token[name]).exists() for name in ("staged", "name"))


Sinks.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSinks = Sinks.TestCase


# ---------------------------------------------------------------- the other guarantee, and no snapshots


def test_at_least_once_writes_at_once_and_is_safe_with_each_snapshot(tmp_path: Path) -> None:
    sink = Files(tmp_path, mode="at-least-once")
    writer = opened(sink)
    writer.write([1])
    assert visible(tmp_path) == {"part-out-0-0.jsonl": b""}
    with system() as calls:
        assert writer.prepare(1) is None
        synced = [name for name, _ in calls.log]
        assert "fsync" in synced
        calls.log.clear()
        assert writer.prepare(2) is None
        assert calls.log == []
    assert visible(tmp_path) == {"part-out-0-0.jsonl": b"1\n"}
    writer.write([2])
    writer.close()
    assert visible(tmp_path) == {"part-out-0-0.jsonl": b"1\n2\n"}
    assert not (tmp_path / ".staged").exists()
    sink.recover("flow", "out", 1, [])


def test_a_mode_may_be_changed_between_runs(tmp_path: Path) -> None:
    token = prepared(Files(tmp_path), [1])
    Files(tmp_path, mode="at-least-once").recover("flow", "out", 1, [token])
    assert lines(tmp_path) == [1]


def test_our_own_source_passes_over_what_is_staged(tmp_path: Path) -> None:
    sink = Files(tmp_path)
    sink.commit(prepared(sink, [1]))
    prepared(sink, [2])
    assert len(list(Directory(tmp_path, "**/*").partitions())) == 1
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


# ---------------------------------------------------------------- the operator


class Answers(TwoPhaseSink[Any]):
    """Prepares what it is told to."""

    def __init__(self, token: Any) -> None:
        self.token = token

    def open(self, place: Place) -> Writer[Any]:
        return AnswersWriter(self.token)

    def commit(self, token: Any) -> None: ...

    def recover(self, flow: str, step: str, generation: int, tokens: Any) -> None: ...


class AnswersWriter(TwoPhaseWriter[Any]):
    def __init__(self, token: Any) -> None:
        self.token = token

    def write(self, items: Any) -> None: ...

    def prepare(self, snapshot: int) -> Any:
        if isinstance(self.token, Exception):
            raise self.token
        return self.token


class Plain(Sink[Any], Writer[Any]):
    """Knows no snapshots."""

    def __init__(self) -> None:
        self.flushed = 0

    def open(self, place: Place) -> Writer[Any]:
        return self

    def write(self, items: Any) -> None: ...

    def flush(self) -> None:
        self.flushed += 1


def test_the_operator_passes_prepare_on() -> None:
    for token in (None, "x", {"a": [1, None, 2.5]}):
        assert Writing(Setting("out"), Answers(token), place()).prepare(3) == token


def test_a_writer_without_two_phases_is_flushed_with_a_snapshot() -> None:
    sink = Plain()
    writing = Writing(Setting("out"), sink, place())
    assert writing.prepare(1) is None
    assert sink.flushed == 0
    writing.push(RowBatch([1], 0))
    assert writing.prepare(2) is None
    assert sink.flushed == 1


def test_errors_of_prepare_name_the_step() -> None:
    for token, told in (
        ({1, 2}, r"the token \{1, 2\} is not JSON"),
        (float("nan"), "the token nan is not JSON"),
        (KeyError("broken"), "KeyError: 'broken'"),
        (ConnectorError("no"), "ConnectorError: no"),
    ):
        with pytest.raises(SinkError, match=told) as caught:
            Writing(Setting("out"), Answers(token), place()).prepare(1)
        assert str(caught.value).startswith("sink 'out': Answers.prepare failed\n")


def test_a_flow_tells_its_sinks_whether_it_takes_snapshots(tmp_path: Path) -> None:
    flow = Flow("flow")
    numbers = flow.source(Items([1, 2]), name="numbers")
    numbers.sink(Files(tmp_path), name="files")
    numbers.sink(Collect(), name="collect")
    plan = flow.plan()
    [stage] = plan.stages
    for transactional in (True, False):
        there = Place("flow", "", 0, 0, lambda step, items: None, transactional)
        operators = build(plan, stage, there, lambda stage, batch: None, 0)
        for writing in operators.writing:
            writing.push(RowBatch([1], 0))
            writing.flush()
        tokens = [writing.prepare(1) for writing in operators.writing]
        assert [token is not None for token in tokens] == [transactional, False]
        for writing in operators.writing:
            writing.writer.close()


def test_two_jobs_of_one_flow_do_not_touch_each_other(tmp_path: Path) -> None:
    """Their snapshots are in directories of their own: one restarts while the other is about to commit."""
    sink = Files(tmp_path)
    eu, us = (Place("flow", "out", 0, 1, transactional=True, store=store) for store in ("eu", "us"))
    writer = sink.open(eu)
    writer.write(["of eu"])
    token = writer.prepare(1)  # type: ignore[attr-defined]
    sink.recover_at(replace(us, generation=7), [])
    sink.recover_at(replace(eu, generation=2), [token])
    assert [path.read_text() for path in tmp_path.glob("part-*")] == ['"of eu"\n']
    writer.close()
