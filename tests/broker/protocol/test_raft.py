"""Raft, rule by rule: a test for each sentence of the paper that says what a node does, and for what was added."""

from __future__ import annotations

import pytest
from tests.broker.protocol.raft_play import ABC, Play, append, entries_of, of
from verification.raft.mutants import CommitsEarlierTerms

from railgun.broker.protocol.raft.log import Log
from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskRead,
    AskVote,
    Campaign,
    ChangeError,
    Entry,
    Hard,
    Install,
    Installing,
    Members,
    NotLeaderError,
    ReadAt,
    Settings,
    Snapshot,
    Vote,
)
from railgun.broker.protocol.raft.state import Role, fraction
from railgun.errors import ProtocolError

# ---------------------------------------------------------------- terms


def test_whoever_hears_of_a_later_term_is_a_follower_in_it() -> None:
    for message in (Appended(5, True, 0, 0), append(5, 0, 0), Vote(5, False), AskVote(5, 0, 0)):
        node = Play()
        node.elect()
        assert node.role() is Role.LEADER
        node.hear("c", message)
        assert (node.raft.role, node.raft.term) == (Role.FOLLOWER, 5)


def test_a_candidate_that_hears_of_a_leader_of_its_term_follows_it() -> None:
    node = Play()
    node.raft.campaign(0.0)
    node.do()
    node.hear("b", append(1, 0, 0))
    assert (node.raft.role, node.raft.leader) == (Role.FOLLOWER, "b")


def test_what_is_of_an_earlier_term_is_refused_and_its_sender_is_told() -> None:
    node = Play(term=3)
    assert node.hear("b", append(2, 0, 0, "2")) == [("b", Appended(3, False, 0, 0))]
    assert node.hear("b", AskVote(2, 9, 2)) == [("b", Vote(3, False))]
    assert node.hear("b", Vote(2, True)) == []
    assert node.log == ""


def test_term_and_vote_are_on_disk_before_the_answer_goes_out() -> None:
    node = Play()
    node.raft.step("b", AskVote(4, 0, 0), 0.0)
    ready = node.raft.ready()
    assert ready.hard == Hard(4, "b")
    assert ready.early == ()
    assert ready.late == (("b", Vote(4, True)),)


# ---------------------------------------------------------------- elections


def test_a_node_that_hears_of_no_leader_campaigns_and_votes_for_itself() -> None:
    node = Play()
    sent = node.pass_time(2.1)
    assert sent[:2] == [("b", AskVote(1, 0, 0)), ("c", AskVote(1, 0, 0))]
    assert (node.raft.role, node.raft.vote) == (Role.CANDIDATE, "a")


def test_who_hears_from_its_leader_does_not_campaign() -> None:
    node = Play()
    for _ in range(50):
        node.hear("b", append(1, 0, 0))
        assert of(AskVote, node.pass_time(0.5)) == []


def test_nodes_wait_for_different_times() -> None:
    waits = {fraction(seed, number) for seed in range(50) for number in range(50)}
    assert len(waits) == 2_500
    assert all(0 <= wait < 1 for wait in waits)
    assert 0.45 < sum(waits) / 2_500 < 0.55


def test_an_election_that_nobody_wins_is_followed_by_another() -> None:
    node = Play()
    sent = node.pass_time(6.0)
    assert [m.term for m in of(AskVote, sent, "b")] == list(range(1, node.raft.term + 1))
    assert node.raft.term >= 2


def test_a_majority_of_votes_elects_and_less_does_not() -> None:
    node = Play(members=Members(tuple("abcde")))
    node.raft.campaign(0.0)
    node.do()
    node.hear("b", Vote(1, True))
    node.hear("b", Vote(1, True))  # again: one vote
    assert node.role() is Role.CANDIDATE
    node.hear("c", Vote(1, True))
    assert node.role() is Role.LEADER


def test_a_majority_against_it_ends_a_candidacy() -> None:
    node = Play()
    node.raft.campaign(0.0)
    node.do()
    node.hear("b", Vote(1, False))
    assert node.role() is Role.CANDIDATE
    node.hear("c", Vote(1, False))
    assert node.role() is Role.FOLLOWER


def test_votes_of_learners_and_strangers_do_not_count() -> None:
    node = Play(members=Members(("a", "b", "c"), ("d",)))
    node.raft.campaign(0.0)
    assert {to for to, _ in node.do()} == {"b", "c"}
    node.hear("d", Vote(1, True))
    node.hear("x", Vote(1, True))
    assert node.role() is Role.CANDIDATE


def test_a_candidates_own_vote_counts_when_it_is_on_disk() -> None:
    node = Play(members=Members(("a",)))
    node.raft.campaign(0.0)
    ready = node.raft.ready()
    assert node.role() is Role.CANDIDATE
    node.write(ready)
    assert node.role() is Role.LEADER


def test_one_vote_in_a_term() -> None:
    node = Play()
    assert node.hear("b", AskVote(1, 0, 0)) == [("b", Vote(1, True))]
    assert node.hear("c", AskVote(1, 0, 0)) == [("c", Vote(1, False))]
    assert node.hear("b", AskVote(1, 0, 0)) == [("b", Vote(1, True))]  # the same again
    assert node.hear("c", AskVote(2, 0, 0)) == [("c", Vote(2, True))]


def test_a_vote_survives_a_restart() -> None:
    node = Play(term=1, vote="b")
    assert node.hear("c", AskVote(1, 0, 0)) == [("c", Vote(1, False))]


@pytest.mark.parametrize(
    ("log", "index", "term", "granted"),
    [
        ("11", 2, 1, True),
        ("11", 1, 1, False),  # shorter
        ("11", 3, 1, True),
        ("112", 2, 2, False),
        ("12", 9, 1, False),  # longer, and older
        ("11", 1, 2, True),  # shorter, and newer
        ("", 0, 0, True),
    ],
)
def test_votes_are_for_those_whose_log_is_at_least_as_new(
    log: str, index: int, term: int, granted: bool
) -> None:
    node = Play(log=log, term=2)
    assert node.hear("b", AskVote(3, index, term)) == [("b", Vote(3, granted))]


def test_who_is_no_voter_does_not_campaign() -> None:
    for members in (Members(("b", "c"), ("a",)), Members(("b", "c")), Members(())):
        node = Play(members=members)
        assert node.pass_time(9.0) == []
        assert node.raft.term == 0


def test_a_leader_that_removed_itself_and_nobody_knows_campaigns_all_the_same() -> None:
    """Its log is the longest: without it nobody could be elected, and with it nobody is harmed."""
    node = Play(members=Members(("a", "b")))
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.raft.change(Members(("b",)), 0.0)
    node.do()
    again = Play(members=Members(("a", "b")), term=1, vote="a")
    again.raft.log.append([Entry(1, 1), Entry(2, 1, members=Members(("b",)))])
    assert of(AskVote, again.pass_time(2.1), "b")
    again.hear("b", Vote(again.raft.term, True))  # its own does not count any more
    assert again.role() is Role.LEADER
    again.hear("b", Appended(again.raft.term, True, 3, 1))
    assert again.role() is Role.FOLLOWER
    assert again.pass_time(9.0) == []


# ---------------------------------------------------------------- pre-vote


def test_a_pre_vote_changes_nothing_for_anybody() -> None:
    node = Play(pre_vote=True, log="1", term=1)
    assert node.hear("b", AskVote(2, 1, 1, pre=True)) == [("b", Vote(2, True, pre=True))]
    assert node.hear("c", AskVote(2, 1, 1, pre=True)) == [("c", Vote(2, True, pre=True))]
    assert node.hear("c", AskVote(2, 0, 0, pre=True)) == [("c", Vote(1, False, pre=True))]
    assert (node.raft.term, node.raft.vote) == (1, None)


def test_a_term_begins_when_a_majority_would_vote_for_us() -> None:
    node = Play(pre_vote=True)
    node.raft.campaign(0.0)
    sent = node.do()
    assert of(AskVote, sent, "b") == [AskVote(1, 0, 0, pre=True)]
    assert (node.raft.role, node.raft.term) == (Role.PRECANDIDATE, 0)
    sent = node.hear("b", Vote(1, True, pre=True))
    assert of(AskVote, sent, "c") == [AskVote(1, 0, 0)]
    assert (node.raft.role, node.raft.term) == (Role.CANDIDATE, 1)
    node.hear("c", Vote(1, True, pre=True))  # late, and not a vote
    assert node.role() is Role.CANDIDATE


def test_a_node_that_is_cut_off_keeps_its_term() -> None:
    node = Play(pre_vote=True, term=3)
    node.pass_time(60.0)
    assert node.raft.term == 3


# ---------------------------------------------------------------- check-quorum


def test_who_hears_of_a_leader_votes_for_nobody_else() -> None:
    node = Play(check_quorum=True)
    node.hear("b", append(1, 0, 0))
    node.now = 0.9
    assert node.hear("c", AskVote(9, 0, 0)) == []
    assert node.hear("c", AskVote(9, 0, 0, pre=True)) == []
    assert node.raft.term == 1
    assert node.hear("c", AskVote(9, 0, 0, transfer=True)) == [("c", Vote(9, True))]


def test_a_node_that_has_just_started_votes_for_nobody_for_a_while() -> None:
    node = Play(check_quorum=True, term=3, now=50.0)
    assert node.hear("c", AskVote(4, 0, 0)) == []
    node.now = 51.0
    assert node.hear("c", AskVote(4, 0, 0)) == [("c", Vote(4, True))]


def test_a_leader_that_no_majority_answers_stops() -> None:
    node = Play(check_quorum=True)
    node.elect()
    for _ in range(20):
        node.pass_time(0.5)
        node.hear("b", Appended(1, True, 1, node.raft.round))
        assert node.role() is Role.LEADER
    node.pass_time(1.2)
    assert node.role() is not Role.LEADER


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


# ---------------------------------------------------------------- members


def leading(members: Members = ABC) -> Play:
    node = Play(members=members)
    others = [voter for voter in members.voters if voter != "a"]
    node.elect(*others)
    for other in (*others, *members.learners):
        node.hear(other, Appended(1, True, 1, 1))
    return node


def test_a_change_counts_from_the_moment_it_is_in_the_log() -> None:
    node = leading()
    node.raft.change(Members(("a", "b")), 0.0)
    assert node.raft.log.members == Members(("a", "b"))
    node.do()
    node.hear("b", Appended(1, True, 2, 1))
    assert node.raft.commit == 2


def test_a_change_that_is_cut_never_was() -> None:
    node = Play(log="1", term=1)
    change = Entry(2, 1, members=Members(("b", "c")))
    node.hear("b", Append(1, 1, 1, (change,), 0, 1))
    assert node.raft.log.members == Members(("b", "c"))
    node.hear("c", append(2, 1, 1, "2"))
    assert node.raft.log.members == ABC


def test_one_change_at_a_time() -> None:
    node = leading()
    node.raft.change(Members(("a", "b")), 0.0)
    with pytest.raises(ChangeError) as error:
        node.raft.change(Members(("a",)), 0.0)
    assert error.value.code == "BUSY"


def test_no_change_before_something_of_the_own_term_is_committed() -> None:
    node = Play()
    node.elect()
    with pytest.raises(ChangeError) as error:
        node.raft.change(Members(("a", "b")), 0.0)
    assert error.value.code == "NOT_READY"


@pytest.mark.parametrize(
    ("members", "code"),
    [
        (Members(()), "NO_VOTERS"),
        (Members(("a",)), "TOO_MANY"),
        (Members(("a", "b", "c"), ("c",)), "TWICE"),
        (Members(("a", "b", "c", "d")), "BEHIND"),  # has not been a learner
    ],
)
def test_changes_that_cannot_be(members: Members, code: str) -> None:
    node = leading()
    with pytest.raises(ChangeError) as error:
        node.raft.change(members, 0.0)
    assert error.value.code == code


def test_a_learner_becomes_a_voter_when_it_has_caught_up() -> None:
    node = leading()
    node.raft.change(ABC.with_learner("d"), 0.0)
    node.do()
    node.hear("b", Appended(1, True, 2, 1))
    with pytest.raises(ChangeError) as error:
        node.raft.change(node.raft.log.members.with_voter("d"), 0.0)
    assert error.value.code == "BEHIND"
    node.hear("d", Appended(1, True, 2, 1))
    node.raft.change(node.raft.log.members.with_voter("d"), 0.0)
    assert node.raft.log.members == Members(("a", "b", "c", "d"))


def test_who_is_removed_hears_that_it_is_committed() -> None:
    node = leading()
    node.raft.change(Members(("a", "b")), 0.0)
    node.do()
    sent = node.hear("b", Appended(1, True, 2, 1))
    assert of(Append, sent, "c")[-1].commit == 2
    assert "c" not in node.raft.progress


def test_a_leader_that_is_removed_leads_until_that_is_committed() -> None:
    node = leading()
    node.raft.change(Members(("b", "c")), 0.0)
    node.do()
    node.hear("b", Appended(1, True, 2, 1))
    assert node.role() is Role.LEADER  # it does not count itself
    node.hear("c", Appended(1, True, 2, 1))
    assert node.role() is Role.FOLLOWER


# ---------------------------------------------------------------- handing over


def test_the_lead_is_handed_over_when_the_other_has_everything() -> None:
    node = leading()
    node.raft.propose([b"x"], 0.0)
    node.raft.transfer("b", 0.0)
    assert of(Campaign, node.do()) == []
    sent = node.hear("b", Appended(1, True, 2, 1))
    assert of(Campaign, sent, "b") == [Campaign(1)]
    with pytest.raises(NotLeaderError, match="it hands over to b"):
        node.raft.propose([b"y"], 0.0)


def test_who_is_chosen_campaigns_at_once_and_says_why() -> None:
    node = Play("b", pre_vote=True, check_quorum=True)
    node.hear("a", append(1, 0, 0))
    sent = node.hear("a", Campaign(1))
    assert of(AskVote, sent, "c") == [AskVote(2, 0, 0, transfer=True)]


def test_a_leader_goes_on_when_nothing_comes_of_it() -> None:
    node = leading()
    node.raft.transfer("b", 0.0)
    node.pass_time(1.2)
    node.raft.propose([b"x"], node.now)


def test_a_leader_that_has_told_another_goes_on_in_a_new_term_if_it_needs_leases() -> None:
    node = Play(lease=0.7, check_quorum=True)
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.hear("c", Appended(1, True, 1, 1))
    node.raft.transfer("b", 0.0)
    sent = []
    for round in range(2, 14):  # b is told, and never campaigns; c answers
        sent += node.pass_time(0.1)
        if node.role() is Role.LEADER:
            sent += node.hear("c", Appended(1, True, 1, round))
            assert not node.raft.has_lease(node.now)
    assert of(AskVote, sent, "c") == [AskVote(2, 1, 1, transfer=True)]
    node.hear("c", Vote(2, True))
    assert node.role() is Role.LEADER
    node.hear("c", Appended(2, True, 2, node.raft.round))
    assert node.raft.has_lease(node.now)


def test_only_voters_are_handed_the_lead() -> None:
    node = leading(Members(("a", "b"), ("c",)))
    with pytest.raises(ChangeError, match="c is not a voter"):
        node.raft.transfer("c", 0.0)
    node.raft.transfer("a", 0.0)  # it leads
    node.raft.propose([b"x"], 0.0)


# ---------------------------------------------------------------- reads


def test_a_read_asks_a_majority_whether_we_still_lead() -> None:
    node = leading()
    node.raft.read(7, 0.0)
    sent = node.do()
    assert node.reads == []
    node.hear("b", Appended(1, True, 1, of(Append, sent, "b")[-1].round))
    assert node.reads == [(7, 1)]


def test_an_answer_to_an_earlier_round_does_not_answer_a_read() -> None:
    node = leading()
    earlier = node.raft.round
    node.raft.read(7, 0.0)
    node.do()
    node.hear("b", Appended(1, True, 1, earlier))
    assert node.reads == []


def test_reads_that_come_meanwhile_wait_for_the_next_round_together() -> None:
    node = leading()
    node.raft.read(1, 0.0)
    round = node.raft.round
    for number in (2, 3, 4):
        node.raft.read(number, 0.0)
    assert node.raft.round == round
    node.do()
    node.hear("b", Appended(1, True, 1, round))
    assert node.reads == [(1, 1)]
    assert node.raft.round == round + 1
    node.hear("b", Appended(1, True, 1, round + 1))
    assert node.reads == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_a_leader_answers_no_read_before_it_has_committed_in_its_term() -> None:
    node = Play(log="1", term=1)
    node.elect()
    node.raft.read(7, 0.0)
    node.do()
    node.hear("b", Appended(2, False, 1, node.raft.round, 0, 0))
    assert node.reads == []
    node.hear("b", Appended(2, True, 2, node.raft.round))
    node.hear("b", Appended(2, True, 2, node.raft.round))
    assert node.reads == [(7, 2)]


def test_a_lease_answers_at_once_until_it_ends() -> None:
    node = Play(lease=0.7, check_quorum=True)
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.now = 0.69
    node.raft.read(1, node.now)
    node.do()
    assert node.reads == [(1, 1)]
    node.now = 0.71
    node.raft.read(2, node.now)
    node.do()
    assert node.reads == [(1, 1)]


def test_a_lease_begins_when_its_round_began() -> None:
    node = Play(lease=0.7, check_quorum=True)
    node.elect()
    node.now = 0.5
    node.hear("b", Appended(1, True, 1, 1))
    assert node.raft.has_lease(0.69)
    assert not node.raft.has_lease(0.71)


def test_who_has_chosen_another_has_no_lease() -> None:
    node = Play(lease=0.7, check_quorum=True)
    node.elect()
    node.hear("b", Appended(1, True, 1, 1))
    node.raft.transfer("b", 0.0)
    assert not node.raft.has_lease(0.1)


def test_a_follower_asks_its_leader_and_without_one_a_read_fails() -> None:
    node = Play("b")
    node.raft.read(1, 0.0)
    node.do()
    assert node.reads == [(1, None)]
    node.hear("a", append(1, 0, 0))
    node.raft.read(2, 0.0)
    assert node.do() == [("a", AskRead(1, 2))]
    node.hear("a", ReadAt(1, 2, 5))
    assert node.reads == [(1, None), (2, 5)]


def test_reads_of_others_are_answered_and_given_up_with_the_lead() -> None:
    node = leading()
    node.hear("c", AskRead(1, 9))
    sent = node.hear("b", Appended(1, True, 1, node.raft.round))
    assert of(ReadAt, sent, "c") == [ReadAt(1, 9, 1)]
    node.hear("c", AskRead(1, 10))
    node.raft.read(11, 0.0)
    sent = node.hear("b", Vote(5, False))
    assert of(ReadAt, sent, "c") == [ReadAt(5, 10, None)]
    assert node.reads == [(11, None)]
    assert node.hear("c", AskRead(5, 12)) == [("c", ReadAt(5, 12, None))]


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
