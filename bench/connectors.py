"""Programs outside feed a flow on Spark: how many messages a second, and how long until they are acknowledged.

The feeder is a process of its own, the worker a Spark task; both share the cores of this machine with the JVM.

- *throughput*: one connector into one worker, one stream of 100-byte messages, from the first message to the last
  acknowledgement, with a snapshot every second: each message is applied and in a committed snapshot. The flow counts
  by 1,000 keys. Beside it the same flow reads the same messages from a source inside the worker: what the flow itself
  can do, in the same run.
- *send*: the same, with a call for each message instead of an iterable.
- *acknowledgements*: a message every 5 ms; how much longer than the time between two snapshots each one waits.
- *many streams*: 1,000 streams into 4 workers, which become 2, 4 and 1 meanwhile; what came out is compared with
  what went in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from verification.report import Report, options
from verification.stream_validator import check_streams

from bench._feeder import payload
from railgun import Flow, Job, run
from railgun.engine.controller.storekeeper import Snapshots
from railgun.flows.source import Reader, Source
from railgun.sinks.files import Files
from railgun.sources.connectors import ConnectorMessage, Connectors

WANTED = 300_000  # messages/s
PEER = 86_000  # messages/s: what Wallaroo published for Python
LATE = 50.0  # ms
EVERY = 1.0


def count(total: int, item: bytes) -> tuple[int, int]:
    return total + 1, total + 1


def key(item: bytes) -> bytes:
    return item[:3]


def is_round(total: int) -> bool:
    return total % 10_000 == 0


def counting(flow: Flow, source: Any, out: Path) -> Flow:
    keyed = flow.source(source, name="in").key_by(key)
    keyed.stateful_map(count, initial=int, name="count").filter(is_round).sink(
        Files(out), name="out"
    )
    return flow


class Ring(Source[bytes]):
    """The same messages, from within."""

    def __init__(self, messages: int) -> None:
        self.messages = messages

    def partitions(self) -> list[str]:
        return ["ring"]

    def open(self, partition: Any, position: Any) -> Reader[bytes]:
        return RingReader(self.messages, position or 0)


class RingReader(Reader[bytes]):
    def __init__(self, messages: int, position: int) -> None:
        self.messages, self.position = messages, position
        self.ring = [payload(number) for number in range(100_000)]

    def read(self, most: int, now: int) -> Sequence[bytes] | None:
        if self.position >= self.messages:
            return None
        at = self.position % len(self.ring)
        found = self.ring[at : at + min(most, self.messages - self.position)]
        self.position += len(found)
        return found


def line(message: ConnectorMessage) -> str:
    return f"{message.stream} {message.id} {message.payload.decode()}"


class Bench:
    """One run."""

    def __init__(self, home: Path, quick: bool, report: Report, master: str) -> None:
        self.home, self.quick, self.report, self.master = home, quick, report, master
        self.number = 0

    @contextmanager
    def job(self, flow: Flow, workers: int, every: float) -> Iterator[Job]:
        with run(
            flow,
            workers,
            master=self.master,
            snapshots=Snapshots(str(self.home / f"snapshots-{flow.name}"), every=every),
            registry=self.home / "jobs",
            by_value=[sys.modules[__name__]],
        ) as job:
            wait_until(lambda: job.status()["state"] == "running")
            yield job

    @contextmanager
    def feeder(self, flow: str, how: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        told = {"flow": flow, "registry": str(self.home / "jobs"), "how": how, **more}
        command = [sys.executable, "-m", "bench._feeder", json.dumps(told)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield process

    def fed(self, flow: str, how: str, **more: Any) -> dict[str, Any]:
        with self.feeder(flow, how, **more) as process:
            return result(process)

    # ------------------------------------------------------------ figures

    def inside(self, messages: int) -> float:
        """The flow without connectors: messages a second."""
        name = self._name("inside")
        flow = counting(Flow(name), Ring(messages), self.home / name)
        with self.job(flow, 1, EVERY) as job:
            began = time.perf_counter()
            job.wait()
            return messages / (time.perf_counter() - began)

    def through(self, how: str, messages: int) -> float:
        """With a connector: messages a second."""
        name = self._name(how)
        flow = counting(Flow(name), Connectors(decode="bytes"), self.home / name)
        with self.job(flow, 1, EVERY):
            self.fed(name, how, messages=messages // 10)  # once around, which does not count
        name = self._name(how)
        flow = counting(Flow(name), Connectors(decode="bytes"), self.home / name)
        with self.job(flow, 1, EVERY):
            told = self.fed(name, how, messages=messages)
        return float(messages / told["seconds"])

    def _name(self, what: str) -> str:
        self.number += 1
        return f"{what}{self.number}"

    def throughput(self) -> None:
        messages, rounds = (300_000, 1) if self.quick else (4_000_000, 3)
        found: dict[str, list[float]] = {"feed": [], "send": [], "inside": []}
        for _ in range(rounds):
            found["feed"].append(self.through("feed", messages))
            found["inside"].append(self.inside(messages))
            found["send"].append(self.through("send", messages // 2))
        rates = {how: median(some) for how, some in found.items()}
        spread = f"({min(found['feed']):,.0f} to {max(found['feed']):,.0f})"
        self.report.check(
            "applied and acknowledged",
            rates["feed"],
            f"messages/s {spread}",
            goal=f">= {WANTED:,}",
            passed=rates["feed"] >= WANTED,
        )
        self.report.check("beside Wallaroo's published figure", rates["feed"] / PEER, "times")
        self.report.check("with a call for each message", rates["send"], "messages/s")
        self.report.check("the flow without connectors", rates["inside"], "messages/s")
        self.report.check("with connectors / without", rates["feed"] / rates["inside"], "times")

    def acknowledgements(self) -> None:
        name = self._name("acks")
        flow = counting(Flow(name), Connectors(decode="bytes"), self.home / name)
        with self.job(flow, 1, EVERY):
            told = self.fed(name, "pace", seconds=6.0 if self.quick else 30.0)
        waits = sorted(1000 * wait for wait in told["waits"])
        worst = waits[int(0.99 * len(waits))] - 1000 * EVERY
        self.report.check("acknowledged, median", median(waits), "ms")
        self.report.check(
            "99 % within the time between two snapshots and",
            worst,
            "ms",
            goal=f"<= {LATE:.0f} ms",
            passed=worst <= LATE,
        )
        self.report.check("the longest, beyond that time", waits[-1] - 1000 * EVERY, "ms")

    def many_streams(self) -> None:
        streams, messages = (200, 30) if self.quick else (1_000, 60)
        name = self._name("many")
        out = self.home / name
        flow = Flow(name)
        source = Connectors(decode="message")
        flow.source(source, name="in").map(line).sink(Files(out, "text"), name="out")
        sizes: list[float] = []
        with self.job(flow, 4, EVERY) as job:
            args = {"streams": streams, "messages": messages, "connections": 16, "pause": 0.25}
            with self.feeder(name, "many", **args) as process:
                for size in (2, 4, 1):
                    time.sleep(2)  # messages flow before, between and after
                    began = time.perf_counter()
                    job.scale(size, wait=True, timeout=120)
                    sizes.append(time.perf_counter() - began)
                told = result(process)
            job.stop()
        files = sorted(out.glob("part-*.txt"), key=lambda path: int(path.name.split("-")[2]))
        lines = [text for path in files for text in path.read_text("utf-8").splitlines()]
        shown = [(text.split(" ")[0], text) for text in lines]
        names = [f"s{number:04d}" for number in range(streams)]
        sent = {one: [f"{one} {n} {one} {n}" for n in range(messages)] for one in names}
        trouble = check_streams(shown, sent, whole=True)
        self.report.check(f"{streams:,} streams, messages that came out", len(lines), "messages")
        self.report.check(
            "through 4, 2, 4 and 1 workers",
            trouble or "as sent",
            goal="as sent",
            passed=not trouble,
        )
        took = ", ".join(f"{seconds:.1f}" for seconds in sizes)
        self.report.check("rescales", took, "s")
        self.report.check("connections there were", told["connections"], "for 16 connectors")


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the feeder failed: exit code {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def wait_until(done: Any) -> None:
    while not done():
        time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    chosen, _ = options("bench connectors", __doc__ or "", argv)
    home = Path(tempfile.mkdtemp(prefix="railgun-bench-", dir=Path.cwd()))
    os.environ["RAILGUN_JOBS"] = str(home / "jobs")
    report = Report("connectors")
    bench = Bench(home, chosen.quick, report, "local[4]")
    try:
        bench.throughput()
        bench.acknowledgements()
        bench.many_streams()
    finally:
        with suppress(OSError):
            shutil.rmtree(home)
    return report.finish(chosen)
