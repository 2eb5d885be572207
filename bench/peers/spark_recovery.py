"""Spark Structured Streaming: sums per key in the JVM, killed and started again from the checkpoint.

The kindest case there is for Spark: no Python, twelve long sums for the 100 bytes of a key, records made
within the JVM. The first rows bring in many keys each, so that all keys are there after the first
micro-batch. The program is killed with its JVM when a micro-batch has just been committed, and started
again at that moment; the first output is the first micro-batch that is through from then on, by the
times Spark itself tells of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from bench._outage import KEYS, NEW, RATE, Outage
from bench._workload import CORES

SUMS = 12  # of 8 bytes
ENOUGH = 15  # micro-batches before the kill: more than it takes for a snapshot of the state store
MAINTENANCE = "5s"  # how often state stores write snapshots; a minute by default
LOOK = 0.02  # seconds between looks at the progress
PATIENCE = 240.0
STATE = "org.apache.spark.sql.execution.streaming.state"
STORES = {
    "memory": f"{STATE}.HDFSBackedStateStoreProvider",
    "rocksdb": f"{STATE}.RocksDBStateStoreProvider",
}
UP, SPARK_UP = "Python is up", "Spark is up"


def session(scratch: str, store: str) -> SparkSession:
    """Spark on two cores."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    settings = {
        "spark.master": f"local[{CORES}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": scratch,
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.streaming.stateStore.providerClass": STORES[store],
        "spark.sql.streaming.stateStore.maintenanceInterval": MAINTENANCE,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    builder = SparkSession.builder.appName("recovery")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def totals(spark: SparkSession, keys: int, rows: int) -> DataFrame:
    """`rows` records in each micro-batch; those of the first bring in all keys."""
    made = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", CORES)
        .load()
    )
    each = -(-keys // rows)
    many = F.sequence(F.col("value") * each, F.col("value") * each + (each - 1))
    one = F.array(F.pmod(F.xxhash64("value"), F.lit(keys)))
    keyed = made.select(
        F.explode(F.when(F.col("value") < rows, many).otherwise(one)).alias("key"), "value"
    )
    sums = [F.sum(F.col("value") + number).alias(f"total{number}") for number in range(SUMS)]
    return keyed.groupBy("key").agg(*sums)


def tell(mark: str, at: float) -> None:
    """To the one who leads."""
    print(json.dumps([mark, at]), flush=True)


def work(chosen: argparse.Namespace) -> None:
    """Run the query for ever, and tell of each micro-batch when its output was there."""
    tell(UP, time.time())
    spark = session(chosen.directory, chosen.store)
    tell(SPARK_UP, time.time())
    rows = int(chosen.rate)
    query = (
        totals(spark, chosen.keys, rows)
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", f"{chosen.directory}/checkpoint")
        .start()
    )
    done = -1
    while True:
        problem = query.exception()
        if problem is not None:
            raise problem
        progress = query.lastProgress
        if progress is not None and progress.batchId > done and progress.numInputRows:
            done = progress.batchId
            took = progress.durationMs
            began = datetime.fromisoformat(progress.timestamp).timestamp()
            tell(NEW, began + (took["triggerExecution"] - took.get("commitOffsets", 0)) / 1000)
        time.sleep(LOOK)


def start(chosen: argparse.Namespace, directory: str) -> subprocess.Popen[str]:
    """Start the program, with its JVM in a group of its own."""
    command = [sys.executable, "-m", "bench.peers.spark_recovery", "--directory", directory]
    command += ["--keys", str(chosen.keys), "--rate", str(chosen.rate), "--store", chosen.store]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def lead(chosen: argparse.Namespace) -> Outage:
    """Start, kill, start again."""
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as directory:
        running = [start(chosen, directory)]
        try:
            read_until(running[0], ENOUGH)
            killed = time.time()
            os.killpg(running[0].pid, signal.SIGKILL)
            running.append(start(chosen, directory))
            marks = read_until(running[1], 1)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    version = importlib.metadata.version("pyspark")
    return Outage({m: at - killed for m, at in marks.items()}, f"Spark {version}, {chosen.store}")


def read_until(process: subprocess.Popen[str], outputs: int) -> dict[str, float]:
    """What a program tells, up to so many outputs."""
    assert process.stdout is not None
    marks: dict[str, float] = {}
    while outputs:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the program has ended before its time")
        if line.startswith("["):
            mark, at = json.loads(line)
            marks[mark] = at
            outputs -= mark == NEW
    return marks


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--store", choices=STORES, default="memory")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.directory is None:
        print(lead(chosen).as_line())
    else:
        work(chosen)


if __name__ == "__main__":
    main()
