"""The door of a worker: whatever connectors send, only their own session ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engine.worker.listener_callers import Caller, behind, frame, run, settle

from railgun.engine.worker import ingest_listener as module
from railgun.transport import ingest_batch as outside
from railgun.transport.commands import encode
from railgun.transport.hello import HelloError
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import BatchError

BAD: dict[str, tuple[Callable[[Caller], None], str]] = {
    "garbage": (lambda caller: caller.connection.send(os.urandom(64) + b"\xff" * 64), "BAD_FRAME"),
    "oversize": (lambda caller: caller.connection.send(frame(9 << 20, 54, 0)), "BAD_FRAME"),
    "more than was agreed on": (lambda caller: caller.connection.send(frame(2 << 20, 54, 0)), "BAD_FRAME"),
    "no such command": (lambda caller: caller.connection.send(frame(12, 99, 0)), "BAD_FRAME"),
    "not protobuf": (lambda caller: caller.connection.send(frame(15, 52, 3, b"\xff\xff\xff")), "BAD_FRAME"),
    "a second hello": (lambda caller: caller.connection.send(b"RAILGUN1" + bytes(80)), "BAD_FRAME"),
    "not for a worker": (lambda caller: caller.send(c.Welcome(credits=5)), "BAD_FRAME"),
    "of a node": (lambda caller: caller.send(p.Publish(stream="x")), "BAD_FRAME"),
    "not open": (lambda caller: caller.messages(1, stream=2), "NOT_OPEN"),
    "end of what is not open": (lambda caller: caller.send(c.Eos(stream=9, last=1)), "NOT_OPEN"),
    "a batch that is none": (lambda caller: caller.send(c.Messages(stream=1), b"\x01" * 30), "BAD_FRAME"),
    "an empty batch": (lambda caller: caller.send(c.Messages(stream=1), bytes(8)), "BAD_FRAME"),
    "no batch": (lambda caller: caller.send(c.Messages(stream=1)), "BAD_FRAME"),
    "ids that go down": (lambda caller: caller.messages(5, 4), "BAD_IDS"),
    "an id below 0": (lambda caller: caller.messages(-2), "BAD_IDS"),
    "an end beyond": (lambda caller: caller.send(c.Eos(stream=1, last=77)), "BAD_IDS"),
    "an end before all": (lambda caller: caller.send(c.Eos(stream=1, last=-2)), "BAD_IDS"),
    "a time that cannot be": (
        lambda caller: caller.send(c.Messages(stream=1), outside.pack([5], [b"x"], [1 << 62])),
        "BAD_TIME",
    ),
    "no name": (lambda caller: caller.send(c.Notify(stream=3)), "BAD_NAME"),
    "a long name": (lambda caller: caller.send(c.Notify(stream=3, name="x" * 1001)), "BAD_NAME"),
    "a number with two names": (lambda caller: caller.send(c.Notify(stream=1, name="b")), "BAD_NAME"),
    "a name with two numbers": (lambda caller: caller.send(c.Notify(stream=2, name="a")), "BAD_NAME"),
    "a payload that is no text": (
        lambda caller: caller.send(c.Messages(stream=1), outside.pack([5], [b"\xff"])),
        "BAD_PAYLOAD",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_ends_that_session_and_no_other(what: str) -> None:
    act, code = BAD[what]

    async def main() -> None:
        async with behind() as there:
            good = await Caller().opened(there.address, "good")
            bad = await Caller().opened(there.address)
            act(bad)
            await settle()
            there.read()
            refused = await bad.until(c.Refused)
            assert refused.code == code
            assert refused.text
            assert await bad.until(()) is None  # and the connection ends
            good.messages(1, 2)
            await settle()
            assert there.read() == ["x", "x"]
            assert there.door.metrics() == {"connectors": 1, "refused": 1}

    run(main)


def test_credits_are_paid_back_as_messages_are_applied_and_cannot_be_overdrawn() -> None:
    async def main() -> None:
        async with behind() as there:
            one = await Caller().opened(there.address)
            window = there.door.callers[1].window
            large = "y" * (window // 3 - 100)
            for number in range(4):  # the last one takes more than there is
                one.messages(number, text=large)
            await settle()
            assert len(there.read()) == 4
            back = await one.until(c.Ack)
            size = len(outside.pack([0], [large.encode()]))
            assert back.credits == 4 * (size + outside.FRAME_COST)
            for number in range(4, 10):
                one.messages(number, text=large)
            refused = await one.until(c.Refused)
            assert refused.code == "OVERDRAWN"
            assert len(there.read()) == 4  # what waited is dropped with its session

    run(main)


@pytest.mark.parametrize(
    ("who", "code"),
    [({"version": 7}, "BAD_VERSION"), ({"source": "other"}, "NO_SOURCE")],
)
def test_who_is_not_expected_is_turned_away(who: dict[str, Any], code: str) -> None:
    async def main() -> None:
        async with behind() as there:
            caller = await Caller().dial(there.address, **who)
            assert await caller.next() is None
            assert isinstance(caller.error, HelloError)
            assert caller.error.code == code

    run(main)


def test_a_connector_that_comes_again_ends_its_old_session() -> None:
    async def main() -> None:
        async with behind() as there:
            first = await Caller().dial(there.address, instance="me")
            first.send(c.Notify(stream=1, name="a"))
            assert (await first.until(c.NotifyAck)).granted
            first.messages(4)
            await settle()
            there.read()
            second = await Caller().dial(there.address, instance="me")
            assert await first.until(c.Refused) is None
            second.send(c.Notify(stream=8, name="a"))
            answer = await second.until(c.NotifyAck)
            assert (answer.granted, answer.por) == (True, 4)

    run(main)


def test_who_says_nothing_is_asked_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", (0.1, 0.3))

    async def main() -> None:
        async with behind() as there:
            mute = await Caller().opened(there.address, "mute")
            alive = await Caller().opened(there.address, "alive")
            mute.messages(1)
            await settle()
            there.read()
            asked = await alive.until(p.Ping)
            assert asked is not None
            while there.door.callers.keys() > {2}:
                alive.send(p.Pong())
                await asyncio.sleep(0.05)
            assert await mute.until(c.Refused) is None  # half-open: nobody there to be told
            assert there.receiving.table.entries["mute"].state.value == "detached"
            assert there.receiving.table.entries["alive"].state.value == "open"

    run(main)


def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 64 << 10)

    async def main() -> None:
        async with behind() as there:
            slow = await Caller().opened(there.address)
            slow.messages(1)
            await settle()
            there.read()
            slow.connection.transport.pause_reading()
            many = b"".join(encode(p.Ping(number=1))) * 10_000
            while there.door.callers:  # it fills what the system keeps, and then what we do
                slow.connection.send(many)
                await asyncio.sleep(0.001)
            assert there.receiving.table.entries["a"].state.value == "detached"

    run(main)


def test_with_dead_letters_a_stream_goes_on() -> None:
    async def main() -> None:
        async with behind("dead_letter") as there:
            one = await Caller().opened(there.address)
            payloads = [b"a", b"\xff", b"b", b"\xfe", b"c"]
            one.send(c.Messages(stream=1), outside.pack([1, 2, 3, 4, 5], payloads))
            one.send(c.Messages(stream=1), outside.pack([4, 5, 6], [*payloads[3:], b"d"]))
            await settle()
            assert there.read() == ["a", "b", "c", "d"]
            assert [letter.record for letter in there.letters] == [b"\xff", b"\xfe"]
            assert there.receiving.dropped == 2

    run(main)


def test_what_came_before_a_bad_payload_counts() -> None:
    async def main() -> None:
        async with behind() as there:
            one = await Caller().opened(there.address)
            one.send(c.Messages(stream=1), outside.pack([1, 5, 7], [b"a", b"\xff", b"b"]))
            await settle()
            assert there.read() == ["a"]
            refused = await one.until(c.Refused)
            assert (refused.code, refused.stream, refused.id) == ("BAD_PAYLOAD", "a", 5)
            assert there.receiving.table.positions() == {"a": 1}

    run(main)


def test_thousands_of_streams_and_hundreds_of_connections() -> None:
    async def main() -> None:
        async with behind() as there:
            callers = [await Caller().dial(there.address) for _ in range(200)]
            for number, caller in enumerate(callers):
                for stream in range(20):
                    caller.send(c.Notify(stream=stream, name=f"{number}/{stream}"))
            for caller in callers:
                for _ in range(20):
                    assert (await caller.until(c.NotifyAck)).granted
                for stream in range(20):
                    caller.messages(0, 1, stream=stream)
            await settle()
            while len(there.read()) < 8000:
                await asyncio.sleep(0.01)
            assert len(there.seen.values) == 8000
            assert there.door.metrics()["connectors"] == 200
            assert there.receiving.table.begin(1).keys() == {
                f"{number}/{stream}" for number in range(200) for stream in range(20)
            }
            there.receiving.settled(1, committed=True)
            for caller in callers:
                ack = await caller.until(c.Ack)
                while not ack.points:
                    ack = await caller.until(c.Ack)
                assert {(point.stream, point.por) for point in ack.points} == {
                    (stream, 1) for stream in range(20)
                }

    run(main)


def test_between_generations_connectors_are_told_to_try_again() -> None:
    async def main() -> None:
        async with behind() as there:
            one = await Caller().opened(there.address)
            there.receiving.close()
            assert await one.until(c.Restart) is not None
            two = await Caller().dial(there.address)
            two.send(c.Notify(stream=1, name="a"))
            answer = await two.until(c.NotifyAck)
            assert (answer.granted, answer.reason) == (False, c.ROLLING_BACK)

    run(main)


def test_a_batch_is_what_it_was() -> None:
    ids = [0, 5, 1 << 62]
    batch = outside.unpack(outside.pack(ids, [b"", b"a", b"bc"], [7, -1, 9], ["k", None, ""]))
    assert batch.ids.tolist() == ids
    assert batch.times is not None
    assert batch.times.tolist() == [7, -1, 9]
    assert batch.keys == ["k", None, ""]
    assert batch.payloads == [b"", b"a", b"bc"]
    plain = outside.unpack(outside.pack(np.array(ids), [b"x"] * 3))
    assert (plain.times, plain.keys) == (None, None)


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_are_a_batch_or_an_error(seed: int) -> None:
    chance = np.random.default_rng(seed)
    whole = bytearray(outside.pack([1, 2, 3], [b"abc", b"d", b""], keys=["x", None, "yz"]))
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(int(chance.integers(1, 4))):
            data[int(chance.integers(len(data)))] = int(chance.integers(256))
        data = data[: int(chance.integers(len(data) + 1))]
        try:
            batch = outside.unpack(bytes(data))
        except BatchError:
            continue
        assert len(batch.payloads) == len(batch.ids)
