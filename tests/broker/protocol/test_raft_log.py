"""Raft, rule by rule: the log, snapshots of it, and what a driver may do."""

from __future__ import annotations

import pytest
from tests.broker.protocol.raft_play import ABC, Play, append, entries_of, of
from verification.raft.mutants import CommitsEarlierTerms

from railgun.broker.protocol.raft.log import Log
from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskVote,
    Entry,
    Install,
    Installing,
    Members,
    NotLeaderError,
    Settings,
    Snapshot,
    Vote,
)
from railgun.broker.protocol.raft.state import Role
from railgun.errors import ProtocolError

# ---------------------------------------------------------------- the log


def test_a_leader_begins_its_term_with_an_entry_and_tells_all() -> None:
    node = Play()
    sent = node.elect()
    told = Append(1, 0, 0, (Entry(1, 1),), 0, 1)
    assert of(Append, sent) == [told, told]


def test_entries_are_sent_to_all_before_they_are_on_our_own_disk() -> None:
    node = Play()
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.raft.propose([b"x"], 0.0)
    ready = node.raft.ready()
    assert of(Append, list(ready.early), "b")[-1].entries == (Entry(2, 1, b"x"),)
    assert ready.entries == (Entry(2, 1, b"x"),)


def test_heartbeats_are_sent_all_the_time() -> None:
    node = Play()
    node.elect()
    assert len(of(Append, node.pass_time(1.0), "b")) == 10


def test_a_follower_takes_entries_after_one_that_it_has() -> None:
    node = Play(log="11", term=1)
    assert node.hear("b", append(1, 2, 1, "11")) == [("b", Appended(1, True, 4, 1))]
    assert node.log == "1111"


@pytest.mark.parametrize(
    ("log", "prev", "term", "hint"),
    [
        ("11", 5, 3, (2, 1)),  # too short
        ("1111", 3, 3, (3, 1)),  # of another term
        ("1122", 4, 1, (2, 1)),  # what is newer cannot be the leader's
        ("", 4, 1, (0, 0)),
    ],
)
def test_a_follower_that_lacks_the_entry_before_says_where_its_log_may_agree(
    log: str, prev: int, term: int, hint: tuple[int, int]
) -> None:
    node = Play(log=log, term=3)
    assert node.hear("b", append(3, prev, term, "3")) == [("b", Appended(3, False, prev, 1, *hint))]
    assert node.log == log


def test_a_follower_cuts_what_differs_and_nothing_else() -> None:
    node = Play(log="11122", term=3)
    node.hear("b", append(3, 2, 1, "13"))
    assert node.log == "1113"


def test_an_old_message_cuts_nothing() -> None:
    node = Play(log="1111", term=1)
    assert node.hear("b", append(1, 1, 1, "1")) == [("b", Appended(1, True, 2, 1))]
    assert node.log == "1111"


def test_entries_are_on_disk_before_they_are_acknowledged() -> None:
    node = Play()
    node.raft.step("b", append(1, 0, 0, "1"), 0.0)
    ready = node.raft.ready()
    assert [entry.term for entry in ready.entries] == [1]
    assert ready.early == ()
    assert ready.late == (("b", Appended(1, True, 1, 1)),)


def test_what_was_cut_while_it_was_written_is_written_anew() -> None:
    node = Play()
    node.raft.step("b", append(1, 0, 0, "11"), 0.0)
    ready = node.raft.ready()
    node.raft.step("c", append(2, 1, 1, "2"), 0.0)
    node.write(ready)
    assert node.raft.log.durable == 0  # nobody knows, so all of it comes again
    assert [entry.term for entry in node.raft.ready().entries] == [1, 2]


def test_a_leader_goes_back_to_where_a_follower_agrees() -> None:
    node = Play(log="11133", term=3)
    node.elect()
    sent = node.hear("b", Appended(4, False, 5, 1, 4, 2))  # it has term 2 there
    assert of(Append, sent, "b")[0].prev_index == 3
    sent = node.hear("b", Appended(4, True, 6, 1))
    assert node.raft.progress["b"].match == 6


def test_a_refusal_that_is_old_news_is_passed_over() -> None:
    node = Play(log="111", term=1)
    node.elect()
    node.hear("b", Appended(2, True, 4, 1))
    assert of(Append, node.hear("b", Appended(2, False, 3, 1, 0, 0))) == []
    assert node.raft.progress["b"].next == 5


def test_an_entry_is_committed_when_a_majority_has_it_on_disk() -> None:
    node = Play(members=Members(tuple("abcde")))
    node.elect("b", "c")
    node.raft.propose([b"x"], 0.0)
    node.do()
    node.hear("b", Appended(1, True, 2, 1))
    assert node.raft.commit == 0
    node.hear("c", Appended(1, True, 2, 1))
    assert node.raft.commit == 2
    assert [entry.data for entry in node.committed] == [b"", b"x"]


def test_a_leader_counts_itself_when_it_has_written() -> None:
    node = Play()
    node.elect()
    node.raft.propose([b"x"], 0.0)
    ready = node.raft.ready()
    node.raft.step("b", Appended(1, True, 2, 1), 0.0)
    assert node.raft.commit == 1
    node.write(ready)
    assert node.raft.commit == 2


def test_entries_of_earlier_terms_are_committed_only_with_one_of_this_term() -> None:
    node = Play(log="12", term=3)
    node.elect()
    assert node.log == "124"
    node.hear("b", Appended(4, True, 2, 1))
    assert node.raft.commit == 0
    node.hear("b", Appended(4, True, 3, 1))
    assert node.raft.commit == 3


@pytest.mark.parametrize("kind", [Raft, CommitsEarlierTerms])
def test_an_entry_on_a_majority_can_still_be_lost_so_it_is_not_committed(kind: type[Raft]) -> None:
    """Figure 8 of the paper, with three nodes; and what happens without the rule."""
    a, b, c = (Play(id, kind=kind, append_bytes=1) for id in "abc")
    a.elect("b")  # term 1; its entry reaches nobody
    for node in (b, c):
        node.hear("a", AskVote(1, 0, 0))
    c.elect("b")  # term 2; its entry reaches nobody
    for node in (a, b):
        node.hear("c", AskVote(2, 0, 0))
    a.elect("b")  # term 3
    for node in (b, c):
        node.hear("a", AskVote(3, 1, 1))
    assert (a.log, b.log, c.log) == ("13", "", "2")
    refused = b.hear("a", Append(3, 1, 1, (Entry(2, 3),), 0, 1))
    (again,) = of(Append, a.hear("b", refused[0][1]), "b")
    (taken,) = b.hear("a", again)
    a.hear("b", taken[1])  # the entry of term 1 is on a and b
    assert (a.log, b.log) == ("13", "1")
    c.elect()  # term 4: what b has is older
    assert b.hear("c", AskVote(4, 1, 2)) == [("c", Vote(4, True))]
    assert c.role() is Role.LEADER
    lost = kind is not Raft
    assert [entry.term for entry in a.committed] == ([1] if lost else [])


def test_what_learners_have_does_not_count() -> None:
    node = Play(members=Members(("a", "b", "c"), ("d",)))
    node.elect()
    node.hear("d", Appended(1, True, 1, 1))
    assert node.raft.commit == 0


def test_followers_hear_what_is_committed_at_once() -> None:
    node = Play()
    node.elect()
    sent = node.hear("b", Appended(1, True, 1, 1))
    assert {m.commit for m in of(Append, sent, "b")} == {1}


def test_a_follower_knows_what_is_committed_only_as_far_as_its_log_is_the_leaders() -> None:
    node = Play(log="1111", term=1)
    node.hear("b", append(2, 1, 1, "", commit=4))
    assert node.raft.commit == 1
    assert [entry.index for entry in node.committed] == [1]


def test_what_is_committed_is_applied_once_and_in_order() -> None:
    node = Play()
    for commit in (0, 1, 1, 3, 2, 3):
        node.hear("b", append(1, 0, 0, "111", commit=commit))
    assert [entry.index for entry in node.committed] == [1, 2, 3]


def test_nothing_is_applied_before_it_is_on_disk() -> None:
    node = Play()
    node.raft.step("b", append(1, 0, 0, "1", commit=1), 0.0)
    assert node.raft.ready().committed == ()


def test_a_committed_entry_is_never_cut() -> None:
    node = Play(log="11", term=1)
    node.hear("b", append(1, 2, 1, "", commit=2))
    with pytest.raises(ProtocolError, match="would cut entry 2"):
        node.raft._take((Entry(2, 2),))
    assert node.log == "11"


def test_two_leaders_in_a_term_are_noticed() -> None:
    node = Play()
    node.elect()
    with pytest.raises(ProtocolError, match="both lead in term 1"):
        node.hear("c", append(1, 0, 0))


def test_no_more_is_under_way_than_the_window_allows() -> None:
    node = Play(window=2, append_bytes=1)
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.raft.propose([b"1", b"2", b"3", b"4"], 0.0)
    sent = node.do()
    assert [m.entries[0].data for m in of(Append, sent, "b")] == [b"1", b"2"]
    sent = node.hear("b", Appended(1, True, 2, 1))
    assert [m.entries[0].data for m in of(Append, sent, "b")] == [b"3"]


def test_what_was_lost_on_the_way_is_noticed_by_the_next_heartbeat() -> None:
    node = Play()
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.raft.propose([b"lost"], 0.0)
    node.do()
    beat = of(Append, node.pass_time(0.1), "b")[-1]
    assert (beat.prev_index, beat.entries) == (2, ())
    sent = node.hear("b", Appended(1, False, 2, beat.round, 1, 1))
    assert of(Append, sent, "b")[-1].entries[0].data == b"lost"


def test_only_a_leader_adds_entries_and_others_say_who_that_is() -> None:
    node = Play()
    node.hear("b", append(1, 0, 0))
    with pytest.raises(NotLeaderError, match="a cannot add an entry: it is a follower") as error:
        node.raft.propose([b"x"], 0.0)
    assert error.value.leader == "b"


# ---------------------------------------------------------------- snapshots


def lagging(chunk: int = 4) -> Play:
    """A leader whose log begins at 3, and that knows b to lack that."""
    snapshot = Snapshot(3, 1, ABC, b"0123456789")
    node = Play(snapshot=snapshot, log="1", term=1, chunk=chunk)
    node.elect("c")
    node.hear("b", Appended(2, False, 4, 1, 0, 0))
    return node


def test_who_lacks_what_is_not_in_the_log_gets_a_snapshot_in_pieces() -> None:
    node = lagging()
    got = b""
    for _ in range(3):
        sent = node.pass_time(0.1)  # whatever was lost is sent again
        piece = of(Install, sent, "b")[-1]
        assert (piece.offset, piece.size, piece.snapshot.data) == (len(got), 10, b"")
        got += piece.data
        node.hear("b", Installing(2, 3, len(got), piece.round))
    assert got == b"0123456789"
    sent = node.hear("b", Appended(2, True, 3, 1))
    assert [entry.index for entry in of(Append, sent, "b")[0].entries] == [4, 5]


def test_a_piece_that_is_acknowledged_twice_is_followed_once() -> None:
    node = lagging()
    assert len(of(Install, node.hear("b", Installing(2, 3, 4, 1)), "b")) == 1
    assert of(Install, node.hear("b", Installing(2, 3, 4, 1)), "b") == []
    assert of(Install, node.hear("b", Installing(2, 3, 0, 1)), "b") == []  # it has begun anew
    assert [piece.offset for piece in of(Install, node.pass_time(0.1), "b")] == [0]


def test_whose_entry_before_differs_from_that_of_the_snapshot_gets_it_too() -> None:
    node = Play(snapshot=Snapshot(3, 2, ABC, b"x"), term=2)
    node.elect("c")
    sent = node.hear("b", Appended(3, False, 3, 1, 3, 1))  # it has another entry at 3
    assert of(Install, sent, "b")


def test_a_follower_puts_pieces_together_and_begins_anew() -> None:
    node = Play(log="11", term=1)
    about = Snapshot(9, 2, Members(("b", "c")))
    pieces = [Install(2, about, at, b"0123456789"[at : at + 4], 10, 1) for at in (0, 4, 8)]
    assert node.hear("b", pieces[1]) == [("b", Installing(2, 9, 0, 1))]  # the first is missing
    assert node.hear("b", pieces[0]) == [("b", Installing(2, 9, 4, 1))]
    assert node.hear("b", pieces[0]) == [("b", Installing(2, 9, 4, 1))]
    assert node.hear("b", pieces[1]) == [("b", Installing(2, 9, 8, 1))]
    assert node.hear("b", pieces[2]) == [("b", Appended(2, True, 9, 1))]
    restored = next(ready.snapshot for ready in node.written if ready.snapshot is not None)
    assert restored.data == b"0123456789"
    assert (node.raft.log.base, node.raft.commit, node.raft.log.members.voters) == (
        9,
        9,
        ("b", "c"),
    )


def test_a_snapshot_of_what_we_have_changes_nothing() -> None:
    node = Play(log="111", term=1)
    about = Snapshot(2, 1, ABC)
    assert node.hear("b", Install(1, about, 0, b"x", 1, 1)) == [("b", Appended(1, True, 2, 1))]
    assert node.log == "111"
    assert all(ready.snapshot is None for ready in node.written)
    assert node.raft.commit == 2


def test_pieces_of_two_leaders_are_not_put_together() -> None:
    node = Play()
    about = Snapshot(9, 1, ABC)
    node.hear("b", Install(1, about, 0, b"0123", 8, 1))
    assert node.hear("c", Install(2, about, 4, b"4567", 8, 1)) == [("c", Installing(2, 9, 0, 1))]


def test_a_log_becomes_a_snapshot_of_what_was_applied() -> None:
    node = Play(log="111", term=1)
    node.hear("b", append(1, 3, 1, "", commit=2))
    with pytest.raises(ProtocolError, match="has applied 2, not 3"):
        node.raft.snapshot(3, b"")
    made = node.raft.snapshot(2, b"state")
    assert made == Snapshot(2, 1, ABC, b"state")
    node.raft.compact(made)
    assert (node.raft.log.base, node.log) == (2, "1")
    node.raft.compact(made)  # again
    assert (node.raft.log.base, node.log) == (2, "1")


# ---------------------------------------------------------------- drivers


def test_one_thing_after_the_other() -> None:
    node = Play()
    node.raft.campaign(0.0)
    node.raft.ready()
    with pytest.raises(ProtocolError, match="call persisted"):
        node.raft.ready()


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ProtocolError, match="heartbeat interval"):
        Settings(heartbeat=2.0)
    with pytest.raises(ProtocolError, match="a lease"):
        Settings(lease=1.0)


def test_a_log_with_a_hole_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has entry 5 where 4 should be"):
        Log(Snapshot(3, 1, ABC), entries_of("1", 5))
