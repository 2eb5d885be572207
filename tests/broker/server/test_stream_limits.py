"""Streams at the edges of what they promise: timeouts of responses, `ensure`, bounds on bytes and IDs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.broker.clustered import clustered, retried
from tests.broker.clustered import until as until_slowly
from tests.broker.running import DEADLINE, Proxy, node, refused, run, take, until

from railgun.broker.server.server import ServerConfig, serving
from railgun.cli.commands.serve import read_config
from railgun.cli.errors import CommandError
from railgun.cli.main import parser as build_parser
from railgun.client.client import Client, connect

# ---------------------------------------------------------------- rs_timeout


def test_a_request_without_a_timeout_waits_as_long_as_the_node_is_configured_to(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = ServerConfig(tmp_path, port=0, rs_timeout=0.3)
        async with serving(config), await connect(data=tmp_path) as client:
            await client.ensure("ask", kind="ephemeral")
            await client.subscribe("ask")
            await refused("RS_TIMEOUT", client.request("ask", b"what?"))

    run(main(), deadline=20.0)  # shorter than the usual 30 s


def test_a_request_with_a_timeout_of_its_own_is_not_bound_by_the_configured_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = ServerConfig(tmp_path, port=0, rs_timeout=0.05)
        async with serving(config), await connect(data=tmp_path) as client:
            await client.ensure("ask", kind="ephemeral")
            sub = await client.subscribe("ask")
            asked = asyncio.create_task(client.request("ask", b"what?", timeout=DEADLINE))
            message = await sub.next(DEADLINE)
            await refused("RS_TIMEOUT", client.request("ask", b"not answered"))
            await message.respond(b"this")
            assert await asked == b"this"

    run(main())


def test_a_cluster_has_one_timeout_of_responses_and_changes_it_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path, 3) as nodes:
            clients = [await nodes.client(name) for name in sorted(nodes.servers)]
            await clients[0].ensure("ask", kind="ephemeral")
            await until_slowly(
                lambda: all("ask" in s.node.streams for s in nodes.servers.values()), "no stream"
            )
            await clients[0].subscribe("ask")
            await clients[0].admin("cluster_settings", change={"rs_timeout": 0.3})
            members = [nodes.member(name) for name in nodes.servers]
            await until_slowly(
                lambda: all(one.metadata.seconds("rs_timeout") == 0.3 for one in members),
                "the setting did not reach all nodes",
            )
            async with asyncio.timeout(20.0):  # shorter than the usual 30 s
                await refused("RS_TIMEOUT", clients[0].request("ask", b"what?"))

    run(main(), deadline=60.0)


def test_the_file_of_a_node_configures_the_timeout_of_responses(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[node]\nrs_timeout = 2.5\n")
    assert read_config(file)["rs_timeout"] == 2.5
    for wrong in ("0", "-1", '"long"', "true", "100000"):
        file.write_text(f"[node]\nrs_timeout = {wrong}\n")
        with pytest.raises(CommandError, match=r"rs_timeout is 0\.001 to 86400 seconds"):
            read_config(file)
    file.write_text('[node]\nrs_timeout = 2.5\n[cluster]\nsecret_file = "secret"\n')
    with pytest.raises(CommandError, match=r"write it to \[cluster\]"):
        read_config(file)


def test_a_request_does_not_wait_for_ever_for_a_node_that_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            client, direct = await running.client(proxy.port), await running.client()
            await client.ensure("ask", kind="ephemeral")
            sub = await client.subscribe("ask")
            asked = asyncio.create_task(client.request("ask", b"what?"))
            await sub.next(DEADLINE)
            proxy.cut()
            await refused("CONNECTION_LOST", asked)
            await client.close()
            await running.stop()
            await until(lambda: not direct.connected)
            direct.timeout = 0.2
            await refused("DEADLINE", direct.request("ask", b"what?"))

    run(main())


# ---------------------------------------------------------------- ensure


@contextlib.asynccontextmanager
async def one_or_three(path: Path, several: bool) -> AsyncIterator[Client]:
    """A client of one node, or of a cluster."""
    if several:
        async with clustered(path, 3) as nodes:
            yield await nodes.client()
    else:
        async with node(path) as running:
            yield await running.client()


@pytest.mark.parametrize("several", [False, True])
def test_ensure_merges_with_what_is_there_before_it_is_checked(
    tmp_path: Path, several: bool
) -> None:
    async def main() -> None:
        async with one_or_three(tmp_path, several) as client:
            await client.ensure("orders", id_box=10.0, max_age=60.0)
            # By itself it could not be: IDs are remembered for 120 s if nothing is said.
            assert (await client.ensure("orders", max_age=60.0))["result"] == "UNCHANGED"
            assert (await client.ensure("orders", "strict", max_age=60))["result"] == "UNCHANGED"
            assert (await client.ensure("orders", max_age=30.0))["result"] == "DIFFERS"
            changed = await client.ensure("orders", "overwrite", max_age=30.0)
            assert changed["result"] == "UPDATED"
            # By itself it could be, and together with what is there it cannot.
            for mode in ("warn", "strict", "overwrite"):
                await refused("BAD_SETTINGS", client.ensure("orders", mode, id_box=31.0))
            await refused("BAD_SETTINGS", client.ensure("other", max_age=60.0))
            told = (await client.describe("orders"))["settings"]
            assert (told["id_box"], told["max_age"]) == (10.0, 30.0)

    run(main(), deadline=60.0)


@pytest.mark.parametrize("several", [False, True])
def test_ensure_of_another_kind_says_that_it_differs(tmp_path: Path, several: bool) -> None:
    async def main() -> None:
        async with one_or_three(tmp_path, several) as client:
            await client.ensure("orders", id_box=10.0)
            await client.ensure("news", kind="ephemeral")
            told = await client.ensure("orders", kind="ephemeral")
            assert told["result"] == "DIFFERS"
            assert told["differs"]["kind"] == {"is": "persistent", "asked": "ephemeral"}
            assert (await client.ensure("news", kind="persistent"))["result"] == "DIFFERS"
            await refused("BAD_SETTINGS", client.ensure("news", max_age=500.0))
            for mode in ("strict", "overwrite"):
                await refused("DIFFERS", client.ensure("orders", mode, kind="ephemeral"))

    run(main(), deadline=60.0)


# ---------------------------------------------------------------- max_ids


@pytest.mark.parametrize("several", [False, True])
def test_the_pool_of_ids_has_the_size_that_was_asked_for_and_changes_at_once(
    tmp_path: Path, several: bool
) -> None:
    async def main() -> None:
        async with one_or_three(tmp_path, several) as client:
            await client.ensure("orders", max_ids=2)
            for id in ("a", "b"):
                await client.publish("orders", b"x", id=id)
            await refused("ID_POOL_FULL", client.publish("orders", b"x", id="c"))
            await client.ensure("orders", "overwrite", max_ids=3)

            async def taken() -> None:
                await client.publish("orders", b"x", id="c")

            await retried(taken)  # in a cluster the master hears of it a moment later
            await refused("ID_POOL_FULL", client.publish("orders", b"x", id="d"))
            await refused("DUPLICATE_ID", client.publish("orders", b"x", id="a"))
            await refused("BAD_SETTINGS", client.ensure("orders", "overwrite", max_ids=0))

    run(main(), deadline=60.0)


def test_the_size_of_the_pool_of_ids_can_be_typed() -> None:
    options = build_parser().parse_args(["stream", "ensure", "orders", "--max-ids", "5"])
    assert options.max_ids == 5
    with pytest.raises(CommandError):
        build_parser().parse_args(["stream", "ensure", "orders", "--max-ids", "0"])


# ---------------------------------------------------------------- max_bytes


def test_max_bytes_holds_below_the_size_of_a_segment(tmp_path: Path) -> None:
    most = 64 << 10

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_bytes=most)
            for n in range(120):
                await client.publish("orders", bytes([n]) * 2000)
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.retain()
            told = await client.describe("orders")
            assert most * 3 // 4 <= told["bytes"] <= most
            async with await client.subscribe("orders") as sub:
                kept = await take(sub, told["end"] - told["first"])
            assert [message.payload[0] for message in kept] == list(range(told["first"], 120))
            await running.again()
            client = await running.client()
            assert (await client.describe("orders"))["bytes"] <= most
            assert await client.publish("orders", b"x") == 120

    run(main())


def test_a_lower_max_bytes_takes_a_large_segment_only_when_there_is_more_to_keep(
    tmp_path: Path,
) -> None:
    most = 64 << 10

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"x" * 2000] * 120)
            await client.ensure("orders", "overwrite", max_bytes=most)
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.retain()
            assert (await client.describe("orders"))["first"] == 0
            for _ in range(30):
                await client.publish("orders", b"y" * 2000)
            await stream.retain()
            told = await client.describe("orders")
            assert told["first"] >= 120
            assert most // 2 <= told["bytes"] <= most

    run(main())
