"""A node whose process is frozen: its connections stay open, and nothing comes over them any more."""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 30.0


@pytest.fixture
def with_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a coroutine function with three `railgun serve` processes that have formed a cluster."""
    monkeypatch.syspath_prepend(str(ROOT))
    clusters: Any = importlib.import_module("bench._clusters")
    clusterer: Any = importlib.import_module("bench._clusterer")

    def run(use: Callable[[Any], Awaitable[None]]) -> None:
        async def begin_and_use(cluster: Any) -> None:
            await clusterer.begin(cluster)
            await use(cluster)

        with clusters.ours(tmp_path / "cluster") as cluster:
            asyncio.run(begin_and_use(cluster))

    return run


@pytest.mark.parametrize("node", ["another node", "the master"])
def test_a_publisher_goes_on_without_a_master_that_is_frozen(
    node: str, with_cluster: Callable[..., None]
) -> None:
    async def use(cluster: Any) -> None:
        _, master, other = await cluster.roles()
        async with await cluster.client(other if node == "another node" else master) as client:
            assert await client.publish("bench", b"before", id="1") == 0
            master.signal(signal.SIGSTOP)
            assert await client.publish("bench", b"after", id="2", timeout=WAIT_S) == 1
            async with await client.subscribe("bench", group="all") as subscription:
                found = await subscription.batch(2, WAIT_S)
            assert [message.payload for message in found][:1] == [b"before"]

    with_cluster(use)


def test_an_exclusive_group_hands_over_while_the_node_of_its_active_member_is_frozen(
    with_cluster: Callable[..., None],
) -> None:
    async def use(cluster: Any) -> None:
        _, master, frozen = await cluster.roles()
        (standby_node,) = [node for node in cluster.nodes if node not in (master, frozen)] or [
            master
        ]
        async with (
            await cluster.client(frozen) as active_client,
            await cluster.client(standby_node) as standby_client,
        ):
            active = await active_client.subscribe("bench", group="g", exclusive=True)
            await standby_client.publish("bench", b"first", id="1")
            assert (await active.next(WAIT_S)).payload == b"first"
            standby = await standby_client.subscribe("bench", group="g", exclusive=True)
            frozen.signal(signal.SIGSTOP)
            message = await standby.next(15.0)  # a silent client is given up after 20 s
            assert message.payload == b"first"
            assert message.delivery == 2
            message.ack()
            await standby.flush()
            frozen.signal(signal.SIGCONT)
            await standby_client.publish("bench", b"second", id="2")
            assert (await standby.next(WAIT_S)).payload == b"second"

    with_cluster(use)


def test_a_client_does_not_wait_for_a_frozen_node_to_say_hello(
    with_cluster: Callable[..., None],
) -> None:
    async def use(cluster: Any) -> None:
        _, master, frozen = await cluster.roles()
        frozen.signal(signal.SIGSTOP)
        async with await cluster.client(frozen, master, timeout=WAIT_S) as client:
            assert client.where[1] == master.port

    with_cluster(use)


def test_a_reader_without_a_group_leaves_a_frozen_replica(
    with_cluster: Callable[..., None],
) -> None:
    async def use(cluster: Any) -> None:
        _, master, frozen = await cluster.roles()
        async with await cluster.client(frozen) as reader, await cluster.client(master) as writer:
            await writer.publish("bench", b"first", id="1")
            subscription = await reader.subscribe("bench", start="start")
            assert (await subscription.next(WAIT_S)).payload == b"first"
            frozen.signal(signal.SIGSTOP)
            await writer.publish("bench", b"second", id="2")
            message = await subscription.next(WAIT_S)
            assert (message.offset, message.payload) == (1, b"second")

    with_cluster(use)
