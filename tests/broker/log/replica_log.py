"""A log with small segments, and what tests of copies ask of it: its batches, runs of epochs and files."""

from __future__ import annotations

from collections.abc import Iterator

from verification.log_disk import LogDisk

from railgun.broker.log.disk import Disk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import Walk, base_of
from railgun.transport.records import Records, build

SMALL = LogConfig(segment_bytes=600, index_bytes=150)
S = "orders"

Stored = tuple[int, int, list[bytes]]
"""A batch: its offset, its epoch, its payloads."""


def opened(disk: Disk, config: LogConfig = SMALL) -> StreamLog:
    return StreamLog.open(disk, S, config)[0]


def put(log: StreamLog, *payloads: bytes, epoch: int = 1, now: int = 0) -> int:
    batch = build(payloads)
    log.stamp([batch], epoch, now)
    return log.append([batch])


def kept(log: StreamLog, *payloads: bytes, epoch: int = 1, now: int = 0) -> int:
    put(log, *payloads, epoch=epoch, now=now)
    return log.sync()


def stored(log: StreamLog, most: int = 1000) -> list[Stored]:
    """All batches that hold an offset that is kept."""
    found: list[Stored] = []
    at = log.first
    while batches := log.read(at, most):
        for batch in batches:
            records = Records(batch)
            assert records.base == at or not found
            found.append((records.base, records.epoch, records.payloads()))
            at = records.end
    assert at == log.durable_end
    return found


def names(disk: Disk, part: str) -> list[str]:
    return [name for name in disk.list(S) if part in name]


def filled(log: StreamLog, count: int = 20) -> None:
    """Batches of two messages, several segments, an epoch for every five."""
    for n in range(count):
        kept(log, b"message %03d" % n, bytes(20 + n), epoch=1 + n // 5, now=100 + n)


def runs_of(batches: list[Stored], first: int) -> tuple[tuple[int, int], ...]:
    """The naive way."""
    ends: dict[int, int] = {}
    for base, epoch, payloads in batches:
        ends[epoch] = base + len(payloads)
    return tuple((epoch, end) for epoch, end in sorted(ends.items()) if end > first)


def same(log: StreamLog, other: StreamLog) -> None:
    """One of them has lived, and the other was opened; nobody could tell which."""
    for what in ("first", "end", "durable_end", "runs", "last_time", "last_epoch", "size"):
        assert getattr(log, what) == getattr(other, what), what
    shapes = [
        [(segment.base, segment.end, segment.size, segment.runs) for segment in one._segments]
        for one in (log, other)
    ]
    assert shapes[0] == shapes[1]


def walked(disk: LogDisk) -> Iterator[tuple[int, bytes]]:
    """All batches as they lie on disk."""
    for name in names(disk, ".log"):
        base = base_of(name)
        assert base is not None
        for _, found, batch in Walk(disk.content(f"{S}/{name}"), 0, base):
            yield found.base, bytes(batch)
