"""A node whose log of Raft cannot be written: it passes on what it is asked, and says what is wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.broker.clustered import DEADLINE, Clustered, clustered, until
from tests.broker.refusing import becomes, has_alarm, has_no_alarm, health, shimmed
from tests.broker.running import run
from verification.faults.shim import Control, Orders

from railgun.client.client import Client
from railgun.client.errors import StreamsError

RAFT = "cluster/raft"
REFUSALS = [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO]


@asynccontextmanager
async def one_of_three(
    path: Path, orders: Orders, *, again: bool = False
) -> AsyncIterator[tuple[Clustered, Client, str, dict[str, Control]]]:
    """Three nodes with ten messages in `orders`, one of which cannot write; the name of that one, and all disks.

    The client is one of the others. `again`: the node was started anew, on a disk that could not be written.
    """
    cluster = Clustered(path, 3)
    controls = shimmed(cluster, path)
    for n in range(1, 4):
        cluster.configs[f"n{n}"] = replace(cluster.config(f"n{n}"), http_port=0)
    async with clustered(path, cluster=cluster):
        _, master = await cluster.serving("orders")
        bad = next(name for name in cluster.servers if name != master)
        others = await cluster.client(*(name for name in cluster.servers if name != bad))
        await others.publish_many("orders", [b"%d" % n for n in range(10)])
        await cluster.in_step("orders")
        if again:
            await cluster.stop(bad)
        controls[bad]._orders = orders
        if again:
            await others.ensure("made-meanwhile")
            await cluster.start(bad)
        await others.ensure("more")  # which is an entry of the log
        await until(lambda: cluster.member(bad).failed is not None, "it goes on")
        yield cluster, others, bad, controls


async def command(cluster: Clustered, name: str, *words: str) -> tuple[int, str, str]:
    """Run a command of `railgun` against a node: its exit code, what it prints, and what it complains of."""
    server = cluster.servers[name]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "railgun", *words),
        *(
            "--node",
            f"127.0.0.1:{server.port}",
            "--secret-file",
            str(server.config.data / "secret"),
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        async with asyncio.timeout(DEADLINE):
            out, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), complaints.decode()


@pytest.mark.parametrize("number", REFUSALS)
def test_a_reader_is_not_told_that_an_old_copy_is_all_there_is(tmp_path: Path, number: int) -> None:
    """Its copy lacks what was published since: neither it nor its master takes part in that any more."""

    async def main() -> None:
        orders = Orders(refuse=number, refuse_at="")
        async with one_of_three(tmp_path, orders) as (cluster, others, bad, _):
            await others.publish_many("orders", [b"%d" % n for n in range(10, 20)])
            for _ in range(3):  # whatever the node tries meanwhile
                code, out, complaints = await command(cluster, bad, "sub", "orders")
                assert (code, out.split()) == (0, [str(n) for n in range(20)]), complaints

    run(main(), deadline=4 * DEADLINE)


def test_a_reader_that_began_before_gets_what_comes_later(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            bad = next(name for name in cluster.servers if name != master)
            reader = await (await cluster.client(bad)).subscribe("orders", start="start")
            assert (await reader.next(DEADLINE)).payload == b"0"
            controls[bad]._orders = Orders(full=True)
            at_master = await cluster.client(master)
            await at_master.ensure("more")
            await until(lambda: cluster.member(bad).failed is not None, "it goes on")
            await at_master.publish("orders", b"1")
            assert (await reader.next(DEADLINE)).payload == b"1"

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_every_command_is_answered(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        orders = Orders(full=True)
        async with one_of_three(tmp_path, orders, again=again) as (cluster, others, bad, _):
            group = await others.subscribe("orders", group="billing")
            await group.next(DEADLINE)
            for words, expected in (
                (("stream", "ls"), "orders"),
                (("stream", "info", "orders"), "billing"),
                (("group", "ls", "orders"), "billing"),
                (("stream", "ensure", "others"), "made"),
                (("stream", "info", "others"), "others"),
                (("pub", "others", "hello"), "1 message"),
                (("sub", "others"), "hello"),
                (("stream", "rm", "others", "--yes"), "others"),
                (("cluster", "transfer", "--leader", bad), ""),
            ):
                code, out, complaints = await command(cluster, bad, *words)
                if words[0] == "cluster":  # it cannot lead
                    assert code != 0
                    assert "NOT_ELIGIBLE" in complaints
                else:
                    assert code == 0, (words, complaints)
                    assert expected in out, (words, out)
            code, _, complaints = await command(cluster, bad, "sub", "nowhere")
            assert code != 0
            assert "there is no stream 'nowhere'" in complaints

    run(main(), deadline=8 * DEADLINE)


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "started anew"])
def test_its_status_names_its_trouble_and_what_there_is(tmp_path: Path, again: bool) -> None:
    async def main() -> None:
        orders = Orders(refuse=errno.EFBIG, refuse_at=RAFT)
        async with one_of_three(tmp_path, orders, again=again) as (cluster, others, bad, controls):
            mine = await cluster.client(bad)
            await has_alarm(mine, "RAFT_FAILED")
            await until(lambda: "more" in cluster.member(bad).metadata.streams, "it hears nothing")
            told = await mine.admin("cluster", DEADLINE)
            assert told["streams"] == (3 if again else 2)
            assert [one["name"] for one in told["regions"]] == ["global"]
            failed = {one["name"]: one["failed"] for one in told["nodes"]}
            assert str(tmp_path / bad) in failed.pop(bad)
            assert not any(failed.values())
            assert told["leader"] not in (None, cluster.member(bad).me)
            assert not {one["code"] for one in told["alarms"]} & {"NO_LEADER", "NO_MASTER"}
            http = cluster.servers[bad].http
            assert http is not None
            assert "RAFT_FAILED" in (await becomes(http.port, 503))["reasons"]
            await others.ensure("made-later")  # it hears of that from the others
            await until(lambda: "made-later" in cluster.member(bad).metadata.streams, "it does not")
            controls[bad]._orders = Orders()
            await has_no_alarm(others)
            await becomes(http.port, 200)
            await cluster.in_step("made-later")

    run(main(), deadline=4 * DEADLINE)


def test_a_node_that_nobody_else_is_there_for_answers_by_its_copy(tmp_path: Path) -> None:
    async def main() -> None:
        async with one_of_three(tmp_path, Orders(full=True)) as (cluster, _, bad, _):
            for name in set(cluster.servers) - {bad}:
                await cluster.kill(name)
            code, out, complaints = await command(cluster, bad, "sub", "orders")
            assert (code, len(out.split())) == (0, 10)
            assert "reported by a copy" in complaints
            follows = ("sub", "orders", "--follow", "--count", "10")
            code, out, complaints = await command(cluster, bad, *follows)
            assert (code, len(out.split())) == (0, 10)
            assert "reported by a copy" in complaints
            mine = await cluster.client(bad, timeout=DEADLINE)
            with pytest.raises(StreamsError) as caught:
                await mine.publish("orders", b"x")
            assert caught.value.code == "NO_MASTER"

    run(main(), deadline=4 * DEADLINE)


def test_what_a_node_knows_does_not_become_older_when_it_takes_part_again(tmp_path: Path) -> None:
    """It reads its log anew, and is told bit by bit what of it was agreed on."""

    async def main() -> None:
        async with one_of_three(tmp_path, Orders(full=True)) as (cluster, others, bad, controls):
            member = cluster.member(bad)
            await until(lambda: "more" in member.metadata.streams, "it does not hear of it")
            known = member.metadata.index
            controls[bad]._orders = Orders()
            while member.failed is not None:
                assert member.metadata.index >= known
                await asyncio.sleep(0)
            for _ in range(100):
                assert member.metadata.index >= known
                await asyncio.sleep(0.005)
            await others.ensure("made-later")
            await until(lambda: "made-later" in member.metadata.streams, "it takes no part")

    run(main(), deadline=4 * DEADLINE)


async def says_the_same(cluster: Clustered, name: str) -> None:
    """Wait until `/health` of a node lists the alarms that its status has: which nodes fail, are silent or are seen."""
    http = cluster.servers[name].http
    assert http is not None
    client = await cluster.client(name, timeout=DEADLINE)
    end = asyncio.get_running_loop().time() + DEADLINE
    while True:
        status, (_, told) = await client.admin("cluster", DEADLINE), await health(http.port)
        both = [{(one["code"], one["text"]) for one in side["alarms"]} for side in (status, told)]
        if both[0] == both[1]:
            return
        assert asyncio.get_running_loop().time() < end, both
        await asyncio.sleep(0.05)


def test_every_node_knows_of_one_that_takes_no_part_without_asking(tmp_path: Path) -> None:
    async def main() -> None:
        orders = Orders(refuse=errno.EFBIG, refuse_at=RAFT)
        async with one_of_three(tmp_path, orders) as (cluster, others, bad, controls):
            await has_alarm(others, "RAFT_FAILED")
            for name in cluster.servers:
                await says_the_same(cluster, name)
                http = cluster.servers[name].http
                assert http is not None
                _, told = await health(http.port)
                assert "RAFT_FAILED" in {one["code"] for one in told["alarms"]}
                assert "NODE_SILENT" not in {one["code"] for one in told["alarms"]}
            controls[bad]._orders = Orders()
            await has_no_alarm(others)
            for name in cluster.servers:
                await says_the_same(cluster, name)

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.slow
def test_two_nodes_that_cannot_write_keep_nobody_waiting(tmp_path: Path) -> None:
    """The third one knows all that was acknowledged, and that nobody can lead; so do the two."""

    async def main() -> None:
        orders = Orders(refuse=errno.EFBIG, refuse_at=RAFT)
        async with one_of_three(tmp_path, orders) as (cluster, others, _, controls):
            _, master = await cluster.serving("orders")
            controls[master]._orders = orders
            with contextlib.suppress(StreamsError):
                await others.ensure("never")
            await until(lambda: cluster.member(master).failed is not None, "it goes on")
            members = [cluster.member(name) for name in cluster.servers]
            await until(lambda: all(m.has_no_quorum for m in members), "one believes in a leader")
            for name in cluster.servers:
                mine = await cluster.client(name, timeout=DEADLINE)
                with pytest.raises(StreamsError) as caught:
                    await mine.publish("orders", b"x")
                assert caught.value.code == "NO_MASTER"
                told = await mine.admin("cluster", DEADLINE)
                assert told["leader"] is None
                [why] = [one["text"] for one in told["alarms"] if one["code"] == "NO_LEADER"]
                assert "1 of 3 voters" in why
                await says_the_same(cluster, name)
                code, out, _ = await command(cluster, name, "sub", "orders")
                assert (code, len(out.split())) == (0, 10)
                code, out, _ = await command(cluster, name, "stream", "info", "orders")
                assert code == 0

    run(main(), deadline=8 * DEADLINE)
