"""A reader without a group may nack: its messages come again, acks mean nothing, and `flush` does not complain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, node, refused, run, take

from railgun.client.message import Message

SAID: list[tuple[Callable[[Message], None], list[str]]] = [
    (lambda m: m.ack(), ["1", "2"]),
    (lambda m: m.nack(), ["1", "2", "0"]),
    (lambda m: m.nack(delay=0.3), ["1", "2", "0"]),
    (lambda m: m.nack(delay=0.3, block=True), ["1", "2", "0"]),
]


@pytest.mark.parametrize("prefetch", [1, 1000])
@pytest.mark.parametrize("said", range(len(SAID)))
def test_what_a_reader_says_counts_and_nothing_of_it_is_stale(
    tmp_path: Path, said: int, prefetch: int
) -> None:
    say, expected = SAID[said]

    async def body() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news")
            await client.publish_many("news", ["0", "1", "2"])
            async with await client.subscribe("news", prefetch=prefetch) as sub:
                [first] = await take(sub, 1)
                say(first)
                found = await take(sub, len(expected))
                assert sorted(m.text for m in found) == sorted(expected)
                assert [m.text for m in found if m.delivery == 1] == ["1", "2"]
                assert sub.position == 3
                await sub.flush()

    run(body())


def test_of_a_batch_a_reader_nacks_what_it_likes(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news")
            await client.publish_many("news", ["0", "1", "2"])
            async with await client.subscribe("news", prefetch=3) as sub:
                batch = await sub.batch(3, DEADLINE)
                assert len(batch) == 3
                batch[1].nack()
                batch[0].ack()
                [again] = await take(sub, 1)
                assert (again.text, again.delivery) == ("1", 2)
                await sub.flush()
                batch[0].nack()  # it was done when the next one was asked for
                await refused("ACK_STALE", sub.flush())
                await sub.flush()

    run(body())


def test_a_delay_of_a_reader_that_is_lost_with_the_connection_is_told(tmp_path: Path) -> None:
    async def body() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news")
            await client.publish_many("news", ["0", "1", "2"])
            async with await client.subscribe("news") as sub:
                [first] = await take(sub, 1)
                first.nack(delay=60)
                await sub.flush()
                assert client._connection is not None
                client._connection.transport.abort()
                assert [m.text for m in await take(sub, 2)] == ["1", "2"]
                await refused("CONNECTION_LOST", sub.flush())
                await sub.flush()

    run(body())
