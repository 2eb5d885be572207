"""What a copy needs to know of a log: runs of epochs, and batches that are the same byte for byte."""

from __future__ import annotations

import random
import threading

import pytest
from tests.broker.log.replica_log import (
    SMALL,
    S,
    filled,
    kept,
    names,
    opened,
    put,
    runs_of,
    stored,
    walked,
)
from verification.log_disk import LogDisk

from railgun.broker.errors import BeyondEndError
from railgun.broker.log.committer import Committer
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import index_name


def runs(log: StreamLog) -> tuple[tuple[int, int], ...]:
    return log.runs


# ------------------------------------------------------------ runs


def test_runs_are_known_without_a_scan_after_a_restart() -> None:
    disk = LogDisk()
    log = opened(disk)
    assert runs(log) == ()
    filled(log)
    expected = ((1, 10), (2, 20), (3, 30), (4, 40))
    assert runs(log) == expected == runs_of(stored(log), 0)
    assert [log.epoch_at(offset) for offset in range(40)] == [1 + n // 10 for n in range(40)]
    put(log, b"not synced", epoch=9)
    assert runs(log) == (*expected, (9, 41)), "what is appended counts"
    assert log.epoch_at(40) == 9
    log.close()
    segments = names(disk, ".log")
    assert len(segments) > 4
    for name in segments[:-1]:  # what is not read cannot be scanned
        disk.flip(f"{S}/{name}", 8 * 100)
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.rebuilt == ()
    assert runs(log) == (*expected, (9, 41))
    with pytest.raises(BeyondEndError, match="no batch holds offset 41"):
        log.epoch_at(41)


def test_an_index_of_the_old_format_is_made_anew() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    log.close()
    path = f"{S}/{names(disk, '.idx')[1]}"
    good = disk.content(path)
    disk.replace(path, b"RGI1" + good[4:])
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.rebuilt == (path[len(S) + 1 :],)
    assert disk.content(path) == good
    assert runs(log) == ((1, 10), (2, 20), (3, 30), (4, 40))


def test_runs_before_the_first_offset_are_forgotten_but_the_last_epoch_is_not() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    assert log.epoch_at(-1) == 0
    log.purge(15)
    assert runs(log) == ((2, 20), (3, 30), (4, 40))
    assert log.epoch_at(14) == log.epoch_at(15) == 2
    log.purge(20)
    assert runs(log) == ((3, 30), (4, 40))
    assert log.epoch_at(19) == 2
    assert log.epoch_at(0) == 0, "gone"
    log.purge(40)
    assert (runs(log), log.first, log.end) == ((), 40, 40)
    assert log.epoch_at(39) == 4
    assert log.epoch_at(38) == 0
    kept(log, b"x", epoch=5, now=999)
    assert runs(log) == ((5, 41),)
    log.close()
    log = opened(disk)
    assert runs(log) == ((5, 41),)
    assert log.epoch_at(39) == 0, "not known any more"


def test_retention_clips_runs_at_whole_segments() -> None:
    log = opened(LogDisk())
    filled(log)
    first = log.trim(None, 1200, 0)
    assert first > 10
    assert runs(log) == tuple(run for run in ((1, 10), (2, 20), (3, 30), (4, 40)) if run[1] > first)
    assert log.epoch_at(first - 1) == 1 + (first - 1) // 10


def test_epochs_of_64_bits_are_kept() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"x", epoch=(1 << 64) - 1)
    log.roll()
    log.close()
    assert runs(opened(disk)) == (((1 << 64) - 1, 1),)


# ------------------------------------------------------------ what replicas read and append


def test_a_read_from_the_begin_of_a_batch_gives_just_that_and_what_follows() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    whole = [batch for _, batch in walked(disk)]
    for n, batch in enumerate(whole):
        for most in (1, 300, 5000):
            found = log.read(2 * n, most)
            assert [bytes(one) for one in found] == whole[n : n + len(found)]
            assert bytes(found[0]) == batch


def committed(committer: Committer, log: StreamLog) -> None:
    """Wait for all that was submitted."""
    event = threading.Event()
    committer.perform(log, lambda: None, lambda _: event.set())
    assert event.wait(30)


@pytest.mark.parametrize("most", [1, 700, 100_000])
def test_a_copy_is_the_same_byte_for_byte(most: int) -> None:
    chance = random.Random(most)
    disk, copied = LogDisk(1), LogDisk(2)
    log, copy = opened(disk), opened(copied, LogConfig(segment_bytes=1000, index_bytes=100))
    for n in range(60):
        payloads = [
            chance.randbytes(chance.choice((0, 5, 90))) for _ in range(chance.randint(1, 4))
        ]
        kept(log, *payloads, epoch=n // 7, now=n)
    done: list[object] = []
    committer = Committer(threads=1)
    while (at := copy.durable_end) < log.end:
        committer.submit(copy, log.read(at, most), done.append)
        committed(committer, copy)
    committer.close()
    assert set(done) == {None}
    assert [*walked(copied)] == [*walked(disk)]
    assert (copy.runs, copy.end, copy.last_time) == (log.runs, log.end, log.last_time)
    assert len(names(copied, ".log")) > 2
    copy.close()
    assert opened(copied).runs == log.runs


# ------------------------------------------------------------ names of files


def test_an_index_name_is_of_a_segment() -> None:
    """What lies beside a log is no part of it."""
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    log.cut(10)
    log.close()
    (side,) = names(disk, "cut-")
    assert index_name(0) in disk.list(S)
    log, found = StreamLog.open(disk, S, SMALL)
    assert (found.end, found.rebuilt) == (10, ())
    assert side in disk.list(S)
