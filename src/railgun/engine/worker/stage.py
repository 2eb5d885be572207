"""Run one stage on one worker: carry out the commands of its distributor.

The distributor decides, the operators compute, and this module connects them: it is the driver whose duties are
numbered in `engine.protocol.rescale.messages`. It never waits: long work (counting the keys that have to move, moving
them) is done in pieces, by `step`, between which records flow.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.engine.operators.calls import KeyCalls, ValueCalls
from railgun.engine.operators.describe import shorten
from railgun.engine.operators.functions import check_part
from railgun.engine.operators.keyed import Keyed, LeavingKeys
from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.collect import Collect
from railgun.engine.protocol.rescale.distributor import Distributor
from railgun.engine.protocol.rescale.interrogate import Interrogate
from railgun.engine.protocol.rescale.order import Order
from railgun.engine.protocol.stage_alignment import Alignment
from railgun.engine.snapshots.fit import KeyTypeCheck, missing_parts
from railgun.errors import ProtocolError
from railgun.flows.errors import UnpicklableRecordError
from railgun.flows.plan import Operators, Stage
from railgun.hashing import Hashes, hash_keys
from railgun.transport.columns import EncodingError
from railgun.transport.pickling import dumps
from railgun.transport.rows import RowBatch

if TYPE_CHECKING:
    from railgun.engine.worker.runtime import Runtime

CHUNK_KEYS: Final = 1_000  # moved at once, at most; the chunk is also limited in bytes and time
CHUNK_BYTES: Final = 64 << 10
CHUNK_TIME_US: Final = 800
MIN_CHUNK_KEYS: Final = 50  # moved at once, at least, unless their states are large
_PART: Final = struct.Struct("<I")
_SENT: Final = struct.Struct("<qq")  # time of sending, and watermark of these keys


class StageRunner:
    """One stage on one worker."""

    def __init__(
        self, runtime: Runtime, stage: Stage, distributor: Distributor, operators: Operators
    ) -> None:
        self.runtime = runtime
        self.stage = stage
        self.distributor = distributor
        self.operators = operators
        self.ended = False
        self.upstream = dict.fromkeys(stage.before, MIN)  # watermarks of the stages before
        self.latest_upstream = MIN  # the earliest of them, when last passed on
        self.alignment: Alignment[m.Local | m.Advanced | m.PassFence] = Alignment(stage.before)
        self.latest = MIN  # the latest known watermark of any worker
        self.listed: dict[Any, None] = {}  # parts of a source that this worker has listed
        self.records = 0
        self.moved_keys = 0  # in the present or last move
        self.moved_bytes = 0
        self.moving_keys = 0
        self.taken_keys = 0
        self.longest_hold = 0
        self._chunk = CHUNK_KEYS // 10  # keys to move next
        self._events: deque[m.Event] = deque()
        self._busy = False
        self.leaving = LeavingKeys()
        # Of operators whose first state was checked.
        self._type_checks: dict[Keyed, KeyTypeCheck] = {}
        self._unchecked = [op for op in operators.keyed if type(op).packed is Keyed.packed]
        self._compares_parts = True
        self._census: Iterator[tuple[list[Any], tuple[Keyed, ...]]] | None = None
        self._counted: tuple[Keyed, ...] = ()  # operators whose keys have all been noted

    # ------------------------------------------------------------ events and commands

    def handle(self, event: m.Event) -> None:
        """Pass an event to the distributor and carry out its commands, after those of events before it."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                message = event.message if isinstance(event, m.Received) else event
                if isinstance(message, m.Frontier | m.Advanced) and message.value < LAST:
                    self.latest = max(self.latest, message.value)
                if isinstance(event, m.Rescale):
                    self._announce_keys(event)
                for command in self.distributor.handle(event):
                    self._carry_out(command)
        finally:
            self._busy = False

    def _announce_keys(self, rescale: m.Rescale) -> None:
        """Tell sinks that keys of other workers will come to this one."""
        if rescale.placement.takes(self.runtime.worker, self.distributor.placement):
            for writing in self.operators.writing:
                writing.keys_arrive(rescale.epoch)

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Process(batch):
                assert isinstance(batch, RowBatch)
                self._process(batch)
            case m.Send(to, message):
                if not isinstance(message, m.Data | m.Forward):
                    self.runtime.send(to, self.stage.index, message)
                    return
                assert isinstance(message.batch, RowBatch)
                values, keys = message.batch.values, message.batch.keys
                call_place = self.stage.name, "pickle of records", "record"
                with ValueCalls(*call_place, values, owners=keys) as call:
                    call.try_each(dumps, values)
                    call.try_each(dumps, keys or ())
                    try:
                        self.runtime.send(to, self.stage.index, message)
                    except EncodingError as error:
                        row = error.row
                        key = "" if keys is None or row is None else shorten(keys[row])
                        raise UnpicklableRecordError(
                            self.stage.name, "", key, "", str(error)
                        ) from error
            case m.Interrogate():
                self._start_census()
            case m.Collect(parts, frontier, turns):
                with KeyCalls(self.stage.name):
                    leaving = [
                        self.leaving.pop(hashes, turn)
                        for (_, hashes), turn in zip(parts, turns, strict=True)
                    ]
                states = [self._collect(keys, frontier) for keys in leaving]
                self.moved_keys += sum(len(hashes) for _, hashes in parts)
                self._events.appendleft(m.Collected(tuple(states)))
            case m.Take(_, state):
                self._take(state)
            case m.Drop():
                pass  # the state was removed when it was collected
            case m.RaiseFence(fence):
                self.flush_outlets()
                for after in self.stage.after:
                    self.runtime.stages[after].from_upstream(self.stage.index, m.PassFence(fence))
            case m.Snapshot(snapshot):
                self.flush_outlets()
                self.runtime.saver.cut(self)
                for after in self.stage.after:
                    self.runtime.stages[after].barrier(self.stage.index, snapshot)
            case m.Confirm(to, stage, message):
                self.runtime.confirm(to, stage, message)
            case m.Advance(frontier):
                self._advance(frontier)
            case m.Completed():
                self.leaving, self._counted = LeavingKeys(), ()
                self.runtime.report(self.stage.index, command)
            case m.Started() | m.Left():
                self.runtime.report(self.stage.index, command)
            case _:
                raise ProtocolError(f"{self.stage.name}: cannot carry out {command}")

    def _process(self, batch: RowBatch) -> None:
        self.records += len(batch.values)
        if isinstance(self.distributor.phase, Interrogate | Collect):
            self._note_new(batch)
        self.operators.heads[batch.port].push(batch)
        if self._unchecked:
            self._check_first(batch)

    def _check_first(self, batch: RowBatch) -> None:
        """Check the first keys and states of each step: whether keys have the types in the snapshot, and states can be
        pickled.

        Raises `UnpicklableStateError` now, because the first snapshot or rescale would fail.
        """
        keys = batch.keys or []
        for operator in list(self._unchecked):
            check = self._type_checks.get(operator)
            if check is None:
                with KeyCalls(operator.step, keys):
                    keys_with_state = list(
                        islice((key for key in keys if key in operator.states), 1)
                    )
                if not keys_with_state:
                    continue
                key = keys_with_state[0]  # the key may be None
                operator.check_state(key, operator.states[key])
                check = self._type_checks[operator] = KeyTypeCheck(
                    operator.step, operator.loaded_keys
                )
                operator.loaded_keys = []
            with KeyCalls(operator.step, keys):
                warnings = check.warnings(keys, operator.states.__contains__)
            for kind, warning in warnings.items():
                self.runtime.environment.warn(warning, f"keys of step {operator.step!r}: {kind}")
            if not check.left:
                self._unchecked.remove(operator)

    def flush_outlets(self) -> bool:
        """Pass on records that were keyed for the next stages, before any other message to them."""
        return sum(outlet.flush() for outlet in self.operators.outlets) > 0

    # ------------------------------------------------------------ time

    def _advance(self, frontier: int) -> None:
        for operator in self.operators.keyed:
            if frontier == MAX:
                operator.end(self.latest)
            else:
                operator.advance(frontier)
        if frontier == MAX:
            self.ended = True
            for writing in self.operators.writing:
                writing.flush()
        self.flush_outlets()
        for after in self.stage.after:
            self.runtime.stages[after].from_upstream(self.stage.index, m.Advanced(frontier))

    # ------------------------------------------------------------ the stages before

    def from_upstream(self, origin: int, event: m.Local | m.Advanced | m.PassFence) -> None:
        """Handle an event from a stage before this one, in order, or hold it back behind a snapshot's barrier."""
        if self.alignment.waits(origin):
            self.alignment.wait(origin, event)
        elif isinstance(event, m.Advanced):
            self.upstream[origin] = event.value  # the earliest of all stages before is valid
            lowest = min(self.upstream.values())
            if lowest > self.latest_upstream:
                self.latest_upstream = lowest
                self.handle(m.Advanced(lowest))
        else:
            self.handle(event)

    def barrier(self, origin: int, snapshot: int) -> None:
        """Handle a snapshot's barrier from a stage before, or, in a stage that reads, from the controller."""
        if not self.alignment.barrier(origin, snapshot):
            return
        self.handle(m.StartSnapshot(snapshot))
        for sender, event in self.alignment.release():
            self.from_upstream(sender, event)

    def list_parts(self, now: int) -> None:
        """Report the new parts of the source, in a stage that reads."""
        reading = self.operators.reading
        assert reading is not None
        if self.distributor.local == MAX:
            return
        reading.now = now
        with reading.calling("partitions"):
            new_parts = []
            for part in reading.source.partitions():
                check_part(part)
                if part not in self.listed:
                    new_parts.append(part)
            batch = RowBatch.keyed(new_parts, [None] * len(new_parts), now)
        if new_parts:
            self.listed.update(dict.fromkeys(new_parts))
            self.handle(m.Local(batch))
        if self._compares_parts:
            self._compares_parts = False
            unfinished = [part for part in reading.loaded_keys if not reading.is_finished(part)]
            warning = missing_parts(reading.step, unfinished, self.listed)
            if warning:
                self.runtime.environment.warn(warning, warning)
        self.end_listing(MAX if reading.source.bounded else LAST)

    def end_listing(self, frontier: int = MAX) -> None:
        """Report that this worker lists no further parts (`LAST`: it may list some)."""
        if frontier > self.distributor.local:
            self.handle(m.Advanced(frontier))

    def tell_bound(self, now: int) -> None:
        """Report the watermark of what is read here, in a stage that reads."""
        reading = self.operators.reading
        if reading is not None:
            bound = reading.bound(now, self.distributor.frontiers.announced)
            # In flows without timers only the end of the input matters.
            if bound != self.distributor.bound and (self.runtime.timed or bound == MAX):
                self.handle(m.Bound(bound))

    # ------------------------------------------------------------ moving keys

    @property
    def counting(self) -> bool:
        """Return whether the keys that have to move are being counted."""
        return self._census is not None

    def busy(self, has_room: Callable[[], bool]) -> bool:
        """Return whether a piece of long work can be done now. Keys move while there is room to send them."""
        return self.counting or (self.distributor.movable and has_room())

    def step(self) -> None:
        """Do a piece of long work."""
        if self._census is not None:
            self._count()
            return
        clock = self.runtime.environment.clock
        keys, began = self._chunk, clock()
        self.handle(m.Move(keys))
        elapsed_us = max(1, clock() - began)
        key_bytes = max(1, self.moved_bytes // max(1, self.moved_keys))
        most = min(CHUNK_KEYS, CHUNK_BYTES // key_bytes, keys * CHUNK_TIME_US // elapsed_us)
        self._chunk = max(MIN_CHUNK_KEYS if key_bytes * MIN_CHUNK_KEYS <= CHUNK_BYTES else 1, most)

    @property
    def givers_per_taker(self) -> float:
        """Return by how much to slow down where many workers give keys to few, which cannot limit them."""
        migration = self.distributor.migration_now()
        old, new = set(migration.old.workers), set(migration.new.workers)
        givers, takers = old - new or old, new - old or new
        return max(1.0, len(givers) / len(takers))

    def _start_census(self) -> None:
        self.moved_keys = self.moved_bytes = self.moving_keys = self.taken_keys = 0
        self.longest_hold = 0
        self.leaving, self._counted = LeavingKeys(), ()
        migration = self.distributor.migration_now()
        self._census = self._blocks() if migration.any_leaves(self.distributor.worker) else iter(())

    def _blocks(self) -> Iterator[tuple[list[Any], tuple[Keyed, ...]]]:
        """Yield the keys of all operators in blocks, each with the operators that were counted before.

        All present keys of the first operator will be noted, so it counts as soon as they are listed. Of a further
        operator only those keys will be noted that none before it has when their block comes.
        """
        for operator in self.operators.keyed:
            before = self._counted
            blocks = operator.census()
            self._counted = before or (operator,)
            for keys in blocks:
                yield keys, before
            self._counted = (*before, operator)

    def _count(self) -> None:
        """Find the keys of the next block that have to move."""
        assert self._census is not None
        block = next(self._census, None)
        if block is not None:
            keys, before = block
            with KeyCalls(self.stage.name, keys):
                hashes = hash_keys(keys)
                rows = self._rows_to_move(hashes).tolist()
                for operator in before:
                    operator.store.fetch(keys)
                if before:
                    rows = [row for row in rows if not _has_state(keys[row], before)]
            self.leaving.note(hashes[rows], [keys[row] for row in rows])
            return
        self._census = None
        # Sorting many keys takes long, so another thread does it while records flow.
        self.runtime.environment.background(
            partial(Order.of, self.leaving.found_hashes), self._order_keys
        )

    def _order_keys(self, order: Order | None, error: Exception | None) -> None:
        """Tell the distributor the sorted keys that have to move."""
        if order is None:
            assert error is not None
            raise error
        self.leaving.name(order)
        self.handle(m.Interrogated(order))
        if isinstance(self.distributor.phase, Collect):
            self.moving_keys = len(self.distributor.phase.order)

    def _rows_to_move(self, hashes: Hashes) -> NDArray[np.intp]:
        """Return the rows of the keys that have to move."""
        migration = self.distributor.migration_now()
        return np.flatnonzero(migration.leaving(self.distributor.worker, hashes))

    def _note_new(self, batch: RowBatch) -> None:
        """Note keys that records bring while keys are counted, because they may be new here and have to move.

        New keys may come later too, if one has the hash of a key that has not left yet: both leave together.

        A key of an operator that has been counted is always noted: it was there when the operator was counted; or a
        record brought it since, and it was noted here; or a timer of an earlier operator brought it, which had the key
        and was counted before. So neither this function nor the count of a further operator needs to note it again.
        """
        keys, counted = batch.keys, self._counted
        assert keys is not None
        with KeyCalls(self.stage.name, keys) as call:
            for operator in counted:
                operator.store.fetch(keys)
            if not counted or all(map(counted[0].states.__contains__, call.walk())):
                return
            call.walked()
            moving = self._rows_to_move(batch.hashes).tolist()
            new = [row for row in moving if not _has_state(keys[row], counted)]
            self.leaving.note_late(batch.hashes[new], [keys[row] for row in new])

    def _collect(self, keys: list[Any], frontier: int) -> bytes:
        """Return the states of these keys from every operator, as bytes."""
        for operator in self.operators.keyed:
            operator.advance_keys(keys, frontier, self.latest)
        reached = max((operator.reached() for operator in self.operators.keyed), default=MIN)
        if frontier < LAST:
            reached = max(reached, frontier)
        parts = [_SENT.pack(self.runtime.environment.clock(), reached)]
        for operator in self.operators.keyed:
            part = operator.collect(keys)
            parts += [_PART.pack(len(part)), part]
        packed = b"".join(parts)
        self.moved_bytes += len(packed)
        return packed

    def _take(self, state: bytes) -> None:
        view = memoryview(state)
        sent, reached = _SENT.unpack_from(view)
        at = _SENT.size
        most = 0
        for operator in self.operators.keyed:
            (length,) = _PART.unpack_from(view, at)
            at += _PART.size
            keys = operator.take(view[at : at + length])
            operator.restore_keys(keys, reached)
            most = max(most, len(keys))
            at += length
        self.runtime.environment.keep()
        self.taken_keys += most
        self.longest_hold = max(self.longest_hold, self.runtime.environment.clock() - sent)

    # ------------------------------------------------------------ status

    @property
    def keys(self) -> int:
        """Return the number of keys that have state here."""
        return max((len(operator.store) for operator in self.operators.keyed), default=0)

    def close(self) -> None:
        """Close sources and sinks; an error of one does not keep the others open."""
        with contextlib.ExitStack() as closing:  # closes in reverse order
            for writing in reversed(self.operators.writing):
                closing.callback(writing.close)
                closing.callback(writing.flush)
            if self.operators.reading is not None:
                closing.callback(self.operators.reading.close)


def _has_state(key: Any, operators: Iterable[Keyed]) -> bool:
    return any(key in operator.states for operator in operators)
