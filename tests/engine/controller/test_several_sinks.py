"""A flow with several sinks: the manifest of a snapshot is the one decision, repeated until it is done everywhere.

Real processes: workers, the driver, the broker and the sink outside are killed between the commits of the sinks.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.engine.controller.tallies import Line, expected, store
from verification.ports import free_port

from railgun.client.errors import NoNodeError
from railgun.client.sync import SyncClient, connect_sync

DEADLINE = 180.0
ROOT = Path(__file__).resolve().parents[3]
BROKER = """
import asyncio, sys
from pathlib import Path
from railgun.broker.server.server import Server, ServerConfig
async def main():
    server = Server(ServerConfig(Path(sys.argv[1]), port=int(sys.argv[2])))
    await server.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""
SINK = """
import asyncio, sys
from railgun.sinkserver import SinkServer, TableTarget
target = TableTarget(sys.argv[3], "counted")
asyncio.run(SinkServer(target, sys.argv[1], port=int(sys.argv[2])).run())
"""
PAIRS = [("first", "second"), ("first", "files"), ("first", "table")]


class World:
    """The processes around a flow, each started again when it has died."""

    def __init__(self, work: Path, sinks: tuple[str, ...], **plan: Any) -> None:
        self.work = work
        self.plan: dict[str, Any] = {"sinks": sinks, "rate": 2_000.0, "count": 6_000, "every": 0.2}
        self.plan |= {"blows": []} | plan
        self.runs = 0
        self._commands = {"broker": [BROKER, str(work / "node"), str(free_port())]}
        if "table" in sinks:
            table = [SINK, str(work / "sink"), str(free_port()), f"sqlite:///{work}/out.db"]
            self._commands["sink"] = table
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, who: str) -> None:
        program, *arguments = self._commands[who]
        made = subprocess.Popen([sys.executable, "-c", program, *arguments])
        self._processes[who] = made
        (self.work / f"{who}.pid").write_text(str(made.pid))

    def write_plan(self) -> None:
        (self.work / "plan.json").write_text(json.dumps(self.plan))

    def run(self, pause_s: float = 0.0) -> int:
        """Run the flow once, and return its exit code; what dies meanwhile comes back after a pause."""
        self.write_plan()
        self.runs += 1
        log = self.work / f"run-{self.runs}.txt"
        line = [sys.executable, "-m", "tests.engine.controller.several_sinks", str(self.work)]
        with log.open("wb") as out:
            driver = subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        self._processes["driver"] = driver
        deadline = time.monotonic() + DEADLINE
        while driver.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            self.revive(pause_s)
            time.sleep(0.02)
        self.revive()
        return driver.returncode

    def revive(self, pause_s: float = 0.0) -> None:
        """Start what has died."""
        for who in self._commands:
            if self._processes[who].poll() is not None:
                time.sleep(pause_s)
                self.start(who)

    def client(self) -> SyncClient:
        """Connect to the broker as soon as it listens."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                return connect_sync(data=self.work / "node", timeout=30.0)
            except NoNodeError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def struck(self) -> int:
        return sum((self.work / f"blow-{n}").exists() for n in range(len(self.plan["blows"])))

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.work.glob("run-*.txt")))

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ------------------------------------------------------------ what came out

    def seen(self, sink: str) -> list[Line]:
        if sink == "files":
            return sorted(
                [one["key"], one["number"], one["seen"]] for one in _json_lines(self.work)
            )
        if sink == "table":
            with contextlib.closing(sqlite3.connect(self.work / "out.db")) as db:
                return sorted(map(list, db.execute("SELECT key, number, seen FROM counted")))
        with self.client() as client:
            end = client.admin("describe", name=sink)["end"]
            found: list[dict[str, int]] = []
            with client.subscribe(sink, prefetch=10_000) as sub:
                while len(found) < end:
                    found += [message.json() for message in sub.batch(5000, 30.0)]
            return sorted([one["key"], one["number"], one["seen"]] for one in found)

    def check(self) -> None:
        for sink in self.plan["sinks"]:
            found, whole = self.seen(sink), expected(self.plan["count"])
            lost = len({*map(tuple, whole)} - {*map(tuple, found)})
            twice = len(found) - len({*map(tuple, found)})
            assert found == whole, f"{sink}: {lost} lost, {twice} twice\n{self.logs()}"


def _json_lines(work: Path) -> Iterator[dict[str, int]]:
    for path in (work / "files").glob("part-*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


@contextlib.contextmanager
def world(work: Path, sinks: tuple[str, ...], **plan: Any) -> Iterator[World]:
    made = World(work, sinks, **plan)
    try:
        for who in made._commands:
            made.start(who)
        for name in ("node", "sink")[: len(made._commands)]:
            deadline = time.monotonic() + 60
            while not any((work / name).glob("*.json")):
                assert time.monotonic() < deadline, f"the {name} does not start\n{made.logs()}"
                time.sleep(0.02)
        yield made
    finally:
        made.close()


def blows_of(draw: Random, sinks: tuple[str, ...]) -> list[dict[str, Any]]:
    """Draw some blows. The first is sure to come, the second follows in the recovery from it, others may come."""
    others = ["broker", *(["sink"] if "table" in sinks else [])]
    made: list[dict[str, Any]] = []
    for number in range(5):
        recovers = number > 0 and made[-1]["victim"] in ("worker", "driver")
        victims = ["worker", "driver"] if number == 0 else ["worker", "driver", *others]
        made.append(
            {
                "step": draw.choice(sinks),
                "method": "recover" if recovers else "commit",
                "when": draw.choice(["before", "after"]),
                "skip": draw.randrange(3) if number > 1 and not recovers else 0,
                "victim": draw.choice(victims),
            }
        )
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sinks", PAIRS, ids="-".join)
def test_whatever_dies_between_the_commits_each_sink_has_everything_once(
    tmp_path: Path, sinks: tuple[str, ...], seed: int
) -> None:
    draw = Random(f"{sinks}/{seed}")
    with world(tmp_path, sinks, blows=blows_of(draw, sinks)) as made:
        while made.run(draw.choice([0.0, 1.0])):
            assert made.runs < 12, made.logs()
            snapshots = store(tmp_path).manifests()
            if snapshots and draw.random() < 0.5:  # --from that same snapshot
                made.plan["begin"] = next(iter(snapshots)).snapshot
            else:
                made.plan.pop("begin", None)
        assert made.struck() >= 2, made.logs()
        made.check()
        made.plan.pop("begin", None)
        assert made.run() == 0, "the end is repeated without effect"
        made.check()


@pytest.mark.parametrize("again", ["before", "after"])
@pytest.mark.parametrize("sinks", PAIRS, ids="-".join)
def test_the_decision_of_the_end_is_carried_out_though_the_driver_dies_twice(
    tmp_path: Path, sinks: tuple[str, ...], again: str
) -> None:
    """The first time between the sinks; the second time a new generation has begun, and was to repeat it."""
    blows = [
        {"step": sinks[1], "method": "commit", "when": "before", "skip": 0, "victim": "worker"},
        {"step": sinks[0], "method": "recover", "when": again, "skip": 0, "victim": "driver"},
    ]
    plan: dict[str, Any] = {"blows": blows, "count": 3_000, "every": 1_000.0, "rate": None}
    with world(tmp_path, sinks, **plan) as made:
        assert made.run() != 0
        assert made.struck() == 2, made.logs()
        assert made.run() == 0, made.logs()
        made.check()
