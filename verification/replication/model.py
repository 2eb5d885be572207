"""Explore copies of a stream on a few nodes: every interleaving, with `broker.protocol.replication` itself.

One more node is the metadata: it appoints any master that the case allows, at any time; the appointed node hears of it
late, or in the states in between never. The possible events are counted for each node. The exploration begins when `a`
leads in epoch 1, and all nodes have its label. Links keep their order. A session may end at any time; messages of the
session before come late, or (`deaf`) not at all. A sync makes all waiting data durable; a crash keeps any part of it.

Proven of every reachable state are the rules of `node`. Larger sets, full disks, and that all copies become
the same when the faults are over, are the simulation's part (`world`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from railgun.broker.protocol.replication.replica import Replica
from verification.explorer import Exploration, Explorer, Plain, State, Step
from verification.replication.node import (
    ORACLE,
    Active,
    Append,
    CopyNode,
    Habits,
    Job,
    contradiction,
)
from verification.replication.world import Metadata
from verification.rescale.model import Violation

Given = list[tuple[int, Any]]


@dataclass(frozen=True)
class Case:
    """The possible events. A digit for each node: how often; `appoints`: each node as often as it is named, in any
    order."""

    nodes: str = "ab"
    appoints: str = "b"
    learners: str = ""
    members: int = 0
    publishes: str = ""
    units: str = ""
    changes: str = ""
    trims: str = ""
    crashes: str = ""
    breaks: str = ""
    deaf: str = ""
    damages: str = ""
    warm: int = 0
    """Messages and changes of groups that only a and b have at the beginning."""

    def __str__(self) -> str:
        parts = [f"nodes {self.nodes}", f"appointed {self.appoints or 'nobody else'}"]
        if self.warm:
            parts.append(f"a and b have {self.warm}")
        if self.members:
            parts.append(f"learners {self.learners}, {self.members} changes of members")
        for name in KINDS:
            if int(getattr(self, name) or 0):
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join(parts)


KINDS: Final = ("publishes", "units", "changes", "trims", "crashes", "breaks", "deaf", "damages")
EVENTS: Final = ("publish", "unit", "change", "trim", "crash", "break", "hear nothing", "damage")
SPENT: Final = dict(zip(EVENTS, KINDS, strict=True))


class ModelNode(CopyNode):
    """A node, and the events that may still happen to it."""

    __slots__ = ("case", "hears", "index", "left")
    constant: tuple[str, ...] = ("habits", "id", "names", "case", "index")

    def __init__(self, index: int, case: Case, habits: Habits) -> None:
        names = case.nodes + case.learners
        super().__init__(names[index], names, habits)
        self.case, self.index = case, index
        self.hears = True
        self.left = {
            name: int(digits[index]) if index < len(digits := getattr(case, name)) else 0
            for name in KINDS
        }

    def events(self) -> Sequence[str]:
        """Return the events the node could take now."""
        left, events = self.left, list[str]()
        if not self.hears:
            return ["hear again"]
        if self.leads:
            events += ["publish"] if left["publishes"] else []
            events += ["unit"] if left["units"] else []
            events += ["change"] if left["changes"] else []
            events += ["trim"] if left["trims"] and self._trims_to() else []
        if self.line:
            events.append("sync")
        if left["crashes"]:
            events += [f"crash {keep}" for keep in range(len(self.line) + 1)]
            events += [f"crash {at} torn" for at, job in enumerate(self.line) if _is_unit(job)]
        if left["breaks"]:
            events += [f"break {other}" for other in self.sessions]
        if left["deaf"]:
            events.append("hear nothing")
        if left["damages"]:
            events += [f"damage {kind}" for kind in ("messages", "groups")]
        return events

    def step(self, event: str) -> Given:
        """Take an event; return the messages that follow."""
        what, _, how = event.partition(" ")
        if event in SPENT or what in SPENT:
            self.left[SPENT[event if event in SPENT else what]] -= 1
        return self._given(self._act(event, what, how))

    def _act(self, event: str, what: str, how: str) -> list[tuple[str, Any]]:
        match what:
            case "publish":
                return self.publish(1)
            case "unit":
                return self.publish_unit(2)
            case "change":
                return self.change()
            case "trim":
                return self.trim(self._trims_to())
            case "sync":
                return self.sync()
            case "crash":
                keep, _, torn = how.partition(" ")
                return self.crash(int(keep), torn=bool(torn))
            case "break":
                return self._guarded(lambda: self.renew(how))
            case "damage":
                return self.damage(0 if how == "groups" else 100, how == "groups")
        if event == "hear nothing":
            self.hears = False
            if isinstance(self.machine, Replica):
                self.machine.session = 0
            return []
        self.hears = True
        sent = self.greetings()
        for other in self.sessions:
            sent += self.renew(other)
        return sent

    def _trims_to(self) -> int:
        copy = self.machine.copy
        return copy.safe if copy.safe > self.disk.first else 0

    def deliver(self, sender: int, message: Any) -> Given:
        """Take a message; return the messages that follow."""
        if not self.hears:
            return []
        names = (*self.names, ORACLE)
        return self._given(self.hear(names[sender], message))

    def _given(self, sent: list[tuple[str, Any]]) -> Given:
        names = (*self.names, ORACLE)
        return [(names.index(to), message) for to, message in sent]


def _is_unit(job: Job) -> bool:
    """Return whether a crash may keep only a part of a unit of the job."""
    return isinstance(job.command, Append) and job.payload[0].more


class OracleNode(Plain):
    """The metadata."""

    __slots__ = ("appoints", "case", "members", "metadata")
    constant = ("case",)

    def __init__(self, case: Case) -> None:
        self.case = case
        self.appoints = "".join(sorted(case.appoints))
        self.members = case.members
        self.metadata = Metadata(tuple(case.nodes), tuple(case.learners))

    def events(self) -> Sequence[str]:
        """Return the possible appointments and changes of votes."""
        metadata = self.metadata
        events = [f"appoint {n}" for n in sorted(set(self.appoints)) if n in metadata.voting]
        if self.members and metadata.is_active:
            events += [f"promote {node}" for node in metadata.learners]
            events += [f"demote {node}" for node in metadata.voting if node != metadata.master]
        return events

    def step(self, event: str) -> Given:
        """Take an event; return the messages that follow."""
        what, _, node = event.partition(" ")
        if what == "appoint":
            self.appoints = self.appoints.replace(node, "", 1)
        else:
            self.members -= 1
        to, message = getattr(self.metadata, what)(node)
        return [((self.case.nodes + self.case.learners).index(to), message)]

    def deliver(self, sender: int, message: Active) -> Given:
        """Take the message of a master that its epoch is active."""
        self.metadata.hear(message)
        return []


class CopyExplorer(Explorer):
    """Compares each two nodes in every state."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        super().__init__(nodes, lambda _: None)
        self.pairs: dict[tuple[int, int], Violation | None] = {}

    def _follow(
        self, state: State, index: int, node: int, event: str | int, sender: int
    ) -> State | Violation:
        following = super()._follow(state, index, node, event, sender)
        if isinstance(following, Violation) or index == self.count - 1 or following[index] == node:
            return following
        for other in range(self.count - 1):
            pair = following[index], following[other]
            if pair not in self.pairs:
                self.pairs[pair] = contradiction(*(self.nodes[number] for number in pair))  # type: ignore[arg-type]
            violation = self.pairs[pair]
            if violation is not None:
                return violation
        return following


def beginning(case: Case, habits: Habits) -> list[Any]:
    """Return all nodes, and the metadata, when `a` leads in epoch 1 and all nodes know."""
    nodes: list[Any] = [
        ModelNode(index, case, habits) for index in range(len(case.nodes + case.learners))
    ]
    nodes.append(OracleNode(replace(case, appoints=case.appoints + "a")))
    _settle(nodes, [(len(nodes) - 1, *sent) for sent in nodes[-1].step("appoint a")])
    assert nodes[-1].metadata.is_active
    if case.warm:
        for name in nodes[0].names[2:]:
            nodes[0].part(name)
        for _ in range(case.warm):
            nodes[0].publish(1)
            nodes[0].change()
        _settle(nodes, [])
    return nodes


def _settle(nodes: Sequence[Any], waiting: list[tuple[int, int, Any]]) -> None:
    while waiting or any(node.line for node in nodes[:-1]):
        if waiting:
            sender, at, message = waiting.pop(0)
            sent = nodes[at].deliver(sender, message)
        else:
            at = next(n for n, node in enumerate(nodes[:-1]) if node.line)
            sent = nodes[at].step("sync")
        waiting += [(at, to, message) for to, message in sent]


def explore(case: Case, habits: Habits | None = None, limit: int | None = None) -> Exploration:
    """Visit every state of a case."""
    return CopyExplorer(beginning(case, habits or Habits())).run(limit=limit)


def story_lines(case: Case, story: Sequence[Step]) -> list[str]:
    """Describe the steps of a story."""
    names, lines = case.nodes + case.learners + ORACLE, []
    for step in story:
        if step.sender is None:
            lines.append(f"  {names[step.node]}: {step.event}")
        else:
            lines.append(f"  {names[step.sender]} → {names[step.node]}: {step.message}")
    return lines


CASES: Final = (
    Case("ab", "ab", publishes="11", crashes="01"),
    Case("ab", "b", publishes="21", crashes="11"),
    Case("ab", "ab", publishes="11", trims="11"),
    Case("ab", "ab", units="11", crashes="10"),
    Case("abc", "b", units="1"),
    Case("ab", "ab", changes="11", crashes="10"),
    Case("a", "a", learners="x", members=2, publishes="1", changes="1"),
    Case("abc", "b", publishes="1"),
    Case("abc", "bc", warm=1),
    Case("abc", "c", warm=2, damages="010"),
)
"""The cases of every run."""
LARGE: Final = (
    Case("ab", "ab", publishes="11", crashes="11", breaks="10"),
    Case("ab", "ab", publishes="11", deaf="11"),
    Case("abc", "b", publishes="1", crashes="100"),
    Case("abc", "b", publishes="1", deaf="010"),
    Case("abc", "bc", units="1", crashes="100"),
    Case("abc", "c", warm=1, damages="110"),
    Case("abc", "c", warm=1, crashes="010", damages="010"),
    Case("abc", "bc", warm=1, damages="010"),
    Case("abc", "bc", publishes="1"),
    Case("ab", "b", learners="x", members=1, publishes="1"),
)
"""Further cases for longer runs; the last ones are cut short."""
