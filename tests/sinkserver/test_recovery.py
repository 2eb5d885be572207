"""A sink that is cut off at any byte: what it has promised is there, and nothing comes twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.sinkserver.sinks import Shelf, new

from railgun.ingest.errors import LostError, SinkError
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.journal import Journal
from railgun.sinkserver.participant import Participant
from railgun.sinkserver.staged import InMemoryRecords, Log
from railgun.sinkserver.targets import TargetError
from railgun.transport.packed_records import pack


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is torn is torn by hand here, so nothing need wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda file: None)


def opened(directory: Path, target: Shelf | FileTarget | None = None) -> Participant:
    directory.mkdir(exist_ok=True)
    made = Participant(directory, target or Shelf())
    made.open()
    return made


def sent(part: Participant, items: list[bytes], snapshot: int = 1, *, worker: int = 0) -> str:
    """A transaction that is prepared, in batches of two records."""
    txn = new()
    part.begin(txn, "demo", "out", 1, worker)
    at = 0
    for first in range(0, len(items), 2):
        at = part.data(txn, at, pack(items[first : first + 2]))
    part.prepare(txn, snapshot, at, len(items))
    return txn


# ---------------------------------------------------------------- the parts


def entries_in(path: Path) -> list[Any]:
    journal, entries = Journal.open(path)
    journal.close()
    return entries


def test_a_journal_that_is_torn_at_any_byte_has_the_entries_before(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    first = path.stat().st_size
    entries = [{"n": n, "text": "ä\n" * n} for n in range(5)]
    ends = []
    for entry in entries:
        journal.add(entry)
        ends.append(path.stat().st_size)
    journal.close()
    whole = path.read_bytes()
    for cut in range(first, len(whole) + 1):
        path.write_bytes(whole[:cut])
        expected = sum(end <= cut for end in ends)
        journal, found = Journal.open(path)
        assert found == entries[:expected]
        journal.add({"more": True})
        journal.close()
        assert entries_in(path) == [*entries[:expected], {"more": True}]


def test_a_journal_with_a_changed_byte_before_what_was_promised_is_left_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    journal.add({"n": 1})
    journal.add({"n": 2})
    last = path.stat().st_size
    journal.add({"n": 3})
    journal.close()
    whole = path.read_bytes()
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        path.write_bytes(changed)
        if at < last:
            with pytest.raises(SinkError, match="is damaged at byte"):
                Journal.open(path)
            assert path.read_bytes() == changed
        else:  # as if it had never been written whole
            assert entries_in(path) == [{"n": 1}, {"n": 2}]


def test_a_journal_that_was_written_anew_is_never_taken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    journal.rewrite([{"n": 1}, {"n": 2}])
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(SinkError, match="is damaged at byte"):
            Journal.open(path)


def test_of_entries_that_were_not_synced_a_power_cut_may_lose_any(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    journal.add({"n": 1})
    safe = path.stat().st_size
    journal.add({"n": 2}, sync=False)
    middle = path.stat().st_size
    journal.add({"n": 3}, sync=False)
    torn = tmp_path / "torn"
    whole = path.read_bytes()
    torn.write_bytes(whole[:safe] + bytes(middle - safe) + whole[middle:])
    again, found = Journal.open(torn)
    again.close()
    assert (found, again.cut) == ([{"n": 1}], len(whole) - safe)
    journal.add({"n": 4})
    journal.add({"n": 5})  # 2 and 3 were safe before this one was written
    journal.close()
    whole = path.read_bytes()
    torn.write_bytes(whole[:safe] + bytes(middle - safe) + whole[middle:])
    with pytest.raises(SinkError, match="is damaged at byte"):
        Journal.open(torn)


def test_a_journal_that_could_not_be_written_anew_takes_nothing_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    journal.add({"n": 1})

    def fail(directory: Path) -> None:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("railgun.sinkserver.journal.sync_directory", fail)
        with pytest.raises(OSError, match="too many"):
            journal.rewrite([{"n": 1}])
    assert journal.broken
    with pytest.raises(OSError, match="open it again"):
        journal.add({"n": 2})
    journal.rewrite([{"n": 1}])
    journal.add({"n": 3})
    journal.close()
    assert entries_in(path) == [{"n": 1}, {"n": 3}]


def test_a_log_that_is_torn_at_any_byte_has_the_batches_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log.create(path, {"flow": "demo"})
    first = path.stat().st_size
    batches = [[b"a" * n, b"b"] for n in range(1, 5)]
    ends, sizes = [0], [first]
    for batch in batches:
        log.append(pack(batch))
        ends.append(log.end)
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = Log.open(path)
        if cut < first:
            assert found is None
            continue
        assert found is not None
        expected = sum(size <= cut for size in sizes) - 1
        assert found.end == ends[expected]
        found.append(pack([b"more"]))
        assert list(found.records().batches()) == [*batches[:expected], [b"more"]]


def test_a_log_with_a_changed_byte_ends_before_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log.create(path, {"flow": "demo"})
    begin = path.stat().st_size
    log.append(pack([b"abc"]))
    middle = path.stat().st_size
    log.append(pack([b"def"]))
    whole = path.read_bytes()
    for at in range(begin, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = Log.open(path)
        assert found is not None
        assert list(found.records()) == ([] if at < middle else [b"abc"])


# ---------------------------------------------------------------- the whole


def test_a_ledger_that_is_torn_in_any_line_keeps_what_was_answered(tmp_path: Path) -> None:
    """The ledger grows by promises; whatever is cut off, those before it hold, and commits have no second effect."""
    shelf = Shelf()
    part = opened(tmp_path / "sink", shelf)
    ledger = tmp_path / "sink" / "ledger"
    first = ledger.stat().st_size
    one = sent(part, [b"1", b"2", b"3"], 1)
    prepared_one = ledger.stat().st_size
    two = sent(part, [b"4"], 2)
    prepared_two = ledger.stat().st_size
    shutil.copytree(tmp_path / "sink" / "staged", tmp_path / "staged")
    part.commit(two)
    whole = ledger.read_bytes()
    part.close()
    decided = whole.index(b"\n", prepared_two) + 1
    ends = [at + 1 for at in range(first - 1, len(whole)) if whole[at : at + 1] == b"\n"]
    for cut in sorted({end + by for end in ends for by in (-1, 0, 1, 20)}):
        if not first <= cut <= len(whole):
            continue
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        again.mkdir()
        shutil.copytree(tmp_path / "staged", again / "staged")
        (again / "ledger").write_bytes(whole[:cut])
        after = Shelf()
        if cut > decided:  # the target has it, whether the ledger knows that or not
            after.applied, after.items = list(shelf.applied), list(shelf.items)
        part = opened(again, after)
        if cut >= decided:
            assert after.items == [b"1", b"2", b"3", b"4"], "what was decided is done"
            part.commit(one)
            part.commit(two)
        elif cut >= prepared_two:
            part.commit(two)
            part.commit(one)
        elif cut >= prepared_one:
            part.commit(one)
            with pytest.raises(LostError):
                part.commit(two)
            assert after.items == [b"1", b"2", b"3"]
            part.close()
            continue
        else:
            for txn in (one, two):
                with pytest.raises(LostError):
                    part.commit(txn)
            assert after.items == []
            part.close()
            continue
        assert after.items == [b"1", b"2", b"3", b"4"]
        part.close()


def test_a_log_of_an_open_transaction_is_torn_and_the_rest_is_sent_again(tmp_path: Path) -> None:
    items = [b"one", b"two", b"three", b"four"]
    part = opened(tmp_path / "sink")
    txn = new()
    part.begin(txn, "demo", "out", 1, 0)
    middle = part.data(txn, 0, pack(items[:2]))
    end = part.data(txn, middle, pack(items[2:]))
    part.close()
    log = tmp_path / "sink" / "staged" / f"{txn}.log"
    whole = log.read_bytes()
    seen = set()
    for cut in range(len(whole) + 1):
        log.write_bytes(whole[:cut])
        shelf = Shelf()
        part = opened(tmp_path / "sink", shelf)
        here = part.begin(txn, "demo", "out", 1, 0)
        seen.add(here)
        assert here in (0, middle, end)
        if here < middle:
            part.data(txn, 0, pack(items[:2]))
        part.data(txn, middle, pack(items[2:]))
        part.prepare(txn, 1, end, 4)
        part.commit(txn)
        assert shelf.items == items
        part.close()
        (tmp_path / "sink" / "ledger").unlink()
    assert seen == {0, middle, end}


def test_a_log_of_a_prepared_transaction_that_is_damaged_is_never_half_applied(
    tmp_path: Path,
) -> None:
    shelf = Shelf()
    part = opened(tmp_path / "sink", shelf)
    txn = sent(part, [b"1", b"2", b"3"])
    part.close()
    log = tmp_path / "sink" / "staged" / f"{txn}.log"
    whole = log.read_bytes()
    for cut in range(len(whole)):
        log.write_bytes(whole[:cut])
        part = opened(tmp_path / "sink", shelf)
        with pytest.raises(LostError, match="damaged"):
            part.commit(txn)
        part.close()
    assert shelf.items == []


def test_what_was_decided_is_done_at_the_start_in_its_order(tmp_path: Path) -> None:
    part = opened(tmp_path / "sink", broken := Shelf())
    three, one = sent(part, [b"3"], 3), sent(part, [b"1"], 1)
    two = sent(part, [b"2"], 4, worker=1)

    def fail() -> None:
        raise OSError("gone")

    broken.before_apply = fail
    with pytest.raises(TargetError, match="gone"):
        part.commit(two)
    with pytest.raises(SinkError, match="cannot be aborted"):
        part.abort(three)
    part.close()
    part = Participant(tmp_path / "sink", shelf := Shelf())
    assert part.open() == ["3 transactions were decided on, and are applied now"]
    assert shelf.items == [b"3", b"1", b"2"]  # 1 voted after 3, so it is of no earlier snapshot
    for txn in (one, two, three):
        part.commit(txn)
    assert len(shelf.items) == 3
    part.close()


# ---------------------------------------------------------------- the file


def test_a_file_that_is_torn_at_any_byte_is_as_it_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    journal = tmp_path / ".out.txt.journal"
    target = FileTarget(path)
    target.open()
    target.apply("t1", InMemoryRecords([b"one", b"two"]))
    before = journal.read_bytes()
    target.apply("t2", InMemoryRecords([b"three", b"four"]))
    target.close()
    whole, after = path.read_bytes(), journal.read_bytes()
    assert whole == b"one\ntwo\nthree\nfour\n"
    for cut in range(8, len(whole) + 1):  # the lines of t2 were under way
        path.write_bytes(whole[:cut])
        journal.write_bytes(before)
        check_goes_on(path)
    for cut in range(len(before), len(after) + 1):  # and then its entry
        path.write_bytes(whole)
        journal.write_bytes(after[:cut])
        check_goes_on(path)


def check_goes_on(path: Path) -> None:
    target = FileTarget(path)
    target.open()
    assert path.read_bytes() in (b"one\ntwo\n", b"one\ntwo\nthree\nfour\n")
    target.apply("t1", InMemoryRecords([b"one", b"two"]))
    target.apply("t2", InMemoryRecords([b"three", b"four"]))
    target.apply("t3", InMemoryRecords([b"five"]))
    target.close()
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\n"


def test_what_was_in_a_file_stays_and_what_is_cut_off_by_others_is_told(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old\n")
    target = FileTarget(path)
    target.open()
    target.apply("t1", InMemoryRecords([b"new"]))
    assert path.read_text() == "old\nnew\n"
    path.write_text("old\n")
    with pytest.raises(TargetError, match="has 4 bytes, and 8 were written"):
        target.apply("t2", InMemoryRecords([b"more"]))
    path.write_text("old\nnew\n")
    target.apply("t2", InMemoryRecords([b"more"]))
    with pytest.raises(TargetError, match="another sink"):
        FileTarget(path).open()
    target.close()
    assert path.read_text() == "old\nnew\nmore\n"


def test_a_record_is_a_line_unless_bytes_are_raw(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "out.txt")
    with pytest.raises(TargetError, match="record 1 contains an end of line"):
        target.check(InMemoryRecords([b"a", b"b\nc"]))
    raw = FileTarget(tmp_path / "out.bin", raw=True)
    raw.open()
    raw.check(InMemoryRecords([b"b\nc"]))
    raw.apply("t1", InMemoryRecords([b"a", b"b\nc"]))
    raw.close()
    assert raw.path.read_bytes() == b"ab\nc"


def test_a_journal_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railgun.sinkserver.file_target._REWRITE_LINES", 10)
    monkeypatch.setattr("railgun.sinkserver.file_target.REMEMBERED_TRANSACTIONS", 5)
    target = FileTarget(tmp_path / "out.txt")
    target.open()
    for n in range(50):
        target.apply(f"t{n}", InMemoryRecords([b"%d" % n]))
        target.apply(f"t{n}", InMemoryRecords([b"%d" % n]))
    target.close()
    assert target.path.read_text() == "".join(f"{n}\n" for n in range(50))
    assert len((tmp_path / ".out.txt.journal").read_text().splitlines()) <= 11
