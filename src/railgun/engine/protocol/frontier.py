"""Track frontiers (watermarks): how far time has advanced at one worker of one stage.

A frontier `f` promises that no record with a time below `f` will be delivered any more. Its rules:

1. **Senders.** Every worker sends its own upstream's frontier to every worker of the stage, on the link its records
   travel, behind them. Without a migration a worker's frontier is the minimum over the senders.
2. **Homes.** During a migration a record can also come by way of its key's home. Every home *relays* the frontier of
   the records it may still forward; the minimum is over senders and unfinished homes. A home relays the minimum over
   its own senders, never its own frontier, so there is no cycle among homes.
3. **Held records.** A record that waits at its new owner keeps the frontier at the value its path had when the record
   came (`held`): a frontier never overtakes a held or forwarded record.
4. **The end.** `MAX` says that no records come any more and ends an operator. A home that still has keys to give away
   stays just below `MAX`, and so do the workers it may give keys to: a key ends once, at its last owner.
5. **Readers** emit on their own, at times of their own, and move from worker to worker. So all workers of a stage of
   readers share one frontier: the minimum over the times each of them may emit at (`Emissions`). It stands still while
   the stage moves, which for a handful of readers takes a moment, and goes on when all workers have reported again.
6. **Idle readers** delay no other reader. A worker whose readers are all idle reports `LAST`: the minimum is over the
   other workers. `LAST` is no promise: when its readers have records again, the worker's new report counts, though it
   is lower. If all workers report `LAST` the frontier stays where it is; only `MAX`, from all, ends the stage.
7. A frontier never goes back.
8. **Late records.** Whether a record is late is decided when it is read, by the records before it in the same part of
   the source (`late_rows`), and travels with the record. So it does not depend on how quickly parts are read, by how
   many workers, or where keys are. A frontier is never ahead of the bound that a record was judged by, unless the part
   was idle: so a record that is not late finds the windows of its time still open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.placement import Worker
from railgun.errors import ProtocolError

MIN: Final = -(1 << 63)
MAX: Final = (1 << 63) - 1
LAST: Final = MAX - 1
"""The highest frontier that does not end an operator."""


def late_rows(
    times: NDArray[np.int64], reached: int, lateness: int
) -> tuple[NDArray[np.int64] | None, int]:
    """Return which records of a part are late, given their times in order.

    A record is late if it is older than the bound of its part: the latest time before it, less the `lateness` allowed,
    or the bound that the part had `reached` before. Return the bound for each late record and `MIN` for the others
    (None: no record is late), and the bound that the part has reached with these records.

    >>> late_rows(np.array([10, 30, 15, 20, 31]), reached=MIN, lateness=10)[0].tolist() == [MIN, MIN, 20, MIN, MIN]
    True
    >>> late_rows(np.array([20, 25]), reached=20, lateness=10)
    (None, 20)
    """
    latest = np.maximum.accumulate(times)
    after = max(reached, int(latest[-1]) - lateness)
    if int(times.min()) >= after:
        return None, after
    bounds = np.empty_like(latest)
    bounds[0] = reached
    # No bound goes below MIN: the subtraction must not overflow.
    np.maximum(np.maximum(latest[:-1], MIN + lateness) - lateness, reached, out=bounds[1:])
    return late_by(times, bounds), after


def late_by(times: NDArray[np.int64] | int, bounds: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the bound of each record older than its bound, and `MIN` for the others; None if no record is older."""
    late = times < bounds
    return np.where(late, bounds, MIN) if late.any() else None


class Frontiers:
    """The frontiers one worker has received, by sender and by home, and the one it announced (`announced`)."""

    __slots__ = ("announced", "relayed", "senders")

    def __init__(self, members: Iterable[Worker]) -> None:
        self.senders: dict[Worker, int] = dict.fromkeys(sorted(members), MIN)
        self.relayed: dict[Worker, int] = {}
        self.announced = MIN

    def join(self, worker: Worker) -> None:
        """Add a worker that begins to send; the frontier stays where it is until that worker reports one."""
        self.senders.setdefault(worker, MIN)

    def leave(self, worker: Worker) -> None:
        """Remove a worker that will never send again."""
        self.senders.pop(worker, None)

    def sender(self, worker: Worker, value: int) -> None:
        """Set the frontier of a sender; raise `ProtocolError` if it goes back."""
        if value < self.senders[worker]:
            raise ProtocolError(
                f"worker {worker} told frontier {value} after {self.senders[worker]}: it went back"
            )
        self.senders[worker] = value

    def begin(self, homes: Iterable[Worker]) -> None:
        """Expect records by way of these homes from now on."""
        self.relayed = dict.fromkeys(sorted(homes), MIN)

    def relay(self, home: Worker, value: int) -> None:
        """Take note that a home forwards no record below `value` any more."""
        if home in self.relayed:
            self.relayed[home] = max(value, self.relayed[home])

    def finish(self, home: Worker) -> None:
        """Take note that a home forwards no records at all any more."""
        self.relayed.pop(home, None)

    def lowest_sender(self, among: Iterable[Worker]) -> int:
        """Return the lowest frontier of these senders."""
        return min((self.senders[worker] for worker in among), default=MAX)

    def advance(self, held: int, may_end: bool) -> int | None:
        """Return the new frontier to announce, or None if it has not risen.

        `held` is the highest frontier that waiting records allow; without `may_end` the frontier stays below `MAX`.
        """
        value = min(
            held,
            min(self.senders.values(), default=MAX),
            min(self.relayed.values(), default=MAX),
            MAX if may_end else LAST,
        )
        if value <= self.announced:
            return None
        self.announced = value
        return value


class Emissions:
    """The times that the workers of a stage of readers may emit at, as they reported them."""

    __slots__ = ("announced", "early", "epoch", "values")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.values: dict[Worker, int] = {}
        self.early: dict[Worker, int] = {}  # of workers that completed a move before this one
        self.announced = MIN

    def of(self, worker: Worker) -> int:
        """Return what a worker has reported in this epoch, or `MIN`."""
        return self.values.get(worker, MIN)

    def changes(self, worker: Worker, value: int) -> bool:
        """Return whether `value` replaces a worker's report: a higher one does; after `LAST` (idle), any other does."""
        reported = self.of(worker)
        return value > reported or (reported == LAST and value < reported)

    def report(self, worker: Worker, epoch: int, value: int) -> None:
        """Take a worker's report that it emits nothing below `value`; reports of earlier epochs are dropped."""
        if epoch == self.epoch:
            self.values[worker] = value if self.changes(worker, value) else self.of(worker)
        elif epoch == self.epoch + 1:
            self.early[worker] = value

    def begin(self, epoch: int) -> None:
        """Begin an epoch: the keys have moved, and every worker reports again."""
        self.epoch = epoch
        self.values, self.early = self.early, {}

    def advance(self, members: Iterable[Worker]) -> int | None:
        """Return the stage's new frontier to announce, or None if it has not risen."""
        value = min((self.of(worker) for worker in members), default=MAX)
        if value <= self.announced or value == LAST:
            return None
        self.announced = value
        return value
