"""Clients of a stream that has no master: who waits, who is told, and that nothing overtakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

import pytest
from tests.broker.cluster.several import several
from tests.broker.running import DEADLINE, Raw, run, stored, take, until
from tests.broker.server.relaying import numbers, session_at

from railgun.broker.server.session import MAX_UNSTORED_BYTES
from railgun.client.errors import StreamsError
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


async def in_vain(call: Awaitable[object]) -> None:
    """Tried until the deadline: at that moment it waits here, and nothing was done, or it waits at the node."""
    with pytest.raises(StreamsError) as caught:
        await call
    assert caught.value.code in ("NO_MASTER", "DEADLINE")


def test_who_finds_no_master_waits_for_one_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            await nodes.ensure("other", "b")
            nodes.masters["orders"] = None
            client = await nodes.client("a")
            publishing = [
                asyncio.create_task(client.publish("orders", payload)) for payload in numbers(50)
            ]
            subscribing = asyncio.create_task(client.subscribe("orders", group="g"))
            asking = asyncio.create_task(client.describe("orders"))
            assert await client.publish("other", b"x") == 0  # other streams go on
            await until(lambda: len(session_at(nodes, "a")._relay._lines) == 1)  # type: ignore[union-attr]
            assert not any(task.done() for task in (*publishing, subscribing, asking))
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            assert await asyncio.gather(*publishing) == list(range(50))
            assert (await asking)["name"] == "orders"
            assert [m.payload for m in await take(await subscribing, 50)] == numbers(50)
            assert session_at(nodes, "a")._unstored == 0
            assert not session_at(nodes, "a")._relay._lines  # type: ignore[union-attr]

    run(main())


def test_who_waits_in_vain_is_told_that_nothing_was_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.1
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])
            asked = json.dumps({"name": "orders"})
            for told, blobs, channel in (
                (p.Publish(request=1, stream="orders"), [build([b"x"])], 0),
                (p.Subscribe(request=2, stream="orders", group="g", credit=1), [], 3),
                (p.Admin(request=3, call="describe", arguments=asked), [], 0),
                (p.Ack(request=4), [], 3),
                (p.Unsubscribe(request=5), [], 3),
            ):
                raw.connection.send(b"".join(encode(told, blobs, channel)))
            await until(lambda: any(isinstance(f.command, p.Unsubscribed) for f in raw.frames))
            assert raw.codes() == ["NO_MASTER"] * 3 + ["NO_SUBSCRIPTION"]
            failed = [f.command for f in raw.frames if isinstance(f.command, p.Failed)]
            assert [one.request for one in failed] == [1, 2, 3, 4]
            assert all("'orders' has no master" in one.text for one in failed[:3])
            assert all("nothing was stored" in one.text for one in failed[:3])
            assert session_at(nodes, "a")._unstored == 0
            raw.connection.close()
            client = await nodes.client("a", timeout=0.5)
            for call in (
                client.publish("orders", b"x"),
                client.subscribe("orders", group="g"),
                client.describe("orders"),
            ):
                await in_vain(call)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            client.timeout = DEADLINE
            assert await client.publish("orders", b"y") == 0

    run(main())


def test_a_session_that_was_passed_on_is_not_passed_on_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            nodes.believes["a", "orders"] = "b"  # which is wrong
            client = await nodes.client("a", timeout=0.5)
            await in_vain(client.publish("orders", b"x"))
            await in_vain(client.subscribe("orders", group="g"))
            await in_vain(client.describe("orders"))
            assert nodes.sessions("c") == 0
            client.timeout = DEADLINE
            later = asyncio.create_task(client.publish("orders", b"y"))
            del nodes.believes["a", "orders"]
            assert await later == 0
            assert nodes.sessions("c") == 1

    run(main())


def test_publishes_behind_one_that_was_refused_do_not_overtake_it(tmp_path: Path) -> None:
    """They were on their way when the master came back."""

    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.05
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> None:
                told = p.Publish(request=number, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([b"%d" % number])])))

            publish(1)
            publish(2)
            await until(lambda: raw.codes() == ["NO_MASTER"] * 2)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            publish(3)  # as if it had been sent before
            await until(lambda: raw.codes() == ["NO_MASTER"] * 3)
            (ping,) = [f.command for f in raw.frames if isinstance(f.command, p.Ping)]
            raw.connection.send(b"".join(encode(p.Pong(number=ping.number))))
            for number in (1, 2, 3):
                publish(number)
            client = await nodes.client("b")
            found: list[bytes] = []
            sub = await client.subscribe("orders")
            found = [m.payload for m in await take(sub, 3)]
            assert found == [b"1", b"2", b"3"]
            raw.connection.close()

    run(main())


def test_the_node_between_refuses_too_when_the_master_has_refused(tmp_path: Path) -> None:
    """It has answered the master's ping: from then on it is the one who keeps the order."""

    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.05
            await nodes.ensure("orders", "b")
            nodes.believes["b", "orders"] = None  # but a believes that b is the master
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> None:
                told = p.Publish(request=number, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([b"%d" % number])])))

            publish(1)
            await until(lambda: raw.codes() == ["NO_MASTER"])
            there = session_at(nodes, "b")
            await until(lambda: not there._relay._refusing)  # type: ignore[union-attr]
            del nodes.believes["b", "orders"]
            publish(2)
            await until(lambda: len(raw.frames) >= 3)
            assert raw.codes() == ["NO_MASTER"] * 2
            (ping,) = [f.command for f in raw.frames if isinstance(f.command, p.Ping)]
            raw.connection.send(b"".join(encode(p.Pong(number=ping.number))))
            publish(1)
            publish(2)
            client = await nodes.client("b")
            sub = await client.subscribe("orders")
            assert [m.payload for m in await take(sub, 2)] == [b"1", b"2"]
            raw.connection.close()

    run(main())


def test_so_it_is_when_the_other_node_refuses_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            nodes.wait = 0.05
            client = await nodes.client("a")
            await client.publish("orders", b"first")
            nodes.believes["b", "orders"] = None  # but a believes that b is the master
            tasks = [
                asyncio.create_task(client.publish_many("orders", [payload * 300_000]))
                for payload in (b"a", b"b", b"c", b"d", b"e", b"f")
            ]
            await until(lambda: bool(client._publisher._held))
            for _ in range(20):  # it comes and goes
                nodes.believes["b", "orders"] = None
                await asyncio.sleep(0.01)
                del nodes.believes["b", "orders"]
                nodes.changed.set()
                nodes.changed = asyncio.Event()
                await asyncio.sleep(0.005)
            await asyncio.gather(*tasks)
            found = await stored(client, "orders")
            assert [one[:1] for one in found[1:]] == [b"a", b"b", b"c", b"d", b"e", b"f"]

    run(main())


def test_what_waits_for_a_master_is_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])
            for number in range(60):
                told = p.Publish(request=number + 1, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([bytes(1_000_000)])])))
            await until(lambda: nodes.sessions("a") == 1 and session_at(nodes, "a").paused)
            waiting = session_at(nodes, "a")._unstored
            assert MAX_UNSTORED_BYTES <= waiting < MAX_UNSTORED_BYTES + (2 << 20)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")

            def answers() -> list[int]:
                """The signs of life that come while the session is not read are none."""
                return [f.command.request for f in raw.frames if not isinstance(f.command, p.Pong)]

            await until(lambda: len(answers()) == 60)
            assert answers() == list(range(1, 61))
            assert session_at(nodes, "a")._unstored == 0
            raw.connection.close()

    run(main())


def test_a_master_that_cannot_be_reached_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            nodes.wait = 0.3
            await nodes.ensure("orders", "b")
            await nodes.running["b"].stop()
            client = await nodes.client("a", timeout=0.8)
            await in_vain(client.publish("orders", b"x"))
            client.timeout = DEADLINE
            later = asyncio.create_task(client.publish("orders", b"y"))
            connection = client._connection
            await nodes.start("b")
            assert await later >= 0
            assert client._connection is connection  # nothing of it was done: there was no need

    run(main())


def test_a_node_that_does_not_let_others_in_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.2
            await nodes.ensure("orders", "b")
            there = nodes.running["b"].server
            assert there is not None
            there.secret = b"another one that nobody knows of"
            client = await nodes.client("a", timeout=0.5)
            await in_vain(client.publish("orders", b"x"))
            assert "refuses this node" in caplog.text

    run(main())


def test_a_node_that_stops_lets_those_who_wait_try_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            client = await nodes.client("ac")
            waiting = [asyncio.create_task(client.publish("orders", one)) for one in numbers(20)]
            await until(lambda: nodes.sessions("a") == 1 and session_at(nodes, "a")._unstored > 0)
            await nodes.running["a"].stop()
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            assert await asyncio.gather(*waiting) == list(range(20))  # though they have no IDs
            assert client.where[1] == nodes.running["c"].port

    run(main())
