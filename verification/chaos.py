"""Chaos: a storm of failures over a running flow, after which its committed output must equal that of a calm run.

The flow has two stages with state and two sinks: numbered records are counted by key (keys are forgotten now and then,
so a deleted key that came back would be seen), and then summed by group in windows of event time (so would a timer that
fires twice or never). The output follows from the records alone, whatever computes it when.

A storm is drawn from a seed. Workers are killed, or frozen, for longer than the timeout or shorter; the flow is
rescaled and saved at any moment; and the program that runs it, a process of its own, is killed, and started again with
another number of workers. Then the flow is left to come to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from railgun.engine.controller.controller import Settings
from railgun.engine.controller.launcher import Launcher
from railgun.engine.controller.storekeeper import Snapshots
from railgun.engine.operators.stateful import FORGET, Context, Stateful
from railgun.engine.snapshots.store import SnapshotStore
from railgun.errors import RailgunError
from railgun.flows.flow import Flow
from railgun.job import Job, run
from railgun.sinks.files import Files
from railgun.sources.generate import Generate
from railgun.testing.local_workers import SubprocessLauncher
from verification.report import Report

NAME: Final = "chaos"
KEYS: Final = 500
GROUPS: Final = 23
PARTS: Final = 6
LIVES: Final = 7  # records after which a key is forgotten
STEP: Final = 1_000  # µs of event time between two records
WINDOW: Final = 1_000_000  # µs
START: Final = 1_700_000_000_000_000
HANG_AFTER: Final = 2.0
EVERY: Final = 1.0
WAIT_TIMEOUT_S: Final = 180.0  # seconds to wait for an event that must come
ACTIONS: Final = {"kill": 6, "freeze": 4, "rescale": 5, "snapshot": 4, "driver kill": 1}
PROGRAM: Final = "from verification.chaos import drive; drive()"

Record = tuple[int, int, int]  # key, number within the key, index


class ChaosError(RailgunError):
    """Raised when the flow does not come to its end."""


# ---------------------------------------------------------------- the flow


def record(index: int, chance: Random) -> Record:
    """Return the record of an index. Each part has keys of its own, so a key's records are in order."""
    part, turn = index % PARTS, index // PARTS
    return part * KEYS + turn % KEYS, turn // KEYS, index


def when(item: Record) -> int:
    """Return the time of a record."""
    return START + item[2] * STEP


def by_key(item: Record) -> int:
    """Return the key of the first stage."""
    return item[0]


def by_group(line: list[int]) -> int:
    """Return the key of the second stage."""
    return line[0] % GROUPS


def tally(seen: int, item: Record) -> tuple[Any, list[int]]:
    """Count a key's records, and forget the key every few of them."""
    seen += 1
    return FORGET if seen == LIVES else seen, [*item, seen]


class Windows(Stateful[int, list[int], dict[int, list[int]], list[int]]):
    """The number of lines in each window of time, and their sums."""

    def initial(self) -> dict[int, list[int]]:
        """Return the state of a new group: no open window."""
        return {}

    def on_item(self, item: list[int], context: Context[int, dict[int, list[int]]]) -> None:
        """Add a line to its window."""
        end = context.time // WINDOW * WINDOW + WINDOW
        sums = context.state.setdefault(end, [0, 0, 0])
        sums[:] = sums[0] + 1, sums[1] + item[2], sums[2] + item[3]
        context.set_timer(end)

    def on_timer(self, context: Context[int, dict[int, list[int]]]) -> Iterable[list[int]]:
        """Emit a closed window; a group without open windows is forgotten."""
        sums = context.state.pop(context.time)
        line = [context.key, (context.time - START) // WINDOW, *sums]
        if not context.state:
            context.forget()
        return [line]


def flow(out: Path, count: int, rate: float | None) -> Flow:
    """Return the flow: count by key, sum by group and window; both are written."""
    flow_ = Flow(NAME)
    source = Generate(record, rate=rate, count=count, partitions=PARTS)
    # A part is never idle, however long its worker is frozen: otherwise records would be late and change the output.
    records = flow_.source(source, name="records", time=when, idle_after=100_000.0)
    counted = records.key_by(by_key, name="keys").stateful_map(tally, initial=int, name="tally")
    counted.sink(Files(out / "tallies"), name="tallies")
    summed = counted.key_by(by_group, name="groups").stateful(Windows(), name="windows")
    summed.sink(Files(out / "windows"), name="sums")
    return flow_


def lines(out: Path) -> dict[str, list[bytes]]:
    """Return the visible output, sorted."""
    return {
        name: sorted(
            line
            for path in (out / name).glob("part-*")
            for line in path.read_bytes().splitlines(keepends=True)
        )
        for name in ("tallies", "windows")
    }


# ---------------------------------------------------------------- the program that is killed


@dataclass(frozen=True, slots=True)
class Storm:
    """The length and intensity of a storm, and its directories."""

    directory: str
    seconds: float
    seed: int = 1
    rate: float = 2_000.0
    most_workers: int = 4
    pause: float = 1.0  # mean seconds between two blows
    spark: bool = False

    @property
    def count(self) -> int:
        """Return the number of records: the last one is due when the storm is over."""
        return int(self.rate * self.seconds)

    @property
    def out(self) -> Path:
        """Return the directory of the output."""
        return Path(self.directory) / "out"

    @property
    def snapshots(self) -> str:
        """Return the directory of the snapshots."""
        return str(Path(self.directory) / "snapshots")


def drive() -> None:
    """Run the flow of a storm: settings on the first line of stdin, then orders; events go to stdout."""
    orders = json.loads(sys.stdin.readline())
    workers = orders.pop("workers")
    storm = Storm(**orders)
    launcher: Launcher | None = None if storm.spark else SubprocessLauncher()
    settings = Settings(
        hang_after=HANG_AFTER if not storm.spark else 2 * HANG_AFTER,
        restarts=1_000_000,
        restarts_within=3.0,
    )
    with run(
        flow(storm.out, storm.count, storm.rate),
        workers,
        launcher=launcher,
        master="local[8]" if storm.spark else None,
        settings=settings,
        snapshots=Snapshots(storm.snapshots, every=EVERY),
        http=False,
    ) as job:
        threading.Thread(target=_obey, args=(job,), daemon=True).start()
        last = 0
        while True:
            over = job.over
            for event in job.events(last):
                last = event.number
                _say(event=event.kind, text=event.text, at=event.at)
            status = job.status()
            pids = [worker["pid"] for worker in status["workers"] if worker["pid"]]
            _say(state=status["state"], pids=pids, size=status["size"], cause=status["cause"])
            if over:
                return
            time.sleep(0.05)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _obey(job: Job) -> None:
    for line in sys.stdin:
        order, _, what = line.strip().partition(" ")
        with contextlib.suppress(RailgunError):  # the flow may have ended, or not have begun
            if order == "scale":
                job.scale(int(what))
            elif order == "snapshot":
                job._controller.snapshot()  # without waiting for it
    with contextlib.suppress(RailgunError):
        job.abort("nobody is there any more")


class _Driver:
    """The program, from outside."""

    def __init__(self, storm: Storm, workers: int) -> None:
        self.state, self.cause, self._said = "starting", "", ""
        self.pids: list[int] = []
        self.heard: list[tuple[float, str, str]] = []  # time, kind, text
        self.errors = tempfile.TemporaryFile()  # as long as this is there  # noqa: SIM115  # as long as this is there
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.order(json.dumps({**asdict(storm), "workers": workers}))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def order(self, line: str) -> None:
        """Send an order to the program, if it still reads."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # cut off in the middle, or not from the program
            if "event" in message:
                self.heard.append((message["at"], message["event"], message["text"]))
            else:
                self.state, self.pids, self.cause = (
                    message["state"],
                    message["pids"],
                    message["cause"],
                )

    def kill(self) -> None:
        """Kill the program."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill the program, and read its output; its workers, which have its stdout, must be able to end."""
        self.kill()
        self._thread.join(WAIT_TIMEOUT_S)
        if self._thread.is_alive():
            raise ChaosError("workers do not end without their program")
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self.stderr_end()
        self.errors.close()

    def stderr_end(self) -> str:
        """Return the end of its stderr."""
        if not self.errors.closed:
            self.errors.seek(0)
            self._said = self.errors.read().decode(errors="replace")[-2_000:]
        return self._said


# ---------------------------------------------------------------- the storm


@dataclass(slots=True)
class Outcome:
    """The events of a storm and their results."""

    blows: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from the moment that a failure was noticed until the flow ran again."""
    returns: list[float] = field(default_factory=list)
    """Seconds from the kill of the program until the flow ran again."""
    partings: list[float] = field(default_factory=list)
    """Seconds from the kill of the program until none of its workers was left."""
    lines: int = 0
    lost: int = 0
    extra: int = 0
    same: bool = False
    staged: int = 0
    """Files that were prepared and never published."""
    finished: bool = False
    causes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, report: Report) -> None:
        """Add the results to a report."""
        for kind in ACTIONS:
            report.check(kind, self.blows[kind], "times")
        report.check("starts again", self.events["restarting"], "times")
        report.check("rescaled", self.events["rescaled"], "times")
        report.check("snapshots committed", self.events["snapshot"], "")
        report.check("snapshots given up", self.events["snapshot-failed"], "")
        for name, times in (
            ("runs again, after a worker", self.recoveries),
            ("runs again, after the program", self.returns),
            ("workers end without it", self.partings),
        ):
            if times:
                report.check(f"{name}, median", round(statistics.median(times), 2), "s")
                report.check(f"{name}, longest", round(max(times), 2), "s")
        report.check("took", round(self.seconds, 1), "s")
        report.check("lines", self.lines, "")
        report.check("lost", self.lost, "lines", "= 0", self.lost == 0)
        report.check("too many", self.extra, "lines", "= 0", self.extra == 0)
        same = "yes" if self.same else "no"
        report.check("as in a calm run, byte by byte", same, "", "yes", self.same)
        report.check("left behind", self.staged, "files", "= 0", self.staged == 0)


def calm(storm: Storm) -> dict[str, list[bytes]]:
    """Return the output of a run without failures."""
    out = Path(storm.directory) / "calm"
    with run(flow(out, storm.count, None), 2, launcher=SubprocessLauncher(), http=False) as job:
        if not job.wait(WAIT_TIMEOUT_S):
            raise ChaosError("even without a storm the flow did not end")
    return lines(out)


def storm_over(storm: Storm, say: Callable[[str], object] = lambda text: None) -> Outcome:
    """Perform a storm; raises `ChaosError` if the flow does not come to its end."""
    outcome = Outcome()
    wanted = calm(storm)
    say("calm run done")
    began = time.monotonic()
    _Weather(storm, outcome, say).blow()
    outcome.seconds = time.monotonic() - began
    output = lines(storm.out)
    for name, whole in wanted.items():
        expected_lines, output_lines = Counter(whole), Counter(output[name])
        outcome.lines += len(output[name])
        outcome.lost += (expected_lines - output_lines).total()
        outcome.extra += (output_lines - expected_lines).total()
    outcome.same = output == wanted
    outcome.staged = sum(path.is_file() for path in storm.out.rglob(".staged/**/*"))
    last = SnapshotStore(storm.snapshots, NAME).latest()
    outcome.finished = last is not None and last.finished
    return outcome


class _Weather:
    """One storm."""

    def __init__(self, storm: Storm, outcome: Outcome, say: Callable[[str], object]) -> None:
        self.storm = storm
        self.outcome = outcome
        self.say = say
        self.chance = Random(storm.seed)
        self.frozen: queue.PriorityQueue[tuple[float, int]] = queue.PriorityQueue()
        self.seen_workers: set[int] = set()  # all workers so far
        self.driver = _Driver(storm, self._size())
        self.killed_at: float | None = None

    def _size(self) -> int:
        return self.chance.randint(1, self.storm.most_workers)

    def blow(self) -> None:
        """Run from the first blow to the end of the flow."""
        try:
            self._await(self._runs, "it runs")
            end = time.monotonic() + self.storm.seconds
            while time.monotonic() < end:
                self._rest(self.chance.expovariate(1 / self.storm.pause))
                [action] = self.chance.choices(list(ACTIONS), list(ACTIONS.values()))
                self._do(action)
            self._thaw(everything=True)
            self.say("the storm is over")
            self._await(lambda: self.driver.process.poll() is not None, "it ends")
            if self.driver.state != "finished":
                raise ChaosError(
                    f"the flow has failed: {self.driver.cause}\n{self.driver.stderr_end()}"
                )
        finally:
            self.driver.kill()
            self._thaw(everything=True)
            self.driver.end()
            self._account()
            self._await(self._all_gone, "no worker is left")

    def _do(self, action: str) -> None:
        victims = [pid for pid in self.driver.pids if _is_alive(pid)]
        self.seen_workers.update(victims)
        if action in ("kill", "freeze"):
            if not victims:
                return
            pid = self.chance.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                if action == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGSTOP)
                    until = time.monotonic() + self.chance.uniform(0.05, 2 * HANG_AFTER)
                    self.frozen.put((until, pid))
        elif action == "rescale":
            self.driver.order(f"scale {self._size()}")
        elif action == "snapshot":
            self.driver.order("snapshot")
        else:
            self._kill_driver()
        self.outcome.blows[action] += 1
        self.say(action)

    def _kill_driver(self) -> None:
        killed, at = time.monotonic(), time.time()
        self.driver.kill()
        self._thaw(everything=True)  # a frozen process cannot end
        self.driver.end()
        self.seen_workers.update(self.driver.pids)
        self._account()
        self._await(self._all_gone, "workers end without their program")
        self.outcome.partings.append(time.monotonic() - killed)
        self.driver = _Driver(self.storm, self._size())
        self.killed_at = at
        if self.chance.random() < 0.7:  # otherwise the storm continues during the start
            self._await(self._runs, "it runs again")

    def _account(self) -> None:
        """Count the events that a driver reported."""
        outcome, since = self.outcome, None
        back, self.killed_at = self.killed_at, None
        for at, kind, text in self.driver.heard:
            outcome.events[kind] += 1
            if kind == "restarting":
                outcome.causes.append(text)
                since = at if since is None else since
            elif kind == "running":
                if since is not None:
                    outcome.recoveries.append(at - since)
                if back is not None:
                    outcome.returns.append(at - back)
                since = back = None

    def _runs(self) -> bool:
        return self.driver.state in ("running", "rescaling", "finished")

    def _all_gone(self) -> bool:
        return not any(map(_is_alive, self.seen_workers))

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._look()
            time.sleep(min(left, 0.02))

    def _look(self) -> None:
        self.seen_workers.update(self.driver.pids)
        self._thaw()
        code = self.driver.process.poll()
        if code is not None and self.driver.state != "finished":
            raise ChaosError(
                f"the program has ended ({code}): {self.driver.cause}\n{self.driver.stderr_end()}"
            )

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_TIMEOUT_S
        while not condition():
            if time.monotonic() > end:
                raise ChaosError(f"waited in vain until {what}; {self.driver.stderr_end()}")
            self._thaw()
            self.seen_workers.update(self.driver.pids)
            time.sleep(0.02)

    def _thaw(self, everything: bool = False) -> None:
        while not self.frozen.empty():
            until, pid = self.frozen.get()
            if not everything and until > time.monotonic():
                self.frozen.put((until, pid))
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
