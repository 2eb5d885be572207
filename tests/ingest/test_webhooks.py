"""Webhooks, pushed into a flow: who hears 200 may forget the message, and who sends it again sends it once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from tests.ingest.ready_connectors import DEADLINE, Fed, eventually, fed, running, stop

from railgun.ingest import Connector
from railgun.ingest.ready.webhooks import ListenError, Webhooks


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Fed]:
    with fed(tmp_path) as running_flow:
        yield running_flow


@contextlib.asynccontextmanager
async def hooks(flow: Fed, **options: Any) -> AsyncIterator[tuple[Webhooks, aiohttp.ClientSession]]:
    """Webhooks in this process, and who calls them."""
    async with asyncio.timeout(DEADLINE):
        connector = Connector(flow.name, registry=flow.registry)
        await connector.open()
        made = Webhooks(connector, port=0, **options)
        connector.on_ack = made.acknowledged
        await made.start()
        try:
            async with aiohttp.ClientSession(made.url) as session:
                yield made, session
        finally:
            await made.stop(20)
            await connector.close()


async def post(
    session: aiohttp.ClientSession, path: str, body: bytes, **more: Any
) -> tuple[int, Any]:
    async with session.post(path, data=body, **more) as answer:
        return answer.status, await answer.json()


def call(url: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Without an event loop."""
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def listening(process: subprocess.Popen[str]) -> str:
    """Where a command listens."""
    assert process.stdout is not None
    for line in iter(process.stdout.readline, ""):
        told = json.loads(line)
        if "listening" in told:
            return str(told["listening"]["url"])
        assert "error" not in told, told
    raise AssertionError("it ended without listening")


def test_200_is_what_is_committed(flow: Fed) -> None:
    async def work() -> None:
        async with hooks(flow) as (_, session):
            for n in range(3):
                assert await post(session, "/a", b"%d" % n) == (200, {"id": n})
                await asyncio.to_thread(flow.check, {"a": [b"%d" % k for k in range(n + 1)]})
            together = [post(session, "/b", b"%d" % n) for n in range(200)]
            answers = await asyncio.gather(*together)
            assert sorted(told["id"] for _, told in answers) == list(range(200))
            by_id = {told["id"]: b"%d" % n for n, (_, told) in enumerate(answers)}
            want = {"a": [b"0", b"1", b"2"], "b": [by_id[n] for n in range(200)]}
            await asyncio.to_thread(flow.check, want)

    asyncio.run(work())


def test_ids_of_callers(flow: Fed) -> None:
    async def work() -> None:
        async with hooks(flow) as (_, session):
            assert await post(session, "/a/5", b"five") == (200, {"id": 5})
            header = {"X-Message-Id": "7"}
            assert await post(session, "/a", b"seven", headers=header) == (200, {"id": 7})
            for path in ("/a/5", "/a/7"):
                status, told = await post(session, path, b"again")
                assert (status, told["duplicate"]) == (200, True)
            for path in ("/a/6", "/a/3"):
                status, told = await post(session, path, b"late")
                assert (status, told["error"]["code"]) == (409, "OUT_OF_ORDER")
            assert (await post(session, "/a", b"next"))[1] == {"id": 8}
            for bad in (
                "/a/x",
                "/a/-1",
                "/a/9223372036854775807",
                f"/{'n' * 1001}",
                "/a?wait=long",
            ):
                assert (await post(session, bad, b""))[0] == 400
            twins = [post(session, "/a/9", b"nine") for _ in range(5)]
            answers = await asyncio.gather(*twins)
            assert [status for status, _ in answers] == [200] * 5
            assert sum("duplicate" in told for _, told in answers) == 4
        await asyncio.to_thread(flow.check, {"a": [b"five", b"seven", b"next", b"nine"]})
        async with hooks(flow) as (
            _,
            session,
        ):  # another program: what the flow has is all that is known
            for path in ("/a/3", "/a/9"):
                assert (await post(session, path, b"again"))[1]["duplicate"]
            assert (await post(session, "/a", b"last"))[1] == {"id": 10}
        await asyncio.to_thread(flow.check, {"a": [b"five", b"seven", b"next", b"nine", b"last"]})

    asyncio.run(work())


def test_limits(flow: Fed) -> None:
    async def work() -> None:
        async with hooks(flow, largest=1000, waiting=3000, token="a-token") as (made, session):
            bears = {"Authorization": "Bearer a-token"}
            assert (await post(session, "/a", b"x"))[0] == 401
            assert (await post(session, "/a", b"x", headers={"Authorization": "Bearer b"}))[
                0
            ] == 401
            status, told = await post(session, "/a", b"x" * 1001, headers=bears)
            assert (status, "1,000 bytes" in told["error"]["message"]) == (413, True)
            posts = [
                session.post("/a?wait=no", data=b"%0700d" % n, headers=bears) for n in range(12)
            ]
            answers = await asyncio.gather(*posts)
            good = [n for n, answer in enumerate(answers) if answer.status == 202]
            bad = [answer for answer in answers if answer.status == 503]
            assert good
            assert bad
            assert len(good) + len(bad) == 12
            assert all(answer.headers["Retry-After"] == "1" for answer in bad)
            async with session.get("/health") as answer:
                assert (answer.status, (await answer.json())["connected"]) == (200, True)
            async with session.get("/a", headers=bears) as answer:
                assert answer.status == 405
            assert made.progress.sent == len(good)
        eventually(lambda: flow.count() >= len(good))
        assert sorted(flow.payloads()["a"]) == [b"%0700d" % n for n in good]

    asyncio.run(work())
    with pytest.raises(ListenError, match="certificate"):
        asyncio.run(_listen_everywhere(flow))


async def _listen_everywhere(flow: Fed) -> None:
    Webhooks(Connector(flow.name, registry=flow.registry), "0.0.0.0")


def test_a_refused_message_is_422_and_the_stream_goes_on(tmp_path: Path) -> None:
    from railgun import Collect, Flow
    from railgun.engine.controller.storekeeper import Snapshots
    from railgun.job import run
    from railgun.sources.connectors import Connectors
    from railgun.testing.local_workers import SubprocessLauncher

    flow = Flow("numbers")
    flow.source(Connectors("feed", decode="json"), name="feed").sink(Collect(), name="out")
    launcher = SubprocessLauncher()
    snapshots = Snapshots(str(tmp_path / "snapshots"), every=0.3)
    with run(flow, 1, launcher=launcher, snapshots=snapshots, registry=tmp_path / "r") as job:

        async def work() -> None:
            connector = Connector("numbers", registry=tmp_path / "r")
            await connector.open()
            hooking = Webhooks(connector, port=0)
            connector.on_ack = hooking.acknowledged
            await hooking.start()
            try:
                async with asyncio.timeout(DEADLINE), aiohttp.ClientSession(hooking.url) as session:
                    bodies = [b"1", b"2", b"three", b"4", b"5", b"six"]
                    posts = [post(session, f"/a/{n}", body) for n, body in enumerate(bodies)]
                    tasks = [asyncio.ensure_future(one) for one in posts]
                    answers = []
                    for task in tasks:
                        answers.append(await task)
                    assert [status for status, _ in answers] == [200, 200, 422, 200, 200, 422]
                    assert "cannot be decoded" in answers[2][1]["error"]["message"]
                    assert (await post(session, "/a/2", b"3"))[0] == 422  # too late
                    assert (await post(session, "/a/5", b"6"))[0] == 200  # it was the last
                    assert (await post(session, "/b/0", b"7"))[0] == 200
            finally:
                await hooking.stop(10)
                await connector.close()

        try:
            asyncio.run(work())
            assert sorted(job.collected("out")) == [1, 2, 4, 5, 6, 7]
        finally:
            job.abort()
            launcher.close()


def test_200_is_in_the_flow_also_if_two_programs_send_a_stream(flow: Fed) -> None:
    async def work() -> None:
        told: dict[int, bytes] = {}
        async with contextlib.AsyncExitStack() as stack:
            (a, to_a), (b, to_b) = [await stack.enter_async_context(hooks(flow)) for _ in range(2)]
            assert await post(to_a, "/s", b"first") == (200, {"id": 0})
            bodies = {b"from b": (b, to_b), b"from a": (a, to_a)}
            tasks = {asyncio.create_task(post(to_b, "/s", b"from b")): b"from b"}
            await asyncio.sleep(0)
            a.connector._link.leave()  # its connection is lost
            tasks[asyncio.create_task(post(to_a, "/s", b"from a"))] = b"from a"
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    status, answer = task.result()
                    body = tasks.pop(task)
                    assert (status, answer["id"] not in told) == (200, True)
                    told[answer["id"]] = body
                    await bodies[body][0].stop(20)  # so the other one gets the stream
                    await bodies[body][0].connector.close()
        want = [b"first", *(told[id_] for id_ in sorted(told))]
        await asyncio.to_thread(flow.check, {"s": want})

    asyncio.run(work())


@pytest.mark.slow
def test_retries_through_kills_of_connector_and_worker(flow: Fed) -> None:
    """A caller that sends each message until it hears 200, whatever is killed meanwhile."""
    chance = Random(5)
    streams = {f"s{n}": 0 for n in range(4)}
    url = ""
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        nonlocal url
        started.append(flow.start("http", "--port", "0"))
        url = listening(started[-1])

    async def send_all(stream: str, count: int) -> None:
        async with aiohttp.ClientSession() as session:
            for n in range(count):
                while True:
                    try:
                        where = f"{url}/{stream}/{n}"
                        async with session.post(where, data=f"{stream} {n}".encode()) as answer:
                            if answer.status == 200:
                                break
                            assert answer.status == 503, await answer.text()
                    except aiohttp.ClientError:
                        pass
                    await asyncio.sleep(0.02)
                streams[stream] = n + 1

    async def work() -> None:
        async with asyncio.timeout(DEADLINE):
            await asyncio.to_thread(start)
            callers = [asyncio.create_task(send_all(stream, 12)) for stream in streams]
            for turn in range(3):
                at = sum(streams.values()) + chance.randrange(3, 9)
                while sum(streams.values()) < min(at, 45) and not all(c.done() for c in callers):
                    await asyncio.sleep(0.01)
                if turn == 1:
                    await asyncio.to_thread(flow.kill_worker)
                else:
                    started[-1].kill()
                    await asyncio.to_thread(start)
            await asyncio.gather(*callers)

    try:
        asyncio.run(work())
        code, told = stop(started[-1])
        assert code == 0
        assert told[-1]["stopped"]
    finally:
        for process in started:
            with running(process):
                process.kill()
    want = {stream: [f"{stream} {n}".encode() for n in range(12)] for stream in streams}
    flow.check(want)


def test_patience_and_drain_of_the_command(tmp_path: Path) -> None:
    """No snapshot comes, so nothing is acknowledged."""
    with fed(tmp_path, every=1000.0) as flow:
        words = ("http", "--port", "0", "--patience", "0.2", "--drain", "0.1")
        with running(flow.start(*words)) as process:
            url = listening(process)
            status, told = call(f"{url}/a/1", b"1")
            assert (status, "within 0.2 s" in told["error"]["message"]) == (503, True)
            assert call(f"{url}/a/1?wait=no", b"1") == (202, {"id": 1, "duplicate": True})
            code, answers = stop(process)
    assert (code, answers[-1]["progress"]["acknowledged"]) == (0, 0)


def test_the_end_answers_what_waits(flow: Fed) -> None:
    with running(flow.start("http", "--port", "0", "--early")) as process:
        url = listening(process)
        for n in range(50):
            assert call(f"{url}/a", b"%d" % n) == (202, {"id": n})
        code, told = stop(process)
    assert code == 0
    assert told[-1]["progress"]["acknowledged"] == 50
    flow.check({"a": [b"%d" % n for n in range(50)]})
