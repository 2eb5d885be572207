"""Deleted streams are gone, all are told, and a crash leaves the stream or nothing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, die, node, process, refused, run, take, until
from tests.broker.streams.administering import BROKEN, again, bury, spoil, stored

from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError


def test_a_deleted_stream_is_gone_and_all_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"a", b"b"])
            alone = await other.subscribe("orders")
            member = await other.subscribe("orders", group="g")
            await take(alone, 2)
            found = await take(member, 2)
            assert await client.delete("orders") == ["orders"]
            for sub in (alone, member):
                await refused("NO_STREAM", sub.next(DEADLINE))
            found[0].ack()
            await refused("NO_STREAM", member.flush())
            await refused("NO_STREAM", client.publish("orders", b"c"))
            await refused("NO_STREAM", other.subscribe("orders"))
            await refused("NO_STREAM", client.delete("orders"))
            assert list((tmp_path / "streams").iterdir()) == []
            await client.ensure("orders")
            assert await client.publish("orders", b"new") == 0
            assert (await client.describe("orders"))["groups"] == []
            await client.delete("orders")
            client = await again(running)
            assert await client.streams() == []

    run(main())


def test_listeners_of_a_deleted_ephemeral_stream_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("air", kind="ephemeral")
            subs = [await client.subscribe("air"), await client.subscribe("air", group="g")]
            await client.delete("air")
            for sub in subs:
                await refused("NO_STREAM", sub.next(DEADLINE))
            await refused("NO_STREAM", client.publish("air", b"x"))
            client = await again(running)
            assert await client.streams() == []

    run(main())


def test_publishes_under_way_are_answered_when_a_stream_is_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            clients = [await running.client() for _ in range(8)]
            await clients[0].ensure("orders")
            codes: set[str] = set()
            stored = 0

            async def publish(client: Client, n: int) -> None:
                nonlocal stored
                try:
                    for k in range(300):
                        await client.publish("orders", b"x", id=f"{n % 4}-{k}")  # all have a twin
                        stored += 1
                except StreamsError as error:
                    codes.add(error.code)

            tasks = [asyncio.create_task(publish(c, n)) for n, c in enumerate(clients)]
            tasks += [asyncio.create_task(publish(c, n)) for n, c in enumerate(clients)]
            await until(lambda: stored > 20)
            await clients[0].delete("orders")
            await asyncio.gather(*tasks)
            assert codes <= {"NO_STREAM", "DUPLICATE_ID"}
            await refused("NO_STREAM", clients[0].publish("orders", b"x"))

    run(main())


def test_dead_letters_stay_unless_they_are_to_go(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 2)
            await client.delete("orders")
            assert [one["name"] for one in await client.streams()] == ["orders.dlq"]
            await bury(client, "orders", 2)  # other messages, of the same offsets and IDs
            assert (await client.describe("orders.dlq"))["end"] == 4
            gone = await client.delete("orders", dead_letters=True)
            assert gone == ["orders", "orders.dlq"]
            assert await client.streams() == []
            await client.ensure("orders")
            assert await client.delete("orders", dead_letters=True) == ["orders"]

    run(main())


def test_a_delete_that_fails_leaves_the_stream_or_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            for name in ("kept", "doubtful"):
                await client.ensure(name)
                await client.publish_many(name, [b"a", b"b"])
            sub = await client.subscribe("kept")
            await take(sub, 2)
            disk = spoil(running)
            disk.refuses = {"rename kept/stream.json": BROKEN, "sync doubtful": BROKEN}
            await refused("STORAGE", client.delete("kept"))
            assert await client.publish("kept", b"c") == 2
            assert (await sub.next(DEADLINE)).payload == b"c"
            await refused("STORAGE", client.delete("doubtful"))
            await refused("NO_STREAM", client.publish("doubtful", b"c"))
            # Whether the name comes back after a power cut nobody knows; then it has its messages.
            assert list((tmp_path / "streams" / "doubtful" / "log").glob("*.log"))
            disk.refuses = {}
            await client.ensure("doubtful")
            assert await client.publish("doubtful", b"new") == 0
            client = await again(running)
            assert await stored(client, "kept") == {0: b"a", 1: b"b", 2: b"c"}
            assert await stored(client, "doubtful") == {0: b"new"}

    run(main())


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.002, 0.004, 0.008])
def test_a_node_killed_while_it_deletes_has_the_stream_or_nothing(
    tmp_path: Path, pause: float
) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(1000)])
            deleting = asyncio.create_task(client.delete("orders"))
            await asyncio.sleep(pause)
            await running.kill()
            die(client)
            await asyncio.gather(deleting, return_exceptions=True)
            await running.start()
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            if await client.streams():
                assert len(await stored(client, "orders")) == 1000
            else:
                assert list((tmp_path / "streams").iterdir()) == []
                await client.ensure("orders")
                assert await client.publish("orders", b"new") == 0
            await client.close()

    run(main())


@pytest.mark.parametrize("left", [["log", "groups"], ["log"], ["groups"], []])
def test_what_a_crash_has_left_of_a_deleted_stream_is_taken_away(
    tmp_path: Path, left: list[str]
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"old")
            await running.stop()
            home = tmp_path / "streams" / "orders"
            (home / "stream.json").rename(home / "deleted")
            for name in ("log", "groups"):
                if name not in left:
                    shutil.rmtree(home / name)
            await running.start()
            client = await running.client()
            assert await client.streams() == []
            assert not home.exists()

    run(main())


def test_a_stream_that_was_only_begun_to_be_made_is_taken_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await running.stop()
            (tmp_path / "streams" / "orders" / "stream.json").unlink()
            await running.start()
            assert not (tmp_path / "streams" / "orders").exists()
            client = await running.client()
            assert await client.streams() == []

    run(main())


def test_messages_without_settings_are_kept_and_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"a", b"b"])
            await running.stop()
            settings = tmp_path / "streams" / "orders" / "stream.json"
            content = settings.read_bytes()
            settings.unlink()
            before = {path: path.stat().st_size for path in settings.parent.rglob("*.log")}
            for _ in range(2):
                await running.start()
                assert running.server is not None
                [told] = [one for one in running.told if "'orders'" in one]
                assert "it has messages, and" in told
                assert "stream.json is missing" in told
                [alarm] = [one for one in running.server.node.alarms() if "orders" in one["text"]]
                assert alarm["code"] == "NOT_OPENED"
                client = await running.client()
                await refused("STORAGE", client.ensure("orders"))
                await running.stop()
                assert {path: path.stat().st_size for path in before} == before
            settings.write_bytes(content)
            await running.start()
            client = await running.client()
            assert await stored(client, "orders") == {0: b"a", 1: b"b"}

    run(main())
