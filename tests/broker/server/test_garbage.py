"""Garbage and frames without sense end at most their own session, and the node lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from tests.broker.running import DEADLINE, Raw, node, run, until

from railgun.transport.commands import KINDS, encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def test_garbage_on_the_port_is_turned_away(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(7)
        async with node(tmp_path) as running:
            for size in (1, 9, 64, 5000, 100_000):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(b"\xff" + draw.randbytes(size))
                async with asyncio.timeout(DEADLINE):
                    try:
                        said = await reader.read()
                    except ConnectionResetError:
                        said = b""
                assert not said or b"no hello of Railgun" in said
                writer.close()
            client = await running.client()
            assert (await client.ensure("orders"))["result"] == "CREATED"

    run(main())


def test_garbage_after_the_hello_is_named_and_ends_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(8)
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            for n in range(20):
                raw = await Raw.dial(running)
                raw.connection.send(b"\xff" * 4 + draw.randbytes(1 + n * 100))
                async with asyncio.timeout(DEADLINE):
                    await raw.closed.wait()
                assert raw.codes() in (["BAD_FRAME"], [])  # a reset may overtake what was said
            assert await client.publish("orders", b"x") == 0

    run(main())


def test_frames_without_sense_are_answered_and_the_node_lives(tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(9)
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            words = ["", "orders", "news", "é", "x" * 300, "a..b", "{}", "[" * 20_000, "null", "-1",
                     "ensure", "list", "describe", "group", '{"name": 5}', '{"name": "a/b"}',
                     '{"name": "n", "asked": {"max_ids": NaN}}', '{"name": "n", "asked": 1}']  # fmt: skip
            numbers = [0, 1, 2, 7, 1 << 31, (1 << 32) - 1]
            blobs: list[bytes | bytearray] = [
                b"", b"x", build([b"a", b"b"]), build([b"a"], [b"id"]), build([b"a"])[:-1],
                build([b"a"]) + b"tail", bytes(60),
            ]  # fmt: skip

            def command() -> bytes:
                kind = draw.choice([*KINDS.values()])
                made = kind()
                for field in kind.DESCRIPTOR.fields:
                    if field.name == "ranges":
                        some = [draw.choice(numbers) for _ in range(3)]
                        made.ranges.append(p.Range(first=some[0], count=some[1], delivery=some[2]))
                    elif field.message_type is not None or field.is_repeated or draw.random() < 0.2:
                        continue
                    elif field.type == field.TYPE_BYTES:
                        setattr(made, field.name, bytes(draw.choice(blobs)))
                    elif field.type == field.TYPE_STRING:
                        setattr(made, field.name, draw.choice(words))
                    elif field.type == field.TYPE_BOOL:
                        setattr(made, field.name, draw.random() < 0.5)
                    elif field.type == field.TYPE_ENUM:
                        setattr(made, field.name, draw.randrange(5))
                    elif field.type == field.TYPE_UINT64 and draw.random() < 0.2:
                        setattr(made, field.name, (1 << 64) - 1)
                    else:
                        setattr(made, field.name, draw.choice(numbers))
                return b"".join(encode(made, [draw.choice(blobs)], draw.choice(numbers[:4])))

            for _ in range(300):
                raw = await Raw.dial(running)
                for _ in range(10):
                    raw.connection.send(command())
                raw.connection.send(b"".join(encode(p.Ping(number=99))))
                await until(
                    lambda raw=raw: (  # type: ignore[misc]
                        raw.closed.is_set()
                        or any(isinstance(f.command, p.Pong) for f in raw.frames)
                    )
                )
                raw.connection.close()
            assert await client.publish("news", b"x", topic="q") >= 0
            offset = await client.publish("orders", b"x")
            sub = await client.subscribe("orders", start=offset)
            assert (await sub.next(DEADLINE)).payload == b"x"

    run(main())


def test_who_says_no_hello_is_gone_when_the_node_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            await reader.readexactly(40)  # what the node says first
            await running.stop()
            async with asyncio.timeout(DEADLINE / 2):  # before it would lose its patience
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()

    run(main())
