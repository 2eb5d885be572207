"""A client whose event loop was busy, so that its connection was lost meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import DEADLINE, Proxy, node, run, stored, until

import railgun.broker.server.session as session_module
import railgun.client.client as client_module
from railgun.client.client import connect
from railgun.client.sync import SyncClient, connect_sync
from railgun.testing.node import served

SILENCE_S = 3.0


def block_until_given_up(other: SyncClient) -> None:
    """Block this thread until the node has given up the connection that reads the stream `orders`."""
    time.sleep(client_module.STALL_S + 0.5)
    end = time.monotonic() + 10 * DEADLINE
    while other.admin("describe", name="orders")["readers"]:
        assert time.monotonic() < end, "the node keeps a connection that is silent"
        time.sleep(0.05)


@pytest.mark.parametrize("messages", [0, 2000])
def test_what_a_busy_program_asks_for_is_sent_by_its_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    """With messages the socket has bytes to read before its end is seen."""
    monkeypatch.setattr(session_module, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(client_module, "SILENCE_S", SILENCE_S)

    async def main() -> None:
        with served(tmp_path) as node, connect_sync(data=tmp_path, timeout=DEADLINE) as other:
            client = await connect(f"127.0.0.1:{node.port}", data=tmp_path, timeout=2 * DEADLINE)
            async with client:
                await client.ensure("orders")
                await client.ensure("ask", kind="ephemeral")
                sub = await client.subscribe("orders", prefetch=messages + 1)
                if messages:
                    other.publish_many("orders", [bytes(1000)] * messages)
                block_until_given_up(other)
                offset, many, ensured, described, *_ = await asyncio.gather(
                    client.publish("orders", b"one"),
                    client.publish_many("orders", [b"two", b"three"]),
                    client.ensure("orders"),
                    client.describe("orders"),
                    client.subscribe("orders", group="g"),
                )
                assert (offset, many) == (messages, [messages + 1, messages + 2])
                assert ensured["result"] == "UNCHANGED"
                assert described["name"] == "orders"
                assert other.admin("describe", name="orders")["end"] == messages + 3, "each once"
                for n in range(messages + 3):
                    assert (await sub.next(DEADLINE)).offset == n

    asyncio.run(main())


def test_a_busy_program_whose_connection_lives_goes_on_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        with served(tmp_path) as node:
            client = await connect(f"127.0.0.1:{node.port}", data=tmp_path, timeout=2 * DEADLINE)
            async with client:
                await client.ensure("orders")
                connection = client._connection
                for n in range(2):
                    time.sleep(client_module.STALL_S + 0.1)
                    assert await client.publish("orders", b"x") == n
                assert client._connection is connection

    asyncio.run(main())


def test_what_is_asked_for_while_a_connection_closes_is_sent_by_the_next_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            for n in range(5):
                assert client._connection is not None
                client._connection.transport.abort()  # which is noticed in a later turn
                told = await asyncio.gather(
                    client.publish("orders", b"%d" % n),
                    client.describe("orders"),
                    client.admin("purge", name="orders", before=0),
                )
                assert told[0] == n
            assert await stored(client, "orders") == [b"%d" % n for n in range(5)]

    run(main())


def test_what_was_not_written_when_the_connection_ended_is_sent_by_the_next_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            for name in ("a", "b", "c"):
                await client.ensure(name)
            for n in range(20):
                assert client._connection is not None
                outbox, transport = client._outbox, client._connection.transport
                assert outbox is not None
                outbox._scheduled = (
                    True  # as if a frame had just been sent: others wait for the next turn
                )
                tasks = [asyncio.create_task(client.publish(name, b"x")) for name in "abc"]
                tasks += [asyncio.create_task(client.admin("purge", name="a", before=0))]
                await until(lambda: outbox.frames - outbox.written >= 4)  # noqa: B023
                transport.abort()
                outbox.flush()
                told = await asyncio.gather(*tasks)
                assert told[:3] == [n, n, n]

    run(main())


@pytest.mark.parametrize("call", ["describe", "ensure", "list"])
def test_calls_that_do_no_harm_twice_are_sent_again(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            proxy.muted, proxy.swallowed = True, 0
            arguments: dict[str, Any] = {} if call == "list" else {"name": "orders"}
            asked = asyncio.create_task(client.admin(call, **arguments))
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            assert await asked

    run(main())
