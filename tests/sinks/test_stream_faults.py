"""A flow that writes into a stream of three nodes while workers and nodes fail: the stream gets each result once.

What fails when is drawn from a seed: workers are killed, or frozen when a snapshot has just been saved (so in the
middle of commits) for longer than the stream remembers IDs; its master is killed or frozen; it is purged. A reader of
its own follows the stream, and nothing is purged that it has not read: what it has must be what must be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.broker.outages import Processes, processes
from tests.engine.controller import flows, tallies
from tests.engine.controller.tallies import expected, kill, saved, tally

from railgun import Flow, Generate, StreamSink
from railgun.client.errors import StreamsError
from railgun.client.sync import SyncClient
from railgun.engine.controller.controller import Settings
from railgun.engine.controller.storekeeper import Storekeeper
from railgun.job import Job

STREAM = "counted"
ID_WINDOW_S = 0.2
HANG_AFTER_S = 3.0
SHORT_S, LONG_S = 1.0, 5.0
"""How long a worker is frozen: longer than IDs are remembered, and longer than the flow waits for it."""
STRIKES = (
    "kill worker",
    "freeze worker",
    "give worker up",
    "kill master",
    "freeze master",
    "purge",
)


def tallied(nodes: Processes, count: int) -> Flow:
    """Numbered records, counted by key, into a stream."""
    flow = Flow("tallying")
    records = flow.source(Generate(tallies.record, rate=2_000, count=count), name="records")
    counted = records.key_by(lambda item: item[0], name="keys").stateful_map(
        tally, initial=int, name="tally"
    )
    where = {"node": ",".join(nodes.where()), "secret": nodes.secret}
    counted.sink(StreamSink(STREAM, **where), name="out")  # type: ignore[arg-type]
    return flow


class Follower:
    """Reads a stream as it grows."""

    def __init__(self, client: SyncClient) -> None:
        self.lines: list[list[int]] = []
        self.offsets: list[int] = []
        self.error: BaseException | None = None
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            with self._client.subscribe(STREAM, prefetch=5000) as sub:
                while not self._over.is_set():
                    with contextlib.suppress(TimeoutError):
                        for message in sub.batch(1000, 0.2):
                            self.lines.append(message.json())
                            self.offsets.append(message.offset)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


class Storm:
    """Does to a flow and its nodes what a seed says."""

    def __init__(self, nodes: Processes, client: SyncClient, follower: Follower, seed: int) -> None:
        self._nodes, self._client, self._follower = nodes, client, follower
        self._chance = Random(seed)
        self._victim = 0  # to be frozen when the next snapshot is saved
        self._frozen = threading.Event()

    def saved(self) -> None:
        """Freeze the victim: a snapshot is saved, and workers are told to commit in this moment."""
        victim, self._victim = self._victim, 0
        if victim:
            threading.Timer(self._chance.uniform(0.0, 0.02), self._stop, [victim]).start()

    def _stop(self, victim: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
        self._frozen.set()

    def strike(self, job: Job, what: str) -> None:
        """Let one thing fail, and wait until it is over."""
        time.sleep(self._chance.uniform(0.0, 0.6))
        match what:
            case "kill worker":
                with contextlib.suppress(IndexError, ProcessLookupError):
                    kill(job, self._chance.randrange(2))
            case "freeze worker":
                self._freeze(job, SHORT_S)
            case "give worker up":
                self._freeze(job, LONG_S)
            case "kill master":
                name = asyncio.run(self._nodes.master())
                self._nodes[name].kill()
                time.sleep(self._chance.uniform(0.0, 2.0))
                self._nodes[name].start()
            case "freeze master":
                name = asyncio.run(self._nodes.master())
                self._nodes[name].signal(signal.SIGSTOP)
                time.sleep(self._chance.uniform(1.0, 4.0))
                self._nodes[name].signal(signal.SIGCONT)
            case "purge" if self._follower.offsets:
                with contextlib.suppress(StreamsError):  # in doubt, or there is no master now
                    self._client.admin("purge", name=STREAM, before=self._follower.offsets[-1] + 1)

    def _freeze(self, job: Job, seconds: float) -> None:
        found = flows.pids(job)
        if not found:
            return
        victim = self._chance.choice(found)
        self._frozen.clear()
        self._victim = victim
        if self._frozen.wait(flows.DEADLINE / 4):
            time.sleep(seconds)
        self._victim = 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


@contextlib.contextmanager
def stormy(tmp_path: Path, seed: int, count: int) -> Iterator[tuple[Job, Storm, Follower]]:
    """A flow of so many records into a stream of three nodes."""
    with processes(tmp_path / "nodes") as nodes, pytest.MonkeyPatch.context() as patch:
        asyncio.run(nodes.ready(STREAM, id_box=ID_WINDOW_S))
        with nodes.sync_client() as client, Follower(client) as follower:
            storm = Storm(nodes, client, follower, seed)
            options: dict[str, Any] = {
                "snapshots": saved(tmp_path),
                "by_value": [sys.modules[__name__], tallies, flows],
                "settings": Settings(hang_after=HANG_AFTER_S, restarts=1000),
            }
            written = Storekeeper.written

            def is_saved(*told: Any) -> Any:
                storm.saved()
                return written(*told)

            patch.setattr(Storekeeper, "written", is_saved)
            with flows.started(tallied(nodes, count), 2, **options) as job:
                yield job, storm, follower


def lives_through(tmp_path: Path, seed: int, count: int, strikes: list[str]) -> None:
    with stormy(tmp_path, seed, count) as (job, storm, follower):
        for strike in strikes:
            storm.strike(job, strike)
        assert job.wait(4 * flows.DEADLINE), job.events()
        flows.eventually(lambda: follower.error or len(follower.lines) >= count, "all comes out")
        time.sleep(0.3)  # what came twice would come now
        assert follower.error is None
        assert sorted(follower.lines) == expected(count)
        assert follower.offsets == list(range(count))


def test_a_flow_writes_once_though_a_worker_is_frozen_in_a_commit(tmp_path: Path) -> None:
    lives_through(tmp_path, 1, 4_000, ["freeze worker", "purge", "kill worker"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_flow_writes_once_whatever_fails(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    lives_through(
        tmp_path,
        seed,
        60_000,
        [*chance.sample(STRIKES, len(STRIKES)), *chance.choices(STRIKES, k=6)],
    )
