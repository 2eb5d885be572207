"""Bring records back into order where ways that parted inside a stage meet again.

Operators push whole batches: all records that go one way are processed, then all that go the other. Where the ways meet
again the records have to be put back into their order. Rules:

1. Where ways part that meet again (`Operator.parting`), each row of a batch gets its number and its way (`origin`).
2. Where they meet (`Meeting`), batches wait until all records have gone all their ways. Then their rows are sorted by
   numbers and ways, and go on together. Two rows are compared at the place where their ways parted: their numbers from
   earlier places are the same for both, so their columns stand for the same places.
3. A batch has one port. If records of several ports meet, and the port matters behind the meeting, they go on in parts:
   in a part all records of a key are of one port, so the order of each key's records is kept. They are numbered before.
4. A record made by a timer has no number and waits for nothing: no batch is under way then.
5. When `push` returns nothing waits here, so there is nothing to flush, to save or to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from railgun.engine.operators.operator import Operator, Setting
from railgun.transport.rows import RowBatch, joined


class Ways:
    """The places of one stage at which ways part and meet again."""

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []
        """Calls that empty the queues in front of meetings, before ways part."""
        self.release: list[Callable[[], object]] = []
        """Calls that release the waiting batches, those of earlier meetings first."""
        self.under_way = False

    @contextmanager
    def parting(self) -> Iterator[None]:
        """Let batches wait at the meetings until the outermost of these contexts ends."""
        if self.under_way:
            yield
            return
        for clear in self.before:
            clear()
        self.under_way = True
        try:
            yield
            for release in self.release:
                release()
        finally:
            self.under_way = False


class Meeting(Operator):
    """Brings the records of several ways back into their order, and hands them on."""

    def __init__(
        self,
        setting: Setting,
        ways: Ways,
        keeps_ports: bool = True,
        deliver: Callable[[RowBatch], None] | None = None,
    ) -> None:
        super().__init__(setting)
        self.ways = ways
        self.keeps_ports = keeps_ports
        self.deliver = deliver or self.emit
        self._waiting: list[RowBatch] = []

    def push(self, batch: RowBatch) -> None:
        """Let a batch wait if records are under way, or else hand it on."""
        if self.ways.under_way:
            self._waiting.append(batch)
        else:
            self.deliver(batch)

    def release(self) -> None:
        """Hand on the waiting records, in order."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) < 2:
            for batch in waiting:
                self.deliver(batch)
            return
        whole = joined(waiting)
        assert whole.origin is not None
        order = np.lexsort(whole.origin[::-1])
        whole = whole.take(order)
        sizes = [len(batch) for batch in waiting]
        ports = np.repeat(np.array([batch.port for batch in waiting]), sizes)[order]
        if not self.keeps_ports or whole.keys is None or bool((ports == ports[0]).all()):
            whole.port = int(ports[0])
            self.deliver(whole)
            return
        whole = whole.numbered()
        for rows in rows_by_round(round_of(whole, ports)):
            for port in np.unique(ports[rows]).tolist():
                part = whole.take(rows[ports[rows] == port])
                part.port = port
                self.deliver(part)


def rows_by_round(rounds: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return the rows of each part, as `round_of` numbers them, in order."""
    order = np.argsort(rounds, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(rounds[order])) + 1)


def round_of(batch: RowBatch, ports: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return, for each row of a keyed batch, the part in which it goes on, so that no key has two ports in one part.

    Keys with one hash count as one.
    """
    order = np.argsort(batch.hashes, kind="stable")
    hashes, sorted_ports = batch.hashes[order], ports[order]
    first = np.ones(len(order), dtype=bool)  # whether the row is the first of its key
    first[1:] = hashes[1:] != hashes[:-1]
    turns = ~first
    turns[1:] &= sorted_ports[1:] != sorted_ports[:-1]
    counted = np.cumsum(turns)
    starts = np.flatnonzero(first)
    since = np.repeat(counted[starts], np.diff(np.append(starts, len(order))))
    rounds = np.empty(len(order), dtype=np.intp)
    rounds[order] = counted - since
    return rounds


def mark_parting(operators: Iterable[Operator], ways: Ways) -> None:
    """Set `parting` on the operators whose ways part and meet again."""
    reach: dict[int, set[int]] = {}

    def reachable_from(operator: Operator) -> set[int]:
        reachable = reach.get(id(operator))
        if reachable is None:
            reachable = {id(operator)}.union(*map(reachable_from, operator.next_operators()))
            reach[id(operator)] = reachable
        return reachable

    for operator in operators:
        seen: set[int] = set()
        for next_operator in operator.next_operators():
            if not seen.isdisjoint(reachable_from(next_operator)):
                operator.parting = ways
            seen |= reachable_from(next_operator)
