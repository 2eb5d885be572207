"""Regions: which nodes have copies, which of them vote, and which is the master, epoch by epoch.

Rules:

1. An epoch is one master with one voting set. It begins with an entry of the log, its number only grows, and the first
   epoch of a region is the index of the entry that made it: so a region that comes back after it was gone never uses an
   epoch twice (replicas have promised on disk to take nothing of an older one).
2. A new epoch has another master or a voting set that differs by one node, not both. The set changes only in an epoch
   that is active, so only the set of the last active epoch (`active`) and the present one (`voting`) can have
   acknowledged messages that must not be lost, and these differ by one node at most.
3. A new replica learns. Only in a region that never had a master do nodes vote at once, and leave at once: no message
   can have been written.
4. The voting set of a region with a master or with streams is never empty, and its master votes.
5. A voting replica leaves the set only by `demote`. Then it learns again, if it still names the region.
6. A region exists while a node names it or a stream is in it; `global` always does. Without streams there is nothing to
   lose: when all voting nodes have left the cluster, the region is made anew from the nodes that name it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from railgun.broker.protocol.metadata.fields import (
    RefusedError,
    check_list,
    check_name,
    take_flag,
    take_whole,
)
from railgun.broker.protocol.metadata.nodes import GLOBAL, NodeInfo


@dataclass(frozen=True, slots=True)
class Region:
    """A region in its present epoch. Nodes are ids, in order."""

    name: str
    epoch: int
    epoch_index: int
    """The index of the entry that began the epoch."""
    master: str | None = None
    """None: the region never had a master."""
    voting: tuple[str, ...] = ()
    learning: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    """The voting set of the last active epoch."""
    is_active: bool = False
    """Whether a majority of the voting set has the label of this epoch on every stream."""

    @staticmethod
    def begin(name: str, index: int, voting: Collection[str]) -> Region:
        """Return a new region without a master."""
        nodes = tuple(sorted(voting))
        return Region(name, index, index, voting=nodes, active=nodes)

    # ------------------------------------------------------------ epochs

    def with_master(self, node: str, index: int) -> Region:
        """Return the next epoch, with this master."""
        return replace(self, epoch=self.epoch + 1, epoch_index=index, master=node, is_active=False)

    def promoted(self, node: str, index: int) -> Region:
        """Return the next epoch, in which a learner votes."""
        if node not in self.learning:
            raise RefusedError(
                "NOT_LEARNING",
                f"{node} does not learn in region {self.name!r}, so it cannot be promoted",
            )
        return replace(
            self,
            epoch=self.epoch + 1,
            epoch_index=index,
            voting=tuple(sorted({*self.voting, node})),
            learning=tuple(other for other in self.learning if other != node),
            is_active=False,
        )

    def demoted(self, node: str, index: int, learns: bool) -> Region:
        """Return the next epoch, in which a voting node no longer votes; `learns`: it becomes a learner."""
        if node not in self.voting:
            raise RefusedError("NOT_VOTING", f"{node} does not vote in region {self.name!r}")
        if node == self.master:
            raise RefusedError(
                "MASTER",
                f"{node} is the master of region {self.name!r}: make another node master first",
            )
        return replace(
            self,
            epoch=self.epoch + 1,
            epoch_index=index,
            voting=tuple(other for other in self.voting if other != node),
            learning=tuple(sorted({*self.learning, node})) if learns else self.learning,
            is_active=False,
        )

    def activated(self) -> Region:
        """Return the region with the present epoch active."""
        return replace(self, active=self.voting, is_active=True)

    def check_epoch(self, epoch: int, expected: int) -> None:
        """Raise `RefusedError` if a decision was made for another epoch."""
        if epoch != expected:
            raise RefusedError(
                "STALE",
                f"region {self.name!r} is in epoch {self.epoch} now: the command was for another epoch",
                epoch=self.epoch,
            )

    def check_active(self) -> None:
        """Raise `RefusedError` if the last change of the set is not complete."""
        if not self.is_active:
            raise RefusedError(
                "NOT_ACTIVE",
                f"epoch {self.epoch} of region {self.name!r} is not active yet: wait until a majority "
                "of its replicas has caught up",
            )

    # ------------------------------------------------------------ plain data

    def dump(self) -> dict[str, Any]:
        """Return the region as plain data."""
        fields = asdict(self)
        return fields | {key: list(fields[key]) for key in ("voting", "learning", "active")}

    @staticmethod
    def load(dumped: dict[str, Any]) -> Region:
        """Return the region from the result of `dump`."""

        def ids(key: str) -> tuple[str, ...]:
            return tuple(check_name(id, key) for id in check_list(dumped.get(key), key))

        master = dumped.get("master")
        return Region(
            check_name(dumped.get("name"), "region"),
            take_whole(dumped, "epoch"),
            take_whole(dumped, "epoch_index"),
            None if master is None else check_name(master, "master"),
            ids("voting"),
            ids("learning"),
            ids("active"),
            take_flag(dumped, "is_active"),
        )


def holds(region: Region, node: str, used: Collection[str]) -> bool:
    """Return whether a node cannot leave the cluster as it votes in the region; `used`: the regions with streams."""
    if node not in region.voting:
        return False
    if region.voting == (node,):
        return region.name in used
    return region.master is not None


def updated_regions(
    regions: Mapping[str, Region], nodes: Mapping[str, NodeInfo], used: Collection[str], index: int
) -> dict[str, Region]:
    """Return the regions after nodes or streams have changed: rules 3, 5 and 6."""
    named: dict[str, set[str]] = {GLOBAL: set()}
    for node in nodes.values():
        for name in node.regions:
            named.setdefault(name, set()).add(node.id)
    updated = {}
    for name in sorted({*named, *used}):
        names = named.get(name, set())
        region = regions.get(name)
        if region is None or (name not in used and _is_abandoned(region, names, nodes)):
            updated[name] = Region.begin(name, index, names)
        elif region.master is None:
            voting = tuple(sorted(names))
            if not voting and name in used:  # keep the last voters until another node comes
                voting = tuple(voter for voter in region.voting if voter in nodes)
            updated[name] = replace(region, voting=voting, active=voting)
        else:
            learning = tuple(sorted(names - set(region.voting)))
            updated[name] = replace(region, learning=learning)
    return updated


def _is_abandoned(region: Region, names: Collection[str], nodes: Mapping[str, NodeInfo]) -> bool:
    """Return whether no voting node is left in the cluster, or no node names the region."""
    if not region.voting:
        return False
    return not names or not any(voter in nodes for voter in region.voting)
