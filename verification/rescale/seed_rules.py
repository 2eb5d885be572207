"""ICADD as its author first wrote it down: used only by the proof, to show that its holes are real.

The rules of the original text, message by message. Every message carries its sender's version, and a receiver must take
a message with a higher version than its own. The five ways in which this fails are named in `HOLES`, each with the
smallest scenario that shows it; the explorer finds the shortest story of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from railgun.engine.protocol.frontier import MIN
from verification.explorer import Exploration, Explorer, Step
from verification.rescale.model import Counts, Violation, name, tell
from verification.rescale.rows import Item
from verification.rescale.scenarios import SNAPSHOT, STARTED, Scenario


class SeedData(NamedTuple):
    """A record and the version of its last sender."""

    version: int
    item: Item


class SeedAcquire(NamedTuple):
    """A key's state, for its new owner."""

    key: int
    state: tuple[tuple[int, int], ...]


class SeedDone(NamedTuple):
    """The sender has no more state to give."""

    version: int


class SeedBarrier(NamedTuple):
    """The cut of a snapshot."""

    snapshot: int


class SeedWorker:
    """One worker by the original rules, as a node of the explorer."""

    __slots__ = (
        "at", "barriers", "behind", "buffer", "cut", "finished_homes", "hold", "outbox", "phase",
        "save", "scenario", "seqs", "snapped", "state", "upstream", "version", "whitelist", "worker",
    )  # fmt: skip

    constant = ("scenario",)

    def __init__(self, scenario: Scenario, worker: int) -> None:
        self.scenario = scenario
        self.worker = worker
        self.phase = "normal"
        self.version = 0
        self.at = 0
        self.cut = 0
        self.seqs: dict[int, int] = {}
        self.state: dict[int, Counts] = {}
        self.whitelist: set[int] = set()
        self.hold: set[int] = set()
        self.buffer: list[Item] = []
        self.finished_homes: set[int] = set()
        self.snapped = False
        self.barriers: set[int] = set()
        self.behind: dict[int, list[Any]] = {}
        self.upstream: list[Item] = []
        self.save: dict[int, Counts] | None = None
        self.outbox: list[tuple[int, Any]] = []

    # ------------------------------------------------------------ the rules

    def home(self, key: int) -> int:
        """Return the owner of a key before the rescale (F)."""
        return self.scenario.homes[key - 1]

    def owner(self, key: int) -> int:
        """Return the owner of a key after the rescale (F′)."""
        return self.scenario.owners[key - 1]

    def data(self, sender: int | None, version: int, item: Item) -> None:
        """Treat a record, from a peer or (None) from upstream."""
        key, me = item.key, self.worker
        home, owner = self.home(key), self.owner(key)
        if version > self.version:
            self.process(item)  # "you must take it"
        elif self.phase == "normal":
            self.route(home, item)
        elif self.phase == "interrogate":
            if home == me and owner != me:
                self.whitelist.add(key)  # rule 1.1
            self.route(home, item)
        elif self.phase == "final":
            self.route(owner, item)
        elif key in self.whitelist:
            self.process(item)  # rule 1.1
        elif key in self.hold:
            self.buffer.append(item)  # rule 1.2
        elif owner != me:
            self.route(owner, item)  # rule 2
        elif home == sender:
            self.process(item)  # rule 3, the ping-pong broken
        else:
            self.route(home, item)  # rule 3

    def route(self, to: int, item: Item) -> None:
        """Send a record on, or process it on this worker."""
        if to == self.worker:
            self.process(item)
        else:
            self.outbox.append((to, SeedData(self.version, item)))

    def process(self, item: Item) -> None:
        """Count a record, and raise `Violation` if it is not the next one of its sender."""
        counts = self.state.setdefault(item.key, {})
        expected = counts.get(item.origin, 0) + 1
        if item.seq != expected:
            where = "at home" if self.home(item.key) == self.worker else "elsewhere"
            if self.phase == "final":
                where = "after Done"
            raise Violation(
                f"out of order {where}",
                f"worker {self.worker} processed {tell(item)} when number {expected} was next",
            )
        counts[item.origin] = item.seq

    def finish(self) -> None:
        """Say Done with nothing left to give; when all workers have, use the final rules."""
        if self.phase == "collect" and not self.whitelist and not self.hold:
            if self.worker in self.scenario.old and self.worker not in self.finished_homes:
                self.finished_homes.add(self.worker)
                self.tell_all(SeedDone(self.version))
            if self.finished_homes >= set(self.scenario.old):
                self.phase = "final"

    def tell_all(self, message: Any) -> None:
        """Send a message to every peer."""
        peers = (w for w in range(len(self.scenario.scripts)) if w != self.worker)
        self.outbox.extend((peer, message) for peer in peers)

    # ------------------------------------------------------------ a node of the explorer

    def events(self) -> Sequence[str]:
        """Return the events that can happen on this worker next, apart from messages."""
        events = []
        if self.at < len(self.scenario.scripts[self.worker]):
            events.append("send")
        if self.phase == "normal" and self.version == 0:
            events.append("rescale")
        if self.phase == "interrogate":
            events.append("collect")
        if self.phase == "collect":
            events.extend(f"hold {key}" for key in sorted(self.whitelist) if not self.hold)
            events.extend(f"give {key}" for key in sorted(self.hold))
        if self.scenario.snapshot and not self.snapped:
            events.append("snapshot")
        return events

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Take an event; return the messages that follow."""
        what, _, key_text = event.partition(" ")
        match what:
            case "send":
                key = self.scenario.scripts[self.worker][self.at]
                self.at += 1
                seq = self.seqs[key] = self.seqs.get(key, 0) + 1
                self.upstream.append(Item(key, self.worker, seq))
                self.take_upstream()
            case "rescale":
                self.phase = "interrogate"  # the operators report the keys they have now
                self.whitelist |= {k for k in self.state if self.home(k) == self.worker}
            case "collect":
                self.phase = "collect"
                self.version = 1
                self.whitelist = {k for k in self.whitelist if self.owner(k) != self.worker}
            case "hold":
                self.whitelist.remove(int(key_text))
                self.hold.add(int(key_text))
            case "give":
                self.give(int(key_text))
            case "snapshot":
                self.snapped = True
                self.cut = self.at
                self.tell_all(SeedBarrier(SNAPSHOT))
        self.align()
        self.finish()
        return self._sent()

    def give(self, key: int) -> None:
        """Send Acquire, then the buffered records, then Drop."""
        counts = self.state.pop(key, {})
        self.outbox.append((self.owner(key), SeedAcquire(key, tuple(sorted(counts.items())))))
        self.hold.remove(key)
        for item in [item for item in self.buffer if item.key == key]:
            self.outbox.append((self.owner(key), SeedData(self.version, item)))
        self.buffer = [item for item in self.buffer if item.key != key]

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Take a message from a link; behind a barrier the message waits."""
        if sender in self.barriers and self.save is None:
            self.behind.setdefault(sender, []).append(message)
        else:
            self.take(sender, message)
        self.align()
        self.finish()
        return self._sent()

    def take(self, sender: int, message: Any) -> None:
        """Treat a message that does not wait."""
        match message:
            case SeedData(version, item):
                self.data(sender, version, item)
            case SeedAcquire(key, counts):
                self.state[key] = dict(counts)  # overwrites any state of the key
            case SeedDone():
                self.finished_homes.add(sender)
            case SeedBarrier():
                self.barriers.add(sender)

    def take_upstream(self) -> None:
        """Take records from upstream, which wait between the barrier and the snapshot."""
        while self.upstream and (not self.snapped or self.save is not None):
            self.data(None, self.version, self.upstream.pop(0))

    def align(self) -> None:
        """Align one layer of barriers, as in normal operation."""
        peers = len(self.scenario.scripts) - 1
        if self.snapped and self.save is None and len(self.barriers) == peers:
            self.save = {key: dict(counts) for key, counts in self.state.items()}
            behind, self.behind = self.behind, {}
            for sender in sorted(behind):
                for message in behind[sender]:
                    self.take(sender, message)
            self.take_upstream()

    def _sent(self) -> list[tuple[int, Any]]:
        sent, self.outbox = self.outbox, []
        return sent

    def holdings(self) -> int:
        """Return the keys that have state on this worker."""
        return sum(1 << key for key in self.state)

    def flags(self) -> int:
        """Return whether the worker has heard of the rescale."""
        return STARTED * (self.phase != "normal")

    def may_send(self) -> int:
        """Return all workers: not worked out for these rules."""
        return -1

    def finished(self) -> bool:
        """Return whether everything that had to happen on this worker has happened."""
        return self.phase == "final" and (not self.scenario.snapshot or self.save is not None)

    def waits_for(self) -> str:
        """Describe the point where the worker stopped."""
        return self.phase

    def states(self) -> list[dict[int, Counts]]:
        """Return the state of the only stage."""
        return [self.state]

    def saved(self) -> list[dict[int, Counts]]:
        """Return the snapshot of the only stage."""
        return [self.save or {}]

    def frontier(self) -> int:
        """Return the first time: the original text has no frontiers."""
        return MIN

    def endings(self) -> Counts:
        """Return nothing: the original text has no end of keys."""
        return {}


def seed_explorer(scenario: Scenario) -> Explorer:
    """Return an explorer of the scenario under the original rules."""
    nodes = [SeedWorker(scenario, worker) for worker in range(len(scenario.scripts))]
    return Explorer(nodes, scenario.judge, {"snapshot": STARTED})


class Hole(NamedTuple):
    """One way in which the original rules break: the scenario, and the violation."""

    scenario: Scenario
    kinds: tuple[str, ...]
    meaning: str

    def find(self) -> Exploration:
        """Return the shortest story of this hole."""
        return seed_explorer(self.scenario).run(
            shortest=True, accept=lambda violation, _: violation.kind in self.kinds
        )


HOLES: dict[str, Hole] = {
    "state split": Hole(
        Scenario((0,), (1,), (0,), (1,), ((1,), (), (1,))),
        ("split state",),
        "the new owner must take a message with a higher version and begins a second state",
    ),
    "reorder at Done": Hole(
        Scenario((0, 1), (0, 1), (0,), (1,), ((), (1, 1))),
        ("out of order after Done",),
        "a record bounced to the old owner is overtaken by one under the final rules",
    ),
    "path race": Hole(
        Scenario((0,), (1,), (0,), (1,), ((), (), (1, 1))),
        ("out of order at home",),
        "a record by the old placement is overtaken by one by way of the new owner",
    ),
    "stranded key": Hole(
        Scenario((0, 1), (0, 1), (0,), (1,), ((), (1,))),
        ("stranded",),
        "a message with a higher version bypasses the whitelist, and its key stays behind for ever",
    ),
    "lost in a snapshot": Hole(
        Scenario((0, 1), (0, 1), (0,), (1,), ((1,), ()), snapshot=True),
        ("lost in snapshot",),
        "state sent behind the barrier is in nobody's snapshot",
    ),
}


def story_of(steps: Sequence[Step]) -> list[str]:
    """Describe the steps of a story under the original rules."""
    lines = []
    for step in steps:
        match step.message:
            case SeedData(version, item):
                text = f"gets {tell(item)} from {step.sender} (version {version})"
            case SeedAcquire(key, _):
                text = f"gets the state of {name(key)} from {step.sender}"
            case SeedDone():
                text = f"hears that {step.sender} is Done"
            case SeedBarrier():
                text = f"gets the barrier of {step.sender}"
            case _:
                text = step.event
        lines.append(f"worker {step.node} {text}")
    return lines
