"""Copies of a stream, rule by rule: a test for each rule at the top of `standing`, `replica` and `master`."""

from __future__ import annotations

import pytest
from verification.rewriting import rewritten

from railgun.broker.protocol.replication.master import Master, Phase
from railgun.broker.protocol.replication.messages import (
    Anew,
    Cut,
    CutHalf,
    Fetch,
    Fetched,
    FetchedGroups,
    FetchGroups,
    Has,
    HasGroups,
    Label,
    Push,
    PushGroups,
    Safe,
    SafeGroups,
    Say,
    Serve,
    Stands,
    Trim,
    Write,
    WriteGroups,
)
from railgun.broker.protocol.replication.replica import Replica
from railgun.broker.protocol.replication.standing import LOST, Copy, Runs, Standing, agree
from railgun.errors import ProtocolError

# ---------------------------------------------------------------- how a copy stands


def test_copies_agree_up_to_the_last_epoch_both_have() -> None:
    one = Standing(3, 0, 9, ((1, 4), (3, 9)))
    assert agree(one, Standing(3, 0, 7, ((1, 4), (3, 7)))) == 7
    assert agree(one, Standing(2, 0, 8, ((1, 6), (2, 8)))) == 4
    assert agree(one, Standing(2, 0, 8, ((2, 8),))) == 0


def test_a_copy_agrees_in_what_it_does_not_keep_any_more() -> None:
    assert agree(Standing(3, 0, 9, ((3, 9),)), Standing(2, 5, 5)) == 5


def test_nobody_knows_what_a_copy_has_below_the_first_message_of_the_other() -> None:
    """Something of an old epoch may lie there that was never safe."""
    one, other = Standing(3, 4, 9, ((3, 9),)), Standing(1, 0, 6, ((1, 6),))
    assert agree(one, other) < one.first


def test_the_higher_label_is_better_and_of_equals_the_longer_copy() -> None:
    assert Standing(2, 0, 1).rank > Standing(1, 0, 9).rank
    assert Standing(2, 0, 2).rank > Standing(2, 0, 1).rank
    assert Standing(0, 0, 0).rank > Standing(LOST, 0, 9).rank


def test_what_is_safe_is_never_cut_off() -> None:
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)), safe=5)
    with pytest.raises(ProtocolError, match="up to 5 are safe"):
        copy.cut(4)
    with pytest.raises(ProtocolError, match="up to 5 are safe"):
        copy.anew(4)
    copy.cut(5)
    assert (copy.end, copy.runs) == (5, [(1, 5)])


def test_a_copy_that_is_cut_where_it_begins_has_no_runs() -> None:
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)))
    copy.trim(4)
    copy.cut(4)
    assert copy.standing() == Standing(1, 4, 4)


# ---------------------------------------------------------------- a copy that follows

RUN: Runs = ((1, 5),)


def follower(label: int = 1, end: int = 5, runs: Runs = RUN, session: int = 7) -> Replica:
    """A replica of "a" in epoch 2."""
    replica = Replica(Copy.of(Standing(label, 0, end, runs, (1, 3))))
    replica.fenced("a", 2, session)
    return replica


def push(base: int, runs: Runs = (), **more: int | bool) -> Push:
    given: dict[str, int | bool] = {"before": 1, "start": 5, "safe": 0, "first": 0, **more}
    return Push(7, 2, base, runs=runs, **given)  # type: ignore[arg-type]


def says(end: int, labelled: bool = False, first: int = 0) -> Say:
    return Say("a", Has(7, end, labelled, first))


def test_a_replica_hears_the_last_session_only() -> None:
    replica = follower(session=8)
    assert replica.pushed(push(5, ((2, 9),))) == []
    assert replica.pushed_groups(PushGroups(7, 2, 0, whole=True)) == []
    assert replica.copy.standing() == Standing(1, 0, 5, RUN, (1, 3))


def test_a_replica_cuts_off_what_the_master_has_not() -> None:
    replica = follower()
    assert replica.pushed(push(3, ((2, 4),), start=3)) == [
        Cut(3),
        Write(3, ((2, 4),)),
        Label(2),
    ]
    assert replica.copy.standing().runs == ((1, 3), (2, 4))


def test_a_replica_never_cuts_off_what_is_safe() -> None:
    replica = follower()
    replica.pushed(push(5, safe=5))
    assert replica.copy.safe == 5
    with pytest.raises(ProtocolError):
        replica.pushed(push(4))


def test_a_replica_is_labelled_when_it_is_on_disk_up_to_the_start() -> None:
    replica = follower(end=3, runs=((1, 3),))
    assert replica.pushed(push(3, ((1, 5),))) == [Write(3, ((1, 5),))]
    assert replica.wrote(4) == [says(4)]
    assert replica.wrote(5) == [Label(2)]
    assert replica.copy.label == 1
    assert replica.labelled(2) == [says(5, labelled=True)]
    assert replica.copy.label == 2


def test_before_the_master_has_said_where_the_epoch_starts_there_is_no_label() -> None:
    replica = follower()
    assert replica.pushed_groups(PushGroups(7, 2, 0, whole=True)) == [WriteGroups(2, 0, True)]
    assert replica.wrote_groups(2, 0) == [Say("a", HasGroups(7, 2, 0))]


def test_what_does_not_follow_is_not_taken_and_says_nothing_about_the_start() -> None:
    for wrong in (push(6, ((2, 9),)), push(5, ((2, 9),), before=2)):
        replica = follower()
        assert replica.pushed(wrong) == [
            Say("a", Stands(7, Standing(1, 0, 5, RUN, (1, 3)))),
        ]
        assert replica.copy.end == 5
        assert replica.start is None


def test_what_was_sent_before_a_replica_told_how_it_stands_is_not_heard() -> None:
    """It would cut off what was taken, and counted, since."""
    replica = follower()
    replica.pushed(push(5, ((2, 7),)))
    assert replica.failed() == [Say("a", Stands(7, Standing(1, 0, 5, RUN, (1, 3))))]
    assert replica.pushed(push(7, ((2, 9),))) == []
    replica.pushed(push(5, ((2, 7),), turn=1))
    assert replica.pushed(push(5, ((2, 7),))) == []
    assert replica.copy.end == 7


def test_what_could_not_be_written_is_not_there_and_a_label_is_asked_for_again() -> None:
    replica = follower()
    assert replica.pushed(push(5, ((2, 7),))) == [Write(5, ((2, 7),)), Label(2)]
    replica.pushed_groups(PushGroups(7, 2, 0, whole=True))
    assert replica.failed() == [Say("a", Stands(7, Standing(1, 0, 5, RUN, (1, 3))))]
    assert replica.pushed(push(5, turn=1)) == [Label(2), says(5)]
    assert replica.failed_groups((1, 2)) == [Say("a", Stands(7, Standing(1, 0, 5, RUN, (1, 2))))]


def test_readers_see_what_is_safe_and_on_this_disk() -> None:
    replica = follower(label=2)
    assert replica.pushed(push(5, ((2, 9),), safe=7)) == [Write(5, ((2, 9),)), Safe(5)]
    assert replica.wrote(6) == [Safe(6), says(6, labelled=True)]
    assert replica.wrote(9) == [Safe(7), says(9, labelled=True)]


def test_a_replica_trims_what_is_on_disk_only() -> None:
    """Else what is not there yet, and fails to get there, would be safe by its own word."""
    replica = follower(label=2)
    assert replica.pushed(push(5, ((2, 9),), safe=9, first=8)) == [Write(5, ((2, 9),)), Trim(5)]
    assert replica.wrote(9) == [Trim(8), Safe(9), says(9, labelled=True, first=8)]


def test_a_replica_that_has_nothing_in_common_begins_anew() -> None:
    replica = follower(end=3, runs=((1, 3),))
    commands = replica.pushed(push(9, ((2, 12),), start=9, first=9, anew=True))
    assert commands == [Anew(9), Write(9, ((2, 12),)), Label(2)]
    assert replica.copy.standing() == Standing(1, 9, 12, ((2, 12),), (1, 3))


def test_groups_come_whole_and_then_without_a_gap() -> None:
    replica = follower()
    stands = Say("a", Stands(7, Standing(1, 0, 5, RUN, (1, 3))))
    assert replica.pushed_groups(PushGroups(7, 2, 4, whole=False)) == [stands]
    whole = PushGroups(7, 2, 4, whole=True, turn=1)
    assert replica.pushed_groups(whole) == [WriteGroups(2, 4, whole=True)]
    change = PushGroups(7, 2, 5, whole=False, turn=1)
    assert replica.pushed_groups(change) == [WriteGroups(2, 5, whole=False)]
    assert replica.wrote_groups(2, 4) == [Say("a", HasGroups(7, 2, 4))]


def test_a_lost_copy_gets_its_label_when_it_has_all_that_is_safe() -> None:
    """It may have been counted for that, in this epoch: the start is not enough."""
    replica = follower(label=2, end=9, runs=((1, 5), (2, 9)))
    replica.copy.cut(6)
    replica.has_cut(6)
    replica.lost()
    assert replica.copy.label == LOST
    replica.pushed_groups(PushGroups(7, 2, 0, whole=True, turn=1))
    replica.wrote_groups(2, 0)
    assert replica.pushed(push(6, ((2, 8),), before=2, safe=9, turn=1)) == [
        Write(6, ((2, 8),)),
        Safe(6),
    ]
    assert replica.wrote(8) == [Safe(8), says(8)]
    replica.pushed(push(8, ((2, 9),), before=2, safe=9, turn=1))
    assert replica.wrote(9) == [Safe(9), Label(2)]


def test_a_lost_copy_gets_its_label_when_it_has_the_groups() -> None:
    replica = follower(label=2)
    replica.lost()
    assert replica.pushed(push(5, turn=1)) == [says(5)]
    replica.pushed_groups(PushGroups(7, 2, 4, whole=True, turn=1))
    assert replica.wrote_groups(2, 4) == [Say("a", HasGroups(7, 2, 4)), Label(2)]


def test_a_label_that_was_being_written_is_none_after_a_loss() -> None:
    replica = follower()
    assert replica.pushed(push(5)) == [Label(2), says(5)]
    replica.lost()
    assert replica.labelled(2) == []
    assert replica.copy.label == LOST


# ---------------------------------------------------------------- the copy that writes

ABC = ("a", "b", "c")


def standing(label: int, end: int, runs: Runs = (), *, first: int = 0, groups: int = 0) -> Standing:
    return Standing(label, first, end, runs or (((1, end),) if end > first else ()), (groups, 0))


def master(mine: Standing | None = None, *more: tuple[str, ...], epoch: int = 2) -> Master:
    """Node a, which begins in an epoch."""
    master = Master("a", Copy.of(mine or standing(1, 5, groups=1)), epoch, [ABC, *more])
    assert master.begin() == []
    return master


def leader(end: int = 5, **peers: Standing) -> Master:
    """One that leads in epoch 2, after it has heard of b, who has nothing better."""
    one = master(standing(1, end, groups=1))
    for node, stands in (peers or {"b": standing(1, end, groups=1)}).items():
        one.stands(node, 1, stands)
    assert one.phase is Phase.LABEL
    assert Serve(end) in one.labelled(2)
    return one


def test_a_master_waits_for_a_majority() -> None:
    one = master()
    assert one.labelled(2) == []
    assert one.stands("b", 1, standing(1, 5, groups=1)) == [CutHalf()]
    assert one.phase is Phase.LABEL


def test_a_master_leads_with_whole_units_only() -> None:
    """What its log ends with may be a part of one: that is cut off before it labels its copy."""
    one = master()
    assert one.stands("b", 1, standing(1, 5, groups=1)) == [CutHalf()]
    assert one.cut_half(3) == [Label(2, groups=True)]
    assert one.copy.end == 3
    assert Serve(3) in one.labelled(2)
    assert one.cut_half(3) == []


def test_a_part_of_a_unit_is_never_safe() -> None:
    one = leader()
    one.appended(5, 2, 9, [(5, 9)])
    one.has("b", Has(1, 7, labelled=True, first=0))
    assert one.copy.safe == 5
    assert Safe(9) in one.has("b", Has(1, 9, labelled=True, first=0))
    one.appended(9, 2, 12)
    assert Safe(10) in one.has("b", Has(1, 10, labelled=True, first=0))


def test_a_replica_shows_no_part_of_a_unit() -> None:
    replica = follower(label=2, end=5, runs=((1, 5),))
    replica.pushed(push(5, ((2, 7),), before=1, safe=9))
    assert not any(isinstance(told, Safe) for told in replica.wrote(7, 0))
    assert replica.copy.safe == 5
    replica.pushed(push(7, ((2, 9),), before=2, safe=9))
    assert Safe(9) in replica.wrote(9, 9)


def test_a_master_waits_for_a_majority_of_the_set_that_was_active_too() -> None:
    one = master(None, ("a", "d", "e"))
    assert one.stands("b", 1, standing(1, 5)) == []
    assert one.stands("d", 1, standing(1, 5)) == [CutHalf()]


def test_a_lost_copy_counts_for_nobody_not_even_its_own_node() -> None:
    one = master()
    assert one.stands("b", 1, standing(LOST, 9)) == []
    assert one.stands("c", 1, standing(1, 5, groups=1)) == [CutHalf()]
    two = master(standing(LOST, 5, groups=1))
    assert two.stands("b", 1, standing(0, 0)) == []
    assert two.stands("c", 1, standing(0, 0)) == [
        Cut(0),
        Say("b", FetchGroups(1)),
    ]


def test_the_higher_label_is_chosen_though_it_be_shorter() -> None:
    one = master(standing(1, 9, groups=1))
    best = standing(2, 6, ((1, 3), (2, 6)), groups=1)
    assert one.stands("b", 1, best) == [Cut(3), Say("b", Fetch(1, 3))]


def test_a_master_fetches_what_it_lacks_before_it_labels_its_copy() -> None:
    one = master()
    assert one.stands("b", 1, standing(1, 8, groups=1)) == [Say("b", Fetch(1, 5))]
    assert one.fetched("b", Fetched(1, 5, ((1, 7),))) == [
        Write(5, ((1, 7),)),
        Say("b", Fetch(1, 7)),
    ]
    assert one.fetched("b", Fetched(1, 7, ((1, 8),))) == [Write(7, ((1, 8),))]
    assert one.wrote(7) == []
    assert one.wrote(8) == [CutHalf()]


def test_a_master_that_has_nothing_in_common_with_the_best_copy_begins_anew() -> None:
    one = master(standing(1, 6))
    best = standing(2, 9, ((2, 9),), first=4)
    assert one.stands("b", 1, best) == [Anew(4), Say("b", Fetch(1, 4))]


def test_a_master_fetches_the_groups_of_the_highest_number() -> None:
    one = master()
    assert one.stands("b", 1, standing(1, 5, groups=2)) == [Say("b", FetchGroups(1))]
    assert one.fetched_groups("b", FetchedGroups(1, 2, 0)) == [WriteGroups(2, 0, whole=True)]
    assert one.wrote_groups(2, 0) == [CutHalf()]


def test_a_master_gathers_again_if_whom_it_fetches_from_is_gone() -> None:
    one = master()
    one.stands("b", 1, standing(1, 8, groups=1))
    assert one.gone("b") == []
    assert one.phase is Phase.GATHER
    assert one.stands("c", 1, standing(1, 5, groups=1)) == [CutHalf()]


def test_a_master_gathers_again_if_whom_it_fetches_from_has_lost_something() -> None:
    """What that tells now is not what has to be fetched."""
    one = master()
    one.stands("b", 1, standing(1, 8, groups=1))
    assert one.stands("b", 1, standing(LOST, 5)) == []
    assert one.phase is Phase.GATHER


def test_what_cannot_be_read_is_looked_for_elsewhere_and_its_copy_is_fed_from_where_it_agrees() -> (
    None
):
    one = master()
    one.stands("b", 1, standing(1, 8, groups=1))
    assert one.fetched("b", Fetched(1, 5, ())) == []
    assert one.stands("c", 1, standing(1, 5, groups=1)) == [CutHalf()]
    one.labelled(2)
    pushed = one.push("b", 5)
    assert pushed is not None
    assert pushed.base == 5


def test_states_that_were_asked_of_somebody_else_do_not_end_the_fetching() -> None:
    one = master()
    one.stands("b", 1, standing(1, 9, groups=2))
    one.fetched_groups("b", FetchedGroups(1, 2, 0))
    one.gone("b")
    one.stands("c", 1, standing(1, 9, groups=3))
    assert one.wrote_groups(2, 0) == []
    assert one.needs_groups


def test_the_epoch_starts_where_the_log_ends() -> None:
    one = leader(end=5)
    pushed = one.push("b", 9)
    assert pushed == Push(1, 2, base=5, before=1, start=5, safe=0, first=0)


def test_a_replica_is_fed_from_where_it_agrees() -> None:
    one = leader(b=standing(1, 5, groups=1), c=standing(1, 7, ((1, 3), (9, 7))))
    pushed = one.push("c", 4)
    assert pushed is not None
    assert (pushed.base, pushed.runs) == (3, ((1, 4),))
    again = one.push("c", 9)
    assert again is not None
    assert (again.base, again.runs) == (4, ((1, 5),))


def test_a_replica_that_is_too_slow_for_what_is_kept_begins_anew() -> None:
    one = leader(b=standing(1, 5, groups=1), c=standing(0, 2, ((1, 2),)))
    one.has("b", Has(1, 5, labelled=True, first=0))
    one.trimmed(4)
    pushed = one.push("c", 5)
    assert pushed is not None
    assert (pushed.base, pushed.anew, pushed.runs) == (4, True, ((1, 5),))


def test_a_copy_counts_when_it_is_labelled_and_not_before_the_start_is_safe() -> None:
    one = leader()
    one.appended(5, 2, 9)
    assert one.has("b", Has(1, 9, labelled=False, first=0)) == []
    assert one.has("b", Has(1, 4, labelled=True, first=0)) == []
    assert one.has("b", Has(1, 7, labelled=True, first=0)) == [Safe(7)]
    assert one.has("b", Has(1, 9, labelled=True, first=0)) == [Safe(9)]


def test_what_is_not_on_the_masters_own_disk_is_not_pushed() -> None:
    one = leader()
    pushed = one.push("b", 9)
    assert pushed is not None
    assert pushed.end == 5


def test_a_change_of_groups_is_safe_when_a_majority_has_it() -> None:
    one = leader()
    one.number = 1
    assert one.wrote_groups(2, 1) == []
    assert one.has_groups("b", HasGroups(1, 1, 9)) == []
    assert one.has_groups("b", HasGroups(1, 2, 0)) == [SafeGroups(0)]
    assert one.has_groups("b", HasGroups(1, 2, 1)) == [SafeGroups(1)]


def test_groups_are_sent_whole_first() -> None:
    one = leader()
    assert one.push_groups("b", whole=False, number=1) is None
    assert one.push_groups("b", whole=True, number=0) == PushGroups(1, 2, 0, whole=True)
    assert one.push_groups("b", whole=False, number=2) is None
    assert one.push_groups("b", whole=False, number=1) == PushGroups(1, 2, 1, whole=False)


def test_a_master_that_goes_on_labels_its_copy_and_takes_what_comes_meanwhile() -> None:
    copy = Copy.of(standing(1, 5, groups=1))
    one = Master("a", copy, 2, [ABC])
    assert one.go_on() == [Label(2, groups=True)]
    assert one.appended(5, 1, 7) == []
    assert one.labelled(2)[0] == Serve(7)
    assert copy.runs == [(1, 7)]


def test_what_a_replica_has_said_to_have_counts_on_when_its_session_is_over() -> None:
    one = leader()
    one.has("b", Has(1, 5, labelled=True, first=0))
    one.has_groups("b", HasGroups(1, 2, 0))
    one.gone("b")
    assert one.active
    assert one.push("b", 9) is None
    one.stands("b", 2, standing(LOST, 5, groups=2))
    assert not one.active


def test_what_a_replica_tells_in_the_middle_of_a_session_may_not_be_on_disk() -> None:
    one = leader()
    one.appended(5, 2, 9)
    one.has("b", Has(1, 6, labelled=True, first=0))
    one.push("b", 9)
    told = standing(2, 9, ((1, 5), (2, 9)), groups=1)
    assert one.stands("b", 1, told) == []
    pushed = one.push("b", 9)
    assert pushed is not None
    assert (pushed.base, pushed.turn) == (9, 1)
    assert one.has("b", Has(1, 9, labelled=True, first=0)) == [Safe(9)]


def test_what_is_of_an_old_session_is_not_heard() -> None:
    one = leader()
    one.gone("b")
    one.stands("b", 1, standing(1, 0))  # came late
    assert one.push("b", 5) is None
    one.stands("b", 2, standing(1, 5))
    assert one.has("b", Has(1, 5, labelled=True, first=0)) == []
    assert one.has_groups("b", HasGroups(1, 2, 0)) == []
    assert not one.active


def test_an_epoch_is_active_when_a_majority_has_the_label_and_the_groups() -> None:
    one = leader()
    one.has("b", Has(1, 5, labelled=True, first=0))
    assert not one.active
    one.has_groups("b", HasGroups(1, 2, 0))
    assert one.active
    assert one.caught_up("b")
    assert not one.caught_up("c")
    assert not one.all_have(5)


def check_who_has_all() -> None:
    """`all_have` and `caught_up`, with replicas that lack the label, the groups, a session, or messages."""
    one = leader(b=standing(1, 5, groups=1), c=standing(1, 5, groups=1))
    assert not one.all_have(5)
    for node in "bc":
        one.has(node, Has(1, 5, labelled=False, first=0))
        one.has_groups(node, HasGroups(1, 2, 0))
    # The messages are there, but the copies are not of this epoch yet: a later master may not choose them.
    assert not one.all_have(5)
    assert not one.caught_up("b")
    one.has("b", Has(1, 5, labelled=True, first=0))
    assert one.caught_up("b")
    assert not one.caught_up("c")
    assert not one.all_have(5)
    one.has("c", Has(1, 5, labelled=True, first=0))
    assert one.all_have(5)
    assert not one.all_have(6)
    one.appended(5, 2, 7)
    assert one.all_have(5)
    assert not one.all_have(7)  # on its own disk only
    one.has("b", Has(1, 7, labelled=True, first=0))
    assert one.copy.safe == 7
    assert one.caught_up("b")
    assert not one.caught_up("c")  # two messages behind what is safe
    assert not one.all_have(7)
    one.has("c", Has(1, 7, labelled=True, first=0))
    assert one.all_have(7)
    # Without a session nobody knows whether a replica still has what it said to have.
    one.gone("c")
    assert not one.caught_up("c")
    assert one.caught_up("b")
    one.stands("c", 2, standing(2, 7, ((1, 5), (2, 7)), groups=1))
    assert not one.caught_up("c")  # its groups are of an older epoch
    one.has_groups("c", HasGroups(2, 2, 0))
    assert one.caught_up("c")
    alone = Master("a", Copy.of(standing(1, 5, groups=1)), 2, [("a",)])
    alone.begin()
    alone.labelled(2)
    assert alone.all_have(5)
    assert not alone.all_have(6)  # not even on its own disk


def test_a_replica_has_all_only_with_the_label_the_groups_and_a_session() -> None:
    check_who_has_all()


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        (
            "all_have",
            "p is not None and p.labelled and p.end >= end",
            "p is not None and p.end >= end",
        ),
        (
            "all_have",
            "p is not None and p.labelled and p.end >= end",
            "p is not None and p.labelled",
        ),
        ("all_have", "self.copy.durable >= end and all(", "all("),
        (
            "all_have",
            "return self.copy.durable >= end and all(",
            "return self.copy.durable >= end and any(",
        ),
        ("caught_up", "or peer is None or not peer.labelled:", "or peer is None:"),
        ("caught_up", "if peer.session is None:", "if False:"),
        ("caught_up", " and peer.groups[0] == self.epoch", ""),
        ("caught_up", "peer.end >= self.copy.safe and ", ""),
    ],
)
def test_mutants_of_who_has_all_are_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str, old: str, new: str
) -> None:
    monkeypatch.setattr(*rewritten(Master, rule, (old, new)))
    with pytest.raises(AssertionError):
        check_who_has_all()


def test_what_another_copy_does_not_keep_any_more_does_not_come_back() -> None:
    """A majority has let go of it, so one of any majority has."""
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)))
    master = Master("a", copy, 2, [("a", "b", "c")])
    assert master.begin() == []
    commands = master.stands("b", 1, Standing(1, 5, 9, ((1, 9),)))
    assert commands == [Trim(5), CutHalf()]
    assert (copy.first, copy.end) == (5, 9)


def test_a_majority_tells_what_is_not_kept_any_more() -> None:
    copy = Copy.of(Standing(1, 0, 9, ((1, 9),)))
    master = Master("a", copy, 2, [("a", "b", "c")])
    master.go_on()
    master.labelled(2)
    master.trimmed(4)
    assert master.kept_from() is None
    master.stands("b", 1, Standing(1, 0, 9, ((1, 9),)))
    master.has("b", Has(1, 9, True, 0))
    assert master.kept_from() == 0
    master.has("b", Has(1, 9, True, 4))
    assert master.kept_from() == 4
