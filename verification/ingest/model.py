"""Connectors, workers and a controller for `exploration`: the machines of `engine.protocol.ingest`, in nodes.

One source. Connectors send streams to workers, lose connections and connect elsewhere; a worker is lost, so the flow
goes back to its last snapshot; snapshots are taken, written, committed or given up at any moment; a worker leaves, and
comes back under its name.

The number of snapshots is unlimited: all have the same number, and workers forget it when a snapshot is settled, so
that there are finitely many states.

A connection is lost with all messages under way in it: from a moment on that the connector does not know, its messages
are dropped, and the worker hears that the connection is gone. For the worker that is the same as if it had noticed the
loss before the messages that were still to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from railgun.engine.protocol.ingest.messages import (
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
from railgun.engine.protocol.ingest.registry import Registry
from railgun.engine.protocol.ingest.sender import Phase, Sender
from railgun.engine.protocol.ingest.table import Table
from verification.explorer import Plain
from verification.rescale.model import Violation

Sent = list[tuple[int, Any]]
CONTROLLER: Final = 0
SNAPSHOT: Final = 1  # the number of every snapshot


@dataclass(frozen=True)
class Case:
    """The possible events."""

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
    """Whether snapshots may be given up, before or during their writing."""
    late: bool = False
    """Whether messages of a lost process may arrive late, among those of its successor of the same name."""

    def __str__(self) -> str:
        parts = [
            f"{self.streams} stream{'s' * (self.streams > 1)} of {self.messages}",
            f"{self.workers} workers",
            f"{self.connectors} connector{'s' * (self.connectors > 1)}",
        ]
        for name in ("closes", "crashes", "shrinks"):
            if getattr(self, name):
                parts.append(f"{getattr(self, name)} {name}")
        if self.failures:
            parts.append("failing snapshots")
        if self.late:
            parts.append("late words")
        return ", ".join(parts)


@dataclass(frozen=True)
class Rules:
    """The machines to explore; a mutant replaces one of them."""

    table: type[Table] = Table
    registry: type[Registry] = Registry
    sender: type[Sender] = Sender


class Controller(Plain):
    """The controller: registry, snapshots, generations."""

    __slots__ = (
        "case", "committed", "crashes", "drained", "gone", "incarnations", "late", "left", "logs",
        "members", "owing", "recorded", "registry", "saving", "shrinks", "writing",
    )  # fmt: skip
    constant = ("case",)

    def __init__(self, case: Case, rules: Rules) -> None:
        self.case = case
        self.crashes, self.shrinks = case.crashes, case.shrinks
        self.registry = rules.registry()
        self.incarnations = dict.fromkeys(range(1, case.workers + 1), 0)
        self.members = set(self.incarnations)
        self.drained = False  # whether the last worker is to leave
        self.owing = False  # whether it has left and not yet handed over what it saw
        self.gone = False  # whether it has handed that over
        self.saving: set[int] | None = None  # workers that have not saved
        self.recorded: dict[Owner, dict[str, int]] = {}
        self.writing: dict[str, int] | None = (
            None  # the content of the snapshot that is being written
        )
        self.logs: list[
            tuple[str, int]
        ] = []  # messages applied since the last snapshot, as reported with this one
        self.left: list[tuple[str, int]] = []  # the same, of workers that left
        self.late: list[Any] = []  # messages of a lost process that have not arrived
        self.committed: dict[str, int] = {}
        self.registry.go_back(0, {}, map(self._owner, self.members))

    def _owner(self, worker: int) -> Owner:
        return worker, self.incarnations[worker]

    @property
    def last(self) -> int:
        return self.case.workers

    def events(self) -> Sequence[str]:
        events = []
        if self.writing is not None:
            events.append("commit")
            if self.case.failures:
                events.append("fail to write")
        elif self.saving is None:
            events.append("begin a snapshot")
            if self.drained and self.last in self.members:
                events.append("let the last worker go")
        elif not self.saving and not self.owing:
            events.append("write")
            if self.case.failures:
                events.append("give the snapshot up")
        if self.crashes:
            events += [f"lose {worker}, go back" for worker in self._mortal()]
            if self.writing is not None:
                events += [f"lose {worker}, commit, go back" for worker in self._mortal()]
        if self.late:
            events.append("hear what is late")
        if self.shrinks and not self.drained and not self.gone:
            events.append("drain the last worker")
        if self.gone and self.last not in self.members:
            events.append("let the last worker come back")
        return events

    def _mortal(self) -> list[int]:
        """Return the workers that may be lost. All but the leaving one are alike: one of each kind is enough."""
        return sorted({min(self.members), max(self.members)} if self.case.shrinks else {self.last})

    def step(self, event: str) -> Sent:
        generation = self.registry.generation
        if event.startswith("lose "):
            if "commit" in event:
                self._commit()
            return self._go_back(int(event.split()[1].rstrip(",")))
        match event:
            case "begin a snapshot":
                self.saving = set(self.members)
                return self._all("take")
            case "write":
                self._write()
                return []
            case "commit":
                return self._commit()
            case "give the snapshot up" | "fail to write":
                self.saving, self.writing, self.recorded, self.logs = None, None, {}, []
                return self._all("settled", False)
            case "hear what is late":
                return self._heard(*self.late.pop())
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
                return [(self.last, ("start", generation, self.incarnations[self.last]))]
        raise AssertionError(event)

    def _all(self, what: str, *more: Any) -> Sent:
        message = (what, self.registry.generation, *more)
        return [(worker, message) for worker in sorted(self.members)]

    def _write(self) -> None:
        positions = self.registry.snapshot(SNAPSHOT, self.recorded)
        held: dict[str, list[int]] = {
            name: list(range(por + 1)) for name, por in self.committed.items()
        }
        for name, id_ in (*self.logs, *self.left):
            held.setdefault(name, []).append(id_)
        for name in sorted({*held, *positions}):
            has, por = sorted(held.get(name, [])), positions.get(name, NONE)
            if has != list(range(por + 1)):
                raise Violation(
                    "not a prefix", f"a snapshot says {name} up to {por}, and holds {has}"
                )
        # No worker leaves while a snapshot is being written: all that take part stay until it is settled.
        self.writing, self.recorded, self.logs = positions, {}, []

    def _commit(self) -> Sent:
        assert self.writing is not None
        self.committed = self.writing
        self.saving, self.writing, self.left = None, None, []
        self.registry.committed(SNAPSHOT)
        return self._all("settled", True)

    def _go_back(self, lost: int) -> Sent:
        self.crashes -= 1
        if self.owing:  # the messages to hand over are lost
            self.owing, self.gone = False, True
        self.incarnations[lost] += 1
        if self.drained:
            self.gone, self.drained = True, False
            self.members.discard(self.last)
        self.saving, self.writing, self.recorded, self.logs, self.left = None, None, {}, [], []
        generation = self.registry.generation + 1
        self.registry.go_back(generation, self.committed, map(self._owner, self.members))
        stopped = [] if self.last in self.members else [(self.last, ("stop", generation, 0))]
        return stopped + [
            (worker, ("start", generation, self.incarnations[worker]))
            for worker in sorted(self.members)
        ]

    def deliver(self, sender: int, message: Any) -> Sent:
        what, _, incarnation, *_ = message
        is_late = self.case.late and what in ("ask", "relinquish") and not self.late
        if is_late and incarnation != self.incarnations[sender]:
            self.late = [(sender, message)]
            return []
        return self._heard(sender, message)

    def _heard(self, sender: int, message: Any) -> Sent:
        what, generation, incarnation, *more = message
        owner = sender, incarnation
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
                self.left += log
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
                    pass  # snapshots may begin at any time, so a request changes nothing
        return sent


class WorkerNode(Plain):
    """A worker: its table, and the messages it has applied since the last snapshot."""

    __slots__ = (
        "case", "cut", "drains", "generation", "incarnation", "index", "log", "rules", "sessions",
        "table",
    )  # fmt: skip
    constant = ("case", "index", "rules")

    def __init__(self, index: int, case: Case, rules: Rules) -> None:
        self.index, self.case, self.rules = index, case, rules
        self.sessions: dict[int, int] = {}  # the connector of each open connection
        self._start(0, 0)

    def _start(self, generation: int, incarnation: int) -> Sent:
        closed = [(who, ("closed", session)) for session, who in sorted(self.sessions.items())]
        self.generation, self.incarnation = generation, incarnation
        self.drains = False
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
            closed = self._start(generation, *more)
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
                self.drains = True
                out = self._sent(table.drain())
                self.sessions = {s: w for s, w in self.sessions.items() if s in table.sessions}
                return out
            case "go":
                seen = tuple(sorted(table.positions().items()))
                farewell = self._to_controller("farewell", seen, tuple(self.log))
                closed = self._start(self.generation, self.incarnation)
                self.table = None
                return [*farewell, *closed]
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
                    if self.drains:
                        raise Violation(
                            "read too late", f"{stream} {id_}, by a worker that is to leave"
                        )
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
        return [(CONTROLLER, (what, self.generation, self.incarnation, *more))]


class ConnectorNode(Plain):
    """A connector that sends all streams, to any worker."""

    __slots__ = ("at", "broken", "case", "closes", "index", "sender", "session")
    constant = ("case", "index")

    def __init__(self, index: int, case: Case, rules: Rules) -> None:
        self.index, self.case = index, case
        self.closes = case.closes
        self.sender = rules.sender()
        for number in range(case.streams):
            self.sender.stream(_name(number))
        self.at: int | None = None  # the worker of the connection
        self.session = index * 100  # distinguishes connections
        self.broken = False  # whether its messages are dropped

    @property
    def last(self) -> int:
        return self.case.messages - 1

    def events(self) -> Sequence[str]:
        if self.at is None:
            return [f"connect to {worker}" for worker in range(1, self.case.workers + 1)]
        events = []
        for name, stream in self.sender.streams.items():
            if stream.phase is Phase.IDLE:
                events.append(f"notify {name}")
            elif stream.phase is Phase.OPEN:
                events.append(f"send {name}" if stream.at < self.last else f"end {name}")
        if self.broken:
            events.append("notice")
        elif self.closes:
            events.append("lose the connection")
        return events

    def step(self, event: str) -> Sent:
        broken = self.broken
        sent = self._step(event)
        return [] if broken else sent

    @property
    def _worker(self) -> int:
        assert self.at is not None
        return self.at

    def _step(self, event: str) -> Sent:
        what, _, name = event.partition(" ")
        match what:
            case "connect":
                self.at = int(name.removeprefix("to "))
                self.session += 1
                self.sender.opened(1)
                return [(self.at, ("open", self.session)), *self._notify(*self.sender.streams)]
            case "lose":
                self.closes -= 1
                self.broken = True
                return [(self._worker, ("close", self.session))]
            case "notice":
                self._lost()
                return []
        stream = self.sender.stream(name)
        match what:
            case "notify":
                return self._notify(name)
            case "send":
                self.sender.sent(stream, stream.at + 1, 0)
                return [(self._worker, ("message", self.session, name, stream.at))]
            case "end":
                self.sender.ended(stream)
                return [(self._worker, ("end", self.session, name, stream.at))]
        raise AssertionError(event)

    def _notify(self, *names: str) -> Sent:
        for name in names:
            self.sender.asks(self.sender.stream(name))
        return [(self._worker, ("notify", self.session, name)) for name in names]

    def _leave(self) -> Sent:
        messages = [] if self.broken else [(self._worker, ("close", self.session))]
        self._lost()
        return messages

    def _lost(self) -> None:
        self.at, self.broken = None, False
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
                self.session -= 1  # as if the connector had not tried
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


def _name(number: int) -> str:
    return "abc"[number]
