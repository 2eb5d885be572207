"""The machines of connectors, rule by rule: the tables of `engine.protocol.ingest`, row for row."""

from __future__ import annotations

import numpy as np
import pytest

from railgun.engine.protocol.ingest.messages import (
    NONE,
    Acknowledge,
    Answer,
    Ask,
    Grant,
    Hasten,
    Reason,
    Reject,
    Relinquish,
    Restart,
    SessionError,
    Want,
)
from railgun.engine.protocol.ingest.registry import Active, Inactive, Left, Registry
from railgun.engine.protocol.ingest.sender import Phase, Sender
from railgun.engine.protocol.ingest.table import State, Table

ONE, TWO = (1, 7), (2, 8)  # workers and their incarnations


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def opened(seen: int = NONE, session: int = 5) -> Table:
    """A table with the stream `a` open."""
    table = Table()
    table.opened(session)
    assert table.notify(session, "a") == [Ask("a", session)]
    assert table.granted("a", session, seen) == [Answer(session, "a", Reason.OK, seen)]
    return table


# ---------------------------------------------------------------- the table


def test_ids_go_up_and_what_was_seen_is_passed_over() -> None:
    table = opened(seen=4)
    assert table.message(5, "a", ids(3, 4, 5, 9)) == 2
    assert table.message(5, "a", ids(8, 9)) == 2
    assert table.message(5, "a", ids(10)) == 0
    assert table.entries["a"].seen == 10


@pytest.mark.parametrize("bad", [(3, 3), (4, 2), (-1,), (-1, 0)])
def test_ids_that_do_not_go_up_end_the_session(bad: tuple[int, ...]) -> None:
    with pytest.raises(SessionError, match="have to go up") as error:
        opened().message(5, "a", ids(*bad))
    assert error.value.code == "BAD_IDS"


def test_the_first_id_may_be_0() -> None:
    table = opened()
    assert table.message(5, "a", ids(0)) == 0
    assert table.begin(1) == {"a": 0}


@pytest.mark.parametrize("state", ["absent", "pending", "closing", "detached", "another session"])
def test_a_message_for_a_stream_that_is_not_open_here_ends_the_session(state: str) -> None:
    table = opened()
    match state:
        case "absent":
            del table.entries["a"]
        case "pending":
            table.entries["a"].state = State.PENDING
        case "closing":
            table.end(5, "a", NONE)
        case "detached":
            table.closed(5)
        case "another session":
            table.opened(6)
    session = 6 if state == "another session" else 5
    for act in (lambda: table.message(session, "a", ids(1)), lambda: table.end(session, "a", NONE)):
        with pytest.raises(SessionError) as error:
            act()
        assert error.value.code == "NOT_OPEN"


def test_an_end_beyond_what_came_ends_the_session() -> None:
    table = opened(seen=3)
    with pytest.raises(SessionError, match="names 4 as the last id, but 3 was the last"):
        table.end(5, "a", 4)


def test_a_notify_is_refused_unless_the_stream_is_absent_or_detached() -> None:
    table = opened()
    table.opened(6)
    busy = [Answer(6, "a", Reason.BUSY_RETRY)]
    assert table.notify(6, "a") == busy
    table.message(5, "a", ids(3))
    table.end(5, "a", 3)
    assert table.notify(6, "a") == [*busy, Hasten()]
    table.entries["a"].state = State.PENDING
    assert table.notify(6, "a") == busy


def test_who_comes_back_goes_on_after_what_was_seen_without_asking_anybody() -> None:
    table = opened()
    table.message(5, "a", ids(0, 1, 2))
    assert table.closed(5) == []
    table.opened(6)
    assert table.notify(6, "a") == [Answer(6, "a", Reason.OK, 2)]
    assert table.message(6, "a", ids(2, 3)) == 1


def test_a_stream_leaves_only_with_a_snapshot_that_began_after_its_connection_was_lost() -> None:
    table = opened()
    table.message(5, "a", ids(0))
    assert table.begin(1) == {"a": 0}
    table.message(5, "a", ids(1))
    table.closed(5)
    assert table.settled(1, committed=True) == []
    assert table.begin(2) == {"a": 1}
    assert table.settled(2, committed=False) == []
    assert table.begin(3) == {"a": 1}
    assert table.settled(3, committed=True) == [Relinquish("a", 1)]
    assert not table.entries


def test_an_end_between_begin_and_commit_waits_for_the_next_snapshot() -> None:
    table = opened()
    table.message(5, "a", ids(0))
    table.begin(1)
    table.message(5, "a", ids(1))
    table.end(5, "a", 1)
    assert table.settled(1, committed=True) == [Acknowledge(5, (("a", 0),))]
    table.begin(2)
    assert table.settled(2, committed=True) == [Acknowledge(5, (("a", 1),)), Relinquish("a", 1)]


def test_a_stream_of_which_nothing_came_is_given_back_too() -> None:
    table = opened()
    table.end(5, "a", NONE)
    table.begin(1)
    assert table.settled(1, committed=True) == [Relinquish("a", NONE)]


def test_a_lost_connection_gives_back_at_once_what_nothing_ever_came_of() -> None:
    table = opened()
    assert table.closed(5) == [Relinquish("a", NONE)]
    assert not table.entries
    table = opened(seen=3)  # of which something came, once: as with any other
    assert table.closed(5) == []
    assert table.entries["a"].state is State.DETACHED


def test_only_news_are_acknowledged() -> None:
    table = opened(seen=7)
    table.begin(1)
    assert table.settled(1, committed=True) == [Acknowledge(5, (("a", 7),))]
    table.begin(2)
    assert table.settled(2, committed=True) == []


def test_a_grant_whose_session_died_is_given_back() -> None:
    table = Table()
    table.opened(5)
    table.notify(5, "a")
    table.closed(5)
    table.opened(6)
    assert table.notify(6, "a") == [Answer(6, "a", Reason.BUSY_RETRY)]
    assert table.granted("a", 5, 3) == [Relinquish("a", 3)]
    assert table.notify(6, "a") == [Ask("a", 6)]


def test_a_grant_nobody_asked_for_is_given_back_and_one_for_an_open_stream_is_ignored() -> None:
    assert Table().granted("a", 5, 3) == [Relinquish("a", 3)]
    assert opened().granted("a", 5, 3) == []


def test_a_rejected_stream_is_absent_again() -> None:
    table = Table()
    table.opened(5)
    table.notify(5, "a")
    assert table.rejected("a", 5) == [Answer(5, "a", Reason.BUSY_RETRY)]
    table.notify(5, "a")
    table.closed(5)
    assert table.rejected("a", 5) == []
    assert not table.entries
    assert table.rejected("a", 5) == []


def test_a_stream_that_is_wanted_elsewhere_hastens_the_snapshot_that_frees_it() -> None:
    table = opened(seen=0)
    assert table.wanted("a") == []
    table.closed(5)
    assert table.wanted("a") == [Hasten()]
    assert table.wanted("b") == []


def test_a_worker_that_drains_sends_connectors_elsewhere_and_keeps_what_it_saw() -> None:
    table = opened()
    table.message(5, "a", ids(3))
    table.notify(5, "b")
    assert table.drain() == [Answer(5, "b", Reason.REDIRECT), Restart(5)]
    assert table.granted("b", 5, 9) == [Relinquish("b", 9)]
    table.opened(6)
    assert table.notify(6, "a") == [Answer(6, "a", Reason.REDIRECT)]
    assert table.positions() == {"a": 3}


# ---------------------------------------------------------------- the registry


def registry(**positions: int) -> Registry:
    made = Registry()
    made.go_back(4, positions, [ONE, TWO])
    return made


def test_a_stream_nobody_has_is_granted_from_where_it_is() -> None:
    assert registry().notify(ONE, 4, "a", 5) == [Grant(ONE, "a", 5, NONE)]
    assert registry(a=9).notify(TWO, 4, "a", 6) == [Grant(TWO, "a", 6, 9)]


def test_a_stream_somebody_has_is_not_but_the_same_session_hears_it_again() -> None:
    streams = registry(a=9)
    streams.notify(ONE, 4, "a", 5)
    assert streams.notify(ONE, 4, "a", 5) == [Grant(ONE, "a", 5, 9)]
    assert streams.notify(ONE, 4, "a", 6) == [Reject(ONE, "a", 6), Want(ONE, "a")]
    assert streams.notify(TWO, 4, "a", 6) == [Reject(TWO, "a", 6), Want(ONE, "a")]


def test_only_its_owner_gives_a_stream_back() -> None:
    streams = registry()
    streams.notify(ONE, 4, "a", 5)
    streams.relinquish(TWO, 4, "a", 3)
    streams.relinquish(ONE, 3, "a", 3)
    streams.relinquish((1, 6), 4, "a", 3)
    assert streams.streams == {"a": Active(ONE, 5, NONE)}
    streams.relinquish(ONE, 4, "a", 3)
    assert streams.streams == {"a": Inactive(3)}
    streams.relinquish(ONE, 4, "a", 5)
    streams.relinquish(ONE, 4, "b", 5)
    assert streams.streams == {"a": Inactive(3)}


@pytest.mark.parametrize(("owner", "generation"), [(ONE, 3), ((1, 6), 4), ((3, 1), 4)])
def test_what_is_stale_is_dropped(owner: tuple[int, int], generation: int) -> None:
    streams = registry()
    assert streams.notify(owner, generation, "a", 5) == []
    assert streams.streams == {}


def test_a_snapshot_holds_what_the_owner_recorded_or_what_it_began_with() -> None:
    streams = registry(a=1, b=2, c=3)
    streams.notify(ONE, 4, "a", 5)
    streams.notify(ONE, 4, "b", 5)
    streams.notify(TWO, 4, "new", 6)
    assert streams.snapshot(1, {ONE: {"a": 7}, TWO: {"b": 9}}) == {"a": 7, "b": 2, "c": 3}


def test_what_a_worker_that_left_saw_is_free_with_the_next_snapshot() -> None:
    streams = registry()
    streams.notify(ONE, 4, "a", 5)
    streams.notify(ONE, 4, "b", 5)
    streams.left(ONE, 4, {"a": 6})
    assert streams.streams == {"a": Left(6), "b": Left(NONE)}
    assert streams.notify(TWO, 4, "a", 8) == [Reject(TWO, "a", 8), Hasten()]
    streams.committed(1)  # of which it was no part
    assert streams.streams["a"] == Left(6)
    assert streams.snapshot(2, {}) == {"a": 6}
    streams.committed(2)
    assert streams.streams == {"a": Inactive(6)}
    assert streams.notify(ONE, 4, "a", 9) == []  # it is no member any more
    streams.joined((1, 9))
    assert streams.notify((1, 9), 4, "a", 9) == [Grant((1, 9), "a", 9, 6)]


def test_when_the_flow_goes_back_streams_are_where_the_snapshot_says() -> None:
    streams = registry(a=1)
    streams.notify(ONE, 4, "a", 5)
    streams.notify(ONE, 4, "b", 5)
    streams.go_back(5, {"a": 1}, [ONE])
    assert streams.streams == {"a": Inactive(1)}
    assert streams.notify(TWO, 5, "a", 5) == []


# ---------------------------------------------------------------- the sender


def test_a_sender_goes_on_where_it_is_told_and_knows_what_is_safe() -> None:
    sender = Sender()
    stream = sender.stream("a")
    sender.opened(100)
    assert not sender.may_send(stream)
    sender.asks(stream)
    sender.granted(stream, 3)
    assert sender.may_send(stream)
    sender.sent(stream, 8, 150)
    assert not sender.may_send(stream)  # the last batch took more than there was
    sender.granted_credits(60)
    assert sender.may_send(stream)
    assert sender.acknowledged(stream, 5)
    assert not sender.acknowledged(stream, 5)
    sender.lost()
    assert (stream.phase, stream.acked, sender.credits) == (Phase.IDLE, 5, 0)
    sender.granted(stream, 7)
    assert (stream.at, stream.acked) == (7, 5)
    sender.granted(stream, 1)  # the flow was started from an older snapshot
    assert (stream.at, stream.acked) == (1, 1)
