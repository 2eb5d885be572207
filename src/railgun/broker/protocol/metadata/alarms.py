"""Alarms: problems of a cluster, with texts for operators and codes for programs.

They are derived from a status (`broker.cluster.overview`) and from nothing else: the same status gives the same alarms.
Rules:

1. An alarm has a code, the thing it is about (a node, a region, or the cluster), a text on the problem, and a text on
   what to do. Both texts have no full stop at their end: the program that shows them adds it.
2. *critical*: something is not served now, or a node takes no part. *warning*: everything is served, and an operator
   should look.
3. Missing knowledge is no alarm: a node that was not asked, or did not answer, is silent if the leader says so, or,
   where no leader can be asked, if there is no connection to it. A node that was removed reports only that.
4. A short delay is no alarm: a replica that lags or an epoch that is not active is reported after `ALARM_DELAY_S`.
5. One cause gives one alarm: a silent node is not reported as lagging, nor is one that cannot write; and a cluster
   without a leader is not reported as lacking masters.
6. A replica that cannot write a stream does not count as a copy of it: either there is a quorum without it, or there is
   none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from railgun.errors import said

ALARM_DELAY_S: Final = 10.0
"""Seconds for which a lag or an inactive epoch is not reported yet."""
MAX_SKEW_S: Final = 1.0
"""A larger difference between the clocks of two nodes is reported."""
MAX_STEP_S: Final = 10.0
"""A larger jump of the time of day while a node runs is reported, and a clock that is further behind at its start."""
MAX_PAUSE_S: Final = 30 * 24 * 3600.0
"""A larger step ahead between the last time a node noted and its start is reported: it was hardly off so long."""
Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One problem, and what to do about it."""

    code: str
    severity: Severity
    about: str
    text: str
    todo: str


TODO: Final[Mapping[str, str]] = {
    "NO_CLUSTER": "Start the other nodes, or say where one is: railgun cluster join HOST:PORT",
    "NO_LEADER": "Start the nodes that are down, mend the network, check the disks of nodes that take no part: "
    "a majority of the voters must be able to reach each other",
    "REMOVED": "Stop it; to have it back, start it as a new one, with an empty directory",
    "RAFT_FAILED": "Check its disk. After a refused write it takes part again by itself; otherwise start it again, or "
    "replace it if it does not start",
    "NO_QUORUM": "Start the nodes that are down, and check the disks of those that cannot write: acknowledged "
    "messages are safe, and writes wait",
    "NO_MASTER": "Start a node that votes there and may be master; its file says so under regions",
    "NOT_ACTIVE": "Start the replicas that are down, and check their alarms about disks",
    "NODE_SILENT": "Start it, or mend its network; if it is lost for good: railgun cluster remove NODE",
    "NODE_TROUBLE": "Check its disk: room, file size limits, quotas, read-only; if the alarm stays, start it again",
    "DATA_GONE": "Stop the node, put back the directory that was there, and start it again",
    "NOT_OPENED": "Do what the text says; until then the stream is not served, and it is not created anew",
    "DISK_FULL": "Free space on it, or let streams keep less: railgun stream ensure NAME --max-age … --max-bytes …",
    "REPLICA_BEHIND": "Check whether its disk is full, or its disk, processor or network too slow",
    "COPY_DAMAGED": "The node fetches it from the others by itself; check the disk, as this may happen again",
    "NO_QUORUM_SPARE": "Start the nodes that are down, or add one",
    "DRIFT": "Change the cluster (railgun cluster settings KEY=VALUE), or make the file say the same",
    "LEFT_ALONE": "They are older than the node's membership, and not served: start it without [cluster] to read them",
    "CLOCK_SKEW": "Let NTP set the clocks of all nodes; the times of messages are those of their master",
    "CLOCK_STEPPED": "If the clock is right now, start the node again: it takes the time of day when it starts",
    "CLOCK_AT_START": "Check whether the clock is right (NTP); if not, set it, and start the node again",
    "TIME_AHEAD": "If the clocks are right, stop all nodes, and mend the stored times on each: railgun stream retime",
}
"""What to do, by the code of the alarm."""
UNSETTLED: Final = frozenset(
    {
        *(
            "NO_CLUSTER",
            "NO_LEADER",
            "REMOVED",
            "RAFT_FAILED",
            "NO_QUORUM",
            "NO_MASTER",
            "NOT_ACTIVE",
        ),
        *("NODE_SILENT", "NODE_TROUBLE", "REPLICA_BEHIND", "COPY_DAMAGED", "NO_QUORUM_SPARE"),
    }
)
"""Alarms during which no further node should be stopped: a node, a master or a copy is missing or in trouble. For the
others (settings, clocks, disk space), restarting a node may even help."""


def derive(status: Mapping[str, Any]) -> list[Alarm]:
    """Return all alarms of a status, the most severe first.

    >>> derive({"state": "alone", "node": "n1", "looking": "2 of 3 nodes are there", "nodes": [], "regions": []})
    [Alarm(code='NO_CLUSTER', severity='critical', about='n1', text='...2 of 3 nodes are there', todo=...)]
    """
    if status.get("removed"):
        text = "this node was removed, and takes no part any more: what it shows may be old"
        return [_critical("REMOVED", status["node"], text)]
    alarms = [*_of_cluster(status)]
    for node in status["nodes"]:
        alarms += _of_node(node)
    if status["state"] == "member" and status["leader"] is not None:
        for region in status["regions"]:
            alarms += _of_region(status, region)
    return sorted(alarms, key=lambda alarm: alarm.severity)


def is_settled(status: Mapping[str, Any]) -> bool:
    """Return whether the cluster is in order, so that one more node may be stopped.

    It is if there is no alarm in `UNSETTLED`, every node answers, every region is served, and every replica has caught
    up and votes. A learner does not count yet, so messages are safe on fewer nodes than intended.
    """
    if status["state"] != "member" or status["leader"] is None:
        return False
    if any(alarm["code"] in UNSETTLED for alarm in status["alarms"]):
        return False
    if not status["nodes"] or not all(node["answered"] for node in status["nodes"]):
        return False
    for region in status["regions"]:
        others = {*region["voting"]} - {region["master"]}
        lags = region["lag"]
        if not others and not region["learning"] and not region["streams"]:
            continue
        if not region["active"] or not region["acting"] or region["learning"]:
            return False
        if not all(node in lags and lags[node]["caught_up"] for node in others):
            return False
    return True


def _critical(code: str, about: str, text: str) -> Alarm:
    return _alarm(code, "critical", about, text)


def _warning(code: str, about: str, text: str) -> Alarm:
    return _alarm(code, "warning", about, text)


def _alarm(code: str, severity: Severity, about: str, text: str) -> Alarm:
    """Return an alarm. A full stop at the end of `text` is removed: the text may end with a quoted error."""
    return Alarm(code, severity, about, said(text), TODO[code])


def _of_cluster(status: Mapping[str, Any]) -> Iterator[Alarm]:
    if status["state"] != "member":
        reason = status.get("looking") or "it looks for other nodes"
        text = f"this node is not a member of a cluster yet: {reason}"
        yield _critical("NO_CLUSTER", status["node"], text)
        return
    up = {node["id"] for node in status["nodes"] if node["up"] and not node.get("failed")}
    voters = status["voters"]
    if status["leader"] is None:
        seen = f": {_share(voters, up, 'voters')} are seen to take part" if voters else " yet"
        text = (
            f"no quorum: this node knows no leader{seen}. It can create, change and write nothing"
        )
        yield _critical("NO_LEADER", "cluster", text)
    elif (spare := _spare(voters, up)) is not None and spare == 0:
        text = "one more failure, and no node can lead: " + _share(voters, up, "voters")
        yield _warning("NO_QUORUM_SPARE", "cluster", text)


def _of_node(node: Mapping[str, Any]) -> Iterator[Alarm]:
    name = node["name"]
    if node.get("failed"):
        yield _critical("RAFT_FAILED", name, f"{name} takes no part any more: {node['failed']}")
        return
    if not node["up"]:
        silent = node.get("silent_for")
        text = f"{name} is silent" + ("" if silent is None else f" for {silent:.0f} s")
        yield _warning("NODE_SILENT", name, text)
        return
    if unwritable := node.get("unwritable"):
        (stream, why), *rest = sorted(unwritable.items())
        others = f" and {len(rest)} other streams" if rest else ""
        text = f"{name} cannot write {stream!r}{others}: its copies do not count, and it cannot be master. {why}"
        yield _warning("NODE_TROUBLE", name, text)
    elif node.get("trouble"):
        text = f"{name} cannot be a master: {node['trouble']}"
        yield _warning("NODE_TROUBLE", name, text)
    if node.get("full"):
        text = f"{name} has hardly any room on its disk: nodes with more room become master instead"
        yield _warning("DISK_FULL", name, text)
    for stream, why in sorted(node.get("damaged", {}).items()):
        text = f"the copy of {stream!r} on {name} has lost something: {why}"
        yield _warning("COPY_DAMAGED", name, text)
    drift = node.get("drift") or {}
    if drift:
        in_file = [
            f"{key} is {values['file']} in its file" for key, values in sorted(drift.items())
        ]
        in_cluster = [f"{values['cluster']}" for _, values in sorted(drift.items())]
        text = f"{name}: {', '.join(in_file)}, and the cluster has {', '.join(in_cluster)}"
        yield _warning("DRIFT", name, text)
    yield from _of_clock(node)
    alone = node.get("left_alone") or []
    if alone:
        more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
        text = f"streams on {name} that belong to no cluster: {', '.join(alone[:5])}{more}"
        yield _warning("LEFT_ALONE", name, text)


def of_lone_node(node: Mapping[str, Any]) -> list[Alarm]:
    """Return the alarms of a node without a cluster: about its directory, streams, disk space and clock.

    `displaced`: why the directory is no longer its own; `not_opened`: why streams cannot be opened, by name.

    >>> of_lone_node({"name": "/data", "full": True, "clock_stepped": 0.0})
    [Alarm(code='DISK_FULL', severity='warning', about='/data', text='/data has hardly any room on its disk', todo=...)]
    """
    name, alarms = node["name"], []
    if node.get("displaced"):
        alarms.append(_critical("DATA_GONE", name, node["displaced"]))
    for stream, why in sorted((node.get("not_opened") or {}).items()):
        alarms.append(_critical("NOT_OPENED", stream, why))
    if node.get("full"):
        alarms.append(_warning("DISK_FULL", name, f"{name} has hardly any room on its disk"))
    return [*alarms, *_of_clock(node)]


def wrong_at_start(name: str, off: float) -> str:
    """Return the alarm text for a clock that was `off` seconds ahead when its node started; "" if it was right.

    The clock is compared with the last time that the node noted before it stopped.
    """
    if off < -MAX_STEP_S:
        return (
            f"when {name} started, its clock was {-off:,.0f} s behind the last time it had noted. "
            "Messages are stored with that clock"
        )
    if off > MAX_PAUSE_S:
        days = off / (24 * 3600)
        return (
            f"when {name} started, its clock was {days:,.0f} days ahead of the last time it had noted: "
            "either the node was off for so long, or the clock is wrong"
        )
    return ""


def _of_clock(node: Mapping[str, Any]) -> Iterator[Alarm]:
    name = node["name"]
    skew = node.get("clock_skew") or 0.0
    if abs(skew) > MAX_SKEW_S:
        way = "ahead of" if skew > 0 else "behind"
        text = f"the clock of {name} is {abs(skew):,.1f} s {way} the leader's"
        yield _warning("CLOCK_SKEW", name, text)
    stepped = node.get("clock_stepped") or 0.0
    if abs(stepped) > MAX_STEP_S:
        way = "ahead" if stepped > 0 else "back"
        text = (
            f"the clock of {name} has jumped {abs(stepped):,.0f} s {way} since it was started: the times of messages "
            "follow it slowly"
        )
        yield _warning("CLOCK_STEPPED", name, text)
    if text := wrong_at_start(name, node.get("clock_at_start") or 0.0):
        yield _warning("CLOCK_AT_START", name, text)
    for stream, ahead in sorted((node.get("time_ahead") or {}).items()):
        text = (
            f"the last message of {stream!r} on {name} is stored {ahead:,.0f} s ahead of its clock"
        )
        yield _warning("TIME_AHEAD", name, text)


def _of_region(status: Mapping[str, Any], region: Mapping[str, Any]) -> Iterator[Alarm]:
    name, voting, master = region["name"], region["voting"], region["master"]
    nodes = {node["id"]: node for node in status["nodes"]}
    up = {id for id, node in nodes.items() if node["up"]}
    if not voting and not region["streams"]:
        return  # no node names the region, and no stream is in it

    def name_of(id: str) -> str:
        return str(nodes[id]["name"]) if id in nodes else id

    stream, able = _scarcest(region, up)
    unable = [node for node in voting if node in up - able]
    if 2 * sum(node in up for node in voting) <= len(voting):
        text = f"region {name}: {_share(voting, up, 'voting replicas')} are up. Writes wait"
        yield _critical("NO_QUORUM", name, text)
    elif unable and 2 * sum(node in able for node in voting) <= len(voting):
        names = ", ".join(map(name_of, unable))
        text = f"region {name}: {_share(voting, able, 'voting replicas')} can write {stream!r}. Writes wait, "
        yield _critical("NO_QUORUM", name, f"{text}or are refused: {names} cannot write")
    elif master is None:
        yield _critical("NO_MASTER", name, f"region {name} has no master yet")
    elif master not in up:
        text = f"region {name}: its master {name_of(master)} is silent, and it has no successor"
        yield _critical("NO_MASTER", name, text)
    elif region.get("idle_for", 0.0) > ALARM_DELAY_S:
        text = f"region {name}: its master {name_of(master)} does not serve for {region['idle_for']:.0f} s"
        yield _critical("NO_MASTER", name, text)
    elif not region["active"] and region["inactive_for"] > ALARM_DELAY_S:
        text = f"epoch {region['epoch']} of region {name} is not active for {region['inactive_for']:.0f} s"
        yield _warning("NOT_ACTIVE", name, text)
    elif (spare := _spare(voting, able)) is not None and spare == 0:
        text = f"region {name}: one more failure, and writes wait: "
        described = f"voting replicas can write {stream!r}" if unable else "voting replicas are up"
        yield _warning("NO_QUORUM_SPARE", name, text + _share(voting, able, described))
    for id, lag in sorted(region["lag"].items()):
        if nodes.get(id, {}).get("unwritable"):
            continue
        if id in up and not lag["caught_up"] and lag["behind_for"] > ALARM_DELAY_S:
            much, long = f"{lag['messages']:,} messages", f"{lag['behind_for']:.0f} s"
            text = f"{name_of(id)} is {much} behind in region {name}, for {long}"
            yield _warning("REPLICA_BEHIND", name_of(id), text)


def _scarcest(region: Mapping[str, Any], up: set[str]) -> tuple[str, set[str]]:
    """Return the stream of a region that the fewest nodes can write, and the nodes of `up` that can.

    Return "" and `up` if every node can write every stream.
    """
    unwritable = region.get("unwritable") or {}
    able = {stream: up - set(ids) for stream, ids in unwritable.items()}
    voting = region["voting"]
    scarcest = min(
        sorted(able), key=lambda name: sum(id in able[name] for id in voting), default=""
    )
    return scarcest, able.get(scarcest, up)


def _spare(voting: list[str], up: set[str]) -> int | None:
    """Return how many more nodes may fail, or None for one or two nodes, all up: they were never meant to lose one."""
    present = sum(node in up for node in voting)
    if len(voting) < 3 and present == len(voting):
        return None
    return max(0, present - len(voting) // 2 - 1)


def _share(voting: list[str], up: set[str], described: str) -> str:
    return f"{sum(node in up for node in voting)} of {len(voting)} {described}"
