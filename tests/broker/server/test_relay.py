"""Clients of one node and streams of another: what is passed on, and in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.cluster.several import SECRET, several
from tests.broker.running import DEADLINE, Raw, nothing, refused, run, stored, take, until
from tests.broker.server.relaying import numbers, session_at

from railgun.broker.errors import StoppingError
from railgun.broker.server.session import Session
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.transport.commands import VERSION, encode
from railgun.transport.connection import Connection
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build

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


# ---------------------------------------------------------------- safety, names and secrets


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
