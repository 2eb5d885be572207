"""Connections that are cut: nothing comes twice or out of order, and no lost ack is called safe."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Proxy, node, nothing, run, stored, take, until
from tests.broker.server.hard_times import Cutter, Gate, code_of, sessions

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.publisher import Batch


async def until_true(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that has to be asked for."""
    async with asyncio.timeout(DEADLINE):
        while not await holds():
            await asyncio.sleep(0.01)


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
