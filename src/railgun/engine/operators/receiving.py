"""Take records that outside programs push into a flow: the first stage of such a flow.

The operator's `table` tracks the streams. Messages wait in one queue per session until sources are read: so they pause
with all other sources under back-pressure, and their senders run out of credits. Exactly the messages that the table
has seen were applied; messages that still wait when a session ends are dropped with it, and are sent again. A message
that cannot be decoded, or that the user's time function raises for, is the fault of its sender: that session ends, or
the message becomes a dead letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from railgun.engine.operators.calls import ValueCalls
from railgun.engine.operators.operator import Setting, shorten, without_values
from railgun.engine.operators.reading import BATCH, Clock, Reading
from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.protocol.ingest.messages import FromTable, Relinquish, SessionError
from railgun.engine.protocol.ingest.table import Table
from railgun.errors import pass_interrupt
from railgun.flows.source import Pushed
from railgun.transport import ingest_batch as outside
from railgun.transport.commands import Blob
from railgun.transport.ingest_batch import EARLIEST, LATEST
from railgun.transport.records import BatchError
from railgun.transport.rows import RowBatch, joined

MANY_STREAMS: Final = 1_000  # streams; with more, the reached time is not computed at every read
REACHED_VALID_US_PER_STREAM: Final = 10  # µs that a computed reached time is valid, for each stream

Waiting: TypeAlias = Blob | outside.Pushed | int
"""A waiting entry: a batch, the rest of one, or the last id of a stream that ends."""


class Callers(Protocol):
    """The driver that talks to this worker's connectors and, for them, to the controller."""

    def carry_out(self, command: FromTable) -> None:
        """Carry out a command of the table."""

    def took(self, session: int, size: int) -> None:
        """Take note that `size` bytes of a session's messages were processed: grant them as credits again."""

    def refuse(self, session: int, error: SessionError) -> None:
        """End a session with this error."""

    def let_go(self) -> None:
        """End all sessions: the flow goes back, or ends."""


@dataclass(slots=True)
class Pace:
    """How far time has advanced in a stream, kept while the stream is in the table, and handed on with it."""

    reached: int = MIN
    heard: int = 0


class Receiving(Reading):
    """Takes the records that connectors push to this worker."""

    def __init__(self, setting: Setting, source: Pushed[Any], clock: Clock, now: int) -> None:
        super().__init__(setting, source, clock, now)
        self.pushed = source
        self.table = Table()
        self.callers: Callers | None = None
        self.dropped = 0  # messages that were applied before
        self.stopped = False
        self.timed_by_event = clock.time is not None or source.event_time
        # By session, the next session first: stream, entry, size in bytes.
        self._queues: dict[int, deque[tuple[str, Waiting, int]]] = {}
        self._paces: dict[str, Pace] = {}
        self._reached = LAST  # the computed reached time of all streams
        self._reached_until = MIN  # when to compute it again

    # ------------------------------------------------------------ connectors

    def offer(self, session: int, stream: str, waiting: Blob | int, size: int) -> bool:
        """Queue a batch of messages, or the last id of a stream that ends; return whether nothing waited before."""
        if session not in self.table.sessions:
            return False
        first = not self._queues
        self._queues.setdefault(session, deque()).append((stream, waiting, size))
        return first

    def notify(self, session: int, stream: str) -> None:
        """Answer a connector that wants to send a stream."""
        self._carry_out(self.table.notify(session, stream))

    def closed(self, session: int) -> None:
        """End a session whose connection is lost, and drop its waiting messages."""
        self._queues.pop(session, None)
        self._carry_out(self.table.closed(session))

    def granted(self, stream: str, session: int, por: int, reached: int) -> None:
        """Take a stream that the controller grants, in which time has advanced to `reached`."""
        if reached > MIN and stream not in self._paces:
            self._begin(stream, Pace(reached))
        self._carry_out(self.table.granted(stream, session, por))

    def times_reached(self) -> dict[str, int]:
        """Return how far time has advanced in each stream on this worker."""
        return {stream: pace.reached for stream, pace in self._paces.items()}

    def rejected(self, stream: str, session: int) -> None:
        """Refuse a stream to its connector: another worker has it."""
        self._carry_out(self.table.rejected(stream, session))

    def wanted(self, stream: str) -> None:
        """Take note that another worker wants a stream."""
        self._carry_out(self.table.wanted(stream))

    def settled(self, snapshot: int, committed: bool) -> None:
        """Take note that a snapshot was committed, or failed."""
        self._carry_out(self.table.settled(snapshot, committed))

    def _carry_out(self, commands: list[FromTable]) -> None:
        for command in commands:
            if isinstance(command, Relinquish):
                pace = self._paces.pop(command.stream, Pace())
                command = replace(command, reached=pace.reached)
            if self.callers is not None:
                self.callers.carry_out(command)

    # ------------------------------------------------------------ reading

    def read(self, now: int, most: int = BATCH) -> int:
        """Apply waiting messages, a batch of each session in turn, up to about `most`; return their number."""
        self.now = now
        together: list[RowBatch] = []
        rows = 0
        while self._queues and rows < most:
            session, queue = next(iter(self._queues.items()))
            stream, waiting, size = queue.popleft()
            try:
                batch, count, rest = self._apply(session, stream, waiting, most)
            except SessionError as error:
                self._refuse(session, error)
                rows += 1
                continue
            rows += count  # bad and repeated messages take time as well
            if self._queues.pop(session, None) is not None:
                if rest is not None:
                    queue.appendleft((stream, rest, size))
                elif self.callers is not None:
                    self.callers.took(session, size)
                if queue:
                    self._queues[session] = queue  # behind the others
            self.records += len(batch)
            if len(batch):
                together.append(batch)
        if together:
            self.emit(together[0] if len(together) == 1 else joined(together))
        return rows

    def _refuse(self, session: int, error: SessionError) -> None:
        self.closed(session)
        if self.callers is not None:
            self.callers.refuse(session, error)

    def _apply(
        self, session: int, stream: str, waiting: Waiting, most: int
    ) -> tuple[RowBatch, int, outside.Pushed | None]:
        """Apply a waiting entry; return its records, the number of messages, and the rest for the next turn."""
        if isinstance(waiting, int):
            self.table.end(session, stream, waiting)
            return RowBatch([], self.now), 1, None
        pushed = waiting if isinstance(waiting, outside.Pushed) else _unpacked(stream, waiting)
        rest = None
        if len(pushed.ids) > most:
            pushed, rest = _part(pushed, 0, most), _part(pushed, most)
        return self._take(session, stream, pushed), len(pushed.ids), rest

    def _take(self, session: int, stream: str, pushed: outside.Pushed) -> RowBatch:
        """Return the records of messages that have not been applied before, and mark them as applied.

        If one of them ends the session, the messages before it are applied.
        """
        seen = self.table.check(session, stream, pushed.ids).seen
        if pushed.ids[0] <= seen:
            before = int(np.searchsorted(pushed.ids, seen, "right"))
            self.dropped += before
            pushed = _part(pushed, before)
            if not pushed.payloads:
                return RowBatch([], self.now)
        batch, good, fault = self._records(stream, pushed)
        if good:
            self.table.message(session, stream, pushed.ids[:good])
        if len(batch) and self.timed_by_event:
            self._keep_pace(stream, batch)
        if fault is not None:
            self._refuse(session, fault)
        return batch

    def _records(
        self, stream: str, pushed: outside.Pushed
    ) -> tuple[RowBatch, int, SessionError | None]:
        """Return records with their times, the number of messages covered, and the error of the next one, if fatal."""
        items: list[Any] = []
        bad: list[int] = []  # rows that cannot be decoded
        count = len(pushed.payloads)
        rest, fault = pushed, None

        def done() -> int:
            return len(items) + len(bad)

        while len(items) + len(bad) < count:
            error: BaseException = ValueError("it has given no item for the message")
            with ValueCalls(self.step, self.pushed.items, "message", pushed.payloads, done):
                try:
                    self.pushed.items(stream, rest, items)
                    if len(items) + len(bad) == count:
                        break
                except BaseException as raised:
                    pass_interrupt(raised)
                    error = raised
            row = len(items) + len(bad)
            payload = pushed.payloads[row]
            fault = self._fault(stream, pushed, row, "cannot be decoded", payload, error)
            if fault is not None:
                break
            self.raised_for(self.pushed.items, stream, payload, self.now, error)
            bad.append(row)
            rest = _part(pushed, row + 1)
        good = len(items) + len(bad)
        if self.timed_by_event and items:
            rows = np.delete(np.arange(good), bad)
            if self.clock.time is not None:
                batch, late = self._timed_by(self.clock.time, stream, pushed, rows, items)
                return (batch, good, fault) if late is None else (batch, *late)
            if pushed.times is not None:
                return RowBatch(items, pushed.times[rows]), good, fault
        return RowBatch(items, self.now), good, fault

    def _timed_by(
        self,
        function: Callable[[Any], int],
        stream: str,
        pushed: outside.Pushed,
        rows: NDArray[Any],
        items: list[Any],
    ) -> tuple[RowBatch, tuple[int, SessionError] | None]:
        """Return items with the times of the user's function; and the first fatal row with its error, if any."""
        times: list[int] = []
        bad: list[int] = []
        left = iter(items)
        end = None

        def done() -> int:
            return len(times) + len(bad)

        while len(times) + len(bad) < len(items):
            with ValueCalls(self.step, function, "record", items, done):
                try:
                    for item in left:
                        times.append(self._time_of(item))
                    break
                except BaseException as raised:
                    pass_interrupt(raised)
                    error = raised
            at = len(times) + len(bad)
            row = int(rows[at])
            fault = self._fault(stream, pushed, row, "has no time", items[at], error)
            if fault is not None:
                items, end = items[:at], (row, fault)
                break
            self.raised_for(function, stream, items[at], self.now, error)
            bad.append(at)
        return RowBatch(
            without_values(items, bad) if bad else items, np.array(times, np.int64)
        ), end

    def _fault(
        self,
        stream: str,
        pushed: outside.Pushed,
        row: int,
        problem: str,
        record: Any,
        error: BaseException,
    ) -> SessionError | None:
        """Return the error that ends the session of a bad message, or None if bad messages become dead letters."""
        if self.setting.on_error != "stop" and self.setting.dead_letter is not None:
            return None
        id_ = int(pushed.ids[row])
        text = f"message {id_} of {stream!r} {problem}: {error!r:.300}; it is {shorten(record)}"
        return SessionError("BAD_PAYLOAD", text, stream, id_)

    def _keep_pace(self, stream: str, batch: RowBatch) -> None:
        """Mark the late records of a stream's batch, and update how far time has advanced in the stream."""
        pace = self._paces.get(stream, Pace())
        pace.reached = self.judge(batch, pace.reached)
        self._begin(stream, pace)

    def _begin(self, stream: str, pace: Pace) -> None:
        """Let a stream hold time back from now on: it has brought records just now."""
        if stream not in self._paces or not self._is_awake(pace):
            self.woke = True
            self._reached = min(self._reached, pace.reached)
        self._paces[stream] = pace
        pace.heard = self.now

    def _is_awake(self, pace: Pace) -> bool:
        return pace.heard > self.now - self.clock.idle_after

    def bound(self, now: int, listed: int) -> int:
        """Return the earliest time at which this worker may emit."""
        if self.stopped and listed == MAX:
            return MAX
        if not self.timed_by_event:
            return now
        self.now = now
        if now >= self._reached_until:
            awake = (pace.reached for pace in self._paces.values() if self._is_awake(pace))
            self._reached = min(awake, default=LAST)
            many = len(self._paces) > MANY_STREAMS
            self._reached_until = (
                now + REACHED_VALID_US_PER_STREAM * len(self._paces) if many else MIN
            )
        return self._reached

    # ------------------------------------------------------------ the end

    def leave(self) -> None:
        """Prepare to leave: send connectors elsewhere."""
        self._queues.clear()
        self._carry_out(self.table.drain())

    def stop(self) -> None:
        """Take no more messages; connected programs still hear acknowledgements."""
        self.stopped = True
        self._queues.clear()

    def close(self) -> None:
        """End all sessions: the flow goes back, or ends."""
        callers, self.callers = self.callers, None
        if callers is not None:
            callers.let_go()


def _unpacked(stream: str, blob: Blob) -> outside.Pushed:
    try:
        pushed = outside.unpack(blob)
    except BatchError as error:
        raise SessionError("BAD_FRAME", str(error), stream) from error
    times = pushed.times
    if times is not None and not EARLIEST <= int(times.min()) <= int(times.max()) <= LATEST:
        raise SessionError("BAD_TIME", f"a message of {stream!r} has an impossible time", stream)
    return pushed


def _part(pushed: outside.Pushed, begin: int, end: int | None = None) -> outside.Pushed:
    rows = slice(begin, end)
    return outside.Pushed(
        pushed.ids[rows],
        None if pushed.times is None else pushed.times[rows],
        None if pushed.keys is None else pushed.keys[rows],
        pushed.payloads[rows],
    )
