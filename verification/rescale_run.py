"""Rescale a flow live under a steady load, measure and judge the run: shared by the demo and the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from railgun.engine.protocol.placement import Placement
from railgun.errors import RailgunError
from railgun.hashing import hash_ints
from verification.numbered_load import PARTS, Load, Rows, Verdict, judge, read_logs
from verification.report import Report
from verification.rescale_picture import Rescale, Story

EVERY: Final = 0.25
STAGE: Final = "by key"


class RunError(RailgunError):
    """Raised when a run does not come to its end."""


class Runs(Protocol):
    """What a run needs of a job."""

    def scale(self, workers: int) -> None:
        """Ask for a number of workers."""

    def status(self) -> dict[str, Any]:
        """Return the status of the job."""
        ...

    def events(self, after: int = 0) -> list[Any]:
        """Return the events after the given number."""
        ...

    def stop(self) -> object:
        """Let the flow end."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it came."""
        ...


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from the time a record was due until it arrived."""

    records: int
    p50: float
    p99: float
    longest: float

    @staticmethod
    def of(rows: Rows) -> Latency:
        """Return the latencies of `rows`."""
        if not len(rows):
            return Latency(0, 0.0, 0.0, 0.0)
        took = (rows[:, 3] - rows[:, 2]) / 1000
        p50, p99 = np.percentile(took, [50, 99])
        return Latency(len(rows), float(p50), float(p99), float(took.max()))


@dataclass(frozen=True, slots=True)
class Span:
    """One rescale: how long keys moved (seconds since the epoch), and the latencies meanwhile."""

    before: int
    after: int
    asked: float
    begin: float
    end: float
    moved_keys: int
    moved: Latency
    unmoved: Latency

    @property
    def seconds(self) -> float:
        """Return how long the rescale took."""
        return self.end - self.begin


@dataclass(slots=True)
class Result:
    """The results of a run."""

    verdict: Verdict
    steady: Latency
    spans: list[Span]
    story: Story
    restarts: int

    def check(self, report: Report, which: str = "") -> None:
        """Add the checks that hold for any run: every record arrived, once, in order, and nothing restarted."""
        verdict = self.verdict
        report.check(f"records{which}", verdict.records, "records", "> 0", verdict.records > 0)
        for name, count in (
            ("lost", verdict.lost),
            ("doubled", verdict.doubled),
            ("reordered", verdict.reordered),
            ("restarts", self.restarts),
        ):
            report.check(name + which, count, "", "= 0", count == 0)


@dataclass(slots=True)
class RescaleRun:
    """Waits until all keys exist, then rescales; `show` is called with each status."""

    job: Runs
    load: Load
    sizes: Sequence[int]
    title: str
    subtitle: str
    pause: float = 3.0
    show: Callable[[str, dict[str, Any]], None] = lambda what, status: None
    patience: float = 300.0
    _samples: list[tuple[float, dict[int, int]]] = field(default_factory=list)

    def run(self) -> Result:
        """Perform the whole run."""
        keys = self.load.keys_of_part * PARTS
        self._until("filling the state", lambda: sum(self._samples[-1][1].values()) >= keys)
        self._for("a steady load", 1.0)  # until the backlog is gone
        begin = time.time()
        self._for("a steady load", self.pause)
        moves = []
        size = self.job.status()["size"]
        for after in self.sizes:
            moves.append((size, after, *self._rescale(size, after)))
            size = after
            self._for("a steady load", self.pause)
        end = time.time()
        self.job.stop()
        if not self.job.wait(self.patience):
            raise RunError("the flow did not end")
        restarts = sum(event.kind == "restarting" for event in self.job.events())
        rows = read_logs(self.load.directory)
        verdict = judge(self.load, rows)
        rows = rows[rows[:, 2] > 0]
        spans = [self._span(rows, *move) for move in moves]
        steady = Latency.of(_between(rows, begin, moves[0][2]))
        return Result(verdict, steady, spans, self._story(rows, begin, end, spans), restarts)

    # ------------------------------------------------------------ while it runs

    def _rescale(self, before: int, after: int) -> tuple[float, float, float]:
        """Rescale; return when that was requested, began and ended."""
        last = max((event.number for event in self.job.events()), default=0)
        requested = time.time()
        self.job.scale(after)
        what = f"{before} → {after} workers"

        def when(kind: str) -> float | None:
            return next((e.at for e in self.job.events(last) if e.kind == kind), None)

        self._until(what, lambda: when("rescaled") is not None)
        begin, end = when("rescaling"), when("rescaled")
        assert begin is not None
        assert end is not None
        return requested, begin, end

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.patience
        self._look(what)
        while not done():
            if time.monotonic() > deadline:
                raise RunError(f"{what}: not done after {self.patience:.0f} s")
            time.sleep(0.05)
            self._look(what)

    def _for(self, what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look(what)
            time.sleep(0.1)

    def _look(self, what: str) -> None:
        status = self.job.status()
        if status["state"] in ("failed", "finished"):
            raise RunError(f"the flow is {status['state']}: {status['cause']}")
        keys = {
            worker["worker"]: worker["stages"][STAGE]["keys"]
            for worker in status["workers"]
            if worker.get("stages")
        }
        self._samples.append((time.time(), keys))
        self.show(what, status)

    # ------------------------------------------------------------ afterwards

    def _span(
        self, rows: Rows, before: int, after: int, asked: float, begin: float, end: float
    ) -> Span:
        old, new = Placement.of(range(before)), Placement.of(range(after))
        every = hash_ints(np.arange(self.load.keys_of_part * PARTS, dtype=np.int64))
        moving = int((old.owners(every) != new.owners(every)).sum())
        during = _between(rows, begin, end)
        hashes = hash_ints(during[:, 0])
        moved = old.owners(hashes) != new.owners(hashes)
        return Span(
            *(before, after, asked, begin, end, moving),
            moved=Latency.of(during[moved]),
            unmoved=Latency.of(during[~moved]),
        )

    def _story(self, rows: Rows, begin: float, end: float, spans: Sequence[Span]) -> Story:
        story = Story(self.title, self.subtitle, EVERY)
        at = np.floor((rows[:, 2] / 1e6 - begin) / EVERY)
        took = (rows[:, 3] - rows[:, 2]) / 1000
        arrived = np.floor((rows[:, 3] / 1e6 - begin) / EVERY)
        for interval in range(int((end - begin) / EVERY)):
            mine = took[at == interval]
            p50, p99 = np.percentile(mine, [50, 99]) if len(mine) else (0.0, 0.0)
            story.median.append(float(p50))
            story.p99.append(float(p99))
            story.longest.append(float(mine.max(initial=0.0)))
            story.rate.append(float((arrived == interval).sum()) / EVERY)
        seen = [(when, keys) for when, keys in self._samples if begin <= when <= end]
        story.times = [when - begin for when, _ in seen]
        for worker in sorted({worker for _, keys in seen for worker in keys}):
            story.held[worker] = [keys.get(worker, 0) for _, keys in seen]
        story.rescales = [
            Rescale(span.before, span.after, span.begin - begin, span.end - begin) for span in spans
        ]
        return story


def _between(rows: Rows, begin: float, end: float) -> Rows:
    """Return the rows that were due in an interval."""
    due = rows[:, 2]
    return rows[(due >= begin * 1e6) & (due <= end * 1e6)]
