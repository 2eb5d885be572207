"""Trouble with one transaction: it stays with its flow and step; in doubt the target is asked; people can give up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sinkserver.sinks import Shelf, new

from railgun.ingest.errors import LostError, SinkError
from railgun.sinkserver import ledger as ledgers
from railgun.sinkserver import participant as participants
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.ledger import Ledger
from railgun.sinkserver.participant import Participant
from railgun.sinkserver.staged import Absent, InMemoryRecords
from railgun.sinkserver.table_target import TableTarget
from railgun.sinkserver.targets import Records, Target, TargetError
from railgun.transport.packed_records import pack


class Picky(Shelf):
    """Refuses some records, may lose its connection when it has applied them, and remembers the last ones only."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = 1000
        self.refused: set[bytes] = set()
        self.unheard: set[bytes] = set()

    def apply(self, transaction: str, records: Records) -> None:
        if transaction not in self.applied[-self.memory :]:
            found = list(records)
            if self.refused & set(found):
                raise TargetError("not now")
            self.items += found
            self.applied.append(transaction)
            if self.unheard & set(found):
                self.unheard -= set(found)
                raise TargetError("the connection is lost")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def target() -> Picky:
    return Picky()


@pytest.fixture
def part(tmp_path: Path, target: Picky) -> Iterator[Participant]:
    made = opened(tmp_path, target)
    yield made
    made.close()


def opened(directory: Path, target: Shelf) -> Participant:
    made = Participant(directory, target)
    made.open()
    return made


def sent(part: Participant, text: bytes, snapshot: int = 1, flow: str = "demo") -> str:
    txn = new()
    part.begin(txn, flow, "out", 1, 0)
    end = part.data(txn, 0, pack([text]))
    part.prepare(txn, snapshot, end, 1)
    return txn


def log_of(part: Participant, txn: str) -> Path:
    return part.directory / "staged" / f"{txn}.log"


# ---------------------------------------------------------------- logs


def test_a_log_is_kept_until_it_is_safe_that_it_is_not_needed(part: Participant) -> None:
    one = sent(part, b"1")
    part.commit(one)
    assert log_of(part, one).exists(), "the note is not synced yet"
    two = sent(part, b"2")
    assert not log_of(part, one).exists()
    part.commit(two)
    part.ledger.close()
    assert not log_of(part, two).exists()


def test_a_target_is_asked_for_what_is_decided_and_has_no_file(
    part: Participant, target: Picky, tmp_path: Path
) -> None:
    """The note and the file are lost in a power cut; but the target has it, or has not."""
    ledger = part.directory / "ledger"
    one = sent(part, b"1", 1)
    part.commit(one)
    two = sent(part, b"2", 2)
    part.ledger.decide([part.txns[two]])
    part.close()
    noted = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(line for line in noted if b'"committed"' not in line))
    log_of(part, one).unlink(missing_ok=True)
    log_of(part, two).unlink()
    again = opened(tmp_path, target)
    again.commit(one)
    with pytest.raises(LostError, match=r"1 records for snapshot 2\) is gone or damaged"):
        again.commit(two)
    assert target.items == [b"1"]
    again.commit(sent(again, b"other", flow="other"))
    assert target.items == [b"1", b"other"]
    again.ledger.close()


def test_a_log_that_is_cut_off_after_the_decision_is_not_half_applied(
    part: Participant, target: Picky, tmp_path: Path
) -> None:
    txn = new()
    part.begin(txn, "demo", "out", 1, 0)
    middle = part.data(txn, 0, pack([b"1"]))
    part.prepare(txn, 1, part.data(txn, middle, pack([b"2"])), 2)
    part.ledger.decide([part.txns[txn]])
    part.close()
    os.truncate(log_of(part, txn), log_of(part, txn).stat().st_size - 1)
    again = opened(tmp_path, target)
    with pytest.raises(LostError, match="damaged"):
        again.commit(txn)
    assert target.items == []
    again.ledger.close()


@pytest.mark.parametrize("kind", ["file", "table"])
def test_a_target_that_is_asked_in_doubt_takes_nothing(kind: str, tmp_path: Path) -> None:
    made: Target = FileTarget(tmp_path / "out.txt")
    if kind == "table":
        made = TableTarget(f"sqlite:///{tmp_path}/out.db", "out")
    made.open()
    known, unknown, records = new(), new(), InMemoryRecords([b'{"n":1}'])
    made.check(records)
    made.apply(known, records)
    for txn, wanted in ((known, False), (unknown, True)):
        unread = Absent(LostError("DAMAGED", "gone"))
        with contextlib.suppress(LostError):
            made.apply(txn, unread)
        assert unread.wanted == wanted
    made.apply(unknown, records)
    unread = Absent(LostError("DAMAGED", "gone"))
    made.apply(unknown, unread)
    assert not unread.wanted
    made.close()


# ---------------------------------------------------------------- queues


def test_what_is_refused_stops_its_flow_and_step_only(
    part: Participant, target: Picky, tmp_path: Path
) -> None:
    target.refused = {b"bad"}
    bad, later, other = sent(part, b"bad", 1), sent(part, b"later", 2), sent(part, b"o", 1, "other")
    for txn in (bad, later):
        with pytest.raises(TargetError, match="not now"):
            part.commit(txn)
    part.commit(other)
    assert target.items == [b"o"]
    part.close()
    again = Participant(tmp_path, target)
    told = again.open()
    assert told[1:] == ["transactions of demo, out wait: not now"]
    again.commit(sent(again, b"o2", 2, "other"))
    target.refused.clear()
    again.commit(later)
    assert target.items == [b"o", b"o2", b"bad", b"later"]
    again.ledger.close()


def test_in_doubt_the_target_is_asked_before_it_forgets(
    part: Participant, target: Picky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participants, "REMEMBERED_TRANSACTIONS", 10)
    target.memory = 10
    target.unheard, target.refused = {b"unheard"}, {b"bad"}
    unheard, bad = sent(part, b"unheard", 1), sent(part, b"bad", 1, "third")
    for txn in (unheard, bad):
        with pytest.raises(TargetError):
            part.commit(txn)
    for n in range(30):
        part.commit(sent(part, b"%d" % n, n, "other"))
    part.commit(unheard)
    assert target.items == [b"unheard", *(b"%d" % n for n in range(30))]
    target.refused.clear()
    part.commit(bad)
    assert target.items[-1] == b"bad"


def test_what_was_applied_and_could_not_be_noted_is_not_applied_again(
    part: Participant, target: Picky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    txn = sent(part, b"1")
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 1:  # not the decision, but the note
            raise OSError(28, "full")
        return real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(OSError, match="full"):
            part.commit(txn)
    target.applied.clear()  # so much comes in between that it has forgotten
    part.commit(txn)
    other = sent(part, b"2", 1, "other")
    part.close()
    again = opened(tmp_path, target)
    again.commit(txn)
    again.commit(other)
    assert target.items == [b"1", b"2"]
    again.ledger.close()


# ---------------------------------------------------------------- the ledger


def test_a_ledger_stays_short_also_without_commits(
    part: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_REWRITE_LINES", 20)
    kept = sent(part, b"kept")
    for n in range(100):
        part.abort(sent(part, b"%d" % n))
    assert part.ledger.lines < 30
    assert list(part.txns) == [kept]


def test_what_belongs_to_no_snapshot_is_thrown_away_without_a_restart(
    part: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = new()
    part.begin(left, "demo", "out", 1, 0, alone=True)
    monkeypatch.setattr(ledgers, "ABANDONED_AFTER_S", -1.0)
    monkeypatch.setattr(participants, "SWEEP_INTERVAL_S", -1.0)
    begun = new()
    part.begin(begun, "demo", "out", 1, 0)
    assert list(part.txns) == [begun]
    assert not log_of(part, left).exists()


def test_a_directory_takes_no_other_target_while_something_waits(
    part: Participant, target: Picky, tmp_path: Path
) -> None:
    txn = sent(part, b"1")
    part.close()
    with pytest.raises(
        SinkError, match=r"1 transactions wait in .* for Picky, and this sink fills Shelf"
    ):
        opened(tmp_path, Shelf())
    again = opened(tmp_path, target)
    again.commit(txn)
    again.close()
    opened(tmp_path, Shelf()).close()
    again = opened(tmp_path, Shelf())
    txn = sent(again, b"2")
    again.close()
    moved = Ledger(tmp_path)
    moved.open()
    moved.set_target("")
    moved.close()
    again = opened(tmp_path, target)
    again.commit(txn)
    again.ledger.close()


def test_what_is_given_up_counts_as_committed_and_frees_what_waits_behind_it(
    part: Participant, target: Picky, tmp_path: Path
) -> None:
    target.refused = {b"bad"}
    bad, later = sent(part, b"bad", 1), sent(part, b"later", 2)
    with pytest.raises(TargetError):
        part.commit(later)
    part.close()
    ledger = Ledger(tmp_path)
    ledger.open()
    ledger.give_up(ledger.txns[bad])
    ledger.close()
    again = opened(tmp_path, target)
    again.commit(later)
    again.commit(bad)
    assert target.items == [b"later"]
    assert not log_of(again, bad).exists()
    again.ledger.close()
