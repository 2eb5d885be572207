"""Three nodes as one: durable publishes by a quorum beside NATS JetStream, failover, metadata, catching up.

Three nodes and the client share this machine, on loopback and on one file system; messages of 100 bytes. A publish is
answered when it is on disk (fdatasync) where it has to be: `quorum` two of three nodes, `master` one, `all` three.
Whoever is compared takes turns, each turn with three new servers in empty directories.

- *NATS JetStream*: three servers, a stream with three replicas and file storage, the client connected to the server
  that leads it. They are at their defaults, which sync files every two minutes. It is tried in several ways (windows,
  tasks), and in each round its best counts.

What is measured:

- *publish*: `publish_many` of 1,000 messages, several at once; with each promise, through a node that is not the
  master, in batches of 100, and by 1,000 tasks that each await `publish` of one message.
- *single*: one awaited publish after the other, beside a bare append and fdatasync, in turns of 50.
- *consume*: a group that acks in batches, through the master and through another node; a reader without a group at a
  replica.
- *metadata*: new streams, one after the other, on a quiet cluster.
- *failover*: the master is killed (SIGKILL) and started again, seven times while it is the leader, too, and seven
  times while another node is; and stopped (SIGSTOP). From there to the first publish that was begun after it and is
  acknowledged, of clients that try again.
- *catch-up*: a replica that was away while so many bytes were published, beside bare writes with a sync every 16 MiB;
  what a publisher notices meanwhile, and that nobody loses his role.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from verification.report import Report

from bench import _clusterer, _clusters, streams
from bench._clusterer import Figures, Much
from bench._peers import Peer, PeerError
from bench._sections import measure
from bench.streams import NATS, OURS, of, spread
from railgun import __version__
from railgun.errors import RailgunError

RATE = 200_000  # messages a second with a quorum, at least
TIMES_NATS = 5.0
OUTAGE = 3.0  # seconds without a master, at most
METADATA = 20.0  # milliseconds for a change, the middle one
OF_BARE = 0.5  # of what the bare disk takes, at least


@dataclass(frozen=True, slots=True)
class Size(streams.Size):
    """How much of everything."""

    much: Much = field(default_factory=lambda: Much(1.5, 1_000_000, 7, 100, 2 << 30))


QUICK = Size(rounds=1, seconds=0.4, much=Much(0.4, 100_000, 1, 10, 32 << 20))


@dataclass(slots=True)
class Bench(streams.Bench):
    """One run."""

    size: Size

    def turn(self, name: str, work: str) -> Figures:
        """Some work by one of them, with a cluster of its own."""
        home = self.home / f"{name}-{work}".lower()
        try:
            if name == OURS:
                return self.ours(home, work)
            with _clusters.nats(home) as ports:
                peer = Peer("nats", "nats_streams")
                told = ("--cluster", ",".join(map(str, ports)), "--seconds", str(self.size.seconds))
                return self.told(name, work, peer.ask(work, *told))
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def ours(self, home: Path, work: str) -> Figures:
        """Some work by our client, with a cluster of ours."""
        with _clusters.ours(home) as cluster:
            try:
                figures = asyncio.run(_clusterer.do(work, cluster, self.size.much))
            except RailgunError as error:
                raise PeerError(f"{error}\n{cluster.words()}") from error
        self.engines.add(f"railgun {__version__}")
        shown = "; ".join(f"{key}: {streams.brief(value)}" for key, value in figures.items())
        self.say(f"{work}, {OURS}: {shown}")
        return figures

    # ------------------------------------------------------------ what is measured

    def publish(self) -> None:
        """Durable publishes."""
        found = self.rounds("publish", (OURS, NATS))
        theirs = self.peers_at(found, "publish", "NATS JetStream, 3 replicas")[NATS]
        quorum = of(found[OURS], "acks=quorum, batches of 1,000")
        self.at_least("publish, acks=quorum, batches of 1,000", quorum, RATE)
        if NATS in self.peers:
            name = f"publish, acks=quorum, batches of 1,000 / {NATS}"
            self.compare(name, quorum, theirs, TIMES_NATS)
        for way in ("acks=master, batches of 1,000", "acks=all, batches of 1,000"):
            self.tell(f"publish, {way}", of(found[OURS], way))
        for way in ("batches of 100", "1,000 tasks", "through another node"):
            self.tell(f"publish, {way}", of(found[OURS], way))
            if NATS in self.peers and way != "through another node":
                self.compare(f"publish, {way} / {NATS}", of(found[OURS], way), theirs)
        through = of(found[OURS], "through another node")
        self.compare("publish, through another node / to the master", through, quorum)
        self.none("publish, other leaders or masters meanwhile", of(found[OURS], "changes"))

    def single(self) -> None:
        """One awaited publish after the other."""
        found = self.rounds("single", (OURS,))[OURS]
        for who, name in (
            ("bare", "a bare append and fdatasync"),
            ("master", "acks=master"),
            ("quorum", "acks=quorum"),
            ("all", "acks=all"),
            ("through", "acks=quorum, through another node"),
        ):
            for share in ("p50", "p99"):
                values = of(found, f"{who}, {share}")
                self.tell(f"single, {name}, {share}", values, "µs")
        bare = of(found, "bare, p50")
        for who in ("master", "quorum", "all", "through"):
            self.compare(f"single, {who} / bare, p50", of(found, f"{who}, p50"), bare)

    def consume(self) -> None:
        """Consume and ack."""
        found = self.rounds("consume", (OURS,))[OURS]
        near, far = of(found, "master"), of(found, "another node")
        self.tell("consume, a group, at the master", near)
        self.tell("consume, a group, through another node", far)
        self.tell("consume, a reader at a replica", of(found, "a reader"))
        self.compare("consume, through another node / at the master", far, near)

    def metadata(self) -> None:
        """New streams."""
        found = self.rounds("metadata", (OURS,))[OURS]
        for who in ("at the leader", "through another node"):
            for share in ("p50", "p99"):
                values = of(found, f"{who}, {share}")
                most = METADATA if share == "p50" else None
                self.at_most(f"metadata, a new stream, {who}, {share}", values, "ms", most)

    def failover(self) -> None:
        """A master goes."""
        try:
            every = list(self.turn(OURS, "failover").items())  # in one round there are many
        except PeerError as error:
            self.leave_out(OURS, "failover", error)
            every = []
        for way in ("kill -9, leader and master", "kill -9, master only", "SIGSTOP"):
            values = [value for name, value in every if name.startswith(way)]
            count = f"{len(values)} time{'s' * (len(values) != 1)}"
            self.at_most(f"failover, {way}, {count}", values, "s")
            self.at_most(f"failover, {way}, the longest", values and [max(values)], "s", OUTAGE)

    def catch_up(self) -> None:
        """A replica comes back."""
        found = self.rounds("catch-up", (OURS,))[OURS]
        mib = round(max(of(found, "bytes"), default=0) / (1 << 20))
        self.tell(
            "catch-up, published with two of three nodes", of(found, "published with two of three")
        )
        self.tell(f"catch-up, {mib:,} MiB", of(found, "MB/s"), "MB/s")
        self.tell("catch-up, bare writes", of(found, "bare MB/s"), "MB/s")
        self.compare("catch-up / bare", of(found, "MB/s"), of(found, "bare MB/s"), OF_BARE)
        for way in ("quiet, p50", "quiet, p99", "meanwhile, p50", "meanwhile, p99"):
            self.at_most(f"catch-up, a publish, {way}", of(found, way), "ms")
        self.at_most("catch-up, a publish, the longest", of(found, "meanwhile, longest"), "ms")
        self.none("catch-up, other leaders or masters meanwhile", of(found, "changes"))

    # ------------------------------------------------------------ telling

    def at_least(self, name: str, values: Sequence[float], least: float) -> None:
        """A rate with a goal of its own."""
        value = median(values) if values else 0.0
        goal = f">= {least:,.0f}"
        shown = f"messages/s{spread(values)}"
        self.report.check(name, round(value), shown, goal, value >= least)

    def at_most(
        self, name: str, values: Sequence[float], unit: str, most: float | None = None
    ) -> None:
        """A time, and perhaps what it has to be."""
        if not values:
            self.report.check(name, "not measured", goal="is measured", passed=False)
            return
        value = median(values)
        goal = "" if most is None else f"< {most:g} {unit}"
        passed = most is None or value < most
        self.report.check(name, round(value, 2), f"{unit}{spread(values)}", goal, passed)

    def none(self, name: str, values: Sequence[float]) -> None:
        """What must not be."""
        count = round(sum(values))
        self.report.check(name, count, "changes", "= 0", bool(values) and count == 0)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "publish": Bench.publish, "single": Bench.single, "consume": Bench.consume,
    "metadata": Bench.metadata, "failover": Bench.failover, "catch-up": Bench.catch_up,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    return measure("cluster", __doc__, argv, SECTIONS, OURS, _bench)


def _bench(home: Path, report: Report, console: Console, chosen: Any) -> Bench:
    size, peers = (QUICK if chosen.quick else Size()), (() if chosen.ours else (NATS,))
    return Bench(home, size, report, console, peers)
