"""`./run demo`: what there is to see of Railgun today, on local Spark, in under a minute.

Flows that run a user's pipeline on Spark do not exist yet. What exists is the protocol that will
let them rescale live, and this shows it at work:

1. Spark is started in this process, and whole simulated clusters are run as its tasks, one seed in
   each. Every simulated worker runs the production distributors, while the cluster is resized,
   saved and hurt; every record is numbered, so the first one lost, doubled or out of order is
   noticed.
2. One more cluster is resized by script, from 2 workers to 4 and to 1, and drawn as a picture.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from railgun.core.errors import RailgunError
from railgun.core.placement import Placement, Worker
from railgun.spark.session import SparkSession, session
from railgun.testing.model import CountingOperator
from railgun.testing.picture import Rescale, Story, draw
from railgun.testing.report import Report, options
from railgun.testing.rows import Rows
from railgun.testing.simulator import Outcome, Plan, ReaderOperator, Simulation, simulate

SIZE = 0.15
SCHEDULES, QUICK_SCHEDULES = 250, 80
PICTURE = Path("railgun-demo.svg")
WRONG_RECORDS = {"lost", "twice", "out of order", "late", "wrong counts", "wrong snapshot"}
"""The kinds of violation that are about records; the others are about keys and the protocol."""

SCRIPT = Plan(
    seed=2,
    workers=2,
    most_workers=4,
    partitions=8,
    keys=300,
    records=900,
    skew=0.5,
    burst=5,
    chunk=3,
    rescales=2,
    snapshots=3,
    crashes=0,
    slow_links=0.0,
    slow_operators=False,
    swaps=False,
    pins=False,
)
RESCALES = {600: 4, 1400: 1}
SNAPSHOTS = (300, 850, 1620)
COUNTING = 1  # the stage the picture is of
EVERY = 25
TITLE = "A live rescale, 2 → 4 → 1 workers, while records flow"
SUBTITLE = (
    f"The production protocol on simulated workers and links: {SCRIPT.keys} keys, "
    f"{SCRIPT.partitions * SCRIPT.records:,} records, none lost, doubled or out of order"
)
UNTIL = 2200  # a little later the first partitions have been read to their end


def main(argv: Sequence[str] | None = None) -> int:
    """Show it; the exit code."""
    chosen, progress = options("demo", "The rescale protocol at work, on local Spark.", argv)
    report = Report("demo")
    began = time.monotonic()
    try:
        with progress.status("starting Spark in this process ..."):
            spark = session("railgun demo", quick=True)
    except RailgunError as error:
        progress.print(str(error), style="red", markup=False)
        report.check("Spark", "did not start", goal="starts", passed=False)
        return report.finish(chosen)
    start = time.monotonic() - began
    report.check("start of Spark", round(start, 2), "s")
    cores = spark.sparkContext.defaultParallelism
    progress.print(f"Spark {spark.version} is up on {cores} cores, after {start:.1f} s")
    try:
        seeds = range(QUICK_SCHEDULES if chosen.quick else SCHEDULES)
        totals, failed = run_schedules(spark, seeds, progress)
    finally:
        spark.stop()
    for seed in failed[:3]:
        progress.print(Simulation(Plan.of(seed, SIZE)).run().story(), markup=False)

    progress.print("one more cluster, by script: 2 → 4 → 1 workers while records flow")
    recorder = Recorder(SCRIPT)
    outcome = recorder.run()
    totals += tally(outcome)
    judge(report, totals)
    if outcome.violation is None:
        story = recorder.what_was_seen()
        PICTURE.write_text(draw(story), encoding="utf-8")
        fewest = min(story.counted)
        report.check(f"records in every {EVERY} ticks", fewest, "or more", "> 0", fewest > 0)
    else:
        progress.print(outcome.story(), markup=False)
    code = report.finish(chosen)
    if code == 0:
        tell(progress if chosen.json else Console(), totals, story, cores)
    return code


# ---------------------------------------------------------------- many clusters, as Spark tasks


def run_schedules(
    spark: SparkSession, seeds: Sequence[int], console: Console
) -> tuple[Counter[str], list[int]]:
    """Run a simulated cluster for each seed, each in a Spark task; the totals, and failed seeds."""
    totals: Counter[str] = Counter()
    failed = []
    context = spark.sparkContext
    batch = 8 * context.defaultParallelism  # enough to keep all cores busy; the bar moves with each
    columns = (
        TextColumn("clusters as Spark tasks"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(seeds), told="")
        for first in range(0, len(seeds), batch):
            part = seeds[first : first + batch]
            for seed, counts in context.parallelize(part, len(part)).map(run_schedule).collect():
                totals += counts
                if counts["violations"]:
                    failed.append(seed)
            told = f"{totals['moved']:,} keys moved, {totals['violations']} violations"
            progress.update(bar, advance=len(part), told=told)
    return totals, failed


def run_schedule(seed: int) -> tuple[int, Counter[str]]:
    """What a Spark task does: one simulated cluster, from its first record to its last.

    >>> run_schedule(1)[1]["violations"]
    0
    """
    return seed, tally(simulate(seed, SIZE))


def tally(outcome: Outcome) -> Counter[str]:
    """What came out of a run, and whether it was about records if something was wrong."""
    wrong = outcome.violation is not None and outcome.violation.kind in WRONG_RECORDS
    return outcome.tally() + Counter(wrong=int(wrong))


# ---------------------------------------------------------------- one cluster, by script


class Recorder(Simulation):
    """A simulated cluster that is resized by script, and keeps what there is to see of it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, keep_trace=False, watch=lambda _: self.look())
        self.story = Story(TITLE, SUBTITLE, EVERY)
        self.read_at: dict[tuple[int, int, int], int] = {}  # when a record was read
        self.waits: dict[int, list[int]] = {}  # by interval, of the records counted in it
        self.seen: set[int] = set()
        self.samples: list[dict[Worker, int]] = []

    def what_was_seen(self) -> Story:
        """The story, after the run."""
        story = self.story
        intervals = UNTIL // EVERY
        samples = self.samples[: intervals + 1]
        members = sorted({worker for sample in samples for worker in sample})
        story.held = {w: [sample.get(w, 0) for sample in samples] for w in members}
        del story.travel[intervals + 1 :]
        for interval in range(intervals):
            waits = self.waits.get(interval, [0])
            story.counted.append(len(self.waits.get(interval, ())))
            story.median.append(median(waits))
            story.longest.append(max(waits))
        return story

    def plan_events(self) -> None:
        """The script."""
        for at, size in RESCALES.items():
            self.later(at, partial(self.scale_to, size), always=True)
        for at in SNAPSHOTS:
            self.later(at, self.want_snapshot, always=True)

    def scale_to(self, size: int) -> None:
        """Ask for another number of workers."""
        self.rescales_left -= 1
        self.story.rescales.append(Rescale(len(self.workers), size, self.now))
        self.obey(self.coordinator.rescale(Placement.of(range(size))))

    def launch(
        self,
        worker: Worker,
        members: Iterable[Worker],
        placements: list[Placement],
        epochs: list[int],
    ) -> None:
        """A new worker, with operators that tell the recorder what they do."""
        super().launch(worker, members, placements, epochs)
        readers, counts, _ = self.workers[worker].stages
        readers.operator = RecordedReader(self)
        counts.operator = RecordedCounts(self, worker)

    def look(self) -> None:
        """Note what has changed; called after everything that happens."""
        held = {w: len(model.stages[COUNTING].operator.states) for w, model in self.workers.items()}
        travel = len(self.seen) - sum(held.values())
        while len(self.samples) * EVERY <= self.now:
            self.samples.append(held)
            self.story.travel.append(travel)
        for rescale in self.story.rescales[-1:]:
            if travel:
                rescale.moving = (rescale.moving[0] or self.now, self.now)
            if self.outcome.rescales == len(self.story.rescales) and not rescale.end:
                rescale.end = self.now
        if self.outcome.snapshots > len(self.story.snapshots):
            self.story.snapshots.append(self.now)

    def was_read(self, rows: Rows) -> None:
        """A reader emitted records."""
        for item in rows.items:
            self.read_at[item.key, item.origin, item.seq] = self.now

    def was_counted(self, rows: Rows) -> None:
        """A counting operator counted records."""
        waits = self.waits.setdefault(self.now // EVERY, [])
        for item in rows.items:
            self.seen.add(item.key)
            waits.append(self.now - self.read_at.pop((item.key, item.origin, item.seq)))


class RecordedReader(ReaderOperator):
    """Readers that tell what they read."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.source)
        self.recorder = recorder

    def read(self, partition: int, count: int) -> Rows | None:
        """The next records of an open partition."""
        rows = super().read(partition, count)
        if rows is not None:
            self.recorder.was_read(rows)
        return rows


class RecordedCounts(CountingOperator):
    """Counts that tell what they count."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder, worker: Worker) -> None:
        super().__init__(worker, recorder.source.group_of.__getitem__)
        self.recorder = recorder

    def process(self, rows: Rows) -> Rows | None:
        """Count each record."""
        self.recorder.was_counted(rows)
        return super().process(rows)


# ---------------------------------------------------------------- what came of it


def judge(report: Report, totals: Counter[str]) -> None:
    """The checks: nothing may be wrong, and there must have been something to go wrong."""
    report.check("simulated clusters", totals["schedules"], "runs")
    report.check("records", totals["records"], "records")
    for name, value in (
        ("violations", totals["violations"]),
        ("lost, doubled, reordered or late", totals["wrong"]),
    ):
        report.check(name, value, "runs", "= 0", value == 0)
    for name, value, unit in (
        ("rescales", totals["rescales"], ""),
        ("keys moved", totals["moved"], "keys"),
        ("snapshots", totals["snapshots"], ""),
        ("snapshots during a rescale", totals["during"], ""),
        ("crashes recovered from", totals["crashes"], ""),
    ):
        report.check(name, value, unit, "> 0", value > 0)


def tell(console: Console, totals: Counter[str], story: Story, cores: int) -> None:
    """What happened when all went well, and what to try next."""
    during, calm = [0], [0]
    for interval, wait in enumerate(story.longest):
        at = interval * story.every
        moving = any(rescale.begin <= at < rescale.end for rescale in story.rescales)
        (during if moving else calm).append(wait)
    lines = (
        "",
        f"What happened: {totals['schedules'] - 1} simulated clusters ran as Spark tasks on "
        f"{cores} cores, and one here by script. Over {totals['records']:,} records they were "
        f"rescaled {totals['rescales']:,} times, which moved {totals['moved']:,} keys; took "
        f"{totals['snapshots']:,} snapshots, {totals['during']:,} of them during a rescale; and "
        f"came back from {totals['crashes']:,} crashes.",
        "No record was lost, doubled, out of order or late.",
        f"In the scripted rescale records never stopped: {min(story.counted)} or more were counted "
        f"in every {story.every} ticks of simulated time. The longest wait of a record was "
        f"{max(calm)} ticks in calm, {max(during)} during a rescale.",
        f"The picture of it: {PICTURE.resolve()}",
        "",
        "What this is not yet: flows that run your own pipelines on Spark are the next part. This "
        "ran the protocol they will rescale by, under simulated workers inside Spark tasks.",
        "Try next: ./run prove (the proof of the protocol), ./run bench placement (how fast the "
        "owners of keys are found), docs/design/rescale.md (how a live rescale works).",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith("The picture"))


if __name__ == "__main__":
    sys.exit(main())
