"""The door of a worker has its limits: in bytes, connections and names, whatever connectors do."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.worker.listener_callers import (
    SECRET,
    Behind,
    Caller,
    behind,
    frame,
    run,
    settle,
    until,
)

from railgun.engine.worker import control_messages as control
from railgun.engine.worker import ingest_listener as module
from railgun.ingest import Connector
from railgun.transport import connection as connections
from railgun.transport import ingest_batch as outside
from railgun.transport.commands import encode
from railgun.transport.hello import HelloError
from railgun.transport.proto import connectors_pb2 as c

KB = 1 << 10


def batch(*ids: int, size: int = 1) -> bytes:
    """A whole frame of messages of stream 1."""
    blob = outside.pack(ids, [b"x" * size] * len(ids))
    return b"".join(encode(c.Messages(stream=1), [blob]))


# ---------------------------------------------------------------- what waits


def test_what_waits_is_dropped_with_its_session_also_while_the_flow_rests() -> None:
    """Nobody reads; a connector sends what it may, is lost, and comes again."""

    async def main() -> None:
        async with behind() as there:
            for _ in range(5):
                one = await Caller().opened(there.address)
                one.messages(1, 2, 3, text="y" * 100_000)
                await until(lambda: there.door._waiting > 300_000)
                one.transport.abort()
                await until(lambda: not there.door.callers)
                assert (there.door._waiting, there.receiving._queues) == (0, {})
            assert there.read() == []

    run(main)


def test_sessions_take_turns() -> None:
    async def main() -> None:
        async with behind() as there:
            callers = [await Caller().opened(there.address, name) for name in "ab"]
            for number in range(3):
                callers[0].messages(number, text="a")
            await settle()
            callers[1].messages(0, text="b")
            await settle()
            assert there.read() == ["a", "b", "a", "a"]

    run(main)


def test_who_sends_gets_no_more_credits_while_the_flow_rests() -> None:
    async def main() -> None:
        async with behind() as there:
            host, port = there.address
            one = Connector(f"{host}:{port}", secret=SECRET, keep=4 << 20)
            await one.open()

            async def send() -> None:
                for number in range(100):
                    await one.send("a", number, bytes(100_000))

            sending = asyncio.create_task(send())
            window = module.WINDOW_BYTES[1]
            await until(lambda: there.door._waiting >= window, "a window full")
            await settle()
            assert there.door._waiting <= window + outside.LARGEST
            assert not sending.done()

            async def flush() -> None:
                await sending
                await one.flush()

            flushing = asyncio.create_task(flush())
            while not flushing.done():
                there.read()
                there.receiving.table.begin(there.receiving.table.begun + 1)
                there.receiving.settled(there.receiving.table.begun, committed=True)
                await asyncio.sleep(0.001)
            await flushing
            await one.close()
            assert len(there.seen.values) == 100

    run(main)


def test_all_that_waits_stays_within_bounds_and_all_of_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 400 * KB)

    async def main() -> None:
        async with behind() as there:
            callers = [await Caller().opened(there.address, str(n)) for n in range(20)]
            for caller in callers:
                caller.connection.send(batch(1, size=100 * KB))
            await until(lambda: there.door._paused, "too much of it waits")
            most = there.door._waiting + there.door._begun
            while len(there.seen.values) < 20:
                for _ in range(5):
                    await asyncio.sleep(0.001)
                    most = max(most, there.door._waiting + there.door._begun)
                there.read()
            assert most <= 400 * KB + connections.READ_BUFFER_BYTES
            await until(lambda: not there.door._paused, "there is room again")
            callers[0].connection.send(batch(2))
            await until(lambda: there.read()[20:], "it goes on as before")

    run(main)


def test_frames_that_are_not_whole_count_and_are_completed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 300 * KB)

    async def main() -> None:
        async with behind() as there:
            whole = batch(1, size=100 * KB)
            callers = [await Caller().opened(there.address, str(n)) for n in range(8)]
            for caller in callers:
                caller.connection.send(whole[: 60 * KB])
            await until(lambda: there.door._paused, "too much of what is not whole")
            for caller in callers:
                caller.connection.send(whole[60 * KB :])
            await until(lambda: len(there.read()) == 8, "all of them")
            await until(lambda: not there.door._paused, "there is room again")
            assert there.door._begun == 0

    run(main)


def test_who_does_not_complete_a_frame_that_all_wait_for_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 300 * KB)
    monkeypatch.setattr(module, "SILENCE_S", (0.04, 30.0))
    monkeypatch.setattr(module, "LEAVING_S", 0.05)

    async def main() -> None:
        async with behind() as there:
            good = await Caller().opened(there.address, "good")
            for number in range(6):
                bad = await Caller().opened(there.address, str(number))
                bad.connection.send(frame(1 << 20, 54, 0) + bytes(90 * KB))
                await settle()
            good.messages(1)
            await until(there.read, "others go on")
            assert 1 in there.door.callers

    run(main)


def test_a_turn_is_bounded_whatever_the_messages_are() -> None:
    """Those that cannot be decoded, and those that were applied before, take their time too."""

    async def main() -> None:
        async with behind("dead_letter") as there:
            one = await Caller().opened(there.address)
            one.send(c.Messages(stream=1), outside.pack(range(1000), [b"\xff"] * 1000))
            await until(lambda: there.receiving._queues)
            window = there.door.callers[1].window
            assert there.receiving.read(0, 300) == 300
            assert len(there.letters) == 300
            assert there.receiving.table.positions() == {"a": 299}
            assert there.door.callers[1].credits < window  # it is paid for when all of it is done
            assert [there.receiving.read(0, 300) for _ in range(4)] == [300, 300, 100, 0]
            assert len(there.letters) == 1000
            assert there.door.callers[1].credits == window
            one.send(c.Messages(stream=1), outside.pack(range(1000), [b"x"] * 1000))
            await until(lambda: there.receiving._queues)
            assert there.receiving.read(0, 600) == 600
            assert there.receiving.dropped == 600

    run(main)


# ---------------------------------------------------------------- who does not read


async def _unread(there: Behind) -> tuple[Caller, module.Caller]:
    """A caller that reads nothing, and for whom a lot waits to be read."""
    slow = await Caller().dial(there.address, instance="slow")
    slow.connection.transport.pause_reading()
    here = next(iter(there.door.callers.values()))
    while here.out.unsent < 1 << 20:  # more than what the system keeps
        here.connection.send(bytes(1 << 20))
    return slow, here


ENDS: dict[str, Callable[[Behind, Caller], Any]] = {
    "refused": lambda there, slow: slow.connection.send(b"\xff" * 64),
    "restarted": lambda there, slow: there.receiving.close(),
    "sent elsewhere": lambda there, slow: there.receiving.leave(),
    "came again": lambda there, slow: asyncio.ensure_future(
        Caller().dial(there.address, instance="slow")
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_who_does_not_read_that_it_is_over_keeps_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", (0.04, 30.0))
    monkeypatch.setattr(module, "LEAVING_S", 0.05)

    async def main() -> None:
        async with behind() as there:
            slow, here = await _unread(there)
            ended = ENDS[what](there, slow)
            await until(lambda: here.session not in there.door.callers, "the session ends")
            await until(lambda: here.connection._gone, "its connection, too")
            assert here.connection.transport.get_write_buffer_size() == 0
            assert there.door._leaving == {}
            if ended is not None:
                await ended

    run(main)


def test_those_who_leave_count() -> None:
    async def main() -> None:
        async with behind() as there:
            there.door._max_sessions = 2
            slow, here = await _unread(there)
            slow.connection.send(b"\xff" * 64)
            await until(lambda: not there.door.callers)
            assert list(there.door._leaving) == [here]
            assert (await Caller().dial(there.address)).error is None
            third = await Caller().dial(there.address)
            assert isinstance(third.error, HelloError)
            assert third.error.code == "TOO_MANY"

    run(main)


# ---------------------------------------------------------------- how many


def test_when_there_are_too_many_one_of_them_can_still_come_again() -> None:
    async def main() -> None:
        async with behind() as there:
            there.door._max_sessions = 2
            for name in ("me", "you"):
                assert (await Caller().dial(there.address, instance=name)).error is None
            other = await Caller().dial(there.address, instance="other")
            assert isinstance(other.error, HelloError)
            assert (other.error.code, str(other.error)) == (
                "TOO_MANY",
                "this worker accepts at most 2 connectors",
            )
            assert (await Caller().dial(there.address, instance="me")).error is None
            assert there.door.instances.keys() == {"me", "you"}

    run(main)


def test_files_are_left_for_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert module.files_left() == 4096 - module.RESERVED_FILES
    assert limits[-1] == (4096, 4096)
    assert module.files_left() == 4096 - module.RESERVED_FILES
    limits.append((10, 10))
    assert module.files_left() == 1
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert module.files_left() == module.MAX_SESSIONS
    limits.append((4096, 4096))

    async def main() -> None:
        async with behind(share=2) as there:
            both = 2 * there.door._max_sessions
            assert both <= 4096 - module.RESERVED_FILES - connections.MAX_UNGREETED
            assert 2 * there.door._max_waiting_bytes == module.MAX_WAITING_BYTES

    run(main)


def test_streams_of_a_session_and_of_all_are_so_many_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with behind() as there:

            async def named(caller: Caller, *names: str) -> Any:
                for name in names:
                    caller.send(c.Notify(stream=ord(name), name=name))
                return await caller.until(c.Refused)

            monkeypatch.setattr(module, "MAX_STREAMS_PER_SESSION", 2)
            one = await Caller().dial(there.address)
            refused = await named(one, *"abc")
            assert (refused.code, refused.text) == (
                "TOO_MANY",
                "a session has at most 2 streams",
            )
            monkeypatch.setattr(module, "MAX_STREAMS_PER_SESSION", 9)
            monkeypatch.setattr(module, "MAX_STREAMS", 3)
            await until(lambda: not there.door.callers)
            assert there.door._names == 0
            await Caller().opened(there.address, "x")
            two = await Caller().dial(there.address)
            refused = await named(two, *"def")
            assert (refused.code, refused.text) == (
                *("TOO_MANY", "all sessions together have at most 3 streams"),
            )

    run(main)


def test_streams_that_nobody_sends_any_more_make_room_with_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 2)

    async def main() -> None:
        async with behind() as there:
            for name in "ab":
                one = await Caller().opened(there.address, name)
                one.messages(1)
                await settle()
                there.read()
                one.transport.abort()
            await until(lambda: not there.door.callers)
            new = await Caller().dial(there.address)
            new.send(c.Notify(stream=1, name="c"))
            answer = await new.until(c.NotifyAck)
            assert (answer.granted, answer.reason) == (False, c.BUSY_RETRY)
            assert there.told[-1] == control.Hastened(1)
            there.receiving.table.begin(1)
            there.receiving.settled(1, committed=True)
            new.send(c.Notify(stream=1, name="c"))
            assert (await new.until(c.NotifyAck)).granted

    run(main)


def test_names_of_which_nothing_came_are_given_back_with_their_session() -> None:
    async def main() -> None:
        async with behind() as there:
            one = await Caller().dial(there.address)
            for number in range(100):
                one.send(c.Notify(stream=number, name=str(number)))
            await until(lambda: len(there.receiving.table.entries) == 100)
            for _ in range(100):
                await one.until(c.NotifyAck)
            one.transport.abort()
            await until(lambda: not there.receiving.table.entries)
            back = [t for t in there.told if isinstance(t, control.Relinquished)]
            assert {t.stream for t in back} == {str(number) for number in range(100)}
            assert there.door._names == 0

    run(main)


def test_strangers_who_say_nothing_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with behind() as there:
            strangers = [
                await asyncio.open_connection(*there.address)
                for _ in range(connections.MAX_UNGREETED)
            ]
            gate = there.door._listener.gate
            assert gate is not None
            await until(lambda: len(gate._waiting) == connections.MAX_UNGREETED)
            monkeypatch.setattr(connections, "USUAL_HELLO_S", 60.0)
            turned_away = await Caller().dial(there.address)
            assert turned_away.error is not None  # those who came a moment ago may finish
            monkeypatch.setattr(connections, "USUAL_HELLO_S", 0.0)
            for _ in range(3):
                assert (await Caller().dial(there.address)).error is None
            await strangers[0][0].read()  # to the end: it was the oldest
            for _, writer in strangers:
                writer.close()
            await until(lambda: all(one.settled for one in gate._waiting))

    run(main)


# ---------------------------------------------------------------- where


def test_a_port_that_is_taken_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        held = socket.create_server(("127.0.0.1", 0))
        port = held.getsockname()[1]
        there = Behind()
        there.source.port = port
        monkeypatch.setattr(module, "LISTEN_RETRY_S", (0.01, 0.03))
        with pytest.raises(OSError, match="use") as caught:
            await there.door.open("127.0.0.1", 0)
        assert caught.value.errno == errno.EADDRINUSE
        monkeypatch.setattr(module, "LISTEN_RETRY_S", (0.01, 10.0))
        opening = asyncio.create_task(there.door.open("127.0.0.1", 0))
        await asyncio.sleep(0.02)
        assert not opening.done()
        held.close()
        assert await opening == ("127.0.0.1", port)
        await there.door.close()

    run(main)


def test_a_connector_goes_where_a_worker_that_leaves_sends_it() -> None:
    async def main() -> None:
        async with behind() as first, behind() as second:
            host, port = first.address
            one = Connector(f"{host}:{port}", secret=SECRET)
            await one.open()
            await one.send("a", 1, "x")
            await until(first.read, "a message")
            first.door.elsewhere = "{}:{}".format(*second.address)
            first.receiving.leave()
            await until(second.read, "it comes again, elsewhere")
            assert not first.door.callers
            second.receiving.table.begin(1)
            second.receiving.settled(1, committed=True)
            await one.close()

    run(main)
