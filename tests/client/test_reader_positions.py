"""Positions of readers without a group: a copy that lags never refuses them, and they are of one stream for ever."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.broker.cluster.several import several
from tests.broker.clustered import DEADLINE, Clustered, clustered
from tests.broker.running import refused, run, take
from tests.sinks.test_streams import offset, read_some

from railgun import ConnectorError, Streams
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.sync import SyncClient, connect_sync
from railgun.flows.errors import may_pass
from railgun.sources import streams
from railgun.testing.node import Served, served

# ---------------------------------------------------------------- a copy that lags


def test_a_reader_is_handed_to_the_master_by_a_copy_that_lags(tmp_path: Path) -> None:
    async def body() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "a")
            behind = nodes.running["b"].server
            assert behind is not None
            await behind.node.ensure("orders")  # a copy that has nothing yet
            nodes.copies["orders"] = {"b"}
            master = await nodes.client("a")
            await master.publish_many("orders", [b"%d" % n for n in range(8)])
            client = await nodes.client("b")
            async with await client.subscribe("orders", start=5) as sub:
                assert [m.payload for m in await take(sub, 3)] == [b"5", b"6", b"7"]
            await refused("OFFSET_OUT_OF_RANGE", client.subscribe("orders", start=9))

    asyncio.run(body())


def test_a_reader_that_reconnects_to_a_copy_that_lags_goes_on_where_it_was(tmp_path: Path) -> None:
    async def body() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "a")
            behind = nodes.running["b"].server
            assert behind is not None
            await behind.node.ensure("orders")
            master = await nodes.client("a")
            await master.publish_many("orders", [b"%d" % n for n in range(8)])
            nodes.told = []  # the client knows b alone
            client = await nodes.client("b")
            async with await client.subscribe("orders") as sub:  # b has none: a serves it
                await take(sub, 8)
                nodes.copies["orders"] = {"b"}
                assert client._connection is not None
                client._connection.transport.abort()
                await asyncio.sleep(0.1)
                await master.publish("orders", b"8")
                message = await sub.next(DEADLINE)
                assert (message.offset, message.payload) == (8, b"8")

    asyncio.run(body())


@asynccontextmanager
async def lagging(path: Path) -> AsyncIterator[tuple[Clustered, Client, str, Callable[[], None]]]:
    """Three nodes; what is pushed to one of them does not get there, until the function is called.

    With a client of the others, and the name of that one.
    """
    async with clustered(path) as nodes:
        _, master = await nodes.serving("orders")
        behind = next(name for name in nodes.servers if name != master)
        others = await nodes.client(*(name for name in nodes.servers if name != behind))
        await others.publish("orders", b"0")
        await nodes.in_step("orders")
        regions = nodes.member(behind).regions
        take_in, held = regions.received, list[tuple[Any, ...]]()
        regions.received = lambda *given: held.append(given)  # type: ignore[method-assign]

        def let_in() -> None:
            regions.received = take_in  # type: ignore[method-assign]
            for given in held:
                take_in(*given)

        await others.publish_many("orders", [b"%d" % n for n in range(1, 20)])
        yield nodes, others, behind, let_in


def test_a_reader_begins_at_the_end_of_the_stream_not_at_that_of_a_copy_that_lags(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with lagging(tmp_path) as (nodes, others, behind, _):
            client = await nodes.client(behind, timeout=DEADLINE)
            readers = [await client.subscribe("orders", start="end") for _ in range(2)]
            assert nodes.copy(behind, "orders").safe == 1
            assert [sub.offset for sub in readers] == [20, 20]
            assert [sub.why for sub in readers] == ["end", "end"]
            await others.publish("orders", b"new")
            for sub in readers:
                assert (await sub.next(DEADLINE)).payload == b"new"
            from_start = await client.subscribe("orders")  # which the copy serves, as far as it is
            assert (await from_start.next(DEADLINE)).payload == b"0"

    run(body(), deadline=4 * DEADLINE)


def test_a_reader_that_begins_at_the_end_waits_for_its_copy_to_get_there(tmp_path: Path) -> None:
    async def body() -> None:
        async with lagging(tmp_path) as (nodes, others, behind, let_in):
            client = await nodes.client(behind, timeout=DEADLINE)
            begins = asyncio.create_task(client.subscribe("orders", start="end"))
            await asyncio.sleep(0.1)
            let_in()
            sub = await begins
            assert sub.offset == 20
            await others.publish("orders", b"new")
            assert (await sub.next(DEADLINE)).payload == b"new"
            await nodes.in_step("orders")
            another = await client.subscribe("orders", start="end")
            assert another.offset == 21
            sessions = nodes.servers[behind].sessions.values()
            here = [one for one in sessions if another.channel in one.subscriptions]
            assert here, "the master serves it, though the copy is as far"

    run(body(), deadline=4 * DEADLINE)


def test_what_was_acknowledged_can_be_read_at_every_node_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with clustered(tmp_path) as nodes:
            client, _ = await nodes.serving("orders")
            readers = [await nodes.client(name) for name in nodes.servers]
            for n in range(40):
                assert await client.publish("orders", b"%d" % n) == n
                for reader in readers:
                    await (await reader.subscribe("orders", start=n + 1)).close()

    asyncio.run(body())


# ---------------------------------------------------------------- the identity of a stream


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "node") as made:
        yield made


@pytest.fixture
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data, timeout=DEADLINE) as made:
        yield made


def filled(client: SyncClient, count: int) -> str:
    """Make a stream with so many messages; its identity."""
    client.ensure("orders")
    client.publish_many("orders", [str(n) for n in range(count)])
    return str(client.admin("describe", name="orders")["identity"])


def made_anew(client: SyncClient, count: int) -> str:
    client.admin("delete", name="orders")
    return filled(client, count)


def test_a_stream_that_is_made_anew_has_another_identity(node: Served, client: SyncClient) -> None:
    first = filled(client, 3)
    client.ensure("orders", mode="overwrite", max_age=3600.0)
    node.stop()
    node.start()
    assert client.admin("describe", name="orders")["identity"] == first
    with client.subscribe("orders", start=2, identity=first) as sub:
        assert sub.inner.identity == first
    second = made_anew(client, 5)
    assert second
    assert second != first


def test_a_position_in_a_stream_that_was_deleted_is_refused(client: SyncClient) -> None:
    first = filled(client, 3)
    made_anew(client, 9)

    async def body() -> None:
        under = client.client
        await refused("STREAM_REPLACED", under.subscribe("orders", start=3, identity=first))
        await (await under.subscribe("orders", start=3)).close()  # without one it is taken as it is

    client.wait(body())


def test_a_subscription_that_comes_back_to_another_stream_ends(node: Served) -> None:
    with connect_sync(f"127.0.0.1:{node.port}", data=node.data, timeout=DEADLINE) as client:
        filled(client, 3)
        reader = client.subscribe("orders")
        for _ in range(3):
            reader.next(DEADLINE)
        node.stop()
        shutil.rmtree(node.data / "streams" / "orders")
        with (
            served(node.data) as other,  # at another port: the reader does not see it yet
            connect_sync(data=other.data, timeout=DEADLINE) as maker,
        ):
            filled(maker, 9)
        node.start()
        with pytest.raises(StreamsError, match="STREAM_REPLACED"):
            reader.next(DEADLINE)


def test_a_flow_does_not_read_a_stream_made_anew_from_the_middle(
    node: Served, client: SyncClient
) -> None:
    filled(client, 4)
    reader = Streams("orders", data=node.data).open("orders", None)
    assert read_some(reader) == [0, 1, 2, 3]
    position = json.loads(json.dumps(reader.position))
    reader.close()
    made_anew(client, 9)
    reader = Streams("orders", data=node.data).open("orders", position)
    with pytest.raises(ConnectorError, match="STREAM_REPLACED") as told:
        read_some(reader)
    assert not may_pass(told.value)
    reader.close()
    reader = Streams("orders", missing="skip", data=node.data).open("orders", position)
    assert read_some(reader) == list(range(9)), "it starts over"
    assert offset(reader) == 9
    reader.close()
    reader = Streams("orders", data=node.data).open("orders", 4)
    assert read_some(reader) == [4, 5, 6, 7, 8], "a position of an older snapshot has no identity"
    reader.close()


def test_a_flow_never_takes_what_lies_before_its_position(
    node: Served, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(client, 4)
    reader = Streams("orders", data=node.data).open("orders", 2)
    assert isinstance(reader, streams._Reader)
    taken: Any = None
    while taken is None:
        taken = reader._feed.take()
    reader._offset = 4
    with pytest.raises(ConnectorError, match="nothing is read twice"):
        reader._take(*taken)
    assert offset(reader) == 4
    reader.close()


def test_all_nodes_of_a_cluster_know_the_same_identity(tmp_path: Path) -> None:
    async def body() -> None:
        async with clustered(tmp_path) as nodes:
            client, _ = await nodes.serving("orders")
            found = []
            for _ in range(2):
                await client.publish("orders", b"x")
                seen = set()
                for name in nodes.servers:
                    reader = await nodes.client(name)
                    async with await reader.subscribe("orders", start=1) as sub:
                        seen.add(sub.identity)
                assert len(seen) == 1
                found.append(seen.pop())
                assert all(found)
                await client.delete("orders")
                await client.ensure("orders")
                await nodes.ready("orders")
                await nodes.in_step("orders")
            assert found[0] != found[1]
            reader = await nodes.client()
            await client.publish_many("orders", [b"y"] * 5)
            await refused("STREAM_REPLACED", reader.subscribe("orders", start=1, identity=found[0]))

    asyncio.run(body())
