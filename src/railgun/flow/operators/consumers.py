"""Several consumers of one stream: what one of them changes in an item, the others must not see.

Items are handed on as they are. If two steps take from one stream and one changes the items in place, what the other
sees depends on who comes first. Rules:

1. For the first `CHECKED` items of a stream with several consumers each consumer has copies of its own, and it is
   watched whether it changes them, also later, when they have waited to be sent to another stage.
2. If one did, the consumers have copies for ever. So what each of them sees is what was emitted.
3. If none did, items are handed on as they are, and one of every `SAMPLE_ROWS` is watched. A change that is found only
   then is told people as a warning, because nobody knows any more what others saw; from then on there are copies.
4. Where that must not be copied but found (`FlowTester`), a consumer that changes an item is an error, which names it.

A stream with one consumer is none of this module's business, and pays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from railgun.flow.errors import StepError
from railgun.flow.operators.sharing import Watched, own_copy
from railgun.flow.telling import shorten

if TYPE_CHECKING:
    from railgun.flow.operators.operator import Operator
    from railgun.wire.rows import RowBatch

CHECKED: Final = 1_000
SAMPLE_ROWS: Final = 1_000
WATCHED: Final = 100
"""Items of a batch that are watched for each consumer, while it is found out whether it changes them."""


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

    def __init__(self, step: str, outs: Sequence[Operator], warn: Callable[[str], None]) -> None:
        self.step = step
        self.outs = outs
        self.strict = False
        self.numbered = False
        """Whether rows are numbered, because their ways meet again (`operators.ways`)."""
        self._warn = warn
        self._left = CHECKED
        self._copying = False
        self._watched: list[deque[Watched]] = [deque(maxlen=CHECKED) for _ in outs]
        self._sample: Watched | None = None
        self._rows = 0  # since the last sample

    def push(self, batch: RowBatch) -> None:
        """Hand a batch to all of them."""
        if self.strict:
            self._push_copies(batch, watched=CHECKED)
            self.check()
        elif self._copying:
            self._push_copies(batch)
        elif self._left > 0:
            self._left -= len(batch)
            self._push_copies(batch, watched=WATCHED)
            self._learn()
        else:
            self._push_shared(batch)

    def check(self) -> None:
        """Raise `SharedItemError` if a consumer has changed an item it was given, and that is an error here."""
        for out, watched in zip(self.outs, self._watched, strict=True):
            for item in watched if self.strict else ():
                if item.has_changed():
                    was, now = shorten(item.before()), shorten(item.value)
                    raise SharedItemError(out.step, self.step, "", now, was)

    def _push_copies(self, batch: RowBatch, watched: int = 0) -> None:
        """Give each consumer items of its own, the last one those that were emitted."""
        mine = [batch.with_values([own_copy(item) for item in batch.values]) for _ in self.outs[1:]]
        mine.append(batch)
        for own, watch in zip(mine, self._watched, strict=True):
            watch.extend(filter(None, map(Watched.of, own.values[:watched])))
        self._give(mine)

    def _learn(self) -> None:
        """Find out whether a consumer changes what it is given; in the end, let go of what was watched."""
        self._copying = any(item.has_changed() for watched in self._watched for item in watched)
        if self._copying:
            self._watched = [deque() for _ in self.outs]

    def _push_shared(self, batch: RowBatch) -> None:
        if any(self._watched):  # the last ones that were given as copies, which have had time since
            self._learn()
            if self._copying:
                self._push_copies(batch)
                return
            self._watched = [deque() for _ in self.outs]
        if self._sample is not None and self._sample.has_changed():
            self._tell_late()
            self._push_copies(batch)
            return
        self._rows += len(batch)
        if self._rows >= SAMPLE_ROWS:
            self._rows, self._sample = 0, Watched.of(batch.values[-1])
        self._give([batch] * len(self.outs))

    def _give(self, batches: Sequence[RowBatch]) -> None:
        for way, (out, batch) in enumerate(zip(self.outs, batches, strict=True)):
            out.push(batch.numbered(way) if self.numbered else batch)

    def _tell_late(self) -> None:
        self._copying, self._sample = True, None
        steps = ", ".join(repr(out.step) for out in self.outs)
        self._warn(
            f"step {self.step!r}: one of the steps that take its items ({steps}), or a step after one of them, changes "
            "items in place, which the others get, too. What they have seen up to now may be wrong; from now on they "
            "have copies. Change a copy instead: copy.deepcopy(item)"
        )
