"""Several consumers of one stream: what one of them changes in an item, the others must not see.

If two steps got the same item and one changed it in place, what the other sees would depend on who comes first. Rules:

1. Each consumer has items of its own, always: all but the last have copies. So what each of them sees is what was
   emitted, whatever the others do, and whenever they begin to. Items that cannot change (numbers, text, tuples of
   these) are their own copies; of the others, plain ones are copied quickly (`copying`).
2. An item that cannot be copied (a lock, an open file) is handed to all of them as it is.
3. Where that must not be copied but found (`FlowTester`), a consumer that changes an item is an error, which names it.

A stream with one consumer is none of this module's business, and pays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.calls import ValueCalls
from railgun.engine.operators.copying import ATOMS, ODD, own_copy, plain_copy
from railgun.engine.operators.describe import shorten
from railgun.engine.operators.sharing import Watched
from railgun.flows.errors import StepError

if TYPE_CHECKING:
    from railgun.engine.operators.operator import Operator
    from railgun.transport.rows import RowBatch

WATCHED: Final = 1_000
"""Items that are watched for each consumer, where it is to be found out whether it changes them."""


class SharedItemError(StepError):
    """A step changes items in place that another step also gets; `function` is the step that emitted them."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}, or a step after it, changes items in place that other steps get from "
            f"{self.function!r}, too: what they see depends on who comes first. An item was {self.cause} and is "
            f"{self.record} now. Change a copy instead: copy.deepcopy(item)."
        )


class Consumers:
    """Hands the batches of one step to the several operators that take from it."""

    def __init__(self, step: str, outs: Sequence[Operator]) -> None:
        self.step = step
        self.outs = outs
        self.strict = False
        self.numbered = False
        """Whether rows are numbered, because their ways meet again (`operators.ways`)."""
        self._watched: list[deque[Watched]] = [deque(maxlen=WATCHED) for _ in outs]

    def push(self, batch: RowBatch) -> None:
        """Hand a batch to all of them: items of its own to each, to the last one those that were emitted."""
        mine = [batch.with_values(self._copies(batch.values)) for _ in self.outs[1:]]
        mine.append(batch)
        if self.strict:
            for own, watch in zip(mine, self._watched, strict=True):
                watch.extend(filter(None, map(Watched.of, own.values[:WATCHED])))
        for way, (out, own) in enumerate(zip(self.outs, mine, strict=True)):
            out.push(own.numbered(way) if self.numbered else own)
        self.check()

    def check(self) -> None:
        """Raise `SharedItemError` if a consumer has changed an item it was given, and that is an error here."""
        for out, watched in zip(self.outs, self._watched, strict=True):
            for item in watched if self.strict else ():
                if item.has_changed():
                    was, now = shorten(item.before()), shorten(item.value)
                    raise SharedItemError(out.step, self.step, "", now, was)

    def _copies(self, items: list[Any]) -> list[Any]:
        """Return copies of items; of one that cannot be copied, itself."""
        if ATOMS.issuperset(map(type, items)):
            return items.copy()
        copies = [item if type(item) in ATOMS else plain_copy(item) for item in items]
        odd = [row for row, item in enumerate(copies) if item is ODD]
        if odd:  # which may call code of users
            tried: list[int] = []
            values = [items[row] for row in odd]
            with ValueCalls(self.step, "copy of items", "record", values, tried.__len__) as call:
                copy = call.following(own_copy)
                for row in odd:
                    copies[row] = copy(items[row])
                    tried.append(row)
        return copies
