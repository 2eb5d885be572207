"""Purges and retention take exactly what they should, while others publish and consume."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, node, refused, run, take, until
from tests.broker.streams.administering import FULL, again, spoil, stored

import railgun.broker.streams.node as node_module

# ---------------------------------------------------------------- purge


def test_a_purged_stream_is_empty_and_goes_on_with_its_offsets(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            assert await client.purge("orders") == {"first": 0, "end": 0, "purged": 0}
            await client.publish_many("orders", [b"x" * 1000] * 100)
            behind = await client.subscribe("orders", group="behind")
            behind.ack_all(await take(behind, 10))
            await behind.flush()
            await behind.close()
            assert await client.purge("orders") == {"first": 100, "end": 100, "purged": 100}
            assert (await client.describe("orders"))["bytes"] == 0
            assert (await client.group("orders", "behind"))["lag"] == 0
            for _ in range(2):
                client = await again(running)
                told = await client.describe("orders")
                assert (told["first"], told["end"]) == (100, 100)
            behind = await client.subscribe("orders", group="behind")
            assert await client.publish("orders", b"next") == 100
            assert (await behind.next(DEADLINE)).offset == 100
            assert behind.missed == 90
            assert await stored(client, "orders") == {100: b"next"}
            await refused("OFFSET_OUT_OF_RANGE", client.purge("orders", 102))

    run(main())


def test_purge_before_an_offset_takes_exactly_those(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])  # one batch
            watching = await client.subscribe("orders", group="g", prefetch=2)
            found = await take(watching, 2)
            assert await client.purge("orders", 7) == {"first": 7, "end": 10, "purged": 7}
            assert await client.purge("orders", 3) == {"first": 7, "end": 10, "purged": 0}
            for message in found:
                message.ack()  # what it has it may still ack
            assert [m.offset for m in await take(watching, 2)] == [7, 8]
            assert watching.missed == 5
            for _ in range(2):
                assert await stored(client, "orders") == {n: b"%d" % n for n in (7, 8, 9)}
                client = await again(running)
            await client.publish("orders", b"10", id="a")
            assert await client.purge("orders", 9) == {"first": 9, "end": 11, "purged": 2}
            client = await again(running)
            await refused("DUPLICATE_ID", client.publish("orders", b"again", id="a"))
            assert await stored(client, "orders") == {9: b"9", 10: b"10"}
            await client.purge("orders")
            names = [path.name for path in (tmp_path / "streams" / "orders" / "log").iterdir()]
            assert names == ["00000000000000000011.log"]

    run(main())


def test_a_purge_while_all_publish_and_consume(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, consumer = await running.client(), await running.client()
            await client.ensure("orders")
            count, got = 20_000, set[int]()
            subs = {
                "shared": await consumer.subscribe("orders", group="shared", prefetch=50),
                "alone": await consumer.subscribe("orders", group="alone", exclusive=True),
                "": await consumer.subscribe("orders", prefetch=100),
            }

            async def consume(name: str) -> None:
                sub, last = subs[name], -1
                seen: set[int] = set()
                while len(seen) + sub.missed < count:
                    try:
                        some = await sub.batch(20, 0.05)
                    except TimeoutError:  # it may have missed all the others
                        continue
                    for message in some:
                        assert message.payload == b"%d" % message.offset
                        assert message.offset > last or name == "shared"
                        last = message.offset
                        seen.add(message.offset)
                        if name:
                            message.ack()
                    await asyncio.sleep(0)
                assert len(seen) + sub.missed == count
                got.update(seen)

            async def publish() -> None:
                for first in range(0, count, 100):
                    some = [b"%d" % n for n in range(first, first + 100)]
                    assert await client.publish_many("orders", some) == [*range(first, first + 100)]

            async def purge() -> int:
                done, times = 0, 0
                while not publishing.done():
                    before = (done + count) // 3 if times % 2 else None
                    end = (await client.describe("orders"))["end"]
                    told = await client.purge("orders", before and min(before, end))
                    done, times = told["first"], times + 1
                return times

            publishing = asyncio.create_task(publish())
            consuming = [asyncio.create_task(consume(name)) for name in subs]
            assert await purge() > 3
            await publishing
            # What is left is read; the last message comes, or was purged.
            await client.purge("orders", count - 1)
            await asyncio.gather(*consuming)
            assert got
            assert await client.publish("orders", b"%d" % count) == count

    run(main())


def test_a_purge_that_finds_no_room_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            disk = spoil(running)
            await client.ensure("orders")
            await client.publish_many("orders", [b"a", b"b"])
            disk.refuses = {"create .first": FULL}
            await refused("NO_SPACE", client.purge("orders", 1))
            assert await stored(client, "orders") == {0: b"a", 1: b"b"}
            disk.refuses = {}
            assert (await client.purge("orders", 1))["first"] == 1

    run(main())


# ---------------------------------------------------------------- retention


def test_ps18_messages_grow_old_also_in_a_stream_that_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETENTION_INTERVAL_S", 0.02)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("kept")
            await client.ensure("orders", max_age=0.3, id_box=0.1)
            for name in ("kept", "orders"):
                await client.publish_many(name, [b"a", b"b"])
            sub = await client.subscribe("orders", group="g", prefetch=1)
            await take(sub, 1)

            async def first() -> int:
                return int((await client.describe("orders"))["first"])

            async with asyncio.timeout(DEADLINE):
                while await first() < 2:
                    await asyncio.sleep(0.01)
            await until(lambda: sub.missed == 1)
            client = await again(running)
            assert await first() == 2
            assert await client.publish("orders", b"c") == 2
            assert (await client.describe("kept"))["first"] == 0

    run(main())


def test_ps18_messages_grow_old_in_a_segment_that_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETENTION_INTERVAL_S", 0.02)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_age=0.2, id_box=0.1)
            async with asyncio.timeout(DEADLINE):
                while not (await client.describe("orders"))["first"]:
                    await client.publish("orders", b"x")  # so the last one is never old
                    await asyncio.sleep(0.005)
            told = await client.describe("orders")
            assert told["first"] < told["end"]

    run(main())
