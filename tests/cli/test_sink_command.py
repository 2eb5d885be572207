"""`railgun sink` as people and programs use it: in a process of its own, with a flow that finds it by its directory."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sinkserver.sinks import DEADLINE, Shelf, new, place

from railgun.cli.errors import DONE, FAILED, NO_NODE, USAGE
from railgun.cli.main import main
from railgun.flows.sink import TwoPhaseWriter
from railgun.sinks.external import Outside
from railgun.sinkserver.participant import Participant
from railgun.storage.lock import FileLock
from railgun.transport.packed_records import pack

RAILGUN = [sys.executable, "-m", "railgun", "sink"]


class Command:
    """A command that runs, and what it says."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen([*RAILGUN, *words], stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def end(self, how: signal.Signals = signal.SIGTERM) -> list[str]:
        """Ask it to stop; what else it says."""
        self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == DONE
        return rest.splitlines()


@contextlib.contextmanager
def running(*words: str) -> Iterator[Command]:
    made = Command(*words)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.communicate()


def write(sink: Outside, *items: Any, snapshot: int = 1) -> None:
    writer = sink.open(place())
    assert isinstance(writer, TwoPhaseWriter)
    writer.write(items)
    sink.commit(writer.prepare(snapshot))
    writer.close()


def test_files_for_programs(tmp_path: Path) -> None:
    data, out = tmp_path / "sink", tmp_path / "out.jsonl"
    with running("files", str(out), "--data", str(data), "--port", "0", "--json") as command:
        told = json.loads(command.line())
        assert told["listening"]["target"] == str(out)
        assert told["recovery"] == {
            "found": [], "transactions": 0, "records": 0, "prepared": 0, "open": 0,
        }  # fmt: skip
        sink = Outside(data=data)
        write(sink, {"a": 1}, {"a": 2})
        counts = {"transactions": 1, "records": 2, "prepared": 0, "open": 0}
        assert json.loads(command.line()) == {"committed": counts}
        waiting = sink.open(place())
        waiting.write([{"a": 3}])
        assert isinstance(waiting, TwoPhaseWriter)
        token = waiting.prepare(2)
        assert [json.loads(line) for line in command.end()] == [
            {"stopped": True, **counts, "prepared": 1}
        ]
        waiting.close()
    assert out.read_text() == '{"a":1}\n{"a":2}\n'
    with running("files", str(out), "--data", str(data), "--port", "0", "--json") as command:
        assert json.loads(command.line())["recovery"]["prepared"] == 1
        sink.commit(token)
    assert out.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n'


def test_tables_for_people(tmp_path: Path) -> None:
    data, db = tmp_path / "sink", tmp_path / "out.db"
    with running(
        "table", f"sqlite:///{db}", "totals", "--data", str(data), "--port", "0"
    ) as command:
        assert command.line() == f"{data}: nothing waits"
        line = command.line()
        assert line.startswith("listening on 127.0.0.1:")
        assert line.endswith(f", for totals in sqlite:///{db}; Ctrl-C stops")
        sink = Outside(data=data)
        write(sink, {"name": "ada", "n": 1})
        assert command.line() == "committed: 1 records in 1 transactions; 0 prepared, 0 under way"
        with pytest.raises(Exception, match="column 'm'"):
            write(sink, {"m": 1}, snapshot=2)
        assert command.line().startswith(
            "votes no: table totals, record 0, column 'm': the table has no"
        )
        write(sink, {"name": "grace", "n": 2}, snapshot=3)
        assert command.end(signal.SIGINT) == [
            "stopping",
            "committed: 2 records in 2 transactions; 0 prepared, 0 under way",
            "stopped: everything is on disk; 0 transactions wait for their flows",
        ]
    with contextlib.closing(sqlite3.connect(db)) as made:
        assert made.execute("SELECT name, n FROM totals").fetchall() == [("ada", 1), ("grace", 2)]


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["files", "{tmp}/x", "--host", "0.0.0.0"], USAGE, "no-tls"),
        (["files", "{tmp}/x", "--certificate", "c.pem"], USAGE, "usage"),
        (["files", "{tmp}/x", "--port", "70000"], USAGE, "usage"),
        (["table", "mysql://host/db", "t"], USAGE, "bad-url"),
        (["table", "sqlite:///x.db", "no name"], USAGE, "bad-table"),
        (["table", "sqlite:////no/such/place/x.db", "t"], FAILED, "target"),
        (["files", "{tmp}/file/x"], FAILED, "target"),
        (["files"], USAGE, "usage"),
    ],
)
def test_what_makes_no_sense_is_told(
    words: list[str], code: int, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = [word.format(tmp=tmp_path) for word in words]
    given += ["--data", str(tmp_path / "sink"), "--json"]
    assert main(["sink", *given]) == code
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == kind


def test_a_directory_and_a_port_have_one_sink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "sink", str(tmp_path / "out")
    with running("files", out, "--data", str(data), "--port", "0", "--json") as command:
        port = str(json.loads(command.line())["listening"]["port"])
        assert main(["sink", "files", out, "--data", str(data), "--port", "0"]) == NO_NODE
        assert "another sink works in" in capsys.readouterr().err
        other = ["--data", str(tmp_path / "other"), "--port", port]
        assert main(["sink", "files", str(tmp_path / "x"), *other]) == NO_NODE
        assert "cannot listen" in capsys.readouterr().err
        assert (
            main(["sink", "files", out, "--data", str(tmp_path / "third"), "--port", "0"]) == FAILED
        )
        assert "written by another sink" in capsys.readouterr().err
        assert len(command.end()) == 1


def test_people_can_see_what_waits_and_give_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path / "sink")]
    assert main(["sink", "list", *data]) == USAGE
    part = Participant(tmp_path / "sink", Shelf())
    part.open()
    txn, records = new(), pack([b"1", b"2"])
    part.begin(txn, "demo", "out", 1, 0)
    part.data(txn, 0, records)
    part.prepare(txn, 7, len(records), 2)
    part.close()
    (tmp_path / "sink" / "staged" / f"{txn}.log").unlink()
    capsys.readouterr()
    assert main(["sink", "list", "--json", *data]) == DONE
    listed = json.loads(capsys.readouterr().out)
    assert listed["target"] == "Shelf"
    (one,) = listed["transactions"]
    assert (one["id"], one["count"], one["snapshot"], one["damaged"]) == (txn, 2, 7, True)
    assert main(["sink", "list", *data]) == DONE
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"{txn} is damaged: 2 records of demo, out for snapshot 7"
    assert main(["sink", "drop", new(), "--yes", *data]) == FAILED
    assert main(["sink", "drop", txn, *data]) == USAGE
    assert "delete 2 records of demo, out for snapshot 7 for good" in capsys.readouterr().err
    assert main(["sink", "drop", txn, "--yes", *data]) == DONE
    assert main(["sink", "moved", "--yes", *data]) == DONE
    part = Participant(tmp_path / "sink", Shelf())
    part.open()
    part.commit(txn)
    part.close()
    lock = FileLock(tmp_path / "sink" / "lock")
    assert main(["sink", "list", *data]) == NO_NODE
    lock.release()


def test_commands_show_whose_job_a_transaction_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path / "sink")]
    part = Participant(tmp_path / "sink", Shelf())
    part.open()
    txn, sending, records = new(), new(), pack([b"1", b"2"])
    part.begin(txn, "demo", "out", 1, 0, store="5f3a")
    part.data(txn, 0, records)
    part.prepare(txn, 7, len(records), 2)
    part.begin(sending, "demo", "out", 1, 0, store="77aa")
    part.close()
    capsys.readouterr()
    assert main(["sink", "list", "--json", *data]) == DONE
    listed = json.loads(capsys.readouterr().out)["transactions"]
    assert {one["id"]: one["store"] for one in listed} == {txn: "5f3a", sending: "77aa"}
    assert main(["sink", "list", *data]) == DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 records of demo, out, job 5f3a for snapshot 7" in shown
    assert f"{sending} is being sent: demo, out, job 77aa" in shown
    assert main(["sink", "moved", "--yes", "--json", *data]) == DONE
    (moved,) = json.loads(capsys.readouterr().out)["transactions"]
    assert (moved["id"], moved["store"]) == (txn, "5f3a")
    assert main(["sink", "drop", txn, "--yes", "--json", *data]) == DONE
    assert json.loads(capsys.readouterr().out)["dropped"]["store"] == "5f3a"
