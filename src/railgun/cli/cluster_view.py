"""Pictures of a cluster, for people: at one glance whether all is well, then a line a node, and a line a region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from railgun.cli.output import columns, duration

Told = dict[str, Any]
_COLOURS: Final = {"critical": "bold red", "warning": "yellow"}


def status(found: Told) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [Text(headline(found), _colour(found["alarms"]))]
    if found["state"] == "member":
        names = _names(found)
        leader = names.get(found["leader"], "nobody")
        count = found["streams"]
        told = f"{count} stream{'s' * (count != 1)}"
        if not found.get("is_known", True):
            told += " in copies here (without a quorum, others are not known, nor are regions)"
        told += f", leader {leader} in term {found['term']}"
        parts.append(Text(f"{told}; told by {found['name']}", "dim"))
    if found["nodes"]:
        parts.append(_nodes(found["nodes"], found))
    if found["regions"]:
        parts.append(_regions(found))
    parts += [alarm(one) for one in found["alarms"]]
    return Group(*parts)


def headline(found: Told) -> str:
    """Whether all is well, in a line.

    >>> headline({"state": "member", "cluster": "c1", "alarms": [], "nodes": [{"up": True}, {"up": True}]})
    'cluster c1: all is well, 2 of 2 nodes are up'
    """
    if found["state"] != "member":
        return "no cluster yet"
    if found.get("removed"):
        return f"cluster {found['cluster']}: this node was removed from it"
    up = sum(one["up"] and not one.get("failed") for one in found["nodes"])
    if found.get("leader", "") is None:
        voters = [one for one in found["nodes"] if one["id"] in found["voters"]]
        seen = sum(one["up"] and not one.get("failed") for one in voters)
        of = f"{seen} of {len(found['voters'])} voters"
        return f"cluster {found['cluster']}: no quorum, nobody leads; {of} are seen to take part"
    bad = sum(one["severity"] == "critical" for one in found["alarms"])
    well = "all is well"
    if found["alarms"]:
        count = len(found["alarms"])
        well = f"{count} alarm{'s' * (count != 1)}" + (f", {bad} critical" if bad else "")
    return f"cluster {found['cluster']}: {well}, {up} of {len(found['nodes'])} nodes are up"


def _colour(alarms: Sequence[Told]) -> str:
    worst = {one["severity"] for one in alarms}
    return "bold red" if "critical" in worst else "yellow" if worst else "green"


def alarm(one: Told) -> RenderableType:
    """One alarm, and what to do about it."""
    return Text.assemble(
        (f"{one['code']}: ", _COLOURS[one["severity"]]), f"{one['text']}. ", (one["todo"], "dim")
    )


def nodes(found: Sequence[Told]) -> RenderableType:
    """The nodes, without what only the whole status knows."""
    return _nodes(found, None)


def _nodes(found: Sequence[Told], whole: Told | None) -> RenderableType:
    id = () if whole is not None else ("id",)  # addresses are to stay in one piece
    table = columns("node", "", "clients", "nodes", "regions", *id)
    for one in found:
        regions = ", ".join(
            name if role == "master" else f"{name} (replica)"
            for name, role in one["regions"].items()
        )
        table.add_row(
            Text(one["name"], "bold" if whole is not None and one["id"] == whole["leader"] else ""),
            _state(one, whole),
            f"{one['host']}:{one['port']}",
            f"{one['cluster_host']}:{one['cluster_port']}",
            Text(regions),
            *(Text(one["id"], "dim") for _ in id),
        )
    return table


def _state(one: Told, whole: Told | None) -> Text:
    if one["failed"]:
        return Text("failed", "bold red")
    if not one["up"]:
        silent = one["silent_for"]
        return Text("silent" + ("" if silent is None else f" for {duration(silent)}"), "red")
    if one["trouble"]:
        return Text("in trouble", "red")
    if one["leaving"]:
        return Text("leaving", "yellow")
    if whole is None:
        return Text("up", "green")
    if one["id"] == whole["leader"]:
        return Text("up, leads", "green")
    if one["id"] in whole["voters"]:
        return Text("up", "green")
    return Text("up, learns" if one["id"] in whole["learners"] else "up, joins", "cyan")


def _regions(found: Told) -> RenderableType:
    names = _names(found)
    silent = {one["id"] for one in found["nodes"] if not one["up"]}
    table = columns("region", "", "epoch>", "master", "replicas", "streams>")
    for one in found["regions"]:
        replicas = Text(", ").join(
            Text(f"{names[id]} (silent)", "red") if id in silent else _replica(id, one, names)
            for id in (*one["voting"], *one["learning"])
            if id != one["master"]
        )
        state = Text("active", "green") if one["active"] else Text("not active yet", "yellow")
        if one["master"] is None:
            state = Text("no master", "red")
        table.add_row(
            Text(one["name"]),
            state,
            str(one["epoch"]),
            Text(names.get(one["master"], "")),
            replicas,
            str(one["streams"]),
        )
    return table


def _replica(id: str, region: Told, names: Mapping[str | None, str]) -> Text:
    told = names.get(id, id) + (" (learns)" if id in region["learning"] else "")
    lag = region["lag"].get(id)
    if lag is None:
        return Text(told)
    if lag["messages"]:
        return Text(f"{told} −{lag['messages']:,}", "yellow" if lag["behind_for"] > 1 else "")
    return Text(told, "" if lag["caught_up"] else "yellow")


def _names(found: Told) -> dict[str | None, str]:
    return {one["id"]: one["name"] for one in found["nodes"]}


def settings(found: Mapping[str, Any], changed: Mapping[str, Any]) -> RenderableType:
    """The settings of a cluster."""
    table = columns("setting", "seconds>")
    for key, value in sorted(found.items()):
        words = "none" if value is None else f"{value:g}"
        table.add_row(Text(key, "bold" if key in changed else ""), words)
    return table
