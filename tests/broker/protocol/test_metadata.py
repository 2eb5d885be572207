"""Metadata: one test for each rule, and any sequence of commands, sensible or not."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.protocol.cluster_play import Play, node

from railgun.broker.protocol.metadata.fields import RefusedError
from railgun.broker.protocol.metadata.machine import MAX_REQUESTS, Metadata
from railgun.broker.protocol.metadata.options import check_asked
from railgun.broker.protocol.metadata.streams import DEAD
from railgun.errors import ProtocolError

FEW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
DEFAULTS = {"kind": "persistent", "max_age": None, "id_box": 120.0}


# --- Forming a cluster, and its nodes -------------------------------------------------------------


def test_nothing_is_possible_before_a_cluster_is_formed() -> None:
    assert Play().refused("ensure", name="a") == "NOT_FORMED"


def test_the_first_nodes_vote_at_once_and_no_region_has_a_master() -> None:
    play = Play("b", "a", regions={"b": {"global": "replica", "eu": "master"}})
    region = play.region()
    assert (region.voting, region.learning, region.master) == (("a", "b"), (), None)
    assert play.region("eu").voting == ("b",)
    assert not region.is_active


def test_a_second_cluster_is_refused_and_told_which_there_is() -> None:
    play = Play("a")
    result = play.try_("form", cluster="other", nodes=[node("b")])
    assert result["error"]["code"] == "FORMED"
    assert result["error"]["cluster"] == "c"
    assert list(play.metadata.nodes) == ["a"]


def test_two_first_nodes_of_one_name_are_refused() -> None:
    play = Play()
    nodes = [node("a", name="x"), node("b", name="x")]
    assert play.refused("form", cluster="c", nodes=nodes) == "NAME_TAKEN"
    assert play.refused("form", cluster="c", nodes=[node("a"), node("a")]) == "BAD_COMMAND"
    assert play.refused("form", cluster="c", nodes=[]) == "BAD_COMMAND"


def test_a_new_node_learns_once_there_was_a_master() -> None:
    play = Play("a")
    play.crown("a")
    assert play.do("node", node=node("b"))["result"] == "JOINED"
    assert (play.region().voting, play.region().learning) == (("a",), ("b",))


def test_a_node_votes_at_once_in_a_region_that_never_had_a_master() -> None:
    play = Play("a")
    play.do("node", node=node("b", {"eu": "replica"}))
    play.do("node", node=node("d", {"eu": "master"}))
    assert play.region("eu").voting == ("b", "d")
    assert play.region("eu").epoch == play.region("eu").epoch_index


def test_a_name_belongs_to_one_node() -> None:
    play = Play("a")
    assert play.refused("node", node=node("b", name="name-a")) == "NAME_TAKEN"


def test_a_node_that_comes_back_tells_its_news() -> None:
    play = Play("a")
    assert play.do("node", node=node("a"))["result"] == "UNCHANGED"
    assert (
        play.do("node", node=node("a", host="10.1.1.1", http="http://a:8080"))["result"]
        == "UPDATED"
    )
    assert play.metadata.nodes["a"].host == "10.1.1.1"


def test_a_region_that_is_not_named_any_more_is_left_by_demotion_only() -> None:
    play = Play("a", "b")
    play.crown("a")
    assert play.do("node", node=node("b", {}))["leaving"] == ["global"]
    assert play.region().voting == ("a", "b")
    play.change("demote", "b")
    assert (play.region().voting, play.region().learning) == (("a",), ())


def test_who_learns_leaves_a_region_at_once() -> None:
    play = Play("a")
    play.crown("a")
    play.do("node", node=node("b"))
    play.do("node", node=node("b", {"eu": "master"}))
    assert play.region().learning == ()


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""}, {"id": "a/b"}, {"id": None}, {"port": -1}, {"port": True}, {"port": 1 << 70}, {"host": ""},
        {"host": "a\nb"}, {"http": 7}, {"regions": []}, {"regions": {"EU": "master"}}, {"regions": {"eu": "king"}},
        {"regions": {"eu": ["master"]}}, {"version": 7},
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    assert Play("a").refused("node", node=node("b") | change) == "BAD_COMMAND"


# --- Regions and epochs ---------------------------------------------------------------------------


def test_a_master_begins_the_next_epoch_and_no_other() -> None:
    play = Play("a", "b")
    epoch = play.region().epoch
    for wrong in (epoch - 1, epoch, epoch + 2):
        assert play.refused("master", region="global", master="a", epoch=wrong) == "STALE"
    assert play.do("master", region="global", master="a", epoch=epoch + 1)["epoch"] == epoch + 1
    region = play.region()
    assert (region.master, region.epoch_index) == ("a", play.metadata.index)
    assert not region.is_active


def test_only_a_voting_replica_that_may_be_master_is_made_one() -> None:
    play = Play("a", "b", regions={"b": {"global": "replica"}})
    play.crown("a")
    play.do("node", node=node("d"))
    epoch = play.region().epoch + 1
    for who in ("b", "d", "nobody"):
        code = play.refused("master", region="global", master=who, epoch=epoch)
        assert code == "NOT_ELIGIBLE"
    assert play.refused("master", region="mars", master="a", epoch=epoch) == "NO_REGION"


def test_sets_change_by_one_node_in_an_active_epoch_only() -> None:
    play = Play("a")
    play.crown("a", active=False)
    play.do("node", node=node("b"))
    play.do("node", node=node("d"))
    epoch = play.region().epoch
    promote = {"region": "global", "node": "b"}
    assert play.refused("promote", **promote, epoch=epoch) == "NOT_ACTIVE"
    play.activate()
    assert play.refused("promote", **promote, epoch=epoch - 1) == "STALE"
    play.change("promote", "b", active=False)
    region = play.region()
    assert (region.voting, region.active, region.master) == (("a", "b"), ("a",), "a")
    assert region.epoch == epoch + 1
    assert play.refused("promote", region="global", node="d", epoch=region.epoch) == "NOT_ACTIVE"
    play.crown(
        "b", active=False
    )  # another master does not make it active, nor is the old set forgotten
    assert (play.region().active, play.region().is_active) == (("a",), False)
    play.activate()
    assert play.region().active == ("a", "b")
    play.change("demote", "a", active=False)
    assert (play.region().voting, play.region().active) == (("b",), ("a", "b"))
    assert play.region().learning == ("a", "d")  # it still names the region


def test_an_epoch_that_is_over_does_not_become_active() -> None:
    play = Play("a", "b")
    assert play.refused("active", region="global", epoch=play.region().epoch) == "NOT_ACTIVE"
    play.crown("a", active=False)
    play.crown("b", active=False)
    assert play.refused("active", region="global", epoch=play.region().epoch - 1) == "STALE"
    play.activate()
    play.activate()  # told twice


def test_a_master_is_not_demoted_nor_promoted_who_does_not_learn() -> None:
    play = Play("a", "b")
    play.crown("a")
    epoch = play.region().epoch
    assert play.refused("demote", region="global", node="a", epoch=epoch) == "MASTER"
    assert play.refused("promote", region="global", node="b", epoch=epoch) == "NOT_LEARNING"
    assert play.refused("promote", region="global", node="x", epoch=epoch) == "NO_NODE"
    play.change("demote", "b")
    epoch = play.region().epoch
    assert play.refused("demote", region="global", node="b", epoch=epoch) == "NOT_VOTING"
    assert play.refused("demote", region="global", node="a", epoch=epoch) == "MASTER"


def test_a_region_goes_with_the_last_who_names_it_and_comes_back_with_a_higher_epoch() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.crown("b", "eu")
    for _ in range(3):
        play.crown("b", "eu")
    before = play.region("eu").epoch
    play.do("node", node=node("b", {}))
    assert list(play.metadata.regions) == ["global"]
    play.do("node", node=node("b", {"eu": "master"}))
    assert play.region("eu").epoch > before
    assert play.region("eu").voting == ("b",)


def test_a_region_stays_while_a_stream_is_in_it() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.crown("b", "eu")
    play.do("ensure", name="s", region="eu")
    play.do("node", node=node("b", {}))
    assert play.region("eu").voting == ("b",)
    play.do("delete", name="s")
    assert list(play.metadata.regions) == ["global"]


# --- Leaving --------------------------------------------------------------------------------------


def test_a_node_is_removed_only_when_it_votes_nowhere() -> None:
    play = Play("a", "b")
    play.crown("a")
    assert play.refused("remove", node="a") == "STILL_IN_USE"
    assert play.refused("remove", node="b") == "STILL_IN_USE"
    play.change("demote", "b")
    play.do("leave", node="b")
    assert play.do("remove", node="b") == {"result": "REMOVED"}
    assert list(play.metadata.nodes) == ["a"]
    assert play.region().learning == ()
    assert play.metadata.wanted_gone == set()
    assert play.refused("remove", node="b") == "NO_NODE"
    assert play.refused("remove", node="a") == "STILL_IN_USE"


def test_a_node_that_has_come_back_is_not_removed() -> None:
    play = Play("a")
    play.crown("a")
    play.do("node", node=node("b"))
    seen = play.metadata.nodes["b"].index
    play.do("node", node=node("b"))
    assert play.refused("remove", node="b", index=seen) == "STALE"
    play.do("remove", node="b", index=play.metadata.nodes["b"].index)


def test_who_was_removed_does_not_come_back_under_its_id() -> None:
    play = Play("a", "b")
    play.crown("a")
    play.change("demote", "b")
    play.do("remove", node="b")
    assert play.refused("node", node=node("b")) == "REMOVED"
    play.metadata = Metadata.load(play.metadata.dump())
    assert play.refused("node", node=node("b", name="another")) == "REMOVED"
    play.do("node", node=node("d", name="name-b"))  # the name is free


def test_a_region_without_streams_is_made_anew_when_all_who_voted_are_gone() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.crown("b", "eu")
    play.do("node", node=node("a", {"eu": "master"}))
    assert play.region("eu").learning == ("a",)
    before = play.region("eu").epoch
    play.do("remove", node="b")
    assert (play.region("eu").voting, play.region("eu").master) == (("a",), None)
    assert play.region("eu").epoch > before


def test_leaving_is_wanted_refused_where_it_cannot_be_and_taken_back() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.do("ensure", name="s", region="eu")
    assert play.refused("leave", node="b") == "STILL_IN_USE"
    play.do("node", node=node("d", {"eu": "master"}))
    play.do("leave", node="b")
    assert play.metadata.wanted_gone == {"b"}
    assert play.refused("leave", node="d") == "STILL_IN_USE"
    play.do("leave", node="a")
    play.do("stay", node="b")
    assert play.metadata.wanted_gone == {"a"}
    assert play.refused("leave", node="x") == "NO_NODE"


def test_the_last_node_does_not_leave() -> None:
    play = Play("a", "b")
    play.do("leave", node="a")
    assert play.refused("leave", node="b") == "STILL_IN_USE"


def test_who_is_to_leave_is_not_promoted() -> None:
    play = Play("a")
    play.crown("a")
    play.do("node", node=node("b"))
    play.do("leave", node="b")
    epoch = play.region().epoch
    assert play.refused("promote", region="global", node="b", epoch=epoch) == "NOT_ELIGIBLE"


# --- Streams --------------------------------------------------------------------------------------


def test_ensure_makes_a_stream_with_the_index_as_its_identity() -> None:
    play = Play("a")
    result = play.do("ensure", name="s", asked={"max_age": 5}, defaults=DEFAULTS)
    stream = play.metadata.streams["s"]
    assert result == {"result": "CREATED", "differs": {}, "id": play.metadata.index}
    assert (stream.id, stream.region) == (play.metadata.index, "global")
    assert stream.settings == DEFAULTS | {"max_age": 5}
    assert play.metadata.catalogue.of_id(stream.id) == stream


def test_ensure_compares_what_was_asked_for_and_nothing_else() -> None:
    play = Play("a")
    id = play.do("ensure", name="s", asked={"max_age": 5}, defaults=DEFAULTS)["id"]
    same = {"result": "UNCHANGED", "differs": {}, "id": id}
    assert play.do("ensure", name="s") == same
    assert play.do("ensure", name="s", asked={"max_age": 5.0}, mode="strict") == same
    result = play.do("ensure", name="s", asked={"max_age": 6, "id_box": 120})
    assert result["result"] == "DIFFERS"
    assert result["differs"] == {"max_age": {"is": 5, "asked": 6}}
    assert play.metadata.streams["s"].settings["max_age"] == 5
    assert play.refused("ensure", name="s", asked={"max_age": 6}, mode="strict") == "DIFFERS"


def test_overwrite_changes_what_was_seen_and_nothing_that_was_changed_since() -> None:
    play = Play("a")
    id = play.do("ensure", name="s", defaults=DEFAULTS)["id"]
    over = {"name": "s", "mode": "overwrite"}
    result = play.do("ensure", **over, asked={"max_age": 9}, seen=DEFAULTS)
    assert (result["result"], result["id"]) == ("UPDATED", id)
    assert play.metadata.streams["s"].settings == DEFAULTS | {"max_age": 9}
    assert play.refused("ensure", **over, asked={"id_box": 1}, seen=DEFAULTS) == "CHANGED"
    assert play.refused("ensure", **over, asked={"id_box": 1}) == "BAD_COMMAND"


def test_kind_and_region_never_change() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.do("ensure", name="s", defaults=DEFAULTS)
    over = {"name": "s", "mode": "overwrite", "seen": DEFAULTS}
    assert play.refused("ensure", **over, asked={"kind": "ephemeral"}) == "DIFFERS"
    assert play.refused("ensure", **over, region="eu") == "DIFFERS"
    result = play.do("ensure", name="s", region="eu")
    assert result["differs"] == {"region": {"is": "global", "asked": "eu"}}


def test_a_region_needs_somebody_who_can_lead_it() -> None:
    play = Play("a", "b", regions={"b": {"eu": "replica"}})
    assert play.refused("ensure", name="s", region="eu") == "NO_REGION"
    assert play.refused("ensure", name="s", region="mars") == "NO_REGION"
    play.do("node", node=node("d", {"eu": "master"}))
    play.do("ensure", name="s", region="eu")


def test_names_that_differ_by_case_only_are_one_name() -> None:
    play = Play("a")
    play.do("ensure", name="Orders")
    assert play.refused("ensure", name="orders") == "NAME_TAKEN"
    play.do("delete", name="Orders")
    play.do("ensure", name="orders")


def test_dead_letters_are_in_the_region_of_their_stream() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.do("ensure", name="s", region="eu")
    assert play.refused("ensure", name="s" + DEAD, region="global") == "BAD_REGION"
    play.do("ensure", name="s" + DEAD)
    assert play.metadata.streams["s" + DEAD].region == "eu"


def test_a_stream_that_is_deleted_is_remembered_for_ever_and_its_name_is_free() -> None:
    play = Play("a")
    first = play.do("ensure", name="s")["id"]
    dead = play.do("ensure", name="s" + DEAD)["id"]
    assert play.do("delete", name="s", dead_letters=False) == {"deleted": ["s"]}
    assert play.metadata.deleted == {first}
    again = play.do("ensure", name="s")["id"]
    assert play.do("delete", name="s", dead_letters=True) == {"deleted": ["s", "s" + DEAD]}
    assert play.metadata.deleted == {first, dead, again}
    assert play.refused("delete", name="s") == "NO_STREAM"


@pytest.mark.parametrize(
    "asked", [[], {"a": [1]}, {"a": float("nan")}, {"a": 1 << 80}, "x", {"a": "x" * 9999}]
)
def test_settings_are_flat(asked: Any) -> None:
    assert Play("a").refused("ensure", name="s", asked=asked) == "BAD_COMMAND"


# --- Groups ---------------------------------------------------------------------------------------


def test_positions_of_groups_step_back_only_if_that_is_said() -> None:
    play = Play("a")
    play.crown("a")
    id = play.do("ensure", name="s")["id"]
    about = {"region": "global", "epoch": play.region().epoch}
    groups = play.metadata.catalogue.groups
    play.do("groups", **about, positions={str(id): {"g": 10, "h": 0}})
    play.do("groups", **about, positions={str(id): {"g": 5}})
    assert groups == {id: {"g": 10, "h": 0}}
    play.do("groups", **about, positions={str(id): {"g": 5}}, reset=True)
    assert groups == {id: {"g": 5, "h": 0}}
    play.do("groups", **about, gone=[[id, "g"], [id, "x"], [999, "g"]])
    assert groups == {id: {"h": 0}}
    play.do("delete", name="s")
    assert groups == {}


def test_positions_of_another_epoch_region_or_stream_are_left_out() -> None:
    play = Play("a", "b", regions={"b": {"eu": "master"}})
    play.crown("a")
    play.crown("b", "eu")
    id = play.do("ensure", name="s")["id"]
    there = {str(id): {"g": 1}}
    old = play.do("groups", region="global", epoch=play.region().epoch - 1, positions=there)
    assert old["result"] == "IGNORED"
    play.do("groups", region="eu", epoch=play.region("eu").epoch, positions=there)
    play.do("groups", region="global", epoch=play.region().epoch, positions={"999": {"g": 1}})
    assert play.metadata.catalogue.groups == {}


# --- Settings of the cluster ----------------------------------------------------------------------


def test_a_log_of_an_older_version_may_have_a_shorter_master_wait_than_people_may_ask_for() -> None:
    play = Play("a")
    assert play.do("settings", change={"master_wait": 0.1})["result"] == "UPDATED"
    with pytest.raises(RefusedError, match=r"master_wait is 1 to 3600 seconds, not 0\.1"):
        check_asked({"master_wait": 0.1})


def test_settings_change_by_command_and_files_are_compared() -> None:
    play = Play("a", patience=5)
    assert play.metadata.settings["patience"] == 5
    assert play.do("settings", change={"prune_after": 60})["result"] == "UPDATED"
    assert play.do("settings", change={"prune_after": 60})["result"] == "UNCHANGED"
    assert play.metadata.seconds("prune_after") == 60.0
    play.do("settings", change={"prune_after": None})
    assert play.metadata.seconds("prune_after") is None
    drift = play.metadata.drift({"patience": 7, "prune_after": None, "data": "/x"})
    assert drift == {"patience": {"file": 7, "cluster": 5}}


def test_how_long_nodes_wait_for_a_leader_is_settled_when_the_cluster_is_formed() -> None:
    play = Play("a", election=2)
    assert play.refused("settings", change={"patience": 9, "election": 3}) == "BAD_SETTINGS"
    assert play.metadata.settings["election"] == 2
    assert play.metadata.settings["patience"] != 9
    assert play.do("settings", change={"election": 2})["result"] == "UNCHANGED"


@pytest.mark.parametrize(
    "change", [{"x": 1}, {"patience": None}, {"patience": "1"}, {"patience": True}, {"patience": -1},
               {"patience": float("nan")}, {"prune_after": [1]}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    assert Play("a").refused("settings", change=change) == "BAD_SETTINGS"


# --- Requests -------------------------------------------------------------------------------------


def test_the_same_request_again_gives_the_same_result_and_does_nothing() -> None:
    play = Play("a")
    first = play.do("ensure", name="s", request="r1")
    play.do("delete", name="s")
    assert play.do("ensure", name="s", request="r1") == first
    assert "s" not in play.metadata.streams
    missing = play.try_("delete", name="s", request="r2")
    play.do("ensure", name="s")
    assert play.try_("delete", name="s", request="r2") == missing


def test_a_result_that_somebody_changes_is_still_what_it_was() -> None:
    play = Play("a")
    play.do("ensure", name="s", request="r")["differs"]["x"] = 1
    play.do("ensure", name="s", request="r")["differs"]["y"] = 1
    assert play.do("ensure", name="s", request="r")["differs"] == {}


def test_the_last_requests_are_remembered_and_not_more() -> None:
    play = Play("a")
    play.do("ensure", name="s", request="first")
    for number in range(MAX_REQUESTS - 1):
        play.do("stay", node="a", request=str(number))
    assert play.do("ensure", name="s", request="first")["result"] == "CREATED"
    play.do("stay", node="a", request="more")
    assert play.do("ensure", name="s", request="first")["result"] == "UNCHANGED"
    assert len(play.metadata.dump()["requests"]) == MAX_REQUESTS


def test_requests_survive_a_snapshot() -> None:
    play = Play("a")
    first = play.do("ensure", name="s", request="r")
    play.metadata = Metadata.load(json.loads(json.dumps(play.metadata.dump())))
    play.do("delete", name="s")
    assert play.do("ensure", name="s", request="r") == first


# --- Entries and snapshots ------------------------------------------------------------------------


def test_an_entry_is_applied_once() -> None:
    play = Play("a")
    with pytest.raises(ProtocolError, match="applied already"):
        play.metadata.apply(play.metadata.index, {"do": "stay", "node": "a"})


@pytest.mark.parametrize(
    "broken", [None, {}, {"format": 2}, {"format": 1}, {"format": 1, "index": "x"}]
)
def test_a_snapshot_that_cannot_be_read_is_refused(broken: Any) -> None:
    with pytest.raises(ProtocolError):
        Metadata.load(broken)


@pytest.mark.parametrize("key", ["nodes", "regions", "catalogue", "requests", "settings"])
@pytest.mark.parametrize("value", [7, [7], [[7]], [{"x": 1}], None])
def test_a_snapshot_with_a_broken_part_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ProtocolError):
        Metadata.load(Play("a").metadata.dump() | {key: value})


def deep(levels: int) -> Any:
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


def test_what_is_nested_deeply_does_no_harm() -> None:
    play = Play("a")
    nest = deep(100_000)
    for command in ("ensure", "node", "form", "settings", "groups", "delete", "master", "leave"):
        for key in (
            "name",
            "asked",
            "mode",
            "region",
            "node",
            "change",
            "positions",
            "epoch",
            "request",
            "nodes",
        ):
            play.metadata.apply(play.metadata.index + 1, {"do": command, "name": "s", key: nest})
    play.metadata.apply(play.metadata.index + 1, nest)
    play.metadata.apply(play.metadata.index + 1, {"do": nest})
    json.dumps(play.metadata.dump())
    while nest:  # taken apart by hand: not every Python frees it without a deep stack
        nest = nest.pop()


# --- Any sequence ---------------------------------------------------------------------------------

IDS = ["a", "b", "d", "e"]
REGIONS = ["global", "eu"]
STREAMS = ["s", "S", "t", "s.dlq"]
garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from([*IDS, *REGIONS, *STREAMS]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=2) | st.sampled_from([*REGIONS, "id", "1"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
regions_of_node = st.none() | st.dictionaries(
    st.sampled_from(REGIONS), st.sampled_from(["master", "replica"]), max_size=2
)
nodes = st.builds(
    lambda id, name, regions: node(id, regions, name=name),
    st.sampled_from(IDS),
    st.sampled_from(["n1", "n2", "n3", "n4", "n5"]),
    regions_of_node,
)
KINDS = [
    *(
        "form",
        "node",
        "leave",
        "stay",
        "remove",
        "settings",
        "master",
        "promote",
        "demote",
        "active",
    ),
    *("ensure", "delete", "groups", "nothing"),
]
fields: dict[str, st.SearchStrategy[Any]] = {
    "cluster": st.just("c"),
    "nodes": st.lists(nodes, max_size=3),
    "node": st.sampled_from(IDS) | nodes,
    "settings": st.just({}) | st.just({"patience": 2}),
    "change": st.just({"prune_after": 5}),
    "region": st.sampled_from(REGIONS),
    "master": st.sampled_from(IDS),
    "epoch": st.integers(-1, 2),  # from that of the region
    "name": st.sampled_from(STREAMS),
    "asked": st.none() | st.just({"max_age": 1}) | st.just({"kind": "ephemeral"}),
    "defaults": st.just(DEFAULTS),
    "seen": st.just(DEFAULTS),
    "mode": st.sampled_from(["warn", "overwrite", "strict"]),
    "dead_letters": st.booleans(),
    "positions": st.dictionaries(st.integers(1, 20).map(str), st.just({"g": 3}), max_size=2),
    "gone": st.lists(st.tuples(st.integers(1, 20), st.just("g")).map(list), max_size=2),
    "reset": st.booleans(),
    "request": st.sampled_from(["r1", "r2"]),
    "index": st.integers(1, 30),
}


@st.composite
def commands(draw: st.DrawFn) -> Any:
    """Mostly sensible; now and then with a part missing, a part that is garbage, or nothing but that."""
    kind = draw(st.sampled_from(KINDS))
    command: dict[str, Any] = {"do": kind}
    needed = {
        "form": ["cluster", "nodes", "settings"], "node": ["node"], "leave": ["node"], "stay": ["node"],
        "remove": ["node"], "settings": ["change"], "master": ["region", "master", "epoch"],
        "promote": ["region", "node", "epoch"], "demote": ["region", "node", "epoch"], "active": ["region", "epoch"],
        "ensure": ["name", "asked", "defaults", "seen", "mode", "region"], "delete": ["name", "dead_letters"],
        "groups": ["region", "epoch", "positions", "gone", "reset"], "nothing": [],
    }[kind]  # fmt: skip
    for key in needed:
        command[key] = draw(fields[key])
    if kind == "node":
        command["node"] = draw(nodes)
    elif "node" in command:
        command["node"] = draw(st.sampled_from(IDS))
    match draw(st.integers(0, 19)):
        case 0:
            return draw(garbage)
        case 1 | 2:
            command[draw(st.sampled_from([*fields, "do"]))] = draw(garbage)
        case 3:
            command["request"] = draw(fields["request"])
        case 4:
            command["index"] = draw(fields["index"])
        case 5 if needed:
            del command[needed[0]]
    return command


def check(before: dict[str, Any], metadata: Metadata, was_deleted: set[int]) -> None:
    """What is always true, and what is true of each step."""
    after = metadata.dump()
    old = {one["name"]: one for one in before["regions"]}
    used = {stream.region for stream in metadata.streams.values()}
    assert used == metadata.catalogue.used
    for name, region in metadata.regions.items():
        voting, learning = set(region.voting), set(region.learning)
        assert not voting & learning
        assert voting | learning <= set(metadata.nodes)
        assert region.epoch <= region.epoch_index <= metadata.index
        assert len(voting ^ set(region.active)) <= 1
        if region.master is not None:
            assert region.master in voting
        if region.master is not None or name in used:
            assert voting
        was = old.get(name)
        if was is None:
            continue
        assert region.epoch >= was["epoch"]
        if name in used and was["master"] is not None:
            assert region.master is not None
        if region.epoch == was["epoch"] and was["master"] is not None:
            assert (region.master, list(region.voting)) == (was["master"], was["voting"])
        if region.epoch > was["epoch"] and name in used and was["master"] is not None:
            changed = voting ^ set(was["voting"])
            assert region.epoch == was["epoch"] + 1
            assert len(changed) <= 1
            assert not changed or (was["is_active"] and region.master == was["master"])
            assert not region.is_active
    if metadata.cluster:
        assert "global" in metadata.regions
        assert metadata.nodes
    names = [info.name for info in metadata.nodes.values()]
    assert len(set(names)) == len(names)
    assert metadata.wanted_gone <= set(metadata.nodes)
    ids = [stream.id for stream in metadata.streams.values()]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & metadata.deleted
    assert was_deleted <= metadata.deleted
    gone = {one["id"] for one in before["catalogue"]["streams"]} - set(ids)
    assert gone <= metadata.deleted
    assert set(metadata.catalogue.groups) <= set(ids)
    assert after["cluster"] in (before["cluster"], "c") or not before["cluster"]


def at_epoch(metadata: Metadata, command: Any) -> Any:
    """Epochs are drawn relative to what they are."""
    if isinstance(command, dict) and isinstance(command.get("epoch"), int):
        name = command.get("region")
        region = metadata.regions.get(name) if isinstance(name, str) else None
        if region is not None:
            return command | {"epoch": region.epoch + command["epoch"]}
    return command


def likely(metadata: Metadata, random: Random) -> dict[str, Any]:
    """A command that may well be possible now."""
    region = metadata.regions[random.choice(sorted(metadata.regions))]
    epoch = region.epoch + (random.random() < 0.05)
    about = {"region": region.name, "epoch": epoch}
    some = random.choice(IDS)
    roles = {name: random.choice(["master", "master", "replica"]) for name in REGIONS}
    told = {name: role for name, role in roles.items() if random.random() < 0.7}
    voting = region.voting or ("a",)
    streams = [str(one.id) for one in metadata.streams.values()] or ["1"]
    return random.choice(
        [
            {"do": "node", "node": node(some, told)},
            {"do": "node", "node": node(some, told)},
            {"do": "master", **about, "master": random.choice(voting), "epoch": epoch + 1},
            {"do": "active", **about},
            {"do": "active", **about},
            {"do": "promote", **about, "node": random.choice(region.learning or ("a",))},
            {"do": "demote", **about, "node": random.choice(voting)},
            {"do": "leave", "node": some},
            {"do": "stay", "node": some},
            {"do": "remove", "node": some},
            {"do": "ensure", "name": random.choice(STREAMS), "region": region.name},
            {"do": "delete", "name": random.choice(STREAMS), "dead_letters": random.random() < 0.5},
            {"do": "groups", **about, "positions": {random.choice(streams): {"g": 4}}},
        ]
    )


@pytest.mark.simulation
def test_any_life_of_a_cluster_keeps_what_is_promised() -> None:
    done: Counter[str] = Counter()
    for seed in range(200):
        random = Random(seed)
        metadata = Metadata()
        nodes = [node(id) for id in IDS[: random.randint(1, 3)]]
        metadata.apply(1, {"do": "form", "cluster": "c", "nodes": nodes})
        for index in range(2, 100):
            before, deleted = metadata.dump(), set(metadata.deleted)
            command = likely(metadata, random)
            result = metadata.apply(index, command)
            if "error" in result:
                assert metadata.dump() == before | {"index": index}, (seed, command)
            else:
                done[command["do"]] += 1
            check(before, metadata, deleted)
    assert min(done[kind] for kind in KINDS if kind not in ("form", "settings", "nothing")) > 100


@FEW
@given(
    st.lists(commands(), max_size=60),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True),
)
def test_any_sequence_of_commands_keeps_what_is_promised(
    drawn: list[Any], first: list[str]
) -> None:
    metadata, twin = Metadata(), Metadata()
    forming = {"do": "form", "cluster": "c", "nodes": [node(id) for id in first]}
    for index, command in enumerate([forming, *drawn], 1):
        before, deleted = metadata.dump(), set(metadata.deleted)
        command = at_epoch(metadata, command)
        result = metadata.apply(index, command)
        check(before, metadata, deleted)
        assert isinstance(result, dict)
        if "error" in result and not (isinstance(command, dict) and "request" in command):
            assert metadata.dump() == before | {"index": index}  # refused: nothing has changed
        assert json.dumps(twin.apply(index, command)) == json.dumps(result)
        written = json.dumps(metadata.dump(), allow_nan=False)
        assert json.dumps(twin.dump()) == written
        twin = Metadata.load(json.loads(written))  # goes on from a snapshot each time
        assert json.dumps(twin.dump()) == written


@FEW
@given(st.lists(garbage, max_size=10))
def test_garbage_is_refused(drawn: list[Any]) -> None:
    play = Play("a")
    before = play.metadata.dump()
    for index, command in enumerate(drawn, 2):
        assert "error" in play.metadata.apply(index, command)
    assert play.metadata.dump() == before | {"index": 1 + len(drawn)}
