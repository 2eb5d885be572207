"""Simulate copies of a stream: metadata that changes at any time, and nodes, disks and links that fail.

There is no clock: the next event is drawn at random. So nothing here depends on leases: metadata appoints another
master at any time, and the old master continues until it hears of that, which may be never. Checked at every step are
the rules of `node`, for all nodes; and when the faults are over:

* all copies become the same, with all that was ever safe, and messages that are published then are safe everywhere
  (unless copies that are LOST leave no majority: then no node can lead, which is right, and is counted).

Faults: nodes crash, and lose what was not on disk, or some of it; sessions end, with their messages under way, or some
of these come late; nodes are away for a while, disks are slow, or full; copies are damaged, which is noticed. Faults
prefer nodes that lead or write, and several come at once (`strike`). Meanwhile masters change, learners become voters
and voters learners, messages are trimmed, and groups change.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

from railgun.broker.protocol.replication.master import Master
from railgun.broker.protocol.replication.messages import Id
from railgun.broker.protocol.replication.standing import LOST
from verification.replication.node import (
    ORACLE,
    Active,
    Appoint,
    CopyNode,
    Habits,
    Hello,
    contains,
    contradiction,
)
from verification.rescale.model import Violation

MAX_EVENTS: Final = 40_000  # until the nodes are at rest

MORE: Final[dict[str, dict[str, float]]] = {
    "": {},
    "members": {"members": 0.1, "sync": 1.0, "strike": 0.02, "weather": 0.02, "damage": 0.0}
    | {"crash": 0.002, "part": 0.002, "appoint": 0.002, "change": 0.03},
    "loss": {"damage": 0.02, "strike": 0.03, "weather": 0.03, "appoint": 0.002},
    "full": {"fail": 0.15, "strike": 0.02, "change": 0.05, "damage": 0.0, "sync": 0.15},
}
"""The events that some runs have more of, with their weights."""


class Metadata:
    """What the nodes have agreed on: the master, its epoch, and the voters."""

    __slots__ = ("active", "epoch", "is_active", "learners", "master", "voting")

    def __init__(self, voting: tuple[Id, ...], learners: tuple[Id, ...] = ()) -> None:
        self.voting, self.learners = voting, learners
        self.active = voting
        self.epoch, self.master, self.is_active = 0, voting[0], True

    def hear(self, active: Active) -> None:
        """Take the message of a master that its epoch is active."""
        if active.epoch == self.epoch:
            self.is_active, self.active = True, self.voting

    def appoint(self, master: Id) -> tuple[Id, Appoint]:
        """Appoint another master, or the same one again."""
        self.epoch, self.master, self.is_active = self.epoch + 1, master, False
        sets = (self.voting,) if self.voting == self.active else (self.voting, self.active)
        everybody = sorted({*self.voting, *self.active, *self.learners} - {master})
        return master, Appoint(self.epoch, sets, tuple(everybody))

    def promote(self, node: Id) -> tuple[Id, Appoint]:
        """Turn a learner into a voter."""
        self.learners = tuple(n for n in self.learners if n != node)
        self.voting = (*self.voting, node)
        return self.appoint(self.master)

    def demote(self, node: Id) -> tuple[Id, Appoint]:
        """Turn a voter into a learner."""
        self.voting = tuple(n for n in self.voting if n != node)
        self.learners = (*self.learners, node)
        return self.appoint(self.master)


class World:
    """A run. All choices come from `seed`."""

    def __init__(self, seed: int, habits: Habits | None = None, steps: int = 600) -> None:
        self.seed, self.steps, self.habits = seed, steps, habits or Habits()
        self.chance = chance = random.Random(seed)
        voters = tuple("abcde"[: chance.choice([1, 2, 3, 3, 3, 3, 4, 5])])
        learners = tuple("xyz"[: chance.choice([0, 0, 1, 2])])
        names = voters + learners
        self.habits = replace(self.habits, at_once=chance.choice([1, 1_000]))
        self.metadata = Metadata(voters, learners)
        self.nodes = {id: CopyNode(id, names, self.habits) for id in names}
        self.links: dict[tuple[Id, Id], deque[Any]] = {}
        self.late: list[tuple[Id, Id, Any]] = []  # messages of ended sessions that arrive late
        self.parted: set[tuple[Id, Id]] = set()  # masters and replicas without a session
        self.story: list[str] = []
        self.tally: Counter[str] = Counter()
        # how often each event happens in this run
        rare, seldom, often = 0.002, 0.01, 0.05
        self.odds: dict[str, float] = {
            "deliver": 1.0,
            "sync": chance.choice([0.15, 0.4, 1.0]),
            "publish": chance.choice([often, 0.15]),
            "change": chance.choice([0.0, seldom, often]),
            "trim": chance.choice([0.0, seldom, often]),
            "appoint": chance.choice([rare, seldom, 0.03, often]),
            "members": chance.choice([0.0, seldom, often]),
            "crash": chance.choice([0.0, rare, seldom, 0.03]),
            "part": chance.choice([0.0, rare, seldom, 0.03]),
            "meet": seldom,
            "straggle": chance.choice([0.0, seldom, often]),
            "fail": chance.choice([0.0, 0.0, seldom, often]),
            "damage": chance.choice([0.0, 0.0, rare, seldom]),
            "weather": chance.choice([0.0, seldom, 0.03]),
            "strike": chance.choice([0.0, seldom, 0.03]),
        }
        about = chance.choice(["", "", "members", "loss", "full"])  # what the run has more of
        self.odds |= MORE[about]
        self.spite = chance.choice([0.0, 0.5, 0.9])  # how often a fault hits a critical node
        self.away: set[Id] = set()  # nodes that are cut off both ways
        self.slow: set[Id] = set()  # nodes with slow disks

    # ------------------------------------------------------------ running

    def run(self) -> World:
        """Run until all copies are at rest; raises `Violation`."""
        try:
            self.send(ORACLE, [self.metadata.appoint(self.metadata.master)])
            whats, weights = list(self.odds), list(self.odds.values())
            for what in self.chance.choices(whats, weights, k=self.steps):
                getattr(self, what)()
            self.come_to_rest()
        finally:
            self.tally["runs"] += 1
            self.tally["epochs"] += self.metadata.epoch
        return self

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(text)

    def send(self, sender: Id, messages: list[tuple[Id, Any]]) -> None:
        """Put messages on their links."""
        for to, message in messages:
            if to == ORACLE:
                self.metadata.hear(message)
                self.tell(f"{sender} is active in epoch {message.epoch}")
            else:
                self.links.setdefault((sender, to), deque()).append(message)

    def after(self, node: CopyNode, text: str, sent: list[tuple[Id, Any]]) -> None:
        """Record and check what an event did to a node."""
        self.tell(f"{node.id}: {text}   {node.disk.standing()}")
        self.send(node.id, sent)
        for other in self.nodes.values():
            violation = contradiction(node, other)
            if violation is not None:
                raise violation
            if other is not node and other.holdings() & node.holdings():
                raise Violation("two masters", f"{other.id} and {node.id} have led one epoch")

    def pick(self, *, hurts: bool = True) -> CopyNode:
        """Return any node, or one that leads or writes."""
        nodes = list(self.nodes.values())
        if hurts and self.chance.random() < self.spite:
            busy = [n for n in nodes if n.line or isinstance(n.machine, Master)]
            nodes = busy or nodes
        return self.chance.choice(nodes)

    def leaders(self) -> list[CopyNode]:
        """Return all nodes that believe they lead."""
        return [node for node in self.nodes.values() if node.leads]

    # ------------------------------------------------------------ events

    def deliver(self) -> None:
        """Deliver the next message of some link."""
        away = self.away
        full = [link for link, waiting in self.links.items() if waiting and not away & set(link)]
        if full:
            self.deliver_on(self.chance.choice(full))

    def deliver_on(self, link: tuple[Id, Id]) -> None:
        """Deliver the next message of a link."""
        sender, to = link
        message, node = self.links[link].popleft(), self.nodes[to]
        self.tally["messages"] += 1
        self.after(node, f"← {sender} {message}", node.hear(sender, message))

    def sync(self) -> None:
        """Write some waiting data to a disk."""
        nodes = [node for node in self.nodes.values() if node.line]
        if nodes:
            node = self.chance.choice(nodes)
            if node.id in self.slow and self.chance.random() < 0.9:
                return
            most = self.chance.choice([1, 1, None])
            what = ", ".join(str(job.command) for job in node.line[:most])
            self.after(node, f"on disk: {what}", node.sync(most))

    def publish(self) -> None:
        """Give a master a batch, or a unit of several batches."""
        for node in self.leaders()[:1]:
            node = self.chance.choice(self.leaders())
            self.tally["published"] += 1
            if self.chance.random() < 0.3:
                self.tally["units"] += 1
                self.after(node, "publish a unit", node.publish_unit(self.chance.choice([2, 3])))
            else:
                self.after(node, "publish", node.publish(self.chance.choice([1, 2])))

    def change(self) -> None:
        """Change the state of a group."""
        if self.leaders():
            node = self.chance.choice(self.leaders())
            self.tally["changes"] += 1
            self.after(node, "change", node.change())

    def trim(self) -> None:
        """Trim the log of a master."""
        if self.leaders():
            node = self.chance.choice(self.leaders())
            disk, safe = node.disk, node.machine.copy.safe
            ends = [end for end in disk.ends() if disk.first < end <= safe]
            if ends:
                self.tally["trims"] += 1
                first = self.chance.choice([ends[0], ends[-1]])
                self.after(node, f"trim to {first}", node.trim(first))

    def appoint(self) -> None:
        """Let the metadata appoint another master, or the same one."""
        to, message = self.metadata.appoint(self.chance.choice(self.metadata.voting))
        self.tell(f"* appoints {to}: {message}")
        if self.chance.random() < 0.1:
            return  # the appointed node never hears of it
        self.send(ORACLE, [(to, message)])

    def members(self) -> None:
        """Promote or demote a node."""
        metadata = self.metadata
        if not metadata.is_active and self.habits.waits_for_active:
            return
        may = [n for n in metadata.voting if n != metadata.master]
        if metadata.learners and (not may or self.chance.random() < 0.5):
            change = metadata.promote(self.chance.choice(metadata.learners))
        elif may:
            change = metadata.demote(self.chance.choice(may))
        else:
            return
        self.tally["members"] += 1
        self.tell(f"* changes members: {change}")
        self.send(ORACLE, [change])

    def crash(self) -> None:
        """Crash and restart a node."""
        node = self.pick()
        keep = self.chance.choice([0, self.chance.randint(0, len(node.line))])
        self.tally["crashes"] += 1
        for sender, to in list(self.links):
            if node.id in (sender, to) and sender != ORACLE:
                self._lose(sender, to)
        torn = self.chance.random() < 0.5
        self.after(node, f"crash, keeps {keep}", node.crash(keep, torn))

    def _lose(self, sender: Id, to: Id) -> None:
        """Lose some of the last messages of a link; earlier messages still arrive."""
        waiting = self.links.setdefault((sender, to), deque())
        for _ in range(self.chance.choice([0, len(waiting), self.chance.randint(0, len(waiting))])):
            message = waiting.pop()
            if self.chance.random() < 0.3 and not isinstance(message, Hello):
                self.late.append((sender, to, message))

    def straggle(self) -> None:
        """Deliver a message of an ended session."""
        if self.late:
            sender, to, message = self.late.pop(self.chance.randrange(len(self.late)))
            node = self.nodes[to]
            self.tally["late"] += 1
            self.after(node, f"← {sender}, late: {message}", node.hear(sender, message))

    def part(self) -> None:
        """End the session of two nodes; messages under way may be lost."""
        first = self.pick()
        others = [other for other in self.nodes.values() if other is not first]
        if not others:
            return
        second = self.chance.choice(others)
        self.tally["sessions over"] += 1
        for link in ((first.id, second.id), (second.id, first.id)):
            self._lose(*link)
        for node, other in ((first, second), (second, first)):
            self.parted.add((node.id, other.id))
            self.after(node, f"no session with {other.id}", node.part(other.id))
        if self.chance.random() < 0.7:
            self.meet()

    def meet(self) -> None:
        """Begin new sessions between nodes that have none."""
        for master, replica in sorted(self.parted):
            node = self.nodes[master]
            self.after(node, f"a session with {replica}", node.renew(replica))
        self.parted.clear()

    def fail(self) -> None:
        """Let a write fail because a disk is full."""
        nodes = [node for node in self.nodes.values() if node.may_fail]
        if nodes:
            node = self.chance.choice(nodes)
            self.tally["full disks"] += 1
            self.after(node, "disk full", node.fail())

    def damage(self) -> None:
        """Damage a copy, which notices."""
        node = self.pick()
        self.tally["damages"] += 1
        lost = self.chance.choice([0, 1, 2, 100])
        self.after(node, f"damage, {lost}", node.damage(lost, self.chance.random() < 0.5))

    def weather(self) -> None:
        """Cut off other nodes, and slow down other disks."""
        names, chance = list(self.nodes), self.chance
        self.away = set(chance.sample(names, chance.choice([0, 1, 1, len(names) // 2])))
        self.slow = set(chance.sample(names, chance.choice([0, 0, 1, len(names) // 2])))
        self.tell(f"away: {sorted(self.away)}, slow disks: {sorted(self.slow)}")

    def strike(self) -> None:
        """Combine faults: the leader is cut off, a node that has heard of it crashes or is damaged, and another is
        appointed.

        So acknowledged messages have to be on the nodes that are left.
        """
        leaders, chance = self.leaders(), self.chance
        if not leaders:
            return
        leader = max(leaders, key=lambda node: max(node.led))
        others = [node for node in self.nodes.values() if node is not leader]
        self.tally["strikes"] += 1
        self.away = {leader.id}
        self.tell(f"{leader.id} is away")
        if others and chance.random() < 0.7:
            if self.odds["damage"] and chance.random() < 0.5:
                node = chance.choice(others)
                self.after(
                    node, "damage", node.damage(chance.choice([1, 2]), chance.random() < 0.5)
                )
            else:
                node = chance.choice(others)
                self.after(node, "crash", node.crash(chance.randint(0, len(node.line))))
        if chance.random() < 0.3:  # the node hears of its master once more
            self.away = set()
            for _ in range(chance.randint(1, 10)):
                self.deliver()
            self.away = {leader.id}
        voters = [node for node in self.metadata.voting if node != leader.id]
        if voters and chance.random() < 0.8:
            to, message = self.metadata.appoint(chance.choice(voters))
            self.tell(f"* appoints {to}: {message}")
            self.send(ORACLE, [(to, message)])

    # ------------------------------------------------------------ afterwards

    def come_to_rest(self) -> None:
        """Check the end of faults: a master is appointed, and all copies become the same."""
        self.tell("the faults are over")
        self.away, self.slow = set(), set()
        self.meet()
        for node in self.nodes.values():
            for other in self.nodes:
                if other != node.id:
                    self.send(node.id, [(other, Hello())])
        # Data that a former master was still writing belongs to the run, too.
        self._settle()
        for voters in (self.metadata.voting, self.metadata.active):
            if sum(self.nodes[n].disk.label != LOST for n in voters) * 2 <= len(voters):
                self.tally["without a majority"] += 1
                return
        self.send(ORACLE, [self.metadata.appoint(self.chance.choice(self.metadata.voting))])
        self._settle()
        leader = self.nodes[self.metadata.master]
        if not leader.leads or not self.metadata.is_active:
            raise Violation("stuck", f"{leader.id} does not lead: {leader.machine}")
        self._compare(leader)  # readers see all messages without a new publish
        self.after(leader, "publish", leader.publish(2))
        self.after(leader, "change", leader.change())
        self._settle()
        self.tally["at rest"] += 1
        self._compare(leader)

    def _settle(self) -> None:
        for _ in range(MAX_EVENTS):
            full = [link for link, waiting in self.links.items() if waiting]
            lines = [node for node in self.nodes.values() if node.line]
            if full and (not lines or self.chance.random() < 0.7):
                self.deliver_on(self.chance.choice(full))
            elif lines:
                node = self.chance.choice(lines)
                self.after(node, "on disk", node.sync(self.chance.choice([1, None])))
            else:
                return
        raise Violation("storm", "the nodes never come to rest")

    def _compare(self, leader: CopyNode) -> None:
        wanted = leader.disk
        for node in self.nodes.values():
            disk, copy = node.disk, node.machine.copy
            have = disk.label, disk.end, disk.groups, disk.states, copy.safe
            want = wanted.label, wanted.end, wanted.groups, wanted.states, wanted.end
            if have != want or not contains(disk.part(), wanted.part()):
                raise Violation("not the same", f"{node.id} has {have}; {leader.id} has {want}")


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    tally: Counter[str]
    violation: Violation | None = None
    story: list[str] = field(default_factory=list)

    def story_end(self, last: int = 60) -> str:
        """Return the end of the story, for people."""
        return "\n".join([f"seed {self.seed}", *self.story[-last:], f"  {self.violation}"])


def simulate(seed: int, habits: Habits | None = None, **more: Any) -> Outcome:
    """Run the world of a seed; an outcome has the violation and the story."""
    world = World(seed, habits, **more)
    try:
        world.run()
    except Violation as violation:
        return Outcome(seed, world.tally, violation, world.story)
    return Outcome(seed, world.tally, None, world.story)
