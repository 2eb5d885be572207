"""The rules of a participant, one by one: votes, commits, aborts, generations, and the order of output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.sinkserver.sinks import Shelf, new

from railgun.ingest.errors import LostError, MisuseError, SinkError
from railgun.sinkserver import ledger as module
from railgun.sinkserver.participant import Participant
from railgun.sinkserver.targets import BadRecordError, TargetError
from railgun.transport.packed_records import pack


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def part(tmp_path: Path, shelf: Shelf) -> Iterator[Participant]:
    made = Participant(tmp_path, shelf)
    made.open()
    yield made
    made.close()


Reopen = Callable[[], Participant]


@pytest.fixture
def reopen(part: Participant, tmp_path: Path, shelf: Shelf) -> Iterator[Reopen]:
    """A sink in the same directory, after the first one."""
    opened: list[Participant] = []

    def reopen() -> Participant:
        (opened[-1] if opened else part).close()
        made = Participant(tmp_path, shelf)
        made.open()
        opened.append(made)
        return made

    yield reopen
    for one in opened:
        one.ledger.close()


def sent(
    part: Participant,
    text: bytes,
    snapshot: int | None = None,
    *,
    generation: int = 1,
    alone: bool = False,
) -> str:
    """A transaction with one record, open or prepared."""
    txn = new()
    part.begin(txn, "demo", "out", generation, 0, alone)
    data = pack([text])
    part.data(txn, 0, data)
    if snapshot is not None:
        part.prepare(txn, snapshot, len(data), 1)
    return txn


def staged(part: Participant) -> list[str]:
    return sorted(path.name for path in (part.directory / "staged").iterdir())


# ---------------------------------------------------------------- bytes


def test_bytes_come_in_order_and_those_that_came_before_are_dropped(
    part: Participant, shelf: Shelf
) -> None:
    txn = new()
    one, two = pack([b"one"]), pack([b"two"])
    assert part.begin(txn, "demo", "out", 1, 0) == 0
    assert part.data(txn, 0, one) == len(one)
    assert part.data(txn, 0, one) == len(one)
    with pytest.raises(MisuseError, match="these are from 8 on"):
        part.data(txn, len(one) + 1, two)
    with pytest.raises(MisuseError, match="has 7 bytes here"):
        part.data(txn, 3, two)
    assert part.begin(txn, "demo", "out", 1, 0) == len(one)
    end = part.data(txn, len(one), two)
    part.prepare(txn, 1, end, 2)
    assert part.data(txn, end, two) == end, "nothing is added to what is prepared"
    part.commit(txn)
    assert shelf.items == [b"one", b"two"]


def test_names_of_transactions_are_not_believed(part: Participant) -> None:
    for bad in ("", "../../etc/passwd", "A" * 32, "a" * 31, "a" * 33):
        with pytest.raises(MisuseError, match="is no transaction"):
            part.begin(bad, "demo", "out", 1, 0)
    with pytest.raises(MisuseError, match="is no transaction"):
        part.begin(new(), "x" * 2000, "out", 1, 0)
    with pytest.raises(MisuseError, match="has not begun"):
        part.data(new(), 0, b"x")
    txn = sent(part, b"1")
    with pytest.raises(MisuseError, match="is of demo, out"):
        part.begin(txn, "other", "out", 1, 0)


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize(
    ("end", "count", "why"),
    [
        (6, 1, "5 bytes here, and 6 were announced"),
        (4, 1, "and 4 were"),
        (5, 2, "1 records here, and 2"),
    ],
)
def test_a_vote_is_no_if_the_numbers_differ(
    part: Participant, end: int, count: int, why: str
) -> None:
    txn = sent(part, b"1")
    with pytest.raises(SinkError, match=why):
        part.prepare(txn, 1, end, count)
    assert staged(part) == []
    with pytest.raises(LostError):
        part.commit(txn)


def test_a_vote_is_no_for_what_is_unknown_or_no_records(part: Participant) -> None:
    with pytest.raises(SinkError, match="has not begun here"):
        part.prepare(new(), 1, 5, 1)
    txn = new()
    part.begin(txn, "demo", "out", 1, 0)
    end = part.data(txn, 0, b"\xff\xff\xff\xffgarbage")
    with pytest.raises(SinkError, match="a record of") as caught:
        part.prepare(txn, 1, end, 1)
    assert caught.value.code == "BAD_RECORDS"


def test_a_vote_is_no_if_the_target_says_so_and_is_told_again(
    part: Participant, shelf: Shelf
) -> None:
    def refuse() -> None:
        raise BadRecordError("ugly", 0)

    shelf.before_check = refuse
    txn = sent(part, b"1")
    with pytest.raises(BadRecordError, match="ugly"):
        part.prepare(txn, 1, 5, 1)
    shelf.before_check = lambda: None
    with pytest.raises(SinkError, match="ugly"):
        part.begin(txn, "demo", "out", 1, 0)
    with pytest.raises(SinkError, match="ugly"):
        part.prepare(txn, 1, 5, 1)


def test_a_target_that_raises_anything_at_all_is_a_target_that_says_no(
    part: Participant, shelf: Shelf
) -> None:
    def crash() -> None:
        raise ZeroDivisionError("oops")

    shelf.before_check = crash
    with pytest.raises(TargetError, match="Shelf: ZeroDivisionError: oops"):
        sent(part, b"1", 1)


def test_a_yes_is_given_again_and_only_for_the_same(part: Participant, reopen: Reopen) -> None:
    txn = sent(part, b"1", 7)
    part.prepare(txn, 7, 5, 1)
    again = reopen()
    again.prepare(txn, 7, 5, 1)
    with pytest.raises(SinkError, match="other numbers"):
        again.prepare(txn, 8, 5, 1)
    again.commit(txn)
    again.prepare(txn, 7, 5, 1)


# ---------------------------------------------------------------- commits and aborts


def test_a_commit_may_come_again_also_after_a_restart(
    part: Participant, shelf: Shelf, reopen: Reopen
) -> None:
    txn = sent(part, b"1", 1)
    for _ in range(3):
        part.commit(txn)
    for _ in range(3):
        part = reopen()
        part.commit(txn)
    assert shelf.items == [b"1"]
    with pytest.raises(SinkError, match="cannot be aborted"):
        part.abort(txn)


def test_an_abort_may_come_again_and_leaves_nothing(
    part: Participant, shelf: Shelf, reopen: Reopen
) -> None:
    for txn in (new(), sent(part, b"1"), sent(part, b"2", 1)):
        part.abort(txn)
        part.abort(txn)
        with pytest.raises(LostError, match="neither prepared here nor known"):
            part.commit(txn)
    assert staged(part) == []
    again = reopen()
    assert again.txns == {}
    assert shelf.items == []


def test_what_is_only_sent_cannot_be_committed(part: Participant, shelf: Shelf) -> None:
    with pytest.raises(LostError):
        part.commit(sent(part, b"1"))
    assert shelf.items == []


def test_of_committed_ones_the_last_are_remembered(
    part: Participant, shelf: Shelf, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_IDS", 10)
    monkeypatch.setattr(module, "_REWRITE_LINES", 20)
    txns = [sent(part, b"%d" % n, n) for n in range(30)]
    for txn in txns:
        part.commit(txn)
    assert part.ledger.lines < 60
    part = reopen()
    for txn in txns[-10:]:
        part.commit(txn)
    for txn in txns[:-10]:
        with pytest.raises(LostError):
            part.commit(txn)
    assert shelf.items == [b"%d" % n for n in range(30)], "never twice, forgotten or not"


# ---------------------------------------------------------------- generations


def test_a_generation_begins_and_older_ones_are_over(part: Participant, reopen: Reopen) -> None:
    first, second = sent(part, b"1", 1), sent(part, b"2")
    done = sent(part, b"0", 1)
    part.commit(done)
    newer = sent(part, b"3", generation=3)
    alone = sent(part, b"4", alone=True)
    listed = part.uncommitted("demo", "out", 2)
    assert {txn.id: txn.state for txn in listed} == {first: "prepared", second: "open"}
    for again in (part, reopen()):
        with pytest.raises(SinkError, match="generation 1 is over, and 2 has begun") as caught:
            sent(again, b"5")
        assert caught.value.code == "STALE"
    again = reopen()
    with pytest.raises(SinkError, match="generation 1 is over"):
        again.prepare(second, 1, 5, 1)
    again.prepare(newer, 1, 5, 1)
    again.prepare(alone, 0, 5, 1)
    sent(again, b"6", generation=2)
    assert again.uncommitted("demo", "other", 9) == []


def test_a_flow_that_counts_its_generations_anew_is_believed(part: Participant) -> None:
    old = sent(part, b"1", 1, generation=7)
    part.uncommitted("demo", "out", 8)
    part.uncommitted("demo", "out", 1)
    new = sent(part, b"2", 1, generation=1)
    left = [txn.id for txn in part.uncommitted("demo", "out", 7)]
    assert left == [old, new], "what an earlier life has left of 7 is listed before 7 begins"


def test_what_belongs_to_no_snapshot_is_thrown_away_after_a_day(
    part: Participant, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = sent(part, b"1", 1)
    sent(part, b"2", alone=True)
    sent(part, b"3", 0, alone=True)
    assert len(reopen().txns) == 3
    monkeypatch.setattr(module, "ABANDONED_AFTER_S", -1.0)
    again = reopen()
    assert list(again.txns) == [kept]
    assert staged(again) == [f"{kept}.log"]


# ---------------------------------------------------------------- order


def test_earlier_snapshots_come_first(part: Participant, shelf: Shelf, reopen: Reopen) -> None:
    one, three = sent(part, b"1", 1), sent(part, b"3", 3)
    two = sent(part, b"3 too", 3)
    four = sent(part, b"4", 4)
    other = sent(part, b"another generation", 1, generation=2)
    part = reopen()
    part.commit(two)
    assert shelf.items == [b"1", b"3 too"]
    part.commit(four)
    assert shelf.items == [b"1", b"3 too", b"3", b"4"]
    part.commit(one)
    part.commit(three)
    assert len(shelf.items) == 4
    part.commit(other)


def test_within_a_snapshot_the_order_is_that_of_votes(
    part: Participant, shelf: Shelf, reopen: Reopen
) -> None:
    opened = [sent(part, b"%d" % n) for n in range(5)]
    for txn in reversed(opened):
        part.prepare(txn, 1, 5, 1)
    last = sent(part, b"last", 2)
    reopen().commit(last)
    assert shelf.items == [b"4", b"3", b"2", b"1", b"0", b"last"]


def test_what_a_worker_hands_over_by_too_small_a_number_is_not_committed_too_early(
    part: Participant, shelf: Shelf, reopen: Reopen
) -> None:
    """It joined after snapshot 56 and left before 57: it says 1, and others have yet to commit 56."""
    slow, quick = sent(part, b"56 slow", 56), sent(part, b"56 quick", 56)
    handed = sent(part, b"57 handed over", 1)
    part = reopen()
    part.commit(quick)
    part.commit(slow)
    assert shelf.items == [b"56 quick", b"56 slow"]
    later = sent(part, b"58", 58)
    part.commit(later)
    assert shelf.items[2:] == [b"57 handed over", b"58"]
    part.commit(handed)


def test_what_is_handed_over_comes_after_the_snapshot_it_follows(
    part: Participant, shelf: Shelf
) -> None:
    slow = sent(part, b"56", 56)
    handed = [sent(part, b"57 handed over", 1), sent(part, b"57 handed over too", 1)]
    later = sent(part, b"58 perhaps, handed over", 1)
    part.commit(handed[1])
    part.commit(handed[0])
    part.commit(slow)
    assert shelf.items == [b"56", b"57 handed over", b"57 handed over too"]
    part.commit(later)


def test_of_those_that_wait_the_earlier_snapshot_comes_first_whoever_voted_first(
    part: Participant, shelf: Shelf
) -> None:
    sent(part, b"57 by a worker that leaves", 57)
    sent(part, b"57 by one that had just come", 1)
    sent(part, b"57", 57)
    part.commit(sent(part, b"58", 58))
    assert shelf.items == [
        b"57 by a worker that leaves", b"57", b"57 by one that had just come", b"58",
    ]  # fmt: skip


def test_what_belongs_to_no_snapshot_has_no_order(part: Participant, shelf: Shelf) -> None:
    waiting = sent(part, b"alone", 0, alone=True)
    part.commit(sent(part, b"5", 5))
    part.commit(sent(part, b"alone too", 9, alone=True))
    assert shelf.items == [b"5", b"alone too"]
    part.commit(waiting)


# ---------------------------------------------------------------- disks


def test_a_ledger_that_cannot_be_written_promises_nothing(
    part: Participant, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, reopen: Reopen
) -> None:
    good = sent(part, b"1", 1)
    bad = sent(part, b"2")
    with monkeypatch.context() as patch:
        patch.setattr("railgun.sinkserver.journal.os.fsync", _full)
        for action in (
            lambda: part.prepare(bad, 1, 5, 1),
            lambda: part.commit(good),
            lambda: part.abort(good),
            lambda: part.uncommitted("demo", "out", 5),
        ):
            with pytest.raises(OSError, match=r"full|anew"):
                action()
    assert shelf.items == []
    part.commit(good)
    assert shelf.items == [b"1"]
    part = reopen()
    part.commit(good)
    with pytest.raises(LostError):
        part.commit(bad)
    sent(part, b"3", generation=1)


def _full(file: int) -> None:
    raise OSError(28, "full")
