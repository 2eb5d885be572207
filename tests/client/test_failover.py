"""Clients that know several nodes: they go on at another one, and what had no master is tried again in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker.cluster.several import SECRET, several
from tests.broker.running import DEADLINE, Running, refused, run, stored, take, until
from verification.ports import free_port

import railgun.client.client as client_module
from railgun.client.address import Address
from railgun.client.client import Client, connect
from railgun.client.errors import DuplicateIdError, NoNodeError, StreamsError
from railgun.client.nodes import Nodes, Pauses
from railgun.client.sync import connect_sync
from railgun.transport.commands import FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.listener import Listener
from railgun.transport.proto import streams_pb2 as p


class Scripted:
    """A node that answers publishes as it is told to."""

    def __init__(self, answer: Callable[[Scripted, p.Publish], list[p.Published | p.Failed]]):
        self.port = 0
        self.publishes: list[tuple[int, bytes]] = []
        self.connections: list[Connection] = []
        self._answer = answer
        self._listener = Listener(self._accept)

    async def __aenter__(self) -> Scripted:
        self.port = await self._listener.open("127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.close()

    def _accept(self) -> Connection:
        reader = FrameReader()

        def received(connection: Connection, data: bytes) -> None:
            for frame in reader.feed(data):
                if isinstance(frame.command, p.Publish):
                    self.publishes.append((frame.command.request, bytes(frame.blob)))
                    for told in self._answer(self, frame.command):
                        connection.send(b"".join(encode(told)))
                elif isinstance(frame.command, p.Admin):
                    failed = p.Failed(request=frame.command.request, code="BAD_REQUEST")
                    connection.send(b"".join(encode(failed)))

        return Connection(
            bytes.fromhex(SECRET), self.connections.append, received, lambda _, error: None
        )

    async def client(self) -> Client:
        """A client of it."""
        return await connect(f"127.0.0.1:{self.port}", secret=SECRET, timeout=DEADLINE)


# ---------------------------------------------------------------- which node


def test_the_first_that_is_there_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            nodes.told = []
            dead, alive = free_port(), nodes.running["a"].port
            for where in (
                f"127.0.0.1:{dead},127.0.0.1:{alive}",
                [f"127.0.0.1:{dead}", f"127.0.0.1:{alive}"],
            ):
                async with await connect(where, secret=SECRET, timeout=DEADLINE) as client:
                    assert client.where == ("127.0.0.1", alive)
                    assert (await client.ensure("s"))["result"] in ("CREATED", "UNCHANGED")
            with pytest.raises(NoNodeError) as caught:
                await connect([f"127.0.0.1:{dead}", "127.0.0.1:1"], secret=SECRET, timeout=0.3)
            assert f"127.0.0.1:{dead}, 127.0.0.1:1" in str(caught.value)
            for bad in ("x", "a:1,b", "a:99999", [], ["a:1", "b"], [5]):
                with pytest.raises(NoNodeError):
                    await connect(bad, secret=SECRET)  # type: ignore[arg-type]

    run(main())


def test_a_wrong_secret_is_told_at_once_if_all_say_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path) as nodes:
            ports = [one.port for one in nodes.running.values()]
            where = [f"127.0.0.1:{port}" for port in ports]
            with pytest.raises(
                NoNodeError, match="secret"
            ):  # long before that, or the test is over
                await connect(where, secret="77" * 32, timeout=100 * DEADLINE)
            nodes.running["a"].server.secret = b"7" * 32  # type: ignore[union-attr]
            async with await connect(where, secret=SECRET, timeout=DEADLINE) as client:
                assert client.where[1] == ports[1]  # one of them is no use, the other is

    run(main())


def test_a_client_learns_of_the_others_and_goes_on_at_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "abc") as nodes:
            await nodes.ensure("orders", "c")
            client = await nodes.client("a")
            sub = await client.subscribe("orders", group="g")
            await until(lambda: len(client._nodes) == 3)
            before = nodes.running["a"].port
            assert client.where == ("127.0.0.1", before)
            await nodes.running["a"].stop()
            await client.publish("orders", b"x", id="x")
            assert client.where == ("127.0.0.1", nodes.running["b"].port)
            assert (await sub.next(DEADLINE)).payload == b"x"
            await nodes.running["b"].stop()
            await until(lambda: client.where[1] == nodes.running["c"].port and client.connected)
            assert await client.publish("orders", b"y") == 1

    run(main())


def test_what_a_node_tells_of_others_is_not_trusted_blindly(tmp_path: Path) -> None:
    nodes = Nodes([("a", 1)])
    one_by_one = [5, {"host": 1}, {"host": "b"}, {"host": "b", "port": 0}]
    every: list[object] = [None, 5, "x", {}, [], one_by_one]
    for senseless in every:
        nodes.learn(senseless)
        assert len(nodes) == 1
    nodes.learn([{"host": "b", "port": True}, {"host": "c", "port": 7, "more": 1}])
    assert str(nodes) == "a:1, c:7"
    nodes.learn([{"host": f"h{n}", "port": 1} for n in range(5_000)])
    assert len(nodes) == 101


def test_one_whose_node_is_forgotten_goes_on_with_those_that_were_given() -> None:
    nodes = Nodes([("a", 1), ("b", 1)])
    nodes.learn([{"host": "c", "port": 1}])
    nodes.turn(False)
    nodes.turn(False)
    assert nodes.current == ("c", 1)
    nodes.learn([{"host": "d", "port": 1}])
    assert nodes.turn(True) is False
    assert nodes.current == ("a", 1)


def test_all_are_dead_and_one_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            await nodes.ensure("orders", "b")
            client = await nodes.client("ab")
            await client.publish("orders", b"0", id="0")
            sub = await client.subscribe("orders", group="g")
            assert (await sub.next(DEADLINE)).payload == b"0"
            for name in "ab":
                await nodes.running[name].stop()
            await until(lambda: not client.connected)
            waiting = asyncio.create_task(client.publish("orders", b"1", id="1"))
            await nodes.start("b")
            assert await waiting == 1
            assert client.where[1] == nodes.running["b"].port
            assert [m.payload for m in await take(sub, 2)] == [b"0", b"1"]

    run(main())


def test_a_node_that_lets_in_and_throws_out_is_not_run_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a pause when all have been tried, though each of them could be connected to."""
    rests = 0

    class Counted(Pauses):
        def next(self) -> float:
            nonlocal rests
            rests += 1
            return super().next()

    monkeypatch.setattr(client_module, "Pauses", Counted)

    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            client = await nodes.client("ab")
            await until(lambda: len(client._nodes) == 2)
            count = 0

            def out(name: str) -> None:
                nonlocal count
                server = nodes.running[name].server
                assert server is not None
                taken = server._opened

                def opened(connection: Connection) -> None:
                    nonlocal count
                    count += 1
                    taken(connection)
                    connection.transport.close()

                monkeypatch.setattr(server, "_opened", opened)
                for connection in list(server.sessions):
                    connection.transport.abort()

            for name in "ab":
                out(name)
            await until(lambda: count >= 12)
            assert rests >= count // 2 - 1  # one for every two

    run(main())


def test_a_client_without_an_event_loop_goes_on_as_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            await nodes.ensure("orders", "b")
            where = ",".join(f"127.0.0.1:{nodes.running[name].port}" for name in "ab")

            def work(stop: Callable[[], None]) -> list[int]:
                with connect_sync(where, secret=SECRET, timeout=DEADLINE) as client:
                    found = [client.publish("orders", b"x", id="x", acks="all")]
                    stop()
                    found.append(client.publish("orders", b"y", id="y", acks="master"))
                    found += client.publish_many("orders", [b"z"], acks="none")
                    with pytest.raises(StreamsError, match="BAD_REQUEST"):
                        client.publish("orders", b"x", acks="maybe")  # type: ignore[arg-type]
                    return found

            loop = asyncio.get_running_loop()

            def stop() -> None:
                asyncio.run_coroutine_threadsafe(nodes.running["a"].stop(), loop).result()

            assert await asyncio.to_thread(work, stop) == [0, 1, -1]

    run(main())


def test_the_one_in_the_directory_is_first_and_the_others_are_learned(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            one: Running = nodes.running["a"]
            async with await connect(data=one.data, timeout=DEADLINE) as client:
                await until(lambda: len(client._nodes) == 2)
                await one.stop()
                await until(lambda: client.connected and client.where[1] == nodes.running["b"].port)
                assert (await client.ensure("s"))["result"] == "CREATED"

    run(main())


def test_an_address_of_several_can_be_sent_elsewhere() -> None:
    found = Address.find("a:1,b:2,c:3", secret="00")
    assert (found.host, found.port, found.others) == ("a", 1, (("b", 2), ("c", 3)))


# ---------------------------------------------------------------- NO_MASTER and DEPOSED


def test_what_was_refused_is_sent_again_in_its_order_and_nothing_overtakes_it() -> None:
    refusing = True

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if refusing:
            return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
        return [p.Published(request=told.request, base=told.request, stored=1)]

    async def main() -> None:
        nonlocal refusing
        async with Scripted(answer) as node, await node.client() as client:
            payloads = [bytes([n]) * 300_000 for n in range(8)]  # each a publish of its own
            tasks = []
            for payload in payloads:
                tasks.append(asyncio.create_task(client.publish("orders", payload)))
                await asyncio.sleep(0)
            await until(lambda: len(node.publishes) >= 8)  # those that may be under way, twice
            first = [number for number, _ in node.publishes[:4]]
            assert first == sorted(set(first))
            assert {number for number, _ in node.publishes} == set(first)  # nothing else was sent
            refusing = False
            seen = len(node.publishes)
            offsets = await asyncio.gather(*tasks)
            assert offsets == sorted(offsets)
            last = [blob[-1] for _, blob in node.publishes[seen:]]
            assert last == sorted(last)
            assert last[-8:] == list(range(8))

    run(main())


def test_what_is_published_behind_a_refused_one_waits_for_it() -> None:
    refusing = True

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if refusing:
            return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
        return [p.Published(request=told.request, base=told.request, stored=1)]

    async def main() -> None:
        nonlocal refusing
        async with Scripted(answer) as node, await node.client() as client:
            first = asyncio.create_task(client.publish("orders", b"a"))
            await until(lambda: bool(client._publisher._held))
            refusing = False
            seen = len(node.publishes)
            second = asyncio.create_task(client.publish("orders", b"b"))
            await asyncio.gather(first, second)
            assert [blob[-1:] for _, blob in node.publishes[seen:]] == [b"a", b"b"]

    run(main())


def test_pauses_grow_and_are_short_again_after_a_success() -> None:
    count = 0
    pauses: list[float] = []

    async def main() -> None:
        def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
            nonlocal count
            count += 1
            held = client._publisher._held.get("orders")
            pauses.append(0.0 if held is None else held.pauses._pause)  # the one that would come
            if count % 4:
                return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
            return [p.Published(request=told.request, stored=1)]

        async with Scripted(answer) as node, await node.client() as client:
            for _ in range(2):
                await client.publish("orders", b"x")
            assert pauses == [0.0, 0.1, 0.2, 0.4] * 2

    run(main())


def test_a_deadline_that_passes_while_it_is_held_says_that_nothing_was_done() -> None:
    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if told.stream == "orders":
            return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
        return [p.Published(request=told.request, base=7, stored=1)]

    async def main() -> None:
        async with Scripted(answer) as node, await node.client() as client:
            error = await refused("NO_MASTER", client.publish("orders", b"x", timeout=0.6))
            assert error.text == "none"
            assert await client.publish("other", b"x") == 7
            await until(lambda: not client._publisher._under_way)
            assert client._publisher._counts["orders"] == 0

    run(main())


def test_one_that_was_deposed_is_a_matter_of_ids() -> None:
    deposed: set[int] = set()

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if told.request not in deposed:
            deposed.add(told.request)
            return [p.Failed(request=told.request, code="DEPOSED", text="it was")]
        there = p.Refused(index=0, code="DUPLICATE_ID", offset=5)
        return [p.Published(request=told.request, refused=[there])]

    async def main() -> None:
        async with Scripted(answer) as node, await node.client() as client:
            assert await client.publish("orders", b"x", id="x") == 5  # it was stored, and is ours
            await refused("DEPOSED", client.publish("orders", b"y"))
            assert len(node.publishes) == 3

    run(main())


def test_one_that_was_refused_survives_a_lost_connection_without_an_id() -> None:
    refusing = True

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if refusing:
            return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
        return [p.Published(request=told.request, base=3, stored=1)]

    async def main() -> None:
        nonlocal refusing
        async with Scripted(answer) as node, await node.client() as client:
            publishing = asyncio.create_task(client.publish("orders", b"x"))
            await until(
                lambda: (
                    bool(client._publisher._held)
                    and client._publisher._held["orders"].timer is not None
                )
            )
            refusing = False
            node.connections[0].abort()
            assert await publishing == 3

    run(main())


def test_a_duplicate_of_another_is_still_told_after_a_refusal() -> None:
    """It was not stored by us: NO_MASTER says so."""
    answers = iter(["refuse", "duplicate"])

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        if next(answers) == "refuse":
            return [p.Failed(request=told.request, code="NO_MASTER", text="none")]
        there = p.Refused(index=0, code="DUPLICATE_ID", offset=5)
        return [p.Published(request=told.request, refused=[there])]

    async def main() -> None:
        async with Scripted(answer) as node, await node.client() as client:
            with pytest.raises(DuplicateIdError) as caught:
                await client.publish("orders", b"x", id="x")
            assert caught.value.offset == 5

    run(main())


def test_without_acks_nobody_waits_and_what_waits_is_bounded() -> None:
    silent = True

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        assert told.acks == p.NONE
        return [] if silent else [p.Published(request=told.request)]

    async def main() -> None:
        nonlocal silent
        async with Scripted(answer) as node, await node.client() as client:
            sent = 0

            async def publish() -> None:
                nonlocal sent
                for _ in range(20):
                    assert await client.publish("orders", bytes(300_000), acks="none") == -1
                    sent += 1

            publishing = asyncio.create_task(publish())
            await until(lambda: len(node.publishes) == 4)
            await asyncio.sleep(0.05)
            assert (sent, len(node.publishes)) == (4, 4)  # the node has said nothing yet
            silent = False
            for number, _ in list(node.publishes):
                node.connections[0].send(b"".join(encode(p.Published(request=number))))
            await publishing
            await until(lambda: len(node.publishes) == 20 and not client._publisher._under_way)
            node.connections[0].abort()
            await until(lambda: len(node.connections) == 2)
            assert await client.publish("orders", b"x", id="x", acks="none") == -1

    run(main())


def test_levels_of_safety_do_not_travel_together() -> None:
    levels: list[tuple[int, int]] = []

    def answer(node: Scripted, told: p.Publish) -> list[p.Published | p.Failed]:
        levels.append((told.request, told.acks))
        return [p.Published(request=told.request, stored=1)]

    async def main() -> None:
        async with Scripted(answer) as node, await node.client() as client:
            asked = ["quorum", "quorum", "master", "all", "all", "none", "quorum"]
            await asyncio.gather(
                *(client.publish("orders", b"x", acks=acks) for acks in asked)  # type: ignore[arg-type]
            )
            assert [acks for _, acks in levels] == [p.QUORUM, p.MASTER, p.ALL, p.NONE, p.QUORUM]

    run(main())


def test_a_subscription_without_a_master_is_made_as_soon_as_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with several(tmp_path, "ab") as nodes:
            nodes.wait = 0.02
            await nodes.ensure("orders", "b")
            client = await nodes.client("a")
            await client.publish("orders", b"x")
            nodes.masters["orders"] = None
            subscribing = asyncio.create_task(client.subscribe("orders", group="g"))
            asking = asyncio.create_task(client.describe("orders"))
            before = nodes.asked["orders"]
            await until(lambda: nodes.asked["orders"] > before + 15)  # it is refused some times
            assert not subscribing.done()
            assert not asking.done()
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            sub = await subscribing
            assert (await asking)["end"] == 1
            assert (await sub.next(DEADLINE)).payload == b"x"
            # And one that has lost its master: the connection is closed, and it is refused for a while.
            nodes.masters["orders"] = None
            nodes.moved("orders")
            await until(lambda: sub._life == 1 and client.connected)
            before = nodes.asked["orders"]
            await until(lambda: nodes.asked["orders"] > before + 10)
            nodes.masters["orders"] = "b"
            nodes.moved("orders")
            assert (await sub.next(DEADLINE)).delivery == 2
            # And one whose node says that it is deposed, and does not close the connection.
            server = nodes.running["b"].server
            assert server is not None
            life = sub._life
            (session,) = [one for one in server.sessions.values() if one.subscriptions]
            session.send(p.Failed(code="DEPOSED", text="no more"), (), sub.channel)
            await until(lambda: sub._life == life + 1)
            assert (await sub.next(DEADLINE)).payload == b"x"
            assert await stored(client, "orders") == [b"x"]

    run(main())
