"""A real node over TCP, row by row: persistent, ephemeral and response streams, and those who mean it harm."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import (
    DEADLINE,
    Proxy,
    Raw,
    die,
    node,
    nothing,
    process,
    refused,
    run,
    stored,
    take,
    until,
)

import railgun.broker.server.session as session_module
import railgun.client.client as client_module
from railgun.broker.server.server import Server, ServerConfig
from railgun.broker.streams.node import InUseError
from railgun.client.client import Client, connect
from railgun.client.errors import DuplicateIdError, NoAnswerError, NoNodeError, StreamsError
from railgun.client.subscription import Subscription
from railgun.transport.commands import KINDS, encode
from railgun.transport.listen_rules import BadSecretError, OpenListenError
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build

# ---------------------------------------------------------------- PS-1: at least once


def test_ps1_after_a_stop_all_that_was_not_acked_comes_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="billing")
            for message in (await take(sub, 10))[:4]:
                message.ack()
            await sub.flush()
            die(client)
            await running.again()
            client = await running.client()
            sub = await client.subscribe("orders", group="billing")
            assert (sub.offset, sub.why) == (4, "position")
            again = await take(sub, 6)
            assert [m.payload for m in again] == [b"%d" % n for n in range(4, 10)]
            sub.ack_all(again)
            await sub.flush()
            await running.again()
            client = await running.client()
            sub = await client.subscribe("orders", group="billing")
            assert sub.offset == 10
            await nothing(sub)

    run(main())


def test_ps1_after_a_kill_everything_acknowledged_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            await client.ensure("orders")
            late = await client.subscribe("orders", group="late", start="end")
            assert late.offset == 0
            await client.publish_many("orders", [b"%d" % n for n in range(100)])
            sub = await client.subscribe("orders", group="billing")
            sub.ack_all((await take(sub, 100))[:30])
            await sub.flush()
            newest = await client.subscribe("orders", group="newest", start="end")
            assert newest.offset == 100
            await running.kill()
            die(client)
            await running.start()
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            assert await client.publish("orders", b"100") == 100
            for group, first in (("billing", 30), ("late", 0), ("newest", 100)):
                sub = await client.subscribe("orders", group=group, start="end")
                assert (sub.offset, sub.why) == (first, "position"), group
                found = await take(sub, 101 - first)
                assert [m.payload for m in found] == [b"%d" % n for n in range(first, 101)]
            await client.close()

    run(main())


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.01])
def test_ps1_a_stop_under_load_loses_nothing_that_was_answered(
    tmp_path: Path, pause: float
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            known: dict[int, bytes] = {}
            codes: set[str] = set()

            async def publish(payload: bytes) -> None:
                try:
                    known[await client.publish("orders", payload)] = payload
                except StreamsError as error:
                    codes.add(error.code)

            async def feed() -> list[asyncio.Task[None]]:
                tasks = []
                for n in range(600):
                    tasks.append(asyncio.create_task(publish(b"%d" % n)))
                    await asyncio.sleep(0)
                return tasks

            feeding = asyncio.create_task(feed())
            await asyncio.sleep(pause)
            await running.again()
            await asyncio.gather(*await feeding)
            assert codes <= {"CLOSED", "CONNECTION_LOST"}
            found = dict(enumerate(await stored(await running.client(), "orders")))
            assert known.items() <= found.items()

    run(main())


def test_who_does_not_read_fills_no_memory_and_gets_everything_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"x" * 20_000] * 600)
            raw = await Raw.dial(running)
            subscribe = p.Subscribe(request=1, stream="orders", group="g", credit=1000)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: bool(raw.frames))
            raw.connection.transport.pause_reading()
            await asyncio.sleep(0.2)
            assert running.server is not None
            unsent = [connection.unsent for connection in running.server.sessions]
            assert max(unsent) < 3 << 20
            raw.connection.transport.resume_reading()

            def got() -> int:
                every = [f.command for f in raw.frames if isinstance(f.command, p.Deliver)]
                return sum(one.count for command in every for one in command.ranges)

            await until(lambda: got() == 600)
            raw.connection.close()

    run(main())


# ---------------------------------------------------------------- PS-2, PS-9: IDs


def test_ps2_a_publish_whose_answer_is_lost_is_stored_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            watcher = await running.client()
            await client.ensure("orders", duplicates="ok")
            for n in range(3):
                proxy.muted, proxy.swallowed = True, 0
                publish = asyncio.create_task(client.publish("orders", b"%d" % n, id=f"id{n}"))
                await until(lambda: proxy.swallowed > 0)  # it is stored, and nobody knows
                proxy.muted = False
                proxy.cut()
                async with asyncio.timeout(DEADLINE):
                    assert await publish == n
            assert await stored(watcher, "orders") == [b"0", b"1", b"2"]

    run(main())


def test_ps2_without_an_id_the_caller_is_told_that_nobody_knows(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            proxy.muted = True
            publish = asyncio.create_task(client.publish("orders", b"x"))
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            await refused("CONNECTION_LOST", publish)
            await until(lambda: client._connection is not None)
            assert await client.publish("orders", b"y") == 1

    run(main())


def test_ps9_an_id_is_taken_once_and_also_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("easy", duplicates="ok")
            await client.publish("orders", b"before")
            assert await client.publish("orders", b"first", id="a") == 1
            assert await client.publish("easy", b"first", id="a") == 0
            for _ in range(2):
                error = await refused("DUPLICATE_ID", client.publish("orders", b"2nd", id="a"))
                assert isinstance(error, DuplicateIdError)
                assert error.offset == 1
                assert await client.publish("easy", b"2nd", id="a") == 0
                await running.again()
                client = await running.client()
            assert await client.publish("orders", b"other", id="b") == 2
            assert await stored(client, "orders") == [b"before", b"first", b"other"]

    run(main())


def test_ps9_a_twin_waits_for_what_becomes_of_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            clients = [await running.client() for _ in range(4)]
            await clients[0].ensure("orders", duplicates="ok")
            for n in range(30):
                some = [client.publish("orders", b"x", id=f"id{n}") for client in clients]
                assert await asyncio.gather(*some) == [n] * 4

    run(main())


def test_ps9_ids_are_never_silently_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_ids=2)
            await client.publish_many("orders", [b"0", b"1"], ids=["a", "b"])
            await refused("ID_POOL_FULL", client.publish("orders", b"2", id="c"))
            await refused("DUPLICATE_ID", client.publish("orders", b"2", id="a"))
            assert await client.publish("orders", b"2") == 2
            await running.again()
            await refused("ID_POOL_FULL", client.publish("orders", b"2", id="c"))

    run(main())


def test_ps9_an_id_is_free_again_after_the_box(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", id_box=0.2)
            await client.publish("orders", b"0", id="a")
            await refused("DUPLICATE_ID", client.publish("orders", b"1", id="a"))
            await asyncio.sleep(0.25)
            assert await client.publish("orders", b"1", id="a") == 1

    run(main())


def test_ps9_many_duplicates_in_one_publish_are_all_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", duplicates="ok")
            ids = [f"id{n}" for n in range(10_000)]
            first = await client.publish_many("orders", [b"x"] * 10_000, ids=ids)
            assert first == list(range(10_000))
            assert await client.publish_many("orders", [b"x"] * 10_000, ids=ids) == first

    run(main())


# ---------------------------------------------------------------- PS-3, PS-5


def test_ps3_one_order_without_gaps_for_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            clients = [await running.client() for _ in range(5)]
            await clients[0].ensure("orders")

            async def publish(client: Client, who: int) -> list[int]:
                return [await client.publish("orders", b"%d.%d" % (who, n)) for n in range(40)]

            offsets = await asyncio.gather(*(publish(c, who) for who, c in enumerate(clients)))
            assert sorted(o for some in offsets for o in some) == list(range(200))
            assert all(some == sorted(some) for some in offsets)
            seen = []
            for client in clients[:2]:
                async with await client.subscribe("orders") as sub:
                    found = await take(sub, 200)
                assert [m.offset for m in found] == list(range(200))
                assert [m.time for m in found] == sorted(m.time for m in found)
                seen.append([m.payload for m in found])
            assert seen[0] == seen[1]
            assert all(
                seen[0][offset] == b"%d.%d" % (who, n)
                for who, some in enumerate(offsets)
                for n, offset in enumerate(some)
            )
            await running.again()
            assert await (await running.client()).publish("orders", b"after") == 200

    run(main())


def test_ps5_no_topics_and_no_matchers(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await refused("NOT_EPHEMERAL", client.publish("orders", b"x", topic="a.b"))
            await refused("NOT_EPHEMERAL", client.subscribe("orders", matcher="a.*"))
            await refused("NOT_EPHEMERAL", client.request("orders", b"x"))
            await refused("NO_STREAM", client.publish("nowhere", b"x"))
            await refused("NO_STREAM", client.subscribe("nowhere"))
            assert await client.publish("orders", b"x") == 0

    run(main())


# ---------------------------------------------------------------- PS-6, PS-7, PS-8: acks


def test_ps6_a_stale_ack_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"x")
            sub = await client.subscribe("orders", group="g")
            first = await sub.next(DEADLINE)
            first.nack()
            second = await sub.next(DEADLINE)
            assert (first.delivery, second.delivery) == (1, 2)
            first.ack()
            await refused("ACK_STALE", sub.flush())
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 0
            second.ack()
            await sub.flush()
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 1

    run(main())


def test_ps6_acks_of_every_other_message_all_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            count = 24_000
            await client.publish_many("orders", [b"x"] * count)
            sub = await client.subscribe("orders", group="g", prefetch=count)
            found = await take(sub, count)
            sub.ack_all(found[::2])
            await sub.flush()
            told = await client.admin("group", name="orders", group="g")
            assert (told["floor"], told["in_flight"]) == (1, count // 2)

    run(main())


def test_ps7_a_nack_brings_it_again_at_once_or_after_a_delay(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="g", prefetch=1)
            (await sub.next(DEADLINE)).nack()
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (0, 2)
            began = time.monotonic()
            message.nack(delay=0.3)
            other = await sub.next(DEADLINE)  # a delayed one uses no credit
            assert other.offset == 1
            other.ack()
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (0, 3)
            assert time.monotonic() - began >= 0.29
            message.nack(delay=0.4)
            await sub.flush()
            await running.again()
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (0, 4)
            assert time.monotonic() - began >= 0.69

    run(main())


def test_ps8_what_a_dead_consumer_had_goes_to_another_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await one.subscribe("orders", group="g")
            await take(sub, 10)
            other = await two.subscribe("orders", group="g")
            die(one)
            began = time.monotonic()
            assert [(m.offset, m.delivery) for m in await take(other, 10)] == [
                (n, 2) for n in range(10)
            ]
            assert time.monotonic() - began < 1

    run(main())


def test_ps8_who_says_nothing_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SILENCE_S", 2.0)
    monkeypatch.setattr(client_module, "SILENCE_S", 2.0)  # a ping every 0.8 s

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"x")
            raw = await Raw.dial(running)
            subscribe = p.Subscribe(request=1, stream="orders", group="g", credit=5)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: any(isinstance(f.command, p.Deliver) for f in raw.frames))
            sub = await client.subscribe("orders", group="g")
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (0, 2)
            async with asyncio.timeout(DEADLINE):
                await raw.closed.wait()
            assert client._connection is not None

    run(main())


@pytest.mark.parametrize("how", ["subscription", "client"])
def test_ps8_a_graceful_leave_does_not_count(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"0", b"1", b"2"])
            sub = await one.subscribe("orders", group="g")
            (await take(sub, 3))[0].ack()
            other = await two.subscribe("orders", group="g")
            await (sub.close() if how == "subscription" else one.close())
            assert [(m.offset, m.delivery) for m in await take(other, 2)] == [(1, 1), (2, 1)]

    run(main())


def test_ps8_ack_wait_and_in_progress(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="g", ack_wait=0.3)
            kept, dropped = await take(sub, 2)
            for _ in range(6):
                await asyncio.sleep(0.1)
                kept.in_progress()
                if sub._messages:
                    again = await sub.next(DEADLINE)
                    assert (again.offset, again.delivery) == (dropped.offset, 2)
                    again.ack()
            kept.ack()
            await sub.flush()
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 2
            await asyncio.sleep(0.35)
            await nothing(sub)

    run(main())


# ---------------------------------------------------------------- PS-10 to PS-13: groups


def test_ps10_groups_are_independent_and_without_one_nothing_is_tracked(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            for group in ("a", "b"):
                async with await client.subscribe("orders", group=group) as sub:
                    first, second = await take(sub, 2)
                    first.ack()
                    if group == "b":
                        second.ack()
                    await sub.flush()
            for _ in range(2):
                async with await client.subscribe("orders") as sub:
                    assert [m.offset for m in await take(sub, 2)] == [0, 1]
            told = await client.admin("describe", name="orders")
            assert {group["name"]: group["floor"] for group in told["groups"]} == {"a": 1, "b": 2}
            assert told["readers"] == 0

    run(main())


def test_ps11_dead_letters_by_deliveries_come_once_and_say_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_deliveries=2)
            await client.publish("orders", b"poison", id="p1")
            sub = await client.subscribe("orders", group="g")
            for n in (1, 2):
                message = await sub.next(DEADLINE)
                assert message.delivery == n
                message.nack(reason=f"no {n}")
            await nothing(sub)
            dead = await client.subscribe("orders.dlq", group="undertaker")
            letter = await dead.next(DEADLINE)
            assert letter.payload == b"poison"
            told = letter.headers
            assert int(told.pop("time")) > 0
            assert told == {
                "stream": "orders", "offset": "0", "id": "p1", "group": "g", "deliveries": "2",
                "reason": "no 2", "rule": "dead_deliveries",
            }  # fmt: skip
            letter.ack()
            await dead.flush()
            await running.again()
            await nothing(dead)
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 1

    run(main())


def test_ps11_dead_letters_by_distance(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=3)
            await client.publish_many("orders", [b"%d" % n for n in range(6)])
            sub = await client.subscribe("orders", group="g")
            found = await take(sub, 6)
            for message in found[1:4]:
                message.ack()
            await sub.flush()
            found[0].nack(delay=60, reason="later")  # 3 - 0 is not more than 3
            await asyncio.sleep(0.1)
            names = [stream["name"] for stream in await client.admin("list")]
            assert names == ["orders"]
            found[4].ack()
            await sub.flush()

            async def letters() -> int:
                every = {s["name"]: s for s in await client.admin("list")}
                return int(every["orders.dlq"]["end"]) if "orders.dlq" in every else 0

            async with asyncio.timeout(DEADLINE):
                while not await letters():
                    await asyncio.sleep(0.01)
            dead = await client.subscribe("orders.dlq")
            told = (await dead.next(DEADLINE)).headers
            assert (told["offset"], told["rule"], told["reason"]) == ("0", "dead_distance", "later")
            await nothing(dead)

    run(main())


def test_ps11_a_message_nacked_at_once_again_and_again_dies_of_distance(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=3)
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="g")
            deliveries = 0

            async def consume() -> None:
                nonlocal deliveries
                async for message in sub:
                    if message.payload == b"0":
                        deliveries += 1
                        message.nack(reason="no")
                    else:
                        message.ack()

            consuming = asyncio.create_task(consume())
            dead = await subscribed_when_there(client, "orders.dlq")
            told = (await dead.next(DEADLINE)).headers
            consuming.cancel()
            assert (told["offset"], told["rule"], told["reason"]) == ("0", "dead_distance", "no")
            assert deliveries == int(told["deliveries"])
            await nothing(dead)

    run(main())


def test_ps11_with_a_distance_of_none_the_first_return_is_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=0)
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g")
            first, second, third = await take(sub, 3)
            third.ack()
            await sub.flush()
            second.ack()  # while a consumer has a message, the rule waits for what it says
            await sub.flush()
            assert "orders.dlq" not in [one["name"] for one in await client.streams()]
            first.nack(reason="no")
            dead = await subscribed_when_there(client, "orders.dlq")
            told = (await dead.next(DEADLINE)).headers
            assert (told["offset"], told["rule"], told["deliveries"]) == ("0", "dead_distance", "1")
            await nothing(sub)
            await nothing(dead)

    run(main())


@pytest.mark.parametrize(
    "how", [{"prefetch": 1}, {"exclusive": True}, {"exclusive": True, "prefetch": 1}]
)
def test_ps11_a_message_that_nothing_gets_past_dies_of_distance(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=3)
            await client.publish_many("orders", [b"poison", b"1", b"2"])
            sub = await client.subscribe("orders", group="g", **how)
            for delivery in (1, 2, 3, 4):
                message = await sub.next(DEADLINE)
                while message.payload != b"poison":  # came before the recall was known
                    message = await sub.next(DEADLINE)
                assert message.delivery == delivery
                message.nack(reason="no")
            dead = await subscribed_when_there(client, "orders.dlq")
            told = (await dead.next(DEADLINE)).headers
            assert (told["offset"], told["rule"], told["deliveries"]) == ("0", "dead_distance", "4")
            await nothing(dead)
            async with asyncio.timeout(DEADLINE):
                while (await client.group("orders", "g"))["floor"] < 3:
                    message = await sub.next(DEADLINE)
                    assert message.payload in (b"1", b"2")
                    message.ack()
                    with contextlib.suppress(StreamsError):  # of what was recalled
                        await sub.flush()

    run(main())


async def subscribed_when_there(client: Client, stream: str) -> Subscription:
    """Subscribe to a stream as soon as it exists."""
    async with asyncio.timeout(DEADLINE):
        while stream not in [one["name"] for one in await client.streams()]:
            await asyncio.sleep(0.01)
    return await client.subscribe(stream)


def test_ps11_a_letter_that_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_deliveries=1)
            await client.ensure("orders.dlq", max_ids=1)
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="g")
            for message in await take(sub, 2):
                message.nack()
            dead = await client.subscribe("orders.dlq")
            assert (await dead.next(DEADLINE)).payload == b"0"
            await nothing(dead)
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 1

    run(main())


def test_ps11_without_a_place_for_dead_letters_the_group_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_deliveries=1)
            await client.ensure("orders.dlq", kind="ephemeral")
            await client.publish("orders", b"poison")
            sub = await client.subscribe("orders", group="g")
            (await sub.next(DEADLINE)).nack()
            await sub.flush()
            await client.publish("orders", b"1")
            message = await sub.next(DEADLINE)
            assert message.offset == 1
            message.ack()
            await sub.flush()
            assert (await client.admin("group", name="orders", group="g"))["floor"] == 0

    run(main())


def test_ps12_an_exclusive_group_is_served_in_order_by_one_and_handed_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(6)])
            first = await one.subscribe("orders", group="g", exclusive=True)
            second = await two.subscribe("orders", group="g", exclusive=True)
            await refused("GROUP_KIND", two.subscribe("orders", group="g"))
            found = await take(first, 6)
            assert [m.offset for m in found] == list(range(6))
            first.ack_all(found[:2])
            await first.flush()
            await nothing(second)
            await first.close()
            over = await take(second, 4)
            assert [(m.offset, m.delivery) for m in over] == [(n, 1) for n in range(2, 6)]
            assert over[0].epoch > found[0].epoch

    run(main())


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_ps12_a_nack_pauses_an_exclusive_group(tmp_path: Path, delay: float) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(5)])
            sub = await client.subscribe("orders", group="g", exclusive=True)
            (await sub.next(DEADLINE)).ack()
            began = time.monotonic()
            (await sub.next(DEADLINE)).nack(delay=delay)
            found = await take(sub, 4)
            assert [(m.offset, m.delivery) for m in found] == [(1, 2), (2, 1), (3, 1), (4, 1)]
            assert time.monotonic() - began >= delay * 0.95
            sub.ack_all(found)
            await sub.flush()

    run(main())


def test_ps12_what_is_kept_too_long_comes_again_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(4)])
            sub = await client.subscribe("orders", group="g", exclusive=True, ack_wait=0.3)
            kept = await sub.next(DEADLINE)
            await until(lambda: bool(sub._messages) and sub._messages.last_epoch > kept.epoch)
            found = await take(sub, 4)
            assert [m.offset for m in found] == [0, 1, 2, 3]
            assert found[0].delivery == 2
            sub.ack_all(found)
            await sub.flush()

    run(main())


def test_ps13_members_share_by_free_credit_and_nobody_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            stuck = await one.subscribe("orders", group="g", prefetch=5)
            lively = await two.subscribe("orders", group="g", prefetch=5)
            await one.publish_many("orders", [b"%d" % n for n in range(50)])
            got = [m.offset for m in await take(stuck, 5)]
            for _ in range(45):
                message = await lively.next(DEADLINE)
                got.append(message.offset)
                message.ack()
            assert sorted(got) == list(range(50))
            third = await two.subscribe("orders", group="g", prefetch=5)
            await one.publish_many("orders", [b"x"] * 6)
            assert {m.offset for m in await take(lively, 3) + await take(third, 3)} == set(
                range(50, 56)
            )

    run(main())


# ---------------------------------------------------------------- PS-15/16: where it begins


def test_ps15_where_a_group_begins_and_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])

            async def began(group: str, start: str | int) -> tuple[int, str]:
                how: dict[str, Any] = {"group": group} if group else {}
                async with await client.subscribe("orders", start=start, **how) as sub:  # type: ignore[arg-type]
                    return sub.offset, sub.why

            assert await began("a", "start") == (0, "start")
            assert await began("b", "end") == (10, "end")
            assert await began("c", 7) == (7, "offset")
            assert await began("", "end") == (10, "end")
            assert await began("", 4) == (4, "offset")
            assert await began("a", "end") == (0, "position")
            assert await began("b", "start") == (10, "position")
            assert await began("c", "start") == (7, "position")
            assert await began("c", 2) == (2, "offset")
            await refused("OFFSET_OUT_OF_RANGE", began("d", 11))
            await refused("OFFSET_OUT_OF_RANGE", began("a", 11))
            assert await began("a", "end") == (0, "position")
            groups = (await client.admin("describe", name="orders"))["groups"]
            assert [group["name"] for group in groups] == ["a", "b", "c"]
            await running.again()
            await until(lambda: client._connection is None)
            assert await began("b", "start") == (10, "position")
            assert await began("c", "end") == (2, "position")

    run(main())


def test_ps16_no_seek_while_another_member_is_live(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g")
            await refused("GROUP_BUSY", client.subscribe("orders", group="g", start=1))
            assert [m.offset for m in await take(sub, 3)] == [0, 1, 2]
            await sub.close()
            sub = await client.subscribe("orders", group="g", start=1)
            assert [m.offset for m in await take(sub, 2)] == [1, 2]

    run(main())


# ---------------------------------------------------------------- ES


def test_es_topics_and_matchers(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news", kind="ephemeral")
            assert await client.publish("news", b"x", topic="a.b") == 0
            every = await client.subscribe("news")
            some = await client.subscribe("news", matcher="a.*")
            tail = await client.subscribe("news", matcher="#.z")
            topics = {"": 1, "a": 1, "a.b": 2, "a.z": 3, "a.b.z": 2, "z": 2}
            for topic, matched in topics.items():
                assert await client.publish("news", topic, topic=topic) == matched, topic
            assert [m.topic for m in await take(every, 6)] == list(topics)
            assert [m.topic for m in await take(some, 2)] == ["a.b", "a.z"]
            assert [m.topic for m in await take(tail, 3)] == ["a.z", "a.b.z", "z"]
            await refused("BAD_TOPIC", client.publish("news", b"x", topic="a..b"))
            await refused("BAD_MATCHER", client.subscribe("news", matcher="a..#"))
            await refused("BAD_MATCHER", client.subscribe("news", matcher="#.a.#.b.#"))

    run(main())


def test_es_a_group_gets_each_message_once_and_there_are_no_acks(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news", kind="ephemeral")
            subs = [await client.subscribe("news", group="g") for _ in range(3)]
            alone = await client.subscribe("news")
            for n in range(9):
                assert await client.publish("news", b"%d" % n) == 2
            got = [[m.payload for m in await take(sub, 3)] for sub in subs]
            assert sorted(payload for some in got for payload in some) == [
                b"%d" % n for n in range(9)
            ]
            assert all(some == sorted(some) for some in got)
            found = await take(alone, 9)
            assert [m.payload for m in found] == [b"%d" % n for n in range(9)]
            for say in (found[0].ack, found[0].nack, found[0].in_progress):
                with pytest.raises(StreamsError) as caught:
                    say()
                assert caught.value.code == "NO_ACKS"
            raw = await Raw.dial(running)
            raw.connection.send(
                b"".join(encode(p.Subscribe(request=1, stream="news", credit=1), (), 3))
                + b"".join(encode(p.Ack(request=2, ranges=[p.Range(first=0, count=1)]), (), 3))
            )
            await until(lambda: "NO_ACKS" in raw.codes())
            raw.connection.close()

    run(main())


def test_es_a_slow_consumer_loses_the_newest_and_holds_nobody_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("news", kind="ephemeral")
            slow = await other.subscribe("news", prefetch=10)
            raw = await Raw.dial(running)  # does not read at all
            subscribe = p.Subscribe(request=1, stream="news", credit=50)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: bool(raw.frames))
            raw.connection.transport.pause_reading()
            began = time.monotonic()
            for n in range(200):
                assert await client.publish("news", b"%03d" % n + b"x" * 50_000) == 2
            assert time.monotonic() - began < 5
            await until(lambda: slow.lost == 190)
            assert [m.payload[:3] for m in await take(slow, 10)] == [b"%03d" % n for n in range(10)]
            await asyncio.sleep(0.05)  # the node hears that there is room
            await client.publish("news", b"new")
            assert (await slow.next(DEADLINE)).payload == b"new"
            raw.connection.transport.abort()

    run(main())


# ---------------------------------------------------------------- RS


def test_rs_the_first_answer_wins_and_later_ones_find_it_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            subs = [await other.subscribe("ask") for _ in range(2)]
            request = asyncio.create_task(client.request("ask", b"what?"))
            one, two = [await sub.next(DEADLINE) for sub in subs]
            assert one.response == two.response
            await refused("NO_STREAM", other.subscribe(one.response))
            await one.respond(b"this")
            await refused("RS_GONE", two.respond(b"that"))
            assert await request == b"this"

    run(main())


def test_rs_who_does_not_want_to_know_is_not_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("questions", kind="ephemeral")
            sub = await client.subscribe("questions")
            for text in ("one", "two"):
                asked = asyncio.create_task(client.request("questions", text))
                question = await sub.next(DEADLINE)
                await question.respond(text.upper(), confirm=False)
                assert await asked == text.upper().encode()
                await question.respond("too late", confirm=False)
                await refused("RS_GONE", question.respond("too late"))

    run(main())


def test_rs_the_server_tells_the_timeout_and_that_nobody_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            began = time.monotonic()
            error = await refused("NO_CONSUMERS", client.request("ask", b"what?"))
            assert isinstance(error, NoAnswerError)
            assert time.monotonic() - began < 1
            sub = await other.subscribe("ask", matcher="q.#")
            await refused("NO_CONSUMERS", client.request("ask", b"what?", topic="z"))
            began = time.monotonic()
            await refused("RS_TIMEOUT", client.request("ask", b"what?", topic="q", timeout=0.2))
            assert 0.19 < time.monotonic() - began < 2
            await refused("RS_GONE", (await sub.next(DEADLINE)).respond(b"late"))

    run(main())


def test_rs_each_request_has_its_own_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            await other.subscribe("ask")
            over: list[float] = []

            async def ask(timeout: float) -> None:
                await refused("RS_TIMEOUT", client.request("ask", b"what?", timeout=timeout))
                over.append(timeout)

            await asyncio.gather(*map(ask, (0.6, 0.2, 0.4, 0.1)))
            assert over == [0.1, 0.2, 0.4, 0.6]

    run(main())


def test_rs_ends_with_who_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            sub = await other.subscribe("ask")
            request = asyncio.create_task(client.request("ask", b"what?", timeout=0.4))
            message = await sub.next(DEADLINE)
            assert running.server is not None
            before = len(running.server.sessions)
            die(client)
            await until(lambda: len(running.server.sessions) < before)  # type: ignore[union-attr]
            await refused("RS_GONE", message.respond(b"this"))
            request.cancel()
            await asyncio.sleep(0.45)  # its timeout finds nothing, and nobody
            assert await other.publish("ask", b"x") == 1

    run(main())


def test_rs_a_name_is_awaited_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("ask", kind="ephemeral")
            await client.subscribe("ask")
            raw = await Raw.dial(running)
            for number in (1, 2):
                asked = p.Publish(request=number, stream="ask", response="r1", timeout=200_000)
                raw.connection.send(b"".join(encode(asked, [build([b"x"])])))
            await until(lambda: raw.codes() == ["RS_EXISTS", "RS_TIMEOUT"])
            raw.connection.close()

    run(main())


# ---------------------------------------------------------------- reconnecting


def test_a_client_goes_on_when_its_node_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            await client.publish_many("orders", [b"%d" % n for n in range(5)])
            tracked = await client.subscribe("orders", group="g")
            reader = await client.subscribe("orders")
            at_end = await client.subscribe("orders", start="end")
            from_offset = await client.subscribe("orders", start=4)
            news = await client.subscribe("news")
            (await tracked.next(DEADLINE)).ack()
            await tracked.flush()
            assert [m.offset for m in await take(reader, 2)] == [0, 1]
            await running.stop()
            await until(lambda: client._connection is None)
            waits = asyncio.create_task(client.publish("orders", b"5"))
            await asyncio.sleep(0.05)
            await running.start()
            async with asyncio.timeout(DEADLINE):
                assert await waits == 5
            assert [m.offset for m in await take(tracked, 5)] == [1, 2, 3, 4, 5]
            assert [m.offset for m in await take(reader, 4)] == [2, 3, 4, 5]
            assert [m.offset for m in await take(at_end, 1)] == [5]
            assert [m.offset for m in await take(from_offset, 2)] == [4, 5]
            assert await client.publish("news", b"x") == 1
            assert (await news.next(DEADLINE)).payload == b"x"

    run(main())


def test_many_streams_can_be_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            names = [f"s{n:03d}" + "x" * 190 for n in range(160)]
            await asyncio.gather(*(client.ensure(name, kind="ephemeral") for name in names))
            assert [stream["name"] for stream in await client.admin("list")] == names

    run(main())


# ---------------------------------------------------------------- those who mean it harm


def test_garbage_on_the_port_is_turned_away(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(7)
        async with node(tmp_path) as running:
            for size in (1, 9, 64, 5000, 100_000):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(b"\xff" + draw.randbytes(size))
                async with asyncio.timeout(DEADLINE):
                    try:
                        said = await reader.read()
                    except ConnectionResetError:
                        said = b""
                assert not said or b"no hello of Railgun" in said
                writer.close()
            client = await running.client()
            assert (await client.ensure("orders"))["result"] == "CREATED"

    run(main())


def test_garbage_after_the_hello_is_named_and_ends_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(8)
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            for n in range(20):
                raw = await Raw.dial(running)
                raw.connection.send(b"\xff" * 4 + draw.randbytes(1 + n * 100))
                async with asyncio.timeout(DEADLINE):
                    await raw.closed.wait()
                assert raw.codes() in (["BAD_FRAME"], [])  # a reset may overtake what was said
            assert await client.publish("orders", b"x") == 0

    run(main())


def test_frames_without_sense_are_answered_and_the_node_lives(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(9)
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            words = ["", "orders", "news", "é", "x" * 300, "a..b", "{}", "[" * 20_000, "null", "-1",
                     "ensure", "list", "describe", "group", '{"name": 5}', '{"name": "a/b"}',
                     '{"name": "n", "asked": {"max_ids": NaN}}', '{"name": "n", "asked": 1}']  # fmt: skip
            numbers = [0, 1, 2, 7, 1 << 31, (1 << 32) - 1]
            blobs: list[bytes | bytearray] = [
                b"", b"x", build([b"a", b"b"]), build([b"a"], [b"id"]), build([b"a"])[:-1],
                build([b"a"]) + b"tail", bytes(60),
            ]  # fmt: skip

            def command() -> bytes:
                kind = draw.choice([*KINDS.values()])
                made = kind()
                for field in kind.DESCRIPTOR.fields:
                    if field.name == "ranges":
                        some = [draw.choice(numbers) for _ in range(3)]
                        made.ranges.append(p.Range(first=some[0], count=some[1], delivery=some[2]))
                    elif field.message_type is not None or field.is_repeated or draw.random() < 0.2:
                        continue
                    elif field.type == field.TYPE_BYTES:
                        setattr(made, field.name, bytes(draw.choice(blobs)))
                    elif field.type == field.TYPE_STRING:
                        setattr(made, field.name, draw.choice(words))
                    elif field.type == field.TYPE_BOOL:
                        setattr(made, field.name, draw.random() < 0.5)
                    elif field.type == field.TYPE_ENUM:
                        setattr(made, field.name, draw.randrange(5))
                    elif field.type == field.TYPE_UINT64 and draw.random() < 0.2:
                        setattr(made, field.name, (1 << 64) - 1)
                    else:
                        setattr(made, field.name, draw.choice(numbers))
                return b"".join(encode(made, [draw.choice(blobs)], draw.choice(numbers[:4])))

            for _ in range(300):
                raw = await Raw.dial(running)
                for _ in range(10):
                    raw.connection.send(command())
                raw.connection.send(b"".join(encode(p.Ping(number=99))))
                await until(
                    lambda raw=raw: (  # type: ignore[misc]
                        raw.closed.is_set()
                        or any(isinstance(f.command, p.Pong) for f in raw.frames)
                    )
                )
                raw.connection.close()
            assert await client.publish("news", b"x", topic="q") >= 0
            offset = await client.publish("orders", b"x")
            sub = await client.subscribe("orders", start=offset)
            assert (await sub.next(DEADLINE)).payload == b"x"

    run(main())


def test_who_says_no_hello_is_gone_when_the_node_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            await reader.readexactly(40)  # what the node says first
            await running.stop()
            async with asyncio.timeout(DEADLINE / 2):  # before it would lose its patience
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()

    run(main())


def test_who_does_not_know_the_secret_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            with pytest.raises(NoNodeError, match="secret"):
                await connect(f"127.0.0.1:{running.port}", secret=b"wrong" * 7, timeout=DEADLINE)
            raw = await Raw.dial(running, secret=b"wrong" * 7)
            assert "secret" in str(raw.error)
            assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600

    run(main())


@pytest.mark.parametrize("told", ["", "no secret", "00" * 15])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, told: str) -> None:
    (tmp_path / "secret").write_text(told)

    async def main() -> None:
        with pytest.raises(BadSecretError, match="holds no secret"):
            await Server(ServerConfig(tmp_path, port=0)).start()

    run(main())


def family(client: Client) -> int:
    """Of the socket by which it is connected."""
    assert client._connection is not None
    return int(client._connection.transport.get_extra_info("socket").family)


def test_clients_of_the_same_machine_come_by_a_socket_in_the_directory(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            path = tmp_path / "node.sock"
            assert path.stat().st_mode & 0o777 == 0o600
            async with await connect(data=tmp_path, timeout=DEADLINE) as client:
                assert family(client) == socket.AF_UNIX
                await client.ensure("orders")
                large = [b"%d " % n + bytes(100_000) for n in range(50)]
                await client.publish_many("orders", large)
                assert await stored(client, "orders") == large
                await running.again()
                assert await client.publish("orders", b"x", id="x") == 50
                assert family(client) == socket.AF_UNIX
                path.unlink()
                async with await connect(data=tmp_path, timeout=DEADLINE) as other:
                    assert family(other) == socket.AF_INET
                    assert await other.publish("orders", b"y") == 51
            with pytest.raises(NoNodeError):
                await connect(data=tmp_path, secret="00" * 32, timeout=DEADLINE)
        assert not path.exists()

    run(main())


def test_a_directory_whose_name_is_too_long_for_a_socket_will_do(tmp_path: Path) -> None:
    async def main() -> None:
        data = tmp_path / ("d" * 120)
        async with node(data), await connect(data=data, timeout=DEADLINE) as client:
            assert family(client) == socket.AF_INET
            await client.ensure("orders")

    run(main())


def test_a_node_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            client = await connect(data=tmp_path, timeout=DEADLINE)
            await client.close()
            await running.kill()
        with pytest.raises(NoNodeError, match="no node works in"):
            await connect(data=tmp_path, timeout=10 * DEADLINE)  # more than the test has

    run(main())


def test_another_version_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "VERSION", 99)

    async def main() -> None:
        async with node(tmp_path) as running:
            began = time.monotonic()
            with pytest.raises(NoNodeError, match="speaks version 1, and the client speaks 99"):
                await running.client()
            assert time.monotonic() - began < 2

    run(main())


def test_two_nodes_on_one_directory_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            with pytest.raises(InUseError):
                await Server(ServerConfig(tmp_path, port=0)).start()
            client = await running.client()
            assert (await client.ensure("orders"))["result"] == "CREATED"

    run(main())


def test_listening_openly_without_tls_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        for host in ("0.0.0.0", "::", "example.org"):
            with pytest.raises(OpenListenError):
                await Server(ServerConfig(tmp_path / "none", host=host, port=0)).start()
        assert not (tmp_path / "none").exists()

    run(main())


def test_ps2_one_id_for_many_messages_stores_all_of_them_or_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"before", id="single")
            assert await client.publish_many("orders", [b"a", b"b", b"c"], id="all") == [1, 2, 3]
            for _ in range(2):
                with pytest.raises(DuplicateIdError) as told:
                    await client.publish_many("orders", [b"a", b"b", b"c"], id="all")
                assert told.value.offset == 1
                await running.again()
                client = await running.client()
            with pytest.raises(DuplicateIdError):
                await client.publish_many("orders", [b"x", b"y"], id="single")
            twins = [client.publish_many("orders", [b"d", b"e"], id="twin") for _ in range(5)]
            told_all = await asyncio.gather(*twins, return_exceptions=True)
            assert [one for one in told_all if isinstance(one, list)] == [[4, 5]]
            assert sum(isinstance(one, DuplicateIdError) for one in told_all) == 4
            with pytest.raises(StreamsError, match="BAD_REQUEST"):
                await client.publish_many("orders", [b"x"], id="i", ids=["j"])
            await client.ensure("lenient", duplicates="ok")
            for _ in range(2):
                assert await client.publish_many("lenient", [b"a", b"b"], id="all") == [0, 1]
            sub = await client.subscribe("orders")
            found = [m.payload for m in await take(sub, 6)]
            assert found == [b"before", b"a", b"b", b"c", b"d", b"e"]
            await nothing(sub)

    run(main())


def test_ps2_many_messages_with_one_id_come_once_though_the_connection_is_cut(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            proxy.muted = True
            publish = asyncio.create_task(client.publish_many("orders", [b"a", b"b"], id="all"))
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            assert await publish == [0, 1]  # the second time it was a duplicate, as was to be
            sub = await client.subscribe("orders")
            assert [m.payload for m in await take(sub, 2)] == [b"a", b"b"]
            await nothing(sub)

    run(main())
