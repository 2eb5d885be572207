"""Consumers and responders that die or do not read harm nobody else, at a real node over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

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
    take,
    until,
)
from tests.broker.server.hard_times import code_of, sessions

from railgun.broker.server.session import Consumer
from railgun.client.errors import NoAnswerError
from railgun.client.message import Message
from railgun.client.subscription import Subscription
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import head


def unsent(running: Running) -> int:
    """Bytes that wait for the client that has most of them."""
    return max(session._outbox.unsent for session in sessions(running))


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
