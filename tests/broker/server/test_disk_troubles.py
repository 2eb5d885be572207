"""A whole node on a disk that is full for a while, or has rotted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, node, nothing, refused, run, take
from verification.log_disk import LogDisk

import railgun.broker.streams.groups as groups_module
from railgun.client.errors import StreamsError

GROUPS = "streams/orders/groups/groups"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon."""
    monkeypatch.setattr(groups_module, "RETRY_PAUSE_S", 0.02)


def test_a_full_disk_refuses_and_what_groups_have_done_is_written_later(tmp_path: Path) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="billing")
            messages = await take(sub, 10)
            disk.room = disk.used()
            await refused("NO_SPACE", client.publish("orders", b"10"))
            sub.ack_all(messages[:4])
            await refused("NO_SPACE", sub.flush())
            sub.ack_all(messages[6:])
            await refused("NO_SPACE", sub.flush())
            with pytest.raises(StreamsError):
                await client.subscribe("orders", group="new")
            reader = await client.subscribe("orders")
            assert len(await take(reader, 10)) == 10  # reads go on
            disk.room = None
            async with asyncio.timeout(DEADLINE):
                while True:  # without another word from us
                    try:
                        await sub.flush()
                        break
                    except StreamsError as error:
                        if error.code != "NO_SPACE":
                            raise
            await running.again()
            client = await running.client()
            sub = await client.subscribe("orders", group="billing")
            assert [message.offset for message in await take(sub, 2)] == [4, 5]
            await nothing(sub)
            assert await client.publish("orders", b"10") == 10

    run(main())


def test_a_group_writes_what_it_could_not_without_being_asked(tmp_path: Path) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="billing")
            messages = await take(sub, 10)
            disk.room = disk.used()
            sub.ack_all(messages)
            await refused("NO_SPACE", sub.flush())
            disk.room, size = None, len(disk.content(GROUPS))
            async with asyncio.timeout(DEADLINE):
                while len(disk.content(GROUPS)) == size:
                    await asyncio.sleep(0.01)
            await running.again()
            client = await running.client()
            sub = await client.subscribe("orders", group="billing")
            assert sub.offset == 10

    run(main())


def test_ps12_an_exclusive_group_hands_out_nothing_the_log_does_not_know(tmp_path: Path) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            sub = await client.subscribe("orders", group="billing", exclusive=True, prefetch=1)
            await client.publish_many("orders", [b"%d" % n for n in range(3)])
            (message,) = await take(sub, 1)
            disk.room = disk.used()
            message.nack()
            await nothing(sub)
            disk.room = None
            (message,) = await take(sub, 1)
            assert (message.offset, message.delivery) == (0, 2)
            message.ack()
            assert [one.offset for one in await take(sub, 1)] == [1]

    run(main())


def test_ps12_what_waits_for_the_log_is_not_overtaken_by_what_comes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "RETRY_PAUSE_S", 0.3)

    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            sub = await client.subscribe("orders", group="billing", exclusive=True, prefetch=2)
            await client.publish_many("orders", [b"%d" % n for n in range(4)])
            first, second = await take(sub, 2)
            disk.room = disk.used()
            first.ack()  # so there is room for the next one, which the log must know of first
            await refused("NO_SPACE", sub.flush())
            disk.room = None
            second.ack()
            assert [message.offset for message in await take(sub, 2)] == [2, 3]

    run(main())


def test_a_damaged_group_log_is_set_aside_and_its_groups_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="billing")
            for message in await take(sub, 10):
                message.ack()
                await sub.flush()
                if message.offset == 4:
                    middle = len(disk.content(GROUPS)) + 30
            await client.close()
            await running.stop()
            disk.flip(GROUPS, 8 * middle)
            damaged = disk.content(GROUPS)
            await running.start()
            (told,) = running.told
            assert "damaged" in told
            assert "get messages again" in told
            assert disk.content(f"{GROUPS}.damaged-1") == damaged
            client = await running.client()
            sub = await client.subscribe("orders", group="billing")
            assert 4 <= sub.offset <= 6
            messages = await take(sub, 10 - sub.offset)
            sub.ack_all(messages)
            await sub.flush()
            await running.again()
            assert running.told == []
            client = await running.client()
            assert (await client.subscribe("orders", group="billing")).offset == 10

    run(main())


def test_a_stream_whose_settings_have_rotted_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            for name in ("orders", "others"):
                await client.ensure(name)
                await client.publish(name, b"0")
            await client.close()
            for content in (b"{", b"[]", b"\xff\xff", b'{"kind": "strange"}'):
                await running.stop()
                disk.replace("streams/orders/stream.json", content)
                await running.start()
                (told,) = running.told
                assert "orders" in told
                assert "left alone" in told
                client = await running.client()
                assert await client.publish("others", b"1")
                await refused("STORAGE", client.publish("orders", b"1"))
                await refused("STORAGE", client.ensure("orders"))
                assert disk.content("streams/orders/stream.json") == content
                await client.close()

    run(main())
