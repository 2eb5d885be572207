"""Clients, masters and nodes between that die, are slow or talk nonsense, when a stream is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.cluster.several import several
from tests.broker.running import DEADLINE, Proxy, Raw, die, run, stored, take, until
from tests.broker.server.relaying import numbers, session_at

from railgun.broker.server import upstream as upstream_module
from railgun.broker.streams.listener import SOFT_UNSENT_BYTES
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def test_a_client_that_dies_leaves_its_messages_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client, heir = await nodes.client("a"), await nodes.client("b")
            await client.publish_many("orders", numbers(5))
            sub = await client.subscribe("orders", group="g")
            await take(sub, 5)
            other = await heir.subscribe("orders", group="g")
            die(client)
            assert [(m.offset, m.delivery) for m in await take(other, 5)] == [
                (n, 2) for n in range(5)
            ]
            await until(lambda: nodes.sessions("b") == 1)

    run(main())


def test_a_slow_client_does_not_fill_the_memory_of_the_node_between(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            direct = await nodes.client("b")
            payload = bytes(100_000)
            for _ in range(20):
                await direct.publish_many("orders", [payload] * 20)  # 40 MB in all
            client = await nodes.client("a")
            sub = await client.subscribe("orders", prefetch=100_000)
            connection = client._connection
            assert connection is not None
            await take(sub, 1)
            connection.transport.pause_reading()
            between = session_at(nodes, "a")
            upstream = next(iter(between._relay._upstreams.values()))  # type: ignore[union-attr]
            await until(lambda: upstream._paused)
            most = 0
            for _ in range(50):
                most = max(most, between._outbox.unsent)
                await asyncio.sleep(0.002)
            assert SOFT_UNSENT_BYTES <= most < 4 * SOFT_UNSENT_BYTES
            assert await direct.publish("orders", b"end") == 400  # nobody else is hindered
            connection.transport.resume_reading()
            got = await take(sub, 400)
            assert got[-1].payload == b"end"

    run(main())


def test_a_master_that_takes_nothing_stops_the_publisher(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> bytes:
                told = p.Publish(request=number, stream="orders")
                return b"".join(encode(told, [build([bytes(1_000_000)])]))

            raw.connection.send(publish(1))
            await until(lambda: len(raw.frames) == 1)
            there, between = session_at(nodes, "b"), session_at(nodes, "a")
            there.pause_reading()  # as if its disk had stopped
            for number in range(2, 60):
                raw.connection.send(publish(number))
            await until(lambda: between.paused)
            upstream = next(iter(between._relay._upstreams.values()))  # type: ignore[union-attr]
            assert upstream.unsent < 3 * upstream_module.MAX_UNSENT_BYTES
            raw.connection.send(b"".join(encode(p.Ping(number=5))))
            there.resume_reading()

            def stored_requests() -> list[int]:
                return [f.command.request for f in raw.frames if isinstance(f.command, p.Published)]

            await until(lambda: len(stored_requests()) == 59)
            assert stored_requests() == list(range(1, 60))
            assert not between.paused
            raw.connection.close()

    run(main())


def test_a_master_that_dies_and_another_takes_its_place_nothing_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("ac")
            first = await nodes.client("c")
            sub = await client.subscribe("orders", group="g")
            got: list[bytes] = []

            async def consume() -> None:
                while len(set(got)) < 300:
                    message = await sub.next(DEADLINE)
                    got.append(message.payload)
                    message.ack()

            consuming = asyncio.create_task(consume())
            every = [b"m%d" % n for n in range(300)]

            async def publish(payload: bytes) -> None:
                await first.publish("orders", payload, id=payload)

            await asyncio.gather(*map(publish, every[:100]))
            under_way = [asyncio.create_task(publish(one)) for one in every[100:200]]
            await asyncio.sleep(0)
            # The master dies; what it had on disk another node takes over.
            old = nodes.running["b"]
            nodes.masters["orders"] = None
            nodes.kill("b")
            await old.stop()
            old.data.rename(tmp_path / "gone")
            (tmp_path / "c" / "streams").mkdir(exist_ok=True)
            new = nodes.running["c"]
            port = new.port
            await new.stop()
            (tmp_path / "gone" / "streams" / "orders").rename(tmp_path / "c" / "streams" / "orders")
            await nodes.start("c")
            assert new.port == port
            nodes.masters["orders"] = "c"
            nodes.moved("orders")
            await asyncio.gather(*under_way)
            await asyncio.gather(*map(publish, every[200:]))
            await asyncio.wait_for(consuming, DEADLINE)
            assert sorted(await stored(client, "orders")) == sorted(every)
            assert set(got) == set(every)

    run(main())


def test_a_place_that_changes_moves_members_and_cuts_off_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            await nodes.ensure("orders", "b")
            await nodes.ensure("other", "b")
            nodes.copies["orders"] = {"b"}
            member, reader, idle = [await nodes.client("a") for _ in range(3)]
            local, near = await nodes.client("b"), await nodes.client("b")
            sub = await member.subscribe("orders", group="g")
            at_master = await local.subscribe("orders", group="h")
            reading = await near.subscribe("orders")
            await reader.subscribe("other", group="g")
            await idle.publish("orders", b"old")
            assert (await sub.next(DEADLINE)).payload == b"old"
            assert (await at_master.next(DEADLINE)).payload == b"old"
            assert (await reading.next(DEADLINE)).payload == b"old"
            clients = (member, reader, idle, local, near)
            before = [client._connection for client in clients]
            nodes.masters["orders"] = "c"
            nodes.moved("orders")
            for one in (sub, at_master):
                await until(lambda one=one: one._life == 2)  # type: ignore[misc]
            await idle.publish("orders", b"new")
            assert (await sub.next(DEADLINE)).payload == b"new"
            assert (await at_master.next(DEADLINE)).payload == b"new"
            same = [client._connection is one for client, one in zip(clients, before, strict=True)]
            assert all(same), "members subscribe again, and nobody loses a connection"

    run(main())


def test_members_leave_a_master_that_does_not_know_it_is_none_and_readers_stay(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            await nodes.ensure("orders", "b")
            member, reader = await nodes.client("a"), await nodes.client("a")
            sub = await member.subscribe("orders", group="g")
            reading = await reader.subscribe("orders")
            before = reader._connection
            nodes.masters["orders"] = "c"
            between = nodes.running["a"].server
            assert between is not None
            between.moved({"orders"}.__contains__)  # and b hears nothing of it
            await until(lambda: sub._life == 2)
            direct = await nodes.client("c")
            await direct.publish("orders", b"new")
            assert (await sub.next(DEADLINE)).payload == b"new"
            assert reader._connection is before
            assert reading._life == 1

    run(main())


def test_publishes_that_would_go_elsewhere_than_those_before_them_end_the_connection(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            await nodes.ensure("orders", "b")
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> None:
                told = p.Publish(request=number, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([b"%d" % number])])))

            publish(1)
            await until(lambda: len(raw.frames) == 1)
            session_at(nodes, "b").pause_reading()  # it answers nothing more
            publish(2)
            await until(lambda: session_at(nodes, "a")._relay._busy != {})  # type: ignore[union-attr]
            nodes.masters["orders"] = "c"  # and nobody is told
            publish(3)
            await until(lambda: len(raw.codes()) == 1)
            assert [f.command.request for f in raw.frames[:2]] == [1, 3]
            assert raw.codes() == ["NO_MASTER"]
            nodes.moved(
                "orders"
            )  # the old master will not answer: nobody knows what became of the second one
            await raw.closed.wait()
            client = await nodes.client("c")
            assert await stored(client, "orders") == []

    run(main())


def test_a_silent_master_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "SILENCE_S", 0.5)

    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            await nodes.ensure("orders", "b")
            nodes.told = []
            async with Proxy(nodes.running["b"].port) as proxy:
                real, nodes.running["b"].port = nodes.running["b"].port, proxy.port
                client = await nodes.client("a")
                sub = await client.subscribe("orders", group="g")
                before = client._connection
                await asyncio.sleep(0.5)
                assert client._connection is before  # pings are answered
                proxy.muted = True
                await until(lambda: client._connection not in (None, before))
                nodes.running["b"].port = real
                nodes.moved("orders")
                await client.publish("orders", b"x", id="x")
                assert (await sub.next(DEADLINE)).payload == b"x"

    run(main())


def test_bytes_that_make_no_sense_end_nothing_but_their_own_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("a")
            sub = await client.subscribe("orders", group="g")
            ack = b"".join(encode(p.Ack(request=1), (), 3))
            bad: Iterator[bytes] = iter(
                [
                    b"\xff" * 64,
                    ack[:8] + (99_999).to_bytes(4, "little") + ack[12:],
                    ack[:12] + (500).to_bytes(4, "little") + ack[16:],
                    b"".join(encode(p.Published(request=1))),
                ]
            )
            for data in bad:
                raw = await Raw.dial(nodes.running["a"])
                raw.connection.send(data)
                await raw.closed.wait()
                assert raw.codes() == ["BAD_FRAME"]
            # And one whose body is no command, on a channel that is served elsewhere.
            raw = await Raw.dial(nodes.running["a"])
            told = p.Subscribe(request=1, stream="orders", group="h", credit=1)
            raw.connection.send(b"".join(encode(told, (), 3)))
            await until(lambda: len(raw.frames) == 1)
            raw.connection.send(ack[:16] + b"\xff" * (len(ack) - 16))
            await raw.closed.wait()
            await client.publish("orders", b"x")
            assert (await sub.next(DEADLINE)).payload == b"x"
            await until(lambda: nodes.sessions("b") == 1)

    run(main())
