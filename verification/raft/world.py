"""Simulate a Raft cluster: nodes, disks, links and clocks that fail at random, and clients.

Checked at every step:

1. **Election safety**: a term has at most one leader.
2. **Log matching**: entries of one index and term are the same, and so are the entries before them.
3. **Leader completeness**: an elected node has all entries that were ever committed.
4. **State machine safety**: all nodes apply the same entries, in the same order.
5. **Reads**: a read that begins after an acknowledgement sees the acknowledged entry.
6. **Progress**: when the faults are over, an entry can be committed, and all nodes come to have it.

Faults: nodes crash, and lose what they had not synced, or a part of it; nodes stand still for a while; links lose,
double, delay and reorder messages, and are cut, one way or both; clocks run fast or slow. Meanwhile members come and
go, leadership is transferred, and logs become snapshots.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import (
    ChangeError,
    Entry,
    Hard,
    Id,
    Members,
    Message,
    NotLeaderError,
    Ready,
    Settings,
    Snapshot,
)
from railgun.broker.protocol.raft.state import Role
from railgun.errors import ProtocolError
from verification.rescale.model import Violation

DRIFT: Final = 0.02  # by how much clocks run too fast or too slow
AFTERWARDS: Final = 60.0  # seconds without faults, in which the cluster must come to rest
ROUND: Final = (
    10  # snapshots are taken at multiples of it, so those of several nodes are of the same index
)
MAX_EVENTS: Final = 50_000  # in the time without faults


@dataclass(frozen=True)
class Habits:
    """The duties of a driver; mutants neglect them."""

    waits_for_disk: bool = True
    """Messages that depend on a write are sent when the write is on disk."""
    keeps_vote: bool = True
    """The vote survives a restart."""


@dataclass
class Disk:
    """The content that a crash would leave."""

    snapshot: Snapshot
    hard: Hard = field(default_factory=Hard)
    entries: list[Entry] = field(default_factory=list)

    def write(self, ready: Ready, parts: int | None = None) -> None:
        """Write a `Ready`: all of it, or only its first `parts`."""
        todo: list[Callable[[], None]] = []
        if ready.hard is not None:
            hard = ready.hard
            todo.append(lambda: setattr(self, "hard", hard))
        if ready.snapshot is not None:
            todo.append(lambda snapshot=ready.snapshot: self.restore(snapshot))  # type: ignore[misc]
        todo += [lambda entry=entry: self.append(entry) for entry in ready.entries]  # type: ignore[misc]
        for part in todo[:parts]:
            part()

    def append(self, entry: Entry) -> None:
        """Write an entry in place of all entries from its index on."""
        del self.entries[max(0, entry.index - self.snapshot.index - 1) :]
        self.entries.append(entry)

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot in place of everything."""
        self.snapshot, self.entries = snapshot, []

    def compact(self, snapshot: Snapshot) -> None:
        """Write a snapshot in place of the entries up to it."""
        self.entries = [entry for entry in self.entries if entry.index > snapshot.index]
        self.snapshot = snapshot


class Node:
    """One node: its machine while it is up, and its disk."""

    def __init__(self, id: Id, disk: Disk, rate: float) -> None:
        self.id, self.disk, self.rate = id, disk, rate
        self.raft: Raft | None = None
        self.life = 0
        self.stands_until = 0.0
        self.writing: Ready | None = None
        self.applied: list[bytes] = []  # the applied entry of each index
        self.proposed: dict[
            tuple[int, int], int
        ] = {}  # by (term, index): the number of the proposal
        self.reading: dict[
            int, int
        ] = {}  # by number of a read: what was acknowledged when it began
        self.checked = 0, 0  # the index and term up to which the log has been checked

    def clock(self, at: float) -> float:
        """Return the time of the node's clock."""
        return at * self.rate + 1000.0


class World:
    """A run. All choices come from `seed`."""

    def __init__(
        self,
        seed: int,
        kind: type[Raft] = Raft,
        habits: Habits | None = None,
        steps: int | None = None,
    ) -> None:
        self.seed, self.kind, self.habits = seed, kind, habits or Habits()
        self.chance = random.Random(seed)
        self.at = 0.0
        self.todo: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.cuts: set[tuple[Id, Id]] = set()
        self.faulty = True
        self.story: list[str] = []
        self.tally: Counter[str] = Counter()
        # facts about the whole cluster
        self.leaders: dict[int, Id] = {}
        self.known_entries: dict[tuple[int, int], tuple[Entry, int | None]] = {}
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []  # by index: a term in which the commit was known
        self.acknowledged = 0
        self.values = 0
        self.numbers = 0
        # the settings of this run
        chance = self.chance
        self.loss = chance.choice([0.0, 0.0, 0.02, 0.1])
        self.doubling = chance.choice([0.0, 0.0, 0.05])
        self.delay = chance.choice([0.002, 0.02, 0.2])
        self.sync = chance.choice([0.001, 0.01, 0.1, 0.3])
        self.calm = chance.choice([0.2, 0.5, 1.0, 3.0])  # seconds between faults
        self.spite = chance.choice([0.0, 0.5, 0.9])  # how often a fault hits a critical node
        self.pace = chance.choice([0.02, 0.05, 0.15])  # seconds between two requests of clients
        self.reading = chance.choice([0.4, 0.4, 0.85])  # the share of reads
        self.alike = chance.random() < 0.4  # whether all nodes have the same election timeout
        self.settings = Settings(
            election=1.0,
            heartbeat=0.2,
            lease=chance.choice([None, 0.85, 0.85]),
            pre_vote=chance.random() < 0.6,
            check_quorum=chance.random() < 0.9,
            append_bytes=chance.choice([1, 1, 200, 1 << 20]),
            window=chance.choice([1, 1, 3, 64]),
            chunk=chance.choice([5, 64, 1 << 20]),
        )
        voters = tuple("abcde"[: chance.choice([1, 2, 3, 3, 3, 4, 5])])
        self.narrow = chance.random() < 0.2
        """Whether the run is about leases: a follower is cut off from the leader alone, and little is written."""
        self.steps = steps or (4_000 if self.narrow else 1_500)
        if self.narrow:
            voters = tuple("abc")
            self.loss = self.doubling = 0.0
            self.sync, self.calm, self.spite = 0.001, chance.choice([0.15, 0.5]), 0.9
            self.pace, self.reading, self.delay = 0.01, 0.7, chance.choice([0.002, 0.05, 0.2])
            self.settings = replace(
                self.settings, lease=chance.choice([None, 0.95, 0.95]), check_quorum=True, window=64
            )
        self.nodes: dict[Id, Node] = {}
        for id in (*voters, *"vwxyz"[: 0 if self.narrow else chance.choice([0, 1, 2, 3])]):
            members = Members(voters if id in voters else ())
            rate = 1 + DRIFT * (2 * chance.random() - 1)
            self.nodes[id] = Node(id, Disk(Snapshot(0, 0, members)), rate)

    # ------------------------------------------------------------ running

    def run(self) -> World:
        """Run until the cluster has come to rest; raises `Violation`."""
        try:
            for node in self.nodes.values():
                self.start(node)
            self.after(0.1, self.client)
            self.after(0.5, self.fault)
            for _ in range(self.steps):
                self.turn()
            self.come_to_rest()
        except ProtocolError as error:
            raise Violation("the machine says", str(error)) from error
        finally:
            self.tally["runs"] += 1
            self.tally["committed"] += len(self.committed)
            self.tally["terms"] += len(self.leaders)
        return self

    def turn(self) -> None:
        """Perform the next event."""
        self.at, _, act = heapq.heappop(self.todo)
        act()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule `act` after `seconds`."""
        self.count += 1
        heapq.heappush(self.todo, (self.at + seconds, self.count, act))

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.at:8.3f}  {text}")

    def come_to_rest(self) -> None:
        """Check progress after the faults: an entry is committed, and all nodes come to have it."""
        self.faulty = False
        self.cuts.clear()
        self.tell("the faults are over")
        for node in self.nodes.values():
            node.stands_until = min(node.stands_until, self.at)
            if node.raft is None:
                self.start(node)
        end, target = self.at + AFTERWARDS, len(self.committed) + 1
        for _ in range(MAX_EVENTS):
            self.turn()
            if self.at > end:
                break
            if self.acknowledged >= target and self._is_everywhere(target):
                return
        raise Violation(
            "stuck",
            f"without faults for {AFTERWARDS:.0f} s: "
            + "; ".join(str(n.raft) for n in self.nodes.values()),
        )

    def _is_everywhere(self, index: int) -> bool:
        leader = next(
            (n.raft for n in self.nodes.values() if n.raft and n.raft.role is Role.LEADER), None
        )
        return leader is not None and all(
            len(self.nodes[id].applied) >= index for id in leader.log.members.all
        )

    # ------------------------------------------------------------ nodes

    def start(self, node: Node) -> None:
        """Start a node from its disk."""
        node.life += 1
        disk = node.disk
        hard = disk.hard if self.habits.keeps_vote else Hard(disk.hard.term)
        now = node.clock(self.at)
        node.raft = self.kind(
            node.id,
            self.settings,
            now,
            snapshot=disk.snapshot,
            hard=hard,
            entries=disk.entries,
            seed=0 if self.alike else self.chance.getrandbits(32),
        )
        node.applied = _state(disk.snapshot)
        node.writing = None
        node.proposed, node.reading = {}, {}
        self.tell(f"{node.id} starts, {node.raft}")
        self.wake(node)

    def crash(self, node: Node) -> None:
        """Crash a node: it loses what was not synced, or a part of that."""
        if node.raft is None:
            return
        self.tally["crashes"] += 1
        if node.writing is not None:
            ready = node.writing
            most = len(ready.entries) + 2
            node.disk.write(ready, self.chance.choice([0, self.chance.randint(0, most), most]))
        self.tell(f"{node.id} crashes")
        node.raft, node.writing = None, None
        node.life += 1

    def wake(self, node: Node) -> None:
        """Do a node's pending work, and schedule its next timer."""
        raft = node.raft
        assert raft is not None
        self.check(node)
        self.do(node)
        life, due = node.life, (raft.due - 1000.0) / node.rate

        def tick() -> None:
            if node.life != life or node.raft is None:
                return
            if self.at < node.stands_until:
                self.after(node.stands_until - self.at + 1e-6, tick)
            elif raft.due <= node.clock(self.at):
                raft.tick(node.clock(self.at))
                self.wake(node)

        self.after(max(0.0, due - self.at) + 1e-6, tick)

    def do(self, node: Node) -> None:
        """Perform the duties of a driver."""
        raft = node.raft
        assert raft is not None
        if node.writing is not None or not raft.has_ready:
            return
        ready = raft.ready()
        self.send(node, ready.early)
        if not self.habits.waits_for_disk:
            self.send(node, ready.late)
        life = node.life
        node.writing = ready

        def written() -> None:
            if node.life != life:
                return
            if self.at < node.stands_until:
                self.after(node.stands_until - self.at + 1e-6, written)
                return
            node.writing = None
            node.disk.write(ready)
            raft.persisted(ready, node.clock(self.at))
            if self.habits.waits_for_disk:
                self.send(node, ready.late)
            if ready.snapshot is not None:
                self.restored(node, ready.snapshot)
            for entry in ready.committed:
                self.apply(node, entry)
            for number, index in ready.reads:
                self.answered(node, number, index)
            self.check(node)
            if self.chance.random() < 0.1:
                self.compact(node)
            self.do(node)

        if ready.must_sync:
            slow = self.sync if self.faulty else 0.001
            self.after(slow * self.chance.expovariate(1.0), written)
        else:
            written()

    def send(self, node: Node, messages: Sequence[tuple[Id, Message]]) -> None:
        """Put messages on their links, or lose them."""
        for to, message in messages:
            copies = 1
            if self.faulty:
                if self.chance.random() < self.loss:
                    copies = 0
                elif self.chance.random() < self.doubling:
                    copies = 2
            for _ in range(copies):
                delay = self.delay * self.chance.expovariate(1.0) if self.faulty else 0.005
                self.after(delay, self.delivery(node.id, to, message))

    def delivery(self, sender: Id, to: Id, message: Message) -> Callable[[], None]:
        """Return an action that delivers a message."""

        def deliver() -> None:
            node = self.nodes[to]
            if (sender, to) in self.cuts or node.raft is None:
                return
            if self.at < node.stands_until:
                self.after(node.stands_until - self.at + 1e-6, deliver)
                return
            self.tally["messages"] += 1
            node.raft.step(sender, message, node.clock(self.at))
            self.wake(node)

        return deliver

    # ------------------------------------------------------------ applied entries

    def apply(self, node: Node, entry: Entry) -> None:
        """Apply an entry at a node."""
        at = len(node.applied) + 1
        if entry.index != at:
            raise Violation("order", f"{node.id} applies {entry.index} where {at} is due")
        self.is_committed(node, entry)
        node.applied.append(entry.data)
        if node.proposed.pop((entry.term, entry.index), None) is not None:
            self.acknowledged = max(self.acknowledged, entry.index)
            self.tally["acknowledged"] += 1

    def is_committed(self, node: Node, entry: Entry) -> None:
        """Record a committed entry, which must be the same for all nodes."""
        if entry.index <= len(self.committed):
            committed = self.committed[entry.index - 1]
            if committed != entry:
                raise Violation(
                    "two values", f"{node.id} applies {entry}, where others applied {committed}"
                )
        else:
            assert node.raft is not None
            self.committed.append(entry)
            self.committed_in.append(node.raft.term)

    def restored(self, node: Node, snapshot: Snapshot) -> None:
        """Begin anew with a snapshot at a node."""
        node.applied = _state(snapshot)
        self.tally["snapshots"] += 1
        self.tell(f"{node.id} restores a snapshot of {snapshot.index}")
        expected = [entry.data for entry in self.committed[: snapshot.index]]
        if node.applied != expected:
            raise Violation("snapshot", f"{node.id} has another state at {snapshot.index}")

    def compact(self, node: Node) -> None:
        """Replace a part of a node's log by a snapshot."""
        raft = node.raft
        assert raft is not None
        index = len(node.applied) // ROUND * ROUND
        if index > raft.log.base:
            snapshot = raft.snapshot(index, _data(node.applied[:index], self.chance))
            node.disk.compact(snapshot)
            raft.compact(snapshot)
            self.tally["compactions"] += 1

    # ------------------------------------------------------------ checks

    def check(self, node: Node) -> None:
        """Check all properties of a node."""
        raft = node.raft
        assert raft is not None
        log = raft.log
        if raft.role is Role.LEADER:
            if raft.term not in self.leaders:
                self.elected(node)
            leader = self.leaders.setdefault(raft.term, node.id)
            if leader != node.id:
                raise Violation(
                    "two leaders", f"{leader} and {node.id} both were elected in term {raft.term}"
                )
            if log.last == raft.began and raft.commit < raft.began:
                self.check_complete(node)
        if not log.durable <= log.last or raft.applied > raft.commit > log.last:
            raise Violation("state", str(raft))
        index, previous = node.checked
        if index < log.base or not log.has(index, previous):  # the entry was cut, or is new
            index, previous = log.base, log.snapshot.term
        if index == log.last:
            return
        for entry in log.after(index):
            seen = self.known_entries.get((entry.index, entry.term))
            if seen is None:
                self.known_entries[entry.index, entry.term] = entry, previous
            elif seen != (entry, previous):
                raise Violation(
                    "logs differ", f"{node.id} has {entry} after term {previous}, others {seen}"
                )
            previous = entry.term
        node.checked = log.last, log.last_term

    def check_complete(self, node: Node) -> None:
        """Check that an elected node has all committed entries."""
        assert node.raft is not None
        log = node.raft.log
        for entry in self.committed[log.base :]:
            earlier = self.committed_in[entry.index - 1] < node.raft.term
            if earlier and not log.has(entry.index, entry.term):
                raise Violation(
                    "incomplete leader",
                    f"{node.id} leads term {node.raft.term} without {entry}, which is committed",
                )

    def answered(self, node: Node, number: int, index: int | None) -> None:
        """Check the answer of a read."""
        began = node.reading.pop(number, None)
        if began is None or index is None:
            return
        self.tally["reads"] += 1
        if index < began:
            raise Violation(
                "stale read", f"{node.id} reads at {index}, though {began} was acknowledged before"
            )

    # ------------------------------------------------------------ people

    def client(self) -> None:
        """Send a request of a client."""
        chance = self.chance
        pace = self.pace if self.faulty else 0.15
        self.after(pace * chance.expovariate(1.0), self.client)
        awake = [n for n in self.nodes.values() if n.raft is not None and self.at >= n.stands_until]
        if not awake:
            return
        leaders = [n for n in awake if n.raft and n.raft.role is Role.LEADER]
        node = chance.choice(leaders if leaders and chance.random() < 0.7 else awake)
        raft = node.raft
        assert raft is not None
        now = node.clock(self.at)
        try:
            if chance.random() < self.reading:
                self.numbers += 1
                node.reading[self.numbers] = self.acknowledged
                raft.read(self.numbers, now)
            elif leaders and (not self.narrow or len(leaders) > 1 or not self.cuts):
                self.order(chance.choice(leaders))
        except (NotLeaderError, ChangeError):
            pass
        self.wake(node)

    def order(self, node: Node) -> None:
        """Give a leader an order of an operator."""
        chance, raft, now = self.chance, node.raft, node.clock(self.at)
        assert raft is not None
        try:
            if not self.faulty or chance.random() < 0.8:
                count = chance.choice([1, 1, 1, 5])
                self.values += count
                data = [b"%d" % (self.values - count + n) for n in range(count)]
                term, index = raft.propose(data, now)
                for n in range(count):
                    node.proposed[term, index - n] = self.values
            elif chance.random() < 0.7:
                members = self.changed(raft)
                raft.change(members, now)
                self.tell(f"{node.id} changes members: {members}")
                self.tally["changes"] += 1
                self.part_soon(node)
            else:
                to = chance.choice(raft.log.members.voters)
                raft.transfer(to, now)
                self.tell(f"{node.id} hands over to {to}")
                self.tally["transfers"] += 1
                self.part_soon(node)
        finally:
            self.wake(node)

    def changed(self, raft: Raft) -> Members:
        """Return the members after a random change."""
        members, chance = raft.log.members, self.chance
        node = chance.choice(list(self.nodes))
        match chance.choice(["voter", "voter", "learner", "without"]):
            case "voter" if node in members.all:
                return members.with_voter(node)
            case "without":
                return members.without(node)
            case _:
                return members.with_learner(node)

    # ------------------------------------------------------------ faults

    def fault(self) -> None:
        """Cause a fault, or heal one."""
        if not self.faulty:
            return
        chance = self.chance
        self.after(self.calm * chance.expovariate(1.0), self.fault)
        node = self.victim()
        if self.narrow:
            self.narrow_fault()
            return
        match chance.choice(
            ["crash", "crash", "all", "stand", "cut", "one way", "link", "link", "mend"]
        ):
            case "crash":
                self.crash(node)
                self.again(node)
            case "all" if chance.random() < 0.3:
                for each in self.nodes.values():
                    self.crash(each)
                    self.again(each)
            case "stand":
                node.stands_until = self.at + 2 * chance.expovariate(1.0)
                self.tell(f"{node.id} stands still until {node.stands_until:.3f}")
                self.tally["pauses"] += 1
            case "cut":
                group = {id for id in self.nodes if chance.random() < 0.5}
                rest = set(self.nodes) - group
                self.cuts = {(a, b) for a in group for b in rest} | {
                    (b, a) for a in group for b in rest
                }
                self.tell(f"cut: {''.join(sorted(group))} from {''.join(sorted(rest))}")
                self.tally["partitions"] += 1
            case "one way":
                self.cuts = {(node.id, other) for other in self.nodes if chance.random() < 0.7}
                self.tell(f"cut one way: from {node.id}")
                self.tally["partitions"] += 1
            case "link":
                peer = chance.choice(list(self.nodes))
                self.cuts |= {(node.id, peer), (peer, node.id)}
                self.tell(f"cut: the link between {node.id} and {peer}")
            case "mend":
                self.cuts = set()
                self.tell("all links are mended")

    def narrow_fault(self) -> None:
        """Cut the leader from a follower, restart another follower, or heal everything."""
        nodes = list(self.nodes.values())
        leaders = [n for n in nodes if n.raft and n.raft.role is Role.LEADER]
        others = [n for n in nodes if n not in leaders]
        what = self.chance.choice(["bounce", "bounce", "bounce", "mend"] if self.cuts else ["link"])
        if what == "mend" or not leaders or not others:
            self.cuts = set()
        elif what == "link":
            leader, follower = leaders[-1].id, self.chance.choice(others).id
            self.cuts = {(leader, follower), (follower, leader)}
            self.tell(f"cut: the link between {leader} and {follower}")
        else:
            node = self.chance.choice(others)
            self.crash(node)
            self.after(0.01, lambda: self.start(node) if node.raft is None else None)

    def part_soon(self, node: Node) -> None:
        """Perhaps cut a node off from all others, just after an important event."""
        if self.chance.random() < self.spite:
            self.after(self.delay * self.chance.expovariate(1.0), lambda: self.part(node))

    def part(self, node: Node) -> None:
        """Cut a node off from all others."""
        if self.faulty:
            others = set(self.nodes) - {node.id}
            self.cuts = {(node.id, other) for other in others}
            self.cuts |= {(other, node.id) for other in others}
            self.tell(f"cut: {node.id} from all others")
            self.tally["partitions"] += 1

    def elected(self, node: Node) -> None:
        """Handle a new leader; perhaps an old leader never hears of it, and gets requests of clients."""
        for other in self.nodes.values():
            leads = other.raft is not None and other.raft.role is Role.LEADER
            if leads and other is not node and self.chance.random() < self.spite:
                self.part(other)

    def victim(self) -> Node:
        """Return a node for a fault: any node, or one that writes, leads or campaigns."""
        nodes = list(self.nodes.values())
        if self.chance.random() < self.spite:
            busy = [n for n in nodes if n.writing or (n.raft and n.raft.role is not Role.FOLLOWER)]
            nodes = busy or nodes
        return self.chance.choice(nodes)

    def again(self, node: Node) -> None:
        """Restart a node later."""

        def start() -> None:
            if node.raft is None:
                self.start(node)

        self.after(self.chance.choice([0.01, 0.3, 2.0]) * self.chance.expovariate(1.0), start)


def _data(state: Sequence[bytes], chance: random.Random) -> bytes:
    """Encode a state; the same state has several encodings, as real states do."""
    pad = b" " * chance.randint(0, 3)
    return pad + b",".join(state) if state else b""


def _state(snapshot: Snapshot) -> list[bytes]:
    return snapshot.data.strip().split(b",") if snapshot.index else []


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


def simulate(
    seed: int, kind: type[Raft] = Raft, habits: Habits | None = None, **more: Any
) -> Outcome:
    """Run the world of a seed; an outcome has the violation and the story."""
    world = World(seed, kind, habits, **more)
    try:
        world.run()
    except Violation as violation:
        return Outcome(seed, world.tally, violation, world.story)
    return Outcome(seed, world.tally, None, world.story)
