"""Regions: who has copies, who of them votes, and who is the master, epoch by epoch.

Rules:

1. An epoch is one master with one voting set. It begins with an entry of the log, its number only grows, and a region
   begins with the index of the entry that made it as its epoch: so a region that comes back after it was gone has no
   epoch twice (replicas have promised on disk to take nothing of an older one).
2. A new epoch has another master or a voting set that differs by one node, not both. The set changes only in an epoch
   that is active, so no set but that of the last active epoch (`active`) and the present one (`voting`) can have
   acknowledged something that must not be lost, and these differ by one node at most.
3. A new replica learns. Only in a region that never had a master do nodes vote at once, and leave at once: nobody can
   have written anything.
4. The voting set of a region with a master or with streams is never empty, and its master votes.
5. A replica that votes leaves one way: `demote`. It learns again then, if it still names the region.
6. A region is there while a node names it or a stream is in it; `global` always is. Without streams there is nothing to
   lose: when all who vote have left the cluster it is made anew from those who name it.
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
    """None: it never had one."""
    voting: tuple[str, ...] = ()
    learning: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    """The voting set of the last epoch that was active."""
    is_active: bool = False
    """Whether a majority of the voting set has the label of this epoch on every stream."""

    @staticmethod
    def begin(name: str, index: int, voting: Collection[str]) -> Region:
        """A region with nothing in it."""
        nodes = tuple(sorted(voting))
        return Region(name, index, index, voting=nodes, active=nodes)

    # ------------------------------------------------------------ epochs

    def with_master(self, node: str, index: int) -> Region:
        """The next epoch, with this master."""
        return replace(self, epoch=self.epoch + 1, epoch_index=index, master=node, is_active=False)

    def promoted(self, node: str, index: int) -> Region:
        """The next epoch, in which one more votes."""
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
            learning=tuple(one for one in self.learning if one != node),
            is_active=False,
        )

    def demoted(self, node: str, index: int, learns: bool) -> Region:
        """The next epoch, in which one does not vote any more."""
        if node not in self.voting:
            raise RefusedError("NOT_VOTING", f"{node} does not vote in region {self.name!r}")
        if node == self.master:
            raise RefusedError(
                "MASTER", f"{node} is the master of region {self.name!r}: make another one it first"
            )
        return replace(
            self,
            epoch=self.epoch + 1,
            epoch_index=index,
            voting=tuple(one for one in self.voting if one != node),
            learning=tuple(sorted({*self.learning, node})) if learns else self.learning,
            is_active=False,
        )

    def activated(self) -> Region:
        """The same epoch: a majority has all that matters."""
        return replace(self, active=self.voting, is_active=True)

    def check_epoch(self, epoch: int, expected: int) -> None:
        """Refuse what was decided when things were different."""
        if epoch != expected:
            raise RefusedError(
                "STALE",
                f"region {self.name!r} is in epoch {self.epoch} now: this was for another one",
                epoch=self.epoch,
            )

    def check_active(self) -> None:
        """Refuse a second change of the set before the first one is done."""
        if not self.is_active:
            raise RefusedError(
                "NOT_ACTIVE",
                f"epoch {self.epoch} of region {self.name!r} is not active yet: wait until a majority "
                "of its replicas has caught up",
            )

    # ------------------------------------------------------------ plain data

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        told = asdict(self)
        return told | {key: list(told[key]) for key in ("voting", "learning", "active")}

    @staticmethod
    def load(dumped: dict[str, Any]) -> Region:
        """What `dump` told."""

        def ids(key: str) -> tuple[str, ...]:
            return tuple(check_name(one, key) for one in check_list(dumped.get(key), key))

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
    """Whether a node cannot leave the cluster because it votes here; `used`: regions with streams."""
    if node not in region.voting:
        return False
    if region.voting == (node,):
        return region.name in used
    return region.master is not None


def settle(
    regions: Mapping[str, Region], nodes: Mapping[str, NodeInfo], used: Collection[str], index: int
) -> dict[str, Region]:
    """The regions as they are after nodes or streams have changed: rules 3, 5 and 6."""
    named: dict[str, set[str]] = {GLOBAL: set()}
    for node in nodes.values():
        for name in node.regions:
            named.setdefault(name, set()).add(node.id)
    settled = {}
    for name in sorted({*named, *used}):
        names = named.get(name, set())
        region = regions.get(name)
        if region is None or (name not in used and _is_abandoned(region, names, nodes)):
            settled[name] = Region.begin(name, index, names)
        elif region.master is None:
            voting = tuple(sorted(names))
            if not voting and name in used:  # one has to stay, until another one comes
                voting = tuple(one for one in region.voting if one in nodes)
            settled[name] = replace(region, voting=voting, active=voting)
        else:
            learning = tuple(sorted(names - set(region.voting)))
            settled[name] = replace(region, learning=learning)
    return settled


def _is_abandoned(region: Region, names: Collection[str], nodes: Mapping[str, NodeInfo]) -> bool:
    """Whether nobody is left who votes, or nobody who wants to."""
    if not region.voting:
        return False
    return not names or not any(one in nodes for one in region.voting)
