"""Frontiers (watermarks): how far time has come at one worker of one stage.

A frontier `f` promises that no record with a time below `f` will be delivered any more. Its rules:

1. **Senders.** Every worker tells its own upstream's frontier to every worker of the stage, on the link its
   records travel, behind them. Without a migration a worker's frontier is the minimum over the senders.
2. **Homes.** During a migration a record can also come by way of its key's home. Every home *relays* the
   frontier of what it may still forward; the minimum is over senders and unfinished homes. A home relays the
   minimum over its own senders, never its own frontier, so there is no circle among homes.
3. **Held records.** A record that waits at its new owner keeps the frontier at what it was for that record's
   path when it came (`held`): a held or forwarded record is never overtaken.
4. **The end.** `MAX` says that nothing comes any more and ends an operator. A home that still has keys to
   give away stays just below it, and so do those it may give them to: a key ends once, at its last owner.
5. **Readers** emit on their own, at times of their own, and move from worker to worker. So the frontier of a
   stage of readers is one for all its workers: the minimum over what each of them may emit (`Emissions`). It
   stands still while the stage moves, which for a handful of readers is a moment, and goes on when all
   workers have told anew.
6. **Idle readers** hold nobody back. A worker that has nothing to say of time tells `LAST`: the minimum is over
   the others. That is no promise: when its readers have something again, what it tells then counts, though it
   is lower. If all tell `LAST` the frontier stands where it is; only `MAX`, of all, ends the stage.
7. A frontier never goes back.
8. **Late records.** Whether a record is late is settled when it is read, by the records before it in the same part of
   the source (`late_rows`), and travels with it. How quickly parts are read, by how many workers, and where keys
   are then changes nothing. A frontier is never ahead of the bound that a record was judged by, unless the part
   was idle: so a record that is not late finds open whatever its time belongs to.
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
    """Tell which records of a part are late, given their times in order.

    A record is late if it is older than the bound of its part: the latest time before it, less the `lateness` allowed,
    or what the part had `reached` before. Return the bound for each late record and `MIN` for the others (None: no
    record is late), and what the part has reached with these records.

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
    # No time is below MIN: what would be, stays there.
    np.maximum(np.maximum(latest[:-1], MIN + lateness) - lateness, reached, out=bounds[1:])
    return late_by(times, bounds), after


def late_by(times: NDArray[np.int64] | int, bounds: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the bound of each record that is older than its own, `MIN` for the others; None if none is older."""
    late = times < bounds
    return np.where(late, bounds, MIN) if late.any() else None


class Frontiers:
    """What one worker has been told of time, by sender and by home."""

    __slots__ = ("relayed", "senders", "told")

    def __init__(self, members: Iterable[Worker]) -> None:
        self.senders: dict[Worker, int] = dict.fromkeys(sorted(members), MIN)
        self.relayed: dict[Worker, int] = {}
        self.told = MIN

    def join(self, worker: Worker) -> None:
        """A worker begins to send; until it tells a frontier, ours stays where it is."""
        self.senders.setdefault(worker, MIN)

    def leave(self, worker: Worker) -> None:
        """A worker will never send again."""
        self.senders.pop(worker, None)

    def sender(self, worker: Worker, value: int) -> None:
        """A sender's frontier has come to `value`."""
        if value < self.senders[worker]:
            raise ProtocolError(
                f"worker {worker} told frontier {value} after {self.senders[worker]}: it went back"
            )
        self.senders[worker] = value

    def begin(self, homes: Iterable[Worker]) -> None:
        """From now on records can come by way of these homes."""
        self.relayed = dict.fromkeys(sorted(homes), MIN)

    def relay(self, home: Worker, value: int) -> None:
        """A home forwards nothing below `value` any more."""
        if home in self.relayed:
            self.relayed[home] = max(value, self.relayed[home])

    def finish(self, home: Worker) -> None:
        """A home forwards nothing at all any more."""
        self.relayed.pop(home, None)

    def lowest_sender(self, among: Iterable[Worker]) -> int:
        """The frontier of what these senders may still send."""
        return min((self.senders[worker] for worker in among), default=MAX)

    def advance(self, held: int, may_end: bool) -> int | None:
        """The new frontier, if there is one to tell; `held` is the lowest a waiting record allows."""
        value = min(
            held,
            min(self.senders.values(), default=MAX),
            min(self.relayed.values(), default=MAX),
            MAX if may_end else LAST,
        )
        if value <= self.told:
            return None
        self.told = value
        return value


class Emissions:
    """What the workers of a stage of readers have told of the times they may emit at."""

    __slots__ = ("early", "epoch", "told", "values")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.values: dict[Worker, int] = {}
        self.early: dict[Worker, int] = {}  # of workers that are through with a move before us
        self.told = MIN

    def of(self, worker: Worker) -> int:
        """What a worker has told in this epoch."""
        return self.values.get(worker, MIN)

    def changes(self, worker: Worker, value: int) -> bool:
        """Whether `value` says more than what a worker has told; anything does after `LAST`, which is idle."""
        said = self.of(worker)
        return value > said or (said == LAST and value < said)

    def tell(self, worker: Worker, epoch: int, value: int) -> None:
        """A worker emits nothing below `value` any more; what was told in an earlier epoch is void."""
        if epoch == self.epoch:
            self.values[worker] = value if self.changes(worker, value) else self.of(worker)
        elif epoch == self.epoch + 1:
            self.early[worker] = value

    def begin(self, epoch: int) -> None:
        """The keys have moved: everybody tells anew."""
        self.epoch = epoch
        self.values, self.early = self.early, {}

    def advance(self, members: Iterable[Worker]) -> int | None:
        """The stage's new frontier, if there is one to tell."""
        value = min((self.of(worker) for worker in members), default=MAX)
        if value <= self.told or value == LAST:
            return None
        self.told = value
        return value
