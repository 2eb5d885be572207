"""Resets and repairs of a log are done wholly or not at all, and set aside what was damaged."""

from __future__ import annotations

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
)
from verification.log_disk import LogDisk

from railgun.broker.errors import (
    BeyondEndError,
    ClosedError,
    DamagedLogError,
    LogFailedError,
    OrderError,
    StorageError,
    TrimmedError,
)
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import log_name
from railgun.testing.disks import Crash


def trouble(log: StreamLog) -> StorageError | None:
    return log.damage or log.failed


# ------------------------------------------------------------ resets


@pytest.mark.parametrize("base", [0, 3, 10, 12, 40, 41, 10**12])
@pytest.mark.parametrize("how", ["whole", "damaged", "purged"])
def test_a_reset_begins_anew_anywhere(base: int, how: str) -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    if how == "damaged":
        log.close()
        disk.flip(f"{S}/{names(disk, '.log')[-1]}", 80)
        log = opened(disk)
        assert log.damage is not None
    if how == "purged":
        log.purge(21)
    log.reset(base)
    assert (log.first, log.end, log.durable_end, log.runs) == (base, base, base, ())
    assert (log.damage, log.failed, log.size, log.last_epoch) == (None, None, 0, 0)
    assert disk.list(S) == [log_name(base)]
    assert log.read(base) == []
    with pytest.raises(BeyondEndError):
        log.read(base + 1)
    if base:
        with pytest.raises(TrimmedError):
            log.read(base - 1)
    same(log, opened(disk))
    for n in range(30):
        kept(log, b"new %d" % n, bytes(30), epoch=n // 10)
    assert log.end == base + 60
    assert log.runs == tuple((n, base + 20 * (n + 1)) for n in range(3))
    disk.lose_power()
    again, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None
    assert (again.first, again.runs) == (base, log.runs)


def test_a_reset_to_no_offset_is_refused() -> None:
    log = opened(LogDisk())
    kept(log, b"a")
    for base in (-1, 1 << 63):
        with pytest.raises(OrderError, match="no offset"):
            log.reset(base)
    assert stored(log) == [(0, 1, [b"a"])]
    log.close()
    with pytest.raises(ClosedError):
        log.reset(5)


# ------------------------------------------------------------ repairs


@pytest.mark.parametrize("segment", [0, 2, -2, -1])
@pytest.mark.parametrize("bit", [5, 8 * 64 + 3, 8 * 200])
@pytest.mark.parametrize("unindexed", [True, False])
def test_a_repair_sets_damage_aside_and_goes_on(segment: int, bit: int, unindexed: bool) -> None:
    disk = LogDisk()
    log = opened(disk)
    filled(log)
    good = stored(log)
    log.close()
    name = names(disk, ".log")[segment]
    disk.flip(f"{S}/{name}", bit)
    files = {one: disk.content(f"{S}/{one}") for one in names(disk, ".log")}
    if unindexed:  # so that it is found by open; else by a reader
        for index in names(disk, ".idx"):
            disk.remove(f"{S}/{index}")
    log = opened(disk)
    if log.damage is None:
        with pytest.raises(DamagedLogError):
            stored(log)
    assert log.damage is not None
    end = log.damage.offset
    later = sum(len(data) for one, data in files.items() if one > name)
    aside = log.repair()
    assert later <= aside <= later + len(files[name])
    assert (trouble(log), log.end, log.durable_end) == (None, end, end)
    assert stored(log) == good[: end // 2]
    assert log.runs == runs_of(good[: end // 2], 0)
    assert log.repair() == 0
    same(log, opened(disk))
    kept(log, b"fetched", epoch=8, now=1000)
    sides = {one: disk.content(f"{S}/{one}") for one in names(disk, "damaged-1-")}
    assert sum(map(len, sides.values())) == aside
    for one, data in sides.items():
        _, _, base, byte = one.removesuffix(".bytes").split("-")
        assert files[log_name(int(base))][int(byte) :] == data
    disk.lose_power()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None
    assert stored(log) == [*good[: end // 2], (end, 8, [b"fetched"])]


def test_a_missing_segment_is_repaired_too_and_only_the_newest_2_sets_are_kept() -> None:
    disk = LogDisk()
    for n in range(1, 5):
        log = opened(disk)
        filled(log)
        log.close()
        bases = names(disk, ".log")
        disk.forget(f"{S}/{bases[-3]}")
        log = opened(disk)
        assert log.damage is not None
        end = log.damage.offset
        assert end == int(bases[-3][:20])
        assert log.repair() > 0
        assert log.end == end
        assert len(names(disk, f"damaged-{n}-")) == 2
        log.reset(0)
        assert {name.split("-")[1] for name in names(disk, "damaged-")} == {
            str(m) for m in (n - 1, n) if m
        }
        log.close()


def test_more_damage_than_was_known_is_set_aside_with_it() -> None:
    disk, fine = LogDisk(), LogConfig(segment_bytes=600, index_bytes=50)
    log = opened(disk, fine)
    filled(log)
    log.close()
    name = names(disk, ".log")[1]
    base = int(name[:20])
    disk.flip(f"{S}/{name}", 8)
    disk.flip(f"{S}/{name}", 8 * 200)
    log = opened(disk, fine)
    with pytest.raises(DamagedLogError):
        log.read(base + 2)
    assert log.end > base
    log.repair()
    assert log.end == base
    assert log.damage is None


def test_damage_below_what_was_purged_brings_nothing_back_and_hides_nothing() -> None:
    disk = LogDisk()
    log = opened(disk, LogConfig())
    filled(log)
    log.purge(31)
    log.close()
    data = disk.content(f"{S}/{log_name(0)}")
    disk.flip(f"{S}/{log_name(0)}", 8 * (data.index(b"message 010") + 3))
    for crash in range(20):
        trial = LogDisk(crash)
        for name in disk.list(S):
            trial.replace(f"{S}/{name}", disk.content(f"{S}/{name}"))
        log = opened(trial, LogConfig())
        assert log.damage is not None
        trial.crash_at(crash)
        try:
            log.repair()
        except Crash:
            trial.lose_power()
            log = opened(trial, LogConfig())
            log.repair()
        trial.hook = None
        assert (log.first, log.end) == (20, 20)
        for n in range(10):
            kept(log, b"%d" % n, b"x", epoch=9, now=1000)
        trial.lose_power()
        log = opened(trial, LogConfig())
        assert (log.first, log.end) == (20, 40)


def test_a_log_whose_sync_failed_is_not_repaired() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"a")
    put(log, b"b")
    disk.fail_syncs = 1
    with pytest.raises(LogFailedError):
        log.sync()
    for refused in (log.repair, lambda: log.cut(0), lambda: log.reset(0)):
        with pytest.raises(LogFailedError):
            refused()
    log.close()
    with pytest.raises(ClosedError):
        log.repair()


def test_a_cut_that_meets_rot_after_a_crash_waits_for_a_repair() -> None:
    """The name of the cut is on disk, and what was to stay is bad now."""
    for crash in range(60):
        disk = LogDisk(crash)
        log = opened(disk)
        filled(log)
        good = stored(log)
        disk.crash_at(crash)
        try:
            log.cut(16)
        except Crash:
            disk.lose_power()
        disk.hook = None
        if not names(disk, ".cut"):
            continue
        target = max(name for name in names(disk, ".log") if int(name[:20]) <= 16)
        disk.flip(f"{S}/{target}", 80)
        for _ in range(2):
            log, found = StreamLog.open(disk, S, SMALL)
            assert found.damage is not None
            assert log.end == int(target[:20])
        log.repair()
        kept(log, b"new", epoch=9, now=1000)
        disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert (found.damage, found.finished) == (None, "")
        end = int(target[:20])
        assert stored(log) == [*good[: end // 2], (end, 9, [b"new"])]
        return
    pytest.fail("no crash has left a cut half done")


def test_what_a_cut_was_to_keep_is_damaged_and_not_torn_though_no_mark_is_behind_it() -> None:
    disk = LogDisk()
    log = opened(disk)
    put(log, b"a")
    kept(log, b"b")
    path = f"{S}/{log_name(0)}"
    half: list[bytes] = []

    def hook(step: str, _path: str) -> None:
        if step == "sync" and not half and names(disk, ".cut"):  # it is cut off just now
            half.append(disk.content(path))
            disk.crash()
            raise Crash

    disk.hook = hook
    with pytest.raises(Crash):
        log.cut(1)
    assert b"RGSM" not in half[0]
    disk.flip(path, 80)
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is not None
    assert log.end == 0
    assert log.repair() == len(half[0])
    log.close()
    assert opened(disk).damage is None
