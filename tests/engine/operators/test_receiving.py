"""What begins a flow that programs outside push to: times, and messages that are at fault."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.worker.listener_callers import SECRET, Caller, Seen, behind, run, settle

from railgun.engine.operators import receiving as module
from railgun.engine.operators.operator import DeadLetter, Setting, describe_error
from railgun.engine.operators.reading import Clock
from railgun.engine.operators.receiving import Receiving
from railgun.engine.protocol.frontier import LAST, MIN
from railgun.engine.protocol.ingest.messages import NONE, Relinquish, SessionError
from railgun.sources.connectors import Connectors
from railgun.transport import ingest_batch as outside
from railgun.transport.proto import connectors_pb2 as c


class Fed:
    """A source, and who talks to connectors."""

    def __init__(self, on_error: str = "stop", decode: Any = "json", **clock: Any) -> None:
        self.letters: list[DeadLetter] = []
        self.refused: list[SessionError] = []
        self.commands: list[Any] = []
        source = Connectors("feed", decode=decode, secret=SECRET, event_time="time" not in clock)
        setting = Setting("in", on_error, self.letters.append)
        self.receiving = Receiving(setting, source, Clock(**clock), 0)
        self.receiving.callers = self
        self.seen = Seen()
        self.receiving.outs.append(self.seen)
        self.open(1, "a")

    def open(self, session: int, stream: str) -> None:
        table = self.receiving.table
        if session not in table.sessions:
            table.opened(session)
        table.notify(session, stream)
        table.granted(stream, session, NONE)

    def push(self, ids: list[int], payloads: list[bytes], **more: Any) -> None:
        self.receiving.offer(1, "a", outside.pack(ids, payloads, **more), 1)

    def carry_out(self, command: Any) -> None:
        self.commands.append(command)

    def took(self, session: int, size: int) -> None: ...

    def refuse(self, session: int, error: SessionError) -> None:
        self.refused.append(error)

    def let_go(self) -> None: ...


def told(payload: bytes) -> Any:
    return json.loads(payload)


def stops(_: Any) -> Any:
    raise StopIteration


def test_a_message_that_has_no_time_ends_its_session_and_what_came_before_counts() -> None:
    fed = Fed(time=lambda item: item["t"])
    fed.push([1, 2, 3, 4], [b'{"t": 5}', b"{}", b"]", b'{"t": 6}'])
    fed.receiving.read(0)
    assert fed.seen.values == [{"t": 5}]
    [error] = fed.refused
    assert (error.code, error.stream, error.id) == ("BAD_PAYLOAD", "a", 2)
    assert str(error) == "message 2 of 'a' has no time: KeyError('t'); it is {}"
    assert fed.receiving.table.positions() == {"a": 1}
    assert not fed.receiving.table.sessions


def test_or_it_goes_to_the_dead_letters_like_one_that_cannot_be_decoded() -> None:
    fed = Fed("dead_letter", time=lambda item: item["t"])
    fed.push([1, 2, 3, 4, 5], [b"{}", b'{"t": 5}', b"]", b'{"t": "x"}', b'{"t": 6}'])
    fed.receiving.read(0)
    assert fed.seen.values == [{"t": 5}, {"t": 6}]
    assert sorted((letter.key, str(letter.record)) for letter in fed.letters) == [
        *[("a", "b']'"), ("a", "{'t': 'x'}"), ("a", "{}")],
    ]
    assert fed.receiving.table.positions() == {"a": 5}
    assert fed.receiving.bound(0, 0) == 6
    assert not fed.refused


@pytest.mark.parametrize("options", [{"decode": stops}, {"time": stops}])
@pytest.mark.parametrize("on_error", ["stop", "dead_letter"])
def test_a_function_that_says_stop_is_no_end(options: dict[str, Any], on_error: str) -> None:
    fed = Fed(on_error, **options)
    fed.push([1, 2], [b"1", b"2"])
    fed.receiving.read(0)
    assert fed.seen.values == []
    assert len(fed.letters) == (2 if on_error == "dead_letter" else 0)
    assert [error.id for error in fed.refused] == ([1] if on_error == "stop" else [])


def test_what_was_applied_before_is_not_even_looked_at() -> None:
    """Perhaps it was decoded by another function then."""
    fed = Fed()
    fed.receiving.table.entries["a"].seen = 2
    fed.push([1, 2, 3], [b"]", b"]", b"7"])
    fed.receiving.read(0)
    assert (fed.seen.values, fed.receiving.dropped, fed.refused) == ([7], 2, [])


def test_times_of_messages_are_of_the_right_ones() -> None:
    fed = Fed("dead_letter", lateness=0)
    fed.receiving.table.entries["a"].seen = 1
    fed.push([1, 2, 3, 4], [b"1", b"]", b"3", b"4"], times=[90, 80, 7, 6])
    fed.receiving.read(0)
    assert fed.seen.values == [3, 4]
    assert fed.receiving.bound(0, 0) == 7


def test_with_a_function_of_time_at_the_door() -> None:
    async def main() -> None:
        async with behind(time=int) as there:
            bad, good = [await Caller().opened(there.address, name) for name in ("b", "a")]
            bad.messages(1, text="no time")
            good.messages(1, text="7")
            await settle()
            assert there.read() == ["7"]
            assert (await bad.until(c.Refused)).code == "BAD_PAYLOAD"

    run(main)


# ---------------------------------------------------------------- many streams


def test_how_far_time_has_come_in_a_stream_is_known_as_long_as_it_is_here_however_idle() -> None:
    fed = Fed(decode="bytes", idle_after=100)
    fed.open(2, "b")
    for stream, session, time in (("a", 1, 700), ("b", 2, 300)):
        fed.receiving.offer(session, stream, outside.pack([0], [b"x"], times=[time]), 1)
    fed.receiving.read(50)
    fed.receiving.closed(1)
    fed.receiving.table.begin(1)
    assert fed.receiving.times_reached() == {"a": 700, "b": 300}
    fed.receiving.settled(1, committed=True)  # which "a" leaves with
    assert fed.receiving.times_reached() == {"b": 300}
    assert fed.commands[-1] == Relinquish("a", 0, 700)
    assert fed.receiving.bound(1_000, 0) == LAST
    assert fed.receiving.times_reached() == {"b": 300}


def test_a_stream_that_comes_back_is_as_late_as_it_was() -> None:
    fed = Fed(decode="bytes", idle_after=1_000)
    fed.receiving.table.opened(2)
    fed.receiving.notify(2, "b")
    fed.receiving.granted("b", 2, 6, 700)
    fed.receiving.offer(2, "b", outside.pack([7, 8], [b"x", b"y"], times=[699, 700]), 1)
    fed.receiving.read(50)
    (batch,) = fed.seen.batches
    assert batch.late is not None
    assert batch.late.tolist() == [700, MIN]


def test_a_stream_that_was_granted_too_late_goes_back_with_its_time() -> None:
    fed = Fed()
    fed.receiving.granted("b", 2, 6, 700)
    assert fed.commands == [Relinquish("b", 6, 700)]
    assert fed.receiving.times_reached() == {}


def test_how_far_time_has_come_is_right_also_when_it_is_not_worked_out_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MANY_STREAMS", 2)
    fed = Fed(decode="bytes", idle_after=1000)
    receiving = fed.receiving

    def send(stream: str, id_: int, time: int, now: int) -> None:
        if stream not in receiving.table.entries:
            fed.open(1, stream)
        receiving.offer(1, stream, outside.pack([id_], [b"x"], times=[time]), 1)
        receiving.read(now)

    assert receiving.bound(0, 0) == LAST
    for number, stream in enumerate("abc"):
        send(stream, 1, 100 + number, 1)
    assert receiving.bound(1, 0) == 100
    send("a", 2, 500, 2)
    assert receiving.bound(2, 0) == 100  # later is soon enough
    assert receiving.bound(100, 0) == 101
    send("d", 1, 50, 101)
    assert receiving.woke
    assert receiving.bound(101, 0) == 50  # but what holds time back does so at once


# ---------------------------------------------------------------- tracebacks


def _chained() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        raise ValueError("y") from error


def _in_the_course() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        raise ValueError("y")  # noqa: B904


def _grouped() -> None:
    raise ExceptionGroup("two", [ValueError("a"), ValueError("b")])


def _deep(left: int = 20) -> None:
    if left:
        _deep(left - 1)
    raise ValueError(left)


RAISING: list[Callable[[], Any]] = [
    lambda: json.loads("{"),
    lambda: b"\xff".decode(),
    lambda: int("x"),
    _chained,
    _in_the_course,
    _grouped,
    _deep,
]


@pytest.mark.parametrize("number", range(len(RAISING)))
def test_what_is_told_of_an_error_is_its_traceback(number: int) -> None:
    for _ in range(2):  # the second time it is known
        with pytest.raises(Exception) as caught:  # noqa: PT011
            RAISING[number]()
        assert describe_error(caught.value) == "".join(
            traceback.format_exception(caught.value, limit=-8)
        )
