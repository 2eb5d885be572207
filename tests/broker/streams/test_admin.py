"""The admin calls of a node, over TCP and on a real disk: what they do and refuse, and what a restart finds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.broker.running import (
    DEADLINE,
    Raw,
    Running,
    die,
    node,
    nothing,
    process,
    refused,
    run,
    take,
    until,
)

import railgun.broker.streams.node as node_module
from railgun.broker.log.disk import NodeDisk
from railgun.broker.streams import admin
from railgun.broker.streams.node import Node
from railgun.broker.streams.persistent import Persistent
from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p


async def again(running: Running) -> Client:
    """The node is stopped and started; a client of the new one."""
    await running.again()
    return await running.client()


async def stored(client: Client, stream: str) -> dict[int, bytes]:
    """All messages of a stream, by their offsets."""
    told = await client.describe(stream)
    async with await client.subscribe(stream) as sub:
        found = await take(sub, told["end"] - told["first"])
    return {message.offset: message.payload for message in found}


async def bury(client: Client, stream: str, count: int, **headers: str) -> None:
    """So many messages of the stream die."""
    await client.ensure(stream, dead_deliveries=1)
    for n in range(count):
        await client.publish(stream, b"%d" % n, id=f"id{n}", headers=headers)
    async with await client.subscribe(stream, group="g") as sub:
        for message in await take(sub, count):
            message.nack(reason="no")
        await sub.flush()
        await settled(client, stream, "g")


async def settled(client: Client, stream: str, group: str) -> None:
    """The group has finished with everything."""
    async with asyncio.timeout(DEADLINE):
        while (await client.group(stream, group))["lag"]:
            await asyncio.sleep(0.01)


class BadDisk(NodeDisk):
    """A disk that refuses some steps while a test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refuses: dict[str, OSError] = {}

    def _step(self, step: str, path: str) -> None:
        for known, error in self.refuses.items():
            verb, _, part = known.partition(" ")
            if verb == step and part in path:
                raise error

    def create(self, path: str) -> Any:
        """Refused or done."""
        self._step("create", path)
        return super().create(path)

    def remove(self, path: str) -> None:
        """Refused or done."""
        self._step("remove", path)
        super().remove(path)

    def rename(self, path: str, to: str) -> None:
        """Refused or done."""
        self._step("rename", path)
        super().rename(path, to)

    def sync_directory(self, path: str) -> None:
        """Refused or done."""
        self._step("sync", path)
        super().sync_directory(path)


def spoil(running: Running) -> BadDisk:
    """Let the node work with such a disk from now on."""
    assert running.server is not None
    disk = BadDisk(running.data)
    running.server.node._disk = disk
    return disk


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("call", "arguments", "named"),
    [
        ("explode", {}, "'explode'"),
        ("", {}, "there is no call"),
        ("list", {"name": "a"}, "'name'"),
        ("describe", {}, "'name'"),
        ("describe", {"name": None}, "'name'"),
        ("describe", {"name": 7}, "name is text"),
        ("describe", {"name": ["s"]}, "name is text"),
        ("ensure", {"name": "s", "asked": []}, "asked is an object"),
        ("ensure", {"name": "s", "mode": "gentle"}, "mode is"),
        ("ensure", {"name": "s", "mode": ["warn"]}, "mode is"),
        ("delete", {"name": "s", "dead_letters": 1}, "dead_letters is true or false"),
        ("purge", {"name": "s", "before": -1}, "before is a whole number"),
        ("purge", {"name": "s", "before": True}, "before is a whole number"),
        ("purge", {"name": "s", "before": 1.5}, "before is a whole number"),
        ("purge", {"name": "s", "before": 1 << 70}, "before is a whole number"),
        ("redrive", {"name": "s", "offsets": [1, "2"]}, "offsets is a list"),
        ("redrive", {"name": "s", "most": "all"}, "most is a whole number"),
        ("reset_group", {"name": "s", "group": "g"}, "'to'"),
        ("reset_group", {"name": "s", "group": "g", "to": "middle"}, "to is 'start', 'end'"),
        ("reset_group", {"name": "s", "group": "g", "to": {}}, "to is 'start', 'end'"),
        ("group", {"name": "s", "group": 3}, "group is text"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, call: str, arguments: dict[str, Any], named: str
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("s")
            assert named in str(await refused("BAD_REQUEST", client.admin(call, **arguments)))
            assert await client.publish("s", b"the session goes on") == 0

    run(main())


def test_arguments_that_are_no_json_object_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            raw = await Raw.dial(running)
            for n, text in enumerate(("{", "[]", "7", '"x"', "[" * 100_000), 1):
                command = p.Admin(request=n, call="list", arguments=text)
                raw.connection.transport.write(b"".join(encode(command, (), 0)))
            await until(lambda: len(raw.frames) == 5)
            assert raw.codes() == ["BAD_REQUEST"] * 5
            raw.connection.close()

    run(main())


def test_an_error_of_ours_is_not_taken_for_a_bad_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(node: Node) -> Any:
        raise KeyError("a key")

    made = admin.Call("broken", "It fails.", "GET", "/broken", (), broken)
    monkeypatch.setattr(admin, "CALLS", {**admin.CALLS, "broken": made})

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            assert "KeyError" in str(await refused("INTERNAL", client.admin("broken")))
            assert await client.streams() == []

    run(main())


def test_what_only_persistent_streams_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("air", kind="ephemeral")
            await refused("NOT_PERSISTENT", client.purge("air"))
            await refused("NOT_PERSISTENT", client.redrive("air"))
            await refused("NO_GROUP", client.reset_group("air", "g", "start"))
            assert await client.groups("air") == []
            for call in (client.delete("no"), client.purge("no"), client.redrive("no")):
                await refused("NO_STREAM", call)
            await refused("NO_STREAM", client.groups("no"))

    run(main())


def test_a_stream_that_finds_no_room_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            disk = spoil(running)
            for step in ("create stream.json", "create log", "create groups", "sync orders"):
                disk.refuses = {step: FULL}
                await refused("NO_SPACE", client.ensure("orders"))
                await refused("NO_STREAM", client.publish("orders", b"x"))
            disk.refuses = {"create stream.json": BROKEN}
            await refused("STORAGE", client.ensure("orders"))
            disk.refuses = {}
            assert not (tmp_path / "streams" / "orders").exists()
            assert (await client.ensure("orders"))["result"] == "CREATED"
            assert await client.publish("orders", b"x") == 0
            disk.refuses = {"create stream.json": FULL}
            await refused("NO_SPACE", client.ensure("orders", "overwrite", max_age=500.0))
            disk.refuses = {}
            client = await again(running)
            assert (await client.describe("orders"))["settings"]["max_age"] is None
            assert await stored(client, "orders") == {0: b"x"}

    run(main())


# ---------------------------------------------------------------- delete


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


# ---------------------------------------------------------------- redrive


NONE = {"redriven": 0, "already": 0, "left": 0, "refused": []}


def test_dead_letters_are_redriven_once_to_the_group_that_gave_them_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            assert await client.redrive("orders") == NONE
            await client.delete("orders")
            await bury(client, "orders", 3, colour="red")
            others = await client.subscribe("orders", group="others")
            others.ack_all(await take(others, 3))
            reader = await client.subscribe("orders")
            await take(reader, 3)
            assert await client.redrive("orders") == NONE | {"redriven": 3}
            sub = await client.subscribe("orders", group="g")
            found = await take(sub, 3)
            assert [m.payload for m in found] == [b"0", b"1", b"2"]
            assert [m.offset for m in found] == [0, 1, 2], "the messages themselves"
            assert [m.id for m in found] == [b"id0", b"id1", b"id2"]
            assert found[1].headers == {"colour": "red"}
            sub.ack_all(found)
            await sub.flush()
            await nothing(others)
            await nothing(reader)
            await others.close()
            for _ in range(2):
                assert await client.redrive("orders") == NONE
                client = await again(running)
            assert (await client.describe("orders"))["end"] == 3

    run(main())


def test_what_was_redriven_is_known_after_a_kill(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            await bury(client, "orders", 4)
            assert (await client.redrive("orders", most=3))["left"] == 1
            await running.kill()
            die(client)
            await running.start()
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            assert await client.redrive("orders") == NONE | {"redriven": 1}
            sub = await client.subscribe("orders", group="g")
            assert [m.payload for m in await take(sub, 4)] == [b"0", b"1", b"2", b"3"]
            await client.close()

    run(main())


def test_a_crash_between_redrive_and_ack_doubles_no_letter(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 3)
            await client.redrive("orders", most=2)
            async with await client.subscribe("orders", group="g") as sub:
                (await sub.next(DEADLINE)).ack()  # one is done, the other is not
                await sub.flush()
            await running.stop()
            shutil.rmtree(tmp_path / "streams" / "orders.dlq" / "groups")  # the acks are lost
            await running.start()
            client = await running.client()
            told = await client.redrive("orders")
            assert told == {"redriven": 1, "already": 2, "left": 0, "refused": []}
            async with await client.subscribe("orders", group="g") as sub:
                assert [m.offset for m in await take(sub, 2)] == [1, 2]
                await nothing(sub)

    run(main())


def test_some_letters_are_redriven_and_those_that_die_again_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 5)
            told = await client.redrive("orders", offsets=[3, 1, 1])
            assert told == NONE | {"redriven": 2, "left": 3}
            async with await client.subscribe("orders", group="g") as sub:
                for message in await take(sub, 2):
                    message.nack(reason="still not")
                await sub.flush()
                await settled(client, "orders", "g")
            assert (await client.describe("orders.dlq"))["end"] == 7, "letters of their own"
            letters = await take(await client.subscribe("orders.dlq", start=5), 2)
            assert [one.headers["redrives"] for one in letters] == ["1", "1"]
            assert await client.redrive("orders", most=1) == NONE | {"redriven": 1, "left": 4}
            assert await client.redrive("orders") == NONE | {"redriven": 4}
            sub = await client.subscribe("orders", group="g")
            assert [m.offset for m in await take(sub, 5)] == [0, 1, 2, 3, 4]

    run(main())


def test_what_is_redriven_does_not_die_of_the_distance_it_had(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=2)
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="g", exclusive=True)
            found = await take(sub, 10)
            sub.ack_all(found[1:9])
            await sub.flush()
            found[0].nack(reason="no")
            (last,) = await take(sub, 1)  # what was above was recalled
            assert last.offset == 9
            async with asyncio.timeout(DEADLINE):
                while not (told := await client.redrive("orders"))["redriven"]:
                    await asyncio.sleep(0.01)
            assert told == NONE | {"redriven": 1}
            assert [m.offset for m in await take(sub, 2)] == [0, 9], "in order"

    run(main())


def test_a_redrive_says_what_it_cannot_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 4)
            sub = await client.subscribe("orders.dlq", group="redrive", prefetch=1)
            await sub.next(DEADLINE)
            await refused("GROUP_BUSY", client.redrive("orders"))
            await sub.close()
            await client.publish("orders.dlq", b"by hand", headers={"a": "b"})
            await client.publish("orders.dlq", b"bare")
            await client.purge("orders", 1)
            await client.reset_group("orders", "g", 3)
            told = await client.redrive("orders", most=3)
            codes = [(one["offset"], one["code"]) for one in told["refused"]]
            assert codes == [
                (0, "MESSAGE_GONE"),
                (3, "GROUP_BUSY"),
                (4, "NOT_A_LETTER"),
                (5, "NOT_A_LETTER"),
            ]
            assert (told["redriven"], told["left"]) == (2, 4), "and they stay where they are"
            await client.delete_group("orders", "g")
            told = await client.redrive("orders", offsets=[3])
            assert told["refused"][0]["code"] == "NO_GROUP"
            await client.delete("orders")
            await refused("NO_STREAM", client.redrive("orders"))
            await client.ensure("orders")
            told = await client.redrive("orders")
            texts = {one["offset"]: one["text"] for one in told["refused"]}
            assert "ends before message 0 (at 0): it was deleted and made anew" in texts[0]
            await client.publish_many("orders", [b"other", b"0", b"1", b"2"])
            told = await client.redrive("orders")
            assert {one["code"] for one in told["refused"]} == {"MESSAGE_GONE", "NOT_A_LETTER"}
            texts = {one["offset"]: one["text"] for one in told["refused"]}
            assert "has another message 0: it was deleted and made anew" in texts[0]
            await client.purge("orders", 2)
            told = await client.redrive("orders", offsets=[0])
            assert "does not have message 0 any more (it begins at 2)" in told["refused"][0]["text"]

    run(main())


def test_letters_that_are_not_there_or_were_redriven_are_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()

            async def codes(*offsets: int) -> list[tuple[int, str]]:
                told = await client.redrive("orders", offsets=offsets)
                return [(one["offset"], one["code"]) for one in told["refused"]]

            await client.ensure("orders")
            assert await codes(4, 2) == [(2, "NO_LETTER"), (4, "NO_LETTER")], "no letters at all"
            await client.delete("orders")
            await bury(client, "orders", 5)
            assert await codes(0, 3, 77) == [(77, "NO_LETTER")]
            assert await codes(0, 1, 3) == [(0, "REDRIVEN"), (3, "REDRIVEN")], "and 1 is redriven"
            assert (await client.group("orders.dlq", "redrive"))["ready"] == 2
            client = await again(running)
            assert await codes(1) == [(1, "REDRIVEN")]
            async with await client.subscribe("orders.dlq", group="redrive", prefetch=1) as sub:
                (await sub.next(DEADLINE)).nack(delay=3600)
                await sub.flush()
            assert await codes(2) == [(2, "GROUP_BUSY")]
            await client.purge("orders.dlq", 3)
            assert await codes(0, 2, 4) == [(0, "NO_LETTER"), (2, "NO_LETTER")]

    run(main())


# ---------------------------------------------------------------- groups


def test_a_group_without_members_is_reset_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            cases: list[tuple[Literal["start", "end"] | int, int]] = [
                ("start", 0),
                ("end", 10),
                (4, 4),
            ]
            for to, expected in cases:
                sub = await client.subscribe("orders", group="g")
                await refused("GROUP_BUSY", client.reset_group("orders", "g", to))
                await refused("GROUP_BUSY", client.delete_group("orders", "g"))
                await sub.close()
                assert await client.reset_group("orders", "g", to) == expected
                await running.kill()
                die(client)
                await running.start()
                client = await connect(where, data=tmp_path, timeout=DEADLINE)
                assert (await client.group("orders", "g"))["floor"] == expected
            sub = await client.subscribe("orders", group="g")
            assert [m.delivery for m in await take(sub, 6)] == [1] * 6
            await sub.close()
            await refused("OFFSET_OUT_OF_RANGE", client.reset_group("orders", "g", 11))
            await refused("NO_GROUP", client.reset_group("orders", "h", 1))
            await client.close()

    run(main())


def test_a_deleted_group_is_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"a", b"b"])
            for group in ("g", "other"):
                async with await client.subscribe("orders", group=group) as sub:
                    sub.ack_all(await take(sub, 2))
                    await sub.flush()
            await client.delete_group("orders", "g")
            await refused("NO_GROUP", client.group("orders", "g"))
            await refused("NO_GROUP", client.delete_group("orders", "g"))
            client = await again(running)
            assert [one["name"] for one in await client.groups("orders")] == ["other"]
            sub = await client.subscribe("orders", group="g")
            assert [m.offset for m in await take(sub, 2)] == [0, 1]
            assert (await client.group("orders", "other"))["floor"] == 2

    run(main())


def test_a_group_that_cannot_be_deleted_is_as_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"a", b"b", b"c"])
            async with await client.subscribe("orders", group="g") as sub:
                (await sub.next(DEADLINE)).ack()
                await sub.flush()
            assert running.server is not None
            stream = running.server.node.streams["orders"]
            assert isinstance(stream, Persistent)
            stream.group_log._notes.tail.file.close()  # as if the disk were gone
            await refused("LOG_FAILED", client.delete_group("orders", "g"))
            assert (await client.group("orders", "g"))["floor"] == 1
            assert "could not be" in (await client.describe("orders"))["trouble"]

    run(main())


def test_readers_without_a_group_are_no_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            sub = await client.subscribe("orders")
            assert await client.groups("orders") == []
            for call in (client.group("orders", "#1"), client.delete_group("orders", "#1")):
                await refused("NO_GROUP", call)
            await client.publish("orders", b"x")
            assert (await sub.next(DEADLINE)).payload == b"x"
            await nothing(sub)

    run(main())


def test_many_calls_at_once_leave_a_node_that_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            codes: set[str] = set()

            async def churn(n: int) -> None:
                for _ in range(10):
                    try:
                        await client.ensure("orders")
                        await client.publish("orders", b"%d" % n)
                        await client.purge("orders")
                        await client.delete("orders")
                    except StreamsError as error:
                        codes.add(error.code)

            await asyncio.gather(*(churn(n) for n in range(6)))
            assert codes <= {"NO_STREAM", "CLOSED"}
            await client.ensure("orders")
            assert json.dumps(await client.streams())
            client = await again(running)
            assert (
                await client.publish("orders", b"x") == (await client.describe("orders"))["end"] - 1
            )

    run(main())
