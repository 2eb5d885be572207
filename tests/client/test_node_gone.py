"""Consumers whose node ends, or serves them no more: what they had fetched ahead has not failed, and becomes no letter.

Who receives everything shows it: a message that had become a dead letter would not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.broker.clustered import clustered, retried
from tests.broker.running import die, node, process, run, take

from railgun.client.client import Client, connect
from railgun.client.message import Message
from railgun.client.subscription import Subscription

COUNT = 40
PATIENCE = 240.0
RULES = [{"dead_deliveries": 1}, {"dead_distance": 0}, {"dead_age": 0.001}, {"dead_deliveries": 2}]


async def subscribed(client: Client, exclusive: bool = False) -> Subscription:
    """Return a subscription that fetches all messages ahead."""
    return await client.subscribe("orders", group="g", exclusive=exclusive, prefetch=COUNT)


async def filled(client: Client, rule: dict[str, float]) -> None:
    """Make the stream, with its messages."""
    await client.ensure("orders", **rule)  # type: ignore[arg-type]
    await client.publish_many("orders", [b"%d" % n for n in range(COUNT)])


async def worked_through(
    sub: Subscription, upset: Callable[[], Awaitable[object]], times: int = 3
) -> list[int]:
    """Ack one message, upset the nodes, and so on; then ack all there are. Return the offsets that came."""
    came: list[int] = []

    async def next_one() -> Message:
        while True:
            try:
                return await sub.next(1.0)
            except TimeoutError:
                assert await letters(sub.client) == []

    for _ in range(times):
        message = await next_one()
        message.ack()
        await retried(sub.flush)
        came.append(message.offset)
        await upset()
    while len(set(came)) < COUNT:
        message = await next_one()
        message.ack()
        came.append(message.offset)
    await retried(sub.flush)
    return came


async def has_letters(client: Client) -> bool:
    """Return whether there are dead letters."""
    return "orders.dlq" in {one["name"] for one in await client.streams()}


async def all_die(client: Client) -> None:
    """Wait until all messages are dead letters, each because its consumer had gone."""
    while not await has_letters(client):
        await asyncio.sleep(0.02)
    sub = await retried(lambda: client.subscribe("orders.dlq"))
    found = [await sub.next(PATIENCE) for _ in range(COUNT)]
    assert {m.headers["rule"] for m in found} == {"dead_deliveries"}
    assert all(m.headers["reason"].endswith("has gone") for m in found)


async def letters(client: Client) -> list[dict[str, str]]:
    """Return the headers of all dead letters there are."""
    if not await has_letters(client):
        return []
    end = (await client.describe("orders.dlq"))["end"]
    async with await client.subscribe("orders.dlq") as sub:
        return [message.headers for message in await take(sub, end)]


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_orderly_stop_makes_no_dead_letters(
    tmp_path: Path, rule: dict[str, float], exclusive: bool
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client(timeout=PATIENCE)
            await filled(client, rule)
            sub = await subscribed(client, exclusive)
            came = await worked_through(sub, running.again)
            assert sorted(set(came)) == list(range(COUNT))
            assert await letters(client) == []

    run(main(), PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_node_that_is_killed_makes_no_dead_letters(
    tmp_path: Path, rule: dict[str, float]
) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:

            async def again() -> None:
                await running.kill()
                await running.start()

            where = f"127.0.0.1:{running.port}"
            async with await connect(where, data=tmp_path, timeout=PATIENCE) as client:
                await filled(client, rule)
                came = await worked_through(await subscribed(client), again)
                assert sorted(set(came)) == list(range(COUNT))
                assert await letters(client) == []

    run(main(), PATIENCE)


def test_consumers_that_die_make_dead_letters_whatever_nodes_do_in_between(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            await filled(await running.client(), {"dead_deliveries": 2})
            for failures in range(2):
                for _ in range(2):
                    client = await running.client()
                    await take(await subscribed(client), 1)
                    await running.again()
                    await client.close()
                client = await running.client()
                message = (await take(await subscribed(client), 1))[0]
                assert message.delivery > 2 * failures, "ends of nodes count as deliveries"
                die(client)
            await all_die(await running.client())

    run(main(), PATIENCE)


def test_a_new_master_makes_no_dead_letters(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await filled(client, {"dead_deliveries": 1, "dead_distance": 0})

            async def transfer() -> None:
                master = cluster.master()
                other = next(name for name in cluster.servers if name != master)
                await retried(lambda: client.admin("transfer", region="global", node=other))
                await cluster.ready("orders")

            await cluster.ready("orders")
            came = await worked_through(await subscribed(client), transfer, times=4)
            assert sorted(set(came)) == list(range(COUNT))
            assert await letters(client) == []

    run(main(), PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("which", ["master", "between"])
def test_a_node_of_a_cluster_that_ends_makes_no_dead_letters(
    tmp_path: Path, how: str, which: str
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            first = await cluster.client()
            await filled(first, {"dead_deliveries": 1, "dead_distance": 0})
            master = await cluster.ready("orders")
            await cluster.in_step("orders")
            other = next(name for name in cluster.servers if name != master)
            ends = master if which == "master" else other
            names = [other, *(name for name in cluster.servers if name != other)]
            client = await cluster.client(*names)

            async def end() -> None:
                await (cluster.stop(ends) if how == "stopped" else cluster.kill(ends))

            came = await worked_through(await subscribed(client), end, times=1)
            assert sorted(set(came)) == list(range(COUNT))
            assert await letters(client) == []

    run(main(), PATIENCE)


def test_a_consumer_that_dies_at_another_node_than_the_master_makes_dead_letters(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await filled(client, {"dead_deliveries": 1})
            master = await cluster.ready("orders")
            other = next(name for name in cluster.servers if name != master)
            dying = await cluster.client(other)
            await take(await subscribed(dying), 1)
            die(dying)
            await all_die(client)

    run(main(), PATIENCE)
