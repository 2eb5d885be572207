"""The metadata of one node: its permanent id, and fields that may change with each start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import (
    check_object,
    check_region,
    invalid,
    quoted,
    take_name,
    take_text,
    take_whole,
)

GLOBAL: Final = "global"
"""The region that always exists."""
MASTER: Final = "master"
REPLICA: Final = "replica"
MAX_REGIONS: Final = 100
"""Limit for one node."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node, as it described itself in the entry at `index`."""

    id: str
    name: str
    """A unique name for operators."""
    host: str
    port: int
    """The port for clients."""
    cluster_host: str
    cluster_port: int
    """The port for other nodes."""
    http: str
    """The address of its HTTP API, or empty."""
    regions: Mapping[str, str]
    """The regions it has copies of, and its role in each: "master" (it may be master) or "replica"."""
    version: str
    index: int

    @staticmethod
    def of(description: Any, index: int) -> NodeInfo:
        """Return the node that a command describes. Raises `RefusedError`.

        >>> node = {"id": "n1", "name": "one", "host": "10.0.0.1", "port": 7400, "cluster_port": 7401}
        >>> NodeInfo.of(node, 5).regions
        {'global': 'master'}
        """
        fields = check_object(description, "node")
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

    def same_as(self, other: NodeInfo) -> bool:
        """Return whether both are equal except for their index."""
        return self.dump() | {"index": 0} == other.dump() | {"index": 0}

    def dump(self) -> dict[str, Any]:
        """Return the node as plain data."""
        return asdict(self) | {"regions": dict(self.regions)}

    @staticmethod
    def load(dumped: dict[str, Any]) -> NodeInfo:
        """Return the node from the result of `dump`."""
        return NodeInfo.of(dumped, take_whole(dumped, "index"))


def _regions(value: Any) -> dict[str, str]:
    if value is None:
        return {GLOBAL: MASTER}
    regions = check_object(value, "regions")
    if len(regions) > MAX_REGIONS:
        raise invalid(f"a node has at most {MAX_REGIONS} regions, not {len(regions)}")
    for name, role in regions.items():
        check_region(name)
        if role not in (MASTER, REPLICA) or not isinstance(role, str):
            raise invalid(
                f"in a region a node is 'master' or 'replica', not {quoted(role)} (in {name})"
            )
    return {name: regions[name] for name in sorted(regions)}
