"""The connector library used in ways that people use it: restarts, rewinds, mistakes, cancellation, closing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.ingest.fed_flow import (
    SECRET,
    check,
    connector,
    doors,
    fed_flow,
    fed_job,
    items,
    text,
    until,
)

from railgun import Collect, Connectors, Flow, FlowError, Job, run
from railgun.ingest import Connector, FeedError, RewindError, SyncConnector, TooLargeError
from railgun.job import JobError


def kill(job: Job) -> None:
    os.kill(job.status()["workers"][0]["pid"], signal.SIGKILL)


def records(job: Job) -> int:
    """How many have come into the flow."""
    stages = job.status()["workers"][0].get("stages", {})
    return int(stages.get("in", {}).get("records", 0))


def test_who_relies_on_a_position_that_is_lost_again_is_told(tmp_path: Path) -> None:
    """The flow has more than any snapshot has, a program goes on after that, and the flow goes back."""

    async def main(job: Job) -> None:
        async with connector(tmp_path) as c:
            for number, payload in items("a", 50):
                await c.send("a", number, payload)
            await asyncio.to_thread(job.snapshot)
            for number, payload in items("a", 100, 49):
                await c.send("a", number, payload)
            await until(lambda: records(job) == 100, "all of them")
            await c.close()
        async with connector(tmp_path) as c:
            assert await c.position("a") == 99
            await c.send("a", 100, text("a", 100))
            kill(job)
            with pytest.raises(RewindError, match="wants 'a' after 49: it has gone back"):
                await asyncio.wait_for(c.flush(), 30)
            await c.close()
        async with connector(tmp_path) as c:  # who has all of it sends all of it
            await with_snapshots(job, c.feed("a", items("a", 120)))

    with fed_job(tmp_path, 1, every=600.0) as job:
        asyncio.run(asyncio.wait_for(main(job), 90))
        job.stop()
    check(tmp_path / "out", {"a": 120})


async def with_snapshots(job: Job, work: Any) -> None:
    """Snapshots are rare here; what waits for one gets it."""
    task = asyncio.create_task(work)
    while not task.done():
        done, _ = await asyncio.wait([task], timeout=0.5)
        if not done:
            job._controller.snapshot()
    await task


def test_a_flow_that_begins_anew_wants_all_again(tmp_path: Path) -> None:
    """What was acknowledged is no more; a function is called again, what was kept is not enough."""

    async def main(again: asyncio.Event, going: asyncio.Event) -> None:
        async with connector(tmp_path) as c:
            await c.feed("f", lambda after: items("f", 30, after))
            await c.feed("a", items("a", 30))
            again.set()
            await going.wait()
            await c.feed("f", lambda after: items("f", 60, after))
            with pytest.raises(
                RewindError, match="from its start: it began with an older snapshot"
            ):
                await c.feed("a", items("a", 60, 29))
            await c.close()
        async with connector(tmp_path) as c:
            await c.feed("a", items("a", 60))

    async def both() -> None:
        again, going = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(main(again, going))
        with fed_job(tmp_path, 1):
            await asyncio.wait_for(again.wait(), 60)
        for path in (tmp_path / "out").glob("part-*"):
            path.unlink()
        with fed_job(tmp_path, 1, fresh=True) as job:
            going.set()
            await asyncio.wait_for(task, 60)
            await asyncio.to_thread(job.stop)

    asyncio.run(both())
    check(tmp_path / "out", {"a": 60, "f": 60})


def test_mistakes_are_told_and_lose_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with connector(tmp_path) as c:
            await c.send("a", 0, text("a", 0))
            wrong: list[tuple[Any, dict[str, Any], str]] = [
                ("x", {"time": datetime.now()}, "a time is a whole number"),
                ("x", {"time": 1 << 62}, "a time is from"),
                ("x", {"key": 7}, "a key is text"),
                ("x", {"key": "\ud800"}, "a key is text"),
                (5, {}, "a payload is bytes or text"),
                (None, {}, "a payload is bytes or text"),
            ]
            for payload, more, why in wrong:
                with pytest.raises(FeedError, match=why):
                    await c.send("a", 1, payload, **more)
            with pytest.raises(TooLargeError, match="1,048,570 bytes"):
                await c.send("a", 1, bytes(1_048_570))
            for name in ("", 7, "\ud800", "x" * 1001):
                with pytest.raises(FeedError, match="a stream's name is text"):
                    await c.send(name, 0, "x")  # type: ignore[arg-type]
            with pytest.raises(FeedError, match="3 does not come after 4"):
                await c.feed("a", [(n, text("a", n).encode()) for n in (1, 2, 4, 3, 5)])
            await c.send("a", 5, text("a", 5))
            await c.flush()

            def broken(after: int | None) -> Iterator[tuple[int, str]]:
                yield from items("b", 10, after)
                raise ZeroDivisionError("mine")

            with pytest.raises(ZeroDivisionError):
                await c.feed("b", iter(broken(None)))
            with pytest.raises(ZeroDivisionError):
                await c.feed("c", broken)
            assert await c.position("b") is not None
            await c.end("b")
            feeding = asyncio.create_task(c.feed("d", items("d", 5)))
            await asyncio.sleep(0)
            for again in (c.feed("d", []), c.send("d", 9, "x"), c.end("d")):
                with pytest.raises(FeedError, match="is being fed"):
                    await again
            await feeding
            await c.feed("e", lambda after: items("e", 5, after))
            for number, payload in items("e", 9, 4):  # by hand, after a function
                await c.send("e", number, payload)
            await c.end("e")
            await c.feed("f", lambda after: items("f", 5, after), end=False)
            await c.send("f", 5, text("f", 5))
            await c.flush()
        with pytest.raises(FeedError, match="is closed"):
            await c.send("a", 9, "x")
        with pytest.raises(FeedError, match="not open"):
            await connector(tmp_path).send("a", 9, "x")
        with pytest.raises(FeedError, match="keep is at least 1 byte"):
            connector(tmp_path, keep=0)
        with pytest.raises(FeedError, match="no address"):
            Connector("127.0.0.1:99999", secret=SECRET)

    with fed_job(tmp_path, 1) as job:
        asyncio.run(asyncio.wait_for(main(), 60))
        job.stop()
    rows: dict[str, list[int]] = {}
    for path in sorted((tmp_path / "out").glob("part-*"), key=lambda p: int(p.name.split("-")[2])):
        for line in path.read_text("utf-8").splitlines():
            rows.setdefault(line.split("\t")[0], []).append(int(line.split("\t")[1]))
    # What a function brought before it raised may be there, or not: it will be asked for again.
    assert rows.pop("c", list(range(10))) == list(range(10))
    assert rows == {
        "a": [0, 1, 2, 4, 5], "b": list(range(10)), "d": list(range(5)), "e": list(range(9)),
        "f": list(range(6)),
    }  # fmt: skip


def test_a_function_that_on_acknowledgement_raises_is_heard_of(tmp_path: Path) -> None:
    def mine(stream: str, por: int) -> None:
        raise ValueError("mine")

    async def main() -> None:
        c = connector(tmp_path, on_ack=mine)
        await c.open()
        with pytest.raises(ValueError, match="mine"):
            await c.feed("a", items("a", 3))
        await c.close()

    with fed_job(tmp_path, 1):
        asyncio.run(asyncio.wait_for(main(), 30))


def test_without_an_event_loop_mistakes_and_closing(tmp_path: Path) -> None:
    blocked, release = threading.Event(), threading.Event()

    def slow(after: int | None) -> Iterator[tuple[int, str]]:
        yield from items("slow", 3, after)
        blocked.set()
        release.wait(60)

    with fed_job(tmp_path, 1) as job:
        c = SyncConnector("fed", registry=tmp_path / "jobs")
        with pytest.raises(FeedError, match="not open"):
            c.send("a", 0, "x")
        c.open()
        with pytest.raises(FeedError, match="opened once"):
            c.open()
        for number, payload in items("good", 100):
            c.send("good", number, payload)
        c.send("bad", 5, "x")
        with pytest.raises(FeedError, match="5 does not come after 5"):
            c.send("bad", 5, "x")
        c.flush()
        assert c.acked("good") == 99
        told: list[Exception] = []

        def feed() -> None:
            try:
                c.feed("slow", slow)
            except FeedError as error:
                told.append(error)

        feeding = threading.Thread(target=feed)
        feeding.start()
        assert blocked.wait(30)
        c.close()  # whatever a function waits for
        feeding.join(30)
        assert not feeding.is_alive()
        assert "closed" in str(told)
        with pytest.raises(FeedError, match="closed"):
            c.send("good", 5000, "x")
        release.set()
        job.stop()


def test_flows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    flow = Flow("two")
    for name in ("one", "other"):
        flow.source(Connectors("same"), name=name).sink(Collect(), name=f"{name} out")
    with pytest.raises(FlowError, match=r"two Connectors\('same'\) in this flow"):
        flow.plan()
    with pytest.raises(
        JobError, match=r"Connectors\('feed'\) acknowledges records once a snapshot holds them"
    ):
        run(fed_flow(tmp_path), 1)


def test_two_sources_of_one_flow(tmp_path: Path) -> None:
    from railgun.engine.controller.storekeeper import Snapshots
    from railgun.testing.local_workers import SubprocessLauncher

    flow = Flow("two")
    for name in ("one", "other"):
        flow.source(Connectors(name), name=name).sink(Collect(), name=f"{name} out")

    async def main() -> None:
        with pytest.raises(FeedError, match="several sources, say which: one, other"):
            await connector(tmp_path, "two").open()
        async with (
            connector(tmp_path, "two", source="one") as one,
            connector(tmp_path, "two", source="other") as other,
        ):
            await asyncio.gather(one.feed("a", [(0, "1")]), other.feed("a", [(0, "2")]))

    snapshots = Snapshots(str(tmp_path / "s"), every=0.2)
    launcher = SubprocessLauncher()
    with run(flow, 1, launcher=launcher, snapshots=snapshots, registry=tmp_path / "jobs") as job:
        asyncio.run(asyncio.wait_for(main(), 60))
        assert (job.collected("one out"), job.collected("other out")) == ([1], [2])


def test_a_feed_that_is_cancelled_loses_nothing_it_took(tmp_path: Path) -> None:
    async def main(job: Job) -> None:
        await until(lambda: len(doors(job)) == 1, "a worker that listens")
        async with connector(tmp_path) as c:
            source = items("a", 500)

            async def slow() -> Any:
                for item in source:
                    await asyncio.sleep(0.001)
                    yield item

            feeding = asyncio.create_task(c.feed("a", slow()))
            await until(lambda: c._streams["a"].last > 20 if "a" in c._streams else False, "some")
            feeding.cancel()
            await asyncio.wait([feeding])
            await c.feed("a", [*items("a", 500, c._streams["a"].last)])

    with fed_job(tmp_path, 1) as job:
        asyncio.run(asyncio.wait_for(main(job), 60))
        job.stop()
    check(tmp_path / "out", {"a": 500})
