"""Raft, rule by rule: terms, elections, pre-vote and check-quorum."""

from __future__ import annotations

import pytest
from tests.broker.protocol.raft_play import Play, append, of

from railgun.broker.protocol.raft.messages import Appended, AskVote, Entry, Hard, Members, Vote
from railgun.broker.protocol.raft.state import Role, fraction

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
