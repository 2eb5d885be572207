"""Raft, rule by rule: reads by a round or a lease."""

from __future__ import annotations

from tests.broker.protocol.raft_play import Play, append, leading, of

from railgun.broker.protocol.raft.messages import Append, Appended, AskRead, ReadAt, Vote


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
