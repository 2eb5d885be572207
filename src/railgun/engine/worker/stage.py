"""A stage at work on one worker: carries out what its distributor commands.

The distributor decides, the operators compute, and this is what stands between them: a driver with the duties that are
numbered in `engine.protocol.rescale.messages`. Nothing here waits: long work (counting the keys that have to move,
moving them) is done in pieces, by `step`, between which records flow.
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
from railgun.engine.operators.keyed import Keyed, Leaving
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

CHUNK_KEYS: Final = 1_000  # at most at once; and
CHUNK_BYTES: Final = 64 << 10
CHUNK_TIME: Final = 800  # µs
FEWEST: Final = 50  # keys at least at once, unless they are large
_PART: Final = struct.Struct("<I")
_SENT: Final = struct.Struct("<qq")  # when, and how far time had come for these keys


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
        self.upstream = dict.fromkeys(stage.before, MIN)  # frontiers of the stages before
        self.latest_upstream = MIN  # the earliest of them, when it was last told
        self.alignment: Alignment[m.Local | m.Advanced | m.PassFence] = Alignment(stage.before)
        self.latest = MIN  # how far time has come anywhere, as far as is known here
        self.listed: dict[Any, None] = {}  # parts of a source this worker has told of
        self.records = 0
        self.moved_keys = 0  # in the present or last move
        self.moved_bytes = 0
        self.moving_keys = 0
        self.taken_keys = 0
        self.longest_hold = 0
        self._chunk = CHUNK_KEYS // 10  # keys to move next
        self._events: deque[m.Event] = deque()
        self._busy = False
        self.leaving = Leaving()
        # Operators whose keys and states nobody has looked at yet; parts of a source that were saved.
        self._made: dict[Keyed, KeyTypeCheck] = {}  # by step of which the first state was looked at
        self._unseen = [op for op in operators.keyed if type(op).packed is Keyed.packed]
        self._compares_parts = True
        self._census: Iterator[tuple[list[Any], tuple[Keyed, ...]]] | None = None
        self._counted: tuple[Keyed, ...] = ()  # operators whose keys have all been noted

    # ------------------------------------------------------------ events and commands

    def handle(self, event: m.Event) -> None:
        """Give an event to the distributor, and carry out its commands; in turn, if one is being handled."""
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
                    self._meet_keys(event)
                for command in self.distributor.handle(event):
                    self._carry_out(command)
        finally:
            self._busy = False

    def _meet_keys(self, rescale: m.Rescale) -> None:
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
                what = self.stage.name, "pickle of records", "record"
                with ValueCalls(*what, values, owners=keys) as call:
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
                        self.leaving.pop(hashes, some)
                        for (_, hashes), some in zip(parts, turns, strict=True)
                    ]
                states = [self._collect(keys, frontier) for keys in leaving]
                self.moved_keys += sum(len(hashes) for _, hashes in parts)
                self._events.appendleft(m.Collected(tuple(states)))
            case m.Take(_, state):
                self._take(state)
            case m.Drop():
                pass  # state was taken out when it was collected
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
                self.leaving, self._counted = Leaving(), ()
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
        if self._unseen:
            self._look_at_first(batch)

    def _look_at_first(self, batch: RowBatch) -> None:
        """Look at the first keys and states of each step: are they as in the snapshot, and can they be pickled?

        Raises `UnpicklableStateError`: what fails at the first snapshot or rescale had better fail now.
        """
        keys = batch.keys or []
        for operator in list(self._unseen):
            made = self._made.get(operator)
            if made is None:
                with KeyCalls(operator.step, keys):
                    found = list(islice((key for key in keys if key in operator.states), 1))
                if not found:
                    continue
                key = found[0]  # which may be None
                operator.check_state(key, operator.states[key])
                made = self._made[operator] = KeyTypeCheck(operator.step, operator.loaded_keys)
                operator.loaded_keys = []
            with KeyCalls(operator.step, keys):
                others = made.warnings(keys, operator.states.__contains__)
            for kind, told in others.items():
                self.runtime.outside.warn(told, f"keys of step {operator.step!r}: {kind}")
            if not made.left:
                self._unseen.remove(operator)

    def flush_outlets(self) -> bool:
        """Hand on what was keyed for the stages that follow, ahead of anything else that goes to them."""
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
        """What a stage before this one sends, in order; behind a barrier it waits for those of the others."""
        if self.alignment.waits(origin):
            self.alignment.wait(origin, event)
        elif isinstance(event, m.Advanced):
            self.upstream[origin] = event.value  # the earliest of them all counts
            lowest = min(self.upstream.values())
            if lowest > self.latest_upstream:
                self.latest_upstream = lowest
                self.handle(m.Advanced(lowest))
        else:
            self.handle(event)

    def barrier(self, origin: int, snapshot: int) -> None:
        """The barrier of a snapshot, from a stage before; for a stage that reads, from the controller."""
        if not self.alignment.barrier(origin, snapshot):
            return
        self.handle(m.StartSnapshot(snapshot))
        for waited, event in self.alignment.release():
            self.from_upstream(waited, event)

    def list_parts(self, now: int) -> None:
        """For a stage that reads: tell of the parts of the source that are there now."""
        reading = self.operators.reading
        assert reading is not None
        if self.distributor.local == MAX:
            return
        reading.now = now
        with reading.calling("partitions"):
            fresh = []
            for part in reading.source.partitions():
                check_part(part)
                if part not in self.listed:
                    fresh.append(part)
            batch = RowBatch.keyed(fresh, [None] * len(fresh), now)
        if fresh:
            self.listed.update(dict.fromkeys(fresh))
            self.handle(m.Local(batch))
        if self._compares_parts:
            self._compares_parts = False
            unfinished = [part for part in reading.loaded_keys if not reading.is_finished(part)]
            told = missing_parts(reading.step, unfinished, self.listed)
            if told:
                self.runtime.outside.warn(told, told)
        self.end_listing(MAX if reading.source.bounded else LAST)

    def end_listing(self, frontier: int = MAX) -> None:
        """No further parts will be told of by this worker (`LAST`: perhaps)."""
        if frontier > self.distributor.local:
            self.handle(m.Advanced(frontier))

    def tell_bound(self, now: int) -> None:
        """For a stage that reads: tell how far time has come in what is read here."""
        reading = self.operators.reading
        if reading is not None:
            bound = reading.bound(now, self.distributor.frontiers.told)
            # Where nobody sets timers, only the end of time is of interest.
            if bound != self.distributor.bound and (self.runtime.timed or bound == MAX):
                self.handle(m.Bound(bound))

    # ------------------------------------------------------------ moving keys

    @property
    def counting(self) -> bool:
        """Whether the keys that have to move are being counted."""
        return self._census is not None

    def busy(self, calm: Callable[[], bool]) -> bool:
        """Whether a piece of long work can be done now; keys move when there is room to send them."""
        return self.counting or (self.distributor.movable and calm())

    def step(self) -> None:
        """Do a piece of long work."""
        if self._census is not None:
            self._count()
            return
        clock = self.runtime.outside.clock
        keys, began = self._chunk, clock()
        self.handle(m.Move(keys))
        took = max(1, clock() - began)
        each = max(1, self.moved_bytes // max(1, self.moved_keys))
        most = min(CHUNK_KEYS, CHUNK_BYTES // each, keys * CHUNK_TIME // took)
        self._chunk = max(FEWEST if each * FEWEST <= CHUNK_BYTES else 1, most)

    @property
    def crowd(self) -> float:
        """By how much to slow down where many give keys to few: who takes them cannot say how fast."""
        migration = self.distributor.migration_now()
        old, new = set(migration.old.workers), set(migration.new.workers)
        givers, takers = old - new or old, new - old or new
        return max(1.0, len(givers) / len(takers))

    def _start_census(self) -> None:
        self.moved_keys = self.moved_bytes = self.moving_keys = self.taken_keys = 0
        self.longest_hold = 0
        self.leaving, self._counted = Leaving(), ()
        migration = self.distributor.migration_now()
        self._census = self._blocks() if migration.any_leaves(self.distributor.worker) else iter(())

    def _blocks(self) -> Iterator[tuple[list[Any], tuple[Keyed, ...]]]:
        """The keys of all operators in blocks, and with each the operators that were counted before.

        Of the first one all keys will be noted that it has now, so it counts as soon as they are listed; of a further
        one only those that none before it has when their block comes.
        """
        for operator in self.operators.keyed:
            before = self._counted
            blocks = operator.census()
            self._counted = before or (operator,)
            for keys in blocks:
                yield keys, before
            self._counted = (*before, operator)

    def _count(self) -> None:
        """Look at a block of keys: which have to move?"""
        assert self._census is not None
        block = next(self._census, None)
        if block is not None:
            keys, before = block
            with KeyCalls(self.stage.name, keys):
                hashes = hash_keys(keys)
                rows = self._moving(hashes).tolist()
                for operator in before:
                    operator.store.fetch(keys)
                if before:
                    rows = [row for row in rows if not _has_state(keys[row], before)]
            self.leaving.note(hashes[rows], [keys[row] for row in rows])
            return
        self._census = None
        # To sort takes long, where keys are many: records flow meanwhile.
        self.runtime.outside.background(partial(Order.of, self.leaving.found), self._name)

    def _name(self, order: Order | None, error: Exception | None) -> None:
        """All keys that have to move are found, and sorted."""
        if order is None:
            assert error is not None
            raise error
        self.leaving.name(order)
        self.handle(m.Interrogated(order))
        if isinstance(self.distributor.phase, Collect):
            self.moving_keys = len(self.distributor.phase.order)

    def _moving(self, hashes: Hashes) -> NDArray[np.intp]:
        """Which of these keys have to move."""
        migration = self.distributor.migration_now()
        return np.flatnonzero(migration.leaving(self.distributor.worker, hashes))

    def _note_new(self, batch: RowBatch) -> None:
        """Records that come while keys are counted may be of keys that are not there yet.

        So may those that come later, if the new key has the hash of one that has not left yet: they leave together.

        A key that is in an operator which has been counted is noted, always: it was there when that one was counted; or
        it came with a record since, and was noted here; or a timer of an operator before brought it, which had it and
        was counted before. So neither this nor the count of a further operator need note it again.
        """
        keys, counted = batch.keys, self._counted
        assert keys is not None
        with KeyCalls(self.stage.name, keys) as call:
            for operator in counted:
                operator.store.fetch(keys)
            if not counted or all(map(counted[0].states.__contains__, call.walk())):
                return
            call.walked()
            moving = self._moving(batch.hashes).tolist()
            new = [row for row in moving if not _has_state(keys[row], counted)]
            self.leaving.note_late(batch.hashes[new], [keys[row] for row in new])

    def _collect(self, keys: list[Any], frontier: int) -> bytes:
        """The state of these keys, from every operator, as bytes."""
        for operator in self.operators.keyed:
            operator.advance_keys(keys, frontier, self.latest)
        reached = max((operator.reached() for operator in self.operators.keyed), default=MIN)
        if frontier < LAST:
            reached = max(reached, frontier)
        parts = [_SENT.pack(self.runtime.outside.clock(), reached)]
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
        self.runtime.outside.keep()
        self.taken_keys += most
        self.longest_hold = max(self.longest_hold, self.runtime.outside.clock() - sent)

    # ------------------------------------------------------------ what the worker asks

    @property
    def keys(self) -> int:
        """How many keys have state here."""
        return max((len(operator.store) for operator in self.operators.keyed), default=0)

    def close(self) -> None:
        """Let go of files and sockets; a source or sink that raises keeps no other."""
        with contextlib.ExitStack() as closing:  # the last one that is named is the first to go
            for writing in reversed(self.operators.writing):
                closing.callback(writing.close)
                closing.callback(writing.flush)
            if self.operators.reading is not None:
                closing.callback(self.operators.reading.close)


def _has_state(key: Any, operators: Iterable[Keyed]) -> bool:
    return any(key in operator.states for operator in operators)
