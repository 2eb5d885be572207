"""What all nodes know of one: its id for ever, and what may change with each start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import (
    bad,
    check_object,
    check_region,
    take_name,
    take_text,
    take_whole,
    told,
)

GLOBAL: Final = "global"
"""The region that always exists."""
MASTER: Final = "master"
REPLICA: Final = "replica"
MOST_REGIONS: Final = 100
"""Of one node."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node, as it has told about itself in the entry with this `index`."""

    id: str
    name: str
    """For people."""
    host: str
    port: int
    """For clients."""
    cluster_host: str
    cluster_port: int
    """For other nodes."""
    http: str
    """Where its HTTP API is, if it has one."""
    regions: Mapping[str, str]
    """What it has copies of: it can be "master" there, or is a "replica" only."""
    version: str
    index: int

    @staticmethod
    def of(told_of: Any, index: int) -> NodeInfo:
        """As a command tells it.

        >>> told_of = {"id": "n1", "name": "one", "host": "10.0.0.1", "port": 7400, "cluster_port": 7401}
        >>> NodeInfo.of(told_of, 5).regions
        {'global': 'master'}
        """
        fields = check_object(told_of, "node")
        http = take_text(fields, "http", 500) if fields.get("http") else ""
        version = take_text(fields, "version", 100) if fields.get("version") else ""
        return NodeInfo(
            take_name(fields, "id"),
            take_name(fields, "name"),
            take_text(fields, "host", 253),
            take_whole(fields, "port", 65535),
            take_text(fields, "cluster_host" if fields.get("cluster_host") else "host", 253),
            take_whole(fields, "cluster_port", 65535),
            http,
            _regions(fields.get("regions")),
            version,
            index,
        )

    def is_as(self, other: NodeInfo) -> bool:
        """Whether there is no news."""
        return self.dump() | {"index": 0} == other.dump() | {"index": 0}

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"regions": dict(self.regions)}

    @staticmethod
    def load(dumped: dict[str, Any]) -> NodeInfo:
        """What `dump` told."""
        return NodeInfo.of(dumped, take_whole(dumped, "index"))


def _regions(asked: Any) -> dict[str, str]:
    if asked is None:
        return {GLOBAL: MASTER}
    regions = check_object(asked, "regions")
    if len(regions) > MOST_REGIONS:
        raise bad(f"a node has at most {MOST_REGIONS} regions, not {len(regions)}")
    for name, role in regions.items():
        check_region(name)
        if role not in (MASTER, REPLICA) or not isinstance(role, str):
            raise bad(f"in a region a node is 'master' or 'replica', not {told(role)} (in {name})")
    return {name: regions[name] for name in sorted(regions)}
