"""A connector in moments that seldom come: cancelled at the end of a stream, asked for what it lacks, full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.ingest.acting_worker import acted, client, until, worker

from railgun.engine.protocol.ingest.sender import Phase
from railgun.ingest import Connector, FeedError, RefusedError, RewindError


def numbers(begin: int, end: int) -> list[tuple[int, bytes]]:
    return [(n, b"%d" % n) for n in range(begin, end)]


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("how", ["end", "iterable", "function"])
def test_who_stops_to_wait_for_an_end_goes_on_with_the_stream(how: str) -> None:
    async def main() -> None:
        async with worker(acks=False) as (made, where), client(where) as c:
            if how == "end":
                await c.send("a", 0, b"0")
                work = c.end("a")
            else:
                work = c.feed("a", numbers(0, 1) if how == "iterable" else lambda _: numbers(0, 1))
            task = asyncio.create_task(work)
            await until(lambda: made.ended == ["a"])
            await cancelled(task)
            made.acks = True
            await c.send("a", 1, b"1")
            await c.flush()
            await c.feed("a", lambda after: numbers((after or 0) + 1, 3))
            assert made.came["a"] == numbers(0, 3)

    acted(main())


def test_one_thing_at_a_time_also_at_the_end() -> None:
    async def main() -> None:
        async with worker(acks=False) as (made, where), client(where) as c:
            await c.send("a", 0, b"0")
            ending = asyncio.create_task(c.end("a"))
            await until(lambda: made.ended == ["a"])
            for again in (c.send("a", 1, b"1"), c.end("a"), c.feed("a", numbers(1, 2))):
                with pytest.raises(FeedError, match="'a' is being ended: one at a time"):
                    await again
            assert await c.position("a") == 0
            made.ack("a")
            await ending
            made.acks = True
            await c.send("a", 1, b"1")
            await c.flush()
            assert made.came["a"] == numbers(0, 2)

    acted(main())


# ---------------------------------------------------------------- flush


@pytest.mark.parametrize("how", ["raises", "cancelled"])
def test_what_a_function_brought_and_was_not_sent_is_not_waited_for(how: str) -> None:
    async def main() -> None:
        async with worker(grants=True) as (made, where), client(where) as c:
            going = asyncio.Event()

            async def items(after: int | None) -> AsyncIterator[tuple[int, bytes]]:
                yield 0, b"0"
                await c.wait("a", 0)
                made.grants = False
                made.lose()
                await until(lambda: not c.connected)
                yield 1, b"1"
                going.set()
                if how == "raises":
                    raise ZeroDivisionError
                await asyncio.Event().wait()

            task = asyncio.create_task(c.feed("a", items))
            await going.wait()
            if how == "cancelled":
                await cancelled(task)
            else:
                with pytest.raises(ZeroDivisionError):
                    await task
            made.grants = True
            made.lose()
            await c.send("b", 0, b"0")
            await c.flush()
            await c.send("a", 1, b"one")  # it was never sent
            await c.flush()
            assert made.came["a"] == [(0, b"0"), (1, b"one")]

    acted(main())


def test_flush_waits_for_what_was_sent_before_it() -> None:
    async def main() -> None:
        async with worker(acks=False) as (made, where), client(where) as c:
            await c.send("a", 0, b"0")
            flushing = asyncio.create_task(c.flush())
            await until(lambda: made.has == {"a": 0})
            await c.send("a", 1, b"1")
            made.ack("a")
            await flushing
            made.acks = True
            await c.send("a", 2, b"2")

    acted(main())


def test_flush_waits_for_streams_that_are_well_and_then_raises() -> None:
    async def main() -> None:
        async with worker(bad={b"x"}) as (made, where):
            c = client(where)

            async def work() -> None:
                async with c:
                    for name in ("bad", "worse"):
                        await c.send(name, 0, b"x")
                        with pytest.raises(RefusedError):
                            await c.wait(name, 0)
                    made.acks = False
                    await c.send("good", 0, b"0")
                    flushing = asyncio.create_task(c.flush())
                    await until(lambda: made.has == {"good": 0})
                    assert not flushing.done()
                    made.ack("good")
                    with pytest.raises(RefusedError):
                        await flushing
                    made.acks = True
                    await c.send("good", 1, b"1")

            with pytest.raises(RefusedError, match="it is bad") as caught:
                await work()
            assert (caught.value.stream, c.acked("good")) == ("bad", 1)
            assert caught.value.__notes__ == ["and RefusedError: it is bad (BAD_PAYLOAD)"]

    acted(main())


# ---------------------------------------------------------------- room


def test_send_waits_while_there_is_no_room() -> None:
    async def main() -> None:
        async with worker(acks=False) as (made, where), client(where, keep=1000) as c:
            await c.send("a", 0, bytes(2000))
            await until(lambda: made.has == {"a": 0})
            sending = asyncio.create_task(c.send("b", 0, b"0"))
            feeding = asyncio.create_task(c.feed("c", numbers(0, 3)))
            done, _ = await asyncio.wait([sending, feeding], timeout=0.05)
            assert not done
            await cancelled(asyncio.create_task(c.send("d", 0, b"0")))
            assert c._streams.get("d") is None or c._streams["d"].last == -1
            made.acks = True
            made.ack("a")
            await asyncio.gather(sending, feeding)

    acted(main())


def test_a_stream_that_stands_still_takes_no_room_from_others() -> None:
    async def main() -> None:
        async with worker(bad={b"x"}) as (made, where), client(where, keep=1000) as c:
            with pytest.raises(RefusedError):
                await c.feed("bad", [(0, b"x"), (1, bytes(2000))])
            await c.send("good", 0, b"0")
            await c.wait("good", 0)
            made.acks = False
            assert c.skip("bad", 0)  # what it keeps counts again
            waiting = asyncio.create_task(c.send("good", 1, b"1"))
            await until(lambda: made.has.get("bad") == 1)
            assert not waiting.done()
            made.acks = True
            made.ack("bad")
            await waiting

    acted(main())


def test_what_the_flow_had_before_takes_no_room() -> None:
    """A program that was restarted sends everything again, which is more than it may keep."""

    async def main() -> None:
        async with worker(has={"a": 99}) as (made, where), client(where, keep=1000) as c:
            assert await c.position("a") == 99
            made.ack("a")
            await until(lambda: c.acked("a") == 99)
            for n in range(101):
                await c.send("a", n, bytes(100))
                await asyncio.sleep(0)
            await c.flush()
            assert [id_ for id_, _ in made.came["a"]] == [100]

    acted(main())


# ---------------------------------------------------------------- what the flow wants again


def rewinds(first: int, *points: int) -> list[str]:
    """A program gives ids from `first` to 120, and the flow wants them after these points, one after the other."""
    told: list[str] = []

    async def main() -> None:
        async with worker(acks=False, grants=False) as (made, where):
            c = client(where)
            await c.open()
            for n in range(first, 121):
                await c.send("a", n, b"%d" % n)
            for point in points:
                await until(lambda: len(made.asked) == len(told) + 1)
                made.has = {} if point < 0 else {"a": point}
                made.came.clear()
                made.grant("a")
                await until(lambda: made.came or c._streams["a"].error)
                error = c._streams["a"].error
                if error is None:
                    told.append(f"{made.came['a'][0][0]}")
                    assert [id_ for id_, _ in made.came["a"]][-1] == 120
                    made.lose()
                else:
                    assert isinstance(error, RewindError)
                    told.append(str(error))
                    break
            await c.close()

    acted(main())
    return told


def test_messages_between_that_are_not_here_are_told_of() -> None:
    assert rewinds(50, 99, 60, 49)[:2] == ["100", "61"]
    (_, told) = rewinds(50, 99, 20)
    assert "wants 'a' after 20: it has gone back. The messages kept here begin after 49" in told


def test_gaps_are_fine_and_so_is_everything_again() -> None:
    assert rewinds(50, 20, 60, 20) == ["50", "61", "50"]
    assert rewinds(50, -1, 60, -1) == ["50", "61", "50"]
    assert rewinds(1, 99, -1) == ["100", "1"]
    assert "begin after 20" in rewinds(50, 20, 10)[1]


def test_a_stream_that_was_rewound_too_far_is_mended_by_a_function() -> None:
    async def main() -> None:
        async with worker() as (made, where), client(where, keep=1000) as c:
            await c.feed("a", numbers(0, 3), end=False)
            await c.flush()
            made.has.clear()
            made.came.clear()
            made.lose()
            await c.send("a", 3, b"3")
            with pytest.raises(RewindError, match="feed a function"):
                await c.flush()
            assert c._streams["a"].sent.phase is Phase.IDLE
            await c.feed("a", lambda after: numbers(0 if after is None else after + 1, 5))
            await c.send("a", 5, b"5")
            await c.flush()
            made.lose()
            await c.send("a", 6, b"6")
            await c.flush()
            assert made.came["a"] == numbers(0, 7)

    acted(main())


def test_a_refused_stream_is_mended_by_a_function() -> None:
    async def main() -> None:
        async with worker(bad={b"x"}) as (made, where), client(where) as c:
            with pytest.raises(RefusedError):
                await c.feed("a", lambda after: [(0, b"0"), (1, b"x"), (2, b"2")])
            assert not c.skip("a", 1)  # it is not kept
            await c.feed("a", lambda after: [n for n in numbers(0, 4) if n[0] > (after or 0)])
            with pytest.raises(RefusedError):
                await c.feed("a", [(4, b"4"), (5, b"x"), (6, b"6")])
            with pytest.raises(RefusedError):
                await c.feed("a", left := iter(numbers(7, 9)))
            assert next(left) == (7, b"7")  # nothing was taken
            await c.feed("a", lambda after: [n for n in numbers(0, 9) if n[0] > (after or 0)])
            assert [id_ for id_, _ in made.came["a"]] == list(range(9))

    acted(main())


# ---------------------------------------------------------------- passed over


def passing(c: Connector) -> list[tuple[str, Any]]:
    told: list[tuple[str, Any]] = []
    c.on_ack = lambda stream, id_: told.append(("acked", id_))
    c.on_passed = lambda stream, ids: told.append(("passed", ids))
    return told


def test_what_is_passed_over_is_told_before_it_is_acknowledged() -> None:
    async def main() -> None:
        async with worker(grants=False, acks=False) as (made, where), client(where) as c:
            told = passing(c)
            for n in range(3):
                await c.send("a", n, b"%d" % n)
            await until(lambda: made.asked)
            made.has["a"] = 4  # of another program
            made.grant("a")
            made.ack("a")
            await c.wait("a", 4)
            assert told == [("passed", [0, 1, 2]), ("acked", 4)]
            for n in range(3, 7):
                await c.send("a", n, b"%d" % n)
            await until(lambda: made.has["a"] == 6)
            made.ack("a")
            await c.flush()
            assert told[2:] == [("passed", [3, 4]), ("acked", 6)]
            assert made.came["a"] == numbers(5, 7)

    acted(main())


def test_what_was_sent_from_here_is_not_passed_over() -> None:
    async def main() -> None:
        async with worker(acks=False) as (made, where), client(where) as c:
            told = passing(c)
            for n in range(3):
                await c.send("a", n, b"%d" % n)
            await until(lambda: made.has == {"a": 2})
            made.grants = False
            made.lose()
            await until(lambda: not c.connected)
            await c.send("a", 3, b"X")  # and another program sends its own 3 meanwhile
            made.has["a"] = 3
            await until(lambda: made.asked == ["a", "a"])
            made.grant("a")
            await until(lambda: told)
            made.grants = made.acks = True
            made.lose()  # it is told once
            await c.send("a", 4, b"4")
            await c.flush()
            assert told == [("passed", [3]), ("acked", 4)]

    acted(main())


def test_what_on_passed_raises_is_heard_of() -> None:
    async def main() -> None:
        def mine(stream: str, ids: list[int]) -> None:
            raise ValueError("mine")

        async with worker(has={"a": 5}) as (_, where):
            c = client(where, on_passed=mine)
            await c.open()
            await c.send("a", 0, b"0")
            with pytest.raises(ValueError, match="mine"):
                await c.flush()
            await c.close()

    acted(main())


# ---------------------------------------------------------------- odd items


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (5, "not 5"), ((1,), r"not \(1,\)"), (None, "not None"), ({"id": 1}, "not {'id': 1}"),
        ((-(2**70), b"x"), "from 0 to"), ((2**70, b"x"), "from 0 to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["iterable", "function", "async", "lists"])
def test_what_is_no_message_is_told_and_those_before_it_are_taken(
    odd: Any, why: str, how: str
) -> None:
    items: list[Any] = [*numbers(0, 40), odd, *numbers(40, 60)]

    async def one_by_one(after: int | None) -> Any:
        for item in items:
            yield item

    async def together(after: int | None) -> Any:
        yield []
        yield items

    async def main() -> None:
        async with worker() as (made, where), client(where) as c:
            kinds: dict[str, Any] = {
                "iterable": items, "async": one_by_one(None), "lists": together(None),
                "function": lambda after: items,
            }  # fmt: skip
            with pytest.raises(FeedError, match=why):
                await c.feed("a", kinds[how])
            if how != "function":
                await c.flush()
                assert made.came["a"] == numbers(0, 40)

    acted(main())


def test_what_cannot_be_fed_is_told() -> None:
    async def coroutine(after: int | None) -> Any:
        return numbers(0, 3)

    async def main() -> None:
        async with worker() as (_, where), client(where) as c:
            wrong: list[Any] = [5, coroutine, lambda after: None]
            for n, source in enumerate(wrong):
                with pytest.raises(FeedError, match="feed takes an iterable"):
                    await c.feed(f"s{n}", source)

    acted(main())


def test_a_message_whose_sending_is_cancelled_was_not_taken() -> None:
    async def main() -> None:
        async with worker() as (made, where), client(where) as c:
            taken: list[int] = []

            async def send() -> None:
                for n in range(len(taken), 3):
                    await c.send(
                        "a", n, bytes(70_000)
                    )  # which waits until the one before is on its way
                    taken.append(n)

            sending = asyncio.create_task(send())
            await asyncio.sleep(0)
            await cancelled(sending)
            await send()
            await c.flush()
            assert [id_ for id_, _ in made.came["a"]] == [0, 1, 2]

    acted(main())
