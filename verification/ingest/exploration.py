"""Explore connectors, workers and a controller: every interleaving, with the machines of `engine.protocol.ingest`.

The possible events are in `verification.ingest.model`. Proven of every reachable state:

1. **Prefix.** Every committed snapshot holds the first messages of each stream, each once, and exactly those up to the
   position that the snapshot records.
2. **Truth.** All messages that a connector knows to be safe are in the snapshot that was committed last.
3. **Progress.** Whatever happened, all streams can still be sent to their end, committed, and acknowledged completely.

States that differ only in messages that every receiver will ignore are merged: messages of a connection that its
receiver has ended, or of a generation that the controller has left behind (and drops, which is tested).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railgun.engine.protocol.ingest.messages import NONE, Reason
from verification.explorer import Explorer, State, Step
from verification.fork import fingerprint, fork
from verification.ingest.model import CONTROLLER, Case, ConnectorNode, Controller, Rules, WorkerNode
from verification.rescale.model import Violation

__all__ = [
    "CASES",
    "LARGE",
    "Case",
    "Explored",
    "Rules",
    "Tidy",
    "explore",
    "new_explorer",
    "story_lines",
]


@dataclass(slots=True)
class Explored:
    """The result: the numbers of states and steps, and the first violation with its story."""

    case: Case
    states: int = 0
    transitions: int = 0
    violation: Violation | None = None
    story: list[Step] = field(default_factory=list)


def new_explorer(case: Case, rules: Rules) -> Explorer:
    """Return an explorer of the nodes of a case: the controller, the workers, the connectors."""
    nodes: list[Any] = [Controller(case, rules)]
    nodes += [WorkerNode(index, case, rules) for index in range(1, case.workers + 1)]
    first = len(nodes)
    nodes += [ConnectorNode(first + index, case, rules) for index in range(case.connectors)]
    return Explorer(nodes, lambda _: None)


def explore(case: Case, rules: Rules | None = None, limit: int | None = None) -> Explored:
    """Visit every state; the first violation comes with its shortest story."""
    explorer = new_explorer(case, rules or Rules())
    first = case.workers + 1
    result = Explored(case)
    tidy = Tidy(explorer, case)
    number: dict[State, int] = {explorer.start: 0}
    came: list[tuple[int, tuple[int, Any, int]] | None] = [None]
    before: list[list[int]] = [[]]  # the predecessors of each state
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
            following = tidy(following)
            target = number.get(following)
            if target is None:
                target = number[following] = len(came)
                came.append((here, step))
                before.append([])
                todo.append(following)
            before[target].append(here)
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


class Tidy:
    """Removes from links the messages that will be ignored: to deliver them would change nothing, now or later."""

    def __init__(self, explorer: Explorer, case: Case) -> None:
        self.explorer, self.case = explorer, case
        self.memo: dict[tuple[int, int], int] = {}
        count, first = explorer.count, case.workers + 1
        pairs = [(worker, other) for worker in range(1, first) for other in range(first, count)]
        pairs += [(other, worker) for worker, other in pairs]
        if not case.late:
            pairs += [(worker, CONTROLLER) for worker in range(1, first)]
        self.slots = [(to, count + sender * count + to) for sender, to in pairs]

    def __call__(self, state: State) -> State:
        """Return the state without these messages."""
        tidied: list[int] | None = None
        for to, slot in self.slots:
            link = state[slot]
            if link:
                key = state[to], link
                left = self.memo.get(key)
                if left is None:
                    left = self.memo[key] = self._left(*key)
                if left != link:
                    tidied = tidied or list(state)
                    tidied[slot] = left
        return state if tidied is None else tuple(tidied)

    def _left(self, node: int, link: int) -> int:
        explorer = self.explorer
        receiver: Any = explorer.nodes[node]
        content = explorer.links[link]
        messages = [explorer.messages[number] for number in content]
        if isinstance(receiver, Controller):
            heeded = [self._is_heeded(receiver, message) for message in messages]
        elif isinstance(receiver, ConnectorNode):
            oldest = receiver.session + (receiver.at is None)
            heeded = [message[1] >= oldest for message in messages]
        else:
            opened, heeded = set(receiver.sessions), []
            for what, session, *_ in messages:
                if what == "open":
                    opened.add(session)
                heeded.append(session in opened)
        return explorer.link(number for number, stays in zip(content, heeded, strict=True) if stays)

    def _is_heeded(self, controller: Controller, message: Any) -> bool:
        if message[1] >= controller.registry.generation:
            return True
        tried = fork(controller)
        return any(
            tried.deliver(worker, message) or fingerprint(tried) != fingerprint(controller)
            for worker in range(1, self.case.workers + 1)
        )


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
    """Return a violation if a connector was told that a message is safe which is not."""
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
    """Return the first state from which none of the good states can be reached."""
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
    story = [] if last is None else [explorer.as_step(last)]
    before = came[at]
    while before is not None:
        story.append(explorer.as_step(before[1]))
        before = came[before[0]]
    result.states = len(number)
    result.violation, result.story = violation, story[::-1]
    return result


def story_lines(explored: Explored) -> list[str]:
    """Describe the story that leads to a violation."""
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
    return " ".join(
        [what, *(reason.name if isinstance(reason, Reason) else str(reason) for reason in more)]
    )


CASES: Final = (
    Case(messages=2, closes=1),
    Case(messages=1, closes=1, failures=True),
    Case(messages=2, closes=0, crashes=1),
    Case(messages=1, closes=0, shrinks=1, failures=True),
    Case(messages=2, closes=0, connectors=2),
    Case(messages=1, closes=1, crashes=1),
    Case(workers=1, messages=2, closes=1, shrinks=1),
    Case(workers=1, messages=2, closes=1, crashes=1, failures=True),
    Case(workers=1, messages=1, closes=1, crashes=1, late=True),
    Case(workers=3, messages=1, closes=0, crashes=1),
    Case(workers=3, messages=1, closes=0, shrinks=1),
    Case(workers=1, streams=2, messages=1, closes=1),
    Case(streams=2, messages=1, closes=0),
)
"""The cases of every run, with each kind of fault at least once: one and a half million states."""
LARGE: Final = (
    Case(messages=2, closes=2),
    Case(messages=1, closes=1, shrinks=1),
    Case(messages=1, closes=0, crashes=1, shrinks=1),
    Case(messages=1, closes=1, crashes=1, failures=True),
    Case(messages=1, closes=0, connectors=2, crashes=1),
    Case(workers=3, messages=1, closes=1),
    Case(streams=2, messages=1, closes=0, crashes=1),
    Case(streams=2, messages=1, closes=0, shrinks=1),
)
"""Further cases for longer runs: combined faults."""
