"""Hold back what reaches the new owner of a key until it may be processed (rules 3, 8 and 12).

Each arrival passes up to three *gates*, in this order; a gate opens once and stays open:

1. **Flushed(A, C)**, for a record that came directly (NEW) from C: earlier records may still be under way through the
   key's home A. A's `Flushed(C)`, on the link from A, says that they have all arrived.
2. **Fence 0 of A**, for every record: the home's outputs for a key that left no state behind may still be on their
   way to the next stage. A fence is open when every worker of the next stages has confirmed it.
3. **The fence of a chunk of A**, for the state of its keys and for their records, likewise.

Where no stage follows there are no fences. An arrival that finds a gate shut waits in a line before it, and goes on to
the next gate when it opens: so an event looks only at the arrivals it releases. Within a line nothing overtakes. A
direct record joins the line before a fence only after all records its sender sent through the home, because Flushed is
its first gate: records that went through the home are older, even if they came later.

Keys leave their home in no order of their hashes; `chunks.py` looks up the chunk a key came with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from railgun.engine.protocol.batch import Batch, select, split
from railgun.engine.protocol.frontier import MAX, MIN
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale.chunks import Chunks
from railgun.engine.protocol.rescale.messages import Acquire
from railgun.errors import ProtocolError

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Gate(NamedTuple):
    """A gate that arrivals wait at: `kind` is "flushed" (of a sender) or "fence" (of a chunk)."""

    kind: str
    home: Worker
    of: int


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Waiting records of one home, and the worker that sent them directly (None: forwarded)."""

    origin: Worker | None
    batch: Batch
    frontier: int


class Line:
    """The arrivals that wait at one gate, in order, and the frontier that must not be passed meanwhile."""

    __slots__ = ("entries", "lowest")

    def __init__(self) -> None:
        self.entries: list[Acquire | Records] = []
        self.lowest = MAX


class Arrivals:
    """The new owner's side of one migration at one worker."""

    __slots__ = (
        "awaited", "confirmations", "confirmed", "fenced", "flushed", "homes", "lines", "lowest_held",
        "members", "old",
    )  # fmt: skip

    def __init__(
        self, me: Worker, old: Placement, members: tuple[Worker, ...], confirmations: int
    ) -> None:
        self.old = old
        self.homes = tuple(home for home in old.workers if home != me)
        self.members = members
        self.confirmations = confirmations
        self.confirmed: dict[tuple[Worker, int], int] = {}
        self.flushed: dict[Worker, set[Worker]] = {home: set() for home in self.homes}
        gates = len(members) + (confirmations > 0)  # per home: Flushed of all senders, and fence 0
        self.awaited = len(self.homes) * gates
        self.lines: dict[Gate, Line] = {}
        self.fenced: dict[Worker, Chunks] = {home: Chunks(home) for home in self.homes}
        self.lowest_held = MAX

    # -------------------------------------------------------- what arrives

    def on_acquire(self, worker: Machine, home: Worker, acquire: Acquire) -> None:
        """Take the state of keys from their home, or let it wait for its fence."""
        if self.open(home, acquire.chunk):
            worker.take(acquire)
            return
        self.fenced[home].add(acquire.chunk, acquire.hashes)
        lowest = worker.frontiers.relayed.get(home, MIN)
        self._line_up(Gate("fence", home, acquire.chunk), acquire, lowest)

    def on_forward(self, worker: Machine, home: Worker, batch: Batch) -> None:
        """Take FWD records from the home of their keys: the keys' state, if any, came before them."""
        lowest = worker.frontiers.relayed.get(home, MIN)
        self._admit(worker, home, Records(None, batch, lowest))

    def on_new(self, worker: Machine, origin: Worker, batch: Batch) -> None:
        """Take NEW records directly from their sender."""
        shut = [home for home in self.homes if self.fenced[home] or self.gate(home, origin)]
        if not shut:
            worker.process(batch)
            return
        lowest = worker.frontiers.senders.get(origin, MIN)
        homes = self.old.owners(batch.hashes)
        held = np.zeros(len(batch), dtype=bool)
        for home in shut:
            held |= homes == home
        now = select(batch, ~held)
        if now is not None:
            worker.process(now)
        later = select(batch, held)
        if later is not None:
            for home, part in split(later, homes[held]):
                self._admit(worker, home, Records(origin, part, lowest))

    def on_flushed(self, worker: Machine, home: Worker, origin: Worker) -> None:
        """Open the gate of `origin` at `home`: all records sent that way have arrived.

        Raise `ProtocolError` if the gate is open already.
        """
        if origin in self.flushed[home]:
            raise ProtocolError(f"{worker}: worker {home} sent Flushed({origin}) twice")
        self.flushed[home].add(origin)
        self.awaited -= 1
        self._release(worker, Gate("flushed", home, origin))

    def on_fenced(self, worker: Machine, home: Worker, chunk: int) -> None:
        """Count a confirmation of a chunk's fence by one worker of a following stage; open the fence at the last."""
        count = self.confirmed.get((home, chunk), 0) + 1
        if count > self.confirmations:
            raise ProtocolError(
                f"{worker}: the fence {chunk} of worker {home} was confirmed too often"
            )
        self.confirmed[home, chunk] = count
        if count == self.confirmations:
            self.awaited -= chunk == 0
            self._release(worker, Gate("fence", home, chunk))

    # -------------------------------------------------------- what may go on

    def open(self, home: Worker, chunk: int) -> bool:
        """Return whether a chunk's fence is open: everything the home emitted for its keys is confirmed."""
        return self.confirmed.get((home, chunk), 0) == self.confirmations

    def gate(self, home: Worker, origin: Worker | None) -> Gate | None:
        """Return the first shut gate for all records of `home` from `origin`, or None; chunk gates come after it."""
        if origin is not None and origin not in self.flushed[home]:
            return Gate("flushed", home, origin)
        return None if self.open(home, 0) else Gate("fence", home, 0)

    def _admit(self, worker: Machine, home: Worker, records: Records) -> None:
        """Process the records that may be processed now; let the others wait."""
        gate = self.gate(home, records.origin)
        if gate is not None:
            self._line_up(gate, records, records.frontier)
        elif not self.fenced[home]:
            worker.process(records.batch)
        else:
            for chunk, part in split(records.batch, self.fenced[home].of(records.batch.hashes)):
                if chunk == 0:
                    worker.process(part)
                else:
                    waiting = Records(records.origin, part, records.frontier)
                    self._line_up(Gate("fence", home, chunk), waiting, records.frontier)

    def _line_up(self, gate: Gate, entry: Acquire | Records, frontier: int) -> None:
        line = self.lines.setdefault(gate, Line())
        line.entries.append(entry)
        line.lowest = min(line.lowest, frontier)
        self.lowest_held = min(self.lowest_held, frontier)

    def _release(self, worker: Machine, gate: Gate) -> None:
        """Let the arrivals that waited at a gate go on, in order."""
        line = self.lines.pop(gate, None)
        if line is None:
            return
        if line.lowest == self.lowest_held:
            self.lowest_held = min(
                (line_left.lowest for line_left in self.lines.values()), default=MAX
            )
        for entry in line.entries:
            if isinstance(entry, Acquire):
                self.fenced[gate.home].remove(entry.chunk)
                worker.take(entry)
            elif gate.kind == "fence" and gate.of > 0:
                worker.process(entry.batch)  # this was the last gate
            else:
                self._admit(worker, gate.home, entry)

    # -------------------------------------------------------- what the worker reads

    @property
    def empty(self) -> bool:
        """Return whether no arrival waits."""
        return not self.lines

    @property
    def records(self) -> int:
        """Return how many records wait."""
        lines = (entry for line in self.lines.values() for entry in line.entries)
        return sum(len(entry.batch) for entry in lines if isinstance(entry, Records))

    @property
    def lowest(self) -> int:
        """Return the highest frontier that does not overtake a waiting arrival."""
        return self.lowest_held

    def finished(self, home: Worker) -> bool:
        """Return whether no message can come by way of this home any more."""
        return len(self.flushed[home]) == len(self.members)

    @property
    def complete(self) -> bool:
        """Return whether every home is finished, every fence confirmed, and no arrival waits."""
        return not self.awaited and not self.lines

    def validate(self) -> None:
        """Check the invariants: no arrival waits at an open gate, and the counts are right."""
        for gate, line in self.lines.items():
            assert line.entries
            if gate.kind == "flushed":
                assert gate.of not in self.flushed[gate.home], "waits in vain"
            else:
                assert not self.open(gate.home, gate.of), "waits in vain"
            for entry in line.entries:
                if isinstance(entry, Records):
                    assert bool((self.old.owners(entry.batch.hashes) == gate.home).all())
        assert self.lowest_held == min((line.lowest for line in self.lines.values()), default=MAX)
        flushes = sum(len(self.members) - len(origins) for origins in self.flushed.values())
        assert self.awaited == flushes + sum(not self.open(home, 0) for home in self.homes)
        for home in self.homes:
            self.fenced[home].validate()
