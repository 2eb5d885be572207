"""Units of batches in the log of a stream: seen together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import log_name
from railgun.transport.records import Records, build, unite


def unit(count: int) -> list[bytearray]:
    batches = [build([b"part %d" % n]) for n in range(count)]
    unite(batches)
    return batches


def put(log: StreamLog, batches: list[bytearray]) -> None:
    log.stamp(batches, 1, 1_000)
    log.append(batches)
    log.sync()


def test_a_unit_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    put(log, [build([b"before"])])
    first, second, last = unit(3)
    for batch in (first, second):
        put(log, [batch])
        assert (log.whole_end, log.durable_end) == (1, log.end)
    put(log, [last])
    assert log.whole_end == log.end == 4
    log.close()


def test_a_unit_lies_in_one_segment(tmp_path: Path) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders", LogConfig(segment_bytes=150))
    for batch in unit(5):
        put(log, [batch])
        log.roll()
    put(log, [build([b"behind"])])
    segments = sorted(path.name for path in (tmp_path / "orders").glob("*.log"))
    assert segments == [log_name(0), log_name(5)]
    log.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_unit_that_was_not_finished_is_cut_off_when_the_log_is_opened(
    tmp_path: Path, parts: int
) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    put(log, [build([b"before"])])
    put(log, unit(2))
    for batch in unit(3)[:parts]:
        put(log, [batch])
    log.close()
    log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
    assert (log.end, log.whole_end, found.damage) == (3, 3, None)
    assert "not finished" in found.cut_reason
    put(log, [build([b"behind"])])
    log.close()
    log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
    payloads = [payload for batch in log.read(0) for payload in Records(batch).payloads()]
    assert payloads == [b"before", b"part 0", b"part 1", b"behind"]
    assert not found.cut_bytes
    log.close()


def test_a_cut_within_a_unit_leaves_what_is_not_whole_unseen(tmp_path: Path) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    put(log, [build([b"before"])])
    put(log, unit(3))
    log.cut(3)
    assert (log.end, log.whole_end) == (3, 1)
    log.cut(log.whole_end)
    assert (log.end, log.whole_end) == (1, 1)
    log.close()
