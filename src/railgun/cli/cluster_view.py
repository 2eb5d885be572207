"""Draw a cluster for people: a headline with its health, then a row for each node and each region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from railgun.cli.output import columns, duration

ClusterData = dict[str, Any]
_COLOURS: Final = {"critical": "bold red", "warning": "yellow"}


def status(cluster: ClusterData) -> RenderableType:
    """Draw the status of a cluster: headline, nodes, regions and alarms."""
    parts: list[RenderableType] = [Text(headline(cluster), _colour(cluster["alarms"]))]
    if cluster["state"] == "member":
        names = _names(cluster)
        leader = names.get(cluster["leader"], "nobody")
        count = cluster["streams"]
        summary = f"{count} stream{'s' * (count != 1)}"
        if not cluster.get("is_known", True):
            summary += " in replicas here (without a quorum, other streams and regions are unknown)"
        summary += f", leader {leader} in term {cluster['term']}"
        parts.append(Text(f"{summary}; as seen by {cluster['name']}", "dim"))
    if cluster["nodes"]:
        parts.append(_nodes(cluster["nodes"], cluster))
    if cluster["regions"]:
        parts.append(_regions(cluster))
    parts += [alarm(entry) for entry in cluster["alarms"]]
    return Group(*parts)


def headline(cluster: ClusterData) -> str:
    """Describe the health of a cluster in one line.

    >>> headline({"state": "member", "cluster": "c1", "alarms": [], "nodes": [{"up": True}, {"up": True}]})
    'cluster c1: all is well, 2 of 2 nodes are up'
    """
    if cluster["state"] != "member":
        return "no cluster yet"
    if cluster.get("removed"):
        return f"cluster {cluster['cluster']}: this node was removed from it"
    up = sum(node["up"] and not node.get("failed") for node in cluster["nodes"])
    if cluster.get("leader", "") is None:
        voters = [node for node in cluster["nodes"] if node["id"] in cluster["voters"]]
        voters_up = sum(node["up"] and not node.get("failed") for node in voters)
        share = f"{voters_up} of {len(cluster['voters'])} voters"
        return f"cluster {cluster['cluster']}: no quorum, no leader; {share} are up"
    critical = sum(alarm["severity"] == "critical" for alarm in cluster["alarms"])
    health = "all is well"
    if cluster["alarms"]:
        count = len(cluster["alarms"])
        health = f"{count} alarm{'s' * (count != 1)}"
        health += f", {critical} critical" if critical else ""
    return f"cluster {cluster['cluster']}: {health}, {up} of {len(cluster['nodes'])} nodes are up"


def _colour(alarms: Sequence[ClusterData]) -> str:
    severities = {entry["severity"] for entry in alarms}
    return "bold red" if "critical" in severities else "yellow" if severities else "green"


def alarm(entry: ClusterData) -> RenderableType:
    """Draw an alarm, with what to do about it."""
    return Text.assemble(
        (f"{entry['code']}: ", _COLOURS[entry["severity"]]),
        f"{entry['text']}. ",
        (entry["todo"], "dim"),
    )


def nodes(nodes: Sequence[ClusterData]) -> RenderableType:
    """Draw the nodes with their ids, without roles in the quorum, which only the whole status has."""
    return _nodes(nodes, None)


def _nodes(nodes: Sequence[ClusterData], whole: ClusterData | None) -> RenderableType:
    id = (
        () if whole is not None else ("id",)
    )  # without ids in the wide table, so that addresses are not wrapped
    table = columns("node", "", "clients", "nodes", "regions", *id)
    for node in nodes:
        regions = ", ".join(
            name if role == "master" else f"{name} (replica)"
            for name, role in node["regions"].items()
        )
        table.add_row(
            Text(
                node["name"], "bold" if whole is not None and node["id"] == whole["leader"] else ""
            ),
            _state(node, whole),
            f"{node['host']}:{node['port']}",
            f"{node['cluster_host']}:{node['cluster_port']}",
            Text(regions),
            *(Text(node["id"], "dim") for _ in id),
        )
    return table


def _state(node: ClusterData, whole: ClusterData | None) -> Text:
    if node["failed"]:
        return Text("failed", "bold red")
    if not node["up"]:
        silent = node["silent_for"]
        return Text("silent" + ("" if silent is None else f" for {duration(silent)}"), "red")
    if node["trouble"]:
        return Text("in trouble", "red")
    if node["leaving"]:
        return Text("leaving", "yellow")
    if whole is None:
        return Text("up", "green")
    if node["id"] == whole["leader"]:
        return Text("up, leads", "green")
    if node["id"] in whole["voters"]:
        return Text("up", "green")
    return Text("up, learns" if node["id"] in whole["learners"] else "up, joins", "cyan")


def _regions(cluster: ClusterData) -> RenderableType:
    names = _names(cluster)
    silent = {node["id"] for node in cluster["nodes"] if not node["up"]}
    table = columns("region", "", "epoch>", "master", "replicas", "streams>")
    for region in cluster["regions"]:
        replicas = Text(", ").join(
            Text(f"{names[id]} (silent)", "red") if id in silent else _replica(id, region, names)
            for id in (*region["voting"], *region["learning"])
            if id != region["master"]
        )
        state = Text("active", "green") if region["active"] else Text("not active yet", "yellow")
        if region["master"] is None:
            state = Text("no master", "red")
        table.add_row(
            Text(region["name"]),
            state,
            str(region["epoch"]),
            Text(names.get(region["master"], "")),
            replicas,
            str(region["streams"]),
        )
    return table


def _replica(id: str, region: ClusterData, names: Mapping[str | None, str]) -> Text:
    label = names.get(id, id) + (" (learns)" if id in region["learning"] else "")
    lag = region["lag"].get(id)
    if lag is None:
        return Text(label)
    if lag["messages"]:
        return Text(f"{label} −{lag['messages']:,}", "yellow" if lag["behind_for"] > 1 else "")
    return Text(label, "" if lag["caught_up"] else "yellow")


def _names(cluster: ClusterData) -> dict[str | None, str]:
    return {node["id"]: node["name"] for node in cluster["nodes"]}


def settings(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> RenderableType:
    """Draw the settings of a cluster; those that were changed are bold."""
    table = columns("setting", "seconds>")
    for key, value in sorted(settings.items()):
        shown = "none" if value is None else f"{value:g}"
        table.add_row(Text(key, "bold" if key in changed else ""), shown)
    return table
