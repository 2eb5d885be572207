"""What the log of a stream costs beside bare writes and syncs of the same bytes, in the same run."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from verification.report import Report, options

from railgun.broker.log.committer import Committer, Stamp
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.log import StreamLog
from railgun.errors import RailgunError
from railgun.transport.records import build, check

MESSAGES, SIZE = 1_000, 100


def bare_append(file: int, batch: bytearray) -> None:
    os.writev(file, [batch])
    os.fdatasync(file)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    chosen, _ = options("bench storage", __doc__ or "", argv)
    rounds, singles = (150, 300) if chosen.quick else (600, 1500)
    report = Report("storage")
    directory = Path(tempfile.mkdtemp(prefix="railgun-bench-", dir=Path.cwd()))
    try:
        measure(report, directory, rounds)
        asyncio.run(measure_singles(report, directory, singles))
    finally:
        shutil.rmtree(directory)
    return report.finish(chosen)


def measure(report: Report, directory: Path, rounds: int) -> None:
    payloads = [os.urandom(SIZE) for _ in range(MESSAGES)]
    log, _ = StreamLog.open(NodeDisk(directory), "batches")
    bare = os.open(directory / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times: dict[str, list[float]] = {"bare": [], "log": [], "all": []}
    batch = build(payloads)

    def append() -> None:
        log.append([batch])
        log.sync()

    def whole() -> None:
        made = build(payloads)
        check(made)
        log.stamp([made], 1, 0)
        log.append([made])
        log.sync()

    for n in range(rounds):
        kinds: list[tuple[str, Callable[[], object]]] = [
            ("bare", lambda: bare_append(bare, batch)),
            ("log", append),
            ("all", whole),
        ]
        for name, work in kinds[n % 3 :] + kinds[: n % 3]:
            log.stamp([batch], 1, 0)
            times[name].append(seconds(work))
    os.close(bare)
    rate = {name: MESSAGES / statistics.median(found) for name, found in times.items()}
    report.check("bare writev and fdatasync", rate["bare"], "messages/s")
    report.check("append and sync", rate["log"], "messages/s")
    share = rate["log"] / rate["bare"]
    report.check("of bare", share, goal=">= 0.5", passed=share >= 0.5)
    report.check("build, check, stamp, append and sync", rate["all"], "messages/s")
    report.check("of bare, with building", rate["all"] / rate["bare"])

    def read() -> None:
        at = 0
        while batches := log.read(at):
            at += MESSAGES * len(batches)

    report.check("read", log.end / seconds(read), "messages/s")
    log.close()


async def measure_singles(report: Report, directory: Path, singles: int) -> None:
    loop = asyncio.get_running_loop()
    log, _ = StreamLog.open(NodeDisk(directory), "singles")
    committer = Committer(run=loop.call_soon_threadsafe)
    bare = os.open(directory / "bare1", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    payload = os.urandom(SIZE)
    batch = build([payload])
    times: dict[str, list[float]] = {"bare": [], "thread": [], "log": [], "awaited": []}
    asked: SimpleQueue[asyncio.Future[None] | None] = SimpleQueue()

    def write_when_asked() -> None:
        while (done := asked.get()) is not None:
            bare_append(bare, batch)
            loop.call_soon_threadsafe(done.set_result, None)

    writer = threading.Thread(target=write_when_asked)
    writer.start()

    async def publish() -> None:
        done: asyncio.Future[RailgunError | None] = loop.create_future()
        committer.submit(log, [build([payload])], done.set_result, Stamp(1, 0))
        assert await done is None

    for _ in range(singles // 50):  # in turns of fifty: one kind warms up for itself only
        for _ in range(50):
            times["bare"].append(seconds(lambda: bare_append(bare, batch)))
        for _ in range(50):
            began = time.perf_counter()
            written: asyncio.Future[None] = loop.create_future()
            asked.put(written)
            await written
            times["thread"].append(time.perf_counter() - began)
        for _ in range(50):
            made = build([payload])
            log.stamp([made], 1, 0)
            times["log"].append(seconds(lambda made=made: (log.append([made]), log.sync())))  # type: ignore[misc]
        for _ in range(50):
            began = time.perf_counter()
            await publish()
            times["awaited"].append(time.perf_counter() - began)
    asked.put(None)
    writer.join()
    middle = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    report.check("one message, bare write and fdatasync", middle["bare"], "µs")
    report.check("one message, bare, awaited through a thread", middle["thread"], "µs")
    report.check("one message, append and sync", middle["log"], "µs")
    report.check("one message, awaited through the committer", middle["awaited"], "µs")
    report.check("of bare", middle["awaited"] / middle["bare"], "times")
    # An event loop cannot write itself: the least it can do is to hand the write to a thread and wait for it.
    ratio = middle["awaited"] / middle["thread"]
    report.check("of bare through a thread", ratio, "times", goal="<= 1.4", passed=ratio <= 1.4)

    async def producer(count: int) -> None:
        for _ in range(count):
            await publish()

    began = time.perf_counter()
    await asyncio.gather(*(producer(singles // 30) for _ in range(1000)))
    took = time.perf_counter() - began
    report.check("1,000 awaiting producers", singles // 30 * 1000 / took, "messages/s")
    committer.close()
    began, at, batches = time.perf_counter(), 0, []
    while batches := log.read(at):
        at += len(batches)
    report.check("read of batches of one message", at / (time.perf_counter() - began), "messages/s")
    log.close()
    os.close(bare)
