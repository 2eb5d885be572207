"""Raft, rule by rule: changes of members, and handing over the lead."""

from __future__ import annotations

import pytest
from tests.broker.protocol.raft_play import ABC, Play, append, leading, of

from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskVote,
    Campaign,
    ChangeError,
    Entry,
    Members,
    NotLeaderError,
    Vote,
)
from railgun.broker.protocol.raft.state import Role

# ---------------------------------------------------------------- members


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
