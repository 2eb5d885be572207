"""A connector for programs without an event loop: what is raised where, by threads that share one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tests.ingest.acting_worker import DEADLINE, SECRET, Worker

from railgun.ingest import Connector, FeedError, RefusedError, SyncConnector, TooLargeError


class Stage:
    """A worker that acts in a thread of its own."""

    def __init__(self) -> None:
        self.worker = Worker()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.where = self.do(self.worker.open)

    def do(self, work: Callable[..., Any], *told: Any) -> Any:
        """Let it do something."""

        async def act() -> Any:
            done = work(*told)
            return await done if inspect.isawaitable(done) else done

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(DEADLINE)

    def until(self, done: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(DEADLINE):
                while not done():
                    await asyncio.sleep(0.001)

        self.do(wait)

    def close(self) -> None:
        self.do(self.worker.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def client(stage: Stage, **options: Any) -> SyncConnector:
    return SyncConnector(stage.where, secret=SECRET, **options)


@contextmanager
def opened(stage: Stage, **options: Any) -> Iterator[SyncConnector]:
    """Closed at the end, without waiting for anything."""
    c = client(stage, **options)
    c.open()
    try:
        yield c
    finally:
        c.close()


def test_it_has_all_that_the_other_one_has() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(SyncConnector) == names(Connector)
    for name in names(Connector) & {"send", "feed", "flush", "wait", "end", "position", "skip"}:
        ours, theirs = (inspect.signature(getattr(k, name)) for k in (SyncConnector, Connector))
        assert list(ours.parameters) == list(theirs.parameters)


def test_it_says_that_it_is_not_open(stage: Stage) -> None:
    c = client(stage)
    calls: list[Callable[[], None]] = [
        lambda: c.feed("a", lambda after: []), lambda: c.end("a"), c.flush,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(FeedError, match="this connector is not open"):
            call()
    c.open()
    c.close()
    with pytest.raises(FeedError, match="this connector is closed"):
        c.flush()


def test_what_is_wrong_with_a_message_is_raised_where_it_is_sent(stage: Stage) -> None:
    with client(stage) as c:
        c.send("a", 0, "0")
        wrong: list[tuple[int, Any, type[FeedError], str]] = [
            (1, bytes(2_000_000), TooLargeError, "2,000,000"),
            (0, "x", FeedError, "0 does not come after 0"),
            (1, 7, FeedError, "a payload is bytes or text"),
        ]
        for id_, payload, kind, why in wrong:
            with pytest.raises(kind, match=why):
                c.send("a", id_, payload)
        with pytest.raises(FeedError, match="a stream's name"):
            c.send("", 0, "x")
        for odd in (5, (1,), None):
            with pytest.raises(FeedError, match="an item is"):
                c.feed("a", [odd])  # type: ignore[list-item]
        for source in (None, lambda after: None):
            with pytest.raises(FeedError, match="feed takes an iterable"):
                c.feed("b", source)  # type: ignore[arg-type]
        c.send("a", 1, "1")
    assert stage.worker.came == {"a": [(0, b"0"), (1, b"1")]}


def test_what_was_taken_is_sent_whatever_becomes_of_its_stream(stage: Stage) -> None:
    """All that `send` did not raise for comes out, after what was refused is left out."""
    stage.worker.bad, stage.worker.grants = {b"x"}, False
    with opened(stage) as c:
        for n in range(100):
            c.send("a", n, "x" if n == 5 else str(n))
        stage.until(lambda: stage.worker.asked == ["a"])
        stage.do(stage.worker.grant, "a")
        stage.until(lambda: c._connector._streams["a"].error is not None)
        stage.worker.grants = True
        with pytest.raises(RefusedError) as told:
            c.send("a", 100, "100")
        assert told.value.id == 5
        assert c.skip("a", 5)
        c.send("a", 100, "100")
        c.flush()
    assert [id_ for id_, _ in stage.worker.came["a"]] == [n for n in range(101) if n != 5]


def test_what_is_on_its_way_to_a_stream_that_stands_still_is_kept(stage: Stage) -> None:
    """It was taken before the refusal came, and is handed over after it."""
    stage.worker.bad, stage.worker.grants = {b"x"}, False
    with opened(stage) as c:
        c.send("a", 0, "x")
        stage.until(lambda: stage.worker.asked == ["a"])
        hand_over, c._begin = c._begin, lambda: None  # type: ignore[method-assign]
        c._do(c._all_handed())
        c.send("a", 1, "1")
        stage.do(stage.worker.grant, "a")
        stage.until(lambda: c._connector._streams["a"].error is not None)
        c._loop.call_soon_threadsafe(hand_over)
        stage.worker.grants = True
        assert c.skip("a", 0)
        c.flush()
    assert stage.worker.came["a"] == [(1, b"1")]


def test_errors_are_those_of_a_stream(stage: Stage) -> None:
    stage.worker.bad = {b"x"}
    with opened(stage) as c:
        c.send("bad", 0, "x")
        with pytest.raises(RefusedError, match="it is bad"):
            c.wait("bad", 0)
        calls: list[Callable[[], None]] = [
            lambda: c.send("bad", 1, "1"), lambda: c.end("bad"), c.flush,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(RefusedError, match="it is bad"):
                call()
        c.feed("good", [(0, "0")])
        c.send("good", 1, "1")
        c.wait("good", 1)
        c.feed("bad", lambda after: [(0, "right")])
        c.flush()
    assert stage.worker.came["bad"] == [(0, b"right")]


def test_a_message_that_was_skipped_can_be_sent_right_if_it_was_the_last(stage: Stage) -> None:
    stage.worker.bad = {b"x"}
    with client(stage) as c:
        c.send("a", 0, "0")
        c.send("a", 1, "x")
        with pytest.raises(RefusedError):
            c.flush()
        assert c.skip("a", 1)
        c.send("a", 1, "right")
    assert stage.worker.came["a"] == [(0, b"0"), (1, b"right")]


def test_flush_returns_while_another_thread_sends(stage: Stage) -> None:
    with opened(stage) as c, ThreadPoolExecutor() as pool:
        done = threading.Event()

        def send() -> int:
            number = 0
            while not done.is_set():
                c.send("a", number, b"x")
                number += 1
            return number

        sending = pool.submit(send)
        try:
            stage.until(lambda: "a" in stage.worker.has)
            pool.submit(c.flush).result(DEADLINE)
        finally:
            done.set()
        assert sending.result() > 0


def test_one_at_a_time(stage: Stage) -> None:
    stage.worker.acks = False
    with opened(stage) as c, ThreadPoolExecutor() as pool:
        c.send("a", 0, "0")
        ending = pool.submit(c.end, "a")
        stage.until(lambda: stage.worker.ended == ["a"])
        calls: list[Callable[[], None]] = [
            lambda: c.send("a", 1, "1"), lambda: c.end("a"), lambda: c.feed("a", lambda after: []),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(FeedError, match="'a' is being ended: one at a time"):
                call()
        c.send("b", 0, "0")  # of others
        stage.do(stage.worker.ack, "a")
        ending.result(DEADLINE)


def test_send_waits_while_there_is_no_room(stage: Stage) -> None:
    stage.worker.acks = False
    with opened(stage, keep=1000) as c, ThreadPoolExecutor() as pool:

        def send() -> None:
            for n in range(30_000):
                c.send("a", n, bytes(50))

        sending = pool.submit(send)
        stage.until(lambda: c._handed > 0)
        stage.until(lambda: not c._room.is_set())
        assert not sending.done()

        def let_go() -> None:
            stage.worker.acks = True
            stage.worker.ack("a")

        stage.until(lambda: "a" in stage.worker.has)
        stage.do(let_go)
        sending.result(DEADLINE)
        pool.submit(c.flush).result(DEADLINE)
    assert stage.worker.has["a"] == 29_999


def test_a_function_that_is_called_back_must_not_wait(stage: Stage) -> None:
    asked: list[Any] = []

    def on_ack(stream: str, id_: int) -> None:
        asked.append(c.acked(stream))
        c.position(stream)

    with opened(stage, on_ack=on_ack) as c:
        c.send("a", 0, "x")
        with pytest.raises(FeedError, match="must not wait: let another thread"):
            c.flush()
    assert asked == [0]


def test_a_function_is_called_by_another_thread_than_the_connector_s(stage: Stage) -> None:
    names: list[str] = []

    def function(after: int | None) -> list[tuple[int, str]]:
        names.append(threading.current_thread().name)
        return [(0, "0")]

    with client(stage) as c:
        c.feed("a", function)
    assert names == ["railgun-feed"]
