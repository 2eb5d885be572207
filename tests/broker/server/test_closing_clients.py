"""Clients that are closed without a node or give up a request, and messages too large to be sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Proxy, node, run, stored, take, until
from tests.broker.server.hard_times import Gate, code_of, sessions

from railgun.client.errors import DeadlineError
from railgun.transport.commands import LARGEST


def test_a_client_closed_without_a_node_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            sub = await client.subscribe("orders", group="g")
            await running.stop()
            await until(lambda: client._connection is None)
            waiting = [
                asyncio.create_task(code_of(client.publish("orders", b"x", id="a"))),
                asyncio.create_task(code_of(client.publish("orders", b"x"))),
                asyncio.create_task(code_of(client.publish_many("orders", [b"x"] * 3, id="b"))),
                asyncio.create_task(code_of(client.describe("orders"))),
                asyncio.create_task(code_of(client.subscribe("orders"))),
                asyncio.create_task(code_of(sub.flush())),
            ]
            await asyncio.sleep(0.01)
            await client.close()
            async with asyncio.timeout(DEADLINE / 2):
                codes = await asyncio.gather(*waiting)
            assert set(codes) <= {"CLOSED", "CONNECTION_LOST"}
            with pytest.raises(StopAsyncIteration):
                await sub.next(DEADLINE)
            async with asyncio.timeout(DEADLINE / 2):
                assert await code_of(client.publish("orders", b"x")) == "CLOSED"
                assert await code_of(client.describe("orders")) == "CLOSED"

    run(main())


def test_a_client_closed_while_it_connects_leaves_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            proxy.muted = True  # the hello of the node does not come
            proxy.cut()
            await until(lambda: proxy.swallowed > 0)
            await client.close()
            proxy.muted = False
            async with asyncio.timeout(DEADLINE / 2):
                await until(lambda: not sessions(running))
                await until(lambda: not proxy.connections)

    run(main())


def test_who_gave_up_subscribing_takes_no_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            with gate:  # the group cannot be written
                with pytest.raises(DeadlineError):
                    await client.subscribe("orders", group="g", timeout=0.2)
                task = asyncio.create_task(client.subscribe("orders", group="g"))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
            sub = await client.subscribe("orders", group="g", prefetch=100)
            assert sorted(m.offset for m in await take(sub, 10)) == list(range(10))
            assert (await client.group("orders", "g"))["members"] == 1

    run(main())


def test_a_subscription_closed_while_it_is_made_again_takes_no_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, other = await running.client(proxy.port), await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            for _ in range(5):
                subs = [await client.subscribe("orders", group="g", prefetch=2) for _ in range(5)]
                proxy.cut()
                await until(lambda: client._connection is None)
                while client._connection is None:
                    await asyncio.sleep(0)
                for sub in subs:
                    await sub.close()
            await client.describe("orders")
            assert (await other.group("orders", "g"))["members"] == 0
            sub = await other.subscribe("orders", group="g")
            assert sorted(m.offset for m in await take(sub, 10)) == list(range(10))

    run(main())


def test_small_messages_with_long_ids_are_not_too_large_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            ids = [f"{n:0>200}" for n in range(50_000)]
            assert await client.publish_many("orders", [b"x"] * 50_000, ids=ids) == [*range(50_000)]
            small = asyncio.create_task(client.publish("orders", b"small"))
            large = asyncio.create_task(code_of(client.publish("orders", bytes(LARGEST))))
            assert await small == 50_000
            assert await large == "TOO_LARGE"
            sizes = (200_000, LARGEST - 100_000)  # which fit, but not together
            big = await asyncio.gather(*(client.publish("orders", bytes(n)) for n in sizes))
            assert big == [50_001, 50_002]

    run(main())


def test_a_message_that_cannot_be_sent_does_no_harm_to_those_beside_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            calls = [
                client.publish("orders", b"a", id="a"),
                client.publish("orders", b"x", id="x" * 256),
                client.publish_many("orders", [b"b", b"c"]),
                client.publish_many("orders", [b"x", b"x", b"x"], ids=["one", "two"]),
                client.publish("orders", ["no bytes"]),  # type: ignore[arg-type]
                client.publish("orders", 5),  # type: ignore[arg-type]
                client.publish("orders", b"d", headers={"x": "y"}),
            ]
            told = await asyncio.gather(*calls, return_exceptions=True)
            wrong = {n for n, one in enumerate(told) if isinstance(one, Exception)}
            assert wrong == {1, 3, 4, 5}
            assert (told[0], told[2], told[6]) == (0, [1, 2], 3)
            assert await client.publish("orders", b"e") == 4
            assert await stored(client, "orders") == [b"a", b"b", b"c", b"d", b"e"]
            sub = await client.subscribe("orders")
            found = await take(sub, 5)
            assert [m.id for m in found] == [b"a", None, None, None, None]
            assert found[3].headers == {"x": "y"}

    run(main())
