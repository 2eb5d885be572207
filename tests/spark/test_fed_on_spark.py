"""Programs feed a flow whose workers are Spark tasks: grown, shrunk and killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.ingest.fed_flow import check, connector, fed_job, items, until

from railgun import Job
from railgun.ingest import Connector
from railgun.job import NotRescaledError
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark
COUNT = 600


def do(job: Job, deed: str) -> None:
    what, _, much = deed.partition(" ")
    if what == "crash":
        pids = [one["pid"] for one in job.status()["workers"]]
        for pid in pids[: int(much)]:
            os.kill(pid, signal.SIGKILL)
        return
    size = job.status()["size"] + int(much) * (1 if what == "grow" else -1)
    # A crash just before may interrupt it: then the flow starts again from its snapshot.
    with contextlib.suppress(NotRescaledError):
        job.scale(size, wait=True, timeout=120)


@pytest.mark.parametrize(
    ("workers", "deeds"),
    [(1, ["grow 4", "shrink 4", "crash 1"]), (3, ["crash 2", "shrink 1", "grow 1"])],
)
def test_what_is_fed_comes_out_whatever_is_done_to_the_flow(
    spark: SparkSession, tmp_path: Path, workers: int, deeds: list[str]
) -> None:
    streams = {f"s{number}": COUNT for number in range(4)}

    async def main(job: Job) -> None:
        done = [asyncio.Event() for _ in deeds]

        async def send(c: Connector, name: str) -> None:
            part = COUNT // (len(deeds) + 1)
            for number, payload in items(name, COUNT):
                if number and number % part == 0 and number // part <= len(deeds):
                    await c.flush()
                    await done[number // part - 1].wait()
                await c.send(name, number, payload)
            await c.end(name)

        async with connector(tmp_path) as one, connector(tmp_path) as two:
            names = list(streams)
            work = asyncio.gather(
                *(send(one, name) for name in names[:2]), *(send(two, name) for name in names[2:])
            )
            for deed, event in zip(deeds, done, strict=True):
                await until(lambda: one.acked("s0") is not None, "something is acknowledged")
                await asyncio.to_thread(do, job, deed)
                event.set()
            await asyncio.wait_for(work, 120)

    with fed_job(tmp_path, workers, spark=spark) as job:
        asyncio.run(main(job))
        job.stop()
    check(tmp_path / "out", streams)
