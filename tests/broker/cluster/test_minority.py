"""A node without a quorum: readers and `describe` are answered by its copy, writes are refused at once."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.broker.clustered import DEADLINE, QUICK, Clustered, clustered, retried, until
from tests.broker.running import node, run, take
from verification.ports import free_port
from verification.stream_server import StreamServer

from railgun.broker.cluster.consensus import NoLeaderError
from railgun.broker.cluster.links import PeerError
from railgun.cli import cluster_view, stream_view
from railgun.client.address import Address
from railgun.client.client import Client, connect
from railgun.client.errors import NoNodeError, StreamsError

WAIT = 1.0


@asynccontextmanager
async def minority(path: Path, *, again: bool) -> AsyncIterator[tuple[Clustered, Client, str]]:
    """A node that is alone of three, and a client of it; `again`: it was started anew after the others were lost."""
    cluster = Clustered(path, 3)
    for n in range(1, 4):
        cluster.config(f"n{n}", settings={**QUICK, "master_wait": WAIT})
    async with clustered(path, cluster=cluster):
        client, _ = await cluster.serving("orders")
        await client.publish_many("orders", [b"%d" % n for n in range(10)])
        await cluster.in_step("orders")
        left = "n2"
        for name in ("n1", "n3"):
            await cluster.kill(name)
        if again:
            await cluster.kill(left)  # a stop waits for answers that cannot come
            await cluster.start(left)
        mine = await cluster.client(left, timeout=DEADLINE)
        await until(lambda: cluster.member(left).has_no_quorum, "it is not noticed")
        yield cluster, mine, left


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_readers_and_describe_are_answered_by_the_copy(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        async with minority(tmp_path, again=again) as (_, client, _):
            told = await client.describe("orders")
            assert told["end"] == 10
            assert "copy" in told["trouble"]
            sub = await client.subscribe("orders")
            assert len(await take(sub, 10)) == 10
            assert (await client.subscribe("orders", start="end")).offset == 10

    run(main(), deadline=4 * DEADLINE)


def shown(picture: Any) -> str:
    console = Console(width=200, file=StringIO())
    console.print(picture)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_the_streams_it_has_copies_of_are_listed(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        async with minority(tmp_path, again=again) as (_, client, _):
            (told,) = await client.streams()
            assert (told["name"], told["end"]) == ("orders", 10)
            assert told["trouble"]
            assert "orders" in shown(stream_view.streams([told]))
            status = await client.admin("cluster", DEADLINE)
            assert status["streams"] == 1
            assert status["is_known"] is not again
            assert ("are unknown" in shown(cluster_view.status(status))) is again
            assert "LEFT_ALONE" not in {one["code"] for one in status["alarms"]}

    run(main(), deadline=4 * DEADLINE)


def test_a_node_without_copies_does_not_say_that_there_are_no_streams(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        for n in range(1, 4):
            cluster.config(f"n{n}", settings={**QUICK, "master_wait": WAIT})
        async with clustered(tmp_path, cluster=cluster):
            for name in ("n1", "n3"):
                await cluster.kill(name)
            await cluster.stop("n2")
            await cluster.start("n2")
            client = await cluster.client("n2", timeout=DEADLINE)
            with pytest.raises(StreamsError, match="is unknown") as caught:
                await client.streams()
            assert caught.value.code == "NO_MASTER"

    run(main(), deadline=4 * DEADLINE)


def test_a_node_that_was_started_again_lists_what_all_know(tmp_path: Path) -> None:
    """Not what it has copies of: that is asked for before it has heard of the leader."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            await cluster.serving("orders")
            await cluster.stop("n2")
            others = await cluster.client("n1", "n3", timeout=DEADLINE)
            await others.ensure("more")
            await others.delete("orders")
            await cluster.start("n2")
            client = await cluster.client("n2", timeout=DEADLINE)
            assert [one["name"] for one in await client.streams()] == ["more"]

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_a_publish_is_refused_as_not_stored(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        async with minority(tmp_path, again=again) as (cluster, client, left):
            refused = cluster.servers[left].node.refused
            for n in range(3):
                with pytest.raises(StreamsError, match="nothing was stored") as caught:
                    await client.publish("orders", b"10")
                assert caught.value.code == "NO_MASTER"
                # At once: the client looks for other nodes, and asks once more. It does not try until its deadline.
                assert refused["NO_MASTER"] <= 2 + n

    run(main(), deadline=4 * DEADLINE)


@asynccontextmanager
async def frozen(count: int) -> AsyncIterator[list[str]]:
    """Addresses at which connections are accepted, and nothing is ever said: as of processes that are frozen."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with AsyncExitStack() as servers:
        opened = [await servers.enter_async_context(StreamServer(silent)) for _ in range(count)]
        yield [f"127.0.0.1:{one.port}" for one in opened]


def test_a_client_stays_where_it_is_if_the_other_nodes_are_frozen(tmp_path: Path) -> None:
    """It does not wait for them one after the other, and what it has subscribed goes on."""

    async def main() -> None:
        async with minority(tmp_path, again=False) as (cluster, _, left), frozen(2) as others:
            server = cluster.servers[left]
            where = [f"127.0.0.1:{server.port}", *others]
            client = await connect(where, secret=server.secret, timeout=DEADLINE)
            try:
                sub = await client.subscribe("orders")
                assert len(await take(sub, 10)) == 10
                sessions = set(server.sessions)
                for call in (
                    lambda: client.publish("orders", b"x"),
                    lambda: client.ensure("more"),
                    lambda: client.groups("orders"),
                ):
                    with pytest.raises(StreamsError) as caught:
                        await call()
                    assert caught.value.code == "NO_MASTER"
                assert set(server.sessions) == sessions
            finally:
                await client.close()

    run(main(), deadline=4 * DEADLINE)


def test_a_client_passes_over_frozen_nodes_on_its_way_to_the_majority(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        for n in range(1, 4):
            cluster.config(f"n{n}", settings={**QUICK, "master_wait": WAIT})
        async with clustered(tmp_path, cluster=cluster), frozen(2) as others:
            await cluster.serving("orders")
            await cluster.member("n2").links.close()  # clients reach it, other nodes do not
            await until(lambda: cluster.member("n2").has_no_quorum, "it is not noticed")
            ports = [cluster.servers[name].port for name in ("n2", "n3")]
            where = [f"127.0.0.1:{ports[0]}", *others, f"127.0.0.1:{ports[1]}"]
            client = await connect(where, secret=cluster.servers["n2"].secret, timeout=DEADLINE)
            try:
                assert await retried(lambda: client.publish("orders", b"0")) == 0
                assert client.where[1] not in [ports[0], *(int(one[10:]) for one in others)]
            finally:
                await client.close()

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_what_needs_the_leader_is_refused_as_not_done(tmp_path: Path, again: bool) -> None:
    """As soon as a publish is: nobody was there to send it to, so nothing is in doubt."""

    async def main() -> None:
        async with minority(tmp_path, again=again) as (_, client, left):
            for call in (
                lambda: client.ensure("more"),
                lambda: client.ensure("orders", mode="overwrite", max_age=600.0),
                lambda: client.delete("orders"),
                lambda: client.admin("cluster_settings", change={"patience": 9.0}),
            ):
                with pytest.raises(StreamsError, match="Nothing was changed") as caught:
                    await call()
                assert caught.value.code == "NO_MASTER"
                assert caught.value.nothing_done
            if not again:  # else it does not know yet which nodes there are
                with pytest.raises(StreamsError) as caught:
                    await client.admin("transfer", node=left, region="global")
                assert caught.value.code == "NO_MASTER"

    run(main(), deadline=4 * DEADLINE)


def test_what_was_sent_to_a_leader_that_is_gone_may_be_done_or_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            await cluster.serving("orders")
            member = next(
                cluster.member(name)
                for name in cluster.servers
                if not cluster.member(name).consensus.leads  # type: ignore[union-attr]
            )
            leader = member.consensus.leader  # type: ignore[union-attr]
            assert leader is not None
            call = member.links.call

            async def lost(to: str, name: str, *more: Any) -> Any:
                """Ask for it, and never hear what came of it."""
                told = await call(to, name, *more)
                if name == "propose":
                    raise PeerError("UNREACHABLE", f"node {to} did not answer in time")
                return told

            member.links.call = lost  # type: ignore[method-assign, assignment]
            with pytest.raises(NoLeaderError, match="may have been made or not"):
                await member.propose({"do": "settings", "change": {"patience": 1.5}}, timeout=1.0)
            assert member.metadata.settings["patience"] == 1.5

    run(main(), deadline=4 * DEADLINE)


def test_a_client_leaves_a_node_that_is_cut_off_for_the_majority(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        for n in range(1, 4):
            cluster.config(f"n{n}", settings={**QUICK, "master_wait": WAIT})
        async with clustered(tmp_path, cluster=cluster):
            await cluster.serving("orders")
            client = await cluster.client("n2", timeout=DEADLINE)
            await client.publish("orders", b"0")
            await cluster.member("n2").links.close()  # clients reach it, other nodes do not
            await until(lambda: cluster.member("n2").has_no_quorum, "it is not noticed")
            assert await retried(lambda: client.publish("orders", b"1")) == 1
            assert client.where[1] != cluster.servers["n2"].port

    run(main(), deadline=4 * DEADLINE)


def test_a_client_that_waits_for_a_quorum_is_served_when_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with minority(tmp_path, again=False) as (cluster, client, left):
            patient = await cluster.client(left, timeout=4 * DEADLINE, wait_for_quorum=True)
            publish = asyncio.create_task(patient.publish("orders", b"10"))
            ensure = asyncio.create_task(patient.ensure("more"))
            await asyncio.sleep(2 * WAIT)
            with pytest.raises(StreamsError, match="nothing was stored"):
                await client.publish("orders", b"not waited for")
            assert not publish.done()
            assert not ensure.done()
            with pytest.raises(StreamsError) as caught:
                await patient.publish("orders", b"not for so long", timeout=0.5)
            assert caught.value.code == "DEADLINE"
            await cluster.start("n1")
            assert await publish == 10
            await ensure

    run(main(), deadline=5 * DEADLINE)


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_the_status_says_no_quorum_and_knows_the_nodes(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        async with minority(tmp_path, again=again) as (_, client, _):
            end = time.monotonic() + DEADLINE
            while True:  # connections of those that are gone may take a moment to end
                told: dict[str, Any] = await client.admin("cluster", DEADLINE)
                if "1 of 3" in (line := cluster_view.headline(told)):
                    break
                assert time.monotonic() < end, line
                await asyncio.sleep(0.05)
            assert "no quorum" in line
            assert len(told["nodes"]) == 3
            assert not told["settled"]
            (alarm,) = [one for one in told["alarms"] if one["code"] == "NO_LEADER"]
            assert "no quorum" in alarm["text"]
            assert "1 of 3 voters" in alarm["text"]

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.slow
def test_a_new_reader_sees_nothing_that_was_not_safe(tmp_path: Path) -> None:
    """What only this node had before it was started anew was never acknowledged."""

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        for n in range(1, 4):
            cluster.config(f"n{n}", settings={**QUICK, "master_wait": WAIT})
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            await cluster.in_step("orders")
            stream = cluster.copy(master, "orders").stream
            for name in set(cluster.servers) - {master}:
                await cluster.kill(name)
            doubtful = asyncio.create_task(client.publish("orders", b"unsafe", timeout=DEADLINE))
            await until(
                lambda: stream.log.durable_end == 11 or not stream.acting, "nothing happens"
            )
            await cluster.stop(master)
            doubtful.cancel()
            await cluster.start(master)
            mine = await cluster.client(master, timeout=DEADLINE)
            await until(lambda: cluster.member(master).has_no_quorum, "it is not noticed")
            assert (await mine.describe("orders"))["end"] <= 10

    run(main(), deadline=4 * DEADLINE)


# ---------------------------------------------------------------- node.json of a node that is gone


def test_word_of_a_killed_node_is_not_believed_though_its_port_is_taken(tmp_path: Path) -> None:
    """Another node listens on the port that the killed one had."""

    async def main() -> None:
        async with node(tmp_path / "other") as other:
            killed = tmp_path / "killed"
            killed.mkdir()
            (killed / "secret").write_text((tmp_path / "other/secret").read_text())
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(killed / "node.sock"))  # the file stays when nobody listens any more
            for more in ({"socket": str(killed / "node.sock")}, {"pid": 2**22 - 1}):
                told = {"host": "127.0.0.1", "port": other.port, **more}
                (killed / "node.json").write_text(json.dumps(told))
                with pytest.raises(NoNodeError):
                    await connect(data=killed)
            client = await connect(data=tmp_path / "other")
            await client.close()

    run(main())


def test_a_node_without_a_local_socket_is_found_by_its_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            told = {"host": "127.0.0.1", "port": running.port, "pid": os.getpid()}
            (tmp_path / "node.json").write_text(json.dumps(told))
            assert Address.find(data=tmp_path).port == running.port
            (tmp_path / "node.json").write_text(json.dumps(told | {"port": free_port()}))
            with pytest.raises(NoNodeError):
                Address.find(data=tmp_path)

    run(main())
