"""History, then live, as users run it: the example, on local Spark and on a cluster; and flows that read streams."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.spark.workers import eventually, is_alive
from verification.spark_cluster import Standalone, standalone

import railgun
from railgun.cli.loading import Loaded, load
from railgun.cli.main import main
from railgun.client.sync import SyncClient, connect_sync
from railgun.spark.archive import archive_options
from railgun.spark.java import find_java
from railgun.spark.session import QUICK_JVM_OPTIONS, SparkSession
from railgun.testing.local_workers import SubprocessLauncher
from railgun.testing.node import Served, served

pytestmark = pytest.mark.spark

EXAMPLE = Path(__file__).parents[2] / "examples" / "history.py"
CUSTOMERS = ("ada", "bob", "cyd", "dan", "eve")
DAYS = 3 * 365
SPARK_NOISE = ("WARN", "ERROR", "Exception", "Traceback", "Setting default log level")
PATIENCE = 90.0
Order = dict[str, Any]


# ---------------------------------------------------------------- the example


def ordered_on(first: int, end: int) -> list[Order]:
    """What is ordered on some days, in order: not every customer orders every day."""
    begin = dt.date(2022, 1, 1)
    orders = []
    for day in range(first, end):
        chance = random.Random(day)
        for customer in chance.sample(CUSTOMERS, chance.randrange(1, 4)):
            at = str(begin + dt.timedelta(day))
            orders.append({"customer": customer, "cents": chance.randrange(10_000), "day": at})
    return orders


def revenue(orders: Sequence[Order]) -> list[str]:
    """The lines that one pass over all orders gives."""
    seen: dict[str, Order] = {}
    lines = []
    for order in orders:
        before = seen.get(order["customer"], {"orders": 0, "cents": 0, "since": order["day"]})
        after = {
            "customer": order["customer"],
            "orders": before["orders"] + 1,
            "cents": before["cents"] + order["cents"],
            "since": before["since"],
        }
        seen[order["customer"]] = after
        lines.append(json.dumps(after, separators=(",", ":")))
    return sorted(lines)


def written(out: Path) -> list[str]:
    """All lines; of each customer those of a file are in order."""
    found = []
    for file in out.glob("*.jsonl"):
        lines = file.read_text().splitlines()
        last: dict[str, int] = {}
        for line in map(json.loads, lines):
            assert line["orders"] > last.get(line["customer"], 0), file
            last[line["customer"]] = line["orders"]
        found += lines
    return sorted(found)


class Shell:
    """Runs commands in a directory, one after another, until Ctrl-C."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: subprocess.Popen[bytes] | None = None
        self.count = 0

    def start(self, *words: str) -> None:
        self.count += 1
        command = [sys.executable, "-m", "railgun", *words, "--registry", "jobs"]
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.running = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def _file(self, kind: str) -> Path:
        return self.directory / f"{self.count}.{kind}"

    @property
    def out(self) -> str:
        """What the command has said, in one line for each it wrote."""
        return self._file("out").read_text()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        running = self.running
        assert running is not None

        def told() -> str:
            return f"{self.out}\n{self._file('err').read_text()}"

        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert running.poll() is None, f"{what}: it has ended, and said\n{told()}"
            assert time.monotonic() < deadline, (
                f"{what}: not within {PATIENCE} s; it said\n{told()}"
            )
            time.sleep(0.05)

    def interrupt(self) -> str:
        """Press Ctrl-C; what was said, all in all."""
        assert self.running is not None
        self.running.send_signal(signal.SIGINT)
        assert self.running.wait(PATIENCE) == 0, self._file("err").read_text()
        err = self._file("err").read_text()
        assert not [word for word in SPARK_NOISE if word in err + self.out], err + self.out
        self.running = None
        return self.out

    def close(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait(PATIENCE)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("COLUMNS", "300")
    made = Shell(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def history(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three years of orders in files of Parquet, in no order."""
    place = tmp_path_factory.mktemp("history") / "orders"
    orders = ordered_on(0, DAYS)
    random.Random(1).shuffle(orders)
    table = spark.createDataFrame(orders, "customer string, cents long, day string")
    table.repartition(4).write.parquet(str(place))
    return place


@pytest.fixture(scope="module")
def cluster() -> Iterator[Standalone]:
    with standalone(workers=1, cores=4, memory="1g") as started:
        yield started
    assert not [pid for pid in started.processes if is_alive(pid)]


def deliver(directory: Path, name: str, orders: Sequence[Order]) -> None:
    """Put a file among the orders, all of it at once."""
    hidden = directory / "orders" / f".{name}"
    hidden.write_text("".join(json.dumps(order) + "\n" for order in orders))
    hidden.rename(directory / "orders" / name)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "cluster"])
def test_the_example_runs_over_its_history_and_goes_on_live(
    where: str, shell: Shell, history: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "orders").mkdir()
    out = tmp_path / "spent"
    java = " ".join([QUICK_JVM_OPTIONS, *archive_options(find_java(os.environ), os.environ)])
    running = ["--every", "0.5", "--set", f"spark.driver.extraJavaOptions={java}"]
    on = "local Spark"
    if where == "cluster":
        on = request.getfixturevalue("cluster").url
        running += ["--master", on, "--set", "spark.executor.memory=512m"]
        running += ["--set", f"spark.executor.extraJavaOptions={QUICK_JVM_OPTIONS}"]
    orders = ordered_on(0, DAYS)

    given = ["--input", f"parquet:{history}", "--order-by", "day", "--at", "start"]
    shell.start("backfill", str(EXAMPLE), *given, "--then-live", *running)
    shell.until("it is live", lambda: "running on 2 workers, from snapshot 1" in shell.out)
    assert written(out) == revenue(orders), "the history, before anything else"
    fresh = ordered_on(DAYS, DAYS + 20)
    deliver(tmp_path, "monday.jsonl", fresh)
    orders += fresh
    shell.until("what is new is there", lambda: len(written(out)) >= len(orders))
    said = shell.interrupt().splitlines()
    assert said[0] == f"history: its history, on {on}"
    assert re.fullmatch(r"done in .*: snapshot 1 in railgun-snapshots", said[1])
    assert said[2] == f"history: starting on {on}"
    snapshots = tmp_path / "railgun-snapshots" / "history"
    assert said[3] == f"snapshots every 0.5 s in {snapshots}; goes on from snapshot 1"
    again = re.fullmatch(r"run it again, and it goes on from snapshot (\d+)", said[-1])
    assert again is not None, said
    assert written(out) == revenue(orders)
    if where == "cluster":
        return  # the rest has nothing to do with where it runs

    more = ordered_on(DAYS + 20, DAYS + 40)
    deliver(tmp_path, "tuesday.jsonl", more)
    orders += more
    shell.start("run", str(EXAMPLE), *running)
    shell.until("it has gone on", lambda: len(written(out)) >= len(orders))
    assert f"running on 2 workers, from snapshot {again[1]}\n" in shell.interrupt()
    assert written(out) == revenue(orders)
    assert not [file for file in out.rglob(".*/*") if file.is_file()], "nothing is left over"


# ---------------------------------------------------------------- streams

FLOW = """
from railgun import Files, Flow, Streams

def add(total, order):
    total += order["cents"]
    return total, [order["customer"], total]

flow = Flow("streams")
orders = flow.source(Streams("orders", data={data!r}), name="orders")
totals = orders.key_by(lambda order: order["customer"], name="by customer")
totals.stateful_map(add, initial=int, name="total").sink(Files("totals"), name="out")
"""


class Live:
    """A flow that reads a stream: its history by the command, in this process; then live on plain processes."""

    def __init__(self, place: Path, client: SyncClient) -> None:
        self.client = client
        self.file = place / "h_streams.py"
        self.out = place / "totals"
        self.snapshots = str(place / "railgun-snapshots")

    def backfill(self, *words: str) -> int:
        return main(["backfill", str(self.file), "--registry", "jobs", *words])

    def publish(self, orders: Sequence[Order]) -> None:
        self.client.publish_many("orders", [json.dumps(order) for order in orders])

    def lines(self) -> list[list[Any]]:
        files = self.out.glob("*.jsonl")
        return sorted(json.loads(line) for file in files for line in file.read_text().splitlines())

    def run(self, until: Callable[[], bool]) -> None:
        loaded: Loaded = load(str(self.file))
        options: dict[str, Any] = {"launcher": SubprocessLauncher(), "http": False}
        saved = railgun.Snapshots(self.snapshots, every=0.3)
        with railgun.run(
            loaded.flow, 2, snapshots=saved, by_value=loaded.modules, **options
        ) as job:
            eventually("all is there", until)
            assert job.stop(timeout=60)


def totals(orders: Sequence[Order]) -> list[list[Any]]:
    """What one pass over all orders gives."""
    sums: dict[str, int] = {}
    found = []
    for order in orders:
        sums[order["customer"]] = sums.get(order["customer"], 0) + order["cents"]
        found.append([order["customer"], sums[order["customer"]]])
    return sorted(found)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "node") as made:
        yield made


@pytest.fixture
def live(
    spark: SparkSession, node: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Live]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    with connect_sync(data=node.data, timeout=30.0) as client:
        client.ensure("orders")
        made = Live(tmp_path, client)
        made.file.write_text(FLOW.format(data=str(node.data)))
        yield made
    for name in [name for name in sys.modules if name.endswith("h_streams")]:
        del sys.modules[name]


@pytest.mark.parametrize("at", ["orders=700", "end"])
def test_a_stream_goes_on_at_the_offset_that_is_told(live: Live, history: Path, at: str) -> None:
    old, new = ordered_on(0, DAYS), ordered_on(DAYS, DAYS + 50)
    live.publish([{"customer": "ada", "cents": 1_000_000}] * 700)  # what is never to be read
    if at != "end":
        live.publish(new)
    words = ["--input", f"parquet:{history}", "--order-by", "day", "--at", at]
    assert live.backfill(*words, "--partitions", "2") == 0
    assert live.lines() == totals(old)
    if at == "end":
        live.publish(new)
    live.run(lambda: len(live.lines()) >= len(old + new))
    assert live.lines() == totals(old + new)


def test_a_stream_that_is_read_itself_goes_on_where_it_was(live: Live) -> None:
    """Messages come all the time; wherever the batch ends, the live flow takes over exactly there."""
    orders = ordered_on(0, DAYS)
    live.publish(orders)
    days = iter(range(DAYS, 100 * DAYS))
    over = threading.Event()

    def go_on_publishing() -> None:
        while not over.is_set():
            more = ordered_on(day := next(days), day + 1)
            live.publish(more)
            orders.extend(more)

    publisher = threading.Thread(target=go_on_publishing)
    publisher.start()
    try:
        assert live.backfill("--input", "source", "--partitions", "2") == 0
        history = len(live.lines())

        def enough() -> bool:
            if len(live.lines()) < history + 500:
                return False
            over.set()
            return not publisher.is_alive() and len(live.lines()) >= len(orders)

        live.run(enough)
    finally:
        over.set()
        publisher.join(30)
    assert history >= len(ordered_on(0, DAYS))
    assert live.lines() == totals(orders)


def test_an_offset_of_a_stream_that_is_not_read_is_refused(
    live: Live, spark: SparkSession, history: Path
) -> None:
    table = railgun.Input(spark.read.parquet(str(history)), positions={"order": 700})
    with pytest.raises(
        railgun.BatchError, match=r"name 'order', which it does not read: .* 'orders'$"
    ):
        railgun.run_batch(
            load(str(live.file)).flow,
            spark,
            {"orders": table},
            snapshot_to=live.snapshots,
            into_sinks="out",
        )
    assert live.lines() == []
