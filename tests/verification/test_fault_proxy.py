"""Links that are cut, deaf, held up or slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.broker.running import node, run, until
from verification.faults.proxy import Links, Proxy
from verification.stream_server import StreamServer

from railgun.client.client import connect

A, B = "127.0.0.11", "127.0.0.12"


class Echo:
    """Says back what it hears, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self.ended = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                self.heard += data
                writer.write(data)
        self.ended += 1
        writer.close()


class Caller:
    """A connection to the proxy, from the address of a node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def says(self, data: bytes) -> bytes:
        self.writer.write(data)
        async with asyncio.timeout(5):
            return await self.reader.readexactly(len(data))

    async def gone(self) -> bool:
        async with asyncio.timeout(5):
            try:
                return await self.reader.read(1) == b""
            except OSError:
                return True


class World:
    def __init__(self, links: Links, proxy: Proxy, echo: Echo) -> None:
        self.links, self.proxy, self.echo = links, proxy, echo
        self.callers: list[Caller] = []

    async def call(self, host: str) -> Caller:
        port = self.proxy.port
        made = Caller(*await asyncio.open_connection("127.0.1.12", port, local_addr=(host, 0)))
        self.callers.append(made)
        return made


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    """`b` says back what it hears; others reach it by a proxy."""
    links, echo = Links(), Echo()
    server = StreamServer(echo.talk)
    await server.open(B)
    callers = {A: "a", B: "b", "127.0.0.13": "c"}
    try:
        async with Proxy(links, "b", ("127.0.1.12", 0), (B, server.port), callers) as proxy:
            made = World(links, proxy, echo)
            yield made
            for caller in made.callers:
                caller.writer.transport.abort()
    finally:
        await server.close()


def test_bytes_pass_both_ways_and_so_does_the_end() -> None:
    async def main() -> None:
        async with world() as w:
            caller = await w.call(A)
            assert await caller.says(b"hello") == b"hello"
            assert w.links.connections == [("a", "b")]
            big = bytes(range(256)) * 4096
            assert await caller.says(big) == big
            caller.writer.close()
            await until(lambda: w.echo.ended == 1)
            await until(lambda: not w.links.connections)

    run(main())


def test_a_cut_link_resets_and_refuses_and_the_others_go_on() -> None:
    async def main() -> None:
        async with world() as w:
            a, c = await w.call(A), await w.call("127.0.0.13")
            for caller in (a, c):
                await caller.says(b"x")
            w.links.set("a", "b", "cut")
            assert await a.gone()
            assert await (await w.call(A)).gone()
            assert await c.says(b"y") == b"y"
            w.links.heal()
            assert await (await w.call(A)).says(b"z") == b"z"

    run(main())


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_what_vanishes_is_told_nobody_and_the_connection_cannot_go_on(way: tuple[str, str]) -> None:
    async def main() -> None:
        async with world() as w:
            a = await w.call(A)
            await a.says(b"x")
            w.links.set(*way, "drop")
            a.writer.write(b"lost")
            await until(lambda: w.links.of(*way).lost == 4)
            assert w.echo.heard == (b"x" if way == ("a", "b") else b"xlost")
            assert w.links.connections == [("a", "b")]
            w.links.set(*way, "open")
            assert await a.gone()
            assert await (await w.call(A)).says(b"y") == b"y"

    run(main())


def test_who_calls_while_all_vanishes_is_heard_by_nobody() -> None:
    async def main() -> None:
        async with world() as w:
            w.links.set("a", "b", "drop")
            a = await w.call(A)
            a.writer.write(b"hello")
            await until(lambda: w.links.of("a", "b").lost == 5)
            a.writer.close()
            w.links.heal()
            await until(lambda: not w.links.connections)
            assert w.echo.heard == b""

    run(main())


def test_what_is_held_up_comes_later_in_order_with_the_end() -> None:
    async def main() -> None:
        async with world() as w:
            a = await w.call(A)
            await a.says(b"1")
            w.links.set("a", "b", "hold")
            a.writer.write(b"2")
            late = await w.call(A)
            late.writer.write(b"4")
            await asyncio.sleep(0.05)
            assert w.echo.heard == b"1"
            a.writer.write(b"3")
            a.writer.close()
            assert w.echo.ended == 0
            w.links.set("a", "b", "open")
            await until(lambda: w.echo.ended == 1 and sorted(w.echo.heard) == sorted(b"1234"))
            assert w.echo.heard.index(b"2") < w.echo.heard.index(b"3")

    run(main())


def test_a_slow_link_keeps_the_order() -> None:
    async def main() -> None:
        async with world() as w:
            w.links.slow("a", "b", 0.05, 0.05)
            a = await w.call(A)
            before = asyncio.get_running_loop().time()
            for number in range(5):
                a.writer.write(b"%d" % number)
                await asyncio.sleep(0.005)
            async with asyncio.timeout(5):
                assert await a.reader.readexactly(5) == b"01234"
            assert asyncio.get_running_loop().time() - before >= 0.05

    run(main())


def test_nobody_behind_it() -> None:
    async def main() -> None:
        links = Links()
        async with Proxy(links, "b", ("127.0.1.12", 0), (B, 1)) as proxy:
            reader, writer = await asyncio.open_connection("127.0.1.12", proxy.port)
            assert await Caller(reader, writer).gone()
            writer.close()

    run(main())


def test_a_client_lives_through_it(tmp_path: Path) -> None:
    async def main() -> None:
        links = Links()
        async with (
            node(tmp_path) as running,
            Proxy(links, "n1", ("127.0.1.12", 0), ("127.0.0.1", running.port)) as proxy,
        ):
            where = f"127.0.1.12:{proxy.port}"
            async with await connect(where, data=tmp_path, timeout=10) as client:
                await client.ensure("orders")
                await client.publish("orders", "a", id="a")
                links.set("n1", "clients", "hold")
                task = asyncio.create_task(client.publish("orders", "b", id="b"))
                await asyncio.sleep(0.05)
                assert not task.done()
                links.set("clients", "n1", "cut")
                links.heal()
                assert await task == 1
                assert (await client.describe("orders"))["end"] == 2

    run(main())
