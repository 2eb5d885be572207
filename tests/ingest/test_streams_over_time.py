"""A connector's streams over time: ended and sent again, left to another connector, and no early end of `feed`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.ingest.ready_connectors import DEADLINE, Fed, fed

from railgun.ingest import Connector, FeedError


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fed]:
    with fed(tmp_path_factory.mktemp("again")) as running_flow:
        yield running_flow


def work(flow: Fed, doing: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE):
            connector = Connector(flow.name, registry=flow.registry)
            await connector.open()
            try:
                await doing(connector)
            finally:
                await connector.close()

    asyncio.run(run())


def payloads(flow: Fed, stream: str) -> list[bytes]:
    flow.job.snapshot()
    flow.job.snapshot()  # what is in the first one is in files by now
    return flow.payloads().get(stream, [])


def test_a_stream_is_sent_again_after_its_end(flow: Fed) -> None:
    async def doing(connector: Connector) -> None:
        for n in range(3):
            await connector.send("again", n, b"%d" % n)
            await connector.end("again")
        await connector.feed("again", [(3, b"3")])
        await connector.send("again", 4, b"4")
        await connector.flush()

    work(flow, doing)
    assert payloads(flow, "again") == [b"%d" % n for n in range(5)]


def test_an_ended_stream_is_another_connector_s_also_after_a_reconnect(flow: Fed) -> None:
    async def doing(connector: Connector) -> None:
        await connector.send("left", 0, b"0")
        await connector.end("left")
        before = connector.connections
        assert connector._link.connection is not None
        connector._link.connection.close()
        while connector.connections == before:
            await asyncio.sleep(0.01)
        async with Connector(flow.name, registry=flow.registry) as other:
            assert await other.position("left") == 0
            await other.send("left", 1, b"1")

    work(flow, doing)
    assert payloads(flow, "left") == [b"0", b"1"]


def test_a_function_is_not_taken_for_done_when_the_connection_is_lost(flow: Fed) -> None:
    """All that was sent is acknowledged, the function waits for more, and the connection is lost: it goes on."""
    more = asyncio.Event()

    async def items(por: int | None) -> Any:
        for n in range(0 if por is None else por + 1, 20):
            if n == 10:
                await more.wait()
            yield [(n, b"%d" % n)]

    async def doing(connector: Connector) -> None:
        feeding = asyncio.create_task(connector.feed("lost", items))
        await connector.wait("lost", 9)
        before = connector.connections
        assert connector._link.connection is not None
        connector._link.connection.close()
        while connector.connections == before:
            await asyncio.sleep(0.01)
        assert await connector.position("lost") == 9
        assert not feeding.done()
        more.set()
        await feeding

    work(flow, doing)
    assert payloads(flow, "lost") == [b"%d" % n for n in range(20)]


def test_names_that_cannot_be_are_refused_here(flow: Fed) -> None:
    async def doing(connector: Connector) -> None:
        for bad in ("", "n" * 1001, "\udcff"):
            with pytest.raises(FeedError):
                await connector.send(bad, 0, b"")
        assert connector.error is None
        assert connector.connected

    work(flow, doing)


def test_what_is_skipped_is_not_sent(flow: Fed) -> None:
    async def doing(connector: Connector) -> None:
        for n in range(6):
            await connector.send("skip", n, b"%d" % n, key=f"k{n}", time=n)
        assert connector.skip("skip", 3)
        assert connector.skip("skip", 5)
        assert not connector.skip("skip", 3)
        assert not connector.skip("skip", 99)
        await connector.flush()

    work(flow, doing)
    assert payloads(flow, "skip") == [b"0", b"1", b"2", b"4"]
    assert [row[:3] for row in flow.rows()["skip"]] == [[n, f"k{n}", n] for n in (0, 1, 2, 4)]
