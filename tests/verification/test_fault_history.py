"""Histories on disk: they are read as they were written, and can be checked again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.verification.fault_records import kept, put, right
from verification.faults.__main__ import main
from verification.faults.history import (
    Fault,
    History,
    HistoryError,
    Meta,
    Record,
    of_line,
    read,
    to_line,
)


def write(file: Path, records: Sequence[Record]) -> None:
    history = History(file)
    history.add_all(records)
    history.close()


def test_a_history_on_disk_is_the_same_and_a_torn_end_is_passed_over(tmp_path: Path) -> None:
    records: list[Record] = [Meta(7, 3, 10.0), Fault(1.0, "kill", "n1"), *right(7)]
    assert [of_line(to_line(one)) for one in records] == records
    write(tmp_path / "h", records)
    assert read(tmp_path / "h") == records
    data = (tmp_path / "h").read_bytes()
    (tmp_path / "h").write_bytes(data[:-10])
    assert read(tmp_path / "h") == records[:-1]
    (tmp_path / "h").write_bytes(b"nonsense\n" + data)
    with pytest.raises(HistoryError, match="line 1"):
        read(tmp_path / "h")


@pytest.mark.parametrize("line", ["{}", "[]", '{"kind": "x"}', '{"kind": "fault", "more": 1}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(HistoryError):
        of_line(line)


def test_a_history_can_be_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "good", right(3))
    assert main(["check", str(tmp_path / "good")]) == 0
    write(tmp_path / "bad", [put("a", 0), kept()])
    assert main(["check", str(tmp_path / "bad")]) == 1
    told = capsys.readouterr()
    assert "'a' was acknowledged at 0 of orders, and is not there" in told.out
    assert main(["check", str(tmp_path / "none")]) == 2
