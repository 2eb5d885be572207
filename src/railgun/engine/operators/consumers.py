"""Hand the items of one stream to several consumers, so that none sees another's changes to an item.

If two steps got the same item and one changed it in place, the other would see either form, depending on which step
comes first. Rules:

1. Each consumer always has items of its own: all but the last get copies. So each of them sees the items that were
   emitted, whatever the others do, and whenever they begin to change them. Items that cannot change (numbers, text,
   tuples of these) are their own copies; of the others, plain ones are copied quickly (`copying`).
2. An item that cannot be copied (a lock, an open file) is handed to all of them as it is.
3. In strict mode (`FlowTester`), a consumer that changes an item is an error, which names the consumer.

A stream with one consumer does not use this module, and costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.calls import ValueCalls
from railgun.engine.operators.copying import ATOMS, NOT_PLAIN, own_copy, plain_copy
from railgun.engine.operators.describe import shorten
from railgun.engine.operators.sharing import Watched
from railgun.flows.errors import StepError

if TYPE_CHECKING:
    from railgun.engine.operators.operator import Operator
    from railgun.transport.rows import RowBatch

WATCHED_ITEMS: Final = 1_000
"""The number of items watched for changes for each consumer, in strict mode."""


class SharedItemError(StepError):
    """A step changes items in place that another step also gets; `function` is the step that emitted them."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}, or a step after it, changes items in place that other steps get from "
            f"{self.function!r}, too: what they see depends on who comes first. An item was {self.cause} and is "
            f"{self.record} now. Change a copy instead: copy.deepcopy(item)."
        )


class Consumers:
    """Hands the batches of one step to the several operators that follow it."""

    def __init__(self, step: str, outs: Sequence[Operator]) -> None:
        self.step = step
        self.outs = outs
        self.strict = False
        self.numbered = False
        """Whether rows are numbered, because their ways meet again (`operators.ways`)."""
        self._watched: list[deque[Watched]] = [deque(maxlen=WATCHED_ITEMS) for _ in outs]

    def push(self, batch: RowBatch) -> None:
        """Hand a batch to all consumers: copies of its items to all but the last, which gets the items themselves."""
        batches = [batch.with_values(self._copies(batch.values)) for _ in self.outs[1:]]
        batches.append(batch)
        if self.strict:
            for own_batch, watch in zip(batches, self._watched, strict=True):
                watch.extend(filter(None, map(Watched.of, own_batch.values[:WATCHED_ITEMS])))
        for way, (out, own_batch) in enumerate(zip(self.outs, batches, strict=True)):
            out.push(own_batch.numbered(way) if self.numbered else own_batch)
        self.check()

    def check(self) -> None:
        """Raise `SharedItemError` if a consumer has changed an item it was given; only in strict mode."""
        for out, watched in zip(self.outs, self._watched, strict=True):
            for item in watched if self.strict else ():
                if item.has_changed():
                    was, now = shorten(item.before()), shorten(item.value)
                    raise SharedItemError(out.step, self.step, "", now, was)

    def _copies(self, items: list[Any]) -> list[Any]:
        """Return copies of the items; an item that cannot be copied stands for itself."""
        if ATOMS.issuperset(map(type, items)):
            return items.copy()
        copies = [item if type(item) in ATOMS else plain_copy(item) for item in items]
        not_plain = [row for row, item in enumerate(copies) if item is NOT_PLAIN]
        if not_plain:  # copying these may call user code
            copied_rows: list[int] = []
            values = [items[row] for row in not_plain]
            with ValueCalls(
                self.step, "copy of items", "record", values, copied_rows.__len__
            ) as call:
                copy = call.following(own_copy)
                for row in not_plain:
                    copies[row] = copy(items[row])
                    copied_rows.append(row)
        return copies
