"""Figures of a node, as text for Prometheus: what streams and groups count anyway, read when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from railgun.broker.protocol.groups import Explanation
from railgun.broker.protocol.interest import Remote
from railgun.broker.settings import STAGING
from railgun.broker.streams.counts import BOUNDS
from railgun.broker.streams.groups import GroupDriver
from railgun.broker.streams.node import Ephemeral, Node
from railgun.broker.streams.persistent import Persistent
from railgun.transport.prometheus import Labels, Text

_STREAM: Final[tuple[tuple[str, str, str, Callable[[Persistent], float]], ...]] = (
    ("first", "gauge", "First offset that is kept", lambda s: s.log.first),
    ("end", "gauge", "Offset of the next message", lambda s: s.end),
    ("bytes", "gauge", "Bytes of its log on disk", lambda s: s.log.size),
    ("failed", "gauge", "1 if its files cannot be written, have failed or are damaged", lambda s: int(bool(s.trouble))),
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
    text.gauge(
        "streams", "Streams there are", sum(not name.endswith(STAGING) for name in node.streams)
    )
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
    if node.cluster is not None:
        _tell_cluster(text, node.cluster.status())
    text.begin("alarms", "gauge", "Alarms, by code")
    for code, count in sorted(Counter(one["code"] for one in node.alarms()).items()):
        text.add((("code", code),), count)
    return str(text)


def _tell_cluster(text: Text, status: dict[str, Any]) -> None:
    """What this node knows of its cluster; of replicas their master does."""
    nodes = status["nodes"]
    names = {one["id"]: str(one["name"]) for one in nodes}
    text.gauge("cluster_nodes", "Nodes of the cluster", len(nodes))
    text.begin("cluster_up", "gauge", "1 if a node is heard of")
    for one in nodes:
        text.add((("node", one["name"]),), int(one["up"]))
    text.gauge("cluster_streams", "Streams of the cluster", status["streams"])
    text.gauge("raft_term", "Term of Raft", status["term"])
    text.gauge("raft_commit", "Last entry of Raft that is known to be committed", status["commit"])
    text.gauge("raft_leads", "1 if this node leads", int(status["leader"] == status["node"]))
    for metric, what, value in (
        ("epoch", "Epoch of a region", lambda r: r["epoch"]),
        ("active", "1 if its epoch is active", lambda r: int(r["active"])),
        ("is_master", "1 if this node is its master", lambda r: int(r["master"] == status["node"])),
    ):
        text.begin(f"region_{metric}", "gauge", what)
        for region in status["regions"]:
            text.add((("region", region["name"]),), value(region))
    text.begin("replica_lag", "gauge", "Messages of the master that a replica lacks")
    for region in status["regions"]:
        for id, lag in region["lag"].items():
            labels = (("region", region["name"]), ("node", names.get(id, id)))
            text.add(labels, lag["messages"])


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
