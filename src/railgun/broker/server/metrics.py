"""Write a node's metrics as Prometheus text. They are read from counters of streams and groups at each request."""

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
    ("first", "gauge", "Lowest offset kept", lambda s: s.log.first),
    ("end", "gauge", "Offset of the next message", lambda s: s.end),
    ("bytes", "gauge", "Bytes of the stream's log on disk", lambda s: s.log.size),
    ("failed", "gauge", "1 if its files cannot be written, have failed or are damaged", lambda s: int(bool(s.trouble))),
    ("published_messages_total", "counter", "Messages stored", lambda s: s.counts.messages),
    ("published_bytes_total", "counter", "Bytes stored", lambda s: s.counts.bytes),
    (
        "duplicates_total", "counter", "Messages refused because their ID was published before",
        lambda s: s.counts.refused["DUPLICATE_ID"] + s.counts.refused["OK"],
    ),
    ("dead_letters_total", "counter", "Messages that became dead letters", lambda s: s.counts.dead),
)  # fmt: skip
_GROUP: Final[tuple[tuple[str, str, str, Callable[[GroupDriver, Explanation], float]], ...]] = (
    (
        "lag",
        "gauge",
        "Messages between the group's position and the end of the stream",
        lambda _, e: e.end - e.floor,
    ),
    ("in_flight", "gauge", "Messages delivered and not yet acknowledged", lambda _, e: e.in_flight),
    ("delayed", "gauge", "Messages waiting for their redelivery time", lambda _, e: e.delayed),
    ("members", "gauge", "Members of the group", lambda _, e: e.members),
    ("redelivered_total", "counter", "Messages delivered again", lambda d, _: d.redelivered),
)


def prometheus(node: Node, connections: int) -> str:
    """Return the metrics of `node` since its start, as Prometheus text."""
    text = Text()
    text.gauge("connections", "Connected clients", connections)
    text.gauge(
        "streams", "Streams of the node", sum(not name.endswith(STAGING) for name in node.streams)
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
    text.begin("stream_listeners", "gauge", "Listeners of an ephemeral stream on this node")
    for name, any_stream in sorted(node.streams.items()):
        if isinstance(any_stream, Ephemeral):
            local_members = sum(
                not isinstance(member, Remote) for member in any_stream.exchange.members()
            )
            text.add((("stream", name),), local_members)
    text.begin("publish_seconds", "histogram", "Seconds from a publish until it is on disk")
    for name, stream in persistent.items():
        counts = stream.counts
        text.histogram((("stream", name),), BOUNDS, counts.commits, counts.seconds)
    _add_groups(text, persistent)
    if node.cluster is not None:
        _add_cluster(text, node.cluster.status())
    text.begin("alarms", "gauge", "Alarms, by code")
    for code, count in sorted(Counter(alarm["code"] for alarm in node.alarms()).items()):
        text.add((("code", code),), count)
    return str(text)


def _add_cluster(text: Text, status: dict[str, Any]) -> None:
    """Add what this node knows about its cluster. Only a region's master knows the lag of its replicas."""
    nodes = status["nodes"]
    names = {node["id"]: str(node["name"]) for node in nodes}
    text.gauge("cluster_nodes", "Nodes of the cluster", len(nodes))
    text.begin("cluster_up", "gauge", "1 if this node hears heartbeats of a node")
    for node in nodes:
        text.add((("node", node["name"]),), int(node["up"]))
    text.gauge("cluster_streams", "Streams of the cluster", status["streams"])
    text.gauge("raft_term", "Term of Raft", status["term"])
    text.gauge("raft_commit", "Index of the last committed Raft entry", status["commit"])
    text.gauge(
        "raft_leads", "1 if this node is the Raft leader", int(status["leader"] == status["node"])
    )
    for metric, what, value in (
        ("epoch", "Epoch of a region", lambda r: r["epoch"]),
        ("active", "1 if the region's epoch is active", lambda r: int(r["active"])),
        (
            "is_master",
            "1 if this node is the region's master",
            lambda r: int(r["master"] == status["node"]),
        ),
    ):
        text.begin(f"region_{metric}", "gauge", what)
        for region in status["regions"]:
            text.add((("region", region["name"]),), value(region))
    text.begin("replica_lag", "gauge", "Messages that the master has and a replica lacks")
    for region in status["regions"]:
        for id, lag in region["lag"].items():
            labels = (("region", region["name"]), ("node", names.get(id, id)))
            text.add(labels, lag["messages"])


def _add_groups(text: Text, persistent: dict[str, Persistent]) -> None:
    drivers: list[tuple[Labels, GroupDriver, Explanation]] = [
        ((("stream", name), ("group", group)), driver, driver.explain())
        for name, stream in persistent.items()
        for group, driver in stream.groups.items()
        if driver.tracked
    ]
    for metric, kind, what, value in _GROUP:
        text.begin(f"group_{metric}", kind, what)
        for labels, driver, explanation in drivers:
            text.add(labels, value(driver, explanation))
