"""A node that is asked to stop in order: a publisher without IDs sees no error, no loss and no duplicate."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.broker.clustered import clustered, retried, until
from tests.broker.outages import DEADLINE, Processes, processes
from tests.broker.running import run, stored

from railgun.broker.log.disk import _NodeFile
from railgun.client.client import Client
from railgun.client.subscription import Subscription

PUBLISHERS = 8


class Steady:
    """Publishes without IDs, one message after the other in each of several tasks, and counts every outcome."""

    def __init__(self, client: Client, name: str) -> None:
        self.done: list[bytes] = []
        self.errors: list[str] = []
        self._client, self._name = client, name
        self._over = False
        self._tasks = [asyncio.create_task(self._publish(n)) for n in range(PUBLISHERS)]

    async def _publish(self, task: int) -> None:
        n = 0
        while not self._over:
            payload = f"{self._name}-{task}-{n}".encode()
            n += 1
            try:
                await self._client.publish("orders", payload)
                self.done.append(payload)
            except Exception as error:
                self.errors.append(f"{payload!r}: {error}")
            await asyncio.sleep(0.002)

    async def more(self, count: int = 200) -> None:
        """Wait until so many more were published."""
        wanted = len(self.done) + count
        async with asyncio.timeout(DEADLINE):
            while len(self.done) < wanted and not self.errors:
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def check(nodes: Processes, publishers: list[Steady]) -> None:
    """Every publish has succeeded, and is stored once, with nothing else."""
    assert [error for one in publishers for error in one.errors] == []
    async with await nodes.client() as client:
        found = await retried(lambda: stored(client, "orders"))
    assert sorted(found) == sorted(payload for one in publishers for payload in one.done)


def test_a_single_node_that_restarts_is_not_noticed_by_publishers(tmp_path: Path) -> None:
    async def body(nodes: Processes) -> None:
        await nodes.ready("orders")
        client = await nodes.client()
        steady = Steady(client, "p")
        for _ in range(4):
            await steady.more()
            await asyncio.to_thread(nodes["n1"].terminate)
            await asyncio.to_thread(nodes["n1"].start)
        await steady.more()
        await steady.end()
        await client.close()
        await check(nodes, [steady])

    with processes(tmp_path, 1) as nodes:
        asyncio.run(body(nodes))


@pytest.mark.parametrize("consumes", [False, True], ids=["publishers", "with consumers"])
def test_a_rolling_restart_is_not_noticed_by_publishers(tmp_path: Path, consumes: bool) -> None:
    async def body(nodes: Processes) -> None:
        await nodes.ready("orders")
        clients = [await nodes.client(*names) for names in (("n1", "n2"), ("n2", "n3"), ("n3",))]
        consumers = []
        if consumes:
            for client in clients:
                sub = await client.subscribe("orders", group="workers")
                consumers.append(asyncio.create_task(consume(sub)))
        steady = [Steady(client, f"p{n}") for n, client in enumerate(clients)]
        for name in nodes.nodes:
            await asyncio.gather(*(one.more(100) for one in steady))
            await asyncio.to_thread(nodes[name].terminate)
            await asyncio.to_thread(nodes[name].start)
            await asyncio.sleep(1.0)
        await asyncio.gather(*(one.more(100) for one in steady))
        await asyncio.gather(*(one.end() for one in steady))
        for task in consumers:
            task.cancel()
        for client in clients:
            await client.close()
        await check(nodes, steady)

    with processes(tmp_path) as nodes:
        asyncio.run(body(nodes))


async def consume(sub: object) -> None:
    async for message in sub:  # type: ignore[attr-defined]
        message.ack()


async def watch(sub: Subscription, seen: dict[int, list[int]]) -> None:
    """Ack every message in the moment in which it is seen; note their delivery numbers."""
    async for message in sub:
        seen.setdefault(message.offset, []).append(message.delivery)
        message.ack()


def twice(seen: dict[int, list[int]]) -> dict[int, list[int]]:
    """What came more than once."""
    return {offset: numbers for offset, numbers in seen.items() if len(numbers) > 1}


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
def test_what_was_acked_does_not_come_again_from_the_next_master(
    tmp_path: Path, exclusive: bool
) -> None:
    """Not even if it was acked in the moment in which the old one handed over: the consumers have their say first."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            publisher, _ = await cluster.serving("orders")
            steady = Steady(publisher, "p")
            seen: dict[int, list[int]] = {}
            tasks = []
            for name in ("n1", "n2", "n3"):  # one of them by the master itself
                client = await cluster.client(name)
                sub = await client.subscribe("orders", group="workers", exclusive=exclusive)
                tasks.append(asyncio.create_task(watch(sub, seen)))
            for _ in range(4):
                await steady.more(100)
                master = cluster.master()
                to = next(name for name in ("n1", "n2", "n3") if name != master)
                await publisher.admin("transfer", node=to, region="global")
            await steady.more(100)
            await steady.end()
            assert steady.errors == []
            await until(lambda: len(seen) >= len(steady.done), lambda: f"{len(seen)} were seen")
            assert twice(seen) == {}
            for task in tasks:
                task.cancel()

    run(main(), deadline=4 * DEADLINE)


def test_a_master_with_a_slow_disk_answers_what_it_has_taken_before_another_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that takes a second is slow, and no fault: no publisher is left in doubt."""
    sync, slow = _NodeFile.sync, [False]

    def slowly(file: _NodeFile) -> None:
        if slow[0] and "/streams/" in file.place:  # the log of Raft is another matter
            time.sleep(1.0)
        sync(file)

    monkeypatch.setattr(_NodeFile, "sync", slowly)

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            publisher, _ = await cluster.serving("orders")
            for _ in range(2):
                steady = Steady(publisher, "p")
                await steady.more(50)
                slow[0] = True
                await asyncio.sleep(0.2)  # publishes wait for slow syncs now
                master = cluster.master()
                to = next(name for name in ("n1", "n2", "n3") if name != master)
                await publisher.admin("transfer", node=to, region="global")
                slow[0] = False
                await steady.more(50)
                await steady.end()
                assert steady.errors == []

    run(main(), deadline=4 * DEADLINE)


def test_a_master_that_ends_alone_writes_what_its_groups_have_acked(tmp_path: Path) -> None:
    """All nodes are stopped at once, so that nobody can take over."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, _ = await cluster.serving("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(100)])
            seen: dict[int, list[int]] = {}
            sub = await client.subscribe("orders", group="workers")
            task = asyncio.create_task(watch(sub, seen))
            await until(lambda: len(seen) == 100)
            await asyncio.gather(*(cluster.stop(name) for name in ("n1", "n2", "n3")))
            task.cancel()
            await asyncio.gather(*(cluster.start(name) for name in ("n1", "n2", "n3")))
            again = await cluster.client()
            task = asyncio.create_task(
                watch(await again.subscribe("orders", group="workers"), seen)
            )
            await again.publish("orders", b"100")
            await until(lambda: 100 in seen)
            assert twice(seen) == {}
            task.cancel()

    run(main(), deadline=4 * DEADLINE)
