"""Ephemeral and response streams at one node over TCP, row by row."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Raw, die, node, refused, run, take, until

from railgun.client.errors import NoAnswerError, StreamsError
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build

# ---------------------------------------------------------------- ES


def test_es_topics_and_matchers(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news", kind="ephemeral")
            assert await client.publish("news", b"x", topic="a.b") == 0
            every = await client.subscribe("news")
            some = await client.subscribe("news", matcher="a.*")
            tail = await client.subscribe("news", matcher="#.z")
            topics = {"": 1, "a": 1, "a.b": 2, "a.z": 3, "a.b.z": 2, "z": 2}
            for topic, matched in topics.items():
                assert await client.publish("news", topic, topic=topic) == matched, topic
            assert [m.topic for m in await take(every, 6)] == list(topics)
            assert [m.topic for m in await take(some, 2)] == ["a.b", "a.z"]
            assert [m.topic for m in await take(tail, 3)] == ["a.z", "a.b.z", "z"]
            await refused("BAD_TOPIC", client.publish("news", b"x", topic="a..b"))
            await refused("BAD_MATCHER", client.subscribe("news", matcher="a..#"))
            await refused("BAD_MATCHER", client.subscribe("news", matcher="#.a.#.b.#"))

    run(main())


def test_es_a_group_gets_each_message_once_and_there_are_no_acks(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("news", kind="ephemeral")
            subs = [await client.subscribe("news", group="g") for _ in range(3)]
            alone = await client.subscribe("news")
            for n in range(9):
                assert await client.publish("news", b"%d" % n) == 2
            got = [[m.payload for m in await take(sub, 3)] for sub in subs]
            assert sorted(payload for some in got for payload in some) == [
                b"%d" % n for n in range(9)
            ]
            assert all(some == sorted(some) for some in got)
            found = await take(alone, 9)
            assert [m.payload for m in found] == [b"%d" % n for n in range(9)]
            for say in (found[0].ack, found[0].nack, found[0].in_progress):
                with pytest.raises(StreamsError) as caught:
                    say()
                assert caught.value.code == "NO_ACKS"
            raw = await Raw.dial(running)
            raw.connection.send(
                b"".join(encode(p.Subscribe(request=1, stream="news", credit=1), (), 3))
                + b"".join(encode(p.Ack(request=2, ranges=[p.Range(first=0, count=1)]), (), 3))
            )
            await until(lambda: "NO_ACKS" in raw.codes())
            raw.connection.close()

    run(main())


def test_es_a_slow_consumer_loses_the_newest_and_holds_nobody_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("news", kind="ephemeral")
            slow = await other.subscribe("news", prefetch=10)
            raw = await Raw.dial(running)  # does not read at all
            subscribe = p.Subscribe(request=1, stream="news", credit=50)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: bool(raw.frames))
            raw.connection.transport.pause_reading()
            began = time.monotonic()
            for n in range(200):
                assert await client.publish("news", b"%03d" % n + b"x" * 50_000) == 2
            assert time.monotonic() - began < 5
            await until(lambda: slow.lost == 190)
            assert [m.payload[:3] for m in await take(slow, 10)] == [b"%03d" % n for n in range(10)]
            await asyncio.sleep(0.05)  # the node hears that there is room
            await client.publish("news", b"new")
            assert (await slow.next(DEADLINE)).payload == b"new"
            raw.connection.transport.abort()

    run(main())


# ---------------------------------------------------------------- RS


def test_rs_the_first_answer_wins_and_later_ones_find_it_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            subs = [await other.subscribe("ask") for _ in range(2)]
            request = asyncio.create_task(client.request("ask", b"what?"))
            one, two = [await sub.next(DEADLINE) for sub in subs]
            assert one.response == two.response
            await refused("NO_STREAM", other.subscribe(one.response))
            await one.respond(b"this")
            await refused("RS_GONE", two.respond(b"that"))
            assert await request == b"this"

    run(main())


def test_rs_who_does_not_want_to_know_is_not_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("questions", kind="ephemeral")
            sub = await client.subscribe("questions")
            for text in ("one", "two"):
                asked = asyncio.create_task(client.request("questions", text))
                question = await sub.next(DEADLINE)
                await question.respond(text.upper(), confirm=False)
                assert await asked == text.upper().encode()
                await question.respond("too late", confirm=False)
                await refused("RS_GONE", question.respond("too late"))

    run(main())


def test_rs_the_server_tells_the_timeout_and_that_nobody_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            began = time.monotonic()
            error = await refused("NO_CONSUMERS", client.request("ask", b"what?"))
            assert isinstance(error, NoAnswerError)
            assert time.monotonic() - began < 1
            sub = await other.subscribe("ask", matcher="q.#")
            await refused("NO_CONSUMERS", client.request("ask", b"what?", topic="z"))
            began = time.monotonic()
            await refused("RS_TIMEOUT", client.request("ask", b"what?", topic="q", timeout=0.2))
            assert 0.19 < time.monotonic() - began < 2
            await refused("RS_GONE", (await sub.next(DEADLINE)).respond(b"late"))

    run(main())


def test_rs_each_request_has_its_own_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            await other.subscribe("ask")
            over: list[float] = []

            async def ask(timeout: float) -> None:
                await refused("RS_TIMEOUT", client.request("ask", b"what?", timeout=timeout))
                over.append(timeout)

            await asyncio.gather(*map(ask, (0.6, 0.2, 0.4, 0.1)))
            assert over == [0.1, 0.2, 0.4, 0.6]

    run(main())


def test_rs_ends_with_who_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("ask", kind="ephemeral")
            sub = await other.subscribe("ask")
            request = asyncio.create_task(client.request("ask", b"what?", timeout=0.4))
            message = await sub.next(DEADLINE)
            assert running.server is not None
            before = len(running.server.sessions)
            die(client)
            await until(lambda: len(running.server.sessions) < before)  # type: ignore[union-attr]
            await refused("RS_GONE", message.respond(b"this"))
            request.cancel()
            await asyncio.sleep(0.45)  # its timeout finds nothing, and nobody
            assert await other.publish("ask", b"x") == 1

    run(main())


def test_rs_a_name_is_awaited_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("ask", kind="ephemeral")
            await client.subscribe("ask")
            raw = await Raw.dial(running)
            for number in (1, 2):
                asked = p.Publish(request=number, stream="ask", response="r1", timeout=200_000)
                raw.connection.send(b"".join(encode(asked, [build([b"x"])])))
            await until(lambda: raw.codes() == ["RS_EXISTS", "RS_TIMEOUT"])
            raw.connection.close()

    run(main())
