"""Our own flow at the work of `_workload`, on local Spark: two workers, each a Spark task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

from bench._peers import PeerError
from bench._workload import CORES, Rate, add, batches
from bench.peers._processor import processor_seconds_of
from railgun import Flow, Place, Reader, Sink, Source, Writer, run
from railgun.errors import RailgunError
from railgun.job import Snapshots
from railgun.spark.session import session

WARM_UP = 2.0
PATIENCE = 120.0
STAGE = "by key"


class Repeated(Source[tuple[str, int]]):
    """Batches of (key, value), made beforehand, again and again; one part for each core."""

    def __init__(self, size: int) -> None:
        self.size = size

    def partitions(self) -> Sequence[int]:
        """Two numbers that the two workers own, one each."""
        return (0, 2)

    def open(self, partition: Any, position: Any) -> Reader[tuple[str, int]]:
        """Make the batches."""
        return _Repeater(partition, self.size)


class _Repeater(Reader[tuple[str, int]]):
    def __init__(self, part: int, size: int) -> None:
        made = batches(part, size)
        self.batches = [list(zip(keys, values, strict=True)) for keys, values in made]
        self.position = 0

    def read(self, most: int, now: int) -> list[tuple[str, int]]:
        self.position = (self.position + 1) % len(self.batches)
        return self.batches[self.position]


class Drop(Sink[int]):
    """Counts, and drops: the engine does the counting."""

    def open(self, place: Place) -> Writer[int]:
        """Nothing to open."""
        return _Dropper()


class _Dropper(Writer[int]):
    def write(self, items: Sequence[int]) -> None:
        pass


def summing(size: int) -> Flow:
    """Read, key, sum, drop."""
    flow = Flow("throughput")
    records = flow.source(Repeated(size), name="records")
    by_key = records.key_by(itemgetter(0), itemgetter(1), name=STAGE)
    by_key.reduce(add, name="sum").sink(Drop(), name="drop")
    return flow


def ours(size: int, seconds: float, snapshots: Snapshots | None = None) -> Rate:
    """How fast our flow does the work, in batches of `size`."""
    try:
        with ExitStack() as stack:
            spark = session("railgun bench throughput")
            stack.callback(spark.stop)
            job = stack.enter_context(
                run(summing(size), CORES, spark=spark, http=False, snapshots=snapshots)
            )
            _await(lambda: _done(job.status()) > 0)
            time.sleep(WARM_UP)
            pids = [worker["pid"] for worker in job.status()["workers"]]
            began, before, used = time.monotonic(), _done(job.status()), processor_seconds_of(pids)
            time.sleep(seconds)
            after, spent = _done(job.status()), time.monotonic() - began
            used = processor_seconds_of(pids) - used
            job.abort("measured")
    except RailgunError as error:
        raise PeerError(str(error)) from error
    made = after - before
    return Rate(made / spent, used * 1e9 / made, f"Railgun on Spark, batches of {size:,}")


def _done(status: dict[str, Any]) -> int:
    workers = [worker for worker in status["workers"] if worker.get("stages")]
    return sum(worker["stages"][STAGE]["written"] for worker in workers)


def _await(done: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > deadline:
            raise PeerError("the flow did not start")
        time.sleep(0.1)
