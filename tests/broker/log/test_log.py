"""The log of a stream: one order, nothing acknowledged lost, nothing damaged passed over."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import partial
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
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.segment import index_name, log_name
from railgun.broker.log.tail import MARK_SIZE
from railgun.testing.disks import Crash
from railgun.transport.records import Records, build, head, patch

SMALL = LogConfig(segment_bytes=600, index_bytes=150)
S = "orders"


def opened(disk: Disk, config: LogConfig = SMALL) -> StreamLog:
    return StreamLog.open(disk, S, config)[0]


def put(log: StreamLog, *payloads: bytes, now: int = 0, epoch: int = 1) -> int:
    batch = build(payloads)
    log.stamp([batch], epoch, now)
    return log.append([batch])


def kept(log: StreamLog, *payloads: bytes, now: int = 0) -> int:
    put(log, *payloads, now=now)
    return log.sync()


def everything(log: StreamLog, most: int = 1000) -> list[bytes]:
    """All payloads, and that their offsets are contiguous."""
    found: list[bytes] = []
    at = log.first
    while batches := log.read(at, most):
        for batch in batches:
            records = Records(batch)
            assert records.base == at
            found += records.payloads()
            at = records.end
    assert at == log.durable_end
    return found


def names(disk: Disk, ending: str) -> list[str]:
    return [name for name in disk.list(S) if name.endswith(ending)]


def filled(disk: Disk, count: int = 20) -> list[bytes]:
    """A log of several segments, closed."""
    log = opened(disk)
    payloads = [b"message %03d " % n + bytes(n) for n in range(count)]
    for n, payload in enumerate(payloads):
        kept(log, payload, now=n)
    log.close()
    return payloads


# ------------------------------------------------------------ order


def test_ps_3_offsets_are_contiguous_from_0_and_go_on_after_a_restart(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    log, found = StreamLog.open(disk, S, SMALL)
    assert (found.first, found.end, log.first, log.end, log.durable_end) == (0, 0, 0, 0, 0)
    assert kept(log, b"a", b"b") == 2
    assert kept(log, b"c") == 3
    log.close()
    log, found = StreamLog.open(disk, S, SMALL)
    assert str(found) == "messages 0 to 3"
    assert kept(log, b"d") == 4
    assert everything(log) == [b"a", b"b", b"c", b"d"]
    log.close()


@pytest.mark.parametrize(
    ("base", "epoch", "stored"), [(0, 5, 10), (1, 5, 10), (3, 5, 10), (2, 4, 10), (2, 5, 9)]
)
def test_ps_3_a_batch_that_does_not_follow_is_refused(base: int, epoch: int, stored: int) -> None:
    log = opened(LogDisk())
    put(log, b"a", b"b", now=10, epoch=5)
    batch = build([b"c"])
    patch(batch, base, epoch, stored)
    with pytest.raises(OrderError, match="cannot follow: offset 2, time 10, epoch 5"):
        log.append([batch])
    assert log.end == 2
    patch(batch, 2, 5, 10)
    with pytest.raises(OrderError, match="one by one"):
        log.append([batch + batch])
    assert log.append([batch]) == 3
    assert log.append([]) == 3


def test_ps_3_stored_time_never_steps_back() -> None:
    disk = LogDisk()
    log = opened(disk)
    assert log.next_time(100) == 100
    assert log.next_time(90) == 100, "told before, be it stored or not"
    kept(log, b"a", now=200)
    kept(log, b"b", now=150)
    assert log.last_time == 200
    log.close()
    log = opened(disk)
    assert log.next_time(10) == 200
    assert [head(batch).time for batch in log.read(0)] == [200, 200]


def test_readers_see_only_what_is_synced() -> None:
    log = opened(LogDisk())
    put(log, b"a")
    assert (log.end, log.durable_end) == (1, 0)
    assert log.read(0) == []
    assert log.sync() == 1
    assert everything(log) == [b"a"]


def test_a_read_gives_whole_batches_as_views_of_one_read() -> None:
    log = opened(LogDisk(), LogConfig())
    for n in range(100):
        put(log, *(b"%d-%d" % (n, m) for m in range(10)))
    log.sync()
    batches = log.read(500, 1 << 20)
    assert len({id(batch.obj) for batch in batches}) == 1
    assert head(batches[0]).base == 500
    assert head(batches[-1]).end == 1000
    assert head(log.read(509)[0]).base == 500, "the batch that holds the offset"
    size = len(batches[0])
    assert [head(batch).base for batch in log.read(500, 3 * size)] == [500, 510, 520]
    assert [head(batch).base for batch in log.read(500, 1)] == [500], "at least one"
    assert [head(batch).base for batch in log.read(500, end=520)] == [500, 510]
    assert log.read(500, end=505) == [], "a batch is below the end, or is not given"
    assert log.read(1000) == []
    with pytest.raises(BeyondEndError, match="ends at 1000") as error:
        log.read(1001)
    assert (error.value.end, error.value.code) == (1000, "BEYOND_END")


def test_a_batch_larger_than_a_segment_and_a_read_is_kept_whole() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"small")
    kept(log, bytes(5000))
    kept(log, b"small")
    assert len(names(disk, ".log")) == 3
    assert everything(log, most=10) == [b"small", bytes(5000), b"small"]


@pytest.mark.parametrize("seed", range(10))
def test_any_offset_is_found_whatever_the_sizes(seed: int) -> None:
    chance = random.Random(seed)
    disk = LogDisk(seed)
    log = opened(disk)
    payloads: list[bytes] = []
    while len(payloads) < 200:
        batch = [chance.randbytes(chance.choice((0, 10, 300))) for _ in range(chance.randint(1, 5))]
        put(log, *batch)
        payloads += batch
        if chance.random() < 0.3:
            log.sync()
    log.sync()
    for _ in range(2):
        for offset in chance.sample(range(len(payloads)), 60):
            records = Records(log.read(offset, chance.choice((1, 100, 2000)))[0])
            assert records.base <= offset < records.end
            assert records.payloads() == payloads[records.base : records.end]
        assert everything(log, chance.choice((1, 100, 2000))) == payloads
        log.close()
        log = opened(disk)


def open_in(directory: Path) -> list[str]:
    """The files of a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(directory))]


def test_many_segments_are_read_with_few_open_files(tmp_path: Path) -> None:
    log = opened(NodeDisk(tmp_path))
    payloads = [b"%03d" % n + bytes(500) for n in range(80)]
    for payload in payloads:
        kept(log, payload)
    assert len(names(NodeDisk(tmp_path), ".log")) == 80
    for _ in range(2):
        assert everything(log) == payloads
        assert len(open_in(tmp_path)) < 30
        log.close()
        log = opened(NodeDisk(tmp_path))
    log.close()
    with pytest.raises(ClosedError):
        log.read(0)
    with pytest.raises(ClosedError):
        put(log, b"x")


def test_batches_since_a_time() -> None:
    disk = LogDisk()
    filled(disk)
    log = opened(disk)
    for since in (-5, 0, 7, 19, 20):
        found = [head(batch).base for batch in log.batches_since(since)]
        assert found == [*range(max(0, since), 20)]


def test_readers_go_on_while_one_writes_and_one_trims(tmp_path: Path) -> None:
    log = opened(NodeDisk(tmp_path), LogConfig(segment_bytes=5_000, index_bytes=500))
    wrong: list[BaseException] = []
    stop = threading.Event()

    def reader() -> None:
        at = 0
        try:
            while not stop.is_set():
                try:
                    batches = log.read(at, 2000)
                except TrimmedError as error:
                    at = max(at + 1, error.first)
                    continue
                for batch in batches:
                    records = Records(batch)
                    assert records.base == at
                    assert records.payloads() == [b"%d" % n * 20 for n in range(at, records.end)]
                    at = records.end
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(100):
        kept(log, b"%d" % (2 * n) * 20, b"%d" % (2 * n + 1) * 20, now=n)
        if n % 10 == 0:
            log.trim(None, 8_000, n)
    stop.set()
    for thread in threads:
        thread.join()
    log.close()
    assert wrong == []


# ------------------------------------------------------------ recovery


@pytest.mark.parametrize("tail", ["part", "zeros", "header", "garbage"])
def test_a_torn_tail_is_cut_off(tail: str) -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"kept", b"too")
    whole = disk.content(f"{S}/{log_name(0)}")
    put(log, b"not acknowledged")
    data = disk.content(f"{S}/{log_name(0)}")
    torn = {
        "part": data[:-1],
        "header": data[: len(whole) + MARK_SIZE + 20],
        "zeros": whole + bytes(1000),
        "garbage": whole + b"\xff" * 333,
    }[tail]
    disk.replace(f"{S}/{log_name(0)}", torn)
    disk.crash()
    log, found = StreamLog.open(disk, S, SMALL)
    assert 0 < found.cut_bytes <= len(torn) - len(whole)
    assert "are cut off" in str(found)
    assert found.damage is None
    assert everything(log) == [b"kept", b"too"]
    assert kept(log, b"next") == 3
    log.close()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.cut_bytes == 0
    assert everything(log) == [b"kept", b"too", b"next"]


def test_a_whole_batch_behind_a_hole_of_the_last_writes_is_cut_off_with_it() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"kept")
    size = len(disk.content(f"{S}/{log_name(0)}"))
    put(log, b"lost" * 10)
    put(log, b"whole")
    data = bytearray(disk.content(f"{S}/{log_name(0)}"))
    data[size + MARK_SIZE : size + MARK_SIZE + 40] = bytes(40)
    disk.replace(f"{S}/{log_name(0)}", data)
    disk.crash()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None
    assert everything(log) == [b"kept"]


@pytest.mark.parametrize("closed", [True, False])
def test_no_bit_in_the_middle_flips_unseen_and_nothing_is_truncated(closed: bool) -> None:
    disk = LogDisk()
    log = opened(disk, LogConfig())
    for n in range(4):
        kept(log, b"message %d" % n)
    path = f"{S}/{log_name(0)}"
    if closed:
        log.close()
    disk.crash()
    whole = disk.content(path)
    last = len(whole) if closed else whole.rindex(b"RGSM")
    for bit in range(0, 8 * (last - MARK_SIZE), 7):
        disk.replace(path, whole)
        disk.flip(path, bit)
        flipped = disk.content(path)
        log, found = StreamLog.open(disk, S)
        assert found.damage is not None
        assert log.failed is found.damage
        assert disk.content(path) == flipped, "nothing is changed"
        good = found.damage.offset
        assert log.end == log.durable_end == good
        assert everything_before(log, good) == [b"message %d" % n for n in range(good)]
        writes = (partial(log.append, []), log.sync, log.roll, partial(log.trim, 1, 1, 10**9))
        for refused in writes:
            with pytest.raises(DamagedLogError, match=f"All before offset {good} can be read"):
                refused()
        with pytest.raises(DamagedLogError) as error:
            log.read(good)
        assert (error.value.offset, error.value.code) == (good, "LOG_DAMAGED")
        log.close()
        assert disk.content(path) == flipped


def everything_before(log: StreamLog, end: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < end:
        for batch in log.read(len(found)):
            found += Records(batch).payloads()
    return found


def test_damage_in_an_old_segment_is_found_by_the_reader() -> None:
    disk = LogDisk()
    payloads = filled(disk)
    old = names(disk, ".log")[1]
    first, third = int(old[:20]), int(names(disk, ".log")[2][:20])
    disk.flip(f"{S}/{old}", 8 * (len(disk.content(f"{S}/{old}")) - 3))
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None, "old segments are believed by their index"
    bad = third - 1
    assert everything_before(log, bad) == payloads[:bad]
    with pytest.raises(DamagedLogError) as error:
        log.read(bad)
    assert error.value.offset == log.end == bad > first
    with pytest.raises(DamagedLogError):
        put(log, b"x")
    assert log.read(0)


@pytest.mark.parametrize("broken", ["absent", "garbage", "empty", "old", "flipped", "of another"])
def test_an_index_that_does_not_fit_is_made_anew(broken: str) -> None:
    disk = LogDisk()
    payloads = filled(disk)
    indexes = names(disk, ".idx")
    assert len(indexes) == len(names(disk, ".log")) - 1 >= 3
    path = f"{S}/{indexes[1]}"
    good = disk.content(path)
    match broken:
        case "absent":
            disk.forget(path)
        case "garbage":
            disk.replace(path, b"garbage" * 30)
        case "empty":
            disk.replace(path, b"")
        case "old":
            data = bytearray(good)
            data[24:32] = (100).to_bytes(8, "little")  # when the segment was smaller
            data[4:8] = zlib.crc32(data[8:]).to_bytes(4, "little")
            disk.replace(path, data)
        case "flipped":
            disk.flip(path)
        case _:
            disk.replace(path, disk.content(f"{S}/{indexes[0]}"))
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.rebuilt == (indexes[1],)
    assert disk.content(path) == good
    assert everything(log) == payloads


def test_an_index_lost_while_the_log_is_open_is_done_without() -> None:
    disk = LogDisk()
    payloads = filled(disk)
    log = opened(disk)
    for name in names(disk, ".idx"):
        disk.replace(f"{S}/{name}", b"")
    assert everything(log) == payloads


def test_a_missing_segment_is_damage() -> None:
    disk = LogDisk()
    filled(disk)
    gone = names(disk, ".log")[2]
    disk.forget(f"{S}/{gone}")
    before = disk.list(S)
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is not None
    assert "the next segment begins with" in str(found)
    assert log.end == int(gone[:20])
    assert {*before} - {*disk.list(S)} <= {index_name(int(gone[:20]))}


def test_a_crash_between_any_two_steps_of_a_roll_loses_nothing() -> None:
    for kind, step in itertools.product(("kill", "power"), range(30)):
        for seed in range(4):
            disk = LogDisk(seed)
            log = opened(disk)
            while len(disk.content(f"{S}/{log_name(0)}")) < 400:
                kept(log, b"x" * 100)
            acknowledged = log.durable_end
            disk.crash_at(step)
            try:
                kept(log, b"y" * 300)
                acknowledged += 1
                disk.crash()
            except Crash:
                pass
            if kind == "power":
                disk.lose_power()
            log, found = StreamLog.open(disk, S, SMALL)
            assert found.damage is None
            assert acknowledged <= log.end <= acknowledged + 1
            kept(log, b"z")
            assert everything(log)[:acknowledged][:3] == [b"x" * 100] * min(3, acknowledged)
            assert everything(log)[-1] == b"z"


@pytest.mark.parametrize("block", range(10))
def test_ps_1_nothing_acknowledged_is_lost_by_power_cuts(block: int) -> None:
    """A hundred lives of logs each: append, sync, trim, crash and power cut, by chance."""
    for seed in range(block * 25, block * 25 + 25):
        chance = random.Random(seed)
        disk = LogDisk(seed)
        written: list[bytes] = []  # by offset, as last written there
        acknowledged, told_first = 0, 0
        for life in range(4):
            log, found = StreamLog.open(disk, S, SMALL)
            assert found.damage is None, (seed, str(found))
            assert acknowledged <= log.end <= len(written), (seed, life)
            assert log.first >= told_first, seed
            assert everything(log, chance.choice((1, 300, 5000))) == written[log.first : log.end]
            del written[log.end :]
            acknowledged = log.end
            disk.crash_at(chance.randrange(chance.choice((5, 60))))
            try:
                for n in range(100):
                    payloads = [
                        b"%d/%d/%d/%d " % (seed, life, n, m) + bytes(chance.choice((0, 9, 200)))
                        for m in range(chance.randint(1, 4))
                    ]
                    batch = build(payloads)
                    log.stamp([batch], life, n)
                    written[log.end :] = payloads
                    log.append([batch])
                    if chance.random() < 0.5:
                        acknowledged = log.sync()
                    if chance.random() < 0.05:
                        told_first = log.trim(None, 1500, 0)
            except Crash:
                pass
            if chance.random() < 0.8:
                disk.lose_power()


# ------------------------------------------------------------ errors of the disk


def test_a_full_disk_refuses_and_later_takes_again() -> None:
    disk = LogDisk()
    log = opened(disk, LogConfig())
    kept(log, b"a" * 100)
    size = disk.used()
    disk.room = size + 120
    for _ in range(3):
        with pytest.raises(NoSpaceError, match="the disk is full") as error:
            put(log, b"b" * 100)
        assert error.value.code == "NO_SPACE"
        assert (disk.used(), log.end) == (size, 1)
        assert everything(log) == [b"a" * 100]
    disk.room = None
    assert kept(log, b"c" * 100) == 2
    disk.lose_power()
    assert everything(opened(disk)) == [b"a" * 100, b"c" * 100]


def test_what_a_full_disk_refused_is_gone_after_a_power_cut() -> None:
    """The first of two batches fits: it must not come back."""
    for seed in range(20):
        disk = LogDisk(seed)
        log = opened(disk, LogConfig())
        kept(log, b"a")
        disk.room = disk.used() + 150
        batches = [build([b"first"]), build([b"second" * 30])]
        log.stamp(batches, 1, 0)
        with pytest.raises(NoSpaceError):
            log.append(batches)
        disk.lose_power()
        log, found = StreamLog.open(disk, S)
        assert (log.end, found.cut_bytes) == (1, 0)


def test_no_room_for_another_segment_is_no_space_too() -> None:
    disk = LogDisk()
    log = opened(disk)
    payloads = [b"%d" % n * 100 for n in range(3)]
    for payload in payloads:
        kept(log, payload)
    disk.room = disk.used()
    with pytest.raises(NoSpaceError, match="cannot be made"):
        put(log, b"x" * 300)
    assert everything(log) == payloads
    disk.room = used = disk.used() + 50  # for the name of a segment, not for its index or a batch
    with pytest.raises(NoSpaceError, match="the disk is full"):
        put(log, b"x" * 300)
    assert disk.used() == used - 50
    disk.room = None
    payloads.append(b"y" * 300)
    kept(log, payloads[-1])
    assert everything(log) == payloads
    log.close()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.rebuilt == (index_name(0),)
    assert everything(log) == payloads


def test_a_failed_sync_ends_the_log_but_not_its_readers() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"kept")
    put(log, b"doubtful")
    disk.fail_syncs = 1
    with pytest.raises(LogFailedError, match="could not be synced") as error:
        log.sync()
    assert error.value.code == "LOG_FAILED"
    for refused in (log.sync, lambda: put(log, b"x"), log.roll):
        with pytest.raises(LogFailedError):
            refused()
    assert isinstance(log.failed, LogFailedError)
    assert log.durable_end == 1
    assert everything(log) == [b"kept"]
    log.close()
    disk.lose_power()
    assert everything(opened(disk)) == [b"kept"]


def test_a_cut_that_fails_after_a_full_disk_ends_the_log() -> None:
    disk = LogDisk()
    log = opened(disk)
    kept(log, b"kept")
    disk.room, disk.fail_syncs = disk.used() + 50, 1
    with pytest.raises(LogFailedError, match="cut off"):
        put(log, b"x" * 100)
    assert everything(log) == [b"kept"]


# ------------------------------------------------------------ retention


def test_ps_18_retention_by_bytes_takes_whole_segments_and_never_the_last() -> None:
    disk = LogDisk()
    payloads = filled(disk)
    log = opened(disk)
    assert log.trim(None, None, 10**9) == 0
    before = names(disk, ".log")
    first = log.trim(None, log.size - 1, 0)
    assert first == log.first == int(before[1][:20])
    assert names(disk, ".log") == before[1:]
    assert everything(log) == payloads[first:]
    assert log.trim(None, 0, 0) == int(before[-1][:20])
    assert names(disk, ".log") == before[-1:]
    assert names(disk, ".idx") == []
    log.close()
    log = opened(disk)
    assert (log.first, log.end) == (int(before[-1][:20]), 20)
    log.roll()
    assert log.trim(None, 0, 0) == 20
    log.close()
    log = opened(disk)
    assert (log.first, log.end) == (20, 20)
    assert kept(log, b"never used before") == 21


def test_ps_18_retention_by_age() -> None:
    disk = LogDisk()
    filled(disk)
    log = opened(disk)
    bases = [int(name[:20]) for name in names(disk, ".log")]
    oldest_end = bases[1]
    assert log.trim(100, None, 100 + oldest_end - 1) == 0, "its last batch is just young enough"
    assert log.trim(100, None, 100 + oldest_end) == oldest_end
    assert log.trim(100, None, 10**9) == bases[-1]


def test_ps_18_a_reader_below_the_first_offset_is_told_it() -> None:
    disk = LogDisk()
    filled(disk)
    log = opened(disk)
    first = log.trim(None, 1000, 0)
    assert first > 0
    with pytest.raises(TrimmedError, match=f"keeps offset {first} and later; 0 is gone") as error:
        log.read(0)
    assert (error.value.first, error.value.code) == (first, "TRIMMED")
    assert log.read(first)


def test_a_segment_that_cannot_be_removed_leaves_no_hole() -> None:
    disk = LogDisk()
    payloads = filled(disk)
    log = opened(disk)

    def hook(step: str, path: str) -> None:
        if step == "remove":
            raise PermissionError(1, "not yours")

    disk.hook = hook
    for _ in range(2):
        with pytest.raises(StorageError, match="not yours"):
            log.trim(None, 0, 0)
        assert everything(log) == payloads
    disk.hook = None
    log.trim(None, 1000, 0)
    log.close()
    log, found = StreamLog.open(disk, S, SMALL)
    assert found.damage is None


# ------------------------------------------------------------ the real disk

CHILD = """
import sys
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.transport.records import build
log, _ = StreamLog.open(NodeDisk(sys.argv[1]), "orders", LogConfig(segment_bytes=20_000))
while True:
    end = log.end
    batches = [build([b"%d " % n * 10 for n in range(at, at + 5)]) for at in (end, end + 5)]
    log.stamp(batches, 1, end)
    log.append(batches)
    print(log.sync(), flush=True)
"""


@pytest.mark.slow
def test_ps_1_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    chance = random.Random(9)
    source = Path(__file__).resolve().parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    total = 0
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(chance.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
        child.stdout.close()
        child.wait()
        acknowledged = int([line for line in lines if line.endswith("\n")][-1])
        log, found = StreamLog.open(NodeDisk(tmp_path), S, LogConfig(segment_bytes=20_000))
        assert found.damage is None
        assert log.end >= acknowledged > total
        assert everything(log, 100_000) == [b"%d " % n * 10 for n in range(log.end)]
        total = log.end
        log.close()
