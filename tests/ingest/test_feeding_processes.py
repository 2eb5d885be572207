"""Programs feed a flow whose workers are real processes: through kills, rescales and reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ingest.fed_flow import (
    SECRET,
    check,
    connector,
    doors,
    fed_job,
    items,
    shown,
    text,
    until,
)

from railgun import Job
from railgun.ingest import Connector, FeedError, NoFlowError, RefusedError, SyncConnector


def kill(job: Job, *workers: int) -> None:
    pids = {one["worker"]: one["pid"] for one in job.status()["workers"]}
    for worker in workers:
        os.kill(pids[worker], signal.SIGKILL)


async def size(job: Job, workers: int) -> None:
    await asyncio.to_thread(job.scale, workers, wait=True, timeout=60)


def test_two_streams_come_out_as_they_went_in_and_all_is_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        told: list[tuple[str, int]] = []
        async with connector(tmp_path, on_ack=lambda *ack: told.append(ack)) as c:
            await asyncio.gather(
                c.feed("a", items("a", 3000)), c.feed("b", lambda after: items("b", 2000, after))
            )
            assert (c.acked("a"), c.acked("b"), c.acked("c")) == (2999, 1999, None)
        assert told[-1] in (("a", 2999), ("b", 1999))

    with fed_job(tmp_path) as job:
        asyncio.run(main())
        job.stop()
    check(tmp_path / "out", {"a": 3000, "b": 2000})


@pytest.mark.slow
def test_through_lost_workers_and_every_rescale(tmp_path: Path) -> None:
    """Crash 1 of 2, grow, crash 2 of 3, shrink, come back under an old name: one job, all in a row."""
    streams = {f"s{number}": 1200 for number in range(6)}

    async def main(job: Job) -> None:
        gates = [asyncio.Event() for _ in range(3)]

        async def sent_in_parts(c: Connector, name: str) -> None:
            for number, payload in items(name, 1200):
                if number in (300, 600, 900):
                    await gates[number // 300 - 1].wait()
                await c.send(name, number, payload)
            await c.end(name)

        async def replayed(c: Connector, name: str) -> None:
            await c.feed(name, lambda por: items(name, 1200, por))

        async with connector(tmp_path) as one, connector(tmp_path) as two:
            names = list(streams)
            work = asyncio.gather(
                *(sent_in_parts(one, name) for name in names[:3]),
                *(sent_in_parts(two, name) for name in names[3:5]),
                replayed(two, names[5]),
            )
            await until(lambda: bool(one.acked("s0")), "the first acknowledgement")
            kill(job, 1)
            gates[0].set()
            await until(lambda: (one.acked("s0") or 0) >= 599, "half of a stream")
            await size(job, 3)
            kill(job, 0, 2)
            gates[1].set()
            await until(lambda: (two.acked("s3") or 0) >= 899, "most of a stream")
            await size(job, 1)
            gates[2].set()
            await size(job, 2)
            await asyncio.wait_for(work, 90)
            assert one.connections > 1

    with fed_job(tmp_path) as job:
        asyncio.run(main(job))
        assert job.status()["failures"] >= 2
        job.stop()
    check(tmp_path / "out", streams)


def test_a_stream_goes_on_at_the_same_worker_and_at_another(tmp_path: Path) -> None:
    """Without a crash: close and come back; then half by one connector, half by the next, elsewhere."""

    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 2, "two workers that listen")
        first, second = doors(job)
        async with Connector(first, secret=SECRET) as c:
            for number, payload in items("a", 100):
                await c.send("a", number, payload)
            await until(lambda: bool(shown(tmp_path / "out")), "some output")
            await c.close()
        async with Connector(first, secret=SECRET) as c:
            assert await c.position("a") == 99  # it is there, committed or not
            for number, payload in items("a", 250, 99):
                await c.send("a", number, payload)
            await c.close()
        async with Connector(second, secret=SECRET) as c:
            position = await c.position("a")
            assert position is not None
            await c.feed("a", items("a", 400))  # what is there already is passed over
        async with Connector(second, secret=SECRET) as c:
            await c.feed("b", [(0, text("b", 0))])  # the first id may be 0 at each worker
        async with Connector(first, secret=SECRET) as c:
            await c.feed("c", [(0, text("c", 0))])

    with fed_job(tmp_path) as job:
        asyncio.run(main(job))
        job.stop()
    check(tmp_path / "out", {"a": 400, "b": 1, "c": 1})


def test_a_stream_that_is_wanted_elsewhere_is_free_soon_however_rare_snapshots_are(
    tmp_path: Path,
) -> None:
    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 2, "two workers that listen")
        first, second = doors(job)
        one = Connector(first, secret=SECRET)
        await one.open()
        for number, payload in items("a", 50):
            await one.send("a", number, payload)

        def came() -> int:
            stages = [one.get("stages", {}).values() for one in job.status()["workers"]]
            return max((stage["records"] for known in stages for stage in known), default=0)

        await until(lambda: came() == 50, "all of it is there")
        await one.close()
        async with Connector(second, secret=SECRET) as two:
            assert await asyncio.wait_for(two.position("a"), 20) == 49
            await two.close()

    with fed_job(tmp_path, every=3600.0) as job:
        asyncio.run(main(job))
        job.stop()
    check(tmp_path / "out", {"a": 50})


def test_a_port_that_is_not_free_for_a_moment_when_a_worker_is_started_again(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 1, "a worker that listens")
        kill(job, 0)
        held = []

        def hold() -> bool:
            with contextlib.suppress(OSError):
                held.append(socket.create_server(("127.0.0.1", port)))
            return bool(held) or bool(job.status()["failures"])

        await until(hold, "the port is free")
        await until(lambda: job.status()["failures"] == 1, "it is noticed")
        await until(lambda: bool(job.status()["workers"][0]["pid"]), "a new one has called")
        await asyncio.sleep(0.1)  # while it finds the port taken
        for one in held:
            one.close()
        async with Connector(f"127.0.0.1:{port}", secret=SECRET) as c:
            await c.feed("a", items("a", 10))

    with fed_job(tmp_path, 1, port=port) as job:
        asyncio.run(main(job))
        job.stop()
    check(tmp_path / "out", {"a": 10})


def test_two_connectors_race_for_one_stream(tmp_path: Path) -> None:
    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 2, "two workers that listen")
        async with (
            Connector(doors(job)[0], secret=SECRET) as one,
            Connector(doors(job)[1], secret=SECRET) as two,
        ):
            await asyncio.gather(one.feed("a", items("a", 500)), two.feed("a", items("a", 500)))

    with fed_job(tmp_path) as job:
        asyncio.run(main(job))
        job.stop()
    check(tmp_path / "out", {"a": 500})


def test_without_an_event_loop(tmp_path: Path) -> None:
    with fed_job(tmp_path, 1) as job:
        with SyncConnector("fed", registry=tmp_path / "jobs") as c:
            assert c.position("a") is None
            for number, payload in items("a", 5000):
                c.send("a", number, payload)
            c.feed("b", items("b", 10))
            c.feed("c", lambda after: items("c", 10, after))
            assert c.acked("c") == 9
        job.stop()
    check(tmp_path / "out", {"a": 5000, "b": 10, "c": 10})


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 1, "a worker that listens")
        with pytest.raises(RefusedError, match="secret") as caught:
            await Connector(doors(job)[0], secret=bytes(32)).open()
        assert caught.value.code == "BAD_SECRET"
        with pytest.raises(FeedError, match="no source 'other', but feed"):
            await connector(tmp_path, source="other").open()
        with pytest.raises(NoFlowError, match="no job 'else' runs"):
            await connector(tmp_path, "else", timeout=0.2).open()
        async with connector(tmp_path) as c:
            await c.send("a", 5, "x")
            wrong: list[tuple[Any, str]] = [
                (5, "5 does not come after 5"), (-1, "from 0 to"), ("7", "from 0 to"),
            ]  # fmt: skip
            for bad, why in wrong:
                with pytest.raises(FeedError, match=why):
                    await c.send("a", bad, "x")
            with pytest.raises(FeedError, match="2,000,000 bytes"):
                await c.send("a", 6, bytes(2_000_000))

    with fed_job(tmp_path, 1) as job:
        asyncio.run(main(job))


def test_a_payload_that_cannot_be_decoded_is_refused_and_what_came_before_counts(
    tmp_path: Path,
) -> None:
    from railgun import Flow, run
    from railgun.engine.controller.storekeeper import Snapshots
    from railgun.sinks.collect import Collect
    from railgun.sources.connectors import Connectors
    from railgun.testing.local_workers import SubprocessLauncher

    flow = Flow("strict")
    flow.source(Connectors("feed"), name="in").sink(Collect(), name="out")

    async def main() -> None:
        async with connector(tmp_path, "strict") as c:
            await c.feed("good", [(1, "[1]")])
            with pytest.raises(RefusedError, match="message 3 of 'bad' cannot be decoded") as error:
                await c.feed("bad", [(1, "[2]"), (3, "{"), (4, "[3]")])
            assert (error.value.code, error.value.stream, error.value.id) == (
                *("BAD_PAYLOAD", "bad", 3),
            )
            await c.feed("good", [(2, "[4]")])  # other streams go on
            await c.close()
        async with connector(tmp_path, "strict") as c:  # sent right, it goes on
            assert await c.position("bad") == 1
            await c.feed("bad", [(3, "[5]"), (4, "[3]")])

    with run(
        flow,
        1,
        launcher=SubprocessLauncher(),
        snapshots=Snapshots(str(tmp_path / "s"), every=0.2),
        registry=tmp_path / "jobs",
    ) as job:
        asyncio.run(main())
        assert sorted(job.collected("out")) == [[1], [2], [3], [4], [5]]


def test_the_end_of_a_stream_is_said_again_after_a_lost_connection(tmp_path: Path) -> None:
    """With nothing left to send, nothing else would set the connector going."""

    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 1, "a worker that listens")
        async with connector(tmp_path) as c:
            await c.feed("a", items("a", 10))
        async with connector(tmp_path) as c:
            calls = 0

            def nothing_left(after: int | None) -> Iterator[tuple[int, str]]:
                nonlocal calls
                calls += 1
                assert c._link.connection is not None
                if calls < 3:
                    c._link.connection.transport.abort()
                return items("a", 10, after)

            await asyncio.wait_for(c.feed("a", nothing_left), 30)
            assert calls == 3

    with fed_job(tmp_path, 1, every=1.0) as job:
        asyncio.run(main(job))


def test_connections_that_are_lost_at_any_moment(tmp_path: Path) -> None:
    """Every few milliseconds, whatever is under way: answers, batches, ends, acknowledgements."""
    streams = {f"s{number}": 400 for number in range(6)}

    async def main() -> None:
        chance = random.Random(3)

        async def slow(name: str, after: int | None) -> AsyncIterator[tuple[int, str]]:
            for number, payload in items(name, 400, after):
                if number % 50 == 0:
                    await asyncio.sleep(chance.random() / 20)
                yield number, payload

        async def by_hand(c: Connector, name: str) -> None:
            async for number, payload in slow(name, None):
                await c.send(name, number, payload)
            await c.end(name)

        async with connector(tmp_path) as one, connector(tmp_path) as two:
            names = list(streams)
            work = asyncio.gather(
                *(by_hand(one, name) for name in names[:2]),
                *(two.feed(name, partial(slow, name)) for name in names[2:4]),
                two.feed(names[4], slow(names[4], None)),
                one.feed(names[5], lambda after: items(names[5], 400, after)),
            )
            for _ in range(60):
                await asyncio.sleep(chance.random() / 15)
                victim = chance.choice((one, two))._link.connection
                if victim is not None:
                    victim.transport.abort()
            await asyncio.wait_for(work, 60)
            assert one.connections + two.connections > 10

    with fed_job(tmp_path, 2) as job:
        asyncio.run(main())
        job.stop()
    check(tmp_path / "out", streams)


def test_a_stream_that_was_ended_is_free_and_can_be_sent_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with connector(tmp_path) as one, connector(tmp_path) as two:
            await one.feed("a", items("a", 10))
            await two.feed("a", items("a", 20, 9))
            await one.feed("a", items("a", 30, 19))
            await two.send("a", 30, text("a", 30))
            await two.flush()
            await two.end("a")
            await one.end("b")  # of which nothing was ever sent
            await two.feed("b", [(0, text("b", 0))])
            await one.feed("c", [])
            await two.feed("c", lambda after: [(0, text("c", 0))])

    with fed_job(tmp_path, 2) as job:
        asyncio.run(asyncio.wait_for(main(), 60))
        job.stop()
    check(tmp_path / "out", {"a": 31, "b": 1, "c": 1})
