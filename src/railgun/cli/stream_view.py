"""Pictures of streams, groups and dead letters, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from railgun.cli.output import columns, duration, size

Told = dict[str, Any]


def _pairs(pairs: Sequence[tuple[str, object]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, "dim"), Text(str(value)))
    return grid


def streams(found: Sequence[Told]) -> RenderableType:
    """All streams."""
    several = {one.get("region") for one in found} - {None, "global"}  # else it says nothing
    where = ("region",) if several else ()
    table = columns("stream", *where, "kind", "messages>", "size>", "last>", "groups>", "")
    for one in found:
        kind = one["settings"]["kind"]
        named = [Text(one["name"]), *(Text(one.get("region") or "") for _ in where)]
        if kind == "ephemeral":
            listening = Text(f"{one['consumers']} listening")
            if one.get("trouble"):
                listening.append(f"; {one['trouble']}", "red")
            table.add_row(*named, kind, "", "", "", "", listening)
            continue
        table.add_row(
            *named,
            kind,
            f"{one['end'] - one['first']:,}",
            size(one["bytes"]),
            _ago(one["last_time"]),
            str(len(one["groups"])),
            Text(one["trouble"], "red"),
        )
    return table


def stream(one: Told) -> RenderableType:
    """One stream, with its groups."""
    settings = one["settings"]
    pairs: list[tuple[str, object]] = [("kind", settings["kind"])]
    if one.get("region"):
        pairs.append(("region", one["region"]))
    if settings["kind"] == "ephemeral":
        pairs.append(("listening", one["consumers"]))
    else:
        count = one["end"] - one["first"]
        pairs += [
            (
                "messages",
                f"{count:,}, offsets {one['first']:,} to {one['end'] - 1:,}" if count else 0,
            ),
            ("size", size(one["bytes"])),
            ("last", _ago(one["last_time"]) or "never"),
            ("readers", one["readers"]),
        ]
        rules = {k: v for k, v in settings.items() if k != "kind" and v is not None}
        pairs += [(name.replace("_", " "), value) for name, value in rules.items()]
    parts: list[RenderableType] = [Text(one["name"], "bold"), _pairs(pairs)]
    if one.get("trouble"):
        parts.append(Text(one["trouble"], "red"))
    if one.get("groups"):
        parts.append(groups(one["groups"]))
    return Group(*parts)


def groups(found: Sequence[Told]) -> RenderableType:
    """The groups of a stream."""
    table = columns("group", "members>", "lag (messages)>", "in flight>", "next offset>", "why")
    for one in found:
        table.add_row(
            Text(one["name"] + (" (exclusive)" if one["exclusive"] else "")),
            str(one["members"]),
            f"{one['lag']:,}",
            f"{one['in_flight']:,}",
            f"{one['floor']:,}",
            one["code"],
        )
    return table


def group(one: Told) -> RenderableType:
    """One group."""
    pairs: list[tuple[str, object]] = [
        ("position", f"{one['floor']:,} of {one['end']:,}: {one['lag']:,} to go"),
        ("members", str(one["members"]) + (", exclusive" if one["exclusive"] else "")),
    ]
    if one["active"] is not None:
        pairs.append(("active", one["active"]))
    for name in ("credit", "in_flight", "ready", "delayed", "letters"):
        pairs.append((name.replace("_", " "), f"{one[name]:,}"))
    return _pairs(pairs)


_OLD_RULES: Final = {
    "max_deliveries": "dead_deliveries", "distance": "dead_distance", "max_age": "dead_age",
}  # fmt: skip


def headers_of(letter: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a dead letter, with its rule as the settings call it: older letters have another name.

    >>> headers_of({"group": "g", "rule": "distance"}), headers_of({"rule": "dead_age"})
    ({'group': 'g', 'rule': 'dead_distance'}, {'rule': 'dead_age'})
    """
    rule = letter.get("rule", "")
    return dict(letter) | ({"rule": _OLD_RULES[rule]} if rule in _OLD_RULES else {})


def letters(found: Sequence[Told]) -> RenderableType:
    """Dead letters, without what is in them."""
    table = columns(
        "letter>", "group", "offset>", "id", "deliveries>", "rule", "reason", "buried>", ""
    )
    for one in found:
        names = ("group", "offset", "id", "deliveries", "rule", "reason")
        words = [Text(str(one.get(name, ""))) for name in names]
        again = "redriven" if one["redriven"] else ""
        table.add_row(str(one["letter"]), *words, _ago(one["buried"]), again)
    return table


def letter(offset: int, headers: Mapping[str, str], redriven: bool = False) -> str:
    """Describe a dead letter in one line.

    >>> letter(0, {"offset": "7", "group": "g", "deliveries": "3", "rule": "dead_deliveries", "reason": "no"})
    'letter 0: offset 7, group g, 3 deliveries, rule dead_deliveries: no'
    """
    told = (
        f"letter {offset}: offset {headers.get('offset', '?')}, group {headers.get('group', '?')}"
    )
    told += f", {headers.get('deliveries', '?')} deliveries, rule {headers.get('rule', '?')}"
    told += ", redriven" if redriven else ""
    return told + (f": {headers['reason']}" if headers.get("reason") else "")


def _ago(when: float | None) -> str:
    return "" if when is None else f"{duration(max(0.0, time.time() - when))} ago"
