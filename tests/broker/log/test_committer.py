"""Group commit: in order, many by one sync, and everybody is told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from verification.log_disk import LogDisk

from railgun.broker.errors import ClosedError, LogFailedError, NoSpaceError, OrderError
from railgun.broker.log.committer import Committer, Stamp
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.errors import RailgunError
from railgun.transport.records import BatchError, Records, build, head, patch

STAMP = Stamp(epoch=1, now=1)


def opened(disk: LogDisk, name: str = "orders") -> StreamLog:
    return StreamLog.open(disk, name, LogConfig(segment_bytes=100_000))[0]


def payloads(log: StreamLog) -> list[bytes]:
    found: list[bytes] = []
    while batches := log.read(len(found)):
        for batch in batches:
            found += Records(batch).payloads()
    return found


class Gate:
    """Holds the syncs of a disk back until it is opened."""

    def __init__(self, disk: LogDisk) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Event()
        disk.hook = self._hook

    def _hook(self, step: str, path: str) -> None:
        if step == "sync":
            self.reached.release()
            assert self.open.wait(10)


def test_many_submitters_are_committed_by_one_sync() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    committer = Committer()
    told: list[tuple[int, RailgunError | None]] = []

    def done(n: int) -> Callable[[RailgunError | None], None]:
        return lambda error: told.append((n, error))

    before = disk.syncs
    committer.submit(log, [build([b"0"])], done(0), STAMP)
    gate.reached.acquire()
    for n in range(1, 1001):
        committer.submit(log, [build([b"%d" % n])], done(n), STAMP)
    assert told == []
    gate.open.set()
    committer.close()
    assert told == [(n, None) for n in range(1001)]
    assert disk.syncs - before == 2
    assert payloads(log) == [b"%d" % n for n in range(1001)]


def test_a_group_is_not_larger_than_told() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    committer = Committer(max_bytes=500)
    batches = [build([bytes(100)]) for _ in range(7)]
    before = disk.syncs
    for batch in [*batches, build([bytes(1000)])]:
        committer.submit(log, [batch], lambda error: None, STAMP)
        if batch is batches[0]:
            gate.reached.acquire()
    gate.open.set()
    committer.close()
    assert disk.syncs - before == 1 + 3 + 1
    assert log.durable_end == 8


def test_ps_3_first_come_first_served_for_each_of_many_logs() -> None:
    disk = LogDisk()
    logs = [opened(disk, f"stream{n}") for n in range(5)]
    committer = Committer(threads=3)
    told: dict[tuple[int, int], list[int]] = {}
    wrong: list[RailgunError] = []
    lock = threading.Lock()

    def publisher(me: int) -> None:
        chance = random.Random(me)
        for n in range(200):
            at = chance.randrange(len(logs))
            batch = build([b"%d %d" % (me, n)])

            def done(error: RailgunError | None, at: int = at, n: int = n) -> None:
                if error is not None:
                    wrong.append(error)
                told.setdefault((at, me), []).append(n)

            with lock:
                committer.submit(logs[at], [batch], done, STAMP)

    threads = [threading.Thread(target=publisher, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    committer.close()
    assert wrong == []
    assert sum(map(len, told.values())) == 800
    for at, log in enumerate(logs):
        by_publisher: dict[int, list[int]] = {}
        for payload in payloads(log):
            me, n = map(int, payload.split())
            by_publisher.setdefault(me, []).append(n)
        for me, numbers in by_publisher.items():
            assert numbers == sorted(numbers) == told[at, me]


def test_two_logs_are_committed_at_the_same_time() -> None:
    disk = LogDisk()
    logs = [opened(disk, "a"), opened(disk, "b")]
    gate = Gate(disk)
    committer = Committer(threads=2)
    for log in logs:
        committer.submit(log, [build([b"x"])], lambda error: None, STAMP)
    for _ in logs:
        assert gate.reached.acquire(timeout=10)
    gate.open.set()
    committer.close()


def test_an_error_reaches_all_of_the_group_and_the_next_group_goes_on() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    committer = Committer()
    told: list[RailgunError | None] = []
    committer.submit(log, [build([b"first"])], told.append, STAMP)
    gate.reached.acquire()
    disk.room = disk.used() + 100
    batches = [build([b"%d" % n * 50]) for n in range(3)]
    for batch in batches:
        committer.submit(log, [batch], told.append, STAMP)
    gate.open.set()
    wait_for(lambda: len(told) == 4)
    assert told[0] is None
    assert [type(error) for error in told[1:]] == [NoSpaceError] * 3
    disk.room = None
    for batch in batches:
        committer.submit(log, [batch], told.append, STAMP)
    committer.close()
    assert told[4:] == [None] * 3
    assert [head(batch).base for batch in batches] == [1, 2, 3], "offsets not used are used now"
    assert payloads(log) == [b"first", *(b"%d" % n * 50 for n in range(3))]


def test_what_was_sent_behind_a_write_that_failed_fails_until_its_sender_could_know() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    calls: list[Callable[[], None]] = []
    committer = Committer(run=calls.append, max_bytes=300)
    told: list[tuple[str, RailgunError | None]] = []

    def send(name: str, size: int) -> None:
        batch = build([name.encode() + bytes(size)])
        committer.submit(log, [batch], lambda error: told.append((name, error)), STAMP)

    send("first", 10)
    gate.reached.acquire()
    disk.room = disk.used() + 200
    send("large", 300)  # in a group of its own, for which there is no room
    send("small", 1)  # there is room for that one
    gate.open.set()
    wait_for(lambda: len(calls) == 3)
    send("before it is told", 1)
    wait_for(lambda: len(calls) == 4)
    while calls:
        calls.pop(0)()
    send("after it is told", 1)
    committer.close()
    calls.pop()()
    assert [(name, type(error)) for name, error in told] == [
        ("first", type(None)),
        ("large", NoSpaceError),
        ("small", NoSpaceError),
        ("before it is told", NoSpaceError),
        ("after it is told", type(None)),
    ]
    assert [one.rstrip(b"\0") for one in payloads(log)] == [b"first", b"after it is told"]


def test_a_failed_sync_reaches_all_now_and_later() -> None:
    disk = LogDisk()
    log = opened(disk)
    disk.fail_syncs = 1
    committer = Committer()
    told: list[RailgunError | None] = []
    for _ in range(5):
        committer.submit(log, [build([b"x"])], told.append, STAMP)
    committer.close()
    assert [type(error) for error in told] == [LogFailedError] * 5
    assert log.durable_end == 0


def test_a_batch_that_does_not_fit_is_the_error_of_its_own_submitter() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    committer = Committer()
    told: list[RailgunError | None] = []
    committer.submit(log, [build([b"first"])], told.append, STAMP)
    gate.reached.acquire()
    elsewhere = build([b"elsewhere"])
    patch(elsewhere, 77, 1, 1)
    given: list[tuple[Sequence[Any], Stamp | None]] = [
        ([build([b"second"])], STAMP),
        ([elsewhere], None),
        ([bytearray(b"garbage" * 20)], STAMP),
        ([build([b"third"]), build([b"fourth"])], STAMP),
    ]
    for batches, stamp in given:
        committer.submit(log, batches, told.append, stamp)
    gate.open.set()
    committer.close()
    assert [type(error) for error in told] == [
        type(None),
        type(None),
        OrderError,
        BatchError,
        type(None),
    ]
    assert payloads(log) == [b"first", b"second", b"third", b"fourth"]


def test_batches_that_have_offsets_are_taken_as_they_are() -> None:
    log = opened(LogDisk())
    committer = Committer()
    told: list[RailgunError | None] = []
    for n in range(10):
        batch = build([b"%d" % n])
        patch(batch, n, 3, n)
        committer.submit(log, [batch], told.append)
    committer.close()
    assert told == [None] * 10
    assert log.last_epoch == 3


def test_close_waits_for_all_and_takes_nothing_more() -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    committer = Committer()
    told: list[RailgunError | None] = []
    for _ in range(10):
        committer.submit(log, [build([b"x"])], told.append, STAMP)
    closing = threading.Thread(target=committer.close)
    closing.start()
    wait_for(lambda: refused(committer, log))
    assert closing.is_alive()
    gate.open.set()
    closing.join(10)
    assert not closing.is_alive()
    assert told.count(None) == len(told) >= 10
    committer.close()


def test_those_who_wait_are_told_once_a_group(caplog: pytest.LogCaptureFixture) -> None:
    disk = LogDisk()
    log = opened(disk)
    gate = Gate(disk)
    hops: list[Callable[[], None]] = []
    committer = Committer(run=hops.append)
    told: list[int] = []

    def bad(error: RailgunError | None) -> None:
        raise ValueError("not my day")

    committer.submit(log, [build([b"x"])], bad, STAMP)
    gate.reached.acquire()
    for n in range(5):
        committer.submit(log, [build([b"x"])], lambda error, n=n: told.append(n), STAMP)  # type: ignore[misc]
    gate.open.set()
    committer.close()
    assert len(hops) == 2
    assert told == []
    for hop in hops:
        hop()
    assert told == [0, 1, 2, 3, 4]
    assert "not my day" in caplog.text


def refused(committer: Committer, log: StreamLog) -> bool:
    try:
        committer.submit(log, [build([b"late"])], lambda error: None, STAMP)
    except ClosedError:
        return True
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    ready = threading.Event()
    for _ in range(2000):
        if condition():
            return
        ready.wait(0.005)
    raise AssertionError("it did not come about")
