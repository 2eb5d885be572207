"""Cuts of a log are done wholly or not at all, and readers meanwhile get batches of one past."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

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
    same,
    stored,
    walked,
)
from verification.log_disk import LogDisk

from railgun.broker.errors import (
    BeyondEndError,
    ClosedError,
    DamagedLogError,
    LogFailedError,
    NoSpaceError,
    OrderError,
    StorageError,
    TrimmedError,
)
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import base_of
from railgun.testing.disks import Crash
from railgun.transport.records import Records, head, split

# ------------------------------------------------------------ cuts


@pytest.mark.parametrize("at", range(0, 41, 2))
def test_a_cut_forgets_all_behind_and_keeps_it_for_people(at: int) -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    before = [batch for _, batch in walked(disk)]
    stale = stored(log)
    assert log.cut(at) == 40 - at
    assert (log.first, log.end, log.durable_end) == (0, at, at)
    assert stored(log) == stale[: at // 2]
    assert log.runs == runs_of(stale[: at // 2], 0)
    assert log.last_epoch == (log.runs[-1][0] if at else 0)
    assert log.next_time(-5) == log.last_time if at else log.next_time(-5) == -5
    sides = names(disk, "cut-")
    assert sides == ([f"cut-{at}-1.batches"] if at < 40 else [])
    if sides:
        assert [bytes(one) for one in split(disk.content(f"{S}/{sides[0]}"))] == before[at // 2 :]
    with pytest.raises(BeyondEndError):
        log.read(at + 1)
    again = StreamLog.open(disk, S, SMALL)
    assert str(again[1]) == f"messages 0 to {at}"
    same(log, again[0])
    assert kept(log, b"new", epoch=7, now=1000) == at + 1
    assert log.epoch_at(at) == 7
    assert not names(disk, ".cut")
    disk.lose_power()
    log, found = StreamLog.open(disk, S, SMALL)
    assert (found.damage, found.cut_bytes) == (None, 0)
    assert stored(log) == [*stale[: at // 2], (at, 7, [b"new"])]


def test_a_cut_within_a_batch_or_outside_changes_nothing() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    log.purge(10)
    before = {name: disk.content(f"{S}/{name}") for name in disk.list(S)}
    with pytest.raises(OrderError, match="in the middle of the batch from 22 on"):
        log.cut(23)
    with pytest.raises(TrimmedError, match="keeps offset 10"):
        log.cut(8)
    with pytest.raises(BeyondEndError, match="ends at 40"):
        log.cut(41)
    assert {name: disk.content(f"{S}/{name}") for name in disk.list(S)} == before
    assert log.cut(40) == 0
    assert log.cut(10) == 30
    assert (log.first, log.end, log.runs) == (10, 10, ())
    log.close()
    with pytest.raises(ClosedError):
        log.cut(10)
    log = opened(disk)
    assert (log.first, log.end, log.runs) == (10, 10, ())
    kept(log, b"x", epoch=9, now=500)
    log.close()
    assert stored(opened(disk)) == [(10, 9, [b"x"])]


def test_what_was_not_synced_can_be_cut_too() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"a", b"b")
    put(log, b"c")
    put(log, b"d", epoch=2)
    assert log.cut(3) == 1
    assert (log.end, log.durable_end, log.runs) == (3, 3, ((1, 3),))
    disk.lose_power()
    assert stored(opened(disk)) == [(0, 1, [b"a", b"b"]), (2, 1, [b"c"])]


@pytest.mark.parametrize("power", [True, False])
def test_a_crash_in_a_cut_of_what_was_not_synced_keeps_what_was(power: bool) -> None:
    for step, seed in itertools.product(range(20), range(10)):
        disk = LogDisk(seed)
        log = opened(disk)
        kept(log, b"a", b"b")
        put(log, b"c" * 100)
        put(log, b"d", epoch=2)
        disk.crash_at(step)
        with contextlib.suppress(Crash):
            log.cut(3)
        disk.crash()
        if power:
            disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert found.damage is None
        assert log.end in ((3,) if found.finished else (2, 3, 4))


def test_only_the_newest_8_cuts_are_kept() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"a")
    for n in range(12):
        kept(log, b"again %d" % n)
        log.cut(1)
    sides = sorted(names(disk, "cut-"), key=lambda name: int(name.split("-")[2].split(".")[0]))
    assert sides == [f"cut-1-{n}.batches" for n in range(5, 13)]
    for n, name in enumerate(sides, 4):
        assert Records(disk.content(f"{S}/{name}")).payloads() == [b"again %d" % n]


def test_a_cut_into_damage_says_so_and_changes_nothing() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    path = f"{S}/{names(disk, '.log')[2]}"
    base = base_of(path[len(S) + 1 :])
    assert base is not None
    data = bytearray(disk.content(path))
    data[10] ^= 1
    log.close()
    disk.replace(path, data)
    for at in (base + 2, base - 2):  # in what is to stay, and in what is to go
        log = opened(disk)
        with pytest.raises(DamagedLogError) as error:
            log.cut(at)
        assert error.value.offset == base
        assert disk.content(path) == data
        assert not names(disk, "cut")
        log.close()


def test_no_room_for_what_is_cut_off_changes_nothing() -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    before = stored(log)
    for room in (0, 10, 500):
        disk.room = disk.used() + room
        with pytest.raises(NoSpaceError, match="nothing was"):
            log.cut(10)
        assert stored(log) == before
        assert not names(disk, "cut")
    disk.room = None
    assert log.cut(10) == 30


@pytest.mark.parametrize("failing", range(40))
def test_a_step_that_fails_leaves_the_log_as_it_was_or_ends_it(failing: int) -> None:
    """And when it is opened again, it is as before or wholly cut."""
    disk = LogDisk(failing)
    log = opened(disk)
    filled(log)
    before = stored(log)
    steps = itertools.count()

    def hook(_step: str, _path: str) -> None:
        if next(steps) == failing:
            raise OSError(5, "broken")

    disk.hook = hook
    try:
        log.cut(10)
    except LogFailedError:
        assert isinstance(log.failed, LogFailedError)
        with pytest.raises(LogFailedError):
            put(log, b"x", epoch=9)
        assert stored(log) in (before, before[:5]), "readers go on"
    except StorageError:
        assert log.failed is None
        assert stored(log) == before
        assert log.cut(10) == 30
    disk.hook = None
    if log.failed is None:
        assert stored(log) == before[:5]
        kept(log, b"x", epoch=9, now=1000)
        before[5:] = [(10, 9, [b"x"])]
    if failing % 2:
        disk.lose_power()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None
    assert stored(log) in (before, before[:5])
    same(log, opened(disk))


# ------------------------------------------------------------ readers


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_read_while_the_log_was_cut_is_read_again(when: str) -> None:
    """The new batches have the places of the old ones: a reader would not see the seam."""
    log = opened(LogDisk(), LogConfig())
    for n in range(10):
        kept(log, b"old %d" % n)
    file = log._tail.file
    read = file.read

    def meanwhile(at: int, size: int) -> bytes:
        file.read = read  # type: ignore[method-assign]
        data = read(at, size) if when == "before" else b""
        log.cut(4)
        for n in range(4, 8):
            kept(log, b"new %d" % n, epoch=2)
        return data or read(at, size)

    file.read = meanwhile  # type: ignore[method-assign]
    found = [Records(batch) for batch in log.read(2)]
    assert [one.payloads()[0] for one in found] == [
        *(b"old %d" % n for n in range(2, 4)),
        *(b"new %d" % n for n in range(4, 8)),
    ]
    assert log.damage is None


def test_a_reader_of_a_file_that_was_closed_meanwhile_finds_it_again_or_is_told() -> None:
    log = opened(LogDisk())
    filled(log)

    def during(act: Callable[[], object], offset: int) -> list[memoryview]:
        with log._lock:
            file = log._file(log._segments[1])
        read = file.read

        def meanwhile(at: int, size: int) -> bytes:
            file.read = read  # type: ignore[method-assign]
            act()
            return read(at, size)

        file.read = meanwhile  # type: ignore[method-assign]
        return log.read(offset, 1)

    offset = log._bases[1]
    assert (
        head(during(lambda: [log.read(base, 1) for base in log._bases], offset)[0]).base == offset
    )
    with pytest.raises(TrimmedError):
        during(lambda: log.trim(None, 1200, 0), offset)
    offset = log._bases[1]
    with pytest.raises(BeyondEndError):
        during(lambda: log.cut(log.first), offset + 2)


@pytest.mark.parametrize("real", [True, False])
def test_readers_get_batches_of_one_past_while_a_log_is_cut(tmp_path: Path, real: bool) -> None:
    disk: Disk = NodeDisk(tmp_path) if real else LogDisk()
    log = opened(disk, LogConfig(segment_bytes=2_000, index_bytes=300))
    starts: dict[int, int] = {1: 0}  # of each epoch
    wrong: list[BaseException] = []
    seen: set[int] = set()
    stop = threading.Event()

    def together(batches: list[memoryview], at: int) -> int:
        """That these have been in the log at one time; the offset after them."""
        last = head(batches[-1]).epoch
        for batch in batches:
            records = Records(batch)
            assert records.base <= at < records.end
            text = [b"%d at %d" % (records.epoch, n) * 3 for n in range(records.base, records.end)]
            assert records.payloads() == text
            for epoch in range(records.epoch + 1, last + 1):
                assert starts[epoch] >= records.end, "it was cut off before the last one came"
            at = records.end
            seen.add(records.epoch)
        return at

    def reader(seed: int) -> None:
        chance = random.Random(seed)
        at = 0
        try:
            while not stop.is_set():
                try:
                    batches = log.read(at, chance.choice((1, 500, 3000)))
                except (BeyondEndError, TrimmedError):
                    at = log.first
                    continue
                at = together(batches, at) if batches else chance.randint(log.first, log.end)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(2)]
    try:
        for thread in threads:
            thread.start()
        chance = random.Random(7)
        for epoch in range(1, 60 if real else 150):
            for _ in range(chance.randint(3, 12)):
                end = log.end
                kept(log, *(b"%d at %d" % (epoch, n) * 3 for n in (end, end + 1)), epoch=epoch)
            places = [head(batch).base for batch in log.read(max(log.first, log.end - 30), 5000)]
            starts[epoch + 1] = place = chance.choice(places)
            log.cut(place)
            if epoch % 20 == 0:
                starts[epoch + 1] = log.end + 4
                log.reset(log.end + 4)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []
    assert len(seen) > 5
    assert log.damage is None
    log.close()
