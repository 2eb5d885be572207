"""Arrivals: what reaches the new owner of a key, and when it may be processed (rules 3, 8 and 12).

A record waits here for one of two reasons:

- It came directly (NEW) from a sender whose earlier records may still be under way through the key's home A.
  `Flushed(A, sender)` on the link from A says that they have all arrived.
- The home's outputs for its key may still be under way to the next stage. Every worker of the next stages
  confirms the home's fence; until all have, state and records of the chunk wait (`chunk 0`: keys that came
  without state). Where no stage follows there are no fences.

What waits leaves in the order it came, forwarded records before direct ones: whatever a sender sent through
the home is older than what it sends directly, even if that came first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from railgun.core.batch import Batch, select
from railgun.core.errors import ProtocolError
from railgun.core.frontier import MAX, MIN
from railgun.core.hashing import Hashes
from railgun.core.placement import Placement, Worker
from railgun.core.rescale.messages import Acquire

if TYPE_CHECKING:
    from railgun.core.rescale.machine import Machine


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Records that wait, who sent them directly (None: forwarded), and how far time may go meanwhile."""

    origin: Worker | None
    batch: Batch
    frontier: int


@dataclass(frozen=True, slots=True, eq=False)
class Fenced:
    """State that waits for the fence of its chunk."""

    home: Worker
    acquire: Acquire
    frontier: int


class Arrivals:
    """The new owner's side of one migration at one worker."""

    __slots__ = (
        "confirmations",
        "confirmed",
        "direct",
        "fenced",
        "flushed",
        "forwarded",
        "homes",
        "old",
    )

    def __init__(self, me: Worker, old: Placement, confirmations: int) -> None:
        self.old = old
        self.homes = tuple(home for home in old.workers if home != me)
        self.confirmations = confirmations
        self.confirmed: dict[tuple[Worker, int], int] = {}
        self.flushed: set[tuple[Worker, Worker]] = set()
        self.forwarded: list[Waiting] = []
        self.direct: list[Waiting] = []
        self.fenced: list[Fenced] = []

    # -------------------------------------------------------- what arrives

    def on_acquire(self, worker: Machine, home: Worker, acquire: Acquire) -> None:
        """State of keys, from their home."""
        if self.open(home, acquire.chunk):
            worker.take(acquire)
        else:
            lowest = worker.frontiers.relayed.get(home, MIN)
            self.fenced.append(Fenced(home, acquire, lowest))

    def on_forward(self, worker: Machine, home: Worker, batch: Batch) -> None:
        """FWD records, from the home of their keys: the state came before them, if there is any."""
        lowest = worker.frontiers.relayed.get(home, MIN)
        self._admit(worker, Waiting(None, batch, lowest))

    def on_new(self, worker: Machine, origin: Worker, batch: Batch) -> None:
        """NEW records, directly from their sender."""
        lowest = worker.frontiers.senders.get(origin, MIN)
        self._admit(worker, Waiting(origin, batch, lowest))

    def on_flushed(self, worker: Machine, home: Worker, origin: Worker) -> None:
        """All that `origin` sent through `home` has arrived."""
        if (home, origin) in self.flushed:
            raise ProtocolError(f"{worker}: worker {home} sent Flushed({origin}) twice")
        self.flushed.add((home, origin))
        self.release(worker)

    def on_fenced(self, worker: Machine, home: Worker, chunk: int) -> None:
        """One worker of one next stage has seen the fence of a chunk."""
        count = self.confirmed.get((home, chunk), 0) + 1
        if count > self.confirmations:
            raise ProtocolError(
                f"{worker}: the fence {chunk} of worker {home} was confirmed too often"
            )
        self.confirmed[home, chunk] = count
        if count == self.confirmations:
            self.release(worker)

    # -------------------------------------------------------- what may go on

    def open(self, home: Worker, chunk: int) -> bool:
        """Whether everything the home emitted for the keys of a chunk is ordered."""
        return self.confirmed.get((home, chunk), 0) == self.confirmations

    def ready(self, origin: Worker | None, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these keys' records, from this origin, may be processed now."""
        ready = np.ones(len(hashes), dtype=bool)
        owners = self.old.owners(hashes)
        for home in self.homes:
            flushed = origin is None or (home, origin) in self.flushed
            behind = [fenced.acquire.hashes for fenced in self.fenced if fenced.home == home]
            if not flushed or not self.open(home, 0):
                ready &= owners != home
            elif behind:
                ready &= ~np.isin(hashes, np.concatenate(behind))
        return ready

    def release(self, worker: Machine) -> None:
        """Let go on what no longer has to wait, in order."""
        fenced, self.fenced = self.fenced, []
        for entry in fenced:
            if self.open(entry.home, entry.acquire.chunk):
                worker.take(entry.acquire)
            else:
                self.fenced.append(entry)
        waiting, self.forwarded, self.direct = self.in_order(), [], []
        for record in waiting:
            self._admit(worker, record)

    def in_order(self) -> list[Waiting]:
        """What waits, in the order it has to be processed."""
        return self.forwarded + self.direct

    def _admit(self, worker: Machine, record: Waiting) -> None:
        ready = self.ready(record.origin, record.batch.hashes)
        now = select(record.batch, ready)
        if now is not None:
            worker.process(now)
        later = select(record.batch, ~ready)
        if later is not None:
            line = self.forwarded if record.origin is None else self.direct
            line.append(Waiting(record.origin, later, record.frontier))

    # -------------------------------------------------------- what the worker asks

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self.forwarded and not self.direct and not self.fenced

    @property
    def lowest(self) -> int:
        """How far time may go without overtaking something that waits."""
        if self.empty:
            return MAX
        held = [entry.frontier for entry in self.in_order()]
        return min(held + [entry.frontier for entry in self.fenced], default=MAX)

    def finished(self, home: Worker, members: tuple[Worker, ...]) -> bool:
        """Whether nothing can come by way of this home any more."""
        return all((home, origin) in self.flushed for origin in members)

    def complete(self, members: tuple[Worker, ...]) -> bool:
        """Whether every home is finished, every fence confirmed, and nothing waits."""
        return self.empty and all(
            self.finished(home, members) and self.open(home, 0) for home in self.homes
        )
