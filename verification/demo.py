"""`./run demo`: a flow on local Spark, under a steady load, rescaled live from 2 workers to 4 and to 1; then streams.

Every record is numbered, and an oracle that knows nothing of the engine checks afterwards that each record arrived once
and in order. The run is drawn as a timeline. Then a second flow reads orders from a stream of a messaging node and
writes totals to another stream, exactly once, though one of its workers is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from railgun.cli import job_view as view
from railgun.client.sync import SyncClient, connect_sync
from railgun.errors import RailgunError
from railgun.flows.flow import Flow
from railgun.job import Snapshots, run
from railgun.sinks.streams import StreamSink
from railgun.sources.streams import Streams
from railgun.spark.session import session
from railgun.testing.node import served
from verification.numbered_load import Load, numbered_flow
from verification.report import Report, options
from verification.rescale_picture import draw
from verification.rescale_run import RescaleRun, Result

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS, RATE, PAUSE = 100_000, 10_000, 4.0
QUICK_KEYS, QUICK_RATE, QUICK_PAUSE = 20_000, 5_000, 1.5
ORDERS, QUICK_ORDERS, CUSTOMERS = 60_000, 10_000, 500
SIZES = (4, 1)
WAIT_TIMEOUT_S = 60.0  # seconds to wait for a message or a status
PICTURE = Path("railgun-demo.svg")
TITLE = "A flow on Spark is rescaled live: 2 → 4 → 1 workers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code says whether nothing was lost, doubled or reordered."""
    description = (__doc__ or "").partition("\n")[0].partition(": ")[2]
    chosen, console = options("demo", description, argv)
    began = time.monotonic()
    keys, rate, pause = (
        (QUICK_KEYS, QUICK_RATE, QUICK_PAUSE) if chosen.quick else (KEYS, RATE, PAUSE)
    )
    report = Report("demo")
    console.print("Starting Spark, local mode, in this process …", style="dim")
    spark = session("railgun demo", quick=True)
    try:
        with tempfile.TemporaryDirectory(prefix="railgun-demo-") as directory:
            result = rescale_live(spark, Load(keys, rate, directory), pause, console)
        orders = QUICK_ORDERS if chosen.quick else ORDERS
        with tempfile.TemporaryDirectory(prefix="railgun-demo-") as directory:
            streams = stream_to_stream(spark, Path(directory), orders, console)
    except RailgunError as error:
        console.print(f"[red]The demo failed:[/] {error}")
        report.check("ran", "no", goal="= yes", passed=False)
        return report.finish(chosen)
    finally:
        spark.stop()
    PICTURE.write_text(draw(result.story), "utf-8")
    judge(report, result)
    streams.check(report)
    tell(console, result, streams, keys, time.monotonic() - began)
    return report.finish(chosen)


def rescale_live(spark: SparkSession, load: Load, pause: float, console: Console) -> Result:
    """Start the flow, and rescale it while people watch."""
    flow = numbered_flow("demo", load)
    subtitle = (
        f"{load.keys:,} keys of about 100 bytes, {load.rate:,.0f} records/s, "
        "each worker a Python process in a Spark task"
    )
    with (
        Live(console=console, refresh_per_second=8, transient=True) as live,
        run(flow, workers=2, spark=spark, name="railgun-demo") as job,
    ):
        shown = _watcher(live, console)
        return RescaleRun(job, load, SIZES, TITLE, subtitle, pause, shown).run()


# ---------------------------------------------------------------- from stream to stream


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """The result of the flow from stream to stream."""

    orders: int
    totals: int
    wrong: int
    """Customers whose last total is not the sum of their orders."""
    restarts: int

    def check(self, report: Report) -> None:
        """Add the checks of the streams to a report."""
        good = self.totals == self.orders
        report.check("streams: totals of all orders", self.totals, "", f"= {self.orders:,}", good)
        report.check("streams: customers with a wrong sum", self.wrong, "", "= 0", not self.wrong)
        report.check(
            "streams: workers killed on the way", self.restarts, "", "= 1", self.restarts == 1
        )


def _spend(spent: int, order: dict[str, int]) -> tuple[int, dict[str, int]]:
    spent += order["amount"]
    return spent, {"customer": order["customer"], "spent": spent}


def stream_to_stream(
    spark: SparkSession, directory: Path, orders: int, console: Console
) -> StreamsResult:
    """Run a node and a flow between two of its streams, and kill a worker of the flow."""
    console.print("Starting a messaging node, and a flow from stream to stream …", style="dim")
    node = directory / "node"
    sums = dict.fromkeys(range(CUSTOMERS), 0)
    flow = Flow("totals")
    read = flow.source(Streams("orders", data=node), name="orders")
    keyed = read.key_by(lambda order: order["customer"], name="by customer")
    totals = keyed.stateful_map(_spend, initial=int, name="spent")
    totals.sink(StreamSink("totals", data=node), name="totals")

    def publish(client: SyncClient, first: int, end: int) -> None:
        orders_made = [{"customer": n % CUSTOMERS, "amount": n % 97} for n in range(first, end)]
        for order in orders_made:
            sums[order["customer"]] += order["amount"]
        client.publish_many(
            "orders", [json.dumps(order) for order in orders_made], id=f"from {first}"
        )

    saved = Snapshots(str(directory / "snapshots"), every=1.0)
    with served(node), connect_sync(data=node) as client:
        client.ensure("orders")
        client.ensure("totals")
        publish(client, 0, orders // 2)
        with run(flow, workers=2, spark=spark, name="railgun-demo-streams", snapshots=saved) as job:
            _until(lambda: _end(client) > 0, "the first totals")
            console.print("a worker is killed …", style="dim")
            os.kill(job.status()["workers"][0]["pid"], signal.SIGKILL)
            publish(client, orders // 2, orders)
            _until(lambda: _end(client) >= orders, "the last totals")
            restarts = sum(event.kind == "restarting" for event in job.events())
            job.stop(timeout=WAIT_TIMEOUT_S)
        last: dict[int, int] = {}
        count = _end(client)
        with client.subscribe("totals", prefetch=10_000) as subscription:
            for _ in range(count):
                total = subscription.next(WAIT_TIMEOUT_S).json()
                last[total["customer"]] = max(total["spent"], last.get(total["customer"], 0))
    wrong = sum(last.get(customer, 0) != spent for customer, spent in sums.items())
    return StreamsResult(orders, count, wrong, restarts)


def _end(client: SyncClient) -> int:
    return int(client.admin("describe", name="totals")["end"])


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RailgunError(f"{what} did not come within {WAIT_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


# ---------------------------------------------------------------- output


def _watcher(live: Live, console: Console) -> Callable[[str, dict[str, Any]], None]:
    """Return a function that draws the state of the job; without a terminal it prints a line for each phase."""
    lines: list[str] = []

    def show(what: str, status: dict[str, Any]) -> None:
        if console.is_terminal:
            live.update(Group(Text(f"Now: {what}", "bold"), view.job(status)))
        elif lines[-1:] != [what]:
            lines.append(what)
            console.print(f"{what} …", style="dim")

    return show


def judge(report: Report, result: Result) -> None:
    """Add the checks of the rescales to a report."""
    result.check(report)
    report.check("steady, p50", round(result.steady.p50, 1), "ms")
    report.check("steady, longest", round(result.steady.longest, 1), "ms")
    for span in result.spans:
        name = f"{span.before} → {span.after}"
        report.check(f"{name}, keys moved", span.moved_keys, "keys", "> 0", span.moved_keys > 0)
        report.check(f"{name}, took", round(span.seconds, 2), "s")
        report.check(f"{name}, longest wait", round(span.moved.longest, 1), "ms")


def tell(
    console: Console, result: Result, streams: StreamsResult, keys: int, seconds: float
) -> None:
    """Print a summary of six lines, and what to try next."""
    verdict, spans = result.verdict, result.spans
    moved = "; ".join(
        f"{span.before} → {span.after}: {span.moved_keys:,} keys in {span.seconds:.1f} s"
        for span in spans
    )
    waits = ", ".join(f"{span.moved.longest:.0f} ms" for span in spans)
    good = "every one there once, in order" if verdict.good else "NOT as it should be"
    for line in (
        f"A keyed flow ran on local Spark: each worker a Python process in a Spark task, {keys:,} keys.",
        f"While {verdict.records:,} records went through, it was rescaled live. {moved}.",
        f"Nothing stopped: the longest any record of a moving key took was {waits}"
        f" (steady: {result.steady.longest:.0f} ms).",
        f"The oracle looked at all records: {good}"
        f" ({verdict.lost} lost, {verdict.doubled} doubled, {verdict.reordered} reordered).",
        f"Then {streams.orders:,} orders went from stream to stream through a flow of which a worker was killed: "
        f"{streams.totals:,} totals came out, {streams.wrong} sums are wrong.",
        f"The timeline is in {PICTURE}; all this took {seconds:.0f} s.",
    ):
        console.print(line)
    console.print(
        "\nNext: [bold]./run railgun run examples/wordcount.py[/], and in another terminal "
        "[bold]./run railgun scale wordcount 4 --watch[/]."
    )


if __name__ == "__main__":
    sys.exit(main())
