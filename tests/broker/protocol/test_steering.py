"""Steering: one test for each rule, and clusters that live through losses by what it decides."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.protocol.cluster_play import Play, node

from railgun.broker.protocol.metadata.options import OPTIONS
from railgun.broker.protocol.metadata.reports import Report
from railgun.broker.protocol.metadata.steering import (
    MAX_VOTERS,
    ChangeMembers,
    Decision,
    Propose,
    Steering,
    Transfer,
)
from railgun.broker.protocol.raft.messages import Members

ELECTION, PATIENCE = (float(OPTIONS[key].default or 0) for key in ("election", "patience"))


class Led:
    """A cluster that `a` leads since time 0; everybody who is up reports when time passes."""

    def __init__(self, *ids: str, crowned: str | None = "a", **play: Any) -> None:
        self.play = Play(*ids, **play)
        self.members = Members(tuple(sorted(ids)))
        self.leader = "a"
        self.steering = Steering()
        self.steering.began(0.0)
        self.now = 0.0
        self.up = set(ids)
        self.reports: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, float] = {}
        if crowned is not None:
            self.play.crown(crowned)

    @property
    def metadata(self) -> Any:
        return self.play.metadata

    def report(self, id: str) -> dict[str, Any]:
        """What is true, and what a test wants it to tell."""
        regions = {
            name: {"epoch": region.epoch, "caught_up": list(region.learning), "active": True}
            for name, region in self.metadata.regions.items()
            if region.master == id
        }
        return {"regions": regions, "applied": self.metadata.index} | self.reports.get(id, {})

    def pass_time(self, seconds: float = 0.0) -> None:
        """In steps in which everybody who is up reports."""
        end = self.now + seconds
        while True:
            for id in sorted(self.up):
                self.steering.heard(id, self.report(id), self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.2, end)

    def decide(self) -> list[Decision]:
        return self.steering.decide(self.metadata, self.members, self.leader, self.now)

    def proposed(self) -> list[dict[str, Any]]:
        return [one.command for one in self.decide() if isinstance(one, Propose)]

    def crowned(self, region: str = "global") -> str | None:
        """Who is to be master next."""
        for command in self.proposed():
            if command["do"] == "master" and command["region"] == region:
                assert command["epoch"] == self.play.region(region).epoch + 1
                return str(command["master"])
        return None

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Propose):
                self.metadata.apply(self.metadata.index + 1, one.command)
            elif isinstance(one, ChangeMembers):
                assert len(set(one.members.voters) ^ set(self.members.voters)) <= 1
                assert one.members.voters
                self.members = one.members
            else:
                self.lead(one.to)

    def lead(self, leader: str) -> None:
        self.leader = leader
        self.steering = Steering()
        self.steering.began(self.now)

    def settle(self, most: float = 60.0) -> list[Decision]:
        """Carry out everything until there is nothing to do for longer than patience; what it was."""
        done: list[Decision] = []
        quiet, end = self.now, self.now + most
        while self.now < end and self.now - quiet <= PATIENCE + ELECTION:
            self.pass_time(0.2)
            decisions = self.decide()
            self.carry_out(decisions)
            done += decisions
            if decisions:
                quiet = self.now
        return done


# --- Masters --------------------------------------------------------------------------------------


def test_a_region_without_a_master_gets_one_when_all_who_vote_were_heard() -> None:
    led = Led("a", "b", "d", crowned=None)
    led.up = {"a", "b"}
    led.pass_time()
    assert led.decide() == []
    led.up.add("d")
    led.pass_time()
    assert led.crowned() == "a"


def test_or_when_patience_with_them_is_over() -> None:
    led = Led("a", "b", crowned=None)
    led.up = {"a"}
    led.pass_time(PATIENCE)
    assert led.crowned() is None
    led.pass_time(0.1)
    assert led.crowned() == "a"


def test_masters_spread_over_nodes() -> None:
    both = {"global": "master", "eu": "master", "us": "master"}
    led = Led("a", "b", "d", crowned=None, regions=dict.fromkeys("abd", both))
    led.pass_time()
    masters = [command["master"] for command in led.proposed()]
    assert sorted(masters) == ["a", "b", "d"]


def test_the_master_that_lacks_least_is_chosen() -> None:
    led = Led("a", "b", "d", crowned=None)
    led.reports = {"a": {"lag": 5}, "b": {"lag": 4}, "d": {"lag": 9}}
    led.pass_time()
    assert led.crowned() == "b"
    led.reports["d"] = {"lag": 9, "regions": {"global": {"lag": 0}}}
    led.pass_time()
    assert led.crowned() == "d"


def test_a_silent_master_is_replaced_after_patience_and_not_before() -> None:
    led = Led("a", "b", "d", crowned="b")
    led.pass_time(10.0)
    led.up.discard("b")
    led.pass_time(PATIENCE)
    assert led.crowned() is None
    led.pass_time(0.1)
    assert led.crowned() == "a"


def test_a_new_leader_has_patience_with_all() -> None:
    led = Led("a", "b", "d", crowned="b")
    led.pass_time(10.0)
    led.up.discard("b")
    led.lead("d")
    led.pass_time(PATIENCE)
    assert led.crowned() is None
    led.pass_time(0.1)
    assert led.crowned() == "a"


def test_who_leads_again_knows_nothing_of_last_time() -> None:
    led = Led("a", "b", "d", crowned="b", regions={"a": {}})
    led.pass_time(10.0)
    led.steering.began(led.now)
    led.up.discard("d")
    led.reports["b"] = {"trouble": "the disk is broken"}
    led.pass_time(ELECTION)
    assert led.crowned() is None  # nobody has heard of d since
    led.up.add("d")
    led.pass_time()
    assert led.crowned() == "d"


def test_a_silent_master_is_not_replaced_while_a_lease_is_good() -> None:
    led = Led("a", "b", crowned="b")
    led.up.discard("b")
    led.steering.granted("b", 20.0)
    led.steering.granted("b", 15.0)  # the latest one counts
    led.pass_time(19.9)
    assert led.crowned() is None
    led.pass_time(0.1)
    assert led.crowned() == "a"


def test_without_somebody_fit_nothing_happens() -> None:
    regions = {"d": {"global": "replica"}}
    led = Led("a", "b", "d", "e", crowned="b", regions=regions)
    led.up -= {"b", "e"}
    led.reports["a"] = {"trouble": "the disk is broken"}
    led.pass_time(PATIENCE + 1)
    assert led.crowned() is None
    led.up.add("e")
    led.pass_time()
    assert led.crowned() == "e"


def test_who_only_learns_is_not_made_master() -> None:
    led = Led("a", "b", crowned="b", regions={"a": {}})
    led.play.do("node", node=node("a"))
    led.up.discard("b")
    led.pass_time(PATIENCE + 1)
    assert led.play.region().learning == ("a",)
    assert led.crowned() is None


def test_a_master_in_trouble_is_replaced_after_its_lease_and_gets_no_more() -> None:
    led = Led("a", "b", crowned="b")
    led.pass_time(10.0)
    led.steering.granted("b", 10.5)
    led.reports["b"] = {"trouble": "the disk is broken"}
    led.pass_time()
    assert led.crowned() is None
    why = led.steering.refuses(led.metadata, led.members, "a", "b", led.now)
    assert "the disk is broken" in why
    led.pass_time(0.5)
    assert led.crowned() == "a"


def test_a_master_nobody_can_follow_keeps_its_lease_even_in_trouble() -> None:
    led = Led("a", "b", crowned="b", regions={"a": {"global": "replica"}})
    led.reports["b"] = {"trouble": "the disk is broken"}
    led.pass_time(10.0)
    assert led.steering.refuses(led.metadata, led.members, "a", "b", led.now) == ""
    assert led.crowned() is None


def test_a_master_without_room_is_replaced_by_one_that_has() -> None:
    led = Led("a", "b", "c", crowned="b")
    led.reports["a"] = led.reports["b"] = {"full": True}
    led.pass_time(10.0)
    assert "room" in led.steering.refuses(led.metadata, led.members, "a", "b", led.now)
    assert led.crowned() == "c"


def test_a_master_without_room_stays_while_nobody_has_more() -> None:
    led = Led("a", "b", "c", crowned="b")
    led.reports |= {id: {"full": True} for id in "abc"}
    led.pass_time(10.0)
    assert led.steering.refuses(led.metadata, led.members, "a", "b", led.now) == ""
    assert led.crowned() is None
    led.reports["b"] = {"full": True, "trouble": "the disk is broken"}  # which is worse
    led.pass_time(10.0)
    assert led.crowned() == "a"


def test_a_master_that_does_not_want_to_be_one_any_more_is_replaced() -> None:
    led = Led("a", "b", crowned="b")
    led.play.do("node", node=node("b", {"global": "replica"}))
    led.pass_time(10.0)
    assert led.steering.refuses(led.metadata, led.members, "a", "b", led.now) != ""
    assert led.crowned() == "a"


def test_what_a_predecessor_granted_is_waited_for() -> None:
    led = Led("a", "b", "d", crowned="b")
    led.pass_time(10.0)
    led.lead("d")  # handed over: nobody has waited for an election
    led.reports["b"] = {"trouble": "the disk is broken"}
    led.pass_time(ELECTION - 0.1)
    assert led.crowned() is None
    led.pass_time(0.2)
    assert led.crowned() == "a"


def test_a_master_that_was_started_again_gets_the_next_epoch() -> None:
    led = Led("a", "b", crowned="b")
    epoch = led.play.region().epoch
    led.steering.granted("b", 100.0)
    led.reports["b"] = {"regions": {"global": {"epoch": epoch, "anew": True}}}
    led.pass_time()
    assert led.crowned() == "b"
    led.carry_out(led.decide())
    led.pass_time()
    assert led.decide() == []  # that was of the epoch before


# --- Sets -----------------------------------------------------------------------------------------


def test_an_epoch_becomes_active_when_its_master_says_so() -> None:
    led = Led("a", "b", crowned=None)
    led.play.crown("a", active=False)
    epoch = led.play.region().epoch
    for told in ({"epoch": epoch, "active": False}, {"epoch": epoch - 1, "active": True}, {}):
        led.reports["a"] = {"regions": {"global": told}}
        led.pass_time()
        assert led.decide() == []
    led.reports.clear()
    led.pass_time()
    assert led.proposed() == [{"do": "active", "region": "global", "epoch": epoch}]


def test_who_has_caught_up_is_promoted_one_at_a_time() -> None:
    led = Led("a")
    for id in ("b", "d"):
        led.play.do("node", node=node(id))
        led.up.add(id)
    led.members = Members(("a", "b", "d"))
    epoch = led.play.region().epoch
    led.reports["a"] = {"regions": {"global": {"epoch": epoch, "caught_up": ["x", "d"]}}}
    led.pass_time()
    promote = {"do": "promote", "region": "global", "node": "d", "epoch": epoch}
    assert led.proposed() == [promote]
    assert led.proposed() == [promote]  # it remembers nothing
    led.carry_out(led.decide())
    led.reports["a"] = {"regions": {"global": {"epoch": epoch + 1, "caught_up": ["b"]}}}
    led.pass_time()
    assert led.proposed() == []  # the epoch is not active yet
    led.play.activate()
    assert [one["node"] for one in led.proposed()] == ["b"]


@pytest.mark.parametrize("why", ["dead", "trouble", "leaves"])
def test_who_is_not_well_or_is_to_leave_is_not_promoted(why: str) -> None:
    led = Led("a", "b", crowned=None, regions={"b": {}})
    led.play.crown("a")
    led.play.do("node", node=node("b"))
    if why == "dead":
        led.up.discard("b")
    elif why == "trouble":
        led.reports["b"] = {"trouble": "x"}
    led.pass_time()
    if why == "leaves":
        led.play.do("leave", node="b")
    assert not [one for one in led.proposed() if one["do"] == "promote"]


def test_who_does_not_name_a_region_any_more_is_demoted_after_promotions() -> None:
    led = Led("a", "b", "d", crowned=None, regions={"d": {}})
    led.play.crown("a")
    led.play.do("node", node=node("b", {}))
    led.play.do("node", node=node("d"))
    led.pass_time()
    assert [one["do"] for one in led.proposed()] == ["promote"]
    led.settle()
    assert led.play.region().voting == ("a", "d")
    assert led.play.region().is_active


def test_nobody_is_demoted_if_the_rest_would_have_no_quorum() -> None:
    led = Led("a", "b", "d", crowned="a")
    led.play.do("node", node=node("b", {}))
    led.up.discard("d")
    led.pass_time(PATIENCE + 1)
    assert led.proposed() == []  # a and d would be left, and d is dead
    led.up.add("d")
    led.pass_time()
    assert [one["node"] for one in led.proposed()] == ["b"]


# --- Pruning --------------------------------------------------------------------------------------


def test_dead_nodes_stay_if_nothing_else_is_said() -> None:
    led = Led("a", "b", "d", crowned="a")
    led.up.discard("d")
    led.pass_time(100.0)
    assert led.decide() == []


def test_a_dead_node_is_pruned_step_by_step() -> None:
    led = Led("a", "b", "d", crowned="a", prune_after=20)
    led.pass_time(10.0)
    led.up.discard("d")
    led.pass_time(20.0)
    assert led.decide() == []
    led.pass_time(0.1)
    done = led.settle()
    steps = [one.command["do"] if isinstance(one, Propose) else one for one in done]
    assert steps == ["demote", "active", ChangeMembers(Members(("a", "b"))), "remove"]
    assert sorted(led.metadata.nodes) == ["a", "b"]


def test_a_dead_master_is_replaced_and_then_pruned() -> None:
    led = Led("a", "b", "d", crowned="d", prune_after=20)
    led.pass_time(1.0)
    led.up.discard("d")
    led.settle()
    assert led.play.region().master == "a"
    led.pass_time(20.0)
    led.settle()
    assert sorted(led.metadata.nodes) == ["a", "b"]
    assert led.members == Members(("a", "b"))


def test_nobody_is_pruned_who_is_needed_for_a_quorum_of_raft() -> None:
    led = Led("a", "b", "d", "e", crowned="a", prune_after=5, regions={"e": {}, "d": {}})
    led.up -= {"d", "e"}
    led.pass_time(50.0)
    assert led.decide() == []  # two of four are no majority


def test_nor_is_it_demoted_anywhere_then() -> None:
    led = Led("a", "b", "d", "e", crowned="a", prune_after=5, regions={"e": {}})
    led.up -= {"d", "e"}
    led.pass_time(50.0)
    assert led.decide() == []  # global could do without d, Raft could not


def test_nobody_is_pruned_who_is_needed_for_a_quorum_of_a_region() -> None:
    eu = {"global": "master", "eu": "master"}
    led = Led("a", "b", "d", crowned="a", prune_after=5, regions={"b": eu, "d": eu})
    led.play.do("ensure", name="s", region="eu")
    led.play.crown("b", "eu")
    led.pass_time(1.0)
    led.up.discard("d")
    led.settle()
    led.pass_time(50.0)
    assert led.decide() == []  # in Raft and in global it could go, but b alone is no majority in eu


def test_two_of_which_one_is_dead_stay_two() -> None:
    led = Led("a", "b", "d", crowned="a", prune_after=5, regions={"d": {}})
    led.up.discard("b")
    led.pass_time(50.0)
    assert led.decide() == []


def test_a_node_that_comes_back_while_it_is_pruned_stays() -> None:
    led = Led("a", "b", "d", crowned="a", prune_after=5)
    led.up.discard("d")
    led.pass_time(5.1)
    led.carry_out(led.decide())
    assert led.play.region().voting == ("a", "b")
    led.up.add("d")
    led.settle()
    assert led.play.region().voting == ("a", "b", "d")
    assert led.members.voters == ("a", "b", "d")


def test_a_member_of_raft_nobody_knows_is_pruned() -> None:
    led = Led("a", "b", crowned="a", prune_after=5)
    led.members = led.members.with_learner("x")
    led.pass_time(4.0)
    assert led.decide() == []
    led.pass_time(2.0)
    assert led.decide() == [ChangeMembers(Members(("a", "b")))]


# --- Leaving --------------------------------------------------------------------------------------


def test_a_node_that_is_to_leave_leaves_in_order() -> None:
    led = Led("a", "b", "d", crowned="b")
    led.pass_time(10.0)
    led.steering.granted("b", 10.5)
    led.play.do("leave", node="b")
    assert led.decide() == []
    assert led.steering.refuses(led.metadata, led.members, "a", "b", led.now) != ""
    done = led.settle()
    steps = [one.command["do"] if isinstance(one, Propose) else "members" for one in done]
    assert steps.index("master") < steps.index("demote") < steps.index("members")
    assert steps[-1] == "remove" or steps[-2] == "remove"
    assert sorted(led.metadata.nodes) == ["a", "d"]
    assert led.members == Members(("a", "d"))
    assert led.play.region().voting == ("a", "d")


def test_a_leader_that_is_to_leave_hands_over() -> None:
    led = Led("a", "b", "d", crowned="a")
    led.pass_time(10.0)
    led.play.do("leave", node="a")
    done = led.settle()
    assert [one for one in done if isinstance(one, Transfer)] == [Transfer("b")]
    assert led.leader == "b"
    assert sorted(led.metadata.nodes) == ["b", "d"]
    assert led.members == Members(("b", "d"))


def test_nobody_leaves_raft_without_whom_it_has_no_quorum() -> None:
    led = Led("a", "b", "d", crowned="a", regions={"b": {}, "d": {}})
    led.up.discard("d")
    led.play.do("leave", node="b")
    led.pass_time(PATIENCE + 1)
    assert led.decide() == []
    led.up.add("d")
    led.pass_time()
    assert led.decide() == [ChangeMembers(Members(("a", "d")))]


def test_who_leaves_does_not_hand_its_regions_to_one_that_leaves_too() -> None:
    led = Led("a", "b", "d", crowned="a")
    led.up.discard("d")
    for id in ("a", "b"):
        led.play.do("leave", node=id)
    led.pass_time(PATIENCE + 1)
    assert led.decide() == []
    assert led.steering.refuses(led.metadata, led.members, "a", "a", led.now) == ""
    led.up.add("d")
    led.pass_time()
    assert led.crowned() == "d"


def test_but_one_that_leaves_is_better_than_a_dead_one() -> None:
    led = Led("a", "b", "d", crowned="d", regions={"a": {"global": "replica"}})
    led.play.do("leave", node="b")
    led.up.discard("d")
    led.pass_time(PATIENCE + 1)
    assert led.crowned() == "b"


def test_a_node_leaves_down_to_one() -> None:
    led = Led("a", "b", crowned="b")
    led.play.do("ensure", name="s")
    led.play.do("leave", node="b")
    led.settle()
    assert led.members == Members(("a",))
    assert led.play.region().voting == ("a",)
    assert led.play.region().master == "a"


def test_a_node_that_came_back_is_not_removed_by_an_old_proposal() -> None:
    led = Led("a", "b", crowned="a", regions={"b": {}})
    led.members = Members(("a",))
    led.play.do("leave", node="b")
    led.up.discard("b")
    led.pass_time()
    (old,) = led.proposed()
    led.play.do("node", node=node("b", {}))
    assert led.metadata.apply(led.metadata.index + 1, old)["error"]["code"] == "STALE"


# --- Members of Raft ------------------------------------------------------------------------------


def test_a_new_node_becomes_a_learner_and_then_a_voter() -> None:
    led = Led("a", crowned="a")
    led.play.do("node", node=node("b", {}))
    led.pass_time()
    assert led.decide() == []  # it was not heard of
    led.up.add("b")
    led.reports["b"] = {"applied": 0}
    led.pass_time()
    assert led.decide() == [ChangeMembers(Members(("a",), ("b",)))]
    led.carry_out(led.decide())
    for number in range(1001):
        led.play.do("stay", node="a", number=number)
    led.pass_time()
    assert led.decide() == []  # it lacks too much
    led.reports.clear()
    led.pass_time()
    assert led.decide() == [ChangeMembers(Members(("a", "b")))]


def test_there_are_seven_voters_at_most() -> None:
    ids = [f"n{number}" for number in range(MAX_VOTERS)]
    led = Led("a", *ids, crowned="a")
    led.members = Members(tuple(sorted(["a", *ids[1:]])), (ids[0],))
    led.pass_time()
    assert led.decide() == []


def test_before_there_is_a_cluster_nothing_is_decided() -> None:
    steering = Steering()
    steering.began(0.0)
    steering.heard("a", {}, 0.0)
    assert steering.decide(Play().metadata, Members(("a",)), "a", 100.0) == []


# --- Reports --------------------------------------------------------------------------------------

garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["regions", "global", "epoch", "caught_up", "trouble", "lag", "applied"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=200)
@given(garbage)
def test_a_report_that_cannot_be_read_is_a_sign_of_life(told: Any) -> None:
    led = Led("a", "b", crowned="b")
    led.pass_time(10.0)
    led.steering.heard("b", told, led.now)
    led.steering.heard("stranger", told, led.now)
    led.decide()
    if not Report.of(told).trouble:
        assert led.crowned() is None


# --- Whole lives ----------------------------------------------------------------------------------


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(25))
def test_a_cluster_lives_through_losses_and_comes_to_rest(seed: int) -> None:
    """Leases are kept as a driver does; nobody is crowned while another has one; in the end all is well again."""
    random = Random(seed)
    ids = ["a", "b", "d", "e", "f"][: random.choice([3, 4, 5])]
    led = Led(*ids, crowned=None, prune_after=random.choice([None, 8]))
    led.play.do("ensure", name="s")
    leases: dict[str, float] = {}

    def turn() -> None:
        led.pass_time(0.2)
        before = led.play.region().master
        for id in sorted(led.up & set(led.metadata.nodes)):
            if id == before and not led.steering.refuses(
                led.metadata, led.members, led.leader, id, led.now
            ):
                leases[id] = led.now + 0.7
                led.steering.granted(id, leases[id])
        decisions = led.decide()
        random.shuffle(decisions)
        led.carry_out(decide for decide in decisions if random.random() < 0.8)
        after = led.play.region().master
        if before is not None and after != before:
            assert led.now >= leases.get(before, 0.0), f"{before} had a lease"

    for _ in range(300):
        turn()
        everybody = set(led.metadata.nodes)
        match random.randrange(40):
            case 0 if 2 * len((led.up & set(led.members.voters)) - {led.leader}) > len(
                led.members.voters
            ):
                led.up.discard(random.choice(sorted(everybody - {led.leader})))
            case 1 | 2:
                led.up |= {random.choice(sorted(everybody))}
            case 3:
                led.play.try_("leave", node=random.choice(sorted(everybody)))
            case 4:
                led.play.try_("stay", node=random.choice(sorted(everybody)))
            case 5:
                led.reports[random.choice(sorted(everybody))] = {
                    "trouble": random.choice(["x", ""])
                }
            case 6:
                others = [id for id in led.members.voters if id in led.up and id in everybody]
                if others:
                    led.lead(random.choice(others))
            case 7:
                place = random.randrange(len(ids))
                if ids[place] in led.metadata.removed:
                    ids[place] += "x"  # it comes back as a new one
                led.play.do("node", node=node(ids[place]))
    led.up |= set(led.metadata.nodes)
    led.reports.clear()
    led.settle()
    metadata = led.metadata
    staying = sorted(set(metadata.nodes) - metadata.wanted_gone)
    region = led.play.region()
    assert metadata.wanted_gone == set()
    assert staying == sorted(metadata.nodes) == list(led.members.voters)
    assert list(region.voting) == staying
    assert region.is_active
    assert region.master in led.up
