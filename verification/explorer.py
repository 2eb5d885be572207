"""Explore every interleaving of a few workers exhaustively, with the production classes themselves.

A *node* is one worker. In each step one node takes one event: one of its own (`events`), or the first message of a link
to it. The explorer visits every state the system can reach and reports the first violation, with the shortest story
that leads to it.

Two observations make it fast. A step changes one node and appends to its links, so the outcome of (node state, event)
never has to be computed twice: nodes, messages and link contents are interned as numbers, and after a short while a
step is a few dictionary look-ups; the machines have run once for each local situation. And interleavings that lead to
the same state are merged: states are counted, not paths.

`reduce` uses a third: steps of different nodes commute, so the order between them matters only through messages. In
each state it follows only the steps of a set of nodes to which no other node can send anything new before they move (a
*persistent set*; `may_send` says which nodes may still send to which). Every order of events at every node is still
seen, and so is every end state; left out are states in between that differ only in how far unrelated nodes have come.
The claims of `may_send` are checked in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verification.fork import fingerprint, fork
from verification.rescale.model import Violation

State = tuple[int, ...]


class Node(Protocol):
    """What the explorer needs of a worker."""

    def events(self) -> Sequence[str]:
        """Return the events of its own that the node could take now."""
        ...

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Take an event of its own; return the messages that follow, as (to, message)."""
        ...

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Take a message; return the messages that follow."""
        ...

    def holdings(self) -> int:
        """Return a bit set of resources that only one node may hold at a time."""
        ...

    def flags(self) -> int:
        """Return a bit set for the guards of other nodes' events."""
        ...

    def may_send(self) -> int:
        """Return a bit set of the nodes that this node may ever send to, from now on."""
        ...


class Plain:
    """Defaults of a node that holds nothing exclusively, guards nothing, and may send to all nodes."""

    __slots__ = ()

    def holdings(self) -> int:
        """Return an empty set."""
        return 0

    def flags(self) -> int:
        """Return an empty set."""
        return 0

    def may_send(self) -> int:
        """Return the set of all nodes."""
        return -1


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a story."""

    node: int
    event: str
    sender: int | None = None
    message: Any = None


@dataclass(slots=True)
class Exploration:
    """The result: the numbers of states and steps, and the first violation with its story."""

    states: int = 0
    transitions: int = 0
    complete: bool = True
    violation: Violation | None = None
    story: list[Step] = field(default_factory=list)


class Explorer:
    """All reachable states of some nodes and the links between them."""

    def __init__(
        self,
        nodes: Sequence[Node],
        judge: Callable[[Sequence[Any]], Violation | None],
        guards: dict[str, int] | None = None,
        reduce: bool = False,
    ) -> None:
        self.reduce = reduce
        self.count = len(nodes)
        self.judge = judge
        self.guards = guards or {}  # by event: the flag that all nodes must have
        self.node_ids: dict[Hashable, int] = {}
        self.nodes: list[Node] = []
        self.own: list[tuple[tuple[str, int], ...]] = []  # by node: its events with their guards
        self.holdings: list[int] = []
        self.flags: list[int] = []
        self.targets: list[int] = []
        self.traits: list[int] = []  # the input of `_persistent`, as a number
        self.trait_ids: dict[Hashable, int] = {}
        self.groups: dict[Hashable, Sequence[int]] = {}  # results of `_persistent`
        self.incoming = [
            [(sender, self.count + sender * self.count + index) for sender in range(self.count)]
            for index in range(self.count)
        ]
        self.memo: list[dict[Any, Any]] = []
        self.message_ids: dict[Hashable, int] = {}
        self.messages: list[Any] = []
        self.link_ids: dict[tuple[int, ...], int] = {(): 0}
        self.links: list[tuple[int, ...]] = [()]
        self.tails: list[int] = [0]
        self.appended: dict[tuple[int, int], int] = {}
        self.start: State = tuple(self._intern_node(n) for n in nodes) + (0,) * self.count**2

    def run(
        self,
        shortest: bool = False,
        limit: int | None = None,
        accept: Callable[[Violation, list[Step]], bool] | None = None,
    ) -> Exploration:
        """Visit every state, or stop at the first violation (that `accept` accepts).

        `shortest` goes breadth-first and remembers the path, for a minimal story; otherwise the story of a violation
        that was found depth-first is searched again breadth-first.
        """
        result = Exploration()
        parents: dict[State, tuple[State, Step] | None] = {self.start: None}
        seen: set[State] = {self.start}
        todo: deque[State] = deque([self.start])
        take = todo.popleft if shortest else todo.pop
        while todo:
            if limit is not None and len(seen) > limit:
                result.complete = False
                break
            state = take()
            successors = self.successors(state)
            if not successors:
                violation = self.judge([self.nodes[n] for n in state[: self.count]])
                if violation is not None and self._report(
                    result, parents, state, None, violation, accept
                ):
                    break
            for step, following in successors:
                result.transitions += 1
                if isinstance(following, Violation):
                    if self._report(result, parents, state, step, following, accept):
                        todo.clear()
                        break
                    continue
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
                    if shortest:
                        parents[following] = (state, self.as_step(step))
        result.states = len(seen)
        if result.violation is not None and not shortest:
            again = self.run(shortest=True, accept=accept)
            result.violation, result.story = again.violation, again.story
        return result

    def successors(self, state: State) -> list[tuple[tuple[int, Any, int], State | Violation]]:
        """Return every step that is possible in a state, with the state or violation it leads to."""
        count, links = self.count, self.links
        steps: list[tuple[tuple[int, Any, int], State | Violation]] = []
        flags = -1
        for node in state[:count]:
            flags &= self.flags[node]
        indices: Sequence[int] = range(count)
        if self.reduce:
            traits = self.traits
            # The persistent set depends on these; a few hundred different values among all states.
            case = (*[traits[node] for node in state[:count]], *map(bool, state[count:]))
            indices_of_case = self.groups.get(case)
            if indices_of_case is None:
                indices_of_case = self.groups[case] = self._persistent(state, flags)
            indices = indices_of_case
        for index in indices:
            node = state[index]
            for event, guard in self.own[node]:
                if flags & guard == guard:
                    steps.append(((index, event, -1), self._follow(state, index, node, event, -1)))
            for sender, at in self.incoming[index]:
                link = state[at]
                if link:
                    head = links[link][0]
                    steps.append(
                        ((index, head, sender), self._follow(state, index, node, head, sender))
                    )
        return steps

    def _persistent(self, state: State, flags: int) -> Sequence[int]:
        """Return the smallest set of nodes that no other node can disturb before they move."""
        count = self.count
        best: Sequence[int] = range(count)
        for first in range(count):
            group = [first]
            able = False
            for index in group:  # grows during the loop
                for other in range(count):
                    filled = state[count + other * count + index] != 0
                    able = able or filled
                    if other not in group and not filled and self._may_disturb(state, other, index):
                        group.append(other)
                able = able or any(flags & guard == guard for _, guard in self.own[state[index]])
                if len(group) >= len(best):
                    break
            if able and len(group) < len(best):
                best = group
        return best

    def _may_disturb(self, state: State, other: int, index: int) -> bool:
        """Return whether `other` can do something that gives node `index` an event it does not have now."""
        if self.targets[state[other]] >> index & 1:
            return True
        return any(guard & ~self.flags[state[other]] for _, guard in self.own[state[index]])

    def _follow(
        self, state: State, index: int, node: int, event: str | int, sender: int
    ) -> State | Violation:
        outcome = self.memo[node].get((event, sender))
        if outcome is None:
            outcome = self.memo[node][event, sender] = self._compute(node, event, sender)
        if isinstance(outcome, Violation):
            return outcome
        following, sent = outcome
        count = self.count
        successor = list(state)
        successor[index] = following
        if sender >= 0:
            at = count + sender * count + index
            successor[at] = self.tails[state[at]]
        for to, message in sent:
            at = count + index * count + to
            link = self.appended.get((successor[at], message))
            successor[at] = self._append(successor[at], message) if link is None else link
        mine = self.holdings[following]
        if mine:
            for other in range(count):
                if other != index and self.holdings[state[other]] & mine:
                    return Violation(
                        "split state", f"workers {index} and {other} hold the same state"
                    )
        return tuple(successor)

    def _compute(self, node: int, event: str | int, sender: int) -> Any:
        """Run the machines: one step of one node."""
        machine = fork(self.nodes[node])
        try:
            if isinstance(event, str):  # noqa: SIM108 - reads better than one long line
                sent = machine.step(event)
            else:
                sent = machine.deliver(sender, self.messages[event])
        except Violation as violation:
            return violation
        outgoing = tuple((to, self._intern_message(message)) for to, message in sent)
        following = self._intern_node(machine)
        if self.reduce:
            allowed = self.targets[node]
            assert all(allowed >> to & 1 for to, _ in sent), "may_send left out a node"
            assert self.targets[following] & ~allowed == 0, "may_send grew: it may only shrink"
        return following, outgoing

    def _intern_node(self, node: Node) -> int:
        print_ = fingerprint(node)
        number = self.node_ids.get(print_)
        if number is None:
            number = self.node_ids[print_] = len(self.nodes)
            self.nodes.append(node)
            own = tuple((event, self.guards.get(event, 0)) for event in node.events())
            flags, targets = node.flags(), node.may_send()
            trait = (frozenset(guard for _, guard in own), flags, targets)
            self.own.append(own)
            self.holdings.append(node.holdings())
            self.flags.append(flags)
            self.targets.append(targets)
            self.traits.append(self.trait_ids.setdefault(trait, len(self.trait_ids)))
            self.memo.append({})
        return number

    def _intern_message(self, message: Any) -> int:
        print_ = fingerprint(message)
        number = self.message_ids.get(print_)
        if number is None:
            number = self.message_ids[print_] = len(self.messages)
            self.messages.append(message)
        return number

    def _append(self, link: int, message: int) -> int:
        longer = self._intern_link((*self.links[link], message))
        self.appended[link, message] = longer
        return longer

    def _intern_link(self, content: tuple[int, ...]) -> int:
        number = self.link_ids.get(content)
        if number is None:
            tail = self._intern_link(content[1:])
            number = self.link_ids[content] = len(self.links)
            self.links.append(content)
            self.tails.append(tail)
        return number

    def link(self, content: Iterable[int]) -> int:
        """Return the number of a link with these messages, given by their numbers."""
        return self._intern_link(tuple(content))

    def as_step(self, step: tuple[int, Any, int]) -> Step:
        """Return a step in the form of a story."""
        index, event, sender = step
        if isinstance(event, str):
            return Step(index, event)
        return Step(index, "deliver", sender, self.messages[event])

    def _report(
        self,
        result: Exploration,
        parents: dict[State, tuple[State, Step] | None],
        state: State,
        last: tuple[int, Any, int] | None,
        violation: Violation,
        accept: Callable[[Violation, list[Step]], bool] | None,
    ) -> bool:
        story = [] if last is None else [self.as_step(last)]
        before = parents.get(state)
        while before is not None:
            story.append(before[1])
            before = parents.get(before[0])
        story.reverse()
        if accept is not None and not accept(violation, story):
            return False
        result.violation, result.story = violation, story
        return True
