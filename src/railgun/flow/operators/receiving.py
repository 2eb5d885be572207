"""Receiving: the stage that begins a flow into which programs outside push. What it knows of streams is in its table.

Messages wait in a queue until sources are read: so they rest with all other sources when there is too much to do, and
those who send them have no more credits. What was applied is exactly what the table has seen; what waits when
a session ends is dropped, and comes again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np

from railgun.core.frontier import LAST, MAX, MIN
from railgun.core.sources.messages import FromTable, SessionError
from railgun.core.sources.table import Table
from railgun.flow.operators.operator import Setting, shorten
from railgun.flow.operators.reading import BATCH, Clock, Reading
from railgun.flow.source import Pushed
from railgun.wire import outside
from railgun.wire.outside import EARLIEST, LATEST
from railgun.wire.records import BatchError
from railgun.wire.rows import RowBatch, Times, joined_times

FORGET: Final = 10_000  # streams whose times are remembered


class Callers(Protocol):
    """Who talks to the connectors of this worker, and for it to the controller."""

    def carry_out(self, command: FromTable) -> None:
        """Do what the table wants."""

    def took(self, session: int, size: int) -> None:
        """So many bytes of a session's messages are dealt with."""

    def refuse(self, session: int, error: SessionError) -> None:
        """End a session."""

    def let_go(self) -> None:
        """End all sessions: the flow goes back, or ends."""


@dataclass(slots=True)
class Pace:
    """How far time has come in a stream."""

    reached: int = MIN
    heard: int = 0


class Receiving(Reading):
    """Takes what is pushed to this worker."""

    def __init__(self, setting: Setting, source: Pushed[Any], clock: Clock, now: int) -> None:
        super().__init__(setting, source, clock, now)
        self.pushed = source
        self.table = Table()
        self.callers: Callers | None = None
        self.dropped = 0  # messages that were applied before
        self.stopped = False
        self.timed_by_event = clock.time is not None or source.event_time
        self._queue: deque[tuple[int, str, bytes | bytearray | int, int]] = deque()
        self._paces: dict[str, Pace] = {}

    # ------------------------------------------------------------ what connectors do

    def offer(self, session: int, stream: str, what: bytes | bytearray | int, size: int) -> bool:
        """A batch of messages, or the last id of a stream that ends; whether it is the first that waits."""
        self._queue.append((session, stream, what, size))
        return len(self._queue) == 1

    def notify(self, session: int, stream: str) -> None:
        """A connector wants to send a stream."""
        self._do(self.table.notify(session, stream))

    def closed(self, session: int) -> None:
        """A connection is lost."""
        self._do(self.table.closed(session))

    def granted(self, stream: str, session: int, por: int) -> None:
        """The controller gives this worker a stream."""
        self._do(self.table.granted(stream, session, por))

    def rejected(self, stream: str, session: int) -> None:
        """Another worker has it."""
        self._do(self.table.rejected(stream, session))

    def wanted(self, stream: str) -> None:
        """A stream is wanted elsewhere."""
        self._do(self.table.wanted(stream))

    def settled(self, snapshot: int, committed: bool) -> None:
        """A snapshot is committed, or is not."""
        self._do(self.table.settled(snapshot, committed))

    def _do(self, commands: list[FromTable]) -> None:
        if self.callers is not None:
            for command in commands:
                self.callers.carry_out(command)

    # ------------------------------------------------------------ reading

    def read(self, now: int, most: int = BATCH) -> int:
        """Apply what waits, until there are enough records; how many there are."""
        self.now = now
        together: list[list[Any]] = []
        times: list[tuple[Times | int, int]] = []
        rows = 0
        while self._queue and rows < most:
            session, stream, what, size = self._queue.popleft()
            if session not in self.table.sessions:
                continue
            try:
                if isinstance(what, int):
                    self.table.end(session, stream, what)
                    batch = RowBatch([], now)
                else:
                    batch = self._take(session, stream, what)
            except SessionError as error:
                self._refuse(session, error)
                continue
            if self.callers is not None:
                self.callers.took(session, size)
            rows += max(1, len(batch))  # also what is dropped takes its time
            self.records += len(batch)
            if len(batch):
                together.append(batch.values)
                times.append((batch.times, len(batch)))
        if together:
            whole = together[0] if len(together) == 1 else list(chain.from_iterable(together))
            self.emit(RowBatch(whole, joined_times(times)))
        return rows

    def _refuse(self, session: int, error: SessionError) -> None:
        self.table.closed(session)
        if self.callers is not None:
            self.callers.refuse(session, error)

    def _take(self, session: int, stream: str, blob: bytes | bytearray) -> RowBatch:
        """The records of a batch that have not been applied before; from now on they have been."""
        try:
            pushed = outside.unpack(blob)
        except BatchError as error:
            raise SessionError("BAD_FRAME", str(error), stream) from error
        times = pushed.times
        if times is not None and not EARLIEST <= int(times.min()) <= int(times.max()) <= LATEST:
            raise SessionError(
                "BAD_TIME", f"a message of {stream!r} has an impossible time", stream
            )
        items: list[Any] = []
        bad: list[int] = []  # rows that cannot be decoded
        rest = pushed
        while True:
            try:
                self.pushed.items(stream, rest, items)
                break
            except Exception as error:
                row = len(items) + len(bad)
                fault = self._fault(session, stream, pushed, row, error)
                if fault is not None:
                    return self._before_fault(session, stream, pushed, items, fault)
                bad.append(row)
                rest = _after(pushed, row + 1)
                if not rest.payloads:
                    break
        before = self.table.message(session, stream, pushed.ids)
        self.dropped += before
        return self._records(stream, pushed, items, bad, before)

    def _fault(
        self, session: int, stream: str, pushed: outside.Pushed, row: int, error: Exception
    ) -> SessionError | None:
        """A message cannot be decoded: it goes to the dead letters, or its session ends."""
        id_, payload = int(pushed.ids[row]), pushed.payloads[row]
        if self.setting.on_error == "stop" or self.setting.dead_letter is None:
            what = f"message {id_} of {stream!r} cannot be decoded: {error!r:.300}; it is {shorten(payload)}"
            return SessionError("BAD_PAYLOAD", what, stream, id_)
        if id_ > self.table.check(session, stream, pushed.ids).seen:
            self.raised_for(self.pushed.items, stream, payload, self.now, error)
        return None

    def _before_fault(
        self,
        session: int,
        stream: str,
        pushed: outside.Pushed,
        items: list[Any],
        fault: SessionError,
    ) -> RowBatch:
        """What came before a message that ends the session counts."""
        good = len(items)
        batch = RowBatch([], self.now)
        if good:
            before = self.table.message(session, stream, pushed.ids[:good])
            batch = self._records(stream, pushed, items, [], before)
        self._refuse(session, fault)
        return batch

    def _records(
        self, stream: str, pushed: outside.Pushed, items: list[Any], bad: list[int], before: int
    ) -> RowBatch:
        rows = np.arange(len(items) + len(bad))
        if bad:
            rows = np.delete(rows, bad)
        keep = int(np.searchsorted(rows, before))
        if keep:
            rows, items = rows[keep:], items[keep:]
        batch = RowBatch(items, self.now)
        if not items or not self.timed_by_event:
            return batch
        if self.clock.time is not None:
            batch = self.timed(batch)
        elif pushed.times is not None:
            batch.times = pushed.times[rows]
        if len(batch):
            self._keep_pace(stream, batch)
        return batch

    def _keep_pace(self, stream: str, batch: RowBatch) -> None:
        pace = self._paces.get(stream)
        if pace is None:
            if len(self._paces) >= FORGET:
                self._paces = {s: p for s, p in self._paces.items() if self._is_awake(p)}
            pace = self._paces[stream] = Pace()
        self.woke = self.woke or not self._is_awake(pace)
        latest = batch.times if isinstance(batch.times, int) else int(batch.times.max())
        pace.reached = max(pace.reached, latest - self.clock.lateness)
        pace.heard = self.now

    def _is_awake(self, pace: Pace) -> bool:
        return pace.heard > self.now - self.clock.idle_after

    def bound(self, now: int, listed: int) -> int:
        """The earliest time this worker may emit at."""
        if self.stopped and listed == MAX:
            return MAX
        if not self.timed_by_event:
            return now
        self.now = now
        awake = (pace.reached for pace in self._paces.values() if self._is_awake(pace))
        return min(awake, default=LAST)

    # ------------------------------------------------------------ the end

    def leave(self) -> None:
        """This worker is to leave: connectors go elsewhere."""
        self._queue.clear()
        self._do(self.table.drain())

    def stop(self) -> None:
        """Take nothing more; those who are connected will hear what of theirs is safe."""
        self.stopped = True
        self._queue.clear()

    def close(self) -> None:
        """The flow goes back, or ends."""
        callers, self.callers = self.callers, None
        if callers is not None:
            callers.let_go()


def _after(pushed: outside.Pushed, row: int) -> outside.Pushed:
    return outside.Pushed(
        pushed.ids[row:],
        None if pushed.times is None else pushed.times[row:],
        None if pushed.keys is None else pushed.keys[row:],
        pushed.payloads[row:],
    )
