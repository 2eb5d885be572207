"""Connectors, workers and a controller, explored: every interleaving, with the production machines of `core.sources`.

A model of one source: connectors send streams to workers, lose connections and connect elsewhere; workers crash, so
the flow goes back to its last snapshot; snapshots are taken, committed or given up at any moment; a worker leaves, and
comes back under its name. What is proven of every state that can be reached:

1. **Prefix.** Every committed snapshot holds of each stream its first messages, each once, and just those up to the
   position that the snapshot says.
2. **Truth.** What a connector is told to be safe is in the snapshot that was committed last.
3. **Progress.** However things went, all streams can still be sent to their end, committed, and acknowledged to all.

Snapshots are as many as you like: they have the same number, and workers forget it when one is settled, so that
there are finitely many states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from railgun.core.sources.messages import (
    NONE,
    Acknowledge,
    Answer,
    Ask,
    FromRegistry,
    FromTable,
    Grant,
    Hasten,
    Owner,
    Reason,
    Reject,
    Relinquish,
    Restart,
    SessionError,
    Want,
)
from railgun.core.sources.registry import Registry
from railgun.core.sources.sender import Phase, Sender
from railgun.core.sources.table import Table
from railgun.testing.explorer import Explorer, State, Step
from railgun.testing.model import Violation

Sent = list[tuple[int, Any]]
CONTROLLER: Final = 0
SNAPSHOT: Final = 1  # the number of every snapshot


@dataclass(frozen=True)
class Case:
    """What may happen."""

    streams: int = 1
    workers: int = 2
    connectors: int = 1
    messages: int = 2
    closes: int = 1
    """How often each connector may lose its connection by itself."""
    crashes: int = 0
    shrinks: int = 0
    """How often the last worker may leave, and come back."""
    failures: bool = False
    """Whether snapshots may be given up."""

    def __str__(self) -> str:
        told = [
            f"{self.streams} stream{'s' * (self.streams > 1)} of {self.messages}",
            f"{self.workers} workers",
            f"{self.connectors} connector{'s' * (self.connectors > 1)}",
        ]
        for name in ("closes", "crashes", "shrinks"):
            if getattr(self, name):
                told.append(f"{getattr(self, name)} {name}")
        if self.failures:
            told.append("failing snapshots")
        return ", ".join(told)


@dataclass(frozen=True)
class Rules:
    """The machines to explore; mutants take the place of one."""

    table: type[Table] = Table
    registry: type[Registry] = Registry
    sender: type[Sender] = Sender


class Controller:
    """The controller: registry, snapshots, generations."""

    __slots__ = (
        "back", "case", "committed", "crashes", "drained", "gone", "incarnations", "logs",
        "members", "owing", "recorded", "registry", "saving", "shrinks",
    )  # fmt: skip
    constant = ("case",)

    def __init__(self, case: Case, rules: Rules) -> None:
        self.case = case
        self.crashes, self.shrinks = case.crashes, case.shrinks
        self.registry = rules.registry()
        self.incarnations = dict.fromkeys(range(1, case.workers + 1), 0)
        self.members = set(self.incarnations)
        self.drained = False  # the last worker is to leave
        self.owing = False  # it has, and has not handed over what it saw
        self.gone = False  # it has handed it over
        self.back = False  # it came back, this time for good
        self.saving: set[int] | None = None  # who has not saved
        self.recorded: dict[Owner, dict[str, int]] = {}
        self.logs: list[tuple[str, int]] = []  # what was applied since the last snapshot, as told
        self.committed: dict[str, int] = {}
        self.registry.go_back(0, {}, map(self._owner, self.members))

    def _owner(self, worker: int) -> Owner:
        return worker, self.incarnations[worker]

    @property
    def last(self) -> int:
        return self.case.workers

    def events(self) -> Sequence[str]:
        found = []
        if self.saving is None:
            found.append("begin a snapshot")
            if self.drained and self.last in self.members:
                found.append("let the last worker go")
        elif not self.saving and not self.owing:
            found.append("commit")
            if self.case.failures:
                found.append("give the snapshot up")
        if self.crashes:
            found.append("go back to the last snapshot")
        if self.shrinks and not self.drained and not self.gone:
            found.append("drain the last worker")
        if self.gone and self.last not in self.members:
            found.append("let the last worker come back")
        return found

    def step(self, event: str) -> Sent:
        generation = self.registry.generation
        match event:
            case "begin a snapshot":
                self.saving = set(self.members)
                return self._all("take")
            case "commit":
                return self._commit()
            case "give the snapshot up":
                self.saving, self.recorded = None, {}
                self.logs = [log for log in self.logs if log[0].startswith("left:")]
                return self._all("settled", False)
            case "go back to the last snapshot":
                return self._go_back()
            case "drain the last worker":
                self.drained = True
                self.shrinks -= 1
                return [(self.last, ("drain", generation))]
            case "let the last worker go":
                self.members.discard(self.last)
                self.owing = True
                return [(self.last, ("go", generation))]
            case "let the last worker come back":
                self.gone = False
                self.members.add(self.last)
                self.incarnations[self.last] += 1
                self.registry.joined(self._owner(self.last))
                return [(self.last, ("start", generation))]
        raise AssertionError(event)

    def _all(self, what: str, *more: Any) -> Sent:
        told = (what, self.registry.generation, *more)
        return [(worker, told) for worker in sorted(self.members)]

    def _commit(self) -> Sent:
        positions = self.registry.snapshot(SNAPSHOT, self.recorded)
        held: dict[str, list[int]] = {
            name: list(range(por + 1)) for name, por in self.committed.items()
        }
        for name, id_ in self.logs:
            held.setdefault(name.removeprefix("left:"), []).append(id_)
        for name in sorted({*held, *positions}):
            has, por = sorted(held.get(name, [])), positions.get(name, NONE)
            if has != list(range(por + 1)):
                raise Violation(
                    "not a prefix", f"a snapshot says {name} up to {por}, and holds {has}"
                )
        self.committed = positions
        self.saving, self.recorded, self.logs = None, {}, []
        self.registry.committed(SNAPSHOT)
        return self._all("settled", True)

    def _go_back(self) -> Sent:
        self.crashes -= 1
        if self.owing:  # what it was to hand over is lost
            self.owing, self.gone = False, True
        if self.drained:
            self.gone, self.drained = True, False
            self.members.discard(self.last)
        self.saving, self.recorded, self.logs = None, {}, []
        for worker in self.members:
            self.incarnations[worker] += 1
        generation = self.registry.generation + 1
        self.registry.go_back(generation, self.committed, map(self._owner, self.members))
        stopped = [] if self.last in self.members else [(self.last, ("stop", generation))]
        return [*stopped, *self._all("start")]

    def deliver(self, sender: int, message: Any) -> Sent:
        what, generation, *more = message
        owner = self._owner(sender)
        match what:
            case "ask":
                return self._sent(self.registry.notify(owner, generation, *more))
            case "relinquish":
                self.registry.relinquish(owner, generation, *more)
            case "saved" if generation == self.registry.generation and self.saving:
                recorded, log = more
                self.saving.discard(sender)
                self.recorded[owner] = dict(recorded)
                self.logs += log
            case "farewell" if generation == self.registry.generation:
                seen, log = more
                self.registry.left(owner, generation, dict(seen))
                self.logs += [(f"left:{name}", id_) for name, id_ in log]
                self.owing, self.gone, self.drained = False, True, False
        return []

    def _sent(self, commands: Iterable[FromRegistry]) -> Sent:
        generation = self.registry.generation
        sent: Sent = []
        for command in commands:
            match command:
                case Grant(to, stream, session, por):
                    sent.append((to[0], ("grant", generation, stream, session, por)))
                case Reject(to, stream, session):
                    sent.append((to[0], ("reject", generation, stream, session)))
                case Want() | Hasten():
                    pass  # snapshots may begin at any time, so nobody need hasten them
        return sent

    def holdings(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def may_send(self) -> int:
        return -1


class WorkerNode:
    """A worker: its table, and what it has applied since the last snapshot."""

    __slots__ = ("case", "cut", "generation", "index", "log", "rules", "sessions", "table")
    constant = ("case", "index", "rules")

    def __init__(self, index: int, case: Case, rules: Rules) -> None:
        self.index, self.case, self.rules = index, case, rules
        self.sessions: dict[int, int] = {}  # of connections that are open: the connector
        self._start(0)

    def _start(self, generation: int) -> Sent:
        closed = [(who, ("closed", session)) for session, who in sorted(self.sessions.items())]
        self.generation = generation
        self.table: Table | None = self.rules.table()
        self.sessions = {}
        self.log: list[tuple[str, int]] = []
        self.cut = 0
        return closed

    def events(self) -> Sequence[str]:
        return ()

    def step(self, event: str) -> Sent:
        raise AssertionError(event)

    def deliver(self, sender: int, message: Any) -> Sent:
        if sender == CONTROLLER:
            return self._ordered(message)
        return self._called(sender, *message)

    # ------------------------------------------------------------ the controller

    def _ordered(self, message: Any) -> Sent:
        what, generation, *more = message
        if what in ("start", "stop"):
            closed = self._start(generation)
            if what == "stop":
                self.table = None
            return closed
        table = self.table
        if table is None or generation != self.generation:
            return []
        match what:
            case "grant":
                return self._sent(table.granted(*more))
            case "reject":
                return self._sent(table.rejected(*more))
            case "take":
                recorded = tuple(sorted(table.begin(SNAPSHOT).items()))
                self.cut = len(self.log)
                return self._to_controller("saved", recorded, tuple(self.log))
            case "settled":
                (committed,) = more
                out = self._sent(table.settled(SNAPSHOT, committed))
                if committed:
                    self.log = self.log[self.cut :]
                self.cut = table.begun = 0
                for entry in table.entries.values():
                    entry.after = min(entry.after, SNAPSHOT)
                return out
            case "drain":
                out = self._sent(table.drain())
                self.sessions = {}
                return out
            case "go":
                seen = tuple(sorted(table.positions().items()))
                told = self._to_controller("farewell", seen, tuple(self.log))
                closed = self._start(self.generation)
                self.table = None
                return [*told, *closed]
        raise AssertionError(what)

    # ------------------------------------------------------------ connectors

    def _called(self, connector: int, what: str, session: int, *more: Any) -> Sent:
        table = self.table
        if what == "open":
            if table is None or table.draining:
                return [(connector, ("refused", session))]
            self.sessions[session] = connector
            table.opened(session)
            return []
        if table is None or session not in self.sessions:
            return []
        try:
            match what:
                case "notify":
                    return self._sent(table.notify(session, *more))
                case "message":
                    stream, id_ = more
                    if not table.message(session, stream, np.array([id_])):
                        self.log.append((stream, id_))
                case "end":
                    table.end(session, *more)
                case "close":
                    return self._close(session)
        except SessionError as error:
            raise Violation("refused", f"a connector that keeps the rules: {error}") from error
        return []

    def _close(self, session: int) -> Sent:
        assert self.table is not None
        del self.sessions[session]
        return self._sent(self.table.closed(session))

    def _sent(self, commands: Iterable[FromTable]) -> Sent:
        sent: Sent = []
        for command in commands:
            match command:
                case Answer(session, stream, reason, por):
                    sent.append((self.sessions[session], ("answer", session, stream, reason, por)))
                case Acknowledge(session, points):
                    sent.append((self.sessions[session], ("ack", session, points)))
                case Restart(session):
                    sent.append((self.sessions[session], ("restart", session)))
                case Ask(stream, session):
                    sent += self._to_controller("ask", stream, session)
                case Relinquish(stream, por):
                    sent += self._to_controller("relinquish", stream, por)
                case Hasten():
                    pass
        return sent

    def _to_controller(self, what: str, *more: Any) -> Sent:
        return [(CONTROLLER, (what, self.generation, *more))]

    def holdings(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def may_send(self) -> int:
        return -1


class ConnectorNode:
    """A connector that sends all streams, to any worker."""

    __slots__ = ("at", "case", "closes", "index", "opened", "sender", "session")
    constant = ("case", "index")

    def __init__(self, index: int, case: Case, rules: Rules) -> None:
        self.index, self.case = index, case
        self.closes = case.closes
        self.sender = rules.sender()
        for number in range(case.streams):
            self.sender.stream(_name(number))
        self.at: int | None = None  # the worker it is connected to
        self.session = index * 100  # tells connections apart
        self.opened = 0

    @property
    def last(self) -> int:
        return self.case.messages - 1

    def events(self) -> Sequence[str]:
        if self.at is None:
            return [f"connect to {worker}" for worker in range(1, self.case.workers + 1)]
        found = []
        for name, stream in self.sender.streams.items():
            if stream.phase is Phase.IDLE:
                found.append(f"notify {name}")
            elif stream.phase is Phase.OPEN:
                found.append(f"send {name}" if stream.at < self.last else f"end {name}")
        if self.closes:
            found.append("close")
        return found

    def step(self, event: str) -> Sent:
        what, _, name = event.partition(" ")
        match what:
            case "connect":
                self.at = int(name.removeprefix("to "))
                self.session += 1
                self.sender.opened(1)
                return [(self.at, ("open", self.session)), *self._notify(*self.sender.streams)]
            case "close":
                self.closes -= 1
                return self._leave()
        assert self.at is not None
        stream = self.sender.stream(name)
        match what:
            case "notify":
                return self._notify(name)
            case "send":
                self.sender.sent(stream, stream.at + 1, 0)
                return [(self.at, ("message", self.session, name, stream.at))]
            case "end":
                self.sender.ended(stream)
                return [(self.at, ("end", self.session, name, stream.at))]
        raise AssertionError(event)

    def _notify(self, *names: str) -> Sent:
        assert self.at is not None
        for name in names:
            self.sender.asks(self.sender.stream(name))
        return [(self.at, ("notify", self.session, name)) for name in names]

    def _leave(self) -> Sent:
        assert self.at is not None
        told = [(self.at, ("close", self.session))]
        self._lost()
        return told

    def _lost(self) -> None:
        self.at = None
        self.sender.lost()

    def deliver(self, sender: int, message: Any) -> Sent:
        what, session, *more = message
        if session != self.session or self.at is None:
            return []
        match what:
            case "closed":
                self._lost()
            case "refused":
                self._lost()
                self.session -= 1  # as if it had not tried
            case "restart":
                return self._leave()
            case "answer":
                name, reason, por = more
                stream = self.sender.stream(name)
                if reason is Reason.OK:
                    self.sender.granted(stream, por)
                elif reason is Reason.REDIRECT:
                    return self._leave()
                else:
                    self.sender.refused(stream)
            case "ack":
                for name, por in more[0]:
                    self.sender.acknowledged(self.sender.stream(name), por)
        return []

    def holdings(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def may_send(self) -> int:
        return -1


def _name(number: int) -> str:
    return "abc"[number]


# ---------------------------------------------------------------- exploring


@dataclass(slots=True)
class Explored:
    """What came out."""

    case: Case
    states: int = 0
    transitions: int = 0
    violation: Violation | None = None
    story: list[Step] = field(default_factory=list)


def explore(case: Case, rules: Rules | None = None, limit: int | None = None) -> Explored:
    """Visit every state; the first violation comes with the shortest story that leads to it."""
    rules = rules or Rules()
    nodes: list[Any] = [Controller(case, rules)]
    nodes += [WorkerNode(index, case, rules) for index in range(1, case.workers + 1)]
    first = len(nodes)
    nodes += [ConnectorNode(first + index, case, rules) for index in range(case.connectors)]
    explorer = Explorer(nodes, lambda _: None)
    result = Explored(case)
    number: dict[State, int] = {explorer.start: 0}
    came: list[tuple[int, tuple[int, Any, int]] | None] = [None]
    before: list[list[int]] = [[]]  # the states each one is reached from
    good: list[int] = []
    todo = deque([explorer.start])
    while todo:
        state = todo.popleft()
        here = number[state]
        if _is_done(explorer, state, case, first):
            good.append(here)
        broken = _is_untrue(explorer, state, first)
        if broken is not None:
            return _found(explorer, result, number, came, here, None, broken)
        for step, following in explorer.successors(state):
            result.transitions += 1
            if isinstance(following, Violation):
                return _found(explorer, result, number, came, here, step, following)
            known = number.get(following)
            if known is None:
                known = number[following] = len(came)
                came.append((here, step))
                before.append([])
                todo.append(following)
            before[known].append(here)
        if limit is not None and len(number) > limit:
            raise RuntimeError(f"more than {limit:,} states: {case}")
    result.states = len(number)
    stuck = _first_stuck(before, good)
    if stuck is not None:
        violation = Violation(
            "stuck", "from here on, no way leads to all messages being acknowledged"
        )
        return _found(explorer, result, number, came, stuck, None, violation)
    return result


def _is_done(explorer: Explorer, state: State, case: Case, first: int) -> bool:
    controller = explorer.nodes[state[0]]
    assert isinstance(controller, Controller)
    committed = controller.committed
    if len(committed) < case.streams or min(committed.values()) < case.messages - 1:
        return False
    connectors = (explorer.nodes[node] for node in state[first : explorer.count])
    return all(
        stream.acked == case.messages - 1
        for connector in connectors
        for stream in connector.sender.streams.values()  # type: ignore[attr-defined]
    )


def _is_untrue(explorer: Explorer, state: State, first: int) -> Violation | None:
    """Whether a connector was told that something is safe which is not."""
    controller = explorer.nodes[state[0]]
    assert isinstance(controller, Controller)
    for node in state[first : explorer.count]:
        connector = explorer.nodes[node]
        assert isinstance(connector, ConnectorNode)
        for name, stream in connector.sender.streams.items():
            if stream.acked > controller.committed.get(name, NONE):
                return Violation("untrue", f"{name} is acknowledged up to {stream.acked}")
    return None


def _first_stuck(before: list[list[int]], good: list[int]) -> int | None:
    """The first state from which none of the good ones can be reached."""
    reaches = bytearray(len(before))
    todo = list(good)
    for state in good:
        reaches[state] = 1
    while todo:
        for earlier in before[todo.pop()]:
            if not reaches[earlier]:
                reaches[earlier] = 1
                todo.append(earlier)
    stuck = reaches.find(0)
    return None if stuck < 0 else stuck


def _found(
    explorer: Explorer,
    result: Explored,
    number: dict[State, int],
    came: list[tuple[int, tuple[int, Any, int]] | None],
    at: int,
    last: tuple[int, Any, int] | None,
    violation: Violation,
) -> Explored:
    story = [] if last is None else [explorer.told(last)]
    before = came[at]
    while before is not None:
        story.append(explorer.told(before[1]))
        before = came[before[0]]
    result.states = len(number)
    result.violation, result.story = violation, story[::-1]
    return result


def told(explored: Explored) -> list[str]:
    """The story that leads to a violation, in words."""
    case = explored.case

    def who(index: int) -> str:
        if index == CONTROLLER:
            return "controller"
        return f"worker {index}" if index <= case.workers else f"connector {index - case.workers}"

    lines = []
    for step in explored.story:
        if step.message is None:
            lines.append(f"  {who(step.node)}: {step.event}")
        else:
            assert step.sender is not None
            lines.append(f"  {who(step.sender)} → {who(step.node)}: {_in_words(step.message)}")
    return [*lines, f"  {explored.violation}"]


def _in_words(message: Sequence[Any]) -> str:
    what, *more = message
    return " ".join([what, *(one.name if isinstance(one, Reason) else str(one) for one in more)])


CASES: Final = (
    Case(messages=2, closes=1),
    Case(messages=1, closes=1, failures=True),
    Case(messages=2, closes=0, crashes=1),
    Case(messages=1, closes=0, shrinks=1),
    Case(messages=2, closes=0, connectors=2),
    Case(workers=1, messages=2, closes=1, shrinks=1),
    Case(workers=1, messages=2, closes=1, crashes=1, failures=True),
    Case(workers=1, streams=2, messages=1, closes=1),
)
"""What is explored each time: about a million states."""
LARGE: Final = (
    Case(messages=1, closes=1, crashes=1),
    Case(messages=1, closes=1, shrinks=1),
    Case(messages=2, closes=2),
    Case(workers=3, messages=1, closes=1),
    Case(workers=3, messages=1, closes=0, shrinks=1),
    Case(workers=3, messages=1, closes=0, crashes=1),
    Case(streams=2, messages=1, closes=0),
    Case(streams=2, messages=1, closes=0, connectors=2),
)
"""And if there is more time."""
