"""State machine of the cluster metadata. Every node applies the same entries of Raft's log, in order.

Rules:

1. `apply` takes an entry and returns its result. The same entries make the same state and the same results on every
   node: nothing here depends on a clock, chance, or an order that differs.
2. No command can stop a node. A command that is not understood or not possible gives `{"error": {"code", "text"}}`, and
   then nothing has changed.
3. A command may carry a `request`, a text chosen by its proposer. The results of the last 1000 requests are part of the
   state: the same request again gives the same result and does nothing. So a proposal whose outcome is unknown is
   proposed again.
4. The first command is `form`. Until then every other command is refused (`NOT_FORMED`), after that a second one
   (`FORMED`, with the id of the existing cluster): if several nodes form a cluster at the same time, one wins.
5. Nodes have a permanent id, a unique name, and addresses that may change. Their roles in regions are in `regions`, the
   streams in `catalogue`; the rules are in those modules.
6. A decision made for an epoch of a region counts in that epoch only; otherwise it is `STALE`.
7. A node leaves in steps (see `steering`): it is marked to leave, is master of no region, votes nowhere, and only then
   is removed.
8. The description that a node sent counts until it sends another one. `remove` may carry the `index` of the last one:
   if the node has come back since, it is not removed.
9. A removed node stays removed for ever (`REMOVED`), even if it is restarted with its old directory. It comes back as a
   new node, with another id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

from railgun.broker.protocol.metadata import options
from railgun.broker.protocol.metadata.fields import (
    RefusedError,
    Scalar,
    check_list,
    check_name,
    check_object,
    check_region,
    invalid,
    quoted,
    take_name,
    take_text,
    take_whole,
)
from railgun.broker.protocol.metadata.nodes import MASTER, NodeInfo
from railgun.broker.protocol.metadata.regions import Region, holds, updated_regions
from railgun.broker.protocol.metadata.streams import Catalogue, StreamInfo
from railgun.errors import ProtocolError

MAX_REQUESTS: Final = 1000
MAX_NODES: Final = 1000
DUMP_FORMAT: Final = 1
"""The version of the result of `dump`."""

Result = dict[str, Any]


class Metadata:
    """The metadata of a cluster, as one node has applied it.

    >>> metadata = Metadata()
    >>> node = {"id": "n1", "name": "one", "host": "10.0.0.1", "port": 7400, "cluster_port": 7401}
    >>> metadata.apply(2, {"do": "form", "cluster": "c1", "nodes": [node]})
    {'result': 'FORMED', 'cluster': 'c1'}
    >>> metadata.apply(3, {"do": "master", "region": "global", "master": "n1", "epoch": 3})
    {'result': 'BEGAN', 'epoch': 3}
    >>> metadata.apply(4, {"do": "ensure", "name": "orders"})
    {'result': 'CREATED', 'differs': {}, 'id': 4}
    >>> metadata.apply(5, {"do": "master", "region": "global", "master": "n1", "epoch": 3})["error"]["code"]
    'STALE'
    """

    __slots__ = (
        "_requests",
        "catalogue",
        "cluster",
        "index",
        "nodes",
        "regions",
        "removed",
        "settings",
        "wanted_gone",
    )

    def __init__(self) -> None:
        self.index = 0
        """The index of the last applied entry."""
        self.cluster = ""
        """The id of the cluster; empty before it is formed."""
        self.settings: dict[str, Scalar] = options.defaults()
        self.nodes: dict[str, NodeInfo] = {}
        self.wanted_gone: set[str] = set()
        """Nodes that are marked to leave."""
        self.removed: set[str] = set()
        """The ids of all removed nodes."""
        self.regions: dict[str, Region] = {}
        self.catalogue = Catalogue()
        self._requests: dict[str, Result] = {}

    # ------------------------------------------------------------ queries

    @property
    def streams(self) -> Mapping[str, StreamInfo]:
        """Return all streams by name."""
        return self.catalogue.streams

    @property
    def deleted(self) -> set[int]:
        """Return the ids of all deleted streams; files are removed for these only."""
        return self.catalogue.deleted

    def seconds(self, key: str) -> float | None:
        """Return a setting of the cluster, in seconds."""
        value = self.settings.get(key, options.OPTIONS[key].default)
        return None if value is None else float(value)

    def drift(self, file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return where the settings in a node's file differ from those of the cluster."""
        return options.drift(self.settings, file)

    def role(self, node: str, region: str) -> str | None:
        """Return a node's role in a region, or None."""
        info = self.nodes.get(node)
        return None if info is None else info.regions.get(region)

    def can_lead(self, region: str) -> bool:
        """Return whether a region has a node that can be its master and is not marked to leave."""
        voting = self.regions[region].voting if region in self.regions else ()
        return any(
            self.role(node, region) == MASTER and node not in self.wanted_gone for node in voting
        )

    # ------------------------------------------------------------ entries

    def apply(self, index: int, command: Any) -> Result:
        """Apply the entry at `index`, and return its result. Raises `ProtocolError` if it was applied before."""
        if index <= self.index:
            raise ProtocolError(f"entry {index} was applied already: the last one is {self.index}")
        self.index = index
        try:
            fields = check_object(command, "command")
            request = take_text(fields, "request") if "request" in fields else None
        except RefusedError as error:
            return error.result()
        if request is not None and request in self._requests:
            return deepcopy(self._requests[request])
        try:
            result = self._do(index, fields)
        except RefusedError as error:
            result = error.result()
        if request is not None:
            if len(self._requests) >= MAX_REQUESTS:
                del self._requests[next(iter(self._requests))]
            self._requests[request] = deepcopy(result)
        return result

    def _do(self, index: int, command: dict[str, Any]) -> Result:
        name = command.get("do")
        handler = _HANDLERS.get(name) if isinstance(name, str) else None
        if handler is None:
            raise invalid(
                f"there is no command {quoted(name)}; there are {', '.join(sorted(_HANDLERS))}"
            )
        if not self.cluster and name != "form":
            raise RefusedError("NOT_FORMED", "there is no cluster yet")
        return handler(self, index, command)

    # ------------------------------------------------------------ the cluster and its nodes

    def _form(self, index: int, command: dict[str, Any]) -> Result:
        if self.cluster:
            raise RefusedError(
                "FORMED", f"there is a cluster already: {self.cluster}", cluster=self.cluster
            )
        cluster = take_name(command, "cluster")
        settings = options.check_options(command.get("settings", {}))
        nodes = [NodeInfo.of(node, index) for node in check_list(command.get("nodes"), "nodes")]
        if not 0 < len(nodes) <= MAX_NODES:
            raise invalid(f"a cluster begins with 1 to {MAX_NODES} nodes, not {len(nodes)}")
        if len({node.id for node in nodes}) < len(nodes):
            raise invalid("two nodes have the same id")
        if len({node.name for node in nodes}) < len(nodes):
            raise RefusedError("NAME_TAKEN", "two nodes have the same name: give each its own")
        self.cluster = cluster
        self.settings |= settings
        self.nodes = {node.id: node for node in nodes}
        self._update_regions(index)
        return {"result": "FORMED", "cluster": cluster}

    def _node(self, index: int, command: dict[str, Any]) -> Result:
        node = NodeInfo.of(command.get("node"), index)
        if node.id in self.removed:
            raise RefusedError(
                "REMOVED",
                f"{node.id} was removed: to have it back, start it as a new node, with an empty directory",
            )
        for other in self.nodes.values():
            if other.name == node.name and other.id != node.id:
                raise RefusedError(
                    "NAME_TAKEN",
                    f"node {other.id} has the name {node.name!r}: give {node.id} another name, or let "
                    f"{other.id} leave",
                )
        before = self.nodes.get(node.id)
        if before is None and len(self.nodes) >= MAX_NODES:
            raise RefusedError("TOO_MANY", f"a cluster has at most {MAX_NODES} nodes")
        self.nodes[node.id] = node
        self._update_regions(index)
        change = "UPDATED" if before is None or not node.same_as(before) else "UNCHANGED"
        leaving = [
            region.name
            for region in self.regions.values()
            if node.id in region.voting and region.name not in node.regions
        ]
        return {"result": "JOINED" if before is None else change, "leaving": leaving}

    def _leave(self, index: int, command: dict[str, Any]) -> Result:
        node = self._existing_node(command)
        if not set(self.nodes) - self.wanted_gone - {node}:
            raise RefusedError("STILL_IN_USE", f"{node} is the last node: the cluster needs one")
        used = self.catalogue.used
        for region in self.regions.values():
            others = {*region.voting, *region.learning} - {node} - self.wanted_gone
            eligible = any(self.role(other, region.name) == MASTER for other in others)
            if region.name in used and node in region.voting and not eligible:
                raise RefusedError(
                    "STILL_IN_USE",
                    f"no node but {node} can be the master of region {region.name!r}: let another node have it, "
                    "or delete its streams",
                )
        self.wanted_gone.add(node)
        return {"result": "LEAVING"}

    def _stay(self, index: int, command: dict[str, Any]) -> Result:
        self.wanted_gone.discard(self._existing_node(command))
        return {"result": "STAYS"}

    def _remove(self, index: int, command: dict[str, Any]) -> Result:
        node = self._existing_node(command)
        if command.get("index") is not None:
            seen = take_whole(command, "index")
            if seen != self.nodes[node].index:
                raise RefusedError("STALE", f"{node} has come back: it stays")
        used = self.catalogue.used
        held = [region.name for region in self.regions.values() if holds(region, node, used)]
        if held:
            raise RefusedError(
                "STILL_IN_USE",
                f"{node} votes in {', '.join(held[:5])}: run railgun cluster remove, and wait until it has left",
            )
        if len(self.nodes) == 1:
            raise RefusedError("STILL_IN_USE", f"{node} is the last node: the cluster needs one")
        del self.nodes[node]
        self.wanted_gone.discard(node)
        self.removed.add(node)
        self._update_regions(index)
        return {"result": "REMOVED"}

    def _change_settings(self, index: int, command: dict[str, Any]) -> Result:
        change = options.check_options(command.get("change"))
        before = self.settings
        for key, value in change.items():
            if options.OPTIONS[key].fixed and value != before[key]:
                raise RefusedError(
                    "BAD_SETTINGS",
                    f"{key} is fixed when the cluster is formed, and is {before[key]:g} seconds: leases depend on it, "
                    "and nodes would not change it at the same moment",
                )
        self.settings = before | change
        result = "UNCHANGED" if self.settings == before else "UPDATED"
        return {"result": result, "settings": dict(self.settings)}

    # ------------------------------------------------------------ regions

    def _master(self, index: int, command: dict[str, Any]) -> Result:
        region, epoch = self._region(command), take_whole(command, "epoch")
        node = take_name(command, "master")
        region.check_epoch(epoch, region.epoch + 1)
        if node not in region.voting or self.role(node, region.name) != MASTER:
            raise RefusedError(
                "NOT_ELIGIBLE",
                f"{node} cannot be the master of region {region.name!r}: it must vote there, and its file "
                "must give it the role master there",
            )
        return self._begin(region.with_master(node, index))

    def _promote(self, index: int, command: dict[str, Any]) -> Result:
        region, node = self._region(command), self._existing_node(command)
        region.check_epoch(take_whole(command, "epoch"), region.epoch)
        region.check_active()
        if node in self.wanted_gone:
            raise RefusedError("NOT_ELIGIBLE", f"{node} is about to leave the cluster")
        return self._begin(region.promoted(node, index))

    def _demote(self, index: int, command: dict[str, Any]) -> Result:
        region, node = self._region(command), self._existing_node(command)
        region.check_epoch(take_whole(command, "epoch"), region.epoch)
        region.check_active()
        learns = self.role(node, region.name) is not None
        return self._begin(region.demoted(node, index, learns))

    def _active(self, index: int, command: dict[str, Any]) -> Result:
        region = self._region(command)
        region.check_epoch(take_whole(command, "epoch"), region.epoch)
        if region.master is None:
            raise RefusedError("NOT_ACTIVE", f"region {region.name!r} has no master yet")
        self.regions[region.name] = region.activated()
        return {"result": "ACTIVE", "epoch": region.epoch}

    def _begin(self, region: Region) -> Result:
        self.regions[region.name] = region
        return {"result": "BEGAN", "epoch": region.epoch}

    # ------------------------------------------------------------ streams

    def _ensure(self, index: int, command: dict[str, Any]) -> Result:
        return self.catalogue.ensure(index, command, self.can_lead)

    def _delete(self, index: int, command: dict[str, Any]) -> Result:
        result = self.catalogue.delete(command)
        self._update_regions(index)
        return result

    def _groups(self, index: int, command: dict[str, Any]) -> Result:
        region = self._region(command)
        if take_whole(command, "epoch") != region.epoch:
            return {"result": "IGNORED", "epoch": region.epoch}
        return self.catalogue.note_groups(region.name, command)

    # ------------------------------------------------------------ lookups

    def _existing_node(self, command: dict[str, Any]) -> str:
        node = take_name(command, "node")
        if node not in self.nodes:
            raise RefusedError("NO_NODE", f"there is no node {node} in the cluster")
        return node

    def _region(self, command: dict[str, Any]) -> Region:
        name = check_region(command.get("region"))
        region = self.regions.get(name)
        if region is None:
            raise RefusedError("NO_REGION", f"there is no region {name!r}")
        return region

    def _update_regions(self, index: int) -> None:
        self.regions = updated_regions(self.regions, self.nodes, self.catalogue.used, index)

    # ------------------------------------------------------------ snapshots

    def dump(self) -> dict[str, Any]:
        """Return the whole state as plain data, for a snapshot. Changing the result does not change the metadata."""
        return {
            "format": DUMP_FORMAT,
            "index": self.index,
            "cluster": self.cluster,
            "settings": dict(self.settings),
            "nodes": [node.dump() for node in self.nodes.values()],
            "wanted_gone": sorted(self.wanted_gone),
            "removed": sorted(self.removed),
            "regions": [region.dump() for region in self.regions.values()],
            "catalogue": self.catalogue.dump(),
            "requests": [[key, deepcopy(result)] for key, result in self._requests.items()],
        }

    @staticmethod
    def load(dumped: dict[str, Any]) -> Metadata:
        """Return the metadata from the result of `dump`.

        Raises `ProtocolError` if any part is invalid: a node must not go on with a part of the state.
        """
        if not isinstance(dumped, dict) or dumped.get("format") != DUMP_FORMAT:
            raise ProtocolError(
                "a snapshot of the metadata is in a form this version does not know: use a later one"
            )
        try:
            return Metadata._load(dumped)
        except (RefusedError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"a snapshot of the metadata cannot be read: {error}") from error

    @staticmethod
    def _load(dumped: dict[str, Any]) -> Metadata:
        metadata = Metadata()
        metadata.index = take_whole(dumped, "index")
        metadata.cluster = check_name(dumped["cluster"], "cluster") if dumped["cluster"] else ""
        metadata.settings = dict(check_object(dumped["settings"], "settings"))
        for dumped_node in dumped["nodes"]:
            node = NodeInfo.load(dumped_node)
            metadata.nodes[node.id] = node
        metadata.wanted_gone = {check_name(node, "node") for node in dumped["wanted_gone"]}
        metadata.removed = {check_name(node, "node") for node in dumped["removed"]}
        for dumped_region in dumped["regions"]:
            region = Region.load(dumped_region)
            metadata.regions[region.name] = region
        metadata.catalogue = Catalogue.load(dumped["catalogue"], metadata.index)
        metadata._requests = {
            key: deepcopy(check_object(result, "result")) for key, result in dumped["requests"]
        }
        return metadata


_HANDLERS: Final[Mapping[str, Callable[[Metadata, int, dict[str, Any]], Result]]] = {
    "form": Metadata._form,
    "node": Metadata._node,
    "leave": Metadata._leave,
    "stay": Metadata._stay,
    "remove": Metadata._remove,
    "settings": Metadata._change_settings,
    "master": Metadata._master,
    "promote": Metadata._promote,
    "demote": Metadata._demote,
    "active": Metadata._active,
    "ensure": Metadata._ensure,
    "delete": Metadata._delete,
    "groups": Metadata._groups,
}
