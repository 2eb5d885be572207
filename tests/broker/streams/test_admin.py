"""Admin calls of a node over TCP: bad arguments, streams that find no room, and groups."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.broker.running import (
    DEADLINE,
    Raw,
    die,
    node,
    nothing,
    process,
    refused,
    run,
    take,
    until,
)
from tests.broker.streams.administering import BROKEN, FULL, again, spoil, stored

from railgun.broker.streams import admin
from railgun.broker.streams.node import Node
from railgun.broker.streams.persistent import Persistent
from railgun.client.client import connect
from railgun.client.errors import StreamsError
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p

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
