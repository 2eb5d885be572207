"""Nodes that are killed or stop in order lose and double nothing, and their clients go on at the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Proxy, node, run, stored, take, until
from tests.broker.server.hard_times import Gate, code_of, sessions

import railgun.client.client as client_module
from railgun.client.client import Client, connect
from railgun.client.subscription import Subscription
from railgun.transport.commands import VERSION, Frame
from railgun.transport.hello import NONCE, Dialer


class Life:
    """Publishers with IDs and a consumer that flushes its acks, through whatever happens to the node."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.told: dict[bytes, int] = {}
        self.safe: set[int] = set()
        self.seen: set[int] = set()
        self.over = False

    async def single(self, who: int) -> None:
        """One by one, each with an ID."""
        n = 0
        while not self.over:
            payload = b"one %d %d" % (who, n)
            self.told[payload] = await self.client.publish("orders", payload, id=payload)
            n += 1
            await asyncio.sleep(0.002)

    async def many(self, who: int) -> None:
        """Some at a time, with one ID or with one each."""
        turn = 0
        while not self.over:
            payloads = [b"many %d %d %d" % (who, turn, n) for n in range(40)]
            if turn % 2:
                name = f"many {who} {turn}"
                offsets = await self.client.publish_many("orders", payloads, id=name)
                assert offsets == list(range(offsets[0], offsets[0] + 40))
            else:
                offsets = await self.client.publish_many("orders", payloads, ids=payloads)
            assert offsets == sorted(offsets)
            self.told.update(zip(payloads, offsets, strict=True))
            turn += 1
            await asyncio.sleep(0.002)

    async def consume(self, sub: Subscription) -> None:
        """Take, ack, and wait for it."""
        while True:
            found = await sub.batch(50)
            offsets = {message.offset for message in found}
            assert not self.safe & offsets, "it was done with"
            self.seen |= offsets
            sub.ack_all(found)
            code = await code_of(sub.flush())
            assert code in ("", "CONNECTION_LOST", "ACK_STALE", "CLOSED")
            if not code:
                self.safe |= offsets

    async def through(self, trouble: Callable[[], Awaitable[None]], times: int) -> None:
        """Live through this, and look at what is there."""
        await self.client.ensure("orders")
        sub = await self.client.subscribe("orders", group="g", prefetch=200)
        publishing = [asyncio.create_task(self.single(n)) for n in range(20)]
        publishing += [asyncio.create_task(self.many(n)) for n in range(3)]
        consuming = asyncio.create_task(self.consume(sub))
        for _ in range(times):
            before = len(self.told)
            await until(lambda before=before: len(self.told) > before + 100)  # type: ignore[misc]
            await trouble()
        self.over = True
        await asyncio.gather(*publishing)
        await until(lambda: consuming.done() or len(self.seen) >= len(self.told))
        if not consuming.cancel():
            consuming.result()
        found = await stored(self.client, "orders")
        assert {payload: offset for offset, payload in enumerate(found)} == self.told
        assert len(found) == len(self.told)
        assert self.seen == set(range(len(found)))


_MOTHER = """
import asyncio, os, signal, sys
from pathlib import Path
from railgun.broker.server.server import Server, ServerConfig
async def main(port):
    server = Server(ServerConfig(Path(sys.argv[1]), port=port))
    await server.start()
    print(os.getpid(), server.port, flush=True)
    await asyncio.Event().wait()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        asyncio.run(main(int(line)))
"""


class Mortal:
    """A node in a process of its own. A process that has loaded everything stands by to make the next one."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = 0
        self._pid = 0
        self._mother: asyncio.subprocess.Process

    async def __aenter__(self) -> Mortal:
        self._mother = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MOTHER, str(self.data)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()
        await self._mother.communicate(b"")

    async def start(self) -> None:
        """Start it, where it was before."""
        assert self._mother.stdin is not None
        assert self._mother.stdout is not None
        self._mother.stdin.write(b"%d\n" % self.port)
        async with asyncio.timeout(DEADLINE):
            self._pid, self.port = map(int, (await self._mother.stdout.readline()).split())

    async def kill(self) -> None:
        """End it without a word."""
        os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(self._pid, 0)
                await asyncio.sleep(0.001)


def test_what_was_acknowledged_is_there_once_however_often_the_node_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_PAUSES_S", (0.05, 0.1))

    async def main() -> None:
        async with Mortal(tmp_path) as running:
            client = await connect(f"127.0.0.1:{running.port}", data=tmp_path, timeout=3 * DEADLINE)

            async def kill() -> None:
                await running.kill()
                await running.start()

            await Life(client).through(kill, 10)
            await client.close()

    run(main())


@pytest.mark.parametrize("slow", [0.0, 0.02])
def test_a_node_that_stops_in_order_fails_no_publish_with_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    gate = Gate(monkeypatch)
    gate.slow = slow

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client(timeout=3 * DEADLINE)
            await Life(client).through(running.again, 10)

    run(main())


def test_whoever_says_hello_to_a_node_that_stops_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            assert running.server is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            dialer = Dialer(running.server.secret, bytes(NONCE), {"version": VERSION, "name": "x"})
            writer.write(dialer.start())
            hello = await reader.read(1000)
            with gate:
                publish = asyncio.create_task(client.publish("orders", b"x"))
                (session,) = sessions(running)
                await until(lambda: session._unstored > 0)
                stopping = asyncio.create_task(running.stop())
                await until(lambda: session.paused)
                writer.write(dialer.feed(hello))
                async with asyncio.timeout(DEADLINE / 2):
                    assert b"about to end" in await reader.read()
            await stopping
            assert await publish == 0  # what it had taken was answered
            writer.close()

    run(main())


def test_a_publish_with_ids_that_a_stopping_node_takes_no_more_goes_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            said: list[str] = []
            take_frame = two._take

            def listen(frame: Frame) -> None:
                said.append(getattr(frame.command, "code", ""))
                take_frame(frame)

            monkeypatch.setattr(two, "_take", listen)
            with gate:
                first = asyncio.create_task(one.publish("orders", b"a", id="a"))
                await until(lambda: any(session._unstored for session in sessions(running)))
                twin = asyncio.create_task(  # a part of it waits for what becomes of the first
                    two.publish_many("orders", [b"a", b"b"], ids=["a", "b"])
                )
                await until(lambda: all(session._unstored for session in sessions(running)))
                stopping = asyncio.create_task(running.stop())
                await until(lambda: all(session.paused for session in sessions(running)))
            await stopping
            assert await first == 0
            assert said[-1] == "CLOSED"
            await running.start()
            assert await twin == [0, 1]
            assert await stored(one, "orders") == [b"a", b"b"]

    run(main())


def test_a_subscription_made_again_at_a_node_that_stops_goes_on_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            await client.publish("orders", b"x")
            sub = await client.subscribe("orders", group="g", exclusive=True)
            await take(sub, 1)
            (former,) = sessions(running)
            with gate:  # the group's new epoch cannot be written
                proxy.cut()
                await until(
                    lambda: any(s.subscriptions for s in sessions(running) if s is not former)
                )
                stopping = asyncio.create_task(running.stop())
                await until(lambda: all(session.paused for session in sessions(running)))
            await stopping
            await running.start()
            message = await sub.next(DEADLINE)
            assert (message.offset, message.payload) == (0, b"x")
            message.ack()
            await sub.flush()

    run(main())


def test_a_subscription_that_is_made_again_late_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            await client.publish("orders", b"x")
            sub = await client.subscribe("orders", group="g", exclusive=True)
            await take(sub, 1)
            client.timeout = 0.1
            with gate:
                proxy.cut()
                await until(lambda: client._connection is None)
                await until(lambda: bool(client._answers))
                await until(lambda: not client._answers)  # its deadline has passed
            message = await sub.next(DEADLINE)
            assert (message.offset, message.delivery) == (0, 2)

    run(main())
