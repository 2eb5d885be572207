"""How a cluster is, in one piece: for people, for programs, and for whoever watches it.

Rules:

1. Each node tells what only it knows (`here`): the leader for how long others are silent, masters how far their
   replicas are, everybody how their disks and files are. Any node puts that together: it asks all others at once, and
   waits for none longer than `PATIENCE`. Of a node that does not answer in time it knows what the leader told last with
   a lease (its trouble, and what it cannot write), and what the node itself told last of why it takes no part
   (`sidelined`).
2. `status` asks nobody: what this node knows, for figures and health. The same form, with less in it.
3. A node that was started without a leader does not know what was agreed on. It tells of the streams that it has copies
   of, and says that they may be old: what is not known is never told as not being there.
4. A replica is behind since the moment at which its master had something that it has not got yet. So one that follows
   closely under load is not behind, though it never has all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from railgun.broker.cluster import identity
from railgun.broker.cluster.errors import RemovedError
from railgun.broker.cluster.links import PeerError
from railgun.broker.cluster.regions import Region
from railgun.broker.errors import NoMasterError
from railgun.broker.protocol.metadata.alarms import ALARM_DELAY_S, derive, is_settled
from railgun.broker.protocol.metadata.nodes import NodeInfo
from railgun.broker.settings import SECOND, STAGING
from railgun.broker.streams.node import Stream
from railgun.broker.streams.persistent import Persistent
from railgun.broker.streams.routing import MASTER_WAIT
from railgun.errors import RailgunError

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

PATIENCE: Final = 1.0
AGAIN: Final = 0.1
OLD: Final = "told by this node's copy: it may be old, or deleted elsewhere"
Told = dict[str, Any]


class Overview:
    """What a node can tell of its cluster."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._behind: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and what it lacks
        self._inactive: dict[str, tuple[int, float]] = {}  # by region: its epoch, and since when
        self._idle: dict[str, float] = {}  # regions it is master of and does not serve
        self._leaderless: float | None = time.monotonic()

    # ------------------------------------------------------------ what takes time

    def look(self) -> None:
        """Remember since when things are as they are. Called now and then."""
        member, now = self._member, time.monotonic()
        led = member.leader is not None
        self._leaderless = None if led else self._leaderless or now
        regions = member.metadata.regions
        waits = {name: one.epoch for name, one in regions.items() if not one.is_active}
        self._inactive = {
            name: self._inactive[name]
            if self._inactive.get(name, (0,))[0] == epoch
            else (epoch, now)
            for name, epoch in waits.items()
        }
        idle = {
            one.name for one in member.regions if self._is_master(one.name) and not one.may_act()
        }
        self._idle = {name: self._idle.get(name, now) for name in idle}
        before, self._behind = self._behind, {}
        for region in member.regions:
            self._look_at(region, before, now)

    def _look_at(
        self, region: Region, before: dict[tuple[str, str], tuple[float, int]], now: float
    ) -> None:
        total = sum(copy.copy.durable for copy in region.streams.values())
        good = set(region.caught_up())
        for node, lag in region.lags().items():
            if node in good and not lag:
                continue
            since, target = before.get((region.name, node), (now, total))
            reached = total - lag if node in good or lag else -1
            if not target > reached or target > total:  # it has got what it lacked, or that is gone
                since, target = now, total
            self._behind[region.name, node] = since, target

    def _is_master(self, region: str) -> bool:
        there = self._member.metadata.regions.get(region)
        return there is not None and there.master == self._member.me

    @property
    def leaderless_for(self) -> float:
        """Seconds for which this node has known no leader."""
        return 0.0 if self._leaderless is None else time.monotonic() - self._leaderless

    # ------------------------------------------------------------ what this node knows

    def here(self) -> Told:
        """What this node knows, and others may not."""
        member, now = self._member, time.monotonic()
        consensus = member.consensus
        return {
            "node": member.me,
            "leader": member.leader,
            "term": consensus.term if consensus is not None else 0,
            "applied": consensus.applied if consensus is not None else 0,
            "silence": self._silence(),
            "failed": str(member.failed or ""),
            "trouble": member.trouble,
            "unwritable": member.regions.unwritable,
            "full": member.full,
            "drift": member.metadata.drift(member.config.settings),
            "left_alone": self._left_alone(),
            "damaged": self._damaged(),
            "clock_skew": round(member.clock_skew_s, 3),
            "clock_stepped": round(member.node.pace.stepped / SECOND, 3),
            "clock_at_start": round(member.node.clock_at_start_s, 3),
            "time_ahead": member.node.time_ahead(),
            "regions": {one.name: self._led(one, now) for one in member.regions if one.led},
        }

    def _silence(self) -> dict[str, float] | None:
        """For how long the others are silent, if this node leads."""
        member, now = self._member, time.monotonic()
        if member.consensus is None or not member.consensus.leads:
            return None
        others = [id for id in member.metadata.nodes if id != member.me]
        return {id: round(member.leasing.steering.silence(id, now), 3) for id in others}

    def _led(self, region: Region, now: float) -> Told:
        good = set(region.caught_up())
        lag = {
            node: {
                "messages": messages,
                "caught_up": node in good,
                "behind_for": round(now - self._behind.get((region.name, node), (now, 0))[0], 3),
            }
            for node, messages in region.lags().items()
        }
        idle = self._idle.get(region.name, now)
        return {
            "epoch": region.led,
            "active": region.active,
            "acting": region.may_act(),
            "idle_for": round(now - idle, 3),
            "lag": lag,
        }

    def _left_alone(self) -> list[str]:
        """Streams in the directory that nobody serves, because they are not of this cluster."""
        member, metadata = self._member, self._member.metadata
        known = {one.id for one in metadata.streams.values()} | metadata.deleted
        strange = [
            name
            for name, stream in member.node.streams.items()
            if metadata.cluster and stream.id not in known
        ]
        return sorted({*member.node.left_alone, *strange} - self._kept().keys())

    def _kept(self) -> dict[str, Stream]:
        """Return the streams that this node has from before it was started, while nobody tells whether they still are.

        Streams are numbered by the entries of Raft that made them: this node has not heard of the later ones yet.
        """
        member, metadata = self._member, self._member.metadata
        if member.leader is not None or member.who.state == identity.ALONE:
            return {}
        return {
            name: stream
            for name, stream in member.node.streams.items()
            if name not in metadata.streams and stream.id > metadata.index
        }

    def _damaged(self) -> dict[str, str]:
        found = {}
        for region in self._member.regions:
            for copy in region.streams.values():
                if copy.lost:
                    found[copy.stream.name] = "it is fetched from the others"
                elif copy.stream.log.damage is not None:
                    found[copy.stream.name] = str(copy.stream.log.damage)
        return found

    # ------------------------------------------------------------ all of it

    def status(self) -> Told:
        """How the cluster is, as far as this node knows."""
        return self._put_together({self._member.me: self.here()})

    async def ask_all(self) -> Told:
        """How the cluster is, as all say who answer."""
        member = self._member
        others = [id for id in member.metadata.nodes if id != member.me and member.links.is_up(id)]
        asked = [member.links.call(id, "here", {}, PATIENCE) for id in others]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told = {member.me: self.here()}
        for id, answer in zip(others, answers, strict=True):
            if isinstance(answer, dict):
                told[id] = answer
            elif not isinstance(answer, PeerError):
                raise answer if isinstance(answer, BaseException) else TypeError(answer)
        return self._put_together(told)

    def _put_together(self, told: dict[str, Told]) -> Told:
        member = self._member
        metadata, consensus = member.metadata, member.consensus
        is_member = member.who.state != identity.ALONE and consensus is not None
        members = consensus.members if consensus is not None else None
        leader = member.leader
        status: Told = {
            "cluster": member.who.cluster,
            "state": "member" if is_member else "alone",
            "looking": "" if is_member else member.joining.told,
            "removed": isinstance(member.failed, RemovedError),
            "node": member.me,
            "name": member.info.get("name", ""),
            "leader": leader,
            "term": consensus.term if consensus is not None else 0,
            "commit": consensus.commit if consensus is not None else 0,
            "applied": consensus.applied if consensus is not None else 0,
            "voters": list(members.voters) if members is not None else [],
            "learners": list(members.learners) if members is not None else [],
            "nodes": self.nodes(told),
            "regions": [self._region(name, told) for name in sorted(metadata.regions)],
            "streams": _count({*metadata.streams, *self._kept()}),
            "is_known": bool(metadata.cluster),
            "settings": dict(metadata.settings),
        }
        status["alarms"] = [asdict(one) for one in derive(status)]
        status["settled"] = is_settled(status)
        return status

    def nodes(self, told: dict[str, Told] | None = None) -> list[Told]:
        """The nodes, with what is known of each; `told`: what they have said."""
        member, metadata = self._member, self._member.metadata
        told = {member.me: {"silence": self._silence()}} if told is None else told
        leader = member.leader
        silence = told.get(leader or "", {}).get("silence")
        unwritable = {node.id: self._unwritable(node.id, told) for node in self._known_nodes()}
        found = []
        for node in self._known_nodes():
            here = told.get(node.id, {})
            up, silent = self._is_up(node.id, leader, silence, told)
            found.append(
                {
                    **node.dump(),
                    "up": up,
                    "answered": bool(here) and "term" in here,
                    "silent_for": None if up else silent,
                    "leaving": node.id in metadata.wanted_gone,
                    "failed": here.get("failed", member.sidelined.why_failed(node.id)),
                    "trouble": here.get("trouble", member.troubles.get(node.id, "")),
                    "unwritable": unwritable[node.id],
                    "full": here.get("full", False),
                    "damaged": here.get("damaged", {}),
                    "drift": here.get("drift", {}),
                    "left_alone": here.get("left_alone", []),
                    "clock_skew": here.get("clock_skew", 0.0),
                    "clock_stepped": here.get("clock_stepped", 0.0),
                    "clock_at_start": here.get("clock_at_start", 0.0),
                    "time_ahead": here.get("time_ahead", {}),
                    "applied": here.get("applied"),
                }
            )
        return sorted(found, key=lambda one: str(one["name"]))

    def _unwritable(self, id: str, told: dict[str, Told]) -> dict[str, str]:
        """Return the streams that a node cannot write: as it says itself, or as the leader says."""
        said: dict[str, str] | None = told.get(id, {}).get("unwritable")
        return self._member.regions.elsewhere.get(id, {}) if said is None else said

    def _known_nodes(self) -> list[NodeInfo]:
        """Return the nodes as all agree; after a restart without a leader, those that were known before it."""
        member = self._member
        nodes = list(member.metadata.nodes.values())
        return nodes or [NodeInfo.of(one, 0) for one in member.who.nodes]

    def _is_up(
        self, id: str, leader: str | None, silence: dict[str, float] | None, told: dict[str, Told]
    ) -> tuple[bool, float | None]:
        """Whether a node is heard of, and for how long it is not: the leader knows best."""
        if id in (self._member.me, leader):
            return True, None
        if silence is None:
            return id in told or self._member.links.is_up(id), None
        metadata = self._member.metadata
        patience = max(metadata.seconds("patience") or 0, metadata.seconds("election") or 0)
        silent = silence.get(id, 0.0)
        return silent <= patience, silent

    def _region(self, name: str, told: dict[str, Told]) -> Told:
        metadata = self._member.metadata
        region = metadata.regions[name]
        there = told.get(region.master or "", {}).get("regions", {}).get(name, {})
        if there.get("epoch") != region.epoch:
            there = {}
        now = time.monotonic()
        since = self._inactive.get(name, (0, now))[1]
        here = {one.name for one in metadata.streams.values() if one.region == name}
        unwritable: dict[str, list[str]] = {}  # by stream: the nodes that cannot write it
        for id in {*region.voting, *region.learning}:
            for stream in self._unwritable(id, told).keys() & here:
                unwritable.setdefault(stream, []).append(id)
        lag = {
            id: one
            | {"caught_up": one["caught_up"] and not self._unwritable(id, told).keys() & here}
            for id, one in there.get("lag", {}).items()
        }
        return {
            "name": name,
            "epoch": region.epoch,
            "master": region.master,
            "active": region.is_active,
            "inactive_for": 0.0 if region.is_active else round(now - since, 3),
            "voting": list(region.voting),
            "learning": list(region.learning),
            "streams": _count(here),
            "unwritable": {stream: sorted(ids) for stream, ids in sorted(unwritable.items())},
            "acting": there.get("acting"),
            "idle_for": there.get("idle_for", 0.0),
            "lag": lag,
        }

    # ------------------------------------------------------------ streams

    async def streams(self) -> list[Told]:
        """All streams, each as its master describes it.

        Without a quorum, also those that this node has copies of and knows nothing else of; `NoMasterError` if there
        are none: nobody tells whether there are others.
        """
        member = self._member
        await self._wait_for_news()
        metadata, kept = member.metadata, self._kept()
        if not kept and not metadata.cluster and member.who.state != identity.ALONE:
            told = "which streams there are is not known: there is no quorum, and this node has no copies"
            raise NoMasterError(told, member.has_no_quorum)
        masters = {name: one.master for name, one in metadata.regions.items()}
        infos = dict(metadata.streams)
        lasting = [one for one in infos.values() if one.settings.get("kind") != "ephemeral"]
        asked = {m for one in lasting if (m := masters.get(one.region)) and m != member.me}
        calls = [member.links.call(id, "streams", {}, 3 * PATIENCE) for id in asked]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, Told] = {}
        for id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, list):
                led = {name for name, one in infos.items() if masters.get(one.region) == id}
                found |= {one["name"]: one for one in answer if one["name"] in led}
        found |= {name: self._describe(name) for name in member.led_streams() if name in infos}
        for name, one in infos.items():
            if name not in found:
                found[name] = self._undescribed(name, masters.get(one.region))
        for name in kept.keys() - found.keys() & member.node.streams.keys():
            found[name] = self._describe(name)
        return [told for _, told in sorted(found.items())]

    def _describe(self, name: str) -> Told:
        """Describe a stream of which there is a copy here; it is marked as perhaps old if it is not served here now."""
        node = self._member.node
        told, stream = node.describe(name), node.streams[name]
        if (
            isinstance(stream, Persistent) and not stream.acting
        ):  # also of a master that has lost its quorum
            told |= {"trouble": told.get("trouble") or OLD, "from_copy": OLD}
        return told

    async def _wait_for_news(self) -> None:
        """Hear of all that was agreed on up to now, if there is a quorum; wait not longer than for a master."""
        member = self._member
        deadline = time.monotonic() + MASTER_WAIT
        while (
            not member.metadata.cluster
            and member.who.state != identity.ALONE
            and not member.has_no_quorum
            and time.monotonic() < deadline
        ):
            await member.wait_for_change(AGAIN)
        if member.failed is None and member.consensus is not None and member.leader is not None:
            with contextlib.suppress(RailgunError):
                await member.consensus.barrier()

    def _undescribed(self, name: str, master: str | None) -> Told:
        """A stream of which the master says nothing now."""
        member = self._member
        info = member.metadata.streams.get(name)
        stream = member.node.streams.get(name)
        if stream is not None and not isinstance(stream, Persistent):
            return member.node.describe(name)
        settings = dict(info.settings) if info is not None else {"kind": "persistent"}
        blank: Told = {
            "first": 0,
            "end": 0,
            "bytes": 0,
            "last_time": None,
            "groups": [],
            "readers": 0,
        }
        told: Told = {"name": name, "settings": settings, "region": member.region_of(name)}
        if settings.get("kind") == "ephemeral":
            return told | {"consumers": 0}
        told |= blank
        if stream is not None:
            told |= member.node.describe(name)
        node = member.metadata.nodes.get(master or "")
        if master == member.me:
            why = "this node is its master, and is not ready yet"
        elif node is None:
            why = "its region has no master now"
        else:
            why = f"its master {node.name} does not answer"
        return told | {"trouble": told.get("trouble") or why}

    # ------------------------------------------------------------ health

    def reasons(self) -> dict[str, str]:
        """Why this node is of no use to clients, by code; nothing: it is."""
        member = self._member
        if member.failed is not None:
            code = "REMOVED" if isinstance(member.failed, RemovedError) else "RAFT_FAILED"
            return {code: str(member.failed)}
        if member.consensus is None:
            return {"NO_CLUSTER": f"not a member of a cluster yet: {member.joining.told}"}
        if self.leaderless_for > ALARM_DELAY_S:
            told = f"it has known no leader for {self.leaderless_for:.0f} s"
            return {"NO_LEADER": told}
        return {}


def _count(names: Iterable[str]) -> int:
    """Return how many streams there are, without those that hold what producers stage."""
    return sum(not name.endswith(STAGING) for name in names)
