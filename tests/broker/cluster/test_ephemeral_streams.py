"""Ephemeral and response streams across nodes: real nodes and links on loopback, without Raft."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.running import DEADLINE, Raw, Running, die, nothing, refused, run, take, until

from railgun.broker.cluster import events as events_module
from railgun.broker.cluster import responding as responding_module
from railgun.broker.cluster.events import Events
from railgun.broker.cluster.links import Identity, Lane, Links
from railgun.broker.protocol.interest import Remote
from railgun.broker.protocol.response_names import keeper_of
from railgun.broker.server.metrics import prometheus
from railgun.broker.streams.node import Ephemeral
from railgun.client.client import Client
from railgun.client.subscription import Subscription
from railgun.transport.commands import Blob, encode
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build

SECRET = b"of the cluster"


class Member:
    """A node with links to others; it counts what it hears, and can be deaf to some of it."""

    def __init__(self, name: str, data: Path) -> None:
        self.name = name
        self.running = Running(data)
        self.heard: Counter[str] = Counter()
        self.deaf: set[str] = set()
        self.links: Links
        self.events: Events

    async def start(self) -> None:
        await self.running.start()
        assert self.running.server is not None
        self.links = Links(Identity(self.name, "test"), SECRET, self)
        self.events = Events(self.running.server.node, self.links, self.name)
        await self.links.listen("127.0.0.1", 0)

    async def stop(self) -> None:
        await self.links.close()
        self.events.close()
        await self.running.end()

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        kind = type(command).__name__
        self.heard[kind] += 1
        if lane == "events" and kind not in self.deaf:
            self.events.received(sender, command, blob)

    def up(self, peer: str, lane: Lane) -> None:
        if lane == "events":
            self.events.up(peer)

    def down(self, peer: str, lane: Lane) -> None:
        if lane == "events":
            self.events.down(peer)

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.links.port

    @property
    def node(self) -> Any:
        assert self.running.server is not None
        return self.running.server.node

    def listeners(self, stream: str = "news") -> int:
        """Those it knows of, its own and those of others."""
        found = self.node.streams[stream]
        assert isinstance(found, Ephemeral)
        return len(found.exchange)

    def believes(self, stream: str = "news") -> list[int]:
        """The credit of those elsewhere, for all it knows."""
        exchange = self.node.streams[stream].exchange
        return [exchange.credit(one) for one in exchange.members() if isinstance(one, Remote)]

    async def client(self) -> Client:
        return await self.running.client()

    async def cut(self, peer: str) -> None:
        """Its connection for events to that node breaks."""
        neighbour = self.events._neighbours[peer]
        was = neighbour.line
        self.links._peers[peer].lines["events"].connection.abort()
        await until(lambda: neighbour.line != was)


class Cluster:
    """Some members that know each other."""

    def __init__(self, data: Path, names: str) -> None:
        self.members = {name: Member(name, data / name) for name in names}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    async def start(self, *streams: str) -> None:
        for member in self.members.values():
            await member.start()
            for stream in streams:
                await member.node.ensure(stream, {"kind": "ephemeral"})
        self.meet()
        await self.whole()

    def meet(self) -> None:
        addresses = {name: member.address for name, member in self.members.items()}
        for member in self.members.values():
            member.links.know(addresses)

    async def whole(self) -> None:
        """Everybody has heard everybody."""
        others = len(self.members) - 1
        for member in self.members.values():
            await until(
                lambda member=member: (  # type: ignore[misc]
                    sum(bool(one.line and one.heard) for one in member.events._neighbours.values())
                    == others
                )
            )

    async def lose(self, name: str) -> None:
        """One of them is gone from one moment to the next."""
        await self.members.pop(name).stop()

    async def know(self, count: int, stream: str = "news") -> None:
        """Everybody knows so many listeners, and that all have credit."""
        for member in self.members.values():
            await until(
                lambda member=member: (  # type: ignore[misc]
                    member.listeners(stream) == count and all(member.believes(stream))
                )
            )


@contextlib.asynccontextmanager
async def cluster(data: Path, names: str, *streams: str) -> AsyncIterator[Cluster]:
    made = Cluster(data, names)
    try:
        await made.start(*(streams or ("news",)))
        yield made
    finally:
        for member in made.members.values():
            await member.stop()


def kept_by(keeper: str, nodes: str = "abc", count: int = 1) -> str:
    """The name of a response that this node keeps."""
    names = (f"r{at}" for at in range(1000))
    return [name for name in names if keeper_of(name, nodes) == keeper][count - 1]


def ask(raw: Raw, name: str, request: int = 1, timeout: float = DEADLINE) -> None:
    told = p.Publish(request=request, stream="news", response=name, timeout=int(timeout * 1e6))
    raw.connection.send(b"".join(encode(told, [build([b"what?"])])))


def answers(raw: Raw) -> list[bytes]:
    return [bytes(f.blob) for f in raw.frames if isinstance(f.command, p.Response) and f.blob]


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


# ---------------------------------------------------------------- RS


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_answered_at_another_node_and_the_first_wins(tmp_path: Path, keeper: str) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b, c = await nodes["b"].client(), await nodes["c"].client()
            subs = [await client.subscribe("news") for client in (b, c)]
            await nodes.know(2)
            raw = await Raw.dial(nodes["a"].running)
            name = kept_by(keeper)
            ask(raw, name)
            one, two = [await sub.next(DEADLINE) for sub in subs]
            assert one.response == two.response == name
            await one.respond(b"this")
            await refused("RS_GONE", two.respond(b"that"))
            await refused("RS_GONE", one.respond(b"again"))
            await until(lambda: bool(answers(raw)))
            assert len(answers(raw)) == 1
            assert b"this" in answers(raw)[0]
            names = nodes[keeper].events.responding.names
            await until(lambda: not len(names))  # it is released
            ask(raw, name, request=2)  # so the name may be used again
            await (await subs[1].next(DEADLINE)).respond(b"once more", confirm=False)
            await until(lambda: len(answers(raw)) == 2)
            raw.connection.close()

    run(main())


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_a_name_is_unique_in_the_cluster(tmp_path: Path, keeper: str) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            c = await nodes["c"].client()
            sub = await c.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            name = kept_by(keeper)
            ask(raws[0], name)
            question = await sub.next(DEADLINE)
            ask(raws[1], name)
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            ask(raws[0], name, request=2)
            await until(lambda: raws[0].codes() == ["RS_EXISTS"])
            await nothing(sub)
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])))
            ask(raws[1], name, request=3)
            await (await sub.next(DEADLINE)).respond(b"that")
            await until(lambda: bool(answers(raws[1])))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_of_two_who_ask_at_once_one_gets_the_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            c = await nodes["c"].client()
            sub = await c.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "abc"]
            for at in range(1, 10):
                name = kept_by("abc"[at % 3], count=at)
                for raw in raws:
                    ask(raw, name, request=at)
                await (await sub.next(DEADLINE)).respond(b"this")
                await until(lambda at=at: sum(len(r.frames) for r in raws) == 3 * at)  # type: ignore[misc]
                assert sum(len(answers(raw)) for raw in raws) == at
                codes = [code for raw in raws for code in raw.codes() if code]
                assert codes == ["RS_EXISTS"] * 2 * at
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_nobody_or_nobody_with_credit_is_told_at_once_and_a_timeout_by_the_node(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            a, b = await nodes["a"].client(), await nodes["b"].client()
            await refused("NO_CONSUMERS", a.request("news", b"what?"))
            sub = await b.subscribe("news", prefetch=1)
            await nodes.know(1)
            await refused("RS_TIMEOUT", a.request("news", b"what?", timeout=0.1))
            await until(lambda: nodes["a"].believes() == [0])
            await refused("CONSUMERS_BUSY", a.request("news", b"what?"))
            await refused("RS_GONE", (await sub.next(DEADLINE)).respond(b"late"))
            for member in nodes.members.values():
                assert not member.events.responding._awaited
                await until(lambda member=member: not len(member.events.responding.names))  # type: ignore[misc]

    run(main())


def test_rs_ends_with_who_asked_wherever_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            for at, keeper in enumerate("abc"):
                ask(raw, kept_by(keeper), request=at + 1)
            questions = await take(sub, 3)
            assert len(nodes["c"].events.responding.names) == 1
            raw.connection.close()
            await until(lambda: not nodes["a"].events.responding._awaited)
            for question in questions:
                await refused("RS_GONE", question.respond(b"this"))
            await until(lambda: not len(nodes["c"].events.responding.names))

    run(main())


def test_rs_many_requests_over_all_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            clients = [await nodes[name].client() for name in "abc"]
            subs = [await client.subscribe("news", group="g") for client in clients]
            await nodes.know(3)

            async def serve(sub: Subscription) -> None:
                async for message in sub:
                    await message.respond(message.payload.upper(), confirm=False)

            serving = [asyncio.create_task(serve(sub)) for sub in subs]
            asked = [f"{at}-{n}" for n in range(100) for at in range(3)]
            found = await asyncio.gather(
                *(clients[int(one[0])].request("news", f"q{one}") for one in asked)
            )
            assert found == [f"Q{one}".encode() for one in asked]
            for task in serving:
                task.cancel()

    run(main())


@pytest.mark.parametrize("keeper", ["a", "b", "c"])
def test_rs_answered_through_a_node_that_never_heard_the_request(
    tmp_path: Path, keeper: str
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b, c = await nodes["b"].client(), await nodes["c"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by(keeper))
            question = await sub.next(DEADLINE)
            await c.respond(question.response, b"from elsewhere")
            await until(lambda: bool(answers(raw)))
            await refused("RS_GONE", c.respond(question.response, b"again"))
            await refused("RS_GONE", question.respond(b"too late"))
            await refused("RS_GONE", c.respond("nobody-asked", b"x"))
            raw.connection.close()

    run(main())


def test_rs_a_keeper_that_dies_is_replaced_while_the_name_is_reserved(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["c"].deaf.add("Reserve")
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            await until(lambda: nodes["c"].heard["Reserve"] == 1)
            await nodes.lose("c")
            await (await sub.next(DEADLINE)).respond(b"this")
            await until(lambda: bool(answers(raw)))
            raw.connection.close()

    run(main())


def test_rs_a_keeper_that_dies_leaves_its_names_to_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            names = [
                name for at in range(1, 9) if keeper_of(name := kept_by("c", count=at), "ab") == "b"
            ]
            ask(raws[0], names[0])
            question = await sub.next(DEADLINE)
            await nodes.lose("c")
            await until(lambda: nodes["b"].events.responding.names.home(names[0]) == "a")
            ask(raws[1], names[0])
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_a_keeper_that_comes_hears_of_the_names_that_are_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raws = [await Raw.dial(nodes[name].running) for name in "ab"]
            ask(raws[0], kept_by("c"))
            question = await sub.next(DEADLINE)
            names = nodes["c"].events.responding.names
            for one, other in ("ca", "ac"):
                await nodes[one].cut(other)
                if one == "c":
                    await until(lambda: names.home(question.response) is None)
                await nodes.whole()
                await until(lambda: names.home(question.response) == "a")
            ask(raws[1], kept_by("c"))
            await until(lambda: raws[1].codes() == ["RS_EXISTS"])
            await question.respond(b"this")
            await until(lambda: bool(answers(raws[0])) and not len(names))
            for raw in raws:
                raw.connection.close()

    run(main())


def test_rs_a_keeper_that_does_not_answer_refuses_the_request_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding_module, "ANSWER_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["c"].deaf |= {"Reserve", "Reply"}
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            ask(raw, kept_by("a"), request=2)  # others go on
            question = await sub.next(DEADLINE)
            assert question.response == kept_by("a")
            await until(lambda: raw.codes() == ["UNREACHABLE"])
            assert nodes["a"].node.refused["UNREACHABLE"] == 1
            assert kept_by("c") not in nodes["a"].node.responses
            await refused("UNREACHABLE", b.respond(kept_by("c"), b"x"))
            await question.respond(b"this")
            await until(lambda: bool(answers(raw)))
            raw.connection.close()

    run(main())


def test_rs_who_leaves_while_the_name_is_reserved_asks_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            nodes["a"].deaf.add("Reserved")
            raw = await Raw.dial(nodes["a"].running)
            ask(raw, kept_by("c"))
            await until(lambda: nodes["a"].heard["Reserved"] == 1)
            raw.connection.close()
            await until(lambda: not len(nodes["c"].events.responding.names))
            await nodes["a"].cut("c")  # by which it would choose again
            await nodes.whole()
            await nothing(sub)

    run(main())


def test_rs_an_answer_for_a_node_that_is_gone_is_not_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "abc") as nodes:
            b = await nodes["b"].client()
            sub = await b.subscribe("news")
            await nodes.know(1)
            raw = await Raw.dial(nodes["a"].running)
            for at, keeper in enumerate("bc"):
                ask(raw, kept_by(keeper), request=at + 1)
            questions = await take(sub, 2)
            nodes["a"].deaf.add("Reply")
            answer = asyncio.create_task(questions[0].respond(b"this"))
            await until(lambda: nodes["a"].heard["Reply"] == 1)
            await nodes.lose("a")
            await refused("UNREACHABLE", answer)  # it may have come
            await nodes.know(1)
            await refused("RS_GONE", questions[1].respond(b"that"))

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
