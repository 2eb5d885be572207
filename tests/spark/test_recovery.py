"""Flows on Spark go on from their snapshots: output is exactly once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.spark.workers import eventually, is_alive
from verification.chaos import Storm, calm, flow, lines

from railgun import run
from railgun.job import Job, Snapshots
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark


def pids(job: Job) -> list[int]:
    return [worker["pid"] for worker in job.status()["workers"] if worker["pid"]]


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.events() if event.kind == kind]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_the_flow_goes_on_from_the_snapshot(
    spark: SparkSession, tmp_path: Path
) -> None:
    storm = Storm(str(tmp_path), seconds=7, rate=1_000)
    wanted = calm(storm)
    snapshots = Snapshots(storm.snapshots, every=0.5)
    made = flow(storm.out, storm.count, storm.rate)
    with run(made, 2, spark=spark, snapshots=snapshots, http=False) as job:
        eventually("two snapshots are committed", lambda: len(told(job, "snapshot")) >= 2)
        (victim, other) = processes = pids(job)
        os.kill(victim, signal.SIGKILL)
        eventually("it says so", lambda: told(job, "restarting"))
        eventually("it runs again", lambda: len(told(job, "running")) == 2)
        [why] = told(job, "restarting")
        assert "the flow goes back to snapshot" in why
        assert told(job, "running")[1].endswith(f"from snapshot {why.rpartition(' ')[2]}")
        assert victim not in pids(job)
        assert other in pids(job), "the one that is well stays"
        processes += pids(job)
        assert job.wait(120)
    assert lines(storm.out) == wanted
    eventually("no process is left", lambda: not any(map(is_alive, processes)))
