"""Readers and groups of a stream whose log is damaged in the middle: an error, and never a silent end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from tests.broker.running import DEADLINE, Running, node, refused, run, take, until

from railgun.cli.errors import REFUSED
from railgun.cli.main import main as railgun
from railgun.client.client import Client
from railgun.client.errors import StreamDamagedError
from railgun.client.subscription import Subscription
from railgun.client.sync import connect_sync
from railgun.flows.errors import ConnectorError
from railgun.sources.streams import Streams
from railgun.spark.streams.errors import StreamSourceError
from railgun.spark.streams.options import Options
from railgun.spark.streams.reader import BatchReader, MicroBatchReader
from railgun.testing.node import Served, served

WHERE = "'orders' cannot be read from offset 3 on"
READERS: list[dict[str, Any]] = [
    {},
    {"prefetch": 1},
    {"group": "g"},
    {"group": "g", "prefetch": 1},
    {"group": "g", "exclusive": True},
    {"consumer": "audit", "prefetch": 2},
]


def damage(data: Path) -> None:
    """Flip a bit of message 3 in the log of the stream `orders`."""
    [file] = (data / "streams" / "orders" / "log").glob("*.log")
    found = bytearray(file.read_bytes())
    found[found.index(b"message 3")] ^= 1
    file.write_bytes(found)


async def filled(client: Client) -> None:
    await client.ensure("orders", dead_deliveries=2)
    for n in range(6):
        await client.publish("orders", b"message %d" % n)


@asynccontextmanager
async def damaged(data: Path, when: str) -> AsyncIterator[tuple[Running, Client]]:
    """A node with a stream of six messages, of which 3 is damaged: before it was started, or behind its back."""
    async with node(data) as running:
        await filled(await running.client())
        if when == "before the start":
            await running.stop()
            damage(data)
            await running.start()
            assert any("damaged" in told for told in running.told)
        else:
            damage(data)
        yield running, await running.client()


async def ends_at_the_damage(sub: Subscription) -> None:
    for _ in range(2):
        with pytest.raises(StreamDamagedError, match=WHERE) as told:
            await sub.next(DEADLINE)
        assert told.value.code == "LOG_DAMAGED"


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("how", READERS, ids=str)
def test_who_reads_a_damaged_stream_gets_all_before_the_damage_and_an_error(
    tmp_path: Path, when: str, how: dict[str, Any]
) -> None:
    async def main() -> None:
        async with damaged(tmp_path, when) as (_, client):
            for other in "ab":  # the second one knows no less than the first
                who = {key: value + other for key, value in how.items() if isinstance(value, str)}
                sub = await client.subscribe("orders", **how | who)
                for n in range(3):
                    message = await sub.next(DEADLINE)
                    assert (message.offset, message.delivery) == (n, 1)
                    if who:
                        message.ack()
                await ends_at_the_damage(sub)
                await sub.close()

    run(main())


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_group_gets_on_with_what_lies_before_the_damage(
    tmp_path: Path, when: str, exclusive: bool
) -> None:
    async def main() -> None:
        async with damaged(tmp_path, when) as (_, client):
            sub = await client.subscribe("orders", group="g", exclusive=exclusive)
            found = await take(sub, 3)
            await ends_at_the_damage(sub)
            found[2].nack(reason="once more")
            await until(lambda: bool(sub._messages))
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (2, 2)
            await ends_at_the_damage(sub)
            await sub.close()  # what was not acked goes to others, and does not count
            other = await client.subscribe("orders", group="g", exclusive=exclusive)
            told = [(m.offset, m.delivery) for m in await take(other, 3)]
            assert told == [(0, 1), (1, 1), (2, 2)]
            await ends_at_the_damage(other)

    run(main())


@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_acks_of_what_lies_before_the_damage_count(tmp_path: Path, when: str) -> None:
    async def main() -> None:
        async with damaged(tmp_path, when) as (_, client):
            sub = await client.subscribe("orders", group="g")
            for message in await take(sub, 3):
                message.ack()
            await ends_at_the_damage(sub)
            await sub.flush()
            told = await client.group("orders", "g")
            assert (told["floor"], told["code"]) == (3, "DAMAGED")
            assert "offset 3" in told["text"]
            described = await client.describe("orders")
            assert described["damaged_at"] == 3
            assert "'orders'" in described["trouble"]
            await sub.close()
            again = await client.subscribe("orders", group="g")
            await ends_at_the_damage(again)
            await refused("LOG_DAMAGED", client.subscribe("orders", start=5))
            await refused("LOG_DAMAGED", client.publish("orders", b"x"))

    run(main())


def test_who_waits_at_the_end_hears_of_damage_that_another_one_finds(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await filled(client)
            waiting = await client.subscribe("orders", group="g")
            await take(waiting, 6)
            damage(tmp_path)
            await ends_at_the_damage_after(await client.subscribe("orders"), 3)
            await ends_at_the_damage(waiting)

    run(main())


async def ends_at_the_damage_after(sub: Subscription, count: int) -> None:
    assert [message.offset for message in await take(sub, count)] == list(range(count))
    await ends_at_the_damage(sub)


@pytest.fixture
def damaged_node(tmp_path: Path) -> Iterator[Served]:
    """A node in a thread, with a stream whose message 3 is damaged."""
    with served(tmp_path), connect_sync(data=tmp_path, timeout=DEADLINE) as client:
        client.ensure("orders")
        for n in range(6):
            client.publish("orders", b"message %d" % n)
    damage(tmp_path)
    with served(tmp_path) as node:
        yield node


def test_a_flow_does_not_take_the_damage_for_the_end_of_a_stream(damaged_node: Served) -> None:
    for follow in (True, False):
        source = Streams("orders", format="text", follow=follow, data=damaged_node.data)
        with pytest.raises(ConnectorError, match=WHERE):
            source.as_of_now()
    with pytest.raises(ConnectorError, match=WHERE):
        source.open("orders", None)
    reader = Streams("orders", format="text", data=damaged_node.data).open("orders", None)
    found: list[str] = []

    def read_on() -> None:
        for _ in range(10_000):
            found.extend(reader.read(10, 0) or ())
            time.sleep(0.01)

    try:
        with pytest.raises(ConnectorError, match=WHERE):
            read_on()
    finally:
        reader.close()
    assert found == ["message 0", "message 1", "message 2"]


def test_spark_does_not_take_the_damage_for_the_end_of_a_stream(damaged_node: Served) -> None:
    given = {"stream": "orders", "data": str(damaged_node.data)}
    batch = BatchReader(Options.of(given), StructType())
    with pytest.raises(StreamSourceError, match=WHERE):
        batch.partitions()
    assert BatchReader(Options.of(given | {"end": "3"}), StructType()).partitions()
    query = MicroBatchReader(Options.of(given), StructType())
    try:
        start = query.initialOffset()
        end = query.latestOffset(start, ReadAllAvailable())
        assert query._at(end) == 3
        with pytest.raises(StreamSourceError, match=WHERE):
            query.latestOffset(end, ReadAllAvailable())
    finally:
        query.stop()


def test_sub_says_that_the_stream_is_damaged(
    damaged_node: Served, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for more in ([], ["--group", "g"], ["--follow"], ["--group", "h", "--no-follow"]):
        capfdbinary.readouterr()
        assert railgun(["sub", "orders", "--data", str(tmp_path), *more]) == REFUSED
        out, err = capfdbinary.readouterr()
        assert out == b"message 0\nmessage 1\nmessage 2\n"
        assert WHERE in err.decode()
    assert railgun(["sub", "orders", "--data", str(tmp_path), "--count", "3"]) == 0
