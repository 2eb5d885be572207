"""What a copy needs of a log: runs of epochs, and cuts, resets and repairs that are done wholly or not at all."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
from railgun.broker.log.committer import Committer
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import Walk, base_of, index_name, log_name
from railgun.testing.disks import Crash
from railgun.transport.records import Records, build, head, split

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


def runs(log: StreamLog) -> tuple[tuple[int, int], ...]:
    return log.runs


def trouble(log: StreamLog) -> StorageError | None:
    return log.damage or log.failed


def same(log: StreamLog, other: StreamLog) -> None:
    """One of them has lived, and the other was opened; nobody could tell which."""
    for what in ("first", "end", "durable_end", "runs", "last_time", "last_epoch", "size"):
        assert getattr(log, what) == getattr(other, what), what
    shapes = [
        [(segment.base, segment.end, segment.size, segment.runs) for segment in one._segments]
        for one in (log, other)
    ]
    assert shapes[0] == shapes[1]


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


def walked(disk: LogDisk) -> Iterator[tuple[int, bytes]]:
    """All batches as they lie on disk."""
    for name in names(disk, ".log"):
        base = base_of(name)
        assert base is not None
        for _, found, batch in Walk(disk.content(f"{S}/{name}"), 0, base):
            yield found.base, bytes(batch)


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


def rotten(disk: LogDisk, segment: int, bit: int) -> None:
    """A closed log of several segments with a bad bit."""
    log = opened(disk)
    filled(log)
    log.close()
    disk.flip(f"{S}/{names(disk, '.log')[segment]}", bit)


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


# ------------------------------------------------------------ crashes


@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize(
    "act", ["cut 0", "cut 6", "cut 30", "reset 0", "reset 12", "reset 77", "repair"]
)
def test_a_crash_between_any_two_steps_leaves_the_log_as_it_was_or_all_done(
    act: str, power: bool
) -> None:
    verb, _, number = act.partition(" ")
    for step, seed in itertools.product(range(100), range(6)):
        disk = LogDisk(seed)
        if verb == "repair":
            rotten(disk, 2, 8 * 200)
            log = opened(disk)
            with pytest.raises(DamagedLogError):
                stored(log)
            assert log.damage is not None
            done: tuple[int, int] = (0, log.damage.offset)
        else:
            log = opened(disk)
            filled(log)
            done = (0, int(number)) if verb == "cut" else (int(number), int(number))
        whole = {name: disk.content(f"{S}/{name}") for name in names(disk, ".log")}
        disk.crash_at(step)
        finished = False
        try:
            if verb == "cut":
                log.cut(int(number))
            elif verb == "reset":
                log.reset(int(number))
            else:
                log.repair()
            finished = True
            disk.crash()
        except Crash:
            pass
        if power:
            disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert found.damage is None or verb == "repair"
        assert not [*names(disk, ".reset"), *names(disk, ".tmp"), *names(disk, "0.repair")]
        now = (log.first, log.end)
        if finished:
            assert (*now, log.damage) == (*done, None)
        if now == done and log.damage is None:
            if verb == "cut":
                (side,) = names(disk, "cut-")
                cut = split(disk.content(f"{S}/{side}"))
                assert [head(one).base for one in cut] == [*range(int(number), 40, 2)]
            if verb == "repair":
                sides = names(disk, "damaged-")
                assert sum(len(disk.content(f"{S}/{one}")) for one in sides) > 1000
        else:
            assert not finished
            if log.damage is None:
                assert now == (0, 40)
                if verb == "repair":
                    with pytest.raises(DamagedLogError):
                        stored(log)
            assert {name: disk.content(f"{S}/{name}") for name in whole} == whole, "as it was"
        log.repair()
        assert log.damage is None
        begin, end, was = log.first, log.end, stored(log)
        for n in range(12):  # others, of the same sizes
            kept(log, b"MESSAGE %03d" % n, bytes(20 + n), epoch=9, now=1000)
        disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert found.damage is None
        assert (log.first, log.end) == (begin, end + 24)
        assert stored(log)[: len(was)] == was
        assert log.runs == runs_of(stored(log), log.first)
        assert all(log.read(offset, 1) for offset in range(log.first, log.end)), "indexes are right"
        if finished and seed == 5:
            return
    pytest.fail("it never ended")


def test_no_index_of_another_past_is_believed() -> None:
    """Segments of the same names and sizes, but other batches in them, whose indexes are lost with the power."""
    for seed in range(30):
        disk = LogDisk(seed)
        log = opened(disk)
        for n in range(20):
            kept(log, b"%03d" % n, bytes(57), epoch=1)
        before = {name: len(disk.content(f"{S}/{name}")) for name in names(disk, ".log")}
        log.close()
        log = opened(disk)
        log.cut(2)
        for n in range(1, 20):
            kept(log, b"%03d" % n, bytes(57), epoch=2 + n // 3, now=n)
        after = {name: len(disk.content(f"{S}/{name}")) for name in names(disk, ".log")}
        assert [*before][1:3] == [*after][1:3]
        expected = log.runs
        disk.lose_power()
        log = opened(disk)
        assert log.runs == expected == runs_of(stored(log), 0), seed


# ------------------------------------------------------------ by chance


class Model:
    """What a log should have, in the simplest way there is."""

    def __init__(self) -> None:
        self.batches: list[Stored] = []
        self.first = 0
        self.begin = 0  # of the log, when there is no batch

    @property
    def end(self) -> int:
        if not self.batches:
            return self.begin
        base, _, payloads = self.batches[-1]
        return base + len(payloads)

    def kept(self) -> list[Stored]:
        return [one for one in self.batches if one[0] + len(one[2]) > self.first]

    def cut(self, offset: int) -> None:
        self.batches = [one for one in self.batches if one[0] < offset]
        if not self.batches:
            self.begin = offset
        self.first = min(self.first, offset)

    def reset(self, base: int) -> None:
        self.batches, self.first, self.begin = [], base, base

    def copy(self) -> Model:
        made = Model()
        made.batches, made.first, made.begin = [*self.batches], self.first, self.begin
        return made

    def check(self, log: StreamLog, most: int) -> None:
        assert (log.first, log.end) == (self.first, self.end)
        if log.durable_end == log.end:
            assert stored(log, most) == self.kept()
        assert log.runs == runs_of(self.kept(), self.first)
        for base, epoch, payloads in self.kept():
            for offset in range(max(base, self.first), base + len(payloads)):
                assert log.epoch_at(offset) == epoch


class Life:
    """A log that many things happen to, and what becomes of its model."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = LogDisk(seed)
        self.log = opened(self.disk)
        self.model = Model()
        self.maybe: list[Model] = []  # what it may be after a crash, besides the model
        self.durable = 0
        self.lowest = 0  # the first offset may be this, after a crash
        self.epoch = 1
        self.counts: dict[str, int] = {}

    def act(self) -> None:
        names = ["append"] * 6 + ["sync"] * 3 + ["roll", "cut", "reset", "trim", "purge", "reopen"]
        name = self.chance.choice(names)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.lowest = self.model.first
        getattr(self, name)()
        self.maybe = []
        self.model.check(self.log, self.chance.choice((1, 300, 5000)))
        assert self.log.durable_end >= self.durable

    def append(self) -> None:
        batches = []
        self.epoch += self.chance.random() < 0.3
        for _ in range(self.chance.randint(1, 3)):
            count = self.chance.randint(1, 4)
            payloads = [
                self.chance.randbytes(self.chance.choice((4, 4, 100))) for _ in range(count)
            ]
            batch = build(payloads)
            self.model.batches.append((self.model.end, self.epoch, payloads))
            batches.append(batch)
        self.log.stamp(batches, self.epoch, len(self.model.batches))
        self.log.append(batches)

    def sync(self) -> None:
        self.durable = self.log.sync()

    def roll(self) -> None:
        self.log.roll()
        self.durable = max(self.durable, self.log.durable_end)

    def cut(self) -> None:
        places = [base for base, _, _ in self.model.batches if base >= self.model.first]
        offset = self.chance.choice([*places, self.model.end])
        count = self.model.end - offset
        after = self.model.copy()
        after.cut(offset)
        self.maybe = [after]
        assert self.log.cut(offset) == count
        self.model, self.durable = after, offset if count else self.durable

    def reset(self) -> None:
        base = self.chance.choice((self.model.end + 5, self.model.first, 0, 3))
        after = Model()
        after.reset(base)
        self.maybe = [after]
        self.log.reset(base)
        self.model, self.durable = after, base

    def trim(self) -> None:
        self.model.first = 1 << 62  # for a crash: anything up to there
        try:
            first = self.log.trim(None, self.chance.choice((0, 700, 2000)), 0)
        finally:
            self.model.first = self.lowest
        self.model.first = first

    def purge(self) -> None:
        before = self.chance.randint(self.log.first, self.log.durable_end)
        assert self.log.purge(before) == before
        self.model.first = before

    def reopen(self) -> None:
        self.log.close()
        self.durable = self.model.end
        self.log = opened(self.disk)

    def decay(self) -> None:
        """A bit flips, somebody finds out, and it is repaired; perhaps with a crash on the way."""
        self.log.close()
        self.durable = self.model.end
        path = f"{S}/{self.chance.choice(names(self.disk, '.log'))}"
        good = self.disk.content(path)
        if not good:
            self.log = opened(self.disk)
            return
        self.disk.flip(path)
        if self.chance.random() < 0.5:
            for index in names(self.disk, ".idx"):
                self.disk.remove(f"{S}/{index}")
        end = self.found()
        if end is None:  # in what is not read any more, or the mark of the close: no loss
            self.disk.crash()
            self.disk.replace(path, good)
            self.log = opened(self.disk)
            return
        self.counts["repair"] = self.counts.get("repair", 0) + 1
        if self.chance.random() < 0.7:
            self.disk.crash_at(self.chance.randrange(25))
        try:
            self.log.repair()
        except Crash:
            if self.chance.random() < 0.8:
                self.disk.lose_power()
            again = self.found()
            assert again in (end, None)
            if again is None and self.log.end > end:
                # an index is back that was removed, and the bad bit is in what nobody reads: purged, or a mark
                assert stored(self.log) == self.model.kept()
                self.disk.crash()
                self.disk.replace(path, good)
                self.log = opened(self.disk)
                self.model.check(self.log, 500)
                return
            assert self.log.end == end
            self.log.repair()
        self.disk.hook = None
        self.model.cut(end)
        self.durable = end
        self.model.check(self.log, 500)

    def found(self) -> int | None:
        """Open the log, and read all of it: where it is damaged."""
        self.log = opened(self.disk)
        if self.log.damage is None:
            try:
                stored(self.log)
            except DamagedLogError:
                assert self.log.damage is not None
        return None if self.log.damage is None else self.log.damage.offset

    def survive(self) -> None:
        """The program is gone, perhaps with the power; whatever was going on has happened or not."""
        if self.chance.random() < 0.8:
            self.disk.lose_power()
        else:
            self.disk.crash()
        self.log, found = StreamLog.open(self.disk, S, SMALL)
        assert found.damage is None, str(found)
        for after in self.maybe:
            if (self.log.first, self.log.end) == (after.first, after.end) and (
                stored(self.log) == after.kept()
            ):
                self.model = after
        model = self.model
        if self.log.end < model.end:
            assert self.log.end >= self.durable, "what was synced is there"
            model.cut(self.log.end)
        assert self.log.first >= min(self.lowest, model.end)
        model.first = self.log.first
        self.maybe, self.durable = [], self.log.end
        model.check(self.log, 700)


@pytest.mark.parametrize("block", range(8))
def test_whatever_happens_to_a_log_it_is_what_a_naive_model_says(block: int) -> None:
    counts: dict[str, int] = {}
    for seed in range(block * 15, block * 15 + 15):
        life = Life(seed)
        for _ in range(6):
            life.disk.crash_at(life.chance.randrange(life.chance.choice((10, 100, 300))))
            try:
                for _ in range(40):
                    life.act()
                life.disk.hook = None
            except Crash:
                pass
            life.survive()
            if life.chance.random() < 0.7:
                life.decay()
        for name, count in life.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert min(counts[name] for name in ("cut", "reset", "trim", "purge", "reopen", "repair")) > 5


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
