"""The messaging node beside NATS and Redis, beside bare writes and syncs, and its memory.

Messages of 100 bytes, a server in a process of its own and a Python client in another, on loopback and on one file
system. Whoever is compared takes turns (ours, NATS, Redis, ours, ...), each turn with a new server in an empty
directory that goes with it. A publish of ours is on disk (fdatasync) when it is answered; the peers are at their
defaults, which are lazier:

- *NATS JetStream*: file storage, synced every two minutes. *Redis streams*: `appendonly yes`, `appendfsync everysec`.
- Each peer is tried in several ways (windows, batches, asyncio or not), and in each round its best counts.

What is measured:

- *publish*: durable publishes from one client: `publish_many` of 1,000 and 100 messages, several at once; and 1,000
  tasks that each await `publish` of one message.
- *consume*: a group's consumer that acks: batches and `ack_all`, and `async for` with an `ack` for each message; beside
  a pull consumer with explicit acks, and XREADGROUP with XACK.
- *pubsub*: an ephemeral stream, one publisher and one subscriber, messages received; beside core NATS.
- *request*: one request after the other to a responder in another process; beside NATS's requests.
- *single*: one awaited publish after the other, beside a bare append and fdatasync of the same bytes, in turns of 50.
- *limit*: batches of 1,000, one at a time and several at once, beside bare appends of the same bytes with a sync for
  each, and with a sync for every four, as group commit does it.
- *memory*: the resident memory of the node while many messages pass, and with 100,000 that are not acked.
- *many*: 1,000 streams with a consumer each; how long the node takes to start with them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from verification.report import Report

from bench import _servers
from bench._peers import Peer, PeerError, last_line
from bench._sections import measure
from bench._servers import Server
from bench._streamer import LANES, TOGETHER

OURS, NATS, REDIS = "Railgun", "NATS", "Redis"
TIMES_NATS, TIMES_REDIS = 10.0, 4.0
"""How many times as fast as JetStream and Redis streams we mean to publish."""
TIMES_CONSUMED, TIMES_SCATTERED = 10.0, 4.0
"""And to consume as JetStream, and to pass on what is not stored as core NATS."""
OF_BARE = 1.5  # times as long as a bare append and sync, at most
OF_THE_LIMIT = 0.5  # of what bare appends and syncs come to, at least
GROWTH, SLACK = 1.2, 20 << 20  # of the last quarter over the second, at most
UNACKED_BYTES = 200
MIB = 1 << 20

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    rounds: int = 3
    seconds: float = 1.5  # for each figure
    consumed: tuple[int, int, int] = (1_000_000, 40_000, 200_000)  # ours, NATS, Redis
    through: int = 10_000_000
    unacked: int = 100_000
    streams: int = 1_000


QUICK = Size(1, 0.4, (200_000, 8_000, 40_000), 1_000_000)


@dataclass(slots=True)
class Bench:
    """One run: who takes part, and what was measured."""

    home: Path
    size: Size
    report: Report
    console: Console
    peers: tuple[str, ...] = (NATS, REDIS)
    failed: set[str] = field(default_factory=set)
    engines: set[str] = field(default_factory=set)

    # ------------------------------------------------------------ turns

    def rounds(self, work: str, who: Sequence[str]) -> dict[str, list[Figures]]:
        """Some work by each in turn, round after round: what each came to. Who fails is left out from then on."""
        found: dict[str, list[Figures]] = {name: [] for name in who}
        for _ in range(self.size.rounds):
            for name in who:
                if name not in self.failed and (name == OURS or name in self.peers):
                    try:
                        found[name].append(self.turn(name, work))
                    except PeerError as error:
                        self.leave_out(name, work, error)
                        found[name] = []
        return found

    def turn(self, name: str, work: str) -> Figures:
        """Some work by one of them, with a server of its own."""
        data = self.home / f"{name}-{work}".lower()
        serve: Callable[[Path], AbstractContextManager[Server]]
        serve = {OURS: _servers.ours, NATS: _servers.nats, REDIS: _servers.redis}[name]
        count = self.size.consumed[(OURS, NATS, REDIS).index(name)]
        try:
            with serve(data) as server:
                if name == OURS:
                    return self.ask(work, server, count)
                peer = Peer(name.lower(), f"{name.lower()}_streams")
                sizes = ("--seconds", str(self.size.seconds), "--messages", str(count))
                return self.told(name, work, peer.ask(work, "--port", str(server.port), *sizes))
        finally:
            shutil.rmtree(data, ignore_errors=True)  # and what is not written yet of it

    def ask(self, work: str, server: Server, messages: int) -> Figures:
        """Some work by our client, at a node that runs."""
        command = [sys.executable, "-m", "bench._streamer", work, "--data", str(server.data)]
        command += ["--seconds", str(self.size.seconds), "--messages", str(messages)]
        line = last_line(command, os.environ, heard=lambda line: self.say(f"  {line}"))
        return self.told(OURS, work, line)

    def told(self, name: str, work: str, line: str) -> Figures:
        """What one of them has told, which is shown."""
        said = json.loads(line)
        figures: Figures = said["figures"]
        self.engines.add(said["engine"])
        shown = "; ".join(f"{key}: {brief(value)}" for key, value in figures.items())
        self.say(f"{work}, {name}: {shown}")
        return figures

    def say(self, text: str) -> None:
        """Progress."""
        self.console.print(text, style="dim", markup=False, highlight=False)

    def leave_out(self, name: str, work: str, error: PeerError) -> None:
        """Say loudly that somebody does not take part."""
        text = f"{name} IS LEFT OUT from here on, it did not {work}: {error}"
        self.console.print(text, style="bold red", markup=False, highlight=False)
        self.report.check(name, "left out", goal="runs", passed=False)
        self.failed.add(name)

    # ------------------------------------------------------------ telling

    def tell(self, name: str, values: Sequence[float], unit: str = "messages/s") -> None:
        """A figure: the middle one, with its spread."""
        if values:
            self.report.check(name, round(median(values)), f"{unit}{spread(values)}")

    def compare(
        self,
        name: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        """How many times theirs ours is, round by round: the middle one, with its spread; and its goal."""
        goal = f">= {least:g} times" if least is not None else ""
        goal = f"<= {most:g} times" if most is not None else goal
        if not ours or not theirs:
            self.report.check(name, "not measured", goal=goal, passed=not goal)
            return
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        times = median(ratios)
        passed = (least is None or times >= least) and (most is None or times <= most)
        self.report.check(name, round(times, 2), f"times{spread(ratios)}", goal, passed)

    # ------------------------------------------------------------ beside peers

    def publish(self) -> None:
        """Durable publishes."""
        found = self.rounds("publish", (OURS, NATS, REDIS))
        theirs = self.peers_at(found, "publish", "NATS JetStream", "Redis XADD")
        for way in ("batches of 1,000", "batches of 100", "1,000 tasks"):
            ours = of(found[OURS], way)
            self.tell(f"publish, {way}", ours)
            for peer, goal in ((NATS, TIMES_NATS), (REDIS, TIMES_REDIS)):
                if peer in self.peers:
                    self.compare(f"publish, {way} / {peer}", ours, theirs[peer], goal)

    def consume(self) -> None:
        """Consume and ack."""
        found = self.rounds("consume", (OURS, NATS, REDIS))
        theirs = self.peers_at(found, "consume", "NATS JetStream", "Redis XREADGROUP")
        for way, goal in (("batches", TIMES_CONSUMED), ("singly", None)):
            ours = of(found[OURS], way)
            self.tell(f"consume, {way}", ours)
            for peer in self.peers:
                name = f"consume, {way} / {peer}"
                self.compare(name, ours, theirs[peer], goal if peer == NATS else None)

    def pubsub(self) -> None:
        """Ephemeral streams."""
        found = self.rounds("pubsub", (OURS, NATS))
        theirs = self.peers_at(found, "pubsub", "core NATS")
        for way, goal in (("batches of 1,000", TIMES_SCATTERED), ("1,000 tasks", None)):
            ours = of(found[OURS], way)
            self.tell(f"pubsub, {way}", ours)
            if NATS in self.peers:
                self.compare(f"pubsub, {way} / {NATS}", ours, theirs[NATS], goal)

    def peers_at(
        self, found: dict[str, list[Figures]], work: str, *names: str
    ) -> dict[str, list[float]]:
        """The best way of each peer in each round, which is told."""
        theirs = {}
        for peer, name in zip((NATS, REDIS), names, strict=False):
            theirs[peer] = [max(figures.values()) for figures in found[peer]]
            self.tell(f"{work}, {name}", theirs[peer])
        return theirs

    def request(self) -> None:
        """Requests."""
        found = self.rounds("request", (OURS, NATS))
        for share, most in (("p50", 1.0), ("p99", None)):
            for name in (OURS, NATS):
                self.tell(f"request, {name}, {share}", of(found[name], share), "µs")
            if NATS in self.peers:
                ours, theirs = of(found[OURS], share), of(found[NATS], share)
                self.compare(f"request, {share} / {NATS}'s", ours, theirs, most=most)

    # ------------------------------------------------------------ beside bare writes

    def single(self) -> None:
        """One awaited publish after the other."""
        found = self.rounds("single", (OURS,))[OURS]
        awaited, bare = of(found, "awaited"), of(found, "bare")
        self.tell("single, awaited publish", awaited, "µs")
        self.tell("single, bare append and fdatasync", bare, "µs")
        self.compare("single, awaited / bare", awaited, bare, most=OF_BARE)

    def limit(self) -> None:
        """Batches of 1,000."""
        found = self.rounds("limit", (OURS,))[OURS]
        alone, together = of(found, "ours, 1"), of(found, f"ours, {LANES}")
        bare, grouped = of(found, "bare, 1"), of(found, f"bare, {TOGETHER}")
        each, some = "a sync for each", f"a sync for {TOGETHER}"
        self.tell("limit, one at a time", alone)
        self.tell(f"limit, {LANES} at once", together)
        self.tell(f"limit, bare, {each}", bare)
        self.tell(f"limit, bare, {some}", grouped)
        self.compare(f"limit, one at a time / {each}", alone, bare)
        self.compare(f"limit, {LANES} at once / {each}", together, bare, OF_THE_LIMIT)
        self.compare(f"limit, {LANES} at once / {some}", together, grouped, OF_THE_LIMIT)

    # ------------------------------------------------------------ one node

    def memory(self) -> None:
        """The memory of the node."""
        data = self.home / "memory"
        with _servers.ours(data) as server:
            passed = self.ask("through", server, self.size.through)
        shutil.rmtree(data)
        with _servers.ours(data) as server:
            held = self.ask("unacked", server, self.size.unacked)
        shutil.rmtree(data)
        check = self.report.check
        check(
            f"memory, {self.size.through:,} published, consumed, acked",
            round(passed["rate"]),
            "messages/s",
        )
        check("memory, second quarter", round(passed["second"] / MIB, 1), "MiB")
        most = GROWTH * passed["second"] + SLACK
        last, goal = round(passed["last"] / MIB, 1), f"<= {most / MIB:.0f} MiB"
        check("memory, last quarter", last, "MiB", goal, passed["last"] <= most)
        goal = f"<= {UNACKED_BYTES} bytes"
        count = f"{self.size.unacked:,}"
        check(f"un-acked, twice {count} delivered", round(held["delivered"], 1), "bytes each")
        for name, key in (
            (f"un-acked, {count}, every second one acked", "alone"),
            ("un-acked, the others acked in any order, at most", "peak"),
            ("un-acked, in the machine, every second one acked", "machine, alone"),
            ("un-acked, in the machine, acked in any order, at most", "machine, peak"),
        ):
            check(name, round(held[key], 1), "bytes each", goal, held[key] <= UNACKED_BYTES)
        check("un-acked, longest wait for acks to be on disk", round(held["wait"], 3), "s")
        check("un-acked, left", round(held["left"]), "messages", "= 0", held["left"] == 0)

    def many(self) -> None:
        """Many streams."""
        data, count = self.home / "many", self.size.streams
        with _servers.ours(data) as server:
            empty = server.seconds
            found = self.ask("many", server, count)
        with _servers.ours(data) as server:
            again = server.seconds
        shutil.rmtree(data)
        check = self.report.check
        right = round(found["right"])
        check("many, streams that brought all", right, "streams", f"= {count:,}", right == count)
        check(f"many, {count:,} streams made", round(found["made"], 2), "s")
        check("many, 10 messages to each, consumed", round(found["worked"], 2), "s")
        check("many, memory of the node", round(found["bytes"] / MIB, 1), "MiB")
        check("many, start of an empty node", round(empty, 2), "s")
        check(f"many, start with {count:,} streams", round(again, 2), "s")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "publish": Bench.publish, "consume": Bench.consume, "pubsub": Bench.pubsub,
    "request": Bench.request, "single": Bench.single, "limit": Bench.limit,
    "memory": Bench.memory, "many": Bench.many,
}  # fmt: skip


def of(found: Sequence[Figures], way: str) -> list[float]:
    """One figure of each round."""
    return [figures[way] for figures in found]


def spread(values: Sequence[float]) -> str:
    """From which to which.

    >>> spread([103_500.0, 91_000.0]), spread([2.26, 2.449]), spread([3.0])
    (' (91,000 to 103,500)', ' (2.26 to 2.45)', '')
    """
    if len(values) < 2:
        return ""
    return f" ({brief(min(values))} to {brief(max(values))})"


def brief(value: float) -> str:
    """A figure as it is told beside others."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    return measure("streams", __doc__, argv, SECTIONS, OURS, _bench)


def _bench(home: Path, report: Report, console: Console, chosen: Any) -> Bench:
    size, peers = (QUICK if chosen.quick else Size()), (() if chosen.ours else (NATS, REDIS))
    return Bench(home, size, report, console, peers)
