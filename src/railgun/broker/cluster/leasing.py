"""Leases, and the work of the leader: who may act as a master, and what is to be changed in the cluster.

Rules:

1. Each node tells the leader how it is, every fifth part of an election and whenever there is a reason to, and is told
   for how long it may act as a master: counted from before it asked.
2. What is granted is what is left of the leader's own lease (docs/design/cluster.md).
3. The leader looks at all of it ten times a second (`broker.protocol.metadata.steering`), and does what is decided, one
   thing after the other. What is refused meanwhile is decided anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from railgun.broker.cluster.consensus import Consensus
from railgun.broker.cluster.errors import ClusterError
from railgun.broker.protocol.metadata.steering import ChangeMembers, Propose, Steering, Transfer
from railgun.broker.protocol.raft.messages import ChangeError
from railgun.broker.settings import SECOND
from railgun.errors import RailgunError

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

STEER: Final = 0.1
AGAIN: Final = 0.05
_LOG: Final = logging.getLogger(__name__)


class Leasing:
    """See the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.steering = Steering()
        self._leading = False
        self._leaving: set[str] = set()  # masters that are being replaced
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """There is a reason to ask for a lease at once."""
        self._hurry.set()

    def led(self) -> None:
        """Raft has another leader, term or members."""
        consensus = self._member.consensus
        leads = consensus is not None and consensus.leads
        if leads and not self._leading:
            self.steering.began(time.monotonic())
        self._leading = leads
        self.hurry()
        self._member.notify()

    async def renew_for_ever(self) -> None:
        """Ask for a lease, again and again."""
        member = self._member
        while True:
            pause = member.election / 5
            consensus = member.consensus
            if consensus is not None and member.failed is None:
                try:
                    await self._renew(consensus, 2 * pause)
                except RailgunError:
                    pause = AGAIN
                except Exception:
                    _LOG.exception("a lease cannot be asked for, in a way nobody has thought of")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            self._hurry.clear()

    async def _renew(self, consensus: Consensus, timeout: float) -> None:
        member, asked = self._member, time.monotonic()
        began = member.node.now()
        report = self._report(consensus)
        leader = consensus.leader or member.hint
        if consensus.leads:
            told = self.grant(member.me, report)
        elif leader:
            told = await member.links.call(leader, "renew", {"report": report}, timeout)
        else:
            await member.ask_around(timeout)
            return
        if told.get("removed"):
            member.was_removed()
            return
        if isinstance(clock := told.get("clock"), int):
            latest = began + int((time.monotonic() - asked) * SECOND)
            member.clock_skew_s = certain_skew(began, latest, clock) / SECOND
        if "leader" in told:
            member.hint = told["leader"]
        for name, epoch in told.get("epochs", {}).items():
            member.regions.get(name).granted(epoch, asked + told["lease"])
        if isinstance(unwritable := told.get("unwritable"), dict):
            member.regions.hear_unwritable(unwritable)
        if isinstance(troubles := told.get("troubles"), dict):
            member.troubles = troubles

    def _report(self, consensus: Consensus) -> dict[str, Any]:
        member = self._member
        regions: dict[str, Any] = {}
        for region in member.regions:
            told = region.report(member.metadata)
            if told is not None:
                regions[region.name] = told
        return {
            "regions": regions,
            "trouble": member.trouble,
            "unwritable": member.regions.unwritable,
            "full": member.full,
            "applied": consensus.applied,
        }

    def grant(self, node: str, report: dict[str, Any]) -> dict[str, Any]:
        """A node tells how it is, and wants to act for a while longer."""
        consensus, me = self._member.consensus, self._member.me
        if consensus is None or not consensus.leads:
            leader = (consensus.leader if consensus is not None else "") or ""
            return {"leader": "" if leader == me else leader}
        if (
            not consensus.knows_all
        ):  # who is master, and who has joined, may be in what is not applied
            return {"lease": 0.0, "epochs": {}}
        if self._member.metadata.cluster and node not in self._member.metadata.nodes:
            return {"removed": True}
        now = time.monotonic()
        self.steering.heard(node, report, now)
        self._member.sidelined.takes_part(node)
        metadata = self._member.metadata
        if node in self._leaving or self.steering.refuses(
            metadata, consensus.members, me, node, now
        ):
            return {"lease": 0.0, "epochs": {}, "clock": self._member.node.now()}
        around = (metadata, consensus.members, me, now)
        unwritable, troubles = self.steering.unwritable(*around), self.steering.troubles(*around)
        left = consensus.lease_left()
        epochs = {one.name: one.epoch for one in metadata.regions.values() if one.master == node}
        if left > 0 and epochs:
            self.steering.granted(node, now + left)
        told = {"lease": left, "epochs": epochs, "clock": self._member.node.now()}
        return told | {"unwritable": unwritable, "troubles": troubles}

    async def steer_for_ever(self) -> None:
        """Do what is decided, while this node leads."""
        while True:
            await asyncio.sleep(STEER)
            try:
                await self._steer()
            except (RailgunError, TimeoutError) as error:
                _LOG.info("steering: %s", error)
            except Exception:
                _LOG.exception("steering has failed in a way nobody has thought of")

    def _replace(self, command: dict[str, Any]) -> None:
        """A master gets no lease while it is agreed on who follows it: it may have been silent, and come back now."""
        region = self._member.metadata.regions.get(command.get("region", ""))
        master = region.master if region is not None and command["do"] == "master" else None
        if master is not None and master != command["master"]:
            self._leaving.add(master)

    async def _steer(self) -> None:
        member = self._member
        consensus, metadata = member.consensus, member.metadata
        if consensus is None or not consensus.leads:
            return
        if not metadata.cluster:
            await consensus.barrier()
            if not member.metadata.cluster:
                await member.propose(
                    {
                        "do": "form",
                        "cluster": member.who.cluster,
                        "nodes": member.who.nodes,
                        "settings": member.config.settings | {"election": member.election},
                    }
                )
            return
        if consensus.commit < consensus.last_index:
            return  # decisions look at what is applied
        self._leaving.clear()
        now = time.monotonic()
        for decision in self.steering.decide(metadata, consensus.members, member.me, now):
            match decision:
                case Propose(command):
                    _LOG.info("steering: %s", command)
                    self._replace(command)
                    with contextlib.suppress(ClusterError):
                        await member.propose(command, timeout=2.0)
                    self._leaving.clear()  # else nobody knows, until all is applied
                case ChangeMembers(members):
                    _LOG.info("steering: members %s", members)
                    with contextlib.suppress(ChangeError):
                        await consensus.change(members)
                case Transfer(to):
                    consensus.transfer(to)


def certain_skew(asked: int, answered: int, clock: int) -> int:
    """Return by how much this node's clock is certainly ahead of another one's; below 0: behind.

    The other one was read between two moments that this node's clock calls `asked` and `answered`.

    >>> certain_skew(100, 110, 50), certain_skew(100, 110, 105), certain_skew(100, 110, 300)
    (50, 0, -190)
    """
    return max(0, asked - clock) + min(0, answered - clock)
