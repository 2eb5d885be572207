"""Bytewax: two processes, a keyed stateful step, a source of batches made beforehand in each.

The defaults are the fastest found: of its three stateful operators the one that gets all values
of a key in a batch at once, and batches so long that longer ones gain nothing (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.operators import StatefulBatchLogic, StatefulLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.run import cli_main

from bench._workload import CORES, Rate, add, batches

BATCH = 20_000
OPERATOR = "stateful_batch"
WARM_UP = 2.0  # seconds
AFTER = 0.5  # seconds


class Records(StatelessSourcePartition[tuple[str, int]]):
    """The same batches again and again, until the sink of this process has counted for long enough.

    And a moment longer: the other process may still be counting.
    """

    def __init__(self, number: int, size: int, tally: list[float]) -> None:
        made = [list(zip(*batch, strict=True)) for batch in batches(number, size)]
        self._batches = cycle(made)
        self._tally, self._end = tally, math.inf

    def next_batch(self) -> Iterable[tuple[str, int]]:
        if self._tally:
            now = time.monotonic()
            self._end = min(self._end, now + AFTER)
            if now >= self._end:
                raise StopIteration
        return next(self._batches)


class Source(DynamicSource[tuple[str, int]]):
    def __init__(self, size: int, tally: list[float]) -> None:
        self._size, self._tally = size, tally

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Records:
        return Records(worker_index, self._size, self._tally)


class Drop(StatelessSinkPartition[tuple[str, int]]):
    """Counts what comes, and tells at the end how much came after the warm-up."""

    def __init__(self, tally: list[float], seconds: float) -> None:
        self._tally, self._seconds = tally, seconds
        self._begin = time.monotonic() + WARM_UP
        self._records = 0
        self._processor = -1.0

    def write_batch(self, items: list[tuple[str, int]]) -> None:
        now = time.monotonic()
        if now < self._begin or self._tally:
            return
        if self._processor < 0:
            self._begin, self._processor = now, time.process_time()
        self._records += len(items)
        if now >= self._begin + self._seconds:
            used = time.process_time() - self._processor
            self._tally += [self._records, now - self._begin, used]


class Sink(DynamicSink[tuple[str, int]]):
    def __init__(self, tally: list[float], seconds: float) -> None:
        self._tally, self._seconds = tally, seconds

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Drop:
        return Drop(self._tally, self._seconds)


class SumOfBatches(StatefulBatchLogic[int, int, int]):
    def __init__(self, total: int | None) -> None:
        self.total = total or 0

    def on_batch(self, batch: list[int]) -> tuple[list[int], bool]:
        out = []
        for value in batch:
            self.total = add(self.total, value)
            out.append(self.total)
        return out, False

    def snapshot(self) -> int:
        return self.total


class SumOfItems(StatefulLogic[int, int, int]):
    def __init__(self, total: int | None) -> None:
        self.total = total or 0

    def on_item(self, value: int) -> tuple[Iterable[int], bool]:
        self.total = add(self.total, value)
        return (self.total,), False

    def snapshot(self) -> int:
        return self.total


def sum_map(total: int | None, value: int) -> tuple[int, int]:
    total = add(total or 0, value)
    return total, total


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "stateful_batch": lambda records: op.stateful_batch("sum", records, SumOfBatches),
    "stateful": lambda records: op.stateful("sum", records, SumOfItems),
    "stateful_map": lambda records: op.stateful_map("sum", records, sum_map),
}


def work(chosen: argparse.Namespace) -> None:
    """One of the processes."""
    tally: list[float] = []
    flow = Dataflow("sums")
    records = op.input("records", flow, Source(chosen.batch, tally))
    summed = OPERATORS[chosen.operator](records)
    op.output("drop", summed, Sink(tally, chosen.seconds))
    cli_main(flow, process_id=chosen.process, addresses=chosen.addresses.split(";"))
    print(json.dumps(tally), flush=True)


def lead(chosen: argparse.Namespace) -> None:
    """Start the processes, and tell what they did together."""
    addresses = ";".join(f"127.0.0.1:{port}" for port in free_ports(CORES))
    command = [sys.executable, "-m", "bench.peers.bytewax_sum", "--addresses", addresses]
    command += ["--seconds", str(chosen.seconds), "--batch", str(chosen.batch)]
    command += ["--operator", chosen.operator]
    started = [
        subprocess.Popen([*command, "--process", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(CORES)
    ]
    tallies = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    rate = Rate(
        sum(records / seconds for records, seconds, _ in tallies),
        sum(used for _, _, used in tallies) * 1e9 / sum(records for records, _, _ in tallies),
        f"Bytewax {importlib.metadata.version('bytewax')}, {chosen.operator}",
    )
    print(rate.as_line())


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on just now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--operator", choices=OPERATORS, default=OPERATOR)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.process is None:
        lead(chosen)
    else:
        work(chosen)


if __name__ == "__main__":
    main()
