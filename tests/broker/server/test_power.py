"""A whole node on a disk that forgets what was not synced, with clients that live through a thousand power cuts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import DEADLINE, Running, run, take, until
from verification.log_disk import LogDisk

import railgun.broker.log.log as log_module
import railgun.client.client as client_module
from railgun.broker.log.committer import Committer
from railgun.broker.server.server import Server
from railgun.broker.server.session import Session
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.testing.disks import Crash
from railgun.transport.connection import Connection
from railgun.transport.hello import HelloError

ROUNDS = 50
SEEDS = range(20)


class Fragile(Running):
    """A node whose power is cut."""

    def __init__(self, data: Path, seed: int) -> None:
        super().__init__(data)
        self.disk: LogDisk = LogDisk(seed)
        self.cuts = 0
        self.down = asyncio.Event()

    def cut_at(self, step: int) -> None:
        """Let the power be gone before the step of the disk of this number, counted from now on."""
        steps, loop, server = itertools.count(), asyncio.get_running_loop(), self.server
        assert server is not None

        def hook(_name: str, _path: str) -> None:
            if next(steps) >= step:
                server.node.gone = True  # type: ignore[attr-defined]
                self.disk.crash()
                loop.call_soon_threadsafe(self.cut, server)
                raise Crash

        self.disk.hook = hook

    def cut(self, server: Server | None = None) -> None:
        """The power is gone now; or was, before this server was started."""
        server = server or self.server
        assert server is not None
        if server is self.server:
            server.node.gone = True  # type: ignore[attr-defined]
            self.disk.crash()
            server._listener.abort()
            self.down.set()

    async def again(self) -> None:
        """The power is back."""
        assert self.server is not None
        server, self.server, self.cuts = self.server, None, self.cuts + 1
        for task in [server._watch, *server.node._tasks]:
            assert task is not None
            task.cancel()
        for timer in (server.node._retention, server.node._beating):
            assert timer is not None
            timer.cancel()
        for stream in server.node._persistent():
            for driver in stream.groups.values():
                driver.ended = True
        await server._listener.close()
        committer = server.node.committer
        committer._stop_threads()
        for thread in committer._threads:
            await asyncio.to_thread(thread.join)
        self.disk.lose_power()
        self.down.clear()
        await self.start()


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is gone says nothing, and does nothing."""
    send, work, open_ = Session.send, Committer._work, Server._opened

    def say(session: Session, *told: Any) -> None:
        if not getattr(session.node, "gone", False):
            send(session, *told)

    def commit(committer: Committer) -> None:
        with contextlib.suppress(Crash):
            work(committer)

    def opened(server: Server, connection: Connection) -> None:
        if getattr(server.node, "gone", False):
            raise HelloError("nobody is there")
        open_(server, connection)

    monkeypatch.setattr(Server, "_opened", opened)
    monkeypatch.setattr(Session, "send", say)
    monkeypatch.setattr(Committer, "_work", commit)


@contextlib.asynccontextmanager
async def fragile(data: Path, seed: int) -> AsyncIterator[Fragile]:
    """Such a node within this."""
    running = Fragile(data, seed)
    await running.start()
    try:
        yield running
    finally:
        if running.down.is_set():
            await running.again()
        await running.end()


class History:
    """What clients were told."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, bytes] = {}
        self.uncertain: set[bytes] = set()
        self.numbers = itertools.count()

    def told(self, offset: int, payload: bytes) -> None:
        """A publish was answered."""
        known = self.acknowledged.setdefault(offset, payload)
        assert known == payload, f"two messages at {offset}: {known!r}, {payload!r}"

    async def publish(self, client: Client, kind: str) -> None:
        """Publish in one of the ways there are."""
        some = [b"%s %d" % (kind.encode(), next(self.numbers)) for _ in range(3)]
        if kind == "id":
            self.told(await client.publish("orders", some[0], id=some[0]), some[0])
        elif kind == "ids":
            offsets = await client.publish_many("orders", some, ids=some)
            for offset, payload in zip(offsets, some, strict=True):
                self.told(offset, payload)
        elif kind == "together":
            offsets = await client.publish_many("orders", some, id=some[0])
            assert offsets == list(range(offsets[0], offsets[0] + 3))
            for offset, payload in zip(offsets, some, strict=True):
                self.told(offset, payload)
        else:
            try:
                self.told(await client.publish("orders", some[0]), some[0])
            except StreamsError as error:
                if error.code != "CONNECTION_LOST":
                    raise
                self.uncertain.add(some[0])

    def check(self, stored: list[bytes]) -> None:
        """Nothing acknowledged is lost, nothing is there twice, and nothing nobody has sent."""
        for offset, payload in self.acknowledged.items():
            assert stored[offset] == payload
        assert max(Counter(stored).values(), default=1) == 1
        assert set(stored) - set(self.acknowledged.values()) <= self.uncertain


class Worker:
    """A consumer that remembers what the node has on disk of its acks."""

    def __init__(self) -> None:
        self.safe: set[int] = set()
        self.seen: set[int] = set()

    async def work(self, client: Client, chance: random.Random) -> None:
        """Consume until the end of days."""
        async with await client.subscribe("orders", group="billing", prefetch=20) as sub:
            while True:
                messages = await sub.batch(chance.randint(1, 8))
                offsets = {message.offset for message in messages}
                again = [one for one in messages if one.offset in self.safe]
                assert not again, "what was acked for good came again"
                self.seen |= offsets
                sub.ack_all(messages)
                with contextlib.suppress(StreamsError):
                    await sub.flush()
                    self.safe |= offsets


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_by_a_thousand_power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_PAUSES_S", (0.001, 0.005))
    small = functools.partial(log_module.LogConfig, segment_bytes=4_000, index_bytes=500)
    monkeypatch.setattr(log_module, "LogConfig", small)
    chance = random.Random(seed)

    async def main() -> None:
        async with fragile(tmp_path, seed) as running:
            client, history, worker = await running.client(), History(), Worker()
            await client.ensure("orders", id_box=24 * 3600.0)
            consuming = asyncio.create_task(worker.work(await running.client(), chance))
            for _ in range(ROUNDS):
                kinds = chance.choices(["id", "ids", "together", "plain"], k=chance.randint(1, 10))
                publishing = [asyncio.create_task(history.publish(client, kind)) for kind in kinds]
                if chance.random() < 0.8:
                    running.cut_at(chance.randint(0, 8))
                else:
                    for _ in range(chance.randint(0, 30)):
                        await asyncio.sleep(0)
                    running.cut()
                while not running.down.is_set() and not all(one.done() for one in publishing):
                    await asyncio.wait([*publishing], timeout=0.001)
                if not running.down.is_set():
                    running.cut()
                if chance.random() < 0.2:
                    running.ahead = chance.uniform(-3600.0, 3600.0)
                await running.again()
                await asyncio.gather(*publishing)
                if consuming.done():
                    await consuming
            assert running.cuts == ROUNDS
            end = (await client.describe("orders"))["end"]
            async with await client.subscribe("orders") as sub:
                history.check([message.payload for message in await take(sub, end)])
            await until(lambda: worker.seen == set(range(end)))
            assert not consuming.done()
            consuming.cancel()

    run(main(), 12 * DEADLINE)
