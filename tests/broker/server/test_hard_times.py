"""A real node over TCP in hard times: consumers and nodes that die, slow ones, full sockets, cut connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import (
    DEADLINE,
    QUIET,
    Proxy,
    Raw,
    Running,
    die,
    node,
    nothing,
    run,
    stored,
    take,
    until,
)

import railgun.broker.log.disk as disk_module
import railgun.broker.server.server as server_module
import railgun.client.client as client_module
from railgun.broker.server.session import MAX_UNSTORED_BYTES, Consumer, Session
from railgun.client.client import Client, connect
from railgun.client.errors import DeadlineError, NoAnswerError, StreamsError
from railgun.client.message import Message
from railgun.client.publisher import Batch
from railgun.client.subscription import Subscription
from railgun.transport.commands import LARGEST, VERSION, Frame, encode
from railgun.transport.hello import NONCE, Dialer
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build, head


async def code_of(call: Awaitable[object]) -> str:
    """What a call is refused with; nothing if it is not."""
    try:
        await call
    except StreamsError as error:
        return error.code
    return ""


async def until_true(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that has to be asked for."""
    async with asyncio.timeout(DEADLINE):
        while not await holds():
            await asyncio.sleep(0.01)


def sessions(running: Running) -> list[Session]:
    """Those of the node."""
    assert running.server is not None
    return list(running.server.sessions.values())


def unsent(running: Running) -> int:
    """Bytes that wait for the client that has most of them."""
    return max(session._outbox.unsent for session in sessions(running))


class Gate:
    """The disk of a node: while it is shut, nothing that is committed gets to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = 0.0
        self._open = threading.Event()
        self._open.set()
        sync = disk_module._NodeFile.sync

        def gated(file: disk_module._NodeFile) -> None:
            if threading.current_thread().name.startswith("railgun-commit"):
                self._open.wait()
                time.sleep(self.slow)
            sync(file)

        monkeypatch.setattr(disk_module._NodeFile, "sync", gated)

    def __enter__(self) -> Gate:
        self._open.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.set()


class Cutter(Proxy):
    """A proxy that cuts after so many bytes, drawn anew each time, in the middle of whatever it is."""

    def __init__(self, port: int, seed: int, cuts: int, least: int, most: int) -> None:
        super().__init__(port)
        self.cuts = 0
        self._draw = random.Random(seed)
        self._most_cuts, self._range = cuts, (least, most)
        self._left = 0

    async def __aenter__(self) -> Cutter:
        await super().__aenter__()
        return self

    def begin(self) -> None:
        """From now on."""
        self._left = self._draw.randint(*self._range)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._left and len(data) >= self._left:
                    sink.write(data[: self._left])
                    with contextlib.suppress(OSError):
                        await sink.drain()
                    self.cuts += 1
                    self._left = 0
                    if self.cuts < self._most_cuts:
                        self.begin()
                    self.cut()
                    return
                if self._left:
                    self._left -= len(data)
                sink.write(data)
        sink.close()


# ---------------------------------------------------------------- consumers that die


@pytest.mark.parametrize("seed", [1, 2])
def test_consumers_that_die_over_and_over_lose_nothing(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        count = 1000
        async with node(tmp_path) as running:
            publisher = await running.client()
            await publisher.ensure("orders")
            deliveries: Counter[int] = Counter()  # the highest number each message came with
            safe: set[int] = set()
            deaths = 0

            async def publish() -> None:
                for first in range(0, count, 100):
                    payloads = [b"%d" % n for n in range(first, first + 100)]
                    await publisher.publish_many("orders", payloads)

            async def live() -> None:
                """Take messages, ack some, and die with the others."""
                nonlocal deaths
                client = await running.client()
                sub = await client.subscribe("orders", group="g", prefetch=draw.randint(1, 80))
                found: list[Message] = []
                for _ in range(draw.randint(1, 6)):
                    try:
                        found = await sub.batch(draw.randint(1, 40), QUIET)
                    except TimeoutError:
                        break
                    for message in found:
                        offset = message.offset
                        assert message.payload == b"%d" % offset
                        assert offset not in safe, f"{offset} was done with"
                        assert message.delivery > deliveries[offset]
                        deliveries[offset] = message.delivery
                    some = draw.sample(found, draw.randint(0, len(found)))
                    sub.ack_all(some)
                    if draw.random() < 0.7:
                        await sub.flush()
                        safe.update(message.offset for message in some)
                if draw.random() < 0.3:
                    for message in found:
                        message.ack()  # which the node may hear of or not
                die(client)
                deaths += 1

            async def over_and_over() -> None:
                while (await publisher.group("orders", "g"))["floor"] < count:
                    await live()

            await (await publisher.subscribe("orders", group="g")).close()
            await asyncio.gather(publish(), *(over_and_over() for _ in range(4)))
            assert set(deliveries) == set(range(count))
            assert deaths >= 10
            last = await publisher.subscribe("orders", group="g")
            assert last.offset == count
            await nothing(last)

    run(main())


# ---------------------------------------------------------------- slow consumers


def test_nobody_waits_for_a_slow_member_but_its_own_prefetch(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            clients = [await running.client() for _ in range(3)]
            await clients[0].ensure("orders")
            stuck = await clients[0].subscribe("orders", group="g", prefetch=7)
            lively = [await c.subscribe("orders", group="g", prefetch=50) for c in clients[1:]]
            count = 2000
            done: list[int] = []

            async def work(sub: Subscription) -> None:
                while len(done) < count - 7:
                    with contextlib.suppress(TimeoutError):
                        found = await sub.batch(20, QUIET)
                        sub.ack_all(found)
                        done.extend(message.offset for message in found)

            publish = clients[0].publish_many("orders", [b"%d" % n for n in range(count)])
            await asyncio.gather(publish, *map(work, lively))
            kept = [message.offset for message in await take(stuck, 7)]
            assert sorted(kept + done) == list(range(count))
            told = await clients[0].group("orders", "g")
            assert (told["code"], told["in_flight"]) == ("WAITING_FOR_ACKS", 7)
            assert told["floor"] == min(kept)

    run(main())


def test_a_group_that_does_not_read_slows_down_nobody_and_fills_no_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("orders")
            raw = await Raw.dial(running)
            subscribe = p.Subscribe(request=1, stream="orders", group="slow", credit=1000)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: bool(raw.frames))
            raw.connection.transport.pause_reading()
            sub = await other.subscribe("orders", group="fast")
            most = 0
            for n in range(20):
                await client.publish_many("orders", [b"%d" % n + b"x" * 100_000] * 20)
                for _ in range(20):
                    message = await sub.next(DEADLINE)
                    assert message.payload.startswith(b"%dx" % n)
                    message.ack()
                most = max(most, unsent(running))
            assert most < 3 << 20
            held = [s for one in sessions(running) for s in one.subscriptions.values()]
            assert all(len(s.outbox) < 100 for s in held if isinstance(s, Consumer))
            raw.connection.transport.resume_reading()

            def got() -> list[int]:
                told = [f.command for f in raw.frames if isinstance(f.command, p.Deliver)]
                return [
                    n for c in told for one in c.ranges for n in range(one.first, one.first + one.count)
                ]  # fmt: skip

            await until(lambda: len(got()) >= 400)
            assert got() == list(range(400))
            raw.connection.close()

    run(main())


@pytest.mark.parametrize("graceful", [True, False])
def test_who_never_acks_gets_its_prefetch_and_another_all_of_it(
    tmp_path: Path, graceful: bool
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            count, prefetch = 20_000, 1000
            await one.publish_many("orders", [b"%d" % n for n in range(count)])
            sub = await one.subscribe("orders", group="g", prefetch=prefetch)
            found = await take(sub, prefetch)
            assert [m.offset for m in found] == list(range(prefetch))
            await nothing(sub)
            told = await two.group("orders", "g")
            assert (told["code"], told["in_flight"]) == ("NO_CREDIT", prefetch)
            assert (told["ready"], told["credit"], told["floor"]) == (count - prefetch, 0, 0)
            assert "no member has free credit" in told["text"]
            other = await two.subscribe("orders", group="g", prefetch=count)
            if graceful:
                await sub.close()
            else:
                die(one)
            again = await take(other, count)
            first = 1 if graceful else 2
            assert {m.offset: m.delivery for m in again} == {
                n: first if n < prefetch else 1 for n in range(count)
            }
            other.ack_all(again)
            await other.flush()
            assert (await two.group("orders", "g"))["code"] == "AT_END"

    run(main())


# ---------------------------------------------------------------- a slow disk


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


# ---------------------------------------------------------------- connections that are cut


@pytest.mark.parametrize("seed", [1, 2])
def test_publishes_with_ids_come_once_however_often_the_connection_is_cut(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            watcher = await running.client()
            async with Cutter(running.port, seed, cuts=25, least=60, most=250_000) as proxy:
                client = await running.client(proxy.port)
                await client.ensure("orders")
                told: dict[bytes, int] = {}  # which offset was told of a payload
                lost: dict[bytes, str] = {}

                async def many(who: int) -> None:
                    payloads = [b"many %d %d " % (who, n) + b"x" * 900 for n in range(500)]
                    ids = [f"many {who} {n}" for n in range(500)]
                    offsets = await client.publish_many("orders", payloads, ids=ids)
                    told.update(zip(payloads, offsets, strict=True))

                async def together(who: int) -> None:
                    for turn in range(4):
                        payloads = [b"all %d %d %d" % (who, turn, n) for n in range(300)]
                        name = f"all {who} {turn}"
                        offsets = await client.publish_many("orders", payloads, id=name)
                        told.update(zip(payloads, offsets, strict=True))

                async def single(who: int) -> None:
                    for n in range(5):
                        payload = b"one %d %d" % (who, n)
                        told[payload] = await client.publish("orders", payload, id=payload)

                async def without(who: int) -> None:
                    for n in range(5):
                        payload = b"no id %d %d" % (who, n)
                        try:
                            told[payload] = await client.publish("orders", payload)
                        except StreamsError as error:
                            lost[payload] = error.code

                proxy.begin()
                await asyncio.gather(
                    *map(many, range(3)),
                    *map(together, range(3)),
                    *map(single, range(200)),
                    *map(without, range(50)),
                )
                assert proxy.cuts >= 5
            assert set(lost.values()) <= {"CONNECTION_LOST"}
            found = await stored(watcher, "orders")
            assert all(found[offset] == payload for payload, offset in told.items())
            copies = Counter(found)
            assert max(copies.values()) == 1
            assert set(copies) - set(told) <= set(lost)
            assert len(told) + len(lost) == 3 * 500 + 3 * 4 * 300 + 200 * 5 + 50 * 5
            assert not any(payload in told for payload in lost)
            at = {payload: offset for offset, payload in enumerate(found)}
            for who in range(3):
                some = [b"many %d %d " % (who, n) + b"x" * 900 for n in range(500)]
                offsets = [at[payload] for payload in some]
                assert offsets == sorted(offsets)
                for turn in range(4):
                    first = at[b"all %d %d 0" % (who, turn)]
                    whole = [b"all %d %d %d" % (who, turn, n) for n in range(300)]
                    assert found[first : first + 300] == whole

    run(main())


def test_an_id_that_is_taken_is_no_error_of_a_publish_that_was_sent_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, other = await running.client(proxy.port), await running.client()
            await client.ensure("orders")
            assert await other.publish("orders", b"by another", id="a") == 0
            assert await code_of(client.publish("orders", b"x", id="a")) == "DUPLICATE_ID"
            proxy.muted = True
            publishing = asyncio.create_task(client.publish("orders", b"x", id="a"))
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            assert await publishing == 0, "it may have been stored by the first attempt"
            assert await code_of(client.publish("orders", b"x", id="a")) == "DUPLICATE_ID"
            assert await stored(other, "orders") == [b"by another"]

    run(main())


def test_what_has_an_id_is_sent_again_though_it_travelled_with_what_has_none(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, watcher = await running.client(proxy.port), await running.client()
            await client.ensure("orders")
            proxy.muted = True
            calls = [
                client.publish("orders", b"a", id="a"),
                client.publish("orders", b"without"),
                client.publish("orders", b"b", id="b", headers={"x": "y"}),
                client.publish_many("orders", [b"c", b"d"], ids=["c", "d"]),
                client.publish_many("orders", [b"e", b"f"], ids=["e", None]),
            ]
            publishing = asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            a, without, b, cd, ef = await publishing
            assert (a, b, cd) == (0, 2, [3, 4])
            assert isinstance(without, StreamsError)
            assert without.code == "CONNECTION_LOST"
            assert ef == [5, 6]  # which had to wait, and was not under way
            assert await stored(watcher, "orders") == [
                b"a",
                b"without",
                b"b",
                b"c",
                b"d",
                b"e",
                b"f",
            ]
            sub = await watcher.subscribe("orders", start=2)
            assert (await sub.next(DEADLINE)).headers == {"x": "y"}

    run(main())


@pytest.mark.parametrize("seed", [1, 2])
def test_subscriptions_go_on_however_often_the_connection_is_cut(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            count = 3000
            publisher = await running.client()
            await publisher.ensure("orders")
            async with Cutter(running.port, seed, cuts=12, least=60, most=50_000) as proxy:
                client = await running.client(proxy.port)
                tracked = await client.subscribe("orders", group="g", prefetch=100)
                reader = await client.subscribe("orders", prefetch=200)
                columns = await client.subscribe("orders", prefetch=200)
                done: set[int] = set()
                seen: set[int] = set()

                async def publish() -> None:
                    for first in range(0, count, 100):
                        payloads = [b"%d " % n + bytes(100) for n in range(first, first + 100)]
                        await publisher.publish_many("orders", payloads)

                async def consume() -> None:
                    while len(done) < count:
                        found = await tracked.batch(30, DEADLINE)
                        assert not done & {message.offset for message in found}
                        seen.update(message.offset for message in found)
                        tracked.ack_all(found)
                        code = await code_of(tracked.flush())
                        if not code:
                            done.update(message.offset for message in found)
                            continue
                        assert code in ("CONNECTION_LOST", "ACK_STALE")  # they count, or do not
                        if (await publisher.group("orders", "g"))["floor"] == count:
                            break

                async def read() -> None:
                    for n in range(count):
                        message = await reader.next(DEADLINE)
                        assert message.offset == n
                        if n % 10 == 0:
                            await asyncio.sleep(0.001)

                async def read_columns() -> None:
                    at = 0
                    while at < count:
                        records = await columns.records(DEADLINE)
                        assert records.base == at
                        at = records.end
                        await asyncio.sleep(0.001)

                proxy.begin()
                await asyncio.gather(publish(), consume(), read(), read_columns())
                assert proxy.cuts >= 5
                assert seen == set(range(count))

    run(main())


def test_a_reader_that_takes_while_it_is_connected_anew_gets_nothing_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            count = 30_000
            await client.publish_many("orders", [b"%d" % n for n in range(count)])
            sub = await client.subscribe("orders", prefetch=count)
            assert [m.offset for m in await take(sub, 10)] == list(range(10))
            proxy.cut()
            for n in range(10, count):
                assert (await sub.next(DEADLINE)).offset == n
                if n % 5 == 0 and sub._life == 1:
                    await asyncio.sleep(0)
            assert sub._life == 2
            await nothing(sub)

    run(main())


@pytest.mark.parametrize("turns", [0, 3])
def test_acks_that_are_lost_with_the_connection_are_not_said_to_be_safe(
    tmp_path: Path, turns: int
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g")
            found = await take(sub, 3)
            await running.stop()
            await until(lambda: client._connection is None)
            sub.ack_all(found)
            for _ in range(turns):
                await asyncio.sleep(0)
            flush = asyncio.create_task(code_of(sub.flush()))
            other = asyncio.create_task(code_of(sub.flush()))
            await running.start()
            assert {await flush, await other} <= {"CONNECTION_LOST", "ACK_STALE"}
            again = await take(sub, 3)
            assert [m.offset for m in again] == [0, 1, 2]
            sub.ack_all(again)
            await sub.flush()
            assert (await client.group("orders", "g"))["floor"] == 3

    run(main())


def test_acks_on_their_way_when_the_connection_was_cut_are_not_said_to_be_safe(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, other = await running.client(proxy.port), await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="g")
            first, second = await take(sub, 2)
            proxy.cut()  # which the client has not noticed yet
            first.ack()
            await asyncio.sleep(0)
            await until(lambda: sub._life == 2)
            assert await code_of(sub.flush()) == "CONNECTION_LOST"
            await sub.flush()  # it was told
            second.ack()  # of the former life
            await until_true(lambda: _settled(other))
            assert await code_of(sub.flush()) == "ACK_STALE"
            again = await take(sub, 2)
            assert [(m.offset, m.delivery) for m in again] == [(0, 2), (1, 2)]

    async def _settled(client: Client) -> bool:
        return bool((await client.group("orders", "g"))["in_flight"] == 2)

    run(main())


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_nack_of_a_former_life_changes_nothing(tmp_path: Path, exclusive: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(5)])
            sub = await client.subscribe("orders", group="g", exclusive=exclusive)
            former = await take(sub, 5)
            proxy.cut()
            await until(lambda: client._connection is None)
            former[1].nack(delay=600)  # said to nobody
            again = await take(sub, 1)
            former[0].nack(delay=600)
            former[3].nack(delay=600)
            again += await take(sub, 4)
            assert [(m.offset, m.delivery) for m in again] == [(n, 2) for n in range(5)]
            sub.ack_all(again)
            assert await code_of(sub.flush()) in ("", "ACK_STALE")  # the nacks were
            await sub.flush()
            told = await client.group("orders", "g")
            assert (told["floor"], told["delayed"]) == (5, 0)

    run(main())


def test_a_publish_that_cannot_be_sent_again_does_no_harm_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            for stream in ("orders", "others"):
                await client.ensure(stream)
            sub = await client.subscribe("others", group="g")
            publisher = client._publisher
            send = publisher._send_batch

            def send_some(number: int, batch: Batch) -> None:
                if batch.again and batch.stream == "orders":
                    raise ValueError("no")
                send(number, batch)

            monkeypatch.setattr(publisher, "_send_batch", send_some)
            proxy.muted = True
            calls = [client.publish(stream, b"x", id="x") for stream in ("orders", "others")]
            publishing = asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: proxy.swallowed > 0)
            proxy.muted = False
            proxy.cut()
            wrong, right = await publishing
            assert isinstance(wrong, ValueError)
            assert right == 0
            assert (await sub.next(DEADLINE)).payload == b"x"

    run(main())


def test_many_messages_are_in_order_though_another_publishes_one_of_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders", duplicates="ok")
            payloads = [b"%d " % n + bytes(1000) for n in range(600)]
            ids = [f"{n}" for n in range(600)]
            with gate:
                first = asyncio.create_task(one.publish("orders", payloads[0], id="0"))
                await until(lambda: any(session._unstored for session in sessions(running)))
                many = asyncio.create_task(two.publish_many("orders", payloads, ids=ids))
                await until(lambda: sum(s._unstored for s in sessions(running)) > 500_000)
            assert await first == 0
            offsets = await many
            assert offsets == list(range(600))

    run(main())


def test_what_is_sent_after_a_message_that_waits_for_its_twin_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders", duplicates="ok")

            def publish(client: Client, payload: bytes, id: str | None = None) -> asyncio.Task[int]:
                return asyncio.create_task(client.publish("orders", payload, id=id))

            with gate:
                first = publish(one, b"a", "a")
                await until(lambda: any(session._unstored for session in sessions(running)))
                later = []
                for payload, id in (
                    (b"a", "a"),
                    (b"b", None),
                    (b"a", "a"),
                    (b"c", "c"),
                    (b"d", None),
                ):
                    later.append(publish(two, payload, id))
                    await asyncio.sleep(0)
                others = publish(one, b"e", "e")
                await until(lambda: sum(s._unstored > 0 for s in sessions(running)) == 2)
            assert await first == 0
            assert await others == 1
            assert await asyncio.gather(*later) == [0, 2, 0, 3, 4]
            assert not running.server.node.streams["orders"]._behind  # type: ignore[union-attr]

    run(main())


# ---------------------------------------------------------------- clients that go while there is no node


def test_a_client_closed_without_a_node_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            sub = await client.subscribe("orders", group="g")
            await running.stop()
            await until(lambda: client._connection is None)
            waiting = [
                asyncio.create_task(code_of(client.publish("orders", b"x", id="a"))),
                asyncio.create_task(code_of(client.publish("orders", b"x"))),
                asyncio.create_task(code_of(client.publish_many("orders", [b"x"] * 3, id="b"))),
                asyncio.create_task(code_of(client.describe("orders"))),
                asyncio.create_task(code_of(client.subscribe("orders"))),
                asyncio.create_task(code_of(sub.flush())),
            ]
            await asyncio.sleep(0.01)
            await client.close()
            async with asyncio.timeout(DEADLINE / 2):
                codes = await asyncio.gather(*waiting)
            assert set(codes) <= {"CLOSED", "CONNECTION_LOST"}
            with pytest.raises(StopAsyncIteration):
                await sub.next(DEADLINE)
            async with asyncio.timeout(DEADLINE / 2):
                assert await code_of(client.publish("orders", b"x")) == "CLOSED"
                assert await code_of(client.describe("orders")) == "CLOSED"

    run(main())


def test_a_client_closed_while_it_connects_leaves_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client = await running.client(proxy.port)
            proxy.muted = True  # the hello of the node does not come
            proxy.cut()
            await until(lambda: proxy.swallowed > 0)
            await client.close()
            proxy.muted = False
            async with asyncio.timeout(DEADLINE / 2):
                await until(lambda: not sessions(running))
                await until(lambda: not proxy.connections)

    run(main())


def test_who_gave_up_subscribing_takes_no_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            with gate:  # the group cannot be written
                with pytest.raises(DeadlineError):
                    await client.subscribe("orders", group="g", timeout=0.2)
                task = asyncio.create_task(client.subscribe("orders", group="g"))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
            sub = await client.subscribe("orders", group="g", prefetch=100)
            assert sorted(m.offset for m in await take(sub, 10)) == list(range(10))
            assert (await client.group("orders", "g"))["members"] == 1

    run(main())


def test_a_subscription_closed_while_it_is_made_again_takes_no_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, other = await running.client(proxy.port), await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            for _ in range(5):
                subs = [await client.subscribe("orders", group="g", prefetch=2) for _ in range(5)]
                proxy.cut()
                await until(lambda: client._connection is None)
                while client._connection is None:
                    await asyncio.sleep(0)
                for sub in subs:
                    await sub.close()
            await client.describe("orders")
            assert (await other.group("orders", "g"))["members"] == 0
            sub = await other.subscribe("orders", group="g")
            assert sorted(m.offset for m in await take(sub, 10)) == list(range(10))

    run(main())


def test_small_messages_with_long_ids_are_not_too_large_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            ids = [f"{n:0>200}" for n in range(50_000)]
            assert await client.publish_many("orders", [b"x"] * 50_000, ids=ids) == [*range(50_000)]
            small = asyncio.create_task(client.publish("orders", b"small"))
            large = asyncio.create_task(code_of(client.publish("orders", bytes(LARGEST))))
            assert await small == 50_000
            assert await large == "TOO_LARGE"
            sizes = (200_000, LARGEST - 100_000)  # which fit, but not together
            big = await asyncio.gather(*(client.publish("orders", bytes(n)) for n in sizes))
            assert big == [50_001, 50_002]

    run(main())


def test_a_message_that_cannot_be_sent_does_no_harm_to_those_beside_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            calls = [
                client.publish("orders", b"a", id="a"),
                client.publish("orders", b"x", id="x" * 256),
                client.publish_many("orders", [b"b", b"c"]),
                client.publish_many("orders", [b"x", b"x", b"x"], ids=["one", "two"]),
                client.publish("orders", ["no bytes"]),  # type: ignore[arg-type]
                client.publish("orders", 5),  # type: ignore[arg-type]
                client.publish("orders", b"d", headers={"x": "y"}),
            ]
            told = await asyncio.gather(*calls, return_exceptions=True)
            wrong = {n for n, one in enumerate(told) if isinstance(one, Exception)}
            assert wrong == {1, 3, 4, 5}
            assert (told[0], told[2], told[6]) == (0, [1, 2], 3)
            assert await client.publish("orders", b"e") == 4
            assert await stored(client, "orders") == [b"a", b"b", b"c", b"d", b"e"]
            sub = await client.subscribe("orders")
            found = await take(sub, 5)
            assert [m.id for m in found] == [b"a", None, None, None, None]
            assert found[3].headers == {"x": "y"}

    run(main())


# ---------------------------------------------------------------- exclusive groups


@pytest.mark.parametrize(("seed", "racers"), [(1, 2), (3, 5)])
def test_an_exclusive_group_has_one_active_member_whoever_dies(
    tmp_path: Path, seed: int, racers: int
) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        count = 400
        async with node(tmp_path) as running:
            publisher = await running.client()
            await publisher.ensure("orders")
            got: list[tuple[int, int, int]] = []  # epoch, who, offset, as they came
            safe: set[int] = set()
            lives = 0

            async def live() -> None:
                nonlocal lives
                lives += 1
                who = lives
                client = await running.client()
                prefetch = draw.randint(1, 60)
                sub = await client.subscribe("orders", group="g", exclusive=True, prefetch=prefetch)
                for _ in range(draw.randint(1, 8)):
                    try:
                        found = await sub.batch(draw.randint(1, 20), QUIET)
                    except TimeoutError:
                        break
                    for message in found:
                        assert message.offset not in safe
                        got.append((message.epoch, who, message.offset))
                    some = found[: draw.randint(0, len(found))]
                    sub.ack_all(some)
                    await sub.flush()
                    safe.update(message.offset for message in some)
                    if len(some) < len(found) and draw.random() < 0.5:
                        found[len(some)].nack(delay=draw.choice([0, 0, 0.01]))
                if draw.random() < 0.5:
                    die(client)
                else:
                    await client.close()

            async def over_and_over() -> None:
                while len(safe) < count:
                    await live()

            async def publish() -> None:
                for first in range(0, count, 50):
                    payloads = [b"%d" % n for n in range(first, first + 50)]
                    await publisher.publish_many("orders", payloads)

            await asyncio.gather(publish(), *(over_and_over() for _ in range(racers)))
            assert safe == {offset for _, _, offset in got} == set(range(count))
            assert lives > racers
            assert [epoch for epoch, _, _ in got] == sorted(epoch for epoch, _, _ in got)
            holders: dict[int, int] = {}
            last: dict[int, int] = {}
            for epoch, who, offset in got:
                assert holders.setdefault(epoch, who) == who, "two members of one epoch"
                assert offset > last.get(epoch, -1), "not in order"
                last[epoch] = offset
            assert len(set(holders.values())) > 1
            told = await publisher.group("orders", "g")
            assert (told["floor"], told["in_flight"]) == (count, 0)

    run(main())


def test_members_of_an_exclusive_group_come_back_and_none_is_active_beside_another(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        draw = random.Random(1)
        count = 600
        async with node(tmp_path) as running, contextlib.AsyncExitStack() as stack:
            publisher = await running.client()
            await publisher.ensure("orders")
            got: list[tuple[int, tuple[int, int], int]] = []  # epoch, who in which life, offset
            safe: set[int] = set()
            cutters: list[Cutter] = []

            async def member(who: int) -> None:
                cutter = Cutter(running.port, who, cuts=15, least=60, most=10_000)
                proxy = await stack.enter_async_context(cutter)
                client = await running.client(proxy.port)
                sub = await client.subscribe("orders", group="g", exclusive=True, prefetch=40)
                cutters.append(cutter)
                cutter.begin()
                while (await publisher.group("orders", "g"))["floor"] < count:
                    try:
                        found = await sub.batch(draw.randint(1, 30), QUIET)
                    except TimeoutError:
                        continue
                    for message in found:
                        assert message.offset not in safe
                        got.append((message.epoch, (who, sub._life), message.offset))
                    some = found[: draw.randint(0, len(found))]
                    sub.ack_all(some)
                    code = await code_of(sub.flush())
                    assert code in ("", "ACK_STALE", "CONNECTION_LOST")
                    if not code:
                        safe.update(message.offset for message in some)
                    if len(some) < len(found):  # what is neither acked nor nacked stays with it
                        found[len(some)].nack()

            publish = publisher.publish_many("orders", [b"%d" % n for n in range(count)])
            await (await publisher.subscribe("orders", group="g", exclusive=True)).close()
            await asyncio.gather(publish, *map(member, range(3)))
            assert sum(cutter.cuts for cutter in cutters) >= 5
            assert {offset for _, _, offset in got} == set(range(count))
            holders: dict[int, tuple[int, int]] = {}
            last: dict[int, int] = {}
            for epoch, who, offset in got:
                assert holders.setdefault(epoch, who) == who, "two members of one epoch"
                assert offset > last.get(epoch, -1), "not in order"
                last[epoch] = offset

    run(main())


def test_a_member_of_an_exclusive_group_that_was_cut_off_acks_in_vain(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            one, two = await running.client(proxy.port), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(6)])
            first = await one.subscribe("orders", group="g", exclusive=True)
            second = await two.subscribe("orders", group="g", exclusive=True)
            former = await take(first, 6)
            proxy.cut()
            found = await take(second, 6)
            assert [(m.offset, m.delivery) for m in found] == [(n, 2) for n in range(6)]
            assert found[0].epoch > former[0].epoch
            await until(lambda: first._life == 2)  # it stands by
            first.ack_all(former)
            assert await code_of(first.flush()) == "ACK_STALE"
            former[0].nack()
            assert (await two.group("orders", "g"))["floor"] == 0
            second.ack_all(found[:3])
            await second.flush()
            await nothing(first)
            die(two)
            again = await take(first, 3)
            assert [(m.offset, m.delivery) for m in again] == [(n, 3) for n in range(3, 6)]
            first.ack_all(again)
            assert await code_of(first.flush()) in ("", "ACK_STALE")  # of the nack
            await first.flush()
            assert (await one.group("orders", "g"))["floor"] == 6

    run(main())


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_nack_of_what_was_acked_changes_nothing(tmp_path: Path, exclusive: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(20)])
            sub = await client.subscribe("orders", group="g", exclusive=exclusive, prefetch=5)
            for n in range(0, 20, 2):
                found = await take(sub, 2)
                assert [(m.offset, m.delivery) for m in found] == [(n, 1), (n + 1, 1)]
                found[0].ack()
                found[0].nack()
                sub.ack_all(found[1:])
                found[1].nack(delay=600)
            assert await code_of(sub.flush()) == "ACK_STALE"
            await sub.flush()
            assert (await client.group("orders", "g"))["code"] == "AT_END"

    run(main())


def test_a_request_is_answered_once_also_if_a_part_of_it_is_stale(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(6)])
            raw = await Raw.dial(running)
            subscribe = p.Subscribe(request=1, stream="orders", group="g", credit=10)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: any(isinstance(f.command, p.Deliver) for f in raw.frames))
            raw.frames.clear()
            ranges = [
                p.Range(first=first, count=1, delivery=delivery)
                for first, delivery in ((0, 1), (1, 7), (2, 1), (3, 8), (99, 1))
            ]
            raw.connection.send(b"".join(encode(p.Ack(request=5, ranges=ranges), (), 3)))
            raw.connection.send(
                b"".join(encode(p.Ack(request=6, ranges=ranges[2:3]), (), 3))
                + b"".join(encode(p.Ack(request=7), (), 3))
            )
            await until(lambda: any(getattr(f.command, "request", 0) == 7 for f in raw.frames))
            told = Counter(f.command.request for f in raw.frames if f.command.request)
            assert told == {5: 1, 6: 1, 7: 1}
            codes = {f.command.request: getattr(f.command, "code", "") for f in raw.frames}
            assert (codes[5], codes[6], codes[7]) == ("ACK_STALE", "ACK_STALE", "")
            told_group = await client.group("orders", "g")
            assert (told_group["floor"], told_group["in_flight"]) == (1, 4)
            raw.connection.close()

    run(main())


# ---------------------------------------------------------------- nodes that die, and nodes that stop


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


# ---------------------------------------------------------------- ephemeral streams


def test_who_does_not_read_an_ephemeral_stream_fills_no_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("news", kind="ephemeral")
            raw = await Raw.dial(running)
            for channel, group in ((3, ""), (4, "g")):
                told = p.Subscribe(request=channel, stream="news", group=group, credit=100_000)
                raw.connection.send(b"".join(encode(told, (), channel)))
            await until(lambda: len(raw.frames) == 2)
            raw.connection.transport.pause_reading()
            alone = await other.subscribe("news", prefetch=10_000)
            member = await other.subscribe("news", group="g", prefetch=10_000)
            count, most = 2000, 0
            for n in range(0, count, 20):
                payloads = [b"%d " % m + bytes(100_000) for m in range(n, n + 20)]
                assert await client.publish_many("news", payloads) == [3] * 20
                most = max(most, unsent(running))
                assert [int(m.payload.split()[0]) for m in await take(alone, 20)] == [
                    *range(n, n + 20)
                ]
                member._messages.clear()
            assert most < 64 << 20
            for _ in range(2000):  # nor does it by what it is told of its losses
                await client.publish("news", b"small")
                most = max(most, unsent(running))
            assert most < 64 << 20
            assert alone.lost == 0
            raw.connection.transport.resume_reading()

            def got() -> Counter[int]:
                """Messages and losses of each channel."""
                found: Counter[int] = Counter()
                for frame in raw.frames:
                    if isinstance(frame.command, p.Deliver):
                        found[frame.channel] += head(frame.blob).count
                    elif isinstance(frame.command, p.Lost):
                        found[-frame.channel] += frame.command.count
                return found

            await until(lambda: got()[3] + got()[-3] == count + 2000)
            assert got()[-3] > 0
            assert 0 < got()[4] < count // 2  # the other member has got the rest
            before = got()[3]
            await client.publish("news", b"again")
            await until(lambda: got()[3] == before + 1)  # it reads: it gets messages again
            raw.connection.close()

    run(main())


def test_a_member_that_does_not_read_leaves_the_messages_to_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("news", kind="ephemeral")
            raw = await Raw.dial(running)
            told = p.Subscribe(request=1, stream="news", group="g", credit=1_000_000)
            raw.connection.send(b"".join(encode(told, (), 3)))
            await until(lambda: bool(raw.frames))
            raw.connection.transport.pause_reading()
            for _ in range(60):  # until its socket is full
                await client.publish("news", bytes(1_000_000))
            member = await other.subscribe("news", group="g", prefetch=500)
            for n in range(300):
                assert await client.publish("news", b"%d" % n) == 1
            assert [m.payload for m in await take(member, 300)] == [b"%d" % n for n in range(300)]
            raw.connection.transport.abort()

    run(main())


# ---------------------------------------------------------------- requests


def test_whose_responder_dies_is_told_by_the_node_that_time_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, responder = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            sub = await responder.subscribe("ask")
            asked = asyncio.create_task(code_of(client.request("ask", b"what?", timeout=0.3)))
            message = await sub.next(DEADLINE)
            die(responder)
            assert await asked == "RS_TIMEOUT"
            late = await running.client()
            assert await code_of(late.respond(message.response, b"late")) == "RS_GONE"
            assert await code_of(client.request("ask", b"what?")) == "NO_CONSUMERS"
            assert not any(session._requests for session in sessions(running))

    run(main())


def test_who_asks_a_node_that_is_gone_is_told_at_its_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, responder = await running.client(proxy.port), await running.client()
            await client.ensure("ask", kind="ephemeral")
            sub = await responder.subscribe("ask")
            real = client._deadline
            monkeypatch.setattr(client, "_deadline", lambda timeout: real((timeout or 0) - 4.9))
            proxy.muted = True  # neither the answer comes, nor the timeout of the node
            asked = asyncio.create_task(code_of(client.request("ask", b"what?", timeout=0.2)))
            await (await sub.next(DEADLINE)).respond(b"this")
            assert await asked == "DEADLINE"
            assert not client._answers

    run(main())


def test_a_thousand_requests_of_which_a_dying_responder_has_some(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("ask", kind="ephemeral")
            responders = [await running.client() for _ in range(3)]
            subs = [await c.subscribe("ask", group="g", prefetch=500) for c in responders]
            answered: set[bytes] = set()

            async def answer(message: Message) -> None:
                code = await code_of(message.respond(b"re " + message.payload))
                assert code in ("", "RS_GONE")  # it was too late, on a slow machine
                if not code:
                    answered.add(message.payload)

            async def answer_all(sub: Subscription) -> None:
                async for message in sub:
                    await answer(message)

            async def die_with_some() -> None:
                for n in range(50):
                    message = await subs[2].next(DEADLINE)
                    if n % 2:
                        await answer(message)
                die(responders[2])

            work = [asyncio.create_task(answer_all(sub)) for sub in subs[:2]]
            work.append(asyncio.create_task(die_with_some()))
            asked = [client.request("ask", b"%d" % n, timeout=2.0) for n in range(1000)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            good = {n for n, one in enumerate(told) if one == b"re %d" % n}
            assert good == set(map(int, answered))
            late = [one for n, one in enumerate(told) if n not in good]
            assert len(late) >= 25
            assert all(isinstance(one, NoAnswerError) for one in late)
            assert {one.code for one in late if isinstance(one, NoAnswerError)} == {"RS_TIMEOUT"}
            for n in range(100):
                assert await client.request("ask", b"%d" % n) == b"re %d" % n
            assert running.server is not None
            assert not len(running.server.node.responses)
            for task in work:
                task.cancel()

    run(main())
