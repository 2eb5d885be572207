"""Acks, nacks and consumers that go, over TCP, row by row (PS-6 to PS-8)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Raw, die, node, nothing, refused, run, take, until

import railgun.broker.server.session as session_module
import railgun.client.client as client_module
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p


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
