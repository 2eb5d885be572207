"""Ephemeral streams across nodes: real nodes and links on loopback, without Raft."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.broker.cluster.linked import SECRET, Member, cluster
from tests.broker.running import DEADLINE, Raw, Running, die, nothing, refused, run, take, until

from railgun.broker.cluster import events as events_module
from railgun.broker.cluster.events import Events
from railgun.broker.cluster.links import Identity, Links
from railgun.broker.server.metrics import prometheus
from railgun.client.subscription import Subscription
from railgun.transport.commands import encode
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build


def payloads(messages: list[Any]) -> list[bytes]:
    return [message.payload for message in messages]


# ---------------------------------------------------------------- ES


def test_es_once_to_everyone_and_each_group_wherever_they_listen(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            a, b, c = [await nodes[name].client() for name in "abc"]
            alone = [await client.subscribe("news") for client in (a, b, b, c)]
            group = [await client.subscribe("news", group="g") for client in (a, b, b, c)]
            some = await c.subscribe("news", matcher="x.*")
            await nodes.know(9)
            for at in range(40):
                assert await a.publish("news", b"%02d" % at) == 5
            for sub in alone:
                assert payloads(await take(sub, 40)) == [b"%02d" % at for at in range(40)]
            got = [payloads(await take(sub, 10)) for sub in group]  # balanced: as many for each
            assert sorted(one for few in got for one in few) == [b"%02d" % at for at in range(40)]
            assert all(few == sorted(few) for few in got)
            assert await b.publish("news", b"y", topic="x.y") == 6
            assert (await some.next(DEADLINE)).topic == "x.y"
            for sub in alone:
                assert (await sub.next(DEADLINE)).payload == b"y"
            await asyncio.gather(*(sub.close() for sub in (*alone, *group)))
            await nodes.know(1)
            assert await b.publish("news", b"z", topic="x") == 0
            await nothing(some)

    run(main())


def test_es_a_message_crosses_a_link_once_and_is_not_passed_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            subs = [await b.subscribe("news") for _ in range(5)]
            subs += [await b.subscribe("news", group="g") for _ in range(2)]
            await nodes.know(7)
            assert await a.publish("news", b"one") == 6
            for sub in subs[:5]:
                assert (await sub.next(DEADLINE)).payload == b"one"
            assert nodes["b"].heard["Scatter"] == 1
            await a.publish_many("news", [b"%d" % at for at in range(50)])
            for sub in subs[:5]:
                assert payloads(await take(sub, 50)) == [b"%d" % at for at in range(50)]
            got = [m.payload for sub in subs[5:] for m in await take(sub, 25)]
            assert len(set(got)) >= 50
            assert nodes["b"].heard["Scatter"] == 2
            assert nodes["c"].heard["Scatter"] == nodes["a"].heard["Scatter"] == 0

    run(main())


def test_es_a_batch_is_shared_out_over_nodes_and_only_what_is_needed_travels(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            subs = []
            for name in "bc":
                client = await nodes[name].client()
                subs += [await client.subscribe("news", group="g", prefetch=100)]
            await nodes.know(2)
            raw = await Raw.dial(nodes["a"].running)
            blob = build([b"%02d" % at for at in range(60)]) + build(
                [b"%02d" % at for at in range(60, 80)]
            )
            raw.connection.send(b"".join(encode(p.Publish(request=1, stream="news"), [blob])))
            got = [payloads(await take(sub, 40)) for sub in subs]
            assert sorted(got[0] + got[1]) == [b"%02d" % at for at in range(80)]
            assert all(few == sorted(few) for few in got)
            assert [nodes[name].heard["Scatter"] for name in "bc"] == [1, 1]
            raw.connection.close()

    run(main())


def test_es_a_slow_consumer_elsewhere_loses_the_newest_and_holds_nobody_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            slow = await b.subscribe("news", prefetch=10)
            quick = await b.subscribe("news", prefetch=1000)
            await nodes.know(2)
            for at in range(100):
                assert await a.publish("news", b"%03d" % at) == 2
            assert payloads(await take(quick, 100)) == [b"%03d" % at for at in range(100)]
            await until(lambda: slow.lost == 90)
            assert payloads(await take(slow, 10)) == [b"%03d" % at for at in range(10)]
            await nodes.know(2)
            await a.publish("news", b"new")
            assert (await slow.next(DEADLINE)).payload == b"new"
            assert quick.lost == 0

    run(main())


def test_es_a_fast_publisher_loses_nothing_while_credit_is_on_its_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            sub = await b.subscribe("news", prefetch=200)
            await nodes.know(1)
            count = 3000
            got: list[bytes] = []

            async def publish() -> None:
                for at in range(0, count, 50):
                    few = [b"%d" % n for n in range(at, at + 50)]
                    await asyncio.gather(*(a.publish("news", one) for one in few))
                    while len(got) < at:  # never more than half of what it is ready for is ahead
                        await asyncio.sleep(0.001)

            publishing = asyncio.create_task(publish())
            while len(got) < count:
                got += payloads(await sub.batch(1000, DEADLINE))
            await publishing
            assert got == [b"%d" % at for at in range(count)]
            assert sub.lost == 0
            assert nodes["a"].heard["Interest"] < count / 10  # told by halves, not one by one

    run(main())


def test_es_the_owner_is_the_judge_of_what_several_nodes_send(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            c = await nodes["c"].client()
            slow = await c.subscribe("news", prefetch=10)
            await nodes.know(1)
            nodes["a"].deaf |= {"Interest"}
            nodes["b"].deaf |= {"Interest"}  # both believe that there is room for ten
            clients = [await nodes[name].client() for name in "ab"]
            for client in clients:
                for _ in range(8):
                    assert await client.publish("news", b"x") == 1
            await until(lambda: slow.lost == 6)
            assert len(await take(slow, 10)) == 10
            await nothing(slow)

    run(main())


def test_es_in_a_group_who_has_no_credit_elsewhere_is_not_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            stuck = await b.subscribe("news", group="g", prefetch=20)
            well = await a.subscribe("news", group="g", prefetch=20)
            await nodes.know(2)
            for at in range(40):
                assert await a.publish("news", b"%02d" % at) == 1
            got = payloads(await take(well, 20))
            await a.describe("news")  # what it has granted has come
            for at in range(40, 60):
                assert await a.publish("news", b"%02d" % at) == 1
            got += payloads(await take(well, 20)) + payloads(await take(stuck, 20))
            assert sorted(got) == [b"%02d" % at for at in range(60)]
            assert well.lost == stuck.lost == 0

    run(main())


def test_es_in_order_from_each_publisher_to_each_subscriber(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            clients = {name: await nodes[name].client() for name in "abc"}
            subs = [await client.subscribe("news", prefetch=5000) for client in clients.values()]
            group = [await clients[name].subscribe("news", group="g") for name in "bc"]
            await nodes.know(5)

            async def publish(name: str) -> None:
                each = [
                    asyncio.create_task(clients[name].publish("news", f"{name}{at:04}"))
                    for at in range(300)
                ]
                await asyncio.gather(*each)

            await asyncio.gather(*map(publish, "abc"))
            for sub in subs:
                got = payloads(await take(sub, 900))
                for name in b"abc":
                    mine = [one for one in got if one[0] == name]
                    assert mine == [b"%c%04d" % (name, at) for at in range(300)]
            shared: list[list[bytes]] = [[], []]

            async def collect(sub: Subscription, into: list[bytes]) -> None:
                while sum(map(len, shared)) < 900:
                    with contextlib.suppress(TimeoutError):
                        into += payloads(await sub.batch(100, 0.1))

            await asyncio.gather(*(collect(*one) for one in zip(group, shared, strict=True)))
            assert len(set(shared[0] + shared[1])) == 900
            for few in shared:
                for name in b"abc":
                    mine = [one for one in few if one[0] == name]
                    assert mine == sorted(mine)

    run(main())


def test_es_a_node_that_is_gone_takes_its_listeners_and_brings_them_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            a, b, c = [await nodes[name].client() for name in "abc"]
            sub = await b.subscribe("news", group="g")
            other = await c.subscribe("news", group="g")
            await nodes.know(2)
            die(b)  # a client that goes takes its listener, too
            await nodes.know(1)
            b = await nodes["b"].client()
            sub = await b.subscribe("news", group="g")
            await nodes.know(2)
            await nodes.lose("c")
            await nodes.know(1)
            for at in range(10):
                assert await a.publish("news", b"%d" % at) == 1
            assert payloads(await take(sub, 10)) == [b"%d" % at for at in range(10)]
            del other

    run(main())


@pytest.mark.parametrize("who", ["ab", "ba", "both"])
def test_es_a_lost_connection_is_made_again_and_all_is_known_anew(tmp_path: Path, who: str) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            sub = await b.subscribe("news", prefetch=50)
            left = await b.subscribe("news")
            await nodes.know(2)
            for at in range(20):
                await a.publish("news", b"%d" % at)
            assert payloads(await take(sub, 20)) == [b"%d" % at for at in range(20)]
            for pair in ["ab", "ba"] if who == "both" else [who]:
                await nodes[pair[0]].cut(pair[1])
            await left.close()
            await nodes.whole()
            await until(lambda: nodes["a"].believes() == [30])  # nothing is counted twice
            for at in range(30):
                assert await a.publish("news", b"%d" % at) == 1
            assert payloads(await take(sub, 30)) == [b"%d" % at for at in range(30)]
            await until(lambda: nodes["a"].believes() == [50])
            assert sub.lost == 0

    run(main())


def test_es_a_node_that_leaves_the_cluster_is_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["a"].links.know({})
            await until(lambda: nodes["a"].listeners() == 0)
            assert await a.publish("news", b"x") == 0
            nodes.meet()
            await nodes.know(1)
            assert await a.publish("news", b"y") == 1
            assert (await sub.next(DEADLINE)).payload == b"y"

    run(main())


def test_es_interest_in_a_stream_that_is_not_there_yet_waits_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            await nodes["b"].node.ensure("late", {"kind": "ephemeral"})
            sub = await b.subscribe("late")
            known = nodes["a"].events._neighbours["b"].known
            await until(lambda: len(known) == 1)
            await nodes["a"].node.ensure("late", {"kind": "ephemeral"})
            assert await a.publish("late", b"x") == 1
            assert (await sub.next(DEADLINE)).payload == b"x"
            await a.delete("late")
            await refused("NO_STREAM", a.publish("late", b"x"))
            await a.ensure("late", kind="ephemeral")
            assert await a.publish("late", b"y") == 1
            assert (await sub.next(DEADLINE)).payload == b"y"
            await b.delete("late")
            await until(lambda: len(known) == 0)
            assert await a.publish("late", b"z") == 0

    run(main())


def test_es_who_listened_before_the_cluster_was_is_known_too(tmp_path: Path) -> None:
    async def main() -> None:
        running = Running(tmp_path)
        await running.start()
        assert running.server is not None
        client = await running.client()
        await client.ensure("news", kind="ephemeral")
        sub = await client.subscribe("news")
        links = Links(Identity("a", "test"), SECRET, Member("a", tmp_path))
        events = Events(running.server.node, links, "a")
        assert len(events._local) == 1
        assert await client.publish("news", b"x") == 1
        assert (await sub.next(DEADLINE)).payload == b"x"
        events.close()
        await running.end()

    run(main())


def test_es_when_too_much_waits_on_the_way_nobody_there_gets_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(events_module, "SOFT_UNSENT_BYTES", 1 << 18)

    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            sub = await b.subscribe("news", prefetch=1000)
            await nodes.know(1)
            for caller in nodes["b"].links._callers:  # it does not read for a while
                caller.transport.pause_reading()
            known = nodes["a"].events._neighbours["b"].known
            sent = 0
            while not known.held:
                assert await a.publish("news", b"%04d" % sent + b"x" * 100_000) == 1
                sent += 1
                assert sent < 900, "nothing holds it"
            assert await a.publish("news", b"lost") == 1  # nobody waits for anybody
            for caller in nodes["b"].links._callers:
                caller.transport.resume_reading()
            assert [m.payload[:4] for m in await take(sub, sent)] == [
                b"%04d" % at for at in range(sent)
            ]
            await until(lambda: sub.lost == 1)
            await until(lambda: all(nodes["a"].believes()))
            assert await a.publish("news", b"new") == 1
            assert (await sub.next(DEADLINE)).payload == b"new"

    run(main())


def test_es_metrics_are_of_this_node_and_descriptions_of_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            for client in (a, b, b):
                await client.subscribe("news")
            await nodes.know(3)
            assert (await a.describe("news"))["consumers"] == 3
            for name, count in (("a", 1), ("b", 2)):
                text = prometheus(nodes[name].node, 0)
                assert f'stream_listeners{{stream="news"}} {count}' in text

    run(main())


# ---------------------------------------------------------------- those who mean harm


def test_nonsense_of_another_node_harms_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "ab") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            to_b = nodes["a"].events._neighbours["b"]
            number = next(iter(nodes["b"].events._local))
            for command, blob in (
                (n.Scatter(parts=[n.Part(listener=number, first=5, end=2)]), b""),
                (n.Scatter(parts=[n.Part(listener=number, end=9)]), build([b"x"])),
                (n.Scatter(parts=[n.Part(listener=number, end=1)]), b"no batch"),
                (n.Fence(region="eu"), b""),
            ):
                line = to_b.line
                if isinstance(command, n.Scatter):
                    command.line = line
                assert nodes["a"].links.send("b", "events", command, [blob])
                await until(lambda line=line: to_b.line not in (line, 0))  # type: ignore[misc]
                await nodes.know(1)
            line = to_b.line
            for wrong in (
                n.Scatter(line=line, parts=[n.Part(listener=999, end=1)]),
                n.Scatter(line=line + 1, parts=[n.Part(listener=number, end=1)]),
                n.Reached(request=77), n.Reserved(request=77, ok=True), n.Release(response="x"),
                n.Reply(request=1, response="x"), n.Interest(line=line, seen=1, gone=[1, 2, 3]),
            ):  # fmt: skip
                blob = build([b"bad"]) if isinstance(wrong, n.Scatter | n.Reply) else b""
                assert nodes["a"].links.send("b", "events", wrong, [blob])
            assert await a.publish("news", b"good") == 1
            assert (await sub.next(DEADLINE)).payload == b"good"
            await nothing(sub)

    run(main())
