"""What people and programs see of a cluster, and do to it: real nodes in one process, over the wire and by HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.broker.clustered import DEADLINE, QUICK, Clustered, clustered, until
from tests.broker.refusing import has_no_alarm
from tests.broker.running import node, run

from railgun.broker.protocol.metadata import alarms
from railgun.broker.streams import admin
from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.transport.commands import Blob

Told = dict[str, Any]


async def status(client: Client) -> Told:
    while True:
        try:
            return dict(await client.admin("cluster"))
        except StreamsError as error:
            if error.code != "CONNECTION_LOST":  # as when what it published has another master now
                raise


async def well(client: Client, size: int = 3) -> Told:
    """Wait until all nodes are there, and nothing is wrong."""
    end = time.monotonic() + DEADLINE
    while True:
        told = await status(client)
        votes = len(told["voters"]) == size == len(told["nodes"])
        if votes and told["settled"] and all(len(r["voting"]) == size for r in told["regions"]):
            return told
        assert time.monotonic() < end, json.dumps(told)
        await asyncio.sleep(0.05)


def codes(told: Told) -> set[str]:
    return {one["code"] for one in told["alarms"]}


async def refused(client: Client, call: str, **given: Any) -> tuple[str, str]:
    with pytest.raises(StreamsError) as caught:
        await client.admin(call, 5.0, **given)
    return caught.value.code, str(caught.value)


class Pressure:
    """A client that publishes one message after the other, each with its ID, and waits for each."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client, self._stream = client, stream
        self.offsets: dict[str, int] = {}
        self.at: list[float] = []
        self._ends = False
        self._task = asyncio.create_task(self._go())

    async def _go(self) -> None:
        while not self._ends:
            name = f"m{len(self.offsets)}"
            try:
                offset = await self._client.publish(self._stream, name, id=name, timeout=10.0)
            except StreamsError as error:
                if error.code != "DUPLICATE_ID":  # its first try was stored
                    raise
                offset = int(error.offset)  # type: ignore[attr-defined]
            self.offsets[name] = offset
            self.at.append(time.monotonic())

    async def more(self, count: int = 20) -> None:
        """Until so many more were acknowledged."""
        goal = len(self.at) + count
        await until(lambda: len(self.at) >= goal or self._task.done(), "nothing is acknowledged")
        if self._task.done():
            self._task.result()

    async def end(self) -> float:
        """Stop; the longest time between two acknowledged messages."""
        self._ends = True
        await self._task
        return max(b - a for a, b in itertools.pairwise(self.at))


def _rules(cluster: Clustered, name: str) -> bool:
    return cluster.master() == name


async def stored(client: Client, stream: str) -> list[str]:
    end = (await client.describe(stream))["end"]
    async with await client.subscribe(stream) as sub:
        return [(await sub.next(DEADLINE)).text for _ in range(end)]


# ---------------------------------------------------------------- a node that is alone


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("cluster", {}),
        ("remove_node", {"node": "a"}),
        ("keep_node", {"node": "a"}),
        ("transfer", {"node": "a", "region": "global"}),
        ("cluster_settings", {"change": {"patience": 2}}),
        ("join", {"address": "127.0.0.1:1"}),
    ],
)
def test_a_node_that_is_alone_says_how_to_get_a_cluster(
    tmp_path: Path, call: str, given: Told
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            code, text = await refused(await running.client(), call, **given)
            assert code == "NO_CLUSTER"
            assert "[cluster]" in text
            assert await (await running.client()).admin("nodes") == []

    run(main())


# ---------------------------------------------------------------- how it is


def test_all_nodes_tell_the_same_of_a_cluster_that_is_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"x"] * 50)
            told = await well(client)
            ids = {one["id"] for one in told["nodes"]}
            assert {one["name"] for one in told["nodes"]} == {"n1", "n2", "n3"}
            assert set(told["voters"]) == ids == set(told["regions"][0]["voting"])
            assert told["streams"] == told["regions"][0]["streams"] == 1
            assert told["settings"]["patience"] == QUICK["patience"]
            [region] = told["regions"]
            await cluster.in_step("orders")
            for name in cluster.servers:
                one = await cluster.client(name)
                other = await well(one)
                assert (other["name"], other["cluster"]) == (name, told["cluster"])
                assert other["leader"] == told["leader"]
                assert other["regions"][0]["master"] == region["master"]
                lags = other["regions"][0]["lag"]
                assert set(lags) == ids - {region["master"]}
                assert [lag["messages"] for lag in lags.values()] == [0, 0]
                known = await one.admin("nodes")
                assert {(a["host"], a["port"]) for a in known} == {
                    ("127.0.0.1", server.port) for server in cluster.servers.values()
                }
                assert all(a["up"] and a["id"] in ids and a["regions"] for a in known)

    run(main())


def test_a_dead_node_is_told_and_so_is_what_it_means(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client("n1")
            await client.ensure("orders")
            told = await well(client)
            names = {one["id"]: one["name"] for one in told["nodes"]}
            gone = next(n for n in ("n2", "n3") if n != names[told["leader"]])
            await cluster.kill(gone)
            end = time.monotonic() + DEADLINE
            while "NODE_SILENT" not in codes(told := await status(client)):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            [dead] = [one for one in told["nodes"] if not one["up"]]
            assert dead["name"] == gone
            assert dead["silent_for"] > 0
            assert "NO_QUORUM_SPARE" in codes(told)
            await cluster.start(gone)
            await well(client)

    run(main())


def test_all_nodes_wait_equally_long_for_a_leader_whatever_their_files_say(tmp_path: Path) -> None:
    files = {"n1": 0.7, "n2": 1.1, "n3": 0.9, "n4": 1.3}

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)

        async def start(name: str) -> None:
            await cluster.start(name, settings=QUICK | {"election": files[name]})

        async def vote(count: int) -> Client:
            client, end = await cluster.client(), time.monotonic() + DEADLINE
            while len((await status(client))["voters"]) != count:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            return client

        try:
            for name in ("n1", "n2", "n3"):
                await start(name)
            await vote(3)
            settled = cluster.member("n1").election
            assert settled in files.values()
            await start("n4")
            await vote(4)
            for name in ("n4", "n1"):
                await cluster.stop(name)
                await start(name)
            client = await vote(4)
            for name in files:
                member = cluster.member(name)
                assert member.consensus is not None
                assert member.consensus.settings.election == settled
                await until(lambda m=member: m.metadata.seconds("election") == settled)  # type: ignore[misc]
            code, text = await refused(client, "cluster_settings", change={"election": 5})
            assert (code, "fixed" in text) == ("BAD_SETTINGS", True)
        finally:
            await cluster.close()

    run(main())


def test_drift_between_a_file_and_the_cluster_is_told_by_every_node(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client("n1")
            await well(client)
            done = await client.admin("cluster_settings", change={"master_wait": 7})
            assert (done["result"], done["settings"]["master_wait"]) == ("UPDATED", 7)
            assert codes(await well(client)) == set()  # nobody's file says anything of it
            await client.admin("cluster_settings", change={"patience": 1.5})
            drift = {"patience": {"file": QUICK["patience"], "cluster": 1.5}}
            end, told = time.monotonic() + DEADLINE, await status(client)
            while [one["drift"] for one in told["nodes"]] != [drift] * 3:
                assert time.monotonic() < end  # all hear of it, not at the same moment
                await asyncio.sleep(0.05)
                told = await status(client)
            assert codes(told) == {"DRIFT"}
            code, text = await refused(client, "cluster_settings", change={"patience": "long"})
            assert (code, "patience" in text) == ("BAD_SETTINGS", True)
            code, text = await refused(client, "cluster_settings", change={"master_wait": 0.1})
            assert (code, "master_wait is 1 to 3600 seconds" in text) == ("BAD_SETTINGS", True)
            now = await client.admin("cluster_settings")
            assert (now["result"], now["settings"]["patience"]) == ("UNCHANGED", 1.5)

    run(main())


def test_a_replica_that_gets_nothing_is_behind_and_one_that_follows_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "ALARM_DELAY_S", 1.0)

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await well(client)
            pressure = Pressure(await cluster.client(), "orders")
            end = time.monotonic() + 2.5  # longer than what is long here
            while time.monotonic() < end:
                assert codes(await status(client)) == set()
                await asyncio.sleep(0.1)
            master = cluster.master()
            late = next(name for name in cluster.servers if name != master)
            member = cluster.member(late)
            received = member.received

            def deaf(sender: str, lane: Any, command: Any, blob: Blob) -> None:
                if lane != "data":
                    received(sender, lane, command, blob)

            monkeypatch.setattr(member, "received", deaf)
            end = time.monotonic() + DEADLINE
            while "REPLICA_BEHIND" not in codes(told := await status(client)):
                assert time.monotonic() < end, json.dumps(told)
                await asyncio.sleep(0.05)
            lag = told["regions"][0]["lag"][member.me]
            assert lag["messages"] > 0
            assert not lag["caught_up"]
            assert not told["settled"]
            await pressure.end()
            await cluster.stop(late)
            await cluster.start(late)
            await well(client)

    run(main())


def test_a_node_that_cannot_write_what_was_agreed_on_takes_no_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client("n1")
            await client.ensure("orders")
            await well(client)
            for name in ("n1", "n2"):
                await cluster.stop(name)
                cluster.configs[name] = replace(cluster.configs[name], http_port=0)
                await cluster.start(name)
            client = await cluster.client("n1")
            await well(client)
            consensus = cluster.member("n2").consensus
            assert consensus is not None
            consensus._fail(OSError("no such device"), "its log cannot be written")
            end = time.monotonic() + DEADLINE
            while "RAFT_FAILED" not in codes(told := await status(client)):
                assert time.monotonic() < end, json.dumps(told)
                await asyncio.sleep(0.05)
            async with web(cluster, "n2") as ask:
                code, health = await ask("GET", "/health")
                assert (code, set(health["reasons"])) == (503, {"RAFT_FAILED"})
            async with web(cluster, "n1") as ask:
                assert (await ask("GET", "/health"))[0] == 200
            assert await client.publish("orders", b"on", id="on", timeout=DEADLINE) == 0

    run(main(), 2 * DEADLINE + 20)


def test_streams_that_are_of_no_cluster_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path / "n1") as running:
            await (await running.client()).ensure("old")
        async with clustered(tmp_path) as cluster:
            client = await cluster.client("n2")
            told = await status(client)
            assert codes(told) == {"LEFT_ALONE"}
            [left] = [one["left_alone"] for one in told["nodes"] if one["left_alone"]]
            assert left == ["old"]

    run(main())


def test_streams_that_hold_what_is_staged_are_not_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            producer = await client.producer("orders", "flow", 1)
            stage = await producer.open()
            await stage.put([b"x"])
            assert "orders.staged" in cluster.member(cluster.master()).metadata.streams
            told = await client.admin("cluster")
            assert told["streams"] == told["regions"][0]["streams"] == 1

    run(main())


def test_streams_are_listed_as_their_masters_know_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            await client.publish_many("orders", [b"x"] * 7)
            async with await client.subscribe("orders", group="g") as sub:
                await sub.next(DEADLINE)
                for name in cluster.servers:
                    told = await (await cluster.client(name)).streams()
                    assert [one["name"] for one in told] == ["news", "orders"]
                    orders = told[1]
                    assert (orders["end"], orders["trouble"]) == (7, "")
                    assert [one["name"] for one in orders["groups"]] == ["g"]

    run(main())


def test_a_stream_whose_master_does_not_answer_is_listed_with_its_trouble(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish("orders", b"x")
            await cluster.in_step("orders")
            master = await cluster.ready("orders")
            one = next(name for name in cluster.servers if name != master)
            asked = await cluster.client(one)
            await asked.admin("cluster_settings", change={"patience": 60})
            await cluster.kill(master)
            [told] = await asked.streams()
            assert (told["name"], told["end"]) == ("orders", 1)  # as the copy here knows it
            assert master in told["trouble"]

    run(main())


# ---------------------------------------------------------------- handing over


def test_a_region_moves_to_a_node_and_nothing_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            told = await well(client)
            epoch = told["regions"][0]["epoch"]
            pressure = Pressure(await cluster.client(), "orders")
            await pressure.more()
            for _ in range(3):
                before = await cluster.ready("orders")
                to = next(name for name in cluster.servers if name != before)
                done = await client.admin("transfer", node=to, region="global")
                assert done["result"] == "BEGAN"
                assert done["epoch"] > epoch
                await until(partial(_rules, cluster, to), "it is not the master")
                await pressure.more()
            longest = await pressure.end()
            print(f"longest gap at a transfer: {longest * 1000:.0f} ms")
            assert sorted(pressure.offsets.values()) == list(range(len(pressure.offsets)))
            assert await stored(client, "orders") == list(pressure.offsets)
            done = await client.admin("transfer", node=cluster.master(), region="global")
            assert done["result"] == "UNCHANGED"

    run(main())


def test_a_master_that_yielded_in_vain_gets_the_next_epoch(tmp_path: Path) -> None:
    """As when the leader is lost between asking it to and choosing the next one."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish("orders", b"a")
            master = await cluster.ready("orders")
            region = cluster.member(master).regions.get("global")
            epoch = region.led
            await region.yield_up(epoch)
            assert not region.may_act()
            region.granted(epoch, time.monotonic() + 60)
            assert not region.may_act()  # never again in this epoch
            assert await client.publish("orders", b"b", timeout=DEADLINE) == 1
            assert cluster.member("n1").metadata.regions["global"].epoch > epoch

    run(main())


def test_whom_a_region_or_the_lead_cannot_be_given_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            await cluster.start("n4", bootstrap_expect=0, regions={"global": "replica"})
            client = await cluster.client("n1")
            await well(client, 4)
            give = {"region": "global"}
            assert (await refused(client, "transfer", node="n9", **give))[0] == "UNKNOWN_NODE"
            assert (await refused(client, "transfer", node="n9"))[0] == "UNKNOWN_NODE"
            assert (await refused(client, "transfer", node="n2", region="x"))[0] == "NO_REGION"
            assert (await refused(client, "transfer", node="n4", **give))[0] == "NOT_ELIGIBLE"
            told = await status(client)
            names = {one["id"]: one["name"] for one in told["nodes"]}
            held = {names[told["leader"]], names[told["regions"][0]["master"]], "n1", "n4"}
            gone = next((name for name in ("n2", "n3") if name not in held), None)
            if gone is None:  # n2 and n3 are leader and master
                gone = names[told["regions"][0]["master"]]
                await client.admin("transfer", node="n1", region="global")
            await cluster.kill(gone)
            end = time.monotonic() + DEADLINE
            while all(one["up"] for one in (await status(client))["nodes"]):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert (await refused(client, "transfer", node=gone, **give))[0] == "NOT_ELIGIBLE"
            assert (await refused(client, "transfer", node=gone))[0] == "NOT_ELIGIBLE"

    run(main())


def test_the_lead_moves(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            told = await well(client)
            to = next(one for one in told["voters"] if one != told["leader"])
            assert (await client.admin("transfer", node=to))["result"] == "MOVING"
            await until(
                lambda: all(
                    (c := cluster.member(n).consensus) is not None and c.leader == to
                    for n in cluster.servers
                ),
                "it does not lead",
            )
            assert (await client.admin("transfer", node=to))["result"] == "LEADS"

    run(main())


# ---------------------------------------------------------------- leaving, joining


def test_a_node_leaves_and_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"x"] * 100)
            await well(client)
            assert (await refused(client, "remove_node", node="n9"))[0] == "UNKNOWN_NODE"
            gone = await cluster.ready("orders")  # the master itself
            rest = [name for name in cluster.servers if name != gone]
            asked = await cluster.client(rest[0])
            done = await asked.admin("remove_node", DEADLINE, node=gone, wait=DEADLINE)
            assert done == {"result": "REMOVED", "why": ""}
            await cluster.stop(gone)
            told = await well(asked, 2)
            assert {one["name"] for one in told["nodes"]} == set(rest)
            assert await asked.publish("orders", b"more") == 100
            itself = await cluster.client(rest[1])
            last = await itself.admin("remove_node", DEADLINE, node=rest[1], wait=DEADLINE)
            assert last["result"] == "REMOVED"
            await well(asked, 1)
            assert (await refused(asked, "remove_node", node=rest[0]))[0] == "STILL_IN_USE"

    run(main())


def test_a_node_that_cannot_leave_says_why_and_may_stay(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await well(client)
            await client.admin("cluster_settings", change={"patience": 60})
            keeps = await cluster.ready("orders")
            dead = next(name for name in cluster.servers if name != keeps)
            rest = await cluster.client(keeps)
            other = next(name for name in cluster.servers if name not in (keeps, dead))
            await cluster.kill(dead)
            # Its vote is missed, and nobody of the other two can be spared while it counts as living.
            done = await rest.admin("remove_node", node=other, wait=0)
            assert done["result"] == "LEAVING"
            assert "global" in done["why"]
            assert (await rest.admin("keep_node", node=other))["result"] == "STAYS"
            assert [one["leaving"] for one in (await status(rest))["nodes"]] == [False] * 3

    run(main())


def test_a_running_node_is_told_where_a_cluster_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await well(client)
            config = cluster.config("n4", bootstrap_expect=0, discovery="")
            assert config.cluster is not None
            await cluster.start("n4")
            new = await cluster.client("n4")
            told = await status(new)
            assert (told["state"], codes(told)) == ("alone", {"NO_CLUSTER"})
            assert (await refused(new, "remove_node", node="n1"))[0] == "NO_CLUSTER"
            assert (await refused(new, "join", address="nowhere"))[0] == "BAD_REQUEST"
            nobody = await new.admin("join", address="127.0.0.1:1", wait=0.1)
            assert nobody["result"] == "LOOKING"
            where = f"127.0.0.1:{cluster.ports[0]}"
            done = await new.admin("join", DEADLINE, address=where, wait=DEADLINE)
            assert done["result"] == "JOINED"
            told = await well(client, 4)
            assert told["cluster"] == done["cluster"]
            assert (await refused(new, "join", address=where))[0] == "IS_MEMBER"

    run(main())


# ---------------------------------------------------------------- an orderly end


def test_a_rolling_restart_is_not_noticed_by_a_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            ports = {name: server.port for name, server in cluster.servers.items()}
            client = await cluster.client()
            await client.ensure("orders")
            await well(client)
            pressure = Pressure(await cluster.client(), "orders")
            await pressure.more()
            for name in list(cluster.servers):
                server = cluster.servers[name]
                await server.hand_over()
                assert cluster.master() != name
                consensus = cluster.member(name).consensus
                assert consensus is not None
                assert not consensus.leads
                await cluster.stop(name)
                cluster.configs[name] = replace(cluster.configs[name], port=ports[name])
                await pressure.more()
                await cluster.start(name)
                await well(client)
                await pressure.more()
            longest = await pressure.end()
            print(f"longest gap in a rolling restart: {longest * 1000:.0f} ms")
            assert sorted(pressure.offsets.values()) == list(range(len(pressure.offsets)))
            assert await stored(client, "orders") == list(pressure.offsets)

    run(main())


def test_the_last_node_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client("n1")
            await well(client)
            await cluster.kill("n2")
            await cluster.kill("n3")
            async with asyncio.timeout(DEADLINE):
                await cluster.servers["n1"].hand_over(0.5)

    run(main())


# ---------------------------------------------------------------- by HTTP


@asynccontextmanager
async def web(cluster: Clustered, name: str) -> AsyncIterator[Any]:
    """Asks a node by HTTP: its status, and what it says."""
    server = cluster.servers[name]
    assert server.http is not None
    url = server.http.url
    headers = {"Authorization": f"Bearer {server.secret.hex()}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            async with session.request(method, url + path, json=body) as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await (answer.json() if is_json else answer.text())

        yield ask


def test_http_health_and_figures_of_a_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"x"] * 9)
            master = await cluster.ready("orders")
            aside = next(name for name in cluster.servers if name != master)
            for name in (master, aside):
                await cluster.stop(name)
                cluster.configs[name] = replace(cluster.configs[name], http_port=0)
                await cluster.start(name)
                await well(client)
            async with web(cluster, aside) as ask:
                code, told = await ask("GET", "/cluster")
                assert (code, told["alarms"]) == (200, [])
                assert await ask("GET", "/health") == (
                    200,
                    {"healthy": True, "reasons": {}, "alarms": []},
                )
                # The master describes it, whoever is asked.
                code, orders = await ask("GET", "/streams/orders")
                assert (code, orders["end"]) == (200, 9)
                done = await ask("POST", "/streams/orders/purge", {"before": 4})
                assert done == (200, {"first": 4, "end": 9, "purged": 4})
                assert (await ask("GET", "/streams/nobody"))[0] == 404
                assert (await ask("DELETE", "/nodes/n9"))[0] == 404
                assert (await ask("DELETE", "/nodes/n1?wait=long"))[0] == 400
                assert (await ask("POST", "/cluster/join", {"address": "h:1"}))[0] == 409
                code, done = await ask("POST", "/cluster/settings", {"change": {"patience": 0.7}})
                assert (code, done["settings"]["patience"]) == (200, 0.7)
                code, text = await ask("GET", "/metrics")
                for line in (
                    "railgun_cluster_nodes 3",
                    f'railgun_cluster_up{{node="{aside}"}} 1',
                    'railgun_region_is_master{region="global"}',
                    'railgun_region_epoch{region="global"}',
                    "railgun_raft_term",
                    "railgun_raft_commit",
                    'railgun_alarms{code="DRIFT"} 1',
                ):
                    assert line in text
            holder = await cluster.ready("orders")
            if cluster.servers[holder].http is not None:
                async with web(cluster, holder) as ask:
                    _, text = await ask("GET", "/metrics")
                    assert 'railgun_replica_lag{region="global",node="' in text

    run(main(), 2 * DEADLINE + 20)


def test_a_node_without_a_cluster_is_not_healthy(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        cluster.config("n1")
        cluster.configs["n1"] = replace(cluster.configs["n1"], http_port=0)
        await cluster.start("n1")
        try:
            async with web(cluster, "n1") as ask:
                code, told = await ask("GET", "/health")
                assert (code, set(told["reasons"])) == (503, {"NO_CLUSTER"})
                assert [one["code"] for one in told["alarms"]] == ["NO_CLUSTER"]
        finally:
            await cluster.stop("n1")

    run(main())


def test_every_call_about_the_cluster_is_in_the_table() -> None:
    calls = {"cluster", "nodes", "remove_node", "keep_node", "transfer", "cluster_settings", "join"}
    assert calls <= set(admin.CALLS)


def test_what_is_left_of_a_cluster_can_be_read_by_a_node_that_is_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(30)])
            await cluster.in_step("orders")
        async with node(tmp_path / "n2") as running:
            alone = await connect(data=tmp_path / "n2")
            async with alone:
                assert await stored(alone, "orders") == [str(n) for n in range(30)]
            assert running.told == []

    run(main())


def test_who_has_made_a_stream_finds_it_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that lags behind in what was agreed on must not say that there is no such stream."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            told = await well(await cluster.client("n1"))
            names = {one["id"]: one["name"] for one in told["nodes"]}
            late = next(name for id, name in names.items() if id != told["leader"])
            member = cluster.member(late)
            received = member.received

            def slowly(sender: str, lane: Any, command: Any, blob: Blob) -> None:
                pause = 0.1 if lane == "raft" else 0.0
                member.loop.call_later(pause, received, sender, lane, command, blob)

            monkeypatch.setattr(member, "received", slowly)
            maker = await cluster.client(names[told["leader"]])
            user = await cluster.client(late)
            for n in range(3):
                await maker.ensure(f"s{n}")
                assert f"s{n}" not in member.metadata.streams
                assert await user.publish(f"s{n}", b"x") == 0
            assert (await refused(user, "describe", name="s99"))[0] == "NO_STREAM"

    run(main())


def test_a_master_whose_disk_is_full_lets_another_one_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[str, int] = {}

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            master = await cluster.ready("orders")
            await well(client)
            for name in cluster.servers:
                member = cluster.member(name)
                monkeypatch.setattr(member.disk, "free", lambda name=name: free.get(name, 1 << 40))
            free[master] = 10 << 20
            await until(lambda: cluster.master() not in ("", master), "nobody takes its place")
            other = await cluster.ready("orders")
            await client.publish("orders", b"x", id="1")
            assert ("DISK_FULL", master) in {
                (one["code"], one["about"]) for one in (await status(client))["alarms"]
            }
            free.update(dict.fromkeys(cluster.servers, 0))
            await asyncio.sleep(2.0)
            assert cluster.master() == other  # nobody has more
            free.clear()
            await has_no_alarm(client)
            await well(client)

    run(main())
