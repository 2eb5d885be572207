"""Read the sources of a flow: the first stage. Its keys are the parts of a source, its states the positions in them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from railgun.engine.operators.calls import NO_PART, SourceCall
from railgun.engine.operators.functions import check_time
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.stateless import without_rows
from railgun.engine.protocol.frontier import LAST, MAX, MIN, late_rows
from railgun.flows.source import Reader, Source
from railgun.transport.rows import RowBatch, Times

SECOND_US: Final = 1_000_000
BATCH: Final = 5_000


@dataclass(frozen=True, slots=True)
class Clock:
    """How records of a source get their times: by a function of the record, or else as they are read.

    `lateness` says how far behind the latest record another one may be; a part that has brought nothing for
    `idle_after` no longer holds time back. All in µs.
    """

    time: Callable[[Any], int] | None = None
    lateness: int = 0
    idle_after: int = 10 * SECOND_US


@dataclass(slots=True)
class Part:
    """A part of the source that this worker reads."""

    reader: Reader[Any] | None
    position: Any
    finished: bool = False
    reached: int = MIN  # bound: nothing older is expected from the part
    heard: int = 0  # when the part last brought records


class Reading(Keyed):
    """Reads the parts this worker owns, in turn."""

    def __init__(self, setting: Setting, source: Source[Any], clock: Clock, now: int) -> None:
        super().__init__(setting)
        self.source = source
        self.clock = clock
        self.now = now
        self.active: deque[Any] = deque()
        self.records = 0
        self.over = False
        self.woke = False  # whether an idle part has brought records since this was last read

    def push(self, batch: RowBatch) -> None:
        """Begin to read those listed parts that are new."""
        for partition in batch.keys or ():
            # A worker that joined after the end may list parts again: they are known, and have been read.
            if partition not in self.states and not self.over:
                self.touch([partition])
                self.states[partition] = self._open(partition, None)

    def _open(self, partition: Any, position: Any) -> Part:
        self.active.append(partition)
        with self.calling("open", partition, position):
            reader = self.source.open(partition, position)
        return Part(reader, position, heard=self.now)

    def calling(self, method: str, partition: Any = NO_PART, position: Any = None) -> SourceCall:
        """Return the context in which a method of the source or of a reader is called; it raises a `SourceError`."""
        return SourceCall(self.step, self.source, method, partition, position)

    def read(self, now: int, most: int = BATCH) -> int:
        """Read up to about `most` records from the parts in turn; return their number."""
        self.now = now
        together: list[list[Any]] = []
        rows = 0
        for _ in range(len(self.active)):
            partition = self.active[0]
            self.active.rotate(-1)
            part = self.states[partition]
            self.touch([partition])
            with self.calling("read", partition, part.position):
                items = part.reader.read(most - rows, now)
                listed = items if items is None or isinstance(items, list) else list(items)
                part.position = part.reader.position
            if listed is None:
                self._finish(partition, part)
            elif listed:
                self.woke = self.woke or part.heard <= now - self.clock.idle_after
                part.heard = now
                rows += len(listed)
                if self.clock.time is None:
                    together.append(listed)
                else:
                    self._emit(part, listed, now)
                if rows >= most:
                    break
        if together:
            whole = together[0] if len(together) == 1 else list(chain.from_iterable(together))
            self.emit(RowBatch(whole, now))
        self.records += rows
        return rows

    def _emit(self, part: Part, items: list[Any], now: int) -> None:
        batch = self.timed(RowBatch(items, now))
        if len(batch):
            part.reached = self.judge(batch, part.reached)
            self.emit(batch)

    def judge(self, batch: RowBatch, reached: int) -> int:
        """Mark the late records of a batch of one part, which has `reached` this bound; return its new bound."""
        times = batch.times
        if isinstance(times, int):
            times = np.full(len(batch), times, dtype=np.int64)
        batch.late, reached = late_rows(times, reached, self.clock.lateness)
        return reached

    def timed(self, batch: RowBatch) -> RowBatch:
        """Return the records with their times, without those that the user's time function raised for."""
        if self.clock.time is None:
            return batch
        results, failed = self.each(self._time_of, batch, user=self.clock.time)
        times: Times = np.array(results, dtype=np.int64)
        left = without_rows(batch, failed)
        return RowBatch(left.values, times, origin=left.origin)

    def _time_of(self, item: Any) -> int:
        assert self.clock.time is not None
        return check_time("a time", self.clock.time(item))

    def _finish(self, partition: Any, part: Part) -> None:
        part.finished = True
        self.active.remove(partition)
        self._close(partition, part)

    def _close(self, partition: Any, part: Part) -> None:
        """Close the reader of a part."""
        reader, part.reader = part.reader, None
        if reader is not None:
            with self.calling("close", partition, part.position):
                reader.close()

    def bound(self, now: int, listed: int) -> int:
        """Return the earliest time at which this worker may emit; `listed` is the frontier of the lister."""
        if not self.active:
            if listed == MAX:
                return MAX
            return now if self.clock.time is None else LAST
        if self.clock.time is None:
            return now
        idle = now - self.clock.idle_after
        waiting = (self.states[partition] for partition in self.active)
        return min((part.reached for part in waiting if part.heard > idle), default=LAST)

    def is_finished(self, partition: Any) -> bool:
        """Return whether a part was read to its end, or is not on this worker."""
        part = self.states.get(partition)
        return part is None or part.finished

    def leave(self) -> None:
        """Prepare to leave. A reading worker has nothing to do: its parts move away, as keys do."""

    def stop(self) -> None:
        """Read no more; positions stay."""
        self.close()
        self.active.clear()

    def close(self) -> None:
        """Close all readers."""
        with contextlib.ExitStack() as closing:  # an error of one reader keeps no other open
            for partition, part in self.states.items():
                closing.callback(self._close, partition, part)

    def end_keys(self, latest: int = MIN) -> None:
        """Take note that all parts have been read."""
        self.over = True

    # ------------------------------------------------------------ moving and saving

    def saved(self, keys: list[Any], states: list[Any]) -> list[Any]:
        """Return positions and times of the parts."""
        return [
            None if part is None else (part.position, part.finished, part.reached)
            for part in states
        ]

    def packed(self, key: Any, state: Part) -> Any:
        """Return position and time of a part that moves; close its reader."""
        if state.reader is not None:
            self.active.remove(key)
            self._close(key, state)
        return state.position, state.finished, state.reached

    def unpacked(self, key: Any, state: Any) -> Part:
        """Open a part where the other worker stopped."""
        position, finished, reached = state
        part = Part(None, position, finished=True) if finished else self._open(key, position)
        part.reached = reached
        return part
