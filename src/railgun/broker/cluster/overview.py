"""Describe the state of the cluster: for people, for programs, and for monitoring.

Rules:

1. Each node reports what only it knows (`local_report`): the leader how long other nodes are silent, masters how far
   their replicas are, every node the state of its disks and files. Any node merges the reports: it asks all others at
   once, and waits for each at most `CALL_TIMEOUT_S`. About a node that does not answer in time it knows what the leader
   last sent with a lease (its trouble, and what it cannot write), and what the node itself last gave as the reason why
   it takes no part (`sidelined`).
2. `status` asks no other node: it returns what this node knows, for metrics and health. The form is the same, with
   fewer facts.
3. A node that was started without a leader does not know the agreed metadata. It lists the streams of which it has
   copies, and marks them as perhaps old: what is unknown is never reported as missing.
4. A replica is behind since the moment at which its master had something that the replica has not got yet. So a replica
   that follows closely under load is not behind, though it never has everything.
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

CALL_TIMEOUT_S: Final = 1.0
CHECK_PAUSE_S: Final = 0.1
COPY_NOTE: Final = "described by this node's copy: it may be old, or deleted elsewhere"
Report = dict[str, Any]


class Overview:
    """The state of a cluster, as one node can describe it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        # By region and replica: since when it is behind, and what it has to reach.
        self._behind: dict[tuple[str, str], tuple[float, int]] = {}
        self._inactive: dict[str, tuple[int, float]] = {}  # by region: its epoch, and since when
        # By region: since when this node is its master without serving it.
        self._idle: dict[str, float] = {}
        self._leaderless: float | None = time.monotonic()

    # ------------------------------------------------------------ durations

    def observe(self) -> None:
        """Note since when the current conditions last. Called regularly."""
        member, now = self._member, time.monotonic()
        has_leader = member.leader is not None
        self._leaderless = None if has_leader else self._leaderless or now
        regions = member.metadata.regions
        inactive = {name: region.epoch for name, region in regions.items() if not region.is_active}
        self._inactive = {
            name: self._inactive[name]
            if self._inactive.get(name, (0,))[0] == epoch
            else (epoch, now)
            for name, epoch in inactive.items()
        }
        idle = {
            region.name
            for region in member.regions
            if self._is_master(region.name) and not region.may_act()
        }
        self._idle = {name: self._idle.get(name, now) for name in idle}
        before, self._behind = self._behind, {}
        for region in member.regions:
            self._observe_region(region, before, now)

    def _observe_region(
        self, region: Region, previous: dict[tuple[str, str], tuple[float, int]], now: float
    ) -> None:
        total = sum(copy.copy.durable for copy in region.streams.values())
        caught_up_nodes = set(region.caught_up())
        for node, lag in region.lags().items():
            if node in caught_up_nodes and not lag:
                continue
            since, target = previous.get((region.name, node), (now, total))
            reached = total - lag if node in caught_up_nodes or lag else -1
            # The replica has what it lacked, or that was deleted: start again.
            if not target > reached or target > total:
                since, target = now, total
            self._behind[region.name, node] = since, target

    def _is_master(self, region: str) -> bool:
        info = self._member.metadata.regions.get(region)
        return info is not None and info.master == self._member.me

    @property
    def leaderless_for(self) -> float:
        """Seconds for which this node has known no leader."""
        return 0.0 if self._leaderless is None else time.monotonic() - self._leaderless

    # ------------------------------------------------------------ this node

    def local_report(self) -> Report:
        """Report what this node knows, and others may not."""
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
            "regions": {
                region.name: self._region_report(region, now)
                for region in member.regions
                if region.led
            },
        }

    def _silence(self) -> dict[str, float] | None:
        """Return for how many seconds the other nodes are silent, or None if this node does not lead."""
        member, now = self._member, time.monotonic()
        if member.consensus is None or not member.consensus.leads:
            return None
        others = [id for id in member.metadata.nodes if id != member.me]
        return {id: round(member.leasing.steering.silence(id, now), 3) for id in others}

    def _region_report(self, region: Region, now: float) -> Report:
        caught_up_nodes = set(region.caught_up())
        lag = {
            node: {
                "messages": messages,
                "caught_up": node in caught_up_nodes,
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
        """Return streams in the directory that are not of this cluster, so that no node serves them."""
        member, metadata = self._member, self._member.metadata
        cluster_ids = {info.id for info in metadata.streams.values()} | metadata.deleted
        foreign = [
            name
            for name, stream in member.node.streams.items()
            if metadata.cluster and stream.id not in cluster_ids
        ]
        return sorted({*member.node.left_alone, *foreign} - self._kept_streams().keys())

    def _kept_streams(self) -> dict[str, Stream]:
        """Return the streams that this node had before its start, while there is no leader to tell whether they still
        exist.

        A stream's ID is the Raft entry that created it: this node has not heard of streams with higher IDs yet.
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
        damaged = {}
        for region in self._member.regions:
            for copy in region.streams.values():
                if copy.lost:
                    damaged[copy.stream.name] = "it is fetched from the others"
                elif copy.stream.log.damage is not None:
                    damaged[copy.stream.name] = str(copy.stream.log.damage)
        return damaged

    # ------------------------------------------------------------ the cluster

    def status(self) -> Report:
        """Return the state of the cluster, as far as this node knows."""
        return self._merge_reports({self._member.me: self.local_report()})

    async def ask_all(self) -> Report:
        """Return the state of the cluster, with the reports of all nodes that answer."""
        member = self._member
        others = [id for id in member.metadata.nodes if id != member.me and member.links.is_up(id)]
        calls = [member.links.call(id, "here", {}, CALL_TIMEOUT_S) for id in others]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        reports = {member.me: self.local_report()}
        for id, answer in zip(others, answers, strict=True):
            if isinstance(answer, dict):
                reports[id] = answer
            elif not isinstance(answer, PeerError):
                raise answer if isinstance(answer, BaseException) else TypeError(answer)
        return self._merge_reports(reports)

    def _merge_reports(self, reports: dict[str, Report]) -> Report:
        member = self._member
        metadata, consensus = member.metadata, member.consensus
        is_member = member.who.state != identity.ALONE and consensus is not None
        members = consensus.members if consensus is not None else None
        leader = member.leader
        status: Report = {
            "cluster": member.who.cluster,
            "state": "member" if is_member else "alone",
            "looking": "" if is_member else member.joining.status,
            "removed": isinstance(member.failed, RemovedError),
            "node": member.me,
            "name": member.info.get("name", ""),
            "leader": leader,
            "term": consensus.term if consensus is not None else 0,
            "commit": consensus.commit if consensus is not None else 0,
            "applied": consensus.applied if consensus is not None else 0,
            "voters": list(members.voters) if members is not None else [],
            "learners": list(members.learners) if members is not None else [],
            "nodes": self.nodes(reports),
            "regions": [self._region(name, reports) for name in sorted(metadata.regions)],
            "streams": _count({*metadata.streams, *self._kept_streams()}),
            "is_known": bool(metadata.cluster),
            "settings": dict(metadata.settings),
        }
        status["alarms"] = [asdict(alarm) for alarm in derive(status)]
        status["settled"] = is_settled(status)
        return status

    def nodes(self, reports: dict[str, Report] | None = None) -> list[Report]:
        """Describe the nodes, with what is known about each; `reports`: what they have reported."""
        member, metadata = self._member, self._member.metadata
        reports = {member.me: {"silence": self._silence()}} if reports is None else reports
        leader = member.leader
        silence = reports.get(leader or "", {}).get("silence")
        unwritable = {node.id: self._unwritable(node.id, reports) for node in self._known_nodes()}
        nodes = []
        for node in self._known_nodes():
            report = reports.get(node.id, {})
            up, silent = self._is_up(node.id, leader, silence, reports)
            nodes.append(
                {
                    **node.dump(),
                    "up": up,
                    "answered": bool(report) and "term" in report,
                    "silent_for": None if up else silent,
                    "leaving": node.id in metadata.wanted_gone,
                    "failed": report.get("failed", member.sidelined.why_failed(node.id)),
                    "trouble": report.get("trouble", member.troubles.get(node.id, "")),
                    "unwritable": unwritable[node.id],
                    "full": report.get("full", False),
                    "damaged": report.get("damaged", {}),
                    "drift": report.get("drift", {}),
                    "left_alone": report.get("left_alone", []),
                    "clock_skew": report.get("clock_skew", 0.0),
                    "clock_stepped": report.get("clock_stepped", 0.0),
                    "clock_at_start": report.get("clock_at_start", 0.0),
                    "time_ahead": report.get("time_ahead", {}),
                    "applied": report.get("applied"),
                }
            )
        return sorted(nodes, key=lambda entry: str(entry["name"]))

    def _unwritable(self, id: str, reports: dict[str, Report]) -> dict[str, str]:
        """Return the streams that a node cannot write, as it reports itself, or else as the leader reports."""
        reported: dict[str, str] | None = reports.get(id, {}).get("unwritable")
        return self._member.regions.elsewhere.get(id, {}) if reported is None else reported

    def _known_nodes(self) -> list[NodeInfo]:
        """Return the agreed nodes; after a restart without a leader, those that were known before it."""
        member = self._member
        nodes = list(member.metadata.nodes.values())
        return nodes or [NodeInfo.of(node, 0) for node in member.who.nodes]

    def _is_up(
        self,
        id: str,
        leader: str | None,
        silence: dict[str, float] | None,
        reports: dict[str, Report],
    ) -> tuple[bool, float | None]:
        """Return whether a node is up, and for how many seconds it was silent if the leader has reported that."""
        if id in (self._member.me, leader):
            return True, None
        if silence is None:
            return id in reports or self._member.links.is_up(id), None
        metadata = self._member.metadata
        patience = max(metadata.seconds("patience") or 0, metadata.seconds("election") or 0)
        silent = silence.get(id, 0.0)
        return silent <= patience, silent

    def _region(self, name: str, reports: dict[str, Report]) -> Report:
        metadata = self._member.metadata
        region = metadata.regions[name]
        master_report = reports.get(region.master or "", {}).get("regions", {}).get(name, {})
        if master_report.get("epoch") != region.epoch:
            master_report = {}
        now = time.monotonic()
        since = self._inactive.get(name, (0, now))[1]
        region_streams = {info.name for info in metadata.streams.values() if info.region == name}
        unwritable: dict[str, list[str]] = {}  # by stream: the nodes that cannot write it
        for id in {*region.voting, *region.learning}:
            for stream in self._unwritable(id, reports).keys() & region_streams:
                unwritable.setdefault(stream, []).append(id)
        lag = {
            id: replica_lag
            | {
                "caught_up": replica_lag["caught_up"]
                and not self._unwritable(id, reports).keys() & region_streams
            }
            for id, replica_lag in master_report.get("lag", {}).items()
        }
        return {
            "name": name,
            "epoch": region.epoch,
            "master": region.master,
            "active": region.is_active,
            "inactive_for": 0.0 if region.is_active else round(now - since, 3),
            "voting": list(region.voting),
            "learning": list(region.learning),
            "streams": _count(region_streams),
            "unwritable": {stream: sorted(ids) for stream, ids in sorted(unwritable.items())},
            "acting": master_report.get("acting"),
            "idle_for": master_report.get("idle_for", 0.0),
            "lag": lag,
        }

    # ------------------------------------------------------------ streams

    async def streams(self) -> list[Report]:
        """Describe all streams, each as its master does.

        Without a quorum, streams of which only this node's copies are known are included. Raise `NoMasterError` if
        there are none, because the list of streams is unknown then.
        """
        member = self._member
        await self._wait_for_news()
        metadata, kept = member.metadata, self._kept_streams()
        if not kept and not metadata.cluster and member.who.state != identity.ALONE:
            error_text = (
                "the list of streams is unknown: there is no quorum, and this node has no copies"
            )
            raise NoMasterError(error_text, member.has_no_quorum)
        masters = {name: info.master for name, info in metadata.regions.items()}
        infos = dict(metadata.streams)
        lasting = [info for info in infos.values() if info.settings.get("kind") != "ephemeral"]
        masters_asked = {
            m for info in lasting if (m := masters.get(info.region)) and m != member.me
        }
        calls = [member.links.call(id, "streams", {}, 3 * CALL_TIMEOUT_S) for id in masters_asked]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        descriptions: dict[str, Report] = {}
        for id, answer in zip(masters_asked, answers, strict=True):
            if isinstance(answer, list):
                led_streams = {
                    name for name, info in infos.items() if masters.get(info.region) == id
                }
                descriptions |= {
                    info["name"]: info for info in answer if info["name"] in led_streams
                }
        descriptions |= {
            name: self._describe(name) for name in member.led_streams() if name in infos
        }
        for name, info in infos.items():
            if name not in descriptions:
                descriptions[name] = self._describe_unserved(name, masters.get(info.region))
        for name in kept.keys() - descriptions.keys() & member.node.streams.keys():
            descriptions[name] = self._describe(name)
        return [description for _, description in sorted(descriptions.items())]

    def _describe(self, name: str) -> Report:
        """Describe a stream by the copy on this node, marked as perhaps old unless this node serves the stream now."""
        node = self._member.node
        description, stream = node.describe(name), node.streams[name]
        # A master that has lost its quorum is not acting either.
        if isinstance(stream, Persistent) and not stream.acting:
            description |= {
                "trouble": description.get("trouble") or COPY_NOTE,
                "from_copy": COPY_NOTE,
            }
        return description

    async def _wait_for_news(self) -> None:
        """Apply everything committed up to now, if there is a quorum. Wait at most as long as a write waits for a
        master."""
        member = self._member
        deadline = time.monotonic() + MASTER_WAIT
        while (
            not member.metadata.cluster
            and member.who.state != identity.ALONE
            and not member.has_no_quorum
            and time.monotonic() < deadline
        ):
            await member.wait_for_change(CHECK_PAUSE_S)
        if member.failed is None and member.consensus is not None and member.leader is not None:
            with contextlib.suppress(RailgunError):
                await member.consensus.barrier()

    def _describe_unserved(self, name: str, master: str | None) -> Report:
        """Describe a stream whose master does not describe it now."""
        member = self._member
        info = member.metadata.streams.get(name)
        stream = member.node.streams.get(name)
        if stream is not None and not isinstance(stream, Persistent):
            return member.node.describe(name)
        settings = dict(info.settings) if info is not None else {"kind": "persistent"}
        blank: Report = {
            "first": 0,
            "end": 0,
            "bytes": 0,
            "last_time": None,
            "groups": [],
            "readers": 0,
        }
        description: Report = {"name": name, "settings": settings, "region": member.region_of(name)}
        if settings.get("kind") == "ephemeral":
            return description | {"consumers": 0}
        description |= blank
        if stream is not None:
            description |= member.node.describe(name)
        node = member.metadata.nodes.get(master or "")
        if master == member.me:
            why = "this node is its master, but is not ready yet"
        elif node is None:
            why = "its region has no master now"
        else:
            why = f"its master {node.name} does not answer"
        return description | {"trouble": description.get("trouble") or why}

    # ------------------------------------------------------------ health

    def reasons(self) -> dict[str, str]:
        """Return why this node cannot serve clients, by code; an empty dictionary if it can."""
        member = self._member
        if member.failed is not None:
            code = "REMOVED" if isinstance(member.failed, RemovedError) else "RAFT_FAILED"
            return {code: str(member.failed)}
        if member.consensus is None:
            return {"NO_CLUSTER": f"not a member of a cluster yet: {member.joining.status}"}
        if self.leaderless_for > ALARM_DELAY_S:
            error_text = f"this node has known no leader for {self.leaderless_for:.0f} s"
            return {"NO_LEADER": error_text}
        return {}


def _count(names: Iterable[str]) -> int:
    """Return the number of streams, without those that hold staged messages of producers."""
    return sum(not name.endswith(STAGING) for name in names)
