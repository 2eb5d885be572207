"""Persistent streams over TCP, row by row: at least once, IDs, and the order of messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

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

from railgun.client.client import Client, connect
from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p

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


# ---------------------------------------------------------------- lists of streams


def test_many_streams_can_be_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            names = [f"s{n:03d}" + "x" * 190 for n in range(160)]
            await asyncio.gather(*(client.ensure(name, kind="ephemeral") for name in names))
            assert [stream["name"] for stream in await client.admin("list")] == names

    run(main())


# ---------------------------------------------------------------- PS-2: one ID for many messages


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
