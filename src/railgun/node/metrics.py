"""Figures of a node, as text for Prometheus: what streams and groups count anyway, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from railgun.core.delivery import Explanation
from railgun.core.interest import Remote
from railgun.core.prometheus import Labels, Text
from railgun.node.counts import BOUNDS
from railgun.node.groups import GroupDriver
from railgun.node.node import Ephemeral, Node
from railgun.node.persistent import Persistent

_STREAM: Final[tuple[tuple[str, str, str, Callable[[Persistent], float]], ...]] = (
    ("first", "gauge", "First offset that is kept", lambda s: s.log.first),
    ("end", "gauge", "Offset of the next message", lambda s: s.end),
    ("bytes", "gauge", "Bytes of its log on disk", lambda s: s.log.size),
    ("failed", "gauge", "1 if its files have failed or are damaged", lambda s: int(bool(s.trouble))),
    ("published_messages_total", "counter", "Messages stored", lambda s: s.counts.messages),
    ("published_bytes_total", "counter", "Bytes stored", lambda s: s.counts.bytes),
    (
        "duplicates_total", "counter", "Messages with an ID that was there already",
        lambda s: s.counts.refused["DUPLICATE_ID"] + s.counts.refused["OK"],
    ),
    ("dead_letters_total", "counter", "Messages that became dead letters", lambda s: s.counts.dead),
)  # fmt: skip
_GROUP: Final[tuple[tuple[str, str, str, Callable[[GroupDriver, Explanation], float]], ...]] = (
    ("lag", "gauge", "Messages from its position to the end", lambda _, e: e.end - e.floor),
    ("in_flight", "gauge", "Messages that members have", lambda _, e: e.in_flight),
    ("delayed", "gauge", "Messages that wait for a time", lambda _, e: e.delayed),
    ("members", "gauge", "Members there are", lambda _, e: e.members),
    ("redelivered_total", "counter", "Messages delivered again", lambda d, _: d.redelivered),
)


def prometheus(node: Node, connections: int) -> str:
    """The figures of a node, since it was started."""
    text = Text()
    text.gauge("connections", "Clients that are connected", connections)
    text.gauge("streams", "Streams there are", len(node.streams))
    text.counter("publishes_refused_total", "Publishes and messages that were refused, by code")
    persistent = {n: s for n, s in sorted(node.streams.items()) if isinstance(s, Persistent)}
    refused = node.refused.copy()
    for stream in persistent.values():
        refused.update(stream.counts.refused)
    for code, count in sorted(refused.items()):
        if code != "OK":
            text.add((("code", code),), count)
    for metric, kind, what, value in _STREAM:
        text.begin(f"stream_{metric}", kind, what)
        for name, stream in persistent.items():
            text.add((("stream", name),), value(stream))
    text.begin("stream_listeners", "gauge", "Who listens to an ephemeral stream on this node")
    for name, other in sorted(node.streams.items()):
        if isinstance(other, Ephemeral):
            here = sum(not isinstance(one, Remote) for one in other.exchange.members())
            text.add((("stream", name),), here)
    text.begin("publish_seconds", "histogram", "How long a publish took until it was on disk")
    for name, stream in persistent.items():
        counts = stream.counts
        text.histogram((("stream", name),), BOUNDS, counts.commits, counts.seconds)
    _tell_groups(text, persistent)
    return str(text)


def _tell_groups(text: Text, persistent: dict[str, Persistent]) -> None:
    found: list[tuple[Labels, GroupDriver, Explanation]] = [
        ((("stream", name), ("group", group)), driver, driver.explain())
        for name, stream in persistent.items()
        for group, driver in stream.groups.items()
        if driver.tracked
    ]
    for metric, kind, what, value in _GROUP:
        text.begin(f"group_{metric}", kind, what)
        for labels, driver, explanation in found:
            text.add(labels, value(driver, explanation))
