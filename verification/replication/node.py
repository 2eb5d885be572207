"""A node with one copy of a stream for the proof: the production machines, a disk, and the duties of a driver.

The exploration (`model`) and the simulation (`world`) use the same node. Data to be written
waits in a *line*, and is on disk later, in order; a crash keeps some of the first items of the line. Every published
message and every change of groups is different, so any loss, doubling or exchange is seen.

The node remembers, beyond crashes, its claims: what it declared safe in which epoch, and what it had when it began to
lead. `contradiction` compares two nodes by that:

1. a leader has all messages and all changes of groups that were declared safe in earlier epochs, and the same;
2. what two masters declare safe is the same, and what any copy shows to readers is part of it;
3. a label on disk means that all that was declared safe in earlier epochs is on disk, too;
4. one master leads in an epoch (`holdings`).

And each node by itself checks that a part of a unit is never declared safe, never shown to readers, and never led with,
that machines raise nothing, that a copy is cut between batches only and never below what is safe, and that a standing
is what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from railgun.broker.protocol.replication import messages as m
from railgun.broker.protocol.replication.master import Master, Phase
from railgun.broker.protocol.replication.messages import Command, Id
from railgun.broker.protocol.replication.replica import Replica
from railgun.broker.protocol.replication.standing import LOST, Copy, Standing
from railgun.errors import ProtocolError
from verification.explorer import Plain
from verification.rescale.model import Violation

Sent = list[tuple[Id, Any]]
ORACLE: Final = "*"


class Entry(NamedTuple):
    """A message on disk."""

    epoch: int
    value: str
    last: bool  # of its batch
    more: bool = False  # whether its unit goes on with the next batch


class Part(NamedTuple):
    """A part of a log, from an offset on."""

    base: int
    values: tuple[str, ...]

    @property
    def end(self) -> int:
        """Return the offset after the part."""
        return self.base + len(self.values)


@dataclass(frozen=True, slots=True)
class Appoint:
    """Metadata appoint a master for this epoch."""

    epoch: int
    sets: tuple[tuple[Id, ...], ...]
    others: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Active:
    """A master reports to metadata that a majority has the label of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """A session begins."""

    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The promise of the receiver."""

    session: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Hello:
    """A node has started, or its links were cut: any session has ended."""


@dataclass(frozen=True, slots=True)
class Data:
    """A message of a machine, with the data that belongs to it."""

    message: m.Message
    payload: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A write that waits in the line."""

    command: Any
    payload: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Append:
    """A published batch, under an epoch."""

    epoch: int


@dataclass(frozen=True)
class Habits:
    """The duties of a driver; mutants neglect them."""

    master: type[Master] = Master
    replica: type[Replica] = Replica
    keeps_promise: bool = True
    """A promise is on disk before it is sent."""
    drains: bool = True
    """The line is written before a standing is sent."""
    marks_loss: bool = True
    """A damaged copy is marked LOST."""
    asks_both: bool = True
    """A recovering master also asks the set that was active."""
    goes_on_late: bool = False
    """A master continues although it has missed an epoch."""
    stops: bool = True
    """A master that promises a later epoch stops at once."""
    in_order: bool = True
    """Writes happen in the order in which they were requested."""
    knows_sessions: bool = True
    """A promise counts only for the session and epoch in which it was requested."""
    at_once: int = 1_000
    """How many batches a master pushes to a replica before it does something else."""
    waits_for_active: bool = True
    """Metadata change the voters only when the epoch is active."""


class Disk:
    """The content that a crash would leave."""

    __slots__ = ("entries", "first", "groups", "label", "promise", "states")

    def __init__(self) -> None:
        self.promise = 0
        self.label = 0
        self.first = 0
        self.entries: list[Entry] = []
        self.groups = (0, 0)
        self.states: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """Return the offset after the log."""
        return self.first + len(self.entries)

    def runs(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the epochs of a part of the log, with their offsets."""
        runs: list[tuple[int, int]] = []
        for offset in range(begin, end):
            epoch = self.entries[offset - self.first].epoch
            if runs and runs[-1][0] == epoch:
                runs.pop()
            runs.append((epoch, offset + 1))
        return tuple(runs)

    @property
    def whole(self) -> int:
        """Return the offset up to which units are complete."""
        left = len(self.entries)
        while left and self.entries[left - 1].more:
            left -= 1
        return self.first + left

    def halved(self, end: int) -> bool:
        """Return whether a unit continues behind this offset."""
        return self.first < end <= self.end and self.entries[end - self.first - 1].more

    def standing(self) -> Standing:
        """Return the standing of the copy."""
        runs = self.runs(self.first, self.end)
        return Standing(self.label, self.first, self.end, runs, self.groups)

    def read(self, begin: int, end: int) -> tuple[Entry, ...]:
        """Return a part of the log."""
        if not self.first <= begin <= end <= self.end:
            raise Violation(
                "not there", f"[{begin}, {end}) is read of a log of [{self.first}, {self.end})"
            )
        return tuple(self.entries[begin - self.first : end - self.first])

    def ends(self) -> list[int]:
        """Return the first offset, and the offsets after each batch."""
        ends_of_batches = [
            self.first + at + 1 for at, entry in enumerate(self.entries) if entry.last
        ]
        return [self.first, *ends_of_batches]

    def part(self, end: int | None = None) -> Part:
        """Return the log, or its part before `end`."""
        entries = self.entries if end is None else self.entries[: max(0, end - self.first)]
        return Part(self.first, tuple(entry.value for entry in entries))


class CopyNode(Plain):
    """One node: its disk, its line, and the machine of its role."""

    __slots__ = (
        "active", "before", "declared", "declared_groups", "disk", "habits", "id", "led",
        "line", "machine", "names", "news", "number", "sessions", "shown",
    )  # fmt: skip
    constant: tuple[str, ...] = ("habits", "id", "names")

    def __init__(self, id: Id, names: Sequence[Id], habits: Habits) -> None:
        self.id, self.names, self.habits = id, tuple(names), habits
        self.disk = Disk()
        self.line: list[Job] = []
        self.machine: Master | Replica = habits.replica(Copy())
        self.sessions: dict[Id, int] = {}  # a master's session with each replica
        self.news: dict[Id, Any] = {}  # the last news sent to each replica
        self.active = 0  # the epoch that was reported as active
        self.before = 0  # changes of groups before the epoch began
        # for the proof
        self.number = 0  # of messages and changes
        self.led: dict[int, tuple[Part, tuple[str, ...]]] = {}
        self.declared: dict[int, Part] = {}
        self.declared_groups: dict[int, tuple[str, ...]] = {}
        self.shown = Part(0, ())

    # ------------------------------------------------------------ events

    @property
    def leads(self) -> bool:
        """Return whether the node takes published messages."""
        return isinstance(self.machine, Master) and self.machine.phase is Phase.LEAD

    def hear(self, sender: Id, message: Any) -> Sent:
        """Take a message; return the messages that follow."""
        match message:
            case Appoint():
                return self._guarded(lambda: self._appoint(message))
            case Fence():
                return self._guarded(lambda: self._fence(sender, message))
            case Hello():
                return self._guarded(lambda: self.renew(sender))
            case _:
                return self._guarded(lambda: self._take(sender, message))

    def _guarded(self, act: Callable[[], Sent]) -> Sent:
        """Perform `act` and what follows; an exception of a machine is a violation."""
        try:
            sent = act()
            sent += self._pump()
        except (ProtocolError, AssertionError, KeyError, IndexError) as error:
            raise Violation("the machine says", f"{self.id}: {error!r}") from error
        finally:
            copy = self.machine.copy
            end = min(copy.safe, self.disk.end)
            first, disk = max(copy.first, self.disk.first), self.disk
            self.shown = (
                Part(first, tuple(entry.value for entry in disk.read(first, end)))
                if end > first
                else Part(0, ())
            )
        if disk.halved(self.shown.end) and self.shown.values:
            text = f"{self.id} shows {self.shown}, which ends within a unit"
            raise Violation("half a unit", text)
        return sent

    def publish(self, count: int) -> Sent:
        """Put a batch into the line."""
        assert isinstance(self.machine, Master)
        entries = tuple(
            Entry(self.machine.epoch, self._fresh(), at == count - 1) for at in range(count)
        )
        self.line.append(Job(Append(self.machine.epoch), entries))
        return []

    def publish_unit(self, count: int) -> Sent:
        """Put a unit of `count` batches into the line."""
        assert isinstance(self.machine, Master)
        epoch = self.machine.epoch
        unit = (Entry(epoch, self._fresh(), True, n < count - 1) for n in range(count))
        self.line.append(Job(Append(epoch), tuple(unit)))
        return []

    def change(self) -> Sent:
        """Change the state of a group."""
        master = self.machine
        assert isinstance(master, Master)
        master.number += 1
        command = m.WriteGroups(master.epoch, master.number, whole=False)
        self.line.append(Job(command, (self._fresh(),)))
        return []

    def _fresh(self) -> str:
        self.number += 1
        return f"{self.id}{self.number}"

    def trim(self, first: int) -> Sent:
        """Drop all messages before `first` at the master."""
        master = self.machine
        assert isinstance(master, Master)

        def act() -> Sent:
            self._trim(first)
            master.trimmed(first)
            return []

        return self._guarded(act)

    def sync(self, most: int | None = None) -> Sent:
        """Write the first `most` items of the line to disk, or all."""

        def act() -> Sent:
            sent: Sent = []
            for _ in range(len(self.line) if most is None else min(most, len(self.line))):
                sent += self._write_one()
            return sent

        return self._guarded(act)

    def crash(self, keep: int = 0, torn: bool = False) -> Sent:
        """Crash and restart with the disk, the first `keep` items of the line, and if `torn` a batch of the next."""
        for job in self.line[:keep]:
            self._store(job)
        if torn and keep < len(self.line):
            job = self.line[keep]
            if isinstance(job.command, m.Write | Append):
                last = next(at for at, entry in enumerate(job.payload) if entry.last)
                self._store(Job(job.command, job.payload[: last + 1]))
        if not self.habits.keeps_promise:
            self.disk.promise = 0
        return self._restart()

    def _restart(self) -> Sent:
        self.line.clear()
        self.machine = self.habits.replica(Copy.of(self.disk.standing(), whole=self.disk.whole))
        self.sessions, self.news = {}, {}
        return self.greetings()

    def greetings(self) -> Sent:
        """Return a message to all nodes: all sessions have ended."""
        return [(other, Hello()) for other in self.names if other != self.id]

    def damage(self, lost: int, groups: bool) -> Sent:
        """Lose the last `lost` messages, and perhaps the groups; the node notices, and says so."""

        def act() -> Sent:
            self.line.clear()
            disk = self.disk
            ends = disk.ends()
            keep = ends[max(0, len(ends) - 1 - lost)]
            del disk.entries[keep - disk.first :]
            if groups:
                disk.groups, disk.states = (0, 0), ()
            if self.habits.marks_loss:
                disk.label = LOST
            machine = self.machine
            if isinstance(machine, Master) or not machine.session:
                return self._restart()
            machine.copy = Copy.of(disk.standing(), whole=disk.whole)
            return self._do(machine.lost(), ()) if self.habits.marks_loss else []

        return self._guarded(act)

    @property
    def may_fail(self) -> bool:
        """Return whether a write can fail now."""
        if not self.line or isinstance(self.machine, Master):
            return False
        return isinstance(self.line[0].command, m.Write | m.Label | m.WriteGroups)

    def fail(self) -> Sent:
        """Fill the disk: the first item of the line is not written, nor others of its kind."""

        def act() -> Sent:
            replica = self.machine
            assert isinstance(replica, Replica)
            if isinstance(self.line[0].command, m.WriteGroups):
                self.line = [j for j in self.line if not isinstance(j.command, m.WriteGroups)]
                return self._do(replica.failed_groups(self.disk.groups), ())
            self.line = [j for j in self.line if not isinstance(j.command, m.Write | m.Label)]
            return self._do(replica.failed(), ())

        return self._guarded(act)

    def renew(self, other: Id) -> Sent:
        """End the session with another node, and begin the next one."""
        master = self.machine
        if not isinstance(master, Master) or other not in self.sessions:
            return []
        sent = self._do(master.gone(other), ())
        return sent + self._open(other)

    def part(self, other: Id) -> Sent:
        """End the session with another node, without a next one for now."""
        master = self.machine
        if not isinstance(master, Master) or other not in self.sessions:
            return []
        return self._guarded(lambda: self._do(master.gone(other), ()))

    def _open(self, other: Id) -> Sent:
        assert isinstance(self.machine, Master)
        self.sessions[other] = self.sessions.get(other, self.machine.epoch * 1_000) + 1
        return [(other, Fence(self.machine.epoch, self.sessions[other]))]

    # ------------------------------------------------------------ roles

    def _appoint(self, appoint: Appoint) -> Sent:
        if appoint.epoch <= self.disk.promise:
            return []
        before = self.machine
        expected = appoint.epoch - 1
        goes_on = isinstance(before, Master) and before.phase is Phase.LEAD
        if goes_on and not self.habits.goes_on_late:
            goes_on = before.epoch == expected
        sent: Sent = []
        if not goes_on:
            sent += self._drain()
        self.disk.promise = appoint.epoch
        sets = appoint.sets if self.habits.asks_both else appoint.sets[:1]
        master = self.habits.master(self.id, self.machine.copy, appoint.epoch, sets)
        self.machine, self.sessions, self.news = master, {}, {}
        sent += self._do(master.go_on() if goes_on else master.begin(), ())
        for other in appoint.others:
            sent += self._open(other)
        return sent

    def _fence(self, sender: Id, fence: Fence) -> Sent:
        if fence.epoch < self.disk.promise:
            return []
        machine = self.machine
        if fence.epoch == self.disk.promise and (
            isinstance(machine, Master) or machine.session >= fence.session
        ):
            return []
        self.disk.promise = fence.epoch
        sent = self._drain() if self.habits.drains else []
        if isinstance(machine, Master):
            if not self.habits.stops:
                return [*sent, (sender, Fenced(fence.session, machine.copy.standing()))]
            self.machine = self.habits.replica(machine.copy)
            self.sessions, self.news = {}, {}
        replica = self.machine
        assert isinstance(replica, Replica)
        standing = replica.fenced(sender, fence.epoch, fence.session)
        if self.habits.drains and standing != self.disk.standing():
            text = f"{self.id} says {standing}, and there is {self.disk.standing()}"
            raise Violation("standing", text)
        return [*sent, (sender, Fenced(fence.session, standing))]

    def _drain(self) -> Sent:
        sent: Sent = []
        while self.line:
            sent += self._write_one()
        return sent

    # ------------------------------------------------------------ messages

    def _take(self, sender: Id, message: Any) -> Sent:
        machine = self.machine
        if isinstance(machine, Replica):
            if not isinstance(message, Data) or sender != machine.master:
                return []
            match message.message:
                case m.Push() as push:
                    return self._do(machine.pushed(push), message.payload)
                case m.PushGroups() as groups:
                    return self._do(machine.pushed_groups(groups), message.payload)
                case m.Fetch() | m.FetchGroups() as fetch:
                    return self._answer(sender, machine, fetch)
            return []
        if isinstance(message, Fenced):
            if self.habits.knows_sessions and self.sessions.get(sender) != message.session:
                return []
            return self._do(machine.stands(sender, message.session, message.standing), ())
        assert isinstance(message, Data)
        body, payload = message.message, message.payload
        match body:
            case m.Stands():
                if self.sessions.get(sender) != body.session:
                    return []
                return self._do(machine.stands(sender, body.session, body.standing), ())
            case m.Has():
                return self._do(machine.has(sender, body), ())
            case m.HasGroups():
                return self._do(machine.has_groups(sender, body), ())
            case m.Fetched():
                return self._do(machine.fetched(sender, body), payload)
            case m.FetchedGroups():
                return self._do(machine.fetched_groups(sender, body), payload)
        return []

    def _answer(self, sender: Id, replica: Replica, fetch: m.Fetch | m.FetchGroups) -> Sent:
        if fetch.session != replica.session:
            return []
        disk = self.disk
        if isinstance(fetch, m.FetchGroups):
            epoch, number = disk.groups if disk.label != LOST else (LOST, 0)
            return [(sender, Data(m.FetchedGroups(fetch.session, epoch, number), disk.states))]
        if disk.label == LOST and self.habits.marks_loss:
            return [(sender, Data(m.Fetched(fetch.session, fetch.begin, ())))]
        end = next((end for end in disk.ends() if end > fetch.begin), disk.end)
        runs = disk.runs(fetch.begin, end)
        fetched = m.Fetched(fetch.session, fetch.begin, runs)
        return [(sender, Data(fetched, disk.read(fetch.begin, end)))]

    def _pump(self) -> Sent:
        """Send all pending news of a master."""
        master, sent = self.machine, list[tuple[Id, Any]]()
        if not isinstance(master, Master) or master.phase is not Phase.LEAD:
            return []
        for node in sorted(master.peers):
            sent += self._feed(master, node)
        if master.active and self.active < master.epoch:
            self.active = master.epoch
            sent.append((ORACLE, Active(master.epoch)))
        return sent

    def _feed(self, master: Master, node: Id) -> Sent:
        sent: Sent = []
        peer, disk = master.peers[node], self.disk
        ends = [end for end in disk.ends() if end <= master.copy.durable]
        for _ in range(self.habits.at_once):
            end = next((end for end in ends if end > peer.next), None)
            news = (peer.session, peer.standing, master.copy.safe, master.copy.first)
            if end is None and self.news.get(node) == news:
                break
            push = master.push(node, peer.next if end is None else end)
            if push is None:
                break
            self.news[node] = news
            payload = disk.read(push.base, push.end) if push.runs else ()
            sent.append((node, Data(push, payload)))
        while master.copy.groups[0] == master.epoch:
            number = master.copy.groups[1]
            whole = peer.sent is None
            if peer.sent is not None:
                if peer.sent >= number:
                    break
                number = peer.sent + 1
            groups = master.push_groups(node, whole=whole, number=number)
            if groups is None:
                break
            at = self.before + number
            states = disk.states[:at] if whole else disk.states[at - 1 : at]
            sent.append((node, Data(groups, states)))
        return sent

    # ------------------------------------------------------------ commands

    def _do(self, commands: Iterable[Command], payload: tuple[Any, ...]) -> Sent:
        sent: Sent = []
        for command in commands:
            match command:
                case m.Say(to, message):
                    sent.append((to, Data(message)))
                case m.Serve(start):
                    self._serves(start)
                case m.Safe(end):
                    self._is_safe(end)
                case m.SafeGroups(number):
                    assert isinstance(self.machine, Master)
                    states = self.disk.states[: self.before + number]
                    self.declared_groups[self.machine.epoch] = states
                case m.Label() if not self.habits.in_order:
                    self.line.insert(0, Job(command))
                case _:
                    self.line.append(Job(command, payload))
        return sent

    def _serves(self, start: int) -> None:
        master = self.machine
        assert isinstance(master, Master)
        self.before = len(self.disk.states)
        if self.disk.halved(start):
            raise Violation("half a unit", f"{self.id} leads with a log that ends within a unit")
        if start != self.disk.end:
            raise Violation(
                "start", f"{self.id} starts at {start}, its log ends at {self.disk.end}"
            )
        self.led[master.epoch] = self.disk.part(), self.disk.states

    def _is_safe(self, end: int) -> None:
        if end > self.disk.end:
            raise Violation("not there", f"{self.id} says {end} is safe, and has {self.disk.end}")
        if isinstance(self.machine, Master):
            if self.disk.halved(end):
                raise Violation("half a unit", f"{self.id} says {end} is safe, within a unit")
            self.declared[self.machine.epoch] = self.disk.part(end)

    def _write_one(self) -> Sent:
        job = self.line.pop(0)
        self._store(job)
        machine, end = self.machine, self.disk.end
        commands: list[Command] = []
        match job.command:
            case Append(epoch) if isinstance(machine, Master):
                base = end - len(job.payload)
                units = [(base, end)] if job.payload[0].more else []
                commands = machine.appended(base, epoch, end, units)
            case m.CutHalf() if isinstance(machine, Master):
                commands = machine.cut_half(end)
            case m.Write():
                whole = self.disk.whole
                commands = machine.wrote(end, whole if whole > end - len(job.payload) else 0)
            case m.Cut():
                commands = machine.has_cut(self.disk.whole)
            case m.Label(epoch):
                commands = machine.labelled(epoch)
            case m.WriteGroups(epoch, number):
                commands = machine.wrote_groups(epoch, number)
        return self._do(commands, ())

    def _store(self, job: Job) -> None:
        disk = self.disk
        match job.command:
            case Append():
                disk.entries += job.payload
            case m.Write(base):
                if base != disk.end:
                    text = f"{self.id} writes at {base}, and its log ends at {disk.end}"
                    raise Violation("gap", text)
                disk.entries += job.payload
            case m.Cut(offset):
                if offset not in disk.ends():
                    raise Violation("cut", f"{self.id} is cut at {offset}, within a batch")
                del disk.entries[offset - disk.first :]
            case m.CutHalf():
                del disk.entries[disk.whole - disk.first :]
            case m.Anew(base):
                disk.first, disk.entries = base, []
            case m.Trim(first):
                self._trim(first)
            case m.Label(epoch, groups):
                disk.label = epoch
                if groups:
                    disk.groups = epoch, 0
            case m.WriteGroups(epoch, number, whole):
                disk.groups = epoch, number
                disk.states = job.payload if whole else disk.states + job.payload

    def _trim(self, first: int) -> None:
        disk = self.disk
        if not disk.first <= first <= disk.end:
            raise Violation("trim", f"{self.id}: {first} of [{disk.first}, {disk.end})")
        del disk.entries[: first - disk.first]
        disk.first = first

    def holdings(self) -> int:
        """Return the epochs this node has led: no other node may have led one of them."""
        return sum(1 << epoch for epoch in self.led)


# ---------------------------------------------------------------- two nodes, taken together


def contradiction(first: CopyNode, second: CopyNode) -> Violation | None:
    """Return the contradiction between two nodes (or within one, taken twice), or None."""
    for mine, theirs in ((first, second), (second, first)):
        for epoch, part in mine.declared.items():
            violation = _beside(mine.id, epoch, part, theirs)
            if violation is not None:
                return violation
        for epoch, states in mine.declared_groups.items():
            for later, (_, had) in theirs.led.items():
                if later > epoch and had[: len(states)] != states:
                    text = f"{theirs.id} leads epoch {later} with groups {had}, without {states}"
                    return Violation("lost change", f"{text}, safe since epoch {epoch}")
    return None


def _beside(who: Id, epoch: int, part: Part, other: CopyNode) -> Violation | None:
    """Check what was declared safe against another node."""
    for later, (log, _) in other.led.items():
        if later > epoch and not contains(log, part):
            text = f"{other.id} leads epoch {later} with {log}; {who} had {part}, safe in {epoch}"
            return Violation("lost message", text)
    for theirs in other.declared.values():
        if not _agrees(theirs, part):
            return Violation("two logs", f"{theirs} and {part} were declared safe")
    if not _agrees(other.shown, part):
        return Violation("shown", f"{other.id} shows {other.shown}; {part} is safe")
    if other.disk.label > epoch and not contains(other.disk.part(), part):
        text = f"{other.id} has label {other.disk.label} and {other.disk.part()}; "
        return Violation("label", text + f"{part} is safe since epoch {epoch}")
    return None


def contains(log: Part, part: Part) -> bool:
    """Return whether a log has this part, as far as the log still keeps it."""
    return log.end >= part.end and _agrees(log, part)


def _agrees(first: Part, second: Part) -> bool:
    begin, end = max(first.base, second.base), min(first.end, second.end)
    return (
        first.values[begin - first.base : end - first.base]
        == (second.values[begin - second.base : end - second.base])
        or begin >= end
    )
