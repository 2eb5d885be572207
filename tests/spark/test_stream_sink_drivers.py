"""Drivers of queries that write streams: killed anywhere, or awake after their successor."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.spark.stream_writing import PATIENCE, left_behind, needs_spark, stored, texts

from railgun.broker.errors import NoMasterError
from railgun.broker.streams.producing import Producing
from railgun.client.sync import SyncClient
from railgun.testing.node import Served

DRIVER = """
import sys
from railgun.spark.session import session

data, source, target, checkpoint = sys.argv[1:]
spark = session("another driver", "local[2]", quick=True)
rows = spark.readStream.format("railgun").option("data", data)
rows = rows.options(stream=source, partitions=2, maxMessages=100).load()
rows = rows.selectExpr("concat(CAST(payload AS STRING), repeat('.', 9000)) AS payload")
writer = rows.writeStream.format("railgun").option("data", data)
writer = writer.options(stream=target, checkpointLocation=checkpoint)
writer.trigger(availableNow=True).start().awaitTermination()
"""


class Driver:
    """Spark in a process of its own, which copies a stream as far as there is something."""

    def __init__(self, node: Served, source: str, target: str, checkpoint: Path) -> None:
        command = [sys.executable, "-c", DRIVER, str(node.data), source, target, str(checkpoint)]
        with checkpoint.with_name(f"{uuid.uuid4().hex}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )
        self.log = Path(log.name)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self) -> int:
        return self.process.wait(2 * PATIENCE)


@pytest.fixture
def at_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does something just before the node makes the n-th commit, or just after it, before its answer."""

    def make(n: int, when: str, act: Callable[[], None]) -> None:
        monkeypatch.undo()
        original, seen = Producing._commit, [0]

        async def commit(self: Producing, *given: Any) -> Any:
            seen[0] += 1
            if seen[0] == n and when == "before":
                act()
                raise NoMasterError("killed")
            made = await original(self, *given)
            if seen[0] == n:
                act()
            return made

        monkeypatch.setattr(Producing, "_commit", commit)

    return make


@pytest.mark.slow
@needs_spark
def test_a_driver_that_is_killed_anywhere_goes_on_from_its_checkpoint(
    client: SyncClient, node: Served, at_commits: Any, tmp_path: Path
) -> None:
    chance = random.Random(5)
    client.ensure("killed-in")
    client.publish_many("killed-in", texts(0, 2_000))
    client.ensure("killed-out")
    checkpoint = tmp_path / "checkpoint"

    def driver() -> Driver:
        return Driver(node, "killed-in", "killed-out", checkpoint)

    for n, when in ((2, "before"), (1, "after"), (2, "after")):
        found = driver()
        at_commits(n, when, partial(found.signal, signal.SIGKILL))
        found.wait()
        there = stored(client, "killed-out")
        assert there == texts(0, len(there), 9_000)
    at_commits(0, "", lambda: None)
    for _ in range(2):
        before = len(stored(client, "killed-out"))
        found = driver()
        while found.process.poll() is None and len(stored(client, "killed-out")) == before:
            time.sleep(0.02)
        time.sleep(chance.random() * 0.3)
        found.signal(signal.SIGKILL)
        found.wait()
    found = driver()
    assert found.wait() == 0, found.log.read_text()
    assert stored(client, "killed-out") == texts(0, 2_000, 9_000)
    assert left_behind(client, "killed-out") == {}


@pytest.mark.slow
@needs_spark
def test_a_driver_that_wakes_up_after_its_successor_is_fenced(
    client: SyncClient, node: Served, at_commits: Any, tmp_path: Path
) -> None:
    client.ensure("frozen-in")
    client.publish_many("frozen-in", texts(0, 300))
    client.ensure("frozen-out")
    checkpoint = tmp_path / "checkpoint"
    zombie = Driver(node, "frozen-in", "frozen-out", checkpoint)
    frozen = threading.Event()

    def freeze() -> None:
        zombie.signal(signal.SIGSTOP)
        frozen.set()

    at_commits(2, "before", freeze)
    try:
        assert frozen.wait(PATIENCE)
        successor = Driver(node, "frozen-in", "frozen-out", checkpoint)
        assert successor.wait() == 0, successor.log.read_text()
    finally:
        zombie.signal(signal.SIGCONT)
    zombie.wait()
    assert stored(client, "frozen-out") == texts(0, 300, 9_000)
    assert left_behind(client, "frozen-out") == {}
