"""A stage at work on one worker: carries out what its distributor commands.

The distributor decides, the operators compute, and this is what stands between them: a driver with the duties that are
numbered in `core.rescale.messages`. Nothing here waits: long work (counting the keys that have to move, moving them) is
done in pieces, by `step`, between which records flow.
"""

from __future__ import annotations

import gc
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.core.errors import ProtocolError
from railgun.core.frontier import LAST, MAX, MIN
from railgun.core.hashing import Hashes, hash_keys
from railgun.core.placement import Placement
from railgun.core.rescale import messages as m
from railgun.core.rescale.collect import Collect
from railgun.core.rescale.distributor import Distributor
from railgun.core.rescale.interrogate import Interrogate
from railgun.flow.operators.keyed import Index, Keyed
from railgun.flow.plan import Operators, Stage
from railgun.wire.rows import RowBatch

if TYPE_CHECKING:
    from railgun.worker.runtime import Runtime

CHUNK_KEYS: Final = 1_000  # at most at once; and
CHUNK_BYTES: Final = 64 << 10
CHUNK_TIME: Final = 800  # µs
FEWEST: Final = 50  # keys at least at once, unless they are large
_PART: Final = struct.Struct("<I")
_SENT: Final = struct.Struct("<q")


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
        self._census: Iterator[tuple[Keyed, list[Any]]] | None = None
        self._found: list[Hashes] = []

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
                for command in self.distributor.handle(event):
                    self._carry_out(command)
        finally:
            self._busy = False

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Process(batch):
                assert isinstance(batch, RowBatch)
                self._process(batch)
            case m.Send(to, message):
                self.runtime.send(to, self.stage.index, message)
            case m.Interrogate():
                self._start_census()
            case m.Collect(parts, frontier):
                states = tuple(self._collect(hashes, frontier) for _, hashes in parts)
                self._events.appendleft(m.Collected(states))
            case m.Take(_, state):
                self._take(state)
            case m.Drop():
                pass  # state was taken out when it was collected
            case m.RaiseFence(fence):
                self.flush_outlets()
                for after in self.stage.after:
                    self.runtime.stages[after].handle(m.PassFence(fence))
            case m.Confirm(to, stage, message):
                self.runtime.confirm(to, stage, message)
            case m.Advance(frontier):
                self._advance(frontier)
            case m.Completed():
                for operator in self.operators.keyed:
                    operator.index = Index()
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
            self.runtime.stages[after].upstream_advanced(self.stage.index, frontier)

    def upstream_advanced(self, stage: int, frontier: int) -> None:
        """A stage before this one has come to a time; the earliest of them all counts."""
        self.upstream[stage] = frontier
        lowest = min(self.upstream.values())
        if lowest > self.distributor.local:
            self.handle(m.Advanced(lowest))

    def list_parts(self, now: int) -> None:
        """For a stage that reads: tell of the parts of the source that are there now."""
        reading = self.operators.reading
        assert reading is not None
        if self.distributor.local == MAX:
            return
        reading.now = now
        fresh = [part for part in reading.source.partitions() if part not in self.listed]
        if fresh:
            self.listed.update(dict.fromkeys(fresh))
            self.handle(m.Local(RowBatch.keyed(fresh, [None] * len(fresh), now)))
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
        """By how much to slow down where many give keys to few: to take one costs 0.4 of what it costs to give it."""
        migration = self.distributor.migration_now()
        old, new = set(migration.old.workers), set(migration.new.workers)
        givers, takers = old - new or old, new - old or new
        return max(1.0, 0.4 * len(givers) / len(takers))

    def _start_census(self) -> None:
        self.moved_keys = self.moved_bytes = self.moving_keys = self.taken_keys = 0
        self.longest_hold = 0
        self._found = []
        self._census = ((op, keys) for op in self.operators.keyed for keys in op.census())

    def _count(self) -> None:
        """Look at a block of keys: which have to move?"""
        assert self._census is not None
        block = next(self._census, None)
        if block is not None:
            operator, keys = block
            hashes = hash_keys(keys)
            moving = self._moving(hashes)
            if len(moving):
                operator.index.note(hashes[moving], [keys[row] for row in moving.tolist()])
                self._found.append(hashes[moving])
            return
        self._census = None
        found = np.concatenate(self._found) if self._found else np.empty(0, dtype=np.uint64)
        self._found = []
        self.handle(m.Interrogated(found))
        if isinstance(self.distributor.phase, Collect):
            self.moving_keys = len(self.distributor.phase.keys)

    def _moving(self, hashes: Hashes) -> NDArray[np.intp]:
        """Which of these keys have to move."""
        new: Placement = self.distributor.migration_now().new
        return np.flatnonzero(new.owners(hashes) != self.distributor.worker)

    def _note_new(self, batch: RowBatch) -> None:
        """Records that come while keys are counted may be of keys that are not there yet.

        So may those that come later, if the new key has the hash of one that has not left yet: they leave together.
        """
        keys = batch.keys
        assert keys is not None
        for operator in self.operators.keyed:
            operator.store.fetch(keys)
            if all(map(operator.states.__contains__, keys)):
                continue
            moving = self._moving(batch.hashes)
            new = [row for row in moving.tolist() if keys[row] not in operator.states]
            operator.index.note_late(batch.hashes[new], [keys[row] for row in new])

    def _collect(self, hashes: Hashes, frontier: int) -> bytes:
        """The state of these keys, from every operator, as bytes."""
        parts = [_SENT.pack(self.runtime.outside.clock())]
        keyed = self.operators.keyed
        # A timer of one operator may make state in the next one: the keys of all are those of each.
        keys = keyed[0].index.pop(hashes) if keyed else []
        if len(keyed) > 1:
            more = (key for operator in keyed[1:] for key in operator.index.pop(hashes))
            keys = list(dict.fromkeys([*keys, *more]))
        for operator in keyed:
            operator.advance_keys(keys, frontier, self.latest)
        for operator in keyed:
            part = operator.collect(keys)
            parts += [_PART.pack(len(part)), part]
        packed = b"".join(parts)
        self.moved_keys += len(hashes)
        self.moved_bytes += len(packed)
        return packed

    def _take(self, state: bytes) -> None:
        view = memoryview(state)
        (sent,) = _SENT.unpack_from(view)
        at = _SENT.size
        most = 0
        for operator in self.operators.keyed:
            (length,) = _PART.unpack_from(view, at)
            at += _PART.size
            most = max(most, len(operator.take(view[at : at + length])))
            at += length
        gc.freeze()  # state is here to stay: the collector need not look through it
        self.taken_keys += most
        self.longest_hold = max(self.longest_hold, self.runtime.outside.clock() - sent)

    # ------------------------------------------------------------ what the worker asks

    @property
    def keys(self) -> int:
        """How many keys have state here."""
        return max((len(operator.store) for operator in self.operators.keyed), default=0)

    def close(self) -> None:
        """Let go of files and sockets."""
        if self.operators.reading is not None:
            self.operators.reading.close()
        for writing in self.operators.writing:
            writing.flush()
            writing.writer.close()
