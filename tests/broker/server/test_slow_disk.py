"""Clients that publish faster than the disk of their node writes, over TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import Raw, node, run, stored, until
from tests.broker.server.hard_times import Gate, sessions

import railgun.broker.server.server as server_module
import railgun.client.client as client_module
from railgun.broker.server.session import MAX_UNSTORED_BYTES
from railgun.transport.commands import LARGEST, encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def test_a_publisher_faster_than_the_disk_is_not_read_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            client, asker = await running.client(), await running.client()
            await client.ensure("orders")
            await client.ensure("ask", kind="ephemeral")
            answerer = await client.subscribe("ask")

            async def answer() -> None:
                async for message in answerer:
                    await message.respond(message.payload)

            answering = asyncio.create_task(answer())
            before = {session.name for session in sessions(running)}
            raw = await Raw.dial(running)
            (session,) = [s for s in sessions(running) if s.name not in before]
            count, size = 80, 1_000_000

            def answers() -> list[Any]:
                told = [frame.command for frame in raw.frames]
                return [one for one in told if not isinstance(one, p.Pong)]

            with gate:
                for n in range(count):
                    blob = build([b"%d " % n + bytes(size)])
                    told = p.Publish(request=n + 1, stream="orders")
                    raw.connection.send(b"".join(encode(told, [blob])))
                await until(lambda: session.paused)
                for n in range(50):
                    assert await asker.request("ask", b"%d" % n) == b"%d" % n
                assert session.paused
                assert MAX_UNSTORED_BYTES < session._unstored <= MAX_UNSTORED_BYTES + LARGEST
                assert session._reader.begun <= LARGEST
                assert not answers()
                assert raw.connection.unsent > (count - 10) * size - MAX_UNSTORED_BYTES - (16 << 20)
                gate.slow = 0.005
            await until(lambda: len(answers()) == count)
            assert [(a.request, a.base, a.stored) for a in answers()] == [
                (n + 1, n, 1) for n in range(count)
            ]
            assert not session.paused
            assert session._unstored == 0
            payloads = await stored(asker, "orders")
            assert [int(payload.split()[0]) for payload in payloads] == list(range(count))
            raw.connection.close()
            answering.cancel()

    run(main())


def test_a_client_that_waits_for_the_disk_hears_that_the_node_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(client_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(server_module, "PULSE_S", 0.05)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            names = [f"orders{n}" for n in range(15)]
            for name in names:
                await client.ensure(name)
            (session,) = sessions(running)
            with gate:
                some = [
                    asyncio.create_task(client.publish(name, bytes(1_000_000)))
                    for name in names
                    for _ in range(4)
                ]
                await until(lambda: session.paused)
                await asyncio.sleep(3.0)
                assert session.paused
                assert sessions(running) == [session]
            await asyncio.gather(
                *some
            )  # none has an ID: had the connection been given up, they would fail

    run(main())


def test_a_client_faster_than_the_disk_gets_everything_there_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.slow = 0.01

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            some = [
                client.publish_many("orders", [b"%d.%d" % (who, n) for n in range(200)])
                for who in range(20)
            ]
            single = [client.publish("orders", b"s.%d" % n) for n in range(500)]
            offsets = await asyncio.gather(*some)
            singles = await asyncio.gather(*single)
            found = await stored(client, "orders")
            assert len(found) == 20 * 200 + 500
            for who, given in enumerate(offsets):
                assert given == sorted(given)
                assert [found[at] for at in given] == [b"%d.%d" % (who, n) for n in range(200)]
            assert [found[at] for at in singles] == [b"s.%d" % n for n in range(500)]

    run(main())
