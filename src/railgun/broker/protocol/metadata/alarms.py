"""Alarms: what is wrong with a cluster, in words for people and codes for programs.

They are derived from a status (`broker.cluster.overview`) and from nothing else: the same status, the same alarms.
Rules:

1. An alarm has a code, says what it is about (a node, a region, or the cluster), what is so, and what to do. Both of
   these texts are without a full stop at their end: whoever shows them sets it.
2. *critical*: something is not served now, or a node takes no part. *warning*: all is served, and somebody should look.
3. What is not known is no alarm: a node that was not asked, or did not answer, is silent if the leader says so, or,
   where no leader can be asked, if there is no connection to it. A node that was removed tells that, and nothing else.
4. What is over by itself in a moment is none either: a replica that lags or an epoch that is not active is told after
   `LONG` seconds.
5. One cause, one alarm: a silent node does not lag, nor does one that cannot write; and a cluster without a leader does
   not lack masters, too.
6. A replica that cannot write a stream is no copy of it to count on: it is there, and there is a quorum without it or
   there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from railgun.errors import said

LONG: Final = 10.0
"""Seconds after which what takes its time takes too long."""
MAX_SKEW_S: Final = 1.0
"""Clocks of two nodes that differ by more are told."""
MAX_STEP_S: Final = 10.0
"""A time of day that has jumped by more while its node ran is told, and one that is so far behind when it starts."""
MAX_PAUSE_S: Final = 30 * 24 * 3600.0
"""A time of day that is further ahead when a node starts than when it ran last is told: it was hardly off so long."""
Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that is wrong."""

    code: str
    severity: Severity
    about: str
    text: str
    todo: str


TODO: Final[Mapping[str, str]] = {
    "NO_CLUSTER": "Start the other nodes, or say where one is: railgun cluster join HOST:PORT",
    "NO_LEADER": "Start the nodes that are down, mend the network, look after the disks of nodes that take no part: "
    "a majority of the voters has to see each other",
    "REMOVED": "Stop it; to have it back, start it as a new one, with an empty directory",
    "RAFT_FAILED": "Look after its disk. After a refused write it takes part again by itself; else start it again, or "
    "replace it if it does not start",
    "NO_QUORUM": "Start the nodes that are down, and look after the disks of those that cannot write: what was "
    "acknowledged is safe, and writes wait",
    "NO_MASTER": "Start a node that votes there and may be master; its file says so under regions",
    "NOT_ACTIVE": "Start the replicas that are down, and see what they say of their disks",
    "NODE_SILENT": "Start it, or mend its network; if it is lost for good: railgun cluster remove NODE",
    "NODE_TROUBLE": "Look after its disk: room, file size limits, quotas, read-only; if it stays so, start it again",
    "DATA_GONE": "Stop the node, put back the directory that was there, and start it again",
    "NOT_OPENED": "Do what it says; until then nothing of the stream is served, and it is not made anew",
    "DISK_FULL": "Make room on it, or let streams keep less: railgun stream ensure NAME --max-age … --max-bytes …",
    "REPLICA_BEHIND": "See whether its disk is full, or its disk, processor or network too slow",
    "COPY_DAMAGED": "It is fetched from the others by itself; look after the disk, for it will not be the last time",
    "NO_QUORUM_SPARE": "Start the nodes that are down, or add one",
    "DRIFT": "Change the cluster (railgun cluster settings KEY=VALUE), or make the file say the same",
    "LEFT_ALONE": "They are older than the node's membership, and served by nobody: start it without [cluster] to read",
    "CLOCK_SKEW": "Let NTP set the clocks of all nodes; the times of messages are those of their master",
    "CLOCK_STEPPED": "If the clock is right now, start the node again: it takes the time of day when it starts",
    "CLOCK_AT_START": "See whether the clock is right (NTP); if not, set it, and start the node again",
    "TIME_AHEAD": "If the clocks are right, stop all nodes, and mend the stored times on each: railgun stream retime",
}
"""What to do, by code."""
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
"""A node, a master or a copy is missing or in trouble: nobody should stop one more node. The others (settings, clocks,
room) are for somebody to look at, and to start a node again may be what helps."""


def derive(status: Mapping[str, Any]) -> list[Alarm]:
    """All alarms of a status, the worst first.

    >>> derive({"state": "alone", "node": "n1", "looking": "2 of 3 nodes are there", "nodes": [], "regions": []})
    [Alarm(code='NO_CLUSTER', severity='critical', about='n1', text='...2 of 3 nodes are there', todo=...)]
    """
    if status.get("removed"):
        told = "this node was removed, and takes no part any more: what it shows may be old"
        return [_critical("REMOVED", status["node"], told)]
    found = [*_of_cluster(status)]
    for node in status["nodes"]:
        found += _of_node(node)
    if status["state"] == "member" and status["leader"] is not None:
        for region in status["regions"]:
            found += _of_region(status, region)
    return sorted(found, key=lambda one: one.severity)


def is_settled(status: Mapping[str, Any]) -> bool:
    """Whether all is as it is to be, so that one more node may be stopped.

    There is no alarm that says otherwise (`UNSETTLED`), every node answers, every region is served, and every replica
    has caught up, and counts: one that learns does not yet, so what is safe is on fewer nodes than there will be.
    """
    if status["state"] != "member" or status["leader"] is None:
        return False
    if any(alarm["code"] in UNSETTLED for alarm in status["alarms"]):
        return False
    if not status["nodes"] or not all(one["answered"] for one in status["nodes"]):
        return False
    for region in status["regions"]:
        others = {*region["voting"]} - {region["master"]}
        lags = region["lag"]
        if not others and not region["learning"] and not region["streams"]:
            continue
        if not region["active"] or not region["acting"] or region["learning"]:
            return False
        if not all(one in lags and lags[one]["caught_up"] for one in others):
            return False
    return True


def _critical(code: str, about: str, text: str) -> Alarm:
    return _alarm(code, "critical", about, text)


def _warning(code: str, about: str, text: str) -> Alarm:
    return _alarm(code, "warning", about, text)


def _alarm(code: str, severity: Severity, about: str, text: str) -> Alarm:
    """Return an alarm; the text may end with what a node or an error has said, and loses the full stop of that."""
    return Alarm(code, severity, about, said(text), TODO[code])


def _of_cluster(status: Mapping[str, Any]) -> Iterator[Alarm]:
    if status["state"] != "member":
        why = status.get("looking") or "it looks for others"
        told = f"this node is not a member of a cluster yet: {why}"
        yield _critical("NO_CLUSTER", status["node"], told)
        return
    up = {one["id"] for one in status["nodes"] if one["up"] and not one.get("failed")}
    voters = status["voters"]
    if status["leader"] is None:
        seen = f": {_share(voters, up, 'voters')} are seen to take part" if voters else " yet"
        told = f"no quorum: this node knows nobody who leads{seen}. Nothing is made, changed or written by way of it"
        yield _critical("NO_LEADER", "cluster", told)
    elif (spare := _spare(voters, up)) is not None and spare == 0:
        told = "one more failure, and nobody can lead: " + _share(voters, up, "voters")
        yield _warning("NO_QUORUM_SPARE", "cluster", told)


def _of_node(node: Mapping[str, Any]) -> Iterator[Alarm]:
    name = node["name"]
    if node.get("failed"):
        yield _critical("RAFT_FAILED", name, f"{name} takes no part any more: {node['failed']}")
        return
    if not node["up"]:
        silent = node.get("silent_for")
        told = f"{name} is silent" + ("" if silent is None else f" for {silent:.0f} s")
        yield _warning("NODE_SILENT", name, told)
        return
    if unwritable := node.get("unwritable"):
        (stream, why), *rest = sorted(unwritable.items())
        others = f" and {len(rest)} other streams" if rest else ""
        told = f"{name} cannot write {stream!r}{others}: it is no copy to count on, and no master. {why}"
        yield _warning("NODE_TROUBLE", name, told)
    elif node.get("trouble"):
        told = f"{name} cannot be a master: {node['trouble']}"
        yield _warning("NODE_TROUBLE", name, told)
    if node.get("full"):
        told = f"{name} has hardly any room on its disk: others are master instead of it, if they have more"
        yield _warning("DISK_FULL", name, told)
    for stream, why in sorted(node.get("damaged", {}).items()):
        told = f"the copy of {stream!r} on {name} has lost something: {why}"
        yield _warning("COPY_DAMAGED", name, told)
    drift = node.get("drift") or {}
    if drift:
        words = [f"{key} is {one['file']} in its file" for key, one in sorted(drift.items())]
        is_so = [f"{one['cluster']}" for _, one in sorted(drift.items())]
        told = f"{name}: {', '.join(words)}, and the cluster has {', '.join(is_so)}"
        yield _warning("DRIFT", name, told)
    yield from _of_clock(node)
    alone = node.get("left_alone") or []
    if alone:
        more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
        told = f"streams on {name} that are of no cluster: {', '.join(alone[:5])}{more}"
        yield _warning("LEFT_ALONE", name, told)


def of_lone_node(node: Mapping[str, Any]) -> list[Alarm]:
    """Return the alarms of a node without a cluster: of its directory, streams, room and clock.

    `displaced`: why the directory is not its own any more; `not_opened`: why streams cannot be opened, by name.

    >>> of_lone_node({"name": "/data", "full": True, "clock_stepped": 0.0})
    [Alarm(code='DISK_FULL', severity='warning', about='/data', text='/data has hardly any room on its disk', todo=...)]
    """
    name, found = node["name"], []
    if node.get("displaced"):
        found.append(_critical("DATA_GONE", name, node["displaced"]))
    for stream, why in sorted((node.get("not_opened") or {}).items()):
        found.append(_critical("NOT_OPENED", stream, why))
    if node.get("full"):
        found.append(_warning("DISK_FULL", name, f"{name} has hardly any room on its disk"))
    return [*found, *_of_clock(node)]


def wrong_at_start(name: str, off: float) -> str:
    """Return what is to be told of a clock that was so many seconds off when its node started; "": nothing.

    It is compared with the time that the node noted last, in its life before.
    """
    if off < -MAX_STEP_S:
        return (
            f"the clock of {name} was {-off:,.0f} s behind when the node started: it had noted a later time before. "
            "Messages are stored with that clock"
        )
    if off > MAX_PAUSE_S:
        days = off / (24 * 3600)
        return (
            f"the clock of {name} was {days:,.0f} days ahead when the node started of the time that it had noted last: "
            "either it was off for so long, or the clock is wrong"
        )
    return ""


def _of_clock(node: Mapping[str, Any]) -> Iterator[Alarm]:
    name = node["name"]
    skew = node.get("clock_skew") or 0.0
    if abs(skew) > MAX_SKEW_S:
        way = "ahead of" if skew > 0 else "behind"
        told = f"the clock of {name} is {abs(skew):,.1f} s {way} the leader's"
        yield _warning("CLOCK_SKEW", name, told)
    stepped = node.get("clock_stepped") or 0.0
    if abs(stepped) > MAX_STEP_S:
        way = "ahead" if stepped > 0 else "back"
        told = (
            f"the clock of {name} has jumped {abs(stepped):,.0f} s {way} since it was started: the times of messages "
            "follow it slowly"
        )
        yield _warning("CLOCK_STEPPED", name, told)
    if told := wrong_at_start(name, node.get("clock_at_start") or 0.0):
        yield _warning("CLOCK_AT_START", name, told)
    for stream, ahead in sorted((node.get("time_ahead") or {}).items()):
        told = (
            f"the last message of {stream!r} on {name} is stored {ahead:,.0f} s ahead of its clock"
        )
        yield _warning("TIME_AHEAD", name, told)


def _of_region(status: Mapping[str, Any], region: Mapping[str, Any]) -> Iterator[Alarm]:
    name, voting, master = region["name"], region["voting"], region["master"]
    nodes = {one["id"]: one for one in status["nodes"]}
    up = {id for id, one in nodes.items() if one["up"]}
    if not voting and not region["streams"]:
        return  # nobody wants it, and nothing is in it

    def called(id: str) -> str:
        return str(nodes[id]["name"]) if id in nodes else id

    stream, able = _scarcest(region, up)
    unable = [one for one in voting if one in up - able]
    if 2 * sum(one in up for one in voting) <= len(voting):
        told = f"region {name}: {_share(voting, up, 'voting replicas')}. What is written waits"
        yield _critical("NO_QUORUM", name, told)
    elif unable and 2 * sum(one in able for one in voting) <= len(voting):
        who = ", ".join(map(called, unable))
        told = f"region {name}: {_share(voting, able, 'voting replicas')} can write {stream!r}. What is written waits, "
        yield _critical("NO_QUORUM", name, f"{told}or is refused: {who} cannot write")
    elif master is None:
        yield _critical("NO_MASTER", name, f"region {name} has no master yet")
    elif master not in up:
        told = f"region {name}: its master {called(master)} is silent, and nobody follows it"
        yield _critical("NO_MASTER", name, told)
    elif region.get("idle_for", 0.0) > LONG:
        told = f"region {name}: its master {called(master)} does not serve for {region['idle_for']:.0f} s"
        yield _critical("NO_MASTER", name, told)
    elif not region["active"] and region["inactive_for"] > LONG:
        told = f"epoch {region['epoch']} of region {name} is not active for {region['inactive_for']:.0f} s"
        yield _warning("NOT_ACTIVE", name, told)
    elif (spare := _spare(voting, able)) is not None and spare == 0:
        told = f"region {name}: one more failure, and writes wait: "
        what = f"voting replicas can write {stream!r}" if unable else "voting replicas are there"
        yield _warning("NO_QUORUM_SPARE", name, told + _share(voting, able, what))
    for id, lag in sorted(region["lag"].items()):
        if nodes.get(id, {}).get("unwritable"):
            continue
        if id in up and not lag["caught_up"] and lag["behind_for"] > LONG:
            much, long = f"{lag['messages']:,} messages", f"{lag['behind_for']:.0f} s"
            told = f"{called(id)} is {much} behind in region {name}, for {long}"
            yield _warning("REPLICA_BEHIND", called(id), told)


def _scarcest(region: Mapping[str, Any], up: set[str]) -> tuple[str, set[str]]:
    """Return the stream of a region that the fewest nodes can write, and the nodes that can; "": all are alike."""
    unwritable = region.get("unwritable") or {}
    able = {stream: up - set(ids) for stream, ids in unwritable.items()}
    voting = region["voting"]
    stream = min(sorted(able), key=lambda one: sum(id in able[one] for id in voting), default="")
    return stream, able.get(stream, up)


def _spare(voting: list[str], up: set[str]) -> int | None:
    """How many more may fail; None: that many were never meant to (one or two, and all are there)."""
    there = sum(one in up for one in voting)
    if len(voting) < 3 and there == len(voting):
        return None
    return max(0, there - len(voting) // 2 - 1)


def _share(voting: list[str], up: set[str], what: str) -> str:
    return f"{sum(one in up for one in voting)} of {len(voting)} {what}"
