"""An exhaustive explorer: every interleaving of a few workers, with the production classes themselves.

A *node* is one worker. In each step one node takes one event: something of its own (`events`) or the first message
of a link to it. The explorer visits every state the system can reach and reports the first violation, with the
shortest story that leads to it.

It is fast because of two observations. A step changes one node and appends to its links, so the outcome of (node
state, event) never has to be computed twice: nodes, messages and link contents are interned as numbers, and after
a short while a step is a few dictionary look-ups; the machines have run once for each local situation. And
interleavings that lead to the same state are merged, so it is states that are counted, not paths.

`reduce` uses a third: steps of different nodes commute, so the order between them matters only through messages. In
each state it follows only the steps of a set of nodes to which no other node can send anything new before they
move (a *persistent set*; `may_send` says who may still send to whom). Every order of events at every node is
still seen, and so is every end state; what is left out are states in between that differ only in how far
unrelated nodes have come. What `may_send` claims is checked in every step.
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
        """The events of its own it could take now."""
        ...

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Take one of them; the messages it sends, as (to, message)."""
        ...

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Take a message; the messages it sends."""
        ...

    def holdings(self) -> int:
        """A bit set of what only one node may have at a time."""
        ...

    def flags(self) -> int:
        """A bit set that guards of events of other nodes look at."""
        ...

    def may_send(self) -> int:
        """A bit set of the nodes it may ever send something to, from now on."""
        ...


class Plain:
    """What a node says that holds nothing of its own, guards nothing, and may send to anybody."""

    __slots__ = ()

    def holdings(self) -> int:
        """Nothing that others may not have."""
        return 0

    def flags(self) -> int:
        """No guard looks at it."""
        return 0

    def may_send(self) -> int:
        """To everybody."""
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
    """What came out: how much was seen, and the first violation with its story."""

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
        self.guards = guards or {}  # event → flag that all nodes must have
        self.node_ids: dict[Hashable, int] = {}
        self.nodes: list[Node] = []
        self.own: list[tuple[tuple[str, int], ...]] = []  # events with their guards
        self.holdings: list[int] = []
        self.flags: list[int] = []
        self.targets: list[int] = []
        self.traits: list[int] = []  # what `_persistent` looks at, as a number
        self.trait_ids: dict[Hashable, int] = {}
        self.groups: dict[Hashable, Sequence[int]] = {}  # what `_persistent` has found
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

        `shortest` goes breadth-first and remembers the way, for a minimal story; otherwise a violation found
        depth-first is looked for again that way.
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
        """Every step possible in a state, and where it leads."""
        count, links = self.count, self.links
        found: list[tuple[tuple[int, Any, int], State | Violation]] = []
        flags = -1
        for node in state[:count]:
            flags &= self.flags[node]
        indices: Sequence[int] = range(count)
        if self.reduce:
            traits = self.traits
            # What the persistent set depends on; a few hundred different ones among all states.
            case = (*[traits[node] for node in state[:count]], *map(bool, state[count:]))
            known = self.groups.get(case)
            if known is None:
                known = self.groups[case] = self._persistent(state, flags)
            indices = known
        for index in indices:
            node = state[index]
            for event, guard in self.own[node]:
                if flags & guard == guard:
                    found.append(((index, event, -1), self._follow(state, index, node, event, -1)))
            for sender, at in self.incoming[index]:
                link = state[at]
                if link:
                    head = links[link][0]
                    found.append(
                        ((index, head, sender), self._follow(state, index, node, head, sender))
                    )
        return found

    def _persistent(self, state: State, flags: int) -> Sequence[int]:
        """Nodes that no other node can disturb before they move; as few as possible."""
        count = self.count
        best: Sequence[int] = range(count)
        for first in range(count):
            group = [first]
            able = False
            for index in group:  # grows while we go through it
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
        """Whether `other` can do something that gives node `index` an event it does not have now."""
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
                    return Violation("split state", f"workers {index} and {other} both have it")
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
            assert all(allowed >> to & 1 for to, _ in sent), "may_send left a node out"
            assert self.targets[following] & ~allowed == 0, "may_send took back what it said"
        return following, outgoing

    def _intern_node(self, node: Node) -> int:
        print_ = fingerprint(node)
        found = self.node_ids.get(print_)
        if found is None:
            found = self.node_ids[print_] = len(self.nodes)
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
        return found

    def _intern_message(self, message: Any) -> int:
        print_ = fingerprint(message)
        found = self.message_ids.get(print_)
        if found is None:
            found = self.message_ids[print_] = len(self.messages)
            self.messages.append(message)
        return found

    def _append(self, link: int, message: int) -> int:
        longer = self._intern_link((*self.links[link], message))
        self.appended[link, message] = longer
        return longer

    def _intern_link(self, content: tuple[int, ...]) -> int:
        found = self.link_ids.get(content)
        if found is None:
            tail = self._intern_link(content[1:])
            found = self.link_ids[content] = len(self.links)
            self.links.append(content)
            self.tails.append(tail)
        return found

    def link(self, content: Iterable[int]) -> int:
        """The number of a link with these messages, in their numbers."""
        return self._intern_link(tuple(content))

    def as_step(self, step: tuple[int, Any, int]) -> Step:
        """A step, for a story."""
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
