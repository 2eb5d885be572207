"""Draw streams, consumer groups and dead letters for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from railgun.cli.output import columns, duration, size

StreamData = dict[str, Any]


def _pairs(pairs: Sequence[tuple[str, object]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, "dim"), Text(str(value)))
    return grid


def streams(streams: Sequence[StreamData]) -> RenderableType:
    """Draw a table with a row for each stream; regions are shown if there are any but `global`."""
    regions = {stream.get("region") for stream in streams} - {None, "global"}
    region_column = ("region",) if regions else ()
    table = columns("stream", *region_column, "kind", "messages>", "size>", "last>", "groups>", "")
    for stream in streams:
        kind = stream["settings"]["kind"]
        named = [Text(stream["name"]), *(Text(stream.get("region") or "") for _ in region_column)]
        if kind == "ephemeral":
            listening = Text(f"{stream['consumers']} listening")
            if stream.get("trouble"):
                listening.append(f"; {stream['trouble']}", "red")
            table.add_row(*named, kind, "", "", "", "", listening)
            continue
        table.add_row(
            *named,
            kind,
            f"{stream['end'] - stream['first']:,}",
            size(stream["bytes"]),
            _ago(stream["last_time"]),
            str(len(stream["groups"])),
            Text(stream["trouble"], "red"),
        )
    return table


def stream(stream: StreamData) -> RenderableType:
    """Draw a stream: its extent, its settings and its groups."""
    settings = stream["settings"]
    pairs: list[tuple[str, object]] = [("kind", settings["kind"])]
    if stream.get("region"):
        pairs.append(("region", stream["region"]))
    if settings["kind"] == "ephemeral":
        pairs.append(("listening", stream["consumers"]))
    else:
        count = stream["end"] - stream["first"]
        pairs += [
            (
                "messages",
                f"{count:,}, offsets {stream['first']:,} to {stream['end'] - 1:,}" if count else 0,
            ),
            ("size", size(stream["bytes"])),
            ("last", _ago(stream["last_time"]) or "never"),
            ("readers", stream["readers"]),
        ]
        rules = {k: v for k, v in settings.items() if k != "kind" and v is not None}
        pairs += [(name.replace("_", " "), value) for name, value in rules.items()]
    parts: list[RenderableType] = [Text(stream["name"], "bold"), _pairs(pairs)]
    if stream.get("trouble"):
        parts.append(Text(stream["trouble"], "red"))
    if stream.get("groups"):
        parts.append(groups(stream["groups"]))
    return Group(*parts)


def groups(groups: Sequence[StreamData]) -> RenderableType:
    """Draw a table with a row for each consumer group of a stream."""
    table = columns("group", "members>", "lag (messages)>", "in flight>", "next offset>", "why")
    for group in groups:
        table.add_row(
            Text(group["name"] + (" (exclusive)" if group["exclusive"] else "")),
            str(group["members"]),
            f"{group['lag']:,}",
            f"{group['in_flight']:,}",
            f"{group['floor']:,}",
            group["code"],
        )
    return table


def group(group: StreamData) -> RenderableType:
    """Draw a consumer group: its position, members and messages."""
    pairs: list[tuple[str, object]] = [
        ("position", f"{group['floor']:,} of {group['end']:,}: {group['lag']:,} to go"),
        ("members", str(group["members"]) + (", exclusive" if group["exclusive"] else "")),
    ]
    if group["active"] is not None:
        pairs.append(("active", group["active"]))
    for name in ("credit", "in_flight", "ready", "delayed", "letters"):
        pairs.append((name.replace("_", " "), f"{group[name]:,}"))
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


def letters(letters: Sequence[StreamData]) -> RenderableType:
    """Draw a table with a row for each dead letter, without payloads."""
    table = columns(
        "letter>", "group", "offset>", "id", "deliveries>", "rule", "reason", "buried>", ""
    )
    for letter in letters:
        names = ("group", "offset", "id", "deliveries", "rule", "reason")
        words = [Text(str(letter.get(name, ""))) for name in names]
        again = "redriven" if letter["redriven"] else ""
        table.add_row(str(letter["letter"]), *words, _ago(letter["buried"]), again)
    return table


def letter(offset: int, headers: Mapping[str, str], redriven: bool = False) -> str:
    """Describe a dead letter in one line.

    >>> letter(0, {"offset": "7", "group": "g", "deliveries": "3", "rule": "dead_deliveries", "reason": "no"})
    'letter 0: offset 7, group g, 3 deliveries, rule dead_deliveries: no'
    """
    text = (
        f"letter {offset}: offset {headers.get('offset', '?')}, group {headers.get('group', '?')}"
    )
    text += f", {headers.get('deliveries', '?')} deliveries, rule {headers.get('rule', '?')}"
    text += ", redriven" if redriven else ""
    return text + (f": {headers['reason']}" if headers.get("reason") else "")


def _ago(time_s: float | None) -> str:
    return "" if time_s is None else f"{duration(max(0.0, time.time() - time_s))} ago"
