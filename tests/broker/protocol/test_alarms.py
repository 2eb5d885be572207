"""One test for each alarm: when it is there, when it is not, and that one cause makes one alarm."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from rich.text import Text

from railgun.broker.protocol.metadata.alarms import (
    ALARM_DELAY_S,
    TODO,
    Alarm,
    derive,
    is_settled,
    of_lone_node,
)
from railgun.cli.cluster_view import alarm

Told = dict[str, Any]


def node(id: str, **more: Any) -> Told:
    return {"id": id, "name": f"name-{id}", "up": True, "silent_for": None} | more


def region(**more: Any) -> Told:
    plain = {"name": "global", "epoch": 3, "master": "a", "active": True, "inactive_for": 0.0}
    voting = {"voting": ["a", "b", "c"], "learning": [], "streams": 1, "lag": {}, "idle_for": 0.0}
    return plain | voting | more


def status(**more: Any) -> Told:
    """Of a cluster that is well, but for this."""
    nodes = [node("a"), node("b"), node("c")]
    plain = {"state": "member", "node": "a", "leader": "a", "voters": ["a", "b", "c"]}
    return plain | {"nodes": nodes, "regions": [region()]} | more


def codes(told: Told) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in derive(told)]


def only(told: Told) -> Alarm:
    [alarm] = derive(told)
    assert alarm.todo == TODO[alarm.code]
    return alarm


def test_a_cluster_that_is_well_has_none() -> None:
    assert derive(status()) == []


def test_a_node_without_a_cluster_says_what_it_waits_for() -> None:
    told = status(state="alone", nodes=[], regions=[], leader=None, looking="2 of 3 are there")
    alarm = only(told)
    assert (alarm.code, alarm.severity) == ("NO_CLUSTER", "critical")
    assert "2 of 3 are there" in alarm.text


def test_a_node_that_was_removed_says_that_and_nothing_else() -> None:
    alarm = only(status(removed=True, leader=None, nodes=[], regions=[]))
    assert (alarm.code, alarm.severity) == ("REMOVED", "critical")


def test_without_a_leader_masters_are_not_missed_too() -> None:
    gone = [node("a"), node("b", up=False), node("c", up=False)]
    told = status(leader=None, nodes=gone, regions=[region(master=None)])
    assert codes(told) == [
        ("NO_LEADER", "critical"),
        ("NODE_SILENT", "warning"),
        ("NODE_SILENT", "warning"),
    ]
    assert "1 of 3 voters" in derive(told)[0].text


def test_a_silent_node_is_told_with_its_time_and_leaves_nothing_to_spare() -> None:
    nodes = [node("a"), node("b"), node("c", up=False, silent_for=12.4)]
    told = derive(status(nodes=nodes))
    assert [one.code for one in told] == ["NO_QUORUM_SPARE", "NODE_SILENT", "NO_QUORUM_SPARE"]
    assert told[1].text == "name-c is silent for 12 s"
    assert {one.severity for one in told} == {"warning"}


@pytest.mark.parametrize(("skew", "words"), [(180.0, "180.0 s ahead of"), (-2.5, "2.5 s behind")])
def test_a_clock_that_differs_from_the_leaders_is_told(skew: float, words: str) -> None:
    alarm = only(status(nodes=[node("a"), node("b", clock_skew=skew), node("c", clock_skew=-0.9)]))
    assert (alarm.code, alarm.severity, alarm.about) == ("CLOCK_SKEW", "warning", "name-b")
    assert words in alarm.text


def test_a_clock_that_jumped_while_its_node_ran_is_told() -> None:
    alarm = only(
        status(nodes=[node("a", clock_stepped=-9.0), node("b", clock_stepped=7200.0), node("c")])
    )
    assert (alarm.code, alarm.about) == ("CLOCK_STEPPED", "name-b")
    assert "7,200 s ahead" in alarm.text


@pytest.mark.parametrize(
    ("off", "words"),
    [(-3600.0, "3,600 s behind"), (40 * 86400.0, "40 days"), (-9.0, ""), (86400.0, "")],
)
def test_a_clock_that_was_wrong_when_its_node_started_is_told(off: float, words: str) -> None:
    told = derive(status(nodes=[node("a"), node("b", clock_at_start=off), node("c")]))
    assert [(one.code, one.about) for one in told] == [("CLOCK_AT_START", "name-b")] * bool(words)
    assert all(words in one.text for one in told)


def test_messages_stored_ahead_of_the_clock_are_told_with_their_stream() -> None:
    alarm = only(status(nodes=[node("a", time_ahead={"orders": 31536000.0}), node("b"), node("c")]))
    assert (alarm.code, alarm.about) == ("TIME_AHEAD", "name-a")
    assert "'orders'" in alarm.text
    assert "31,536,000 s" in alarm.text


@pytest.mark.parametrize("down", [False, True])
def test_a_replica_that_cannot_write_is_no_copy_to_count_on(down: bool) -> None:
    why = {"orders": "the log in /data/orders cannot be written"}
    third = node("c", up=False) if down else node("c", unwritable=why)
    unable = ["b"] if down else ["b", "c"]
    told = derive(
        status(
            nodes=[node("a"), node("b", trouble="no room", unwritable=why), third],
            regions=[region(unwritable={"orders": unable})],
        )
    )
    (alarm,) = [one for one in told if one.code == "NO_QUORUM"]
    assert alarm.severity == "critical"
    assert "1 of 3 voting replicas can write 'orders'" in alarm.text
    assert "name-b" in alarm.text
    trouble = [one for one in told if one.code == "NODE_TROUBLE"]
    assert [one.about for one in trouble] == [f"name-{id}" for id in unable]
    assert all("/data/orders" in one.text for one in trouble)


def test_one_replica_of_three_that_cannot_write_leaves_nothing_to_spare() -> None:
    lag = {"b": {"messages": 5, "caught_up": False, "behind_for": ALARM_DELAY_S + 1}}
    nodes = [node("a"), node("b", unwritable={"orders": "no room"}), node("c")]
    told = codes(status(nodes=nodes, regions=[region(unwritable={"orders": ["b"]}, lag=lag)]))
    assert told == [("NODE_TROUBLE", "warning"), ("NO_QUORUM_SPARE", "warning")]


@pytest.mark.parametrize("size", [1, 2])
def test_small_clusters_were_never_meant_to_spare_a_node(size: int) -> None:
    ids = ["a", "b"][:size]
    told = status(nodes=[node(id) for id in ids], voters=ids, regions=[region(voting=ids)])
    assert derive(told) == []


def test_a_fourth_node_can_be_spared() -> None:
    ids = ["a", "b", "c", "d", "e"]
    nodes = [node(id, up=id != "e") for id in ids]
    told = status(nodes=nodes, voters=ids, regions=[region(voting=ids)])
    assert codes(told) == [("NODE_SILENT", "warning")]


def test_a_region_without_a_quorum_is_critical_though_there_is_a_leader() -> None:
    ids = ["a", "b", "c", "d", "e"]
    nodes = [node(id, up=id not in "bc") for id in ids]
    told = codes(status(nodes=nodes, voters=ids, regions=[region()]))
    assert ("NO_QUORUM", "critical") in told
    assert not {"NO_MASTER", "NOT_ACTIVE"} & {code for code, _ in told}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"master": None}, "has no master yet"),
        ({"idle_for": ALARM_DELAY_S + 1}, "name-a does not serve for 11 s"),
    ],
)
def test_a_region_without_a_master(more: Told, words: str) -> None:
    alarm = only(status(regions=[region(**more)]))
    assert (alarm.code, alarm.severity, alarm.about) == ("NO_MASTER", "critical", "global")
    assert words in alarm.text


def test_a_silent_master_is_missed() -> None:
    nodes = [node("a", up=False), node("b"), node("c")]
    told = codes(status(nodes=nodes, leader="b"))
    assert ("NO_MASTER", "critical") in told


def test_a_region_that_nobody_has_is_no_alarm() -> None:
    empty = region(name="far", master=None, voting=[], streams=0)
    assert derive(status(regions=[region(), empty])) == []


def test_an_epoch_that_is_not_active_for_long() -> None:
    short = region(active=False, inactive_for=ALARM_DELAY_S)
    assert derive(status(regions=[short])) == []
    alarm = only(status(regions=[region(active=False, inactive_for=ALARM_DELAY_S + 0.1)]))
    assert (alarm.code, alarm.severity) == ("NOT_ACTIVE", "warning")


def test_a_replica_that_is_behind_for_long_unless_it_is_silent() -> None:
    lag = {"c": {"messages": 1200, "caught_up": False, "behind_for": ALARM_DELAY_S + 1}}
    alarm = only(status(regions=[region(lag=lag)]))
    assert (alarm.code, alarm.about) == ("REPLICA_BEHIND", "name-c")
    assert "1,200 messages" in alarm.text
    close = {"c": {"messages": 9, "caught_up": False, "behind_for": ALARM_DELAY_S - 1}}
    assert derive(status(regions=[region(lag=close)])) == []
    silent = status(regions=[region(lag=lag)], nodes=[node("a"), node("b"), node("c", up=False)])
    assert "REPLICA_BEHIND" not in {code for code, _ in codes(silent)}


@pytest.mark.parametrize(
    ("more", "code", "severity", "words"),
    [
        ({"failed": "no disk"}, "RAFT_FAILED", "critical", "no disk"),
        ({"trouble": "a sync has failed"}, "NODE_TROUBLE", "warning", "a sync has failed"),
        ({"damaged": {"orders": "rot"}}, "COPY_DAMAGED", "warning", "'orders' on name-b"),
        (
            {"drift": {"patience": {"file": 5, "cluster": 1.0}}},
            "DRIFT",
            "warning",
            "patience is 5 in its file, and the cluster has 1.0",
        ),
        (
            {"left_alone": [f"s{n}" for n in range(7)]},
            "LEFT_ALONE",
            "warning",
            "s0, s1, s2, s3, s4 and 2 more",
        ),
    ],
)
def test_what_a_node_tells_of_itself(more: Told, code: str, severity: str, words: str) -> None:
    found = derive(status(nodes=[node("a"), node("b", **more), node("c")]))
    [alarm] = [one for one in found if one.about == "name-b"]
    assert (alarm.code, alarm.severity, alarm.about) == (code, severity, "name-b")
    assert words in alarm.text


def test_the_worst_comes_first() -> None:
    nodes = [node("a", drift={"patience": {"file": 5, "cluster": 1}}), node("b"), node("c")]
    told = codes(status(nodes=nodes, regions=[region(master=None)]))
    assert [severity for _, severity in told] == ["critical", "warning"]


def test_one_more_node_may_be_stopped_when_all_is_well_and_nobody_only_learns() -> None:
    def settled(**more: Any) -> bool:
        lag = {id: {"messages": 0, "caught_up": True, "behind_for": 0.0} for id in "bcd"}
        nodes = [node(id, answered=True) for id in "abcd"]
        whole = status(nodes=nodes, regions=[region(acting=True, lag=lag) | more])
        return is_settled(whole | {"alarms": derive(whole)})

    assert settled()
    assert not settled(learning=["d"])  # what is safe is on fewer nodes than there will be
    assert not settled(active=False)
    assert not settled(acting=False)
    assert not settled(lag={"b": {"messages": 1, "caught_up": False, "behind_for": 0.0}})


@pytest.mark.parametrize(
    ("more", "is_held"),
    [
        ({"drift": {"patience": {"file": 5, "cluster": 1.0}}}, False),
        ({"left_alone": ["orders"]}, False),
        ({"full": True}, False),
        ({"clock_skew": 9.0, "clock_stepped": 99.0, "clock_at_start": -99.0}, False),
        ({"time_ahead": {"orders": 99.0}}, False),
        ({"trouble": "a sync has failed"}, True),
        ({"damaged": {"orders": "rot"}}, True),
        ({"failed": "no disk"}, True),
        ({"up": False}, True),
    ],
)
def test_alarms_that_are_not_of_copies_or_nodes_keep_nobody_from_stopping_one(
    more: Told, is_held: bool
) -> None:
    lag = {id: {"messages": 0, "caught_up": True, "behind_for": 0.0} for id in "bcd"}
    nodes = [node(id, answered=True) for id in "acd"] + [node("b", answered=True) | more]
    whole = status(nodes=nodes, regions=[region(acting=True, lag=lag)])
    alarms = [asdict(one) for one in derive(whole)]
    assert alarms
    assert is_settled(whole | {"alarms": alarms}) is not is_held


SAID = "the disk of /data refuses. Look after it, and try again."


@pytest.mark.parametrize("code", sorted(TODO))
def test_whatever_nodes_say_the_texts_of_alarms_are_sentences(code: str) -> None:
    full = {
        "full": True,
        "drift": {"patience": {"file": 5, "cluster": "1."}},
        "left_alone": ["orders."],
    }
    clock = {
        "clock_skew": 9.0,
        "clock_stepped": 99.0,
        "clock_at_start": -99.0,
        "time_ahead": {"orders": 99.0},
    }
    lag = {"b": {"messages": 5, "caught_up": False, "behind_for": ALARM_DELAY_S + 1}}
    said = [
        node("a", trouble=SAID, damaged={"orders": SAID}, **full, **clock),
        node("b"),
        node("c", up=False, silent_for=3.0),
        node("d", failed=SAID),
        node("e", unwritable={"orders": SAID}),
    ]
    statuses = [
        status(state="alone", nodes=[], regions=[], leader=None, looking=SAID),
        status(removed=True),
        status(leader=None, nodes=said),
        status(nodes=said, regions=[region(lag=lag)]),
        status(nodes=said, regions=[region(master=None)]),
        status(
            nodes=said, regions=[region(voting=["a", "b", "e"], unwritable={"orders": ["a", "e"]})]
        ),
        status(regions=[region(active=False, inactive_for=ALARM_DELAY_S + 1)]),
    ]
    found = [one for told in statuses for one in derive(told) if one.code == code]
    found += [
        one
        for one in of_lone_node(
            {"name": "/data.", "displaced": SAID, "not_opened": {"orders": SAID}} | full | clock
        )
        if one.code == code
    ]
    assert found, "there is such an alarm"
    for one in found:
        for text in (one.text, one.todo):
            assert not text.endswith((".", " "))
            assert ".." not in text
        shown = alarm(asdict(one))
        assert isinstance(shown, Text)
        assert ".." not in shown.plain
