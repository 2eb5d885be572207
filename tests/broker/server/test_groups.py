"""Groups over TCP, row by row: dead letters, exclusive groups, credit, and where a group begins."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import DEADLINE, node, nothing, refused, run, take, until

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.subscription import Subscription

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
