"""Webhooks, one rule after the other: with an actor in the place of the connector, which does what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from railgun.engine.protocol.ingest.messages import LAST_ID
from railgun.ingest.errors import FeedError, RefusedError, RewindError
from railgun.ingest.ready import webhooks
from railgun.ingest.ready.webhooks import MAX_GIVEN_ID, Webhooks

DEADLINE = 20.0


class Actor:
    """What webhooks need of a connector."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.connected = True
        self.open = asyncio.Event()
        self.open.set()
        self.room = asyncio.Event()
        self.room.set()
        self.at: dict[str, int] = {}
        self.safe: dict[str, int] = {}
        self.wrong: dict[str, Exception] = {}
        self.sent: list[tuple[str, int, bytes]] = []
        self.ended: list[str] = []
        self.news = asyncio.Condition()

    async def position(self, stream: str) -> int | None:
        await self.open.wait()
        self._check(stream)
        return self.at.get(stream)

    def acked(self, stream: str) -> int | None:
        return self.safe.get(stream)

    async def wait(self, stream: str, id: int) -> None:
        async with self.news:
            await self.news.wait_for(
                lambda: self.safe.get(stream, -1) >= id or stream in self.wrong
            )
        self._check(stream)

    async def send(self, stream: str, id: int, payload: bytes) -> None:
        await self.room.wait()
        self._check(stream)
        self.sent.append((stream, id, payload))

    def skip(self, stream: str, id: int) -> bool:
        return False

    async def end(self, stream: str) -> None:
        self.ended.append(stream)

    def _check(self, stream: str) -> None:
        if stream in self.wrong:
            raise self.wrong[stream]

    async def is_wrong(self, stream: str, error: Exception) -> None:
        self.wrong[stream] = error
        async with self.news:
            self.news.notify_all()

    async def safe_up_to(self, hooks: Webhooks, stream: str, id: int) -> None:
        """The flow has a stream up to this id, in a snapshot."""
        self.safe[stream] = self.at[stream] = id
        hooks.acknowledged(stream, id)
        async with self.news:
            self.news.notify_all()


class Hooked:
    """Webhooks, and who calls them."""

    def __init__(self, actor: Actor, hooks: Webhooks, session: aiohttp.ClientSession) -> None:
        self.actor, self.hooks, self.session = actor, hooks, session

    async def post(self, path: str, body: bytes = b"x", **more: Any) -> tuple[int, Any]:
        async with self.session.post(path, data=body, **more) as answer:
            if answer.status == 503:
                assert answer.headers["Retry-After"] == "1"
            return answer.status, await answer.json()

    async def code(self, path: str, **more: Any) -> tuple[int, str]:
        status, told = await self.post(path, **more)
        return status, told["error"]["code"]

    async def handed(self, path: str, body: bytes = b"x") -> asyncio.Task[tuple[int, Any]]:
        """A request whose message the connector has."""
        count = len(self.actor.sent)
        task = asyncio.create_task(self.post(path, body))
        await until(lambda: len(self.actor.sent) > count)
        return task


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def hooked(**options: Any) -> AsyncIterator[Hooked]:
    actor = Actor()
    hooks = Webhooks(actor, port=0, **options)  # type: ignore[arg-type]
    await hooks.start()
    try:
        async with aiohttp.ClientSession(hooks.url) as session:
            yield Hooked(actor, hooks, session)
    finally:
        await hooks.stop(0)


def runs(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that must come to an end."""

    def test() -> None:
        asyncio.run(asyncio.wait_for(work(), DEADLINE))

    return test


# ---------------------------------------------------------------- what is wrong with one


@runs
async def test_the_last_ids_cannot_be_given_and_there_may_be_no_next_one() -> None:
    async with hooked() as h:
        for id_ in (MAX_GIVEN_ID + 1, LAST_ID, LAST_ID + 1):
            assert await h.code(f"/a/{id_}") == (400, "BAD_ID")
        assert (await h.post(f"/a/{MAX_GIVEN_ID}?wait=no"))[0] == 202
        assert (await h.post("/a?wait=no"))[1] == {"id": MAX_GIVEN_ID + 1}
        await h.actor.safe_up_to(h.hooks, "full", LAST_ID)  # by another program
        assert await h.code("/full") == (409, "NO_NEXT_ID")
        assert not h.hooks.failed.done()


@runs
async def test_what_is_wrong_with_one_stream_answers_those_who_send_it() -> None:
    async with hooked() as h:
        waiting = await h.handed("/bad/1")
        other = await h.handed("/good/1")
        await h.actor.is_wrong("bad", RefusedError("BAD_IDS", "no", "bad"))
        assert (await waiting)[0] == 503
        assert await h.code("/bad/2") == (503, "FLOW")
        assert h.hooks.progress.failed == {"bad": "no (BAD_IDS)"}
        await h.actor.is_wrong("odd", FeedError("it cannot be"))
        assert await h.code("/odd/1") == (503, "FLOW")
        assert not h.hooks.failed.done()
        await h.actor.safe_up_to(h.hooks, "good", 1)
        assert (await other)[0] == 200


@runs
async def test_a_flow_that_has_forgotten_ends_the_program() -> None:
    for ends_all in (False, True):
        async with hooked() as h:
            waiting = await h.handed("/a/1")
            if ends_all:
                h.actor.error = FeedError("nothing more")
            error = FeedError("nothing more") if ends_all else RewindError("gone")
            await h.actor.is_wrong("a", error)
            assert (await waiting)[0] == 503
            assert h.hooks.failed.exception() is error


@runs
async def test_a_body_that_cannot_be_read_is_400() -> None:
    async with hooked() as h:
        told = {"Content-Encoding": "gzip"}
        assert await h.code("/a", headers=told, body=b"this is not gzip") == (400, "BAD_BODY")


# ---------------------------------------------------------------- several programs


@runs
async def test_an_id_is_drawn_after_what_the_flow_has_when_the_stream_is_open() -> None:
    async with hooked() as h:
        first = await h.handed("/a", b"0")
        await h.actor.safe_up_to(h.hooks, "a", 0)
        assert await first == (200, {"id": 0})
        h.actor.open.clear()  # the connection is lost
        task = asyncio.create_task(h.post("/a", b"mine"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.05)
        assert len(h.actor.sent) == 1
        h.actor.safe["a"] = h.actor.at["a"] = 1  # others have sent 1
        h.actor.open.set()
        await until(lambda: len(h.actor.sent) == 2)
        await h.actor.safe_up_to(h.hooks, "a", 2)
        assert await task == (200, {"id": 2})


@runs
async def test_nobody_hears_200_for_what_others_may_have_overtaken() -> None:
    for seen_first in ("the position", "the acknowledgement"):
        async with hooked() as h:
            given = await h.handed("/a/7")
            drawn = await h.handed("/a")
            if seen_first == "the position":
                h.actor.safe["a"] = h.actor.at["a"] = 9
                assert (await h.post("/a?wait=no"))[1] == {"id": 10}
            else:
                await h.actor.safe_up_to(h.hooks, "a", 9)
            assert (await drawn)[0] == 503
            status, told = await given
            assert (status, told["error"]["code"]) == (409, "PASSED_OVER")
            assert await h.code("/a/7") == (409, "PASSED_OVER")  # it is no duplicate


@runs
async def test_what_is_passed_over_while_it_is_handed_over_is_not_200() -> None:
    async with hooked() as h:
        h.actor.room.clear()
        tasks = [asyncio.create_task(h.post(path)) for path in ("/a/7", "/b")]
        hooks = h.hooks._hooks
        await until(lambda: len(hooks) == 2 and all(hook.waiting for hook in hooks.values()))
        h.hooks.passed("a", [6, 7])
        h.hooks.passed("b", [0])
        h.hooks.passed("unknown", [0])
        h.actor.room.set()
        await until(lambda: len(h.actor.sent) == 2)
        await h.actor.safe_up_to(h.hooks, "a", 7)
        await h.actor.safe_up_to(h.hooks, "b", 0)
        assert [status for status, _ in await asyncio.gather(*tasks)] == [409, 503]


# ---------------------------------------------------------------- limits


@runs
async def test_who_goes_away_leaves_no_id_to_be_drawn_twice() -> None:
    async with hooked(patience=0.05) as h:
        h.actor.room.clear()
        for _ in range(3):  # one after the other
            assert (await h.post("/a?wait=no"))[0] == 503
        h.actor.room.set()
        for _ in range(3):
            assert (await h.post("/a?wait=no"))[0] == 202
        ids = [id_ for _, id_, _ in h.actor.sent]
        assert ids == [0, 1, 2, 3]  # the one that was begun, and three more


@runs
async def test_patience_has_an_end() -> None:
    async with hooked(patience=0.05) as h:
        status, told = await h.post("/a/1")
        assert (status, "send it again" in told["error"]["message"]) == (503, True)
        assert [id_ for _, id_, _ in h.actor.sent] == [1]
        again = await h.post("/a/1?wait=no")
        assert again == (202, {"id": 1, "duplicate": True})

        async def slow() -> AsyncIterator[bytes]:
            yield b"half"
            await asyncio.sleep(DEADLINE)

        assert await h.code("/a/2", body=slow()) == (408, "REQUEST_TIMEOUT")


@runs
async def test_the_end_waits_for_what_was_taken() -> None:
    async with hooked() as h:
        waiting = await h.handed("/a/1")
        stopping = asyncio.create_task(h.hooks.stop(10 * DEADLINE))
        await asyncio.sleep(0)
        assert await h.code("/a/2") == (503, "BUSY")
        await h.actor.safe_up_to(h.hooks, "a", 1)
        assert (await waiting)[0] == 200
        await stopping


@runs
async def test_the_end_does_not_wait_for_ever() -> None:
    async with hooked() as h:
        waiting = await h.handed("/a/1")
        h.actor.open.clear()
        early = asyncio.create_task(h.post("/b"))  # not even handed over
        await until(lambda: "b" in h.hooks._hooks)
        await h.hooks.stop(0.01)
        for task in (waiting, early):
            status, told = await task
            assert (status, "before the end" in told["error"]["message"]) == (503, True)


@runs
async def test_half_a_body_does_not_hold_up_the_end() -> None:
    async with hooked() as h:
        _, writer = await asyncio.open_connection("127.0.0.1", h.hooks.port)
        writer.write(b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        async with h.session.get("/health") as answer:  # so the other one has been heard
            assert answer.status == 200
        await h.hooks.stop(10 * DEADLINE)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@runs
async def test_the_stream_that_was_not_used_for_longest_makes_room() -> None:
    most = webhooks.MAX_STREAMS
    webhooks.MAX_STREAMS = 2  # type: ignore[misc]
    try:
        async with hooked() as h:
            a, b = await h.handed("/a"), await h.handed("/b")
            assert await h.code("/c") == (503, "BUSY")
            for name in ("b", "a"):
                await h.actor.safe_up_to(h.hooks, name, 0)
            await asyncio.gather(a, b)
            assert (await h.post("/a?wait=no"))[1] == {"id": 1}
            assert (await h.post("/c?wait=no"))[1] == {"id": 0}
            assert h.actor.ended == ["b"]
            assert h.hooks.progress.streams == 2
            await h.actor.safe_up_to(h.hooks, "a", 1)
            assert (await h.post("/b?wait=no"))[1] == {"id": 1}  # as the flow knows it
            assert h.actor.ended == ["b", "a"]
    finally:
        webhooks.MAX_STREAMS = most  # type: ignore[misc]
