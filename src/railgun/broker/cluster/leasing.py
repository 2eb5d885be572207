"""Renew this node's lease, and do the leader's work: grant leases, and steer the cluster.

Rules:

1. Each node reports its state to the leader, five times per election timeout and whenever something changes, and is
   told for how long it may act as a master: counted from before it asked.
2. A lease lasts as long as what is left of the leader's own lease (docs/design/cluster.md).
3. The leader examines the reports ten times a second (`broker.protocol.metadata.steering`), and carries out the
   decisions one after the other. What is refused meanwhile is decided anew.
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

STEERING_PAUSE_S: Final = 0.1
RETRY_PAUSE_S: Final = 0.05
_LOG: Final = logging.getLogger(__name__)


class Leasing:
    """Requests and grants of leases, and steering: see the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.steering = Steering()
        self._leading = False
        self._replaced: set[str] = set()  # masters that are being replaced
        self._renew_now = asyncio.Event()

    def renew_soon(self) -> None:
        """Renew the lease at once."""
        self._renew_now.set()

    def raft_changed(self) -> None:
        """React to a new leader, term or membership of Raft."""
        consensus = self._member.consensus
        leads = consensus is not None and consensus.leads
        if leads and not self._leading:
            self.steering.began(time.monotonic())
        self._leading = leads
        self.renew_soon()
        self._member.notify()

    async def renew_for_ever(self) -> None:
        """Renew the lease, again and again."""
        member = self._member
        while True:
            pause = member.election / 5
            consensus = member.consensus
            if consensus is not None and member.failed is None:
                try:
                    await self._renew(consensus, 2 * pause)
                except RailgunError:
                    pause = RETRY_PAUSE_S
                except Exception:
                    _LOG.exception("renewing the lease failed unexpectedly")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._renew_now.wait()
            self._renew_now.clear()

    async def _renew(self, consensus: Consensus, timeout: float) -> None:
        member, asked_s = self._member, time.monotonic()
        began_us = member.node.now()
        report = self._report(consensus)
        leader = consensus.leader or member.hint
        if consensus.leads:
            answer = self.grant(member.me, report)
        elif leader:
            answer = await member.links.call(leader, "renew", {"report": report}, timeout)
        else:
            await member.ask_around(timeout)
            return
        if answer.get("removed"):
            member.was_removed()
            return
        if isinstance(clock := answer.get("clock"), int):
            latest = began_us + int((time.monotonic() - asked_s) * SECOND)
            member.clock_skew_s = certain_skew(began_us, latest, clock) / SECOND
        if "leader" in answer:
            member.hint = answer["leader"]
        for name, epoch in answer.get("epochs", {}).items():
            member.regions.get(name).granted(epoch, asked_s + answer["lease"])
        if isinstance(unwritable := answer.get("unwritable"), dict):
            member.regions.hear_unwritable(unwritable)
        if isinstance(troubles := answer.get("troubles"), dict):
            member.troubles = troubles

    def _report(self, consensus: Consensus) -> dict[str, Any]:
        member = self._member
        regions: dict[str, Any] = {}
        for region in member.regions:
            report = region.report(member.metadata)
            if report is not None:
                regions[region.name] = report
        return {
            "regions": regions,
            "trouble": member.trouble,
            "unwritable": member.regions.unwritable,
            "full": member.full,
            "applied": consensus.applied,
        }

    def grant(self, node: str, report: dict[str, Any]) -> dict[str, Any]:
        """Take the report of a node, and return for how long it may act as a master, with news for it."""
        consensus, me = self._member.consensus, self._member.me
        if consensus is None or not consensus.leads:
            leader = (consensus.leader if consensus is not None else "") or ""
            return {"leader": "" if leader == me else leader}
        # An entry that is not applied yet may name another master, or a new node.
        if not consensus.knows_all:
            return {"lease": 0.0, "epochs": {}}
        if self._member.metadata.cluster and node not in self._member.metadata.nodes:
            return {"removed": True}
        now = time.monotonic()
        self.steering.heard(node, report, now)
        self._member.sidelined.takes_part(node)
        metadata = self._member.metadata
        if node in self._replaced or self.steering.refuses(
            metadata, consensus.members, me, node, now
        ):
            return {"lease": 0.0, "epochs": {}, "clock": self._member.node.now()}
        context = (metadata, consensus.members, me, now)
        unwritable, troubles = self.steering.unwritable(*context), self.steering.troubles(*context)
        left_s = consensus.lease_left()
        epochs = {
            region.name: region.epoch
            for region in metadata.regions.values()
            if region.master == node
        }
        if left_s > 0 and epochs:
            self.steering.granted(node, now + left_s)
        answer = {"lease": left_s, "epochs": epochs, "clock": self._member.node.now()}
        return answer | {"unwritable": unwritable, "troubles": troubles}

    async def steer_for_ever(self) -> None:
        """Steer the cluster while this node leads."""
        while True:
            await asyncio.sleep(STEERING_PAUSE_S)
            try:
                await self._steer()
            except (RailgunError, TimeoutError) as error:
                _LOG.info("steering: %s", error)
            except Exception:
                _LOG.exception("steering failed unexpectedly")

    def _withhold_lease(self, command: dict[str, Any]) -> None:
        """Grant a master no lease while its successor is being agreed on: it may have been silent, and come back
        now."""
        region = self._member.metadata.regions.get(command.get("region", ""))
        master = region.master if region is not None and command["do"] == "master" else None
        if master is not None and master != command["master"]:
            self._replaced.add(master)

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
            return  # decisions are made on the applied state
        self._replaced.clear()
        now = time.monotonic()
        for decision in self.steering.decide(metadata, consensus.members, member.me, now):
            match decision:
                case Propose(command):
                    _LOG.info("steering: %s", command)
                    self._withhold_lease(command)
                    with contextlib.suppress(ClusterError):
                        await member.propose(command, timeout=2.0)
                    self._replaced.clear()  # after a timeout, everything is applied before the next decision
                case ChangeMembers(members):
                    _LOG.info("steering: members %s", members)
                    with contextlib.suppress(ChangeError):
                        await consensus.change(members)
                case Transfer(to):
                    consensus.transfer(to)


def certain_skew(earliest: int, latest: int, clock: int) -> int:
    """Return by how much this node's clock is certainly ahead of another clock; below 0: behind.

    The other clock was read as `clock` between two moments that this node's clock calls `earliest` and `latest`.

    >>> certain_skew(100, 110, 50), certain_skew(100, 110, 105), certain_skew(100, 110, 300)
    (50, 0, -190)
    """
    return max(0, earliest - clock) + min(0, latest - clock)
