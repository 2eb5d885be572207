"""Clients of one node and streams of another: what is passed on, in which order, and what comes of it in bad times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from tests.broker.cluster.several import SECRET, Several, several
from tests.broker.running import (
    DEADLINE,
    Proxy,
    Raw,
    die,
    nothing,
    refused,
    run,
    stored,
    take,
    until,
)

from railgun.broker.errors import StoppingError
from railgun.broker.server import upstream as upstream_module
from railgun.broker.server.session import MAX_UNSTORED_BYTES, Session
from railgun.broker.streams.listener import SOFT_UNSENT_BYTES
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.transport.commands import VERSION, encode
from railgun.transport.connection import Connection
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def session_at(nodes: Several, name: str) -> Session:
    """The one session of a node."""
    server = nodes.running[name].server
    assert server is not None
    (found,) = server.sessions.values()
    return found


async def in_vain(call: Awaitable[object]) -> None:
    """Tried until the deadline: at that moment it waits here, and nothing was done, or it waits at the node."""
    with pytest.raises(StreamsError) as caught:
        await call
    assert caught.value.code in ("NO_MASTER", "DEADLINE")


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


# ---------------------------------------------------------------- everything, through another node


def test_what_is_published_at_another_node_is_stored_at_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("a")
            offsets = [await client.publish("orders", payload) for payload in numbers(20)]
            assert offsets == list(range(20))
            assert await client.publish("orders", b"x", id="one", headers={"a": "b"}) == 20
            await refused("DUPLICATE_ID", client.publish("orders", b"x", id="one"))
            assert await client.publish_many("orders", [b"y", b"z"], id="both") == [21, 22]
            direct = await nodes.client("b")
            assert (await stored(direct, "orders"))[:20] == numbers(20)
            assert await stored(client, "orders") == await stored(direct, "orders")
            server = nodes.running["a"].server
            assert server is not None
            assert not server.node.streams

    run(main())


def test_large_batches_and_many_small_ones_keep_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("a")
            large = [bytes([n]) * 400_000 for n in range(60)]  # more than the socket takes at once
            small = numbers(5_000)
            every = [*large, *small]
            tasks = [asyncio.create_task(client.publish("orders", one)) for one in every]
            assert await asyncio.gather(*tasks) == list(range(len(every)))
            assert await stored(client, "orders") == every

    run(main())


def test_groups_acks_nacks_and_seeks_reach_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client, direct = await nodes.client("a"), await nodes.client("b")
            await client.publish_many("orders", numbers(10))
            sub = await client.subscribe("orders", group="billing", ack_wait=60.0)
            first = await take(sub, 10)
            sub.in_progress(first[9])
            sub.ack_all(first[:6])
            first[6].nack(reason="not now")
            await sub.flush()
            again = await sub.next(DEADLINE)
            assert (again.offset, again.delivery) == (6, 2)
            sub.ack(first[6])  # it is not ours by that number
            await refused("ACK_STALE", sub.flush())
            assert (await direct.group("orders", "billing"))["floor"] == 6
            await sub.close()
            sub = await client.subscribe("orders", group="billing")
            assert (sub.offset, sub.why) == (6, "position")
            assert [m.offset for m in await take(sub, 4)] == [6, 7, 8, 9]
            other = await client.subscribe("orders", start=3)
            assert [m.offset for m in await take(other, 7)] == list(range(3, 10))
            error = await refused("OFFSET_OUT_OF_RANGE", client.subscribe("orders", start=99))
            assert "99" in str(error)

    run(main())


def test_an_exclusive_group_has_members_at_different_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "b")
            one, two, three = [await nodes.client(name) for name in "abc"]
            subs = [
                await client.subscribe("orders", group="ledger", exclusive=True, prefetch=5)
                for client in (one, two, three)
            ]
            await two.publish_many("orders", numbers(30))
            got = await take(subs[0], 5)
            assert [m.offset for m in got] == list(range(5))
            await nothing(subs[1])
            got[0].nack()
            again = await subs[0].next(DEADLINE)
            assert (again.offset, again.delivery) == (0, 2)
            await subs[0].close()
            heirs: dict[asyncio.Task[object], int] = {
                asyncio.ensure_future(sub.next(DEADLINE)): n for n, sub in enumerate(subs[1:])
            }
            done, left = await asyncio.wait(heirs, return_when=asyncio.FIRST_COMPLETED)
            (first,) = done
            assert first.result().offset == 0  # type: ignore[attr-defined]
            for task in left:
                task.cancel()
            await refused("GROUP_KIND", one.subscribe("orders", group="ledger"))

    run(main())


def test_calls_about_one_stream_are_the_masters(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            await nodes.ensure("orders.dlq", "b")
            client = await nodes.client("a")
            await client.publish_many("orders", numbers(10))
            async with await client.subscribe("orders", group="g") as sub:
                await take(sub, 1)
                assert [one["name"] for one in await client.groups("orders")] == ["g"]
            assert (await client.describe("orders"))["end"] == 10
            assert await client.reset_group("orders", "g", 4) == 4
            await client.delete_group("orders", "g")
            assert await client.groups("orders") == []
            assert (await client.purge("orders", 5))["purged"] == 5
            assert (await client.redrive("orders"))["redriven"] == 0
            await refused("NO_GROUP", client.group("orders", "g"))
            await refused("NO_STREAM", client.describe("nothing"))
            await refused("NO_STREAM", client.publish("nothing", b"x"))
            await refused("NO_STREAM", client.subscribe("nothing"))
            await refused("BAD_REQUEST", client.admin("describe"))
            await refused("BAD_REQUEST", client.admin("describe", name=5))
            await refused("BAD_REQUEST", client.admin("groups", name="orders", more=1))
            assert await client.streams() == []  # it has none itself

    run(main())


def test_readers_are_served_by_whoever_has_a_copy(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "a")
            await nodes.ensure("orders", "b")  # and b is the master
            nodes.copies["orders"] = {"a", "b"}
            server = nodes.running["a"].server
            assert server is not None
            other = await nodes.client("b")
            await other.publish("orders", b"there")
            client = await nodes.client("a")
            reader = await client.subscribe("orders")
            await nothing(reader)  # the copy of a has nothing yet
            member = await client.subscribe("orders", group="g")
            assert (await member.next(DEADLINE)).payload == b"there"
            stream = server.node.get_persistent("orders")
            stream.publish([build([b"copied"])], lambda _: None)
            assert (await reader.next(DEADLINE)).payload == b"copied"

    run(main())


def test_ephemeral_streams_stay_where_the_client_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            client = await nodes.client("a")
            await client.ensure("news", kind="ephemeral")
            async with await client.subscribe("news", matcher="a.#") as sub:
                assert await client.publish("news", b"x", topic="a.b") == 1
                assert (await sub.next(DEADLINE)).payload == b"x"
            assert nodes.sessions("b") == 0

    run(main())


def test_a_channel_is_free_again_after_its_subscription_and_taken_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("here", "a")
            await nodes.ensure("there", "b")
            raw = await Raw.dial(nodes.running["a"])

            def say(command: p.Subscribe | p.Unsubscribe, channel: int) -> None:
                raw.connection.send(b"".join(encode(command, (), channel)))

            def heard(kind: type, count: int) -> list[int]:
                found = [f for f in raw.frames if isinstance(f.command, kind)]
                return [f.command.request for f in found] if len(found) >= count else []

            say(p.Subscribe(request=1, stream="there", group="g", credit=5), 7)
            await until(lambda: heard(p.Subscribed, 1) == [1])
            say(p.Subscribe(request=2, stream="here", group="g", credit=5), 7)
            say(p.Subscribe(request=3, stream="there", group="g", credit=5), 7)
            say(p.Subscribe(request=4, stream="there", credit=5), 0)
            await until(lambda: heard(p.Failed, 3) == [2, 3, 4])
            assert raw.codes() == ["BAD_CHANNEL"] * 3
            say(p.Unsubscribe(request=5), 7)
            say(p.Subscribe(request=6, stream="there", group="g", credit=5), 7)  # at once
            await until(lambda: heard(p.Subscribed, 2) == [1, 6])
            say(p.Unsubscribe(request=7), 7)
            await until(lambda: heard(p.Unsubscribed, 2) == [5, 7])
            say(p.Subscribe(request=8, stream="here", group="g", credit=5), 7)
            await until(lambda: heard(p.Subscribed, 3) == [1, 6, 8])
            say(p.Subscribe(request=9, stream="there", group="g", credit=5), 7)
            await until(lambda: raw.codes() == ["BAD_CHANNEL"] * 4)
            say(p.Subscribe(request=10, stream="there", start=p.OFFSET, offset=99, credit=5), 8)
            await until(lambda: raw.codes()[4:] == ["OFFSET_OUT_OF_RANGE"])
            say(p.Subscribe(request=11, stream="here", credit=5), 8)  # for nothing came of it
            await until(lambda: heard(p.Subscribed, 4) == [1, 6, 8, 11])
            raw.connection.close()

    run(main())


def test_a_channel_is_free_for_who_waits_for_a_master_and_begins_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            raw = await Raw.dial(nodes.running["a"])

            def say(command: p.Subscribe | p.Unsubscribe) -> None:
                raw.connection.send(b"".join(encode(command, (), 7)))

            def heard(kind: type[p.Subscribed | p.Unsubscribed | p.Failed]) -> list[int]:
                commands = [frame.command for frame in raw.frames]
                return [one.request for one in commands if isinstance(one, kind)]

            nodes.masters["orders"] = None
            for request in (1, 3, 5):
                if request > 1:
                    say(p.Unsubscribe(request=request - 1))
                say(p.Subscribe(request=request, stream="orders", group="g", credit=5))
            say(p.Subscribe(request=6, stream="orders", group="g", credit=5))
            await until(lambda: heard(p.Failed) == [6])
            assert raw.codes() == ["BAD_CHANNEL"]
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            await until(lambda: heard(p.Subscribed) == [5])
            assert heard(p.Unsubscribed) == [2, 4]
            assert sorted(heard(p.Failed)) == [1, 3, 6]  # 1 and 3 ended before they began
            client = await nodes.client("b")
            await client.publish("orders", b"x")
            await until(lambda: bool([f for f in raw.frames if isinstance(f.command, p.Deliver)]))
            raw.connection.close()

    run(main())


def test_a_subscription_that_is_lost_as_soon_as_it_is_made_again_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe, made = Session._subscribe, 0

    def lose(self: Session, channel: int, command: p.Subscribe) -> None:
        nonlocal made
        subscribe(self, channel, command)
        made += 1
        if made in (2, 3):  # the client reads this together with the answer
            self.subscriptions.pop(channel).leave(graceful=True)
            self.fail(0, StoppingError("elsewhere"), channel)

    monkeypatch.setattr(Session, "_subscribe", lose)

    async def main() -> None:
        async with several(tmp_path) as nodes:
            client = await nodes.client("a")
            await client.ensure("news", kind="ephemeral")
            async with await client.subscribe("news") as sub:
                session = session_at(nodes, "a")
                [channel] = session.subscriptions
                session.subscriptions.pop(channel).leave(graceful=True)
                session.fail(0, StoppingError("elsewhere"), channel)
                await until(lambda: made == 4)
                await client.publish("news", b"x")
                assert (await sub.next(DEADLINE)).payload == b"x"

    run(main())


# ---------------------------------------------------------------- in bad times


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


# ---------------------------------------------------------------- without a master


def test_who_finds_no_master_waits_for_one_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            await nodes.ensure("other", "b")
            nodes.masters["orders"] = None
            client = await nodes.client("a")
            publishing = [
                asyncio.create_task(client.publish("orders", payload)) for payload in numbers(50)
            ]
            subscribing = asyncio.create_task(client.subscribe("orders", group="g"))
            asking = asyncio.create_task(client.describe("orders"))
            assert await client.publish("other", b"x") == 0  # other streams go on
            await until(lambda: len(session_at(nodes, "a")._relay._lines) == 1)  # type: ignore[union-attr]
            assert not any(task.done() for task in (*publishing, subscribing, asking))
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            assert await asyncio.gather(*publishing) == list(range(50))
            assert (await asking)["name"] == "orders"
            assert [m.payload for m in await take(await subscribing, 50)] == numbers(50)
            assert session_at(nodes, "a")._unstored == 0
            assert not session_at(nodes, "a")._relay._lines  # type: ignore[union-attr]

    run(main())


def test_who_waits_in_vain_is_told_that_nothing_was_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.1
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])
            asked = json.dumps({"name": "orders"})
            for told, blobs, channel in (
                (p.Publish(request=1, stream="orders"), [build([b"x"])], 0),
                (p.Subscribe(request=2, stream="orders", group="g", credit=1), [], 3),
                (p.Admin(request=3, call="describe", arguments=asked), [], 0),
                (p.Ack(request=4), [], 3),
                (p.Unsubscribe(request=5), [], 3),
            ):
                raw.connection.send(b"".join(encode(told, blobs, channel)))
            await until(lambda: any(isinstance(f.command, p.Unsubscribed) for f in raw.frames))
            assert raw.codes() == ["NO_MASTER"] * 3 + ["NO_SUBSCRIPTION"]
            failed = [f.command for f in raw.frames if isinstance(f.command, p.Failed)]
            assert [one.request for one in failed] == [1, 2, 3, 4]
            assert all("'orders' has no master" in one.text for one in failed[:3])
            assert all("nothing was stored" in one.text for one in failed[:3])
            assert session_at(nodes, "a")._unstored == 0
            raw.connection.close()
            client = await nodes.client("a", timeout=0.5)
            for call in (
                client.publish("orders", b"x"),
                client.subscribe("orders", group="g"),
                client.describe("orders"),
            ):
                await in_vain(call)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            client.timeout = DEADLINE
            assert await client.publish("orders", b"y") == 0

    run(main())


def test_a_session_that_was_passed_on_is_not_passed_on_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            nodes.believes["a", "orders"] = "b"  # which is wrong
            client = await nodes.client("a", timeout=0.5)
            await in_vain(client.publish("orders", b"x"))
            await in_vain(client.subscribe("orders", group="g"))
            await in_vain(client.describe("orders"))
            assert nodes.sessions("c") == 0
            client.timeout = DEADLINE
            later = asyncio.create_task(client.publish("orders", b"y"))
            del nodes.believes["a", "orders"]
            assert await later == 0
            assert nodes.sessions("c") == 1

    run(main())


def test_publishes_behind_one_that_was_refused_do_not_overtake_it(tmp_path: Path) -> None:
    """They were on their way when the master came back."""

    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.05
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> None:
                told = p.Publish(request=number, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([b"%d" % number])])))

            publish(1)
            publish(2)
            await until(lambda: raw.codes() == ["NO_MASTER"] * 2)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            publish(3)  # as if it had been sent before
            await until(lambda: raw.codes() == ["NO_MASTER"] * 3)
            (ping,) = [f.command for f in raw.frames if isinstance(f.command, p.Ping)]
            raw.connection.send(b"".join(encode(p.Pong(number=ping.number))))
            for number in (1, 2, 3):
                publish(number)
            client = await nodes.client("b")
            found: list[bytes] = []
            sub = await client.subscribe("orders")
            found = [m.payload for m in await take(sub, 3)]
            assert found == [b"1", b"2", b"3"]
            raw.connection.close()

    run(main())


def test_the_node_between_refuses_too_when_the_master_has_refused(tmp_path: Path) -> None:
    """It has answered the master's ping: from then on it is the one who keeps the order."""

    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.05
            await nodes.ensure("orders", "b")
            nodes.believes["b", "orders"] = None  # but a believes that b is the master
            raw = await Raw.dial(nodes.running["a"])

            def publish(number: int) -> None:
                told = p.Publish(request=number, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([b"%d" % number])])))

            publish(1)
            await until(lambda: raw.codes() == ["NO_MASTER"])
            there = session_at(nodes, "b")
            await until(lambda: not there._relay._refusing)  # type: ignore[union-attr]
            del nodes.believes["b", "orders"]
            publish(2)
            await until(lambda: len(raw.frames) >= 3)
            assert raw.codes() == ["NO_MASTER"] * 2
            (ping,) = [f.command for f in raw.frames if isinstance(f.command, p.Ping)]
            raw.connection.send(b"".join(encode(p.Pong(number=ping.number))))
            publish(1)
            publish(2)
            client = await nodes.client("b")
            sub = await client.subscribe("orders")
            assert [m.payload for m in await take(sub, 2)] == [b"1", b"2"]
            raw.connection.close()

    run(main())


def test_so_it_is_when_the_other_node_refuses_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            nodes.wait = 0.05
            client = await nodes.client("a")
            await client.publish("orders", b"first")
            nodes.believes["b", "orders"] = None  # but a believes that b is the master
            tasks = [
                asyncio.create_task(client.publish_many("orders", [payload * 300_000]))
                for payload in (b"a", b"b", b"c", b"d", b"e", b"f")
            ]
            await until(lambda: bool(client._publisher._held))
            for _ in range(20):  # it comes and goes
                nodes.believes["b", "orders"] = None
                await asyncio.sleep(0.01)
                del nodes.believes["b", "orders"]
                nodes.changed.set()
                nodes.changed = asyncio.Event()
                await asyncio.sleep(0.005)
            await asyncio.gather(*tasks)
            found = await stored(client, "orders")
            assert [one[:1] for one in found[1:]] == [b"a", b"b", b"c", b"d", b"e", b"f"]

    run(main())


def test_what_waits_for_a_master_is_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            raw = await Raw.dial(nodes.running["a"])
            for number in range(60):
                told = p.Publish(request=number + 1, stream="orders")
                raw.connection.send(b"".join(encode(told, [build([bytes(1_000_000)])])))
            await until(lambda: nodes.sessions("a") == 1 and session_at(nodes, "a").paused)
            waiting = session_at(nodes, "a")._unstored
            assert MAX_UNSTORED_BYTES <= waiting < MAX_UNSTORED_BYTES + (2 << 20)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")

            def answers() -> list[int]:
                """The signs of life that come while the session is not read are none."""
                return [f.command.request for f in raw.frames if not isinstance(f.command, p.Pong)]

            await until(lambda: len(answers()) == 60)
            assert answers() == list(range(1, 61))
            assert session_at(nodes, "a")._unstored == 0
            raw.connection.close()

    run(main())


def test_a_master_that_cannot_be_reached_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            nodes.wait = 0.3
            await nodes.ensure("orders", "b")
            await nodes.running["b"].stop()
            client = await nodes.client("a", timeout=0.8)
            await in_vain(client.publish("orders", b"x"))
            client.timeout = DEADLINE
            later = asyncio.create_task(client.publish("orders", b"y"))
            connection = client._connection
            await nodes.start("b")
            assert await later >= 0
            assert client._connection is connection  # nothing of it was done: there was no need

    run(main())


def test_a_node_that_does_not_let_others_in_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.wait = 0.2
            await nodes.ensure("orders", "b")
            there = nodes.running["b"].server
            assert there is not None
            there.secret = b"another one that nobody knows of"
            client = await nodes.client("a", timeout=0.5)
            await in_vain(client.publish("orders", b"x"))
            assert "refuses this node" in caplog.text

    run(main())


def test_a_node_that_stops_lets_those_who_wait_try_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "b")
            nodes.masters["orders"] = None
            client = await nodes.client("ac")
            waiting = [asyncio.create_task(client.publish("orders", one)) for one in numbers(20)]
            await until(lambda: nodes.sessions("a") == 1 and session_at(nodes, "a")._unstored > 0)
            await nodes.running["a"].stop()
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            assert await asyncio.gather(*waiting) == list(range(20))  # though they have no IDs
            assert client.where[1] == nodes.running["c"].port

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


def test_levels_of_safety_travel_and_bad_ones_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("a")
            for n, acks in enumerate(("quorum", "master", "all")):
                assert await client.publish("orders", b"%d" % n, acks=acks) == n  # type: ignore[arg-type]
            assert await client.publish("orders", b"3", acks="none") == -1
            assert await client.publish_many("orders", [b"4", b"5"], acks="none") == [-1, -1]
            assert await client.publish("orders", b"6") == 6
            assert await stored(client, "orders") == numbers(7)
            await refused("BAD_REQUEST", client.publish("orders", b"x", acks="some"))  # type: ignore[arg-type]
            await refused("BAD_REQUEST", client.publish_many("orders", [], acks=5))  # type: ignore[arg-type]
            raw = await Raw.dial(nodes.running["a"])
            told = p.Publish(request=1, stream="orders", acks=9)  # type: ignore[arg-type]
            raw.connection.send(b"".join(encode(told, [build([b"x"])])))
            await until(lambda: raw.codes() == ["BAD_REQUEST"])
            raw.connection.close()

    run(main())


def test_the_name_of_the_client_is_known_at_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            await nodes.ensure("orders", "b")
            client: Client = await nodes.client("a")
            await client.publish("orders", b"x")
            there = session_at(nodes, "b")
            assert there.name.startswith("test-")
            assert there.forwarded
            assert not session_at(nodes, "a").forwarded

    run(main())


def test_who_says_it_was_passed_on_needs_the_secret_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            who = {"version": VERSION, "forwarded": True}
            await asyncio.get_running_loop().create_connection(
                lambda: Connection(
                    bytes.fromhex(SECRET)[::-1] + b"x",
                    lambda _: None,
                    lambda _, data: None,
                    lambda _, error: closed.set_result(error),
                    who,
                ),
                *("127.0.0.1", nodes.running["a"].port),
            )
            error = await closed
            assert getattr(error, "code", "") == "BAD_SECRET"
            assert not isinstance(error, StreamsError)

    run(main())
