"""A node whose clock is wrong, jumps back and forth, or is a day further than it was a moment ago."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.running import Running, node, nothing, run, take, until

import railgun.node.node as node_module
from railgun.client.errors import DuplicateIdError
from railgun.node.settings import SECOND

HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that looks at its clock more often than others."""
    monkeypatch.setattr(node_module, "BEAT", 0.01)


async def looked(running: Running) -> None:
    """The node has looked at its clock, and its groups after that."""
    assert running.server is not None
    seen, node = [running.server.node._beating], running.server.node

    def beat() -> bool:
        if node._beating is not seen[-1]:
            seen.append(node._beating)
        return len(seen) > 3

    await until(beat)


@pytest.mark.parametrize("restart", [False, True])
def test_ps7_a_delay_of_a_day_ends_after_a_day(tmp_path: Path, restart: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="billing")
            first, second = await take(sub, 2)
            first.nack(delay=DAY)
            second.nack(delay=HOUR)
            await sub.flush()
            for hours, expected in ((0.9, None), (1.1, 1), (23.9, None), (24.1, 0)):
                if restart:
                    await running.again()
                running.ahead = hours * HOUR
                if expected is None:
                    await nothing(sub)
                else:
                    (message,) = await take(sub, 1)
                    assert (message.offset, message.delivery) == (expected, 2)
                    message.ack()
                    await sub.flush()
            explained = await client.group("orders", "billing")
            assert explained["code"] == "AT_END"

    run(main())


def test_ps7_a_clock_that_went_back_makes_nothing_wait_longer_than_it_was_to(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            running.ahead = 10 * HOUR
            await looked(running)
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            sub = await client.subscribe("orders", group="billing")
            (message,) = await take(sub, 1)
            message.nack(delay=HOUR)
            await sub.flush()
            running.ahead = 0.0  # by this clock, the delay ends in eleven hours
            await looked(running)
            running.ahead = 0.9 * HOUR
            await nothing(sub)
            running.ahead = 1.1 * HOUR
            (message,) = await take(sub, 1)
            assert message.delivery == 2

    run(main())


def test_ps8_ack_wait_survives_a_clock_that_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            sub = await client.subscribe("orders", group="billing", ack_wait=60.0)
            (message,) = await take(sub, 1)
            running.ahead = -5 * HOUR
            await looked(running)
            message.in_progress()
            second = await other.subscribe("orders", group="billing", ack_wait=60.0)
            running.ahead = -5 * HOUR + 30.0
            await nothing(second)
            running.ahead = -5 * HOUR + 70.0
            message = await second.next(5.0)
            assert message.delivery == 2
            message.ack()
            await second.flush()
            assert (await client.group("orders", "billing"))["lag"] == 0

    run(main())


def test_ps9_ids_are_remembered_though_the_clock_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", id_box=2 * HOUR)
            assert await client.publish("orders", b"0", id="a") == 0
            for hours in (-100.0, 1.0, -1.0, 1.9):
                running.ahead = hours * HOUR
                with pytest.raises(DuplicateIdError):
                    await client.publish("orders", b"0", id="a")
                await running.again()
                client = await running.client()
            running.ahead = 2.1 * HOUR
            assert await client.publish("orders", b"1", id="b") == 1  # now the log is past the box
            assert await client.publish("orders", b"0", id="a") == 2

    run(main())


def test_ps3_stored_time_never_steps_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            for hours in (0.0, 3.0, -7.0, 1.0, 5.0, -1000.0):
                running.ahead = hours * HOUR
                await client.publish("orders", b"x")
                if hours == 3.0:
                    await running.again()
                    client = await running.client()
            async with await client.subscribe("orders") as sub:
                times = [message.time for message in await take(sub, 6)]
            assert times == sorted(times)
            assert times[1] - times[0] > 2 * HOUR * SECOND
            assert times[4] - times[3] > 1 * HOUR * SECOND

    run(main())


def test_ps11_dead_letters_by_age(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_age=HOUR)
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="billing")
            first, second = await take(sub, 2)
            second.ack()
            first.nack(delay=DAY, reason="not today")
            await sub.flush()
            running.ahead = 2 * HOUR
            async with asyncio.timeout(5.0):
                while "orders.dlq" not in [one["name"] for one in await client.streams()]:
                    await asyncio.sleep(0.01)
            letters = await client.subscribe("orders.dlq", group="undertaker")
            (letter,) = await take(letters, 1)
            assert letter.payload == b"0"
            assert letter.headers["rule"] == "max_age"

    run(main())


def test_ps18_retention_by_age_with_a_clock_that_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_age=HOUR)
            await client.publish("orders", b"0")
            running.ahead = -DAY
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.retain()
            assert (await client.describe("orders"))["first"] == 0
            await client.publish("orders", b"1")
            await client.purge("orders", 1)
            running.ahead = DAY
            await stream.retain()
            assert await client.publish("orders", b"2") == 2

    run(main())
