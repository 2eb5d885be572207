"""Our own flow at the work of `_outage`, on local Spark: killed, stopped and run again, rescaled live.

One job after the other, each from where the last one ended, so that all the keys have to be brought in
once only. What happened when is worked out from the sinks' logs afterwards: they hold every record with
when it was due and when it arrived, also those of a worker that was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from verification.numbered_load import PARTS, Load, Logged, Rows, judge, logs, numbered_flow

from bench._outage import AFTER, EVERY, NEW, Outage
from railgun import run
from railgun.errors import RailgunError
from railgun.job import Job, Snapshots
from railgun.spark.session import SparkSession

STAGE = "by key"
PATIENCE = 300.0
NEAR = 0.05  # seconds behind what is due that count as having caught up, while it runs
BIN = 100_000  # µs of records whose latency is looked at together
SLOWER = 2.0  # times the steady latency that count as having caught up, in the logs
BEFORE, AFTERWARDS = 2, 4  # workers

DETECTED, RELAUNCHED, LOADED, OUTPUT = (
    "the kill is seen",
    "all workers are there",
    "state is loaded",
    "first output",
)


class RecoveringError(RailgunError):
    """The flow did not do what was waited for."""


@dataclass(frozen=True, slots=True)
class Killed:
    """One worker was killed; times in seconds since the epoch."""

    steady_since: float
    at: float
    seen: float
    running: float
    until: float


@dataclass(frozen=True, slots=True)
class Window:
    """A change of size, with some steady time on both sides."""

    begin: float
    end: float


@dataclass(slots=True)
class Recovering:
    """Goes through rounds, then tells."""

    spark: SparkSession
    load: Load
    store: Path
    console: Console
    pause: float = 3.0
    kills: list[Killed] = field(default_factory=list)
    reloads: list[Window] = field(default_factory=list)
    rescales: list[Window] = field(default_factory=list)

    # ------------------------------------------------------------ while it runs

    def round(self, number: int, *, last: bool) -> None:
        """Kill a worker; stop, and run again with more; then the same change of size, live.

        The last round drains: what was read behind the last snapshot is read again by the next job only.
        """
        with self._run(BEFORE) as job:
            self._say("bringing the state in" if not self.kills else "going on")
            keys = self.load.keys_of_part * PARTS
            self._until(lambda: self._keys(job) >= keys)
            self._caught_up()
            job.snapshot(timeout=PATIENCE)
            self._caught_up()
            self._kill(job, number % BEFORE)
            self._caught_up()
            time.sleep(self.pause)
            self._say(f"stopping, and running again: {BEFORE} → {AFTERWARDS} workers")
            begin = time.time()
            if not job.stop(timeout=PATIENCE):
                raise RecoveringError("the flow did not stop")
        with self._run(AFTERWARDS) as job:
            self._until(lambda: self._running(job) > 0)
            self._caught_up()
            self.reloads.append(Window(begin, time.time()))
            job.scale(BEFORE, wait=True, timeout=PATIENCE)
            self._caught_up()
            time.sleep(self.pause)
            self._say(f"live: {BEFORE} → {AFTERWARDS} workers")
            begin = time.time()
            job.scale(AFTERWARDS, wait=True, timeout=PATIENCE)
            self._caught_up()
            self.rescales.append(Window(begin, time.time()))
            job.stop(drain=last, timeout=PATIENCE)

    def _run(self, workers: int) -> Job:
        flow = numbered_flow("recovery", self.load, at_once=True)
        snapshots = Snapshots(str(self.store), every=EVERY)
        return run(flow, workers, spark=self.spark, http=False, snapshots=snapshots)

    def _kill(self, job: Job, victim: int) -> None:
        self._say("a steady load")
        since = time.time()
        time.sleep(self.pause)
        job.snapshot(timeout=PATIENCE)
        time.sleep(AFTER)
        (process,) = [w["pid"] for w in job.status()["workers"] if w["worker"] == victim]
        last = max(event.number for event in job.events())
        self._say(f"killing worker {victim}")
        at = time.time()
        os.kill(process, signal.SIGKILL)
        self._until(lambda: self._running(job, last) > 0)
        seen = next(event.at for event in job.events(last) if event.kind == "restarting")
        self._caught_up()
        self.kills.append(Killed(since, at, seen, self._running(job, last), time.time()))

    def _running(self, job: Job, after: int = 0) -> float:
        """When the flow began to run; 0 if it has not."""
        for event in job.events(after):
            if event.kind == "failed":
                raise RecoveringError(f"the flow failed: {event.text}")
            if event.kind == "running":
                return event.at
        return 0.0

    def _keys(self, job: Job) -> int:
        workers = [worker for worker in job.status()["workers"] if worker.get("stages")]
        return sum(worker["stages"][STAGE]["keys"] for worker in workers)

    def _caught_up(self) -> None:
        """Wait until nothing has been late for half a second."""
        good = 0
        while good < 5:
            self._until(lambda: self._lag() < NEAR)
            time.sleep(0.1)
            good = good + 1 if self._lag() < NEAR else 0

    def _lag(self) -> float:
        """By how much the last record of the last generation's logs was late, or there was none."""
        known = logs(self.load.directory)
        last = [log for log in known if log.generation == known[-1].generation] if known else []
        late = []
        for log in last:
            with log.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END) // 32 * 32
                if not size:
                    continue
                file.seek(size - 32)
                due, arrived = np.frombuffer(file.read(32), dtype=np.int64)[2:]
            if time.time() - arrived / 1e6 < 1.0:
                late.append(float(arrived - due) / 1e6 if due > 0 else np.inf)
        return max(late, default=np.inf)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                raise RecoveringError(f"what was waited for did not come within {PATIENCE:.0f} s")
            time.sleep(0.05)

    def _say(self, what: str) -> None:
        self.console.print(f"Railgun: {what} …", style="dim")

    # ------------------------------------------------------------ afterwards

    def outcome(self) -> Outcome:
        """What the logs tell."""
        known = logs(self.load.directory)
        by_generation: dict[int, list[Logged]] = {}
        for log in known:
            by_generation.setdefault(log.generation, []).append(log)
        rows = {
            generation: np.concatenate([log.rows() for log in some])
            for generation, some in by_generation.items()
        }
        every = np.concatenate(list(rows.values()))
        verdict = judge(self.load, every)
        doubled = sum(_doubled(some) for some in rows.values())
        arrived = np.sort(every[:, 3])
        outages, caught_up = [], []
        for kill in self.kills:
            after = min(g for g, some in by_generation.items() if some[0].opened > kill.at * 1e6)
            before = every[(every[:, 2] >= kill.steady_since * 1e6) & (every[:, 3] < kill.at * 1e6)]
            opened = max(log.opened for log in by_generation[after]) / 1e6
            new = rows[after][rows[after][:, 2] > kill.at * 1e6]
            marks = {
                DETECTED: kill.seen,
                RELAUNCHED: opened,
                LOADED: kill.running,
                OUTPUT: rows[after][:, 3].min() / 1e6,
                NEW: new[:, 3].min() / 1e6,
            }
            outages.append(Outage({m: float(at - kill.at) for m, at in marks.items()}, "Railgun"))
            caught_up.append(_caught_up(before, new) / 1e6 - kill.at)
        return Outcome(
            outages,
            caught_up,
            [_longest_gap(arrived, window) for window in self.reloads],
            [_longest_gap(arrived, window) for window in self.rescales],
            verdict.records,
            verdict.lost,
            doubled,
            verdict.reordered,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of all rounds; seconds."""

    outages: list[Outage]
    caught_up: list[float]
    reloads: list[float]
    rescales: list[float]
    records: int
    lost: int
    doubled: int
    """Within one generation: from one to the next, what came after the snapshot is logged again."""
    reordered: int


def _doubled(rows: Rows) -> int:
    """Records that a generation has logged more than once."""
    records = rows[:, 0] << 32 | rows[:, 1]
    return len(records) - len(np.unique(records))


def _longest_gap(arrived: NDArray[np.int64], window: Window) -> float:
    """The longest time in which nothing arrived at any sink.

    >>> _longest_gap(np.array([0, 1, 3, 8, 9, 50]) * 1_000_000, Window(1, 10))
    5.0
    """
    inside = arrived[(arrived >= window.begin * 1e6) & (arrived <= window.end * 1e6)]
    return float(np.diff(inside).max()) / 1e6


def _caught_up(before: Rows, new: Rows) -> float:
    """When the latency of new records was back under twice that of those before the kill (µs, by medians)."""
    steady = float(np.median(before[:, 3] - before[:, 2]))
    new = new[np.argsort(new[:, 2])]
    edges = np.arange(new[0, 2], new[-1, 2], BIN)
    for begin, end in pairwise(np.searchsorted(new[:, 2], edges).tolist()):
        some = new[begin:end]
        if len(some) and np.median(some[:, 3] - some[:, 2]) < SLOWER * steady:
            return float(some[:, 3].min())
    return float("inf")
