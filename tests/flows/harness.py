"""A flow run in this process, with nothing in between: every stage once, what is keyed handed straight on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from railgun import Collect, DeadLetter, Flow, Items, Place, Stateful, Stream
from railgun.engine.operators.keyed import Keyed
from railgun.engine.protocol.frontier import MAX
from railgun.flows.plan import Operators, build
from railgun.transport.rows import RowBatch


class Harness:
    """All stages of a flow on one worker."""

    def __init__(self, flow: Flow, now: int = 0) -> None:
        self.plan = flow.plan()
        self.now = now
        self.out: dict[str, list[Any]] = {}
        self.dead: list[DeadLetter] = []
        self.waiting: deque[tuple[int, RowBatch]] = deque()
        place = Place(
            flow.name, "", 0, 0, lambda step, items: self.out.setdefault(step, []).extend(items)
        )
        self.stages: list[Operators] = [
            build(self.plan, stage, place, self.deliver, now, self.dead.append)
            for stage in self.plan.stages
        ]

    def deliver(self, stage: int, batch: RowBatch) -> None:
        """Every batch travels as bytes, as between workers."""
        self.waiting.append((stage, RowBatch.decode(batch.encode())))

    def settle(self) -> None:
        for operators in self.stages:  # outlets lead to later stages
            for outlet in operators.outlets:
                outlet.flush()
            while self.waiting:
                stage, batch = self.waiting.popleft()
                self.stages[stage].heads[batch.port].push(batch)

    def read(self, most: int = 5_000) -> None:
        """Read all sources to their ends."""
        for operators in self.stages:
            reading = operators.reading
            if reading is not None:
                parts = list(reading.source.partitions())
                reading.push(RowBatch.keyed(parts, [None] * len(parts)))
                while reading.active:
                    reading.read(self.now, most)
                    self.settle()

    def end(self) -> None:
        for operators in self.stages:
            for operator in operators.keyed:
                operator.end()
            self.settle()

    def run(self) -> Harness:
        self.read()
        self.end()
        return self

    def keyed(self, step: str) -> Keyed:
        [found] = [o for operators in self.stages for o in operators.keyed if o.step == step]
        return found

    def errors(self) -> dict[str, int]:
        return {step: n for operators in self.stages for step, n in operators.errors.items()}


def through(
    items: Sequence[Any], add: Callable[[Stream[Any]], Stream[Any]], **options: Any
) -> Harness:
    """Run items through the steps that `add` adds to their stream."""
    flow = Flow("test", **options)
    add(flow.source(Items(items), name="source")).sink(Collect(), name="out")
    return Harness(flow).run()


class Keys(Stateful[Any, Any, Any, Any]):
    """Lets everything pass; for tests that override what they need."""

    def initial(self) -> Any:
        return []

    def on_item(self, item: Any, context: Any) -> Any:
        return [item]


__all__ = ["MAX", "Harness", "Keys", "through"]
